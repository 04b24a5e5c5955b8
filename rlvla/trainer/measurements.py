"""Measurements of an iteration: rollout statistics, throughput, memory, profiles."""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch.profiler import profile, record_function, supported_activities

from rlvla.envs.base import TaskSpec
from rlvla.experience import Sample
from rlvla.models.policy import Policy
from rlvla.rewards.success_source import SIMULATOR
from rlvla.rollout.stats import OF_TASKS, SUMMED, RolloutStats
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.observers import Observer, OptimizerStep, Rollout
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.terminal import duration, log

SUCCESS_ALONE = {"success": 1.0}  # reward weights for which reward and success are the same number
TRACE_FOLDER = "profile"
GB = 1e9
# Dense bfloat16 FLOP/s per device from the vendors' data sheets, by pattern of the name that the driver reports; the
# first match counts.
_BF16_PEAKS = (
    (r"B200", 2250e12),
    (r"H200|GH200", 989e12),
    (r"H100.*PCIe", 756e12),
    (r"H100.*NVL", 835e12),
    (r"H100", 989e12),
    (r"A100|A800", 312e12),
    (r"L40S", 362e12),
    (r"L40", 181e12),
    (r"A40", 150e12),
    (r"L4\b", 121e12),
    (r"A10\b", 125e12),
    (r"RTX 4090", 165e12),
    (r"RTX 3090", 71e12),
    (r"MI300X", 1307e12),
    (r"MI250X", 383e12),
)

TOTAL_REWARD = "reward/total"
_LONG_WAIT = 1.0  # seconds


def measure_rollout(
    samples: Sequence[Sample],
    stats: RolloutStats,
    metrics: Metrics,
    strategy: DeepspeedStrategy,
    tasks: Sequence[TaskSpec] = (),
    *,
    measured: Container[str] = (TOTAL_REWARD,),
) -> None:
    """Add metrics of all episodes played, those that are not trained on too; of each task if there are several.

    `measured`: names of the algorithm's metrics; the total reward is added unless it is one of them.
    """
    of_rollout = stats.as_metrics()
    metrics.total({name: of_rollout.pop(name) for name in SUMMED})
    metrics.mean(of_rollout, 1.0)
    n = len(samples)
    sums: dict[str, float] = {
        "rollout/success_at_end": sum(s.success_at_end for s in samples),
        "rollout/success_once": sum(s.success_once for s in samples),
        "rollout/episode_length": sum(s.finish_step for s in samples),
        "rollout/truncated": sum(s.truncated for s in samples),
    }
    of_rewards: dict[str, float] = {}
    for name in samples[0].reward_components if samples else ():
        of_rewards[f"reward/{name}"] = float(sum(s.reward_components[name].sum() for s in samples))
    if samples and samples[0].simulator_at_end is not None:  # a judge detected success
        pairs = [(s.success_at_end, bool(s.simulator_at_end)) for s in samples]
        of_rewards |= {
            "rollout/simulator_success_at_end": sum(simulator for _, simulator in pairs),
            "rollout/simulator_success_once": sum(bool(s.simulator_once) for s in samples),
            "rollout/success_judge_only": sum(judge and not simulator for judge, simulator in pairs),
            "rollout/success_simulator_only": sum(simulator and not judge for judge, simulator in pairs),
            "rollout/success_unanswered": sum(s.unanswered for s in samples),
        }
    # Not every episode needs to report the same numbers.
    reported: dict[str, list[float]] = {}
    for sample in samples:
        for name, number in sample.reward_info.items():
            reported.setdefault(f"reward/{name}", []).append(number)
    # A rank without episodes does not know the names, but all ranks must declare the same ones.
    for reward_names, info_names in strategy.gather_objects([list(of_rewards), list(reported)]):
        of_rewards = dict.fromkeys(reward_names, 0.0) | of_rewards
        reported = {name: [] for name in info_names} | reported
    if TOTAL_REWARD not in measured:
        sums[TOTAL_REWARD] = sum(s.score for s in samples)
    metrics.mean({name: value / max(1, n) for name, value in (sums | of_rewards).items()}, n)
    if len(tasks) > 1:
        for task in tasks:
            outcomes = [s.success_at_end for s in samples if (s.suite, s.task_id) == (task.suite, task.task_id)]
            metrics.mean({f"{OF_TASKS}{task.name}": sum(outcomes) / max(1, len(outcomes))}, len(outcomes))
    for name, numbers in reported.items():
        metrics.mean({name: float(sum(numbers)) / max(1, len(numbers))}, len(numbers))


