"""The training loop around an algorithm: rollouts, updates, evaluation, checkpoints, signals, logging, export."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from rlvla.checkpoints.policy_folder import export_policy
from rlvla.checkpoints.run_folder import CHECKPOINTS, CRITICS, POLICIES, FolderWatch, remove_folders_without
from rlvla.checkpoints.training import (
    CheckpointError,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    set_aside_later,
)
from rlvla.evaluation.evaluate import evaluate
from rlvla.evaluation.results import EvalResult
from rlvla.evaluation.videos import record_videos
from rlvla.models.policy import Policy, RolloutPolicy
from rlvla.rollout import RolloutEngine
from rlvla.trainer.algorithm import Algorithm, LearnerSetup
from rlvla.trainer.algorithm_config import LEARNERS
from rlvla.trainer.guards import FewEffectiveSamples, Guards
from rlvla.trainer.measurements import IterationProfiler, Stopwatch, Throughput, measure_rollout
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.metrics_writer import MetricsLogger
from rlvla.trainer.models import Offloading, WeightAverage, anneal_noise
from rlvla.trainer.observers import Observer, RewardCheck, Rollout, RolloutDumps
from rlvla.trainer.player import closes_player, make_player
from rlvla.trainer.progress.report import Progress, start_evaluation
from rlvla.utils.deepspeed.engine import Engine
from rlvla.utils.errors import SaveError, TrainingHalted
from rlvla.utils.seeding import seed_everything
from rlvla.utils.signals import BrokenOff, StopRequested, StopSignals
from rlvla.utils.terminal import log


class Trainer:
    """Trains a policy with the chosen algorithm on episodes played in the simulator.

    Args:
        setup: models, strategy, configuration and tasks; `setup.config.learner` names the algorithm.
        rollout: plays episodes on this rank's workers.
        save_path: run folder, which receives metrics, TensorBoard files, and `policy/` at the end.
        ckpt_path: folder of the training checkpoints.

    Attributes:
        algorithm: the algorithm, created from `setup`.
        iteration: number of completed iterations.
        totals: episodes, env_steps and seconds of training so far.
        evaluations: (iteration, result) for each evaluated iteration.
        logger: writes the metrics.
        player: plays the episodes; closed at the end of `fit`.
        observers: called after rollouts, optimizer steps, updates and iterations.
        exported: folder of the trained policy.
        signals: while caught, signals that ask the run to stop after a checkpoint.
    """

    @closes_player
    def __init__(
        self,
        setup: LearnerSetup,
        rollout: RolloutEngine,
        save_path: Path,
        ckpt_path: Path,
    ):
        config, strategy = setup.config, setup.strategy
        self.config, self.strategy, self.rollout, self.tasks = config, strategy, rollout, setup.tasks
        self._save_path, self._ckpt_path = save_path, ckpt_path
        self.signals = StopSignals()
        # First, as a copy of the policy that plays ahead is made before DeepSpeed changes it.
        self.player = make_player(config, setup.models.actor, rollout, strategy, self.signals)
        self.algorithm: Algorithm = LEARNERS.get(config.learner)(setup)
        engines, optimization = self.algorithm.engines, config.optimization
        self._offloading = Offloading(optimization.offload_during_rollout, engines, setup.models, strategy)
        self._average = WeightAverage(self.algorithm.actor, optimization.ema_beta) if optimization.ema_beta else None
        replayed = {"temperature": config.batch.temperature, "overrides": dict(setup.models.overrides)}
        limit = setup.models.actor.spec.proprio_limit
        self._guards = Guards(config.guards, strategy, save_path, replayed, self.algorithm.is_idle, limit)
        self._profiler = IterationProfiler(config.schedule.profile_steps, save_path, strategy)
        self._throughput = Throughput(strategy, setup.models.actor)
        module, source = self.algorithm.actor.module, rollout.success_source
        densities = "probabilities" in module.spec.missing
        self._progress = Progress(config, strategy, save_path, module, source, densities=densities)
        self.observers: list[Observer] = [RewardCheck(rollout.rewards, strategy), self._throughput]
        self._few_effective = FewEffectiveSamples(config.asynchronous)
        self.observers += [self._progress, self._guards, self._few_effective]
        if config.schedule.dump_rollouts:  # first, because the other observers may end the run
            rollout.keep_observed = True
            shown_env = config.shown_env or config.record.env
            self.observers.insert(0, RolloutDumps(save_path / "rollouts", strategy.rank, shown_env, module))
        if self._average is not None:
            self.observers.append(self._average)
        self.algorithm.observers = self.observers
        self.logger = MetricsLogger(
            save_path if strategy.is_main else None,
            use_tensorboard=config.schedule.use_tensorboard,
            use_wandb=config.schedule.use_wandb,
            wandb_run=config.schedule.wandb_run,
            layout=self.algorithm.layout(config.reward_weights()),
            overview=self.algorithm.overview,
        )
        self._folder_watch = FolderWatch(save_path) if strategy.is_main else None
        self.iteration = 0
        self.totals = {"episodes": 0.0, "env_steps": 0.0, "seconds": 0.0}
        self.evaluations: list[tuple[int, EvalResult]] = []
        self._saved, self._saved_in = 0, ckpt_path  # iteration of the newest checkpoint, and its folder
        self._pretrained = False  # whether a checkpoint has the updates of `pretrain`
        self._unsaved, self.exported = False, save_path / "policy"
        self._best: dict[str, Any] | None = None  # iteration and success_at_end of the best evaluation
        self._launched, self._running_s = time.monotonic(), 0.0  # mean over ranks, which must end together

    # -------------------------------------------------------------------- run
    def resume(self, name: str | None = None) -> bool:
        """Restore the checkpoint `name`, or the newest intact one; False if there is none.

        Later checkpoints are set aside and later metrics forgotten, except in a run that only evaluates.
        """
        val_only = self.config.schedule.val_only
        state = load_checkpoint(
            self._ckpt_path,
            self.algorithm.engines,
            self.strategy,
            name,
            read_only=val_only,
            state_damage=None if val_only else self.algorithm.state_damage,
        )
        if state is None:
            if not val_only:
                self.logger.rewind(-1, evaluates_again=False)
            return False
        self.iteration = self._saved = state["iteration"]
        self._pretrained = not self.iteration
        self.totals = state["totals"]
        self.evaluations = [(iteration, EvalResult.from_dict(result)) for iteration, result in state["evaluations"]]
        self._load_state(state)
        if name is not None and not val_only and self.strategy.is_main:
            later = set_aside_later(self._ckpt_path, state["iteration"])
            if later:
                self._log(f"later checkpoints are set aside as superseded_...: {', '.join(later)}")
        if not val_only:
            self.logger.rewind(self.iteration, evaluates_again=not self._evaluated)
        return True

    def _state(self) -> dict[str, Any]:
        """JSON-serializable state, equal on all ranks."""
        evaluations = [(iteration, result.as_dict()) for iteration, result in self.evaluations]
        state: dict[str, Any] = {"totals": self.totals, "evaluations": evaluations, "best": self._best}
        state |= {"guards": self._guards.state_dict(), "run_progress": self._progress.state_dict()}
        state |= {"few_effective": self._few_effective.count}
        learned = self.algorithm.state_dict()
        conflicts = sorted({*state, "iteration", "world_size", "rank_state", "rank_states", "tensors"} & set(learned))
        if conflicts:
            raise ValueError(f"state_dict of the algorithm uses names of the loop: {', '.join(conflicts)}; rename them")
        return state | learned

    def _load_state(self, state: dict[str, Any]) -> None:
        self._best = state["best"]
        self._guards.load_state_dict(state["guards"])
        self._few_effective.count = int(state.get("few_effective", 0))
        self._progress.load_state_dict(state.get("run_progress"))
        self.algorithm.load_state_dict(state)
        self.algorithm.load_tensors(state["tensors"])
        if state["rank_state"] is not None:
            self.algorithm.load_rank_state_dict(state["rank_state"])
        else:  # the number of ranks has changed
            outcome = self.algorithm.reshard_state(state["rank_states"])
            self._log(
                f"{state['world_size']} rank(s) wrote the checkpoint and {self.strategy.world_size} continue: "
                f"{outcome}, all ranks reseed their generators, as at the start of each iteration"
            )
        if self._average is not None:
            self._average.load_state_dict(state["tensors"]["ema"])

    def fit(self) -> dict[str, float]:
        """Train to the end of the run, export the policy, and return totals (episodes, env_steps, seconds).

        Raises:
            StopRequested: a signal asked the run to stop; a checkpoint has been saved.
            TrainingHalted: further training would be wasted; after the first iteration, a checkpoint and the policy are
                saved.
            SaveError: the last checkpoint, or the policy, could not be written; everything else is done.
        """
        with self.player, self._progress.on_bars(lambda: self.iteration):
            return self._fit()

    def _fit(self) -> dict[str, float]:
        if not self.iteration and not self._pretrained and not self.config.schedule.val_only:
            self._pretrain()
        self._evaluate_if_due()
        try:
            self._train()
        except TrainingHalted as error:
            if self.iteration == 0 and not self._pretrained:
                raise
            self.algorithm.interrupt()  # an iteration that was played and not trained on is repeated after a resume
            outcome = ", ".join(self._keep())
            self.logger.close()
            raise TrainingHalted(f"{error}\nKept after iteration {self.iteration}: {outcome}") from error
        self.player.close()
        if not self.config.schedule.val_only:
            if self._early_end is not None:
                self._log(f"iteration {self.iteration}: {self._early_end}; the run ends")
            kept = self._keep()
            if not self._evaluated:  # an early end may be due to an evaluation
                self.evaluate()
            if self._unsaved:
                self.logger.close()
                raise SaveError(", ".join(kept))
        self.logger.close()
        return dict(self.totals)

    def _pretrain(self) -> None:
        """Updates before the first iteration, with a checkpoint after the last one."""
        updated = False
        for _ in self.algorithm.pretrain():
            updated = True
            self._stop_if_asked()
        if updated:
            self._pretrained = self._save_or_warn()

    def _save_or_warn(self) -> bool:
        """Write a checkpoint; False after a warning if it could not be written: there may be room later."""
        try:
            self.save()
        except CheckpointError as error:
            self._log(f"warning: {error}; training continues")
            return False
        return True

    def _train(self) -> None:
        """Run all iterations, with evaluations and checkpoints as scheduled."""
        schedule = self.config.schedule
        while not self._ended():
            self._stop_if_asked()
            with self._profiler.recorded(self.iteration + 1):
                self._iterate()
            self._stop_if_asked()
            self._evaluate_if_due()
            ended = self._ended()
            due = schedule.save_steps and self.iteration % schedule.save_steps == 0
            new_best = schedule.save_steps and self._best is not None and self._best["iteration"] == self.iteration
            if (due or new_best) and not ended:
                self._save_or_warn()

    def _keep(self) -> list[str]:
        """Write the last checkpoint and the policy, each even if the other fails; returns a description of each."""
        self._unsaved, kept = False, []
        try:
            self._save_last()
            kept.append(f"the checkpoint is in {self._saved_in}")
        except CheckpointError as error:
            self._unsaved = True
            kept.append(str(error))
        try:
            self.exported = self._export("policy")
            kept.insert(0, f"the policy is in {self.exported}")
            if self._value_network is not None:
                kept.append(f"the critic is in {self._export('critic', self._value_network)}")
        except SaveError as error:
            self._unsaved = True
            kept.append(str(error))
        return kept

    def _save_last(self) -> None:
        """Write a checkpoint, to `--fallback_path` if it cannot be written to its folder.

        Raises:
            CheckpointError: it could not be written.
        """
        fallback = self.config.schedule.fallback_path
        if self._saved == self.iteration:
            return
        try:
            self.save()
        except CheckpointError as error:
            if fallback is None:
                raise
            folder = Path(fallback) / CHECKPOINTS
            self._log(f"warning: {error}; it goes to {folder} instead")
            self.save(folder)

    def save(self, folder: Path | None = None) -> None:
        """Write a checkpoint of the state after the current iteration, to `folder` if it is given.

        Raises:
            CheckpointError: it could not be written.
        """
        self._restore_folder()
        folder = folder or self._ckpt_path
        save_checkpoint(
            folder,
            self.iteration,
            self.algorithm.engines,
            self._state(),
            self.strategy,
            self.config.schedule.max_ckpt_num,
            self.algorithm.rank_state_dict,
            tensors=self.algorithm.tensors() | ({} if self._average is None else {"ema": self._average.state_dict()}),
            protect=[self._best["iteration"]] if self._best else [],
        )
        self._saved, self._saved_in = self.iteration, folder
        self.algorithm.checkpoint_written()
        if self.config.schedule.save_hf_ckpt:
            self._export_beside_checkpoint()

    def _export_beside_checkpoint(self) -> None:
        """Export policy and critic of the checkpoint just written, and remove those whose checkpoints are gone."""
        name = f"iteration_{self.iteration:06d}"
        try:
            self._export(f"{POLICIES}/{name}", fallback=None)
            if self._value_network is not None:
                self._export(f"{CRITICS}/{name}", self._value_network, fallback=None)
        except SaveError as error:
            self._log(f"warning: {error}; training continues")
        if self.strategy.is_main and self._saved_in == self._ckpt_path:
            folders = (self._save_path / CHECKPOINTS, self._ckpt_path)  # both, after a resume from --fallback_path
            remove_folders_without(self._save_path, [path for folder in folders for path in list_checkpoints(folder)])

    @property
    def _value_network(self) -> Engine | None:
        """The critic, if it is to be exported."""
        return self.algorithm.engines.get("critic") if self.config.schedule.save_value_network else None

    def _restore_folder(self) -> None:
        """Continue in a new folder if the run folder was deleted."""
        if self._folder_watch is not None and self._folder_watch.restored():
            self.logger.reopen()

    def _ended(self) -> bool:
        """Whether training is over: all iterations are done, or it ends early."""
        done = self.config.schedule.val_only or self.iteration >= self.config.batch.iterations
        return done or self._early_end is not None

    @property
    def _early_end(self) -> str | None:
        """Why training ends before its last iteration, or None."""
        if self._guards.nothing_left:
            return "everything succeeds, nothing is left to learn"
        limit = self.config.schedule.max_minutes
        if limit is not None and self._running_s >= 60 * limit:
            return f"the time budget is spent (--max_minutes {limit:g})"
        return self._progress.good_enough(self.evaluations, self.iteration)

    @property
    def _evaluated(self) -> bool:
        """Whether the current policy has been evaluated."""
        return any(iteration == self.iteration for iteration, _ in self.evaluations)

    def _stop_if_asked(self) -> None:
        number = self.signals.of_all_ranks(self.strategy.all_reduce)
        if not number:
            return
        outcome = "there is nothing to save yet"
        if self.iteration or self._pretrained:
            try:
                self._save_last()
                outcome = f"the checkpoint is in {self._saved_in}"
            except CheckpointError:
                outcome = ", ".join(self._keep())
        self._log(f"stopped after iteration {self.iteration} of {self.config.batch.iterations}; {outcome}")
        self.logger.close()
        raise StopRequested(number, self._saved_in if self._saved_in != self._ckpt_path else None)

    def _evaluate_if_due(self) -> None:
        schedule = self.config.schedule
        if schedule.val_only:  # even if evaluated before, which may have been on other episodes
            due = True
        elif self._evaluated:
            due = False
        elif self.iteration == 0:
            due = schedule.val_before_train
        else:
            steps, last = schedule.eval_steps, self.config.batch.iterations
            due = bool(steps) and self.iteration % steps == 0 and self.iteration < last
        if due:
            self.evaluate()

    def evaluate(self) -> EvalResult:
        """Evaluate the policy on the evaluation states; the result is logged and stored in `evaluations`.

        The policy with the best evaluation during training (success at end; ties go to the earliest) is exported to
        `best_policy/`.

        Raises:
            StopRequested: a signal asked the run to stop.
        """
        schedule, watch = self.config.schedule, Stopwatch()
        self._progress.clock.begin_evaluation(last=self._ended())
        try:
            with self.player.idle(), self._evaluated_weights(), self._policy() as policy:
                result = evaluate(
                    self.rollout,
                    policy,
                    self.tasks,
                    self.strategy,
                    episodes_per_task=schedule.eval_episodes,
                    split=self.config.split,
                    seed=self.strategy.seed,
                    greedy=not schedule.eval_temperature,
                    temperature=schedule.eval_temperature or 1.0,
                    samples=schedule.eval_samples,
                    attempt=self.signals.attempt,
                )
                totals = {f"total/{name}": value for name, value in self.totals.items()}
                log_metrics = self.logger.replace_evaluation if schedule.val_only else self.logger.log
                log_metrics(result.as_metrics("eval") | totals, self.iteration)
                if schedule.num_videos:
                    self._record(policy, result)
        except BrokenOff:
            self._stop_if_asked()
            raise
        self._progress.evaluated(self.iteration, result, watch.elapsed)
        self.evaluations = [e for e in self.evaluations if e[0] != self.iteration] + [(self.iteration, result)]
        rate = result.success_at_end.rate
        if not schedule.val_only and (self._best is None or rate > self._best["success_at_end"]):
            self._best = {"iteration": self.iteration, "success_at_end": rate}
            if self.iteration:  # the initial policy already has a folder
                try:
                    self._export("best_policy")
                except SaveError as error:
                    self._log(f"warning: {error}; training continues")
        return result

    def _export(self, name: str, engine: Engine | None = None, **options: Any) -> Path:
        """Export the weights used for evaluation into a subfolder of the run; returns the folder.

        Args:
            name: the subfolder.
            engine: a model other than the actor, with its latest weights.
            options: `fallback`, if it is not --fallback_path.

        Raises:
            SaveError: it could not be written.
        """
        self._restore_folder()
        options = {"fallback": self.config.schedule.fallback_path, **options}
        with self._evaluated_weights() if engine is None else nullcontext():
            engine = engine or self.algorithm.actor
            return export_policy(engine, self._save_path / name, self.strategy, self.config.record, **options)

    def _evaluated_weights(self) -> AbstractContextManager[None]:
        """Inside the block the actor has the weights to evaluate and export: those that play, or --ema_beta's."""
        if self._average is None or not self.config.optimization.use_ema:
            return self.algorithm.rollout_weights()
        return self._average.in_place_of_weights()

    def _record(self, policy: RolloutPolicy, result: EvalResult) -> None:
        videos = record_videos(
            self.rollout,
            policy,
            self.tasks,
            self.strategy,
            result,
            self._save_path / "videos" / f"iteration_{self.iteration:06d}",
            seed=self.strategy.seed,
            count=self.config.schedule.num_videos,
            temperature=self.config.schedule.eval_temperature or 1.0,
        )
        for video in videos:
            name = f"videos/{video.task}/{'success' if video.success else 'failure'}_state{video.init_state_id}"
            self.logger.video(name, video.frames, video.fps, self.iteration)

    # --------------------------------------------------------------- iteration
    def _iterate(self) -> None:
        """One iteration: play the planned episodes, update, report."""
        watch, metrics = Stopwatch(), Metrics()
        # So that library code that draws from global generators depends on the iteration only, even after a resume.
        seed_everything(self.strategy.seed + 1000 * self.iteration + self.strategy.rank)
        try:
            with record_function("rollout"):
                rollout = self._play()
        except BrokenOff:
            self.algorithm.interrupt()  # a signal; the iteration is repeated after a resume
            return
        for observer in self.observers:
            observer.after_rollout(rollout, metrics)
        values = rollout.values | self.algorithm.update(metrics)
        for observer in self.observers:
            observer.after_update(values)
        self._report(rollout, values, metrics, watch.elapsed)

    def _play(self) -> Rollout:
        """Play the episodes that the algorithm plans for an iteration, and pass them to it."""
        rollout = Rollout(self.iteration, start_evaluation=start_evaluation(self.evaluations))
        self.player.begin(self.iteration)
        with self.algorithm.rollout_weights(), self._policy() as policy:
            while (plan := self.algorithm.plan(self.iteration)) is not None:
                bar = self._progress.bar(self.iteration + 1) + (" greedy baselines" if plan.greedy else " rollout")
                samples = self.player.play(plan.requests, policy, bar, greedy=plan.greedy)
                self.algorithm.ingest(samples)
                rollout.num_episodes += len(samples)
                rollout.samples += [] if plan.greedy else samples
            self.player.play_ahead(self.algorithm, policy)
        rollout.stats, rollout.reward_metrics = self.player.stats, self.player.reward_metrics
        return rollout

    def _report(self, rollout: Rollout, values: dict[str, float], metrics: Metrics, elapsed: float) -> None:
        """Count the iteration, log its metrics, and print a line."""
        self._restore_folder()
        measure_rollout(rollout.samples, rollout.stats, metrics, self.strategy, self.tasks, measured=values)
        metrics.total({"episodes": rollout.num_episodes})
        metrics.mean({"timing_s/iteration": elapsed, "timing_s/wait_for_rollout": self.player.waited_s}, 1.0)
        metrics.mean({"running_s": time.monotonic() - self._launched}, 1.0)
        self._throughput.measure_memory(metrics)
        values |= metrics.reduce(self.strategy) | anneal_noise(self.algorithm.actor, self.config.batch, self.iteration)
        self.iteration += 1
        self.totals["episodes"] += values.pop("episodes")
        self.totals["env_steps"] += values["rollout/env_steps"]
        self.totals["seconds"] += elapsed
        self._running_s = values.pop("running_s")
        values |= {f"total/{name}": value for name, value in self.totals.items()}
        self._progress.measure(self.iteration, values)
        if self.iteration % self.config.schedule.logging_steps == 0:
            self.logger.log(values, self.iteration)
            self._log(self._progress.line(self.iteration, values))
        for observer in self.observers:
            observer.after_iteration(values)

    # ------------------------------------------------------------------ helpers
    @contextmanager
    def _policy(self) -> Iterator[Policy]:
        """The actor for a rollout: its weights themselves, complete, in evaluation mode."""
        self.algorithm.actor.train(False)
        anneal_noise(self.algorithm.actor, self.config.batch, self.iteration)
        with self._offloading.during_rollout(), self.algorithm.actor.full_parameters() as module:
            yield module

    def _log(self, text: str) -> None:
        if self.strategy.is_main:
            log.info(text)
