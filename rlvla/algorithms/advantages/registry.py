"""Registry of advantage estimators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlvla.options import Registry

if TYPE_CHECKING:
    from torch import Tensor

AdvantageEstimator = Callable[..., "tuple[Tensor, Tensor]"]

ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry(
    "advantage estimator",
    flag="advantage_estimator",
    package="rlvla.algorithms.advantages",
    defaults={"per_episode": False, "allows_singletons": False},
)


def register_advantage_estimator(
    name: str, *, options: type | None = None, per_episode: bool = False, allows_singletons: bool = False
) -> Callable[[Any], Any]:
    """Decorator that makes an advantage estimator selectable by name.

    The function is called as
    `fn(token_level_rewards, response_mask, *, group_ids, values, reward_baselines, gamma, lam, norm_by_std, **extra)`
    and returns (advantages, returns), both [B, T]; see `rlvla.algorithms.advantages`.

    Args:
        name: for --advantage_estimator.
        options: frozen dataclass of `rlvla.options.arg` fields, which become flags; the function receives their values
            as keyword arguments.
        per_episode: all columns of an episode have the same advantage at any advantage level.
        allows_singletons: an estimator with `group_ids` also takes groups of one episode.

    Raises:
        ValueError: the name is taken by another function.
    """
    return ADVANTAGE_ESTIMATORS.register(
        name, options=options, per_episode=per_episode, allows_singletons=allows_singletons
    )


def get_advantage_estimator(name: str) -> AdvantageEstimator:
    """The estimator registered under `name`.

    Raises:
        ValueError: unknown name; the message lists the registered ones.
    """
    return ADVANTAGE_ESTIMATORS.get(name)


def list_advantage_estimators() -> list[str]:
    """Names of all registered estimators, sorted."""
    return ADVANTAGE_ESTIMATORS.names()
