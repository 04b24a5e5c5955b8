"""Action primitives: the controllers on an ideal arm and on the simulated arm."""

import math

import numpy as np
import pytest

from rlvla.envs.registry import list_tasks, make_env
from rlvla.envs.robosuite.primitives import (
    CLOSE,
    KEEP,
    OPEN,
    PRIMITIVES,
    TOOL_PRIMITIVES,
    PrimitiveController,
    action_dim,
    macro_steps,
)
from rlvla.envs.robosuite.rotation import (
    HOME_YAW,
    MOST_TURN,
    grasp_yaw,
    pointing_down,
    rotation_vector,
)
from rlvla.envs.robosuite.tasks import TABLE, TASKS
from rlvla.envs.workers.answer_checks import AnswerChecker
from rlvla.envs.workers.messages import EnvSpec
from rlvla.envs.workers.pool import EnvPool
from rlvla.envs.workers.worker_env import WorkerEnv
from rlvla.utils.errors import ConfigError
from tests.support.robosuite_primitives import chunk_of, lift_chunks, play, stack_chunks
from tests.support.robosuite_reference import require_simulator

SPACE, GRIPPER_STEPS = TABLE, 4
OPTIONS = {"cameras": (), "control_freq": 10.0, "action_space": "primitives"}


class Arm:
    """A hand that makes a fraction of the displacement and rotation it is given; 0: it does not move at all."""

    def __init__(self, position=(-0.1, 0.0, 1.0), yaw=HOME_YAW, share=0.6):
        self.position, self.rotation, self.share = np.array(position, dtype=float), pointing_down(yaw), share
        self.turns = 0.0  # sum of all turns about the vertical axis

    def pose(self):
        return self.position, self.rotation

    def step(self, action):
        turn = 0.5 * self.share * action[3:6]
        self.position = self.position + 0.05 * self.share * action[:3]
        angle = float(np.linalg.norm(turn))
        if angle:
            x, y, z = turn / angle
            cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
            self.rotation = (
                np.eye(3) + math.sin(angle) * cross + (1 - math.cos(angle)) * cross @ cross
            ) @ self.rotation
        self.turns += turn[2]

    @property
    def yaw(self):
        return math.atan2(self.rotation[1, 0], self.rotation[0, 0])


def run(arm, controller, name, *params, primitives=PRIMITIVES):
    """Execute a primitive; the actions [n, 7] and the positions of the hand before each and after the last."""
    row = np.full(action_dim(primitives), -1.0)
    row[[primitive for primitive, _ in primitives].index(name)] = 1.0
    row[len(primitives) :][: len(params)] = params
    actions, positions = [], [arm.position]
    for action in controller.start(row):
        actions.append(action)
        arm.step(action)
        positions.append(arm.position)
    return np.array(actions), np.array(positions)


def controller_of(arm, freq=10.0, primitives=PRIMITIVES):
    steps = GRIPPER_STEPS if primitives == PRIMITIVES else 0
    return PrimitiveController(primitives, SPACE, freq, steps, arm.pose)


def params_of(position, highest=SPACE.object_height):
    return SPACE.params(position, highest)


def test_positions_span_the_box():
    for highest in (SPACE.high[2], SPACE.object_height):
        assert SPACE.position(-np.ones(3), highest) == pytest.approx(SPACE.low)
        assert SPACE.position(np.ones(3), highest) == pytest.approx([*SPACE.high[:2], highest])
        inside = np.array([0.05, -0.1, 0.83])
        assert SPACE.position(SPACE.params(inside, highest), highest) == pytest.approx(inside)


def test_the_highest_score_chooses_the_first_of_equal_ones():
    controller = controller_of(Arm())
    row = np.linspace(-0.5, 0.5, 12)
    for index, (name, count) in enumerate(PRIMITIVES):
        row[:5] = -0.3
        row[index] = -0.2
        chosen, params = controller.chosen(row)
        assert chosen == name and params == pytest.approx(row[5 : 5 + count])
    row[:5] = 0.7
    assert controller.chosen(row)[0] == "reach"


