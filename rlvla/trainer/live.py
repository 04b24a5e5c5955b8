"""A page that follows a run while it goes on: metrics, newest videos, log.

It is served on this machine only (127.0.0.1), below a path that nobody can guess, for reading only, and ends with the
run. What is served is the page itself, `metrics.jsonl`, the last lines of the log since the start, and the files that
are in `videos/` at that moment, by their names in it: a path is compared with names, and never opened.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import re
import secrets
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from rlvla.evaluation.pages import render, run_name
from rlvla.utils.cli.programs import as_installed
from rlvla.utils.files import METRICS_FILE
from rlvla.utils.terminal import log, without_codes

HOST = "127.0.0.1"
VIDEOS = "videos"
_LINES = 1000  # of the log
_MOST_BYTES = 2_000_000  # of metrics in one answer
_NEWEST = 6  # videos
_CLIENT_SECONDS = 20.0
_SECONDS = 5  # between two looks of the page
_PIECE = 1 << 18  # bytes of a video that are held at a time
_RANGE = re.compile(r"bytes=(\d{0,15})-(\d{0,15})")
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; media-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class _LogLines(logging.Handler):
    """Keeps the last lines of the log; they are counted from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._lines: deque[str] = deque(maxlen=_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        self._lines.append(level + without_codes(as_installed(record.getMessage())))
        self.count += 1

    def since(self, number: int) -> tuple[list[str], int]:
        """The lines from this number on, as far as they are kept, and the number of all."""
        self.acquire()
        try:
            kept = list(self._lines)
            return kept[max(0, number - self.count + len(kept)) :] if number < self.count else [], self.count
        finally:
            self.release()


class LiveRun:
    """What the page shows of a run.

    Args:
        folder: the run folder.
        title: heading of the page.
    """

    def __init__(self, folder: Path, title: str):
        self._folder = folder
        self.log = _LogLines()
        self.page = render("live.html.jinja", title=title, folder=str(folder), seconds=_SECONDS).encode(
            errors="replace"
        )

    def status(self, metrics: int, lines: int) -> dict[str, Any]:
        """What is new.

        Args:
            metrics: bytes of `metrics.jsonl` that the page has.
            lines: lines of the log that it has.

        Returns:
            `metrics`: new lines; `from`: where they begin, 0 if all are sent anew; `to`: where they end; `log` and
            `log_to`; `videos`: names of the newest, the latest first.
        """
        begin, text = self._metrics_from(metrics)
        said, count = self.log.since(lines)
        return {
            "from": begin,
            "metrics": text.decode("utf-8", errors="replace"),
            "to": begin + len(text),
            "log": said,
            "log_to": count,
            "videos": list(self.videos())[:_NEWEST],
        }

    def _metrics_from(self, begin: int) -> tuple[int, bytes]:
        """Whole lines of `metrics.jsonl` from a byte on; all of them if no line begins there, as in a new file."""
        path = self._folder / METRICS_FILE
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                begin = begin if 0 <= begin <= size else 0
                file.seek(max(0, begin - 1))
                if begin and file.read(1) != b"\n":
                    begin = file.seek(0)
                text = file.read(_MOST_BYTES)
        except OSError:
            return 0, b""
        return begin, text[: text.rfind(b"\n") + 1]

    def videos(self) -> dict[str, Path]:
        """Name below `videos/` -> file, the latest first; links are left out."""
        found = []
        for folder in (self._folder / VIDEOS).glob("iteration_*"):
            if folder.is_symlink() or not folder.is_dir():
                continue
            found += [path for path in folder.glob("*.mp4") if path.is_file() and not path.is_symlink()]
        found.sort(key=lambda path: (path.parent.name, path.name), reverse=True)
        return {f"{path.parent.name}/{path.name}": path for path in found}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    run: LiveRun
    token: str

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away, or a file that could not be read, does not concern the run."""


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD; everything else is refused."""

    server: _Server
    protocol_version = "HTTP/1.1"  # parts of files are known since then; still an answer per connection
    server_version, sys_version = "rlvla", ""
    timeout = _CLIENT_SECONDS

    def do_GET(self) -> None:
        """Answer one of the three addresses."""
        # Another name that leads here would be a foreign page that has pointed its own at this machine.
        if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
            return self.send_error(HTTPStatus.FORBIDDEN)
        address = urlsplit(self.path)
        token, _, rest = address.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(errors="replace"), self.server.token.encode()):
            return self.send_error(HTTPStatus.NOT_FOUND)
        if not rest:
            return self._answer("text/html; charset=utf-8", self.server.run.page)
        if rest == "status.json":
            asked = parse_qs(address.query)
            numbers = [_number(asked.get(name, ["0"])[0]) for name in ("metrics", "log")]
            return self._answer("application/json", json.dumps(self.server.run.status(*numbers)).encode())
        video = self.server.run.videos().get(unquote(rest).removeprefix(f"{VIDEOS}/"))
        if video is None:
            return self.send_error(HTTPStatus.NOT_FOUND)
        return self._send_file("video/mp4", video)

    do_HEAD = do_GET

    def _answer(self, kind: str, content: bytes) -> None:
        self._begin(HTTPStatus.OK, kind, len(content))
        if self.command != "HEAD":
            self.wfile.write(content)

    def _send_file(self, kind: str, path: Path) -> None:
        """Send a file, or the part of it that is asked for (`Range`), a piece at a time."""
        try:
            file = path.open("rb")
        except OSError:
            return self.send_error(HTTPStatus.NOT_FOUND)
        with file:
            size = os.fstat(file.fileno()).st_size
            asked = _part(self.headers.get("Range", ""), size) if self.command == "GET" else None
            part, more = range(size) if asked is None else asked, {"Accept-Ranges": "bytes"}
            status = HTTPStatus.OK
            if asked is not None:
                status = HTTPStatus.PARTIAL_CONTENT if part else HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
                more["Content-Range"] = f"bytes {f'{part.start}-{part.stop - 1}' if part else '*'}/{size}"
            self._begin(status, kind, len(part), more)
            file.seek(part.start)
            left = 0 if self.command == "HEAD" else len(part)
            while left and (piece := file.read(min(left, _PIECE))):
                self.wfile.write(piece)
                left -= len(piece)

    def _begin(self, status: HTTPStatus, kind: str, length: int, more: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(length), "Connection": "close", **(more or {})}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def end_headers(self) -> None:
        """Add what keeps other pages out."""
        for name, value in (
            ("Content-Security-Policy", _POLICY),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *args: object) -> None:
        """Say nothing in the log of the run."""


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def _part(asked: str, size: int) -> range | None:
    """The bytes that a `Range` header asks for, none if the file ends before; None if it asks for no one part.

    Args:
        asked: `bytes=FIRST-LAST`, `bytes=FIRST-` or `bytes=-NUMBER`, which are the last ones.
        size: of the file in bytes.
    """
    match = _RANGE.fullmatch(asked)
    if match is None or not any(match.groups()):
        return None
    first, last = match.groups()
    if not first:
        return range(max(0, size - int(last)), size)
    if last and int(last) < int(first):
        return None
    return range(min(int(first), size), min(int(last) + 1, size) if last else size)


