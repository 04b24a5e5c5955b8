"""The rollout engine: plays episodes on worker processes and overlaps simulation with inference.

A free slot starts the next episode at once. The policy decides for waiting episodes as soon as a batch is due, while
the other slots simulate. The outcome of an episode depends only on its request and the policy, not on the number of
workers, the order of their answers, or failures. Only the last bits of log-probs depend on the batch size of the policy
(`RolloutConfig.deterministic_rollout`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlvla.envs import TaskSpec, list_tasks
from rlvla.envs.workers.pool import EnvPool
from rlvla.envs.workers.watchdog import WatchedPool
from rlvla.experience import Sample
from rlvla.models.policy import RolloutPolicy
from rlvla.rewards import RewardPlan, StateInput
from rlvla.rewards.instructions import InstructionSource
from rlvla.rollout.config import RolloutConfig
from rlvla.rollout.episode import EpisodeRequest, FinishedEpisode
from rlvla.rollout.interventions import InterventionRule
from rlvla.rollout.session import RolloutCancelledError, RolloutSession
from rlvla.rollout.stats import RolloutStats
from rlvla.utils.terminal import log


class RolloutEngine:
    """Plays episodes.

    Args:
        pool: environment workers; a plain `EnvPool` is wrapped in a `WatchedPool` with default limits.
        env_kwargs: keyword arguments of `make_env`.
        rewards: a reward plan, or reward source -> weight.
        config: batching and retries.
        tasks: specs of the tasks to be played; by default they are looked up by suite when first needed.
        state_input: adds the state of a reward machine to the policy's observations; None disables it.
        instructions: replaces the task's instruction at each decision; None disables it.
        keep_observed: samples keep the images as rendered even if the policy sees preprocessed ones; always on if a
            reward source needs the images of finished episodes.
        policy_proprio: leading numbers of the environment's proprio that policy and rewards observe; samples have all
            of them in `critic_state`. None: proprio has no privileged state.

    Attributes:
        keep_observed: as above, for sampled episodes of training.
        stats: statistics of the last `run`.
    """

    def __init__(
        self,
        pool: WatchedPool | EnvPool,
        env_kwargs: dict[str, Any],
        rewards: RewardPlan | dict[str, float],
        config: RolloutConfig | None = None,
        tasks: Sequence[TaskSpec] = (),
        state_input: StateInput | None = None,
        keep_observed: bool = False,
        policy_proprio: int | None = None,
        instructions: InstructionSource | None = None,
    ):
        self._pool = pool if isinstance(pool, WatchedPool) else WatchedPool(pool)
        self._env_kwargs = env_kwargs
        self.rewards = rewards if isinstance(rewards, RewardPlan) else RewardPlan(rewards)
        if instructions is not None:
            self.rewards.attach(instructions)
        self._success_only = RewardPlan({"success": 1.0}, success=self.rewards.success)
        self._config = config or RolloutConfig()
        self._state_input, self._instructions, self.keep_observed = state_input, instructions, keep_observed
        self._policy_proprio = policy_proprio
        self._tasks = {(task.suite, task.task_id): task for task in tasks}
        self.stats, self._was_cancelled = RolloutStats(), False

    @property
    def success_source(self) -> str:
        """Success detector, see `--success_source`."""
        return self.rewards.success_source

    def run(
        self,
        requests: Sequence[EpisodeRequest],
        policy: RolloutPolicy,
        *,
        temperature: float,
        greedy: bool = False,
        success_only: bool = False,
        interventions: InterventionRule | None = None,
        on_episode: Callable[[FinishedEpisode], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
        kept: int = 0,
    ) -> list[Sample]:
        """Play all episodes and return their samples in the order of the requests, rewards included.

        An episode whose environment fails is retried from its initial state up to `max_env_retries` times. After that
        it is dropped: it is missing from the result and listed in `stats.dropped`.

        Args:
            requests: the episodes to play.
            policy: chooses the actions.
            temperature: sampling temperature, ignored if greedy.
            greedy: take the most likely actions.
            success_only: count success but run no reward sources, as in evaluations.
            interventions: when the scripted expert takes over from the policy; None: never. The policy decides for its
                steps as well, and `Sample.actions` are the policy's. Not together with `record_frames`.
            on_episode: called after each episode in order of completion, e.g. for progress bars.
            cancelled: polled; once it is true, the rollout ends with RolloutCancelledError.
            kept: episodes of an interrupted rollout that this one completes; `max_dropped_fraction` counts them, too.

        Raises:
            ConfigError: reported by a worker.
            TooManyDroppedError: more than `max_dropped_fraction` of the episodes were dropped.
            RunEnded: the policy's actions hold NaN or infinity.
            ValueError: a request for a task or an initial state that does not exist.
        """
        for request in requests:
            self._check(request)
        if self._config.cuda_graphs:
            enable_cuda_graphs(policy)
        plan = self._success_only if success_only else self.rewards
        session = RolloutSession(
            self._pool,
            requests,
            tasks=self._tasks,
            env_kwargs=self._env_kwargs,
            plan=plan,
            config=self._config,
            policy=policy,
            state_input=self._state_input,
            instructions=self._instructions,
            keep_observed=self.keep_observed and not (success_only or greedy),
            policy_proprio=self._policy_proprio,
            interventions=interventions,
            temperature=temperature,
            greedy=greedy,
            on_episode=on_episode,
            cancelled=cancelled,
            kept=kept,
        )
        self.stats = session.stats
        if self._was_cancelled:  # delayed until now: mostly the run is over, and new workers would be wasted
            self._pool.abandon()
            self._was_cancelled = False
        try:
            return session.play()
        except BaseException as error:  # answers of this run must not reach the next one
            if isinstance(error, Exception) and not isinstance(error, RolloutCancelledError):
                self._pool.abandon()
            else:
                self._was_cancelled = True
            raise

    def _check(self, request: EpisodeRequest) -> None:
        key = (request.suite, request.task_id)
        if key not in self._tasks:
            self._tasks |= {(t.suite, t.task_id): t for t in list_tasks(request.suite, **self._env_kwargs)}
        task = self._tasks.get(key)
        if task is None or not 0 <= request.init_state_id < task.num_init_states:
            reason = "no such task" if task is None else f"its initial states are 0..{task.num_init_states - 1}"
            raise ValueError(
                f"{request.suite} task {request.task_id}, initial state {request.init_state_id} does not exist: "
                f"{reason}"
            )


def enable_cuda_graphs(policy: RolloutPolicy) -> None:
    """Let a policy replay its forward pass as CUDA graphs, if its class can."""
    use = getattr(policy, "use_cuda_graphs", None)
    if use is None:
        log.warning(f"--cuda_graphs has no effect on {type(policy).__name__}, which has no graphs")
    else:
        use()