def test_reach_goes_up_over_the_target_and_down():
    arm, target = Arm(position=(-0.2, -0.1, 0.83)), np.array([-0.05, 0.1, 0.86])
    actions, way = run(arm, controller_of(arm), "reach", *params_of(target, SPACE.high[2]))
    assert np.linalg.norm(way[-1] - target) < 0.008 and len(actions) < 15, "it ends when it is there"
    aside = np.hypot(*(way[:, :2] - way[0, :2]).T)
    far = (aside > 1e-3) & (np.hypot(*(way[:, :2] - target[:2]).T) > 0.02)
    assert far.any() and (way[far, 2] > SPACE.lift_height - 0.031).all(), "sideways only at the lift height"
    assert (actions[:, 6] == KEEP).all() and np.abs(actions).max() <= 1.0


def test_reach_straight_up_makes_no_detour():
    arm = Arm(position=(0.0, 0.0, 0.82))
    _, way = run(arm, controller_of(arm), "reach", *params_of([0.0, 0.0, 0.90], SPACE.high[2]))
    assert (np.diff(way[:, 2]) > 0).all() and way[-1, 2] == pytest.approx(0.90, abs=0.008)


def test_a_primitive_that_is_there_already_takes_one_step():
    arm = Arm(position=(0.0, 0.0, 0.9))
    actions, _ = run(arm, controller_of(arm), "reach", *params_of([0.0, 0.0, 0.9], SPACE.high[2]))
    assert len(actions) == 1 and np.abs(actions[0, :6]).max() < 1e-9


@pytest.mark.parametrize("turn", [-1.0, -0.4, 0.0, 0.7, 1.0])
def test_grasp_opens_turns_descends_and_closes(turn):
    arm, target = Arm(), np.array([-0.1, 0.05, 0.82])
    actions, way = run(arm, controller_of(arm), "grasp", *params_of(target), turn)
    assert np.linalg.norm(way[-1] - target) < 0.008
    assert arm.yaw == pytest.approx(HOME_YAW + turn * MOST_TURN, abs=0.06)
    assert (actions[:-3, 6] == OPEN).all() and (actions[-3:, 6] == CLOSE).all(), "three quarters of the fingers' travel"
    assert len(actions) < 20
    assert np.linalg.norm(rotation_vector(arm.rotation @ pointing_down(arm.yaw).T)) < 1e-2


def test_the_hand_turns_back_the_way_it_came():
    arm = Arm(position=(0.0, 0.0, 0.95), yaw=HOME_YAW - MOST_TURN, share=1.0)
    run(arm, controller_of(arm), "grasp", *params_of([0.0, 0.0, 0.82]), 1.0)
    assert arm.turns == pytest.approx(math.pi, abs=0.1), "over home, half a turn in all"


def test_a_tilted_hand_is_put_upright():
    arm = Arm(position=(0.0, 0.0, 0.95))
    arm.step(np.array([0, 0, 0, 0.6, -0.3, 0, 0]))
    run(arm, controller_of(arm), "reach", *params_of([0.05, 0.05, 0.85], SPACE.high[2]))
    assert np.abs(arm.rotation[2] - [0, 0, -1]).max() < 0.02


def test_push_goes_along_its_displacement_with_closed_fingers():
    arm, start = Arm(position=(-0.1, 0.0, 0.95)), np.array([-0.1, 0.0, 0.82])
    actions, way = run(arm, controller_of(arm), "push", *params_of(start), 0.0, 0.4, -0.2, 0.5)
    assert np.linalg.norm(way - start, axis=1).min() < 0.008, "it goes to the start first"
    assert way[-1] == pytest.approx(start + [0.1, -0.05, 0.025], abs=0.008)
    assert (actions[:, 6] == CLOSE).all()


