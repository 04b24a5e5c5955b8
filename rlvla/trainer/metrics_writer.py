"""Metrics of a run in `metrics.jsonl`, TensorBoard, and Weights & Biases."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.utils.cli.config_file import resolved_flags, telling_flags
from rlvla.utils.cli.programs import command_line
from rlvla.utils.errors import require
from rlvla.utils.files import METRICS_FILE, BestEffortWriter, LineFile, read_lines, require_room, write_atomic
from rlvla.utils.terminal import is_quiet, one_line
from rlvla.utils.video import encode_gif

# Layout of TensorBoard's Custom Scalars page: category -> chart -> regular expressions, matched at the start of a name.
Layout = dict[str, dict[str, list[str]]]
_Image = tuple[Any, int, float]  # TensorBoard summary, step, wall time
# Category names differ between the commands because TensorBoard merges equal ones when it shows several runs.
SFT_LAYOUT: Layout = {
    "supervised training": {
        "loss": ["sft/loss", "sft_heldout/loss", "sft_train/loss"],
        "accuracy of tokens": ["sft/accuracy", "sft_heldout/accuracy", "sft_train/accuracy"],
        "gradient norm": ["sft/grad_norm"],
        "learning rate": ["sft/lr"],
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
_OF_PPO = ("actor/ppo_kl", "actor/pg_clipfrac")
OFF_POLICY_OVERVIEW = {name: title for name, title in PPO_OVERVIEW.items() if name not in _OF_PPO}
OFF_POLICY_OVERVIEW |= {"critic/td_error": "0_overview/5_td_error", "critic/q_mean": "0_overview/6_value"}


# Scalars that count what should not happen.
_COUNTER = re.compile(
    r"rollout/(env_retries|env_faults_|dropped|decisions_repeated|replicas_replaced|success_unanswered)"
    r"|(actor|critic)/skipped_steps|reward/(stalled|vlm_failures)"
)


class _Board:
    """TensorBoard's event files; on a full disk, scalars are kept and written later.

    Args:
        folder: folder of the event files.
    """

    def __init__(self, folder: Path):
        self._writer_class = require("torch.utils.tensorboard", extra="all").SummaryWriter
        self._folder, self._best_effort = folder, BestEffortWriter(str(folder))
        self._writer: Any = None
        self._waiting: list[tuple[int | None, Callable[[Any], object]]] = []  # step, function that adds events
        self.purged_from: int | None = None  # readers drop earlier events of this step and later ones

    def write(self, add: Callable[[Any], object], step: int | None = None, *, keep: bool = True) -> None:
        """Call `add` with the SummaryWriter.

        Args:
            add: adds events.
            step: their step, if they have one.
            keep: try again later if the disk is full.
        """
        self._waiting.append((step, add))
        if not self._best_effort.attempt(self._write) and not keep:
            self._waiting.pop()

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        require_room(self._folder)
        try:
            if self._writer is None:
                self._writer = self._writer_class(str(self._folder), purge_step=self.purged_from)
            for _, add in self._waiting:
                add(self._writer)
            self._writer.flush()
        except (OSError, RuntimeError):
            # A writer never recovers from a failure; the next one repeats the events it may have written.
            if self._writer is not None:
                steps = [step for step, _ in self._waiting if step is not None]
                self._writer, self.purged_from = None, min(steps, default=None)
            raise
        self._waiting.clear()

    def images(self) -> list[_Image]:
        """The images currently shown by TensorBoard."""
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
        from tensorboard.compat.proto.event_pb2 import SessionLog

        shown: dict[tuple[str, int], _Image] = {}
        for path in sorted(self._folder.glob("events.out.tfevents.*")):
            for event in LegacyEventFileLoader(str(path)).Load():
                if event.session_log.status == SessionLog.START:
                    shown = {key: entry for key, entry in shown.items() if entry[1] < event.step}
                for value in event.summary.value:
                    if value.HasField("image"):
                        shown[value.tag, event.step] = event.summary, event.step, event.wall_time
        return list(shown.values())

    def close(self) -> None:
        """Flush and close the files; writing again starts a new one."""
        if self._writer is not None:
            self._best_effort.attempt(self._writer.close)
        self._writer = None


class MetricsLogger:
    """Writes scalars to `metrics.jsonl`, one line per step, and optionally to TensorBoard and Weights & Biases.

    A full disk does not end the run: pending scalars are written later.

    Args:
        folder: folder of `metrics.jsonl` and the event files; None (on all ranks but the main one) writes nothing.
        use_tensorboard: also write event files.
        use_wandb: also log to Weights & Biases; a run resumed in its folder is resumed there as well, and steps that
            it repeats keep the values that are there.
        wandb_run: `project`, `group` and `name` there; by default project `rlvla`, no group, and the folder's name.
        layout: charts of TensorBoard's Custom Scalars page.
        overview: scalar -> additional name in TensorBoard, which lists the most important scalars first.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        use_tensorboard: bool,
        use_wandb: bool = False,
        wandb_run: Mapping[str, str | None] | None = None,
        layout: Layout | None = None,
        overview: Mapping[str, str] | None = None,
    ):
        self._folder, self._layout, self._overview = folder, layout, overview or {}
        self._not_zero: set[str] = set()  # scalars that had another value
        self._board: _Board | None = None
        self._lines: LineFile | None = None
        self._wandb: Any = None
        self._uploaded: set[tuple[int, str]] = set()  # steps and kinds of lines logged before a resume
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = LineFile(folder / METRICS_FILE)
        if use_tensorboard:
            self._board = _Board(folder / "tensorboard")
        if use_wandb:
            wandb = require("wandb", extra="wandb")
            id_file = folder / "wandb_run_id"
            self._wandb_is_new = not id_file.exists()
            if self._wandb_is_new:
                id_file.write_text(secrets.token_hex(8), encoding="utf-8")
            names = {name: value for name, value in (wandb_run or {}).items() if value is not None}
            self._wandb = wandb.init(
                **{"project": "rlvla", "name": folder.name, **names},
                dir=str(folder),
                id=id_file.read_text(encoding="utf-8"),
                resume="allow",
                # wandb's tables of final values would hide ours; it still prints the address of the run.
                settings=wandb.Settings(quiet=True, silent=is_quiet()),
            )
            # wandb's own step only grows: it would drop what a resumed run logs for an earlier one.
            self._wandb.define_metric("step")
            self._wandb.define_metric("*", step_metric="step")
            if not self._wandb_is_new:
                records = read_lines(folder / METRICS_FILE) if (folder / METRICS_FILE).exists() else []
                self._uploaded = {(record["step"], _kind(record)) for record in records}

    def reopen(self) -> None:
        """Continue in new files, after the folder was deleted and created again."""
        if self._lines is not None:
            self._lines.close()
        if self._board is not None:
            self._board.close()

    def rewind(self, step: int, *, evaluates_again: bool) -> None:
        """Delete the scalars that the resumed run will log again; called once, before anything is logged.

        Args:
            step: the step from which the run resumes.
            evaluates_again: delete evaluations of that step.
        """
        if self._folder is None or not (self._folder / METRICS_FILE).exists():
            return
        kept = []
        for record in read_lines(self._folder / METRICS_FILE):
            again = evaluates_again and record["step"] == step and _is_evaluation(record)
            if record["step"] <= step and not again:
                kept.append(record)
        self._rewrite(kept, first=step if evaluates_again else step + 1)
        if self._wandb and self._wandb_is_new:  # the run was begun without it
            for record in kept:
                self._upload({name: value for name, value in record.items() if name != "time"}, int(record["step"]))

    def replace_evaluation(self, metrics: dict[str, float], step: int) -> None:
        """Replace the scalars of the evaluation of a step.

        Args:
            metrics: scalars of the evaluation.
            step: the step it belongs to.
        """
        if self._folder is None or self._lines is None:
            return
        record = {"step": step, "time": time.time(), **metrics}
        self._lines.append(json.dumps(record))
        self._lines.close()
        file = self._folder / METRICS_FILE
        later = [] if self._board is None else [image for image in self._board.images() if image[1] > step]
        self._rewrite([*(read_lines(file) if file.exists() else []), record], step, later)
        self._upload(metrics, step)

    def _rewrite(self, records: Iterable[dict[str, Any]], first: int, images: Iterable[_Image] = ()) -> None:
        """Rewrite `metrics.jsonl` and the events from step `first` on with these records and images."""
        assert self._folder is not None
        file = self._folder / METRICS_FILE
        kept = {(record["step"], _kind(record)): record for record in records}  # the last of duplicates
        text = "".join(json.dumps(record) + "\n" for record in kept.values())
        # On a full disk the file stays as it is; `read_metrics` uses the last of duplicate lines.
        BestEffortWriter(METRICS_FILE).attempt(lambda: write_atomic(file, text.encode()))
        if self._board is None:
            return
        self._not_zero |= {name for record in kept.values() for name, value in record.items() if value != 0}
        self._board.close()
        self._board.purged_from = first
        for image in images:
            self._show_image(*image)
        for record in kept.values():
            if record["step"] >= first:
                values = {name: value for name, value in record.items() if name not in ("step", "time")}
                self._show(values, int(record["step"]), record["time"])

    def describe(self, configs: Sequence[Any], outcomes: tuple[str, ...] = ("eval/success_at_end",)) -> None:
        """Record the configuration, as text and as hyperparameters, and the command line.

        Args:
            configs: configuration dataclasses of the run.
            outcomes: scalars by which TensorBoard's HParams page compares runs.
        """
        configuration = resolved_flags(configs)
        if self._board:
            from torch.utils.tensorboard.summary import hparams

            lines = "\n".join(f"    {name}: {one_line(value)}" for name, value in configuration.items())
            command = _as_block(shlex.split(command_line()))
            flags = {name: _as_number_or_text(value) for name, value in configuration.items()}
            experiment, *others = hparams(flags, dict.fromkeys(outcomes, 0.0))
            summaries = (_listed_first(experiment, telling_flags(configs)), *others)

            def add(writer: Any) -> None:
                writer.add_text("configuration", lines)
                writer.add_text("command", command)
                for summary in summaries:
                    writer.file_writer.add_summary(summary)

            self._lay_out()
            self._board.write(add)
        if self._wandb:
            self._wandb.config.update({**configuration, "command": command_line()}, allow_val_change=True)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record the scalars of a step (an iteration, counted from 1)."""
        if self._lines is None:
            return
        now = time.time()
        self._lines.append(json.dumps({"step": step, "time": now, **metrics}))
        self._show(metrics, step, now)
        self._upload(metrics, step)

    def _upload(self, metrics: Mapping[str, float], step: int) -> None:
        """Log scalars to Weights & Biases, unless an earlier process of the run did: nothing can be replaced."""
        if self._wandb and (step, _kind(metrics)) not in self._uploaded:
            self._wandb.log({**metrics, "step": step})

    def _show(self, metrics: Mapping[str, float], step: int, wall_time: float) -> None:
        """Add scalars to TensorBoard."""
        if self._board is None:
            return

        self._not_zero |= {name for name, value in metrics.items() if value != 0}

        def add(writer: Any) -> None:
            for name, value in metrics.items():
                for tag in (self._tag(name), self._overview.get(name)):
                    if tag is not None:
                        writer.add_scalar(tag, value, step, wall_time)

        self._lay_out()
        self._board.write(add, step)

    def _tag(self, name: str) -> str:
        """The name of a scalar in TensorBoard; details of load balancing and counters without a count are apart."""
        counts = _COUNTER.match(name) is not None and name not in self._not_zero
        return f"debug/{name}" if counts or name.startswith("global_seqlen/") else name

    def _lay_out(self) -> None:
        """Define the Custom Scalars page, once."""
        if self._board and self._layout:
            charts = {
                category: {title: ["Multiline", names] for title, names in charts.items()}
                for category, charts in self._layout.items()
            }
            self._board.write(lambda writer: writer.add_custom_scalars(charts))
            self._layout = None

    def video(self, name: str, frames: np.ndarray, fps: float, step: int) -> None:
        """Show an episode [F, H, W, 3] uint8 as an animation on TensorBoard's Images page."""
        if self._board:
            from tensorboard.compat.proto.summary_pb2 import Summary

            image = Summary.Image(
                height=frames.shape[1],
                width=frames.shape[2],
                colorspace=3,
                encoded_image_string=encode_gif(frames, fps),
            )
            self._show_image(Summary(value=[Summary.Value(tag=name, image=image)]), step)

    def _show_image(self, summary: Any, step: int, wall_time: float | None = None) -> None:
        """Add an image to TensorBoard, unless the disk is full."""
        assert self._board is not None
        self._board.write(lambda writer: writer.file_writer.add_summary(summary, step, wall_time), step, keep=False)

    def close(self) -> None:
        """Flush and close the files."""
        if self._lines:
            self._lines.close()
        if self._board:
            self._board.close()
        if self._wandb:
            self._wandb.finish()


