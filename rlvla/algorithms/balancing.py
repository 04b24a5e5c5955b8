"""Balanced partition of rows into ranks and micro-batches by token count; plain integers, no tensors."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def karmarkar_karp(sizes: Sequence[int], num_parts: int, equal_count: bool = False) -> list[list[int]]:
    """Partition rows into parts of nearly equal total size by the largest differencing method.

    Karmarkar and Karp (1982): repeatedly merge the two partial partitions of largest spread, pairing the largest part
    of one with the smallest part of the other.

    Args:
        sizes: tokens of each row, not negative.
        num_parts: k, at least 1.
        equal_count: every part gets the same number of rows; len(sizes) must be a multiple of k.

    Returns:
        k lists of row indices in ascending order; without `equal_count` parts may be empty if there are few rows.

    Raises:
        ValueError: k below 1, a negative size, or with `equal_count` a number of rows that is not a multiple of k.
    """
    _check_sizes(sizes)
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}")
    if equal_count and len(sizes) % num_parts:
        raise ValueError(f"{len(sizes)} rows cannot be split evenly into {num_parts} parts; use equal_count=False")
    order = sorted(range(len(sizes)), key=lambda row: (sizes[row], row))
    width = num_parts if equal_count else 1
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for number, start in enumerate(range(0, len(order), width)):
        partition = [(sizes[row], [row]) for row in order[start : start + width]]
        partition += [(0, []) for _ in range(num_parts - len(partition))]
        heapq.heappush(heap, _entry(partition, number))
    serial = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        # both are sorted in descending order
        merged = [(a + b, rows + more) for (a, rows), (b, more) in zip(first, reversed(second))]
        heapq.heappush(heap, _entry(merged, serial))
        serial += 1
    if not heap:
        return [[] for _ in range(num_parts)]
    return [sorted(rows) for _, rows in heap[0][2]]


def micro_batches(sizes: Sequence[int], max_tokens: int, num_batches: int | None = None) -> list[list[int]]:
    """Split rows into balanced micro-batches of at most `max_tokens` tokens.

    Args:
        sizes: tokens of each row.
        max_tokens: hard cap per micro-batch.
        num_batches: number of micro-batches, for ranks that must agree on one; None uses the smallest number found.

    Returns:
        Lists of row indices; some are empty if `num_batches` exceeds the number of rows.

    Raises:
        ValueError: a row above the cap, a negative size, or `num_batches` too small for the cap.
    """
    _check_sizes(sizes)
    if sizes and max(sizes) > max_tokens:
        row = max(range(len(sizes)), key=sizes.__getitem__)
        raise ValueError(f"row {row} has {sizes[row]} tokens, more than the cap of {max_tokens}; raise the cap")
    if num_batches is None:
        needed = max(-(-sum(sizes) // max_tokens), 1) if max_tokens else 1
        for count in range(needed, len(sizes)):
            batches = karmarkar_karp(sizes, count)
            if _fits(batches, sizes, max_tokens):
                return batches
        return [[row] for row in range(len(sizes))]
    for batches in (karmarkar_karp(sizes, num_batches), _first_fit(sizes, max_tokens, num_batches)):
        if len(batches) == num_batches and _fits(batches, sizes, max_tokens):
            return batches
    raise ValueError(
        f"{num_batches} micro-batches of {max_tokens} tokens cannot hold {sum(sizes)} tokens in whole rows"
    )


def _entry(partition: list[tuple[int, list[int]]], serial: int) -> tuple[int, int, list[tuple[int, list[int]]]]:
    """Entry of the heap: minus the spread, a tie-breaker, and the parts in descending order of size."""
    partition = sorted(partition, key=lambda part: -part[0])
    return partition[-1][0] - partition[0][0], serial, partition


def _fits(batches: list[list[int]], sizes: Sequence[int], max_tokens: int) -> bool:
    return all(sum(sizes[row] for row in batch) <= max_tokens for batch in batches)


def _first_fit(sizes: Sequence[int], max_tokens: int, num_batches: int) -> list[list[int]]:
    """First-fit decreasing: less even than differencing, but packs tighter against the cap."""
    batches: list[list[int]] = [[] for _ in range(num_batches)]
    totals = [0] * num_batches
    for row in sorted(range(len(sizes)), key=lambda row: -sizes[row]):
        first = next((i for i, total in enumerate(totals) if total + sizes[row] <= max_tokens), None)
        if first is None:
            return []
        batches[first].append(row)
        totals[first] += sizes[row]
    return [sorted(batch) for batch in batches]


def _check_sizes(sizes: Sequence[int]) -> None:
    if any(size < 0 for size in sizes):
        raise ValueError(f"sizes must not be negative, got {min(sizes)}")
