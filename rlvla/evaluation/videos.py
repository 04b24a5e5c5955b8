"""Videos of evaluation episodes, recorded by replaying selected episodes.

Episodes are reproducible from their requests. Replaying means that frames are rendered for the selected episodes only,
and that failures can be selected because all outcomes are known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

import numpy as np

from rlvla.checkpoints.run_folder import RUN_FILE
from rlvla.envs.base import TaskSpec
from rlvla.evaluation.protocol import Instructions, eval_request
from rlvla.evaluation.results import EpisodeOutcome, EvalResult
from rlvla.experience import Sample
from rlvla.rewards import RewardConfig, StepInfo
from rlvla.rewards.base import EpisodeStart
from rlvla.rewards.machine_source import MachineSource
from rlvla.rewards.state_input import STATE_FLAGS
from rlvla.rollout import RolloutEngine, RolloutPolicy, TooManyDroppedError
from rlvla.utils.data_files import read_json
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import BestEffortWriter
from rlvla.utils.terminal import log
from rlvla.utils.video import beside_each_other, caption_frames, upright, write_mp4

_best_effort = BestEffortWriter("a video")
POLICY_VIEW = "seen by the policy"
# Camera -> frames [F, H, W, 3] uint8 of an episode, as rendered.
SceneViews = Mapping[str, np.ndarray]
# Renders further cameras of recorded episodes; None for an episode that could not be rendered.
SceneFilm = Callable[[Sequence[Sample]], Iterable[SceneViews | None]]


@dataclass(frozen=True)
class EvalVideo:
    """A recorded episode.

    Attributes:
        path: mp4 file, named after task, initial state and outcome.
        task: task name.
        init_state_id: id of the initial state.
        success: success at the end of the recorded episode.
        frames: [F, H, W, 3] uint8 with captions.
        fps: frames per second.
    """

    path: Path
    task: str
    init_state_id: int
    success: bool
    frames: np.ndarray
    fps: float


def choose_episodes(
    result: EvalResult,
    count: int,
    preferred: Collection[tuple[str, int]] = (),
    baselines: Sequence[EvalResult] = (),
) -> list[EpisodeOutcome]:
    """Select up to `count` episodes, alternating tasks; half of them (rounded up) are failures if possible.

    Episodes whose outcome differs from a baseline's, lost and gained in turn, are chosen first; before others of their
    kind, those in `preferred`, given as (`recorded_name` of the task, initial state).
    """
    names = {task.task_id: recorded_name(task.name) for task in result.tasks}
    first = [episode for episode in result.episodes if not episode.sample]  # one per initial state
    first.sort(key=lambda e: (names.get(e.task_id, ""), e.init_state_id) not in preferred)
    of_baselines = [e for base in baselines for e in base.episodes if not e.sample]
    outcomes = {(e.task_id, e.init_state_id, e.success_at_end) for e in of_baselines}
    differing = [e for e in first if (e.task_id, e.init_state_id, not e.success_at_end) in outcomes]
    lost, gained = (_in_turn([e for e in differing if e.success_at_end == success]) for success in (False, True))
    chosen = [e for pair in zip_longest(lost, gained) for e in pair if e is not None][:count]
    count -= len(chosen)
    failures = _in_turn([e for e in first if not e.success_at_end and e not in chosen])
    successes = _in_turn([e for e in first if e.success_at_end and e not in chosen])
    from_failures = min(len(failures), max(-(-count // 2), count - len(successes)))
    return chosen + failures[:from_failures] + successes[: count - from_failures]


def recorded_name(task: str) -> str:
    """Name of a task in the file names of videos."""
    return re.sub(r"[^\w.-]+", "_", task)


def recorded_state(path: Path) -> tuple[str, int]:
    """(`recorded_name` of the task, initial state) of a video file; state -1 if `record_videos` did not write it."""
    match = re.fullmatch(r"(.+)_state(\d+)_(?:success|failure)", path.stem)
    return (match[1], int(match[2])) if match else (path.stem, -1)


def _in_turn(episodes: Sequence[EpisodeOutcome]) -> list[EpisodeOutcome]:
    """The first episode of each task, then the second of each, and so on."""
    turn: dict[int, int] = {}
    keyed = []
    for episode in episodes:
        turn[episode.task_id] = turn.get(episode.task_id, -1) + 1
        keyed.append((turn[episode.task_id], episode))
    return [episode for _, episode in sorted(keyed, key=lambda pair: (pair[0], pair[1].task_id))]


def record_videos(
    engine: RolloutEngine,
    policy: RolloutPolicy,
    tasks: Sequence[TaskSpec],
    strategy: DeepspeedStrategy,
    result: EvalResult,
    folder: Path,
    *,
    count: int,
    seed: int,
    temperature: float,
    instructions: str = "own",
    images: str = "own",
    machines: MachineSource | None = None,
    states: Collection[tuple[int, int]] | None = None,
    scene: SceneFilm | None = None,
) -> list[EvalVideo]:
    """Replay selected episodes of an evaluation and write them as mp4; to be called on all ranks.

    Args:
        engine: rollout engine.
        policy: the evaluated policy.
        tasks: as in the evaluation.
        strategy: distributes the episodes over the ranks.
        result: results of the evaluation.
        folder: output folder.
        count: maximum number of videos.
        seed: as in the evaluation.
        temperature: as in the evaluation; ignored if greedy.
        instructions: as in the evaluation.
        images: as in the evaluation; videos show the images of the episode in any case.
        machines: reward machines whose states are shown; default: the engine's, if any.
        states: (task id, initial state id) of the episodes to record, instead of `count` chosen ones.
        scene: renders further cameras, shown beside the policy's images.

    Returns:
        The videos of all ranks, on the main rank; [] on the others.
    """
    by_id = {task.task_id: task for task in tasks}
    if states is None:
        states = [(e.task_id, e.init_state_id) for e in choose_episodes(result, count)]
    played = {(e.task_id, e.init_state_id) for e in result.episodes}
    chosen = sorted(played & set(states))
    texts = Instructions(instructions, tasks)
    requests = [
        replace(
            eval_request(by_id[task_id], state, seed, record_frames=True),
            other_instructions=texts.of(by_id[task_id], state),
            blind=images == "none",
        )
        for task_id, state in chosen
    ]
    assigned = requests[strategy.rank :: strategy.world_size]
    try:
        samples = engine.run(assigned, policy, temperature=temperature, greedy=result.greedy, success_only=True)
    except TooManyDroppedError as error:  # the evaluation itself is complete
        log.warning("some videos are missing: %s", error)
        samples = []
    of_rewards = engine.rewards.sources.get("rm")
    machines = machines or (of_rewards if getattr(of_rewards, "needs_events", False) else None)
    videos: list[EvalVideo] = []
    for sample, views in zip(samples, [None] * len(samples) if scene is None else scene(samples)):
        write = partial(_write, folder, by_id[sample.task_id], sample, machines, views, videos)
        _best_effort.attempt(write)
    gathered = [video for of_rank in strategy.gather_objects(videos) for video in of_rank]
    return gathered if strategy.is_main else []


def _write(
    folder: Path,
    task: TaskSpec,
    sample: Sample,
    machines: MachineSource | None,
    views: SceneViews | None,
    videos: list[EvalVideo],
) -> None:
    frames = captioned(sample, machine_states(sample, task, machines), primitive_names(sample, task), views)
    outcome = "success" if sample.success_at_end else "failure"
    path = folder / f"{recorded_name(task.name)}_state{sample.init_state_id}_{outcome}.mp4"
    write_mp4(path, frames, task.control_freq)
    success = bool(sample.success_at_end)
    videos.append(EvalVideo(path, task.name, sample.init_state_id, success, frames, task.control_freq))


def machines_of_run(policy: Path) -> MachineSource | None:
    """Reward machines of the training run of a policy, from its run folder; None without an `rm` source."""
    try:
        flags = read_json(policy.parent / RUN_FILE, allow_nan=True)["rewards"]
        if not any(spec.partition(":")[0] == "rm" for spec in flags["reward"]):
            return None
        return MachineSource(RewardConfig(**{name: flags[name] for name in STATE_FLAGS}))
    except (OSError, ValueError, KeyError, TypeError):  # not a run folder, or one of another version
        return None


def machine_states(sample: Sample, task: TaskSpec, machines: MachineSource | None) -> list[str] | None:
    """State of the task's reward machine at the start and after each step; None without a machine."""
    if sample.step_events is None or machines is None:
        return None
    try:
        machine = machines.create(task, EpisodeStart(None, sample.init_state_id, sample.seed))
    except ConfigError:
        return None
    for events, success in sample.step_events:
        machine.step(None, events, StepInfo(success=success, terminated=False, truncated=False))
    return machine.states