def iteration_line(
    iteration: int,
    total: int,
    metrics: dict[str, float],
    weights: Mapping[str, float] = SUCCESS_ALONE,
    success_source: str = SIMULATOR,
) -> str:
    """The line printed after iteration `iteration` (counted from 1) of `total`.

    Args:
        iteration: number of the iteration.
        total: number of iterations of the run.
        metrics: metrics of the iteration.
        weights: weights of the reward sources; the reward is shown unless it equals the success.
        success_source: success detector; the simulator's success is shown beside that of a judge.
    """
    label = "success" if success_source == SIMULATOR else f"success by {success_source}"
    shown = {
        label: ("rollout/success_at_end", ".2f"),
        "by the simulator": ("rollout/simulator_success_at_end", ".2f"),
        **({} if weights == SUCCESS_ALONE else {"reward": (TOTAL_REWARD, ".3g")}),
        "signal": ("rollout/signal_share", ".2f"),
        "entropy": ("actor/entropy", ".3f"),
        "kl": ("actor/ppo_kl", ".4f"),
        "clipped": ("actor/pg_clipfrac", ".3f"),
        "stalled": ("reward/stalled", ".2f"),
        "grad": ("actor/grad_norm", ".2f"),
        "moved": ("actor/start_distance", ".2g"),
        "value loss": ("critic/vf_loss", ".4f"),
        "explained": ("critic/vf_explained_var", ".2f"),
        "actor steps left out": ("actor/skipped_steps", ".0f"),
        "critic steps left out": ("critic/skipped_steps", ".0f"),
    }
    entries = [f"{label} {metrics[name]:{form}}" for label, (name, form) in shown.items() if name in metrics]
    phases = [name for name in ("rollout", "update") if f"timing_s/{name}" in metrics]
    times = ", ".join(f"{name} {metrics[f'timing_s/{name}']:.1f} s" for name in phases)
    left = f"; {duration(metrics['timing_s/left'])} left" if metrics.get("timing_s/left") else ""
    return f"iteration {iteration}/{total}: {', '.join([*entries, *_reward_troubles(metrics)])} ({times}{left})"


def _reward_troubles(metrics: Mapping[str, float]) -> list[str]:
    """Requests for rewards that failed or were repeated, and waiting for rewards that took longer than playing."""
    troubles = []
    for name in ("vlm", "remote"):
        counts = [(metrics.get(f"reward/{name}_{what}", 0.0), what) for what in ("failures", "timeouts", "retries")]
        if any(count for count, _ in counts):
            requests = metrics.get(f"reward/{name}_requests")
            of = "" if requests is None else f" of {requests:.0f} requests"
            troubles.append(f"{name}: " + ", ".join(f"{count:.0f} {what}" for count, what in counts if count) + of)
    waited = metrics.get("timing_s/rewards", 0.0)
    if waited > max(_LONG_WAIT, metrics.get("timing_s/rollout", 0.0)):
        troubles.append(f"waited {waited:.1f} s for rewards")
    return troubles


