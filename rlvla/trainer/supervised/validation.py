"""Validation during supervised training: schedule, measurements on training and held-out rows, baselines, episodes.

Baselines are predictions without images. Chunks of actions are [N, A, D] in units of the environment, with a mask
[N, A] of the actions that exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from rlvla.evaluation.results import EvalResult, Rate
from rlvla.models.guidance import without_condition
from rlvla.models.policy import Policy
from rlvla.rollout import RolloutEngine
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.supervised.config import SFTConfig, ValidationConfig
from rlvla.utils.deepspeed.engine import Engine
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.seeding import derive_rng

MAX_MEASUREMENTS, MIN_MEASUREMENTS = 20, 5  # of a run, without --heldout_steps
TOLERANCE = 0.005  # minimum relative decrease of a loss that counts as an improvement
REFERENCES = 20_000  # training rows from which baselines are computed
_BLOCK = 64  # queries whose distances to all references are in memory at a time


# ------------------------------------------------------------------------------------------------------ measurements
@dataclass(frozen=True)
class Quality:
    """Prediction quality of a policy on some rows.

    Attributes:
        loss: mean supervised loss per column.
        accuracy: fraction of the columns whose most likely outcome is correct.
        errors: mean absolute error of greedy actions per action dimension, in units of the environment; () if not
            computed.
    """

    loss: float
    accuracy: float
    errors: tuple[float, ...] = ()


@dataclass(frozen=True)
class Baselines:
    """Quality of predictions without images on the same rows.

    Attributes:
        majority_accuracy: accuracy of the most frequent token of each column; None if actions are not tokens.
        median_errors: as `Quality.errors`, of the median action; () if not computed.
        neighbor_errors: errors of the action at the nearest proprioception in the training rows, of the same
            instruction and another episode; () without proprioception.
    """

    majority_accuracy: float | None = None
    median_errors: tuple[float, ...] = ()
    neighbor_errors: tuple[float, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """Quality of the policy after a step.

    Attributes:
        step: optimizer steps taken.
        epoch: passes over the training rows.
        train: on training rows.
        heldout: on held-out rows; None without any.
        success: greedy success at end on initial states that are not in the data; None without episodes.
        learned: sum of the learning rates of all steps so far; 0 if not recorded.
    """

    step: int
    epoch: float
    train: Quality
    heldout: Quality | None = None
    success: Rate | None = None
    learned: float = 0.0

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Measurement:
        """Inverse of `dataclasses.asdict`, also after JSON."""
        train, heldout = (
            None if raw[side] is None else Quality(**raw[side] | {"errors": tuple(raw[side]["errors"])})
            for side in ("train", "heldout")
        )
        assert train is not None
        success = None if raw["success"] is None else Rate(**raw["success"])
        return cls(raw["step"], raw["epoch"], train, heldout, success, raw["learned"])


class History:
    """The measurements of a run.

    Args:
        patience: measurements without an improvement after which training should stop; 0: never.

    Attributes:
        measurements: in order.
    """

    def __init__(self, patience: int = 0):
        self._patience = patience
        self.measurements: list[Measurement] = []

    def add(self, measurement: Measurement) -> bool:
        """Append a measurement; returns whether it is the best so far."""
        self.measurements.append(measurement)
        return self.best is measurement

    @property
    def best(self) -> Measurement | None:
        """See `best_measurement`."""
        return best_measurement(self.measurements)

    @property
    def exhausted(self) -> bool:
        """Whether neither held-out loss nor success has improved within the patience."""
        losses = [m.heldout.loss for m in self.measurements if m.heldout is not None]
        failures = [1.0 - m.success.rate for m in self.measurements if m.success is not None]
        waited = [since_best(losses, TOLERANCE)] * bool(losses) + [since_best(failures)] * bool(failures)
        return bool(self._patience and waited) and min(waited) >= self._patience


def best_measurement(measurements: Sequence[Measurement]) -> Measurement | None:
    """The best measurement after at least one step.

    Highest success, ties by lowest held-out loss, then earliest; lowest held-out loss without episodes.
    """
    trained = [m for m in measurements if m.step and (m.heldout or m.success)]
    played = [m for m in trained if m.success is not None]
    return min(
        played or trained,
        key=lambda m: (-m.success.rate if m.success else 0.0, m.heldout.loss if m.heldout else 0.0),
        default=None,
    )


def since_best(values: Sequence[float], tolerance: float = 0.0) -> int:
    """Number of values after the last improvement, a decrease below all earlier ones by a fraction `tolerance`."""
    waited, best = 0, float("inf")
    for value in values:
        if value < best - tolerance * abs(value):
            waited, best = 0, value
        else:
            waited += 1
    return waited


def measured_steps(total: int, per_epoch: int, every: int | None) -> set[int]:
    """The steps after which held-out rows are measured, including 0 and the last one.

    Args:
        total: optimizer steps of the run.
        per_epoch: optimizer steps per epoch.
        every: steps between measurements; None: one per epoch, but about 5 to 20 in a run.
    """
    if every is None:
        epochs = max(1, total // per_epoch)
        few = epochs < MIN_MEASUREMENTS
        every = max(1, total // MIN_MEASUREMENTS) if few else -(-epochs // MAX_MEASUREMENTS) * per_epoch
    return {0, *range(every, total + 1, every), total}


def played_steps(total: int, per_epoch: int, epochs: float) -> set[int]:
    """The steps after which episodes are played: every `epochs` epochs and after the last step; none for 0."""
    every = max(1, round(epochs * per_epoch))
    return {*range(every, total + 1, every), total} if epochs else set()


def percent(fraction: float) -> str:
    """A fraction in percent, with a decimal below 10 %."""
    return f"{100 * fraction:.{1 if 0 < fraction < 0.0995 else 0}f}%"


def relative_error(errors: Sequence[float], baseline: Sequence[float]) -> float | None:
    """Mean over the action dimensions of the error divided by the baseline's; None if it cannot be computed.

    Dimensions in which the baseline has no error are left out.
    """
    if not errors or not baseline:
        return None
    numerator, denominator = np.array(errors), np.array(baseline)
    varies = denominator > 0
    return float((numerator[varies] / denominator[varies]).mean()) if varies.any() else None


# -------------------------------------------------------------------------------------------------------- validation
@dataclass(frozen=True)
class Playing:
    """Episodes during supervised training.

    Attributes:
        rollout: plays them on this rank's workers.
        tasks: the tasks.
        states: the initial states.
        episodes: greedy episodes per task.
        samples: final attempts with sampled actions at each initial state; 0: none.
        load: loads a policy folder of this run.
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
        train: training rows, [m] int64.
        heldout: held-out rows, [n] int64; may be empty.
        demos: the demonstrations of the rows.
        engine: engine of the policy.
        strategy: device, and reductions over ranks; all ranks must call the methods together.
        config: schedule and sizes of the measurements.
        sft: options of the loss, and the size of micro-batches.
        playing: episodes; None: none.
        total: optimizer steps of the run.
        per_epoch: optimizer steps per epoch.

    Attributes:
        baselines: of the measured training rows and held-out rows, None without the latter.
    """

    def __init__(
        self,
        rows: DemonstrationRows,
        train: np.ndarray,
        heldout: np.ndarray,
        demos: Demonstrations,
        engine: Engine,
        strategy: DeepspeedStrategy,
        config: ValidationConfig,
        sft: SFTConfig,
        *,
        playing: Playing | None,
        total: int,
        per_epoch: int,
    ):
        self._rows, self._engine, self._strategy = rows, engine, strategy
        self._micro, self._supervision, self._playing = sft.micro_train_batch_size, sft.supervision, playing
        self._per_epoch = per_epoch
        self._played = played_steps(total, per_epoch, config.eval_epochs) if playing is not None else set()
        self._measured = measured_steps(total, per_epoch, config.heldout_steps) if len(heldout) else {0, total}
        rng = derive_rng(strategy.seed, "validation")
        self._train, self._heldout = (_sampled(side, config.heldout_rows, rng) for side in (train, heldout))
        references = _sampled(train, REFERENCES, rng)
        self.baselines = (
            row_baselines(rows, demos, references, self._train),
            row_baselines(rows, demos, references, self._heldout) if len(heldout) else None,
        )

    def due(self, step: int) -> bool:
        """Whether the policy is to be measured after this step."""
        return step in self._measured or step in self._played

    def measure(self, step: int, *, last: bool = False) -> tuple[Measurement, EvalResult | None]:
        """Measure the policy after this step, after the `last` one also by episodes; training is not affected."""
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
            folder: the policy to evaluate; None: that of the engine.
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
        """(successes, attempts) with sampled actions at each initial state; () if none are configured; see `play`."""
        if self._playing is None or not self._playing.samples:
            return ()
        counts: dict[tuple[int, int], list[bool]] = {}
        for episode in self.play(self._playing.samples, folder).episodes:
            counts.setdefault((episode.task_id, episode.init_state_id), []).append(episode.success_at_end)
        return tuple((sum(outcomes), len(outcomes)) for outcomes in counts.values())

    def _policy(self) -> Any:
        self._engine.train(False)
        return self._engine.full_parameters()

    def _quality(self, policy: Any, rows: np.ndarray) -> Quality:
        """Quality on rows, which are split over the ranks."""
        strategy, means = self._strategy, Metrics()
        names = [f"error_{dim}" for dim in range(policy.spec.action_dim)]
        means.mean(dict.fromkeys(["loss", "accuracy", *names], 0.0), 0.0)
        share = rows[strategy.rank :: strategy.world_size]
        devices = [] if strategy.device.type == "cpu" else [strategy.device]
        with torch.no_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(strategy.seed)  # a loss may draw noise: the same in each measurement
            for start in range(0, len(share), self._micro):
                taken = share[start : start + self._micro]
                batch = self._rows.take(taken)
                mask = batch.action_mask
                inputs = policy.score(batch.to(strategy.device), 1.0)
                output = policy(**inputs, wants=("loss",), **self._supervision)
                correct = output["correct"].cpu()[mask].mean()
                means.mean({"loss": output["error"].cpu()[mask].mean(), "accuracy": correct}, float(mask.sum()))
                proprio = None if batch.proprio is None else batch.proprio.numpy()
                plain = [without_condition(text)[0] for text in batch.instructions]  # `act` adds the condition
                decision = policy.act(batch.images.numpy(), proprio, plain, noise=None, temperature=1.0)
                actions, valid = self._rows.actions_of(taken)
                errors = mean_errors(decision.actions, actions, valid).tolist()
                means.mean(dict(zip(names, errors)), float(valid.sum()))
        values = means.reduce(strategy)
        return Quality(values["loss"], values["accuracy"], tuple(values[name] for name in names))


def split_for_validation(
    demos: Demonstrations, config: ValidationConfig, seed: int
) -> tuple[Sequence[int], Sequence[int]]:
    """Split the episodes into training and held-out ones; one of them may be empty."""
    if not config.heldout_share:
        return range(len(demos.actions)), ()
    return split_by_state(demos, config.heldout_share, derive_rng(seed, "sft split"))


def progress_line(measurement: Measurement, baselines: tuple[Baselines, Baselines | None], epochs: int) -> str:
    """A measurement in one line; values on training rows in brackets."""
    train, heldout = measurement.train, measurement.heldout
    if heldout is None:
        shown, baseline = train, baselines[0]
        loss, accuracy = f"loss {train.loss:.3f}", f"accuracy {percent(train.accuracy)}"
    else:
        shown, baseline = heldout, baselines[1] or Baselines()
        loss = f"held-out loss {heldout.loss:.3f} (training {train.loss:.3f})"
        accuracy = f"accuracy {percent(heldout.accuracy)} ({percent(train.accuracy)})"
    if baseline.majority_accuracy is not None:
        accuracy += f", most frequent tokens {percent(baseline.majority_accuracy)}"
    error = f"action error {' '.join(f'{error:.3g}' for error in shown.errors)}{compared_errors(shown, baseline)}"
    success = "" if measurement.success is None else f"; success {measurement.success}"
    return f"epoch {measurement.epoch:.1f}/{epochs}: {loss}; {accuracy}; {error}{success}"


def compared_errors(quality: Quality, baselines: Baselines) -> str:
    """Action errors relative to the baselines', as text after a comma."""
    ratios = {
        "the median action's": relative_error(quality.errors, baselines.median_errors),
        "that at the nearest proprioception": relative_error(quality.errors, baselines.neighbor_errors),
    }
    return "".join(f", {percent(ratio)} of {name}" for name, ratio in ratios.items() if ratio is not None)


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
    """Quality of predictions without images, made from the reference rows, on other rows.

    Args:
        rows: all rows.
        demos: the demonstrations of the rows.
        references: training rows [m].
        queries: the rows to predict [n].
    """
    reference_actions, reference_valid = rows.actions_of(references)
    actions, valid = rows.actions_of(queries)
    median = mean_errors(median_actions(reference_actions, reference_valid), actions, valid)
    neighbor: tuple[float, ...] = ()
    if demos.proprio is not None:
        states = np.concatenate(demos.proprio).astype(np.float64)
        texts = [text for episode in range(len(demos.actions)) for text in demos.row_instructions(episode)]
        ids = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        kinds = np.array([ids[text] for text in texts])
        nearest = nearest_rows(
            states[references],
            states[queries],
            kinds=(kinds[references], kinds[queries]),
            episodes=(rows.episodes[references], rows.episodes[queries]),
        )
        comparable = valid & (nearest >= 0)[:, None] & reference_valid[nearest]
        if comparable.any():
            neighbor = tuple(mean_errors(reference_actions[nearest], actions, comparable).tolist())
    return Baselines(majority_accuracy(rows, references, queries), tuple(median.tolist()), neighbor)


