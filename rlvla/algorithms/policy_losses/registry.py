"""Registry of policy losses."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from rlvla.algorithms.choices import SCORES
from rlvla.options import Registry

if TYPE_CHECKING:
    from torch import Tensor

PolicyLoss = Callable[..., "tuple[Tensor, dict[str, Tensor]]"]

POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "policy loss",
    flag="policy_loss",
    package="rlvla.algorithms.policy_losses",
    defaults={"scores": "log_probs", "needs": (), "select_tokens": None},
)


def register_policy_loss(
    name: str,
    *,
    options: type | None = None,
    scores: str = "log_probs",
    needs: Collection[str] = (),
    select_tokens: Callable[..., Tensor] | None = None,
) -> Callable[[Any], Any]:
    """Decorator that makes a policy loss selectable by name.

    The function is called as `fn(log_probs, old_log_probs, advantages, response_mask, *, clip_low, clip_high,
    clip_dual, agg_mode, rollout_weights, **extra)` and returns (loss, metrics); see `rlvla.algorithms.policy_losses`.

    Args:
        name: for --policy_loss.
        options: frozen dataclass of `rlvla.options.arg` fields, which become flags; the function receives their values
            as keyword arguments.
        scores: one of `SCORES`: the numbers in place of log-probs; only policies that give them are trained with it.
        needs: quantities of `PolicySpec.missing` without which the policy cannot be trained with this loss.
        select_tokens: selects tokens of a whole optimizer step, [B, T] bool, called with the tensor arguments of the
            loss, its options and a generator; the loss receives the rows of a micro-batch as `chosen`.

    Raises:
        ValueError: the name is taken by another function, or unknown `scores`.
    """
    if scores not in SCORES:
        raise ValueError(f"unknown scores {scores!r}; known: {', '.join(SCORES)}")
    attributes = {"scores": scores, "needs": tuple(needs), "select_tokens": select_tokens}
    return POLICY_LOSSES.register(name, options=options, **attributes)


def get_policy_loss(name: str) -> PolicyLoss:
    """The policy loss registered under `name`.

    Raises:
        ValueError: unknown name; the message lists the registered ones.
    """
    return POLICY_LOSSES.get(name)


def list_policy_losses() -> list[str]:
    """Names of all registered policy losses, sorted."""
    return POLICY_LOSSES.names()
