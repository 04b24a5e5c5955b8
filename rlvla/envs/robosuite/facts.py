"""Facts of the robosuite tasks: propositions for reward machines and privileged state for scripted experts.

Lengths are in meters, positions in the world frame. "Grasped" means that both finger pads touch the object, as in
robosuite's check.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from rlvla.envs.robosuite.rotation import grasp_yaw, yaw_of

if TYPE_CHECKING:  # listing the propositions must not import a simulator
    from rlvla.envs.robosuite.sim import RobosuiteSim

State = dict[str, np.ndarray]
Keypoints = dict[str, list[np.ndarray]]  # primitive -> positions [3] in the world

# robosuite's threshold: height of the center of a lifted cube above the table top.
LIFTED_HEIGHT = 0.04
# Our choices, where robosuite defines no threshold.
ALIGNED_DISTANCE = 0.02  # horizontal, between the axes of two cubes
CUBE_REACHED_DISTANCE = 0.04  # from the end effector to the cube's center: the width of a cube
REACHED_DISTANCE = 0.05  # from the gripper to the door's handle
UNLATCHED_ANGLE = 0.8  # rotation of the handle in radians
OPENED_ANGLE = 0.3  # angle of the door's hinge in radians: robosuite's success
ABOVE_BIN_HEIGHT = 0.15  # of the can above the bottom of the first bin
NUT_LIFTED_HEIGHT = 0.1  # above the table top
STACKED_HEIGHT = 0.045  # between the centers of two cubes, one on the other
RELEASE_HEIGHT = 0.1  # of the hand above the bottom of a bin, and above the middle of a peg
PEG_DISTANCE = 0.03  # horizontal, from the nut to the axis of its peg


class TaskFacts(Protocol):
    """Computes the facts of a task from a simulation.

    Attributes:
        propositions: all names that `events` may contain.
        success: the proposition that holds exactly where robosuite's success check passes.
        object_state_dim: length of `object_state`.
        origin: [3] origin of the positions in the proprioceptive vector.
    """

    propositions: ClassVar[tuple[str, ...]]
    success: ClassVar[str]
    object_state_dim: ClassVar[int]
    origin: np.ndarray

    def __init__(self, sim: RobosuiteSim): ...

    def events(self) -> frozenset[str]:
        """Names of the propositions that currently hold."""
        ...

    def state(self) -> State:
        """The task's part of the privileged state."""
        ...

    def object_state(self) -> np.ndarray:
        """Object state for policies without images, [object_state_dim].

        Positions are relative to `origin`, grasp directions as in `rlvla.envs.robosuite.rotation.grasp_yaw`.
        """
        ...

    def keypoints(self) -> Keypoints:
        """Target positions per primitive, for its affordance; primitives that need no object are missing."""
        ...


def _holding(**propositions: Any) -> frozenset[str]:
    return frozenset(name for name, holds in propositions.items() if holds)


class _Body:
    """Position, orientation and collision geoms of a body."""

    def __init__(self, sim: RobosuiteSim, model: Any):
        self._sim, body = sim, sim.model.body(model.root_body).id
        self.position, self.quat = sim.data.xpos[body], sim.data.xquat[body]  # views of the simulator's arrays
        self.geoms = sim.geom_ids(model.contact_geoms)

    @property
    def grasped(self) -> bool:
        return self._sim.grasped(self.geoms)

    def state(self, name: str) -> State:
        return {f"{name}_pos": self.position.copy(), f"{name}_quat": self.quat.copy()}


def _vertical_axis(quat: np.ndarray) -> np.ndarray:
    """The body's z axis [3] in the world; `quat` has w first."""
    w, x, y, z = quat
    return np.array([2.0 * (x * z + w * y), 2.0 * (y * z - w * x), 1.0 - 2.0 * (x * x + y * y)])


def _table_top(sim: RobosuiteSim) -> np.ndarray:
    """Center [3] of the table top."""
    return np.array(sim.env.model.mujoco_arena.table_offset, dtype=np.float64)


def _hand(sim: RobosuiteSim) -> np.ndarray:
    """Position [3] of the end effector."""
    return sim.data.site_xpos[sim.eef_site]


