"""PPO runs that are broken off and continued, on any number of ranks, with a record of what they held.

    [deepspeed --num_accelerators 2] tests/support/resume_cases.py PLAN

PLAN is a JSON list of {"argv": [...], "stop_after": iteration or null, "record": folder or null}. A record has
`whole.pt` (weights and moments of every engine, whole, learning rates, moving average, state of the trainer) and
`rank<N>.pt` (groups that wait). It is made where a run breaks off, or right after it was continued, before anything is
trained.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from cli.train_ppo_vla import build_parser
from rlvla.commands.ppo_flags import PPORun
from rlvla.commands.train_ppo import run_ppo
from rlvla.trainer.ppo_trainer import PPOTrainer
from rlvla.utils.deepspeed.engine import Engine

COMMON = [
    # 12 episodes are three iterations; a machine that pays for coming near gives every run a gradient
    *("--num_episodes", "12", "--rollout_batch_size", "4", "--train_batch_size", "2", "--max_epochs", "2"),
    *("--max_steps", "24", "--temperature", "1.5", "--reward", "success", "rm:0.5", "--rm_formula", "F(near)"),
    *("--actor_learning_rate", "1e-3", "--lr_scheduler", "linear", "--num_envs", "1", "--deterministic_rollout"),
    *("--eval_episodes", "2", "--no-val_before_train", "--no-use_tensorboard", "--save_steps", "1"),
]
PPO = [
    *("--init_kl_coef", "0.1", "--kl_target", "0.001", "--kl_horizon", "40", "--entropy_loss_coef", "0.01"),
    *("--ema_beta", "0.8", "--normalize_values", "--normalize_reward", "--desired_kl", "1e-5"),
]
GRPO = [
    *("--advantage_estimator", "grpo", "--n_samples_per_prompt", "2", "--rollout_batch_size", "2"),
    *("--filter_zero_variance", "--oversample_factor", "3", "--max_group_staleness", "3"),
]
LORA = ["--lora_rank", "4"]
# Sharded stages, PPO and GRPO, all weights and adapters, a critic of its own, a frozen reference. Without ranks: whole
# ones in tests/integration/test_checkpoints.py, a shared backbone in test_share_backbone.py.
CASES = {
    "ppo zero1 lora": [*PPO, "--zero_stage", "1", *LORA, "--critic_input", "state"],
    "grpo zero2 bf16": [*GRPO, "--zero_stage", "2", "--bf16"],
    # Last of all: its engine replaces torch's linear function for the rest of the process, which moves last bits.
    "grpo zero3": [*GRPO, "--zero_stage", "3", "--init_kl_coef", "0.1"],
}


# Those that also go on with another number of ranks: whole and sharded, all weights and adapters, both algorithms.
RESHARDED = ["ppo zero1 lora", "grpo zero3"]


class Stopped(Exception):
    """Stands for a crash."""


def run(argv: list[str], stop_after: int | None = None, record: str | None = None) -> None:
    """One run; it is broken off when that iteration is complete and its checkpoint written."""
    iterate, fit = PPOTrainer._iterate, PPOTrainer.fit

    def iterate_or_stop(trainer: PPOTrainer) -> None:
        if trainer.iteration == stop_after:
            if record:
                write_record(trainer, Path(record))
            raise Stopped
        iterate(trainer)

    def record_then_fit(trainer: PPOTrainer) -> dict[str, float]:
        if record and stop_after is None:
            write_record(trainer, Path(record))
        return fit(trainer)

    PPOTrainer._iterate, PPOTrainer.fit = iterate_or_stop, record_then_fit
    try:
        namespace = build_parser().parse_args(argv)
        run_ppo(PPORun.from_namespace(namespace))
    except Stopped:
        pass
    finally:
        PPOTrainer._iterate, PPOTrainer.fit = iterate, fit


def write_record(trainer: PPOTrainer, folder: Path) -> None:
    """Called on every rank."""
    engines = {name: whole_state(engine) for name, engine in trainer.algorithm.engines.items()}
    folder.mkdir(parents=True, exist_ok=True)
    if trainer.strategy.is_main:
        average = trainer._average.state_dict() if trainer._average is not None else {}
        content = {"engines": engines, "iteration": trainer.iteration, "average": average, "state": trainer._state()}
        torch.save(content, folder / "whole.pt")
    groups = trainer.algorithm.rank_state_dict()["groups"]
    waiting = [(entry["born"], [sample.uid for sample in entry["samples"]]) for entry in groups["carried"]]
    torch.save({"position": groups["position"], "waiting": waiting}, folder / f"rank{trainer.strategy.rank}.pt")
    trainer.strategy.barrier()


def whole_state(engine: Engine) -> dict[str, Any]:
    """Weights, both moments and the step count of each trained parameter, whatever shards they are kept in."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, Any] = {"learning_rate": engine.learning_rate}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        if engine.config.engine_stage == 0:
            state = engine.engine.optimizer.state.get(parameter, {})
            parts = [parameter.detach(), state.get("exp_avg"), state.get("exp_avg_sq")]
        else:
            moments = [safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")]
            parts = [safe_get_full_fp32_param(parameter), *moments]
        # A parameter that never had a gradient has no moments without ZeRO, and zeros with it.
        found[name] = [torch.zeros_like(parts[0]) if part is None else part.clone() for part in parts]
    return found


def case(name: str, policy: Path, folder: Path, *more: str) -> list[str]:
    """The arguments of a case; what stands later replaces what stands before."""
    return ["--pretrain", str(policy), "--save_path", str(folder), *COMMON, *CASES[name], *more]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for entry in json.loads(Path(sys.argv[-1]).read_text(encoding="utf-8")):
        run(**entry)