class Throughput(Observer):
    """Measures the metrics `perf/*`.

    Args:
        strategy: gives the device and the precision.
        policy: gives tokens and FLOPs per decision.
    """

    def __init__(self, strategy: DeepspeedStrategy, policy: Policy):
        self._device, self._policy = strategy.device, policy
        self._peak = device_bf16_peak(strategy.device) if strategy.config.bf16 else None

    def after_rollout(self, rollout: Rollout, metrics: Metrics) -> None:
        """Throughput of the rollout over all decisions of the policy, failed attempts included."""
        samples, stats = rollout.samples, rollout.stats
        prompts = [text for sample in samples for text in sample.decision_instructions]
        length = self._length(prompts, samples[0].images.shape[1]) if prompts else 0
        self._count("rollout", stats.decisions, length, metrics)
        self._rates("rollout", stats.wall_s, metrics)

    def after_step(self, step: OptimizerStep) -> None:
        """Count the rows of a step, without fully masked placeholders."""
        rows, num_images = int(step.rows.action_mask.any(1).sum()), step.rows.images.shape[1]
        length = self._length(step.rows.instructions, num_images)
        self._count("update", rows if step.counts else 0, length, step.metrics)
        if self._peak is not None:
            module = step.engine.module
            flops = getattr(module, "training_flops", self._policy.training_flops)(module, length, num_images)
            step.metrics.total({"_update/flops": rows * flops})

    def after_steps(self, seconds: float, metrics: Metrics) -> None:
        """Throughput of the update."""
        self._count("update", 0, 0, metrics)  # so that all ranks declare the same names
        self._rates("update", seconds, metrics)
        if self._peak is not None:
            metrics.total({"_update/peak": self._peak, "_update/flops": 0.0})
            metrics.derived(
                "perf/update_mfu",
                lambda reduced: (
                    reduced["_update/flops"] / max(1e-9, reduced["_update/seconds"] * reduced["_update/peak"])
                ),
            )

    def measure_memory(self, metrics: Metrics) -> None:
        """Peak memory of a rank since its start, without its environment workers."""
        metrics.maximum({"perf/max_rss_gb": max_rss_gb()})
        allocated = max_memory_allocated_gb(self._device)
        if allocated is not None:
            metrics.maximum({"perf/max_memory_allocated_gb": allocated})

    def _length(self, instructions: Sequence[str], num_images: int) -> int:
        """Tokens of the longest decision; 0 without instructions."""
        return max(self._policy.row_tokens(instructions, num_images), default=0)

    @staticmethod
    def _count(phase: str, rows: int, length: int, metrics: Metrics) -> None:
        metrics.total({f"_{phase}/decisions": rows, f"_{phase}/tokens": rows * length})

    @staticmethod
    def _rates(phase: str, seconds: float, metrics: Metrics) -> None:
        metrics.maximum({f"_{phase}/seconds": seconds})
        for unit in ("decisions", "tokens"):
            metrics.derived(f"perf/{phase}_{unit}_per_s", partial(_rate, f"_{phase}/{unit}", f"_{phase}/seconds"))


def _rate(work: str, seconds: str, reduced: dict[str, float]) -> float:
    return reduced[work] / max(1e-9, reduced[seconds])


class Stopwatch:
    """Measures the phases of an iteration in seconds; each phase is also a named range in a profiler trace.

    Args:
        *phases: phases reported as 0 if they do not occur.
    """

    def __init__(self, *phases: str):
        self.seconds = dict.fromkeys(phases, 0.0)
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to the phase."""
        start = time.perf_counter()
        with record_function(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def elapsed(self) -> float:
        """Seconds since construction."""
        return time.perf_counter() - self._start


class IterationProfiler:
    """Records selected iterations with the torch profiler: a Chrome trace per iteration and rank.

    Args:
        iterations: the iterations to record, counted from 1.
        folder: run folder; traces go to its subfolder `profile/`.
        strategy: gives the rank, which is part of the file names.
    """

    def __init__(self, iterations: Sequence[int], folder: Path, strategy: DeepspeedStrategy):
        self._iterations, self._folder, self._strategy = frozenset(iterations), folder / TRACE_FOLDER, strategy

    @contextmanager
    def recorded(self, iteration: int) -> Iterator[None]:
        """Record the block if the iteration (counted from 1) is selected, and write its trace."""
        if iteration not in self._iterations:
            yield
            return
        with profile(activities=supported_activities()) as recording:
            yield
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"iteration_{iteration:06d}_rank{self._strategy.rank}.json.gz"
        recording.export_chrome_trace(str(path))
        if self._strategy.is_main:
            log.info(f"iteration {iteration}: trace in {path}; open it at https://ui.perfetto.dev or chrome://tracing")


def bf16_peak(name: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of a device by the name its driver reports; None if unknown."""
    return next((peak for pattern, peak in _BF16_PEAKS if re.search(pattern, name)), None)


def device_bf16_peak(device: torch.device) -> float | None:
    """`bf16_peak` of a torch device; None for a CPU."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return bf16_peak(name(device)) if name is not None else None


def max_rss_gb() -> float:
    """Peak resident memory of this process since its start, in GB (1e9 bytes)."""
    unit = 1 if sys.platform == "darwin" else 1024  # what `ru_maxrss` counts
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GB


def max_memory_allocated_gb(device: torch.device) -> float | None:
    """Peak memory allocated by torch on the device, in GB (1e9 bytes); None for a CPU."""
    allocated = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return allocated(device) / GB if allocated is not None else None