class LiftFacts:
    """Lift: `reached` (within 4 cm of the cube's center), `grasped`, `lifted` (center 4 cm above the table top)."""

    propositions: ClassVar[tuple[str, ...]] = ("reached", "grasped", "lifted")
    success: ClassVar[str] = "lifted"
    object_state_dim: ClassVar[int] = 10

    def __init__(self, sim: RobosuiteSim):
        self.sim, self.origin = sim, _table_top(sim)
        self._cube = _Body(sim, sim.env.cube)

    def events(self) -> frozenset[str]:
        """Names of the propositions that currently hold."""
        return _holding(
            reached=np.linalg.norm(self._cube.position - _hand(self.sim)) < CUBE_REACHED_DISTANCE,
            grasped=self._cube.grasped,
            lifted=self._cube.position[2] > self.origin[2] + LIFTED_HEIGHT,
        )

    def state(self) -> State:
        """`cube_pos` [3], `cube_quat` [4] (w first), `table_height` [], `grasped` [] bool."""
        return {
            **self._cube.state("cube"),
            "table_height": np.array(self.origin[2]),
            "grasped": np.array(self._cube.grasped),
        }

    def object_state(self) -> np.ndarray:
        """Cube: position [3], direction to grasp [3], from the hand to it [3], whether it is grasped."""
        cube, direction = self._cube.position, grasp_yaw(yaw_of(self._cube.quat), folds=4)
        return np.concatenate([cube - self.origin, direction, cube - _hand(self.sim), [self._cube.grasped]])

    def keypoints(self) -> Keypoints:
        """The cube."""
        return {"grasp": [self._cube.position], "push": [self._cube.position]}


class StackFacts:
    """Stack: `cubeA_grasped`, `cubeA_lifted` (4 cm), `cubes_aligned` (lifted and within 2 cm), `stacked` (success)."""

    propositions: ClassVar[tuple[str, ...]] = ("cubeA_grasped", "cubeA_lifted", "cubes_aligned", "stacked")
    success: ClassVar[str] = "stacked"
    object_state_dim: ClassVar[int] = 19

    def __init__(self, sim: RobosuiteSim):
        self.sim, self.origin = sim, _table_top(sim)
        self._a, self._b = _Body(sim, sim.env.cubeA), _Body(sim, sim.env.cubeB)

    def events(self) -> frozenset[str]:
        """Names of the propositions that currently hold."""
        lifted = self._a.position[2] > self.origin[2] + LIFTED_HEIGHT
        apart = self._a.position[:2] - self._b.position[:2]
        grasped = self._a.grasped
        return _holding(
            cubeA_grasped=grasped,
            cubeA_lifted=lifted,
            cubes_aligned=lifted and np.hypot(*apart) < ALIGNED_DISTANCE,
            # robosuite's check takes a sixth of the time of a step
            stacked=lifted and not grasped and self.sim.touching(self._a.geoms, self._b.geoms),
        )

    def state(self) -> State:
        """`cubeA_pos`, `cubeB_pos` [3], `cubeA_quat`, `cubeB_quat` [4] (w first), `table_height` [], `grasped` []."""
        return {
            **self._a.state("cubeA"),
            **self._b.state("cubeB"),
            "table_height": np.array(self.origin[2]),
            "grasped": np.array(self._a.grasped),
        }

    def object_state(self) -> np.ndarray:
        """Cube A as in Lift [10]; cube B: position [3], direction to grasp [3], from cube A to it [3]."""
        a, b = self._a.position, self._b.position
        turns = [grasp_yaw(yaw_of(cube.quat), folds=4) for cube in (self._a, self._b)]
        cube_a = (a - self.origin, turns[0], a - _hand(self.sim), [self._a.grasped])
        return np.concatenate([*cube_a, b - self.origin, turns[1], b - a])

    def keypoints(self) -> Keypoints:
        """Cube A, and its target on cube B."""
        place = self._b.position + [0.0, 0.0, STACKED_HEIGHT]
        return {"grasp": [self._a.position], "push": [self._a.position, self._b.position], "reach": [place]}


