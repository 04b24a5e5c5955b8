import numpy as np
import pytest

from rlvla.envs import list_tasks, make_env
from rlvla.envs.experts import ExpertConfig, make_expert
from rlvla.envs.experts.episode import play_expert_episode
from rlvla.envs.registry import make_batched_env
from rlvla.envs.testing import assert_same_observation, assert_same_result, assert_same_state
from rlvla.envs.toy_push.env import HOLD_STEPS, OBJECTS, ZONE_SIZE, ZONES, initial_scene, named
from rlvla.envs.toy_push.physics import CONTACT, OBJECT_RADIUS, PUSHER_RADIUS, STEP_SIZE
from rlvla.utils.errors import ConfigError

TASKS = list_tasks("toy_push")


def expert_actions(task_id, init_state_id, noise=0.0):
    """Actions [S, 2] of the expert of this task."""
    expert = make_expert("toy_push", task_id, ExpertConfig(noise_std=noise))
    env = make_env("toy_push", task_id, image_size=32)
    return play_expert_episode(env, expert, init_state_id, 0)["actions"]


def pixel_of(point, size):
    """(row, column) of a table point; the picture shows [-1.09, 1.09] in both directions, y upwards."""
    return int((1.09 - point[1]) / 2.18 * size), int((point[0] + 1.09) / 2.18 * size)


def test_tasks_are_all_pairs_of_disc_and_zone():
    assert [task.instruction for task in TASKS] == [
        "push the red disc into the green zone",
        "push the red disc into the yellow zone",
        "push the blue disc into the green zone",
        "push the blue disc into the yellow zone",
    ]
    assert [named(task) for task in TASKS] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_scenes_are_solvable_and_fair():
    in_the_way, sides, lower = [], [], []
    for init_state_id in range(1000):
        scene = initial_scene(init_state_id)
        pusher, objects, zones = map(np.array, (scene.pusher, scene.objects, scene.zones))
        assert np.linalg.norm(objects - pusher, axis=1).min() > CONTACT
        assert np.linalg.norm(objects[0] - objects[1]) > 2 * OBJECT_RADIUS
        assert np.abs(pusher).max() < 1 - PUSHER_RADIUS
        assert np.abs(objects).max() + CONTACT < 0.95 - PUSHER_RADIUS, "no room for the pusher behind a disc"
        assert np.abs(zones).max() <= 1 - OBJECT_RADIUS, "a disc cannot get to the middle of a zone"
        assert np.abs(zones[0] - zones[1]).max() > 2 * ZONE_SIZE
        for task in TASKS:
            which, zone = named(task)
            assert np.abs(objects[which] - zones[zone]).max() > ZONE_SIZE, "solved at the start"
            way = zones[zone] - objects[which]
            along = np.clip((objects[1 - which] - objects[which]) @ way / (way @ way), 0, 1)
            in_the_way.append(np.linalg.norm(objects[which] + along * way - objects[1 - which]) < 2 * OBJECT_RADIUS)
        sides.append(zones[0, 0] < 0)
        lower.append(objects[0, 1] < objects[1, 1])
    assert 0.2 < np.mean(in_the_way) < 0.5
    assert np.mean(sides) == pytest.approx(0.5, abs=0.05) and np.mean(lower) == pytest.approx(0.5, abs=0.05)


def test_tasks_share_their_scenes():
    first = [make_env("toy_push", task.task_id, image_size=32).reset(5, 0) for task in TASKS]
    assert len({observation.images.tobytes() for observation in first}) == 1
    assert len({observation.instruction for observation in first}) == len(TASKS)


