"""Finished episodes, and stand-ins for an engine and a single rank."""

from __future__ import annotations

import torch

from rlvla.experience import Sample

A, D = 4, 2


class OneRank:
    """The strategy's collectives for a single process."""

    world_size, rank, device = 1, 0, torch.device("cpu")

    def all_reduce(self, values, op="mean"):
        return dict(values)

    def gather_objects(self, item):
        return [item]


class PlainEngine:
    """Calls the module as a DeepSpeed engine would."""

    def __init__(self, module):
        self.module = module

    def __call__(self, **kw):
        return self.module(**kw)

    def train(self, mode=True):
        self.module.train(mode)


def sample(decisions: int, last_executed: int, *, success: bool, uid: str, seed: int) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    executed = torch.full((decisions,), A)
    executed[-1] = last_executed
    rewards = torch.zeros(decisions, A)
    rewards[-1, last_executed - 1] = float(success)
    images = torch.randint(0, 256, (decisions + 1, 1, 64, 64, 3), dtype=torch.uint8, generator=generator)
    proprio = torch.rand(decisions + 1, 2, generator=generator)
    return Sample(
        images=images[:-1],
        proprio=proprio[:-1],
        instruction="reach the red disc",
        actions=torch.zeros(decisions, A, D),
        executed=torch.arange(A)[None] < executed[:, None],
        trace={"tokens": torch.randint(0, 256, (decisions, A * D), generator=generator)},
        log_probs=torch.zeros(decisions, A * D),
        rewards=rewards,
        reward_components={"success": rewards},
        finish_step=int(executed.sum()),
        success_once=success,
        success_at_end=success,
        terminated=success,
        truncated=not success,
        last_images=images[-1],
        last_proprio=proprio[-1],
        observed_proprio=proprio,
        uid=uid,
        suite="toy_reach",
        task_id=0,
        init_state_id=0,
        seed=seed,
    )


SAMPLES = [
    sample(3, 2, success=True, uid="a", seed=1),
    sample(4, 4, success=False, uid="b", seed=2),
    sample(1, 3, success=True, uid="a", seed=3),
    sample(4, 4, success=False, uid="b", seed=4),
    sample(4, 1, success=False, uid="a", seed=5),
]
