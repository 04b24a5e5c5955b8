"""The settings of reward-model training. Each field is a flag of `cli/train_rm_vla.py`."""

from __future__ import annotations

from dataclasses import dataclass

from rlvla.trainer.config import max_bad_steps_flag
from rlvla.utils.arguments import arg
from rlvla.utils.strategy_config import SCHEDULERS


@dataclass(frozen=True)
class RewardRunConfig:
    """What is trained on what."""

    demos: tuple[str, ...] = arg(
        ("runs/demos/demos.hdf5",),
        "one or more files with episodes: of cli/collect_demos.py --keep all, and of training with --dump_rollouts",
        metavar="FILE",
    )
    pretrain: str = arg("tiny", "policy folder to start from, or 'tiny' for a new small model", metavar="DIR")
    save_path: str = arg("runs/rm", "run folder; the result goes to its subfolder reward_model/", metavar="DIR")
    cameras: tuple[str, ...] = arg((), "cameras of the file to use (default: all of them)", metavar="NAME")
    use_proprio: bool = arg(False, "a new tiny model reads proprio, too")
    center_crop: bool | None = arg(None, "a new tiny model crops images to 90 % of their area (default: no)")
    unnorm_key: str | None = arg(None, "entry of the dataset statistics (default: the only one)", metavar="KEY")
    seed: int = arg(0, "seed of weights, batches and the split", minimum=0)


@dataclass(frozen=True)
class RewardModelConfig:
    """How long and how fast, and what counts."""

    max_epochs: int = arg(6, "passes over the frames", minimum=1)
    train_batch_size: int = arg(64, "frames per optimizer step, over all ranks", minimum=1)
    learning_rate: float = arg(2e-3, "peak learning rate (a 7B model wants about 2e-5 with LoRA)", minimum=0)
    lr_warmup_ratio: float = arg(0.05, "share of the optimizer steps spent warming up", minimum=0, maximum=1)
    lr_scheduler: str = arg("cosine", "learning-rate schedule", choices=SCHEDULERS)
    l2: float = arg(0.01, "AdamW weight decay", minimum=0)
    progress_coef: float = arg(1.0, "weight of the regression of progress beside the cross-entropy", minimum=0)
    failure_progress_cap: float = arg(0.5, "progress that frames of failures may have at most", minimum=0, maximum=1)
    heldout_share: float = arg(0.2, "share of the episodes that is kept for the metrics", above=0, below=1)
    max_bad_steps: int = max_bad_steps_flag()
    logging_steps: int = arg(20, "log metrics every so many optimizer steps", minimum=1)
    use_tensorboard: bool = arg(True, "write TensorBoard event files below --save_path")
    use_wandb: bool = arg(False, "send the same scalars to Weights & Biases (extra rlvla[wandb])")
