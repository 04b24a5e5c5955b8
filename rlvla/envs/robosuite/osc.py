"""Operational space control of an arm, computed in every physics substep.

The control law is that of robosuite's `OSC_POSE` with fixed gains and decoupled position and orientation
(O. Khatib, "A unified approach for motion and force control of robot manipulators", 1987). With M the arm's mass
matrix, J its Jacobian and a the joint acceleration that pulls the arm back to its rest posture:

    A     = J M^-1 J^T
    F     = A_pos^-1 (kp e_pos - kd v),   T = A_ori^-1 (kp e_ori - kd w)
    tau   = J^T [F; T] + bias + M a - J^T A^-1 (J a)

The last two terms are N^T M a with the null-space projector N = I - M^-1 J^T A^-1 J. Neither N nor any inverse is
formed explicitly: Cholesky factors suffice, and the compiled function takes a few microseconds.
"""

from __future__ import annotations

import math

import mujoco
import numba
import numpy as np

# Gains of robosuite's null-space posture task, critically damped.
POSTURE_KP = 10.0
POSTURE_KD = 2.0 * math.sqrt(POSTURE_KP)
# Below this ratio of Cholesky pivot to diagonal, the matrix counts as singular and its pseudo-inverse is used.
SINGULAR_RATIO = 1e-9


@numba.njit(cache=True)
def _cholesky(a: np.ndarray, n: int, lower: np.ndarray) -> bool:
    """Factorize the symmetric a[:n, :n] into lower[:n, :n]; False if it is not numerically positive definite."""
    for i in range(n):
        for j in range(i + 1):
            total = a[i, j]
            for k in range(j):
                total -= lower[i, k] * lower[j, k]
            if i == j:
                if not total > SINGULAR_RATIO * a[i, i]:
                    return False
                lower[i, i] = math.sqrt(total)
            else:
                lower[i, j] = total / lower[j, j]
    return True


@numba.njit(cache=True)
def _solve(lower: np.ndarray, n: int, x: np.ndarray) -> None:
    """Solve (L L^T) x = b in place; x[:n] contains b on entry."""
    for i in range(n):
        for k in range(i):
            x[i] -= lower[i, k] * x[k]
        x[i] /= lower[i, i]
    for i in range(n - 1, -1, -1):
        for k in range(i + 1, n):
            x[i] -= lower[k, i] * x[k]
        x[i] /= lower[i, i]


