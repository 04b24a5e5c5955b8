"""Measuring a policy during supervised training: on held-out and training rows, and in episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlvla.data.demonstrations import Demonstrations, split_by_state
from rlvla.data.rows import DemonstrationRows
from rlvla.envs.base import TaskSpec
from rlvla.envs.splits import UnseenStates
from rlvla.evaluation.evaluate import evaluate
from rlvla.evaluation.results import EvalResult
from rlvla.models.policy import Policy
from rlvla.rollout import RolloutEngine
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.supervised.baselines import majority_tokens, mean_errors, median_actions, nearest_rows
from rlvla.trainer.supervised.config import SFTConfig, ValidationConfig
from rlvla.trainer.supervised.history import Baselines, Measurement, Quality, measured_steps, played_steps
from rlvla.trainer.supervised.verdict import percent, relative_error
from rlvla.utils.deepspeed.engine import Engine
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.seeding import derive_rng

REFERENCES = 20_000  # training rows from which baselines are computed


@dataclass(frozen=True)
class Playing:
    """How episodes are played during supervised training.

    Attributes:
        rollout: plays them on this rank's workers.
        tasks: the tasks.
        states: the initial states.
        episodes: greedy episodes per task.
        samples: attempts with sampled actions at each initial state at the end; 0: none.
        load: reads a policy folder that this run wrote.
    """

    rollout: RolloutEngine
    tasks: Sequence[TaskSpec]
    states: UnseenStates
    episodes: int
    samples: int
    load: Callable[[Path], Policy]


class Validation:
    """Measures the policy at scheduled steps.

    Args:
        rows: all rows.
        sides: the training rows and the held-out rows (perhaps none), [m] int64 each.
        demos: the demonstrations that the rows are from.
        engine: engine of the policy.
        strategy: device, and reductions over ranks; all ranks must call the methods together.
        config: what is measured when.
        sft: options of the loss, and the size of micro-batches.
        playing: how episodes are played; None: not at all.
        total: optimizer steps of the run.
        per_epoch: optimizer steps per epoch.

    Attributes:
        baselines: of the measured training rows and, if there are any, of the measured held-out rows.
    """

    def __init__(
        self,
        rows: DemonstrationRows,
        sides: tuple[np.ndarray, np.ndarray],
        demos: Demonstrations,
        engine: Engine,
        strategy: DeepspeedStrategy,
        config: ValidationConfig,
        sft: SFTConfig,
        playing: Playing | None,
        total: int,
        per_epoch: int,
    ):
        self._rows, self._engine, self._strategy = rows, engine, strategy
        self._micro, self._supervision, self._playing = sft.micro_train_batch_size, sft.supervision, playing
        self._per_epoch = per_epoch
        self._played = played_steps(total, per_epoch, config.eval_epochs) if playing is not None else set()
        self._measured = measured_steps(total, per_epoch, config.heldout_steps) if len(sides[1]) else {0, total}
        train, heldout = sides
        rng = derive_rng(strategy.seed, "validation")
        self._train, self._heldout = (_some(side, config.heldout_rows, rng) for side in sides)
        references = _some(train, REFERENCES, rng)
        self.baselines = (
            row_baselines(rows, demos, references, self._train),
            row_baselines(rows, demos, references, self._heldout) if len(heldout) else None,
        )

    def due(self, step: int) -> bool:
        """Whether the policy is to be measured after this step."""
        return step in self._measured or step in self._played

    def measure(self, step: int, *, last: bool = False) -> tuple[Measurement, EvalResult | None]:
        """Measure the policy after this step, after the `last` one also in episodes; training is not affected."""
        play = step in self._played or (last and self._playing is not None)
        result = self.play() if play else None
        with self._policy() as policy:
            train = self._quality(policy, self._train)
            heldout = self._quality(policy, self._heldout) if len(self._heldout) else None
        success = None if result is None else result.success_at_end
        return Measurement(step, step / self._per_epoch, train, heldout, success), result

    def play(self, samples: int = 0, folder: Path | None = None) -> EvalResult:
        """Play the episodes: greedy, or `samples` attempts with sampled actions at each initial state.

        Args:
            samples: 0 for greedy actions.
            folder: the policy in this folder plays; None: that of the engine.
        """
        assert self._playing is not None
        playing = self._playing
        with self._policy() if folder is None else nullcontext(playing.load(folder)) as policy:
            return evaluate(
                playing.rollout,
                policy,
                playing.tasks,
                self._strategy,
                episodes_per_task=playing.episodes,
                split=playing.states,
                seed=self._strategy.seed,
                greedy=not samples,
                samples=max(1, samples),
                description="attempts" if samples else "episodes",
            )

    def attempts(self, folder: Path | None = None) -> tuple[tuple[int, int], ...]:
        """(successes, attempts) with sampled actions at each initial state; () if none are asked for; see `play`."""
        if self._playing is None or not self._playing.samples:
            return ()
        counts: dict[tuple[int, int], list[bool]] = {}
        for episode in self.play(self._playing.samples, folder).episodes:
            counts.setdefault((episode.task_id, episode.init_state_id), []).append(episode.success_at_end)
        return tuple((sum(outcomes), len(outcomes)) for outcomes in counts.values())

    def _policy(self) -> Any:
        self._engine.train(False)
        return self._engine.full_parameters()

    def _quality(self, policy: Policy, rows: np.ndarray) -> Quality:
        """Of the rows, which are split over the ranks."""
        strategy, dims = self._strategy, policy.spec.action_dim
        means, names = Metrics(), [f"error_{dim}" for dim in range(dims)]
        means.mean(dict.fromkeys(["loss", "accuracy", *names], 0.0), 0.0)
        share = rows[strategy.rank :: strategy.world_size]
        devices = [] if strategy.device.type == "cpu" else [strategy.device]
        with torch.no_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(strategy.seed)  # a loss may draw noise: the same in each measurement
            for start in range(0, len(share), self._micro):
                self._measure_rows(policy, share[start : start + self._micro], means, names)
        values = means.reduce(strategy)
        return Quality(values["loss"], values["accuracy"], tuple(values[name] for name in names))

    def _measure_rows(self, policy: Policy, rows: np.ndarray, means: Metrics, names: Sequence[str]) -> None:
        batch = self._rows.take(rows)
        mask = batch.action_mask
        output = policy(**policy.score(batch.to(self._strategy.device), 1.0), wants=("loss",), **self._supervision)
        values = {"loss": output["error"].cpu()[mask].mean(), "accuracy": output["correct"].cpu()[mask].mean()}
        means.mean(values, float(mask.sum()))
        proprio = None if batch.proprio is None else batch.proprio.numpy()
        decision = policy.act(batch.images.numpy(), proprio, batch.instructions, noise=None, temperature=1.0)
        actions, valid = self._rows.actions_of(rows)
        means.mean(dict(zip(names, mean_errors(decision.actions, actions, valid).tolist())), float(valid.sum()))


def split_for_validation(
    demos: Demonstrations, config: ValidationConfig, seed: int
) -> tuple[Sequence[int], Sequence[int]]:
    """The episodes to train on, and those held out; one of them is empty if the share leaves nothing."""
    if not config.heldout_share:
        return range(len(demos.actions)), ()
    return split_by_state(demos, config.heldout_share, derive_rng(seed, "sft split"))


def progress_line(measurement: Measurement, baselines: tuple[Baselines, Baselines | None], epochs: int) -> str:
    """A measurement on one line; figures of training rows in brackets."""
    train, heldout = measurement.train, measurement.heldout
    shown, of_rows = (train, baselines[0]) if heldout is None else (heldout, baselines[1] or Baselines())

    def beside(figure: str) -> str:
        return "" if heldout is None else f" ({figure})"

    parts = [
        f"{'loss' if heldout is None else 'held-out loss'} {shown.loss:.3f}{beside(f'training {train.loss:.3f}')}",
        f"accuracy {percent(shown.accuracy)}{beside(percent(train.accuracy))}",
        f"action error {' '.join(f'{error:.3g}' for error in shown.errors)}",
    ]
    for name, errors in (
        ("the median action's", of_rows.median_errors),
        ("that at the nearest proprioception", of_rows.neighbor_errors),
    ):
        ratio = relative_error(shown.errors, errors)
        parts[-1] += "" if ratio is None else f", {percent(ratio)} of {name}"
    if of_rows.majority_accuracy is not None:
        parts[1] += f", most frequent tokens {percent(of_rows.majority_accuracy)}"
    if measurement.success is not None:
        parts.append(f"success {measurement.success}")
    return f"epoch {measurement.epoch:.1f}/{epochs}: {'; '.join(parts)}"


def metrics_of(measurement: Measurement, baselines: tuple[Baselines, Baselines | None]) -> dict[str, float]:
    """The scalars of a measurement, for the metrics of the run."""
    sides = {"train": (measurement.train, baselines[0])}
    if measurement.heldout is not None and baselines[1] is not None:
        sides["heldout"] = (measurement.heldout, baselines[1])
    values: dict[str, float] = {}
    for side, (quality, baseline) in sides.items():
        values |= {f"sft_{side}/loss": quality.loss, f"sft_{side}/accuracy": quality.accuracy}
        if baseline.majority_accuracy is not None:
            values[f"sft_{side}/accuracy_majority"] = baseline.majority_accuracy
        errors = {"": quality.errors, "_median": baseline.median_errors, "_neighbor": baseline.neighbor_errors}
        for name, numbers in errors.items():
            values |= {f"sft_{side}/error{name}/{dim}": number for dim, number in enumerate(numbers)}
    return values


def row_baselines(
    rows: DemonstrationRows, demos: Demonstrations, references: np.ndarray, queries: np.ndarray
) -> Baselines:
    """What predictions without images, made from the reference rows, reach on other rows.

    Args:
        rows: all rows.
        demos: the demonstrations that the rows are from.
        references: training rows [m].
        queries: the rows to predict [n].
    """
    known, known_valid = rows.actions_of(references)
    actions, valid = rows.actions_of(queries)
    median = mean_errors(median_actions(known, known_valid), actions, valid)
    neighbor: tuple[float, ...] = ()
    if demos.proprio is not None:
        states, numbers = np.concatenate(demos.proprio).astype(np.float64), _numbers(demos.instructions)[rows.episodes]
        nearest = nearest_rows(
            states[references],
            states[queries],
            kinds=(numbers[references], numbers[queries]),
            episodes=(rows.episodes[references], rows.episodes[queries]),
        )
        comparable = valid & (nearest >= 0)[:, None] & known_valid[nearest]
        neighbor = tuple(mean_errors(known[nearest], actions, comparable).tolist()) if comparable.any() else ()
    return Baselines(majority_accuracy(rows, references, queries), tuple(median.tolist()), neighbor)


def training_majority(rows: DemonstrationRows, train: np.ndarray, seed: int) -> float | None:
    """`majority_accuracy` on the training rows themselves."""
    some = _some(train, REFERENCES, derive_rng(seed, "validation"))
    return majority_accuracy(rows, some, some)


def majority_accuracy(rows: DemonstrationRows, references: np.ndarray, queries: np.ndarray) -> float | None:
    """Accuracy of the most frequent tokens; None if the actions are not encoded as one token per column."""
    (known, known_mask), (asked, mask) = rows.labels_of(references), rows.labels_of(queries)
    if "tokens" not in known or known["tokens"].shape != known_mask.shape:
        return None
    majority = majority_tokens(known["tokens"], known_mask)
    return float((asked["tokens"] == majority)[mask].mean())


def _numbers(words: Sequence[str]) -> np.ndarray:
    """A number for each word, equal for equal words."""
    known = {word: number for number, word in enumerate(dict.fromkeys(words))}
    return np.array([known[word] for word in words])


def _some(rows: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """At most so many of the rows, chosen at random, in their order."""
    return rows if len(rows) <= most else np.sort(rng.choice(rows, most, replace=False))
