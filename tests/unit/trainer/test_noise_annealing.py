"""The noise level of a flow policy over a run: set before every rollout and evaluation, from the iteration alone."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from rlvla.models.flow.head import FlowHead
from rlvla.models.flow.settings import FlowSettings
from rlvla.trainer.config import BatchConfig
from rlvla.trainer.models import anneal_noise
from rlvla.trainer.trainer import Trainer


def test_every_rollout_has_the_level_of_its_iteration() -> None:
    """Whatever was played before, as after a resume; past the last iteration it stays."""
    head = FlowHead(None, FlowSettings(noise_level=0.8), (2, 2))
    actor = SimpleNamespace(module=head, train=lambda mode: None, full_parameters=lambda: nullcontext(head))
    batch = BatchConfig(num_episodes=20, rollout_batch_size=4, flow_noise_level_end=0.2)
    loop = object.__new__(Trainer)
    loop.algorithm, loop.config = SimpleNamespace(actor=actor), SimpleNamespace(batch=batch)
    loop._offloading = SimpleNamespace(during_rollout=nullcontext)
    for iteration, level in ((2, 0.5), (0, 0.8), (4, 0.2), (5, 0.2)):
        loop.iteration = iteration
        with loop._policy() as policy:
            assert policy.noise_level == pytest.approx(level)
        assert anneal_noise(actor, batch, iteration) == {"actor/noise_level": pytest.approx(level)}
    head.noise_level = 0.7
    assert anneal_noise(actor, BatchConfig(), 3) == {} and head.noise_level == 0.7, "it is constant unless asked"