class DoorFacts:
    """Door: `reached` (handle within 5 cm), `unlatched` (handle turned by 0.8 rad), `opened` (hinge past 0.3 rad)."""

    propositions: ClassVar[tuple[str, ...]] = ("reached", "unlatched", "opened")
    success: ClassVar[str] = "opened"
    object_state_dim: ClassVar[int] = 10

    def __init__(self, sim: RobosuiteSim):
        self.sim, self.origin = sim, _table_top(sim)
        env = sim.env
        self._handle = sim.data.site_xpos[sim.model.site(env.door.important_sites["handle"]).id]
        self._hinge, self._latch = env.hinge_qpos_addr, env.handle_qpos_addr
        self._frame = sim.data.xquat[sim.model.body(env.door.root_body).id]

    def events(self) -> frozenset[str]:
        """Names of the propositions that currently hold."""
        qpos = self.sim.data.qpos
        return _holding(
            reached=np.linalg.norm(_hand(self.sim) - self._handle) < REACHED_DISTANCE,
            unlatched=abs(qpos[self._latch]) > UNLATCHED_ANGLE,
            opened=qpos[self._hinge] > OPENED_ANGLE,
        )

    def state(self) -> State:
        """`handle_pos` [3], `handle_angle` [], `hinge_angle` [] (radians)."""
        qpos = self.sim.data.qpos
        return {
            "handle_pos": self._handle.copy(),
            "handle_angle": np.array(qpos[self._latch]),
            "hinge_angle": np.array(qpos[self._hinge]),
        }

    def object_state(self) -> np.ndarray:
        """Handle: position [3], from the hand to it [3]; sine and cosine of the frame's yaw; hinge and handle angle."""
        yaw, qpos = yaw_of(self._frame), self.sim.data.qpos
        angles = [math.sin(yaw), math.cos(yaw), qpos[self._hinge], qpos[self._latch]]
        return np.concatenate([self._handle - self.origin, self._handle - _hand(self.sim), angles])

    def keypoints(self) -> Keypoints:
        """The handle."""
        return {name: [self._handle] for name in ("reach", "grasp", "push")}


class PickPlaceCanFacts:
    """PickPlaceCan: `grasped`, `lifted` (15 cm above the first bin), `above_bin` (above its target), `placed`."""

    propositions: ClassVar[tuple[str, ...]] = ("grasped", "lifted", "above_bin", "placed")
    success: ClassVar[str] = "placed"
    object_state_dim: ClassVar[int] = 13

    def __init__(self, sim: RobosuiteSim):
        self.sim, env = sim, sim.env
        self.origin = np.array(env.bin1_pos, dtype=np.float64)
        self._can = _Body(sim, env.objects[env.object_id])
        self._target = env.target_bin_placements[env.object_id]
        self._half = np.asarray(env.bin_size[:2]) / 4  # a compartment is half as wide and half as long as a bin

    def events(self) -> frozenset[str]:
        """Names of the propositions that currently hold."""
        position = self._can.position
        return _holding(
            grasped=self._can.grasped,
            lifted=position[2] > self.origin[2] + ABOVE_BIN_HEIGHT,
            above_bin=(np.abs(position[:2] - self._target[:2]) < self._half).all() and position[2] > self._target[2],
            placed=self.sim.success(),
        )

    def state(self) -> State:
        """`can_pos` [3], `can_quat` [4] (w first), `target_pos` [3], `grasped` []."""
        return {
            **self._can.state("can"),
            "target_pos": np.array(self._target),
            "grasped": np.array(self._can.grasped),
        }

    def object_state(self) -> np.ndarray:
        """Can: position [3], axis [3], from the hand to it [3], from it to its target [3], whether it is grasped."""
        can, axis = self._can.position, _vertical_axis(self._can.quat)
        return np.concatenate([can - self.origin, axis, can - _hand(self.sim), self._target - can, [self._can.grasped]])

    def keypoints(self) -> Keypoints:
        """The can, and its release position."""
        place = self._target + np.array([0.0, 0.0, RELEASE_HEIGHT])
        return {"grasp": [self._can.position], "push": [self._can.position], "reach": [place]}