@numba.njit(cache=True)
def _solve_or_pinv(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a^-1 b for a symmetric positive semi-definite a; uses the pseudo-inverse if a is nearly singular."""
    n = b.shape[0]
    lower = np.zeros((n, n))
    if _cholesky(a, n, lower):
        x = b.copy()
        _solve(lower, n, x)
        return x
    return np.dot(np.linalg.pinv(a), b)


@numba.njit(cache=True)
def _stiffness_wrench(
    position_error: np.ndarray, goal_mat: np.ndarray, eef_mat: np.ndarray, kp: np.ndarray
) -> np.ndarray:
    """Stiffness wrench [6] toward the goal pose; the rotation error is half the sum of the axes' cross products."""
    wrench = np.zeros(6)
    for i in range(3):
        j, k = (i + 1) % 3, (i + 2) % 3
        rotation = 0.0
        for c in range(3):
            rotation += eef_mat[j, c] * goal_mat[k, c] - eef_mat[k, c] * goal_mat[j, c]
        wrench[i] = kp[i] * position_error[i]
        wrench[3 + i] = kp[3 + i] * 0.5 * rotation
    return wrench


@numba.njit(cache=True)
def osc_torques(
    position_error: np.ndarray,
    goal_mat: np.ndarray,
    eef_mat: np.ndarray,
    jac: np.ndarray,
    mass: np.ndarray,
    posture_error: np.ndarray,
    qvel: np.ndarray,
    bias: np.ndarray,
    kp: np.ndarray,
    kd: np.ndarray,
) -> np.ndarray:
    """Joint torques [n] of operational space control, before clipping to the actuator limits.

    Args:
        position_error: [3] goal minus end-effector position, meters.
        goal_mat: [3, 3] goal orientation.
        eef_mat: [3, 3] end-effector orientation.
        jac: [6, n] Jacobian of the end effector, linear then angular.
        mass: [n, n] mass matrix of the arm's joints.
        posture_error: [n] rest posture minus joint positions, radians.
        qvel: [n] joint velocities.
        bias: [n] gravity and Coriolis torques to compensate.
        kp: [6] stiffness.
        kd: [6] damping.
    """
    n = qvel.shape[0]
    wrench = _stiffness_wrench(position_error, goal_mat, eef_mat, kp)
    posture = np.empty(n)
    for i in range(n):
        posture[i] = POSTURE_KP * posture_error[i] - POSTURE_KD * qvel[i]

    # Row r of `minv_jt` is M^-1 times row r of J.
    lower = np.zeros((n, n))
    definite = _cholesky(mass, n, lower)
    minv_jt = np.empty((6, n))
    jac_posture = np.zeros(6)
    for r in range(6):
        speed = 0.0
        for i in range(n):
            speed += jac[r, i] * qvel[i]
            jac_posture[r] += jac[r, i] * posture[i]
            minv_jt[r, i] = jac[r, i]
        wrench[r] -= kd[r] * speed
        if definite:
            _solve(lower, n, minv_jt[r])
        else:
            minv_jt[r] = np.dot(np.linalg.pinv(mass), jac[r].copy())
    inertia = np.empty((6, 6))
    for r in range(6):
        for c in range(6):
            total = 0.0
            for i in range(n):
                total += jac[r, i] * minv_jt[c, i]
            inertia[r, c] = total

    force = _solve_or_pinv(inertia[:3, :3].copy(), wrench[:3].copy())
    moment = _solve_or_pinv(inertia[3:, 3:].copy(), wrench[3:].copy())
    posture_wrench = _solve_or_pinv(inertia, jac_posture)
    torques = np.empty(n)
    for i in range(n):
        total = bias[i]
        for r in range(3):
            total += jac[r, i] * (force[r] - posture_wrench[r])
            total += jac[3 + r, i] * (moment[r] - posture_wrench[3 + r])
        for k in range(n):
            total += mass[i, k] * posture[k]
        torques[i] = total
    return torques


@numba.njit(cache=True)
def _control(
    eef_pos, eef_mat, jacp, jacr, mass, qpos, qvel, bias, ctrl,
    dofs, qpos_index, actuators, rest, goal_pos, goal_mat, kp, kd, low, high,
):  # fmt: skip
    """Gather the arm's entries of the simulator arrays, compute the torques, and write them, clipped, to `ctrl`."""
    n = dofs.shape[0]
    jac, arm_mass = np.empty((6, n)), np.empty((n, n))
    arm_vel, arm_bias, posture_error, position_error = np.empty(n), np.empty(n), np.empty(n), np.empty(3)
    for i in range(n):
        arm_vel[i], arm_bias[i] = qvel[dofs[i]], bias[dofs[i]]
        posture_error[i] = rest[i] - qpos[qpos_index[i]]
        for r in range(3):
            jac[r, i], jac[3 + r, i] = jacp[r, dofs[i]], jacr[r, dofs[i]]
        for k in range(n):
            arm_mass[i, k] = mass[dofs[i], dofs[k]]
    for r in range(3):
        position_error[r] = goal_pos[r] - eef_pos[r]
    mat = eef_mat.reshape((3, 3))
    torques = osc_torques(position_error, goal_mat, mat, jac, arm_mass, posture_error, arm_vel, arm_bias, kp, kd)
    for i in range(n):
        ctrl[actuators[i]] = min(max(torques[i], low[i]), high[i])


_NUM_INPUTS = 8  # `_control` reads its first eight arguments and writes the ninth


class OscController:
    """Delta-pose control of one arm on raw MuJoCo arrays.

    Args:
        model: the compiled model.
        data: its state; must remain the same object, because its arrays are used in place.
        site: id of the end-effector site.
        dofs: [n] velocity addresses of the arm's joints.
        qpos_index: [n] position addresses of the arm's joints.
        actuators: [n] actuator ids of the arm's joints.
        kp: [6] stiffness (linear, angular).
        kd: [6] damping.
        output_max: [6] displacement in meters and rotation in radians for an action of 1.
        keeps_orientation: whether an action without rotation keeps the goal orientation or sets it to the current one.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        data: mujoco.MjData,
        *,
        site: int,
        dofs: np.ndarray,
        qpos_index: np.ndarray,
        actuators: np.ndarray,
        kp: np.ndarray,
        kd: np.ndarray,
        output_max: np.ndarray,
        keeps_orientation: bool = True,
    ):
        self.model, self.data, self.site = model, data, site
        self.output_max = np.asarray(output_max, dtype=np.float64)
        self._keeps_orientation = keeps_orientation
        self._jacp, self._jacr = np.zeros((3, model.nv)), np.zeros((3, model.nv))
        self._mass = np.zeros((model.nv, model.nv))
        self._eef_pos, self._eef_mat, self._qm = data.site_xpos[site], data.site_xmat[site], data.qM
        self._goal_pos, self._goal_mat = np.zeros(3), np.zeros((3, 3))
        self._rest = np.zeros(len(dofs))
        self._frozen: tuple[np.ndarray, ...] | None = None  # inputs of the next step, see `freeze`
        self._qpos_index = np.asarray(qpos_index, dtype=np.int64)
        actuators = np.asarray(actuators, dtype=np.int64)
        limits = model.actuator_ctrlrange[actuators]
        self._arguments = (
            self._eef_pos, self._eef_mat, self._jacp, self._jacr, self._mass,
            data.qpos, data.qvel, data.qfrc_bias, data.ctrl,
            np.asarray(dofs, dtype=np.int64), self._qpos_index, actuators,
            self._rest, self._goal_pos, self._goal_mat,
            np.asarray(kp, dtype=np.float64), np.asarray(kd, dtype=np.float64),
            np.ascontiguousarray(limits[:, 0]), np.ascontiguousarray(limits[:, 1]),
        )  # fmt: skip

    def reset(self) -> None:
        """Set goal and rest posture to the current pose and joint positions; kinematics must be up to date."""
        self._rest[:] = self.data.qpos[self._qpos_index]
        self._goal_pos[:] = self._eef_pos
        self._goal_mat[:] = self._eef_mat.reshape(3, 3)
        self._frozen = None

    def freeze(self) -> None:
        """Use the current state for the next goal and the torques of the next substep, even if the state changes first.

        robosuite's controller does not read the simulator after a state is restored, only after applying its torques.
        """
        self._update_jacobian_and_mass()
        self._frozen = tuple(np.array(values) for values in self._arguments[:_NUM_INPUTS])

    def set_goal(self, action: np.ndarray) -> None:
        """Set the goal to the current pose plus action [6] in [-1, 1]; without rotation, see `keeps_orientation`.

        Uses double precision throughout; robosuite rounds the rotation to single precision.
        """
        delta = action * self.output_max
        position, mat = self._frozen[:2] if self._frozen else (self._eef_pos, self._eef_mat)
        self._goal_pos[:] = position + delta[:3]
        angle = math.sqrt(float(delta[3:] @ delta[3:]))
        if angle > 0.0:
            quat, rotation = np.empty(4), np.empty(9)
            mujoco.mju_axisAngle2Quat(quat, delta[3:] / angle, angle)
            mujoco.mju_quat2Mat(rotation, quat)
            self._goal_mat[:] = rotation.reshape(3, 3) @ mat.reshape(3, 3)
        elif not self._keeps_orientation:
            self._goal_mat[:] = mat.reshape(3, 3)

    def apply(self) -> None:
        """Write torques for the current state to `data.ctrl`; call between `mj_step1` and `mj_step2`."""
        self._update_jacobian_and_mass()
        if self._frozen is None:
            _control(*self._arguments)
        else:
            _control(*self._frozen, *self._arguments[_NUM_INPUTS:])
            self._frozen = None

    def _update_jacobian_and_mass(self) -> None:
        mujoco.mj_jacSite(self.model, self.data, self._jacp, self._jacr, self.site)
        mujoco.mj_fullM(self.model, self._mass, self._qm)
