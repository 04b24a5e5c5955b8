"""How much of two cores a rollout of Lift with a real policy keeps busy.

    python benchmarks/lift_overlap.py --pretrain runs/quickstart/sft/policy --num_envs 2 3 4

Simulation and inference share the cores here, so that the limit of the wall time is total CPU time / cores: overlap
efficiency = CPU seconds of this process and its workers during the rollout / cores / wall seconds. Other load on the
machine lowers it; `nice -n -10` keeps that away where it is allowed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch

from rlvla.envs.config import EnvConfig
from rlvla.envs.pool import EnvPool
from rlvla.models import Actor
from rlvla.rollout import EpisodeRequest, RolloutConfig, RolloutEngine
from rlvla.trainer.policy_export import recorded_environment
from rlvla.utils.logging import table


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of the processes so far."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def measure(actor: Actor, env: EnvConfig, workers: int, episodes: int, cores: int) -> dict[str, float]:
    """One rollout after a first one that builds the environments."""
    requests = [EpisodeRequest(env.suite, 0, state, state, str(state)) for state in range(episodes)]
    with EnvPool(workers) as pool:
        engine = RolloutEngine(pool, env.env_kwargs(), {"success": 1.0}, RolloutConfig())
        engine.run(requests[:workers], actor, temperature=1.0)
        pids = [os.getpid(), *(pool.pid(worker) for worker in range(workers))]
        before = cpu_seconds(pids)
        engine.run(requests, actor, temperature=1.0)
        used = cpu_seconds(pids) - before
    wall = engine.stats.wall_s
    return {"efficiency": used / cores / wall, "wall_s": wall, "cpu_s": used, "episodes_per_s": episodes / wall}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrain", type=Path, required=True, help="policy folder that has seen Lift")
    parser.add_argument("--num_envs", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    actor, env = Actor.from_pretrained(args.pretrain).eval(), EnvConfig().completed(recorded_environment(args.pretrain))
    figures = {n: measure(actor, env, n, args.episodes, args.cores) for n in args.num_envs}
    keys = ("efficiency", "wall_s", "cpu_s", "episodes_per_s")
    rows = [(n, *(f"{entry[key]:.2f}" for key in keys)) for n, entry in figures.items()]
    print(table(("workers", "efficiency", "wall s", "CPU s", "episodes / s"), rows))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
