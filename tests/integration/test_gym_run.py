"""Gymnasium environments that show images only, or none: off-policy runs, evaluations, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.eval_vla import main as evaluate
from cli.train_sac_vla import main as train

pytest.importorskip("gymnasium")

MODULE = ["--custom_module", str(Path(__file__).resolve().parents[1] / "support" / "gym_point.py")]
SUITE = [*MODULE, "--task_suite_name", "gym:rlvla/PointOfPixels-v0", "--cameras", "observation", "--image_size", "16"]
RUN = [
    *("--num_episodes", "8", "--random_episodes", "4", "--rollout_batch_size", "4", "--train_batch_size", "16"),
    *("--num_envs", "1", "--eval_episodes", "2", "--no-val_before_train", "--no-use_tensorboard"),
    *("--hidden_sizes", "16", "--reward", "env", "--utd_ratio", "0.2"),
]


def test_a_policy_learns_from_images_of_the_observation(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Videos show what it sees; the camera is recorded, and no other one is taken for it."""
    train([*SUITE, *RUN, "--read_images", "--save_path", str(tmp_path / "run")])
    policy = tmp_path / "run" / "policy"
    record = json.loads((policy / "rlvla_environment.json").read_text())
    assert (record["cameras"], record["use_proprio"]) == (["observation"], False)
    played = ["--pretrain", str(policy), *MODULE, "--num_envs", "1", "--eval_episodes", "2", "--num_videos", "1"]
    evaluate([*played, "--output", str(tmp_path / "eval.json")])
    assert json.loads((tmp_path / "eval.json").read_text())["results"][0]["success_at_end"]["n"] == 2
    assert list(tmp_path.rglob("*.mp4"))
    capsys.readouterr()
    with pytest.raises(SystemExit):
        evaluate([*played, "--task_suite_name", "gym:rlvla/Point-v0", "--output", str(tmp_path / "other.json")])
    assert "unknown camera(s) observation; known cameras: render, pixels" in " ".join(capsys.readouterr().err.split())


def test_a_suite_without_state_needs_a_policy_that_reads_images(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        train([*SUITE, *RUN, "--save_path", str(tmp_path / "run")])
    errors = " ".join(capsys.readouterr().err.split())
    assert "has no proprio, which the policy reads without --read_images; give --read_images" in errors
    assert "use_proprio" not in errors and not (tmp_path / "run").exists()


def test_where_nothing_is_drawn_a_policy_of_the_state_learns_and_is_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """As if there were no cameras; only videos would need them."""
    train([*MODULE, "--task_suite_name", "gym:rlvla/PointUnseen-v0", *RUN, "--save_path", str(tmp_path / "run")])
    played = ["--pretrain", str(tmp_path / "run" / "policy"), *MODULE, "--num_envs", "1", "--eval_episodes", "2"]
    evaluate([*played, "--output", str(tmp_path / "eval.json")])
    assert json.loads((tmp_path / "eval.json").read_text())["results"][0]["success_at_end"]["n"] == 2
    for more, says in ((["--num_videos", "1"], "does not render with"), (["--images", "none"], "reads no images")):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            evaluate([*played, *more, "--output", str(tmp_path / "other.json")])
        assert says in " ".join(capsys.readouterr().err.split())
