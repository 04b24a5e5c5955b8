"""The decoder of an autoregressive OpenVLA policy, for an inference server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlvla.models.policy import Decision, Prompts

if TYPE_CHECKING:
    from rlvla.models.actor import Actor

_PREFIX = "language_model."
# Tensors with a row per token, cut to the rows of action tokens.
_BY_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")
# Fields of the decoder's configuration that determine its computation.
_KEPT = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_parameters"),
    *("attention_bias", "mlp_bias", "tie_word_embeddings"),
)


class ServedDecoder:
    """Implements `TokenDecoder` for `policy`."""

    def __init__(self, policy: Actor):
        self._policy, self._inputs = policy, policy.inputs

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
        return _ActionTokenWeights(self._policy.full_weights(), end - self._inputs.config.n_action_bins, end)

    @torch.inference_mode()
    def embed(self, images: np.ndarray, proprio: np.ndarray | None, instructions: Sequence[str]) -> Prompts:
        """See `TokenDecoder.embed`."""
        prompts = self._policy.prompt_embeddings(images, proprio, instructions)
        batch, length = prompts.embeddings.shape[:2]
        return Prompts(prompts.embeddings, [length] * batch if prompts.lengths is None else prompts.lengths.tolist())

    def decision(self, tokens: np.ndarray, log_probs: np.ndarray) -> Decision:
        """See `TokenDecoder.decision`."""
        return Decision(self._inputs.decode_actions(tokens), log_probs, {"tokens": tokens})


class _ActionTokenWeights(Mapping[str, Tensor]):
    """The language model's tensors of a policy, with embedding and head restricted to action tokens."""

    def __init__(self, weights: Mapping[str, Tensor], first: int, end: int):
        self._weights, self._rows = weights, slice(first, end)
        self._names = [name.removeprefix(_PREFIX) for name in weights if name.startswith(_PREFIX)]

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._weights[_PREFIX + name].detach()
        return tensor[self._rows] if name in _BY_TOKEN else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
