"""Short supervised runs that compare values of a setting by success, for `cli/tune_sft_vla.py`."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvla.checkpoints.run_folder import METRICS_FILE
from rlvla.envs.workers.guardian import MARK, new_mark
from rlvla.evaluation.statistics import wilson_interval
from rlvla.utils.cli.config_file import flag_arguments
from rlvla.utils.cli.flags import Parser, arg
from rlvla.utils.data_files import parse_yaml
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.files import write_json
from rlvla.utils.terminal import log, show, table

CHOICE_FILE, TRIALS_FILE, LOG_FILE = "choice.yaml", "trials.json", "log.txt"
OWN_FLAGS, SAVE_PATH = ("candidates", "trial_steps"), "save_path"
# Unless they are given: a trial is judged by episodes after its last step.
_OF_TRIALS = {"eval_epochs": 1e6, "eval_episodes": 50, "eval_samples": 0, "num_envs": 1}
_MAX_STEPS = 3200  # without --max_steps
_POLL_SECONDS = 0.1
_GOOD = 0.5  # success from which the best of a round is taken
_WITHHELD = ("custom_module", "demos", "dry_run", "max_steps", "seed", SAVE_PATH)

Settings = dict[str, Any]


@dataclass(frozen=True)
class TuneConfig:
    """The values to compare."""

    candidates: tuple[str, ...] = arg(
        (),
        "settings of train_sft_vla.py to compare, each with its values, e.g. action_chunk_len=[2,5]; of several "
        "settings all combinations",
        metavar="FLAG=[VALUE,...]",
        essential=True,
    )
    trial_steps: int = arg(
        800,
        "optimizer steps of a trial; the trials are repeated with twice as many, up to --max_steps (default: 3200), "
        "while the best succeeds in less than half of its episodes and its interval overlaps with another",
        minimum=1,
    )

    def combinations(self, parser: Parser) -> list[Settings]:
        """The settings of each trial.

        Raises:
            ConfigError: nothing to compare, or flags and values that the training does not take.
        """
        values: dict[str, list[Any]] = {}
        problems = []
        for text in self.candidates:
            name, equals, listed = text.partition("=")
            values_given = parse_yaml(listed, f"--candidates {name}") if equals else None
            if not isinstance(values_given, list) or len(values_given) < 2 or name in values:
                usage = f"--candidates {text}: write FLAG=[VALUE,VALUE,...], once per flag, with at least two values"
                problems.append(Problem("candidates", "no_assignment", usage))
                continue
            values[name] = values_given
            refused = name in _WITHHELD
            errors = [] if refused else _errors(parser, name, values_given)
            texts = [f"{name} cannot differ between trials"] if refused else errors
            problems += [Problem("candidates", "invalid_value", f"--candidates {text}: {error}") for error in texts]
        if not self.candidates:
            text = "nothing to compare: give --candidates, e.g. --candidates action_chunk_len=[2,5]"
            problems.append(Problem("candidates", "needs_flag", text))
        if problems:
            raise ConfigError(dict.fromkeys(problems))
        return [dict(zip(values, combination)) for combination in itertools.product(*values.values())]


def _errors(parser: Parser, name: str, values: Sequence[Any]) -> list[str]:
    """Errors of the command line of the training for these values of a flag."""
    return [error for value in values for error in parser.read_flags(flag_arguments(name, value), argparse.Namespace())]


def run_tuning(
    trials: Sequence[Settings], steps: int, program: Sequence[str], tokens: Sequence[str], given: Mapping[str, Any]
) -> Settings:
    """Run rounds of trials, one per core at a time, and return the best settings, which are written to `choice.yaml`.

    Args:
        trials: settings of each trial, see `TuneConfig.combinations`.
        steps: optimizer steps of the first round.
        program: program of the training, see `rlvla.recipes.runner.launch_command`.
        tokens: flags of all trials, without those of this command.
        given: flag -> value of those on the command line or in its file, and `save_path`.

    Raises:
        SystemExit: a trial failed.
    """
    folder, most = Path(given[SAVE_PATH]), given.get("max_steps") or _MAX_STEPS
    steps = min(steps, most)
    rounds: list[dict[str, Any]] = []
    while True:
        log.info(f"{len(trials)} trials of {steps} steps")
        rounds.append({"steps": steps, "trials": _play_round(trials, steps, folder, program, tokens, given)})
        best, *others = sorted(
            rounds[-1]["trials"], key=lambda trial: -trial["success_at_end"]
        )  # stable: ties by order
        clear = best["low"] > max(trial["high"] for trial in others)
        if clear or best["success_at_end"] >= _GOOD or steps == most:
            break
        steps = min(2 * steps, most)
    write_json(folder / TRIALS_FILE, {"rounds": rounds, "choice": best["settings"]})
    write_json(folder / CHOICE_FILE, best["settings"])  # JSON is YAML
    rows = [
        (number["steps"], *(_word(value) for value in trial["settings"].values()), trial["n"], _cell(trial))
        for number in rounds
        for trial in number["trials"]
    ]
    show(table(("steps", *best["settings"], "n", "success at end [95 %]"), rows))
    chosen = " ".join(f"--{name} {_word(value)}" for name, value in best["settings"].items())
    why = "the highest success on held-out states" if best["success_at_end"] else "the first, as no trial succeeds"
    show(f"chosen: {chosen} ({why})\nwritten: {folder / CHOICE_FILE}")
    return best["settings"]


def _play_round(
    trials: Sequence[Settings],
    steps: int,
    folder: Path,
    program: Sequence[str],
    tokens: Sequence[str],
    given: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Settings and success of each trial."""
    common = [word for name, value in _OF_TRIALS.items() if name not in given for word in flag_arguments(name, value)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    together = min(cores, len(trials))
    # With a mark, trials end with this process, however it ends.
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, cores // together)), MARK: new_mark()}
    places: list[Path] = []
    waiting: list[tuple[Path, list[str]]] = []
    running: list[tuple[Path, list[str], subprocess.Popen[bytes]]] = []
    for settings in trials:
        name = "_".join(["steps", str(steps), *(f"{flag}_{_word(value)}" for flag, value in settings.items())])
        places.append(folder / name)
        own = [word for flag, value in settings.items() for word in flag_arguments(flag, value)]
        own += [f"--max_steps={steps}", f"--{SAVE_PATH}={folder / name / 'sft'}"]
        waiting.append((folder / name, [sys.executable, *program, *tokens, *common, *own]))
    try:
        while waiting or running:
            if waiting and len(running) < together:
                place, argv = waiting.pop(0)
                place.mkdir(parents=True, exist_ok=True)
                with (place / LOG_FILE).open("w", encoding="utf-8") as file:
                    running.append((place, argv, subprocess.Popen(argv, env=environment, stdout=file, stderr=file)))
                continue
            time.sleep(_POLL_SECONDS)
            for place, argv, child in running:
                if child.poll():
                    raise SystemExit(f"a trial failed: {shlex.join(argv)}; its output: {place / LOG_FILE}")
            running = [trial for trial in running if trial[2].returncode is None]
    finally:
        for _, _, child in running:
            child.kill()
            child.wait()
    return [{"settings": settings, **_success(place / "sft" / METRICS_FILE)} for settings, place in zip(trials, places)]


def _word(value: Any) -> str:
    return "_".join(map(str, value)) if isinstance(value, list) else str(value)


def _success(path: Path) -> dict[str, Any]:
    """Success after the last step, from the metrics of a trial."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    last = [line for line in lines if "eval/success_at_end" in line][-1]
    rate, n = last["eval/success_at_end"], int(last["eval/n"])
    low, high = wilson_interval(round(rate * n), n)
    return {"success_at_end": rate, "n": n, "low": low, "high": high}


def _cell(result: Mapping[str, Any]) -> str:
    rate, low, high = (100 * result[name] for name in ("success_at_end", "low", "high"))
    return f"{rate:.1f}% [{low:.1f}, {high:.1f}]"
