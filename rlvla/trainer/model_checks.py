"""Whether a checkpoint can be a start of training: settings, statistics, adapters, tokens that mean something."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlvla.envs.base import Observation
from rlvla.experience import Experience
from rlvla.models.actor import Actor
from rlvla.models.config import ActorConfig
from rlvla.models.lora import lora_layers
from rlvla.models.vla.attention import require_flash_attention
from rlvla.models.vla.checkpoint import read_config
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.trainer.demonstrations import Demonstrations
from rlvla.utils.errors import ConfigError

# Entropy of the action tokens, as a share of the uniform distribution's, above which they say nothing.
UNIFORM_SHARE = 0.99


def checkpoint_overrides(folder: Path, flags: Any) -> dict[str, Any]:
    """Settings of the command line that replace or complete those of a checkpoint's config.json.

    Args:
        folder: the checkpoint.
        flags: has `center_crop`, `model_variant`, `platform` and `action_chunk_len`.
    """
    overrides = {name: getattr(flags, name) for name in ("center_crop", "model_variant", "platform")}
    # A chunk length completes a public file, which does not tell it; it never changes one that does.
    if flags.action_chunk_len is not None and read_config(folder).get("action_chunk_len") is None:
        overrides["action_chunk_len"] = flags.action_chunk_len
    return {name: value for name, value in overrides.items() if value is not None}


def statistics_problems(config: OpenVLAConfig, statistics: dict[str, Any]) -> list[str]:
    """Statistics whose dimensions are not those of the model."""
    found = []
    wanted = {"action": config.action_dim, "proprio": config.proprio_dim if config.use_proprio else None}
    for entry, dims in wanted.items():
        if dims is None:
            continue
        ranges = statistics.get(entry) or {}
        lengths = {len(v) for k, v in ranges.items() if k in ("q01", "q99", "min", "max")}
        if lengths != {dims}:
            has = f"have {sorted(lengths)} dimensions" if lengths else "are missing"
            found.append(
                f"the {entry} statistics {has}, but the model's {entry} has {dims}; choose another --unnorm_key"
            )
    return found


def actor_problems(config: OpenVLAConfig, actor: ActorConfig) -> list[str]:
    """Adapters without a place, a kernel that is not there."""
    found: list[str] = []
    try:
        if actor.attn_implementation != "sdpa":
            require_flash_attention()
        if actor.lora_rank:
            with torch.device("meta"):
                vla = OpenVLAForActionPrediction(config)
            lora_layers(vla, actor.lora_targets, vision=not actor.freeze_vision_backbone)
    except ConfigError as error:
        found += error.problems
    if actor.lora_targets != ActorConfig.lora_targets and not actor.lora_rank:
        found.append("--lora_targets has no effect without adapters; give --lora_rank")
    return found


@torch.no_grad()
def check_tokens_mean_something(actor: Actor, observations: Sequence[Observation]) -> float:
    """The entropy of the action tokens at real observations, as a share of the uniform distribution's.

    Raises:
        ConfigError: the tokens are as good as random, as those of a policy trained with a regression head are.
    """
    proprio = None if observations[0].proprio is None else np.stack([o.proprio for o in observations])
    rows = Experience(
        images=torch.from_numpy(np.stack([o.images for o in observations])),
        proprio=None if proprio is None else torch.from_numpy(proprio),
        instructions=[o.instruction for o in observations],
        action_tokens=torch.zeros(len(observations), actor.tokens_per_decision, dtype=torch.int64),
    )
    _, entropy = actor(**actor.score(rows, 1.0))
    share = float(entropy[:, actor.inputs.effective_tokens.to(entropy.device)].mean()) / math.log(
        actor.inputs.config.n_action_bins
    )
    if share >= UNIFORM_SHARE:
        raise ConfigError(
            f"the action tokens of this checkpoint are as good as random: their entropy is {100 * share:.1f} % of the "
            "uniform distribution's. It was trained with a regression head, or for another --model_variant; fine-tune "
            "it on tokens first (cli/train_sft_vla.py)"
        )
    return share


def mismatch_with_policy(
    demos: Demonstrations, path: str, config: OpenVLAConfig, folder: str, center_crop: bool | None
) -> list[str]:
    """What keeps a policy from being trained on demonstrations: dimensions, cameras, pixels, proprioception.

    Args:
        demos: the episodes.
        path: where they come from, for the messages.
        config: of the policy.
        folder: where it comes from, for the messages.
        center_crop: what replaces the setting of its config.json, or None.
    """
    problems = []
    cameras, size = demos.images[0].shape[1:3]
    dims = demos.actions[0].shape[1]
    if dims != config.action_dim:
        problems.append(f"{path} has {dims} action dimensions; {folder} predicts {config.action_dim}")
    if config.num_images_in_input not in (None, cameras):
        problems.append(
            f"{path} shows {cameras} camera(s); {folder} takes {config.num_images_in_input}; choose with --cameras"
        )
    cropped = config.center_crop if center_crop is None else center_crop
    if config.image_preprocessing == "none" and not cropped and size != config.image_size:
        problems.append(f"{path} has images of {size} pixels; {folder} takes {config.image_size}")
    if config.use_proprio and demos.proprio is None:
        problems.append(f"{folder} takes proprioception, which {path} does not hold")
    elif config.use_proprio and demos.proprio and demos.proprio[0].shape[1] != config.proprio_dim:
        length = demos.proprio[0].shape[1]
        problems.append(f"{path} has {length} numbers of proprioception; {folder} takes {config.proprio_dim}")
    return problems
