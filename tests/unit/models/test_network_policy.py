"""A family on `NetworkPolicy` writes its network; sampling, scoring and encoding come with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlvla.experience import Experience
from rlvla.models.action_heads import GaussianHead, TokenHead
from rlvla.models.codec import StatisticsCodec
from rlvla.models.network_policy import NetworkPolicy
from rlvla.models.policy import PolicySpec
from rlvla.models.vla.action_tokenizer import ActionTokenizer

CHUNK, BINS, WIDTH, ROWS = (3, 2), 16, 8, 5
RANGES = {"q01": [-1.0, 0.0], "q99": [1.0, 4.0]}


class Linear(NetworkPolicy):
    """Reads the mean color, proprio, and the length of the instruction."""

    def __init__(self, head: str) -> None:
        codec = StatisticsCodec(
            {"action": RANGES, "proprio": RANGES},
            chunk=CHUNK,
            proprio_dim=2,
            bins=ActionTokenizer(BINS, BINS),
            normalization="q99",
        )
        gaussian = head == "gaussian"
        noise = {"noise_shape": CHUNK, "noise": "normal"} if gaussian else {"noise_shape": (6,)}
        spec = PolicySpec(*CHUNK, 6, proprio_dim=2, feature_dim=WIDTH, **noise)
        super().__init__(spec, codec, GaussianHead(codec) if gaussian else TokenHead(codec))
        torch.manual_seed(0)
        self.body, self.out = nn.Linear(6, 6 * WIDTH), nn.Linear(WIDTH, 1 if gaussian else BINS)

    def observations(self, images: Tensor, proprio: Tensor | None, instructions: Sequence[str]) -> dict[str, Any]:
        return {"images": images, "proprio": proprio, "lengths": torch.tensor([[float(len(i))] for i in instructions])}

    def hidden(self, trace: Any, *, images: Tensor, proprio: Tensor, lengths: Tensor) -> Tensor:
        inputs = torch.cat([images.float().mean((1, 2, 3)) / 255, proprio, lengths / 10], 1)
        return torch.tanh(self.body(inputs)).unflatten(1, (6, WIDTH))

    def read_out(self, hidden: Tensor) -> Any:
        outputs = self.out(hidden)
        return outputs if self.spec.noise == "uniform" else (outputs.view(len(hidden), *CHUNK), torch.zeros(2))


def observed() -> tuple[np.ndarray, np.ndarray, list[str]]:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (ROWS, 1, 4, 4, 3), dtype=np.uint8)
    return images, rng.uniform(0, 1, (ROWS, 2)).astype(np.float32), ["go", "go left"] * 2 + ["stop"]


@pytest.fixture(params=["tokens", "gaussian"])
def policy(request: pytest.FixtureRequest) -> Linear:
    return Linear(request.param)


def test_decisions_are_scored_as_they_were_sampled(policy: Linear) -> None:
    images, proprio, instructions = observed()
    images, state = policy.prepare(images, proprio)
    assert state is not None
    np.testing.assert_allclose(state, np.stack([proprio[:, 0], proprio[:, 1] / 2 - 1], 1), atol=1e-6)
    rng = np.random.default_rng(1)
    noise = np.stack([policy.spec.draw(rng) for _ in range(ROWS)])
    decision = policy.act(images, state, instructions, noise=noise, temperature=1.3)
    trace = {name: torch.from_numpy(value) for name, value in decision.trace.items()}
    batch = Experience(
        images=torch.from_numpy(images), proprio=torch.from_numpy(state), instructions=instructions, trace=trace
    )
    outputs = policy(**policy.score(batch, 1.3))
    np.testing.assert_allclose(outputs["log_probs"].detach().numpy(), decision.log_probs, atol=1e-5)
    expected = policy.distribution(batch, 1.3).entropy().detach()
    torch.testing.assert_close(outputs["entropy"], expected, rtol=0, atol=1e-6)
    assert policy.features(batch).shape == (ROWS, 6, WIDTH)
    assert policy.effective_columns.all() and policy.normalized_dims == [True, True]


def test_supervision_and_values(policy: Linear) -> None:
    images, proprio, instructions = observed()
    actions = np.random.default_rng(2).uniform(0, 1, (ROWS, *CHUNK))
    trace = {name: torch.from_numpy(value) for name, value in policy.encode_actions(actions).items()}
    batch = Experience(
        images=torch.from_numpy(images), proprio=torch.from_numpy(proprio), instructions=instructions, trace=trace
    )
    option = {"label_smoothing": 0.3} if policy.spec.noise == "uniform" else {"sft_loss": "nll"}
    inputs = policy.score(batch, 1.0)
    plain, changed = (policy(**inputs, wants=("loss",), **given)["loss"] for given in ({}, option))
    assert plain.shape == (ROWS, 6) and not torch.allclose(plain, changed)
    with pytest.raises(ValueError):
        policy(**policy.score_values(batch))
    policy.value_head = nn.Linear(WIDTH, 1)
    values = policy(**policy.score_values(batch.with_fields(trace=None)))["values"]
    torch.testing.assert_close(values, policy.value_head(policy.features(batch)).squeeze(-1))


def test_a_decision_needs_its_statistics() -> None:
    policy = Linear("tokens")
    policy._codec.statistics = {"proprio": RANGES}
    with pytest.raises(ValueError):
        policy.encode_actions(np.zeros((1, *CHUNK)))
