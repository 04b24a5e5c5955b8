"""Evaluation protocols: which episodes are played, and when two evaluations are paired."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlvla.envs.base import TaskSpec
from rlvla.envs.config import SplitConfig
from rlvla.envs.splits import EvalStates
from rlvla.evaluation.results import eval_uid
from rlvla.rollout import EpisodeRequest
from rlvla.utils.seeding import derive_rng, derive_seed


def eval_requests(
    tasks: Sequence[TaskSpec],
    split: EvalStates,
    episodes_per_task: int,
    seed: int,
    *,
    chosen: Callable[[int, int], bool] = lambda task_id, state: True,
    samples: int = 1,
    instructions: str = "own",
    images: str = "own",
) -> list[EpisodeRequest]:
    """The episodes of an evaluation, task by task; `chosen(task_id, init_state_id)` selects a subset.

    With several `samples` each initial state is played that often; the first episodes are those of `samples=1`. What
    the policy is told (`rlvla.evaluation.config.INSTRUCTIONS`) depends on the task and the initial state alone;
    `images` is one of `rlvla.evaluation.config.IMAGES`.
    """
    heard, blind = Instructions(instructions, tasks), images == "none"
    return [
        replace(eval_request(task, state, seed, sample), other_instructions=heard.of(task, state), blind=blind)
        for task in tasks
        for state in split.eval_states(task, episodes_per_task)
        if chosen(task.task_id, state)
        for sample in range(samples)
    ]


class Instructions:
    """What the policy is told in the episodes of an evaluation.

    Args:
        kind: one of `rlvla.evaluation.config.INSTRUCTIONS`.
        tasks: all tasks that are evaluated.
    """

    def __init__(self, kind: str, tasks: Sequence[TaskSpec]):
        self._kind, self._tasks = kind, tasks
        self._others: dict[str, list[str]] = {}

    def of(self, task: TaskSpec, state: int) -> tuple[str, ...]:
        """`EpisodeRequest.other_instructions` for an initial state of a task."""
        if self._kind != "shuffled":
            return ("",) if self._kind == "none" else ()
        if task.instruction not in self._others:
            # Its own must not come back where the policy would be told the task in other words.
            others = [t for t in self._tasks if t.instructions or t.instruction != task.instruction]
            self._others[task.instruction] = known_instructions(others)
        texts = self._others[task.instruction]
        order = derive_rng("shuffled instructions", task.suite, task.task_id, state).permutation(len(texts))
        return tuple(texts[number] for number in order[:2])  # one of them may be the episode's


def known_instructions(tasks: Sequence[TaskSpec]) -> list[str]:
    """All distinct instructions of some tasks, sorted."""
    return sorted({text for task in tasks for text in task.instructions or (task.instruction,)})


def eval_request(
    task: TaskSpec, state: int, seed: int, sample: int = 0, *, record_frames: bool = False
) -> EpisodeRequest:
    """The evaluation episode of a task and initial state, for an evaluation with this seed."""
    further = (sample,) if sample else ()  # the first sample is the episode of an evaluation with one
    episode_seed = derive_seed(seed, "eval", task.task_id, state, *further)
    uid = eval_uid(task.task_id, state, sample)
    return EpisodeRequest(task.suite, task.task_id, state, episode_seed, uid, record_frames)


def describe_protocol(
    tasks: Sequence[TaskSpec],
    split: SplitConfig,
    episodes: int,
    seed: int,
    temperature: float | None,
    success_hold_steps: int | None = None,
    after_success: str | None = None,
    samples: int = 1,
    *,
    success_source: str | None = None,
    perturb: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    instructions: str = "own",
    images: str = "own",
) -> dict[str, Any]:
    """Everything two evaluations must have in common to be paired; `temperature` is None if greedy.

    `success_hold_steps` is given only if it differs from the suite's, `after_success` only if episodes go on after it,
    `success_source` (a description) only if it is not the simulator; `samples` are the episodes per initial state,
    `perturb` the perturbations of the environment, `options` its `EnvConfig.played_options`, `instructions` and
    `images` as for `eval_requests`.
    """
    described: dict[str, Any] = {"suite": tasks[0].suite, "name": split.protocol_name, "seed": seed}
    if temperature is not None:
        described["temperature"] = temperature
    if success_hold_steps is not None:
        described["success_hold_steps"] = success_hold_steps
    if after_success not in (None, "end"):
        described["after_success"] = after_success
    if samples > 1:
        described["samples"] = samples
    if success_source is not None:
        described["success_source"] = success_source
    if perturb:
        described["perturb"] = sorted(perturb)
    if options:
        described["options"] = dict(options)
    if instructions != "own":
        described["instructions"] = instructions
    if images != "own":
        described["images"] = images
    described["tasks"] = [
        {
            "task_id": task.task_id,
            "name": task.name,
            "max_steps": task.max_steps,
            "control_freq": task.control_freq,
            "init_states": split.eval_states(task, episodes),
        }
        for task in tasks
    ]
    return described


def named_given(given: Mapping[str, Any]) -> list[str]:
    """How a condition is called by what the policy is told and sees in place of its own instructions and images."""
    kinds = {name: given.get(name, "own") for name in ("instructions", "images")}
    return [f"{name}={kind}" for name, kind in kinds.items() if kind != "own"]


def describe_differences(policy: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """Differences between two protocols (see `describe_protocol`), one phrase each."""
    differences = []
    named = ["suite", "name", "seed", "temperature", "success_hold_steps", "after_success", "samples", "success_source"]
    for name in [*named, "perturb", "instructions", "images"]:
        default = "own" if name in ("instructions", "images") else None
        if policy.get(name) != base.get(name):
            differences.append(f"{name} {policy.get(name, default)} and {base.get(name, default)}")
    options = [side.get("options", {}) for side in (policy, base)]
    for name in sorted({*options[0], *options[1]}):
        mine, theirs = (side.get(name, "its default") for side in options)
        if mine != theirs:
            differences.append(f"{name}: {mine} and {theirs}")
    tasks = [{task["task_id"]: task for task in side.get("tasks", [])} for side in (policy, base)]
    if list(tasks[0]) != list(tasks[1]):
        differences.append(f"tasks {sorted(tasks[0])} and {sorted(tasks[1])}")
    for task_id in [i for i in tasks[0] if i in tasks[1]]:
        mine, theirs = tasks[0][task_id], tasks[1][task_id]
        for name in ("max_steps", "control_freq"):
            if mine[name] != theirs[name]:
                differences.append(f"{name} of {mine['name']} {mine[name]:g} and {theirs[name]:g}")
        if mine["init_states"] != theirs["init_states"]:
            counts = f"{len(mine['init_states'])} and {len(theirs['init_states'])}"
            differences.append(f"initial states of {mine['name']} ({counts})")
    return differences
