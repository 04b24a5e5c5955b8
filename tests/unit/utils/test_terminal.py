"""What a person sees."""

from __future__ import annotations

import fcntl
import io
import json
import pty
import re
import struct
import sys
import termios
from pathlib import Path

import pytest

from rlvla.utils.errors import MissingExtraError, require
from rlvla.utils.files import METRICS_FILE, open_lines, read_metrics
from rlvla.utils.terminal import (
    IN_RECIPE,
    columns,
    duration,
    fit,
    fold_command,
    header,
    log,
    markdown_table,
    markdown_text,
    one_line,
    passing_note,
    set_output,
    style,
    suggest,
    table,
)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (95.2, "1m35s"), (3599.9, "1h00m"), (7384, "2h03m")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_table_aligns_numbers_to_the_right_and_words_to_the_left() -> None:
    lines = table(("task", "n"), [("reach", 5), ("x", 1000)]).splitlines()
    assert lines == ["task      n", "-----  ----", "reach     5", "x      1000"]
    assert table(("a", "b"), []).splitlines() == ["a  b", "-  -"]


def test_a_torn_line_of_metrics_costs_itself_only(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    for step in (2, 3):
        with open_lines(path) as file:
            file.write(json.dumps({"step": step, "loss": 0.1 * step}) + "\n")
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]
    assert len(path.read_text().splitlines()) == 4
    with open_lines(tmp_path / "new") as file:
        file.write("first\n")
    assert (tmp_path / "new").read_text() == "first\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_note_passes_on_a_terminal_of_the_first_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")

    def shown(rank: str, stream: io.StringIO) -> str:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(ValueError), passing_note("loading"):
            raise ValueError
        return stream.getvalue()

    assert shown("0", Terminal()) == "\rloading ...\r\x1b[K"
    assert shown("1", Terminal()) == "" == shown("0", io.StringIO())
    monkeypatch.setenv("COLUMNS", "4")
    assert shown("0", Terminal()).endswith("\x1b[K")
    monkeypatch.setenv("TERM", "dumb")
    assert shown("0", Terminal()) == "", "which cannot clear a line"


def test_a_note_stays_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with passing_note("loading a policy from runs/ppo/policy"):
        assert sys.stderr.getvalue() == "\rloading a policy from ..."


def test_only_a_terminal_that_wants_colors_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert style("x", "bold", Terminal()) == "\x1b[1mx\x1b[0m"
    assert style("x", "bold", io.StringIO()) == "x"
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as context:
            context.setenv(name, value)
            assert style("x", "bold", Terminal()) == "x"
    monkeypatch.setenv("NO_COLOR", "")  # which is as good as none
    assert style("x", "red", Terminal()) == "\x1b[31mx\x1b[0m"


LINE = "iteration 1/4: success 0.09, signal 0.09 (rollout 2.1 s, update 0.9 s; 20s left)"
COMMAND = "next: python cli/eval_vla.py --pretrain runs/toy/ppo/policy --report runs/toy/ppo/report"
ROW = "        0  40       7.5% [2.6, 19.9]    17.5% [8.7, 31.9]   11.8"


def test_lines_are_broken_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "38")
    text = "\n".join([LINE, COMMAND, ROW, "  folder  a place with a very long description of it"])
    assert fit(text, io.StringIO()) == text
    assert fit(text, Terminal()).splitlines() == [
        "iteration 1/4: success 0.09,",  # "signal" would fit, but not with its figure
        "  signal 0.09 (rollout 2.1 s,",  # nor "update"
        "  update 0.9 s; 20s left)",
        "next: python cli/eval_vla.py \\",
        "  --pretrain runs/toy/ppo/policy \\",
        "  --report runs/toy/ppo/report",
        ROW,
        "  folder  a place with a very long",
        "          description of it",
    ]
    assert fit("x" * 90, Terminal()) == "x" * 90, "a path is not broken"


