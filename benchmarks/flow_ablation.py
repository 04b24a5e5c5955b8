"""Which noise, how much, how many steps: a flow policy of the quickstart trained in different ways, from one start.

    python cli/run_recipe.py recipes/quickstart.yaml --variant flow --output runs/flow_lift
    python benchmarks/flow_ablation.py --pretrain runs/flow_lift/sft/policy --output runs/flow_ablation

Every run is the stage `rl` of recipes/quickstart.yaml with the flags of its row. A folder that is there already is
continued. Success is at end on held-out initial states: greedy and sampled, of the last policy. "to 90 %" are the
training episodes until nine of ten sampled episodes of an iteration succeed, with the seconds of two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning import effort
from rlvla.utils.terminal import table

SETTINGS: dict[str, dict[str, Any]] = {
    "sde 0.5, one of 4": {},
    "sde 0.2, one of 4": {"flow_noise_level": 0.2},
    "sde 0.8, one of 4": {"flow_noise_level": 0.8},
    "sde 0.5, all of 4": {"flow_noisy_steps": "all"},
    "sde 0.2, all of 4": {"flow_noisy_steps": "all", "flow_noise_level": 0.2},
    "sde 0.5, one of 10": {"flow_steps": 10},
    "cps 0.5, one of 4": {"flow_method": "cps"},
    "noise, all of 4": {"flow_method": "noise", "flow_noisy_steps": "all"},
}


def run(settings: dict[str, Any], pretrain: Path, folder: Path, seed: int) -> None:
    """Reinforcement learning and evaluation of one row."""
    recipe = yaml.safe_load((ROOT / "recipes/quickstart.yaml").read_text(encoding="utf-8"))
    stages = recipe["stages"]
    training = {**stages["rl"], "pretrain": str(pretrain.resolve()), **settings}
    own = {"all": {"seed": seed}, "stages": {"rl": training, "eval_rl": stages["eval_rl"]}}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(own, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "cli/run_recipe.py", str(path.resolve()), "--output", str((folder / "run").resolve())]
    subprocess.run(command, cwd=ROOT, check=True)


def rates(folder: Path) -> list[str]:
    """Greedy and sampled success with 95 % intervals."""
    results = json.loads((folder / "eval_rl.json").read_text(encoding="utf-8"))["results"]
    cells = {}
    for result in results:
        rate = result["success_at_end"]
        cells[result["greedy"]] = f"{100 * rate['rate']:.0f}% [{100 * rate['low']:.0f}, {100 * rate['high']:.0f}]"
    return [cells[True], cells[False]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrain", type=Path, required=True)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/flow_ablation"))
    args = parser.parse_args()
    rows = []
    for name in args.settings:
        folder = args.output / name.replace(", ", "_").replace(" ", "_")
        run(SETTINGS[name], args.pretrain, folder, args.seed)
        records = [json.loads(line) for line in (folder / "run/ppo/metrics.jsonl").read_text().splitlines()]
        first = next(record["rollout/success_at_end"] for record in records if "rollout/success_at_end" in record)
        rows.append((name, f"{100 * first:.0f}%", *rates(folder / "run"), effort(folder / "run")))
    print(table(("noise", "start, sampled", "greedy", "sampled", "to 90 %"), rows))


if __name__ == "__main__":
    main()
