"""The robosuite tasks beyond Lift: placement, physics and success as in robosuite, and their events."""

import mujoco
import numpy as np
import pytest

from rlvla.envs.experts import ExpertConfig, make_expert
from rlvla.envs.registry import get_suite, list_tasks, make_env
from rlvla.utils.errors import ConfigError
from tests.support.robosuite_reference import StockTask, require_simulator

NAMES = {task.name: task.task_id for task in list_tasks("robosuite")}


@pytest.fixture(scope="module", autouse=True)
def _simulator():
    require_simulator()


@pytest.fixture
def make():
    made = []

    def build(name, **options):
        made.append(make_env("robosuite", NAMES[name], **{"cameras": (), **options}))
        return made[-1]

    yield build
    for env in made:
        env.close()


def test_the_tasks_and_their_propositions():
    said = {task.name: task.propositions for task in list_tasks("robosuite")}
    assert said == {
        "Lift": ("reached", "grasped", "lifted"),
        "Stack": ("cubeA_grasped", "cubeA_lifted", "cubes_aligned", "stacked"),
        "Door": ("reached", "unlatched", "opened"),
        "PickPlaceCan": ("grasped", "lifted", "above_bin", "placed"),
        "NutAssemblyRound": ("grasped", "lifted", "aligned", "placed"),
        "Wipe": ("contact", "w25", "w50", "w100", "collision"),
    }
    assert get_suite("robosuite").default_tasks == (NAMES["Lift"],)


@pytest.mark.parametrize("name", ["Stack", "Door", "PickPlaceCan", "NutAssemblyRound", "Wipe"])
def test_physics_and_success_are_those_of_robosuite(make, name):
    env, stock = make(name), StockTask(name)
    env.reset(3, seed=0)
    stock.start_from(env._sim)
    if name == "Wipe":
        stock.env.wiped_markers = []
    down = np.zeros(env.task.action_dim)
    down[2] = -1.0
    for action in np.random.default_rng(1).uniform(-0.5, 0.0, (12, env.task.action_dim)) + 0.5 * down:
        action[3:6] = 0.0  # robosuite rounds rotations to single precision
        env._sim.step(action)
        stock.step(action)
        np.testing.assert_allclose(env._sim.data.qpos, stock.data.qpos, rtol=0, atol=1e-8)
        assert (env._facts.success in env._facts.events()) == env._sim.success() == stock.success()
        if name == "Wipe":
            assert len(env._sim.env.wiped_markers) == len(stock.env.wiped_markers)
    assert np.abs(env._sim.data.qpos[:7] - env._sim._arm_init).max() > 0.05


@pytest.mark.parametrize("name", ["Stack", "PickPlaceCan"])
def test_dense_rewards_are_those_of_robosuite(make, name):
    env, sparse, stock = make(name, dense_reward=True), make(name), StockTask(name)
    stock.env.reward_shaping = True
    for each in (env, sparse):
        each.reset(3, seed=0)
    stock.start_from(env._sim)
    down = np.zeros(env.task.action_dim, dtype=np.float32)
    down[2] = -0.5
    for _ in range(6):
        result, success_alone = env.step_chunk(down[None]), sparse.step_chunk(down[None])
        stock.step(down)
        assert result.rewards[0] == pytest.approx(stock.env.reward(None), abs=1e-6)
        assert 0.0 < result.rewards[0] < 1.0 and success_alone.rewards[0] == 0.0
        np.testing.assert_array_equal(env._sim.data.qpos, sparse._sim.data.qpos)


def test_wipe_has_no_dense_reward():
    (problem,) = get_suite("robosuite").task_problems(list_tasks("robosuite"), {"dense_reward": True})
    assert (problem.flag, problem.reason) == ("dense_reward", "unavailable") and "Wipe" in problem.text


def test_stack_expert_passes_every_proposition_in_order_and_holds_success(make):
    env, expert = make("Stack"), make_expert("robosuite", NAMES["Stack"], ExpertConfig())
    lengths = []
    for i in range(10):
        env.reset(i, seed=0)
        expert.reset(np.random.default_rng(i))
        first = {}
        for step in range(env.task.max_steps):
            result = env.step_chunk(expert.act(env.privileged_state())[None])
            assert ("stacked" in result.events[0]) == env._sim.success()
            for name in result.events[0]:
                first.setdefault(name, step)
            if result.terminated:
                break
        assert result.terminated and result.successes.all()
        order = ("cubeA_grasped", "cubeA_lifted", "cubes_aligned", "stacked")
        assert [first[name] for name in order] == sorted(first[name] for name in order)
        assert step - first["stacked"] >= 4, "success ends an episode only after 5 steps"
        assert "cubeA_grasped" not in result.events[0]
        lengths.append(step + 1)
    assert max(lengths) < 160


