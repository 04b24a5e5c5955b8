"""Off-screen GL contexts for MuJoCo, and errors that say what is missing. Importing this needs neither."""

from __future__ import annotations

import importlib
import os
import weakref
from typing import Any

from rlvla.utils.errors import ConfigError

# The context made current last (one thread renders), so that a single renderer never switches.
_current: weakref.ref[Any] | None = None


def gl_backend() -> str:
    """`egl` or `osmesa`: what MUJOCO_GL asks for, `egl` where it is unset.

    On a machine with several GPUs, MUJOCO_EGL_DEVICE_ID says which one a process renders on.

    Raises:
        ConfigError: MUJOCO_GL names something that needs a screen.
    """
    backend = os.environ.setdefault("MUJOCO_GL", "egl").strip().lower()
    if backend not in ("egl", "osmesa"):
        raise ConfigError(f"MUJOCO_GL={backend!r} cannot render without a screen; set MUJOCO_GL to egl or osmesa")
    return backend


def make_gl_context(width: int, height: int) -> Any:
    """An off-screen GL context (`mujoco.egl.GLContext` or `mujoco.osmesa.GLContext`), made current.

    Raises:
        ConfigError: GL does not work here; the message names the packages to install.
    """
    backend = gl_backend()
    try:
        context_class = importlib.import_module(f"mujoco.{backend}").GLContext
        context_class._context = None  # its destructor reads this even when its constructor has failed
        context = context_class(width, height)
        make_current(context)
    except Exception as error:  # PyOpenGL reports a missing driver as ImportError, AttributeError, GLError, ...
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
    """Make a context from `make_gl_context` the current one, if it is not."""
    global _current
    if _current is None or _current() is not context:
        context.make_current()
        _current = weakref.ref(context)
