"""Shares of an optimiser step: over micro-batches under a cap, and over ranks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvla.experience import Experience
from rlvla.models.actor import Actor
from rlvla.models.vla.inputs import row_tokens
from rlvla.trainer.config import BatchConfig
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.replay import MicroBatchPlanner, assign_rows
from tests.support.ranks import ManyRanks


class OneRank:
    """A rank among others that need `others` micro-batches."""

    world_size, rank = 1, 0

    def __init__(self, others: int = 0):
        self._others = others

    def all_reduce(self, values, op="mean"):
        assert op == "max"
        return {name: max(value, self._others) for name, value in values.items()}


@pytest.fixture(scope="module")
def actor(policy_folder: Path) -> Actor:
    return Actor.from_pretrained(policy_folder)


def rows(n: int) -> Experience:
    return Experience(
        images=torch.zeros(n, 1, 64, 64, 3, dtype=torch.uint8),
        proprio=torch.zeros(n, 2),
        instructions=["reach the red disc"] * n,
        episode_index=torch.arange(n),
        trace={"tokens": torch.zeros(n, 8, dtype=torch.long)},
        action_mask=torch.ones(n, 8, dtype=torch.bool),
    )


def test_row_tokens_are_the_length_of_the_sequence(actor: Actor) -> None:
    lengths = []
    (first,) = (m for name, m in actor.vla.named_modules() if name.endswith("layers.0.self_attn.k_proj"))
    handle = first.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    batch = rows(3)
    batch.instructions[0] = "reach the yellow disc now"
    with torch.no_grad():
        actor(**actor.score(batch, 1.0))
    handle.remove()
    assert row_tokens(actor.inputs, batch.instructions, 1) == actor.row_tokens(batch.instructions, 1) == lengths * 3


@pytest.mark.parametrize("others", [0, 7])
def test_dynamic_micro_batches_keep_the_cap_and_cover_every_row_once(actor: Actor, others: int) -> None:
    tokens = row_tokens(actor.inputs, ["reach the red disc"], 1)[0]
    batch = BatchConfig(use_dynamic_batch=True, train_max_tokens_per_gpu=3 * tokens + 5)
    plan = MicroBatchPlanner(OneRank(others), batch, actor).plan(rows(10))
    assert len(plan) == max(4, others), "as few as the cap allows, or as many as another rank needs"
    assert max(len(part) for part in plan) == 3
    assert sorted(torch.cat(plan).tolist()) == list(range(10))


def test_fixed_micro_batches_are_as_many_as_another_rank_needs(actor: Actor) -> None:
    plan = MicroBatchPlanner(OneRank(5), BatchConfig(micro_train_batch_size=4), actor).plan(rows(10))
    assert [part.tolist() for part in plan] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [], []]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    ranks=st.integers(1, 4),
    equal_rows=st.booleans(),
    data=st.data(),
)
def test_ranks_get_equal_shares(sizes: list[int], ranks: int, equal_rows: bool, data: st.DataObject) -> None:
    owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=len(sizes), max_size=len(sizes)))
    parts = assign_rows(sizes, owners, ranks, equal_rows)
    assert sorted(row for part in parts for row in part) == list(range(len(sizes)))
    totals = [sum(sizes[row] for row in part) for part in parts]
    if equal_rows:
        counts = [len(part) for part in parts]
        assert max(counts) - min(counts) <= 1
    else:
        assert max(totals) - min(totals) <= max(sizes)


def test_rows_stay_where_they_are_as_far_as_possible() -> None:
    assert assign_rows([5, 5, 3, 3], [1, 1, 0, 0], 2, False) in ([[0, 2], [1, 3]], [[1, 2], [0, 3]], [[2, 1], [3, 0]])
    assert assign_rows([9, 1], [1, 0], 2, False) == [[1], [0]]


def test_tokens_of_the_ranks_are_measured_before_and_after_balancing(actor: Actor) -> None:
    """Three ranks with 2, 6 and 1 decisions; the last one holds nothing but the placeholder of an empty step."""
    ranks, tokens = ManyRanks(3), row_tokens(actor.inputs, ["reach the red disc"], 1)[0]
    steps = [rows(2), rows(6), rows(1).take(torch.empty(0, dtype=torch.long))]
    measured: dict[int, dict[str, float]] = {}

    def measure(rank: int) -> None:
        metrics, planner = Metrics(), MicroBatchPlanner(ranks.of(rank), BatchConfig(balance_ranks="tokens"), actor)
        planner.measure_balance(steps[rank], planner.spread(steps[rank]), metrics)
        measured[rank] = {name: metrics.so_far(name)[0] / tokens for name in metrics._sums}

    threads = [threading.Thread(target=measure, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (
        measured[0]
        == measured[1]
        == measured[2]
        == pytest.approx(
            {
                **{"global_seqlen/min": 0.0, "global_seqlen/max": 6.0, "global_seqlen/minmax_diff": 6.0},
                **{"global_seqlen/balanced_min": 2.0, "global_seqlen/balanced_max": 3.0, "global_seqlen/mean": 8 / 3},
            }
        )
    )
