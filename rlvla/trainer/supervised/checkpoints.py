"""Checkpoints of supervised training, from which an interrupted run resumes bit-exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from rlvla.checkpoints.run_folder import CHECKPOINTS
from rlvla.checkpoints.training import CheckpointError, load_checkpoint, save_checkpoint
from rlvla.trainer.config import LoggingConfig
from rlvla.trainer.metrics_writer import MetricsLogger
from rlvla.trainer.supervised.config import OptimizerConfig
from rlvla.utils.deepspeed.engine import Engine
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import ConfigError
from rlvla.utils.terminal import log

# Hyperparameters that may change on resume: those without an effect on the weights, and the time limit.
_FREE_ON_RESUME = {*(field.name for field in fields(LoggingConfig)), "logging_steps", "save_steps", "max_bad_steps"}
_FREE_ON_RESUME |= {"micro_train_batch_size", "max_minutes"}


class SupervisedCheckpoints:
    """Writes and restores the state of a run; only the newest checkpoint is kept.

    Args:
        save_path: run folder.
        config: hyperparameters, compared on resume; intervals of checkpoints and of logged steps.
        engines: trained models by name.
        strategy: process group.
        data: sizes of the data, compared on resume, by name.
    """

    def __init__(
        self,
        save_path: Path,
        config: OptimizerConfig,
        engines: dict[str, Engine],
        strategy: DeepspeedStrategy,
        data: Mapping[str, int],
    ):
        self._folder, self._engines, self._strategy = save_path / CHECKPOINTS, engines, strategy
        self._every, self._logging_steps = config.save_steps, config.logging_steps
        flags = {name: value for name, value in asdict(config).items() if name not in _FREE_ON_RESUME}
        self._run = json.loads(json.dumps({**data, "seed": strategy.seed, **flags}))
        self._saved = 0

    def due(self, step: int) -> bool:
        """Whether to save after this step: only at logged steps, where running means are reset."""
        logged = step % self._logging_steps == 0
        return bool(self._every) and logged and step // self._every > self._saved // self._every

    def save(self, step: int, state: dict[str, Any], tensors: dict[str, dict[str, Tensor]] | None = None) -> None:
        """Write a checkpoint, or warn that it could not be written.

        Args:
            step: optimizer steps taken.
            state: JSON-serializable state of the trainer.
            tensors: name -> tensors that are equal on all ranks.
        """
        self._saved = step
        content = {"run": self._run, "supervised": state}
        try:
            save_checkpoint(self._folder, step, self._engines, content, self._strategy, keep=1, tensors=tensors)
        except CheckpointError as error:  # there may be room later
            if self._strategy.is_main:
                log.warning(f"{error}; training continues")

    def load(self, logger: MetricsLogger) -> tuple[int, dict[str, Any], dict[str, dict[str, Tensor]]] | None:
        """Restore models, random generators and metrics; (step, state, tensors), or None without a checkpoint.

        Raises:
            ConfigError: the checkpoint was written with other flags or data, or cannot be used.
        """
        content = load_checkpoint(self._folder, self._engines, self._strategy)
        if content is None:
            logger.rewind(-1, evaluates_again=False)
            return None
        written = content.get("run") or {}
        differing = [
            f"{name} {written.get(name)} there, {value} here"
            for name, value in self._run.items()
            if written.get(name) != value
        ]
        if differing:
            text = f"--load_checkpoint: the checkpoint in {self._folder} is of another run ({'; '.join(differing)})"
            remedy = "give the flags and data it was started with, or name another --save_path"
            raise ConfigError.of("load_checkpoint", "mismatch", f"{text}: {remedy}")
        self._saved = content["iteration"]
        logger.rewind(self._saved, evaluates_again=False)
        if self._strategy.is_main:
            log.info(f"resumed after step {self._saved}")
        return self._saved, content["supervised"], content["tensors"]
