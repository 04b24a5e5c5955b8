"""Suite options, validated together. Options added by a suite become flags."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from rlvla.utils.cli.flags import range_problems
from rlvla.utils.errors import ConfigError, Problem

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
        has_more_cameras: whether there may be other ones, which `list_tasks` knows.
        needs_camera: whether at least one camera is required.
        smallest_image: minimum `image_size` in pixels.
        can_play_on: whether `after_success` may be "continue".
        action_options: options that choose what an action is; at their defaults, actions are those of demonstrations.
        privileged_options: options that add to proprio what a robot cannot know; at their defaults, nothing is added.
        unplayed_options: other options in which policies may differ and still play the same episodes, such as those of
            a reward; all that are not named are a part of the protocol of an evaluation.
        cameras: names from `known_cameras`, in the order of the images.
        image_size: height and width of the images in pixels.
        use_proprio: whether observations include the proprioceptive vector.
        max_steps: environment steps until truncation; None uses the task's default.
        success_hold_steps: consecutive successful steps that end an episode; None uses the suite's default.
        after_success: "end" ends an episode once success has been held, "continue" plays on to the step limit, where it
            must hold; only where `can_play_on`.
        render_quality: "fast" may skip expensive visual effects, "full" renders everything. Physics is unaffected.

    Raises:
        ConfigError: all invalid values (reported at once).
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
    use_proprio: bool = False
    max_steps: int | None = None
    success_hold_steps: int | None = None
    render_quality: str = "fast"
    after_success: str = "end"

    def __post_init__(self):
        # A single name would otherwise be split into letters.
        cameras = (self.cameras,) if isinstance(self.cameras, str) else tuple(self.cameras)
        object.__setattr__(self, "cameras", cameras)
        problems = self.problems()
        if problems:
            raise ConfigError(problems)

    @property
    def plays_on(self) -> bool:
        """Whether episodes go on to the step limit after success."""
        return self.after_success == AFTER_SUCCESS[1]

    def problems(self) -> list[Problem]:
        """All problems of the values; suites extend this with checks beyond the bounds of single fields."""
        known, problems = ", ".join(self.known_cameras), list[Problem]()
        unknown = [name for name in self.cameras if name not in self.known_cameras]
        if unknown and not self.has_more_cameras:
            text = f"unknown camera(s) {', '.join(unknown)}; known cameras: {known}"
            problems.append(Problem("cameras", "unknown_name", text))
        if len(set(self.cameras)) < len(self.cameras):
            problems.append(Problem("cameras", "duplicate", f"cameras are named twice: {', '.join(self.cameras)}"))
        if self.needs_camera and not self.cameras:
            problems.append(Problem("cameras", "too_few", f"at least one camera must be named; known cameras: {known}"))
        for name, least in (("image_size", self.smallest_image), ("max_steps", 1), ("success_hold_steps", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                problems.append(Problem(name, "out_of_range", f"--{name} {value}: must be at least {least}"))
        if self.plays_on and not self.can_play_on:
            text = "--after_success continue: the episodes of this suite end with success"
            problems.append(Problem("after_success", "unavailable", text))
        for name in self.privileged_options:
            if getattr(self, name) and not self.use_proprio:
                text = f"--{name} is a part of proprio: give --use_proprio as well"
                problems.append(Problem(name, "needs_flag", text))
        return problems + _choice_problems(self) + range_problems(self)


def _choice_problems(options: SuiteOptions) -> list[Problem]:
    """Values that are not among their choices; on the command line argparse rejects them."""
    choices = {name: field.metadata.get("choices", ()) for name, field in own_flags(type(options)).items()}
    problems = []
    for name, known in {"render_quality": RENDER_QUALITIES, "after_success": AFTER_SUCCESS, **choices}.items():
        value, known = getattr(options, name), tuple(known() if callable(known) else known)
        if known and value is not None and value not in known:
            text = f"--{name} {value}: must be one of {', '.join(map(str, known))}"
            problems.append(Problem(name, "unknown_name", text))
    return problems


def own_flags(options: type | None) -> dict[str, dataclasses.Field]:
    """Name -> field of the flags that a suite adds to the common ones; {} for None."""
    if options is None:
        return {}
    shared = {field.name for field in dataclasses.fields(SuiteOptions)}
    fields = dataclasses.fields(options)
    return {field.name: field for field in fields if "help" in field.metadata and field.name not in shared}
