"""What tests of LIBERO need, and the reason for skipping them where it is absent."""

from __future__ import annotations

import pytest

from rlvla.envs.libero.install import find_assets, package_folder
from rlvla.envs.mujoco.gl import make_gl_context
from rlvla.envs.robosuite.importing import import_robosuite
from rlvla.utils.errors import ConfigError, MissingExtraError


def require_package() -> None:
    """Skip where hf-libero is not installed."""
    try:
        package_folder()
    except MissingExtraError as error:
        pytest.skip(str(error))


def require_libero() -> None:
    """Skip where hf-libero, its assets, robosuite or GL are missing."""
    require_package()
    try:
        find_assets(None)
        import_robosuite()
        make_gl_context(1, 1).free()
    except (MissingExtraError, ConfigError) as error:
        pytest.skip(str(error))
