"""Supervised fine-tuning of a policy on demonstrations."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlvla.algorithms.losses import aggregate_loss
from rlvla.checkpoints.policy_folder import PolicyRecord, export_policy
from rlvla.data.demonstrations import Demonstrations
from rlvla.data.rows import DemonstrationRows, rows_per_epoch
from rlvla.experience import Experience
from rlvla.trainer.guards import BadSteps
from rlvla.trainer.measurements import Stopwatch, Throughput
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.metrics_writer import SFT_LAYOUT, MetricsLogger
from rlvla.trainer.models import WeightAverage
from rlvla.trainer.observers import OptimizerStep
from rlvla.trainer.replay import micro_batches
from rlvla.trainer.supervised.checkpoints import SupervisedCheckpoints
from rlvla.trainer.supervised.config import SFTConfig, ValidationConfig
from rlvla.trainer.supervised.validation import (
    Baselines,
    History,
    Measurement,
    Playing,
    Quality,
    Validation,
    metrics_of,
    progress_line,
    split_for_validation,
    training_majority,
)
from rlvla.trainer.supervised.verdict import Facts, Verdict, judge
from rlvla.utils.bars import progress_bar
from rlvla.utils.deepspeed.engine import OptimConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import SaveError
from rlvla.utils.files import put_in_place
from rlvla.utils.terminal import log

if TYPE_CHECKING:
    from rlvla.models.actor import Actor

BEST_POLICY = "best_policy"  # folder of the best policy during training, with --early_stopping
COOL_DOWN = 0.1  # fraction of the steps so far in which the learning rate falls to 0 when training ends early


class SFTTrainer:
    """Trains a policy on demonstrations.

    Args:
        actor: the policy.
        demos: the demonstrations.
        strategy: process group and DeepSpeed engines.
        config: training hyperparameters.
        save_path: run folder; the result goes to its subfolder `policy/`.
        record: environment record written into the exported folder.
        fallback_path: parent of the exported folder if it cannot be written to `save_path`.
        validation: measurements during training.
        playing: episodes during training; None: none.
        positive: [M] bool, the rows whose instructions carry the condition of advantage-conditioned training; None:
            unconditioned.
        weights: [M] of mean 1, factors on the loss of the rows; None: all 1.

    Attributes:
        exported: the exported folder, after `fit`.
        verdict: conclusions, after `fit`.
    """

    def __init__(
        self,
        actor: Actor,
        demos: Demonstrations,
        strategy: DeepspeedStrategy,
        config: SFTConfig,
        save_path: Path,
        record: PolicyRecord,
        fallback_path: str | None = None,
        validation: ValidationConfig | None = None,
        playing: Playing | None = None,
        positive: np.ndarray | None = None,
        weights: np.ndarray | None = None,
    ):
        self._strategy, self._config, self._save_path, self._record = strategy, config, save_path, record
        self._fallback_path, self.exported = fallback_path, save_path / "policy"
        self._rows, validation = DemonstrationRows(demos, actor), validation or ValidationConfig()
        if positive is not None:
            self._rows.condition_on(positive, config.condition_dropout)
        if weights is not None:
            self._rows.weight_by(weights)
        train, heldout = map(self._rows.of_episodes, split_for_validation(demos, validation, strategy.seed))
        self._train_rows, count = train, rows_per_epoch(self._rows.by_policy[train], config.autonomous_weight)
        self._total, self._per_epoch = config.optimizer_steps(count), config.steps_per_epoch(count)
        train, heldout = (side[~self._rows.by_policy[side]] for side in (train, heldout))  # that are measured
        self._history, self._demos = History(validation.early_stopping), demos
        self._patience, self._learned = validation.early_stopping, 0.0
        self._kept: tuple[Measurement, Path] | None = None  # the best policy so far and its folder
        self._parameters = sum(p.numel() for p in actor.parameters())
        self.verdict: Verdict | None = None
        self._engine = strategy.prepare(
            actor,
            OptimConfig(
                config.learning_rate,
                (config.adam_betas[0], config.adam_betas[1]),
                config.l2,
                config.lr_scheduler,
                config.lr_warmup_ratio,
                self._total,
            ),
        )
        self._average = WeightAverage(self._engine, config.ema_decay) if config.ema_decay else None
        self._updates, self._step, self._seconds = 0, 0, 0.0  # updates of the average; before a resume: steps, seconds
        self._started = time.perf_counter()
        self._validation: Validation | None = None
        if validation.active:
            self._validation = Validation(
                self._rows,
                train,
                heldout,
                demos,
                self._engine,
                strategy,
                validation,
                config,
                playing=playing,
                total=self._total,
                per_epoch=self._per_epoch,
            )
        self._majority = None if validation.active else training_majority(self._rows, train, strategy.seed)
        self._throughput = Throughput(strategy, actor)
        self._bad = BadSteps(save_path / "bad_batches", config.max_bad_steps, strategy, "step")
        self.logger = MetricsLogger(
            save_path if strategy.is_main else None,
            use_tensorboard=config.use_tensorboard,
            use_wandb=config.use_wandb,
            wandb_run=config.wandb_run,
            layout=SFT_LAYOUT,
        )
        data = {"rows": len(self._train_rows), "optimizer_steps": self._total}
        self._checkpoints = SupervisedCheckpoints(save_path, config, {"actor": self._engine}, strategy, data)

    def resume(self) -> bool:
        """Restore the newest checkpoint of the run; False if there is none. Called before anything is logged.

        Raises:
            ConfigError: the checkpoint was written with other flags or data, or cannot be used.
        """
        loaded = self._checkpoints.load(self.logger)
        if loaded is None:
            return False
        self._step, state, tensors = loaded
        self._learned, self._updates, self._seconds = state["learned"], state["updates"], state["seconds"]
        self._history.measurements = [Measurement.from_dict(raw) for raw in state["history"]]
        if state["kept"] is not None:
            folder, exported = Path(state["kept_in"]), self._save_path / "policy"
            if self._strategy.is_main and exported.exists() and not folder.exists():
                put_in_place(exported, folder)  # killed after the export
            self._strategy.barrier()
            self._kept = self._history.measurements[state["kept"]], folder
        if self._average is not None:
            self._average.load_state_dict(tensors["ema"])
        return True

    def _elapsed(self) -> float:
        """Seconds of training, those before a resume included."""
        return self._seconds + time.perf_counter() - self._started

    def _save(self, step: int) -> None:
        """Write a checkpoint."""
        measurements = self._history.measurements
        state = {
            "learned": self._learned,
            "updates": self._updates,
            "history": [asdict(measurement) for measurement in measurements],
            "seconds": self._elapsed(),
            "kept": None if self._kept is None else measurements.index(self._kept[0]),
            "kept_in": None if self._kept is None else str(self._kept[1]),
        }
        average = {} if self._average is None else {"ema": self._average.state_dict()}
        self._checkpoints.save(step, state, average)

    def fit(self) -> dict[str, float]:
        """Run the optimizer steps, export the policy, and return the metrics of the last steps.

        With `early_stopping`, training ends early if nothing improves, and with `max_minutes` in that time, after a
        short phase in which the learning rate falls to 0. `early_stopping` exports the policy of the best measurement.

        Raises:
            TrainingHalted: too many consecutive steps were not finite; no policy is exported.
        """
        means, watch, last, self._started = Metrics(), Stopwatch(), {}, time.perf_counter()
        end, cooling = self._total, False
        with progress_bar(self._total, "SFT", enabled=self._strategy.is_main) as bar:
            bar.update(self._step)
            if not self._step:
                self._measure(0, bar)
            self._engine.train()
            for step, batch in enumerate(self._batches(), start=self._step + 1):
                self._learned += self._engine.learning_rate
                with watch.phase("update"):
                    norm = self._train_step(step, batch, means)
                self._throughput.after_step(OptimizerStep("actor", self._engine, norm, batch, step - 1, means))
                if step % self._config.logging_steps == 0 or step == end:
                    self._throughput.after_steps(watch.seconds["update"], means)
                    self._throughput.measure_memory(means)
                    last = {**means.reduce(self._strategy), "sft/lr": self._engine.learning_rate}
                    self.logger.log(last, step)
                    if self._validation is None:  # the conclusions of a run without measurements rest on this loss
                        quality = Quality(last["sft/loss"], last["sft/accuracy"])
                        self._history.add(Measurement(step, step / self._per_epoch, quality, learned=self._learned))
                    means, watch = Metrics(), Stopwatch()
                    bar.set_postfix_str(f"loss {last['sft/loss']:.3f} acc {last['sft/accuracy']:.2f}", refresh=False)
                self._measure(step, bar, last=step == end)
                bar.update(1)
                if step == end:
                    break
                if not cooling and (reason := self._early_end(step)):
                    end, cooling = self._cool_down(step, reason), True
                if not cooling and self._checkpoints.due(step):  # a cool-down begins again
                    self._save(step)
        self.exported = self._export()
        self._conclude(self._elapsed())
        self.logger.close()
        return last

    def _early_end(self, step: int) -> str | None:
        """Why training ends early, or None."""
        if self._history.exhausted:
            return f"no improvement in {self._patience} measurements"
        limit = self._config.max_minutes
        if limit is not None:
            needed = time.perf_counter() - self._started + COOL_DOWN * self._elapsed()
            slowest = self._strategy.all_reduce({"seconds": needed}, "max")["seconds"]
            if slowest >= 60 * limit and self._last_after(step) < self._total:
                return f"the time budget is spent (--max_minutes {limit:g})"
        return None

    @staticmethod
    def _last_after(step: int) -> int:
        """Number of the last step of a cool-down that begins after this one."""
        return step + max(1, round(COOL_DOWN * step))

    def _cool_down(self, step: int, reason: str) -> int:
        """Lower the learning rate to 0 over the last steps; returns the number of the last one."""
        end = min(self._total, self._last_after(step))
        self._engine.cool_down(end - step)
        self._log(f"{reason}: training ends after step {end} of {self._total}, with a learning rate that falls to 0")
        return end

    def _measure(self, step: int, bar: Any, *, last: bool = False) -> None:
        """Measure the policy if it is due, and keep it if it is the best so far."""
        validation = self._validation
        if validation is None or not (last or validation.due(step)):
            return
        with self._averaged():
            measurement, result = validation.measure(step, last=last)
        measurement = replace(measurement, learned=self._learned)
        self._engine.train()
        best = self._history.add(measurement)
        values = metrics_of(measurement, validation.baselines)
        self.logger.log(values | ({} if result is None else result.as_metrics("eval")), step)
        bar.clear()
        epochs = -(-self._total // self._per_epoch)
        self._log(progress_line(measurement, validation.baselines, epochs))
        if best and self._patience and not last:
            try:
                self._kept = measurement, self._write_policy(BEST_POLICY)
            except SaveError as error:
                self._log(f"warning: {error}; training continues")

    def _export(self) -> Path:
        """Export the last policy, or with `early_stopping` the best."""
        if self._kept is not None and self._history.best is self._history.measurements[-1]:
            if self._strategy.is_main:
                shutil.rmtree(self._kept[1], ignore_errors=True)
            self._kept = None
        if self._kept is None:
            return self._write_policy("policy")
        _, best = self._kept
        if self._strategy.is_main:
            put_in_place(best, best.with_name("policy"))
        self._strategy.barrier()
        return best.with_name("policy")

    def _write_policy(self, name: str) -> Path:
        folder = self._save_path / name
        with self._averaged():
            return export_policy(self._engine, folder, self._strategy, self._record, self._fallback_path)

    def _averaged(self) -> AbstractContextManager[None]:
        """Use the average of the weights within the block, with --ema_decay."""
        return nullcontext() if self._average is None else self._average.in_place_of_weights()

    def _conclude(self, seconds: float) -> None:
        """Run the sampled attempts, and draw the conclusions."""
        demos, attempts = self._demos, tuple[tuple[int, int], ...]()
        if self._validation is not None:
            with self._averaged():
                attempts = self._validation.attempts(self.exported if self._kept else None)
        baselines = (Baselines(self._majority), None) if self._validation is None else self._validation.baselines
        self.verdict = judge(
            Facts(
                tuple(self._history.measurements),
                baselines,
                kept=self._kept[0] if self._kept else None,
                seconds=seconds,
                demonstrated=(sum(demos.success), len(demos.success)) if demos.success_recorded else None,
                image_size=demos.images[0].shape[2],
                parameters=self._parameters,
                attempts=attempts,
                patience=self._patience,
            )
        )

    def _log(self, text: str) -> None:
        if self._strategy.is_main:
            log.info(text)

    def _batches(self) -> Iterator[Experience]:
        config, strategy = self._config, self._strategy
        sizes = config.train_batch_size, config.max_epochs
        shares = strategy.rank, strategy.world_size
        rows, own = self._train_rows, config.autonomous_weight
        return self._rows.batches(*sizes, strategy.seed, *shares, rows, own, self._step)

    def _train_step(self, step: int, batch: Experience, means: Metrics) -> float:
        """One optimizer step; returns the gradient norm."""
        strategy, config = self._strategy, self._config
        policy: Any = self._engine.module
        norm: float | None = None
        tokens = strategy.all_reduce({"n": float(batch.action_mask.sum())}, "sum")["n"]
        count = int(strategy.all_reduce({"n": -(-len(batch) // config.micro_train_batch_size)}, "max")["n"])
        for index, micro in enumerate(micro_batches(batch, config.micro_train_batch_size, count)):
            micro = micro.to(strategy.device)
            inputs = policy.score(micro, 1.0)
            output = self._engine(**inputs, wants=("loss",), **config.supervision)
            mask, losses = micro.action_mask, output["loss"]
            if micro.row_weights is not None:
                losses = losses * micro.row_weights[:, None]
            loss = aggregate_loss(losses, mask, "token-mean", num_tokens=tokens, dp_size=strategy.world_size)
            norm = self._engine.backward(loss, last=index == count - 1)
            values = {"sft/loss": output["error"][mask].mean(), "sft/accuracy": output["correct"][mask].mean()}
            means.mean(values, float(mask.sum()))
        assert norm is not None  # returned with the last micro-batch
        means.mean({"sft/grad_norm": norm}, float(math.isfinite(norm)))
        if not self._bad.check("actor", norm, batch, step, {"temperature": 1.0}):
            means.total({"sft/skipped_steps": 1.0 / strategy.world_size})
        elif self._average is not None:
            self._average.update(self._updates)
            self._updates += 1
        return norm
