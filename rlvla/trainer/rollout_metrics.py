"""What is reported of the episodes an iteration has played, and of the iteration in one line."""

from __future__ import annotations

from collections.abc import Mapping

from rlvla.rollout.stats import SUMMED, RolloutStats
from rlvla.trainer.group_collector import Collected
from rlvla.trainer.metrics import Metrics
from rlvla.utils.strategy import DeepspeedStrategy


def measure_rollout(collected: Collected, stats: RolloutStats, metrics: Metrics, strategy: DeepspeedStrategy) -> None:
    """Of all episodes played, whether they are trained on or not."""
    measured = stats.as_metrics()
    metrics.total({name: measured.pop(name) for name in SUMMED})
    metrics.mean(measured, 1.0)
    rounds = collected.counts.pop("rounds")
    metrics.mean({"rollout/rounds": rounds}, 1.0)
    metrics.total({f"rollout/{name}": number for name, number in collected.counts.items()})
    samples, n = collected.played, len(collected.played)
    sums: dict[str, float] = {
        "rollout/success_at_end": sum(s.success_at_end for s in samples),
        "rollout/success_once": sum(s.success_once for s in samples),
        "rollout/episode_length": sum(s.finish_step for s in samples),
        "rollout/truncated": sum(s.truncated for s in samples),
    }
    of_rewards: dict[str, float] = {}
    for name in samples[0].reward_components if samples else ():
        of_rewards[f"reward/{name}"] = float(sum(s.reward_components[name].sum() for s in samples))
    for name in samples[0].reward_info if samples else ():
        of_rewards[f"reward/{name}"] = float(sum(s.reward_info[name] for s in samples))
    # A rank without episodes does not know what is paid, and all must declare the same names.
    known = {name for names in strategy.gather_objects(list(of_rewards)) for name in names}
    sums |= {name: of_rewards.get(name, 0.0) for name in known}
    metrics.mean({name: value / max(1, n) for name, value in sums.items()}, n)


SUCCESS_ALONE = {"success": 1.0}  # weights of the rewards, with which reward and success are one number


def iteration_line(
    iteration: int, total: int, metrics: dict[str, float], weights: Mapping[str, float] = SUCCESS_ALONE
) -> str:
    """What is printed after an iteration, counted from 1, of so many; `weights` are those of the reward sources."""
    shown = {
        "success": ("rollout/success_at_end", ".2f"),
        **({} if weights == SUCCESS_ALONE else {"reward": ("reward/total", ".3g")}),
        "entropy": ("actor/entropy", ".3f"),
        "kl": ("actor/ppo_kl", ".4f"),
        "clipped": ("actor/pg_clipfrac", ".3f"),
        "grad": ("actor/grad_norm", ".2f"),
        "value loss": ("critic/vf_loss", ".4f"),
        "actor steps left out": ("actor/skipped_steps", ".0f"),
        "critic steps left out": ("critic/skipped_steps", ".0f"),
    }
    parts = [f"{label} {metrics[name]:{form}}" for label, (name, form) in shown.items() if name in metrics]
    times = f"rollout {metrics['timing_s/rollout']:.1f} s, update {metrics['timing_s/update']:.1f} s"
    return f"iteration {iteration}/{total}: {', '.join(parts)} ({times})"
