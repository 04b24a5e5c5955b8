"""Meta-World: tasks and groups of the package, initial states by number, propositions, experts, cameras."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from rlvla.envs.base import Env
from rlvla.envs.experts import ExpertConfig, make_expert
from rlvla.envs.metaworld.env import CAMERAS, MAX_STEPS, SUITE
from rlvla.envs.metaworld.tasks import GROUPS, TASKS
from rlvla.envs.registry import list_tasks, make_env
from rlvla.rewards.machines import task_graph
from rlvla.utils.errors import ConfigError

IDS = {task.name: number for number, task in enumerate(TASKS)}


def test_every_task_has_sentences_of_its_own() -> None:
    said = [text for task in TASKS for text in (task.instruction, *task.paraphrases)]
    assert len(TASKS) == 50 and len(set(said)) == 150
    assert all(text == text.lower().strip(" .") and 2 <= len(text.split()) <= 14 for text in said)
    assert [task.name for task in list_tasks(SUITE)] == [task.name for task in TASKS]
    assert all(task_graph(task).success for task in list_tasks(SUITE))


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="ends episodes after 500"):
        list_tasks(SUITE, max_steps=MAX_STEPS + 1)
    with pytest.raises(ConfigError, match="give --use_proprio"):
        list_tasks(SUITE, object_state=True)
    with pytest.raises(ConfigError, match="unknown camera"):
        list_tasks(SUITE, cameras=("agentview",))


class TestWithThePackage:
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _package(cls) -> None:
        pytest.importorskip("metaworld", reason="metaworld is not installed: examples/scripts/install_metaworld.sh")

    def make(self, name: str, **options: object) -> Env:
        return make_env(SUITE, IDS[name], **{"cameras": (), "max_steps": MAX_STEPS, **options})

    def test_names_and_groups_are_those_of_the_package(self) -> None:
        from metaworld import env_dict as package

        assert [task.env_name for task in TASKS] == list(package.ALL_V3_ENVIRONMENTS)
        theirs = {"MT10": package.MT10_V3, "MT50": package.MT50_V3}
        for name, split in (("ML10", package.ML10_V3), ("ML45", package.ML45_V3)):
            theirs |= {name: split["train"], f"{name}-test": split["test"]}
        assert {name: {f"{task}-v3" for task in tasks} for name, tasks in GROUPS.items()} == {
            name: set(tasks) for name, tasks in theirs.items()
        }

    @pytest.mark.parametrize("name", GROUPS["MT10"])
    def test_the_expert_succeeds_and_the_events_tell_how(self, name: str) -> None:
        env, expert = self.make(name), make_expert(SUITE, IDS[name], ExpertConfig())
        events: list[frozenset[str]] = []
        env.reset(0, seed=0)
        expert.reset(np.random.default_rng(0))
        while True:
            result = env.step_chunk(expert.act(env.privileged_state())[None])
            events += result.events
            assert 0 <= result.rewards[0] <= 10
            if result.terminated or result.truncated:
                break
        assert result.terminated and "success" in events[-1], name
        happened = frozenset().union(*events)
        if name != "reach":
            assert "near" in happened and "moved" in happened
        if name == "pick-place":
            assert "grasped" in happened and "moved" in events[-1]
        env.close()

    def test_initial_states_differ_in_objects_and_goals_but_not_by_what_ran_before(self) -> None:
        env = self.make("pick-place", use_proprio=True, object_state=True)
        states = [env.reset(number, seed=0).proprio for number in (0, 1, 0)]
        env.step_chunk(np.full((5, 4), 0.5, np.float32))
        states.append(env.reset(0, seed=7).proprio)
        np.testing.assert_array_equal(states[0], states[2])
        np.testing.assert_array_equal(states[0], states[3])
        assert (states[0][-3:] != states[1][-3:]).any() and (states[0][4:7] != states[1][4:7]).any()
        other = self.make("pick-place", use_proprio=True, object_state=True)
        np.testing.assert_array_equal(other.reset(1, seed=0).proprio, states[1])

    def test_goals_can_be_seen(self) -> None:
        """It is a site; without it the same initial state looks different, most in the cameras that are near."""
        env: Any = self.make("reach", cameras=tuple(CAMERAS), image_size=64)
        shown = env.reset(0, seed=0).images.astype(int)
        env._sim.model.site("goal").rgba[3] = 0.0
        hidden = env.reset(0, seed=0).images.astype(int)
        changed = (np.abs(shown - hidden).max(-1) > 40).sum((1, 2))
        visible = dict(zip(CAMERAS, changed))
        assert shown.shape == (len(CAMERAS), 64, 64, 3) and (changed[:4] > 0).all()
        assert min(visible["sideview"], visible["frontview"]) >= 4 * visible["corner4"]
        env.close()

    def test_simplified_meshes_look_alike(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("fast_simplification")
        options = {"cameras": ("corner4", "behind"), "image_size": 64}
        light = self.make("drawer-open", **options).reset(0, seed=0).images.astype(int)
        monkeypatch.setattr("rlvla.envs.mujoco.rendering.lightly_drawn", lambda model: nullcontext())
        whole = self.make("drawer-open", **options).reset(0, seed=0).images.astype(int)
        assert (light != whole).any() and np.abs(light - whole).mean() < 3
