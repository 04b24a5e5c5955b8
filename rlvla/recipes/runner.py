"""Running the stages of a recipe one after the other, from where an earlier attempt ended."""

from __future__ import annotations

import resource
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rlvla.commands.problem_texts import problem
from rlvla.recipes.config import RecipeConfig
from rlvla.recipes.processes import Signals, command_words, ranks_of, run
from rlvla.recipes.recipe import Stage
from rlvla.recipes.stages import KINDS, REPORT, inputs_of
from rlvla.recipes.state import DONE, RUNNING, State, locked
from rlvla.utils.cli.programs import typed_command
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.signals import SHELL_SIGNAL_BASE, StopRequested
from rlvla.utils.terminal import duration, fit, log, show, style

_LITTLE = 60.0  # seconds as the recipe says that count beside the measured ones: short stages say little of others
_LEAST_LEFT = 0.1  # of a stage that continues, however long it has taken before
# Flags that take any number of values.
_LISTS = {f"--{f.metadata.get('flag', f.name)}" for f in fields(RecipeConfig) if isinstance(f.default, tuple)}
Program = Callable[[str], Sequence[str]]  # command -> what `command_words` takes


@dataclass(frozen=True)
class Timing:
    """How long stages take, in seconds: as measured before, or as the recipe says and this machine differs from it.

    Attributes:
        stages: the stages of the recipe.
        state: what was done so far.
    """

    stages: Sequence[Stage]
    state: State

    def left(self, stage: Stage) -> float | None:
        """Seconds that a stage will still take; None if nothing is known."""
        if self.state.is_done(stage):
            return 0.0
        whole = self.state.earlier.get(stage.name)
        if whole is None and stage.minutes is not None:
            whole = 60 * stage.minutes * self._pace()
        record = self.state.of(stage)
        if whole is None or record is None or not KINDS[stage.name].resumes:
            return whole
        return max(whole - record.seconds, _LEAST_LEFT * whole)

    def _pace(self) -> float:
        """How much longer the stages that are done took here than the recipe says."""
        known = [(s.minutes, self.state.of(s)) for s in self.stages if s.minutes and self.state.is_done(s)]
        said = sum(60 * minutes for minutes, record in known if record is not None and record.seconds)
        took = sum(record.seconds for _, record in known if record is not None)
        return (took + _LITTLE) / (said + _LITTLE)

    def words(self, stages: Sequence[Stage]) -> str:
        """How long these stages will still take, for messages; "" if nothing is known."""
        seconds = [self.left(stage) for stage in stages]
        known = [value for value in seconds if value is not None]
        if not known:
            return ""
        return f"{'about' if len(known) == len(seconds) else 'more than'} {duration(sum(known))}"


def check_state(stages: Sequence[Stage], state: State, first: str | None) -> None:
    """Compare what is to be run with what was done.

    Args:
        stages: the stages of the recipe.
        state: of the folder.
        first: the stage of --from, or None.

    Raises:
        ConfigError: stages were done with other settings, or what they wrote is gone; all of them at once.
    """
    names = [stage.name for stage in stages]
    if first is not None and first not in (*names, REPORT):
        raise ConfigError(_problem("from", "no_such_start", value=first, known=", ".join((*names, REPORT))))
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
                values = {"stage": stage.name, "value": path, "source": source.name}
                problems.append(_problem(stage.name, "lost_input", **values))
    if changed:
        earliest, told = next(iter(changed)), "; ".join(f"{name} ({changes})" for name, changes in changed.items())
        again = command_again(sys.argv, earliest)
        problems.insert(0, _problem(earliest, "changed", stages=told, command=again))
    if problems:
        raise ConfigError(problems)


def describe_plan(stages: Sequence[Stage], folder: Path, program: Program, first: str | None = None) -> str:
    """What `run_recipe` would do: for each stage whether it is done, its estimated time and its command.

    Raises:
        ConfigError: see `check_state`.
    """
    state = State.opened(folder, stages)
    check_state(stages, state, first)
    timing = Timing(stages, state)
    lines = []
    for stage in stages:
        when = "done before" if state.is_done(stage) else timing.words([stage]) or "of unknown duration"
        lines.append(f"{stage.name} ({when}):\n  {_typed(stage, program)}")
    return "\n".join([*lines, f"in all {timing.words(stages) or 'of unknown duration'}; nothing was started"])