@pytest.mark.parametrize("size", [64, 97])
def test_picture_shows_discs_zones_and_pusher_where_they_are(size):
    env = make_env("toy_push", 0, image_size=size)
    for init_state_id in range(20):
        scene, image = initial_scene(init_state_id), env.reset(init_state_id, 0).images[0]
        for color, center in zip(OBJECTS.values(), scene.objects):
            assert tuple(image[pixel_of(center, size)]) == color
            assert (image == color).all(axis=-1).sum() >= np.pi * (0.5 * 6 * size / 64) ** 2, (
                "at least 6 of 64 pixels wide"
            )
        assert tuple(image[pixel_of(scene.pusher, size)]) == (255, 255, 255)
        for color, (x, y) in zip(ZONES.values(), scene.zones):
            for corner in ((x - 0.7 * ZONE_SIZE, y - 0.7 * ZONE_SIZE), (x + 0.7 * ZONE_SIZE, y + 0.7 * ZONE_SIZE)):
                if np.linalg.norm(np.array(corner) - scene.pusher) > PUSHER_RADIUS + 2 * 2.18 / size:
                    assert tuple(image[pixel_of(corner, size)]) == color
        assert tuple(image[0, 0]) == tuple(image[-1, -1]) != tuple(image[size // 2, size - 6])


def test_every_state_that_matters_can_be_seen():
    """Equal pictures mean equal positions of everything that moves, up to a part of a pixel."""
    env = make_env("toy_push", 0)
    env.reset(3, 0)
    images, positions = [], []
    for action in expert_actions(0, 3):
        result = env.step_chunk(action[None])
        images.append(result.observation.images[0].astype(int))
        positions.append(np.concatenate([env.privileged_state()[name] for name in ("pusher", "object", "distractor")]))
    for i in range(len(images)):
        for j in range(i):
            if np.abs(positions[i] - positions[j]).max() > 0.3 * 2.18 / 64:
                assert np.abs(images[i] - images[j]).max() > 20


def test_an_action_is_a_velocity():
    env = make_env("toy_push", 0, use_proprio=True, max_steps=200)
    start = env.reset(1, 0).proprio
    moves = np.array([[0.5, 0.25], [0.25, 0.5]], dtype=np.float32)
    if np.linalg.norm(start) > 0:  # toward the middle of the nearest free corner
        moves *= np.sign(start)
    expected = np.clip(start + STEP_SIZE * moves.sum(axis=0), -1 + PUSHER_RADIUS, 1 - PUSHER_RADIUS)
    assert env.step_chunk(moves).observation.proprio == pytest.approx(expected, abs=1e-6)
    corner = env.step_chunk(np.repeat(moves[:1], 100, axis=0)).observation.proprio
    assert np.abs(corner) == pytest.approx([1 - PUSHER_RADIUS] * 2, abs=1e-6)


def test_only_the_named_disc_in_the_named_zone_counts():
    successes = np.zeros((len(TASKS), len(TASKS)))
    for done in range(len(TASKS)):
        for init_state_id in range(4):
            actions = expert_actions(done, init_state_id)
            for task in TASKS:
                env = make_env("toy_push", task.task_id, image_size=32)
                env.reset(init_state_id, 0)
                successes[done, task.task_id] += env.step_chunk(actions).success_at_end
    assert (np.diag(successes) == 4).all()
    assert successes.sum() - np.trace(successes) <= 1


def test_events_and_success_follow_the_positions():
    env, seen_events = make_env("toy_push", 1, image_size=32), set()
    for init_state_id in range(12):
        env.reset(init_state_id, 0)
        streak = 0
        for action in expert_actions(1, init_state_id, noise=1.0):
            result = env.step_chunk(action[None])
            [events], state = result.events, env.privileged_state()
            gap = np.linalg.norm(state["object"] - state["pusher"]) - CONTACT
            off_center = np.abs(state["object"] - state["zone"]).max()
            assert ("touching" in events) == (gap <= 0.01)
            assert ("in_zone" in events) == (off_center <= ZONE_SIZE) == result.successes[0]
            assert ("near_zone" in events) == (off_center <= 2 * ZONE_SIZE)
            way, ahead = state["object"] - state["pusher"], state["zone"] - state["object"]
            aligned = way @ ahead / np.linalg.norm(way) / np.linalg.norm(ahead)
            if abs(aligned - 0.85) > 1e-9:
                assert ("behind" in events) == (aligned > 0.85 and gap <= 0.2)
            seen_events |= events
            streak = streak + 1 if result.successes[0] else 0
            assert result.terminated == (streak >= HOLD_STEPS)
            if result.terminated:
                break
    assert seen_events == set(TASKS[1].propositions)


def test_batch_equals_single_in_contact():
    """Experts of all slots at once, until every episode is over: pushing, shoving the distractor, success."""
    states = range(6)
    plans = [expert_actions(2, init_state_id) for init_state_id in states]
    options = {"image_size": 32, "use_proprio": True, "object_state": True}
    batch = make_batched_env("toy_push", 2, len(states), **options)
    batch.reset(list(states), list(states), [0] * len(states))
    alone = [make_env("toy_push", 2, **options) for _ in states]
    for env, init_state_id in zip(alone, states):
        env.reset(init_state_id, 0)
    step, running = 0, list(states)
    while running:
        chunks = [np.resize(plans[slot][step : step + 4], (4, 2)) for slot in running]
        results = batch.step_chunk(running, np.stack(chunks), record_frames=True)
        for slot, chunk, result in zip(running, chunks, results):
            assert_same_result(result, alone[slot].step_chunk(chunk, record_frames=True))
            assert_same_state(batch.privileged_state(slot), alone[slot].privileged_state())
        running = [slot for slot, result in zip(running, results) if not result.terminated]
        step += 4
    first, state = alone[0].reset(9, 0), alone[0].privileged_state()
    assert_same_observation(batch.reset([0], [9], [0])[0], first)
    centers = [state[name] for name in ("pusher", "object", "distractor", "zone")]
    assert first.proprio.tolist() == np.concatenate(centers).astype(np.float32).tolist()


@pytest.mark.parametrize("batched", [False, True])
def test_episodes_play_on_after_success_if_asked(batched):
    options = {"after_success": "continue", "image_size": 32}
    actions = expert_actions(0, 0)
    stay = np.zeros((60 - len(actions), 2), dtype=np.float32)
    env = make_batched_env("toy_push", 0, 1, **options) if batched else make_env("toy_push", 0, **options)
    env.reset([0], [0], [0]) if batched else env.reset(0, 0)
    played = np.concatenate([actions, stay])
    result = env.step_chunk([0], played[None])[0] if batched else env.step_chunk(played)
    assert result.terminated and result.success_at_end and result.steps_executed == 60 and result.rewards.sum() == 1


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        make_env("toy_push", 0, cameras=("wrist",), image_size=4, max_steps=0, success_hold_steps=0)
    assert {problem.flag for problem in error.value.problems} == {
        "cameras",
        "image_size",
        "max_steps",
        "success_hold_steps",
    }
