"""How long a rollout of Lift with a real policy takes, and how much of two cores it keeps busy.

    python benchmarks/lift_overlap.py --pretrain runs/quickstart/sft/policy --num_envs 2 3 4
    python benchmarks/lift_overlap.py --pretrain runs/quickstart/sft/policy --num_envs 4 --episodes 256 --code ../old

Simulation and inference share the cores here, so the lower bound of the wall time is total CPU time / cores: overlap
efficiency = CPU seconds of this process and its workers during the rollout / cores / wall seconds. Other load on the
machine lowers it; `nice -n -10`, where allowed, avoids that.

`--code` measures another checkout of the repository with the same script and the same policy, to see what has changed;
everything it uses of rlvla is as old as the first rollout engine (commit c5c4289).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import torch

if TYPE_CHECKING:
    from rlvla.envs.config import EnvConfig
    from rlvla.models import Actor

THIS = Path(__file__).resolve().parents[1]


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of the processes so far."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def measure(actor: Actor, env: EnvConfig, workers: int, episodes: int, cores: int) -> dict[str, float]:
    """One rollout, sampled, after a first one that builds the environments."""
    from rlvla.envs.workers.pool import EnvPool
    from rlvla.rollout import EpisodeRequest, RolloutEngine

    requests = [EpisodeRequest(env.suite, 0, state, state, str(state)) for state in range(episodes)]
    with EnvPool(workers) as pool:
        engine = RolloutEngine(pool, env.env_kwargs(), {"success": 1.0})
        engine.run(requests[:workers], actor, temperature=1.0)
        pids = [os.getpid(), *(pool.pid(worker) for worker in range(workers))]
        before = cpu_seconds(pids)
        samples = engine.run(requests, actor, temperature=1.0)
        used = cpu_seconds(pids) - before
    wall = engine.stats.wall_s
    return {
        "efficiency": used / cores / wall,
        "wall_s": wall,
        "cpu_s": used,
        "episodes_per_s": episodes / wall,
        "env_steps": float(sum(sample.finish_step for sample in samples)),
    }


def measure_all(pretrain: Path, num_envs: list[int], episodes: int, cores: int) -> dict[int, dict[str, float]]:
    """Figures by number of workers, of the code that is imported here."""
    from rlvla.checkpoints.policy_folder import recorded_environment
    from rlvla.envs.config import EnvConfig
    from rlvla.models import Actor

    torch.set_num_threads(1)
    actor, env = Actor.from_pretrained(pretrain).eval(), EnvConfig().completed(recorded_environment(pretrain))
    return {n: measure(actor, env, n, episodes, cores) for n in num_envs}


def of_code(code: Path, args: argparse.Namespace) -> dict[int, dict[str, float]]:
    """`measure_all` in a process of its own that imports rlvla from a checkout."""
    call = "import json, rlvla, lift_overlap; found = lift_overlap.measure_all("
    call += f"{str(args.pretrain)!r}, {args.num_envs}, {args.episodes}, {args.cores}); "
    call += "print(json.dumps([rlvla.__file__, found]))"
    paths = os.pathsep.join([str(code.resolve()), str(Path(__file__).resolve().parent)])
    done = subprocess.run(
        [sys.executable, "-P", "-c", call],  # -P: the folder that this is started in does not come first
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"the code in {code} could not be measured (exit status {done.returncode}, see above)")
    imported, found = json.loads(done.stdout.splitlines()[-1])
    if not Path(imported).is_relative_to(code.resolve()):
        raise SystemExit(f"{code} is no checkout of this repository: rlvla came from {imported}")
    return {int(n): figures for n, figures in found.items()}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrain", type=Path, required=True, help="policy folder that has seen Lift")
    parser.add_argument("--num_envs", type=int, nargs="+", default=[2, 3, 4], help="workers (default 2 3 4)")
    parser.add_argument("--episodes", type=int, default=128, help="sampled episodes of a rollout (default 128)")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="that the machine has (default all)")
    parser.add_argument(
        "--code", type=Path, nargs="*", default=[], help="other checkouts to measure in turns with this"
    )
    parser.add_argument("--repeats", type=int, default=1, help="rollouts of each; medians are reported (default 1)")
    parser.add_argument("--json", type=Path, help="write the figures of every rollout to this file")
    args = parser.parse_args()
    checkouts = {str(code): code for code in args.code} | {"this": THIS}
    found = [{name: of_code(code, args) for name, code in checkouts.items()} for _ in range(args.repeats)]
    keys = ("efficiency", "wall_s", "cpu_s", "episodes_per_s")
    rows = []
    for n in args.num_envs:
        for name in checkouts:
            medians = (statistics.median(repeat[name][n][key] for repeat in found) for key in keys)
            walls = [repeat[name][n]["wall_s"] for repeat in found]
            rows.append((n, name, *(f"{m:.2f}" for m in medians), f"{min(walls):.2f} to {max(walls):.2f}"))
    sys.path.insert(0, str(THIS))
    from rlvla.utils.terminal import table

    headers = ("workers", "code", "efficiency", "wall s", "CPU s", "episodes / s", "wall s of all")
    print(f"{args.episodes} episodes\n{table(headers, rows)}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
