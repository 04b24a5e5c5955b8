"""Flags of reading demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlvla.envs.config import INSTRUCTION_SOURCES, TASK, EnvConfig
from rlvla.envs.pictures import IMAGE_FIT_HELP, IMAGE_FITS, ImageFit
from rlvla.options import arg, given
from rlvla.utils.errors import ConfigError, Problem

IMAGE_PREFIX = "observation.images."


def dataset_camera_flag(**metadata: Any) -> Any:
    """The field of `--dataset_camera`; `metadata` as for `arg`."""
    text = (
        "name of a camera for an image feature of a LeRobot dataset, repeatable (default: the feature's name after "
        f"`{IMAGE_PREFIX}`, of other features the part after the last dot)"
    )
    return arg((), text, action="append", metavar="NAME=FEATURE", **metadata)


@dataclass(frozen=True)
class ReadOptions:
    """How demonstrations are read."""

    dataset_camera: tuple[str, ...] = dataset_camera_flag()
    proprio_keys: tuple[str, ...] = arg(
        (),
        "proprioception of an HDF5 file: the arrays obs/KEY, concatenated (default: obs/proprio; of robomimic position "
        "and quaternion of the end effector, and the gripper)",
        metavar="KEY",
    )
    instruction: str | None = arg(
        None, "language instruction of all episodes of an HDF5 file (default: as recorded)", metavar="TEXT"
    )
    instruction_source: str | None = arg(
        None,
        "instruction of training rows: task: that of the task; else the source that was recorded (default: as "
        "recorded)",
        choices=INSTRUCTION_SOURCES,
    )
    filter_key: str | None = arg(
        None, "read the episodes of an HDF5 file that its list mask/KEY names (default: all)", metavar="KEY"
    )
    episodes: tuple[str, ...] = arg(
        (),
        "episodes to read, of each file or LeRobot dataset: their numbers and ranges, e.g. 0 3 10-19 (default: all)",
        metavar="N",
    )
    tasks: tuple[str, ...] = arg(
        (), "read the episodes with these instructions; * stands for any text (default: all)", metavar="TEXT"
    )
    stride: int = arg(
        1, "read every N-th observation of an episode; actions keep their rate (default: all)", minimum=1, metavar="N"
    )
    image_size: int | None = arg(
        None,
        "resize the images of the demonstrations to squares of this side in pixels (default: as recorded)",
        minimum=8,
        maximum=4096,
    )
    image_fit: str = arg("pad", IMAGE_FIT_HELP, choices=IMAGE_FITS, read_if=given("image_size"))

    @property
    def camera_names(self) -> dict[str, str]:
        """Image feature of a LeRobot dataset -> camera name.

        Raises:
            ConfigError: an entry has another form than NAME=FEATURE, or a feature is named twice.
        """
        names: dict[str, str] = {}
        problems = []
        for entry in self.dataset_camera:
            camera, _, feature = entry.partition("=")
            if not camera or not feature:
                text = f"--dataset_camera {entry}: write NAME=FEATURE, e.g. top=observation.image"
                problems.append(Problem("dataset_camera", "invalid_value", text))
            elif feature in names:
                text = f"--dataset_camera names the feature {feature} twice"
                problems.append(Problem("dataset_camera", "duplicate", text))
            names[feature] = camera
        if problems:
            raise ConfigError(problems)
        return names

    @property
    def fit(self) -> ImageFit | None:
        """The resizing of images; None: as recorded."""
        return None if self.image_size is None else ImageFit(self.image_size, self.image_fit)

    @property
    def selects(self) -> bool:
        """Whether only some rows or proprioceptive observations are read, so that statistics are not the file's."""
        return bool(self.episodes or self.tasks or self.filter_key or self.proprio_keys or self.stride > 1)

    def words(self) -> Sequence[str]:
        """The flags, for a command line that reads the same data."""
        words = [word for entry in self.dataset_camera for word in ("--dataset_camera", entry)]
        words += ["--proprio_keys", *self.proprio_keys] if self.proprio_keys else []
        for name in ("episodes", "tasks"):
            words += [f"--{name}", *getattr(self, name)] if getattr(self, name) else []
        words += ["--stride", str(self.stride)] if self.stride > 1 else []
        for name in ("instruction", "instruction_source", "filter_key"):
            words += [] if getattr(self, name) is None else [f"--{name}", getattr(self, name)]
        size = [] if self.image_size is None else ["--image_size", str(self.image_size), "--image_fit", self.image_fit]
        return [*words, *size]


AS_RECORDED = ReadOptions()


def options_like(env: EnvConfig, dataset_camera: Sequence[str]) -> ReadOptions:
    """Options that fit images as the environment of a policy does, with its source of instructions."""
    options = ReadOptions(tuple(dataset_camera), instruction_source=env.instruction_source or TASK)
    if env.image_size is None or env.image_fit not in IMAGE_FITS:
        return options
    return replace(options, image_size=env.image_size, image_fit=env.image_fit)
