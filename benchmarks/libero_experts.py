"""Success, length and processor time of the scripted expert on the tasks of LIBERO.

    python benchmarks/libero_experts.py --states 50

Results are written after each task, so that an interrupted measurement keeps the tasks it has finished.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.envs.experts import ExpertConfig, make_expert
from rlvla.envs.experts.episode import play_expert_episode
from rlvla.envs.registry import list_tasks, make_env

SUITES = ("libero_object", "libero_spatial", "libero_goal", "libero_10")
RESULTS = Path(__file__).parent / "results" / "libero_experts.json"


def measure(suite: str, task_id: int, states: int, config: ExpertConfig) -> dict[str, Any]:
    """Play one task from its first `states` initial states, without images."""
    env = make_env(suite, task_id, cameras=(), use_proprio=True)
    expert = make_expert(suite, task_id, config)
    start = time.process_time()
    episodes = [play_expert_episode(env, expert, state, seed=0) for state in range(states)]
    seconds = (time.process_time() - start) / states
    env.close()
    return {
        "task": env.task.name,
        "states": states,
        "successes": sum(episode["success_at_end"] for episode in episodes),
        "failed_states": [episode["init_state_id"] for episode in episodes if not episode["success_at_end"]],
        "mean_steps": round(float(np.mean([len(episode["actions"]) for episode in episodes])), 1),
        "cpu_seconds": round(seconds, 2),
    }


def main() -> None:
    """Measure the tasks and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", nargs="+", default=SUITES)
    parser.add_argument("--task_ids", nargs="+", type=int)
    parser.add_argument("--states", type=int, default=50)
    parser.add_argument("--noise_std", type=float, default=0.0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    results = json.loads(args.output.read_text()) if args.output.is_file() else {}
    for suite in args.suites:
        for task in list_tasks(suite):
            if args.task_ids and task.task_id not in args.task_ids:
                continue
            result = measure(suite, task.task_id, args.states, ExpertConfig(noise_std=args.noise_std))
            results.setdefault(suite, {})[str(task.task_id)] = result
            args.output.write_text(json.dumps(results, indent=1) + "\n")
            print(suite, task.task_id, *(f"{key} {value}" for key, value in result.items()), flush=True)


if __name__ == "__main__":
    main()
