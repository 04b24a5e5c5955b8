"""A suite for tests of the rollout engine: episodes whose outcome is known, on simulators that fail as they are told.

The option `plan` names a folder with `faults.json`: {"make": [fault, ...], "<seed>": [[phase, fault], ...]}. The n-th
environment that is built suffers make's n-th fault (null: none), the n-th attempt at an episode the n-th of its seed.
Attempts are counted by files in that folder, since the processes that count them do not live long.
"""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec, check_actions
from rlvla.envs.registry import Suite, register_suite

SIZE, CHUNK = 8, 2


def task(task_id: int = 0) -> TaskSpec:
    task = TaskSpec("faulty", task_id, f"faulty {task_id}", "do it", 8, 1000, 1, 1, 10.0, ("done",))
    return replace(task, reward_range=(0.0, 1.0))


def _late(result: ChunkResult, name: str, value: object) -> ChunkResult:
    """The result of one executed action of two, with something in the second."""
    values = getattr(result, name).copy()
    values[1] = value
    first = {"rewards": result.rewards * np.array([1, 0], np.float32), "successes": result.successes & [True, False]}
    ended = replace(result, **first, steps_executed=1, events=[], terminated=False, success_at_end=False)
    return replace(ended, truncated=True, **{name: values.astype(getattr(result, name).dtype)})


def _seen(result: ChunkResult, **changes: object) -> ChunkResult:
    return replace(result, observation=replace(result.observation, **changes))


# Results that break the contract of environments, and the kind of the failure if it is not "bad_answer".
CONTRACT = {
    "events_numbers": lambda r: replace(r, events=[frozenset({step}) for step in range(r.steps_executed)]),
    "events_text": lambda r: replace(r, events="done"),
    "events_words": lambda r: replace(r, events=["done"] * r.steps_executed),
    "events_dict": lambda r: replace(r, events={"done": 1}),
    "events_nested": lambda r: replace(r, events=[[["done"]]] * r.steps_executed),
    "events_unknown": lambda r: replace(r, events=[frozenset({"flown"})] * r.steps_executed),
    "events_many": lambda r: replace(r, events=[frozenset()] * 5),
    "events_long": lambda r: replace(r, events=[frozenset({"x" * 500_000})] * r.steps_executed),
    "instruction_none": lambda r: _seen(r, instruction=None),
    "instruction_bytes": lambda r: _seen(r, instruction=["do", "it"]),
    "instruction_surrogate": lambda r: _seen(r, instruction="do \ud800 it"),
    "instruction_control": lambda r: _seen(r, instruction="do\0it\x1b[2J"),
    "instruction_long": lambda r: _seen(r, instruction="do it " * 10_000),
    "success_at_end": lambda r: replace(r, success_at_end=True, successes=r.successes & False),
    "terminated": lambda r: replace(
        r, successes=r.rewards >= 0, terminated=True, truncated=False, success_at_end=False
    ),
    "both_ends": lambda r: replace(r, terminated=True, truncated=True, success_at_end=False),
    "flags_numbers": lambda r: replace(r, terminated=1),
    "flags_text": lambda r: replace(r, truncated="no"),
    "late_success": lambda r: _late(r, "successes", True),
    "late_reward": lambda r: _late(r, "rewards", 0.5),
    "absurd_reward": lambda r: replace(r, rewards=np.full_like(r.rewards, 1e30)),
    "negative_reward": lambda r: replace(r, rewards=np.full_like(r.rewards, -0.5)),
    "nan_reward": lambda r: replace(r, rewards=np.full_like(r.rewards, np.nan)),
    "rewards_list": lambda r: replace(r, rewards=[0.0, 0.0]),
    "rewards_double": lambda r: replace(r, rewards=r.rewards.astype(np.float64)),
    "rewards_short": lambda r: replace(r, rewards=r.rewards[:1]),
    "successes_numbers": lambda r: replace(r, successes=r.successes.astype(np.int64)),
    "steps_none": lambda r: replace(r, steps_executed=0),
    "steps_many": lambda r: replace(r, steps_executed=9),
    "steps_bool": lambda r: replace(r, steps_executed=True),
    "steps_nan": lambda r: replace(r, steps_executed=float("nan")),
    "frames": lambda r: replace(r, frames=np.zeros((r.steps_executed, SIZE, SIZE, 3), np.uint8)),
    "grey": lambda r: _seen(r, images=r.observation.images[..., :1]),
    "huge_image": lambda r: _seen(r, images=np.zeros((1, 2000, 2000, 3), np.uint8)),
    "no_image": lambda r: _seen(r, images=None),
    "proprio_nan": lambda r: _seen(r, proprio=np.array([np.nan], np.float32)),
    "proprio_long": lambda r: _seen(r, proprio=np.zeros(4, np.float32)),
    "proprio_none": lambda r: _seen(r, proprio=None),
    "nothing": lambda r: None,
    "observation": lambda r: r.observation,
    "objects": lambda r: replace(r, events=[frozenset({object()})]),
    "array_of_objects": lambda r: replace(r, rewards=np.array([object(), object()])),
    "megabytes": lambda r: _seen(r, instruction="x" * 5_000_000),
}
KINDS = {
    "objects": "exception",
    "array_of_objects": "exception",
}


