"""Signs that a run cannot learn, found early: each with its likely cause and the next thing to try."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlvla.experience import Experience, Sample
from rlvla.models.inputs import VLAInputs
from rlvla.trainer.config import GuardConfig
from rlvla.utils.durable_files import checked_file
from rlvla.utils.errors import TrainingHalted
from rlvla.utils.logging import log
from rlvla.utils.strategy import DeepspeedStrategy

# Two of a hundred values lie outside of the 1 % and 99 % quantiles of the statistics; half are another robot's.
FOREIGN_PROPRIO = 0.5
# Fewer episodes without a success prove nothing.
ENOUGH_EPISODES = 20


class StartCheck:
    """Looks at the first evaluation, the first rollout and the first update of a run."""

    def of_rollout(self, metrics: Mapping[str, float], first_evaluation: tuple[float, int] | None) -> list[str]:
        """Problems of the reward.

        Args:
            metrics: of the rollout: `lowest_score`, `highest_score` (of an episode), `episodes`, `saturated_proprio`
                (share of normalised proprioception at or beyond +-1).
            first_evaluation: success at end of the start policy and number of episodes, if it was evaluated.
        """
        found = []
        rate, n = first_evaluation or (math.nan, 0)
        episodes = int(metrics["episodes"]) + n
        constant = metrics["lowest_score"] == metrics["highest_score"]
        if constant and episodes >= ENOUGH_EPISODES and not (0 < rate < 1):
            score = metrics["highest_score"]
            if rate == 1.0 or (n == 0 and score > 0):
                found.append(
                    f"the start policy succeeded in all of {episodes} episodes: there is nothing to learn. Choose a "
                    "harder task or other initial states"
                )
            else:
                found.append(
                    f"each of the first {int(metrics['episodes'])} episodes got the same reward ({score:g})"
                    + (f", and none of {n} evaluation episodes succeeded" if n else "")
                    + ": there is nothing to compare. Start from a policy that succeeds now and then (more or better "
                    "demonstrations), add a reward that is paid on the way (--reward), or play more episodes per "
                    "iteration"
                )
        if metrics.get("saturated_proprio", 0.0) > FOREIGN_PROPRIO:
            found.append(
                f"{100 * metrics['saturated_proprio']:.0f} % of the proprioception lies at or outside of the range in "
                "the policy's dataset statistics: they belong to another robot or another convention. Look at "
                "--unnorm_key and at how the demonstrations recorded proprio"
            )
        return found

    def of_update(self, metrics: Mapping[str, float]) -> list[str]:
        """Problems of the policy's first update; metrics that are absent (a frozen actor) are not judged."""
        found = []
        if metrics.get("actor/grad_norm") == 0.0 and not advantages_vanish(metrics):
            found.append(
                "the advantages are not zero, but the policy's gradient is: no trainable weight reaches the loss. "
                "Look at what is frozen (--lora_rank) and at which action dimensions ever moved in the data set"
            )
        return found


def advantages_vanish(metrics: Mapping[str, float]) -> bool:
    """Whether all advantages of an iteration were zero."""
    names = ("critic/advantages/mean", "critic/advantages/std")
    return all(abs(metrics.get(name, 0.0)) < 1e-12 for name in names)


def everything_succeeded(metrics: Mapping[str, float]) -> bool:
    """Whether all episodes of an iteration succeeded, or every group was left out because it succeeded too often."""
    if metrics.get("rollout/success_at_end") == 1.0:
        return True
    reasons = ("kept_groups", "dropped_accuracy_low", "dropped_zero_variance", "dropped_truncated")
    others = any(metrics.get(f"rollout/{reason}", 0.0) for reason in reasons)
    return metrics.get("rollout/dropped_accuracy_high", 0.0) > 0 and not others