def test_what_is_held_is_held_until_open():
    arm = Arm()
    controller = controller_of(arm)
    run(arm, controller, "grasp", *params_of([0.0, 0.0, 0.82]), 0.0)
    actions, _ = run(arm, controller, "reach", 0.2, 0.3, 1.0)
    assert (actions[:, 6] == CLOSE).all()
    actions, way = run(arm, controller, "open")
    assert (actions[:, 6] == OPEN).all() and np.ptp(way, axis=0).max() < 1e-9
    assert len(actions) == GRIPPER_STEPS + 3, "the fingers' travel, and a quarter of a second in which success can last"
    actions, _ = run(arm, controller, "reach", -0.2, 0.3, 1.0)
    assert (actions[:, 6] == OPEN).all()
    run(arm, controller, "atomic", 0.0, 0.0, 0.0, 0.0, 0.3)
    assert (run(arm, controller, "reach", 0.0, 0.0, 1.0)[0][:, 6] == CLOSE).all()
    controller.reset()
    assert (run(arm, controller, "reach", 0.5, 0.0, 1.0)[0][:, 6] == KEEP).all()


def test_atomic_is_one_action_as_it_is():
    arm = Arm()
    actions, _ = run(arm, controller_of(arm), "atomic", 0.5, -1.0, 0.25, 0.75, -0.5)
    assert actions.tolist() == [[0.5, -1.0, 0.25, 0.0, 0.0, 0.75, -0.5]]


@pytest.mark.parametrize(("freq", "factor"), [(10.0, 1), (20.0, 2), (5.0, 0.5)])
def test_the_time_of_a_primitive_is_limited(freq, factor):
    arm = Arm(share=0.0)
    controller = controller_of(arm, freq)
    steps = {name: run(arm, controller, name, *[0.5] * count)[0] for name, count in PRIMITIVES}
    assert len(steps["reach"]) == math.ceil(15 * factor) and len(steps["atomic"]) == 1
    assert len(steps["grasp"]) == len(steps["push"]) == 20 * factor == macro_steps(SPACE, freq)
    assert (steps["grasp"][-3:, 6] == CLOSE).all(), "it closes wherever it is"
    assert all(len(actions) <= macro_steps(SPACE, freq) for actions in steps.values())


def test_a_tool_without_fingers():
    arm = Arm()
    controller = controller_of(arm, primitives=TOOL_PRIMITIVES)
    actions, way = run(
        arm, controller, "push", *params_of([0.0, 0.0, 0.82]), 0.0, 0.2, 0.2, 0.0, primitives=TOOL_PRIMITIVES
    )
    assert actions.shape[1] == 6 and way[-1] == pytest.approx([0.05, 0.05, 0.82], abs=0.008)
    actions, _ = run(arm, controller, "atomic", 0.1, 0.2, 0.3, 0.4, primitives=TOOL_PRIMITIVES)
    assert actions.tolist() == [[0.1, 0.2, 0.3, 0.0, 0.0, 0.4]]


@pytest.mark.parametrize("folds", [2, 4])
def test_the_direction_to_grasp_is_the_same_for_all_that_look_the_same(folds):
    for yaw in np.linspace(-3, 3, 13):
        sine, cosine, turn = grasp_yaw(yaw, folds)
        assert np.hypot(sine, cosine) == pytest.approx(1) and -2 / folds <= turn <= 2 / folds
        again = grasp_yaw(yaw + 2 * math.pi / folds, folds)
        assert again[:2] == pytest.approx([sine, cosine])
        fingers = HOME_YAW + turn * MOST_TURN
        assert math.cos(folds * (fingers - yaw)) == pytest.approx(1), "the turn leads there"


def test_specifications():
    plain = {task.name: task for task in list_tasks("robosuite")}
    for task in list_tasks("robosuite", action_space="primitives", control_freq=10):
        before = plain[task.name]
        assert before.primitives == () and before.macro_steps == 0
        assert task.primitives == (TOOL_PRIMITIVES if task.name == "Wipe" else PRIMITIVES)
        assert task.macro_steps == (20 if task.name in ("Lift", "Stack") else 30)
        assert task.action_dim == len(task.primitives) + 7
        assert task.step_action_dim == before.action_dim and before.step_action_dim == 0
        assert task.gripper_dims == () and task.max_steps >= 150 and task.proprio_dim == before.proprio_dim
    assert list_tasks("robosuite", action_space="primitives", max_steps=30)[0].max_steps == 30
    with pytest.raises(ConfigError, match="action_space joints"):
        list_tasks("robosuite", action_space="joints")


