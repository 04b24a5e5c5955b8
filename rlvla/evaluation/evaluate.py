"""Evaluation of a policy on held-out initial states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlvla.envs.base import TaskSpec
from rlvla.envs.config import SplitConfig
from rlvla.envs.splits import EvalStates
from rlvla.evaluation.journal import EpisodeJournal
from rlvla.evaluation.protocol import eval_requests
from rlvla.evaluation.results import EpisodeOutcome, EvalResult, sample_of, summarize
from rlvla.experience import Sample
from rlvla.rollout import FinishedEpisode, RolloutEngine, RolloutPolicy
from rlvla.rollout.stats import saturated_proprio, saturation_warning
from rlvla.utils.bars import progress_bar
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy, OneProcess, Tally
from rlvla.utils.signals import BrokenOff
from rlvla.utils.terminal import log


def evaluate(
    engine: RolloutEngine,
    policy: RolloutPolicy,
    tasks: Sequence[TaskSpec],
    strategy: DeepspeedStrategy | OneProcess | None = None,
    *,
    episodes_per_task: int,
    split: EvalStates | None = None,
    seed: int = 0,
    greedy: bool = True,
    temperature: float = 1.0,
    samples: int = 1,
    instructions: str = "own",
    images: str = "own",
    description: str = "evaluate",
    journal: EpisodeJournal | None = None,
    attempt: Callable[[Callable[[], list[Sample]]], list[Sample] | None] = lambda work: work(),
) -> EvalResult:
    """Play the first `episodes_per_task` evaluation states of each task, each `samples` times, on all ranks together.

    Without a `strategy` this process plays all of them; without a `split` the states are held out (`SplitConfig`).
    `instructions` and `images` are the policy's inputs, see `rlvla.evaluation.config`.

    Policies evaluated with equal arguments get equal initial states and random numbers. Episodes in the `journal` are
    not played again. A warning is logged if most proprioception lies outside the policy's dataset statistics.

    Raises:
        BrokenOff: on all ranks, if `attempt`, which runs the rollout, was interrupted on any rank.
    """
    strategy, split = strategy or OneProcess(), split or SplitConfig()
    requests = eval_requests(
        tasks, split, episodes_per_task, seed, samples=samples, instructions=instructions, images=images
    )
    done: list[EpisodeOutcome] = []
    if journal is not None:
        # One rank reads for all: others may already be writing when the slowest rank reads.
        requested = {(r.task_id, r.init_state_id, sample_of(r.uid)) for r in requests}
        stored = strategy.gather_objects(journal.read() if strategy.rank == 0 else [])[0]
        done = [outcome for outcome in stored if _key(outcome) in requested]
    played = {_key(outcome) for outcome in done}
    open_requests = [r for r in requests if (r.task_id, r.init_state_id, sample_of(r.uid)) not in played]
    assigned = open_requests[strategy.rank :: strategy.world_size]
    if done and strategy.is_main:
        log.info(f"{description}: {len(done)} of {len(requests)} episodes are kept from the interrupted evaluation")
    with progress_bar(len(requests), description, enabled=strategy.is_main, initial=len(done)) as bar:
        show = SuccessOnBar(bar, [outcome.success_at_end for outcome in done])

        def on_episode(episode: FinishedEpisode) -> None:
            show(episode)
            # otherwise the judge, or the policy's server, is asked again on resume
            if journal is not None and not (episode.unanswered or episode.failure):
                journal.append(EpisodeOutcome.of(episode))

        finished = attempt(
            lambda: engine.run(
                assigned,
                policy,
                temperature=temperature,
                greedy=greedy,
                success_only=True,
                on_episode=on_episode,
                kept=len(done) // strategy.world_size,
            )
        )
    if strategy.any(finished is None):
        raise BrokenOff
    assert finished is not None
    gathered = strategy.gather_objects([EpisodeOutcome.of(s) for s in (*finished, *engine.stats.failed)])
    warning = saturation_warning(saturated_proprio(finished, policy.spec.proprio_limit))
    if warning and strategy.is_main:
        log.warning(f"{description}: {warning}")
    return summarize(
        done + [outcome for of_rank in gathered for outcome in of_rank],
        tasks,
        split.protocol_name,
        greedy,
        requested=len(requests),
        samples=samples,
        success_source=engine.success_source,
    )


def _key(outcome: EpisodeOutcome) -> tuple[int, int, int]:
    return outcome.task_id, outcome.init_state_id, outcome.sample


class SuccessOnBar:
    """Shows the finished episodes of all ranks on a progress bar, with the success rate, earlier outcomes included.

    All ranks make one in the same order, see `Tally`.
    """

    def __init__(self, bar: Any, earlier: Sequence[bool] = ()):
        self._bar, self._tally = bar, Tally()
        self._earlier = (len(earlier), sum(earlier))

    def __call__(self, episode: FinishedEpisode) -> None:
        """Count a finished episode of this rank."""
        episodes, successes = map(sum, zip(self._earlier, self._tally.add(bool(episode.success_at_end))))
        self._bar.set_postfix_str(f"success {successes / episodes:.2f}", refresh=False)
        self._bar.update(episodes - self._bar.n)
