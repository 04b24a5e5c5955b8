"""Committed records of benchmarks, and the tables in the documentation that are made from them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.replay_priorities import BUDGET, load, rows

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks/results/replay_priorities"
CASES = {  # row of the benchmark -> how the documentation calls it
    "uniform": "`uniform`",
    "td": "`td`",
    "machine": "`vlm`, scored by the reward machine",
    "reward model": "`vlm`, scored by a reward model",
    "additive": "`hybrid`, scored by the reward machine",
    "additive, mixed": "`hybrid`, `--replay_share 0 0.5`, scored by the reward machine",
    "product": "`hybrid`, `product`, scored by the reward machine",
    "no validators": "`uniform`, `--no-rm_validation`",
}


@pytest.fixture(scope="module")
def found() -> dict:
    return load(RECORDS, BUDGET)  # refuses records of other settings than today's


def numbers(cells: str) -> list[float]:
    return [float(text) for text in re.findall(r"[+-]?\d+(?:\.\d+)?", cells)]


def test_every_record_is_whole(found: dict) -> None:
    records = [record for of_seed in found.values() for record in of_seed.values()]
    assert len(records) == len(list(RECORDS.glob("*.json"))) > 0
    for record in records:
        assert len(record["env_steps"]) == len(record["success_at_end"]) == 128
        assert record["end"]["success_at_end"]["rate"] <= record["end"]["success_once"]["rate"]


def test_the_documentation_shows_the_records(found: dict) -> None:
    page = (ROOT / "docs/what_did_not_help.md").read_text()
    table = rows(found)
    assert {row[0] for row in table} == CASES.keys(), "a row without a name here: add it and the documentation's line"
    for name, seeds, area, end, once, lost, difference, p in table:
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {CASES[name]} |"))
        of_seeds, *cells = line.removeprefix(f"| {CASES[name]} |").strip(" |").split("|")
        low, high = map(int, of_seeds.strip().split(" to "))
        assert high - low + 1 == int(seeds)
        shown = [numbers(cell) for cell in cells]
        assert shown[:4] == [numbers(area), numbers(end), numbers(once), numbers(lost)]
        if difference:
            assert shown[4:] == [numbers(difference), [round(float(p), 2)]]
