"""A headless Chromium, driven through the Chrome DevTools protocol."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_SECONDS = 60.0  # of a loaded machine
_FLAGS = "--headless --no-sandbox --disable-gpu --remote-debugging-port=0 --no-first-run --disable-dev-shm-usage"


class Page:
    """A tab of the browser."""

    def __init__(self, connection: ClientConnection):
        self._connection, self._number = connection, 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        self._connection.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while (answer := json.loads(self._connection.recv(timeout=_SECONDS))).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def evaluate(self, expression: str) -> Any:
        """Value of an expression of JavaScript in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return result["result"].get("value")

    def text(self, element: str) -> str:
        """Text of the element with this id."""
        return self.evaluate(f"document.getElementById({element!r})?.textContent")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression of JavaScript is true."""
        end = time.monotonic() + _SECONDS
        while not self.evaluate(expression):
            assert time.monotonic() < end, (expression, self.evaluate("document.body.innerText"))
            time.sleep(0.02)

    def key(self, kind: str, name: str) -> None:
        """Press (`down`) or let go of (`up`) a key."""
        code = f"Key{name.upper()}" if name.isalpha() and len(name) == 1 else name
        text = {"text": name} if len(name) == 1 and kind == "down" else {}
        self.call("Input.dispatchKeyEvent", type=f"key{kind.title()}", key=name, code=code, **text)

    def tap(self, name: str) -> None:
        """Press a key and let go of it."""
        self.key("down", name)
        self.key("up", name)


@contextmanager
def open_page(profile: Path, address: str, size: str = "1100,700") -> Iterator[Page]:
    """Open an address in a new browser whose profile is in this folder."""
    assert BROWSER is not None
    argv = [BROWSER, *_FLAGS.split(), f"--user-data-dir={profile}", f"--window-size={size}", "about:blank"]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            while "DevTools listening on " not in (line := process.stderr.readline()):
                assert line, "the browser did not start"
            browser = line.rpartition(" ")[2].strip()
            with connect(browser, proxy=None, max_size=None) as connection:
                target = Page(connection).call("Target.createTarget", url=address)["targetId"]
                page = browser.rpartition("/devtools/")[0] + f"/devtools/page/{target}"
                with connect(page, proxy=None, max_size=None) as tab:
                    yield Page(tab)
        finally:
            process.terminate()
            process.stderr.read()
