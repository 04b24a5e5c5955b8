"""Custom task samplers: requests, observed episodes, validation."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlvla.envs import list_tasks
from rlvla.rollout import FinishedEpisode
from rlvla.rollout.task_sampler import TaskSamplerError, UserSampler
from rlvla.utils.errors import ConfigError

TASKS = list_tasks("toy_reach")
CURRICULUM = """
from rlvla.rollout import EpisodeRequest


class Hardest:
    def __init__(self, tasks, init_states, size, seed):
        self.task, self.states, self.size, self.failed = tasks[0], list(init_states[0]), size, {}

    def at(self, positions):
        state = max(self.states, key=lambda s: self.failed.get(str(s), 0))
        return [
            EpisodeRequest(self.task.suite, self.task.task_id, state, 100 * p + i, f"group {p}")
            for p in positions for i in range(self.size)
        ]

    def observe(self, episodes):
        for e in episodes:
            self.failed[str(e.init_state_id)] = self.failed.get(str(e.init_state_id), 0) + (not e.success_at_end)

    def state_dict(self):
        return self.failed

    def load_state_dict(self, state):
        self.failed = dict(state)
"""


def sampler(folder: Path, source: str = CURRICULUM, name: str = "Hardest", size: int = 2) -> UserSampler:
    path = folder / f"mine_{abs(hash(source))}.py"
    path.write_text(source)
    return UserSampler(f"{path}:{name}", TASKS, [range(5)], size, 0)


def finished(state: int, success: bool) -> FinishedEpisode:
    return FinishedEpisode(TASKS[0].suite, TASKS[0].task_id, state, 0, "g", success, success, 5, 0)


def test_a_custom_sampler_adapts_to_observed_episodes_and_its_state_is_saved(tmp_path: Path) -> None:
    mine, resumed = sampler(tmp_path), sampler(tmp_path)
    assert [(r.uid, r.init_state_id) for r in mine.at(range(3, 5))] == [("group 3", 0)] * 2 + [("group 4", 0)] * 2
    mine.observe([finished(3, False), finished(1, True)])
    resumed.load_state_dict(mine.state_dict())
    assert {r.init_state_id for r in mine.at(range(2))} == {3}
    assert resumed.at(range(2)) == mine.at(range(2))


@pytest.mark.parametrize("state", ["np.int64(3)", "{'a': torch.ones(2)}", "{np.int64(3): 1}", "self.failed"])
def test_a_state_that_cannot_be_saved_is_noticed_at_once(tmp_path: Path, state: str) -> None:
    source = CURRICULUM.replace("str(e.init_state_id)]", "np.int64(2)]")
    source = f"import numpy as np\nimport torch\n{source.replace('return self.failed', f'return {state}')}"
    if state == "self.failed":  # numpy's numbers come with the first episodes
        mine = sampler(tmp_path, source)
        with pytest.raises(TaskSamplerError, match="state_dict.*keys must be str"):
            mine.observe([finished(3, False)])
    else:
        with pytest.raises(TaskSamplerError, match=r"state_dict.*item\(\)"):
            sampler(tmp_path, source)


def test_only_at_is_needed(tmp_path: Path) -> None:
    first = CURRICULUM.partition("    def observe")[0]
    mine = sampler(tmp_path, first)
    mine.observe([finished(3, False)])
    mine.load_state_dict(None)
    assert mine.state_dict() is None and len(mine.at(range(2))) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("requests[:-1]", "2 groups of 2"),
        ("None", "list of EpisodeRequest"),
        ("[dataclasses.replace(r, uid='same') for r in requests]", "unique uid"),
        ("[dataclasses.replace(r, init_state_id=i) for i, r in enumerate(requests)]", "one initial state"),
        ("[dataclasses.replace(r, init_state_id=7) for r in requests]", "state 7 is not for training"),
        ("[dataclasses.replace(r, task_id=99) for r in requests]", "task 99"),
        ("requests[99]", "at raised:(?s:.*)IndexError"),
    ],
)
def test_episodes_that_cannot_be_trained_on(tmp_path: Path, change: str, words: str) -> None:
    source = f"import dataclasses\n{CURRICULUM}\n\nclass Other(Hardest):\n    def at(self, positions):\n"
    source += f"        requests = super().at(positions)\n        return {change}\n"
    with pytest.raises(TaskSamplerError, match=words):
        sampler(tmp_path, source, "Other").at(range(2))


@pytest.mark.parametrize(
    ("source", "name", "reason"),
    [
        (CURRICULUM, "Softest", "unknown_name"),
        (CURRICULUM, "", "malformed"),
        ("def make(*arguments):\n    pass\n", "make", "unknown_name"),
        ("class Mine:\n    pass\n", "Mine", "invalid_file"),
        ("class Mine:\n    def __init__(self, *arguments):\n        pass\n", "Mine", "mismatch"),
        ("import nothing_of_that_name\n", "Mine", "invalid_file"),
    ],
)
def test_classes_that_cannot_be_used(tmp_path: Path, source: str, name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        sampler(tmp_path, source, name)
    assert [(p.flag, p.reason) for p in error.value.problems] == [("task_sampler", reason)]
