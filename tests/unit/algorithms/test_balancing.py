import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvla.algorithms.balancing import karmarkar_karp, micro_batches

SIZES = st.lists(st.integers(0, 500), min_size=0, max_size=60)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, parts=st.integers(1, 7))
def test_a_partition_holds_every_row_once(sizes, parts):
    result = karmarkar_karp(sizes, parts)
    assert len(result) == parts
    assert sorted(row for part in result for row in part) == list(range(len(sizes)))


@settings(max_examples=40, deadline=None)
@given(parts=st.integers(1, 6), per_part=st.integers(1, 8), seed=st.integers(0, 999))
def test_equal_counts(parts, per_part, seed):
    sizes = [random.Random(seed + i).randint(1, 100) for i in range(parts * per_part)]
    result = karmarkar_karp(sizes, parts, equal_count=True)
    assert {len(part) for part in result} == {per_part}
    assert sorted(row for part in result for row in part) == list(range(len(sizes)))


def test_the_textbook_example_and_a_large_one():
    # 8, 7, 6, 5, 4: differencing ends with 16 against 14
    totals = [sum([8, 7, 6, 5, 4][i] for i in part) for part in karmarkar_karp([8, 7, 6, 5, 4], 2)]
    assert sorted(totals) == [14, 16]
    rng = random.Random(0)
    sizes = [rng.randint(1, 1000) for _ in range(512)]
    for equal in (False, True):
        totals = [sum(sizes[i] for i in part) for part in karmarkar_karp(sizes, 8, equal_count=equal)]
        assert max(totals) - min(totals) <= (3 if not equal else 20)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, cap=st.integers(500, 900))
def test_micro_batches_never_exceed_the_cap(sizes, cap):
    batches = micro_batches(sizes, cap)
    assert sorted(row for batch in batches for row in batch) == list(range(len(sizes)))
    assert all(sum(sizes[row] for row in batch) <= cap for batch in batches)
    more = micro_batches(sizes, cap, len(batches) + 2)
    assert len(more) == len(batches) + 2
    assert all(sum(sizes[row] for row in batch) <= cap for batch in more)


def test_micro_batches_are_few_and_even():
    batches = micro_batches([10] * 12, 40)
    assert [len(batch) for batch in batches] == [4, 4, 4]
    batches = micro_batches([10] * 8, 70)
    assert [len(batch) for batch in batches] == [4, 4]


def test_bad_input():
    with pytest.raises(ValueError, match="row 1 has 50 tokens, more than the cap of 40"):
        micro_batches([10, 50], 40)
    with pytest.raises(ValueError, match="cannot hold"):
        micro_batches([30, 30, 30], 40, 2)
    with pytest.raises(ValueError, match="num_parts"):
        karmarkar_karp([1], 0)
    with pytest.raises(ValueError, match="split evenly"):
        karmarkar_karp([1, 2, 3], 2, equal_count=True)
    with pytest.raises(ValueError, match="negative"):
        karmarkar_karp([1, -2], 2)
