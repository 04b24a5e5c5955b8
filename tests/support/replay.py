"""Episodes for the replay buffer whose content tells where it belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlvla.replay.buffer import ReplayBuffer
from rlvla.replay.schema import BufferConfig, Column, Episode

COLUMNS = (
    Column("images", (1, 4, 4, 3), "uint8", observation=True, mapped=True),
    Column("proprio", (2,), "float32", observation=True),
    Column("actions", (2, 3), "float32"),
)


def config(capacity: int, **options: Any) -> BufferConfig:
    return BufferConfig(COLUMNS, capacity, chunk_len=2, **options)


def episode(seed: int, decisions: int, *, terminated: bool = False, truncated: bool = False, **options: Any) -> Episode:
    rng = np.random.default_rng(seed)
    return Episode(
        columns={
            "images": rng.integers(0, 255, (decisions + 1, 1, 4, 4, 3), dtype=np.uint8),
            "proprio": rng.random((decisions + 1, 2), dtype=np.float32),
            "actions": rng.random((decisions, 2, 3), dtype=np.float32),
        },
        rewards=rng.random((decisions, 2), dtype=np.float32),
        steps=rng.integers(1, 3, decisions),
        terminated=terminated,
        truncated=truncated,
        init_state=seed,
        policy_version=seed + 1,
        **options,
    )


def random_episodes(rng: np.random.Generator, count: int, longest: int = 6) -> list[Episode]:
    ends = [{"terminated": True}, {"truncated": True}, {}]
    return [
        episode(int(rng.integers(1 << 30)), int(rng.integers(1, longest + 1)), **ends[rng.integers(3)])
        for _ in range(count)
    ]


def exercise(buffer: ReplayBuffer, rng: np.random.Generator, rounds: int) -> list[Any]:
    """Append, draw and update like a learner; returns what was drawn."""
    seen: list[Any] = []
    for now in range(rounds):
        buffer.append(random_episodes(rng, 2), now=now)
        drawn = buffer.sample(8, rng, beta=0.5, share=0.75)
        seen += [drawn.rows, drawn.probabilities, drawn.weights, *buffer.gather(drawn.rows).values()]
        step = buffer.n_step(drawn.rows, 3, 0.9)
        seen += [step.returns, step.discounts, *buffer.gather(step.next_rows).values()]
        asked = buffer.due(now, 2, 4)
        seen.append(asked)
        names = ("episode", "action_score", "progress", "td_error", "scored_at", "init_state")
        seen += list(buffer.gather(asked, names).values())
        scores = rng.random((2, len(asked)))
        buffer.update(
            asked, buffer.gather(asked, ["episode"])["episode"], now=now, action_score=scores[0], progress=scores[1]
        )
        buffer.update(drawn.rows, drawn.episodes, now=now, td_error=rng.normal(0, 5, 8))
    return seen


def slow_returns(
    rewards: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, *, n: int, gamma: float, steps: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """n-step returns of consecutive rows [T] by a loop: returns, discounts of the bootstrap value, last rows."""
    rows = []
    for start in range(len(rewards)):
        total, discount, at = 0.0, 1.0, start
        for at in range(start, min(start + n, len(rewards))):
            total += discount * rewards[at]
            discount *= gamma ** steps[at]
            if terminated[at] or truncated[at]:
                break
        rows.append((total, 0.0 if terminated[at] else discount, at))
    returns, discounts, last = zip(*rows)
    return np.array(returns), np.array(discounts), np.array(last)


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(one, other)
    )


def bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
