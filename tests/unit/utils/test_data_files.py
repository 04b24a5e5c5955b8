"""Damaged JSON and YAML: one sentence that names the file, whatever is wrong."""

from __future__ import annotations

import json
import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlvla.utils.data_files import (
    check_types,
    fits,
    inside,
    parse_json,
    parse_yaml,
    read_json,
    read_settings,
    read_yaml,
)
from rlvla.utils.errors import ConfigError

DEEP = 100_000
DAMAGED = {
    "nothing": b"",
    "half": b'{"a": ',
    "a list": b"[1]",
    "a number": b"3",
    "null": b"null",
    "twice": b'{"a": 1, "a": 2}',
    "twice inside": b'{"b": [{"a": 1, "a": 2}]}',
    "NaN": b'{"a": NaN}',
    "infinity": b'{"a": [-Infinity]}',
    "too large": b'{"a": 1e999}',
    "nested lists": b'{"a": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "nested objects": b'{"a": ' * DEEP + b"1" + b"}" * DEEP,
    "a long number": b'{"a": ' + b"9" * 5000 + b"}",
    "not UTF-8": b'{"a": "\xff"}',
    "binary": bytes(range(256)),
    "with a mark": b"\xef\xbb\xbf{}",
}


def the_sentence(error: ConfigError, file: Path) -> None:
    (problem,) = error.problems
    assert problem.reason in ("invalid_file", "missing_file")
    assert str(file) in problem and "\n" not in problem.text and len(problem.text) < len(str(file)) + 300


@pytest.mark.parametrize("damage", DAMAGED)
def test_json_is_named_with_what_is_wrong(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(DAMAGED[damage])
    with pytest.raises(ConfigError) as refused:
        read_json(file)
    the_sentence(refused.value, file)


@pytest.mark.parametrize(
    "content",
    [b"a: [", b"a: 1\na: 2\n", b"b:\n  a: 1\n  a: 2\n", b"[" * 5000 + b"]" * 5000, b"\xff\xfe\xff", b"? [1]\n: 2\n? {}",
     b"a: !!python/object/apply:os.system ['true']", b"a: *none", b"&a [*a]", b"{? [1] : 2}", b"? {a: 1}\n: 2"],
)  # fmt: skip
def test_yaml_is_named_with_what_is_wrong(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_yaml(file)
    the_sentence(refused.value, file)


@pytest.mark.parametrize("end", ["last: *l30", "? *l30\n: 1"])
def test_a_yaml_bomb_is_refused_before_it_is_expanded(tmp_path: Path, end: str) -> None:
    file = tmp_path / "run.yaml"
    levels = "\n".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 2)}]" for n in range(1, 31))
    file.write_text(f"l0: &l0 [word]\n{levels}\n{end}\n")
    assert file.stat().st_size < 1000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError) as refused:
        read_yaml(file)
    the_sentence(refused.value, file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kilobytes"


NUMBER = "9" * 100_000
OVERSIZED_YAML = {
    "digits": (f"seed: {NUMBER}", "100,000 digits"),
    "base 60": ("seed: " + "1:" * 50_000 + "1", "100,001 digits"),
    "fraction": (f"seed: 0.{NUMBER}", "digits"),
    "key": (f"? {NUMBER}\n: 1", "100,000 digits"),
    "itself": ("a: &a [*a]", "the alias 'a' refers to a list or mapping that holds it"),
    "merged into itself": ("a: &a {<<: *a}", "the alias 'a' refers to"),
    "merges": ("a: &a {x: 1}\nb: {<<: [" + "*a," * 60_000 + "]}", "more than 50,000 values"),
    "megabytes": ("\n".join(f"k{i}: {i}" for i in range(600_000)), "bytes, more than 1,048,576"),
    "comment": ("#" * 8_000_000, "bytes, more than 1,048,576"),
    "values": ("a: [" + "1," * 500_000 + "]", "more than 50,000 values"),
    "deep flow": ("{a: " * 200_000, "nested too deeply"),
    "deep block": ("- " * 500_000, "nested too deeply"),
    "twice": ("\n".join(f"k{i}: 1" for i in range(20_000)) + "\nk19999: 2", "'k19999' is named twice"),
}


@pytest.mark.parametrize("name", OVERSIZED_YAML)
def test_oversized_yaml_is_refused_at_once(tmp_path: Path, name: str) -> None:
    text, reason = OVERSIZED_YAML[name]
    file = tmp_path / "run.yaml"
    file.write_text(text)
    began = time.process_time()
    with pytest.raises(ConfigError) as refused:
        read_yaml(file)
    assert time.process_time() - began < 2, "seconds, of which a busy machine may need more than one"
    the_sentence(refused.value, file)
    assert reason in refused.value.problems[0]
    if len(text) < 1_000_000:
        with pytest.raises(ConfigError, match=re.escape(reason)):
            parse_yaml(text, "--set")


def test_files_of_settings_have_few_keys(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("\n".join(f"k{i}: {i}" for i in range(1001)))
    with pytest.raises(ConfigError, match="1,001 keys, more than 1,000"):
        read_settings(file)


def test_yaml_is_read_alike_without_libyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("a: &a {x: 1, y: [1.5, on]}\nb: {<<: *a, x: 2}\n")
    fast = read_settings(file)
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    assert read_settings(file) == fast
    assert fast[0]["b"] == {"x": 2, "y": [1.5, True]} and fast[1][("b", "y")] == 1


def test_aliases_may_be_used(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("a: &a {x: 1}\nb: *a\nc: [*a, *a]\n? &k word\n: 1\nd: *k\n")
    assert read_yaml(file) == {"a": {"x": 1}, "b": {"x": 1}, "c": [{"x": 1}] * 2, "word": 1, "d": "word"}


def test_missing_files_and_folders(tmp_path: Path) -> None:
    for read in (read_json, read_yaml):
        for file in (tmp_path / "none", tmp_path, tmp_path / "none" / "x"):
            with pytest.raises(ConfigError) as refused:
                read(file)
            the_sentence(refused.value, file)


def test_measurements_may_be_nan(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": NaN, "b": Infinity}')
    assert str(read_json(tmp_path / "a.json", allow_nan=True)) == "{'a': nan, 'b': inf}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON))
def test_whatever_is_valid_is_read(content: dict[str, Any]) -> None:
    assert parse_json(json.dumps(content), "here") == content


@given(st.binary(max_size=60))
def test_whatever_is_not_is_one_problem(content: bytes) -> None:
    problems = []
    try:
        parse_json(content, "here")
    except ConfigError as error:
        problems = error.problems
    assert len(problems) <= 1 and all("here" in problem for problem in problems)


@pytest.mark.parametrize(
    ("value", "hint", "does"),
    [(1, int, True), (True, int, False), (1.0, int, False), (1, float, True), (float("nan"), float, False),
     (10**400, float, False),
     ("a", str, True), (None, str | None, True), (None, str, False), ([1, 2], tuple[int, ...], True),
     ([1, "a"], list[int], False), ("ab", tuple[str, ...], False), ({"a": {}}, dict[str, dict], True),
     ({"a": 1}, dict[str, dict], False), ([], dict, False), (3, Any, True), (True, bool, True), (0, bool, False)],
)  # fmt: skip
def test_types_of_entries(value: Any, hint: Any, does: bool) -> None:
    assert fits(value, hint) == does


@given(JSON, st.sampled_from([int, float, str, bool, dict[str, int], tuple[str, ...], list[float] | None]))
def test_no_value_breaks_the_check(value: Any, hint: Any) -> None:
    assert isinstance(fits(value, hint), bool)


def test_all_entries_of_the_wrong_type_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        check_types({"a": "x" * 1000, "b": [1], "c": 3}, {"a": int, "b": str | None, "c": int, "d": int}, "file.json")
    assert len(refused.value.problems) == 2 and all(len(p.text) < 120 for p in refused.value.problems)


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../a", "a/../../b", "a\0b", None, 3, "..", ["a"]])
def test_names_stay_in_their_folder(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ValueError, match="is not the name of a file in"):
        inside(tmp_path, name)
    assert inside(tmp_path, "a/b.pt") == tmp_path / "a/b.pt"
