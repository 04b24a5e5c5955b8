"""Draws metrics of several runs over their iterations or training episodes, one panel per metric.

    python benchmarks/plot_runs.py "5e-4=runs/a/ppo" "1e-2=runs/b/ppo" --output docs/images/learning_rates.png
    python benchmarks/plot_runs.py "PPO=runs/a/ppo" "NFT=runs/a/flow_nft" --over episodes --output curves.png

Folders are those of training runs, with a metrics.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Of metrics that span orders of magnitude: -> the smallest value that is told from 0.
LOGARITHMIC = {"actor/ppo_kl": 1e-5}


AXES = {"iteration": "step", "episodes": "total/episodes"}


def values(run: Path, metric: str, over: str) -> tuple[list[float], list[float]]:
    """Positions on the axis `over`, and the metric's value at each."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [(entry[AXES[over]], entry[metric]) for entry in entries if metric in entry and AXES[over] in entry]
    return [at for at, _ in found], [max(value, LOGARITHMIC.get(metric, value)) for _, value in found]


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="LABEL=FOLDER")
    parser.add_argument("--metrics", nargs="+", default=["rollout/success_at_end", "actor/ppo_kl"])
    parser.add_argument("--over", choices=AXES, default="iteration", help="the axis (default iteration)")
    parser.add_argument("--title", default="")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    figure, panels = plt.subplots(1, len(args.metrics), figsize=(4.2 * len(args.metrics), 3.1), squeeze=False)
    for panel, metric in zip(panels[0], args.metrics):
        for run in args.runs:
            label, _, folder = run.rpartition("=")
            panel.plot(*values(Path(folder), metric, args.over), marker="o", markersize=3, label=label)
        panel.set(xlabel=args.over, ylabel=metric)
        if metric in LOGARITHMIC:
            panel.set_yscale("log")
        panel.grid(alpha=0.3)
    panels[0][0].legend(title=args.title, frameon=False)
    figure.tight_layout()
    figure.savefig(args.output, dpi=80)
    print(args.output)


if __name__ == "__main__":
    main()
