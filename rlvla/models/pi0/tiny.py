"""A small pi0 or pi0.5 with random weights and its own tokenizer, as a LeRobot folder."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from rlvla.models.lerobot.folder import CONFIG_FILE, write_folder
from rlvla.models.lerobot.processors import NORMALIZER, UNNORMALIZER, pipelines, tokenizer_settings
from rlvla.models.lerobot.tiny import features_as_json, initialize, statistics_tensors, tiny_features
from rlvla.models.pi0.checkpoint import HEAD, TEXT_STEPS
from rlvla.models.pi0.config import PI0, PI05, Pi0Config
from rlvla.models.pi0.network import VLM, Pi0Network
from rlvla.models.pi0.prompts import PALIGEMMA
from rlvla.models.pi0.sizes import SIZES_FILE, GemmaSizes, Sizes, VisionSizes
from rlvla.utils.errors import ConfigError

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
    n_action_steps: int | None = None,
    state_dim: int = 8,
    action_dim: int = 7,
    max_state_dim: int | None = None,
    max_action_dim: int | None = None,
    num_steps: int = 10,
    normalization: str | None = None,
    empty_cameras: int = 0,
    tokenizer_max_length: int | None = None,
    seed: int = 0,
) -> Path:
    """Write a policy and return its folder; same arguments give identical files.

    LeRobot itself knows only the full sizes: it ignores the file sizes.json, and cannot load such a folder.

    Args:
        folder: created if absent.
        sentences: task instructions to train the tokenizer on.
        statistics: "observation.state" and "action" -> statistic -> numbers; at least those of `normalization`.
        family: "pi0" or "pi05".
        cameras: names of the image features, without `observation.images.`.
        sizes: of the network.
        image_size: side of its images, a multiple of the patch size.
        chunk_size: C, actions that are denoised together.
        n_action_steps: how many of them are executed; None: all.
        state_dim: P, length of the state vector.
        action_dim: D, dimensions of an action.
        max_state_dim: states are padded to this length; None: not at all.
        max_action_dim: actions are padded to this length; None: not at all.
        num_steps: denoising steps.
        normalization: mode for states and actions; None: that of the family.
        empty_cameras: image features that may be missing.
        tokenizer_max_length: longest prompt in tokens; None: that of the family.
        seed: of the weights.

    Raises:
        ConfigError: sizes that no policy can have.
    """
    folder = Path(folder)
    features = tiny_features(cameras, image_size, state_dim, action_dim)
    in_prompt = family == PI05
    mode = normalization or ("QUANTILES" if in_prompt else "MEAN_STD")
    modes = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    length = tokenizer_max_length or (200 if in_prompt else 48)
    raw = {
        "type": family,
        "n_obs_steps": 1,
        "input_features": features_as_json(features.inputs),
        "output_features": features_as_json(features.outputs),
        "device": "cpu",
        "normalization_mapping": modes,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "dtype": "float32",
        "chunk_size": chunk_size,
        "n_action_steps": n_action_steps or chunk_size,
        "max_state_dim": max_state_dim or state_dim,
        "max_action_dim": max_action_dim or action_dim,
        "num_inference_steps": num_steps,
        "image_resolution": [image_size, image_size],
        "empty_cameras": empty_cameras,
        "tokenizer_max_length": length,
        "freeze_vision_encoder": False,
        "train_expert_only": False,
    }
    config = Pi0Config.from_json(raw, folder / CONFIG_FILE)
    problems = sizes.problems()
    if image_size % sizes.vision.patch_size:
        problems.append(f"{image_size} pixels are no multiple of the {sizes.vision.patch_size} pixels of a patch")
    if problems:
        raise ConfigError(problems)
    files = tokenizer_files(sentences)
    network = Pi0Network(config, sizes)
    initialize(network, torch.Generator().manual_seed(seed))
    state = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    state[HEAD] = state.pop(f"{VLM}model.language_model.embed_tokens.weight")  # the only one that LeRobot writes
    before = f"policy_preprocessor_step_{2 if in_prompt else 5}_{NORMALIZER}.safetensors"
    after = f"policy_postprocessor_step_0_{UNNORMALIZER}.safetensors"
    text = tokenizer_settings(PALIGEMMA, length, "max_length")
    kinds = {key: (feature.kind, feature.shape) for key, feature in {**features.inputs, **features.outputs}.items()}
    steps = pipelines(
        kinds,
        modes,
        tokenizer=text,
        text_step=TEXT_STEPS[family],
        state_files=(before, after),
        normalize_first=in_prompt,
    )
    contents: dict[str, Mapping[str, Any]] = {
        CONFIG_FILE: raw,
        SIZES_FILE: asdict(sizes),
        **steps,
        **{f"{PALIGEMMA}/{name}": content for name, content in files.items()},
    }
    kept = statistics_tensors(statistics, mode)
    write_folder(folder, state, companions={}, contents=contents, states=dict.fromkeys((before, after), kept))
    return folder


def tokenizer_files(sentences: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The files of a tokenizer like PaliGemma's by name, with at most as many tokens as `TINY` has.

    Raises:
        ConfigError: no sentences.
    """
    if not any(sentence.strip() for sentence in sentences):
        raise ConfigError("the tokenizer needs at least one task sentence to learn its words from")
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
