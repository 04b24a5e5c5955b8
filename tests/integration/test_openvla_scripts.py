"""The launchers for published checkpoints: their flags parse, and say what was published."""

from __future__ import annotations

import json
import re
import shlex
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from cli.train_ppo_vla import build_parser, main
from rlvla.data.demonstrations import statistics
from rlvla.models.vla.tiny import build_tiny

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "scripts"
LIBERO = SCRIPTS / "train_grpo_openvla_oft_libero.sh"
SINGLE = SCRIPTS / "train_grpo_openvla_oft_libero_single_gpu.sh"


def flags(script: Path) -> list[str]:
    """What a script hands to the command, with the defaults of its variables."""
    text = script.read_text(encoding="utf-8").replace("\\\n", " ")
    line = next(line for line in text.splitlines() if '"$@"' in line)
    while re.search(r"\$\{\w+:[-?]", line):  # innermost first: a default may hold another variable
        line = re.sub(r"\$\{\w+:[-?]([^${}]*)\}", r"\1", line)
    words = shlex.split(line.split('"$@"')[0])
    return words[next(i for i, word in enumerate(words) if word.startswith("--")) :]


def parsed(*scripts: Path) -> Namespace:
    return build_parser().parse_args([word for script in scripts for word in flags(script)])


def values(args: Namespace) -> dict[str, object]:
    """A default of several values is a tuple, one from the command line a list."""
    flags = {name: value for name, value in vars(args).items() if name != "given"}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flags.items()}


def documented() -> Namespace:
    """The command of the page about the set-up."""
    text = (SCRIPTS.parents[1] / "docs" / "simplevla_rl.md").read_text(encoding="utf-8").replace("\\\n", " ")
    line = next(line for line in text.splitlines() if "train_ppo_vla.py" in line and line.startswith("deepspeed"))
    words = shlex.split(line)
    return build_parser().parse_args(words[words.index("--pretrain") :])


@pytest.mark.parametrize("source", ["script", "page"])
def test_published_set_up(source: str) -> None:
    args = parsed(LIBERO) if source == "script" else documented()
    published = {
        "rollout_batch_size": 64,
        "n_samples_per_prompt": 8,
        "temperature": 1.6,
        "train_batch_size": 128,
        "max_epochs": 1,
        "actor_learning_rate": 5e-6,
        "lr_scheduler": "constant",
        "adam_betas": [0.9, 0.999],
        "l2": 0.01,
        "max_norm": 1.0,
        "eps_clip_low_high": [0.2, 0.28],
        "init_kl_coef": 0.0,
        "entropy_loss_coef": 0.0,
        "filter_accuracy": True,
        "accuracy_lower_bound": 0.1,
        "accuracy_upper_bound": 0.9,
        "reward_coef": 5.0,
        "reward": ["success:1.0"],
        "loss_agg_mode": "traj-mean-token-mean",
        "max_steps": 512,
        "platform": "libero",
        "advantage_estimator": "grpo",
        "norm_adv_by_std": True,
    }
    assert {name: values(args)[name] for name in published} == published
    optimizer_steps = args.rollout_batch_size * args.n_samples_per_prompt / args.train_batch_size
    assert optimizer_steps == 4


def test_script_and_page_agree() -> None:
    script, page = values(parsed(LIBERO)), values(documented())
    differing = {name for name in script if script[name] != page[name]}
    # Which suite is a variable of the script; what a checkpoint tells by itself and how often one saves is spelled out.
    assert differing <= {"pretrain", "save_path", "task_suite_name", "unnorm_key"} | {
        "model_variant",
        "num_images_in_input",
        "save_steps",
    }


@pytest.mark.parametrize("scripts", [(LIBERO,), (LIBERO, SINGLE)], ids=["8 ranks", "one GPU"])
def test_flags_can_be_run(
    scripts: tuple[Path, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A dry run checks every flag against a checkpoint of that kind, the suite and the number of ranks."""
    pytest.importorskip("libero", reason="the tasks of the suite are listed by LIBERO")
    entry = statistics(np.random.default_rng(0).uniform(-1, 1, (50, 7)), [6])
    build_tiny(
        tmp_path / "policy",
        sentences=["put it there"],
        dataset_statistics={"libero_10": {"action": entry, "num_transitions": 50, "num_trajectories": 1}},
        image_size=64,
        patch_size=32,
        vision_dim=16,
        vision_depth=2,
        llm_dim=32,
        llm_layers=1,
        action_chunk_len=8,
        action_dim=7,
        num_images_in_input=1,
        center_crop=True,
    )
    config = tmp_path / "policy" / "config.json"  # of a published one: it does not tell how it acts
    untold = {"model_variant", "action_chunk_len", "image_preprocessing", "action_normalization", "gripper_convention"}
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k not in untold}))
    if len(scripts) == 1:
        monkeypatch.setenv("WORLD_SIZE", "8")
    words = [word for script in scripts for word in flags(script)]
    main([*words, "--pretrain", str(tmp_path / "policy"), "--save_path", str(tmp_path / "run"), "--dry_run"])
    told = capsys.readouterr().out
    assert "optimizer steps" in told and not (tmp_path / "run").exists()


def test_single_gpu_trains_adapters() -> None:
    args = parsed(LIBERO, SINGLE)
    assert args.lora_rank == 32 and args.lora_targets == ["all-linear"] and args.zero_stage == 0
    assert (args.rollout_batch_size * args.n_samples_per_prompt) % args.train_batch_size == 0
    assert args.temperature == 1.6 and args.filter_accuracy


@pytest.mark.parametrize("script", [LIBERO, SINGLE], ids=lambda path: path.name)
def test_ranks(script: Path) -> None:
    assert ("RANKS=1" if script == SINGLE else 'RANKS="${RANKS:-8}"') in script.read_text(encoding="utf-8")
