"""A reward source of one's own: a price for every environment step (`--reward success hurry`)."""

from dataclasses import dataclass

from rlvla.options import arg
from rlvla.rewards import register_reward


@dataclass(frozen=True)
class HurryOptions:
    hurry_cost: float = arg(0.01, "price of an environment step", minimum=0)
    hurry_free_steps: int = arg(10, "first environment steps of an episode without a price", minimum=0)


@register_reward("hurry", options=HurryOptions, reads_images=False)
class Hurry:
    def __init__(self, options):
        self.options = options

    def create(self, task, episode):
        return HurryEpisode(self.options)


class HurryEpisode:
    def __init__(self, options):
        self.options, self.steps = options, 0

    def step(self, observation, events, info):
        self.steps += 1
        return -self.options.hurry_cost if self.steps > self.options.hurry_free_steps else 0.0

    def finish(self):
        return {"steps": self.steps}

    def release(self):
        pass
