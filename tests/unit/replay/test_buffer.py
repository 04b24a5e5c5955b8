"""The replay buffer in memory and its mapped files; saved states: test_saving.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from rlvla.replay.buffer import ReplayBuffer
from rlvla.replay.priorities import make_priority, unscored
from rlvla.replay.schema import BufferConfig, Column, Episode
from rlvla.replay.targets import row_rewards
from tests.support.disks import needs_root, small_disk
from tests.support.replay import COLUMNS, config, episode, random_episodes, slow_returns


def rows_of(buffer: ReplayBuffer) -> dict[int, np.ndarray]:
    """Initial state (the seed of the episode) -> the rows of its decisions in order."""
    rows = np.flatnonzero(buffer.drawable)
    facts = buffer.gather(rows, ["init_state", "step"])
    return {
        int(seed): rows[facts["init_state"] == seed][np.argsort(facts["step"][facts["init_state"] == seed])]
        for seed in np.unique(facts["init_state"])
    }


def holds(buffer: ReplayBuffer, wanted: Episode) -> bool:
    """Whether an episode is in the buffer, column by column."""
    rows = rows_of(buffer)[wanted.init_state]
    stored, after = buffer.gather(rows), buffer.gather(buffer.n_step(rows, 1, 1.0).next_rows)
    for name in ("images", "proprio"):
        values = np.asarray(wanted.columns[name])
        if not (np.array_equal(stored[name], values[:-1]) and np.array_equal(after[name], values[1:])):
            return False
    facts = buffer.gather(rows, ["rewards", "steps", "terminated", "truncated", "policy_version"])
    last = np.arange(len(rows)) == len(rows) - 1
    return (
        np.array_equal(stored["actions"], wanted.columns["actions"])
        and np.array_equal(facts["rewards"], wanted.rewards)
        and np.array_equal(facts["steps"], wanted.steps)
        and np.array_equal(facts["terminated"], last & wanted.terminated)
        and np.array_equal(facts["truncated"], last & wanted.truncated)
        and (facts["policy_version"] == wanted.policy_version).all()
    )


def test_the_oldest_episodes_leave_and_the_rest_is_as_it_was_added(tmp_path: Path) -> None:
    rng, buffer = np.random.default_rng(0), ReplayBuffer(config(37), tmp_path)
    added: list[Episode] = []
    for _ in range(60):  # wraps around the ring about ten times
        new = random_episodes(rng, int(rng.integers(1, 4)))
        buffer.append(new)
        added += new
        behind = np.cumsum([e.num_decisions + 1 for e in reversed(added)])
        kept = added[len(added) - int((behind <= 37).sum()) :]
        assert set(rows_of(buffer)) == {e.init_state for e in kept}
        assert len(buffer) == sum(e.num_decisions for e in kept) == buffer.tree.positive
        assert buffer.num_episodes == len(kept)
        assert all(holds(buffer, e) for e in kept)


def test_the_last_observation_is_never_drawn(tmp_path: Path) -> None:
    buffer = ReplayBuffer(config(50), tmp_path)
    buffer.append([episode(seed, 1, terminated=True) for seed in range(10)])
    rng = np.random.default_rng(0)
    for share in (0.0, 0.5, 1.0):
        drawn = buffer.sample(200, rng, share=share)
        assert set(buffer.gather(drawn.rows, ["step"])["step"]) == {0}
        assert np.isin(drawn.rows, np.flatnonzero(buffer.drawable)).all()


def test_images_are_stored_once(tmp_path: Path) -> None:
    shape = (1, 64, 64, 3)
    buffer = ReplayBuffer(
        BufferConfig((Column("images", shape, "uint8", observation=True, mapped=True),), 64), tmp_path
    )
    rng, size = np.random.default_rng(0), 64 * 64 * 3
    for _ in range(40):
        images = rng.integers(0, 255, (9, *shape), dtype=np.uint8)
        buffer.append([Episode({"images": images}, np.zeros((8, 1), np.float32), np.ones(8, int), True, False)])
    path = tmp_path / "images.rows"
    assert (64 // 9) * 9 * size <= path.stat().st_size <= 1.25 * (64 + 9) * size
    assert path.stat().st_blocks * 512 <= (64 + 9) * size
    buffer.save()
    others = [p.stat().st_size for p in tmp_path.iterdir() if p != path]
    assert sum(others) < 2 * size, "a saved state refers to the images"


@pytest.mark.parametrize("eviction", ["fifo", "value"])
def test_n_step_returns_agree_with_those_of_the_episode(tmp_path: Path, eviction: str) -> None:
    rng, buffer = np.random.default_rng(1), ReplayBuffer(config(29, eviction=eviction), tmp_path)
    known: dict[int, Episode] = {}
    for turn in range(30):
        new = random_episodes(rng, 2)
        known |= {e.init_state: e for e in new}
        buffer.append(new)
        drawn = buffer.sample(6, rng)
        buffer.update(drawn.rows, drawn.episodes, now=turn, td_error=rng.normal(size=6))
        buffer.set_priorities(np.unique(drawn.rows), rng.random(len(np.unique(drawn.rows))))
        for seed, rows in rows_of(buffer).items():
            source = known[seed]
            rewards = row_rewards(source.rewards, source.steps, 0.8)
            ends = np.arange(len(rows)) == len(rows) - 1
            returns, discounts, boot = slow_returns(
                rewards, ends & source.terminated, ends & source.truncated, n=3, gamma=0.8, steps=source.steps
            )
            found = buffer.n_step(rows, 3, 0.8)
            np.testing.assert_allclose(found.discounts, discounts)
            np.testing.assert_allclose(found.returns, returns)
            after = buffer.gather(found.next_rows)["proprio"]
            np.testing.assert_array_equal(after, np.asarray(source.columns["proprio"])[boot + 1])


def test_windows_stay_in_their_episode(tmp_path: Path) -> None:
    rng, buffer = np.random.default_rng(2), ReplayBuffer(config(40), tmp_path)
    for _ in range(20):
        buffer.append(random_episodes(rng, 1))
    for rows in rows_of(buffer).values():
        found, mask = buffer.windows(rows, 4)
        for i in range(len(rows)):
            inside = rows[i : i + 4]
            assert found[i, : len(inside)].tolist() == inside.tolist()
            assert mask[i].tolist() == [j < len(inside) for j in range(4)]


def test_the_least_valuable_episodes_leave_but_never_the_newest(tmp_path: Path) -> None:
    buffer = ReplayBuffer(config(60, eviction="value"), tmp_path)
    buffer.append([episode(seed, 2) for seed in range(20)])
    means = np.random.default_rng(4).permutation(np.arange(20.0))
    means[[18, 19]] = -1  # the newest 10 % are worth least
    for seed, rows in rows_of(buffer).items():
        buffer.set_priorities(rows, [1 + means[seed], 3 + means[seed]])
    buffer.append([episode(100, 2), episode(101, 5)])
    gone = set(range(20)) - set(rows_of(buffer))
    assert gone == set(np.argsort(means[:18])[:3].tolist()), "9 rows were needed: three episodes of three"
    for seed in (18, 19, 100, 101):
        assert holds(buffer, episode(seed, 5 if seed == 101 else 2))


def test_if_all_others_have_left_the_oldest_leaves(tmp_path: Path) -> None:
    buffer = ReplayBuffer(config(12, eviction="value"), tmp_path)
    buffer.append([episode(0, 10)])
    buffer.append([episode(1, 2), episode(2, 7)])
    assert list(rows_of(buffer)) == [1, 2]
    buffer.append([episode(3, 11)])
    assert list(rows_of(buffer)) == [3]


def test_new_rows_have_the_largest_priority_so_far(tmp_path: Path) -> None:
    buffer = ReplayBuffer(config(50), tmp_path)
    buffer.append([episode(0, 2)])
    assert buffer.tree.get(rows_of(buffer)[0]).tolist() == [1, 1]
    buffer.set_priorities(rows_of(buffer)[0], [7.0, 0.5])
    buffer.set_priorities(rows_of(buffer)[0], [0.25, 0.5])
    buffer.append([episode(1, 1)])
    assert buffer.tree.get(rows_of(buffer)[1]).tolist() == [7]


def test_frequencies_and_weights_of_draws(tmp_path: Path) -> None:
    buffer = ReplayBuffer(config(40), tmp_path)
    buffer.append([episode(seed, 4) for seed in range(6)])
    rng, rows = np.random.default_rng(5), np.flatnonzero(buffer.drawable)
    priorities = rng.random(len(rows)) + 0.1
    priorities[3] = 0.0
    buffer.set_priorities(rows, priorities)
    for share in (1.0, 0.5):
        wanted = share * priorities / priorities.sum() + (1 - share) / len(rows)
        draws = [buffer.sample(20, rng, share=share, beta=1.0) for _ in range(1000)]
        found = np.concatenate([drawn.rows for drawn in draws])
        counts = np.bincount(found, minlength=40)[rows]
        possible = wanted > 0
        assert counts[~possible].sum() == 0
        assert chisquare(counts[possible], wanted[possible] * len(found)).pvalue > 0.01
        p = wanted[np.searchsorted(rows, found)]
        np.testing.assert_allclose(np.concatenate([drawn.probabilities for drawn in draws]), p)
        largest_weight_in_the_buffer = 1 / wanted[possible].min()
        np.testing.assert_allclose(np.concatenate([d.weights for d in draws]), 1 / p / largest_weight_in_the_buffer)
    uniform = buffer.sample(20, rng, share=0.0)
    np.testing.assert_allclose(uniform.weights, 1.0)


def test_priorities_follow_scores_and_td_errors(tmp_path: Path) -> None:
    priority = make_priority("hybrid")
    buffer = ReplayBuffer(config(40), tmp_path, priority)
    buffer.append([episode(0, 3), episode(1, 2, action_score=[0.5, np.nan], progress=[0.5, np.nan])], now=2)
    first, second = rows_of(buffer).values()
    numbers = buffer.gather(first, ["episode"])["episode"]
    buffer.update(first, numbers, now=3, action_score=[0.5, 0.9, np.nan], progress=[0.2, 1.0, np.nan])
    assert buffer.tree.get(first).tolist() == [1, 1, 1], "no TD error is known yet"
    buffer.update(first, numbers, now=5, td_error=[1.0, -2.0, 3.0])
    np.testing.assert_array_equal(
        buffer.tree.get(first), priority([0.5, 0.9, np.nan], [0.2, 1.0, np.nan], [1.0, 2.0, 3.0])
    )
    buffer.update(first, numbers, now=9, action_score=[np.nan, 0.1, 0.1], progress=[np.nan, 0.1, 0.1])
    facts = buffer.gather(first, ["action_score", "progress", "td_error", "scored_at", "prioritised_at"])
    assert facts["action_score"].tolist() == [0.5, 0.1, 0.1], "without an answer what was known stays"
    assert not unscored(facts["action_score"], facts["progress"]).any()
    assert facts["td_error"].tolist() == [1, -2, 3]
    assert facts["scored_at"].tolist() == [9, 9, 9] and facts["prioritised_at"].tolist() == [5, 5, 5]
    assert buffer.gather(second, ["scored_at"])["scored_at"].tolist() == [2, -1]


def test_the_last_of_several_updates_of_a_row_holds(tmp_path: Path) -> None:
    buffer = ReplayBuffer(config(40), tmp_path, make_priority("td"))
    buffer.append([episode(0, 3)])
    rows = rows_of(buffer)[0][[0, 1, 0, 0]]
    buffer.update(rows, np.zeros(4, int), now=0, td_error=[1.0, 2.0, 3.0, 4.0])
    assert buffer.gather(rows[:2], ["td_error"])["td_error"].tolist() == [4, 2]
    assert buffer.tree.get(rows[0]) == make_priority("td")(0, 0, 4.0)


def test_answers_for_rows_that_have_left_are_skipped(tmp_path: Path) -> None:
    buffer = ReplayBuffer(config(8), tmp_path, make_priority("td"))
    buffer.append([episode(0, 3), episode(1, 3)])
    drawn = buffer.sample(30, np.random.default_rng(0))
    left = int((drawn.episodes == 0).sum())
    buffer.append([episode(2, 3)])
    assert buffer.update(drawn.rows, drawn.episodes, now=1, td_error=np.ones(30)) == left > 0
    assert np.isnan(buffer.gather(rows_of(buffer)[2], ["td_error"])["td_error"]).all()
    assert (buffer.gather(rows_of(buffer)[1], ["td_error"])["td_error"] == 1).all()


def test_the_oldest_scores_are_due_first(tmp_path: Path) -> None:
    buffer = ReplayBuffer(config(40), tmp_path)
    buffer.append([episode(0, 6)])
    rows, numbers = rows_of(buffer)[0], np.zeros(6, int)
    assert np.isnan(buffer.score_age(9))
    for row, now in ((0, 5), (1, 3), (2, 9), (3, 4), (5, 1)):
        at = rows[[row]]
        buffer.update(at, numbers[:1], now=now, action_score=[0.5], progress=[0.5])
    assert buffer.due(10, 5, 99).tolist() == rows[[4, 5, 1, 3, 0]].tolist()
    assert buffer.due(10, 5, 3).tolist() == rows[[4, 5, 1]].tolist()
    assert buffer.due(10, 5, 0).tolist() == []
    assert buffer.due(10, 5, 99, of="prioritised_at").tolist() == rows.tolist()
    assert buffer.score_age(10) == pytest.approx(np.mean([5, 7, 1, 6, 9]))


def test_invalid_episodes_change_nothing(tmp_path: Path) -> None:
    buffer = ReplayBuffer(config(10), tmp_path)
    good = episode(0, 3)

    def changed(**parts: Any) -> Episode:
        names = ("columns", "rewards", "steps", "terminated", "truncated", "progress")
        return Episode(**{name: getattr(good, name) for name in names} | parts)

    cases = [
        (changed(columns={"proprio": good.columns["proprio"]}), "the episode has columns .'proprio'"),
        (changed(columns=dict(good.columns) | {"actions": np.zeros((4, 2, 3))}), "actions has shape"),
        (changed(columns=dict(good.columns) | {"images": np.zeros((4, 1, 4, 4, 3))}), "images is float64; uint8"),
        (changed(rewards=np.zeros((3, 3))), "rewards has shape"),
        (changed(steps=[1, 2, 3]), "takes 1..2 env steps"),
        (changed(steps=[1, 0, 2]), "takes 1..2 env steps"),
        (changed(progress=[0.5]), "progress has shape"),
        (episode(1, 10), "takes 11 rows.*the buffer has 10"),
    ]
    for wrong, named in cases:
        with pytest.raises(ValueError, match=named):
            buffer.append([good, wrong])
        assert len(buffer) == 0
    with pytest.raises(ValueError, match="cannot be drawn"):
        buffer.sample(2, np.random.default_rng(0))


def test_wrong_priorities_change_nothing(tmp_path: Path) -> None:
    buffer = ReplayBuffer(config(10), tmp_path, make_priority("td"))
    buffer.append([episode(0, 2)])
    rows = rows_of(buffer)[0]
    for wrong in (-1.0, np.nan):
        with pytest.raises(ValueError, match="a priority is negative, NaN"):
            buffer.set_priorities(rows, [1.0, wrong])
    with pytest.raises(ValueError, match="last observation"):
        buffer.set_priorities(rows + 1, [1.0, 1.0])
    with pytest.raises(ValueError, match="the critic has diverged"):
        buffer.update(rows, np.zeros(2, int), now=1, td_error=[2.0, np.nan])
    assert buffer.tree.get(rows).tolist() == [1, 1]
    assert np.isnan(buffer.gather(rows, ["td_error"])["td_error"]).all()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"capacity": 1}, "capacity is 1"),
        ({"chunk_len": 0}, "chunk_len is 0"),
        ({"eviction": "lru"}, "eviction is 'lru'; known: fifo, value"),
        ({"columns": (COLUMNS[1], COLUMNS[1])}, "two columns have the same name"),
    ],
)
def test_configurations_are_checked(wrong: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        BufferConfig(**{"columns": COLUMNS} | wrong)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"name": "rewards"}, "taken"),
        ({"name": "../x"}, "cannot name a column"),
        ({"dtype": "object"}, "numbers or booleans"),
        ({"mapped": True}, "only observations can be"),
        ({"shape": (3, 0)}, "sizes must be positive"),
    ],
)
def test_columns_are_checked(wrong: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Column(**{"name": "x"} | wrong)


@needs_root
def test_a_full_disk_leaves_the_buffer_as_it_was(tmp_path: Path) -> None:
    columns = (Column("images", (64, 64, 3), "uint8", observation=True, mapped=True),)

    def images(seed: int) -> Episode:
        values = np.random.default_rng(seed).integers(0, 255, (9, 64, 64, 3), dtype=np.uint8)
        return Episode({"images": values}, np.zeros((8, 1)), np.ones(8, int), True, False, init_state=seed)

    with small_disk(tmp_path / "disk", "1m") as disk:
        buffer = ReplayBuffer(BufferConfig(columns, 1000), disk.folder / "replay")
        buffer.append([images(0)])
        disk.fill(left=50_000)
        with pytest.raises(OSError, match="an episode could not be written .*No space left.*make room there"):
            buffer.append([images(1)])
        assert list(rows_of(buffer)) == [0]
        disk.make_room()
        buffer.append([images(2)])
        for seed, rows in rows_of(buffer).items():
            np.testing.assert_array_equal(buffer.gather(rows)["images"], images(seed).columns["images"][:-1])
        assert list(rows_of(buffer)) == [0, 2]
        buffer.close()