def training_majority(rows: DemonstrationRows, train: np.ndarray, seed: int) -> float | None:
    """`majority_accuracy` on the training rows themselves."""
    sampled = _sampled(train, REFERENCES, derive_rng(seed, "validation"))
    return majority_accuracy(rows, sampled, sampled)


def majority_accuracy(rows: DemonstrationRows, references: np.ndarray, queries: np.ndarray) -> float | None:
    """Accuracy of the most frequent tokens; None if the actions are not encoded as one token per column."""
    (labels, label_mask), (targets, mask) = rows.labels_of(references), rows.labels_of(queries)
    if "tokens" not in labels or labels["tokens"].shape != label_mask.shape:
        return None
    majority = majority_tokens(labels["tokens"], label_mask)
    return float((targets["tokens"] == majority)[mask].mean())


def _sampled(rows: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """A random subset of at most `most` rows, in order."""
    return rows if len(rows) <= most else np.sort(rng.choice(rows, most, replace=False))


# --------------------------------------------------------------------------------------------------------- baselines
def majority_tokens(tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The most frequent token of each column, [K] int64; the smallest of equally frequent ones, 0 without any.

    Args:
        tokens: [M, K] non-negative integers.
        mask: [M, K] bool.
    """
    columns = zip(tokens.T, mask.T)
    return np.array([np.bincount(column[valid], minlength=1).argmax() for column, valid in columns], dtype=np.int64)


def median_actions(actions: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """The median of each number in a chunk, [A, D]: the constant prediction with the least absolute error.

    Actions of the chunk that never exist are 0.
    """
    counted = np.where(valid[:, :, None], actions, np.nan)
    existing = valid.any(0)
    medians = np.zeros(actions.shape[1:])
    medians[existing] = np.nanmedian(counted[:, existing], axis=0)
    return medians


def nearest_rows(
    references: np.ndarray,
    queries: np.ndarray,
    *,
    kinds: tuple[np.ndarray, np.ndarray],
    episodes: tuple[np.ndarray, np.ndarray],
) -> np.ndarray:
    """The nearest reference of each query, [N] int64, of the same kind and another episode.

    Distances are Euclidean after each dimension is divided by its standard deviation over the references.

    Args:
        references: [M, P].
        queries: [N, P].
        kinds: of references [M] and queries [N], e.g. the number of the instruction.
        episodes: of references [M] and queries [N].

    Returns:
        Rows of `references`; -1 without a reference of the same kind and another episode.
    """
    spread = references.std(0)
    scale = np.where(spread > 0, spread, 1.0)
    points, targets = references / scale, queries / scale
    squares = np.square(points).sum(1)
    nearest = np.full(len(targets), -1, dtype=np.int64)
    for start in range(0, len(targets), _BLOCK):
        block = slice(start, start + _BLOCK)
        distances = squares - 2.0 * targets[block] @ points.T  # squared, without the square of the query
        comparable = (kinds[1][block, None] == kinds[0]) & (episodes[1][block, None] != episodes[0])
        distances[~comparable] = np.inf
        nearest[block] = np.where(comparable.any(1), distances.argmin(1), -1)
    return nearest


def mean_errors(predicted: np.ndarray, actions: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Mean absolute error of each action dimension, [D]; NaN without any action.

    Args:
        predicted: [N, A, D], or broadcastable to it.
        actions: [N, A, D].
        valid: [N, A].
    """
    errors = np.abs(predicted - actions)[valid]
    return errors.mean(0) if len(errors) else np.full(actions.shape[2], np.nan)
