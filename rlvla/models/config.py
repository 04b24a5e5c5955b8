"""Flags of how a policy checkpoint is prepared for training."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlvla.models.vla.choices import ATTENTION_IMPLEMENTATIONS
from rlvla.utils.arguments import arg


@dataclass(frozen=True)
class ActorConfig:
    """How a policy checkpoint is prepared for training."""

    lora_rank: int = arg(0, "rank of LoRA adapters on the layers of --lora_targets (0: train all weights)", minimum=0)
    lora_alpha: int = arg(16, "LoRA scale is lora_alpha / lora_rank", minimum=1)
    lora_targets: tuple[str, ...] = arg(
        ("language",),
        "what gets adapters: language (every linear layer of the language model), all-linear (those of towers and "
        "projectors too), or names of layers such as q_proj v_proj",
        nargs="+",
        metavar="NAME",
    )
    freeze_vision_backbone: bool = arg(
        False, "train neither the vision towers, those of a critic included, nor adapters on them"
    )
    gradient_checkpointing: bool = arg(
        False, "recompute activations of towers and decoder in the backward pass, also of a critic"
    )
    attn_implementation: str = arg(
        "sdpa",
        "attention kernel of the decoder, also of critic, reference and --reward_pretrain; flash_attention_2 needs a "
        "GPU and the flash-attn package",
        choices=ATTENTION_IMPLEMENTATIONS,
    )

    def without_adapters(self) -> ActorConfig:
        """The same for the networks beside the policy: they have no adapters."""
        return replace(self, lora_rank=0, lora_targets=ActorConfig.lora_targets)
