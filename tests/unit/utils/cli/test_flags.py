"""Dataclasses as flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from rlvla.utils.cli.flags import Parser, add_arguments, arg, fail, from_namespace, range_problems
from rlvla.utils.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    rate: float = arg(1e-3, "a rate in 1/s", above=0, maximum=2)
    share: float | None = arg(None, "a share (default: none)", minimum=0, below=1)
    names: tuple[str, ...] = arg(("a",), "names of 50 % of things")
    pair: tuple[float, ...] = arg((0.5, 0.75), "two numbers", nargs=2, minimum=0)
    fast: bool = arg(True, "be fast")
    careful: bool | None = arg(None, "be careful (default: as it comes)")
    kind: str = arg("x", "a kind", choices=("x", "y"))
    shape: str | None = arg(None, "a shape (default: any)", choices=("round", "square"))
    place: str | None = arg(None, "a place (default: nowhere)", metavar="DIR")


def parse(*argv: str) -> Settings:
    parser = Parser("what it does")
    add_arguments(parser, Settings, "settings")
    return from_namespace(Settings, parser.parse_args(argv))


def test_defaults_are_those_of_the_dataclass() -> None:
    assert parse() == Settings()


def test_every_kind_of_value() -> None:
    got = parse("--rate", "-1e-3", "--share", ".5", "--names", "b", "c", "--pair", "1", "2", "--no-fast", "--careful")
    assert got == Settings(-1e-3, 0.5, ("b", "c"), (1.0, 2.0), False, True, "x")
    assert parse("--names").names == ()


@pytest.mark.parametrize(
    "argv", [("--kind", "z"), ("--pair", "1"), ("--rate", "fast"), ("--ratee", "1"), ("stray",), ("--rat", "1")]
)
def test_mistakes_exit_with_status_two(argv: tuple[str, ...], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert "usage" not in err and len(err.splitlines()) == 2


def test_all_mistyped_flags_at_once(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        parse("--ratee", "1", "--knd=y", "--zzz")
    err = capsys.readouterr().err
    assert "--ratee; did you mean --rate?" in err and "--knd=y; did you mean --kind?" in err and "--zzz" in err


def told(capsys: pytest.CaptureFixture, *argv: str) -> list[str]:
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    assert stop.value.code == 2
    *problems, hint = capsys.readouterr().err.splitlines()
    assert hint == "(run with --help for the flags)"
    return [problem.partition("error: ")[2] or problem.strip() for problem in problems]


def test_a_mistyped_flag_hides_no_other_mistake(capsys: pytest.CaptureFixture) -> None:
    argv = ("--ratee", "1", "--kind", "z", "--share", "-1", "--pair", "1", "--fast", "on", "--careful", "stray")
    assert told(capsys, *argv) == [
        "unknown flag --ratee; did you mean --rate?",
        "--kind: invalid choice: 'z' (choose from 'x', 'y')",
        "--pair: expected 2 arguments",
        "--fast: unexpected value(s): on",
        "--careful: unexpected value(s): stray",
        "--share -1.0: must be at least 0",
    ]
    assert told(capsys, "first", "--names", "-", "-1", "a b") == ["unexpected value(s): first"]
    assert told(capsys, "-r", "1", "--rate") == [
        "unknown flag -r; did you mean --rate?",
        "--rate: expected one argument",
    ]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--ra", "--rate"),  # begins with it
        ("--car", "--careful"),
        ("--hare", "--share"),  # holds it
        ("--knid", "--kind"),  # looks like it
        ("--no-car", "--no-careful"),
        ("--s", "--share or --shape"),
        ("--n", "--names"),
        ("--f", "--fast"),
        ("--qq", None),
    ],
)
def test_what_is_suggested(typed: str, meant: str | None, capsys: pytest.CaptureFixture) -> None:
    (problem,) = told(capsys, typed, "1")
    assert problem == f"unknown flag {typed}" + (f"; did you mean {meant}?" if meant else "")


def test_a_policy_without_its_flag_is_told_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    @dataclass(frozen=True)
    class Policy:
        pretrain: str = arg("x", "policy")

    parser = Parser("what it does")
    add_arguments(parser, Policy, "settings")
    (tmp_path / "run/policy").mkdir(parents=True)
    (tmp_path / "run/policy/config.json").write_text("{}")
    for given, told_flag in ((tmp_path / "run", True), (tmp_path / "run/policy", True), (tmp_path, False)):
        with pytest.raises(SystemExit):
            parser.parse_args([str(given)])
        told_of = f"unexpected value(s): {given}" + (f"; did you mean --pretrain {given}?" if told_flag else "")
        assert told_of in capsys.readouterr().err.splitlines()[0]


def test_none_takes_a_value_back() -> None:
    assert parse("--share", "0.5", "--share", "none").share is None
    assert parse("--place", "a", "--place", "none").place is None
    assert parse("--shape", "round", "--shape", "none") == Settings()
    parser = Parser("what it does")
    add_arguments(parser, Settings, "settings")
    assert "--shape {round,square}\n" in parser.format_help()


def test_none_is_no_value_where_there_is_a_default(capsys: pytest.CaptureFixture) -> None:
    assert told(capsys, "--rate", "none") == ["--rate: invalid float value: 'none'"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(rate=0.0), "--rate 0.0: must be greater than 0"),
        (Settings(rate=2.5), "at most 2"),
        (Settings(rate=float("nan")), "finite"),
        (Settings(share=1.0), "less than 1"),
        (Settings(share=-0.5), "at least 0"),
        (Settings(pair=(0.5, -1.0)), "--pair -1.0"),
        (Settings(pair=(0.5, float("inf"))), "finite"),
    ],
)
def test_ranges(settings: Settings, words: str) -> None:
    problems = range_problems(settings)
    assert len(problems) == 1 and words in problems[0]


def test_range_ends_and_missing_values_are_fine() -> None:
    assert range_problems(Settings(rate=2.0, share=0.0)) == []
    assert range_problems(Settings(share=None)) == []


@pytest.mark.parametrize(
    ("local_rank", "one_rank", "told"), [("0", False, True), ("1", False, False), ("1", True, True)]
)
def test_what_every_rank_found_is_told_once_per_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, local_rank: str, one_rank: bool, told: bool
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit, match="2"):
        fail("train", ConfigError("--gamma 2: must be at most 1", one_rank=one_rank))
    assert ("--gamma 2" in capsys.readouterr().err) == told


def test_a_mistyped_flag_is_told_once_per_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit, match="2"):
        Parser("x").parse_args(["--gama", "1"])
    assert capsys.readouterr().err == ""


@dataclass(frozen=True)
class Resuming:
    again: bool | str = arg(False, "go on, or from a place", value="NAME")


def resuming(*argv: str) -> bool | str:
    parser = Parser("what it does")
    add_arguments(parser, Resuming, "resuming")
    return from_namespace(Resuming, parser.parse_args(argv)).again


def test_a_switch_that_may_have_a_value() -> None:
    assert [resuming(), resuming("--again"), resuming("--again", "--no-again")] == [False, True, False]
    assert [resuming("--again", "there"), resuming("--again=there")] == ["there"] * 2
    assert resuming("--again", "there", "--again") is True, "the last one wins"


def test_a_switch_that_is_off_has_no_value(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        resuming("--no-again", "there")
    assert "takes no value" in capsys.readouterr().err
