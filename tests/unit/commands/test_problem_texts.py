"""Every problem that a command's check names has a text, and every text is used."""

from __future__ import annotations

import ast
import string
from pathlib import Path

import pytest

from rlvla.commands import problem_texts
from rlvla.commands.problem_texts import problem, unread
from rlvla.utils.errors import ConfigError, Problem

ROOT = Path(problem_texts.__file__).resolve().parents[2]
CHECKS = sorted(path for room in ("rlvla/commands", "rlvla/recipes", "cli") for path in ROOT.glob(f"{room}/**/*.py"))
TEXTS, PHRASES = problem_texts._TEXTS, problem_texts._UNREAD


def constants(name: str) -> list[list[object]]:
    """The constant arguments of all calls of a function in the commands; None stands for one that is no constant."""
    calls = [node for path in CHECKS for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    own = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == name]
    return [[arg.value if isinstance(arg, ast.Constant) else ... for arg in call.args] for call in own]


def test_every_reason_has_a_text() -> None:
    calls = constants("problem")
    assert len(calls) > 40
    for flag, reason in calls:
        known = [key for key in TEXTS if reason is ... or (key[1] == reason and key[0] in (flag, None))]
        assert known or flag is ..., (flag, reason)


def test_every_text_is_used() -> None:
    others = [path for path in CHECKS if path.name != "problem_texts.py"]
    nodes = [node for path in others for node in ast.walk(ast.parse(path.read_text()))]
    words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert not {reason for _, reason in TEXTS} - words - {"no_effect"}  # that is `unread`'s
    assert not {flag for flag, _ in TEXTS if flag} - words
    assert not set(PHRASES) - words


def test_a_text_has_the_flag_and_the_values() -> None:
    found = problem("num_episodes", "too_few", value=3, episodes=64)
    assert found == Problem("num_episodes", "too_few", "--num_episodes 3 is less than one iteration of 64 episodes")
    with pytest.raises(KeyError):
        problem("num_episodes", "too_few", value=3)
    with pytest.raises(KeyError):
        problem("num_episodes", "no_such_reason")
    assert "there is no --ptx_coef" in unread("ptx_batch_size", "--ptx_batch_size 3", "missing", switch="ptx_coef")
    for text in (*TEXTS.values(), *PHRASES.values()):
        assert all(name != "" for _, name, _, _ in string.Formatter().parse(text) if name is not None), text


def test_a_problem_of_another_flag() -> None:
    own = Problem("demos", "cameras", "two cameras")
    assert own.of_flag("ptx_demos", "a.hdf5") == Problem("ptx_demos", "cameras", "--ptx_demos a.hdf5: two cameras")
    assert own.prefixed("Lift: ") == Problem("demos", "cameras", "Lift: two cameras")
    error = ConfigError([own, "in words"])
    assert str(error) == "two cameras\nin words" and error.problems[1] == Problem(None, "", "in words")
    assert ConfigError.of("seed", "too_few", "text").problems == [Problem("seed", "too_few", "text")]
