"""A small pi0 or pi0.5 with random weights and its own tokenizer, as a LeRobot folder."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from rlvla.models.lerobot.config import IMAGES, Features
from rlvla.models.lerobot.folder import CONFIG_FILE
from rlvla.models.lerobot.tiny import initialize, new_config, write_new
from rlvla.models.pi0.checkpoint import HEAD
from rlvla.models.pi0.config import PALIGEMMA, PI0, PI05, SIZES_FILE, GemmaSizes, Pi0Config, Sizes, VisionSizes
from rlvla.models.pi0.network import VLM, Pi0Network

_PAD, _END, _START, _UNKNOWN = "<pad>", "<eos>", "<bos>", "<unk>"
_SPECIAL = (_PAD, _END, _START, _UNKNOWN)
_BYTES = tuple(f"<0x{number:02X}>" for number in range(256))
_TEXT_TOKENS = 1024
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # for a space in Gemma's vocabulary

TINY = Sizes(
    vlm=GemmaSizes(width=64, depth=2, mlp_width=128, heads=4, head_dim=16),
    expert=GemmaSizes(width=48, depth=2, mlp_width=96, heads=4, head_dim=16),
    vision=VisionSizes(width=32, depth=1, mlp_width=64, heads=2, patch_size=16),
    vocabulary=_TEXT_TOKENS,
)


def build_tiny_pi0(
    folder: str | Path,
    *,
    sentences: Sequence[str],
    statistics: Mapping[str, Mapping[str, Sequence[float]]],
    family: str = PI0,
    cameras: Sequence[str] = ("image",),
    sizes: Sizes = TINY,
    image_size: int = 64,
    chunk_size: int = 8,
    state_dim: int = 8,
    action_dim: int = 7,
    seed: int = 0,
    **settings: Any,
) -> Path:
    """Write a policy and return its folder; same arguments give identical files.

    LeRobot itself knows only the full sizes: it ignores the file sizes.json, and cannot load such a folder.

    Args:
        folder: created if absent.
        sentences: task instructions to train the tokenizer on.
        statistics: "observation.state" and "action" -> statistic -> numbers.
        family: "pi0" or "pi05".
        cameras: names of the image features, without `observation.images.`.
        sizes: of the network.
        image_size: side of its images, a multiple of the patch size.
        chunk_size: C, actions that are denoised together.
        state_dim: P, length of the state vector.
        action_dim: D, dimensions of an action.
        seed: of the weights.
        **settings: further entries of config.json; by default all C actions are executed and nothing is padded.
    """
    folder = Path(folder)
    features = Features.of([IMAGES + camera for camera in cameras], (image_size, image_size), state_dim, action_dim)
    defaults = {
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "dtype": "float32",
        "num_inference_steps": 10,
        "image_resolution": [image_size, image_size],
        "empty_cameras": 0,
        "tokenizer_max_length": 200 if family == PI05 else 48,
        "freeze_vision_encoder": False,
        "train_expert_only": False,
    }
    mode = "QUANTILES" if family == PI05 else "MEAN_STD"
    raw = new_config(family, features, mode=mode, chunk_size=chunk_size, **{**defaults, **settings})
    config = Pi0Config.from_json(raw, folder / CONFIG_FILE)
    tensors = initialize(Pi0Network(config, sizes), seed)
    tensors[HEAD] = tensors.pop(f"{VLM}model.language_model.embed_tokens.weight")  # the only one that LeRobot writes
    files = {f"{PALIGEMMA}/{name}": content for name, content in tokenizer_files(sentences).items()}
    files[SIZES_FILE] = asdict(sizes)
    write_new(folder, config, tensors, statistics, padding="max_length", files=files)
    return folder


def tokenizer_files(sentences: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The files of a tokenizer like PaliGemma's by name, with at most as many tokens as `TINY` has."""
    tokenizer = Tokenizer(models.BPE(unk_token=_UNKNOWN, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(_SPACE, "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=_TEXT_TOKENS,
        min_frequency=1,
        special_tokens=[AddedToken(token, normalized=False) for token in (*_SPECIAL, *_BYTES)],
        initial_alphabet=sorted(set(string.printable) - set(string.whitespace) | {"\n", _SPACE}),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"{sentence}\n" for sentence in sentences], trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    start = tokenizer.token_to_id(_START)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_START} $A", pair=f"{_START} $A {_START} $B", special_tokens=[(_START, start)]
    )
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in _SPECIAL]
    special = {"pad_token": _PAD, "bos_token": _START, "eos_token": _END, "unk_token": _UNKNOWN}
    settings = {"tokenizer_class": "GemmaTokenizer", "clean_up_tokenization_spaces": False, "model_max_length": 2048}
    return {
        "tokenizer.json": content,
        "tokenizer_config.json": {**settings, "add_bos_token": True, "add_eos_token": False, **special},
        "special_tokens_map.json": special,
    }
