"""Rollouts with the engine against the common lock-step loop, on the same episodes.

    python benchmarks/lock_step.py --task_suite_name robosuite --episodes 8 [--json FILE]

The baseline is straightforward: a fresh process per episode, every step rendered at 256 pixels with the simulator's
defaults (full quality; LIBERO renders scene and wrist), every decision slot computed with the full batch, all wait for
the slowest. With `--same_images` it renders one camera in the engine's quality instead, which leaves only the loop.
Both use the same policy, which plays prepared actions and costs a few matrix products per episode of the batch. CPU
seconds include this process and its children.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.envs import list_tasks, make_env
from rlvla.envs.workers.pool import EnvPool
from rlvla.rollout import EpisodeRequest, RolloutEngine
from rlvla.utils.terminal import table
from tests.support.policies import ScriptedPolicy

CHUNK, LOCK_STEP_SIZE = 8, 256
_WEIGHTS = np.random.default_rng(0).standard_normal((768, 768)).astype(np.float32)


class PreparedPolicy(ScriptedPolicy):
    """Small random actions that depend on nothing; costs a few milliseconds per episode of the batch."""

    def __init__(self, action_dim: int):
        super().__init__(CHUNK, action_dim)
        self._actions = np.random.default_rng(1).uniform(-0.3, 0.3, (CHUNK, action_dim)).astype(np.float32)
        self.rows = 0

    def actions(self, images, proprio, noise):
        """The same for every row."""
        n = len(images)
        for _ in range(n):
            _WEIGHTS @ _WEIGHTS[:, :64]
        self.rows += n
        return np.repeat(self._actions[None], n, axis=0)


def stock_images(suite: str) -> dict[str, Any]:
    """What the simulator draws at every step when nobody asks for less, as options of our adapters."""
    cameras = ("agentview", "wrist") if suite.startswith("libero") else ("agentview",)
    return {"cameras": cameras, "render_quality": "full"}


def _episode(connection: Connection, suite: str, task_id: int, state: int, options: dict[str, Any]) -> None:
    """One process, one episode: every step is rendered; after the end it goes on answering until told to stop."""
    env = make_env(suite, task_id, image_size=LOCK_STEP_SIZE, **options)
    seen, done = env.reset(state, seed=0), False
    connection.send((seen.images, done, 0))
    while (actions := connection.recv()) is not None:
        steps = 0
        for action in actions:
            if not done:
                result = env.step_chunk(action[None])  # a chunk of one: a picture of every step
                seen, done, steps = result.observation, result.terminated or result.truncated, steps + 1
        connection.send((seen.images, done, steps))
    env.close()


def lock_step(
    suite: str, task_id: int, episodes: int, workers: int, options: dict[str, Any], policy: PreparedPolicy
) -> int:
    """Waves of as many processes as workers; returns the executed steps."""
    executed, context = 0, multiprocessing.get_context("spawn")
    for first in range(0, episodes, workers):
        pairs, processes = [], []
        for state in range(first, min(first + workers, episodes)):
            ours, theirs = context.Pipe()
            process = context.Process(target=_episode, args=(theirs, suite, task_id, state, options))
            process.start()
            pairs.append(ours)
            processes.append(process)
        answers = [ours.recv() for ours in pairs]
        for _ in range(-(-options["max_steps"] // CHUNK)):  # all slots, whoever has ended
            images = np.stack([images for images, _, _ in answers])
            decision = policy.act(images, None, [""] * len(pairs), noise=None, temperature=1.0)
            for ours, actions in zip(pairs, decision.actions):
                ours.send(actions)
            answers = [ours.recv() for ours in pairs]
            executed += sum(steps for _, _, steps in answers)
        for ours, process in zip(pairs, processes):
            ours.send(None)
            process.join()
    return executed


def with_engine(
    suite: str, task_id: int, episodes: int, workers: int, size: int, max_steps: int, policy: PreparedPolicy
) -> int:
    """The same episodes on reused workers, starting them included; returns the executed steps."""
    requests = [EpisodeRequest(suite, task_id, state, 0, "g") for state in range(episodes)]
    with EnvPool(workers) as pool:
        engine = RolloutEngine(pool, {"image_size": size, "max_steps": max_steps}, {"success": 1.0})
        engine.run(requests, policy, temperature=1.0, greedy=True)
        return engine.stats.env_steps


def measured(play: Callable[[], int]) -> dict[str, float]:
    """Wall and CPU seconds, children included."""

    def used() -> float:
        return sum(
            usage.ru_utime + usage.ru_stime
            for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        )

    start, cpu = time.perf_counter(), used()
    steps = play()
    return {"env_steps": steps, "wall_s": time.perf_counter() - start, "cpu_s": used() - cpu}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task_suite_name", default="robosuite")
    parser.add_argument("--task_id", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--image_size", type=int, default=64, help="of the engine's images")
    parser.add_argument("--max_steps", type=int, help="default: the suite's")
    parser.add_argument("--same_images", action="store_true", help="the loop renders no more than the engine")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    task = list_tasks(args.task_suite_name)[args.task_id]
    max_steps, policy = args.max_steps or task.max_steps, PreparedPolicy(task.action_dim)
    common = (args.task_suite_name, args.task_id, args.episodes, args.workers)
    options = {"max_steps": max_steps} | ({} if args.same_images else stock_images(args.task_suite_name))
    figures = {
        "engine": measured(lambda: with_engine(*common, args.image_size, max_steps, policy)),
        "lock-step": measured(lambda: lock_step(*common, options, policy)),
    }
    if figures["engine"]["env_steps"] != figures["lock-step"]["env_steps"]:
        raise SystemExit(f"not the same episodes: {figures}")
    figures["ratio"] = {key: figures["lock-step"][key] / figures["engine"][key] for key in ("wall_s", "cpu_s")}
    rows = [(name, *(f"{figures[name].get(k, 0):.1f}" for k in ("wall_s", "cpu_s"))) for name in figures]
    print(table(("loop", "wall s", "CPU s"), rows))
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
