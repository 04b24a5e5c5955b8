"""Quiet import of robosuite with actionable errors. This module imports neither robosuite nor MuJoCo."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Sequence
from typing import Any

from rlvla.envs.mujoco.gl import gl_backend, make_gl_context
from rlvla.utils.errors import ConfigError, require

SUPPORTED = ("1.4", "1.5")


def _errors_only(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def import_robosuite(supported: Sequence[str] = SUPPORTED) -> Any:
    """Import robosuite for off-screen rendering, without its warnings about macro files.

    Args:
        supported: accepted versions (major.minor).

    Raises:
        MissingExtraError: it is not installed.
        ConfigError: GL, which robosuite loads on import, does not work, or the version is not supported.
    """
    gl_backend()
    # A filter, because 1.5 sets the level of its logger during import.
    logging.getLogger("robosuite_logs").addFilter(_errors_only)
    installed = importlib.util.find_spec("robosuite") is not None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from robosuite's logging calls
            robosuite = require("robosuite", extra="robosuite")
    except Exception:
        if installed and importlib.util.find_spec("mujoco") is not None:
            make_gl_context(1, 1).free()  # raises an actionable error if GL is the cause
        raise
    if ".".join(robosuite.__version__.split(".")[:2]) not in supported:
        versions = " or ".join(f"{version}.x" for version in supported)
        raise ConfigError(f"robosuite {robosuite.__version__} is installed; this suite needs robosuite {versions}")
    return robosuite
