"""Options of plug-ins are flags: shown, checked, refused where nothing reads them, recorded, resumed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from cli.train_ppo_vla import main as train
from cli.train_sac_vla import main as train_sac
from cli.train_sft_vla import main as train_sft
from rlvla.algorithms.advantages import ADVANTAGE_ESTIMATORS
from rlvla.algorithms.curricula import TASK_SAMPLINGS
from rlvla.algorithms.policy_losses import POLICY_LOSSES
from rlvla.checkpoints.run_folder import RUN_FILE
from rlvla.models.compact.config import HEADS
from rlvla.rewards.base import REWARDS
from rlvla.trainer.algorithm_config import LEARNERS
from rlvla.utils.files import read_metrics

PLUGINS = Path(__file__).resolve().parents[2] / "examples" / "plugins"
MODULES = [word for path in sorted(PLUGINS.glob("*.py")) for word in ("--custom_module", str(path))]
RUN = [
    *MODULES,
    *("--task_suite_name", "toy_reach", "--max_steps", "24", "--temperature", "1.5", "--num_envs", "2"),
    *("--num_episodes", "16", "--rollout_batch_size", "2", "--n_samples_per_prompt", "4", "--train_batch_size", "4"),
    *("--eval_episodes", "2", "--no-val_before_train", "--no-use_tensorboard", "--deterministic_rollout"),
    *("--reward", "env_progress", "hurry", "--hurry_cost", "0.5", "--hurry_free_steps", "20", "--no-check_start"),
]
PPO = ["--advantage_estimator", "clipped_group", "--policy_loss", "anchored"]
SAC = [
    *MODULES,
    *("--task_suite_name", "toy_push", "--task_names", "red_to_green", "blue_to_yellow", "--use_proprio"),
    *("--max_steps", "12", "--action_chunk_len", "3", "--hidden_sizes", "16", "--num_envs", "1"),
    *("--rollout_batch_size", "4", "--random_episodes", "4", "--train_batch_size", "16", "--eval_episodes", "2"),
    *("--no-val_before_train", "--no-use_tensorboard", "--deterministic_rollout"),
]
OPTIONS = ["--group_scale", "0.5", "--group_clip", "0.25", "--anchor_up", "2", "--anchor_down", "3"]


@pytest.fixture(autouse=True)
def own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test loads the plug-ins, and what they register is gone after it."""
    for name in [name for name in sys.modules if name.startswith("rlvla_custom_")]:
        monkeypatch.delitem(sys.modules, name)
    for registry in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES, LEARNERS, REWARDS, TASK_SAMPLINGS, HEADS):
        for name in registry.names():
            registry.get(name)  # imports the module that registers it
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


def run(policy: Path, folder: Path, *more: str) -> list[dict[str, float]]:
    train(["--pretrain", str(policy), "--save_path", str(folder), *RUN, *more])
    return read_metrics(folder)


def run_sac(folder: Path, episodes: int, *more: str) -> None:
    train_sac([*SAC, "--save_path", str(folder), "--num_episodes", str(episodes), *more])


def refused(policy: Path, folder: Path, capsys: pytest.CaptureFixture, *more: str) -> str:
    with pytest.raises(SystemExit) as ended:
        run(policy, folder, *more)
    assert ended.value.code == 2 and not folder.exists()
    return capsys.readouterr().err


def test_an_estimator_a_loss_and_a_reward_with_options(policy_folder: Path, tmp_path: Path) -> None:
    records = run(policy_folder, tmp_path / "run", *PPO, *OPTIONS)
    updates = [record for record in records if "actor/pg_loss" in record]
    assert len(updates) == 2 and any(record["actor/anchor"] > 0 for record in updates)
    assert max(record["critic/advantages/max"] for record in updates) == pytest.approx(0.25), "--group_clip"
    steps = [record["reward/hurry_steps"] for record in updates]
    paid = [record["reward/hurry"] for record in updates]
    assert all(-0.5 * 4 <= reward <= 0 for reward in paid) and any(paid), "--hurry_free_steps 20 of 24"
    assert all(count <= 24 for count in steps)
    recorded = json.loads((tmp_path / "run" / RUN_FILE).read_text())
    assert recorded["algorithm"]["anchor_up"] == 2 and recorded["rewards"]["hurry_cost"] == 0.5
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["group_clip"] == 0.25


