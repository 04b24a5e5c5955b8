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
from rlvla.commands.sft_runs import marked_environment
from rlvla.evaluation.statistics import wilson_interval
from rlvla.utils.cli.config_file import flag_arguments
from rlvla.utils.cli.flags import Parser, arg
from rlvla.utils.data_files import parse_yaml
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.files import write_json
from rlvla.utils.launcher import ACCELERATOR_FILES
from rlvla.utils.terminal import SUMMARY, log, show, table

CHOICE_FILE, TRIALS_FILE, LOG_FILE = "choice.yaml", "trials.json", "log.txt"
OUTPUT = "runs/tune"  # default of --save_path
OWN_FLAGS = ("candidates", "trial_steps", "max_minutes")
# Unless they are given: a trial is judged by episodes after its last step.
_TRIAL_DEFAULTS = {"eval_epochs": 1e6, "eval_episodes": 50, "eval_samples": 0, "num_envs": 1}
_MAX_STEPS = 3200  # without --max_steps
_SUFFICIENT_SUCCESS = 0.5  # no further round
_POLL_SECONDS = 0.1
# Flags that are common to all trials.
_WITHHELD = (
    *("config", "custom_module", "demos", "dry_run", "eval_epochs", "eval_episodes", "fallback_path", "help"),
    *("load_checkpoint", "max_steps", "save_path", "save_steps", "seed", "version"),
)

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
    max_minutes: float | None = arg(
        None, "no further round of trials unless it is expected to end within this time", above=0
    )

    @property
    def compared(self) -> set[str]:
        """Names of the flags that differ between trials."""
        return {text.partition("=")[0] for text in self.candidates}

    def combinations(self, parser: Parser) -> list[Settings]:
        """The settings of each trial.

        Args:
            parser: command line of the training.

        Raises:
            ConfigError: nothing to compare, or flags and values that the training does not take.
        """
        values: dict[str, list[Any]] = {}
        problems = []
        for text in self.candidates:
            name, equals, listed = text.partition("=")
            try:
                options = parse_yaml(listed, f"--candidates {name}") if equals else None
            except ConfigError as error:
                problems += [problem.of_flag("candidates") for problem in error.problems]
                continue
            if not isinstance(options, list) or len(set(map(str, options))) < max(2, len(options)) or name in values:
                usage = f"--candidates {text}: write FLAG=[VALUE,VALUE,...], once per flag, with different values"
                problems.append(Problem("candidates", "no_assignment", usage))
                continue
            values[name] = options
            texts = [error for value in options for error in _errors(parser, name, value)]
            problems += [Problem("candidates", "invalid_value", f"--candidates {text}: {error}") for error in texts]
        if not self.candidates:
            text = "nothing to compare: give --candidates, e.g. --candidates action_chunk_len=[2,5]"
            problems.append(Problem("candidates", "needs_flag", text))
        if problems:
            raise ConfigError(dict.fromkeys(problems))
        return [dict(zip(values, combination)) for combination in itertools.product(*values.values())]


def _errors(parser: Parser, name: str, value: Any) -> list[str]:
    """Errors of the command line of the training for a value of a flag."""
    action = next((action for action in parser._actions if f"--{name}" in action.option_strings), None)
    if action is not None and action.option_strings[0].removeprefix("--") in _WITHHELD:
        return [f"{name} cannot differ between trials"]
    namespace = argparse.Namespace()
    errors = parser.read_flags(flag_arguments(name, value), namespace)
    dest = None if action is None else action.dest
    return errors or [str(problem) for problem in parser.value_problems(namespace) if problem.flag == dest]


