"""Registry of policy losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlvla.algorithms.choices import SCORES
from rlvla.algorithms.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

PolicyLoss = Callable[..., "tuple[Tensor, dict[str, Tensor]]"]

_SHIPPED = {
    "rlvla.algorithms.policy_losses.clipped": ("geo_mean", "gspo", "ppo"),
    "rlvla.algorithms.policy_losses.covariance": ("clip_cov", "kl_cov"),
    "rlvla.algorithms.policy_losses.flow": ("dppo", "fpo"),
    "rlvla.algorithms.policy_losses.score": ("cispo", "dro", "gpg", "sapo"),
    "rlvla.algorithms.policy_losses.trust_region": ("dppo_kl", "dppo_tv"),
}
_LOSSES: Registry[PolicyLoss] = Registry("policy loss", _SHIPPED)
_SCORES: dict[str, str] = {}  # by the name of the loss


def register_policy_loss(name: str, *, scores: str = "log_probs") -> Callable[[Any], Any]:
    """Decorator that makes a policy loss selectable by name.

    The function is called as `fn(log_probs, old_log_probs, advantages, response_mask, *, clip_low, clip_high,
    clip_dual, agg_mode, rollout_weights, **extra)` and returns (loss, metrics); see `rlvla.algorithms.policy_losses`.

    Args:
        name: for --policy_loss.
        scores: one of `SCORES`, what it takes for log-probs; only policies that give them are trained with it.

    Raises:
        ValueError: the name is taken by another function, or unknown `scores`.
    """
    if scores not in SCORES:
        raise ValueError(f"unknown scores {scores!r}; known: {', '.join(SCORES)}")

    def decorate(function: Any) -> Any:
        _LOSSES.register(name)(function)
        _SCORES[name] = scores
        return function

    return decorate


def get_policy_loss(name: str) -> PolicyLoss:
    """The policy loss registered under `name`.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    return _LOSSES.get(name)


def list_policy_losses() -> list[str]:
    """Names of all registered policy losses, sorted."""
    return _LOSSES.names()


def policy_loss_options(name: str) -> frozenset[str]:
    """The keyword arguments that a policy loss reads; inputs it does not name are neither computed nor passed.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    return _LOSSES.options(name)


def policy_loss_scores(name: str) -> str:
    """What a policy loss takes for log-probs, one of `SCORES`.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    get_policy_loss(name)
    return _SCORES[name]