def _started(folder: Path, port: int) -> tuple[_Server, threading.Thread]:
    """The server, in its thread."""
    run = LiveRun(folder, run_name(str(folder)))
    try:
        server = _Server((HOST, port), _Handler)
    except OSError:
        server = _Server((HOST, 0), _Handler)
    server.run, server.token = run, secrets.token_urlsafe(12)
    thread = threading.Thread(target=server.serve_forever, name="live page", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        server.server_close()
        raise
    return server, thread


@contextmanager
def live_page(folder: Path, port: int) -> Iterator[str | None]:
    """Serve the page of a run during the block, in a thread; yields its address.

    A page that cannot be served is a warning and yields None: it is no reason for a run to end.

    Args:
        folder: the run folder.
        port: the port; 0, or one that is taken, means any free one.
    """
    try:
        server, thread = _started(folder, port)
    except (OSError, RuntimeError, ImportError) as error:
        log.warning(f"--live: the page cannot be served ({error}); the run goes on without it")
        yield None
        return
    log.addHandler(server.run.log)
    number = server.server_address[1]
    address = f"http://{HOST}:{number}/{server.token}/"
    log.info(f"live: {address} (on this machine; from another one first: ssh -L {number}:{HOST}:{number} USER@THIS)")
    try:
        yield address
    finally:
        log.removeHandler(server.run.log)
        server.shutdown()
        server.server_close()
        thread.join()
