"""Runs over the noise of a flow policy through the command: resuming, evaluation of the result, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli.eval_vla import main as evaluate
from cli.inspect_vla import main as inspect
from cli.train_ppo_vla import main as reinforce
from cli.train_sac_vla import main as train
from rlvla.models.compact.config import CompactConfig
from rlvla.models.compact.family import build_compact
from tests.support.flow_folders import TWO, write_flow

SMALL = [
    *("--task_suite_name", "toy_reach", "--image_size", "16", "--use_proprio", "--max_steps", "8", "--num_envs", "1"),
    *("--deterministic_rollout", "--hidden_sizes", "16", "--train_batch_size", "16", "--rollout_batch_size", "4"),
    *("--random_episodes", "4", "--eval_episodes", "2", "--no-val_before_train", "--no-use_tensorboard"),
    *("--utd_ratio", "1", "--n_critics", "3", "--actor_learning_rate", "1e-2", "--policy", "dsrl"),
]
JUDGED = [
    *("--reward", "success", "rm:1", "--replay_priority", "hybrid", "--replay_score_source", "rm", "--n_step", "2"),
    *("--replay_refresh_interval", "5", "--repeat_noise", "--noise_range", "2", "--save_steps", "1"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_flow(tmp_path_factory.mktemp("flow") / "base")


def run(out: Path, base: Path, episodes: int, *more: str) -> Path:
    options = ["--pretrain", str(base), "--save_path", str(out), "--num_episodes", str(episodes)]
    train([*SMALL, *options, *more])
    return out / "policy"


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_resumes_to_the_bit_and_its_policy_is_evaluated(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    own = Path(shutil.copytree(base, tmp_path / "base"))
    policy = run(tmp_path / "whole", own, 16, *JUDGED, "--max_ckpt_num", "4")
    whole = load_file(policy / "model.safetensors")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    again = ("--load_checkpoint", "iteration_000002", *JUDGED, "--max_ckpt_num", "4")
    parts = load_file(run(tmp_path / "parts", own, 16, *again) / "model.safetensors")
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    last, same = metrics(tmp_path / "whole")[-2], metrics(tmp_path / "parts")[-2]
    names = [name for name in last if name.startswith(("actor/", "critic/", "replay/", "rollout/success"))]
    assert {name: last[name] for name in names} == {name: same[name] for name in names} and len(names) > 10
    assert last["critic/updates"] > 0 and last["replay/unjudged_share"] == 0
    assert {path.name: path.read_bytes() for path in own.iterdir()} == before, "the base stays as it is"
    record = json.loads((policy / "rlvla_environment.json").read_text())
    assert record["image_size"] == 16 and record["use_proprio"] and record["max_steps"] == 8

    capsys.readouterr()
    evaluate(["--pretrain", str(policy), "--eval_episodes", "3", "--num_envs", "1"])
    inspect(["--pretrain", str(policy)])
    assert f"{own} (compact)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        reinforce(["--pretrain", str(policy), "--save_path", str(tmp_path / "ppo"), "--advantage_estimator", "grpo"])
    assert "it is trained by train_sac_vla.py only" in " ".join(capsys.readouterr().err.split())
    weights = load_file(own / "model.safetensors")
    torch.save(weights, own / "more.pt")
    for command in (lambda: evaluate(["--pretrain", str(policy)]), lambda: run(tmp_path / "parts", own, 20, *again)):
        with pytest.raises(SystemExit):
            command()
        assert "more.pt" in " ".join(capsys.readouterr().err.split()), "neither evaluated nor resumed with another base"


REFUSED = {
    "nothing to steer": (["--pretrain", "none"], "--policy dsrl needs --pretrain"),
    "images": (["--read_images"], "sees what its flow policy sees"),
    "demonstrations": (["--demos", "nowhere"], "hold actions, not the noise"),
    "another policy": (["--policy", "gaussian"], "--policy is gaussian"),
    "chunk": (["--action_chunk_len", "3"], "--action_chunk_len 3"),
    "proprio": (["--no-use_proprio"], "--use_proprio"),
    "choice": (["--choice_exploration", "5"], "--policy is dsrl"),
    "capacity": (["--replay_capacity", "4"], "an episode takes up to 5 rows"),
    "range": (["--noise_range", "0"], "noise_range"),
    "primitives": (
        ["--task_suite_name", "robosuite", "--task_ids", "0", "--action_space", "primitives"],
        "the environment takes action primitives",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_before_anything_starts(
    case: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    options, words = REFUSED[case]
    with pytest.raises(SystemExit):
        run(tmp_path / "run", base, 8, *options)
    said = capsys.readouterr().err
    assert words in " ".join(said.split()) and said.count("\n  - ") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("head", ["tokens", "gaussian"])
def test_policies_without_noise_to_choose_are_refused(head: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = CompactConfig(16, 1, 2, 2, 2, head)
    other = build_compact(tmp_path / "other", config, {"toy_reach": {"action": TWO, "proprio": TWO}})
    with pytest.raises(SystemExit):
        run(tmp_path / "run", other, 8)
    assert "samples its actions directly" in " ".join(capsys.readouterr().err.split())
