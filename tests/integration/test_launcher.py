"""Runs on two ranks, and what is left of one under the deepspeed launcher that is stopped or killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli.train_sft_vla import main as sft
from rlvla.checkpoints.training import list_checkpoints
from rlvla.models.actor import Actor
from rlvla.utils.files import read_metrics
from tests.support.launching import (
    LAUNCHER,
    PPO_FLAGS,
    PPO_SCRIPT,
    ROOT,
    environment,
    free_port,
    launch,
    launch_command,
)
from tests.support.processes import MARK, running, wait_for

pytestmark = pytest.mark.slow

SFT_FLAGS = [
    *("--tiny_vision_dim", "16", "--tiny_llm_dim", "32", "--tiny_llm_layers", "1", "--action_chunk_len", "4"),
    *("--max_epochs", "1", "--no-use_tensorboard", "--learning_rate", "3e-4"),
]
NIGHTLY = ("zero2", "zero3 lora")
GRPO_FLAGS = [
    *("--advantage_estimator", "grpo", "--n_samples_per_prompt", "2", "--rollout_batch_size", "4"),
    *("--init_kl_coef", "0.1", "--policy_loss", "test_double_ppo"),
]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def change(after: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([(after[name] - before[name]).flatten() for name in sorted(before)])


@pytest.fixture(scope="module")
def runs(
    policy_folder: Path, demos_file: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Path:
    """All runs on two ranks that end by themselves: SFT, GRPO, and GAE under ZeRO 0 and 3 (1: test_exact_resume.py).

    One plays episodes ahead. ZeRO 2 and adapters only with --nightly.

    The run of stage 3 is also stopped after one iteration and continued. What was printed is in `printed`.
    """
    folder = tmp_path_factory.mktemp("two_ranks")

    def ppo(name: str, *flags: str) -> list[str]:
        return ["ppo", "--pretrain", str(policy_folder), "--save_path", str(folder / name), *PPO_FLAGS, *flags]

    stages = {f"zero{stage}": ["--zero_stage", str(stage)] for stage in (0, 2, 3)}
    stages["zero3 lora"] = ["--zero_stage", "3", "--lora_rank", "4", "--actor_learning_rate", "1e-2"]
    stages["zero3 ahead"] = ["--zero_stage", "3", "--async_rollout"]
    # A ZeRO-3 engine replaces torch's linear function for the rest of the process, which moves last bits: last of all.
    order = ["zero0", "zero2", "zero3", "zero3 parts", "zero3 lora", "zero3 ahead"]
    if not pytestconfig.getoption("--nightly"):
        order = [name for name in order if name not in NIGHTLY]
    sequence = [
        ["sft", *SFT_FLAGS, "--demos", str(demos_file), "--save_path", str(folder / "sft")],
        ppo("grpo", *GRPO_FLAGS, "--custom_module", str(ROOT / "tests" / "support" / "own_algorithm.py")),
    ]
    for name in order:
        flags = stages[name.removesuffix(" parts")]
        if name.endswith("parts"):
            sequence += [ppo(name, *flags, "--num_episodes", "8"), ppo(name, *flags, "--load_checkpoint")]
        else:
            sequence.append(ppo(name, *flags))
    (folder / "sequence.json").write_text(json.dumps(sequence))
    (folder / "printed").write_text(launch("tests/support/runs_in_sequence.py", folder / "sequence.json"))
    return folder


def test_sft_on_two_ranks_gives_the_weights_of_one(runs: Path, demos_file: Path, tmp_path: Path) -> None:
    sft([*SFT_FLAGS, "--demos", str(demos_file), "--save_path", str(tmp_path)])
    one, two, start = (weights(folder) for folder in (tmp_path / "policy", runs / "sft/policy", tmp_path / "start"))
    assert float(change(one, start).abs().max()) > 1e-4
    assert float(change(two, one).abs().max()) < 1e-5
    losses = [[r["sft/loss"] for r in read_metrics(folder)] for folder in (tmp_path, runs / "sft")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    Actor.from_pretrained(runs / "sft" / "policy")


def test_grpo_with_an_own_loss_on_two_ranks(runs: Path) -> None:
    """Groups stay on one rank, every rank has the custom module, figures are those of all ranks, printed once."""
    printed, many = (runs / "printed").read_text(), len(list(runs.glob("*/evaluations.json")))
    assert printed.count("next: python cli/eval_vla.py") == many + 2, "SFT, and the run that was stopped"
    assert printed.count("iteration 1/2:") == many - 1 and printed.count("iteration 2/2:") == many
    records = [r for r in read_metrics(runs / "grpo") if "rollout/success_at_end" in r]
    assert [r["total/episodes"] for r in records] == [8, 16]
    assert all("actor/own" in r for r in records), "the metric of the loss in tests/support/own_algorithm.py"
    assert records[-1]["total/env_steps"] > 64, "eight steps of each of the episodes of both ranks"
    (evaluation,) = json.loads((runs / "grpo" / "evaluations.json").read_text())
    assert evaluation["success_at_end"]["n"] == 4
    Actor.from_pretrained(runs / "grpo" / "policy")


def test_playing_while_two_ranks_train_shared_out_weights(runs: Path, policy_folder: Path) -> None:
    """Each rank has a whole copy of them, which plays the second iteration; the first is that of any other run."""
    records = [r for r in read_metrics(runs / "zero3 ahead") if "critic/vf_loss" in r]
    assert [r["async/staleness_max"] for r in records] == [0, 1]
    plain = [r for r in read_metrics(runs / "zero3") if "critic/vf_loss" in r]
    assert records[0]["actor/pg_loss"] == pytest.approx(plain[0]["actor/pg_loss"], abs=1e-4)
    assert float(change(weights(runs / "zero3 ahead" / "policy"), weights(policy_folder)).abs().max()) > 5e-4


@pytest.mark.parametrize(
    "name", ["zero0", "zero3", *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)]
)
def test_zero_stages_train_and_export(runs: Path, policy_folder: Path, name: str) -> None:
    after, start = weights(runs / name / "policy"), weights(policy_folder)
    moved = change(after, start)
    assert torch.isfinite(moved).all() and float(moved.abs().max()) > 5e-4
    if "lora" not in name:
        plain = change(weights(runs / "zero0" / "policy"), start)
        assert float(torch.cosine_similarity(moved, plain, dim=0)) > 0.999, "the stages are one algorithm"
    records = [r for r in read_metrics(runs / name) if "critic/vf_loss" in r]
    assert len(records) == 2 and all(r["actor/grad_norm"] > 0 for r in records)
    assert sum(r["rollout/env_steps"] for r in records) == records[-1]["total/env_steps"]
    Actor.from_pretrained(runs / name / "policy")


def test_continuing_on_two_ranks(runs: Path) -> None:
    """With a critic under ZeRO-3; other stages and adapters are in tests/integration/test_exact_resume.py."""
    whole, parts = (weights(runs / name / "policy") for name in ("zero3", "zero3 parts"))
    assert float(change(parts, whole).abs().max()) == 0.0
    newest = list_checkpoints(runs / "zero3 parts" / "checkpoints")[-1]
    assert {p.name for p in newest.glob("rank*")} == {"rank0.pt", "rank1.pt"}


# --------------------------------------------------------------------------------------- killed runs
def start(command: list[str], log: Path) -> subprocess.Popen:
    """Start in a session of its own, printing to the file."""
    with log.open("w") as file:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment() | {MARK: str(log.parent)},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def test_asked_to_stop_then_continued_as_printed_then_killed(policy_folder: Path, tmp_path: Path) -> None:
    """Asked to stop, a run saves and says how to go on; that command goes on; a kill leaves no process behind."""
    flags = ["--pretrain", policy_folder, *PPO_FLAGS, "--num_episodes", 80_000, "--save_path", tmp_path / "run"]
    flags += ["--num_envs", 2]
    log, second = tmp_path / "log", tmp_path / "second"
    process = start(launch_command(PPO_SCRIPT, *flags), log)
    try:
        assert wait_for(lambda: "iteration 2/" in log.read_text()), log.read_text()
        os.killpg(process.pid, signal.SIGTERM)  # as a terminal or a batch system does: every process of the job
        status = process.wait(300)
        assert wait_for(lambda: not running("", str(tmp_path))), running("", str(tmp_path))
        assert status != 0
        text = log.read_text()
        iteration = saved_and_said(text, tmp_path / "run")
        (words,) = [line.split(": ")[1].split() for line in text.splitlines() if line.startswith("continue with: ")]
        assert words[-1] == "--load_checkpoint" and words[0] == "deepspeed"
        process = start([LAUNCHER, "--master_port", free_port(), *words[1:]], second)
        assert wait_for(lambda: f"iteration {iteration + 1}/" in second.read_text()), second.read_text()
        assert f"continuing after iteration {iteration} of 10000" in second.read_text()
        dies_with_one_rank(process, 2, str(tmp_path))
        assert second.read_text().count("is gone: its connection broke; the newest checkpoint is") == 1
        assert "Traceback" not in second.read_text()
    finally:
        end(str(tmp_path))


def end(mark: str) -> None:
    """SIGKILL whatever is left of a test."""
    for pid in running("", mark):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.nightly
def test_a_killed_launcher_then_a_frozen_rank(policy_folder: Path, tmp_path: Path) -> None:
    """Without its launcher a run saves and ends; with a frozen rank it ends and names the newest checkpoint."""
    flags = ["--pretrain", policy_folder, *PPO_FLAGS, "--num_episodes", 80_000, "--save_path", tmp_path / "run"]
    log, second = tmp_path / "log", tmp_path / "second"
    process = start(launch_command(PPO_SCRIPT, *flags), log)
    try:
        assert wait_for(lambda: "iteration 2/" in log.read_text()), log.read_text()
        process.kill()
        assert wait_for(lambda: not running("", str(tmp_path))), running("", str(tmp_path))
        text = log.read_text()
        iteration = saved_and_said(text, tmp_path / "run")
        assert text.count("the launcher has ended: stopping") == 1 and text.count("continue with: deepspeed") == 1
        process.wait()
        process = start(launch_command(PPO_SCRIPT, *flags, "--load_checkpoint", "--rank_timeout", 30), second)
        assert wait_for(lambda: f"iteration {iteration + 1}/" in second.read_text()), second.read_text()
        (frozen,) = (pid for pid in trainers_of(process) if "--local_rank=1" in words_of(pid))
        os.kill(frozen, signal.SIGSTOP)
        assert wait_for(lambda: trainers_of(process) == {frozen}), second.read_text()
        os.kill(frozen, signal.SIGKILL)  # as the launcher does half a minute later
        assert process.wait(300) != 0
        assert wait_for(lambda: not running("", str(tmp_path))), running("", str(tmp_path))
        text = second.read_text()
        reason = "rank 1 is gone: no sign of life for 30 s (--rank_timeout); the newest checkpoint is"
        assert text.count(reason) == 1 and "Traceback" not in text
        assert f"iteration_{iteration:06d}; continue with: deepspeed" in text
    finally:
        end(str(tmp_path))


def saved_and_said(text: str, folder: Path) -> int:
    """The iteration whose checkpoint was written, as was printed, once and without a traceback."""
    (checkpoint,) = list_checkpoints(folder / "checkpoints")
    iteration = int(checkpoint.name.split("_")[1])
    assert "Traceback" not in text
    assert text.count(f"stopped after iteration {iteration} of 10000; the checkpoint is in") == 1
    return iteration


def dies_with_one_rank(process: subprocess.Popen, ranks: int, mark: str) -> None:
    """SIGKILL of one training process: its workers end with it, and the launcher ends the other rank."""
    assert len(running("rlvla.envs.workers.worker", mark)) == 2 * ranks
    trainers = trainers_of(process)
    assert len(trainers) == ranks
    os.kill(min(trainers), signal.SIGKILL)
    assert process.wait(300) != 0
    assert wait_for(lambda: not running("", mark)), running("", mark)


def trainers_of(launcher: subprocess.Popen) -> set[int]:
    """The processes that run the script themselves (and do not merely name it, as the launcher does)."""
    return {pid for pid in running(PPO_SCRIPT, launcher.pid) if PPO_SCRIPT in words_of(pid)[1:3]}


def words_of(pid: int) -> list[str]:
    """The command line of a process; [] if it has just ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return []
