"""Rollout backends: where the policy of training episodes runs (`--rollout_backend`)."""

from __future__ import annotations

from rlvla.rollout.backends.base import RolloutBackend, register_rollout_backend

__all__ = ["RolloutBackend", "register_rollout_backend"]
