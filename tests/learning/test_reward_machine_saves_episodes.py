"""One seed of `benchmarks/reward_machine_learning.py`, cut short: the same start learns sooner with the machine."""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS, LAST = 14, 5
# Over 640 episodes a rate of 0.35 has a standard error of 0.02: a chance difference of 0.06 is two of a difference.
CLEAR = 0.06

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_hybrid_machine_beats_success_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("learning", ROOT / "benchmarks" / "reward_machine_learning.py")
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "learning", benchmark)  # its dataclass looks its own module up
    spec.loader.exec_module(benchmark)
    start = benchmark.make_start(tmp_path, evaluated=False)
    episodes = ITERATIONS * benchmark.PER_ITERATION
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda kind: benchmark.learn(tmp_path, start, kind, 0, episodes), benchmark.KINDS))
    curves = {kind: benchmark.success_curve(tmp_path / f"{kind}-0") for kind in benchmark.KINDS}
    assert all(len(curve) == ITERATIONS and max(curve[:2]) < 0.1 for curve in curves.values()), curves
    late = {kind: sum(curve[-LAST:]) / LAST for kind, curve in curves.items()}
    assert late["machine"] >= late["success"] + CLEAR, curves
