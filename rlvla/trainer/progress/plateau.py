"""Whether success has stopped rising, by a test on the counts of the last iterations, and the likely causes.

A plateau is a gain that is shown to be too small, not one that was merely not detected: of the last 2k iterations the
second k must have gained less than `SMALLEST_GAIN` over the first k with confidence, and no rise may be visible. In a
run whose success does gain that much in every k iterations the probability of a false alarm is at most `FALSE_ALARM`,
whatever the number of looks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

FALSE_ALARM = 0.05  # probability per run
# In arcsin(sqrt(success)), whose variance does not depend on the rate: 10 points at 50 %, 5 at 5 %.
SMALLEST_GAIN = 0.1
_VISIBLE = 0.9  # one-sided confidence beyond which a gain counts as visible
_EPISODES = 1000  # in k iterations, with which a true plateau is seen in about nine of ten looks
_FEWEST = 5  # iterations whose spread says how much success varies from one to the next

CEILING = 0.95
_FEW_SIGNALS = 0.15
_COLLAPSED = 0.1  # share of the initial entropy, of densities: of the initial width
_SMALL_KL, _SMALL_CLIP = 1e-4, 1e-3  # far below what updates that matter reach
_LARGE_CLIP = 0.3
_UNEXPLAINED = 0.1


@dataclass(frozen=True)
class Plateau:
    """Two consecutive windows of iterations between which success has not risen.

    Attributes:
        window: iterations in each.
        before: success at end in the first.
        now: success at end in the second.
        most: success at end in the second that is the highest in agreement with the data.
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


@dataclass(frozen=True)
class Cause:
    """A likely cause of a plateau.

    Attributes:
        name: ceiling, signal, entropy, step_too_small, step_too_large, critic or unknown.
        text: the measured fact, and the flags that address it.
    """

    name: str
    text: str


def window_of(episodes_per_iteration: int) -> int:
    """Iterations that hold enough episodes to tell a plateau from a small gain."""
    return max(_FEWEST, math.ceil(_EPISODES / episodes_per_iteration))


def find_plateau(counts: Sequence[tuple[float, float]], window: int, looks: int) -> Plateau | None:
    """Compare the last `window` iterations with the `window` before them.

    The pooled rates are compared on the scale of arcsin(sqrt(p)). Their variance is that from iteration to iteration,
    so that the episodes of a group do not count as independent, but at least the binomial one.

    Args:
        counts: (successes, episodes) of each iteration, oldest first.
        window: number k of iterations, at least 2.
        looks: how often the run is examined in all; the confidence is adjusted to it (Bonferroni).

    Returns:
        The plateau, or None if a gain of `SMALLEST_GAIN` is not excluded or a rise is visible.
    """
    if len(counts) < 2 * window or any(n <= 0 for _, n in counts[-2 * window :]):
        return None
    first, second = (_Window.of(part) for part in (counts[-2 * window : -window], counts[-window:]))
    error = math.sqrt(first.variance + second.variance)
    gain, freedom = second.angle - first.angle, 2 * (window - 1)
    highest = gain + _student(1 - FALSE_ALARM / max(1, looks), freedom) * error
    if highest >= SMALLEST_GAIN or gain > _student(_VISIBLE, freedom) * error:
        return None
    most = math.sin(min(math.pi / 2, max(0.0, first.angle + highest))) ** 2
    return Plateau(window, first.rate, second.rate, max(most, second.rate))


@dataclass(frozen=True)
class _Window:
    rate: float
    angle: float
    variance: float  # of the angle

    @classmethod
    def of(cls, counts: Sequence[tuple[float, float]]) -> _Window:
        total, k = sum(n for _, n in counts), len(counts)
        rate = sum(successes for successes, _ in counts) / total
        spread = sum((successes - rate * n) ** 2 for successes, n in counts) * k / (k - 1) / total**2
        inside = (rate * total + 0.5) / (total + 1)  # away from 0 and 1
        slope = 4 * inside * (1 - inside)
        return cls(rate, math.asin(math.sqrt(rate)), max(spread / slope, 1 / (4 * total)))


@cache
def _student(level: float, freedom: int) -> float:
    from scipy.stats import t  # takes a second to import

    return float(t.ppf(level, freedom))


