"""Joins what the quickstart measured into report.json and says what came out of it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlvla.evaluation.comparison import compare
from rlvla.evaluation.findings import PolicyEvaluation
from rlvla.utils.files import write_json
from rlvla.utils.terminal import duration, table


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def rates(result: dict[str, Any]) -> dict[str, float]:
    """The figures of one evaluation, as report.json holds them."""
    at_end = result["success_at_end"]
    return {
        "success_at_end": at_end["rate"],
        "success_once": result["success_once"]["rate"],
        "n": at_end["n"],
        "low": at_end["low"],
        "high": at_end["high"],
    }


def difference(folder: Path) -> dict[str, Any]:
    """RL minus SFT, greedy and paired by initial state, as report.json holds it."""
    rl, sft = (PolicyEvaluation.read(folder / f"eval_{name}.json").results[0] for name in ("rl", "sft"))
    found = compare("rl", rl, "sft", sft).overall()
    names = ("n", "difference", "low", "high", "gained", "lost", "p_value")
    return {name: getattr(found, name) for name in names}


def build_report(folder: Path) -> dict[str, Any]:
    """report.json of a finished quickstart folder."""
    evaluations = {name: read_json(folder / f"eval_{name}.json") for name in ("sft", "rl")}
    seconds: dict[str, float] = {}
    for line in (folder / "seconds.txt").read_text(encoding="utf-8").splitlines():
        stage, value = line.split()
        stage = "eval" if stage.startswith("eval") else stage.removesuffix("/interrupted")
        seconds[stage] = seconds.get(stage, 0.0) + float(value)
    seconds["total"] = sum(seconds.values())
    totals = read_json(folder / "ppo" / "totals.json")
    report: dict[str, Any] = {name: rates(result["results"][0]) for name, result in evaluations.items()}
    report |= {f"{name}_sampled": rates(result["results"][1]) for name, result in evaluations.items()}
    report |= {
        "difference": difference(folder),
        "seconds": seconds,
        "env_steps": int(totals["env_steps"]),
        "episodes": int(totals["episodes"]),
        "seed": evaluations["rl"]["seed"],
        "protocol": evaluations["rl"]["results"][0]["protocol"],
    }
    return report


def describe(report: dict[str, Any]) -> str:
    """The closing table."""
    rows = []
    for name in ("sft", "sft_sampled", "rl", "rl_sampled"):
        r = report[name]
        policy, mode = name.removesuffix("_sampled").upper(), "sampled" if name.endswith("_sampled") else "greedy"
        interval = f"{100 * r['success_at_end']:.1f}% [{100 * r['low']:.1f}, {100 * r['high']:.1f}]"
        rows.append((policy, mode, r["n"], interval, f"{100 * r['success_once']:.1f}%"))
    seconds = {name: duration(value) for name, value in report["seconds"].items()}
    d = report["difference"]
    shown = "" if d["low"] > 0 else "; NO IMPROVEMENT IS SHOWN"
    return "\n".join(
        [
            table(("policy", "actions", "n", "success at end [95 %]", "success once"), rows),
            f"protocol {report['protocol']}: initial states that neither demonstrations nor training have seen",
            f"RL minus SFT on the same states, greedy: {100 * d['difference']:+.1f} [{100 * d['low']:+.1f}, "
            f"{100 * d['high']:+.1f}] percentage points, p = {d['p_value']:.2g} (exact McNemar){shown}",
            f"{report['episodes']} training episodes, {report['env_steps']} environment steps; "
            + ", ".join(f"{name} {value}" for name, value in seconds.items()),
        ]
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    report = build_report(folder)
    write_json(folder / "report.json", report)
    print(describe(report))
    print(f"report: {folder / 'report.json'}; curve: {folder / 'ppo' / 'learning_curve.png'}")
    print(f"next: tensorboard --logdir {folder / 'ppo'}")


if __name__ == "__main__":
    main()
