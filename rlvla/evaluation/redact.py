"""Leaving out of what is published where things are: paths of this machine, and addresses of servers."""

from __future__ import annotations

import re
import shlex
from pathlib import PurePosixPath
from typing import Any

# Two components at least, or one in a home folder, so that "and/or" is none; neither is the path of a URL.
_ABSOLUTE = re.compile(r"(?<![\w/.~@+-])(?:~(?:[A-Za-z_][\w.-]*)?(?:/[\w.@+-]+)*|(?:/[\w.@+-]+)+)/([\w.@+-]*)")
_FILE_URL = re.compile(r"\bfile:/+", re.IGNORECASE)
_URL = re.compile(r"\b\w[\w+.-]{0,20}://[^\s'\"]+")
# Flags and entries whose values say where a server or an interpreter is, in whatever form.
_PLACE_BY_NAME = re.compile(r"_(url|address|python)$")
_SEPARATOR = re.compile(r"[=:,;]")


def without_places(text: str) -> str:
    """The text with the last component of absolute paths in their place; paths end at spaces."""
    return _ABSOLUTE.sub(lambda found: found[1] or "...", _FILE_URL.sub("/", text))


def command_without_places(command: str) -> str:
    """A command line, quoted for a shell, without absolute paths and addresses; "" if its quotes are broken."""
    try:
        words = shlex.split(command)
    except ValueError:
        return ""
    kept, stands_for = [], None
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            stands_for = _stands_for(flag)
            kept.append(f"{flag}={stands_for or _value(value)}" if equals else flag)
        else:
            kept.append(stands_for or _value(word))
    return shlex.join(kept)


def json_without_places(content: Any) -> Any:
    """The content of a JSON file without absolute paths and addresses; no entry of an object is lost."""
    if isinstance(content, dict):
        names = _names({key: without_places(_URL.sub("URL", key)) for key in content})
        return {names[key]: _entry(key, value) for key, value in content.items()}
    if isinstance(content, list):
        return [json_without_places(value) for value in content]
    if not isinstance(content, str):
        return content
    if "\n" not in content and (whole := _whole(content)) is not None:
        return whole
    return without_places(_URL.sub("URL", _FILE_URL.sub("/", content)))


def _stands_for(name: str) -> str | None:
    """The word that replaces any value of a flag or entry; None if its name does not say that it is a place."""
    found = _PLACE_BY_NAME.search(name)
    return found[1].upper() if found else None


def _value(text: str) -> str:
    """A word of a command line, of which everything after a separator may be a path with spaces."""
    whole = _whole(text)
    if whole is not None:
        return whole
    separator = _SEPARATOR.search(text)
    if separator is None or text[separator.start() :].startswith("://"):
        return without_places(_URL.sub("URL", text))
    head, rest = text[: separator.start()], text[separator.end() :]
    after = _stands_for(head) if separator[0] == "=" else None
    return f"{without_places(head)}{separator[0]}{after or _value(rest)}"


def _whole(text: str) -> str | None:
    """What replaces a text that is a path or address from its beginning to its end, spaces and all; None if none."""
    path = _FILE_URL.sub("/", text) if _FILE_URL.match(text) else text
    if path is text and _URL.match(text):
        return "URL"
    if (path.startswith("/") and path.count("/") > 1) or re.match(r"~\w*/", path):
        return PurePosixPath(path).name.removeprefix("~") or "..."
    return None


def _names(shortened: dict[str, str]) -> dict[str, str]:
    """Key -> its name, for shortened keys: unchanged ones stay, equal ones are numbered."""
    taken = {key for key, name in shortened.items() if name == key}
    names = {}
    for key, name in shortened.items():
        unique, number = name, 2
        while name != key and unique in taken:
            unique, number = f"{name} ({number})", number + 1
        taken.add(unique)
        names[key] = unique
    return names


def _entry(key: str, value: Any) -> Any:
    stands_for = _stands_for(key)
    if stands_for and isinstance(value, str):
        return stands_for
    if stands_for and isinstance(value, list):
        return [stands_for if isinstance(one, str) else json_without_places(one) for one in value]
    return json_without_places(value)
