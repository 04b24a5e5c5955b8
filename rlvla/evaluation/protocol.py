"""Evaluation protocols: the episodes of an evaluation, and the settings that paired evaluations share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    samples: int = 1,
    instructions: str = "own",
    images: str = "own",
) -> list[EpisodeRequest]:
    """The episodes of an evaluation, task by task.

    With several `samples` each initial state is played that often; the first episodes equal the ones of `samples=1`.
    `instructions` and `images` are one of `INSTRUCTIONS` and `IMAGES` in `rlvla.evaluation.config`; the instruction of
    an episode depends on its task and initial state alone.
    """
    texts, blind = Instructions(instructions, tasks), images == "none"
    return [
        replace(eval_request(task, state, seed, sample), other_instructions=texts.of(task, state), blind=blind)
        for task in tasks
        for state in split.eval_states(task, episodes_per_task)
        for sample in range(samples)
    ]


class Instructions:
    """Instructions given to the policy in an evaluation of these `tasks`; `kind` is one of `INSTRUCTIONS`."""

    def __init__(self, kind: str, tasks: Sequence[TaskSpec]):
        self._kind, self._tasks = kind, tasks
        self._others: dict[str, list[str]] = {}

    def of(self, task: TaskSpec, state: int) -> tuple[str, ...]:
        """`EpisodeRequest.other_instructions` for an initial state of a task."""
        if self._kind != "shuffled":
            return ("",) if self._kind == "none" else ()
        if task.instruction not in self._others:
            # Other phrasings of a task may replace its instruction, the same text must not.
            others = [t for t in self._tasks if t.instructions or t.instruction != task.instruction]
            self._others[task.instruction] = known_instructions(others)
        texts = self._others[task.instruction]
        order = derive_rng("shuffled instructions", task.suite, task.task_id, state).permutation(len(texts))
        return tuple(texts[number] for number in order[:2])  # one of them may be the episode's


def known_instructions(tasks: Sequence[TaskSpec]) -> list[str]:
    """Distinct instructions of these tasks, sorted."""
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
    """The settings that two evaluations must share to be paired; defaults are left out.

    Defaults: a `temperature` of None (greedy), the suite's `success_hold_steps` (None), `after_success` "end", one
    sample per initial state, the simulator as `success_source` (None), no perturbations. `options` are
    `EnvConfig.played_options`; `instructions` and `images` are as for `eval_requests`.
    """
    optional = {
        "temperature": temperature,
        "success_hold_steps": success_hold_steps,
        "after_success": None if after_success == "end" else after_success,
        "samples": samples if samples > 1 else None,
        "success_source": success_source,
        "perturb": sorted(perturb) or None,
        "options": dict(options) if options else None,
        "instructions": None if instructions == "own" else instructions,
        "images": None if images == "own" else images,
    }
    return {
        "suite": tasks[0].suite,
        "name": split.protocol_name,
        "seed": seed,
        **{name: value for name, value in optional.items() if value is not None},
        "tasks": [
            {
                "task_id": task.task_id,
                "name": task.name,
                "max_steps": task.max_steps,
                "control_freq": task.control_freq,
                "init_states": split.eval_states(task, episodes),
            }
            for task in tasks
        ],
    }


def condition_labels(protocol: Mapping[str, Any]) -> list[str]:
    """Labels of replaced instructions and images, for example "images=none"; [] if the policy gets the episode's."""
    kinds = {name: protocol.get(name, "own") for name in ("instructions", "images")}
    return [f"{name}={kind}" for name, kind in kinds.items() if kind != "own"]


def describe_differences(policy: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """Differences between two protocols (see `describe_protocol`), one phrase each."""
    differences = []
    names = ["suite", "name", "seed", "temperature", "success_hold_steps", "after_success", "samples", "success_source"]
    for name in [*names, "perturb", "instructions", "images"]:
        default = "own" if name in ("instructions", "images") else None
        if policy.get(name) != base.get(name):
            differences.append(f"{name} {policy.get(name, default)} and {base.get(name, default)}")
    options = [side.get("options", {}) for side in (policy, base)]
    for name in sorted({*options[0], *options[1]}):
        own, other = (side.get(name, "its default") for side in options)
        if own != other:
            differences.append(f"{name}: {own} and {other}")
    tasks = [{task["task_id"]: task for task in side.get("tasks", [])} for side in (policy, base)]
    if list(tasks[0]) != list(tasks[1]):
        differences.append(f"tasks {sorted(tasks[0])} and {sorted(tasks[1])}")
    for own, other in ((task, tasks[1][task_id]) for task_id, task in tasks[0].items() if task_id in tasks[1]):
        for name in ("max_steps", "control_freq"):
            if own[name] != other[name]:
                differences.append(f"{name} of {own['name']} {own[name]:g} and {other[name]:g}")
        if own["init_states"] != other["init_states"]:
            counts = f"{len(own['init_states'])} and {len(other['init_states'])}"
            differences.append(f"initial states of {own['name']} ({counts})")
    return differences
