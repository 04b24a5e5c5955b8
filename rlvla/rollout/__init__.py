"""The rollout engine."""

from rlvla.rollout.engine import Decision, RolloutEngine, RolloutPolicy
from rlvla.rollout.episode import Episode, EpisodeRequest

__all__ = ["Decision", "Episode", "EpisodeRequest", "RolloutEngine", "RolloutPolicy"]
