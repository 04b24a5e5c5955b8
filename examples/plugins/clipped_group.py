"""An advantage estimator of one's own: scaled and clipped GRPO (`--advantage_estimator clipped_group`)."""

from dataclasses import dataclass

from rlvla.algorithms import get_advantage_estimator, register_advantage_estimator
from rlvla.options import Options, arg


@dataclass(frozen=True)
class ClippedGroupOptions(Options):
    group_scale: float = arg(1.0, "factor of the advantages", above=0)
    group_clip: float = arg(2.0, "largest magnitude of an advantage", above=0)


@register_advantage_estimator("clipped_group", options=ClippedGroupOptions, per_episode=True)
def clipped_group(rewards, mask, *, group_ids=None, group_scale=1.0, group_clip=2.0, **extra):
    advantages, returns = get_advantage_estimator("grpo")(rewards, mask, group_ids=group_ids)
    return (group_scale * advantages).clamp(-group_clip, group_clip), returns
