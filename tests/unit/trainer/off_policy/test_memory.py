"""Batches of several ranks are one draw from all their buffers; demonstrations become decisions."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from rlvla.data.demonstrations import Demonstrations
from rlvla.models.soft_actor.config import SoftActorConfig
from rlvla.models.soft_actor.policy import SoftActorPolicy
from rlvla.replay.buffer import Drawn, ReplayBuffer
from rlvla.replay.schema import BufferConfig, Column, Episode
from rlvla.trainer.off_policy.config import ReplayConfig
from rlvla.trainer.off_policy.memory import Memory, draw_share, make_batch, normalize_weights
from tests.support.ranks import ManyRanks

LENGTHS = ((3, 1), (2, 4, 2))  # decisions of the episodes of each rank


def buffers(folder: Path) -> list[ReplayBuffer]:
    rng, made = np.random.default_rng(0), []
    for rank, lengths in enumerate(LENGTHS):
        buffer = ReplayBuffer(BufferConfig((Column("action", (1,)),), 40), folder / str(rank))
        for count in lengths:
            buffer.append(
                [Episode({"action": np.zeros((count, 1), "f4")}, np.zeros((count, 1), "f4"), [1] * count, True, False)]
            )
        rows = np.flatnonzero(buffer.drawable)
        buffer.set_priorities(rows, rng.uniform(0.1, 3.0, len(rows)))
        made.append(buffer)
    return made


def of_each_rank(function: Callable[[int, Any], Any]) -> list[Any]:
    """What `function(rank, strategy)` returns on two ranks that run at the same time."""
    meeting = ManyRanks(2)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: function(rank, meeting.of(rank)), range(2)))


def drawn_together(
    made: list[ReplayBuffer], k: int, repeats: int, config: ReplayConfig, share: float
) -> list[list[Drawn]]:
    """Draws of each rank."""

    def draws(rank: int, strategy: Any) -> list[Drawn]:
        own, shared = np.random.default_rng(rank), np.random.default_rng(7)
        return [draw_share(made[rank], k, own, shared, strategy, config, beta=1.0, share=share) for _ in range(repeats)]

    return of_each_rank(draws)


@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.75, 1.0])
def test_the_ranks_draw_from_the_whole(share: float, zeros: bool, stratified: bool, tmp_path: Path) -> None:
    """As often as from one buffer with all rows, and with its weights."""
    made, config = buffers(tmp_path), ReplayConfig(replay_stratified=stratified)
    if zeros:  # all rows of one rank, one of the other
        made[0].set_priorities(np.flatnonzero(made[0].drawable), 0.0)
        made[1].set_priorities(np.flatnonzero(made[1].drawable)[:1], 0.0)
    priorities = np.concatenate([b.tree.get(np.flatnonzero(b.drawable)) for b in made])
    probabilities = share * priorities / priorities.sum() + (1 - share) / 12
    smallest = probabilities[probabilities > 0].min()
    counts, k, repeats = [np.zeros(40), np.zeros(40)], 20, 400
    parts = drawn_together(made, k, repeats, config, share)
    assert {len(a.rows) + len(b.rows) for a, b in zip(*parts)} == {k}
    for rank, of_rank in enumerate(parts):
        own = np.zeros(40)
        own[np.flatnonzero(made[rank].drawable)] = probabilities[:4] if rank == 0 else probabilities[4:]
        for drawn in of_rank:
            np.add.at(counts[rank], drawn.rows, 1)
            assert np.allclose(drawn.probabilities, own[drawn.rows])
            assert np.allclose(drawn.weights, smallest / own[drawn.rows]), "divided by the largest of both ranks"
    found = np.concatenate([counts[r][np.flatnonzero(b.drawable)] for r, b in enumerate(made)])
    assert len(found) == 12 and found.sum() == k * repeats
    assert not found[probabilities == 0].any()
    possible = probabilities > 0
    assert stats.chisquare(found[possible], k * repeats * probabilities[possible]).pvalue > 1e-3


def test_what_was_played_weighs_as_much_as_demonstrations_whichever_rank_it_is_on() -> None:
    def weighed(rank: int, strategy: Any) -> np.ndarray:
        nothing = {"weights": np.ones(1), "mask": np.zeros(1, bool)}  # the placeholder of an empty share
        part = nothing if rank else {"weights": np.array([0.2, 0.3, 0.1]), "mask": np.ones(3, bool)}
        normalize_weights(part, strategy)
        return part["weights"]

    played, _ = of_each_rank(weighed)
    assert played == pytest.approx([1.0, 1.5, 0.5])


def test_every_step_of_a_demonstration_begins_one_decision(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    actions = [rng.uniform(-0.9, 0.9, (steps, 2)).astype("f4") for steps in (7, 2)]
    proprio = [rng.normal(size=(len(a), 3)).astype("f4") for a in actions]
    images = [rng.integers(0, 256, (len(a), 1, 16, 16, 3), dtype=np.uint8) for a in actions]
    demos = Demonstrations({}, {}, images, proprio, actions, ["a", "b"], [True, False], [])
    config = SoftActorConfig(
        action_dim=2,
        action_chunk_len=3,
        num_images_in_input=1,
        image_size=16,
        proprio_dim=3,
        hidden_sizes=(8,),
        text_width=8,
    )
    memory = Memory(SoftActorPolicy(config), ReplayConfig(replay_capacity=60), tmp_path / "buffer")
    memory.append_demonstrations(demos, [0, 1], 2.0)
    rows = np.flatnonzero(memory.buffer.drawable)
    names = ["action", "proprio", "images", "rewards", "steps", "terminated", "truncated", "sentence"]
    found = memory.buffer.gather(rows, names)
    assert len(rows) == 9, "7 and 2 steps"
    recorded = memory.rows(Drawn(rows, rows, np.ones(9), np.ones(9)), 1, 0.9, 9)["recorded_returns"]
    for index in range(len(rows)):
        which = int(memory.sentences[found["sentence"][index]] == "b")
        (start,) = np.flatnonzero((proprio[which] == found["proprio"][index]).all(1))
        assert np.array_equal(found["images"][index], images[which][start])
        chunk = actions[which][start : start + 3].reshape(-1)
        assert np.array_equal(found["action"][index][: len(chunk)], chunk) and found["steps"][index] == len(chunk) // 2
        ends = start + 3 >= len(actions[which])
        assert found["terminated"][index] == (ends and which == 0) and found["truncated"][index] == (
            ends and which == 1
        )
        assert recorded[index] == pytest.approx(2.0 * 0.9 ** (6 - start) if which == 0 else 0.0)
        paid = found["rewards"][index]
        assert paid.sum() == (2.0 if ends and which == 0 else 0.0) and paid[: found["steps"][index] - 1].sum() == 0


def test_interventions_become_decisions_that_end_where_the_policy_acts_again(tmp_path: Path) -> None:
    """Chunks of two actions; what follows the first part is bootstrapped from the observation at its end."""
    flags = np.array([letter == "E" for letter in "..EEE.EE"])
    proprio = np.arange(8, dtype="f4")[:, None]
    actions, images = [np.full((8, 1), 0.5, "f4")], [np.zeros((8, 1, 16, 16, 3), np.uint8)]
    demos = Demonstrations({}, {}, images, [proprio], actions, ["a"], [True], [], interventions=[flags])
    actor = SoftActorPolicy(SoftActorConfig(action_dim=1, action_chunk_len=2, proprio_dim=1, hidden_sizes=(8,)))
    memory = Memory.of_demonstrations(actor, demos, [0], 2.0, tmp_path / "buffer")
    rows = np.flatnonzero(memory.buffer.drawable)
    names = ["proprio", "steps", "terminated", "truncated", "rewards"]
    at = memory.buffer.gather(rows, names)
    later = memory.buffer.gather(memory.buffer.n_step(rows, 1, 0.9).next_rows, ["proprio"])["proprio"][:, 0]
    ends = zip(at["proprio"][:, 0], at["steps"], later, at["terminated"], at["truncated"], at["rewards"].sum(1))
    assert sorted((*map(int, end),) for end in ends) == [
        (2, 2, 4, 0, 0, 0),
        (3, 2, 5, 0, 1, 0),
        (4, 1, 5, 0, 1, 0),
        (6, 2, 7, 1, 0, 2),
        (7, 1, 7, 1, 0, 2),
    ]


def test_the_batch_of_a_rank_without_rows_counts_nothing(tmp_path: Path) -> None:
    config = SoftActorConfig(action_dim=1, action_chunk_len=1, proprio_dim=1, hidden_sizes=(8,))
    actor = SoftActorPolicy(config)
    memory = Memory(actor, ReplayConfig(replay_capacity=10), tmp_path / "buffer")
    columns = {"action": np.ones((2, 1), "f4"), "proprio": np.arange(3, dtype="f4")[:, None]}
    memory.buffer.append([Episode(columns, np.ones((2, 1), "f4"), [1, 1], False, True)])
    empty = memory.buffer.sample(2, np.random.default_rng(0))
    empty = type(empty)(*(getattr(empty, name)[:0] for name in ("rows", "episodes", "probabilities", "weights")))
    batch = make_batch([memory.rows(empty, 1, 0.5)], actor, "cpu")
    assert batch.mask.tolist() == [False] and torch.isfinite(batch.returns).all()
    whole = make_batch([memory.rows(memory.buffer.sample(2, np.random.default_rng(0)), 2, 0.5)], actor, "cpu")
    assert set(whole.returns.tolist()) <= {1.0, 1.5} and set(whole.discounts.tolist()) <= {0.5, 0.25}


def test_states_of_complete_checkpoints_outlive_failed_ones(tmp_path: Path) -> None:
    config = SoftActorConfig(action_dim=1, action_chunk_len=1, proprio_dim=1, hidden_sizes=(8,))
    memory = Memory(SoftActorPolicy(config), ReplayConfig(replay_capacity=100), tmp_path / "buffer")
    columns = {"action": np.ones((2, 1), "f4"), "proprio": np.arange(3, dtype="f4")[:, None]}
    saved = []
    for complete in (True, True, False, False, False, True):
        memory.buffer.append([Episode(columns, np.ones((2, 1), "f4"), [1, 1], False, True)])
        saved.append(memory.save())
        if complete:
            memory.checkpoint_written(2)
        for state, expected in ((saved[1], 2), (saved[0], 1)) if len(saved) == 5 else ():
            copy = tmp_path / f"copy{expected}"
            shutil.copytree(tmp_path / "buffer", copy)
            other = Memory(SoftActorPolicy(config), ReplayConfig(replay_capacity=100), copy)
            other.load(state)
            assert other.buffer.num_episodes == expected
    numbers = sorted(int(path.stem[6:]) for path in (tmp_path / "buffer").glob("state_*.json"))
    assert numbers == [saved[1]["generation"], saved[5]["generation"]]


def test_episodes_are_taken_over_by_other_ranks(tmp_path: Path) -> None:
    config = SoftActorConfig(action_dim=1, action_chunk_len=1, proprio_dim=1, hidden_sizes=(8,), text_width=8)
    actor = SoftActorPolicy(config)
    old = Memory(actor, ReplayConfig(replay_capacity=100), tmp_path / "old")
    for number in range(5):
        columns = {"action": np.full((2, 1), number, "f4"), "proprio": np.full((3, 1), number, "f4")}
        columns["sentence"] = old.sentence_ids([f"task {number}"] * 3)
        old.buffer.append([Episode(columns, np.ones((2, 1), "f4"), [1, 1], False, True, number)])
    state = old.save()
    new = Memory(actor, ReplayConfig(replay_capacity=100), tmp_path / "new")
    new.sentence_ids(["something else"])
    new.take_over([(tmp_path / "old", state)], slice(1, None, 2))
    found = list(new.buffer.stored_episodes())
    assert [episode.init_state for episode in found] == [1, 3]
    for episode in found:
        words = {new.sentences[int(number)] for number in np.asarray(episode.columns["sentence"])}
        assert (
            words == {f"task {episode.init_state}"}
            and (np.asarray(episode.columns["action"]) == episode.init_state).all()
        )
        assert not episode.terminated and episode.truncated and list(np.asarray(episode.steps)) == [1, 1]


def test_episodes_of_several_ranks_are_taken_over_by_age(tmp_path: Path) -> None:
    """So that the oldest ones leave a full buffer first."""
    config = SoftActorConfig(action_dim=1, action_chunk_len=1, proprio_dim=1, hidden_sizes=(8,))
    actor, saved = SoftActorPolicy(config), []
    for rank, versions in enumerate([[0, 3, 7], [0, 2, 9]]):
        memory = Memory(actor, ReplayConfig(replay_capacity=8), tmp_path / str(rank))
        for version in versions:
            columns = {"action": np.zeros((1, 1), "f4"), "proprio": np.zeros((2, 1), "f4")}
            memory.buffer.append([Episode(columns, np.ones((1, 1), "f4"), [1], True, False, rank, version)])
        saved.append((tmp_path / str(rank), memory.save()))
    one = Memory(actor, ReplayConfig(replay_capacity=8), tmp_path / "one")
    one.take_over(saved, slice(None))
    assert [int(np.asarray(e.policy_version).flat[0]) for e in one.buffer.stored_episodes()] == [2, 3, 7, 9]
