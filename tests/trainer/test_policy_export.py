"""What a policy folder says of the observations its policy was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlvla.envs.config import EnvConfig
from rlvla.trainer.policy_export import ENVIRONMENT_FILE, PolicyRecord, recorded_environment
from rlvla.utils.errors import ConfigError


def test_what_is_recorded_is_read_back(tmp_path: Path) -> None:
    env = EnvConfig(task_suite_name="toy_reach", image_size=32, use_proprio=True, max_steps=9)
    PolicyRecord(env, ((0, 5), (7, 9), (0, 5))).write(tmp_path)
    recorded = recorded_environment(tmp_path)
    assert recorded["learned_from"] == [[0, 5], [7, 9]]
    assert EnvConfig().completed(recorded) == EnvConfig(**{**env.as_dict(), "cameras": ("top",)})


def test_nothing_recorded_is_nothing_known(tmp_path: Path) -> None:
    assert recorded_environment(tmp_path) == {}


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    (tmp_path / ENVIRONMENT_FILE).write_text("{")
    with pytest.raises(ConfigError, match=f"{ENVIRONMENT_FILE} is not valid JSON"):
        recorded_environment(tmp_path)
