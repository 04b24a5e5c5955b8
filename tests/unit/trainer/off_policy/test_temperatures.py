"""Temperatures against torch's Adam."""

import math

import pytest
import torch

from rlvla.algorithms.off_policy import temperature_loss
from rlvla.trainer.off_policy.sac import Temperatures


def test_steps_are_those_of_adam() -> None:
    ours = Temperatures({"a": 0.1, "b": 2.0}, 0.01)
    log = [torch.tensor(math.log(0.1), requires_grad=True), torch.tensor(math.log(2.0), requires_grad=True)]
    adam = torch.optim.Adam(log, 0.01)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        entropies = torch.randn(2, 8, generator=generator)
        ours.step({"a": float(entropies[0].mean() + 1), "b": float(entropies[1].mean() - 0.5)})
        adam.zero_grad()
        (temperature_loss(log[0], entropies[0], -1.0) + temperature_loss(log[1], entropies[1], 0.5)).backward()
        adam.step()
    assert ours.values() == pytest.approx({"a": math.exp(log[0]), "b": math.exp(log[1])}, rel=1e-4)


def test_too_little_entropy_raises_a_temperature_and_state_is_exact() -> None:
    first, second = Temperatures({"a": 1.0}, 0.1), Temperatures({"a": 1.0}, 0.1)
    first.step({"a": -1.0})
    assert first["a"] > 1
    second.load_state_dict({name: tensor.clone() for name, tensor in first.state_dict().items()})
    for temperatures in (first, second):
        temperatures.step({"a": 0.3})
    assert first["a"] == second["a"]
    still = Temperatures({"a": 1.0}, 0.0)
    still.step({"a": -1.0})
    assert still["a"] == 1.0
