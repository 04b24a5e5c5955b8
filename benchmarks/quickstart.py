"""Runs the quickstart for several seeds and prints the results as a table and as JSON.

    python benchmarks/quickstart.py --seeds 0 1 2 --output runs/benchmark_quickstart

A seed passes if the supervised policy succeeds from at most 60 % and the trained one from at least 90 % of 100 held-out
initial states (at end, greedy), the intervals do not overlap, and the whole run took at most 25 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.files import write_json
from rlvla.utils.terminal import duration, table

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 25 * 60


def passed(report: dict) -> bool:
    """Whether a report meets what is promised of the quickstart."""
    sft, rl = report["sft"], report["rl"]
    apart = rl["low"] > sft["high"]
    figures = sft["success_at_end"] <= 0.6 and rl["success_at_end"] >= 0.9 and rl["n"] >= 100
    return figures and apart and report["seconds"]["total"] <= LIMIT_SECONDS


def cell(rate: dict) -> str:
    """`93 % [86, 97]`."""
    return f"{100 * rate['success_at_end']:.0f}% [{100 * rate['low']:.1f}, {100 * rate['high']:.1f}]"


def run_seed(seed: int, folder: Path) -> dict:
    """One quickstart; its report."""
    environment = {**os.environ, "OUT": str(folder), "SEED": str(seed)}
    subprocess.run(["bash", str(ROOT / "examples/scripts/quickstart.sh")], env=environment, check=True)
    return json.loads((folder / "report.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark_quickstart"))
    args = parser.parse_args()
    reports = {seed: run_seed(seed, args.output / f"seed_{seed}") for seed in args.seeds}
    rows = [
        (
            seed,
            cell(report["sft"]),
            cell(report["sft_sampled"]),
            cell(report["rl"]),
            cell(report["rl_sampled"]),
            report["episodes"],
            duration(report["seconds"]["total"]),
            "yes" if passed(report) else "NO",
        )
        for seed, report in reports.items()
    ]
    print(table(("seed", "SFT greedy", "SFT sampled", "RL greedy", "RL sampled", "episodes", "time", "passed"), rows))
    write_json(args.output / "reports.json", {str(seed): report for seed, report in reports.items()})
    sys.exit(0 if all(passed(report) for report in reports.values()) else 1)


if __name__ == "__main__":
    main()