def test_stack_expert_can_be_made_worse(make):
    env = make("Stack")
    with pytest.raises(ConfigError, match="gripper_shift -1"):
        make_expert("robosuite", NAMES["Stack"], ExpertConfig(gripper_shift=-1))
    solved = 0
    expert = make_expert("robosuite", NAMES["Stack"], ExpertConfig(offset_bias=(0.05, 0.0)))
    for i in range(3):
        env.reset(i, seed=0)
        expert.reset(np.random.default_rng(i))
        result = None
        while result is None or not (result.terminated or result.truncated):
            result = env.step_chunk(expert.act(env.privileged_state())[None])
        solved += result.terminated
    assert solved == 0, "an offset of 5 cm misses a cube of 4 cm"


def place(env, joint, *numbers):
    """Set a joint's position and let the simulator see it."""
    sim = env._sim
    address = sim.model.joint(joint).qposadr[0]
    sim.data.qpos[address : address + len(numbers)] = numbers
    mujoco.mj_forward(sim.model, sim.data)
    return env._facts.events()


def test_lift_events(make):
    env = make("Lift")
    env.reset(0, seed=0)
    assert env._facts.events() == frozenset()
    hand = env._sim.data.site_xpos[env._sim.eef_site].copy()
    assert place(env, "cube_joint0", *hand + [0.0, 0.041, 0.0]) == {"lifted"}
    assert place(env, "cube_joint0", *hand + [0.0, 0.039, 0.0]) == {"reached", "lifted"}


def test_door_events(make):
    env = make("Door")
    env.reset(0, seed=0)
    assert env._facts.events() == frozenset()
    assert place(env, "Door_latch_joint", 0.79) == frozenset()
    assert place(env, "Door_latch_joint", 0.81) == {"unlatched"}
    assert place(env, "Door_hinge", 0.29) == {"unlatched"}
    assert place(env, "Door_hinge", 0.31) == {"unlatched", "opened"}
    assert env._sim.success()
    env._facts._handle[:] = env._sim.data.site_xpos[env._sim.eef_site] + [0.0, 0.049, 0.0]
    assert "reached" in env._facts.events()
    env._facts._handle[1] += 0.002
    assert "reached" not in env._facts.events()


def test_can_events(make):
    env = make("PickPlaceCan")
    env.reset(0, seed=0)
    assert env._facts.events() == frozenset()
    state = env.privileged_state()
    x, y, bottom = state["target_pos"]
    assert place(env, "Can_joint0", x, y, bottom + 0.3) == {"lifted", "above_bin"}
    assert place(env, "Can_joint0", x, y, bottom + 0.05) == {"above_bin", "placed"}
    assert place(env, "Can_joint0", x - 0.11, y, bottom + 0.3) == {"lifted"}, "over the neighbouring bin"
    others = [env._sim.data.xpos[env._sim.model.body(f"{name}_main").id] for name in ("Milk", "Bread", "Cereal")]
    assert min(np.linalg.norm(position) for position in others) > 5, "the other objects are out of the way"


def test_nut_events(make):
    env = make("NutAssemblyRound")
    env.reset(0, seed=0)
    assert env._facts.events() == frozenset()
    state = env.privileged_state()
    x, y = state["peg_pos"][:2]
    table = float(state["table_height"])
    assert place(env, "RoundNut_joint0", x + 0.02, y, table + 0.3) == {"lifted", "aligned"}
    assert place(env, "RoundNut_joint0", x, y, table + 0.02) == {"aligned", "placed"}
    assert place(env, "RoundNut_joint0", x + 0.04, y, table + 0.3) == {"lifted"}


def test_wiping_and_collisions(make):
    env = make("Wipe", cameras=("agentview",))
    clean = env.reset(0, seed=0).images
    assert env._facts.events() == frozenset()
    events = set()
    for _ in range(60):  # go where the dirt is, pressing down
        state = env.privileged_state()
        rest = state["markers"][~state["wiped"]]
        action = np.zeros(6, dtype=np.float32)
        action[:2] = 10 * (rest.mean(axis=0) - state["eef_pos"])[:2] if len(rest) else 0.0
        action[2] = -0.3
        events |= env.step_chunk(action[None]).events[0]
    wiped = env.privileged_state()["wiped"].mean()
    assert {"contact", "w25"} <= events and ("w50" in events) == (wiped >= 0.5) and ("w100" in events) == (wiped == 1.0)
    dirt = env.reset(0, seed=0).images
    assert not env.privileged_state()["wiped"].any()
    np.testing.assert_array_equal(clean, dirt)  # wiped dirt is there again
    env._sim.data.qpos[env._sim._arm_qpos[3]] = -3.0
    mujoco.mj_forward(env._sim.model, env._sim.data)
    assert "collision" in env._facts.events()


def test_a_camera_that_the_arena_lacks_is_refused():
    with pytest.raises(ConfigError, match="PickPlaceCan has no camera sideview"):
        make_env("robosuite", NAMES["PickPlaceCan"], cameras=("sideview",))