def run_tuning(
    trials: Sequence[Settings],
    steps: int,
    max_steps: int | None,
    folder: Path,
    command: Sequence[str],
    max_minutes: float | None = None,
) -> Settings:
    """Run rounds of trials, and return the best settings, which are written to `choice.yaml`.

    Args:
        trials: settings of each trial, see `TuneConfig.combinations`.
        steps: optimizer steps of the first round.
        max_steps: largest number of steps; None: 3200.
        folder: receives a folder per trial, `trials.json` and `choice.yaml`.
        command: arguments of Python for all trials, see `trial_command`.
        max_minutes: see `TuneConfig`; the first round is played anyway.

    Raises:
        SystemExit: a trial failed.
    """
    max_steps = max_steps or _MAX_STEPS
    steps = min(steps, max_steps)
    rounds: list[dict[str, Any]] = []
    started = time.monotonic()
    while True:
        began = time.monotonic()
        log.info(f"{len(trials)} trials of {steps} steps")
        results = _run_trials(trials, steps, folder / f"steps_{steps}", command)
        rounds.append({"steps": steps, "trials": results})
        best, *others = sorted(results, key=lambda trial: -trial["success_at_end"])  # stable: ties by order
        clear = best["low"] > max(trial["high"] for trial in others)
        finished = steps == max_steps or max(trial["steps"] for trial in results) < steps  # --max_epochs ended them
        if clear or finished or best["success_at_end"] >= _SUFFICIENT_SUCCESS:
            break
        longer, now = min(2 * steps, max_steps), time.monotonic()
        if max_minutes is not None and now - started + (now - began) * longer / steps > 60 * max_minutes:
            log.info(f"no further round: it would not end in time (--max_minutes {max_minutes:g})")
            break
        steps = longer
    chosen, *rest = (
        f"{shlex.join(_flags(trial['settings']))} {_cell(trial)} of {trial['n']}" for trial in (best, *others)
    )
    summary = f"{chosen}, against {', '.join(rest)}, after {steps} steps"
    write_json(folder / TRIALS_FILE, {"rounds": rounds, "choice": best["settings"], SUMMARY: summary})
    write_json(folder / CHOICE_FILE, best["settings"])  # JSON is YAML
    rows = [
        (trial["steps"], *map(str, trial["settings"].values()), trial["n"], _cell(trial))
        for round_ in rounds
        for trial in round_["trials"]
    ]
    show(table(("steps", *best["settings"], "n", "success at end [95 %]"), rows))
    flags = shlex.join(_flags(best["settings"]))
    why = "the highest success on held-out states" if best["success_at_end"] else "the first, as no trial succeeds"
    show(f"chosen: {flags} ({why})\nwritten: {folder / CHOICE_FILE}")
    return best["settings"]


def trial_command(program: Sequence[str], tokens: Sequence[str], given: Sequence[str]) -> list[str]:
    """Arguments of Python for all trials.

    Args:
        program: program of the training, see `rlvla.recipes.runner.launch_command`.
        tokens: its flags, without those that differ between trials.
        given: names of these flags.
    """
    defaults = {name: value for name, value in _TRIAL_DEFAULTS.items() if name not in given}
    return [*program, *tokens, *_flags(defaults)]


def dry_trial(settings: Settings, folder: Path, command: Sequence[str]) -> list[str]:
    """Arguments of Python that check a trial, see `check_command`."""
    return [*command, *_flags(settings), f"--save_path={folder / 'sft'}"]


def _flags(settings: Settings) -> list[str]:
    return [token for flag, value in settings.items() for token in flag_arguments(flag, value)]


def _run_trials(trials: Sequence[Settings], steps: int, folder: Path, command: Sequence[str]) -> list[dict[str, Any]]:
    """Settings and success of each trial, run one per core at a time, on a GPU one after the other."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    concurrent = 1 if any(map(os.path.exists, ACCELERATOR_FILES)) else min(cores, len(trials))
    environment = marked_environment(OMP_NUM_THREADS=str(max(1, cores // concurrent)))
    folders = [folder / str(number) for number in range(1, len(trials) + 1)]
    waiting = list(zip(folders, trials))
    running: list[tuple[Path, subprocess.Popen[bytes]]] = []
    try:
        while waiting or running:
            if waiting and len(running) < concurrent:
                place, settings = waiting.pop(0)
                place.mkdir(parents=True)
                argv = [sys.executable, *command, *_flags(settings), f"--max_steps={steps}"]
                with (place / LOG_FILE).open("w", encoding="utf-8") as file:
                    child = subprocess.Popen(
                        [*argv, f"--save_path={place / 'sft'}"], env=environment, stdout=file, stderr=file
                    )
                running.append((place, child))
                continue
            time.sleep(_POLL_SECONDS)
            for place, child in running:
                if child.poll():
                    raise SystemExit(f"a trial failed; its output: {place / LOG_FILE}")
            running = [trial for trial in running if trial[1].returncode is None]
    finally:
        for _, child in running:
            child.kill()
            child.wait()
    return [
        {"settings": settings, **_success(place / "sft" / METRICS_FILE)} for place, settings in zip(folders, trials)
    ]


def _success(path: Path) -> dict[str, Any]:
    """Success after the last step, from the metrics of a trial."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    last = [line for line in lines if "eval/success_at_end" in line][-1]
    rate, n = last["eval/success_at_end"], int(last["eval/n"])
    low, high = wilson_interval(round(rate * n), n)
    return {"steps": int(last["step"]), "success_at_end": rate, "n": n, "low": low, "high": high}


def _cell(trial: Mapping[str, Any]) -> str:
    rate, low, high = (100 * trial[name] for name in ("success_at_end", "low", "high"))
    return f"{rate:.1f}% [{low:.1f}, {high:.1f}]"