class NutAssemblyRoundFacts:
    """NutAssemblyRound: `grasped`, `lifted` (10 cm), `aligned` (within 3 cm of the peg's axis), `placed`."""

    propositions: ClassVar[tuple[str, ...]] = ("grasped", "lifted", "aligned", "placed")
    success: ClassVar[str] = "placed"
    object_state_dim: ClassVar[int] = 13

    def __init__(self, sim: RobosuiteSim):
        self.sim, self.origin = sim, _table_top(sim)
        env = sim.env
        self._nut = _Body(sim, env.nuts[env.nut_id])
        self._peg = sim.data.xpos[env.peg2_body_id]  # the round one
        self._handle = sim.data.site_xpos[sim.model.site(env.nuts[env.nut_id].important_sites["handle"]).id]

    def events(self) -> frozenset[str]:
        """Names of the propositions that currently hold."""
        position = self._nut.position
        return _holding(
            grasped=self._nut.grasped,
            lifted=position[2] > self.origin[2] + NUT_LIFTED_HEIGHT,
            aligned=np.hypot(*(position[:2] - self._peg[:2])) < PEG_DISTANCE,
            placed=self.sim.success(),
        )

    def state(self) -> State:
        """`nut_pos` [3], `nut_quat` [4] (w first), `peg_pos` [3], `table_height` [], `grasped` []."""
        return {
            **self._nut.state("nut"),
            "peg_pos": self._peg.copy(),
            "table_height": np.array(self.origin[2]),
            "grasped": np.array(self._nut.grasped),
        }

    def object_state(self) -> np.ndarray:
        """Nut: position [3], direction to grasp its handle [3], from the hand to that [3], to the peg [3], grasped."""
        nut = self._nut.position
        direction = grasp_yaw(yaw_of(self._nut.quat) + math.pi / 2, folds=2)  # across the handle
        return np.concatenate(
            [nut - self.origin, direction, self._handle - _hand(self.sim), self._peg - nut, [self._nut.grasped]]
        )

    def keypoints(self) -> Keypoints:
        """The handle of the nut, and its position when the nut is over the peg."""
        place = self._peg + self._handle - self._nut.position + [0.0, 0.0, RELEASE_HEIGHT]
        return {"grasp": [self._handle], "push": [self._handle], "reach": [place]}


class WipeFacts:
    """Wipe: `contact` (tool on table), `w25`, `w50`, `w100` (percentage of markers wiped), `collision`.

    A collision is any contact of the arm (not the tool) or a joint near its limit, as in robosuite.
    """

    propositions: ClassVar[tuple[str, ...]] = ("contact", "w25", "w50", "w100", "collision")
    success: ClassVar[str] = "w100"
    object_state_dim: ClassVar[int] = 7

    def __init__(self, sim: RobosuiteSim):
        self.sim, self.origin = sim, _table_top(sim)
        self._tool = sim.gripper_geoms
        self._table = sim.geom_ids(["table_collision"])

    def events(self) -> frozenset[str]:
        """Names of the propositions that currently hold."""
        env = self.sim.env
        wiped = len(env.wiped_markers) / env.num_markers
        return _holding(
            contact=self.sim.touching(self._tool, self._table),
            w25=wiped >= 0.25,
            w50=wiped >= 0.5,
            w100=wiped >= 1.0,
            collision=self.sim.arm_in_collision(),
        )

    def state(self) -> State:
        """`markers` [M, 3] positions, `wiped` [M] bool."""
        env = self.sim.env
        markers = env.model.mujoco_arena.markers
        bodies = [self.sim.model.body(marker.root_body).id for marker in markers]
        return {
            "markers": self.sim.data.xpos[bodies],
            "wiped": np.array([marker in env.wiped_markers for marker in markers]),
        }

    def object_state(self) -> np.ndarray:
        """Remaining dirt: mean position [3], from the tool to the nearest marker [3]; fraction wiped."""
        env, tool, left = self.sim.env, _hand(self.sim), self._left()
        if not len(left):
            return np.array([0.0] * 6 + [1.0])
        nearest = left[np.argmin(np.linalg.norm(left - tool, axis=1))]
        wiped = len(env.wiped_markers) / env.num_markers
        return np.array([*(left.mean(axis=0) - self.origin), *(nearest - tool), wiped])

    def keypoints(self) -> Keypoints:
        """The remaining dirt."""
        left = list(self._left())
        return {"reach": left, "push": left}

    def _left(self) -> np.ndarray:
        """Positions [M, 3] of the remaining dirt."""
        env = self.sim.env
        markers = [marker for marker in env.model.mujoco_arena.markers if marker not in env.wiped_markers]
        return self.sim.data.xpos[[self.sim.model.body(marker.root_body).id for marker in markers]]
