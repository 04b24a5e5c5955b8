"""Contract tests, answer checks and registry report all violations of an environment at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rlvla.envs.base import ChunkResult, TaskSpec
from rlvla.envs.registry import Suite, get_suite, list_tasks, make_env, register_suite
from rlvla.envs.testing import EnvContract
from rlvla.envs.toy_reach.env import ToyReachEnv
from rlvla.envs.workers.answer_checks import AnswerChecker, BadAnswerError
from rlvla.utils.errors import ConfigError

SUITE = "test_careless"


class CarelessEnv(ToyReachEnv):
    """`toy_reach` with modified results of `step_chunk` or `reset`."""

    spoil_result: Callable = staticmethod(lambda result: result)
    spoil_observation: Callable = staticmethod(lambda observation: observation)
    forgiving = False

    def reset(self, init_state_id, seed):
        if self.forgiving:
            init_state_id %= self.task.num_init_states
        return self.spoil_observation(super().reset(init_state_id, seed))

    def step_chunk(self, actions, *, record_frames=False):
        if self.forgiving:
            actions = np.nan_to_num(np.atleast_2d(actions))[..., :2]
        return self.spoil_result(super().step_chunk(actions, record_frames=record_frames))


def _tasks(**kw):
    return [replace(get_suite("toy_reach").list_tasks(**kw)[0], suite=SUITE)]


def _make(task_id, **kw):
    env = make_env("toy_reach", 0, **kw)
    return CarelessEnv(_tasks(**kw)[0], image_size=env.image_size, use_proprio=env.use_proprio)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlvla.envs.registry._SUITES", {"toy_reach": get_suite("toy_reach")})
    register_suite(
        SUITE, Suite(list_tasks=_tasks, make=_make, cameras=("top",), options=get_suite("toy_reach").options)
    )


class Contract(EnvContract):
    suite = SUITE
    hold_steps = 3

    @classmethod
    def find_solution(cls, env):
        return None


def everything_wrong(result: ChunkResult) -> ChunkResult:
    observation = replace(result.observation, images=result.observation.images / 255.0, proprio=None, instruction=7)
    return replace(
        result,
        observation=observation,
        rewards=result.rewards.astype(np.float64),
        successes=[False] * 3,
        events=["near"] * 3,
        truncated="no",
    )


def test_all_that_is_wrong_with_a_result_is_listed() -> None:
    env = make_env(SUITE, 0, use_proprio=True)
    Contract().test_result_of_a_chunk(env)  # nothing yet
    env.spoil_result = everything_wrong
    with pytest.raises(AssertionError) as error:
        Contract().test_result_of_a_chunk(env)
    lines = str(error.value).split("\n  - ")
    assert lines[0] == "the result of 3 random actions:"
    assert lines[1:] == [
        "images must be [N, H, W, 3] uint8, not [1, 64, 64, 3] float64",
        "the instruction must be text, not int",
        "proprio must be [2] float32, not NoneType",
        "truncated must be a bool, not 'no'",
        "rewards must be [3] float32, not [3] float64",
        "successes must be [3] bool, not list",
        "events of a step must be a frozenset, not str",
        "truncated must be False after so few random actions, not 'no'",
    ]


def test_what_is_wrong_is_told_although_the_checks_cannot_go_on() -> None:
    env = make_env(SUITE, 0, use_proprio=True)
    env.spoil_result = lambda result: None
    with pytest.raises(AssertionError) as error:
        Contract().test_result_of_a_chunk(env)
    lines = str(error.value).split("\n  - ")
    assert lines[1] == "expected the result of a chunk, not NoneType" and "AttributeError" in lines[2]


def test_the_message_of_an_answer_names_the_first_problems() -> None:
    env = make_env(SUITE, 0, use_proprio=True)
    env.reset(0, 0)
    bad = everything_wrong(env.step_chunk(np.zeros((3, 2))))
    with pytest.raises(BadAnswerError) as error:
        AnswerChecker(env.task, {"use_proprio": True}).chunk(bad, 3)
    assert len(error.value.problems) == 7
    assert str(error.value).count("; ") == 4 and str(error.value).endswith("; and 3 more")
    assert str(error.value).startswith("images must be [N, H, W, 3] uint8")


def change(name: str, value: object) -> Callable:
    return lambda result: replace(result, **{name: value})


def still(env: CarelessEnv) -> None:
    env._draw = lambda scene: env._background.copy()


def one_step_more(env: CarelessEnv) -> None:
    env._runner._max_steps += 1


@pytest.mark.parametrize(
    ("test", "break_it", "message"),
    [
        (
            "frames_on_request",
            lambda env: setattr(env, "spoil_result", change("frames", None)),
            "frames must be [2, 64",
        ),
        ("bad_actions_are_refused", lambda env: setattr(env, "forgiving", True), "must raise ValueError, but nothing"),
        (
            "init_state_id_out_of_range_is_refused",
            lambda env: setattr(env, "forgiving", True),
            "reset(-1): initial states are 0..9999 must raise ValueError",
        ),
        ("images_show_the_state", still, "the images must show the effect of three actions"),
        (
            "observation_after_reset",
            lambda env: setattr(env, "spoil_observation", lambda observation: replace(observation, instruction="")),
            "the instruction must not be empty",
        ),
        (
            "offers_what_the_contract_names",
            lambda env: setattr(env, "task", replace(env.task, max_steps=0, name="other")),
            "name is 'other', but the suite lists 'reach'",
        ),
        (
            "offers_what_the_contract_names",
            lambda env: setattr(env, "task", replace(env.task, max_steps=0, name="other")),
            "max_steps must be an int of at least 1, not 0",
        ),
    ],
)
def test_a_failed_test_says_what_is_expected(test: str, break_it: Callable, message: str) -> None:
    env = make_env(SUITE, 0, use_proprio=True)
    check = getattr(Contract(), f"test_{test}")
    check(env)
    break_it(env)
    with pytest.raises(AssertionError) as error:
        check(env)
    assert message in str(error.value)


def test_the_step_limit_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    Contract().test_step_limit_truncates_inside_the_chunk()
    monkeypatch.setattr(Contract, "make", classmethod(lambda cls, **kw: _with(one_step_more, make_env(SUITE, 0, **kw))))
    with pytest.raises(AssertionError) as error:
        Contract().test_step_limit_truncates_inside_the_chunk()
    for line in ("4 steps were executed, more than the limit of 3", "steps_executed must be 3, not 4"):
        assert f"\n  - {line}" in str(error.value)


def _with(change: Callable, env: CarelessEnv) -> CarelessEnv:
    change(env)
    return env


def test_a_task_by_keyword() -> None:
    task = TaskSpec(suite="arm", instruction="pick up the cup", max_steps=80, action_dim=7)
    assert (task.task_id, task.name, task.num_init_states, task.proprio_dim) == (0, "arm", 1000, 0)
    assert task.control_freq == 10.0 and not task.problems()
    assert task == TaskSpec("arm", 0, "arm", "pick up the cup", 80, 1000, 7, 0, 10.0), "positions are as ever"
    with pytest.raises(TypeError, match="a TaskSpec needs instruction, max_steps, action_dim$"):
        TaskSpec(suite="arm")


def test_numbers_of_numpy_and_dimensions_from_the_end() -> None:
    task = TaskSpec(suite="arm", instruction="pick up the cup", max_steps=80, action_dim=7, gripper_dims=(5, 6))
    numbers = {"max_steps": np.int64(80), "action_dim": np.int32(7), "control_freq": np.float32(10)}
    same = replace(task, **numbers, gripper_dims=np.array([-2, 6]), reward_range=(np.float32(0), 1))
    assert same == replace(task, reward_range=(0.0, 1)) and not same.problems()
    assert same.gripper_dims == (5, 6) and type(same.max_steps) is int and type(same.control_freq) is float


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"instruction": ""}, "instruction must be a non-empty string, not ''"),
        ({"name": 3}, "name must be a non-empty string, not 3"),
        ({"max_steps": 0}, "max_steps must be an int of at least 1, not 0"),
        ({"max_steps": 12.0}, "max_steps must be an int of at least 1, not 12.0"),
        ({"action_dim": True}, "action_dim must be an int of at least 1, not True"),
        ({"proprio_dim": -1}, "proprio_dim must be an int of at least 0, not -1"),
        ({"num_init_states": np.float32(4)}, "num_init_states must be an int"),
        ({"max_steps": np.int64(0)}, "max_steps must be an int of at least 1, not 0"),
        ({"control_freq": True}, "control_freq must be a number greater than 0, not True"),
        ({"control_freq": 0}, "control_freq must be a number greater than 0, not 0"),
        ({"action_limit": float("nan")}, "action_limit must be a number greater than 0, not nan"),
        ({"propositions": "grasped"}, "propositions must be a tuple of names, not 'grasped'"),
        ({"gripper_dims": (6, 7)}, "gripper_dims must lie in 0..6, not [7]"),
        ({"gripper_dims": (-8,)}, "gripper_dims must lie in 0..6, not [-8]"),
        ({"reward_range": (1, 0)}, "reward_range must be (lowest, highest), not (1, 0)"),
    ],
)
def test_what_is_wrong_with_a_task(values: dict, text: str) -> None:
    task = TaskSpec(suite="arm", instruction="pick up the cup", max_steps=80, action_dim=7)
    (problem,) = replace(task, **values).problems()
    assert text in problem


def test_a_suite_with_invalid_tasks_is_refused_with_all_of_them() -> None:
    task = TaskSpec(suite=SUITE, instruction="", max_steps=0, action_dim=7)
    tasks = [task, replace(task, suite="other", instruction="go", max_steps=5)]
    register_suite(SUITE, Suite(list_tasks=lambda **kw: tasks, make=_make, cameras=("top",)))
    with pytest.raises(ConfigError) as error:
        list_tasks(SUITE)
    beginnings = ["task 0: instruction must", "task 0: max_steps must", "task 0: suite must", "task_ids must be unique"]
    for problem, beginning in zip(error.value.problems, beginnings, strict=True):
        assert problem.text.startswith(f"suite {SUITE}, {beginning}")
    assert {(problem.flag, problem.reason) for problem in error.value.problems} == {("task_suite_name", "invalid_task")}
