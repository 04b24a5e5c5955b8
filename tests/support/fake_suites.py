"""A suite for tests of worker processes: each option makes the environment misbehave in one way."""

import os
import signal
import subprocess
import sys
import time

import numpy as np

from rlvla.envs.base import ChunkResult, Observation, TaskSpec, check_actions
from rlvla.envs.registry import Suite, register_suite
from rlvla.utils.errors import ConfigError, Problem

TASK = TaskSpec("fake", 0, "fake", "do nothing", 100, 10, 2, 0, 10.0)


class FakeEnv:
    task = TASK
    built = 0

    def __init__(self, options):
        self.options = options
        self._fault("make")
        FakeEnv.built += 1
        self.closed_file = options.get("closed_file")
        if options.get("children"):
            self._start_children(options["children"])

    def _start_children(self, folder):
        """Two processes that leave their numbers there, in the worker's group and in a session of its own."""
        descriptors = [fd for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}")]
        for alone in (False, True):
            child = subprocess.Popen(
                ["sleep", "600"],
                start_new_session=alone,
                pass_fds=descriptors if self.options.get("inherit") else (),
            )
            open(os.path.join(folder, str(child.pid)), "w").close()

    def _fault(self, phase):
        kind = self.options.get(phase)
        if kind == "raise":
            raise ZeroDivisionError(f"deliberate failure in {phase}")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exit":
            os._exit(3)
        if kind == "sleep":
            time.sleep(600)
        if kind == "pause":
            time.sleep(5)
        if kind == "config":
            raise ConfigError([Problem("image_size", "out_of_range", "first mistake"), "second mistake"])

    def _observation(self):
        heavy = [name for name in ("torch", "deepspeed", "transformers") if name in sys.modules]
        if self.options.get("careless"):
            return Observation(np.full((1, 8, 8), 7, np.uint8), None, 3)
        text = f"built={FakeEnv.built} pid={os.getpid()} heavy={heavy} omp={os.environ.get('OMP_NUM_THREADS')}"
        return Observation(np.full((1, 8, 8, 3), 7, np.uint8), None, text)

    def reset(self, init_state_id, seed):
        self._fault("reset")
        return self._observation()

    def step_chunk(self, actions, *, record_frames=False):
        actions = check_actions(actions, 2)
        self._fault("step")
        done = np.zeros(len(actions), dtype=bool)
        rewards = done.astype(np.float64 if self.options.get("careless") else np.float32)
        return ChunkResult(self._observation(), len(actions), rewards, done, False, False, False, [], None)

    def privileged_state(self):
        return {}

    def close(self):
        if self.closed_file:
            with open(self.closed_file, "a") as file:
                file.write("closed\n")


def _make(task_id, **options):
    return FakeEnv(options)


register_suite("fake", Suite(list_tasks=lambda **kw: [TASK], make=_make, cameras=("none",)))


class FakeBatch:
    """Tells in its instructions how many slots were served together; a fault of `step` strikes from slot 1 on."""

    task = TASK

    def __init__(self, num_slots, options):
        self.options, self.num_slots = options, num_slots
        FakeEnv.built += 1

    def _observations(self, slots):
        text = f"built={FakeEnv.built} together={len(slots)} of {self.num_slots}"
        return [Observation(np.full((1, 8, 8, 3), slot, np.uint8), None, text) for slot in slots]

    def reset(self, slots, init_state_ids, seeds):
        return self._observations(slots)

    def step_chunk(self, slots, actions, *, record_frames=False):
        fault = self.options.get("step") if max(slots) >= 1 else None
        if fault == "raise":
            raise ZeroDivisionError("deliberate failure in a batch")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "sleep":
            time.sleep(600)
        if fault == "forget":
            slots = slots[:-1]
        done = np.zeros(actions.shape[1], dtype=bool)
        return [
            ChunkResult(seen, len(done), done.astype(np.float32), done, False, False, False)
            for seen in self._observations(slots)
        ]

    def privileged_state(self, slot):
        return {"slot": np.array(slot)}

    def close(self):
        pass


register_suite(
    "fake_batch",
    Suite(
        list_tasks=lambda **kw: [TASK],
        make=_make,
        cameras=("none",),
        make_batched=lambda task_id, num_slots, **options: FakeBatch(num_slots, options),
    ),
)
