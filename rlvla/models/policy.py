"""The interfaces of policies: rollouts, training, and decoding of action tokens by an inference server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from torch import Tensor, nn

from rlvla.models.distributions import ActionDistribution, PolicyOutput

if TYPE_CHECKING:
    from rlvla.experience import Experience

# Optional capabilities of a policy beyond log-probs -> description.
QUANTITIES = {
    "entropy": "the entropy of its decisions",
    "kl": "the exact KL to a reference",
    "sum_pi_squared": "the sum of squared probabilities",
    "rsample": "reparameterized samples",
    "probabilities": "log-probs of outcomes, not of densities",
    "covariances": "log-probs whose covariance with the advantages predicts the change of entropy",
    "densities": "log-probs of outcomes or of densities",
    "temperature": "a sampling temperature",
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
    """Sizes and capabilities of a policy, from its configuration, without its weights.

    Attributes:
        action_chunk_len: A, actions per decision.
        action_dim: D, dimensions of an action.
        columns: K, log-probs per decision, ordered by action index first; a positive multiple of A.
        scores: kind of these numbers, one of `rlvla.algorithms.choices.SCORES`; a policy loss reads one kind.
        noise: distribution of the random numbers of a decision: "uniform" in [0, 1) or standard "normal".
        noise_shape: shape of the random numbers of one decision.
        greedy_noise: whether greedy decisions also read random numbers, e.g. the start of a flow.
        anneals_noise: whether it has a noise level, see `NetworkPolicy.anneal_noise`.
        training_noise: random numbers per demonstrated decision in the supervised loss; 0: none.
        training_chunk_len: actions per demonstrated decision in the supervised loss, if the network predicts more than
            are executed; 0: `action_chunk_len`.
        cameras: N, images per observation; None: any number.
        reads_images: whether it reads images.
        reads_instruction: whether it reads the instruction.
        image_size: required side of the images in pixels; None: any size, they are resized.
        keeps_aspect_ratio: whether images may have any shape, because they are padded.
        proprio_dim: P, length of the proprio vector; 0: no proprio.
        proprio_limit: magnitude of normalized proprio that data hardly exceeds: 1 for ranges and quantiles, 3 for mean
            and standard deviation.
        feature_dim: d, width of `Policy.features`; 0: no features.
        start_shape: (C, M), shape of the initial noise of `NetworkPolicy.denoise`, the first numbers of the noise of a
            decision; (): no denoising.
        summary_dim: width of `NetworkPolicy.summary`; 0: no summary.
        token_by_token: whether decisions are decoded token by token, so that there is a `TokenDecoder`.
        missing: unsupported names of `QUANTITIES` -> reason.

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
    reads_instruction: bool = True
    image_size: int | None = None
    keeps_aspect_ratio: bool = False
    proprio_dim: int = 0
    proprio_limit: float = 1.0
    feature_dim: int = 0
    start_shape: tuple[int, ...] = ()
    summary_dim: int = 0
    token_by_token: bool = False
    missing: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        """Validate `columns`."""
        if self.action_chunk_len < 1 or self.columns < 1 or self.columns % self.action_chunk_len:
            raise ValueError(
                f"a policy with {self.action_chunk_len} actions per decision cannot have {self.columns} columns: "
                "`columns` is a positive multiple of `action_chunk_len`"
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
        """(A, S, K / (A * S)): columns as actions x separately scored denoising steps x numbers."""
        steps = self.columns_per_action // self.action_dim if self.scores == "step_log_probs" else 1
        return self.action_chunk_len, steps, self.columns_per_action // steps

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Draw the random numbers of one decision, `noise_shape` float64."""
        return rng.random(self.noise_shape) if self.noise == "uniform" else rng.standard_normal(self.noise_shape)


@dataclass
class Decision:
    """A batch of decisions on the host.

    Attributes:
        actions: [B, A, D] float32, for the environment.
        log_probs: [B, K] float32.
        trace: see `PolicyOutput`; name -> [B, ...].
        version: training iterations of the policy's weights; None: not counted.
        failures: row -> why there are no actions for it; its episode fails (remote policies).
    """

    actions: np.ndarray
    log_probs: np.ndarray
    trace: dict[str, np.ndarray]
    version: int | None = None
    failures: dict[int, str] = field(default_factory=dict)


class RolloutPolicy(Protocol):
    """The part of a policy that rollouts use."""

    @property
    def spec(self) -> PolicySpec:
        """See `PolicySpec`."""
        ...

    def prepare(self, images: np.ndarray, proprio: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Preprocess observations once, on arrival, for `act` and all networks of a run.

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


def decide(
    policy: RolloutPolicy,
    images: Sequence[np.ndarray],
    proprio: Sequence[np.ndarray | None],
    instructions: Sequence[str],
    *,
    noise: Sequence[np.ndarray],
    temperature: float | None,
) -> Decision:
    """Prepare observations, one per row, and choose actions.

    Args:
        policy: the policy.
        images: per row [N, H, W, 3] uint8 from the environment, all of one shape.
        proprio: per row [P] float32, or None.
        instructions: one sentence per row.
        noise: per row the random numbers of `PolicySpec.draw`.
        temperature: sampling temperature; None: greedy.
    """
    greedy_noise, greedy = policy.spec.greedy_noise, temperature is None
    prepared = [policy.prepare(*row) for row in zip(images, proprio)]
    states = [state for _, state in prepared if state is not None]
    return policy.act(
        np.stack([pictures for pictures, _ in prepared]),
        np.stack(states) if states else None,
        instructions,
        noise=np.stack(noise) if greedy_noise or not greedy else None,
        temperature=temperature or 1.0,
        **({"greedy": greedy} if greedy_noise else {}),
    )


class Policy(RolloutPolicy, Protocol):
    """A policy that can be trained; it must also be an `nn.Module`.

    With `PolicySpec.scores` other than "log_probs", log-probs are scores of that kind.
    """

    def score(self, batch: Experience, temperature: float) -> dict[str, Any]:
        """Keyword arguments of `forward` for a batch of decisions, on the policy's device."""
        ...

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """`forward(*, wants, **inputs)`: quantities of given decisions by name, all float32; `inputs` from `score`.

        DeepSpeed wraps `forward`, so every training or scoring pass goes through it. Names in `wants`:

        - "log_probs", "entropy", "sum_pi_squared", "kl" to `reference`, with a value head "values": [B, K];
        - "parameters": the distribution's parameters for the `kl` of another policy, as "parameters/<name>";
        - "mirrored": terms of `rlvla.algorithms.flow.mirrored_loss`, as "mirrored/<name>" [B, K], for such scores;
        - "loss": "loss", "error" and "correct" of supervised training, each [B, K], or the columns of
          `PolicySpec.training_chunk_len` actions.
        """
        ...

    def eval(self) -> Self:
        """As in `nn.Module`."""
        ...

    def distribution(self, batch: Experience, temperature: float = 1.0) -> ActionDistribution:
        """The action distributions for a batch of observations."""
        ...

    def features(self, batch: Experience) -> Tensor:
        """[B, K, d]: hidden states for a critic or reward model, one per log-prob."""
        ...

    def encode_actions(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        """The trace of `PolicySpec.demonstrated_actions` environment actions [..., A, D], as labels."""
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
        """Cost of each row for micro-batches sized by tokens: its sequence length, or a comparable number."""
        ...

    def training_flops(self, model: nn.Module, tokens: int, num_images: int) -> float:
        """FLOPs of a forward and backward pass over one decision.

        Args:
            model: the policy, or a critic with the same backbone.
            tokens: sequence length.
            num_images: images per observation.
        """
        ...

    def adapters_disabled(self) -> AbstractContextManager[None]:
        """Context in which the policy has no adapters; ValueError if there are none to disable."""
        ...

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write the policy in the format it was read from; `state_dict`: full parameters, if this module is sharded."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """As in `nn.Module`."""
        ...


def on_host(output: PolicyOutput, actions: np.ndarray) -> Decision:
    """Move a policy output to the host, with the actions for the environment."""
    trace = {name: value.cpu().numpy() for name, value in output.trace.items()}
    return Decision(actions, output.log_probs.cpu().numpy(), trace)


def select(distribution: ActionDistribution, wants: Sequence[str], trace: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The quantities in `wants` that need only a distribution, see `Policy.forward`."""
    quantities: dict[str, Tensor] = {}
    for name in wants:
        if name == "log_probs":
            quantities[name] = distribution.log_prob(trace)
        elif name == "parameters":
            quantities |= {f"parameters/{key}": value for key, value in distribution.parameters().items()}
        elif name == "mirrored":
            terms: dict[str, Tensor] = distribution.mirrored(trace)  # type: ignore[attr-defined]  # of flows only
            quantities |= {f"mirrored/{key}": value for key, value in terms.items()}
        elif name in ("entropy", "sum_pi_squared"):
            quantities[name] = getattr(distribution, name)()
    return quantities


def parameters_of(quantities: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries "parameters/<name>" of a result of `Policy.forward`, by name."""
    prefix = "parameters/"
    return {name.removeprefix(prefix): value for name, value in quantities.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class Prompts:
    """Embedded observations, after which action tokens are decoded.

    Attributes:
        embeddings: [B, S, d], padded at the end.
        lengths: real positions of each row, B of them.
    """

    embeddings: Tensor
    lengths: list[int]


class TokenDecoder(Protocol):
    """The language model of a policy with `PolicySpec.token_by_token`, with a vocabulary of action tokens only.

    Token k of this model is column k of the policy; the policy embeds the prompts.
    """

    def config(self) -> dict[str, Any]:
        """Configuration, as in a config.json of `LlamaForCausalLM`."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Current weights under the names of `LlamaForCausalLM`; adapters are merged on access."""
        ...

    def embed(self, images: np.ndarray, proprio: np.ndarray | None, instructions: Sequence[str]) -> Prompts:
        """Embed prepared observations; arguments as in `RolloutPolicy.act`."""
        ...

    def decision(self, tokens: np.ndarray, log_probs: np.ndarray) -> Decision:
        """Decisions of tokens [B, K] int64 with log-probs [B, K] float32."""
        ...


def undecodable(spec: PolicySpec) -> str | None:
    """Why a policy has no `TokenDecoder`, as a predicate of the policy; None if it has one."""
    if spec.token_by_token:
        return None
    if spec.noise != "uniform":
        return "has continuous actions, not tokens that a language model decodes one by one"
    return "computes all tokens of a decision in one pass, not one by one"