def _typed(stage: Stage, program: Program) -> str:
    """The command of a stage as one would type it."""
    name, ranks = program(_command(stage))[-1], ranks_of(stage.processes)
    return shlex.join(typed_command([name, *stage.words], ranks if ranks > 1 else None))


def run_recipe(stages: Sequence[Stage], folder: Path, program: Program, first: str | None = None) -> None:
    """Run the stages that are not done, and write the report.

    Args:
        stages: the stages, as `rlvla.recipes.recipe.plan` returns them.
        folder: of --output, created if missing.
        program: how commands are called.
        first: a stage that is repeated, with all later ones; None: only what is not done runs.

    Raises:
        ConfigError: see `check_state`; another process runs a recipe in the folder.
        StopRequested: a signal asked to stop.
        SystemExit: a stage failed; the status is that of its command.
    """
    check_state(stages, State.opened(folder, stages), first)  # a mistake leaves nothing behind
    with locked(folder) as lock:
        state = State.opened(folder, stages)
        check_state(stages, state, first)
        if first is not None and first != REPORT:
            state.begin_again(stages, first)
        complete = all(state.is_done(stage) for stage in stages)
        _run_stages(stages, state, program, lock)
        from rlvla.recipes.report import conclude  # loads torch

        log.info(style("== result", "bold"))
        show(conclude(stages, state))
        if complete and first is None:
            show(f"{folder} is complete; to run it anew: {command_again(sys.argv, stages[0].name)}")


def _run_stages(stages: Sequence[Stage], state: State, program: Program, lock: int) -> None:
    timing = Timing(stages, state)
    for number, stage in enumerate(stages, 1):
        if state.is_done(stage):
            log.info(f"== {stage.name}: done before")
            continue
        own, rest = timing.words([stage]), timing.words(stages[number - 1 :])
        times = "" if not own else f", {own}" if number == len(stages) else f", {own}; {rest} for all that is left"
        log.info(style(f"== {stage.name} ({number} of {len(stages)}){times}", "bold"))
        _run_stage(stage, state, program, lock)


def _run_stage(stage: Stage, state: State, program: Program, lock: int) -> None:
    record = state.of(stage)
    before, cpu_before = (record.seconds, record.cpu_seconds) if record is not None else (0.0, 0.0)
    used_before = _cpu_seconds()
    state.remove_remains(stage)
    ranks = ranks_of(stage.processes)
    if ranks < stage.processes:
        log.info(f"{ranks} rank(s) instead of {stage.processes}: each takes a GPU of its own")
    words = command_words(program(_command(stage)), stage.words, ranks)
    took = [0.0]

    def beat(seconds: float) -> None:
        took[0] = seconds
        state.note(stage, RUNNING, before + seconds, cpu_before)

    beat(0.0)
    with Signals().caught() as signals:
        status = run(words, signals, beat, lock)
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
    """Processor time of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _command(stage: Stage) -> str:
    command = KINDS[stage.name].command
    assert command is not None
    return command


def command_again(argv: Sequence[str], first: str | None = None) -> str:
    """The command that continues this one, or repeats it from a stage; without flags that have no values."""
    at = argv.index("--") if "--" in argv else len(argv)
    words, passed_on = list(argv[:at]), list(argv[at:])
    kept: list[str] = []
    for index, word in enumerate(words):
        alone = index + 1 == len(words) or words[index + 1].startswith("--")
        if word.startswith("--from=") or word == "--from" or words[max(0, index - 1)] == "--from":
            continue
        if not (word in _LISTS and alone) and word != "--dry_run":  # scripts give lists where there is nothing to set
            kept.append(word)
    kept += [] if first is None else ["--from", first]
    return shlex.join(typed_command(kept + (passed_on if len(passed_on) > 1 else [])))


def _problem(flag: str, reason: str, **values: object) -> Problem:
    return replace(problem("recipe", reason, **values), flag=flag)
