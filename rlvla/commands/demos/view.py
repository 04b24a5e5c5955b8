"""Viewer of recorded episodes, for `cli/view_data.py`: a page, and a recording for the viewer of rerun.io."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rlvla.data.demonstrations import UNKNOWN_STATE, Demonstrations
from rlvla.data.options import ReadOptions
from rlvla.data.reading import control_frequency, data_files, joined, read_parts, task_of
from rlvla.data.replayed_episodes import play_again, replay_problem
from rlvla.data.robomimic import recorded_rewards
from rlvla.evaluation.demos_page import shown_episodes
from rlvla.evaluation.episode_viewer import ViewedEpisode, render_data_page, write_recording
from rlvla.evaluation.pages import outcome_text
from rlvla.options import Condition, arg
from rlvla.utils.bars import progress_bar
from rlvla.utils.cli.flags import no_effect_problems, range_problems
from rlvla.utils.errors import ConfigError, Problem, require
from rlvla.utils.files import write_atomic
from rlvla.utils.terminal import page_words, show
from rlvla.utils.video import upright

PAGE_FILE = "view_data.html"
_SUM = "reward"


@dataclass(frozen=True)
class ViewConfig(ReadOptions):
    """Episodes to show, and output folder of the page."""

    demos: tuple[str, ...] = arg(
        (),
        "demonstrations or dumped rollouts: HDF5 files, folders of them, LeRobot and LIBERO folders; several are shown "
        "as one dataset",
        metavar="FILE",
    )
    show_episodes: int = arg(
        12,
        "without --episodes: how many, spread over the data, failures among them",
        minimum=1,
        maximum=1000,
        read_if=Condition(lambda flags: not flags["episodes"], "--episodes names them"),
    )
    cameras: tuple[str, ...] = arg((), "cameras to show (default: all of the data)", metavar="NAME")
    max_frames: int = arg(100, "frames of an episode and camera on the page, evenly spaced", minimum=2, maximum=500)
    replay: bool = arg(
        False,
        "execute the actions again, which shows every step and the propositions that hold, where the suite is known "
        "and initial states and seeds are recorded",
    )
    rerun: str | None = arg(
        None,
        "also write the episodes for the viewer of rerun.io (extra rlvla[rerun])",
        metavar="FILE.rrd",
        writes="file",
    )
    output: str = arg(
        "runs/view_data",
        f"folder for {PAGE_FILE}, a page with everything in it; an existing one is overwritten",
        metavar="DIR",
        writes="folder",
    )


def run_view(config: ViewConfig) -> Path:
    """Read the episodes, write the page, and with `rerun` the recording; returns the page.

    Raises:
        ConfigError: a flag is wrong, or the data cannot be read or replayed.
        MissingExtraError: rerun or a reader of the data is not installed.
    """
    problems = [*range_problems(config), *no_effect_problems([config], {}, ())]
    if not config.demos:
        problems.append(Problem("demos", "too_few", "no data is named: give files or folders"))
    if problems:
        raise ConfigError(problems)
    if config.rerun is not None:
        require("rerun", extra="rerun")
    files = data_files(list(dict.fromkeys(config.demos)))
    datasets = read_parts(files, config.cameras or None, options=config)
    demos = joined(datasets)
    count = len(demos.actions)
    if config.replay and (why := replay_problem("it", demos)):
        problems.append(Problem("replay", "not_playable", f"--replay: {why}"))
    if problems:
        raise ConfigError(problems)
    chosen = range(count) if config.episodes else shown_episodes(demos, config.show_episodes)
    with progress_bar(len(chosen), "reading episodes") as bar:
        viewed = []
        for episode in _viewed(config, files, datasets, demos, chosen):
            viewed.append(episode)
            bar.update(1)
    freq = control_frequency(demos)
    page = Path(config.output) / PAGE_FILE
    page.parent.mkdir(parents=True, exist_ok=True)
    successful = f"{sum(demos.success)} of all successful" if demos.success_recorded else outcome_text(None)
    subtitle = f"{len(chosen)} of {count} episodes, {successful}"
    html = render_data_page(" ".join(config.demos), subtitle, viewed, config.max_frames, freq)
    write_atomic(page, html.encode(errors="replace"))
    if config.rerun is not None:
        write_recording(Path(config.rerun), viewed, freq)
        show(f"recording: {config.rerun} (rerun {config.rerun})")
    show(page_words("page", page))
    return page


def _viewed(
    config: ViewConfig,
    files: Sequence[str],
    parts: Sequence[Demonstrations],
    demos: Demonstrations,
    chosen: Sequence[int],
) -> Iterator[ViewedEpisode]:
    """The chosen episodes."""
    task = task_of(demos)
    flipped = task is not None and task.images_flipped_vertically
    places = [(file, index, part) for file, part in zip(files, parts) for index in range(len(part.actions))]
    names: dict[str, list[str]] = {}
    for number in chosen:
        file, index, part = places[number]
        names.setdefault(file, []).append(_name(part, index))
    recorded = {file: recorded_rewards(Path(file), listed) for file, listed in names.items()}  # each opened once
    for number in chosen:
        file, index, part = places[number]
        name, steps = _name(part, index), len(part.actions[index])
        rewards = {source: values for source, values in recorded[file][name].items() if len(values) == steps}
        if not rewards and part.rewards is not None:
            rewards = {_SUM: part.rewards[index]}
        episode = _episode(part, index, flipped, rewards)
        episode = replace(episode, name=name if len(parts) == 1 else f"{file}: {name}")
        yield _played_again(file, part, index, episode, flipped) if config.replay else episode


def _name(part: Demonstrations, index: int) -> str:
    return part.names[index] if part.names else f"demo_{index}"


def _episode(part: Demonstrations, index: int, flipped: bool, rewards: dict[str, np.ndarray]) -> ViewedEpisode:
    images, steps = part.images[index], len(part.actions[index])
    at = np.arange(steps) if part.decision_steps is None else np.asarray(part.decision_steps[index])
    if part.last_images is not None:
        images, at = np.concatenate([images, part.last_images[index][None]]), np.append(at, steps)
    images = upright(images, flipped)
    events = {}
    if part.decision_steps is not None:
        events["decision"] = np.isin(np.arange(steps), part.decision_steps[index])
    if part.interventions is not None:
        events["intervention"] = part.interventions[index]
    state = part.init_states[index] if part.init_states else UNKNOWN_STATE
    return ViewedEpisode(
        name="",
        instruction=part.instructions[index],
        success=part.outcome(index),
        frames={camera: images[:, position] for position, camera in enumerate(part.env_args["cameras"])},
        frame_steps=at,
        actions=part.actions[index],
        rewards=rewards,
        events=events,
        state=None if state[1] < 0 else state,
    )


def _played_again(file: str, part: Demonstrations, index: int, episode: ViewedEpisode, flipped: bool) -> ViewedEpisode:
    """The replayed episode, with the frames of every step and the propositions that hold after it."""
    (played,) = play_again(file, part, [index])
    images = upright(np.stack([observation.images for observation in played.observations]), flipped)
    true_names = [result.events[0] if result.events else frozenset() for result in played.results]
    events = {"success": np.array([bool(result.successes[0]) for result in played.results])}
    for name in played.task.propositions:
        events[name] = np.array([name in held for held in true_names])
    return replace(
        episode,
        frames={camera: images[:, position] for position, camera in enumerate(part.env_args["cameras"])},
        frame_steps=np.arange(len(images)),
        events={**episode.events, **events},
    )
