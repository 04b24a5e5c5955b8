"""From the flags of `cli/convert_demos.py` to a data set of another format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlvla.trainer.demonstrations import UNKNOWN_STATE, Demonstrations, DemonstrationWriter
from rlvla.trainer.joined_demonstrations import control_frequency, joined, read_parts
from rlvla.trainer.lerobot import VERSIONS
from rlvla.trainer.lerobot_writing import write_lerobot
from rlvla.trainer.recorded_episodes import with_every_step
from rlvla.utils.arguments import arg, range_problems
from rlvla.utils.errors import ConfigError, require
from rlvla.utils.runs import output_folder_problem

FORMATS = ("hdf5", *(f"lerobot-{version}" for version in VERSIONS))


@dataclass(frozen=True)
class ConvertConfig:
    """What is converted, and into what."""

    demos: tuple[str, ...] = arg(
        ("runs/demos/demos.hdf5",),
        "one or more HDF5 files of demonstrations or dumped rollouts, or LeRobot folders; they become one data set",
        metavar="PATH",
    )
    output: str = arg("runs/converted", "folder of the new data set", metavar="DIR")
    format: str = arg("lerobot-v3.0", "format of the new data set", choices=FORMATS)
    cameras: tuple[str, ...] = arg((), "cameras to keep, in this order (default: all)", metavar="NAME")
    control_freq: float | None = arg(
        None, "environment steps per second, the fps of lerobot (default: as recorded, else the task's)", above=0
    )
    render_steps: bool = arg(
        False,
        "dumped rollouts hold pictures of decisions only: play them again in their simulator and keep every step's",
    )


def run_convert(config: ConvertConfig) -> Path:
    """Convert; returns the new folder. Every configuration problem is raised before anything is written."""
    problems = range_problems(config)
    folder = output_folder_problem(config.output)
    problems += [f"--output: {folder}"] if folder else []
    if config.format != "hdf5":
        for module in ("pyarrow", "av"):
            require(module, extra="lerobot")
    demos, parts = None, []
    try:
        parts = read_parts(config.demos, config.cameras or None)
        demos = joined(parts)
    except ConfigError as error:
        problems += [p if "--demos" in p else f"--demos: {p}" for p in error.problems]
    freq = config.control_freq
    if demos is not None and config.format != "hdf5":
        try:
            freq = freq or control_frequency(demos)
            if freq is None:
                problems.append(
                    f"--control_freq: {' '.join(config.demos)} does not tell its environment steps per second, and "
                    f"suite {demos.env_args.get('task_suite_name')} is not known here; give them"
                )
        except ConfigError as error:
            problems += [f"--control_freq: {p}; or give the environment steps per second" for p in error.problems]
    if demos is not None and config.render_steps and demos.decision_steps is None:
        problems.append(f"--render_steps: {' '.join(config.demos)} already holds a picture of every step; leave it out")
    if problems or demos is None:
        raise ConfigError(problems)
    if config.render_steps:
        # Each file tells the environment of its own episodes.
        demos = joined([with_every_step(path, part) for path, part in zip(config.demos, parts)])
    output = Path(config.output)
    if config.format == "hdf5":
        _write_hdf5(output, demos, freq or demos.control_freq)
    else:
        assert freq is not None
        write_lerobot(output, demos, freq, config.format.removeprefix("lerobot-"))
    print(f"{output}: {len(demos.actions)} episodes, {demos.num_steps} steps, {config.format}")
    return output


def _write_hdf5(folder: Path, demos: Demonstrations, control_freq: float | None) -> None:
    (entry,) = demos.statistics.values()
    gripper = [dim for dim, normalised in enumerate(entry["action"]["mask"]) if not normalised]
    writer = DemonstrationWriter(
        folder / "demos.hdf5", demos.env_args, demos.env_args["cameras"], gripper, control_freq
    )
    try:
        for index, actions in enumerate(demos.actions):
            rewards = np.zeros(len(actions), np.float32)
            rewards[-1] = float(demos.success[index])
            if demos.rewards is not None:
                rewards = demos.rewards[index]
            task_id, state = demos.init_states[index] if demos.init_states else UNKNOWN_STATE
            episode = {
                "actions": actions,
                "rewards": rewards,
                "instruction": demos.instructions[index],
                "init_state_id": state,
                "seed": demos.seeds[index] if demos.seeds is not None else 0,
                "success_at_end": demos.success[index],
                "images": demos.images[index],
                "proprio": None if demos.proprio is None else demos.proprio[index],
            }
            if demos.decision_steps is not None:
                episode["more"] = {"decision_steps": demos.decision_steps[index]}
            writer.add(episode, task_id)
        writer.close()
    except BaseException:
        writer.abort()
        raise
