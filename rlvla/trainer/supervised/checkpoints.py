"""Checkpoints of supervised training, from which an interrupted run continues to the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rlvla.checkpoints.run_folder import CHECKPOINTS
from rlvla.checkpoints.training import CheckpointError, load_checkpoint, save_checkpoint
from rlvla.trainer.supervised.config import OptimizerConfig
from rlvla.utils.deepspeed.engine import Engine
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import ConfigError
from rlvla.utils.terminal import log


class SupervisedCheckpoints:
    """Writes and restores the state of a run; the newest checkpoint is kept.

    Args:
        save_path: run folder.
        config: interval of checkpoints and of logged steps.
        engines: trained models by name.
        strategy: process group.
        run: what a resumed run must have in common with its start, by name: numbers of rows, steps, and so on.
    """

    def __init__(
        self,
        save_path: Path,
        config: OptimizerConfig,
        engines: dict[str, Engine],
        strategy: DeepspeedStrategy,
        run: Mapping[str, int],
    ):
        self._folder, self._engines, self._strategy = save_path / CHECKPOINTS, engines, strategy
        self._every, self._logging_steps = config.save_steps, config.logging_steps
        self._run = {**run, "seed": strategy.seed}
        self._saved = 0

    def due(self, step: int) -> bool:
        """Whether to save after this step: one that was logged, so that the means of later ones begin anew."""
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

    def load(self) -> tuple[int, dict[str, Any], dict[str, dict[str, Tensor]]] | None:
        """Restore models and random generators; (step, state, tensors) of the newest checkpoint, None without one.

        Raises:
            ConfigError: the checkpoint was written with other flags or data, or cannot be used.
        """
        content = load_checkpoint(self._folder, self._engines, self._strategy)
        if content is None:
            return None
        written = content.get("run")
        if written != self._run:
            differing = [
                f"{name.replace('_', ' ')} {(written or {}).get(name)} there, {value} here"
                for name, value in self._run.items()
                if not written or written.get(name) != value
            ]
            text = f"--load_checkpoint: the checkpoints in {self._folder} are of another run ({'; '.join(differing)})"
            remedy = "give the flags and data it was started with, or name another --save_path"
            raise ConfigError.of("load_checkpoint", "mismatch", f"{text}: {remedy}")
        self._saved = content["iteration"]
        if self._strategy.is_main:
            log.info(f"resumed after step {self._saved}")
        return self._saved, content["supervised"], content["tensors"]
