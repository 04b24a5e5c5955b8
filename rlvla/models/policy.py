"""The interface of every policy, whatever its network and however it samples actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor, nn

from rlvla.models.distributions import ActionDistribution, PolicyOutput

if TYPE_CHECKING:
    from rlvla.experience import Experience

# Optional capabilities of a policy beyond log-probs -> what each one provides.
QUANTITIES = {
    "entropy": "the entropy of its decisions",
    "kl": "the exact KL to a reference",
    "sum_pi_squared": "the sum of squared probabilities",
    "rsample": "samples that can be differentiated",
    "probabilities": "log-probs of outcomes, not of densities",
    "covariances": "log-probs whose covariance with the advantages tells how the entropy will change",
    "densities": "log-probs of outcomes or of densities",
    "temperature": "a temperature of sampling",
    "demonstrated_log_probs": "log-probs of actions that it did not sample itself",
    "label_smoothing": "smoothed targets of the supervised loss",
    "sft_loss": "a choice between supervised losses",
    "critic": "a critic, a network with its body",
    "value_head": "a head for values on the policy's network",
    "training": "scores and losses of stored decisions",
}
# Entry of the trace of demonstrated actions: [B, `PolicySpec.training_noise`] standard normal.
TRAINING_NOISE = "training_noise"


@dataclass(frozen=True)
class PolicySpec:
    """Sizes and capabilities of a policy; known from its configuration, without its weights.

    Attributes:
        action_chunk_len: A, actions per decision.
        action_dim: D, dimensions of an action.
        columns: K, log-probs per decision, ordered by action index first; a positive multiple of A.
        scores: what these numbers are, one of `rlvla.algorithms.choices.SCORES`; a policy loss reads one kind.
        noise: random numbers that a decision is sampled from: "uniform" in [0, 1) or standard "normal".
        noise_shape: shape of the random numbers for one decision.
        greedy_noise: whether greedy decisions read random numbers as well, e.g. where a flow starts.
        anneals_noise: whether it has a noise level, see `NetworkPolicy.anneal_noise`.
        training_noise: random numbers per demonstrated decision that the supervised loss reads; 0: none.
        training_chunk_len: actions per demonstrated decision that the supervised loss reads, where a network predicts
            more than are executed; 0: `action_chunk_len`.
        cameras: N, images per observation; None: any number.
        reads_images: whether it reads them at all.
        image_size: required side of the images in pixels; None: any size, they are resized.
        proprio_dim: P, length of the proprio vector it reads; 0: none.
        feature_dim: d, width of `Policy.features`; 0: it has none.
        start_shape: (C, M), shape of the noise that `NetworkPolicy.denoise` starts from, the first numbers of the noise
            of a decision; (): it does not denoise.
        summary_dim: width of `NetworkPolicy.summary`; 0: it has none.
        token_by_token: whether its decisions are tokens that a language model decodes one by one, so that it has a
            `TokenDecoder`.
        missing: names in `QUANTITIES` that the policy does not support -> reason.

    Raises:
        ValueError: `columns` is not a positive multiple of `action_chunk_len`.
    """

    action_chunk_len: int
    action_dim: int
    columns: int
    noise_shape: tuple[int, ...]
    scores: str = "log_probs"
    noise: str = "uniform"
    greedy_noise: bool = False
    anneals_noise: bool = False
    training_noise: int = 0
    training_chunk_len: int = 0
    cameras: int | None = None
    reads_images: bool = True
    image_size: int | None = None
    proprio_dim: int = 0
    feature_dim: int = 0
    start_shape: tuple[int, ...] = ()
    summary_dim: int = 0
    token_by_token: bool = False
    missing: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        """Check that all actions have the same number of columns."""
        if self.action_chunk_len < 1 or self.columns < 1 or self.columns % self.action_chunk_len:
            raise ValueError(
                f"a policy with {self.action_chunk_len} actions per decision cannot have {self.columns} columns: give "
                "every action the same number of log-probs, at least one (`columns` is a positive multiple of "
                "`action_chunk_len`)"
            )

    @property
    def columns_per_action(self) -> int:
        """Log-probs per action."""
        return self.columns // self.action_chunk_len

    @property
    def demonstrated_actions(self) -> int:
        """Actions per demonstrated decision in supervised training."""
        return self.training_chunk_len or self.action_chunk_len

    @property
    def column_shape(self) -> tuple[int, int, int]:
        """(A, S, K / (A * S)): the columns as actions x denoising steps that are scored on their own x numbers."""
        steps = self.columns_per_action // self.action_dim if self.scores == "step_log_probs" else 1
        return self.action_chunk_len, steps, self.columns_per_action // steps

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """The random numbers for one decision, `noise_shape` float64."""
        return rng.random(self.noise_shape) if self.noise == "uniform" else rng.standard_normal(self.noise_shape)


@dataclass
class Decision:
    """A batch of decisions on the host.

    Attributes:
        actions: [B, A, D] float32, for the environment.
        log_probs: [B, K] float32.
        trace: see `PolicyOutput`; name -> [B, ...].
        version: iterations of training behind the weights that decided; None: not counted.
    """

    actions: np.ndarray
    log_probs: np.ndarray
    trace: dict[str, np.ndarray]
    version: int | None = None


class RolloutPolicy(Protocol):
    """The part of a policy that rollouts use."""

    @property
    def spec(self) -> PolicySpec:
        """See `PolicySpec`."""
        ...

    def prepare(self, images: np.ndarray, proprio: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Turn observations into what `act` and all networks of a run read, once when they arrive.

        Args:
            images: [..., N, H, W, 3] uint8 from the environment.
            proprio: [..., P] float32 from the environment, or None.

        Returns:
            Images [..., N, h, w, 3] uint8 (the same array if there is nothing to do) and normalized proprio.
        """
        ...

    def act(
        self,
        images: np.ndarray,
        proprio: np.ndarray | None,
        instructions: Sequence[str],
        *,
        noise: np.ndarray | None,
        temperature: float,
        greedy: bool = False,
    ) -> Decision:
        """Choose actions for prepared observations.

        Args:
            images: [B, N, h, w, 3] uint8.
            proprio: [B, P] float32, or None.
            instructions: one sentence per row.
            noise: [B, *noise_shape] from `PolicySpec.draw`; None is greedy.
            temperature: sampling temperature; log-probs use it even when greedy.
            greedy: `noise` is for a greedy decision; given only to policies with `PolicySpec.greedy_noise`.
        """
        ...


