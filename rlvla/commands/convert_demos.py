"""Conversion of datasets between formats, for `cli/convert_demos.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.data.demonstrations import UNKNOWN_STATE, Demonstrations
from rlvla.data.lerobot_writing import write_lerobot
from rlvla.data.options import ReadOptions
from rlvla.data.reading import control_frequency, data_files, joined, read_parts
from rlvla.data.replayed_episodes import with_every_step
from rlvla.data.robomimic import INTERVENTIONS, LAST_OBS, DemonstrationWriter
from rlvla.utils.cli.flags import arg, range_problems
from rlvla.utils.errors import ConfigError, Problem, require
from rlvla.utils.files import output_folder_problem
from rlvla.utils.terminal import log, show

FORMATS = ("hdf5", "lerobot-v3.0")


@dataclass(frozen=True)
class ConvertConfig(ReadOptions):
    """Datasets to convert, and the format of the result."""

    demos: tuple[str, ...] = arg(
        ("runs/demos/demos.hdf5",),
        "one or more HDF5 files of demonstrations or dumped rollouts, or LeRobot folders; they become one dataset",
        metavar="PATH",
    )
    output: str = arg("runs/converted", "folder of the new dataset", metavar="DIR", writes="folder")
    format: str = arg("lerobot-v3.0", "format of the new dataset", choices=FORMATS)
    cameras: tuple[str, ...] = arg((), "cameras to keep, in this order (default: all)", metavar="NAME")
    control_freq: float | None = arg(
        None,
        "environment steps per second, the fps of lerobot (default: as recorded, else the task's)",
        minimum=0.01,
        maximum=100_000,
    )
    render_steps: bool = arg(
        False,
        "replay dumped rollouts, which have images of decisions only, in their simulator to get an image of each step",
    )


def run_convert(config: ConvertConfig) -> Path:
    """Convert the files and return the new folder; all configuration problems are raised before anything is written."""
    problems: list[Problem] = range_problems(config)
    if folder := output_folder_problem(config.output):
        problems.append(Problem("output", "folder_in_use", f"--output: {folder}"))
    if config.format != "hdf5":
        for module in ("pyarrow", "av"):
            require(module, extra="lerobot")
    demos, datasets = None, []
    try:
        datasets = read_parts(config.demos, config.cameras or None, options=config)
        demos = joined(datasets)
    except ConfigError as error:
        problems += [p if p.flag else p.of_flag("demos") for p in error.problems]
    if demos is not None and demos.autonomous is not None and not all(demos.autonomous):
        text = f"--demos {' '.join(config.demos)}: episodes of a policy and of an expert cannot be told apart in one"
        problems.append(
            Problem("demos", "mismatch", f"{text} dataset; convert each kind by itself (training reads both)")
        )
    if demos is not None and demos.has_corrections and config.stride > 1:
        text = f"--stride {config.stride}: corrections have an image of each step; leave it out"
        problems.append(Problem("stride", "contradiction", text))
    freq = config.control_freq
    if demos is not None and config.format != "hdf5":
        try:
            freq = freq or control_frequency(demos)
            if freq is None:
                text = f"--control_freq: {' '.join(config.demos)} does not record its environment steps per second, and"
                text += f" suite {demos.env_args.get('task_suite_name')} is unknown; give them"
                problems.append(Problem("control_freq", "unknown_name", text))
        except ConfigError as error:
            texts = [f"--control_freq: {p}; or give the environment steps per second" for p in error.problems]
            problems += [Problem("control_freq", "mismatch", text) for text in texts]
    if demos is not None and config.render_steps and demos.decision_steps is None:
        text = f"--render_steps: {' '.join(config.demos)} already has an image of each step; leave it out"
        problems.append(Problem("render_steps", "no_effect", text))
    if problems or demos is None:
        raise ConfigError(problems)
    if config.render_steps:
        # Each file has the environment options of its episodes.
        demos = joined([with_every_step(path, dataset) for path, dataset in zip(data_files(config.demos), datasets)])
    output = Path(config.output)
    if config.format == "hdf5":
        _write_hdf5(output, demos, freq or demos.control_freq)
    else:
        assert freq is not None
        lost = {"observations after the last action": demos.last_images, "ranks": demos.ranks}
        if names := [name for name, values in lost.items() if values is not None]:
            log.warning(f"{config.format} has no place for {' and '.join(names)}: not written")
        write_lerobot(output, demos, freq)
    show(f"{output}: {len(demos.actions)} episodes, {demos.num_steps} steps, {config.format}")
    return output


def _write_hdf5(folder: Path, demos: Demonstrations, control_freq: float | None) -> None:
    cameras, unnormalized = demos.env_args["cameras"], demos.unnormalized_dims
    writer = DemonstrationWriter(folder / "demos.hdf5", demos.env_args, cameras, unnormalized, control_freq)
    try:
        for index, actions in enumerate(demos.actions):
            success, rewards = demos.outcome(index), None
            if demos.rewards is not None:
                rewards = demos.rewards[index]
            elif success is not None:
                rewards = np.zeros(len(actions), np.float32)
                rewards[-1] = float(success)
            task_id, state = demos.init_states[index] if demos.init_states else UNKNOWN_STATE
            episode: dict[str, Any] = {
                "actions": actions,
                "rewards": rewards,
                "instruction": demos.instructions[index],
                "instructions": demos.step_instructions and demos.step_instructions[index],
                "init_state_id": state,
                "seed": demos.seeds[index] if demos.seeds is not None else 0,
                "success_at_end": success,
                "images": demos.images[index],
                "proprio": None if demos.proprio is None else demos.proprio[index],
            }
            recorded = {"decision_steps": demos.decision_steps, INTERVENTIONS: demos.interventions}
            episode["more"] = {name: values[index] for name, values in recorded.items() if values is not None}
            if demos.last_images is not None:
                for camera, picture in zip(cameras, demos.last_images[index]):
                    episode["more"][f"{LAST_OBS}/{camera}_image"] = picture
            if demos.last_proprio is not None:
                episode["more"][f"{LAST_OBS}/proprio"] = demos.last_proprio[index]
            if demos.ranks is not None:
                episode["rank"] = demos.ranks[index]
            writer.add(episode, task_id)
        writer.close()
    except BaseException:
        writer.abort()
        raise
