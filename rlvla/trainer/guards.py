"""Early detection of runs that cannot learn, with the likely cause and remedies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from rlvla.evaluation.results import EvalResult
from rlvla.experience import Experience
from rlvla.rollout.stats import saturated_proprio, saturation_warning
from rlvla.trainer.config import AsyncConfig, LoopGuardConfig, ScheduleConfig
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.observers import Observer, OptimizerStep, Rollout
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import TrainingHalted
from rlvla.utils.files import BestEffortWriter, flushed_file
from rlvla.utils.terminal import log
from rlvla.utils.torch_files import read_torch_file

# With fewer episodes, the absence of a success is not conclusive.
ENOUGH_EPISODES = 20
TOO_FEW_IN_A_ROW = 3
EARLY_STOP_EPISODES = 50  # smallest evaluation that early stopping relies on


def start_rollout_problems(metrics: Mapping[str, float], first_evaluation: tuple[float, int] | None) -> list[str]:
    """Problems visible in the first rollout: rewards without variation, proprio of another robot.

    Args:
        metrics: `lowest_score` and `highest_score` of an episode, `episodes`, and `saturated_proprio` (share of
            normalized proprioception at or beyond +-1).
        first_evaluation: success at end of the initial policy and number of episodes, if it was evaluated.
    """
    problems = []
    rate, n = first_evaluation or (math.nan, 0)
    episodes = int(metrics["episodes"]) + n
    constant = metrics["lowest_score"] == metrics["highest_score"]
    if constant and episodes >= ENOUGH_EPISODES and not (0 < rate < 1):
        score = metrics["highest_score"]
        if rate == 1.0 or (n == 0 and score > 0):
            problems.append(
                f"the initial policy succeeded in all of {episodes} episodes: there is nothing to learn. Choose a "
                "harder task or other initial states"
            )
        else:
            problems.append(
                f"each of the first {int(metrics['episodes'])} episodes got the same reward ({score:g})"
                + (f", and none of {n} evaluation episodes succeeded" if n else "")
                + ": there is nothing to compare. Start from a policy that succeeds now and then (more or better "
                "demonstrations), add a reward that is paid on the way (--reward), or play more episodes per "
                "iteration"
            )
    foreign = saturation_warning(metrics.get("saturated_proprio", 0.0))
    problems += [foreign] if foreign else []
    return problems


def start_update_problems(metrics: Mapping[str, float]) -> list[str]:
    """Problems visible in the first update of the policy; missing metrics (a frozen actor) are ignored."""
    problems = []
    if metrics.get("actor/grad_norm") == 0.0 and not advantages_vanish(metrics):
        problems.append(
            "the advantages are not zero, but the policy's gradient is: no trainable weight reaches the loss. "
            "Look at what is frozen (--lora_rank) and at which action dimensions ever moved in the dataset"
        )
    return problems


def advantages_vanish(metrics: Mapping[str, float]) -> bool:
    """Whether all advantages of an iteration were zero."""
    names = ("critic/advantages/mean", "critic/advantages/std")
    return all(abs(metrics.get(name, 0.0)) < 1e-12 for name in names)


def everything_succeeded(metrics: Mapping[str, float]) -> bool:
    """Whether all episodes of an iteration succeeded, or all groups were filtered for succeeding too often."""
    if metrics.get("rollout/success_at_end") == 1.0:
        return True
    reasons = ("kept_groups", "dropped_accuracy_low", "dropped_zero_variance", "dropped_truncated")
    others = any(metrics.get(f"rollout/{reason}", 0.0) for reason in reasons)
    return metrics.get("rollout/dropped_accuracy_high", 0.0) > 0 and not others


class IdleCheck:
    """Counts consecutive iterations that could not change the policy.

    Args:
        limit: number of iterations that ends the run; 0 disables the check.
        is_idle: decides from its metrics whether an iteration was idle; default: all advantages were zero.

    Attributes:
        count: consecutive idle iterations so far.
        succeeded: how many of them were idle because all episodes succeeded.
    """

    def __init__(self, limit: int, is_idle: Callable[[Mapping[str, float]], bool] | None = None):
        self._limit, self._is_idle = limit, is_idle or advantages_vanish
        self.count = self.succeeded = 0

    @property
    def nothing_left(self) -> bool:
        """Whether the limit was reached because everything succeeds, which completes the run."""
        return self._limit > 0 and self.count >= self._limit and self.succeeded == self.count

    def check(self, metrics: Mapping[str, float]) -> None:
        """Count an iteration.

        Raises:
            TrainingHalted: the limit is reached and not everything succeeds.
        """
        idle = self._is_idle(metrics)
        self.count = self.count + 1 if idle else 0
        self.succeeded = self.succeeded + everything_succeeded(metrics) if idle else 0
        if self._limit and self.count >= self._limit and not self.nothing_left:
            raise TrainingHalted(
                f"in {self.count} iterations in a row all advantages were zero: the episodes of a group (with a "
                "critic: all episodes) got equal rewards, so nothing was learned. Start from a better policy, add a "
                "reward that is paid on the way (--reward), raise --temperature or --n_samples_per_prompt, or allow "
                "more such iterations with --max_idle_iterations"
            )


class BadSteps:
    """Counts optimizer steps that were skipped because of NaN or infinity, and saves their batches.

    Args:
        folder: where the batches are saved.
        limit: number of consecutive skipped steps that ends the run.
        strategy: gives the rank, which is part of the file names.
        unit: unit of the `number` passed to `check`; part of the file names.
    """

    def __init__(self, folder: Path, limit: int, strategy: DeepspeedStrategy, unit: str = "iteration"):
        self._folder, self._limit, self._strategy, self._unit = folder, limit, strategy, unit
        self._best_effort = BestEffortWriter(str(folder))
        self.in_a_row: dict[str, int] = {}
        self.total = 0

    def check(self, model: str, norm: float, step: Experience, number: int, settings: Mapping[str, Any]) -> bool:
        """Whether a step was taken; the batch of a skipped step is saved.

        Args:
            model: "actor", "critic" or "reward_model".
            norm: gradient norm, equal on all ranks.
            step: the training rows of this rank.
            number: number of the iteration, or of another `unit`.
            settings: needed to replay the step (such as the temperature); saved with the batch.

        Raises:
            TrainingHalted: too many consecutive steps were skipped.
        """
        if math.isfinite(norm):
            self.in_a_row[model] = 0
            return True
        self.total += 1
        self.in_a_row[model] = count = self.in_a_row.get(model, 0) + 1
        name = f"{self._unit}_{number:06d}_{model}_{{}}_rank{self._strategy.rank}.pt"
        paths = (self._folder / name.format(attempt) for attempt in itertools.count(1))  # existing files are kept
        path = next(path for path in paths if not path.exists())
        content = {f.name: getattr(step, f.name) for f in fields(step)}

        def save() -> None:
            self._folder.mkdir(parents=True, exist_ok=True)
            with flushed_file(path) as file:
                torch.save({"experience": content, "model": model, "settings": dict(settings)}, file)

        self._best_effort.attempt(save)
        if count >= self._limit:
            raise TrainingHalted(
                f"{count} optimizer steps of the {model.replace('_', ' ')} in a row had NaN or infinity in their loss "
                "or gradient and were left out. Mostly the learning rate is too high (halve it), the batch itself is "
                "not finite (a reward, a return, proprio), or bf16 overflows (try without). The batches are in "
                f"{self._folder}; see which rows do it with: python cli/replay_batch.py --batch {path} --pretrain DIR"
            )
        return False


class FewEffectiveSamples(Observer):
    """Ends an asynchronous run whose policy has moved too far from the one that sampled.

    Args:
        config: the smallest effective sample size, as a fraction of the tokens.
    """

    def __init__(self, config: AsyncConfig):
        self._config, self.count = config, 0

    def after_iteration(self, values: dict[str, float]) -> None:
        """Count an iteration; TrainingHalted after several in a row below the limit."""
        share = values.get("rollout_corr/ess", 1.0)
        few = self._config.plays_ahead and share < self._config.min_ess
        self.count = self.count + 1 if few else 0
        if self.count >= TOO_FEW_IN_A_ROW:
            raise TrainingHalted(
                f"in {self.count} iterations in a row the effective sample size was below {self._config.min_ess:g} of "
                f"the tokens, now {share:.3g}: the policy moves too far while episodes are played ahead. Take a "
                "smaller --max_staleness, --actor_learning_rate or --max_epochs, or allow it with --min_ess"
            )


class Guards(Observer):
    """All checks of a run; every rank reaches the same conclusion.

    Args:
        config: which checks are on, and their limits.
        strategy: reduces metrics over ranks.
        folder: run folder; batches of skipped steps go to its subfolder `bad_batches/`.
        settings: saved with the batches, for a replay.
        is_idle: see `Algorithm.is_idle`; default: all advantages were zero.
        proprio_limit: see `PolicySpec`.
    """

    def __init__(
        self,
        config: LoopGuardConfig,
        strategy: DeepspeedStrategy,
        folder: Path,
        settings: Mapping[str, Any],
        is_idle: Callable[[Mapping[str, float]], bool] | None = None,
        proprio_limit: float = 1.0,
    ):
        self._config, self._strategy, self._settings = config, strategy, settings
        self._proprio_limit = proprio_limit
        self._idle = IdleCheck(config.max_idle_iterations, is_idle)
        self._bad = BadSteps(folder / "bad_batches", config.max_bad_steps, strategy)
        self._update_seen = False

    def after_rollout(self, rollout: Rollout, metrics: Metrics) -> None:
        """Check the first rollout of the run."""
        if rollout.iteration or self._config.check_start is None:
            return
        scores = [sample.score for sample in rollout.samples]
        reduced = self._strategy.all_reduce({"episodes": len(scores)}, "sum")
        reduced |= self._strategy.all_reduce({"lowest_score": min(scores, default=math.inf)}, "min")
        reduced |= self._strategy.all_reduce({"highest_score": max(scores, default=-math.inf)}, "max")
        saturated = saturated_proprio(rollout.samples, self._proprio_limit)
        reduced |= self._strategy.all_reduce({"saturated_proprio": saturated}, "max")
        self._report(start_rollout_problems(reduced, rollout.start_evaluation))

    def after_step(self, step: OptimizerStep) -> None:
        """See `BadSteps.check`."""
        number = step.iteration + 1  # counted from 1, as in the log
        self._bad.check(step.model, step.norm, step.rows, number, self._settings)

    def after_update(self, values: dict[str, float]) -> None:
        """Check the first update of the policy."""
        if not self._update_seen and "actor/grad_norm" in values:
            self._update_seen = True
            self._report(start_update_problems(values))

    def after_iteration(self, values: dict[str, float]) -> None:
        """See `IdleCheck.check`."""
        self._idle.check(values)

    @property
    def nothing_left(self) -> bool:
        """See `IdleCheck.nothing_left`."""
        return self._idle.nothing_left

    def _report(self, problems: Sequence[str]) -> None:
        if problems and self._config.check_start:
            raise TrainingHalted("\n".join([*problems, "(--no-check_start goes on nevertheless)"]))
        if self._strategy.is_main:
            for problem in problems:
                log.warning(problem)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        idle = {"idle": self._idle.count, "succeeded": self._idle.succeeded}
        return idle | {"update_seen": self._update_seen, "bad_steps": self._bad.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._idle.count, self._update_seen = int(state["idle"]), bool(state["update_seen"])
        # Missing in checkpoints of earlier versions.
        self._idle.succeeded = int(state.get("succeeded", 0))
        self._bad.in_a_row = dict(state.get("bad_steps", {}))


@dataclass(frozen=True)
class StoredBatch:
    """The batch of a skipped step, as `BadSteps` wrote it.

    Attributes:
        rows: rows of one rank.
        model: "actor", "critic" or "reward_model".
        settings: "temperature", and "overrides" of the policy's folder.
        prepared: `rows` hold observations as the networks read them; False for files of version 0.1, which hold those
            of the environment.
    """

    rows: Experience
    model: str
    settings: dict[str, Any]
    prepared: bool


def read_batch(path: Path) -> StoredBatch:
    """Read a file of `BadSteps`, also of version 0.1; errors as in `read_torch_file`."""
    content = read_torch_file(path)
    names = {f.name for f in fields(Experience)}
    stored = content["experience"]
    since_0_2 = "action_tokens" not in stored
    if not since_0_2:
        stored["trace"] = {"tokens": stored["action_tokens"]}
        if stored.get("ref_all_log_probs") is not None:
            stored["reference"] = {"log_probs": stored["ref_all_log_probs"]}
    rows = Experience(**{name: value for name, value in stored.items() if name in names})
    return StoredBatch(rows, content["model"], content["settings"], prepared=since_0_2)


def good_enough(evaluations: Sequence[EvalResult], schedule: ScheduleConfig) -> bool:
    """Whether the latest evaluations, of at least 50 episodes each, all reach the threshold of early stopping."""
    latest = [e.success_at_end for e in evaluations[-schedule.early_stop_evaluations :]]
    enough = len(latest) == schedule.early_stop_evaluations
    return enough and all(r.n >= EARLY_STOP_EPISODES and r.rate >= schedule.early_stop_success for r in latest)