class Policy(RolloutPolicy, Protocol):
    """A policy that can be trained; it must also be an `nn.Module`.

    With `PolicySpec.scores` other than "log_probs", what is called a log-prob here is that kind of number.

    DeepSpeed wraps `forward`, so every training or scoring pass goes through it; its arguments come from `score`.
    `wants` names the quantities to return: "log_probs" [B, K], "entropy" [B, K], "sum_pi_squared" [B, K],
    "parameters" (what `kl` needs from a reference, as entries "parameters/<name>"), "mirrored" (with the scores of that
    name, the terms of `rlvla.algorithms.flow.mirrored_loss`, as entries "mirrored/<name>" [B, K]), "kl" [B, K] to
    `reference`, "loss" (returns "loss", "error" and "correct" of supervised training, each [B, K], or with
    `PolicySpec.training_chunk_len` the columns of that many actions), "values" [B, K] with a value
    head; all float32.
    """

    def score(self, batch: Experience, temperature: float) -> dict[str, Any]:
        """Keyword arguments of `forward` for a batch of decisions, on the policy's device."""
        ...

    def forward(self, *, wants: Sequence[str], **inputs: Any) -> dict[str, Tensor]:
        """The quantities in `wants`, for given decisions."""
        ...

    def distribution(self, batch: Experience, temperature: float = 1.0) -> ActionDistribution:
        """The action distributions for a batch of observations."""
        ...

    def features(self, batch: Experience) -> Tensor:
        """[B, K, d]: hidden states for a critic or reward model, one per log-prob."""
        ...

    def encode_actions(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        """Encode environment actions [..., A, D] as a trace, for use as training labels.

        With `PolicySpec.training_chunk_len` there are that many of them.
        """
        ...

    @property
    def effective_columns(self) -> Tensor:
        """[K] bool: columns that can change the action; the gradient of the others would be pure noise."""
        ...

    @property
    def normalized_dims(self) -> list[bool]:
        """[D]: whether an action dimension is normalized by the dataset statistics."""
        ...

    def row_tokens(self, instructions: Sequence[str], num_images: int) -> list[int]:
        """Size of each row, for micro-batches sized by tokens: the length of its sequence, or what stands for it."""
        ...

    def training_flops(self, model: nn.Module, tokens: int, num_images: int) -> float:
        """FLOPs of a forward and backward pass of a network of this family over one decision.

        Args:
            model: the policy, or a critic with the same backbone.
            tokens: sequence length.
            num_images: images per observation.
        """
        ...

    def adapters_disabled(self) -> AbstractContextManager[None]:
        """Within the block, use the policy without its adapters; raises an error if it has none."""
        ...

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write the policy in the format it was read from; `state_dict` gives full parameters if it is sharded."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """As in `nn.Module`."""
        ...


def on_host(output: PolicyOutput, actions: np.ndarray) -> Decision:
    """Move a policy output to the host, with the actions for the environment."""
    trace = {name: value.cpu().numpy() for name, value in output.trace.items()}
    return Decision(actions, output.log_probs.cpu().numpy(), trace)


def select(distribution: ActionDistribution, wants: Sequence[str], trace: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The quantities in `wants` that need only a distribution: per log-prob [B, K] float32, and its parameters."""
    quantities: dict[str, Tensor] = {}
    for name in wants:
        if name == "log_probs":
            quantities[name] = distribution.log_prob(trace)
        elif name == "parameters":
            quantities |= {f"parameters/{key}": value for key, value in distribution.parameters().items()}
        elif name == "mirrored":
            quantities |= {f"mirrored/{key}": value for key, value in distribution.mirrored(trace).items()}
        elif name in ("entropy", "sum_pi_squared"):
            quantities[name] = getattr(distribution, name)()
    return quantities


def parameters_of(quantities: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries "parameters/<name>" in the result of `Policy.forward`, by name."""
    prefix = "parameters/"
    return {name.removeprefix(prefix): value for name, value in quantities.items() if name.startswith(prefix)}


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
