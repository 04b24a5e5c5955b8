"""Loading a user's Python module from its file."""

from __future__ import annotations

import importlib.util
import sys
import zlib
from pathlib import Path
from types import ModuleType


def load_file(path: Path) -> ModuleType:
    """Import a Python file as a module; later calls with the same file return the same module.

    As with `import`, the module is in `sys.modules` while it is executed: dataclasses resolve their annotations there,
    and pickle looks classes up there.

    Args:
        path: an existing `.py` file.

    Raises:
        ValueError: its name does not end in .py.
        Exception: whatever the file raises; a later call executes it again.
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
