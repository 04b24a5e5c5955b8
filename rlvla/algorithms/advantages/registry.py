"""Registry of advantage estimators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlvla.algorithms.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

AdvantageEstimator = Callable[..., "tuple[Tensor, Tensor]"]

_SHIPPED = {
    "rlvla.algorithms.advantages.group": ("gdpo", "gpg", "grpo", "grpo_passk", "opo", "reinforce_baseline", "rloo"),
    "rlvla.algorithms.advantages.temporal": ("gae", "reinforce", "reinforce_plus_plus", "remax"),
    "rlvla.algorithms.advantages.token_baseline": ("optimal_token_baseline",),
}
_ESTIMATORS: Registry[AdvantageEstimator] = Registry("advantage estimator", _SHIPPED)


def register_advantage_estimator(name: str) -> Callable[[Any], Any]:
    """Decorator that makes an advantage estimator selectable by name.

    The function is called as
    `fn(token_level_rewards, response_mask, *, group_ids, values, reward_baselines, gamma, lam, norm_by_std, **extra)`
    and returns (advantages, returns), both [B, T]; see `rlvla.algorithms.advantages`.

    Raises:
        ValueError: the name is taken by another function.
    """
    return _ESTIMATORS.register(name)


def get_advantage_estimator(name: str) -> AdvantageEstimator:
    """The estimator registered under `name`.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    return _ESTIMATORS.get(name)


def list_advantage_estimators() -> list[str]:
    """Names of all registered estimators, sorted."""
    return _ESTIMATORS.names()


def advantage_estimator_options(name: str) -> frozenset[str]:
    """The keyword arguments that an estimator reads; inputs it does not name are neither computed nor passed.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    return _ESTIMATORS.options(name)
