"""Contract of the networks in LeRobot's format: one prefix for many evaluations, padding that changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlvla.models.lerobot.files import LeRobotFiles
from rlvla.models.lerobot.network import FlowNetwork

B, R = 3, 4
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
Noisy = tuple[Tensor, Tensor]


class FlowNetworkContract:
    """For a fixture `checkpoint` of a policy with two cameras of 32 pixels, chunks of 4 and 2 action dimensions."""

    @pytest.fixture
    def network(self, checkpoint: LeRobotFiles) -> FlowNetwork:
        return checkpoint.load_network()

    @pytest.fixture
    def inputs(self, checkpoint: LeRobotFiles) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(0)
        return {
            "images": torch.rand(B, 2, 3, 32, 32, generator=g) * 2 - 1,
            "image_mask": torch.tensor([[True, True], [True, False], [True, True]]),
            "tokens": torch.randint(0, 200, (B, 5), generator=g),
            "token_mask": torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [True] * 4 + [False]]),
            "state": torch.randn(B, checkpoint.config.max_state_dim, generator=g),
        }

    @pytest.fixture
    def noisy(self) -> Noisy:
        g = torch.Generator().manual_seed(1)
        return torch.randn(B, R, 4, 2, generator=g), torch.rand(B, R, generator=g) * 0.9 + 0.1

    @torch.no_grad()
    def test_padding_changes_nothing(self, network: FlowNetwork, inputs: dict[str, Tensor], noisy: Noisy) -> None:
        """More padding of the prompt, and a camera that is missing everywhere."""
        g = torch.Generator().manual_seed(2)
        more = {"images": torch.rand(B, 1, 3, 32, 32, generator=g), "image_mask": torch.zeros(B, 1, dtype=torch.bool)}
        more |= {"tokens": torch.randint(0, 200, (B, 6), generator=g)}
        more |= {"token_mask": torch.zeros(B, 6, dtype=torch.bool)}
        padded = {name: torch.cat([inputs[name], more[name]], dim=1) for name in more}
        few, many = network.prefix(**inputs), network.prefix(**inputs | padded)
        assert many.mask.shape[1] > few.mask.shape[1]
        assert torch.equal(few.length, many.length)
        torch.testing.assert_close(few.pooled, many.pooled, **CLOSE)
        torch.testing.assert_close(network.velocity(few, *noisy), network.velocity(many, *noisy), **CLOSE)

    @torch.no_grad()
    def test_masked_content_changes_nothing(
        self, network: FlowNetwork, inputs: dict[str, Tensor], noisy: Noisy
    ) -> None:
        other = {name: value.clone() for name, value in inputs.items()}
        other["images"][~inputs["image_mask"]] = 0.3
        other["tokens"][~inputs["token_mask"]] = 7
        first, second = (network.velocity(network.prefix(**given), *noisy) for given in (inputs, other))
        torch.testing.assert_close(first, second, **CLOSE)

    @torch.no_grad()
    def test_every_input_counts(self, network: FlowNetwork, inputs: dict[str, Tensor], noisy: Noisy) -> None:
        x, t = noisy
        prefix = network.prefix(**inputs)
        before = network.velocity(prefix, x, t)
        changes = {"images": inputs["images"].flip(-1), "tokens": inputs["tokens"] + 1, "state": inputs["state"] + 1}
        after = {name: network.velocity(network.prefix(**inputs | {name: v}), x, t) for name, v in changes.items()}
        after |= {"t": network.velocity(prefix, x, t / 2)}
        for name, value in after.items():
            gaps = (value - before).abs().amax(dim=(1, 2, 3))
            if name == "state" and network.config.state_in_prompt:
                assert (gaps == 0).all()
            else:
                assert (gaps > 1e-4).all(), name

    @torch.no_grad()
    def test_evaluations_at_once_equal_one_by_one(
        self, network: FlowNetwork, inputs: dict[str, Tensor], noisy: Noisy
    ) -> None:
        x, t = noisy
        together = network.velocity(network.prefix(**inputs), x, t)
        assert together.shape == x.shape
        for index in range(R):
            fresh = network.prefix(**inputs)
            alone = network.velocity(fresh, x[:, index : index + 1], t[:, index : index + 1])
            torch.testing.assert_close(together[:, index : index + 1], alone, **CLOSE)

    @torch.no_grad()
    def test_a_decision_alone_equals_it_among_others(
        self, network: FlowNetwork, inputs: dict[str, Tensor], noisy: Noisy
    ) -> None:
        x, t = noisy
        together = network.velocity(network.prefix(**inputs), x, t)
        alone = network.prefix(**{name: value[1:2] for name, value in inputs.items()})
        torch.testing.assert_close(network.velocity(alone, x[1:2], t[1:2]), together[1:2], **CLOSE)

    def test_parameters_that_are_read(self, network: FlowNetwork, inputs: dict[str, Tensor], noisy: Noisy) -> None:
        network.requires_grad_(True)
        names = {name for name, _ in network.named_parameters()}
        reached = gradients(network, network.velocity(network.prefix(**inputs), *noisy).square().sum())
        assert reached.keys() == {name for name in names if network.part_of(name)} != names
        reached = gradients(network, network.prefix(**inputs).pooled.square().sum())
        assert reached.keys() == {name for name in names if network.feeds(name, "prefix")}
        states = network.expert_states(network.prefix(**inputs), *noisy)
        reached = gradients(network, states.square().sum())
        assert reached.keys() == {name for name in names if network.feeds(name, "expert")}

    @torch.no_grad()
    def test_bfloat16_is_close(self, checkpoint: LeRobotFiles, inputs: dict[str, Tensor], noisy: Noisy) -> None:
        exact, rough = checkpoint.load_network(), checkpoint.load_network(torch.bfloat16)
        velocity = rough.velocity(rough.prefix(**inputs), *noisy)
        assert velocity.dtype == torch.float32
        gap = (velocity - exact.velocity(exact.prefix(**inputs), *noisy)).abs().mean()
        assert 0 < gap < 0.05


def gradients(network: FlowNetwork, loss: Tensor) -> dict[str, Tensor]:
    """Gradients of the parameters that the loss depends on."""
    network.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
