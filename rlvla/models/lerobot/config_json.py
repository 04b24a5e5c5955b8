"""Typed settings out of the config.json of a LeRobot policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

from rlvla.utils.data_files import fits


def read_settings(cls: type, raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values that a file gives for the fields of a dataclass, and which of them have another type, in words.

    Args:
        cls: a dataclass; its fields `features` and `raw` are left out.
        raw: content of the file; lists become tuples.
    """
    given: dict[str, Any] = {}
    texts = []
    for name, hint in get_type_hints(cls).items():
        if name in ("features", "raw") or name not in raw:
            continue
        if fits(raw[name], hint):
            given[name] = tuple(raw[name]) if isinstance(raw[name], list) else raw[name]
        else:
            wanted = getattr(hint, "__name__", str(hint))
            texts.append(f"{name} is {str(raw[name])[:40]!r}, not {wanted}")
    return given, texts
