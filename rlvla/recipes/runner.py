"""Execution of the stages of a recipe, each as a process with one or several ranks; an interrupted run continues."""

from __future__ import annotations

import ctypes
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType

from rlvla.recipes.recipe import KINDS, MAX_MINUTES, REPORT, RecipeConfig, Stage, inputs_of
from rlvla.recipes.state import DONE, RUNNING, State, locked
from rlvla.utils.cli.programs import typed_command
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.launcher import RANKS_MODULE, num_gpus, ranks_module, ranks_of
from rlvla.utils.signals import SHELL_SIGNAL_BASE, StopRequested, record, taken_over
from rlvla.utils.terminal import IN_RECIPE, duration, fit, log, show, style

_PRIOR_SECONDS = 60.0  # weight of the recipe's own durations beside measured ones: short stages predict little
_MIN_FRACTION_LEFT = 0.1  # of a stage that continues
_POLL_SECONDS = 0.1
_BEAT_SECONDS = 5.0
_TERMINAL_SECONDS = 1.0  # in which Ctrl-C, which the terminal sends to all processes, reaches the command itself
_SAVE_SECONDS = 60.0  # for ranks whose launcher has ended to save a checkpoint
_LIBC = ctypes.CDLL(None, use_errno=True)
# prctl(2)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Flags with any number of values.
_LISTS = {f"--{f.metadata.get('flag', f.name)}" for f in fields(RecipeConfig) if isinstance(f.default, tuple)}
Program = Callable[[str], Sequence[str]]  # command -> the program of `launch_command`


class Signals:
    """The first signal that asked the recipe to stop.

    Attributes:
        received: its number, or 0.
    """

    def __init__(self) -> None:
        self.received = 0

    @contextmanager
    def caught(self) -> Iterator[Signals]:
        """Record signals within the block instead of ending this process."""
        with taken_over(self._handle, lambda: self.received != 0):
            yield self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        record(number)


def launch_command(program: Sequence[str], flags: Sequence[str], processes: int) -> list[str]:
    """The command line that starts a program.

    Args:
        program: the program without an interpreter: a file, or `-m` and a module.
        flags: its flags.
        processes: number of ranks; 1 needs no launcher.
    """
    return [sys.executable, *ranks_module(processes), *program, *flags]


