"""`--help` alone, of everything, and of a group."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, make_dataclass

import pytest

from rlvla.utils.cli.flags import Parser, add_arguments, arg, from_namespace
from rlvla.utils.cli.help import SHORT

CHOICES = tuple(f"choice_{i}" for i in range(12))


@dataclass(frozen=True)
class Oven:
    heat: float = arg(200.0, "temperature in degrees", essential=True, aliases=("temperature", "oven_heat"))
    fan: bool = arg(False, "with the fan, 50 % of the time", aliases=("use_fan",))
    rack: str = arg("choice_0", "where it stands", choices=CHOICES)
    yeast: int = arg(7, "grams of it", of=("dough", "bread"))
    butter: int = arg(100, "grams of it", of=("dough", "cake", "tart"))


Many = make_dataclass(
    "Many", [(f"knob_{i}", int, field(default=i, metadata={"help": "a knob"})) for i in range(SHORT)], frozen=True
)


def parser_of(*kinds: type, description: str = "Bakes.") -> Parser:
    parser = Parser(description)
    for kind in kinds:
        add_arguments(parser, kind, kind.__name__.lower())
    return parser


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")


def helped(capsys: pytest.CaptureFixture, parser: Parser, *topic: str) -> str:
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--help", *topic])
    out, err = capsys.readouterr()
    assert (stop.value.code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 60
    return out


def test_a_command_with_many_flags_shows_those_that_matter(capsys: pytest.CaptureFixture) -> None:
    text = helped(capsys, parser_of(Oven, Many))
    assert text.startswith("usage: ") and "\n\nBakes.\n\noven:\n  --heat FLOAT " in text
    assert "--fan" not in text and "knob_3" not in text and "also" not in text
    number = len(parser_of(Oven, Many).flags) - 2  # --heat, --config
    assert f"\n{number} more flags: --help all, --help FLAG, or --help GROUP" in text
    assert text.endswith("  oven; dough (bread, cake, tart); many; terminal and\n  configuration file\n")


def test_a_command_with_few_flags_shows_all(capsys: pytest.CaptureFixture) -> None:
    text = helped(capsys, parser_of(Oven))
    assert text == helped(capsys, parser_of(Oven), "all") == parser_of(Oven).format_help()
    assert "\n  --fan, --no-fan       with the fan, 50 % of the time\n" in text
    assert "(default: 200.0) (also --temperature, --oven_heat)" in " ".join(text.split())
    assert "--no-use_fan" not in text
    assert text.index("\noven:\n") < text.index("\ndough bread:\n") < text.index("\ndoughs cake, tart:\n")
    assert text.index("\ndough bread:\n") < text.index("\nterminal and configuration file:\n")


def test_choices_are_broken_between_lines(capsys: pytest.CaptureFixture) -> None:
    lines = helped(capsys, parser_of(Oven), "rack").splitlines()
    assert lines[0] == "oven:" and lines[1].startswith("  --rack {choice_0,") and lines[2].startswith("      choice_")
    assert "".join(line.strip() for line in lines[1:4]).startswith("--rack {" + ",".join(CHOICES) + "}")


@pytest.mark.parametrize(
    ("topic", "flags"),
    [
        ("bread", {"yeast"}),
        ("dough", {"yeast", "butter"}),
        ("tart", {"butter"}),
        ("DOUGH bread", {"yeast"}),
        ("oven", {"heat", "fan", "rack"}),
        ("butter", {"butter"}),  # a flag
        ("--fan", {"fan"}),
        ("temperature", {"heat"}),  # its second name
    ],
)
def test_a_topic_is_a_group_or_a_flag(topic: str, flags: set[str], capsys: pytest.CaptureFixture) -> None:
    topic_words = topic.split() if not topic.startswith("--") else [topic[2:]]
    text = helped(capsys, parser_of(Oven, Many), *topic_words)
    shown = {word.strip("-,") for word in text.split() if word.startswith("--")}
    assert shown & set(Oven.__annotations__) == flags


def test_an_unknown_topic_names_the_nearest(capsys: pytest.CaptureFixture) -> None:
    for topic, words in (("yaest", "did you mean yeast?"), ("zzz", "groups: oven; dough (bread, cake, tart);")):
        with pytest.raises(SystemExit) as stop:
            parser_of(Oven).parse_args(["--help", topic])
        assert stop.value.code == 2 and words in capsys.readouterr().err


def test_second_names_are_the_same_flag() -> None:
    parse = parser_of(Oven).parse_args
    assert from_namespace(Oven, parse(["--temperature", "180", "--use_fan"])) == Oven(heat=180.0, fan=True)
    assert from_namespace(Oven, parse(["--use_fan", "--no-use_fan"])) == Oven()


def test_a_second_name_gives_way_to_a_flag(capsys: pytest.CaptureFixture) -> None:
    parser = parser_of(Oven)
    for name in ("use_fan", "temperature", "heat"):
        parser.give_up_alias(f"--{name}")
    parser.add_argument("--use_fan", type=int)
    parsed = parser.parse_args(["--use_fan", "3"])
    assert (parsed.use_fan, parsed.fan, parsed.heat) == (3, False, 200.0)
    with pytest.raises(SystemExit):
        parser.parse_args(["--temperature", "3"])
    assert "unknown flag --temperature" in capsys.readouterr().err
    assert parser.parse_args(["--heat", "3"]).heat == 3.0, "which is no second name"


def test_commands_are_folded_before_flags_and_named_as_installed(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    description = "Bakes.\n\nExample:\n  python cli/new_env.py --heat 200 --rack choice_1 --yeast 8 --butter 9\n"
    folded = "Example:\n  python cli/new_env.py --heat 200 --rack choice_1 \\\n    --yeast 8 --butter 9\n"
    assert folded in helped(capsys, parser_of(Oven, description=description))
    monkeypatch.setattr(sys, "argv", ["/usr/bin/rlvla-new-env"])
    assert "Example:\n  rlvla-new-env --heat 200" in helped(capsys, parser_of(Oven, description=description))


def test_a_terminal_too_narrow_for_help_is_overrun(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    text = helped(capsys, parser_of(Oven), "all")
    assert "--heat" in text and 20 < max(map(len, text.splitlines())) <= 40


def test_version(capsys: pytest.CaptureFixture) -> None:
    from rlvla import __version__

    with pytest.raises(SystemExit) as stop:
        parser_of(Oven).parse_args(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, f"rlvla {__version__}\n")
