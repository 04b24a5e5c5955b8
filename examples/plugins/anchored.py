"""A policy loss of one's own: policy gradient with a quadratic penalty on the log-ratio (`--policy_loss anchored`)."""

from dataclasses import dataclass

from rlvla.algorithms import register_policy_loss
from rlvla.algorithms.losses import aggregate_loss
from rlvla.options import Options, arg


@dataclass(frozen=True)
class AnchoredOptions(Options):
    anchor_up: float = arg(0.5, "weight of the squared log-ratio where probabilities rise", minimum=0)
    anchor_down: float = arg(1.0, "weight of the squared log-ratio where probabilities fall", minimum=0)


@register_policy_loss("anchored", options=AnchoredOptions)
def anchored(
    log_probs, old_log_probs, advantages, mask, *, anchor_up=0.5, anchor_down=1.0, agg_mode="token-mean", **extra
):
    log_ratio = (log_probs - old_log_probs).masked_fill(~mask, 0.0)
    weight = (log_ratio.detach() > 0) * (anchor_up - anchor_down) + anchor_down
    loss = weight * log_ratio.square() - advantages * log_ratio
    counts = {name: extra[name] for name in ("num_tokens", "num_sequences", "dp_size", "horizon") if name in extra}
    return aggregate_loss(loss, mask, agg_mode, **counts), {"anchor": log_ratio.detach().square()[mask].mean()}
