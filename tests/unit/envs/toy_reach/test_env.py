import numpy as np
import pytest

from rlvla.envs import list_tasks, make_env
from rlvla.envs.registry import make_batched_env
from rlvla.envs.toy_reach.env import COLORS, DISC_RADIUS, HOLD_STEPS, STEP_SIZE, initial_scene, paint_disc
from rlvla.utils.errors import ConfigError

MAX_STEPS = list_tasks("toy_reach")[0].max_steps


def pixel_of(point, size):
    """(row, column) of a table point; the picture shows [-1.09, 1.09] in both directions, y upwards."""
    return int((1.09 - point[1]) / 2.18 * size), int((point[0] + 1.09) / 2.18 * size)


def test_scenes_are_solvable_and_fair():
    targets, named = [], []
    for init_state_id in range(2000):
        scene = initial_scene(init_state_id)
        assert scene.colors == list(COLORS) and scene.centers.shape == (3, 2)
        gaps = [np.linalg.norm(scene.centers[i] - scene.centers[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
        assert min(gaps) > 2 * DISC_RADIUS, "discs overlap"
        assert np.abs(scene.centers).max() <= 1 - DISC_RADIUS, "a disc reaches beyond the table"
        distance = np.linalg.norm(scene.centers - scene.effector, axis=1)
        assert distance.min() > DISC_RADIUS, "the effector starts on a disc"
        # Straight to the center at full speed, less the radius: inside by step 7, held by step 9.
        assert (np.abs(scene.centers - scene.effector).max() - DISC_RADIUS / 2**0.5) / STEP_SIZE <= 7
        targets.append(scene.centers[scene.target])
        named.append(scene.colors[scene.target])
    spread = np.std(targets, axis=0)
    assert (spread > 0.25).all(), "the named disc is always in about the same place: nothing to see"
    counts = [named.count(color) for color in COLORS]
    assert min(counts) > 2000 / len(COLORS) * 0.8


def test_a_blind_policy_rarely_succeeds():
    # The best place to stop without looking covers few targets, or the task would not test perception.
    targets = np.array([scene.centers[scene.target] for scene in map(initial_scene, range(2000))])
    grid = np.stack(np.meshgrid(np.linspace(-1, 1, 41), np.linspace(-1, 1, 41)), axis=-1).reshape(-1, 1, 2)
    inside = np.linalg.norm(targets[None] - grid, axis=-1) <= DISC_RADIUS
    assert inside.mean(axis=1).max() < 0.15


def test_picture_shows_the_discs_and_the_effector_where_they_are():
    for size in (64, 97):
        env = make_env("toy_reach", 0, image_size=size)
        for init_state_id in range(20):
            image = env.reset(init_state_id, 0).images[0]
            scene = initial_scene(init_state_id)
            for color, center in zip(scene.colors, scene.centers):
                assert tuple(image[pixel_of(center, size)]) == COLORS[color]
            assert tuple(image[pixel_of(scene.effector, size)]) == (255, 255, 255)
            assert f"reach the {scene.colors[scene.target]} disc" == env.reset(init_state_id, 0).instruction


def test_position_can_be_read_to_a_fraction_of_a_pixel():
    def centroid(x):
        image = np.zeros((64, 64, 3), dtype=np.uint8)
        paint_disc(image, np.array([x, 0.0]), DISC_RADIUS, (255, 255, 255))
        weights = image[:, :, 0].astype(np.float64)
        return (weights.sum(axis=0) * (np.arange(64) + 0.5)).sum() / weights.sum()

    pixel = 2.18 / 64
    for x in np.linspace(0, pixel, 11):
        assert centroid(x) == pytest.approx((1.09 + x) / pixel, abs=0.02)


def test_a_disc_is_as_large_as_it_should_be_and_may_leave_the_picture():
    image = np.zeros((256, 256, 3), dtype=np.uint8)
    paint_disc(image, np.array([0.1, -0.2]), 0.3, (255, 255, 255))
    area = image[:, :, 0].sum() / 255 * (2.18 / 256) ** 2
    assert area == pytest.approx(np.pi * 0.3**2, rel=0.01)
    rows, columns = np.nonzero(image[:, :, 0] > 127)
    assert (rows.mean(), columns.mean()) == pytest.approx(pixel_of((0.1, -0.2), 256), abs=1.0)
    edge = np.zeros((64, 64, 3), dtype=np.uint8)
    paint_disc(edge, np.array([1.09, 1.09]), 0.3, (255, 255, 255))
    assert edge[0, -1, 0] == 255 and not edge[20:].any() and not edge[:, :-20].any()


def test_an_action_is_a_velocity_and_the_table_has_edges():
    env = make_env("toy_reach", 0, use_proprio=True)
    start = env.reset(0, 0).proprio
    result = env.step_chunk(np.array([[0.5, 1.0], [0.5, -0.25]], dtype=np.float32))
    assert result.observation.proprio == pytest.approx(start + STEP_SIZE * np.array([1.0, 0.75]), abs=1e-6)
    env.reset(0, 0)
    assert env.step_chunk(np.full((12, 2), -1.0, dtype=np.float32)).observation.proprio == pytest.approx([-1, -1])


def test_events_and_success_follow_the_distance():
    env = make_env("toy_reach", 0, use_proprio=True)
    event_sets = set()
    for init_state_id in range(30):
        env.reset(init_state_id, 0)
        target = env.privileged_state()["target"]
        rng = np.random.default_rng(init_state_id)
        done = False
        while not done:
            error = target - env.privileged_state()["effector"]
            action = np.clip(error / STEP_SIZE + rng.normal(0, 1.2, 2), -1, 1).astype(np.float32)
            result = env.step_chunk(action[None])
            distance = np.linalg.norm(target - env.privileged_state()["effector"])
            assert result.successes[0] == (distance <= DISC_RADIUS)
            assert ("reached" in result.events[0]) == (distance <= DISC_RADIUS)
            assert ("near" in result.events[0]) == (distance <= 2 * DISC_RADIUS)
            event_sets.add(result.events[0])
            done = result.terminated or result.truncated
    assert len(event_sets) == 3


def test_success_must_be_held_without_interruption():
    env = make_env("toy_reach", 0, max_steps=60)
    env.reset(0, 0)
    state = env.privileged_state()

    def towards(point):
        return np.clip((point - env.privileged_state()["effector"]) / STEP_SIZE, -1, 1).astype(np.float32)[None]

    beside = state["target"] - np.array([0.0, DISC_RADIUS + STEP_SIZE / 2])
    up, stay = np.array([[0.0, 1.0]], dtype=np.float32), np.zeros((1, 2), dtype=np.float32)
    while not np.allclose(env.privileged_state()["effector"], beside, atol=1e-5):
        assert not env.step_chunk(towards(beside)).successes[0]
    assert env.step_chunk(up).successes[0]
    for _ in range(HOLD_STEPS - 2):
        assert env.step_chunk(stay).successes[0]
    assert not env.step_chunk(-up).successes[0]  # off it, one step too soon
    for _ in range(HOLD_STEPS - 1):
        result = env.step_chunk(towards(state["target"]))
        assert result.successes[0] and not result.terminated and result.rewards[0] == 0
    result = env.step_chunk(towards(state["target"]))
    assert result.terminated and result.rewards[0] == 1


@pytest.mark.parametrize("hold_steps", [1, 5])
def test_success_is_held_as_long_as_asked_for(hold_steps):
    env = make_env("toy_reach", 0, max_steps=60, success_hold_steps=hold_steps)
    env.reset(0, 0)
    held, terminated = 0, False
    while not terminated:
        state = env.privileged_state()
        action = np.clip((state["target"] - state["effector"]) / STEP_SIZE, -1, 1).astype(np.float32)
        result = env.step_chunk(action[None])
        held, terminated = held + int(result.successes[0]), result.terminated
    assert held == hold_steps and result.success_at_end


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        make_env(
            "toy_reach", 0, cameras=("wrist",), image_size=4, max_steps=0, success_hold_steps=0, render_quality="best"
        )
    assert len(error.value.problems) == 5
    for word in ("wrist", "image_size", "max_steps", "success_hold_steps", "best"):
        assert word in str(error.value)


@pytest.mark.parametrize("batched", [False, True])
def test_episodes_play_on_after_success_if_asked(batched: bool) -> None:
    """On the disc from the start, then away from it, with 12 steps in all; success holds after 3."""
    options = {"after_success": "continue", "image_size": 32, "use_proprio": True, "object_state": True}
    env = make_batched_env("toy_reach", 0, 1, **options) if batched else make_env("toy_reach", 0, **options)

    def reset() -> np.ndarray:
        first = env.reset([0], [3], [0])[0] if batched else env.reset(3, 0)
        state = env.privileged_state(0) if batched else env.privileged_state()
        assert first.proprio[2:].tolist() == state["target"].astype(np.float32).tolist()
        return (state["target"] - first.proprio[:2]) / STEP_SIZE

    def play(actions: np.ndarray):
        return env.step_chunk([0], actions[None])[0] if batched else env.step_chunk(actions)

    way = reset()
    steps = int(np.ceil(np.abs(way).max()))
    there, stay, away = np.tile(way / steps, (steps, 1)), np.zeros((1, 2)), -np.sign(way)[None]
    assert steps + 5 < 12, "time to hold success and to lose it again"
    first = play(np.concatenate([there, np.repeat(stay, 4, 0)]))
    assert first.successes[-1] and not first.terminated and first.steps_executed == steps + 4
    last = play(np.repeat(away, 12, 0))
    assert last.truncated and not last.terminated and not last.success_at_end
    reset()
    held = play(np.concatenate([there, np.repeat(stay, 12, 0)]))
    assert held.terminated and held.success_at_end and held.steps_executed == 12 and held.rewards.sum() == 1
    env.close()
