"""No flag of any command takes a value that no run can mean: one sentence, and nothing is started."""

from __future__ import annotations

import argparse
import dataclasses
import math
import subprocess
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from cli import (
    check_demos,
    check_env,
    collect_demos,
    compare_runs,
    convert_demos,
    dagger_vla,
    draw_reward_machine,
    eval_vla,
    export_policy,
    inspect_vla,
    push_to_hub,
    replay_batch,
    score_episodes,
    train_ppo_vla,
    train_rm_vla,
    train_sft_vla,
    train_value_vla,
    tune_sft_vla,
    view_data,
)
from rlvla.envs.options import own_flags
from rlvla.envs.registry import get_suite, suite_names
from rlvla.envs.workers.pool import EnvPool
from rlvla.utils.cli.flags import LARGEST, LARGEST_INTEGER, Parser, add_arguments, from_namespace, range_problems
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import ConfigError, Problem

COMMANDS = {
    module.__name__.removeprefix("cli."): module
    for module in (
        *(check_demos, check_env, collect_demos, convert_demos, draw_reward_machine, eval_vla, inspect_vla),
        *(export_policy, push_to_hub, replay_batch, score_episodes, train_ppo_vla, train_rm_vla, train_sft_vla),
        *(train_value_vla, compare_runs, dagger_vla, tune_sft_vla, view_data),
    )
}
OF_THE_LAUNCHER = {"local_rank"}
FRACTIONS = ("nan", "inf", "-inf", "1e-320", "-1e-320", "1e308", "-1e308", "9" * 20, "1e999", "9" * 5000)
INTEGERS = ("9" * 20, "-" + "9" * 20, "9" * 5000, "1e3", "nan", "0x10", "1.0")
NO_VALUES = ("", " ", "--", "\n", "1\n--quiet")
TEXTS = ("", " ", "\t", "\n", "a\nb", "a\0b", "\x1b[31m", "\udcff", "x" * 5000, "--")


def configs_of(command: ModuleType) -> dict[str, type]:
    """The dataclasses behind the flags of a command, options of suites included, by name."""
    parser = command.build_parser()
    found = [config for config, _ in parser.configs]
    flags = {action.dest for action in parser._actions}
    for suite in suite_names():
        options = get_suite(suite).options
        if options is not None and set(own_flags(options)) & flags:
            found.append(options)
    return {f"{config.__module__}.{config.__qualname__}": config for config in found}


CONFIGS = {name: config for command in COMMANDS.values() for name, config in configs_of(command).items()}


def kind_of(action: argparse.Action) -> str | None:
    """ "int", "float" or "str"; None for switches and for flags with a list of choices."""
    return None if action.choices or action.nargs == 0 else getattr(action.type, "__name__", None)


def flags_of(config: type) -> Iterator[tuple[Parser, argparse.Action]]:
    parser = Parser("test")
    add_arguments(parser, config, "flags")
    for action in parser._actions:
        if kind_of(action) and action.dest in {field.name for field in dataclasses.fields(config)}:
            yield parser, action


