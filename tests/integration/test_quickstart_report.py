"""What the quickstart says at its end."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from rlvla.envs import list_tasks
from rlvla.envs.config import SplitConfig
from rlvla.evaluation.findings import PolicyEvaluation
from rlvla.evaluation.protocol import describe_protocol
from rlvla.evaluation.results import EpisodeOutcome, summarize
from rlvla.evaluation.statistics import tango_interval

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "scripts" / "quickstart_report.py"
TASK = list_tasks("toy_reach")[0]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart_report", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def finished(folder: Path, sft: list[bool], rl: list[bool]) -> Path:
    """A folder in which all stages have run."""
    (folder / "ppo").mkdir(parents=True)
    for name, successes in (("sft", sft), ("rl", rl)):
        outcomes = [EpisodeOutcome(0, state, success, success, 5) for state, success in enumerate(successes)]
        protocols = {
            mode: describe_protocol([TASK], SplitConfig(), len(sft), 0, temperature)
            for mode, temperature in (("greedy", None), ("sampled", 1.0))
        }
        results = [summarize(outcomes, [TASK], "heldout", greedy) for greedy in (True, False)]
        evaluation = PolicyEvaluation(name, {}, protocols, results)
        (folder / f"eval_{name}.json").write_text(json.dumps(evaluation.as_dict()))
    (folder / "ppo" / "totals.json").write_text('{"env_steps": 640, "episodes": 128}')
    (folder / "seconds.txt").write_text("sft 2.0\neval_sft 1.0\nrl/interrupted 3.0\nrl 4.0\neval_rl 1.5\n")
    return folder


def test_the_gain_is_that_of_pairs(script: ModuleType, tmp_path: Path) -> None:
    # 30 of 50 against 21 of 50: the intervals of the rates overlap, but nothing was lost and nine states were gained.
    report = script.build_report(finished(tmp_path / "run", [True] * 21 + [False] * 29, [True] * 30 + [False] * 20))
    low, high = tango_interval(9, 0, 50)
    assert report["rl"]["low"] < report["sft"]["high"] and low > 0
    gain = report["difference"]
    assert (gain["gained"], gain["lost"], gain["n"]) == (9, 0, 50)
    assert (gain["difference"], gain["low"], gain["high"]) == pytest.approx((0.18, low, high))
    assert report["seconds"] == {"sft": 2.0, "eval": 2.5, "rl": 7.0, "total": 11.5}
    text = script.describe(report)
    assert f"greedy: +18.0 [{100 * low:+.1f}, {100 * high:+.1f}] percentage points, p = 0.0039" in text
    assert "NO IMPROVEMENT" not in text


def test_no_improvement_is_said_to_be_none(script: ModuleType, tmp_path: Path) -> None:
    same = [True, False] * 20
    worse = [False] * 40
    for name, rl in (("same", same), ("worse", worse)):
        report = script.build_report(finished(tmp_path / name, same, rl))
        assert "; NO IMPROVEMENT IS SHOWN" in script.describe(report)
