"""One task of Meta-World from demonstrations to PPO, and perturbations in training, resume and evaluation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cli.collect_demos import main as collect_demos
from cli.eval_vla import main as eval_vla
from cli.train_ppo_vla import main as train_ppo
from cli.train_sac_vla import main as train_sac
from cli.train_sft_vla import main as train_sft
from rlvla.utils.files import read_metrics

SEEN = ["camera=0.5", "light=0.5", "texture=0.5", "distractor=3"]


def words(*argv: object) -> list[str]:
    return [str(word) for word in argv]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy after three supervised steps."""
    pytest.importorskip("metaworld")
    folder = tmp_path_factory.mktemp("metaworld")
    recorded = ["--task_names", "reach", "--cameras", "sideview", "--image_size", 32, "--use_proprio", "--num_envs", 1]
    collect_demos(words("--task_suite_name", "metaworld", *recorded, "--num_demos", 2, "--output", folder / "demos"))
    small = ["--pretrain", "compact", "--compact_head", "gaussian", "--compact_width", 32, "--max_steps", 3]
    train_sft(words("--demos", folder / "demos", *small, "--no-use_tensorboard", "--save_path", folder / "sft"))
    return folder / "sft" / "policy"


@pytest.mark.nightly
def test_training_under_perturbations_is_resumed_under_the_same(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    given = ["--pretrain", start, "--save_path", tmp_path / "ppo", "--no-use_tensorboard", "--eval_steps", 0]
    given += ["--num_envs", 1, "--rollout_batch_size", 4, "--n_samples_per_prompt", 1, "--train_batch_size", 4]
    given += ["--no-val_before_train", "--no-check_start", "--save_steps", 1, "--num_episodes", 8, "--max_steps", 10]
    train_ppo(words(*given, "--perturb", *SEEN, "--num_episodes", 4))
    with pytest.raises(SystemExit):
        train_ppo(words(*given, "--perturb", "light=1", "--load_checkpoint"))
    assert "--perturb" in capsys.readouterr().err
    train_ppo(words(*given, "--perturb", *SEEN, "--load_checkpoint"))
    record = json.loads((tmp_path / "ppo" / "policy" / "rlvla_environment.json").read_text())
    assert record["perturb"] == SEEN and record["task_suite_name"] == "metaworld"
    assert read_metrics(tmp_path / "ppo")[-1]["total/episodes"] == 8


@pytest.mark.nightly
def test_each_perturbation_is_evaluated_from_the_same_states(start: Path, tmp_path: Path) -> None:
    output = tmp_path / "each.json"
    given = ["--pretrain", start, "--num_envs", 1, "--eval_episodes", 2, "--max_steps", 10, "--output", output]
    eval_vla(words(*given, "--perturb", *SEEN, "instruction=1", "initial_state=0.5", "--each_perturbation"))
    suites = json.loads(output.read_text())["suites"]
    assert list(suites) == [
        "metaworld",
        *(f"metaworld, {word}" for word in [*SEEN, "instruction=1", "initial_state=0.5"]),
    ]
    played = [[(e["task_id"], e["init_state_id"]) for e in s["results"][0]["episodes"]] for s in suites.values()]
    assert len(played[0]) == 2 and all(states == played[0] for states in played)


def test_a_task_that_was_not_learned_from_stands_apart(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    output = tmp_path / "two.json"
    given = ["--pretrain", start, "--num_envs", 1, "--eval_episodes", 2, "--max_steps", 10, "--output", output]
    eval_vla(words(*given, "--task_names", "reach", "push"))
    (result,) = json.loads(output.read_text())["results"]
    (push,) = (task["task_id"] for task in result["tasks"] if task["name"] == "push")
    assert result["unseen_tasks"] == [push]
    printed = capsys.readouterr().out
    assert "seen tasks (1)" in printed and "unseen tasks (1)" in printed


def test_demonstrations_of_heldout_tasks_are_not_mixed_in(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    demos = start.parents[1] / "demos" / "demos.hdf5"
    other = shutil.copytree(start, tmp_path / "other")
    record = json.loads((other / "rlvla_environment.json").read_text())
    (other / "rlvla_environment.json").write_text(json.dumps(record | {"learned_from": []}))
    mixed = {
        train_ppo: ["--pretrain", other, "--ptx_coef", 0.1, "--ptx_demos", demos],
        train_sac: ["--task_suite_name", "metaworld", "--cameras", "sideview", "--image_size", 32, "--demos", demos],
    }
    for main, given in mixed.items():
        with pytest.raises(SystemExit):
            main(words(*given, "--task_names", "push", "--heldout_tasks", "reach", "--save_path", tmp_path / "run"))
        assert f"--heldout_tasks: {demos} was trained on reach" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
