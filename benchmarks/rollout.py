"""Cost of the rollout engine and its overlap of simulation with inference, without a simulator or a model.

    python benchmarks/rollout.py [--json FILE]

Overlap efficiency = max(total env time / workers, total inference time) / wall time. Synthetic environments sleep for a
fixed, uniform or lognormal (sigma 1) time per chunk; the synthetic policy sleeps for a fixed time per batch.
"""

# ruff: noqa: D102 (stand-ins of known interfaces)
# Every worker process loads this file: what brings torch is imported where it is used.

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.envs.base import ChunkResult, Observation, TaskSpec
from rlvla.envs.registry import Suite, register_suite
from rlvla.envs.workers.messages import Make, Reset, StepChunk
from rlvla.envs.workers.pool import EnvPool, WorkerState
from rlvla.utils.terminal import table

CHUNKS, SIZE = 16, 224
TASK = TaskSpec("synthetic", 0, "sleep", "sleep", 10_000, 10_000, 7, 0, 20.0)
DELAYS = ("fixed", "uniform", "lognormal")


def delay_factor(delay: str, rng: np.random.Generator) -> float:
    """A random delay of mean 1."""
    if delay == "uniform":
        return rng.uniform(0, 2)
    return rng.lognormal(-0.5, 1.0) if delay == "lognormal" else 1.0


class SleepingEnv:
    """Sleeps instead of simulating; an episode has CHUNKS chunks."""

    task = TASK

    def __init__(self, delay: str, mean_s: float, size: int):
        self._delay, self._mean, self._image = delay, mean_s, np.zeros((1, size, size, 3), np.uint8)

    def _sleep(self) -> None:
        if self._mean:
            time.sleep(self._mean * delay_factor(self._delay, self._rng))

    def reset(self, init_state_id: int, seed: int) -> Observation:
        self._rng, self._left = np.random.default_rng(seed), CHUNKS
        return Observation(self._image, None, "sleep")

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False) -> ChunkResult:
        self._sleep()
        self._left -= 1
        nothing = np.zeros(len(actions), bool)
        return ChunkResult(
            Observation(self._image, None, "sleep"),
            len(actions),
            nothing.astype(np.float32),
            nothing,
            False,
            self._left == 0,
            False,
        )

    def close(self) -> None:
        pass


def make(task_id, *, delay="fixed", mean_s=0.0, image_size=SIZE):
    return SleepingEnv(delay, mean_s, image_size)


def list_tasks(*, delay="fixed", mean_s=0.0, image_size=SIZE):
    return [TASK]


register_suite("synthetic", Suite(list_tasks=list_tasks, make=make, cameras=("none",)))


def sleeping_policy(seconds: float):
    """A policy that takes this time for each batch and does nothing."""
    from tests.support.policies import ScriptedPolicy

    class SleepingPolicy(ScriptedPolicy):
        def actions(self, images, proprio, noise):
            if seconds:
                time.sleep(seconds)
            return super().actions(images, proprio, noise)

    return SleepingPolicy(action_chunk_len=8, action_dim=7)


def overlap(
    delay: str, workers: int, episodes: int, env_s: float, policy_s: float, envs_per_worker: int = 1
) -> dict[str, float]:
    """Efficiency with real worker processes."""
    from rlvla.rollout import EpisodeRequest, RolloutConfig, RolloutEngine

    with EnvPool(workers * envs_per_worker, envs_per_worker=envs_per_worker, custom_modules=[__file__]) as pool:
        kwargs = {"delay": delay, "mean_s": env_s, "image_size": 64}
        engine = RolloutEngine(pool, kwargs, {"success": 1.0}, RolloutConfig(rollout_max_wait_ms=0.0), [TASK])
        requests = [EpisodeRequest("synthetic", 0, 0, seed, "g") for seed in range(episodes)]
        engine.run(requests[:workers], sleeping_policy(0.0), temperature=1.0)  # processes are up
        engine.run(requests, sleeping_policy(policy_s), temperature=1.0)
    stats = engine.stats
    # What the environments slept, from their own random numbers.
    slept = sum(
        env_s * delay_factor(delay, rng) for rng in map(np.random.default_rng, range(episodes)) for _ in range(CHUNKS)
    )
    limit = max(slept / workers, stats.policy_s)
    return {"efficiency": limit / stats.wall_s, "wall_s": stats.wall_s, "env_s": slept, "policy_s": stats.policy_s}


