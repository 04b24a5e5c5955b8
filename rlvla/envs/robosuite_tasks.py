"""What rlvla knows about each robosuite task: its name, its words, its propositions and its privileged state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:  # listing tasks must not start a simulator
    from rlvla.envs.robosuite_sim import RobosuiteSim

# robosuite counts an object as lifted when its centre is this far above the table top, in metres.
LIFTED_HEIGHT = 0.04


class TaskFacts(Protocol):
    """Reads a task's facts off a simulation."""

    def events(self) -> frozenset[str]:
        """Names of the propositions that hold now."""
        ...

    def state(self) -> dict[str, np.ndarray]:
        """The task's part of the privileged state."""
        ...


class LiftFacts:
    """Lift: `grasped` (both finger pads on the cube), `lifted` (its centre 4 cm above the table top)."""

    def __init__(self, sim: RobosuiteSim):
        self.sim = sim
        self._body = int(sim.env.cube_body_id)
        self._geoms = sim.geom_ids(sim.env.cube.contact_geoms)
        self._table = float(sim.env.model.mujoco_arena.table_offset[2])
        self._position, self._quat = sim.data.xpos[self._body], sim.data.xquat[self._body]

    def events(self) -> frozenset[str]:
        """Names of the propositions that hold now."""
        lifted = self._position[2] > self._table + LIFTED_HEIGHT
        return frozenset(["grasped"] * self.sim.grasped(self._geoms) + ["lifted"] * bool(lifted))

    def state(self) -> dict[str, np.ndarray]:
        """`cube_pos` [3], `cube_quat` [4] (w first), `table_height` [], `grasped` [] bool."""
        return {
            "cube_pos": self._position.copy(),
            "cube_quat": self._quat.copy(),
            "table_height": np.array(self._table),
            "grasped": np.array(self.sim.grasped(self._geoms)),
        }


@dataclass(frozen=True)
class CameraPlacement:
    """Where a camera stands and looks (metres, world frame), and its vertical field of view in degrees."""

    position: tuple[float, float, float]
    target: tuple[float, float, float]
    fovy: float


@dataclass(frozen=True)
class RobosuiteTask:
    """A task of the suite.

    Attributes:
        name: robosuite's name of the environment.
        instruction: what the policy is told.
        seconds: simulated time after which an episode is truncated.
        facts: reads propositions and privileged state.
        closeup: placement of the camera `closeup`, in whose image the objects and the gripper's way fill the frame.
    """

    name: str
    instruction: str
    seconds: float
    facts: type[LiftFacts]
    closeup: CameraPlacement


TASKS = (
    RobosuiteTask(
        name="Lift",
        instruction="lift the red cube",
        seconds=2.0,
        facts=LiftFacts,
        # The cube is 9 of 64 pixels wide here, 5 in `agentview`; the open gripper is in view from the start.
        closeup=CameraPlacement(position=(0.45, 0.0, 1.12), target=(-0.04, 0.0, 0.935), fovy=40.0),
    ),
)
