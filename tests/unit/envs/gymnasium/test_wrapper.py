"""Suites as Gymnasium environments: the checks of Gymnasium and Stable-Baselines3, and equality with `make_env`."""

from __future__ import annotations

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")
from gymnasium.utils.env_checker import check_env  # noqa: E402

from rlvla import gym_env, gym_vector_env, make_env, train_init_states  # noqa: E402
from rlvla.utils.errors import ConfigError  # noqa: E402

OPTIONS = {"image_size": 48, "use_proprio": True}
STATE = {**OPTIONS, "use_state": True}
REACH = {**OPTIONS, "render_mode": "rgb_array"}


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("checker", ["gymnasium", "stable_baselines3"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_checks_of_both_libraries_pass(checker: str, chunk: int) -> None:
    check = check_env
    if checker == "stable_baselines3":
        check = pytest.importorskip("stable_baselines3.common.env_checker").check_env
    check(gym_env("toy_reach", chunk=chunk, **REACH))


def test_episodes_equal_those_of_the_suite() -> None:
    env, own = gym_env("toy_reach", chunk=2, **REACH), make_env("toy_reach", 0, **OPTIONS)
    observation, info = env.reset(seed=1, options={"init_state_id": 9_000})
    expected = own.reset(9_000, 0)
    actions = np.full((2, 2), 0.5, np.float32)
    for _ in range(2):
        assert env.observation_space.contains(observation)
        np.testing.assert_array_equal(observation["top"], expected.images[0])
        np.testing.assert_array_equal(observation["proprio"], expected.proprio)
        np.testing.assert_array_equal(env.render(), expected.images[0])
        assert own.task.instructions[observation["instruction"]] == info["instruction"] == expected.instruction
        observation, reward, terminated, truncated, info = env.step(actions)
        result = own.step_chunk(actions)
        expected = result.observation
        assert (reward, terminated, truncated) == (result.rewards.sum(), result.terminated, result.truncated)
        assert info["steps"] == 2 and info["event/near"] == any("near" in events for events in result.events)


def test_registered_with_splits_of_the_initial_states() -> None:
    env = gymnasium.make("rlvla/toy_push-v0", task="red_to_green", init_states="heldout", image_size=48)
    training = train_init_states(env.unwrapped.task)
    drawn = {env.reset(seed=seed)[1]["init_state_id"] for seed in range(5)}
    assert len(drawn) == 5 and not drawn & set(training)
    assert gym_env("toy_push", init_states=[7]).reset()[1]["init_state_id"] == 7
    assert env.reset(seed=3)[1] == env.reset(seed=3)[1]


def test_a_vector_of_environments_equals_single_ones_and_starts_again() -> None:
    single = [gym_env("toy_reach", **STATE) for _ in range(3)]
    vector = gym_vector_env("toy_reach", num_envs=3, envs_per_worker=2, **STATE)
    try:
        observations, infos = vector.reset(seed=4)
        assert vector.observation_space.contains(observations)
        first = [env.reset(seed=4 + i) for i, env in enumerate(single)]
        assert infos["init_state_id"].tolist() == [info["init_state_id"] for _, info in first]
        rng, ended = np.random.default_rng(0), np.zeros(3, bool)
        for _ in range(14):  # beyond the 12 steps of an episode
            actions = rng.uniform(-1, 1, (3, 2)).astype(np.float32)
            observations, rewards, terminated, truncated, infos = vector.step(actions)
            for i, env in enumerate(single):
                expected, reward, end, limit = (
                    (env.reset()[0], 0.0, False, False) if ended[i] else env.step(actions[i])[:4]
                )
                assert (rewards[i], terminated[i], truncated[i]) == (reward, end, limit)
                for name, value in expected.items():
                    np.testing.assert_array_equal(observations[name][i], value)
            ended = terminated | truncated
        assert (rewards == 0).all() and not ended.any(), "a new episode"
        np.testing.assert_allclose(observations["state/effector"], observations["proprio"], atol=1e-6)
    finally:
        vector.close()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"task": "pull"}, "toy_push has no task pull; its tasks: 0 (red_to_green)"),
        ({"init_states": "test"}, "one of train, heldout, not 'test'"),
        ({"init_states": [10_000]}, "10000 is none of red_to_green, which has 10000"),
        ({"init_states": []}, "none given"),
        ({"chunk": 0}, "at least 1, not 0"),
        ({"render_mode": "human"}, "'rgb_array' or None"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError) as error:
        gym_env("toy_push", **arguments)
    assert part in str(error.value)


def test_unknown_reset_options_are_named() -> None:
    env = gym_env("toy_reach")
    with pytest.raises(ValueError, match="init_state_id, not state"):
        env.reset(options={"state": 1})
    with pytest.raises(ValueError, match="not 10000"):
        env.reset(options={"init_state_id": 10_000})
