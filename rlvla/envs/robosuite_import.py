"""Importing robosuite: quietly, and with errors a user can act on. Needs neither robosuite nor MuJoCo itself."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from typing import Any

from rlvla.envs.gl import gl_backend, make_gl_context
from rlvla.utils.errors import ConfigError, require


def import_robosuite() -> Any:
    """robosuite, imported without its advice about macro files, for rendering without a screen.

    Raises:
        MissingExtraError: it is not installed.
        ConfigError: GL, which it loads on import, does not work here; or the version is not supported.
    """
    gl_backend()
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
    installed = importlib.util.find_spec("robosuite") is not None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about its own logging calls
            robosuite = require("robosuite", extra="robosuite")
    except Exception:
        if installed and importlib.util.find_spec("mujoco") is not None:
            make_gl_context(1, 1).free()  # raises, saying what is missing, if GL is the cause
        raise
    if not robosuite.__version__.startswith("1.4."):
        raise ConfigError(f"robosuite {robosuite.__version__} is installed; this adapter needs robosuite 1.4.x")
    return robosuite
