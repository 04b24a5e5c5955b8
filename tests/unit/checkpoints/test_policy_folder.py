"""Environment records of policy folders."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from rlvla.checkpoints.policy_folder import (
    ENVIRONMENT_FILE,
    PolicyRecord,
    learned_states,
    recorded_environment,
    write_policy,
)
from rlvla.commands.run_policies import policy_record
from rlvla.envs import list_tasks
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.splits import LearnedStates
from rlvla.utils.errors import ConfigError


def seen(start: int, stop: int) -> LearnedStates:
    return LearnedStates("toy_reach", 0, start, stop)


def test_records_are_read_back(tmp_path: Path) -> None:
    env = EnvConfig(task_suite_name="toy_reach", image_size=32, use_proprio=True, max_steps=9)
    PolicyRecord(env, (seen(0, 5), seen(7, 9), LearnedStates("lift", None, 1, 2), seen(0, 5))).write(tmp_path)
    recorded = recorded_environment(tmp_path)
    assert learned_states(recorded) == [LearnedStates("lift", None, 1, 2), seen(0, 5), seen(7, 9)]
    assert EnvConfig().completed(recorded) == replace(env, cameras=("top",))


def test_nothing_recorded_is_nothing_known(tmp_path: Path) -> None:
    assert recorded_environment(tmp_path) == {} and learned_states({}) is None


def test_records_of_before_name_states_of_any_task_of_their_suite() -> None:
    recorded = {"task_suite_name": "toy_reach", "learned_from": [[9000, 9100]]}
    (states,) = learned_states(recorded) or []
    (task,) = list_tasks("toy_reach")
    assert states.states == range(9000, 9100)
    assert states.of(task) and states.of(replace(task, task_id=7)) and not states.of(replace(task, suite="robosuite"))


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    (tmp_path / ENVIRONMENT_FILE).write_text("{")
    with pytest.raises(ConfigError, match=f"{ENVIRONMENT_FILE} is not valid JSON"):
        recorded_environment(tmp_path)


def test_training_notes_the_states_of_its_start_its_tasks_and_its_demonstrations(tmp_path: Path) -> None:
    (task,) = list_tasks("toy_reach")
    env, mixed_in = EnvConfig(task_suite_name="toy_reach"), LearnedStates("kitchen", 3, 5, 6)
    PolicyRecord(env, (seen(100, 120),)).write(tmp_path)
    setting = SimpleNamespace(tasks=[task], env=env, state_input=None)
    record = policy_record(tmp_path, SplitConfig(), setting, SimpleNamespace(states_learned_from=[mixed_in]))
    assert record.learned_from == (seen(100, 120), seen(0, 8000), mixed_in)
    assert policy_record(tmp_path, SplitConfig(), setting, None).learned_from == (seen(100, 120), seen(0, 8000))
    assert policy_record(None, SplitConfig(), setting, None).learned_from == (seen(0, 8000),), "it starts from nothing"


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), True),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES)), False),
        (RuntimeError("a tensor shares memory with another"), False),
    ],
)
def test_room_is_asked_for_only_on_a_full_disk(error: Exception, full: bool, tmp_path: Path) -> None:
    def save(folder: Path) -> None:
        raise error

    text = write_policy(SimpleNamespace(save_pretrained=save), tmp_path / "policy", PolicyRecord(EnvConfig(), ()))
    assert text is not None and str(error) in text and ("make room" in text) == full
    assert not list(tmp_path.iterdir())
