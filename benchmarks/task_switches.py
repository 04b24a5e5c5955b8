"""What it costs that workers change between tasks: MT10, with environments that are kept or built again.

    python benchmarks/task_switches.py [--num_envs 4] [--episodes 160] [--rounds 3]

A round plays as many episodes of each task, in shuffled order, with random actions in chunks of 5 and an image of 64
pixels for each chunk, as in training. "building" is the share of the workers' time in which environments are built,
"seconds" the mean time of a round after the first one, which builds all of them. Both kinds take turns.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlvla.envs.registry import get_suite, list_tasks
from rlvla.envs.workers.pool import EnvPool
from rlvla.rollout import EpisodeRequest, RolloutEngine
from rlvla.utils.terminal import table
from tests.support.policies import ScriptedPolicy

OPTIONS = {"image_size": 64, "use_proprio": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_envs", type=int, default=4)
    parser.add_argument("--episodes", type=int, default=160, help="of a round")
    parser.add_argument("--rounds", type=int, default=3, help="after the first one")
    args = parser.parse_args()

    class Random(ScriptedPolicy):
        def actions(self, images, proprio, noise):
            return rng.uniform(-1, 1, (len(images), 5, 4))

    rng = np.random.default_rng(0)
    group = get_suite("metaworld").groups["MT10"]
    tasks = [task.task_id for task in list_tasks("metaworld") if task.name in group]
    found: dict[str, list[tuple[float, float]]] = {"kept": [], "built again": []}
    modules = [str(ROOT / "benchmarks/suites/metaworld_rebuilt.py")]
    with EnvPool(args.num_envs) as keeping, EnvPool(args.num_envs, custom_modules=modules) as rebuilding:
        pools = zip(found, (keeping, rebuilding))
        engines = {name: RolloutEngine(pool, OPTIONS, {"success": 1.0}) for name, pool in pools}
        for number in range(args.rounds + 1):
            order = rng.permutation(np.resize(tasks, args.episodes)).tolist()
            requests = [EpisodeRequest("metaworld", task, i, i, str(i)) for i, task in enumerate(order)]
            for name, engine in engines.items():
                engine.run(requests, Random(5, 4), temperature=1.0)
                if number:
                    building = engine.stats.building_s / (args.num_envs * engine.stats.wall_s)
                    found[name].append((engine.stats.wall_s, building))
    rows = []
    for name, rounds in found.items():
        seconds, building = np.mean(rounds, 0)
        rows.append((name, f"{seconds:.1f}", f"{100 * building:.1f} %"))
    print(table(("environments", "seconds", "building"), rows))


if __name__ == "__main__":
    main()
