import math

import numpy as np
import pytest

from rlvla.envs import make_env
from rlvla.envs.experts import ExpertConfig, make_expert
from rlvla.envs.experts.episode import play_expert_episode
from rlvla.utils.errors import ConfigError


def play(config, ids=range(100), seed=0, **options):
    env, expert = make_env("toy_reach", 0, **options), make_expert("toy_reach", 0, config)
    return [play_expert_episode(env, expert, i, seed) for i in ids]


def success(episodes):
    return np.mean([episode["success_at_end"] for episode in episodes])


def test_at_its_best_it_always_succeeds_well_within_the_limit():
    episodes = play(ExpertConfig(), range(300))
    assert success(episodes) == 1.0
    assert max(len(episode["actions"]) for episode in episodes) <= 11


def test_episode_pairs_what_was_seen_with_what_was_done():
    [episode] = play(ExpertConfig(noise_std=0.3), [5], use_proprio=True, image_size=32)
    steps = len(episode["actions"])
    assert episode["images"].shape == (steps, 1, 32, 32, 3) and episode["images"].dtype == np.uint8
    assert episode["actions"].shape == (steps, 2) and episode["actions"].dtype == np.float32
    assert episode["rewards"].tolist() == [0.0] * (steps - 1) + [1.0] and episode["successes"].shape == (steps,)
    env = make_env("toy_reach", 0, use_proprio=True, image_size=32)
    observation = env.reset(5, 0)
    assert episode["instruction"] == observation.instruction
    for image, proprio, action in zip(episode["images"], episode["proprio"], episode["actions"]):
        np.testing.assert_array_equal(image, observation.images)
        np.testing.assert_array_equal(proprio, observation.proprio)
        observation = env.step_chunk(action[None]).observation


def test_equal_seeds_give_equal_episodes_and_others_do_not():
    config = ExpertConfig(noise_std=0.2, offset_prob=1.0, offset_max=0.3)
    [first], [again], [other] = play(config, [1]), play(config, [1]), play(config, [1], seed=1)
    np.testing.assert_array_equal(first["actions"], again["actions"])
    assert not np.array_equal(first["actions"][0], other["actions"][0])


def test_systematic_error_moves_where_it_comes_to_rest():
    env = make_env("toy_reach", 0)
    expert = make_expert("toy_reach", 0, ExpertConfig(offset_bias=(0.25, -0.1)))
    episode = play_expert_episode(env, expert, 3, 0)
    state = env.privileged_state()
    # It passes over the disc on its way, which is no success at the end.
    assert episode["truncated"] and not episode["terminated"] and not episode["success_at_end"]
    np.testing.assert_allclose(state["effector"], state["target"] + [0.25, -0.1], atol=1e-6)
    assert success(play(ExpertConfig(offset_prob=0.7, offset_max=0.5))) == pytest.approx(1 - 0.7 * 0.64, abs=0.15)


def test_quantum_leaves_few_distinct_actions():
    actions = np.concatenate([e["actions"] for e in play(ExpertConfig(action_quantum=0.25, noise_std=0.2))])
    assert set(np.unique(actions)) <= {k * 0.25 for k in range(-4, 5)}


def test_noise_disturbs_both_directions():
    def first_actions(config):
        return np.stack([episode["actions"][0] for episode in play(config)])

    difference = first_actions(ExpertConfig(noise_std=0.1)) - first_actions(ExpertConfig())
    assert (difference.std(axis=0) > 0.02).all() and np.abs(difference).max() < 0.6


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(ConfigError, match="no gripper"):
        make_expert("toy_reach", 0, ExpertConfig(gripper_shift=1))
    with pytest.raises(ConfigError, match="its tasks: 0"):
        make_expert("toy_reach", 4, ExpertConfig())
    with pytest.raises(ConfigError, match="known suites"):
        make_expert("no_such_suite", 0, ExpertConfig())


def test_values_out_of_range_are_reported_together():
    with pytest.raises(ConfigError) as error:
        ExpertConfig(noise_std=-1, offset_prob=1.5, offset_max=math.nan, offset_bias=(0.0, math.inf), action_quantum=-2)
    for name in ("noise_std", "offset_prob", "offset_max", "offset_bias", "action_quantum"):
        assert name in str(error.value)
