"""The RoboTwin adapter, against a small environment with RoboTwin's interface (tests/envs/small_robotwin)."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from rlvla.envs import list_tasks, make_env
from rlvla.envs.config import EnvConfig
from rlvla.envs.robotwin.env import CAMERAS, FIRST_EVAL_STATE, SEED_STRIDE, simulator_seed
from rlvla.envs.robotwin.single_step import SingleStepEnv
from rlvla.envs.splits import eval_init_states, train_init_states
from rlvla.envs.testing import EnvContract
from rlvla.envs.workers.messages import EnvSpec, Reset
from rlvla.envs.workers.pool import EnvPool
from rlvla.envs.workers.worker_env import WorkerEnv
from rlvla.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3] / "support" / "small_robotwin"


@pytest.fixture(autouse=True, scope="module")
def _checkout() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROBOTWIN_ROOT", str(ROOT))
        yield


class TestRobotwin(EnvContract):
    suite = "robotwin"
    options: ClassVar = {"image_size": 32}

    @classmethod
    def find_solution(cls, env):
        env.reset(0, seed=0)
        goal = env._simulator.goal
        actions, terminated = [], False
        while not terminated:
            actions.append(np.eye(1, 14)[0].astype(np.float32) * goal)
            terminated = env.step_chunk(actions[-1][None]).terminated
        return 0, np.array(actions, dtype=np.float32)


@pytest.fixture
def env() -> Iterator[SingleStepEnv]:
    made = make_env("robotwin", 0, cameras=CAMERAS, use_proprio=True)
    yield made
    made.close()


def test_facts_come_from_the_checkout() -> None:
    (task,) = list_tasks("robotwin")
    assert (task.name, task.max_steps, task.action_dim, task.proprio_dim) == ("reach_marker", 30, 14, 14)
    assert task.instruction == "turn the left arm to the green mark"
    assert list_tasks("robotwin", max_steps=4)[0].max_steps == 4


def test_training_and_evaluation_have_seeds_and_sentences_of_their_own(env: SingleStepEnv) -> None:
    task = env.task
    trained = {simulator_seed(i) for i in train_init_states(task)}
    evaluated = {simulator_seed(i) for i in eval_init_states(task, "heldout", 200)}
    assert not trained & evaluated and min(evaluated) == 100_000 and len(trained) + len(evaluated) == 1000
    said, side = env.reset(0, seed=5).instruction, "left" if env._simulator.goal < 0 else "right"
    assert said in (f"turn to the mark on the {side}", f"reach the {side} mark")
    assert env._simulator.calls[-2][:3] == ("setup_demo", 0, False)
    held_out = env.reset(FIRST_EVAL_STATE, seed=5)
    assert held_out.instruction.endswith("is where the arm should point")
    assert ("setup_demo", 100_000, True) in env._simulator.calls


def test_scenes_that_cannot_be_solved_are_passed_over_once(env: SingleStepEnv) -> None:
    for state in (3, 5, 1):  # unstable; no plan; the planner raises
        env.reset(state, seed=0)
        seeds = [call[1] for call in env._simulator.calls if call[0] == "setup_demo"]
        assert seeds[0] == state and seeds[1] == seeds[-1] == state + SEED_STRIDE
        env._simulator.calls.clear()
        env.reset(state, seed=0)
        assert [c for c in env._simulator.calls if c[0] != "get_obs"] == [
            ("close_env",),
            ("setup_demo", state + SEED_STRIDE, False),
        ]
        env._simulator.calls.clear()


def test_one_picture_per_chunk_success_inside_it_and_targets_beyond_one(env: SingleStepEnv) -> None:
    first = env.reset(FIRST_EVAL_STATE, seed=0)
    assert first.images.shape == (3, 224, 224, 3) and len({image.tobytes() for image in first.images}) == 3
    np.testing.assert_allclose(first.proprio, env._simulator.joints, rtol=1e-6)
    env._simulator.calls.clear()
    goal = env._simulator.goal
    target = np.full((25, 14), 1.5 * np.sign(goal), dtype=np.float32)
    target[:, 0] = goal
    result = env.step_chunk(target)
    assert env._simulator.calls == [("get_obs",)]
    assert result.terminated and result.steps_executed < 25 and result.events[-1] == {"success"}
    # RoboTwin plays nothing beyond its own limit of 5: the task's holds instead.
    env.reset(FIRST_EVAL_STATE, seed=0)
    far = env.step_chunk(np.full((12, 14), -np.sign(goal) * 3.0, dtype=np.float32))
    assert far.steps_executed == 12 and abs(far.observation.proprio[0]) > 2.9, "a target was clipped, or not played"


def test_working_directory_stays(env: SingleStepEnv) -> None:
    before = os.getcwd()
    env.reset(1, seed=0)
    assert os.getcwd() == before


def test_a_state_has_one_sentence_whoever_draws_it() -> None:
    """RoboTwin's sentences come from the global generator: that of a worker must not decide."""

    def said(state: int, draws: int) -> str:
        random.seed(draws)
        made = make_env("robotwin", 0)
        try:
            following = random.getstate()
            instruction = made.reset(state, seed=0).instruction
            assert random.getstate() == following, "the generator of others is left alone"
            return instruction
        finally:
            made.close()

    first = [said(state, 0) for state in (0, 1, 2, 4, 7, 8)]
    assert first == [said(state, draws) for state, draws in zip((0, 1, 2, 4, 7, 8), range(1, 7))]
    assert len({sentence.split()[0] for sentence in first}) == 2, "both sentences are drawn"


def test_targets_beyond_one_reach_the_environment_of_another_process() -> None:
    with EnvPool(1) as pool:
        env = WorkerEnv(pool, 0, EnvSpec("robotwin", 0, {"robotwin_root": str(ROOT), "use_proprio": True}))
        env.reset(FIRST_EVAL_STATE, seed=0)
        far = np.abs(env.step_chunk(np.full((12, 14), 3.0, dtype=np.float32)).observation.proprio[0])
        env.reset(FIRST_EVAL_STATE, seed=0)
        other = np.abs(env.step_chunk(np.full((12, 14), -3.0, dtype=np.float32)).observation.proprio[0])
    assert max(far, other) > 2.9, "a target was clipped"


def test_in_a_worker() -> None:
    with EnvPool(1) as pool:
        observation = pool.call(0, Reset(EnvSpec("robotwin", 0, {"robotwin_root": str(ROOT), "image_size": 32}), 0, 0))
    assert observation.images.shape == (1, 32, 32, 3) and "mark" in observation.instruction


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it has no envs, task_config, description"):
        list_tasks("robotwin", robotwin_root=str(tmp_path))
    with pytest.raises(ConfigError, match="--robotwin_config dirty: RoboTwin has demo_clean"):
        EnvConfig(task_suite_name="robotwin", options={"robotwin_config": "dirty"}).tasks()
    monkeypatch.delenv("ROBOTWIN_ROOT")
    with pytest.raises(ConfigError, match=r"nowhere is not a RoboTwin 2\.0 folder"):
        EnvConfig(task_suite_name="robotwin", options={"robotwin_root": str(tmp_path / "nowhere")}).tasks()
    with pytest.raises(ConfigError, match="--robotwin_root"):
        list_tasks("robotwin")


def test_a_checkpoint_remembers_the_configuration_and_not_the_folder() -> None:
    options = {"robotwin_root": "/somewhere", "robotwin_config": "demo_randomized"}
    recorded = EnvConfig("robotwin", options=options).as_dict()
    assert recorded["robotwin_config"] == "demo_randomized" and "robotwin_root" not in recorded
