"""What another program needs in order to decode a policy's action tokens one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from rlvla.models.policy import Decision, PolicySpec


@dataclass(frozen=True)
class Prompts:
    """What is decoded after: observations as embeddings.

    Attributes:
        embeddings: [B, S, d], padded at the end.
        lengths: real positions of each row, B of them.
    """

    embeddings: Tensor
    lengths: list[int]


class TokenDecoder(Protocol):
    """The language model of a policy with `PolicySpec.token_by_token`, cut down to its action tokens.

    Token k of this model is column k of the policy. Embeddings of prompts stay with the policy, so that the model needs
    no other words.
    """

    def config(self) -> dict[str, Any]:
        """Its configuration, as in a config.json of `LlamaForCausalLM`."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """The current weights under the names of `LlamaForCausalLM`, adapters merged on access."""
        ...

    def embed(self, images: np.ndarray, proprio: np.ndarray | None, instructions: Sequence[str]) -> Prompts:
        """Prompts of prepared observations; arguments as in `RolloutPolicy.act`."""
        ...

    def decision(self, tokens: np.ndarray, log_probs: np.ndarray) -> Decision:
        """The decisions that consist of tokens [B, K] int64 with log-probs [B, K] float32."""
        ...


def undecodable(spec: PolicySpec) -> str | None:
    """Why a policy has no `TokenDecoder`, as the end of a sentence about the policy; None if it has one."""
    if spec.token_by_token:
        return None
    if spec.noise != "uniform":
        return "has continuous actions, no tokens that a language model could decode one by one"
    return "computes all tokens of a decision in one pass, so that there is nothing to decode one by one"
