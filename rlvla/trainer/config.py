"""The settings of PPO training, grouped by what they govern. Each field is a flag of `cli/train_ppo_vla.py`.

Those of the mathematics stand in `rlvla.trainer.algorithm_config`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlvla.trainer.algorithm_config import AlgorithmConfig, CorrectionConfig, FilterConfig
from rlvla.utils.arguments import arg
from rlvla.utils.strategy_config import SCHEDULERS

__all__ = [
    "AlgorithmConfig",
    "BatchConfig",
    "CorrectionConfig",
    "FilterConfig",
    "GuardConfig",
    "OptimizationConfig",
    "RunConfig",
    "ScheduleConfig",
    "dry_run_flag",
    "max_bad_steps_flag",
]

RANK_BALANCES = ("none", "tokens", "rows")


def dry_run_flag() -> Any:
    """The field `dry_run` of every command that trains a policy."""
    return arg(
        False, "check the configuration, print the step arithmetic and the memory per rank, and stop: starts nothing"
    )


def max_bad_steps_flag() -> Any:
    """The field `max_bad_steps` of every command that trains a model."""
    return arg(
        3, "end the run after so many optimizer steps in a row with NaN or infinity (each is left out)", minimum=1
    )


@dataclass(frozen=True)
class RunConfig:
    """Folders, workers, seed."""

    save_path: str = arg("runs/ppo", "run folder: policy/, metrics, TensorBoard files, learning curve", metavar="DIR")
    ckpt_path: str | None = arg(
        None, "folder of the training checkpoints (default: checkpoints/ below --save_path)", metavar="DIR"
    )
    load_checkpoint: bool = arg(False, "continue from the newest checkpoint; start anew if there is none")
    critic_pretrain: str | None = arg(
        None, "checkpoint folder the critic starts from (default: --pretrain)", metavar="DIR"
    )
    reward_pretrain: str | None = arg(
        None, "reward model folder; its score is added at the end of each episode", metavar="DIR"
    )
    reward_model_coef: float = arg(1.0, "weight of the reward model's score (0..1)")
    num_envs: int = arg(4, "environment processes per rank, each playing one episode at a time", minimum=1)
    seed: int = arg(0, "seed of everything random", minimum=0)
    dry_run: bool = dry_run_flag()


@dataclass(frozen=True)
class BatchConfig:
    """How much is collected, and in what portions it is trained on."""

    num_episodes: int = arg(
        4096, "environment episodes to train on in total (those that filters drop come on top)", minimum=1
    )
    rollout_batch_size: int = arg(64, "groups (task instances) per iteration, over all ranks", minimum=1)
    n_samples_per_prompt: int = arg(
        1, "episodes per group, all from the same initial state (group methods need at least 2)", minimum=1
    )
    micro_rollout_batch_size: int = arg(
        256, "decisions per forward pass when log-probs and values are computed", minimum=1
    )
    train_batch_size: int = arg(32, "episodes per optimizer step, over all ranks", minimum=1)
    micro_train_batch_size: int = arg(64, "decisions per forward and backward pass on one rank", minimum=1)
    use_dynamic_batch: bool = arg(
        False, "cut micro-batches by --train_max_tokens_per_gpu instead of --micro_train_batch_size"
    )
    train_max_tokens_per_gpu: int = arg(
        16384, "most tokens (images, prompt and actions) of a micro-batch on one rank", minimum=1
    )
    balance_ranks: str = arg(
        "none",
        "spread the decisions of an optimizer step evenly over the ranks: by tokens, or (rows) also by number",
        choices=RANK_BALANCES,
    )
    max_epochs: int = arg(1, "passes over the episodes of an iteration", minimum=1)
    temperature: float = arg(1.0, "sampling temperature of the action tokens", above=0)

    @property
    def episodes_per_iteration(self) -> int:
        """Over all ranks."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def iterations(self) -> int:
        """Of the whole run."""
        return max(1, self.num_episodes // self.episodes_per_iteration)


@dataclass(frozen=True)
class OptimizationConfig:
    """AdamW for actor and critic."""

    actor_learning_rate: float = arg(1e-4, "peak learning rate of the actor (a 7B model wants about 5e-6)", minimum=0)
    critic_learning_rate: float = arg(3e-4, "peak learning rate of the critic", minimum=0)
    lr_warmup_ratio: float = arg(0.0, "share of the optimizer steps spent warming up", minimum=0, maximum=1)
    lr_scheduler: str = arg("constant", "learning-rate schedule", choices=SCHEDULERS)
    adam_betas: tuple[float, ...] = arg((0.9, 0.999), "AdamW betas", minimum=0, below=1, nargs=2, metavar="BETA")
    l2: float = arg(0.0, "AdamW weight decay", minimum=0)
    freezing_actor_steps: int = arg(0, "iterations at the start in which only the critic is trained", minimum=0)
    target_kl: float | None = arg(
        None,
        "leave the policy alone for the rest of an iteration once actor/ppo_kl of an optimizer step exceeds this "
        "or is NaN",
        above=0,
    )
    ema_beta: float = arg(
        0.0,
        "keep a moving average of the actor's weights with this share of the old at every step; 0: none",
        minimum=0,
        below=1,
    )
    use_ema: bool = arg(False, "evaluate and export the moving average (--ema_beta) instead of the latest weights")
    offload_during_rollout: bool = arg(
        False,
        "keep optimizer states, critic, reference and reward model in host memory while episodes are played (needs an "
        "accelerator, and zero_stage >= 1 or bf16)",
    )
    ptx_coef: float = arg(
        0.0, "weight of a supervised loss on --ptx_demos that is added to every step of the policy", minimum=0
    )
    ptx_demos: str | None = arg(None, "demonstrations of that loss, as train_sft_vla.py reads them", metavar="PATH")
    ptx_batch_size: int = arg(64, "decisions of --ptx_demos per optimizer step, over all ranks", minimum=1)


@dataclass(frozen=True)
class ScheduleConfig:
    """When something is evaluated, saved or logged; all counted in iterations."""

    eval_steps: int = arg(0, "evaluate every so many iterations; 0: only at the end", minimum=0)
    eval_episodes: int = arg(100, "evaluation episodes per task (initial states never trained on)", minimum=1)
    val_before_train: bool = arg(True, "evaluate the start policy first")
    val_only: bool = arg(False, "evaluate the start policy, or with --load_checkpoint the newest checkpoint, and stop")
    save_steps: int = arg(0, "write a checkpoint every so many iterations; 0: only at the end", minimum=0)
    max_ckpt_num: int = arg(2, "checkpoints kept", minimum=1)
    logging_steps: int = arg(1, "log metrics every so many iterations", minimum=1)
    profile_steps: tuple[int, ...] = arg(
        (),
        "iterations, counted from 1, to record with the torch profiler: a trace per rank in profile/ below --save_path",
        minimum=1,
        metavar="N",
    )
    early_stopping: bool = arg(
        False, "end the run when success at end is good enough in several evaluations (--eval_steps) in a row"
    )
    early_stop_success: float = arg(0.95, "success at end that is good enough", above=0, maximum=1)
    early_stop_evaluations: int = arg(3, "evaluations in a row that must be good enough", minimum=1)
    num_videos: int = arg(
        0, "episodes of each evaluation recorded as mp4 and shown in TensorBoard, half of them failures", minimum=0
    )
    dump_rollouts: bool = arg(
        False, "keep every training episode below --save_path (rollouts/), as HDF5 that SFT and conversion read"
    )
    use_tensorboard: bool = arg(True, "write TensorBoard event files below --save_path")
    use_wandb: bool = arg(False, "send the same scalars to Weights & Biases (extra rlvla[wandb])")


@dataclass(frozen=True)
class GuardConfig:
    """When a run that does not learn is ended."""

    check_start: bool = arg(
        True,
        "end the run in its first iteration if the policy or the reward is such that nothing can be learned; off: warn",
    )
    max_idle_iterations: int = arg(
        50,
        "end the run after so many iterations in a row whose advantages were all zero (no error if everything "
        "succeeds); 0: never",
        minimum=0,
    )
    max_bad_steps: int = max_bad_steps_flag()
