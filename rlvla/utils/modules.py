"""Loading a user's Python module, function or class from its file."""

from __future__ import annotations

import importlib.util
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlvla.utils.errors import ConfigError


def load_file(path: Path) -> ModuleType:
    """Import a Python file as a module; later calls with the same file return the same module.

    As with `import`, the module is in `sys.modules` while it is executed: dataclasses resolve their annotations there,
    and pickle looks classes up there.

    Args:
        path: an existing `.py` file.

    Raises:
        ValueError: its name does not end in .py.
        Exception: any exception of the file; a later call executes it again.
    """
    path = path.resolve()
    # Named after the full path, so that two files of the same name can both be loaded.
    name = f"rlvla_custom_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if path.suffix != ".py":
        raise ValueError(f"{path} is not a Python file")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_from_file(spec: str, flag: str, kind: str = "function") -> Callable[..., Any]:
    """The function or class of `file.py:name`.

    Args:
        spec: file and name.
        flag: the flag that gave it, for messages.
        kind: "function" or "class", for messages.

    Raises:
        ConfigError: malformed spec, missing file or name, or an error while executing the file.
    """
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not file or not name.isidentifier():
        raise ConfigError.of(flag, "malformed", f"--{flag} {spec}: write FILE.py:{kind.upper()}")
    if not path.is_file():
        raise ConfigError.of(flag, "missing_file", f"--{flag} {spec}: {path} does not exist")
    if path.suffix != ".py":
        raise ConfigError.of(flag, "invalid_file", f"--{flag} {spec}: {path} is not a Python file")
    try:
        module = load_file(path)
    except Exception as error:
        text = f"--{flag} {spec}: the file cannot be executed:\n{user_traceback(error, path)}"
        raise ConfigError.of(flag, "invalid_file", text) from error
    loaded = getattr(module, name, None)
    if not callable(loaded) or (kind == "class" and not isinstance(loaded, type)):
        public = {n: v for n, v in vars(module).items() if callable(v) and not n.startswith("_")}
        names = ", ".join(n for n, v in public.items() if kind != "class" or isinstance(v, type)) or "none"
        raise ConfigError.of(flag, "unknown_name", f"--{flag} {spec}: {path} has no {kind} {name}; it has: {names}")
    return loaded


def user_traceback(error: BaseException, path: Path) -> str:
    """The indented traceback, starting at the first frame in the user's file."""
    frames = traceback.extract_tb(error.__traceback__)
    file = path.resolve()
    first = next((i for i, frame in enumerate(frames) if Path(frame.filename).resolve() == file), 0)
    lines = traceback.format_list(frames[first:]) + traceback.format_exception_only(error)
    return "".join(f"      {line}\n" for line in "".join(lines).splitlines()).rstrip("\n")
