"""Success rates with intervals, on initial states chosen by a protocol. SFT and RL are measured by this same code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rlvla.envs.base import TaskSpec
from rlvla.envs.config import SplitConfig
from rlvla.experience import Sample
from rlvla.rollout import EpisodeRequest, RolloutEngine, RolloutPolicy
from rlvla.utils.logging import log, progress_bar, table
from rlvla.utils.seeding import derive_seed
from rlvla.utils.statistics import mean_interval, wilson_interval
from rlvla.utils.stopping import BrokenOff
from rlvla.utils.strategy import DeepspeedStrategy


@dataclass(frozen=True)
class Rate:
    """A success rate of `n` episodes with its 95 % Wilson interval."""

    rate: float
    n: int
    low: float
    high: float

    @classmethod
    def of(cls, outcomes: Sequence[bool]) -> Rate:
        """From the outcomes of episodes."""
        low, high = wilson_interval(sum(outcomes), len(outcomes))
        return cls(sum(outcomes) / len(outcomes), len(outcomes), low, high)

    @classmethod
    def mean(cls, rates: Sequence[Rate]) -> Rate:
        """Mean of independent rates, each with the same weight; `n` counts the episodes of all of them."""
        rate, low, high = mean_interval([(r.rate, r.low, r.high) for r in rates])
        return cls(rate, sum(r.n for r in rates), low, high)

    def __str__(self) -> str:
        return f"{100 * self.rate:.1f}% [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True)
class EpisodeOutcome:
    """How one evaluation episode went.

    Attributes:
        task_id, init_state_id: which episode; outcomes of two policies are paired by these.
        success_at_end, success_once: see `rlvla.experience.Sample`.
        length: environment steps.
        regressions: how often success held and was lost again.
    """

    task_id: int
    init_state_id: int
    success_at_end: bool
    success_once: bool
    length: int
    regressions: int = 0

    @classmethod
    def of(cls, sample: Sample) -> EpisodeOutcome:
        """From a finished episode."""
        return cls(
            sample.task_id,
            sample.init_state_id,
            bool(sample.success_at_end),
            bool(sample.success_once),
            int(sample.finish_step),
            int(sample.regressions),
        )


@dataclass(frozen=True)
class TaskResult:
    """What a policy did on one task."""

    task_id: int
    name: str
    success_at_end: Rate
    success_once: Rate
    mean_length: float
    regressions: float = 0.0


@dataclass(frozen=True)
class EvalResult:
    """What a policy did on all tasks.

    Attributes:
        protocol: "heldout" (states never trained on), "shared", or which states were chosen instead.
        greedy: whether the most likely tokens were taken, or tokens sampled.
        success_at_end, success_once: over all episodes of all tasks.
        mean_length: environment steps per episode.
        tasks: task by task.
        regressions: how often success was lost again, per episode.
        dropped: episodes that were asked for and could not be played; they are in no figure.
        episodes: every episode, by task and initial state.
    """

    protocol: str
    greedy: bool
    success_at_end: Rate
    success_once: Rate
    mean_length: float
    tasks: tuple[TaskResult, ...]
    regressions: float = 0.0
    dropped: int = 0
    episodes: tuple[EpisodeOutcome, ...] = ()

    @property
    def mode(self) -> str:
        """How actions were chosen."""
        return "greedy" if self.greedy else "sampled"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> EvalResult:
        """The inverse of `as_dict`."""
        rates = {name: Rate(**content[name]) for name in ("success_at_end", "success_once")}
        tasks = [
            TaskResult(**{**task, **{name: Rate(**task[name]) for name in ("success_at_end", "success_once")}})
            for task in content["tasks"]
        ]
        episodes = tuple(EpisodeOutcome(**episode) for episode in content.get("episodes", ()))
        return cls(**{**content, **rates, "tasks": tuple(tasks), "episodes": episodes})

    def as_metrics(self) -> dict[str, float]:
        """For TensorBoard."""
        prefix = "eval" if self.greedy else "eval_sampled"
        metrics = {
            f"{prefix}/success_at_end": self.success_at_end.rate,
            f"{prefix}/success_once": self.success_once.rate,
            f"{prefix}/episode_length": self.mean_length,
            f"{prefix}/regressions": self.regressions,
            f"{prefix}/dropped": float(self.dropped),
            f"{prefix}/n": float(self.success_at_end.n),
        }
        if len(self.tasks) > 1:
            metrics |= {f"{prefix}_tasks/{t.name}": t.success_at_end.rate for t in self.tasks}
        return metrics

    def rows(self) -> list[tuple[str, int, str, str, str, str]]:
        """Cells for `HEADERS`, task by task; with more than one task, all of them together in the last row."""
        entries: list[TaskResult | EvalResult] = [*self.tasks, *([self] if len(self.tasks) > 1 else [])]
        return [
            (
                entry.name if isinstance(entry, TaskResult) else "all",
                entry.success_at_end.n,
                str(entry.success_at_end),
                str(entry.success_once),
                f"{entry.mean_length:.1f}",
                f"{entry.regressions:.2f}",
            )
            for entry in entries
        ]

    HEADERS = ("task", "n", "success at end [95 %]", "success once [95 %]", "steps", "lost again")

    def as_table(self, note: str = "") -> str:
        """For the terminal; the note stands below it, behind mode and protocol."""
        notes = [f"{self.mode}, protocol {self.protocol}", *filter(None, [note])]
        notes += [f"{self.dropped} EPISODES COULD NOT BE PLAYED and are in no figure"] if self.dropped else []
        return f"{table(self.HEADERS, self.rows())}\n({'; '.join(notes)})"


class Journal(Protocol):
    """Remembers finished episodes of an evaluation that may be interrupted."""

    def read(self) -> list[EpisodeOutcome]:
        """Everything noted so far, by any rank."""
        ...

    def append(self, outcome: EpisodeOutcome) -> None:
        """Note a finished episode."""
        ...


def evaluate(
    engine: RolloutEngine,
    policy: RolloutPolicy,
    tasks: Sequence[TaskSpec],
    strategy: DeepspeedStrategy,
    *,
    episodes_per_task: int,
    split: SplitConfig,
    seed: int,
    greedy: bool = True,
    temperature: float = 1.0,
    description: str = "evaluate",
    journal: Journal | None = None,
    attempt: Callable[[Callable[[], list[Sample]]], list[Sample] | None] = lambda work: work(),
) -> EvalResult:
    """Play the first `episodes_per_task` evaluation states of each task, shared out over the ranks.

    Two policies evaluated with equal arguments meet equal initial states and equal random numbers.
    With a `journal`, episodes that it holds are not played again.

    Raises:
        BrokenOff: on all ranks, where `attempt`, which runs the work, has broken it off on any rank.
    """
    requests = eval_requests(tasks, split, episodes_per_task, seed)
    done: list[EpisodeOutcome] = []
    if journal is not None:
        # One rank reads for all: another may already be writing when the slowest comes to read.
        asked_for = {(r.task_id, r.init_state_id) for r in requests}
        read = strategy.gather_objects(journal.read() if strategy.rank == 0 else [])[0]
        done = [outcome for outcome in read if (outcome.task_id, outcome.init_state_id) in asked_for]
    known = {(outcome.task_id, outcome.init_state_id) for outcome in done}
    open_requests = [r for r in requests if (r.task_id, r.init_state_id) not in known]
    own = open_requests[strategy.rank :: strategy.world_size]
    if done and strategy.is_main:
        log.info(f"{description}: {len(done)} of {len(requests)} episodes are those of the interrupted evaluation")
    taken_over = len(done) // strategy.world_size  # the bar is that of one rank
    with progress_bar(taken_over + len(own), description, enabled=strategy.is_main, initial=taken_over) as bar:
        show = SuccessOnBar(bar, [outcome.success_at_end for outcome in done])

        def on_sample(sample: Sample) -> None:
            show(sample)
            if journal is not None:
                journal.append(EpisodeOutcome.of(sample))

        samples = attempt(
            lambda: engine.run(
                own, policy, temperature=temperature, greedy=greedy, success_only=True, on_sample=on_sample
            )
        )
    if strategy.any(samples is None):
        raise BrokenOff
    assert samples is not None
    played = strategy.gather_objects([EpisodeOutcome.of(s) for s in samples])
    gathered = done + [outcome for part in played for outcome in part]
    return summarise(gathered, tasks, split.protocol_name, greedy, requested=len(requests))


def eval_requests(
    tasks: Sequence[TaskSpec],
    split: SplitConfig,
    episodes_per_task: int,
    seed: int,
    *,
    chosen: Callable[[int, int], bool] = lambda task_id, state: True,
) -> list[EpisodeRequest]:
    """The episodes of an evaluation, task by task; `chosen` (task id, initial state id) picks some of them."""
    return [
        eval_request(task, state, seed)
        for task in tasks
        for state in split.eval_states(task, episodes_per_task)
        if chosen(task.task_id, state)
    ]


def eval_request(task: TaskSpec, state: int, seed: int, *, record_frames: bool = False) -> EpisodeRequest:
    """The episode of an evaluation with `seed` that starts in an initial state of a task."""
    own_seed, uid = derive_seed(seed, "eval", task.task_id, state), f"eval/{task.task_id}/{state}"
    return EpisodeRequest(task.suite, task.task_id, state, own_seed, uid, record_frames)


def summarise(
    outcomes: Sequence[EpisodeOutcome],
    tasks: Sequence[TaskSpec],
    protocol: str,
    greedy: bool,
    *,
    requested: int | None = None,
) -> EvalResult:
    """The figures of all episodes; RuntimeError if a task has none.

    Args:
        outcomes: of every episode.
        tasks: the tasks.
        protocol: name of the protocol.
        greedy: how actions were chosen.
        requested: how many episodes were asked for (default: those that came).
    """
    order = {task.task_id: position for position, task in enumerate(tasks)}
    outcomes = sorted(outcomes, key=lambda o: (order[o.task_id], o.init_state_id))
    results = []
    for task in tasks:
        own = [outcome for outcome in outcomes if outcome.task_id == task.task_id]
        if not own:
            raise RuntimeError(f"no evaluation episode of {task.name} could be played to its end")
        results.append(TaskResult(task.task_id, task.name, *_figures(own)))
    at_end, once, length, regressions = _figures(outcomes)
    dropped = (requested or len(outcomes)) - len(outcomes)
    return EvalResult(protocol, greedy, at_end, once, length, tuple(results), regressions, dropped, tuple(outcomes))


def _figures(outcomes: Sequence[EpisodeOutcome]) -> tuple[Rate, Rate, float, float]:
    n = len(outcomes)
    return (
        Rate.of([o.success_at_end for o in outcomes]),
        Rate.of([o.success_once for o in outcomes]),
        sum(o.length for o in outcomes) / n,
        sum(o.regressions for o in outcomes) / n,
    )


class SuccessOnBar:
    """Advances a progress bar by an episode and shows the success rate so far, earlier outcomes included."""

    def __init__(self, bar: Any, earlier: Sequence[bool] = ()):
        self._bar = bar
        self._outcomes = list(earlier)

    def __call__(self, sample: Sample) -> None:
        """Take in a finished episode."""
        self._outcomes.append(sample.success_at_end)
        self._bar.set_postfix_str(f"success {sum(self._outcomes) / len(self._outcomes):.2f}", refresh=False)
        self._bar.update(1)