def run(argv: Sequence[str], signals: Signals, beat: Callable[[float], None], lock: int) -> int:
    """Run a command to its end; a signal is passed on to it.

    The command also stops if this process is killed, and holds the lock until it has ended.

    Args:
        argv: see `launch_command`.
        signals: the received signals.
        beat: called every few seconds with the seconds so far.
        lock: descriptor of the lock of the folder.

    Returns:
        The exit status; negative if a signal ended the process.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    started = time.monotonic()
    next_beat = started + _BEAT_SECONDS
    parent = os.getpid()

    def die_with_parent() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    environment = {**os.environ, IN_RECIPE: "1"}
    if RANKS_MODULE in argv and num_gpus() == 0:
        environment.setdefault("DS_ACCELERATOR", "cpu")  # so that DeepSpeed does not search for one
    child = subprocess.Popen(argv, env=environment, preexec_fn=die_with_parent, pass_fds=[lock])
    terminate_at = None
    while (status := child.poll()) is None:
        time.sleep(_POLL_SECONDS)
        now = time.monotonic()
        if signals.received and terminate_at is None:
            terminate_at = now + _TERMINAL_SECONDS
        if terminate_at is not None and now > terminate_at:
            terminate_at = float("inf")
            child.terminate()
        if now >= next_beat:
            beat(now - started)
            next_beat = now + _BEAT_SECONDS
    beat(time.monotonic() - started)
    if signals.received or status:
        # Wait for ranks that outlive their launcher; this process has inherited them.
        deadline = time.monotonic() + _SAVE_SECONDS
        with suppress(ChildProcessError):
            while time.monotonic() < deadline:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    time.sleep(_POLL_SECONDS)
    return status


def _prctl(option: int, value: int) -> None:
    with suppress(AttributeError, OSError):  # not Linux
        _LIBC.prctl(option, value, 0, 0, 0)


@dataclass(frozen=True)
class Timing:
    """Estimated durations of stages: earlier measurements, else the recipe's scaled by the speed of this machine.

    Attributes:
        stages: the stages of the recipe.
        state: the finished and interrupted stages.
        budget: minutes for all stages; None: unlimited.
    """

    stages: Sequence[Stage]
    state: State
    budget: float | None = None

    def left(self, stage: Stage) -> float | None:
        """Estimated seconds that a stage will still take; None without an estimate."""
        if self.state.is_done(stage):
            return 0.0
        whole = self.state.earlier.get(stage.name)
        if whole is None and stage.minutes is not None:
            # Ratio of measured and predicted seconds of the finished stages.
            finished = [(s.minutes, self.state.of(s)) for s in self.stages if s.minutes and self.state.is_done(s)]
            predicted = sum(60 * minutes for minutes, record in finished if record is not None and record.seconds)
            measured = sum(record.seconds for _, record in finished if record is not None)
            whole = 60 * stage.minutes * ((measured + _PRIOR_SECONDS) / (predicted + _PRIOR_SECONDS))
        record = self.state.of(stage)
        if whole is None or record is None or not KINDS[stage.name].resumes:
            return whole
        return max(whole - record.seconds, _MIN_FRACTION_LEFT * whole)

    def limit(self, stage: Stage) -> float | None:
        """Minutes that a stage may take within the budget; None if there is none, or its command cannot be limited.

        The stages that can be limited share equally what the other ones are not expected to need; what one leaves
        goes to the later ones.
        """
        if self.budget is None or not stage.time_limited:
            return None
        spent = sum(record.seconds for record in self.state.records.values())
        later = self.stages[self.stages.index(stage) + 1 :]
        needed = sum(self.left(one) or 0.0 for one in later if not one.time_limited)
        shares = 1 + sum(one.time_limited and not self.state.is_done(one) for one in later)
        least = _MIN_FRACTION_LEFT * (self.left(stage) or _PRIOR_SECONDS)
        minutes = max((60 * self.budget - spent - needed) / shares, least) / 60
        return min(minutes, float(stage.settings.get(MAX_MINUTES) or minutes))

    def text(self, stages: Sequence[Stage]) -> str:
        """Estimated duration of these stages, for messages; "" without an estimate."""
        estimates = [seconds for stage in stages if (seconds := self.left(stage)) is not None]
        if not estimates:
            return ""
        return f"{'about' if len(estimates) == len(stages) else 'more than'} {duration(sum(estimates))}"


def check_state(stages: Sequence[Stage], state: State, first: str | None) -> None:
    """Check that finished stages match the recipe.

    Args:
        stages: the stages of the recipe.
        state: state of the folder.
        first: the stage of --from, or None.

    Raises:
        ConfigError: stages were run with other settings, or their output is missing; all at once.
    """
    names = [stage.name for stage in stages]
    if first is not None and first not in (*names, REPORT):
        text = f"--from {first}: the recipe does not have this stage; it has {', '.join((*names, REPORT))}"
        raise ConfigError.of("from", "no_such_start", text)
    kept = names[: names.index(first)] if first in names else names
    problems: list[Problem] = []
    changed: dict[str, str] = {}
    writers = {stage.output: stage for stage in stages}
    for stage in stages:
        done = stage.name in kept and state.is_done(stage)
        if done and (changes := state.changes(stage)):
            changed[stage.name] = ", ".join(changes)
        for path in () if done else inputs_of(stage.name, stage.settings):
            source = next((writers[place] for place in (path, *path.parents) if place in writers), None)
            if source and source.name in kept and state.is_done(source) and not path.exists():
                text = (
                    f"stage {stage.name} needs {path}, the output of an earlier stage, which is missing; repeat that "
                )
                problems.append(Problem(stage.name, "lost_input", f"{text}stage with --from {source.name}"))
    if changed:
        earliest = next(iter(changed))
        differences = "; ".join(f"{name} ({changes})" for name, changes in changed.items())
        text = f"done with other settings: {differences}; name another folder with --output, or repeat the changed "
        text += f"stages and all later ones: {command_again(sys.argv, earliest)}"
        problems.insert(0, Problem(earliest, "changed", text))
    if problems:
        raise ConfigError(problems)


def describe_plan(stages: Sequence[Stage], folder: Path, program: Program, first: str | None = None) -> str:
    """Description of the plan: for each stage its state, estimated duration and command.

    Raises:
        ConfigError: see `check_state`.
    """
    state = State.opened(folder, stages)
    check_state(stages, state, first)
    timing = Timing(stages, state)
    lines = []
    for stage in stages:
        when = "done before" if state.is_done(stage) else timing.text([stage]) or "of unknown duration"
        name, ranks = program(KINDS[stage.name].command)[-1], ranks_of(stage.processes)
        command = shlex.join(typed_command([name, *stage.argv], ranks if ranks > 1 else None))
        lines.append(f"{stage.name} ({when}):\n  {command}")
    return "\n".join([*lines, f"in all {timing.text(stages) or 'of unknown duration'}; nothing was started"])


def run_recipe(
    stages: Sequence[Stage], folder: Path, program: Program, first: str | None = None, minutes: float | None = None
) -> None:
    """Run the unfinished stages, and write the report.

    Args:
        stages: the stages, as `rlvla.recipes.recipe.plan` returns them.
        folder: folder of --output, created if missing.
        program: program of a command.
        first: stage to be repeated, with all later ones; None: only unfinished stages run.
        minutes: time budget of all stages.

    Raises:
        ConfigError: see `check_state`; another process runs a recipe in the folder.
        StopRequested: a signal asked to stop.
        SystemExit: a stage failed, with the status of its command.
    """
    check_state(stages, State.opened(folder, stages), first)  # a mistake leaves nothing behind
    with locked(folder) as lock:
        state = State.opened(folder, stages)
        check_state(stages, state, first)
        if first is not None and first != REPORT:
            state.begin_again(stages, first)
        complete = all(state.is_done(stage) for stage in stages)
        timing = Timing(stages, state, minutes)
        for number, stage in enumerate(stages, 1):
            if state.is_done(stage):
                log.info(f"== {stage.name}: done before")
                continue
            estimate, rest = timing.text([stage]), timing.text(stages[number - 1 :])
            times = f", {estimate}" if estimate else ""
            if estimate and number < len(stages):
                times += f"; {rest} for all remaining stages"
            limit = timing.limit(stage)
            if limit is not None:
                times += f"; at most {duration(60 * limit)}, so that all take {minutes:g} minutes"
            log.info(style(f"== {stage.name} ({number} of {len(stages)}){times}", "bold"))
            _run_stage(stage, state, program, lock, limit)
        from rlvla.recipes.report import conclude  # loads torch

        log.info(style("== result", "bold"))
        show(conclude(stages, state))
        if complete and first is None:
            show(f"{folder} is complete; to repeat it: {command_again(sys.argv, stages[0].name)}")


def _run_stage(stage: Stage, state: State, program: Program, lock: int, limit: float | None) -> None:
    record = state.of(stage)
    before, cpu_before = (record.seconds, record.cpu_seconds) if record is not None else (0.0, 0.0)
    used_before = _cpu_seconds()
    state.remove_unfinished(stage)
    ranks = ranks_of(stage.processes)
    if ranks < stage.processes:
        log.info(f"{ranks} rank(s) instead of {stage.processes}: each needs a GPU")
    limits = [] if limit is None else [f"--{MAX_MINUTES}={limit:.3f}"]  # takes precedence over an earlier one
    argv = launch_command(program(KINDS[stage.name].command), [*stage.argv, *limits], ranks)
    took = [0.0]

    def beat(seconds: float) -> None:
        took[0] = seconds
        state.note(stage, RUNNING, before + seconds, cpu_before)

    beat(0.0)
    with Signals().caught() as signals:
        status = run(argv, signals, beat, lock)
        used = None if cpu_before is None else cpu_before + _cpu_seconds() - used_before
        state.note(stage, RUNNING if status else DONE, before + took[0], used)
    if signals.received:
        reached = "done" if status == 0 else "not finished"
        log.info(f"== {stage.name}: {reached}; continue with: {command_again(sys.argv)}")
        raise StopRequested(signals.received)
    if status:
        ended = f"exit status {status}" if status > 0 else f"signal {-status}"
        text = f"== {stage.name}: not finished ({ended}, see above); continue with: {command_again(sys.argv)}"
        print(fit(text, sys.stderr), file=sys.stderr, flush=True)
        raise SystemExit(status if status > 0 else SHELL_SIGNAL_BASE - status)


def _cpu_seconds() -> float:
    """Processor time of all finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def command_again(argv: Sequence[str], first: str | None = None) -> str:
    """The command that continues this one, or repeats it from stage `first`; flags without values are left out."""
    at = argv.index("--") if "--" in argv else len(argv)
    tokens, passed_on = list(argv[:at]), list(argv[at:])
    kept: list[str] = []
    for index, token in enumerate(tokens):
        alone = index + 1 == len(tokens) or tokens[index + 1].startswith("--")
        if token.startswith("--from=") or token == "--from" or tokens[max(0, index - 1)] == "--from":
            continue
        if not (token in _LISTS and alone) and token != "--dry_run":  # scripts may pass list flags without values
            kept.append(token)
    kept += [] if first is None else ["--from", first]
    return shlex.join(typed_command(kept + (passed_on if len(passed_on) > 1 else [])))