def length_of(seed: int) -> int:
    """Steps of the episode: 1..8."""
    return 1 + seed % 8


def succeeds(seed: int) -> bool:
    return seed % 3 == 0


def claim(folder: Path, name: str) -> int:
    """How often this was called before with this name, over all processes."""
    number = 0
    while True:
        try:
            os.close(os.open(folder / f"{name}.{number}", os.O_CREAT | os.O_EXCL))
            return number
        except FileExistsError:
            number += 1


class FaultyEnv:
    def __init__(self, task_id: int, plan: str | None, delay: float, leak_mb: int, size: int):
        self.task = task(task_id)
        self._folder = Path(plan) if plan else None
        self._plan = json.loads((self._folder / "faults.json").read_text()) if self._folder else {}
        self._delay, self._leak, self._size, self._kept = delay, leak_mb, size, []
        self._seed, self._steps, self._fault = 0, 0, (None, None)
        if self._folder and "make" in self._plan:
            number = claim(self._folder, "make")
            faults = self._plan["make"]
            self._suffer(faults[number] if number < len(faults) else None)

    def _suffer(self, fault: str | None) -> None:
        if fault == "raise":
            raise ZeroDivisionError("deliberate failure")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "exit":
            os._exit(7)
        if fault == "sleep":
            time.sleep(600)
        if fault == "long_error":
            raise ZeroDivisionError("x" * 30_000_000)
        if fault == "strange_error":
            raise ZeroDivisionError("\ud800 \x1b[2J")
        if fault == "orphan":  # a child holds the connection; the worker is dead
            if os.fork():
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        if fault == "wait":  # for the test to make the file, or to have failed
            ends = time.monotonic() + 120
            while not (self._folder / "go").exists() and time.monotonic() < ends:
                time.sleep(0.01)

    def _observe(self, fault: str | None = None) -> Observation:
        images = np.full((1, self._size, self._size, 3), (self._seed + self._steps) % 256, np.uint8)
        proprio = np.array([self._seed % 1000 + self._steps / 10], np.float32)
        if fault == "nan":
            proprio[0] = np.nan
        if fault == "shape":
            images = images[:, :-1]
        if fault == "dtype":
            images = images.astype(np.float32)
        return Observation(images, proprio, self.task.instruction)

    def _now(self, phase: str) -> str | None:
        fault = self._fault[1] if self._fault[0] == phase else None
        self._suffer(fault)
        return fault

    def reset(self, init_state_id: int, seed: int) -> Observation:
        self._seed, self._steps, self._fault = seed, 0, (None, None)
        faults = self._plan.get(str(seed), [])
        if faults and self._folder:
            attempt = claim(self._folder, str(seed))
            self._fault = tuple(faults[attempt]) if attempt < len(faults) else (None, None)
        if self._leak:
            self._kept.append(np.ones(self._leak * 2**20, np.uint8))
        return self._observe(self._now("reset"))

    def step_chunk(self, actions: np.ndarray, *, record_frames: bool = False) -> ChunkResult:
        actions = check_actions(actions, 1)
        if self._delay:
            share = np.random.default_rng(self._seed + self._steps).uniform(0, 2)
            time.sleep(self._delay * share if self._delay > 0 else -self._delay * (2 - share))
        fault = self._now("step")
        count = min(len(actions), length_of(self._seed) - self._steps)
        self._steps += count
        over = self._steps == length_of(self._seed)
        success = over and succeeds(self._seed)
        rewards, successes = np.zeros(len(actions), np.float32), np.zeros(len(actions), bool)
        rewards[count - 1] = successes[count - 1] = success
        events = [frozenset({"done"} if done else ()) for done in successes[:count]]
        result = ChunkResult(
            self._observe(fault), count, rewards, successes, success, over and not success, success, events
        )
        return CONTRACT[fault](result) if fault in CONTRACT else result

    def privileged_state(self) -> dict[str, np.ndarray]:
        return {}

    def close(self) -> None:
        pass


def list_tasks(*, plan=None, delay=0.0, leak_mb=0, use_proprio=True, image_size=SIZE):
    return [task(0), task(1)]


def make(task_id, *, plan=None, delay=0.0, leak_mb=0, use_proprio=True, image_size=SIZE):
    return FaultyEnv(task_id, plan, delay, leak_mb, image_size)


register_suite("faulty", Suite(list_tasks=list_tasks, make=make, cameras=("front",)))