class IdleCheck:
    """Counts iterations in a row that could not change the policy.

    Args:
        limit: so many are too many; 0: never.

    Attributes:
        count: iterations in a row until now.
        succeeded: those of them in which everything succeeded.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self.count = self.succeeded = 0

    @property
    def nothing_left(self) -> bool:
        """Whether the limit is reached because everything succeeds: the run is at its goal."""
        return self._limit > 0 and self.count >= self._limit and self.succeeded == self.count

    def look(self, metrics: Mapping[str, float]) -> None:
        """Take in an iteration.

        Raises:
            TrainingHalted: the limit is reached, and not everything succeeds.
        """
        idle = advantages_vanish(metrics)
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
    """Counts optimizer steps that were left out because of NaN or infinity, and keeps their batches.

    Args:
        folder: receives the batches.
        limit: so many in a row end the run.
        strategy: the rank.
        unit: what `number` of `look` counts; the files are named by it.
    """

    def __init__(self, folder: Path, limit: int, strategy: DeepspeedStrategy, unit: str = "iteration"):
        self._folder, self._limit, self._strategy, self._unit = folder, limit, strategy, unit
        self.in_a_row: dict[str, int] = {}
        self.total = 0

    def look(self, model: str, norm: float, step: Experience, number: int, settings: Mapping[str, Any]) -> bool:
        """Whether a step was taken; the batch of one that was not is written to the folder.

        Args:
            model: "actor", "critic" or "reward_model".
            norm: its gradient norm, equal on all ranks.
            step: the rows of this rank.
            number: of the iteration, or of what `unit` says.
            settings: whatever a replay needs to know (temperature, ...).

        Raises:
            TrainingHalted: too many in a row.
        """
        if math.isfinite(norm):
            self.in_a_row[model] = 0
            return True
        self.total += 1
        self.in_a_row[model] = count = self.in_a_row.get(model, 0) + 1
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._new_file(f"{self._unit}_{number:06d}_{model}", f"rank{self._strategy.rank}.pt")
        content = {f.name: getattr(step, f.name) for f in fields(step)}
        with checked_file(path, {}) as file:
            torch.save({"experience": content, "model": model, "settings": dict(settings)}, file)
        if count >= self._limit:
            raise TrainingHalted(
                f"{count} optimizer steps of the {model.replace('_', ' ')} in a row had NaN or infinity in their loss "
                f"or gradient and were left out. The batches are in {self._folder}; see which rows do it with: python "
                f"cli/replay_batch.py --batch {path} --pretrain DIR. Mostly the learning rate is too high (halve it), "
                "the batch itself is not finite (a reward, a return, proprio), or bf16 overflows (try without)"
            )
        return False

    def _new_file(self, start: str, end: str) -> Path:
        """Numbered from 1; what an earlier step, or the run before it was continued, has left stays."""
        paths = (self._folder / f"{start}_{number}_{end}" for number in itertools.count(1))
        return next(path for path in paths if not path.exists())


class Guards:
    """All of them, as the trainer asks them; every rank comes to the same verdict.

    Args:
        config: what ends a run.
        strategy: collectives.
        folder: of the run; batches of bad steps go to `bad_batches/` below it.
        temperature: of sampling, for a replay.
    """

    def __init__(self, config: GuardConfig, strategy: DeepspeedStrategy, folder: Path, temperature: float):
        self._config, self._strategy, self._temperature = config, strategy, temperature
        self._start = StartCheck()
        self._idle = IdleCheck(config.max_idle_iterations)
        self._bad = BadSteps(folder / "bad_batches", config.max_bad_steps, strategy)
        self._update_seen = False

    def look_at_rollout(
        self, samples: Sequence[Sample], first_evaluation: tuple[float, int] | None, inputs: VLAInputs
    ) -> None:
        """The first rollout: this rank's episodes."""
        scores = [sample.score for sample in samples]
        share = 0.0
        if inputs.config.use_proprio and samples:
            seen = torch.cat([sample.proprio for sample in samples if sample.proprio is not None])
            told = samples[0].state_width  # one-hot: at the ends of its range by nature
            share = saturated_share(inputs.normalize_proprio(seen)[:, : seen.shape[1] - told])
        metrics = self._strategy.all_reduce({"episodes": len(scores)}, "sum")
        metrics |= self._strategy.all_reduce({"lowest_score": min(scores, default=math.inf)}, "min")
        metrics |= self._strategy.all_reduce({"highest_score": max(scores, default=-math.inf)}, "max")
        metrics |= self._strategy.all_reduce({"saturated_proprio": share}, "max")
        self._tell(self._start.of_rollout(metrics, first_evaluation))

    def look_at_update(self, metrics: Mapping[str, float]) -> None:
        """The metrics of any update; those of the policy's first are judged as the start of the run."""
        if not self._update_seen and "actor/grad_norm" in metrics:
            self._update_seen = True
            self._tell(self._start.of_update(metrics))

    def look_at_iteration(self, metrics: Mapping[str, float]) -> None:
        """All metrics of an iteration at its end, rollout and update; as `IdleCheck.look`."""
        self._idle.look(metrics)

    @property
    def nothing_left(self) -> bool:
        """As `IdleCheck.nothing_left`."""
        return self._idle.nothing_left

    def look_at_step(self, model: str, norm: float, step: Experience, iteration: int) -> bool:
        """As `BadSteps.look`."""
        return self._bad.look(model, norm, step, iteration, {"temperature": self._temperature})

    def _tell(self, problems: Sequence[str]) -> None:
        if problems and self._config.check_start:
            raise TrainingHalted("\n".join([*problems, "(--no-check_start goes on nevertheless)"]))
        if self._strategy.is_main:
            for problem in problems:
                log.warning(problem)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        idle = {"idle": self._idle.count, "succeeded": self._idle.succeeded}
        return idle | {"update_seen": self._update_seen, "bad_steps": self._bad.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._idle.count, self._update_seen = int(state["idle"]), bool(state["update_seen"])
        # Checkpoints of earlier versions have neither.
        self._idle.succeeded = int(state.get("succeeded", 0))
        self._bad.in_a_row = dict(state.get("bad_steps", {}))


def read_batch(path: Path) -> tuple[Experience, str, dict[str, Any]]:
    """What `BadSteps` wrote: rows, model, settings."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    known = {f.name for f in fields(Experience)}
    rows = Experience(**{name: value for name, value in content["experience"].items() if name in known})
    return rows, content["model"], content["settings"]


def saturated_share(normalized: Tensor) -> float:
    """Share of entries of [B, P] normalised proprioception at or beyond +-1, over the dimensions that vary."""
    varying = normalized[:, normalized.amax(0) > normalized.amin(0)] if len(normalized) > 1 else normalized
    return float((varying.abs() >= 1.0).float().mean()) if varying.numel() else 0.0
