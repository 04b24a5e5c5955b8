"""The settings of PPO training, grouped by purpose. Each field is a flag of `cli/train_ppo_vla.py`.

For the algorithm itself see `rlvla.trainer.algorithm_config`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlvla.data.options import dataset_camera_flag
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.options import Condition, arg, equals, given, switched_on
from rlvla.rollout.config import BackendSetup, TaskSamplingConfig
from rlvla.trainer.algorithm_config import (
    WITH_CRITIC_ON_OBSERVATIONS,
    WITH_SEPARATE_CRITIC,
    AlgorithmConfig,
    CorrectionConfig,
    FilterConfig,
)
from rlvla.utils.cli.flags import MAX_SEED
from rlvla.utils.deepspeed.schedules import SCHEDULERS

if TYPE_CHECKING:
    from rlvla.checkpoints.policy_folder import PolicyRecord

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
    "gpu_memory_flag",
    "max_bad_steps_flag",
]
CRITIC_STARTS = ("policy", "rm_model")
PROXIMAL = ("recompute", "interpolate")
EARLY_STOP_BY = ("evaluations", "sampled", "either")
RANK_BALANCES = ("none", "tokens", "rows")


def dry_run_flag() -> Any:
    """The field `dry_run` of every command that trains a policy."""
    return arg(
        False,
        "check the configuration, print the step counts and the memory per rank, and exit without starting",
        essential=True,
    )


def gpu_memory_flag() -> Any:
    """The field `gpu_memory` of commands whose dry run plans memory."""
    return arg(
        None,
        "with --dry_run: memory of a GPU in GiB; says whether the run fits, and which flags reduce the largest part",
        above=0,
        metavar="GIB",
        read_if=switched_on("dry_run"),
    )


def max_bad_steps_flag() -> Any:
    """The field `max_bad_steps` of every command that trains a model."""
    return arg(
        3, "end the run after this many consecutive optimizer steps with NaN or infinity (each is skipped)", minimum=1
    )


def fallback_path_flag(what: str) -> Any:
    """The field `fallback_path` of every command that trains a model; `what` names the outputs written there."""
    return arg(
        None,
        f"folder on another disk that receives {what} if it cannot be written at the end",
        metavar="DIR",
        writes="folder",
    )


@dataclass(frozen=True)
class BasicRunConfig:
    """Folders, workers and seed of every reinforcement-learning run."""

    save_path: str = arg(
        "runs/ppo",
        "run folder: policy/, metrics, TensorBoard files, learning curve",
        metavar="DIR",
        writes="folder",
        essential=True,
        aliases=("output_dir",),
    )
    ckpt_path: str | None = arg(
        None,
        "folder of the training checkpoints (default: checkpoints/ in --save_path)",
        metavar="DIR",
        writes="folder",
        aliases=("default_local_dir",),
    )
    load_checkpoint: bool | str = arg(
        False,
        "resume from the newest checkpoint, or start from scratch if there is none; with a name such as "
        "iteration_000010, from that one",
        value="NAME",
        essential=True,
    )
    num_envs: int = arg(
        4,
        "environment processes per rank, each playing one episode at a time",
        minimum=1,
        maximum=10_000,
        essential=True,
    )
    seed: int = arg(0, "random seed of the run", minimum=0, maximum=MAX_SEED, essential=True)
    dry_run: bool = dry_run_flag()


@dataclass(frozen=True)
class RunConfig(BasicRunConfig):
    """Folders, workers, seed, and initial weights of the critic."""

    gpu_memory: float | None = gpu_memory_flag()
    hours: bool = arg(
        False,
        "with --dry_run: hours of the run on a GPU, from measured decisions per second",
        read_if=switched_on("dry_run"),
    )
    measured: str | None = arg(
        None,
        "rates of your own GPU for --hours: rates.json, written by benchmarks/gpu.py (default: those that come with "
        "rlvla)",
        metavar="FILE",
        read_if=switched_on("hours"),
    )
    critic_pretrain: str | None = arg(
        None,
        "checkpoint folder that the critic starts from, or that of a run (default: --pretrain)",
        metavar="DIR",
        read_if=WITH_CRITIC_ON_OBSERVATIONS,
    )
    critic_from: str = arg(
        "policy",
        "initial weights of the critic: policy (--critic_pretrain, or else --pretrain) or rm_model, the network of the "
        "run's reward model",
        choices=CRITIC_STARTS,
        read_if=WITH_CRITIC_ON_OBSERVATIONS,
    )


class LoopBatchConfig(TaskSamplingConfig):
    """Fields of `BatchConfig` that the training loop reads; defaults of learners without such flags."""

    num_episodes: int
    rollout_batch_size: int
    n_samples_per_prompt: int = 1
    temperature: float = 1.0
    flow_noise_level_end: float | None = None

    @property
    def episodes_per_iteration(self) -> int:
        """Episodes per iteration, over all ranks."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def iterations(self) -> int:
        """Iterations of the run."""
        return max(1, self.num_episodes // self.episodes_per_iteration)

    def progress(self, iteration: int) -> float:
        """0 for the first iteration (number 0), 1 for the last."""
        return iteration / max(1, self.iterations - 1)


@dataclass(frozen=True)
class BatchConfig(LoopBatchConfig):
    """Numbers of episodes per iteration, and sizes of the batches to train on."""

    num_episodes: int = arg(
        4096,
        "total number of episodes to train on (not counting those dropped by filters)",
        minimum=1,
        essential=True,
        aliases=("total_episodes",),
    )
    rollout_batch_size: int = arg(
        64, "groups (task instances) per iteration, over all ranks", minimum=1, essential=True
    )
    n_samples_per_prompt: int = arg(
        1,
        "episodes per group, all from the same initial state (group methods need at least 2)",
        minimum=1,
        essential=True,
        aliases=("n_samples", "num_generations"),
    )
    micro_rollout_batch_size: int = arg(
        256, "decisions per forward pass when computing log-probs and values", minimum=1
    )
    train_batch_size: int = arg(32, "episodes per optimizer step, over all ranks", minimum=1, essential=True)
    micro_train_batch_size: int = arg(
        64,
        "decisions per forward and backward pass on one rank",
        minimum=1,
        read_if=Condition(lambda flags: not flags.get("use_dynamic_batch"), "--use_dynamic_batch splits by tokens"),
    )
    use_dynamic_batch: bool = arg(
        False,
        "form micro-batches by --train_max_tokens_per_gpu instead of --micro_train_batch_size",
        aliases=("use_dynamic_bsz",),
    )
    train_max_tokens_per_gpu: int = arg(
        16384,
        "maximum number of tokens (images, prompt and actions) per micro-batch on one rank",
        minimum=1,
        aliases=("ppo_max_token_len_per_gpu",),
        read_if=switched_on("use_dynamic_batch"),
    )
    balance_ranks: str = arg(
        "none",
        "balance the decisions of an optimizer step over the ranks: by tokens, or (rows) also by number of decisions",
        choices=RANK_BALANCES,
    )
    max_epochs: int = arg(
        1, "passes over the episodes of an iteration", minimum=1, aliases=("ppo_epochs", "num_ppo_epochs")
    )
    temperature: float = arg(1.0, "sampling temperature of the action tokens", above=0)
    flow_noise_level_end: float | None = arg(
        None,
        "noise level of a flow policy in the last iteration, reached linearly from --flow_noise_level (default: "
        "constant)",
        above=0,
        maximum=1,
    )


_AHEAD = (
    switched_on("async_rollout"),
    Condition(lambda flags: flags["max_staleness"] > 0, "with --max_staleness 0 nothing is played ahead"),
)


@dataclass(frozen=True)
class AsyncConfig:
    """Asynchronous rollouts: the next episodes are played while the policy is trained."""

    async_rollout: bool = arg(
        False,
        "asynchronous rollouts: a copy of the policy plays the next iterations while the policy is trained",
    )
    max_staleness: int = arg(
        1,
        "maximum policy lag of a decision when it is trained on, in iterations; 0: synchronous",
        minimum=0,
        maximum=1000,
        read_if=switched_on("async_rollout"),
    )
    partial_rollout: bool = arg(
        False,
        "new weights are used at once, in the middle of episodes, instead of from the next iteration of episodes on",
        read_if=_AHEAD,
    )
    proximal: str = arg(
        "recompute",
        "log-probs in the denominator of the loss's ratio: recompute (a forward pass before the update) or interpolate "
        "(between rollout and current policy, without a pass)",
        choices=PROXIMAL,
        read_if=_AHEAD,
    )
    min_ess: float = arg(
        0.05,
        "end the run once the effective sample size, as a fraction of the tokens (rollout_corr/ess), is below this in "
        "3 iterations in a row; 0: never",
        minimum=0,
        below=1,
        read_if=_AHEAD,
    )

    @property
    def plays_ahead(self) -> bool:
        """Whether episodes are played before their iteration."""
        return self.async_rollout and self.max_staleness > 0

    @property
    def iterations_ahead(self) -> int:
        """Maximum number of iterations whose episodes are played ahead."""
        return self.max_staleness if self.plays_ahead else 0

    @property
    def copies(self) -> int:
        """Copies of the policy's weights: one that plays, and one that waits until its episodes are finished."""
        return (1 + (self.max_staleness > 1 and not self.partial_rollout)) * self.plays_ahead

    @property
    def interpolates(self) -> bool:
        """Whether old log-probs are interpolated."""
        return self.plays_ahead and self.proximal == "interpolate"


class LoopOptimizationConfig:
    """Fields of `OptimizationConfig` that the training loop reads; defaults of learners without such flags."""

    freezing_actor_steps: int = 0
    ema_beta: float = 0.0
    use_ema: bool = False
    offload_during_rollout: bool = False


@dataclass(frozen=True)
class OptimizationConfig(LoopOptimizationConfig):
    """Optimizers of actor and critic, and further losses and averages."""

    actor_learning_rate: float = arg(
        1e-4,
        "peak learning rate of the actor (about 5e-6 is suitable for a 7B model)",
        minimum=0,
        essential=True,
    )
    critic_learning_rate: float = arg(3e-4, "peak learning rate of the critic", minimum=0, read_if=WITH_SEPARATE_CRITIC)
    lr_warmup_ratio: float = arg(
        0.0,
        "fraction of the optimizer steps spent warming up",
        minimum=0,
        maximum=1,
        aliases=("warmup_ratio", "lr_warmup_steps_ratio"),
    )
    lr_scheduler: str = arg("constant", "learning-rate schedule", choices=SCHEDULERS, aliases=("lr_scheduler_type",))
    adam_betas: tuple[float, ...] = arg((0.9, 0.999), "AdamW betas", minimum=0, below=1, nargs=2, metavar="BETA")
    l2: float = arg(0.0, "AdamW weight decay", minimum=0, aliases=("weight_decay",))
    freezing_actor_steps: int = arg(
        0, "number of initial iterations in which only the critic is trained", minimum=0, read_if=WITH_SEPARATE_CRITIC
    )
    target_kl: float | None = arg(
        None,
        "stop training the policy for the rest of an iteration once actor/ppo_kl of an optimizer step exceeds this "
        "or is NaN",
        above=0,
    )
    desired_kl: float | None = arg(
        None,
        "target KL per iteration of an adaptive learning rate: the actor's rate is multiplied by "
        "sqrt(desired / measured), at least 1/4 and at most 2, when actor/ppo_kl is more than twice or less than half "
        "this value times the square of the schedule (default: off)",
        above=0,
    )
    ema_beta: float = arg(
        0.0,
        "decay of a moving average of the actor's weights, updated at each optimizer step; 0: no average",
        minimum=0,
        below=1,
    )
    use_ema: bool = arg(False, "evaluate and export the moving average (--ema_beta) instead of the latest weights")
    offload_during_rollout: bool = arg(
        False,
        "offload optimizer states, critic, reference and reward models to host memory during rollouts (needs an "
        "accelerator, and zero_stage >= 1 or bf16)",
    )
    ptx_coef: float = arg(
        0.0, "weight of a supervised loss on --ptx_demos that is added to each policy update", minimum=0
    )
    ptx_demos: str | None = arg(
        None, "demonstrations for that loss, in any format that train_sft_vla.py reads", metavar="PATH"
    )
    dataset_camera: tuple[str, ...] = dataset_camera_flag(read_if=given("ptx_demos"))
    ptx_batch_size: int = arg(
        64, "decisions of --ptx_demos per optimizer step, over all ranks", minimum=1, read_if=given("ptx_coef")
    )


@dataclass(frozen=True)
class LoggingConfig:
    """Where scalars are logged besides `metrics.jsonl`."""

    use_tensorboard: bool = arg(True, "write TensorBoard event files in --save_path")
    use_wandb: bool = arg(False, "also log to Weights & Biases (extra rlvla[wandb])")
    wandb_project: str | None = arg(
        None,
        "project at Weights & Biases (default: rlvla)",
        metavar="NAME",
        aliases=("project_name",),
        read_if=switched_on("use_wandb"),
    )
    wandb_group: str | None = arg(
        None, "group of runs at Weights & Biases (default: none)", metavar="NAME", read_if=switched_on("use_wandb")
    )
    wandb_name: str | None = arg(
        None,
        "name of the run at Weights & Biases (default: the name of its folder)",
        metavar="NAME",
        aliases=("wandb_run_name", "run_name", "experiment_name"),
        read_if=switched_on("use_wandb"),
    )

    @property
    def wandb_run(self) -> dict[str, str | None]:
        """Project, group and name at Weights & Biases; None for the default."""
        return {"project": self.wandb_project, "group": self.wandb_group, "name": self.wandb_name}


@dataclass(frozen=True)
class ScheduleConfig(LoggingConfig):
    """Evaluation, checkpoints and logging; intervals are in iterations."""

    eval_steps: int = arg(
        0, "evaluate every this many iterations; 0: only at the end", minimum=0, essential=True, aliases=("test_freq",)
    )
    eval_episodes: int = arg(
        100, "evaluation episodes per task (initial states never trained on)", minimum=1, essential=True
    )
    eval_temperature: float = arg(
        0.0, "sampling temperature of evaluations during training; 0: the most likely actions", minimum=0
    )
    eval_samples: int = arg(
        1,
        "episodes per evaluation state (with --eval_temperature): the mean, and pass@k for all of them",
        minimum=1,
        maximum=10_000,
        read_if=given("eval_temperature"),
    )
    val_before_train: bool = arg(True, "evaluate the initial policy before training")
    val_only: bool = arg(False, "only evaluate the initial policy, or with --load_checkpoint the newest checkpoint")
    save_steps: int = arg(
        0,
        "write a checkpoint every this many iterations; 0: only at the end",
        minimum=0,
        essential=True,
        aliases=("save_freq",),
    )
    save_hf_ckpt: bool = arg(
        False,
        "export the policy with every checkpoint, to policies/ in --save_path; removed with its checkpoint",
        read_if=given("save_steps"),
    )
    save_value_network: bool = arg(
        False,
        "also export the critic, to critic/ in --save_path, for --critic_pretrain of another run",
        read_if=WITH_CRITIC_ON_OBSERVATIONS,
    )
    max_ckpt_num: int = arg(2, "number of newest checkpoints to keep", minimum=1, aliases=("save_total_limit",))
    fallback_path: str | None = fallback_path_flag("the checkpoint (in checkpoints/) or policy/")
    logging_steps: int = arg(1, "log metrics every this many iterations", minimum=1)
    profile_steps: tuple[int, ...] = arg(
        (),
        "iterations, counted from 1, to record with the torch profiler: a trace per rank in profile/ in --save_path",
        minimum=1,
        metavar="N",
    )
    max_minutes: float | None = arg(
        None,
        "end the run after the iteration in which the time since its launch reaches this limit; the learning-rate "
        "schedule still spans all iterations",
        above=0,
    )
    early_stopping: bool = arg(
        False,
        "end the run once success at end reaches a threshold, by default in several consecutive evaluations "
        "(--eval_steps)",
    )
    early_stop_success: float = arg(
        0.95,
        "threshold of --early_stopping for success at end",
        above=0,
        maximum=1,
        read_if=switched_on("early_stopping"),
    )
    early_stop_evaluations: int = arg(
        3,
        "consecutive evaluations that must reach the threshold",
        minimum=1,
        read_if=(
            switched_on("early_stopping"),
            equals("early_stop_by", *(by for by in EARLY_STOP_BY if by != "sampled")),
        ),
    )
    early_stop_by: str = arg(
        "evaluations",
        "estimate that must reach the threshold: evaluations; sampled, the success of the last training episodes with "
        "its lower 95 % bound; or either of them",
        choices=EARLY_STOP_BY,
        read_if=switched_on("early_stopping"),
    )
    early_stop_iterations: int = arg(
        5,
        "iterations whose training episodes count with --early_stop_by",
        minimum=1,
        read_if=(
            switched_on("early_stopping"),
            equals("early_stop_by", *(by for by in EARLY_STOP_BY if by != "evaluations")),
        ),
    )
    plateau_iterations: int | None = arg(
        None,
        "report a plateau once, with the likely cause: no gain in success in this many iterations, at least 2 "
        "(default: as many as 1000 episodes take, at least 5); 0: never",
        minimum=0,
    )
    num_videos: int = arg(
        0, "episodes of each evaluation recorded as mp4 and shown in TensorBoard, half of them failures", minimum=0
    )
    live: bool = arg(
        False,
        "serve a page that follows the run (metrics, newest videos, log) on this machine; its address is printed",
    )
    live_port: int = arg(
        8765,
        "port of the page of --live; 0, or one that is taken: any free one",
        minimum=0,
        maximum=65_535,
        read_if=switched_on("live"),
    )
    dump_rollouts: bool = arg(
        False, "save all training episodes in rollouts/ in --save_path, as HDF5 files for SFT or conversion"
    )


class LoopGuardConfig:
    """Fields of `GuardConfig`; defaults of learners without such flags."""

    check_start: bool | None = None  # None: no check
    max_idle_iterations: int = 0
    max_bad_steps: int


@dataclass(frozen=True)
class GuardConfig(LoopGuardConfig):
    """Early termination of runs that cannot learn."""

    check_start: bool = arg(
        True,
        "end the run in its first iteration if policy or reward make learning impossible; off: only warn",
    )
    max_idle_iterations: int = arg(
        50,
        "end the run after this many consecutive iterations with all advantages zero (not an error if all episodes "
        "succeed); 0: never",
        minimum=0,
    )
    max_bad_steps: int = max_bad_steps_flag()


class TrainerConfig:
    """Settings that the training loop reads; the configuration of each learner derives from it.

    Attributes:
        batch: numbers of episodes.
        schedule: evaluation, checkpoints and logging.
        split: initial states for training and evaluation.
        record: environment record written into exported policies.
        reward_weights: returns the current weight of each reward source.
        guards: early termination of runs that cannot learn.
        optimization: moving average, offloading.
        asynchronous: asynchronous rollouts.
        backend: location of the policy during rollouts.
        shown_env: the environment of training if it shows more than that of the record, or None.
    """

    batch: LoopBatchConfig
    schedule: ScheduleConfig
    split: SplitConfig
    record: PolicyRecord
    reward_weights: Callable[[], dict[str, float]]
    guards: LoopGuardConfig
    optimization: LoopOptimizationConfig
    asynchronous: AsyncConfig = AsyncConfig()
    backend: BackendSetup = BackendSetup()
    shown_env: EnvConfig | None = None

    @property
    def learner(self) -> str:
        """Name of the learning algorithm."""
        raise NotImplementedError

    @property
    def compares_groups(self) -> bool:
        """Whether the episodes of a group are compared with each other."""
        return False


@dataclass(frozen=True)
class PPOConfig(TrainerConfig):
    """The configuration of `PPOTrainer`; further attributes as in `TrainerConfig`.

    Attributes:
        algorithm: advantages, losses and KL.
        optimization: optimizers, freezing, moving average, supervised loss.
        filters: filters of dynamic sampling.
        correction: correction of the mismatch between rollout and training.
    """

    batch: BatchConfig
    algorithm: AlgorithmConfig
    optimization: OptimizationConfig
    schedule: ScheduleConfig
    split: SplitConfig
    record: PolicyRecord
    filters: FilterConfig = field(default_factory=FilterConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    reward_weights: Callable[[], dict[str, float]] = dict
    guards: GuardConfig = GuardConfig()
    asynchronous: AsyncConfig = AsyncConfig()
    backend: BackendSetup = BackendSetup()
    shown_env: EnvConfig | None = None

    @property
    def learner(self) -> str:
        """Name of the learning algorithm."""
        return self.algorithm.algorithm

    @property
    def compares_groups(self) -> bool:
        """Whether the advantage estimator compares the episodes of a group."""
        return self.batch.n_samples_per_prompt > 1 and "group_ids" in self.algorithm.estimator_parameters
