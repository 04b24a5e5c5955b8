"""Supported robosuite tasks: names, instructions, time limits, cameras, and facts."""

from __future__ import annotations

from dataclasses import dataclass

from rlvla.envs.mujoco.cameras import CameraPlacement
from rlvla.envs.robosuite.facts import (
    DoorFacts,
    LiftFacts,
    NutAssemblyRoundFacts,
    PickPlaceCanFacts,
    StackFacts,
    TaskFacts,
    WipeFacts,
)
from rlvla.envs.robosuite.primitives import PRIMITIVES, TOOL_PRIMITIVES, Workspace

# The table of Lift and Stack, whose top is at z 0.8.
TABLE = Workspace(low=(-0.30, -0.30, 0.80), high=(0.15, 0.30, 0.95), object_height=0.85, lift_height=0.95)


@dataclass(frozen=True)
class RobosuiteTask:
    """A task of the suite.

    Attributes:
        name: robosuite's name of the environment.
        instruction: instruction for the policy.
        paraphrases: paraphrases of the instruction, for evaluation.
        seconds: time limit in simulated seconds.
        facts: computes propositions and privileged state.
        machine: its reward machine, see `TaskSpec.machine`.
        closeup: placement of the camera `closeup`, whose image is filled by the objects and the gripper's workspace.
        workspace: the box of its action primitives.
        has_gripper: False (Wipe) shortens actions and proprio by one dimension.
        can_spread: whether objects sampled from wider ranges remain reachable.
        missing_cameras: cameras of the suite that the task's arena lacks.
    """

    name: str
    instruction: str
    paraphrases: tuple[str, str]
    seconds: float
    facts: type[TaskFacts]
    machine: str
    closeup: CameraPlacement
    workspace: Workspace = TABLE
    has_gripper: bool = True
    can_spread: bool = True
    missing_cameras: tuple[str, ...] = ()

    @property
    def primitives(self) -> tuple[tuple[str, int], ...]:
        """Its action primitives, see `TaskSpec.primitives`."""
        return PRIMITIVES if self.has_gripper else TOOL_PRIMITIVES


TASKS = (
    RobosuiteTask(
        name="Lift",
        instruction="lift the red cube",
        paraphrases=("pick up the red block", "raise the small red cube off the table"),
        seconds=2.0,
        facts=LiftFacts,
        machine="lift",
        # The cube is 9 of 64 pixels wide (5 in `agentview`), and the open gripper is visible from the start.
        closeup=CameraPlacement(position=(0.45, 0.0, 1.12), target=(-0.04, 0.0, 0.935), fovy=40.0),
    ),
    RobosuiteTask(
        name="Stack",
        instruction="stack the red cube on the green cube",
        paraphrases=("put the red block on top of the green one", "place the small red cube onto the green cube"),
        seconds=10.0,
        facts=StackFacts,
        machine="stack",
        closeup=CameraPlacement(position=(0.45, 0.0, 1.18), target=(-0.03, 0.0, 0.92), fovy=42.0),
    ),
    RobosuiteTask(
        name="Door",
        instruction="open the door",
        paraphrases=("pull the door open", "turn the handle and swing the door open"),
        seconds=15.0,
        facts=DoorFacts,
        machine="door",
        closeup=CameraPlacement(position=(0.35, 0.35, 1.45), target=(-0.2, -0.2, 1.05), fovy=45.0),
        workspace=Workspace(
            low=(-0.35, -0.45, 0.95), high=(0.10, 0.10, 1.20), object_height=1.20, lift_height=1.15, time_scale=1.5
        ),
    ),
    RobosuiteTask(
        name="PickPlaceCan",
        instruction="place the can in its bin",
        paraphrases=("put the can into the bin where it belongs", "pick up the can and drop it into its compartment"),
        seconds=20.0,
        facts=PickPlaceCanFacts,
        machine="pick_place",
        closeup=CameraPlacement(position=(0.85, 0.05, 1.55), target=(0.1, 0.05, 0.9), fovy=50.0),
        workspace=Workspace(
            low=(-0.10, -0.50, 0.80), high=(0.30, 0.50, 1.10), object_height=0.95, lift_height=1.00, time_scale=1.5
        ),
        missing_cameras=("sideview",),
        can_spread=False,  # out of its bin
    ),
    RobosuiteTask(
        name="NutAssemblyRound",
        instruction="put the round nut on the round peg",
        paraphrases=("slide the ring over the round post", "fit the round nut onto the cylindrical peg"),
        seconds=20.0,
        facts=NutAssemblyRoundFacts,
        machine="nut",
        closeup=CameraPlacement(position=(0.7, -0.1, 1.3), target=(0.0, -0.1, 0.9), fovy=45.0),
        workspace=Workspace(
            low=(-0.30, -0.30, 0.82), high=(0.30, 0.30, 1.10), object_height=0.95, lift_height=1.02, time_scale=1.5
        ),
    ),
    RobosuiteTask(
        name="Wipe",
        instruction="wipe the table clean",
        paraphrases=("clean the dirt off the table", "sweep the marks from the table with the sponge"),
        seconds=25.0,
        facts=WipeFacts,
        machine="wipe",
        closeup=CameraPlacement(position=(0.85, 0.0, 1.5), target=(0.1, 0.0, 0.9), fovy=45.0),
        workspace=Workspace(
            low=(-0.10, -0.40, 0.88), high=(0.40, 0.40, 1.10), object_height=0.95, lift_height=1.00, time_scale=1.5
        ),
        has_gripper=False,
        can_spread=False,  # there are none
    ),
)