def _is_evaluation(record: Mapping[str, Any]) -> bool:
    """Whether a line of metrics belongs to an evaluation rather than an iteration."""
    return any(name.startswith(("eval/", "eval_sampled/")) for name in record)


def _kind(record: Mapping[str, Any]) -> str:
    """The alphabetically first metric, which tells apart the lines of a step: iteration, evaluation, measurement."""
    return min((name for name in record if name not in ("step", "time")), default="")


def _as_number_or_text(value: Any) -> float | str:
    """A hyperparameter for TensorBoard's table; booleans as text, which it would otherwise show as 0.0000."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, (int, float)) else str(value)


def _listed_first(experiment: Any, names: Sequence[str]) -> Any:
    """Mark the hyperparameters that TensorBoard lists first, of which it shows five by default.

    TensorBoard lists those marked as differing between runs first, the others alphabetically. All flags are included,
    because for several runs it only reads the flags of the first.
    """
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    metadata = experiment.value[0].metadata.plugin_data
    content = HParamsPluginData.FromString(metadata.content)
    for info in content.experiment.hparam_infos:
        info.differs = info.name in names
    metadata.content = content.SerializeToString()
    return experiment


def _as_block(argv: Sequence[str]) -> str:
    """A command as a Markdown code block with one flag per line, since TensorBoard does not wrap lines."""
    quoted = [shlex.quote(token).replace("\r", " ").replace("\n", "\n    ") for token in argv]  # stays in the block
    lines = "".join((" \\\n      " if token.startswith("--") else " ") + token for token in quoted)
    return f"    {lines.lstrip()}"


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
            "fraction of groups or episodes with a signal": ["rollout/signal_share"],
        },
        "is it stable?": {
            "entropy": ["actor/entropy"],
            "KL": ["actor/ppo_kl", "actor/ref_kl"],
            "clip fraction": ["actor/pg_clipfrac.*", "critic/vf_clipfrac"],
            "gradient norm": ["actor/grad_norm", "critic/grad_norm"],
            "explained variance": ["critic/vf_explained_var"],
            "distance from the start": ["actor/start_distance"],
        },
        "where does the time go?": {
            "seconds per iteration": ["timing_s/.*"],
            "environment steps per second": ["rollout/env_steps_per_s"],
            "decisions per second": ["perf/.*_decisions_per_s"],
            "tokens per second": ["perf/.*_tokens_per_s"],
            "peak memory, GB": ["perf/max_.*_gb"],
        },
    }


def off_policy_layout(rewards: Iterable[str]) -> Layout:
    """The TensorBoard layout of off-policy runs, see `ppo_layout`."""
    layout = ppo_layout(rewards)
    del layout["is it stable?"]
    layout["are its values right?"] = {
        "values and their targets": ["critic/q_mean", "critic/target_mean"],
        "TD error": ["critic/td_error"],
        "entropy": ["actor/entropy", "actor/choice_entropy"],
        "temperatures": ["actor/temperature_.*"],
        "gradient norm": ["actor/grad_norm", "critic/grad_norm"],
        "distance from the start": ["actor/start_distance"],
    }
    layout["what is in the replay buffer?"] = {
        "decisions": ["replay/rows", "replay/relabelled"],
        "mean weight of drawn decisions": ["replay/is_weight_mean"],
        "age of priorities and scores, in updates": ["replay/td_age_mean", "replay/score_age_mean"],
        "fraction without a score": ["replay/unjudged_share"],
    }
    return layout
