"""A small SmolVLA with random weights, its own vision-language model and tokenizer, as a LeRobot folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from rlvla.models.flow.settings import FlowSettings
from rlvla.models.lerobot.config import Features, image_feature
from rlvla.models.lerobot.folder import CONFIG_FILE
from rlvla.models.lerobot.new import NewPolicyFacts, NewPolicySizes
from rlvla.models.lerobot.tiny import initialize, new_config, write_new
from rlvla.models.smolvla.config import MODEL_TYPE, SmolVLAConfig
from rlvla.models.smolvla.network import SmolVLANetwork
from rlvla.models.smolvla.vlm import VlmConfig
from rlvla.utils.errors import ConfigError, Problem

VLM_FOLDER = "vlm"
END, PAD, IMAGE, AROUND_IMAGE, GLOBAL_IMAGE = (
    "<|im_end|>",
    "<|endoftext|>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
)
_SPECIAL = (PAD, END, IMAGE, AROUND_IMAGE, GLOBAL_IMAGE)
_TEXT_TOKENS = 2048
_HEAD_DIM = 32
_MULTIPLE_OF = 8


@dataclass(frozen=True)
class TinyVlm:
    """Sizes of the vision-language model of a tiny policy.

    Attributes:
        image_size: side of the images that its positions are for, in pixels.
        patch_size: side of a patch in pixels.
        scale_factor: pixel shuffle; patches per token and side.
        vision_dim: width of the vision tower, a multiple of 32.
        vision_depth: its layers.
        dim: width of the decoder, a multiple of 32.
        layers: of the decoder.
    """

    image_size: int = 64
    patch_size: int = 8
    scale_factor: int = 2
    vision_dim: int = 64
    vision_depth: int = 2
    dim: int = 96
    layers: int = 2


def build_tiny_smolvla(
    folder: str | Path,
    *,
    sentences: Sequence[str],
    statistics: Mapping[str, Mapping[str, Sequence[float]]],
    cameras: Sequence[str] = ("image",),
    vlm: TinyVlm | None = None,
    chunk_size: int = 8,
    state_dim: int = 8,
    action_dim: int = 7,
    normalization: str = "MEAN_STD",
    seed: int = 0,
    **settings: Any,
) -> Path:
    """Write a policy of about half a million parameters and return its folder; equal arguments give equal files.

    Args:
        folder: created if absent.
        sentences: task instructions to train the tokenizer on.
        statistics: "observation.state" and "action" -> statistic -> numbers, as `normalization` needs.
        cameras: names of the image features; `observation.images.` may be left out.
        vlm: sizes of the vision-language model, which goes into the folder `vlm`; None: the defaults.
        chunk_size: C, actions that are denoised together.
        state_dim: P, length of the state vector.
        action_dim: D, dimensions of an action.
        normalization: mode for states and actions.
        seed: of the weights.
        **settings: further entries of config.json; by default all C actions are executed and nothing is padded.

    Raises:
        ConfigError: sizes that no policy can have.
    """
    folder, sizes = Path(folder), vlm or TinyVlm()
    inner = tiny_vlm_files(sentences, sizes)
    features = Features.of([image_feature(name) for name in cameras], (sizes.image_size,) * 2, state_dim, action_dim)
    defaults = {
        "resize_imgs_with_padding": [sizes.image_size, sizes.image_size],
        "empty_cameras": 0,
        "tokenizer_max_length": 48,
        "num_steps": 10,
        "freeze_vision_encoder": False,
        "train_expert_only": False,
        "train_state_proj": True,
        "vlm_model_name": VLM_FOLDER,
        "load_vlm_weights": False,
        "attention_mode": "cross_attn",
        "num_expert_layers": -1,
        "num_vlm_layers": sizes.layers,
        "self_attn_every_n_layers": 2,
        "expert_width_multiplier": 0.75,
    }
    raw = new_config(MODEL_TYPE, features, mode=normalization, chunk_size=chunk_size, **{**defaults, **settings})
    config = SmolVLAConfig.from_json(raw, folder / CONFIG_FILE)
    vlm_config = VlmConfig.from_json(inner[CONFIG_FILE], folder / VLM_FOLDER / CONFIG_FILE)
    problem = vlm_config.image_problem(config.image_size)
    if problem:
        raise ConfigError(problem)
    tensors = initialize(SmolVLANetwork(config, vlm_config), seed)
    files = {f"{VLM_FOLDER}/{name}": content for name, content in inner.items()}
    write_new(folder, config, tensors, statistics, padding="longest", files=files)
    return folder


def new_policy(folder: Path, facts: NewPolicyFacts, sizes: NewPolicySizes, *, seed: int) -> None:
    """A policy for given demonstrations; image sides are padded to a multiple of a token's."""
    names = {"llm_dim": "dim", "llm_layers": "layers"}
    vlm = TinyVlm(**{names.get(name, name): value for name, value in sizes.given().items()})
    unit = vlm.patch_size * vlm.scale_factor
    build_tiny_smolvla(
        folder,
        sentences=facts.sentences,
        statistics=facts.lerobot_statistics(),
        cameras=list(facts.keys.values()),
        vlm=replace(vlm, image_size=-(-max(facts.image_shape) // unit) * unit),
        chunk_size=facts.chunk_len,
        state_dim=facts.state_dim,
        action_dim=facts.action_dim,
        num_steps=FlowSettings.steps,
        seed=seed,
    )


def new_policy_problems(sizes: NewPolicySizes) -> list[Problem]:
    """Widths that cannot be split into heads."""
    given = sizes.given()
    return [
        Problem(f"tiny_{name}", "not_divisible", f"--tiny_{name} {given[name]} must be a multiple of {_HEAD_DIM} here")
        for name in ("vision_dim", "llm_dim")
        if given.get(name, 0) % _HEAD_DIM
    ]


def tiny_vlm_files(sentences: Sequence[str], sizes: TinyVlm) -> dict[str, dict[str, Any]]:
    """The files of the vision-language model's folder by name, those that only LeRobot reads included.

    Raises:
        ConfigError: no sentences, or widths that cannot be split into heads.
    """
    if sizes.dim % _HEAD_DIM or sizes.vision_dim % _HEAD_DIM:
        text = f"the widths {sizes.dim} and {sizes.vision_dim} of a tiny policy must be multiples of {_HEAD_DIM}"
        raise ConfigError(text)
    tokenizer = _train_tokenizer(sentences)
    content = json.loads(tokenizer.to_str())
    merges = content["model"]["merges"]
    # Older versions of tokenizers do not know merges as pairs.
    content["model"]["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
    special = {"pad_token": PAD, "bos_token": END, "eos_token": END, "unk_token": PAD}
    extra = {"image_token": IMAGE, "fake_image_token": AROUND_IMAGE, "global_image_token": GLOBAL_IMAGE}
    half, side = [0.5, 0.5, 0.5], {"longest_edge": sizes.image_size}
    return {
        CONFIG_FILE: _vlm_json(tokenizer, sizes),
        "tokenizer.json": content,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "processor_class": "SmolVLMProcessor",
            "padding_side": "right",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 2048,
            "extra_special_tokens": extra,
            **special,
        },
        "special_tokens_map.json": special,
        "preprocessor_config.json": {
            "image_processor_type": "SmolVLMImageProcessor",
            "processor_class": "SmolVLMProcessor",
            "image_mean": half,
            "image_std": half,
            "max_image_size": side,
            "size": side,
            "do_image_splitting": False,
            "video_sampling": {"fps": 1, "max_frames": 8, "video_size": side},
        },
        "processor_config.json": {"processor_class": "SmolVLMProcessor", "image_seq_len": 1},
    }


def _vlm_json(tokenizer: Tokenizer, sizes: TinyVlm) -> dict[str, Any]:
    pad, end = tokenizer.token_to_id(PAD), tokenizer.token_to_id(END)
    rows = -(-tokenizer.get_vocab_size() // _MULTIPLE_OF) * _MULTIPLE_OF
    return {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "image_token_id": tokenizer.token_to_id(IMAGE),
        "pad_token_id": pad,
        "scale_factor": sizes.scale_factor,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "llama",
            "hidden_size": sizes.dim,
            "intermediate_size": 2 * sizes.dim,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.dim // _HEAD_DIM,
            "num_key_value_heads": 1,
            "head_dim": _HEAD_DIM,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
            "vocab_size": rows,
            "pad_token_id": pad,
            "bos_token_id": end,
            "eos_token_id": end,
            "tie_word_embeddings": False,
        },
        "vision_config": {
            "model_type": "smolvlm_vision",
            "hidden_size": sizes.vision_dim,
            "intermediate_size": 2 * sizes.vision_dim,
            "num_hidden_layers": sizes.vision_depth,
            "num_attention_heads": sizes.vision_dim // _HEAD_DIM,
            "image_size": sizes.image_size,
            "patch_size": sizes.patch_size,
            "hidden_act": "gelu_pytorch_tanh",
        },
    }


def _train_tokenizer(sentences: Sequence[str]) -> Tokenizer:
    """Byte-level BPE over the sentences, so that any text can be encoded."""
    if not any(sentence.strip() for sentence in sentences):
        raise ConfigError("the tokenizer needs at least one task sentence to learn its words from")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_TEXT_TOKENS,
        min_frequency=1,
        special_tokens=[AddedToken(token, normalized=False) for token in _SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"{sentence}\n" for sentence in sentences], trainer)
    return tokenizer
