"""PPO and its relatives: rollout, experience, update, over and over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from rlvla.envs.base import TaskSpec
from rlvla.experience import Sample
from rlvla.models.actor import Actor
from rlvla.rollout import EpisodeRequest, RolloutEngine
from rlvla.rollout.stats import RolloutStats
from rlvla.trainer.checkpoints import CheckpointError, load_checkpoint, save_checkpoint
from rlvla.trainer.demonstration_loss import DemonstrationLoss
from rlvla.trainer.demonstrations import Demonstrations
from rlvla.trainer.early_stopping import good_enough
from rlvla.trainer.ema import WeightAverage
from rlvla.trainer.eval_videos import record_videos
from rlvla.trainer.evaluation import EvalResult, SuccessOnBar, evaluate
from rlvla.trainer.experience_maker import ExperienceMaker
from rlvla.trainer.group_collector import Collected, GroupCollector, some_for_everyone
from rlvla.trainer.guards import Guards
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.metrics_layout import PPO_OVERVIEW, ppo_layout
from rlvla.trainer.offloading import Offloading
from rlvla.trainer.policy_export import export_policy
from rlvla.trainer.ppo_config import PPOConfig, kl_controller
from rlvla.trainer.profiling import IterationProfiler, Stopwatch
from rlvla.trainer.rollout_dump import dump_rollouts
from rlvla.trainer.rollout_metrics import iteration_line, measure_rollout
from rlvla.trainer.run_models import Models
from rlvla.trainer.scoring import Judges
from rlvla.trainer.task_sampler import TaskSampler
from rlvla.trainer.throughput import Throughput
from rlvla.trainer.update_phase import UpdatePhase
from rlvla.trainer.updates import Updater
from rlvla.utils.errors import TrainingHalted
from rlvla.utils.logging import log, progress_bar
from rlvla.utils.metrics_log import MetricsLogger
from rlvla.utils.seeding import seed_everything
from rlvla.utils.stopping import BrokenOff, StopRequested, StopSignals
from rlvla.utils.strategy import DeepspeedStrategy, Engine, OptimConfig


class PPOTrainer:
    """Trains an actor on episodes that it plays itself.

    Args:
        models: actor and judges.
        strategy: DeepSpeed.
        rollout: plays episodes on this rank's workers.
        tasks: what is trained and evaluated on.
        config: all settings.
        save_path: run folder: metrics, TensorBoard files, and `policy/` at the end.
        ckpt_path: checkpoints.
        signals: tell when to stop before the end.
        demos: of the supervised loss that is mixed in, or None.
    """

    def __init__(
        self,
        models: Models,
        strategy: DeepspeedStrategy,
        rollout: RolloutEngine,
        tasks: Sequence[TaskSpec],
        config: PPOConfig,
        save_path: Path,
        ckpt_path: Path,
        signals: StopSignals | None = None,
        demos: Demonstrations | None = None,
    ):
        self.config, self.strategy, self.rollout, self.tasks = config, strategy, rollout, tasks
        self._save_path, self._ckpt_path = save_path, ckpt_path
        batch = config.batch
        self._actor = strategy.prepare(models.actor, self._optim(config.optimization.actor_learning_rate, actor=True))
        self._critic = None
        if models.critic is not None:
            self._critic = strategy.prepare(models.critic, self._optim(config.optimization.critic_learning_rate))
        for frozen in models.frozen:
            strategy.prepare_frozen(frozen)
        offload = config.optimization.offload_during_rollout
        self._offloading = Offloading(offload, self._actor, self._critic, models, strategy)
        action_dim, shared = tasks[0].action_dim, config.algorithm.share_backbone
        self._maker = ExperienceMaker(
            Judges(self._actor, self._actor if shared else self._critic, models.reference, models.reward_model),
            strategy,
            batch,
            config.algorithm,
            action_dim,
            config.correction,
            config.reward_weights,
            config.reward_model_coef,
        )
        updater = Updater(strategy, batch, config.algorithm, action_dim, models.actor.inputs)
        states = [config.split.train_states(task) for task in tasks]
        sampler = TaskSampler(tasks, states, batch.n_samples_per_prompt, strategy.seed)
        self._collector = GroupCollector(sampler, strategy, batch, config.filters)
        self._kl = kl_controller(config.algorithm)
        self.logger = MetricsLogger(
            save_path if strategy.is_main else None,
            use_tensorboard=config.schedule.use_tensorboard,
            use_wandb=config.schedule.use_wandb,
            layout=ppo_layout(config.reward_weights()),
            overview=PPO_OVERVIEW,
        )
        self.iteration = 0
        self.totals = {"episodes": 0.0, "env_steps": 0.0, "seconds": 0.0}
        self.evaluations: list[tuple[int, EvalResult]] = []
        self._signals = signals or StopSignals()
        self._guards = Guards(config.guards, strategy, save_path, config.batch.temperature)
        optimization = config.optimization
        self._average = WeightAverage(self._actor, optimization.ema_beta) if optimization.ema_beta else None
        demonstrations = None
        if demos is not None:
            sizes = (optimization.ptx_batch_size, batch.micro_train_batch_size)
            demonstrations = DemonstrationLoss(demos, models.actor, strategy, optimization.ptx_coef, *sizes)
        self._throughput = Throughput(strategy, models.actor.inputs)
        self._profiler = IterationProfiler(config.schedule.profile_steps, save_path, strategy)
        parts = (strategy, batch, optimization, updater, self._guards, self._actor, self._critic, self._throughput)
        self._update = UpdatePhase(*parts, self._average, demonstrations)
        self._saved = 0  # iteration of the newest checkpoint
        self._best: dict[str, Any] | None = None  # iteration and success_at_end of the best evaluation

    def _optim(self, learning_rate: float, *, actor: bool = False) -> OptimConfig:
        optimization, batch = self.config.optimization, self.config.batch
        iterations = batch.iterations - (optimization.freezing_actor_steps if actor else 0)
        steps = max(1, iterations * batch.max_epochs * (batch.episodes_per_iteration // batch.train_batch_size))
        return OptimConfig(
            learning_rate,
            tuple(optimization.adam_betas),
            optimization.l2,
            optimization.lr_scheduler,
            optimization.lr_warmup_ratio,
            steps,
        )

    # -------------------------------------------------------------------- life
    def resume(self) -> bool:
        """Continue from the newest intact checkpoint; False if there is none."""
        state = load_checkpoint(self._ckpt_path, self._engines(), self.strategy)
        if state is None:
            return False
        self.iteration = self._saved = state["iteration"]
        self.totals = state["totals"]
        self.evaluations = [(iteration, EvalResult.from_dict(result)) for iteration, result in state["evaluations"]]
        self._load_state(state)
        return True

    def _state(self) -> dict[str, Any]:
        """JSON-able state that all ranks share."""
        normalizer = self._maker.value_normalizer
        return {
            "totals": self.totals,
            "kl": self._kl.state_dict(),
            "evaluations": [(iteration, result.as_dict()) for iteration, result in self.evaluations],
            "best": self._best,
            "guards": self._guards.state_dict(),
            "value_normalizer": None if normalizer is None else normalizer.state_dict(),
        }

    def _load_state(self, state: dict[str, Any]) -> None:
        self._kl.load_state_dict(state["kl"])
        self._best = state["best"]
        self._guards.load_state_dict(state["guards"])
        if state["rank_state"] is not None:
            self._collector.load_state_dict(state["rank_state"]["groups"])
        else:  # written by another number of ranks
            waiting = self._collector.share_out([rank_state["groups"] for rank_state in state["rank_states"]])
            self._say(
                f"{state['world_size']} rank(s) wrote the checkpoint and {self.strategy.world_size} continue: the task "
                f"sampler goes on where it was, {waiting} waiting group(s) are dealt out anew, every rank seeds its "
                "generators anew, as at the start of each iteration"
            )
        if self._average is not None:
            self._average.load_state_dict(state["tensors"]["ema"])
        if self._maker.value_normalizer is not None:
            self._maker.value_normalizer.load_state_dict(state["value_normalizer"])

    def fit(self) -> dict[str, float]:
        """Train to the end of the run, export the policy, and return totals (episodes, env_steps, seconds).

        Raises:
            StopRequested: a signal asked for the end; what is needed to go on has been saved.
            TrainingHalted: going on would be a waste; checkpoint and policy of a run past its first iteration are kept.
        """
        self._evaluate_if_due()
        try:
            self._train(self.config.batch.iterations)
        except TrainingHalted as error:
            if self.iteration == 0:
                raise
            raise TrainingHalted(f"{error}\n{self._keep()}") from error
        if self._guards.nothing_left:
            self._say(f"iteration {self.iteration}: everything succeeds, nothing is left to learn; the run ends")
        if not self.config.schedule.val_only:
            self._export("policy")
            if not self._evaluated:  # an early end may be due to an evaluation
                self.evaluate()
        self.logger.close()
        return dict(self.totals)

    def _train(self, total: int) -> None:
        """Iterate to the end of the run, evaluate and save where it is due."""
        schedule = self.config.schedule
        while not self._ended():
            self._stop_if_asked()
            with self._profiler.recorded(self.iteration + 1):
                self._iterate(total)
            self._stop_if_asked()
            self._evaluate_if_due()
            ended = self._ended()
            due = schedule.save_steps and self.iteration % schedule.save_steps == 0
            new_best = schedule.save_steps and self._best is not None and self._best["iteration"] == self.iteration
            if due or new_best or ended:
                self._try_to_save()

    def _keep(self) -> str:
        """Save and export what a halted run has learned; returns where it is."""
        checkpoint = f"the checkpoint is in {self._ckpt_path}"
        if self._saved != self.iteration:
            try:
                self.save()
            except CheckpointError as error:
                checkpoint = f"no checkpoint ({error})"
        self._export("policy")
        self.logger.close()
        return f"Kept after iteration {self.iteration}: the policy is in {self._save_path / 'policy'}, {checkpoint}"

    def save(self) -> None:
        """Write a checkpoint of the state after the current iteration.

        Raises:
            CheckpointError: it could not be written.
        """
        save_checkpoint(
            self._ckpt_path,
            self.iteration,
            self._engines(),
            self._state(),
            self.strategy,
            self.config.schedule.max_ckpt_num,
            {"groups": self._collector.state_dict()},
            tensors={} if self._average is None else {"ema": self._average.state_dict()},
            protect=[self._best["iteration"]] if self._best else [],
        )
        self._saved = self.iteration

    def _start_evaluation(self) -> tuple[float, int] | None:
        """Success at end of the start policy and number of episodes, if it was evaluated."""
        if not self.evaluations or self.evaluations[0][0] != 0:
            return None
        result = self.evaluations[0][1].success_at_end
        return result.rate, result.n

    def _ended(self) -> bool:
        """Whether nothing is left to train, by number of iterations or because the policy is good enough."""
        schedule = self.config.schedule
        if schedule.val_only or self._guards.nothing_left or self.iteration >= self.config.batch.iterations:
            return True
        judged = schedule.early_stopping and self.iteration > 0 and self._evaluated
        return judged and good_enough([e for _, e in self.evaluations], schedule)

    @property
    def _evaluated(self) -> bool:
        """Whether the policy as it is now has been evaluated."""
        return any(iteration == self.iteration for iteration, _ in self.evaluations)

    def _try_to_save(self) -> None:
        """A disk that is full now may have room later: only the last checkpoint of a run must succeed."""
        try:
            self.save()
        except CheckpointError as error:
            if self._ended():
                raise
            self._say(f"warning: {error}; training goes on")

    def _stop_if_asked(self) -> None:
        number = int(self.strategy.all_reduce({"signal": float(self._signals.received)}, "max")["signal"])
        if not number:
            return
        where = f"after iteration {self.iteration} of {self.config.batch.iterations}"
        if self.iteration == 0:
            self._say(f"stopped {where}: there is nothing to save yet")
        else:
            if self._saved != self.iteration:
                self.save()
            self._say(f"stopped {where}; the checkpoint is in {self._ckpt_path}")
        self.logger.close()
        raise StopRequested(number)

    def _evaluate_if_due(self) -> None:
        schedule = self.config.schedule
        if schedule.val_only:  # also what was evaluated before: perhaps with other episodes
            due = True
        elif self._evaluated:
            due = False
        elif self.iteration == 0:
            due = schedule.val_before_train
        else:
            steps = schedule.eval_steps
            due = steps and self.iteration % steps == 0 and self.iteration < self.config.batch.iterations
        if due:
            self.evaluate()

    def evaluate(self) -> EvalResult:
        """Greedy success on the evaluation states; logged and kept in `evaluations`, one for each iteration.

        The policy of the best evaluation (success at end, the earliest of equals) of training goes to `best_policy/`.

        Raises:
            StopRequested: a signal asked for the end meanwhile.
        """
        schedule = self.config.schedule
        try:
            with self._evaluated_weights(), self._policy() as policy:
                result = evaluate(
                    self.rollout,
                    policy,
                    self.tasks,
                    self.strategy,
                    episodes_per_task=schedule.eval_episodes,
                    split=self.config.split,
                    seed=self.strategy.seed,
                    attempt=self._signals.attempt,
                )
                if schedule.num_videos:
                    self._record(policy, result)
        except BrokenOff:
            self._stop_if_asked()
            raise
        before = [known for known in self.evaluations if known[0] != self.iteration]
        self.evaluations = [*before, (self.iteration, result)]
        metrics = result.as_metrics() | {f"total/{name}": value for name, value in self.totals.items()}
        self.logger.log(metrics, self.iteration)
        self._say(f"iteration {self.iteration}: evaluation, success at end {result.success_at_end}")
        rate = result.success_at_end.rate
        if not schedule.val_only and (self._best is None or rate > self._best["success_at_end"]):
            self._best = {"iteration": self.iteration, "success_at_end": rate}
            if self.iteration:  # the start policy has a folder already
                self._export("best_policy")
        return result

    def _export(self, name: str) -> None:
        """Write the policy as it is evaluated into a folder of the run."""
        with self._evaluated_weights():
            export_policy(self._actor, self._save_path / name, self.strategy, self.config.record)

    def _evaluated_weights(self) -> AbstractContextManager[None]:
        """For the time of the block the actor has the weights that are evaluated and exported."""
        if self._average is None or not self.config.optimization.use_ema:
            return nullcontext()
        return self._average.in_place_of_weights()

    def _record(self, policy: Actor, result: EvalResult) -> None:
        schedule = self.config.schedule
        videos = record_videos(
            self.rollout,
            policy,
            self.tasks,
            self.strategy,
            result,
            self._save_path / "videos" / f"iteration_{self.iteration:06d}",
            count=schedule.num_videos,
            seed=self.strategy.seed,
            temperature=1.0,
        )
        for video in videos:
            name = f"videos/{video.task}/{'success' if video.success else 'failure'}_state{video.init_state_id}"
            self.logger.video(name, video.frames, video.fps, self.iteration)

    # --------------------------------------------------------------- iteration
    def _iterate(self, total: int) -> None:
        watch = Stopwatch("make_experience", "update")
        # Library code that draws from global generators then depends on the iteration alone, also after a resume.
        seed_everything(self.strategy.seed + 1000 * self.iteration + self.strategy.rank)
        self.rollout.rewards.start_iteration(self.iteration, total)
        metrics = Metrics()
        try:
            with record_function("rollout"):
                collected, baselines = self._collect(total, metrics)
        except BrokenOff:
            return  # a signal; the iteration starts anew when the run is continued
        if self.config.schedule.dump_rollouts and collected.played:
            folder, rank, env = self._save_path / "rollouts", self.strategy.rank, self.config.record.env
            dump_rollouts(folder, self.iteration + 1, rank, collected.played, env, self._actor.module)
        of_rewards = self.strategy.all_reduce(self.rollout.rewards.metrics(), "sum")
        self.rollout.rewards.check(of_rewards)
        if self.iteration == 0:
            self._guards.look_at_rollout(collected.played, self._start_evaluation(), self._actor.module.inputs)
        if collected.samples:
            with watch.phase("make_experience"):
                experience, measured = self._maker.make(collected.samples, self._kl.value, baselines)
            with watch.phase("update"):
                self._update.run(self.iteration, experience, self._kl.value, measured)
            self._throughput.measure_update(watch.seconds["update"], measured)
            values = measured.reduce(self.strategy)
        else:
            values = {}
        values |= of_rewards | {"actor/lr": self._actor.learning_rate}
        if self.config.algorithm.init_kl_coef:
            values["actor/kl_coef"] = self._kl.value
        self._guards.look_at_update(values)
        if "actor/ref_kl" in values:
            self._kl.update(values["actor/ref_kl"], collected.groups * self.config.batch.n_samples_per_prompt)
        elapsed = watch.elapsed
        times = watch.seconds | {"iteration": elapsed}
        metrics.mean({f"timing_s/{name}": seconds for name, seconds in times.items()}, 1.0)
        self._throughput.measure_memory(metrics)
        values |= metrics.reduce(self.strategy)
        self.iteration += 1
        self.totals["episodes"] += values.pop("episodes")
        self.totals["env_steps"] += values["rollout/env_steps"]
        self.totals["seconds"] += elapsed
        values |= {f"total/{name}": value for name, value in self.totals.items()}
        if self.iteration % self.config.schedule.logging_steps == 0:
            self.logger.log(values, self.iteration)
            self._say(iteration_line(self.iteration, total, values, self.config.reward_weights()))
        self._guards.look_at_iteration(values)

    def _collect(self, total: int, metrics: Metrics) -> tuple[Collected, torch.Tensor | None]:
        """Play the groups of an iteration, and the greedy episodes that `remax` compares them with."""
        stats = RolloutStats()
        temperature, before = self.config.batch.temperature, self._collector.state_dict()

        def play(requests: list[EpisodeRequest], greedy: bool = False) -> list[Sample]:
            what = "greedy baselines" if greedy else "rollout"
            description = f"iteration {self.iteration + 1}/{total} {what}"
            with progress_bar(len(requests), description, enabled=self.strategy.is_main) as bar:
                on_sample = SuccessOnBar(bar)
                samples = self._signals.attempt(
                    lambda: self.rollout.run(
                        requests, policy, temperature=temperature, greedy=greedy, on_sample=on_sample
                    )
                )
            if self.strategy.any(samples is None):
                self._collector.load_state_dict(before)
                raise BrokenOff("a signal came while episodes were played")
            assert samples is not None
            for part in fields(RolloutStats):
                setattr(stats, part.name, getattr(stats, part.name) + getattr(self.rollout.stats, part.name))
            with self._offloading.judging():
                return self._maker.judge(samples)

        with self._policy() as policy:
            collected = self._collector.collect(self.iteration, play)
            baselines, greedy_episodes = None, 0
            if self.config.algorithm.needs_greedy_episodes and collected.samples:
                firsts = {sample.uid: sample for sample in reversed(collected.samples)}
                greedy = {sample.uid: sample.score for sample in play(_requests(list(firsts.values())), greedy=True)}
                greedy_episodes = len(greedy)
                mean_score = sum(greedy.values()) / max(1, greedy_episodes)
                metrics.mean({"rollout/greedy_score": mean_score}, greedy_episodes)
                # A greedy episode whose environment kept failing takes its group with it.
                comparable = [sample for sample in collected.samples if sample.uid in greedy]
                collected.samples, collected.groups = some_for_everyone(comparable, self.strategy)
                greedy = {uid: score for part in self.strategy.gather_objects(greedy) for uid, score in part.items()}
                baselines = torch.tensor([greedy[sample.uid] for sample in collected.samples])
        measure_rollout(collected, stats, metrics, self.strategy)
        self._throughput.measure_rollout(collected.played, stats, metrics)
        metrics.total({"episodes": len(collected.played) + greedy_episodes})
        wanted = self.config.batch.rollout_batch_size
        if collected.groups < wanted:
            filters = self.config.filters
            how = f"passed the filters in {filters.max_rollout_rounds} rounds" if filters.active else "did not fail"
            what = f"training on these {collected.groups}" if collected.groups else "no update"
            kept = "fewer groups than ranks" if not collected.groups else f"{collected.groups} of {wanted} groups"
            self._say(f"iteration {self.iteration + 1}: {kept} {how}; {what}")
        return collected, baselines

    # ------------------------------------------------------------------ helpers
    @contextmanager
    def _policy(self) -> Iterator[Actor]:
        """The actor as the rollout may use it: the trained weights themselves, whole, in evaluation mode."""
        self._actor.train(False)
        with self._offloading.during_rollout(), self._actor.full_parameters() as module:
            yield module

    def _engines(self) -> dict[str, Engine]:
        return {"actor": self._actor} | ({"critic": self._critic} if self._critic is not None else {})

    def _say(self, text: str) -> None:
        if self.strategy.is_main:
            log.info(text)


def _requests(samples: Sequence[Sample]) -> list[EpisodeRequest]:
    """Episodes from the same states as these."""
    return [EpisodeRequest(s.suite, s.task_id, s.init_state_id, s.seed, s.uid) for s in samples]
