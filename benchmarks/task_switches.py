"""What it costs that workers change between tasks: MT10, with environments that are kept or built again.

    python benchmarks/task_switches.py [--num_envs 4] [--episodes 160] [--rounds 3]

A round plays as many episodes of each task, in shuffled order, with random actions in chunks of 5 and an image of 64
pixels for each chunk, as in training. "building" is the share of the workers' time in which environments are built,
"seconds" the mean time of a round after the first one, which builds all of them. Both kinds take turns.
"""

# Every worker process loads this file: what brings torch is imported where it is used.

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.envs.registry import get_suite, list_tasks, register_suite
from rlvla.utils.terminal import table

REBUILT = "metaworld_rebuilt"
OPTIONS = {"image_size": 64, "use_proprio": True}
_SUITE = get_suite("metaworld")


def _renamed(**options) -> list:
    return [dataclasses.replace(task, suite=REBUILT) for task in _SUITE.list_tasks(**options)]


register_suite(REBUILT, dataclasses.replace(_SUITE, list_tasks=_renamed, kept=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_envs", type=int, default=4)
    parser.add_argument("--episodes", type=int, default=160, help="of a round")
    parser.add_argument("--rounds", type=int, default=3, help="after the first one")
    args = parser.parse_args()

    from rlvla.envs.workers.pool import EnvPool
    from rlvla.rollout import EpisodeRequest, RolloutEngine
    from tests.support.policies import ScriptedPolicy

    class Random(ScriptedPolicy):
        def actions(self, images, proprio, noise):
            return rng.uniform(-1, 1, (len(images), 5, 4))

    rng = np.random.default_rng(0)
    group = _SUITE.groups["MT10"]
    found: dict[str, list[tuple[float, float]]] = {}
    with EnvPool(args.num_envs, custom_modules=[__file__]) as kept, EnvPool(args.num_envs, custom_modules=[__file__]) as rebuilt:
        pools = {"metaworld": kept, REBUILT: rebuilt}
        engines = {name: RolloutEngine(pool, OPTIONS, {"success": 1.0}) for name, pool in pools.items()}
        tasks = [task.task_id for task in list_tasks("metaworld") if task.name in group]
        for number in range(args.rounds + 1):
            order = rng.permutation(np.resize(tasks, args.episodes)).tolist()
            for name, engine in engines.items():
                wanted = [EpisodeRequest(name, task, i, i, str(i)) for i, task in enumerate(order)]
                engine.run(wanted, Random(5, 4))
                if number:
                    busy = engine.stats.building_s / (args.num_envs * engine.stats.wall_s)
                    found.setdefault(name, []).append((engine.stats.wall_s, busy))
    rows = []
    for name, label in (("metaworld", "kept"), (REBUILT, "built again")):
        seconds, shares = np.mean(found[name], 0)
        rows.append((label, f"{seconds:.1f}", f"{100 * shares:.1f} %"))
    print(table(("environments", "seconds", "building"), rows))


if __name__ == "__main__":
    main()
