"""Building a new tiny policy to start from."""

from __future__ import annotations

from pathlib import Path

from rlvla.data.demonstrations import Demonstrations
from rlvla.models.vla.choices import REGRESSION
from rlvla.models.vla.tiny import LLM_HEAD_WIDTH, build_tiny, default_heads
from rlvla.trainer.supervised.config import RewardRunConfig, SFTRunConfig, TinyConfig


def _new_model_problems(run: SFTRunConfig, tiny: TinyConfig, demos: Demonstrations | None) -> list[str]:
    """Problems of the sizes of a tiny model, and of its fit to the demonstrations."""
    problems = []
    if tiny.tiny_vision_dim % 4:
        problems.append(f"--tiny_vision_dim {tiny.tiny_vision_dim} must be a multiple of 4")
    heads = default_heads(max(1, tiny.tiny_llm_dim), LLM_HEAD_WIDTH)
    if tiny.tiny_llm_dim // heads % 2:  # rotary embeddings rotate pairs of channels
        problems.append(
            f"--tiny_llm_dim {tiny.tiny_llm_dim} gives {heads} head(s) of odd width; take a multiple of "
            f"{LLM_HEAD_WIDTH}"
        )
    if run.model_variant == "autoregressive" and tiny.action_chunk_len not in (None, 1):
        problems.append(
            f"--action_chunk_len {tiny.action_chunk_len}: an autoregressive model predicts one action; leave it out"
        )
    if run.model_variant != REGRESSION and (run.action_std, run.action_std_init) != (None, None):
        problems.append(f"--action_std and --action_std_init need --model_variant {REGRESSION}")
    if run.platform is not None:
        problems.append("--platform describes a public checkpoint; leave it out with --pretrain tiny")
    if demos is None:
        return problems
    size = demos.images[0].shape[2]
    if tiny.tiny_patch_size > 0 and size % tiny.tiny_patch_size:
        problems.append(f"--tiny_patch_size {tiny.tiny_patch_size} must divide the image size {size}")
    if run.unnorm_key is not None and run.unnorm_key not in demos.statistics:
        problems.append(f"--unnorm_key {run.unnorm_key}: {run.demos[0]} has statistics for {sorted(demos.statistics)}")
    return problems


def new_tiny(
    folder: Path,
    demos: Demonstrations,
    run: SFTRunConfig | RewardRunConfig,
    tiny: TinyConfig,
    model_variant: str | None = None,
) -> None:
    """Build a tiny model that fits the demonstrations; `model_variant` defaults to oft."""
    with_proprio = run.use_proprio and demos.proprio is not None
    build_tiny(
        folder,
        sentences=sorted(set(demos.instructions)),
        dataset_statistics=demos.statistics,
        image_size=demos.images[0].shape[2],
        patch_size=tiny.tiny_patch_size,
        vision_dim=tiny.tiny_vision_dim,
        vision_depth=tiny.tiny_vision_depth,
        llm_dim=tiny.tiny_llm_dim,
        llm_mlp_dim=3 * tiny.tiny_llm_dim,
        llm_layers=tiny.tiny_llm_layers,
        model_variant=model_variant or "oft",
        action_chunk_len=tiny.action_chunk_len,
        action_dim=demos.actions[0].shape[1],
        num_images_in_input=demos.images[0].shape[1],
        use_proprio=with_proprio,
        proprio_dim=demos.proprio[0].shape[1] if with_proprio and demos.proprio else None,
        center_crop=bool(run.center_crop),
        action_std=getattr(run, "action_std", None),
        action_std_init=getattr(run, "action_std_init", None),
        seed=run.seed,
    )
