"""Plateau of the success rate: a test on the counts of the last iterations, and likely causes from the metrics.

A plateau is a gain that is shown to be too small, not one that was merely not detected: of the last 2k iterations the
second k must have gained less than `SMALLEST_GAIN` over the first k with confidence, and no rise may be visible. In a
run whose success does gain that much in every k iterations the probability of a false alarm is at most `FALSE_ALARM`,
for any number of looks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FALSE_ALARM = 0.05  # probability per run
# In arcsin(sqrt(success)), whose variance does not depend on the rate: 10 points at 50 %, 5 at 5 %.
SMALLEST_GAIN = 0.1
_VISIBLE = 0.9  # one-sided confidence beyond which a gain counts as visible
_EPISODES = 1000  # in k iterations, with which a true plateau is detected in about nine of ten looks
_FEWEST = 5  # iterations for an estimate of the variance between iterations

CEILING = 0.95
_FEW_SIGNALS = 0.15
_COLLAPSED = 0.1  # fraction of the initial entropy, of densities: of the initial width
_SMALL_KL, _SMALL_CLIP = 1e-4, 1e-3  # far below effective updates
_LARGE_CLIP = 0.3
_UNEXPLAINED = 0.1


@dataclass(frozen=True)
class Plateau:
    """Two consecutive windows of iterations between which success has not risen.

    Attributes:
        window: iterations in each.
        before: success at end in the first.
        now: success at end in the second.
        most: upper confidence bound of success at end in the second.
    """

    window: int
    before: float
    now: float
    most: float

    def __str__(self) -> str:
        return (
            f"no gain: sampled success was {100 * self.before:.1f} % in {self.window} iterations and is "
            f"{100 * self.now:.1f} % in the next {self.window} (more than {100 * self.most:.1f} % is excluded; at most "
            f"{100 * FALSE_ALARM:.0f} % of the runs that do gain get this message)"
        )


def window_of(episodes_per_iteration: int) -> int:
    """Iterations with enough episodes to tell a plateau from a small gain."""
    return max(_FEWEST, math.ceil(_EPISODES / episodes_per_iteration))


def find_plateau(counts: Sequence[tuple[float, float]], window: int, looks: int) -> Plateau | None:
    """Compare the last `window` iterations with the `window` before them.

    The pooled rates are compared on the scale of arcsin(sqrt(p)). Their variance is that between iterations, so that
    the episodes of a group do not count as independent, but at least the binomial one.

    Args:
        counts: (successes, episodes) of each iteration, oldest first.
        window: number k of iterations, at least 2.
        looks: number of tests in the whole run; the confidence is adjusted to it (Bonferroni).

    Returns:
        The plateau, or None if a gain of `SMALLEST_GAIN` is not excluded or a rise is visible.
    """
    if len(counts) < 2 * window or any(n <= 0 for _, n in counts[-2 * window :]):
        return None
    from scipy.stats import t  # takes a second to import

    first, first_angle, first_variance = _pooled(counts[-2 * window : -window])
    second, second_angle, second_variance = _pooled(counts[-window:])
    error = math.sqrt(first_variance + second_variance)
    gain, freedom = second_angle - first_angle, 2 * (window - 1)
    highest = gain + float(t.ppf(1 - FALSE_ALARM / max(1, looks), freedom)) * error
    if highest >= SMALLEST_GAIN or gain > float(t.ppf(_VISIBLE, freedom)) * error:
        return None
    most = math.sin(min(math.pi / 2, max(0.0, first_angle + highest))) ** 2
    return Plateau(window, first, second, max(most, second))


def _pooled(counts: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Pooled success rate, its arcsin(sqrt(p)), and the variance of the latter."""
    total, k = sum(n for _, n in counts), len(counts)
    rate = sum(successes for successes, _ in counts) / total
    spread = sum((successes - rate * n) ** 2 for successes, n in counts) * k / (k - 1) / total**2
    inside = (rate * total + 0.5) / (total + 1)  # away from 0 and 1
    slope = 4 * inside * (1 - inside)
    return rate, math.asin(math.sqrt(rate)), max(spread / slope, 1 / (4 * total))


def likely_causes(metrics: Mapping[str, float], *, groups: bool, densities: bool = False) -> dict[str, str]:
    """Likely causes of a plateau, most important first: name -> measured value and flags that address it; never empty.

    Args:
        metrics: means over the last iterations; `first_entropy` is that of the first iterations. Missing or non-finite
            ones are skipped.
        groups: whether advantages compare the episodes of a group.
        densities: whether the policy draws from densities, whose entropy may be negative: the factor by which they
            become narrower is compared.
    """
    values = {name: value for name, value in metrics.items() if math.isfinite(value)}
    success, signal = values.get("rollout/success_at_end", 0.0), values.get("rollout/signal_share", 1.0)
    if success >= CEILING:
        text = f"{100 * success:.0f} % of the sampled episodes succeed already, so little is left to gain. End such "
        return {"ceiling": f"{text}runs with --early_stopping"}
    causes = {}
    if signal < _FEW_SIGNALS:
        unit = (
            "groups have episodes with different rewards" if groups else "episodes differ in reward from the usual one"
        )
        more = "more episodes per state (--n_samples_per_prompt)" if groups else "more episodes per iteration"
        causes["signal"] = (
            f"only {100 * signal:.1f} % of the {unit}. Give {more}, an intermediate reward (--reward rm with a reward "
            "machine, or --reward env where the suite has a dense one), initial states in order of difficulty "
            "(--task_sampler), a higher --temperature, or a better start (more demonstrations)"
        )
    entropy, first = values.get("actor/entropy"), values.get("first_entropy")
    if entropy is not None and first is not None:
        remaining = math.exp(min(0.0, entropy - first)) if densities else entropy / first if first > 0 else 1.0
        if remaining < _COLLAPSED:
            causes["entropy"] = (
                f"the entropy of the policy fell from {first:.3f} to {entropy:.3f}: it hardly explores any more. Raise "
                "--entropy_loss_coef or --temperature, lower --actor_learning_rate, or keep the policy near its start "
                "(--init_kl_coef)"
            )
    kl, clipped = values.get("actor/ppo_kl"), values.get("actor/pg_clipfrac")
    if kl is not None and clipped is not None:
        measured = f"KL {kl:.1g}, clipped {100 * clipped:.1f} %"
        if abs(kl) < _SMALL_KL and clipped < _SMALL_CLIP:
            causes["step_too_small"] = (
                f"updates hardly change the policy ({measured}). Raise --actor_learning_rate or --max_epochs, or set "
                "--desired_kl (its limit is 10 times --actor_learning_rate)"
            )
        elif clipped > _LARGE_CLIP:
            text = (
                f"updates are too large ({measured}). Lower --actor_learning_rate or --max_epochs, set or lower "
                "--desired_kl, or set --target_kl"
            )
            causes["step_too_large"] = text
    explained = values.get("critic/vf_explained_var")
    if explained is not None and explained < _UNEXPLAINED:
        causes["critic"] = (
            f"the critic explains {100 * max(0.0, explained):.0f} % of the variance of the returns. Train a "
            "separate critic (without --share_backbone), on privileged state if the suite has it (--critic_input "
            "state), raise --critic_learning_rate, give it a head start (--freezing_actor_steps), or do without it "
            "(--advantage_estimator grpo with --n_samples_per_prompt 8)"
        )
    return causes or {
        "unknown": "signal, step size, entropy and critic look healthy: the policy may not perceive or represent what "
        "the task needs. Watch the failures (eval_vla.py --num_videos), and try more or other demonstrations, a larger "
        "image or model, or an intermediate reward (--reward)"
    }
