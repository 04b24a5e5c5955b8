"""`--rollout_backend vllm` with vLLM itself, in its own environment; skipped where that is absent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from cli.train_ppo_vla import build_parser
from rlvla.commands.ppo_flags import PPORun
from rlvla.commands.train_ppo import run_ppo
from rlvla.models.config import ActorConfig
from rlvla.rollout.testing import BackendContract
from rlvla.rollout.vllm.backend import VLLMBackend
from rlvla.rollout.vllm.process import ENGINE
from rlvla.utils.files import read_metrics
from tests.support.autoregressive import needs_vllm, write_autoregressive
from tests.support.launching import launch
from tests.support.processes import MARK, running, wait_for
from tests.support.watched import watching

pytestmark = [pytest.mark.slow, needs_vllm]
ROOT = Path(__file__).parents[2]


class TestVLLM(BackendContract):
    """Proprio, two cameras, prompts of several lengths, adapters on the decoder and on the towers."""

    backend_class = VLLMBackend
    config: ClassVar = ActorConfig(lora_rank=2, lora_targets=("all-linear",))
    setup_options: ClassVar = {"episodes": 4}  # fewer than are decided at once

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_autoregressive(tmp_path_factory.mktemp("autoregressive") / "policy")


@pytest.fixture(scope="module")
def policy(demos_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy_reach policy that decodes token by token, after a few supervised steps."""
    from cli.train_sft_vla import main

    folder = tmp_path_factory.mktemp("sft") / "run"
    sizes = ["--tiny_vision_dim", "16", "--tiny_llm_dim", "32", "--tiny_llm_layers", "1", "--action_chunk_len", "1"]
    given = ["--demos", str(demos_file), "--save_path", str(folder), "--max_epochs", "1", "--no-use_tensorboard"]
    main([*given, *sizes, "--model_variant", "autoregressive"])
    return folder / "policy"


CLOCKED = {"rollout/env_steps_per_s"}
FLAGS = [
    *("--rollout_batch_size", "2", "--n_samples_per_prompt", "2", "--train_batch_size", "4", "--num_envs", "2"),
    *("--advantage_estimator", "grpo", "--actor_learning_rate", "3e-3", "--entropy_loss_coef", "0.1"),
    *("--max_steps", "6", "--eval_episodes", "2", "--no-check_start", "--no-val_before_train"),
    *("--deterministic_rollout", "--no-use_tensorboard"),
]


def trains_alike(ours: Path, theirs: Path, iterations: int) -> None:
    """Our own decoding and vLLM gave the same episodes; rollout and training agree on what was played."""
    own, vllm = read_metrics(ours), read_metrics(theirs)
    assert len(own) == len(vllm) == iterations
    for before, after in zip(own, vllm):
        assert before.keys() <= after.keys()
        compared = {name for name in before if name.startswith(("rollout/", "reward/", "actor/", "eval/"))} - CLOCKED
        assert {name: after[name] for name in compared} == pytest.approx({n: before[n] for n in compared}, abs=1e-4)
        assert after["rollout_corr/probs_diff_max"] < 1e-4 and abs(after["rollout_corr/kl"]) < 1e-5
        assert after["rollout_corr/ess"] == pytest.approx(1, abs=1e-5)


def test_a_run_trains_as_with_its_own_decoding(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, str(tmp_path))
    for name in ("colocated", "vllm"):
        given = ["--pretrain", str(policy), "--save_path", str(tmp_path / name), "--num_episodes", "12", *FLAGS]
        assert run_ppo(PPORun.from_namespace(build_parser().parse_args([*given, "--rollout_backend", name])))
    trains_alike(tmp_path / "colocated", tmp_path / "vllm", iterations=3)
    assert (tmp_path / "vllm" / "vllm_0.log").stat().st_size
    assert not running(str(ENGINE), str(tmp_path)), "the program ends with the run"


def test_each_of_two_ranks_has_its_program(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights that are sharded between the ranks, and adapters that are merged on the way."""
    monkeypatch.setenv(MARK, str(tmp_path))
    sequence = []
    for stage, *more in (("2",), ("3", "--lora_rank", "2")):
        for name in ("colocated", "vllm"):
            folder = tmp_path / f"{name} {stage}"
            given = ["ppo", "--pretrain", str(policy), "--save_path", str(folder), "--num_episodes", "16", *FLAGS]
            given += ["--rollout_batch_size", "4", "--zero_stage", stage, "--rollout_backend", name, *more]
            sequence.append(given)
    (tmp_path / "sequence.json").write_text(json.dumps(sequence))
    launch("tests/support/runs_in_sequence.py", tmp_path / "sequence.json")
    for stage in (2, 3):
        trains_alike(tmp_path / f"colocated {stage}", tmp_path / f"vllm {stage}", iterations=2)
        assert all((tmp_path / f"vllm {stage}" / f"vllm_{rank}.log").stat().st_size for rank in (0, 1))
    assert not running(str(ENGINE), str(tmp_path))


def test_it_plays_ahead_with_weights_that_change_within_episodes(policy: Path, tmp_path: Path) -> None:
    """Decisions are older than the policy in training, and still decided with the weights that they are said to be."""
    given = ["--pretrain", str(policy), "--save_path", str(tmp_path / "run"), "--num_episodes", "24", *FLAGS]
    given = [flag for flag in given if flag != "--deterministic_rollout"]
    asked = ["--rollout_backend", "vllm", "--async_rollout", "--partial_rollout"]
    with watching() as seen:
        assert run_ppo(PPORun.from_namespace(build_parser().parse_args([*given, *asked])))
    assert len(seen.iterations) == len(read_metrics(tmp_path / "run")) == 6
    samples = [(k, sample) for k, played in seen.iterations.items() for sample in played]
    ages = {k - int(version) for k, sample in samples for version in sample.versions.tolist()}
    assert 1 in ages and ages <= {0, 1}
    assert max(seen.deviation(sample) for _, sample in samples) < 1e-4


@pytest.mark.parametrize("when", ["starting", "playing"])
def test_the_program_ends_with_a_killed_run(policy: Path, tmp_path: Path, when: str) -> None:
    command = [sys.executable, "cli/train_ppo_vla.py", "--pretrain", str(policy), "--save_path", str(tmp_path / "run")]
    command += [*FLAGS, "--num_episodes", "40000", "--rollout_backend", "vllm"]
    mark = str(tmp_path)

    def programs() -> set[int]:
        return running(str(ENGINE), mark)

    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, MARK: mark}) as run:
        try:
            assert wait_for(lambda: bool(programs()))
            if when == "playing":
                metrics = tmp_path / "run" / "metrics.jsonl"
                assert wait_for(metrics.exists)
        finally:
            run.send_signal(signal.SIGKILL)
    assert wait_for(lambda: not programs())
