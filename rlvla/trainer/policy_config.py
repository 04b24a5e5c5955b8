"""Flags of the checkpoint that is trained or evaluated."""

from __future__ import annotations

from dataclasses import dataclass

from rlvla.models.vla.choices import MODEL_VARIANTS
from rlvla.models.vla.platforms import PLATFORMS
from rlvla.utils.arguments import arg

VARIANT_HELP = (
    "how the checkpoint decodes actions: oft (a chunk at once) or autoregressive (one action, token by token); told by "
    "its files where they can"
)
PLATFORM_HELP = (
    "what a public checkpoint was trained for: sets chunk, action dimensions, normalisation, LIBERO's image treatment "
    "and gripper where its config.json is silent (default: config.json tells all)"
)


@dataclass(frozen=True)
class PolicyConfig:
    """The checkpoint, and what it expects."""

    pretrain: str = arg("runs/sft/policy", "checkpoint folder of the policy", metavar="DIR")
    unnorm_key: str | None = arg(
        None, "entry of the dataset statistics (default: the suite's name, or the only one)", metavar="KEY"
    )
    action_chunk_len: int | None = arg(
        None, "actions per decision; must agree with the checkpoint (default: the checkpoint's)", minimum=1
    )
    num_images_in_input: int | None = arg(
        None,
        "cameras per decision; must agree with --cameras and the checkpoint (default: the checkpoint's)",
        minimum=1,
    )
    center_crop: bool | None = arg(None, "crop images to 90 % of their area (default: the checkpoint's)")
    model_variant: str | None = arg(None, VARIANT_HELP, choices=MODEL_VARIANTS)
    platform: str | None = arg(None, PLATFORM_HELP, choices=tuple(PLATFORMS))