class InstantPool:
    """A pool in this process whose environments answer at once: what is left is the engine."""

    num_slots = num_workers = 8

    def __init__(self):
        self._env = [SleepingEnv("fixed", 0.0, SIZE) for _ in range(self.num_workers)]
        self._answers, self._held = deque(), [None] * self.num_workers

    def state(self, worker):
        return WorkerState.IDLE

    def holds(self, worker):
        return self._held[worker]

    def keeps(self, worker):
        return [spec for spec in [self._held[worker]] if spec is not None]

    def submit_all(self, commands):
        for worker, command in commands:
            self._submit(worker, command)

    def slots_of(self, worker):
        return range(worker, worker + 1)

    def _submit(self, worker, command):
        env = self._env[worker]
        if isinstance(command, Make):
            self._held[worker], answer = command.env, TASK
        elif isinstance(command, Reset):
            answer = env.reset(command.init_state_id, command.seed)
        else:
            assert isinstance(command, StepChunk)
            answer = env.step_chunk(command.actions)
        self._answers.append((worker, answer))

    def wait(self, timeout=None):
        answers = list(self._answers)
        self._answers.clear()
        return answers


def overhead() -> dict[str, float]:
    """CPU microseconds of the engine per decision; memory of one trajectory; bytes copied per decision."""
    from rlvla.envs.workers.watchdog import WatchedPool
    from rlvla.rollout import EpisodeRequest, RolloutConfig, RolloutEngine

    engine = RolloutEngine(
        WatchedPool(InstantPool()),
        {"image_size": SIZE},
        {"success": 1.0},
        RolloutConfig(),
        [TASK],  # type: ignore[arg-type]
    )
    requests = [EpisodeRequest("synthetic", 0, 0, seed, "g") for seed in range(64)]
    engine.run(requests[:8], sleeping_policy(0.0), temperature=1.0)
    start = time.process_time()
    samples = engine.run(requests, sleeping_policy(0.0), temperature=1.0)
    used = time.process_time() - start
    sample = samples[0]
    held = sum(v.numel() * v.element_size() for v in vars(sample).values() if hasattr(v, "element_size"))
    last = image = SIZE * SIZE * 3  # the observation after the last action is kept once
    return {
        "us_per_decision": 1e6 * used / engine.stats.decisions,
        "mb_per_trajectory_64_decisions": ((held - last) / sample.num_decisions * 64 + last) / 1e6,
        "mb_copied_per_decision": 4 * image / 1e6,  # into the slab, out of it, into the batch, into the sample
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--envs_per_worker", type=int, default=1, help="environments of each worker")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--env_ms", type=float, default=200.0, help="mean time of a chunk")
    parser.add_argument("--policy_ms", type=float, default=5.0, help="time of a forward pass")
    args = parser.parse_args()
    env_s, policy_s = args.env_ms / 1000, args.policy_ms / 1000
    figures = {
        delay: overlap(delay, args.workers, args.episodes, env_s, policy_s, args.envs_per_worker) for delay in DELAYS
    }
    figures["engine"] = overhead()
    scaling = {n: overlap("fixed", n, 4 * n, env_s, policy_s)["wall_s"] / 4 for n in (1, 2, 4)}
    figures["seconds_per_round"] = scaling
    rows = [(name, *(f"{figures[name][key]:.2f}" for key in ("efficiency", "wall_s", "policy_s"))) for name in DELAYS]
    print(table(("delays", "efficiency", "wall s", "policy s"), rows))
    print(table(("engine", "figure"), [(name, f"{value:.3g}") for name, value in figures["engine"].items()]))
    print(table(("workers", "seconds per episode"), [(n, f"{s:.2f}") for n, s in scaling.items()]))
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
