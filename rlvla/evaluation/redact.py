"""Removal of local paths and server addresses from published files."""

from __future__ import annotations

import re
import shlex
from pathlib import PurePosixPath
from typing import Any

# Two components at least, or one in a home folder, to exclude "and/or" and paths of URLs.
_ABSOLUTE = re.compile(r"(?<![\w/.~@+-])(?:~(?:[A-Za-z_][\w.-]*)?(?:/[\w.@+-]+)*|(?:/[\w.@+-]+)+)/([\w.@+-]*)")
_FILE_URL = re.compile(r"\bfile:/+", re.IGNORECASE)
_URL = re.compile(r"\b\w[\w+.-]{0,20}://[^\s'\"]+")
# Flags and JSON keys whose values locate a server or an interpreter, in any form.
_LOCATION_KEY = re.compile(r"_(url|address|python)$")
_SEPARATOR = re.compile(r"[=:,;]")


def redact_paths(text: str) -> str:
    """Replace absolute paths, which end at spaces, by their last component."""
    return _ABSOLUTE.sub(lambda match: match[1] or "...", _FILE_URL.sub("/", text))


def redact_command(command: str) -> str:
    """A shell-quoted command line without absolute paths and addresses; "" if its quotes are broken."""
    try:
        tokens = shlex.split(command)
    except ValueError:
        return ""
    kept, placeholder = [], None
    for token in tokens:
        if token.startswith("--"):
            flag, equals, value = token.partition("=")
            placeholder = _placeholder(flag)
            kept.append(f"{flag}={placeholder or _redact_token(value)}" if equals else flag)
        else:
            kept.append(placeholder or _redact_token(token))
    return shlex.join(kept)


def redact_json(content: Any) -> Any:
    """The content of a JSON file without absolute paths and addresses; objects keep all their entries."""
    if isinstance(content, dict):
        names = _unique_names({key: redact_paths(_URL.sub("URL", key)) for key in content})
        return {names[key]: _redact_entry(key, value) for key, value in content.items()}
    if isinstance(content, list):
        return [redact_json(value) for value in content]
    if not isinstance(content, str):
        return content
    if "\n" not in content and (whole := _redact_whole(content)) is not None:
        return whole
    return redact_paths(_URL.sub("URL", _FILE_URL.sub("/", content)))


def _placeholder(name: str) -> str | None:
    """Replacement for any value of a flag or JSON key; None if the name does not denote a location."""
    match = _LOCATION_KEY.search(name)
    return match[1].upper() if match else None


def _redact_token(text: str) -> str:
    """Redact a token of a command line, in which a path with spaces may follow a separator."""
    whole = _redact_whole(text)
    if whole is not None:
        return whole
    separator = _SEPARATOR.search(text)
    if separator is None or text[separator.start() :].startswith("://"):
        return redact_paths(_URL.sub("URL", text))
    head, rest = text[: separator.start()], text[separator.end() :]
    after = _placeholder(head) if separator[0] == "=" else None
    return f"{redact_paths(head)}{separator[0]}{after or _redact_token(rest)}"


def _redact_whole(text: str) -> str | None:
    """Replacement for a text that is one path (perhaps with spaces) or address; None for any other text."""
    path = _FILE_URL.sub("/", text) if _FILE_URL.match(text) else text
    if path is text and _URL.match(text):
        return "URL"
    if (path.startswith("/") and path.count("/") > 1) or re.match(r"~\w*/", path):
        return PurePosixPath(path).name.removeprefix("~") or "..."
    return None


def _unique_names(redacted: dict[str, str]) -> dict[str, str]:
    """Key -> unique name, from key -> redacted key: unchanged keys stay, duplicates are numbered."""
    taken = {key for key, name in redacted.items() if name == key}
    names = {}
    for key, name in redacted.items():
        unique, number = name, 2
        while name != key and unique in taken:
            unique, number = f"{name} ({number})", number + 1
        taken.add(unique)
        names[key] = unique
    return names


def _redact_entry(key: str, value: Any) -> Any:
    placeholder = _placeholder(key)
    if placeholder and isinstance(value, str):
        return placeholder
    if placeholder and isinstance(value, list):
        return [placeholder if isinstance(one, str) else redact_json(one) for one in value]
    return redact_json(value)
