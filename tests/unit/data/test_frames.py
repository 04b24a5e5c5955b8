"""Demonstrations and dumped rollouts as one set of episodes for the reward model."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from cli import collect_demos, score_episodes, train_ppo_vla, train_rm_vla
from rlvla.data.reading import read_demonstrations
from rlvla.data.replayed_episodes import recorded_env
from rlvla.data.reward_model_rows import read_outcomes
from rlvla.envs import make_env
from rlvla.utils.errors import ConfigError


@pytest.fixture(scope="module")
def dump(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One iteration of a policy that acts badly."""
    folder = tmp_path_factory.mktemp("dump") / "run"
    words = ["--pretrain", str(policy_folder), "--save_path", str(folder), "--num_episodes", "16", "--dump_rollouts"]
    words += ["--rollout_batch_size", "16", "--train_batch_size", "8", "--num_envs", "1", "--eval_episodes", "1"]
    train_ppo_vla.main([*words, "--no-val_before_train", "--no-use_tensorboard"])
    return next((folder / "rollouts").rglob("demos.hdf5"))


def test_the_last_frame_is_what_the_last_action_led_to(dump: Path) -> None:
    demos = read_demonstrations(dump)
    assert demos.last_images is not None and demos.last_proprio is not None and demos.proprio is not None
    config = recorded_env(demos)
    env = make_env(config.suite, 0, **config.env_kwargs())
    with h5py.File(dump, "r") as file:
        seeds = [int(file["data"][f"demo_{i}"].attrs["seed"]) for i in range(3)]
    for index, seed in enumerate(seeds):
        env.reset(demos.init_states[index][1], seed)
        result = env.step_chunk(demos.actions[index])
        np.testing.assert_array_equal(result.observation.images, demos.last_images[index])
        np.testing.assert_allclose(result.observation.proprio, demos.last_proprio[index], atol=1e-6)
    env.close()
    frames = read_outcomes([str(dump)])
    for index, images in enumerate(demos.images):
        np.testing.assert_array_equal(frames.images[index][:-1], images)
        np.testing.assert_array_equal(frames.images[index][-1], demos.last_images[index])
        assert len(frames.images[index]) == len(frames.proprio[index]) == len(images) + 1


def test_files_are_joined_in_order(demos_file: Path, dump: Path) -> None:
    one, other = read_outcomes([str(demos_file)]), read_outcomes([str(dump)])
    both = read_outcomes([str(demos_file), str(dump)])
    assert both.success == one.success + other.success and both.init_states == one.init_states + other.init_states
    assert len(both.images) == len(both.proprio) == len(both.instructions) == len(both.actions) == 56
    np.testing.assert_array_equal(both.images[40], other.images[0])
    mean = np.concatenate([*one.proprio, *other.proprio]).mean(0)
    np.testing.assert_allclose(both.statistics["toy_reach"]["proprio"]["mean"], mean, rtol=1e-5)


def test_a_reward_model_from_both(demos_file: Path, dump: Path, tmp_path: Path) -> None:
    assert not all(read_demonstrations(dump).success), "the policy of the fixture fails now and then"
    words = ["--demos", str(demos_file), str(dump), "--save_path", str(tmp_path / "rm"), "--max_epochs", "1"]
    words += ["--tiny_vision_dim", "16", "--tiny_llm_dim", "32", "--tiny_llm_layers", "1", "--no-use_tensorboard"]
    train_rm_vla.main([*words, "--heldout_share", "0.4", "--use_proprio"])
    metrics = json.loads((tmp_path / "rm" / "metrics.json").read_text())
    assert metrics["reward_model/heldout_episodes"] > metrics["reward_model/heldout_successes"] > 0


def test_a_dump_is_scored(dump: Path, tmp_path: Path) -> None:
    words = ["--demos", str(dump), "--episodes", "0", "1", "--reward", "success:1", "rm:0.5"]
    score_episodes.main([*words, "--output", str(tmp_path / "scores")])
    scores = json.loads((tmp_path / "scores" / "scores.json").read_text())
    assert [len(s["rewards"]["rm"]) for s in scores] == [len(a) for a in read_demonstrations(dump).actions[:2]]
    assert (tmp_path / "scores" / "demo_1.png").is_file()


def test_files_that_do_not_fit_together(demos_file: Path, tmp_path: Path) -> None:
    words = ["--task_suite_name", "toy_reach", "--image_size", "32", "--num_demos", "2", "--num_envs", "1"]
    collect_demos.main([*words, "--output", str(tmp_path / "small")])
    small, missing = str(tmp_path / "small" / "demos.hdf5"), str(tmp_path / "none.hdf5")
    with pytest.raises(ConfigError, match="image_size is 32, but .* can be joined") as error:
        read_outcomes([str(demos_file), small])
    assert any("having proprio is False, but True" in problem for problem in error.value.problems)
    with pytest.raises(ConfigError) as error:
        read_outcomes([missing, str(tmp_path / "gone.hdf5")])
    assert sum("none.hdf5 does not exist" in p or "gone.hdf5 does not exist" in p for p in error.value.problems) == 2
    with pytest.raises(ConfigError, match="--demos names no file"):
        read_outcomes([])
