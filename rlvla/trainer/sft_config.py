"""The settings of supervised fine-tuning. Each field is a flag of `cli/train_sft_vla.py`."""

from __future__ import annotations

from dataclasses import dataclass

from rlvla.models.vla.choices import MODEL_VARIANTS
from rlvla.models.vla.platforms import PLATFORMS
from rlvla.trainer.config import dry_run_flag, max_bad_steps_flag
from rlvla.trainer.policy_config import PLATFORM_HELP, VARIANT_HELP
from rlvla.utils.arguments import arg
from rlvla.utils.strategy_config import SCHEDULERS


@dataclass(frozen=True)
class SFTRunConfig:
    """What is trained on what."""

    demos: tuple[str, ...] = arg(
        ("runs/demos/demos.hdf5",),
        "demonstrations, one or more of: HDF5 of cli/collect_demos.py or dumped rollouts, a LeRobot folder, LIBERO's "
        "*_demo.hdf5 (one or a folder)",
        metavar="PATH",
    )
    pretrain: str = arg("tiny", "checkpoint folder to start from, or 'tiny' for a new small model", metavar="DIR")
    save_path: str = arg("runs/sft", "run folder; the policy goes to its subfolder policy/", metavar="DIR")
    cameras: tuple[str, ...] = arg((), "cameras of the file to use (default: all of them)", metavar="NAME")
    use_proprio: bool = arg(True, "a new tiny model reads proprio where the demonstrations hold it")
    center_crop: bool | None = arg(None, "crop images to 90 % of their area (default: the checkpoint's, else no)")
    unnorm_key: str | None = arg(None, "entry of the dataset statistics (default: the only one)", metavar="KEY")
    model_variant: str | None = arg(None, f"{VARIANT_HELP} (a new tiny model: oft)", choices=MODEL_VARIANTS)
    platform: str | None = arg(None, PLATFORM_HELP, choices=tuple(PLATFORMS))
    seed: int = arg(0, "seed of weights and batches", minimum=0)
    dry_run: bool = dry_run_flag()


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of a new tiny model (--pretrain tiny)."""

    action_chunk_len: int | None = arg(
        None, "actions per decision (default: the checkpoint's, else 8, or 1 for autoregressive)", minimum=1
    )
    tiny_patch_size: int = arg(8, "side of a patch in pixels", minimum=1)
    tiny_vision_dim: int = arg(48, "width of each vision tower", minimum=4)
    tiny_vision_depth: int = arg(3, "blocks of each vision tower (the last one is not computed)", minimum=2)
    tiny_llm_dim: int = arg(64, "width of the decoder", minimum=4)
    tiny_llm_layers: int = arg(3, "layers of the decoder", minimum=1)


@dataclass(frozen=True)
class SFTConfig:
    """How long and how fast."""

    max_epochs: int = arg(10, "passes over all steps of the demonstrations", minimum=1)
    train_batch_size: int = arg(64, "decisions per optimizer step, over all ranks", minimum=1)
    micro_train_batch_size: int = arg(64, "decisions per forward and backward pass on one rank", minimum=1)
    learning_rate: float = arg(1e-3, "peak learning rate (a 7B model wants about 5e-5 with LoRA)", minimum=0)
    lr_warmup_ratio: float = arg(0.03, "share of the optimizer steps spent warming up", minimum=0, maximum=1)
    lr_scheduler: str = arg("cosine", "learning-rate schedule", choices=SCHEDULERS)
    adam_betas: tuple[float, ...] = arg((0.9, 0.95), "AdamW betas", minimum=0, below=1, nargs=2, metavar="BETA")
    l2: float = arg(0.01, "AdamW weight decay", minimum=0)
    label_smoothing: float = arg(
        0.0, "share of each label spread evenly over all action tokens", minimum=0, maximum=0.9
    )
    max_bad_steps: int = max_bad_steps_flag()
    logging_steps: int = arg(20, "log metrics every so many optimizer steps", minimum=1)
    use_tensorboard: bool = arg(True, "write TensorBoard event files below --save_path")
    use_wandb: bool = arg(False, "send the same scalars to Weights & Biases (extra rlvla[wandb])")

    def optimizer_steps(self, num_rows: int) -> int:
        """Of the whole run; the last batch of an epoch is dropped if it is not full."""
        return self.max_epochs * max(1, num_rows // self.train_batch_size)
