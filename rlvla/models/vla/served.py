"""The decoder of an autoregressive policy, for a program that decodes action tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlvla.models.policy import Decision, Prompts
from rlvla.models.vla.inputs import VLAInputs
from rlvla.models.vla.openvla import DecoderInput

_PREFIX = "language_model."
# Tensors with a row per word, of which only those of action tokens are served.
_BY_WORD = ("model.embed_tokens.weight", "lm_head.weight")
# Of the decoder's configuration; the rest says nothing about how it computes.
_KEPT = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_parameters"),
    *("attention_bias", "mlp_bias", "tie_word_embeddings"),
)


class ServedDecoder:
    """See `TokenDecoder`.

    Args:
        inputs: of the policy.
        weights: returns the policy's current tensors under their names in the public format.
        embed: returns what the decoder reads before the first token; arguments as `TokenDecoder.embed`.
    """

    def __init__(
        self, inputs: VLAInputs, weights: Callable[[], Mapping[str, Tensor]], embed: Callable[..., DecoderInput]
    ):
        self._inputs, self._weights, self._embed = inputs, weights, embed

    def config(self) -> dict[str, Any]:
        """See `TokenDecoder.config`."""
        config = self._inputs.config
        values = config.text_config.to_dict()
        kept = {name: values[name] for name in _KEPT if values.get(name) is not None}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **kept,
            "vocab_size": config.n_action_bins,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }

    def weights(self) -> Mapping[str, Tensor]:
        """See `TokenDecoder.weights`."""
        end = self._inputs.config.base_vocab_size
        return _ActionWords(self._weights(), end - self._inputs.config.n_action_bins, end)

    @torch.inference_mode()
    def embed(self, images: np.ndarray, proprio: np.ndarray | None, instructions: Sequence[str]) -> Prompts:
        """See `TokenDecoder.embed`."""
        found = self._embed(images, proprio, instructions)
        batch, length = found.embeddings.shape[:2]
        return Prompts(found.embeddings, [length] * batch if found.lengths is None else found.lengths.tolist())

    def decision(self, tokens: np.ndarray, log_probs: np.ndarray) -> Decision:
        """See `TokenDecoder.decision`."""
        return Decision(self._inputs.decode_actions(tokens), log_probs, {"tokens": tokens})


class _ActionWords(Mapping[str, Tensor]):
    """The language model's tensors among those of a policy, of embedding and head only the rows of action tokens."""

    def __init__(self, weights: Mapping[str, Tensor], first: int, end: int):
        self._weights, self._rows = weights, slice(first, end)
        self._names = [name.removeprefix(_PREFIX) for name in weights if name.startswith(_PREFIX)]

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._weights[_PREFIX + name].detach()
        return tensor[self._rows] if name in _BY_WORD else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
