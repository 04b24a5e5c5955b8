"""The fifty tasks of Meta-World: names in the order of the package, task groups and instructions.

The package has no instructions. The two paraphrases of each task are for evaluation only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MetaWorldTask:
    """A task.

    Attributes:
        name: the package's name without its version.
        instruction: language instruction.
        paraphrases: paraphrases of the instruction.
    """

    name: str
    instruction: str
    paraphrases: tuple[str, str]

    @property
    def env_name(self) -> str:
        """The package's name."""
        return f"{self.name}-v3"


_SENTENCES = {
    "assembly": (
        "put the ring over the peg",
        "lift the ring and lower it onto the peg",
        "slide the round nut onto the upright post",
    ),
    "basketball": (
        "drop the ball into the basket",
        "score with the basketball",
        "carry the ball to the hoop and let it fall in",
    ),
    "bin-picking": (
        "move the cube from one bin to the other",
        "pick the cube out of its bin and place it in the other bin",
        "transfer the block to the neighboring bin",
    ),
    "box-close": ("close the box with its lid", "put the cover on the box", "place the lid on top of the open box"),
    "button-press-topdown": (
        "press the button from above",
        "push the button down",
        "lower the hand onto the button until it gives way",
    ),
    "button-press-topdown-wall": (
        "press the button behind the wall from above",
        "reach over the wall and push the button down",
        "go past the wall and press down on the button",
    ),
    "button-press": ("press the button", "push the button in", "move the hand into the button until it gives way"),
    "button-press-wall": (
        "press the button behind the wall",
        "go around the wall and push the button in",
        "push the button on the far side of the wall",
    ),
    "coffee-button": (
        "press the button of the coffee machine",
        "start the coffee machine",
        "push the button on the coffee maker",
    ),
    "coffee-pull": (
        "pull the mug away from the coffee machine",
        "take the mug out from under the coffee machine",
        "drag the cup away from the coffee maker",
    ),
    "coffee-push": (
        "push the mug under the coffee machine",
        "slide the mug to the coffee machine",
        "move the cup beneath the coffee maker",
    ),
    "dial-turn": ("turn the dial", "rotate the dial by half a turn", "twist the knob around"),
    "disassemble": (
        "take the ring off the peg",
        "lift the ring up from the peg",
        "pull the round nut off the upright post",
    ),
    "door-close": ("close the door", "push the door shut", "swing the open door back until it is shut"),
    "door-lock": ("lock the door", "turn the lock of the door", "rotate the latch so that the door is locked"),
    "door-open": ("open the door", "pull the door open by its handle", "swing the door open"),
    "door-unlock": ("unlock the door", "turn the lock back", "rotate the latch so that the door is unlocked"),
    "hand-insert": (
        "put the hand into the hole",
        "insert the gripper into the hole",
        "lower it into the opening",
    ),
    "drawer-close": ("close the drawer", "push the drawer in", "slide the open drawer shut"),
    "drawer-open": ("open the drawer", "pull the drawer out", "slide the drawer open by its handle"),
    "faucet-open": ("open the faucet", "turn the faucet on", "rotate the handle of the tap to open it"),
    "faucet-close": ("close the faucet", "turn the faucet off", "rotate the handle of the tap to close it"),
    "hammer": (
        "hammer the nail into the wall",
        "pick up the hammer and drive the nail in",
        "hit the nail with the hammer",
    ),
    "handle-press-side": (
        "press the handle down from the side",
        "push the sideways handle down",
        "press down the handle that points sideways",
    ),
    "handle-press": ("press the handle down", "push the handle down", "lower the handle with the hand"),
    "handle-pull-side": (
        "pull the handle up from the side",
        "lift the sideways handle",
        "raise the handle that points sideways",
    ),
    "handle-pull": ("pull the handle up", "lift the handle", "raise the handle with the hand"),
    "lever-pull": ("pull the lever up", "raise the lever", "rotate the lever upward"),
    "pick-place-wall": (
        "carry the puck over the wall to the goal",
        "pick up the puck and place it at the goal behind the wall",
        "lift the puck past the wall and bring it to the target",
    ),
    "pick-out-of-hole": (
        "pick the puck out of the hole",
        "lift the puck from the hole to the goal",
        "take the puck out of the opening",
    ),
    "pick-place": (
        "pick up the puck and place it at the goal",
        "grasp the puck and carry it to the goal",
        "lift the puck to the target position",
    ),
    "plate-slide": ("slide the plate into the cabinet", "push the plate into the net", "move the plate forward inside"),
    "plate-slide-side": (
        "slide the plate sideways into the cabinet",
        "push the plate to the side into the net",
        "move the plate sideways inside",
    ),
    "plate-slide-back": (
        "slide the plate back out of the cabinet",
        "pull the plate out of the net",
        "move the plate back toward the robot",
    ),
    "plate-slide-back-side": (
        "slide the plate sideways out of the cabinet",
        "pull the plate out of the net to the side",
        "move the plate sideways outside",
    ),
    "peg-insert-side": (
        "insert the peg into the hole on the side",
        "pick up the peg and push it into the box from the side",
        "put the peg sideways into the hole",
    ),
    "peg-unplug-side": (
        "unplug the peg from the hole on the side",
        "pull the peg sideways out of the box",
        "take the peg out of the hole",
    ),
    "soccer": ("kick the ball into the goal", "push the ball into the goal", "score a goal with the soccer ball"),
    "stick-push": (
        "push the thermos with the stick",
        "pick up the stick and push the container with it",
        "use the stick to push the bottle",
    ),
    "stick-pull": (
        "pull the thermos with the stick",
        "pick up the stick and pull the container with it",
        "use the stick to pull the bottle",
    ),
    "push": ("push the puck to the goal", "slide the puck to the goal", "move the puck along the table to the target"),
    "push-wall": (
        "push the puck around the wall to the goal",
        "slide the puck past the wall to the goal",
        "move the puck around the wall to the target",
    ),
    "push-back": (
        "push the puck back to the goal",
        "slide the puck toward the robot to the goal",
        "pull the puck back to the target",
    ),
    "reach": ("reach the goal", "move the hand to the goal", "bring the gripper to the target position"),
    "reach-wall": (
        "reach the goal behind the wall",
        "move the hand past the wall to the goal",
        "bring the gripper around the wall to the target",
    ),
    "shelf-place": (
        "place the cube on the shelf",
        "pick up the cube and put it on the shelf",
        "set the block down on the shelf",
    ),
    "sweep-into": (
        "sweep the cube into the hole",
        "push the cube into the hole",
        "slide the block until it falls into the hole",
    ),
    "sweep": ("sweep the cube off the table", "push the cube off the table", "slide the block over the table's edge"),
    "window-open": ("open the window", "slide the window open", "push the window's handle to open it"),
    "window-close": ("close the window", "slide the window shut", "push the window's handle to close it"),
}
TASKS = tuple(MetaWorldTask(name, said, (first, second)) for name, (said, first, second) in _SENTENCES.items())

_ML10_TEST = ("drawer-open", "door-close", "shelf-place", "sweep-into", "lever-pull")
_ML45_TEST = ("bin-picking", "box-close", "hand-insert", "door-lock", "door-unlock")
# The benchmarks of the package: training tasks and held-out tasks.
GROUPS = {
    "MT10": (
        *("reach", "push", "pick-place", "door-open", "drawer-open", "drawer-close", "button-press-topdown"),
        *("peg-insert-side", "window-open", "window-close"),
    ),
    "MT50": tuple(_SENTENCES),
    "ML10": (
        *("reach", "push", "pick-place", "door-open", "drawer-close", "button-press-topdown", "peg-insert-side"),
        *("window-open", "sweep", "basketball"),
    ),
    "ML10-test": _ML10_TEST,
    "ML45": tuple(name for name in _SENTENCES if name not in _ML45_TEST),
    "ML45-test": _ML45_TEST,
}
