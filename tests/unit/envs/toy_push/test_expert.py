import numpy as np
import pytest

from rlvla.envs import make_env
from rlvla.envs.experts import ExpertConfig, make_expert
from rlvla.envs.experts.episode import play_expert_episode
from rlvla.envs.toy_push.env import ZONE_SIZE
from rlvla.rewards.machines import task_graph
from rlvla.utils.errors import ConfigError


def play(config, ids, task_ids=range(4), seed=0):
    episodes = []
    for task_id in task_ids:
        env, expert = make_env("toy_push", task_id, image_size=32), make_expert("toy_push", task_id, config)
        episodes += [play_expert_episode(env, expert, i, seed) for i in ids]
    return episodes


def success(episodes):
    return np.mean([episode["success_at_end"] for episode in episodes])


def test_it_succeeds_and_takes_its_time():
    episodes = play(ExpertConfig(), range(50))
    assert success(episodes) >= 0.95
    steps = [len(episode["actions"]) for episode in episodes]
    assert 20 <= np.mean(steps) <= 40 and np.percentile(steps, 95) <= 45


def test_errors_lower_its_success_gradually():
    rates = [success(play(ExpertConfig(noise_std=noise), range(12))) for noise in (0.3, 2.0)]
    assert rates[0] >= 0.9 and rates[1] <= 0.7
    aside = ExpertConfig(offset_prob=0.5, offset_max=1.0)
    assert 0.3 <= success(play(aside, range(12))) <= 0.9
    assert success(play(ExpertConfig(offset_bias=(0.0, -2.5 * ZONE_SIZE)), range(6))) <= 0.2


def test_equal_seeds_give_equal_episodes_and_others_do_not():
    config = ExpertConfig(noise_std=0.2, offset_prob=1.0, offset_max=0.3)
    [first], [again], [other] = (play(config, [1], [0], seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first["actions"], again["actions"])
    np.testing.assert_array_equal(first["images"], again["images"])
    assert not np.array_equal(first["actions"][0], other["actions"][0])


def test_its_episodes_run_through_the_machine_of_the_task():
    env, expert = make_env("toy_push", 2, image_size=32), make_expert("toy_push", 2, ExpertConfig())
    assert task_graph(env.task).propositions == ("behind", "touching", "near_zone", "in_zone")
    for init_state_id in range(5):
        actions = play_expert_episode(env, expert, init_state_id, 0)["actions"]
        env.reset(init_state_id, 0)
        events, stage = env.step_chunk(actions).events, 0
        for happened in events:
            stage += stage < 4 and env.task.propositions[stage] in happened
        assert stage == 4 and "in_zone" not in events[0]


def test_it_pushes_past_the_other_disc():
    expert = make_expert("toy_push", 0, ExpertConfig())
    expert.reset(np.random.default_rng(0))
    state = {"pusher": np.array([0.0, -0.3]), "object": np.zeros(2), "zone": np.array([0.0, 0.7])}
    free = expert.act({**state, "distractor": np.array([0.7, 0.0])})
    assert free == pytest.approx([0.0, 1.0], abs=1e-6)
    # To the right of the way: it turns to the left, so the pusher has to get to the right of the disc.
    blocked = expert.act({**state, "distractor": np.array([0.1, 0.45])})
    assert blocked[0] > 0.2


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(ConfigError, match="no gripper"):
        make_expert("toy_push", 0, ExpertConfig(gripper_shift=1))
    with pytest.raises(ConfigError, match="its tasks: 0"):
        make_expert("toy_push", 4, ExpertConfig())