def test_the_width_is_that_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert columns(io.StringIO()) == 80
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 47, 0, 0))
    with open(slave, "w") as stream, open(master, "rb", buffering=0):
        assert columns(stream) == 47
        monkeypatch.setenv("COLUMNS", "60")
        assert columns(stream) == 60


def test_commands_are_folded_before_flags() -> None:
    assert fold_command("  python x.py --a 1 --b 2 3", 80) == ["  python x.py --a 1 --b 2 3"]
    assert fold_command("  python x.py --a 1 --b 2 3", 24) == ["  python x.py --a 1 \\", "    --b 2 3"]
    quoted = """python x.py --a 'one --two "three --four' --b "it's --five" --c"""
    assert fold_command(quoted, 10) == [
        "python x.py \\",
        """  --a 'one --two "three --four' \\""",
        """  --b "it's --five" \\""",
        "  --c",
    ]
    assert fold_command("echo it's --a --b 1", 14) == ["echo it's \\", "  --a --b 1"], "an apostrophe is no quote"


def test_what_comes_next_is_shown_except_within_a_recipe(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    suggest("python cli/eval_vla.py --pretrain x")
    assert capsys.readouterr().out == "next: python cli/eval_vla.py --pretrain x\n"
    monkeypatch.setenv(IN_RECIPE, "1")
    suggest("python cli/eval_vla.py --pretrain x")
    assert capsys.readouterr().out == ""


def test_header_aligns_its_facts() -> None:
    assert header("run", {"a": "1", "name": "x"}) == "run\n  a     1\n  name  x"


def test_require_names_module_and_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"no_such_module.*rlvla\[robosuite\]"):
        require("no_such_module", extra="robosuite")
    assert require("json", extra="x").dumps([]) == "[]"


def test_levels_of_messages(capsys: pytest.CaptureFixture) -> None:
    def said() -> tuple[str, str]:
        log.debug("detail")
        log.info("line")
        log.warning("mind")
        out, err = capsys.readouterr()
        return out, err

    assert said() == ("line\n", "warning: mind\n")
    set_output("debug")
    assert said() == ("detail\nline\n", "warning: mind\n")
    set_output("error")
    assert said() == ("", "")
    set_output(quiet=True)
    assert said() == ("", "warning: mind\n")


NASTY = [
    "a|b",
    "`code` and ``more``",
    "<script>alert(1)</script>",
    "two\nlines\r\n\u2028of | text",
    "[link](javascript:alert(1)) ![image](http://x) [a][b] [c]: d",
    "*bold* _italic_ __init__ ~~gone~~ $x$ \\ back&amp;",
    "\udcff\x00\x1b[31m",
]


@pytest.mark.parametrize("name", NASTY)
def test_names_add_nothing_to_markdown(name: str) -> None:
    text = markdown_text(name)
    assert len(text.splitlines()) == 1 and "<" not in text and ">" not in text
    text.encode()
    assert markdown_table((name, "n"), [(name, 1)]).count("\n") == 2
    for line in markdown_table((name, "n"), [(name, 1)]).splitlines():
        assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 3, line


@pytest.mark.parametrize("name", NASTY)
def test_a_markdown_reader_sees_the_name_itself(name: str) -> None:
    reader = pytest.importorskip("markdown_it").MarkdownIt("commonmark", {"html": True}).enable("table")
    heading, inline, *_ = reader.parse(f"## {markdown_text(name)}")
    kinds = {child.type for child in inline.children}
    assert heading.type == "heading_open" and kinds <= {"text", "text_special"}, kinds
    assert "".join(child.content for child in inline.children).split() == one_line(name).split()


def test_plain_words_and_figures_stay_as_they_are() -> None:
    for text in ("libero_spatial", "95.0% [91.0, 98.0]", "success at end [95 %]", "runs/a-b/policy (greedy)", "-0.5"):
        assert markdown_text(text) == text


def test_markdown_table() -> None:
    assert markdown_table(("a", "b"), [(1, "x|y")]) == "| a | b |\n| --- | --- |\n| 1 | x\\|y |"