@pytest.fixture
def make():
    require_simulator()
    made = []

    def build(name, **options):
        task_id = [task.name for task in TASKS].index(name)
        made.append(make_env("robosuite", task_id, **{**OPTIONS, **options}))
        return made[-1]

    yield build
    for env in made:
        env.close()


@pytest.mark.parametrize(("name", "chunks"), [("Lift", lift_chunks), ("Stack", stack_chunks)])
@pytest.mark.parametrize("freq", [10.0, 20.0])
def test_the_tasks_are_solved_by_primitives(make, monkeypatch, name, chunks, freq):
    monkeypatch.setitem(OPTIONS, "control_freq", freq)
    env, solved = make(name), 0
    checker = AnswerChecker(env.task, OPTIONS)
    for state in range(6):
        env.reset(state, seed=0)
        steps = 0
        for result in play(env, chunks(env)):
            checker.chunk(result, env.task.macro_steps, steps_before=steps)
            steps += result.steps_executed
        solved += result.terminated
    assert solved == 6


def random_chunks(env, count, seed):
    """Any primitives with any parameters."""
    rows = np.random.default_rng(seed).uniform(-1, 1, (count, env.task.macro_steps, env.task.action_dim))
    return rows.astype(np.float32)


def test_what_primitives_consist_of_is_an_ordinary_episode(make):
    shows = {"use_proprio": True, "max_steps": 60}
    env, plain = make("Lift", **shows, object_state=True), make("Lift", **shows, action_space="osc")
    for state in (0, 1):
        observation = env.reset(state, seed=0)
        results = play(env, lift_chunks(env) if state else random_chunks(env, 50, seed=0))
        plain_observation = plain.reset(state, seed=0)
        np.testing.assert_array_equal(plain_observation.proprio, observation.proprio[:6])
        for result in results:
            actions, count = result.step_actions, result.steps_executed
            assert actions.dtype == np.float32 and actions.shape == (count, plain.task.action_dim)
            again = [plain.step_chunk(action[None]) for action in actions]
            np.testing.assert_array_equal(again[-1].observation.proprio, result.observation.proprio[:6])
            assert [bool(one.successes[0]) for one in again] == result.successes[:count].tolist()
        assert (again[-1].terminated, again[-1].truncated) == (results[-1].terminated, results[-1].truncated)
        assert results[-1].terminated if state else results[-1].truncated


def test_the_episode_goes_on_after_a_primitive_that_ended_early(make):
    env = make("Lift")
    env.reset(0, seed=0)
    for name, steps in (("atomic", 1), ("open", 7), ("atomic", 1)):
        result = env.step_chunk(chunk_of(env.task, name))
        assert result.steps_executed == steps == len(result.events)
        assert not (result.terminated or result.truncated)
        assert result.rewards.shape == result.successes.shape == (env.task.macro_steps,)


def test_the_step_limit_inside_a_primitive(make):
    env = make("Lift", max_steps=9)
    env.reset(0, seed=0)
    first = env.step_chunk(chunk_of(env.task, "open"))
    last = env.step_chunk(chunk_of(env.task, "reach", 1.0, 1.0, -1.0))
    assert first.steps_executed == 7 and last.steps_executed == 2
    assert last.truncated and not last.terminated and not first.truncated
    with pytest.raises(RuntimeError):
        env.step_chunk(chunk_of(env.task, "open"))


def test_an_object_is_carried(make):
    env = make("Stack")
    env.reset(1, seed=0)
    grasp, reach, _ = stack_chunks(env)
    env.step_chunk(grasp)
    for x in (-0.6, 0.6):
        env.step_chunk(chunk_of(env.task, "reach", x, 0.3, 1.0))
        state = env.privileged_state()
        assert state["grasped"] and state["cubeA_pos"][2] > 0.9


