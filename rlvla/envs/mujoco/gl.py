"""Off-screen GL contexts for MuJoCo, with actionable errors. Importing this module needs neither GL nor MuJoCo."""

from __future__ import annotations

import importlib
import os
import weakref
from typing import Any

from rlvla.utils.errors import ConfigError

# The current context (only one thread renders); avoids redundant switches.
_current: weakref.ref[Any] | None = None


def gl_backend() -> str:
    """The value of MUJOCO_GL, `egl` (the default) or `osmesa`.

    With several GPUs, MUJOCO_EGL_DEVICE_ID selects the one to render on.

    Raises:
        ConfigError: MUJOCO_GL is a backend that needs a screen.
    """
    backend = os.environ.setdefault("MUJOCO_GL", "egl").strip().lower()
    if backend not in ("egl", "osmesa"):
        raise ConfigError(f"MUJOCO_GL={backend!r} cannot render without a screen; set MUJOCO_GL to egl or osmesa")
    return backend


def make_gl_context(width: int, height: int) -> Any:
    """Create an off-screen context (`mujoco.egl.GLContext` or `mujoco.osmesa.GLContext`) and make it current.

    Raises:
        ConfigError: GL does not work; the message names the packages to install.
    """
    backend = gl_backend()
    try:
        context_class = importlib.import_module(f"mujoco.{backend}").GLContext
        context_class._context = None  # its destructor reads this even if the constructor failed
        context = context_class(width, height)
        make_current(context)
    except Exception as error:  # PyOpenGL raises ImportError, AttributeError, GLError, ... for a missing driver
        remedy = (
            "install the Debian packages libegl1 libegl-mesa0 libgl1-mesa-dri libopengl0, "
            "or install libosmesa6 and set MUJOCO_GL=osmesa"
            if backend == "egl"
            else "install the Debian package libosmesa6, or set MUJOCO_GL=egl"
        )
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"no working GL for rendering (MUJOCO_GL={backend}: {reason}); {remedy}") from error
    return context


def make_current(context: Any) -> None:
    """Make a context from `make_gl_context` current if it is not."""
    global _current
    if _current is None or _current() is not context:
        context.make_current()
        _current = weakref.ref(context)


def forget_current() -> None:
    """Invalidate the cached current context, after another library may have changed it."""
    global _current
    _current = None
