"""Suite options, validated together. Options added by a suite become flags."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

from rlvla.envs.pictures import IMAGE_FITS, NATIVE
from rlvla.utils.cli.flags import choice_problems, range_problems
from rlvla.utils.errors import ConfigError, Problem

ENV_IMAGE_FITS = (*IMAGE_FITS, NATIVE)
RENDER_QUALITIES = ("fast", "full")
AFTER_SUCCESS = ("end", "continue")


@dataclass(frozen=True)
class SuiteOptions:
    """Options common to all suites. A suite adds options by deriving from this class.

    A field created with `rlvla.utils.cli.flags.arg` becomes a flag of the commands in the group of the suite; its
    bounds and choices are checked. `arg(..., recorded=False)` marks machine-dependent values, such as installation
    paths, which are not saved with demonstrations and checkpoints. Fields without `arg` are options of `make_env` only.

    Attributes:
        known_cameras: available camera names.
        has_more_cameras: whether there may be others, which `list_tasks` validates.
        needs_camera: whether at least one camera is required.
        smallest_image: minimum `image_size` in pixels.
        can_play_on: whether `after_success` may be "continue".
        action_options: options that define the action space; by default, it is that of demonstrations.
        privileged_options: switches that append privileged state to proprio; off by default (`--critic_input state`).
        unplayed_options: options without effect on the episodes, such as those of a reward; all other options are part
            of the protocol of an evaluation.
        cameras: names from `known_cameras`, in the order of the images.
        image_size: height and width of the images in pixels.
        image_fit: how images of another shape become squares of `image_size`, see `rlvla.envs.pictures`; "native": they
            stay as they are; None: the suite's images are such squares.
        use_proprio: whether observations include the proprioceptive vector.
        max_steps: environment steps until truncation; None uses the task's default.
        success_hold_steps: consecutive successful steps that end an episode; None uses the suite's default.
        after_success: "end" ends an episode once success has been held; "continue" plays to the step limit, where
            success must hold (only if `can_play_on`).
        render_quality: "fast" may skip expensive visual effects, "full" renders everything. Physics is unaffected.

    Raises:
        ConfigError: invalid values; reports all problems.
    """

    known_cameras: ClassVar[tuple[str, ...]] = ()
    has_more_cameras: ClassVar[bool] = False
    needs_camera: ClassVar[bool] = False
    smallest_image: ClassVar[int] = 1
    can_play_on: ClassVar[bool] = False
    action_options: ClassVar[tuple[str, ...]] = ()
    privileged_options: ClassVar[tuple[str, ...]] = ()
    unplayed_options: ClassVar[tuple[str, ...]] = ()

    cameras: tuple[str, ...] = ()
    image_size: int = 64
    image_fit: str | None = field(default=None, metadata={"choices": (*ENV_IMAGE_FITS, None)})
    use_proprio: bool = False
    max_steps: int | None = None
    success_hold_steps: int | None = None
    render_quality: str = field(default="fast", metadata={"choices": RENDER_QUALITIES})
    after_success: str = field(default="end", metadata={"choices": AFTER_SUCCESS})

    def __post_init__(self):
        # A single name would otherwise be split into letters.
        cameras = (self.cameras,) if isinstance(self.cameras, str) else tuple(self.cameras)
        object.__setattr__(self, "cameras", cameras)
        if problems := self.problems():
            raise ConfigError(problems)

    @property
    def plays_on(self) -> bool:
        """Whether episodes continue to the step limit after success."""
        return self.after_success == "continue"

    def problems(self) -> list[Problem]:
        """All problems of the values; suites extend this with checks across fields."""
        cameras, problems = ", ".join(self.known_cameras), list[Problem]()
        unknown = [name for name in self.cameras if name not in self.known_cameras]
        if unknown and not self.has_more_cameras:
            text = f"unknown camera(s) {', '.join(unknown)}; known cameras: {cameras}"
            problems.append(Problem("cameras", "unknown_name", text))
        if len(set(self.cameras)) < len(self.cameras):
            problems.append(Problem("cameras", "duplicate", f"cameras are named twice: {', '.join(self.cameras)}"))
        if self.needs_camera and not self.cameras:
            problems.append(Problem("cameras", "too_few", f"at least one camera is required; known cameras: {cameras}"))
        for name, least in (("image_size", self.smallest_image), ("max_steps", 1), ("success_hold_steps", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                problems.append(Problem(name, "out_of_range", f"--{name} {value}: must be at least {least}"))
        if self.plays_on and not self.can_play_on:
            text = "--after_success continue: episodes of this suite always end with success"
            problems.append(Problem("after_success", "unavailable", text))
        for name in self.privileged_options:
            if getattr(self, name) and not self.use_proprio:
                text = f"--{name} is a part of proprio: give --use_proprio as well"
                problems.append(Problem(name, "needs_flag", text))
        return problems + choice_problems(self) + range_problems(self)


def own_flags(options: type | None) -> dict[str, dataclasses.Field]:
    """Name -> field of the suite-specific flags; {} for None."""
    if options is None:
        return {}
    shared = {field.name for field in dataclasses.fields(SuiteOptions)}
    fields = dataclasses.fields(options)
    return {field.name: field for field in fields if "help" in field.metadata and field.name not in shared}