def test_through_a_worker(make):
    env = make("Lift")
    env.reset(3, seed=0)
    chunks = list(lift_chunks(env))
    expected = play(env, chunks)
    with EnvPool(1) as pool:
        away = WorkerEnv(pool, 0, EnvSpec("robosuite", 0, OPTIONS))
        away.reset(3, seed=0)
        results = play(away, chunks)
        away.reset(3, seed=0)
        with pytest.raises(ValueError, match="got 3"):
            away.step_chunk(chunks[0][:3])
    assert [r.steps_executed for r in results] == [r.steps_executed for r in expected]
    assert results[-1].terminated and results[0].steps_executed < env.task.macro_steps


OBJECTS = {
    "Lift": lambda s: [s["cube_pos"] - [0, 0, 0.8], s["cube_pos"] - s["eef_pos"], s["grasped"]],
    "Stack": lambda s: [
        s["cubeA_pos"] - [0, 0, 0.8],
        s["cubeA_pos"] - s["eef_pos"],
        s["grasped"],
        s["cubeB_pos"] - [0, 0, 0.8],
        s["cubeB_pos"] - s["cubeA_pos"],
    ],
    "Door": lambda s: [s["handle_pos"] - s["eef_pos"], s["hinge_angle"], s["handle_angle"]],
    "PickPlaceCan": lambda s: [s["can_pos"] - s["eef_pos"], s["target_pos"] - s["can_pos"], s["grasped"]],
    "NutAssemblyRound": lambda s: [s["nut_pos"] - [0, 0, 0.82], s["peg_pos"] - s["nut_pos"], s["grasped"]],
    "Wipe": lambda s: [s["markers"][~s["wiped"]].mean(axis=0) - [0.15, 0, 0.9], s["wiped"].mean()],
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_in_proprio(make, name):
    plain = {task.name: task.proprio_dim for task in list_tasks("robosuite")}
    env = make(name, use_proprio=True, object_state=True)
    assert env.task.proprio_dim == plain[name] + TASKS[env.task.task_id].facts.object_state_dim
    states = []
    for state in range(2):
        env.reset(state, seed=0)
        proprio = env.step_chunk(chunk_of(env.task, "reach", 0.1, 0.2, -0.9)).observation.proprio
        assert proprio.shape == (env.task.proprio_dim,) and proprio.dtype == np.float32
        objects = proprio[plain[name] :]
        for expected in OBJECTS[name](env.privileged_state()):
            values = np.atleast_1d(np.asarray(expected, dtype=np.float32))
            windows = np.lib.stride_tricks.sliding_window_view(objects, len(values))
            assert np.isclose(windows, values, atol=1e-6).all(axis=1).any(), expected
        states.append(objects)
    assert (states[0] != states[1]).any()


def test_the_turn_in_proprio_grasps_the_cube(make):
    env = make("Lift", use_proprio=True, object_state=True)
    for state in range(4):
        proprio = env.reset(state, seed=0).proprio
        cube, turn = proprio[6:9] + [0, 0, 0.8], proprio[11]
        params = SPACE.params(cube, SPACE.object_height)
        proprio = env.step_chunk(chunk_of(env.task, "grasp", *params, turn)).observation.proprio
        env.step_chunk(chunk_of(env.task, "reach", *params[:2], 1.0))
        assert env.privileged_state()["cube_pos"][2] > 0.9


def test_objects_need_proprio():
    with pytest.raises(ConfigError, match="--use_proprio"):
        list_tasks("robosuite", object_state=True)


def test_a_choice_of_primitives():
    options = {"action_space": "primitives", "primitives": ("grasp", "reach")}
    tasks = {task.name: task for task in list_tasks("robosuite", **options)}
    assert tasks["Lift"].primitives == (("reach", 3), ("grasp", 4)) and tasks["Lift"].action_dim == 6
    for wrong, message in (
        ({"primitives": ("fly",)}, "there is no fly"),
        ({"action_space": "osc"}, "needs --action_space"),
    ):
        with pytest.raises(ConfigError, match=message):
            list_tasks("robosuite", **options | wrong)


def test_a_task_without_the_chosen_primitives_says_so():
    require_simulator()
    wipe = next(index for index, task in enumerate(TASKS) if task.name == "Wipe")
    with pytest.raises(ConfigError, match="Wipe has no primitive grasp; it has reach, push, atomic"):
        make_env("robosuite", wipe, action_space="primitives", primitives=("grasp",), cameras=())
