"""The vision-language model inside SmolVLA: its folder and its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlvla.models.lerobot.prompts import TOKENIZER_FILES, find_folder
from rlvla.models.sizes import size_problems
from rlvla.utils.data_files import fits, read_json
from rlvla.utils.errors import ConfigError, Problem

CONFIG_FILE = "config.json"
_FILES = (CONFIG_FILE, *TOKENIZER_FILES)
_MULTIPLE = 256  # widths of the expert's MLPs are multiples of it


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a Llama decoder.

    Attributes:
        width: of the residual stream.
        mlp_width: of the hidden layers of the MLPs.
        heads: of the queries.
        kv_heads: of keys and values.
        head_dim: width of a head.
        eps: of the RMS norms.
        attention_bias: whether the projections of the attention have biases.
        mlp_bias: whether the projections of the MLPs have biases.
    """

    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False

    def expert(self, multiplier: float) -> DecoderSizes:
        """Sizes of an expert whose residual stream is `multiplier` times as wide."""
        width = int(self.width * multiplier)
        hidden = int(4 * int(2 * width / 3))
        hidden = _MULTIPLE * -(-hidden // _MULTIPLE)
        return replace(self, width=width, mlp_width=hidden)


@dataclass(frozen=True)
class VlmConfig:
    """Sizes of a SmolVLM.

    Attributes:
        text: of its decoder.
        layers: number of decoder layers in its folder.
        vocabulary: rows of the embedding.
        scale_factor: pixel shuffle: s x s patches become one token.
        vision: config of the vision tower, of class `SmolVLMVisionConfig`.
        tied: whether the head shares the weights of the embedding.
    """

    text: DecoderSizes
    layers: int
    vocabulary: int
    scale_factor: int
    vision: Any
    tied: bool

    def image_problem(self, size: int | None) -> str | None:
        """Reason why images of `size` x `size` pixels cannot be read, or None."""
        unit = self.vision.patch_size * self.scale_factor
        if size is not None and size % unit:
            return (
                f"resize_imgs_with_padding is {size}; with patches of {self.vision.patch_size} pixels and pixel "
                f"shuffle {self.scale_factor} it must be a multiple of {unit}"
            )
        return None

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], where: Path) -> VlmConfig:
        """Read the config.json of a SmolVLM.

        Raises:
            ConfigError: another kind of model, or inconsistent sizes.
        """
        if raw.get("model_type") != "smolvlm":
            reason = f"model_type is {raw.get('model_type')!r}, not 'smolvlm', as vlm_model_name needs"
            raise ConfigError.of(None, "mismatch", f"{where}: {reason}")
        from transformers.activations import ACT2FN
        from transformers.models.smolvlm.configuration_smolvlm import SmolVLMConfig

        try:
            config: Any = SmolVLMConfig.from_dict(dict(raw))
            text, vision = config.text_config, config.vision_config
            head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            sizes = DecoderSizes(
                text.hidden_size,
                text.intermediate_size,
                text.num_attention_heads,
                text.num_key_value_heads,
                head_dim,
                text.rms_norm_eps,
                bool(getattr(text, "attention_bias", False)),
                bool(getattr(text, "mlp_bias", False)),
            )
            activation, scale = text.hidden_act, config.scale_factor
            layers, vocabulary = text.num_hidden_layers, text.vocab_size
        except Exception as error:  # transformers checks the types of its settings with several kinds of exceptions
            reason = " ".join(str(error).split())[:200]
            raise ConfigError.of(
                None, "invalid_file", f"{where} is not the configuration of a SmolVLM ({reason})"
            ) from None
        whole = {"scale_factor": scale, "image_size": vision.image_size, "patch_size": vision.patch_size}
        whole |= {"hidden_size": sizes.width, "num_attention_heads": sizes.heads, "head_dim": head_dim}
        whole |= {"num_key_value_heads": sizes.kv_heads, "num_hidden_layers": layers, "vocab_size": vocabulary}
        whole |= {"intermediate_size": sizes.mlp_width}
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        whole |= {f"{name} of vision_config": getattr(vision, name) for name in names}
        problems = size_problems(whole, layers="num_hidden_layers")
        for name, eps in {"rms_norm_eps": sizes.eps, "layer_norm_eps of vision_config": vision.layer_norm_eps}.items():
            if not fits(eps, float) or eps <= 0:
                problems.append(f"{name} is {eps!r}, not a positive number")
        if not problems:
            if sizes.heads % sizes.kv_heads or head_dim % 2:
                problems.append(f"{sizes.heads} heads, {sizes.kv_heads} key-value heads of width {head_dim} do not fit")
            if vision.hidden_size % vision.num_attention_heads:
                problems.append(f"vision width {vision.hidden_size} does not fit {vision.num_attention_heads} heads")
        if activation != "silu":
            problems.append(f"hidden_act is {activation!r}; silu is supported")
        if vision.hidden_act not in ACT2FN:
            problems.append(f"hidden_act of vision_config is {vision.hidden_act!r}, which transformers does not know")
        if vision.num_channels != 3:
            problems.append(f"num_channels of vision_config is {vision.num_channels!r}; images have 3")
        if problems:
            raise ConfigError(Problem(None, "invalid_file", f"{where}: {text}") for text in problems)
        tied = bool(raw.get("tie_word_embeddings", False))
        return cls(sizes, layers, vocabulary, scale, vision, tied)


def find_vlm(name: str, policy_folder: Path) -> Path:
    """Local folder of the model under `vlm_model_name`; see `find_folder`."""
    return find_folder(name, policy_folder, CONFIG_FILE, setting=f"{CONFIG_FILE}: vlm_model_name", files=_FILES)


def read_vlm(folder: Path) -> VlmConfig:
    """Sizes from the config.json of a folder; errors as in `VlmConfig.from_json`."""
    return VlmConfig.from_json(read_json(folder / CONFIG_FILE), folder / CONFIG_FILE)