@dataclass(frozen=True)
class _Run:
    groups: bool
    densities: bool


def likely_causes(facts: Mapping[str, float], *, groups: bool, densities: bool = False) -> list[Cause]:
    """What the metrics of a plateau point to, most telling first; never empty.

    Args:
        facts: means over the last iterations, by metric; `first_entropy` is that of the first iterations. Missing ones
            are not judged.
        groups: whether advantages compare the episodes of a group.
        densities: whether the policy draws from densities, whose entropy may be negative: what counts is the factor by
            which they become narrower.
    """
    known = {name: value for name, value in facts.items() if math.isfinite(value)}
    causes = [cause for judge in _JUDGES if (cause := judge(known, _Run(groups, densities))) is not None]
    if causes and causes[0].name == "ceiling":
        return causes[:1]
    return causes or [
        Cause(
            "unknown",
            "signal, step size, entropy and critic look healthy: the policy may not see or express what the task "
            "needs. Watch the failures (eval_vla.py --num_videos), and try more or other demonstrations, a larger "
            "image or model, or a reward that is paid on the way (--reward)",
        )
    ]


def _ceiling(facts: Mapping[str, float], run: _Run) -> Cause | None:
    success = facts.get("rollout/success_at_end", 0.0)
    if success < CEILING:
        return None
    return Cause(
        "ceiling",
        f"{100 * success:.0f} % of the sampled episodes succeed already, so little is left to gain. End such runs with "
        "--early_stopping",
    )


def _signal(facts: Mapping[str, float], run: _Run) -> Cause | None:
    share = facts.get("rollout/signal_share", 1.0)
    if share >= _FEW_SIGNALS:
        return None
    unit = (
        "groups have episodes with different rewards" if run.groups else "episodes differ in reward from the usual one"
    )
    more = "more episodes per state (--n_samples_per_prompt)" if run.groups else "more episodes per iteration"
    return Cause(
        "signal",
        f"only {100 * share:.1f} % of the {unit}. Give {more}, a reward that is paid on the way (--reward rm with a "
        "reward machine, or --reward env where the suite has a dense one), initial states in order of difficulty "
        "(--task_sampler), a higher --temperature, or a better start (more demonstrations)",
    )


def _entropy(facts: Mapping[str, float], run: _Run) -> Cause | None:
    now, first = facts.get("actor/entropy"), facts.get("first_entropy")
    if now is None or first is None:
        return None
    share = math.exp(min(0.0, now - first)) if run.densities else now / first if first > 0 else 1.0
    if share >= _COLLAPSED:
        return None
    return Cause(
        "entropy",
        f"the entropy of the policy fell from {first:.3f} to {now:.3f}: it hardly explores any more. Raise "
        "--entropy_loss_coef or --temperature, lower --actor_learning_rate, or keep the policy near its start "
        "(--init_kl_coef)",
    )


def _step_size(facts: Mapping[str, float], run: _Run) -> Cause | None:
    kl, clipped = facts.get("actor/ppo_kl"), facts.get("actor/pg_clipfrac")
    if kl is None or clipped is None:
        return None
    measured = f"KL {kl:.1g}, clipped {100 * clipped:.1f} %"
    if abs(kl) < _SMALL_KL and clipped < _SMALL_CLIP:
        text = f"updates hardly change the policy ({measured}). Raise --actor_learning_rate or --max_epochs"
        return Cause("step_too_small", text)
    if clipped > _LARGE_CLIP:
        text = f"updates are too large ({measured}). Lower --actor_learning_rate or --max_epochs, or set --target_kl"
        return Cause("step_too_large", text)
    return None


def _critic(facts: Mapping[str, float], run: _Run) -> Cause | None:
    explained = facts.get("critic/vf_explained_var")
    if explained is None or explained >= _UNEXPLAINED:
        return None
    return Cause(
        "critic",
        f"the critic explains {100 * max(0.0, explained):.0f} % of the variance of the returns. Raise "
        "--critic_learning_rate, give it a head start (--freezing_actor_steps), or do without it "
        "(--advantage_estimator grpo with --n_samples_per_prompt 8)",
    )


_JUDGES = (_ceiling, _signal, _entropy, _step_size, _critic)
