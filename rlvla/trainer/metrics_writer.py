"""Writing the metrics of a run to `metrics.jsonl`, and on request to TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.utils.cli.config_file import command_line, resolved_flags, telling_flags
from rlvla.utils.errors import require
from rlvla.utils.files import METRICS_FILE, open_lines
from rlvla.utils.terminal import is_quiet
from rlvla.utils.video import encode_gif

# Layout of TensorBoard's Custom Scalars page: category -> chart -> regular expressions, matched at the start of a name.
Layout = dict[str, dict[str, list[str]]]
# Category names differ between the commands because TensorBoard merges equal ones when it shows several runs.
SFT_LAYOUT: Layout = {
    "supervised training": {
        "loss": ["sft/loss"],
        "accuracy of tokens": ["sft/accuracy"],
        "gradient norm": ["sft/grad_norm"],
        "learning rate": ["sft/lr"],
    }
}

REWARD_MODEL_LAYOUT: Layout = {
    "reward model": {
        "loss": ["reward_model/loss"],
        "gradient norm": ["reward_model/grad_norm"],
        "learning rate": ["reward_model/lr"],
    }
}


# TensorBoard lists scalars alphabetically; under these additional names the most important ones come first.
PPO_OVERVIEW = {
    "rollout/success_at_end": "0_overview/1_success_at_end",
    "eval/success_at_end": "0_overview/2_success_at_end_evaluated",
    "reward/total": "0_overview/3_reward_per_episode",
    "actor/entropy": "0_overview/4_entropy",
    "actor/ppo_kl": "0_overview/5_kl",
    "actor/pg_clipfrac": "0_overview/6_clip_fraction",
    "actor/grad_norm": "0_overview/7_gradient_norm",
    "rollout/env_steps_per_s": "0_overview/8_env_steps_per_s",
    "timing_s/iteration": "0_overview/9_seconds_per_iteration",
}


class MetricsLogger:
    """Writes scalars to `metrics.jsonl`, one line per step, and to TensorBoard and Weights & Biases on request.

    Args:
        folder: where `metrics.jsonl` and the event files go; None (on all ranks but the main one) writes nothing.
        use_tensorboard: also write event files.
        use_wandb: also log to Weights & Biases (project `rlvla`, run named after the folder); a run resumed in its
            folder is resumed there as well.
        layout: charts of TensorBoard's Custom Scalars page.
        overview: scalar -> additional name in TensorBoard, chosen so that the most important scalars come first.
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
        self._overview, self._folder = overview or {}, folder
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
            # wandb's tables of final values would hide ours; it still prints the address of the run, unless --quiet.
            settings = wandb.Settings(quiet=True, silent=is_quiet())
            self._wandb = wandb.init(
                project="rlvla",
                name=folder.name,
                dir=str(folder),
                id=_wandb_id(folder),
                resume="allow",
                settings=settings,
            )

    def reopen(self) -> None:
        """Go on in new files, after the folder was deleted and made again."""
        if self._folder is None:
            return
        self._lines.close()
        self._lines = open_lines(self._folder / METRICS_FILE)
        if self._writer:
            self._writer.close()
            self._writer._get_file_writer()  # a new file

    def describe(self, parts: Sequence[Any], outcomes: tuple[str, ...] = ("eval/success_at_end",)) -> None:
        """Record the configuration, as text and as hyperparameters, and the command line.

        Args:
            parts: configuration dataclasses of the run.
            outcomes: scalars by which TensorBoard's HParams page compares runs.
        """
        configuration = resolved_flags(parts)
        if self._writer:
            from torch.utils.tensorboard.summary import hparams

            lines = "\n".join(f"    {name}: {value}" for name, value in configuration.items())
            self._writer.add_text("configuration", lines)
            self._writer.add_text("command", _as_block(shlex.split(command_line())))
            plain = {name: _as_number_or_text(value) for name, value in configuration.items()}
            experiment, *others = hparams(plain, dict.fromkeys(outcomes, 0.0))
            for summary in (_listed_first(experiment, telling_flags(parts)), *others):
                self._writer.file_writer.add_summary(summary)
            self._writer.flush()
        if self._wandb:
            self._wandb.config.update({**configuration, "command": command_line()}, allow_val_change=True)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record the scalars of a step (an iteration, counted from 1)."""
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
        """Show an episode [F, H, W, 3] uint8 as an animation on TensorBoard's Images page."""
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
    """A hyperparameter for TensorBoard's table; booleans as words, which it would otherwise show as 0.0000."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, (int, float)) else str(value)


def _listed_first(experiment: Any, names: Sequence[str]) -> Any:
    """Mark the hyperparameters that TensorBoard lists first; it shows five unless asked for more.

    TensorBoard lists those marked as differing between runs first, the others alphabetically. All flags are included,
    because of several runs TensorBoard knows only the flags of the first.
    """
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    metadata = experiment.value[0].metadata.plugin_data
    content = HParamsPluginData.FromString(metadata.content)
    for info in content.experiment.hparam_infos:
        info.differs = info.name in names
    metadata.content = content.SerializeToString()
    return experiment


def _wandb_id(folder: Path) -> str:
    """The id of the folder's run at Weights & Biases; created once and kept in the folder."""
    file = folder / "wandb_run_id"
    if not file.exists():
        file.write_text(secrets.token_hex(8), encoding="utf-8")
    return file.read_text(encoding="utf-8")


def _as_block(words: Sequence[str]) -> str:
    """A command as a Markdown code block with one flag per line, since TensorBoard does not wrap lines."""
    broken = "".join((" \\\n      " if word.startswith("--") else " ") + shlex.quote(word) for word in words)
    return f"    {broken.lstrip()}"


def ppo_layout(rewards: Iterable[str]) -> Layout:
    """The TensorBoard layout of PPO runs: three questions with a few charts each.

    Args:
        rewards: names of the reward sources, which are distinguished from their counters by name.
    """
    names = list(rewards)
    sources = "|".join(map(re.escape, ["total", *names] if len(names) > 1 else ["total"]))
    return {
        "does it learn?": {
            "success at end": ["rollout/success_at_end", "eval/success_at_end"],
            "success once": ["rollout/success_once", "eval/success_once"],
            "reward per episode" + ", by source" * (len(names) > 1): [f"reward/({sources})$"],
            "episode length": ["rollout/episode_length", "eval/episode_length"],
        },
        "is it stable?": {
            "entropy": ["actor/entropy"],
            "KL": ["actor/ppo_kl", "actor/ref_kl"],
            "clip fraction": ["actor/pg_clipfrac.*", "critic/vf_clipfrac"],
            "gradient norm": ["actor/grad_norm", "critic/grad_norm"],
        },
        "where does the time go?": {
            "seconds per iteration": ["timing_s/.*"],
            "environment steps per second": ["rollout/env_steps_per_s"],
            "decisions per second": ["perf/.*_decisions_per_s"],
            "tokens per second": ["perf/.*_tokens_per_s"],
            "peak memory, GB": ["perf/max_.*_gb"],
        },
    }