def problems(parser: Parser, config: type, flag: str, value: str, capsys: pytest.CaptureFixture) -> list[str]:
    """What is said about `--flag=value`; [] if it is accepted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parser, "value_problems", lambda self, namespace: [])
        try:
            parsed = from_namespace(config, parser.parse_args([f"--{flag}={value}"]))
        except SystemExit:
            *lines, _ = capsys.readouterr().err.splitlines()
            return lines
        except ConfigError as error:  # checked where it is made
            return [str(problem) for problem in error.problems]
    return [str(problem) for problem in range_problems(parsed) if problem.flag == flag]


@pytest.mark.parametrize("name", CONFIGS)
def test_absurd_values_are_refused_in_one_sentence(name: str, capsys: pytest.CaptureFixture) -> None:
    accepted, long_winded = [], []
    for parser, action in flags_of(CONFIGS[name]):
        values = {"int": INTEGERS, "float": FRACTIONS, "str": ()}[kind_of(action)]
        for value in (*values, *(TEXTS if kind_of(action) == "str" else NO_VALUES)):
            if action.nargs == 2 and value != "--":
                continue  # the number of values is what is refused
            said = problems(parser, CONFIGS[name], action.dest, value, capsys)
            if not said and "\n" not in value:
                accepted.append((action.dest, value))
            if len(said) > 1 or any(not line.isprintable() or len(line) > 700 for line in said):
                long_winded.append((action.dest, value[:20], said))
    lines = {"rm_formula", "formula"}  # several lines are fine there
    assert [(flag, value) for flag, value in accepted if flag not in lines or not value.strip()] == []
    assert long_winded == []


def owner_of(config: type, flag: str) -> type:
    """The dataclass with the flag: the configuration, or options of an entry of one of its registries."""
    fields = {field.name: field for field in dataclasses.fields(config)}
    if flag in fields:
        return config
    registries = [field.metadata["registry"] for field in fields.values() if "registry" in field.metadata]
    options = [registry.options(name) for registry in registries for name in registry.names()]
    return next(kind for kind in options if kind is not None and flag in kind.__dataclass_fields__)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_number_has_sensible_bounds(name: str) -> None:
    """The values at the ends are accepted, those just outside are not; waiting is for tenths of a second or more."""
    for _, action in flags_of(CONFIGS[name]):
        if kind_of(action) == "str" or action.dest in OF_THE_LAUNCHER:
            continue
        owner = owner_of(CONFIGS[name], action.dest)
        field, hints = owner.__dataclass_fields__[action.dest], typing.get_type_hints(owner)
        bounds, whole = field.metadata, kind_of(action) == "int"
        largest = LARGEST_INTEGER if whole else LARGEST
        least, most = bounds.get("minimum", bounds.get("above", -largest)), bounds.get("maximum", bounds.get("below"))
        most = largest if most is None else most
        assert math.isfinite(least) and math.isfinite(most) and least < most, action.dest
        if action.dest.endswith("timeout"):
            assert least >= 0.1 and most <= 100_000, action.dest
        several = "tuple" in str(hints[action.dest])
        for value, fine in ((least, "above" not in bounds), (most, "below" not in bounds), (least - 1, False)):
            config = owner()
            object.__setattr__(config, action.dest, (value,) if several else value)
            said = [problem for problem in range_problems(config) if problem.flag == action.dest]
            _, remedy = bounds.get("check", (None, None))  # of several values together
            said = [p for p in said if p.reason != "bounds_crossed" and (remedy is None or not p.text.endswith(remedy))]
            assert bool(said) != fine, (action.dest, value, said)
            assert all(isinstance(problem, Problem) and problem.reason == "out_of_range" for problem in said)


class Started(Exception):
    """The configuration was accepted, and the command went on to work."""


@pytest.fixture
def command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> typing.Callable:
    """Runs a command in an empty folder; True if it was accepted, False if it was refused in words."""

    def start(*_: object, **__: object) -> None:
        raise Started

    monkeypatch.setattr(EnvPool, "__init__", start)
    monkeypatch.setattr(DeepspeedStrategy, "__init__", start)
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.chdir(tmp_path)

    def run(command: ModuleType, *words: str) -> bool:
        try:
            command.main(list(words))
        except Started:
            return True
        except SystemExit as stop:
            status = stop.code
        else:
            return True
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err and status, (words, status)
        return False

    return run


def extremes(action: argparse.Action, config: type) -> Iterator[str]:
    """Values at the ends of what a flag accepts, and some of what it does not."""
    if kind_of(action) == "str":
        yield from ("\n", "x" * 300, "/dev/null/x", "none", "-")
        return
    (field,) = [f for f in dataclasses.fields(config) if f.name == action.dest]
    largest = str(LARGEST_INTEGER if kind_of(action) == "int" else LARGEST)
    bounds = field.metadata
    yield str(bounds.get("minimum", bounds.get("above", f"-{largest}")))
    yield str(bounds.get("maximum", bounds.get("below", largest)))
    yield from ("-1", "0", "nan" if kind_of(action) == "float" else "9" * 20, "--")


# As long as all others together; those with the flags of train_sft_vla.py; and the next one.
LONGEST = {"train_ppo_vla", "dagger_vla", "recap_vla", "tune_sft_vla", "eval_vla"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in LONGEST else name for name in COMMANDS]
)
def test_the_ends_of_every_range_give_no_traceback(name: str, command_line: typing.Callable) -> None:
    command, failures = COMMANDS[name], {}
    known = {action.dest for action in command.build_parser()._actions}
    for config in configs_of(command).values():
        for _, action in flags_of(config):
            for value in extremes(action, config) if action.dest in known else ():
                words = [f"--{action.dest}", value, value] if action.nargs == 2 else [f"--{action.dest}={value}"]
                try:
                    command_line(command, *words)
                except BaseException as error:
                    failures[" ".join(words)[:100]] = f"{type(error).__name__}: {error}"[:200]
    assert failures == {}


def test_one_bad_value_per_command(command_line: typing.Callable) -> None:
    for name, command in COMMANDS.items():
        flag = next(a for a in command.build_parser()._actions if kind_of(a) == "str" and a.option_strings)
        assert not command_line(command, f"{flag.option_strings[0]}=\n"), name
        assert not command_line(command, f"{flag.option_strings[0]}=--"), name