def test_a_resumed_run_keeps_its_options(policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run(policy_folder, tmp_path / "whole", *PPO, *OPTIONS)
    run(policy_folder, tmp_path / "halves", *PPO, *OPTIONS, "--num_episodes", "8")
    with pytest.raises(SystemExit):
        run(policy_folder, tmp_path / "halves", *PPO, *OPTIONS, "--anchor_up", "1", "--load_checkpoint")
    assert "--anchor_up 1.0: the run in" in capsys.readouterr().err
    run(policy_folder, tmp_path / "halves", *PPO, *OPTIONS, "--load_checkpoint")
    whole, halves = (load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("whole", "halves"))
    assert all(torch.equal(whole[name], halves[name]) for name in whole)


def test_a_learner_with_options(policy_folder: Path, tmp_path: Path) -> None:
    flags = ["--algorithm", "filtered_bc", "--bc_steps", "3", "--bc_threshold", "-5"]
    updates = [record for record in run(policy_folder, tmp_path / "run", *flags) if "actor/kept" in record]
    assert updates[-1]["actor/kept"] == 16, "all scores are above -5"


def test_a_curriculum_with_options(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    flags = ["--task_sampling", "frontier", "--frontier_width", "0.05", "--save_steps", "1"]
    run_sac(tmp_path / "run", 8, *flags)
    recorded = json.loads((tmp_path / "run" / RUN_FILE).read_text())
    assert recorded["batch"]["frontier_width"] == 0.05
    assert recorded["batch"].pop("frontier_success") == 0.5, "a run from before this option can be resumed"
    recorded["replay"]["her_goal"] = "final"  # which nothing reads without --her_ratio
    (tmp_path / "run" / RUN_FILE).write_text(json.dumps(recorded))
    with pytest.raises(SystemExit):
        run_sac(tmp_path / "run", 12, *flags, "--frontier_width", "0.1", "--load_checkpoint")
    assert "--frontier_width 0.1: the run in" in capsys.readouterr().err
    run_sac(tmp_path / "run", 12, *flags, "--load_checkpoint")
    state = json.loads((tmp_path / "run" / "checkpoints" / "iteration_000003" / "trainer.json").read_text())
    assert sum(state["task_sampler"]["episodes"]) == 12


def test_a_head_with_options(demos_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    sft = [*MODULES, "--demos", str(demos_file), "--save_path", str(tmp_path / "sft"), "--pretrain", "compact"]
    sft += ["--compact_channels", "8", "8", "--compact_width", "32", "--max_epochs", "1", "--no-use_tensorboard"]
    sft += ["--action_chunk_len", "4", "--mean_bound", "0.5"]
    head = ["--compact_head", "bounded_gaussian"]
    for more, words in (
        ([], ("--mean_bound 0.5", "--compact_head tokens does not use it")),
        ([*head, "--constant_std", "0"], ("--constant_std 0.0", "greater than 0")),
    ):
        with pytest.raises(SystemExit):
            train_sft([*sft, *more])
        message = " ".join(capsys.readouterr().err.split())
        assert all(word in message for word in words), message
    train_sft([*sft, *head])
    policy = tmp_path / "sft" / "policy"
    config = json.loads((policy / "config.json").read_text())
    assert config["head_options"] == {"mean_bound": 0.5, "constant_std": 0.1}
    assert yaml.safe_load((tmp_path / "sft" / "config.yaml").read_text())["mean_bound"] == 0.5
    assert all("actor/pg_loss" in record for record in run(policy, tmp_path / "rl")[:-1])
    again = json.loads((tmp_path / "rl" / "policy" / "config.json").read_text())
    assert again == config
    for wrong in ("wide", -1.0):
        (policy / "config.json").write_text(json.dumps(config | {"head_options": {"mean_bound": wrong}}))
        assert "mean_bound" in refused(policy, tmp_path / "none", capsys)
    (policy / "config.json").write_text(json.dumps(config | {"action_head": "unheard_of"}))
    assert "bounded_gaussian" in refused(policy, tmp_path / "none", capsys)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--anchor_up", "2"], ("--anchor_up 2.0", "--policy_loss ppo does not use it")),
        (["--group_clip", "1"], ("--group_clip 1.0", "--advantage_estimator gae does not use it")),
        (["--bc_steps", "3"], ("--bc_steps 3", "--algorithm ppo does not use it")),
        (["--reward", "success", "--hurry_free_steps", "3"], ("--hurry_free_steps 3", "no hurry in --reward")),
        (["--frontier_width", "0.3"], ("--frontier_width 0.3", "--task_sampling uniform does not use it")),
        (["--task_sampling", "frontier", "--frontier_success", "2"], ("--frontier_success 2.0", "at most 1")),
        ([*PPO, "--group_clip", "0"], ("--group_clip 0.0", "greater than 0")),
        (["--hurry_free_steps", "-1"], ("--hurry_free_steps -1", "at least 0")),
        (["--algorithm", "filtered_bc", "--bc_steps", "0"], ("--bc_steps 0", "at least 1")),
    ],
)
def test_what_nothing_reads_or_is_out_of_range(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, flags: list[str], words: tuple[str, ...]
) -> None:
    message = refused(policy_folder, tmp_path / "run", capsys, *flags)
    assert all(word in " ".join(message.split()) for word in words), message


def test_help_shows_them_under_their_owners(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        train([*MODULES, "--help", "all"])
    text = capsys.readouterr().out
    for title, flag in {
        "policy loss anchored": "--anchor_up",
        "advantage estimator clipped_group": "--group_scale",
        "algorithm filtered_bc": "--bc_threshold",
        "reward hurry": "--hurry_cost",
        "task sampling frontier": "--frontier_width",
    }.items():
        group = text.partition(f"\n{title}:")[2].partition("\n\n")[0]
        assert flag in group and "(default: " in group, title
