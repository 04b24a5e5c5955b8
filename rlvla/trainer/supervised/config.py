"""Flags of supervised training: fine-tuning of a policy, and the reward model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlvla.data.options import ReadOptions
from rlvla.envs.config import heldout_tasks_flag
from rlvla.models.compact.config import HEADS as COMPACT_HEADS
from rlvla.models.compact.config import CompactConfig
from rlvla.models.config import (
    ACTION_STD_HELP,
    ACTION_STD_INIT_HELP,
    CAMERA_MAP_HELP,
    PLATFORM_HELP,
    VARIANT_HELP,
)
from rlvla.models.lerobot.new import TINY_FAMILIES
from rlvla.models.vla.choices import ACTION_STD_KINDS, MODEL_VARIANTS, PLATFORMS
from rlvla.options import Condition, arg, equals, fill_selected, given, selected
from rlvla.trainer.config import LoggingConfig, dry_run_flag, fallback_path_flag, gpu_memory_flag, max_bad_steps_flag
from rlvla.utils.cli.flags import MAX_SEED
from rlvla.utils.deepspeed.schedules import SCHEDULERS

NEW_MODELS = ("tiny", "compact")
PAIR_ORDERS = ("success", "length", "return", "rank")
SFT_LOSSES = ("l1", "nll")
VALUE_OBJECTIVES = ("returns", "iql")


def _new_lerobot(flags: Mapping[str, Any]) -> bool:
    return flags["pretrain"] == "tiny" and flags["model_family"] != TINY_FAMILIES[0]


def _for_new(kind: str) -> Condition:
    return Condition(
        lambda flags: flags["pretrain"] == kind, f"it describes a new {kind} model, and --pretrain is {{pretrain}}"
    )


_NEW = Condition(
    lambda flags: flags["pretrain"] in NEW_MODELS, "it describes a new model, and --pretrain is {pretrain}"
)
_NEW_TINY, _NEW_COMPACT = _for_new("tiny"), _for_new("compact")
_DESCRIBES = "it describes public checkpoints, and --pretrain is {pretrain}"
_PUBLIC = Condition(lambda flags: flags["pretrain"] not in NEW_MODELS or _new_lerobot(flags), _DESCRIBES)
_TOKENS = Condition(lambda flags: flags["pretrain"] != "compact" and not _new_lerobot(flags), _DESCRIBES)
_CROPS = Condition(lambda flags: not flags["center_crop"] or _TOKENS.holds(flags), _DESCRIBES)
_NOT_SMOLVLA = Condition(lambda flags: not _new_lerobot(flags), "a new {model_family} policy does not use it")
_NOT_LEROBOT = "it is for policies in LeRobot's format, and --pretrain is {pretrain}"
_LEROBOT_FOLDER = Condition(lambda flags: flags["pretrain"] not in NEW_MODELS, _NOT_LEROBOT)
_LEROBOT = Condition(lambda flags: flags["pretrain"] not in NEW_MODELS or _new_lerobot(flags), _NOT_LEROBOT)
_PLAYS_OR_LISTS_TASKS = Condition(
    lambda flags: bool(flags["eval_epochs"] or flags["heldout_tasks"]),
    "it belongs to --eval_epochs, which is not given",
)
_MEASURES = Condition(
    lambda flags: bool(flags["heldout_share"] or flags["eval_epochs"]),
    "there are no measurements without --heldout_share or --eval_epochs",
)

_CONDITIONED, _WEIGHTED = given("advantage_conditioning"), given("advantage_weighting")
_BY_ADVANTAGE = Condition(
    lambda flags: bool(flags["advantage_conditioning"] or flags["advantage_weighting"]),
    "no effect without --advantage_conditioning or --advantage_weighting",
)
_IQL = equals("value_objective", "iql")


@dataclass(frozen=True)
class SupervisedRunConfig(ReadOptions):
    """Data, initial checkpoint and run folder of any supervised training."""

    demos: tuple[str, ...] = arg(
        ("runs/demos/demos.hdf5",),
        "demonstrations, one or more of: HDF5 of cli/collect_demos.py or dumped rollouts, a LeRobot folder "
        "or the repository id of one in the local cache, LIBERO *_demo.hdf5 (a file or a folder)",
        metavar="PATH",
        essential=True,
    )
    pretrain: str = arg(
        "tiny",
        "checkpoint folder to start from, or a new model: compact (convolutions, learns fast) or tiny (a transformer)",
        metavar="DIR",
        essential=True,
        aliases=("model_name_or_path",),
    )
    save_path: str = arg("runs/supervised", "run folder", metavar="DIR", writes="folder", aliases=("output_dir",))
    fallback_path: str | None = fallback_path_flag("the result")
    cameras: tuple[str, ...] = arg((), "cameras of the file to use (default: all)", metavar="NAME")
    use_proprio: bool = arg(True, "a new model takes proprioception if the demonstrations have it", read_if=_NEW)
    heldout_tasks: tuple[str, ...] = heldout_tasks_flag()
    center_crop: bool | None = arg(
        None, "crop images to 90 % of their area (default: the checkpoint's, else no)", read_if=_CROPS
    )
    platform: str | None = arg(None, PLATFORM_HELP, choices=tuple(PLATFORMS), read_if=_PUBLIC)
    camera_map: tuple[str, ...] = arg((), CAMERA_MAP_HELP, nargs="+", metavar="CAMERA=FEATURE", read_if=_LEROBOT)
    unnorm_key: str | None = arg(None, "entry of the dataset statistics (default: the only one)", metavar="KEY")
    seed: int = arg(0, "seed of weights, batches and held-out data", minimum=0, maximum=MAX_SEED, essential=True)
    load_checkpoint: bool = arg(
        False, "resume from the newest checkpoint of --save_steps, or start from scratch if there is none"
    )


@dataclass(frozen=True)
class SFTRunConfig(SupervisedRunConfig):
    """Data, initial checkpoint and run folder of supervised fine-tuning."""

    save_path: str = arg(
        "runs/sft",
        "run folder; the policy goes to its subfolder policy/",
        metavar="DIR",
        writes="folder",
        essential=True,
        aliases=("output_dir",),
    )
    fallback_path: str | None = fallback_path_flag("policy/")
    model_variant: str | None = arg(
        None, f"{VARIANT_HELP} (a new tiny model: oft)", choices=MODEL_VARIANTS, read_if=_TOKENS
    )
    fit_to_demos: bool = arg(
        False,
        "a LeRobot checkpoint: keep the weights, and take cameras, sizes of state and action, and statistics from the "
        "demonstrations",
        read_if=_LEROBOT_FOLDER,
    )
    action_std: str | None = arg(None, ACTION_STD_HELP, choices=ACTION_STD_KINDS, read_if=_NOT_SMOLVLA)
    action_std_init: float | None = arg(None, ACTION_STD_INIT_HELP, above=0, read_if=_NOT_SMOLVLA)
    dry_run: bool = dry_run_flag()
    gpu_memory: float | None = gpu_memory_flag()


@dataclass(frozen=True)
class NewModelConfig:
    """Sizes of a new model (--pretrain tiny or compact).

    Attributes:
        head_options: options of the head of a compact model.
    """

    action_chunk_len: int | None = arg(
        None,
        "actions per decision (default: the checkpoint's, else 8, in metaworld 5, or 1 for autoregressive)",
        minimum=1,
        maximum=10_000,
        aliases=("n_action_steps",),
        essential=True,
    )
    model_family: str = arg(
        TINY_FAMILIES[0],
        "a tiny model: openvla (a transformer on action tokens) or smolvla (flow matching, in LeRobot's format)",
        choices=TINY_FAMILIES,
        read_if=_NEW_TINY,
    )
    compact_head: str = arg(
        "tokens",
        "a compact model: actions as tokens (bins of each number), gaussian, flow (flow matching), or a custom head",
        choices=COMPACT_HEADS.names,
        read_if=_NEW_COMPACT,
    )
    compact_channels: tuple[int, ...] = arg(
        CompactConfig.channels,
        "a compact model: channels of its convolutions, from the image on",
        minimum=1,
        maximum=4096,
        nargs="+",
        metavar="N",
        read_if=_NEW_COMPACT,
    )
    compact_width: int = arg(
        CompactConfig.width, "a compact model: width of its trunk", minimum=1, maximum=65_536, read_if=_NEW_COMPACT
    )
    tiny_patch_size: int | None = arg(
        None, "a tiny model: side of a patch in pixels (default: 8)", minimum=1, maximum=1024, read_if=_NEW_TINY
    )
    tiny_vision_dim: int | None = arg(
        None,
        "a tiny model: width of each vision tower (default: 48; smolvla: 64)",
        minimum=4,
        maximum=65_536,
        read_if=_NEW_TINY,
    )
    tiny_vision_depth: int | None = arg(
        None,
        "a tiny model: blocks of each vision tower (default: 3, of which the last one is not computed; smolvla: 2)",
        minimum=2,
        maximum=1000,
        read_if=_NEW_TINY,
    )
    tiny_llm_dim: int | None = arg(
        None,
        "a tiny model: width of the decoder (default: 64; smolvla: 96)",
        minimum=4,
        maximum=65_536,
        read_if=_NEW_TINY,
    )
    tiny_llm_layers: int | None = arg(
        None, "a tiny model: layers of the decoder (default: 3; smolvla: 2)", minimum=1, maximum=1000, read_if=_NEW_TINY
    )
    head_options: Any = selected(COMPACT_HEADS)

    def __post_init__(self) -> None:
        fill_selected(self)


@dataclass(frozen=True)
class OptimizerConfig(LoggingConfig):
    """Flags common to all supervised training."""

    lr_scheduler: str = arg("cosine", "learning-rate schedule", choices=SCHEDULERS, aliases=("lr_scheduler_type",))
    l2: float = arg(0.01, "AdamW weight decay", minimum=0, aliases=("weight_decay",))
    max_bad_steps: int = max_bad_steps_flag()
    logging_steps: int = arg(20, "log metrics every this many optimizer steps", minimum=1)
    save_steps: int = arg(
        0,
        "write a checkpoint for --load_checkpoint every this many optimizer steps, at the next logged step; only the "
        "newest is kept; 0: none",
        minimum=0,
        aliases=("save_freq",),
    )


@dataclass(frozen=True)
class SFTConfig(OptimizerConfig):
    """Hyperparameters of supervised fine-tuning."""

    max_epochs: int = arg(
        10, "passes over the demonstrations", minimum=1, essential=True, aliases=("num_train_epochs", "total_epochs")
    )
    max_steps: int | None = arg(None, "maximum number of optimizer steps (default: all epochs)", minimum=1)
    max_minutes: float | None = arg(
        None,
        "time budget, counted from the first step: training ends early, after a final phase (a tenth of the steps so "
        "far) in which the learning rate decays to 0",
        above=0,
    )
    train_batch_size: int = arg(64, "decisions per optimizer step, over all ranks", minimum=1, essential=True)
    micro_train_batch_size: int = arg(64, "decisions per forward and backward pass on one rank", minimum=1)
    learning_rate: float = arg(
        1e-3,
        "peak learning rate (about 5e-5 is suitable for a 7B model with LoRA)",
        above=0,
        essential=True,
        aliases=("lr",),
    )
    lr_warmup_ratio: float = arg(
        0.03,
        "fraction of the optimizer steps spent warming up",
        minimum=0,
        maximum=1,
        aliases=("warmup_ratio", "lr_warmup_steps_ratio"),
    )
    adam_betas: tuple[float, ...] = arg((0.9, 0.95), "AdamW betas", minimum=0, below=1, nargs=2, metavar="BETA")
    autonomous_weight: float = arg(
        0.0,
        "demonstrations with interventions: weight of the policy's steps relative to those of the person or the expert "
        "(0: HG-DAgger)",
        minimum=0,
        maximum=1,
        read_if=Condition(
            lambda flags: not _BY_ADVANTAGE.holds(flags),
            "--advantage_conditioning and --advantage_weighting train on all steps",
        ),
    )
    advantage_conditioning: str | None = arg(
        None,
        "RECAP: return model of cli/train_value_vla.py (or its run); trains on all episodes, a policy's successes and "
        "failures too, with a condition on steps of large advantage, demonstrations and corrections",
        metavar="DIR",
        essential=True,
    )
    advantage_horizon: int = arg(
        10,
        "look-ahead of the advantages, in decisions (implicit Q-learning has its own advantages)",
        minimum=1,
        maximum=100_000,
        read_if=_BY_ADVANTAGE,
    )
    positive_share: float = arg(
        0.3, "fraction of a policy's steps, per task, that get the condition", above=0, below=1, read_if=_CONDITIONED
    )
    label_demonstrations: bool = arg(
        False,
        "label demonstrations by their advantage, too (corrections always get the condition)",
        read_if=_CONDITIONED,
    )
    condition_dropout: float = arg(
        0.1, "probability of training on a step without its condition", minimum=0, maximum=1, read_if=_CONDITIONED
    )
    guidance: float = arg(
        1.0,
        "weight of the condition when the policy acts, recorded with it: 1 acts on the condition alone, 0 without it, "
        "above 1 amplifies the difference",
        minimum=0,
        maximum=100,
        read_if=_CONDITIONED,
    )
    advantage_weighting: str | None = arg(
        None,
        "advantage-weighted regression: return model of cli/train_value_vla.py (or its run), preferably "
        "trained with --value_objective iql; trains on all episodes, each step weighted by its advantage",
        metavar="DIR",
        essential=True,
    )
    awr_temperature: float = arg(
        3.0,
        "inverse temperature: weights are exp(this x standardized advantage); 0: all equal",
        minimum=0,
        maximum=100,
        read_if=_WEIGHTED,
    )
    awr_max_weight: float = arg(
        100.0,
        "upper bound of the weights, before they are divided by their mean",
        minimum=1,
        maximum=1e6,
        read_if=_WEIGHTED,
    )
    label_smoothing: float = arg(
        0.0, "fraction of each label spread uniformly over all action tokens", minimum=0, maximum=0.9
    )
    sft_loss: str | None = arg(
        None,
        "loss of a regression head: l1 (trains the mean, the standard deviation stays fixed; default) or nll (negative "
        "log-likelihood, trains both)",
        choices=SFT_LOSSES,
    )
    ema_decay: float = arg(
        0.0,
        "measure and export a moving average of the weights with this decay, which rises to it from 0.1 in the first "
        "steps (0.999 is a good value); 0: the latest weights",
        minimum=0,
        below=1,
    )

    @property
    def trains_mean_alone(self) -> bool:
        """Whether the loss leaves the standard deviation of a regression policy untouched."""
        return self.supervision["sft_loss"] == "l1"

    @property
    def supervision(self) -> dict[str, object]:
        """Options of the policy's supervised loss."""
        return {"label_smoothing": self.label_smoothing, "sft_loss": self.sft_loss or SFT_LOSSES[0]}

    def optimizer_steps(self, num_rows: int) -> int:
        """Number of optimizer steps of the run."""
        steps = self.max_epochs * self.steps_per_epoch(num_rows)
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def steps_per_epoch(self, num_rows: int) -> int:
        """Optimizer steps of a whole epoch; an incomplete last batch is dropped."""
        return max(1, num_rows // self.train_batch_size)


@dataclass(frozen=True)
class ValidationConfig:
    """Measurements during supervised fine-tuning, on held-out demonstrations and by episodes."""

    heldout_share: float = arg(
        0.0,
        "fraction of the initial states whose demonstrations are held out, to compare loss, accuracy and action errors "
        "with those on training rows (0.1 is a good value)",
        minimum=0,
        below=1,
        essential=True,
    )
    heldout_steps: int | None = arg(
        None,
        "measure every this many optimizer steps (default: after each epoch, but 5 to 20 times in a run)",
        minimum=1,
        read_if=given("heldout_share"),
    )
    heldout_rows: int = arg(
        512,
        "decisions per measurement, of the training rows and of the held-out rows each",
        minimum=1,
        read_if=given("heldout_share"),
    )
    eval_epochs: float = arg(
        0.0,
        "play episodes every this many epochs and at the end, from initial states that are not in the demonstrations; "
        "may be a fraction",
        minimum=0,
        essential=True,
    )
    eval_episodes: int = arg(20, "--eval_epochs: episodes per task", minimum=1, read_if=given("eval_epochs"))
    eval_samples: int = arg(
        8,
        "--eval_epochs: final attempts with sampled actions at each initial state, which show whether reinforcement "
        "learning can start from the policy",
        minimum=0,
        maximum=10_000,
        read_if=given("eval_epochs"),
    )
    num_envs: int = arg(
        4, "--eval_epochs: environment processes per rank", minimum=1, maximum=10_000, read_if=given("eval_epochs")
    )
    env_python: str | None = arg(
        None,
        "--eval_epochs: Python interpreter of the environment workers (default: that of this process)",
        metavar="PATH",
        read_if=_PLAYS_OR_LISTS_TASKS,
    )
    early_stopping: int = arg(
        0,
        "end after this many measurements in a row without an improvement of held-out loss or success, and keep the "
        "best policy (0: never)",
        minimum=0,
        essential=True,
        read_if=_MEASURES,
    )

    @property
    def active(self) -> bool:
        """Whether there are measurements apart from the training batches."""
        return bool(self.heldout_share or self.eval_epochs)


@dataclass(frozen=True)
class FrameRunConfig(SupervisedRunConfig):
    """Data, initial checkpoint and run folder of a model of single frames."""

    use_proprio: bool = arg(
        False, "a new model takes proprioception if the episodes have it", essential=True, read_if=_NEW
    )
    center_crop: bool | None = arg(
        None, "a new tiny model crops images to 90 % of their area (default: no)", read_if=_CROPS
    )


@dataclass(frozen=True)
class RewardRunConfig(FrameRunConfig):
    """Data, initial checkpoint and run folder of a reward model."""

    demos: tuple[str, ...] = arg(
        ("runs/demos/demos.hdf5",),
        "one or more files of episodes, from cli/collect_demos.py --keep all or training with --dump_rollouts",
        metavar="FILE",
        essential=True,
    )
    save_path: str = arg(
        "runs/rm",
        "run folder; the result goes to its subfolder reward_model/",
        metavar="DIR",
        writes="folder",
        essential=True,
        aliases=("output_dir",),
    )
    fallback_path: str | None = fallback_path_flag("reward_model/")


@dataclass(frozen=True)
class ReturnRunConfig(FrameRunConfig):
    """Data, initial checkpoint and run folder of a return model."""

    demos: tuple[str, ...] = arg(
        ("runs/demos/demos.hdf5",),
        "demonstrations, corrections and a policy's episodes, successes and failures: all that the policy is to be "
        "trained on (collect_demos.py --policy --keep all, --dump_rollouts)",
        metavar="PATH",
        essential=True,
    )
    save_path: str = arg(
        "runs/value",
        "run folder; the result goes to its subfolder return_model/",
        metavar="DIR",
        writes="folder",
        essential=True,
        aliases=("output_dir",),
    )
    fallback_path: str | None = fallback_path_flag("return_model/")


@dataclass(frozen=True)
class FrameModelConfig(OptimizerConfig):
    """Hyperparameters of models of single frames."""

    max_epochs: int = arg(
        6, "passes over the frames", minimum=1, essential=True, aliases=("num_train_epochs", "total_epochs")
    )
    train_batch_size: int = arg(64, "frames per optimizer step, over all ranks", minimum=1, essential=True)
    learning_rate: float = arg(
        2e-3,
        "peak learning rate (about 2e-5 is suitable for a 7B model with LoRA)",
        above=0,
        essential=True,
        aliases=("lr",),
    )
    lr_warmup_ratio: float = arg(
        0.05,
        "fraction of the optimizer steps spent warming up",
        minimum=0,
        maximum=1,
        aliases=("warmup_ratio", "lr_warmup_steps_ratio"),
    )
    heldout_share: float = arg(
        0.2, "fraction of the episodes held out for the metrics", above=0, below=1, essential=True
    )


@dataclass(frozen=True)
class ReturnModelConfig(FrameModelConfig):
    """Hyperparameters of return model training."""

    learning_rate: float = arg(
        1e-3,
        "peak learning rate; at 2e-3 predictions can become constant (about 2e-5 suits a 7B model with LoRA)",
        above=0,
        essential=True,
        aliases=("lr",),
    )
    value_objective: str = arg(
        "returns",
        "returns: their distribution, for RECAP; iql: implicit Q-learning, state values by expectile regression and "
        "values of action chunks, for advantage-weighted regression",
        choices=VALUE_OBJECTIVES,
        essential=True,
    )
    expectile: float = arg(
        0.7,
        "expectile of the state values: 0.5 is the mean over the recorded actions, towards 1 the best of them",
        above=0,
        below=1,
        read_if=_IQL,
    )
    target_tau: float = arg(
        0.05, "Polyak averaging coefficient of the target networks", above=0, maximum=1, read_if=_IQL
    )
    image_shift: int = arg(4, "random shift of the images in training, in pixels (DrQ); 0: none", minimum=0, maximum=64)
    failure_cost: float = arg(
        1.0, "cost of a failed episode, in lengths of the task's longest episode", minimum=0, maximum=100
    )


@dataclass(frozen=True)
class RewardModelConfig(FrameModelConfig):
    """Hyperparameters of reward model training."""

    pairs: str | None = arg(
        None,
        "learn success from pairs of episodes of a task (Bradley-Terry) instead of labeled frames; the better one of a "
        "pair: success (over failure), length (also the shorter of two successes), return (the larger recorded one) or "
        "rank (the smaller recorded one)",
        choices=PAIR_ORDERS,
        essential=True,
    )
    pair_frames: int = arg(
        8,
        "--pairs: frames of an episode, evenly spaced with the last one, whose mean is its score",
        minimum=1,
        maximum=10_000,
        read_if=given("pairs"),
    )
    progress_coef: float = arg(
        1.0, "weight of the progress regression relative to the cross-entropy or the loss of --pairs", minimum=0
    )
    failure_progress_cap: float = arg(
        0.5,
        "upper bound of the progress of frames from failed episodes",
        minimum=0,
        maximum=1,
        read_if=given("progress_coef"),
    )

    @property
    def pairs_per_step(self) -> int:
        """Pairs per optimizer step, so that their frames make a batch."""
        return self.train_batch_size // (2 * self.pair_frames)
