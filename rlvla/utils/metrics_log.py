"""Scalars of a run: `metrics.jsonl` always; TensorBoard and Weights & Biases on request, under the same names."""

from __future__ import annotations

import json
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.utils.config_file import command_line, resolved_flags, telling_flags
from rlvla.utils.errors import require
from rlvla.utils.logging import METRICS_FILE, is_quiet, open_lines
from rlvla.utils.video import encode_gif

Layout = dict[str, dict[str, list[str]]]  # category -> chart -> names of scalars, or patterns of them


class MetricsLogger:
    """Writes scalars to `metrics.jsonl`, one line per step, and to TensorBoard and Weights & Biases on request.

    Args:
        folder: where `metrics.jsonl` and the event files go; None (ranks other than the main one) writes nothing.
        use_tensorboard: write event files too.
        use_wandb: send the same scalars to Weights & Biases (project `rlvla`, run named like the folder); a run that is
            continued in its folder is continued there, too.
        layout: charts of TensorBoard's Custom Scalars page, in their order.
        overview: scalar -> second name in TensorBoard; by these the page that it opens with begins with what matters.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        use_tensorboard: bool,
        use_wandb: bool = False,
        layout: Layout | None = None,
        overview: Mapping[str, str] | None = None,
    ):
        self._overview = overview or {}
        self._writer: Any = None
        self._lines: Any = None
        self._wandb: Any = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = open_lines(folder / METRICS_FILE)
        if use_tensorboard:
            board = require("torch.utils.tensorboard", extra="all")
            self._writer = board.SummaryWriter(str(folder / "tensorboard"))
            if layout:
                self._writer.add_custom_scalars(
                    {
                        category: {title: ["Multiline", names] for title, names in charts.items()}
                        for category, charts in layout.items()
                    }
                )
        if use_wandb:
            wandb = require("wandb", extra="wandb")
            # Its tables of the last values would bury the run's own; where the run went is told, unless --quiet.
            settings = wandb.Settings(quiet=True, silent=is_quiet())
            self._wandb = wandb.init(
                project="rlvla",
                name=folder.name,
                dir=str(folder),
                id=_wandb_id(folder),
                resume="allow",
                settings=settings,
            )

    def describe(self, parts: Sequence[Any], outcomes: tuple[str, ...] = ("eval/success_at_end",)) -> None:
        """Record the configuration as text and as hyperparameters, and the command that was typed.

        Args:
            parts: configuration dataclasses of the run.
            outcomes: scalars by which the HParams page compares runs.
        """
        configuration = resolved_flags(parts)
        if self._writer:
            from torch.utils.tensorboard.summary import hparams

            lines = "\n".join(f"    {name}: {value}" for name, value in configuration.items())
            self._writer.add_text("configuration", lines)
            self._writer.add_text("command", _as_block(shlex.split(command_line())))
            plain = {name: _as_number_or_text(value) for name, value in configuration.items()}
            experiment, *others = hparams(plain, dict.fromkeys(outcomes, 0.0))
            for summary in (_in_front(experiment, telling_flags(parts)), *others):
                self._writer.file_writer.add_summary(summary)
            self._writer.flush()
        if self._wandb:
            self._wandb.config.update({**configuration, "command": command_line()}, allow_val_change=True)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record scalars of one step (an iteration, counted from 1)."""
        if self._lines is None:
            return
        self._lines.write(json.dumps({"step": step, "time": time.time(), **metrics}) + "\n")
        self._lines.flush()
        if self._writer:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
                if name in self._overview:
                    self._writer.add_scalar(self._overview[name], value, step)
            self._writer.flush()
        if self._wandb:
            self._wandb.log(metrics, step=step)

    def video(self, name: str, frames: np.ndarray, fps: float, step: int) -> None:
        """Show an episode [F, H, W, 3] uint8 on the Images page of TensorBoard, moving."""
        if self._writer:
            from tensorboard.compat.proto.summary_pb2 import Summary

            image = Summary.Image(
                height=frames.shape[1],
                width=frames.shape[2],
                colorspace=3,
                encoded_image_string=encode_gif(frames, fps),
            )
            self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)
            self._writer.flush()

    def close(self) -> None:
        """Flush and close the files."""
        if self._lines:
            self._lines.close()
        if self._writer:
            self._writer.close()
        if self._wandb:
            self._wandb.finish()


def _as_number_or_text(value: Any) -> float | str:
    """As TensorBoard's table of hyperparameters shows it: switches by their words, as it would write 0.0000."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, (int, float)) else str(value)


def _in_front(experiment: Any, names: Sequence[str]) -> Any:
    """The summary of hyperparameters with these first: TensorBoard shows five of them unless asked for more.

    It puts those first that are said to differ between runs, then goes by the alphabet. All flags are in it, because it
    knows of several runs only the flags that the first one names.
    """
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    metadata = experiment.value[0].metadata.plugin_data
    content = HParamsPluginData.FromString(metadata.content)
    for info in content.experiment.hparam_infos:
        info.differs = info.name in names
    metadata.content = content.SerializeToString()
    return experiment


def _wandb_id(folder: Path) -> str:
    """The folder's run at Weights & Biases, whether this process or an earlier one started it."""
    file = folder / "wandb_run_id"
    if not file.exists():
        file.write_text(secrets.token_hex(8), encoding="utf-8")
    return file.read_text(encoding="utf-8")


def _as_block(words: Sequence[str]) -> str:
    """A command as a block of Markdown, a line for each flag: TensorBoard does not wrap lines."""
    broken = "".join((" \\\n      " if word.startswith("--") else " ") + shlex.quote(word) for word in words)
    return f"    {broken.lstrip()}"