def primitive_names(sample: Sample, task: TaskSpec) -> list[str] | None:
    """Name of the action primitive before the start ("") and in each step; None if the task has none."""
    if not task.primitives or sample.actions is None:
        return None
    scores = sample.actions[:, 0, : len(task.primitives)].numpy()
    chosen = np.clip(scores, -task.action_limit, task.action_limit).argmax(1)  # as the environment chooses
    steps = sample.executed.sum(1).tolist()
    return ["", *(task.primitives[index][0] for index, count in zip(chosen, steps) for _ in range(count))]


def captioned(
    sample: Sample,
    states: Sequence[str] | None = None,
    primitives: Sequence[str] | None = None,
    views: SceneViews | None = None,
) -> np.ndarray:
    """The captioned frames of a recorded episode, starting with its first observation.

    Without recorded frames only the first observation is shown. `states` are from `machine_states`, `primitives` from
    `primitive_names`; `views` are shown to the left of the policy's images.
    """
    start = sample.env_images[0, :1].numpy()
    frames = np.concatenate([start, sample.frames]) if sample.frames is not None else start
    frames = upright(frames, sample.images_flipped_vertically)
    if views is not None:
        scene = {name: upright(view, sample.images_flipped_vertically) for name, view in views.items()}
        frames = beside_each_other(scene | {POLICY_VIEW: frames})
    return caption_frames(
        frames,
        sample.instruction,
        success=[False, *(success for _, success in sample.step_events or ())],
        states=states,
        primitives=primitives,
        result=bool(sample.success_at_end),
    )
