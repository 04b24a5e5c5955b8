"""Live page of a run (`--live`): metrics, newest videos, log.

The page is read-only, served on 127.0.0.1 below a secret path, and ends with the run. It serves the page itself,
`metrics.jsonl`, the last lines of the log, and the files in `videos/`. A requested path is compared with their names
and never opened.
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

from rlvla.evaluation.learning_charts import SMALLEST_SPAN
from rlvla.evaluation.pages import render, run_name
from rlvla.utils.cli.programs import as_installed
from rlvla.utils.files import METRICS_FILE
from rlvla.utils.terminal import log, without_codes

HOST = "127.0.0.1"
VIDEOS = "videos"
_LINES = 1000  # of the log
_MAX_BYTES = 2_000_000  # of metrics in one answer
_NEWEST = 6  # videos
_CLIENT_SECONDS = 20.0
_SECONDS = 5  # polling interval of the page
_CHUNK = 1 << 18  # bytes of a video in memory at a time
_RANGE = re.compile(r"bytes=(\d{0,15})-(\d{0,15})")
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; media-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class _LogLines(logging.Handler):
    """Buffer of the last lines of the log, counted from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._lines: deque[str] = deque(maxlen=_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        self._lines.append(level + without_codes(as_installed(record.getMessage())))
        self.count += 1

    def since(self, number: int) -> tuple[list[str], int]:
        """The buffered lines from this number on, and the total number."""
        self.acquire()
        try:
            kept = list(self._lines)
            return kept[max(0, number - self.count + len(kept)) :] if number < self.count else [], self.count
        finally:
            self.release()


class LiveRun:
    """Content of the page.

    Args:
        folder: the run folder.
        title: heading of the page.
    """

    def __init__(self, folder: Path, title: str):
        self._folder = folder
        self.log = _LogLines()
        page = render(
            "live.html.jinja",
            title=title,
            folder=str(folder),
            seconds=_SECONDS,
            entropy_span=SMALLEST_SPAN["actor/entropy"],
        )
        self.page = page.encode(errors="replace")

    def status(self, metrics: int, lines: int) -> dict[str, Any]:
        """Updates since the last request of the page.

        Args:
            metrics: bytes of `metrics.jsonl` received so far.
            lines: lines of the log received so far.

        Returns:
            `metrics`: new lines; `from`: their first byte, 0 if all are sent again; `to`: their end; `log` and
            `log_to`; `videos`: names of the newest, latest first.
        """
        begin, text = self._metrics_from(metrics)
        log_lines, count = self.log.since(lines)
        return {
            "from": begin,
            "metrics": text.decode("utf-8", errors="replace"),
            "to": begin + len(text),
            "log": log_lines,
            "log_to": count,
            "videos": list(self.videos())[:_NEWEST],
        }

    def _metrics_from(self, begin: int) -> tuple[int, bytes]:
        """Complete lines of `metrics.jsonl` from a byte on, or from 0 if no line begins there (a rewritten file)."""
        path = self._folder / METRICS_FILE
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                begin = begin if 0 <= begin <= size else 0
                file.seek(max(0, begin - 1))
                if begin and file.read(1) != b"\n":
                    begin = file.seek(0)
                text = file.read(_MAX_BYTES)
        except OSError:
            return 0, b""
        return begin, text[: text.rfind(b"\n") + 1]

    def videos(self) -> dict[str, Path]:
        """Name below `videos/` -> file, latest first; links are left out."""
        files: list[Path] = []
        for folder in (self._folder / VIDEOS).glob("iteration_*"):
            if folder.is_symlink() or not folder.is_dir():
                continue
            files += [path for path in folder.glob("*.mp4") if path.is_file() and not path.is_symlink()]
        files.sort(key=lambda path: (path.parent.name, path.name), reverse=True)
        return {f"{path.parent.name}/{path.name}": path for path in files}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    run: LiveRun
    token: str

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore disconnected clients and unreadable files."""


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD requests only."""

    server: _Server
    protocol_version = "HTTP/1.1"  # for range requests; each connection still has one request
    server_version, sys_version = "rlvla", ""
    timeout = _CLIENT_SECONDS

    def do_GET(self) -> None:
        """Serve the page, `status.json`, or a video."""
        # Refuse other host names: DNS rebinding by a foreign page.
        if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
            return self.send_error(HTTPStatus.FORBIDDEN)
        address = urlsplit(self.path)
        token, _, rest = address.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(errors="replace"), self.server.token.encode()):
            return self.send_error(HTTPStatus.NOT_FOUND)
        if not rest:
            return self._answer("text/html; charset=utf-8", self.server.run.page)
        if rest == "status.json":
            query = parse_qs(address.query)
            numbers = [_number(query.get(name, ["0"])[0]) for name in ("metrics", "log")]
            return self._answer("application/json", json.dumps(self.server.run.status(*numbers)).encode())
        video = self.server.run.videos().get(unquote(rest).removeprefix(f"{VIDEOS}/"))
        if video is None:
            return self.send_error(HTTPStatus.NOT_FOUND)
        return self._send_video(video)

    do_HEAD = do_GET

    def _answer(self, content_type: str, content: bytes) -> None:
        self._begin(HTTPStatus.OK, content_type, len(content))
        if self.command != "HEAD":
            self.wfile.write(content)

    def _send_video(self, path: Path) -> None:
        """Send a file, or the requested `Range` of it, in chunks."""
        try:
            file = path.open("rb")
        except OSError:
            return self.send_error(HTTPStatus.NOT_FOUND)
        with file:
            size = os.fstat(file.fileno()).st_size
            requested = _byte_range(self.headers.get("Range", ""), size) if self.command == "GET" else None
            span, status, headers = range(size), HTTPStatus.OK, {"Accept-Ranges": "bytes"}
            if requested is not None:
                span = requested
                status = HTTPStatus.PARTIAL_CONTENT if span else HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
                headers["Content-Range"] = f"bytes {f'{span.start}-{span.stop - 1}' if span else '*'}/{size}"
            self._begin(status, "video/mp4", len(span), headers)
            file.seek(span.start)
            left = 0 if self.command == "HEAD" else len(span)
            while left and (chunk := file.read(min(left, _CHUNK))):
                self.wfile.write(chunk)
                left -= len(chunk)

    def _begin(self, status: HTTPStatus, kind: str, length: int, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        common = {"Content-Type": kind, "Content-Length": str(length), "Connection": "close"}
        for name, value in {**common, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def end_headers(self) -> None:
        """Add security headers."""
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
        """Do not log requests."""


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def _byte_range(header: str, size: int) -> range | None:
    """The bytes of a `Range` header, empty beyond the end of the file; None if it is not a single valid range.

    Args:
        header: `bytes=FIRST-LAST`, `bytes=FIRST-` or `bytes=-NUMBER` (the last ones).
        size: size of the file in bytes.
    """
    match = _RANGE.fullmatch(header)
    if match is None or not any(match.groups()):
        return None
    first, last = match.groups()
    if not first:
        return range(max(0, size - int(last)), size)
    if last and int(last) < int(first):
        return None
    return range(min(int(first), size), min(int(last) + 1, size) if last else size)


def _start(folder: Path, port: int) -> tuple[_Server, threading.Thread]:
    """Start the server in a thread."""
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
    """Serve the page of a run in a thread within the block; yields its address.

    If the page cannot be served, a warning is logged and None is yielded; the run continues.

    Args:
        folder: the run folder.
        port: the port; 0 or a taken one means any free port.
    """
    try:
        server, thread = _start(folder, port)
    except (OSError, RuntimeError, ImportError) as error:
        log.warning(f"--live: the page cannot be served ({error}); the run continues without it")
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
