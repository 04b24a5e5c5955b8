"""Episodes with another goal: which goals they have, where they begin and end, what they pay, how they are drawn."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from rlvla.envs import list_tasks
from rlvla.experience import Sample
from rlvla.models.soft_actor.config import SoftActorConfig
from rlvla.models.soft_actor.policy import SoftActorPolicy
from rlvla.replay.priorities import TDOptions
from rlvla.replay.schema import Episode
from rlvla.rewards import RewardConfig
from rlvla.rewards.machine_source import MachineSource
from rlvla.trainer.off_policy.config import ReplayConfig
from rlvla.trainer.off_policy.hindsight import Hindsight
from rlvla.trainer.off_policy.memory import Memory, make_batch

CHAIN = {
    "states": {f"u{i}": [{"when": "abc"[i], "to": f"u{i + 1}"}, {"when": "d", "to": "lost"}] for i in range(3)},
    "success": "u3",
    "failure": "lost",
    "validators": {"u1": {"needs": "a", "penalty": 0.1}},
}
TASK = replace(list_tasks("toy_reach")[0], propositions=("a", "b", "c", "d"))
GRACE, GAMMA, SCALE = 2, 0.9, 3.0
WEIGHTS = {"success": 2.0, "rm": 0.5, "env": 1.0}
# Reaches u1, falls back, reaches it again and then u2: in steps 1, 4 and 5.
STEPS, TRACE = (3, 2, 2, 1), ["", "a", "", "", "a", "ab", "", ""]


def sample_of(steps: tuple[int, ...] = STEPS, trace: list[str] = TRACE, chunk: int = 3) -> Sample:
    """An episode that was truncated; the step in which `c` holds is a success."""
    rng, count = np.random.default_rng(0), len(steps)
    executed = torch.arange(chunk)[None] < torch.tensor(steps)[:, None]

    def some(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=shape).astype(np.float32))

    parts = {name: some(count, chunk) * executed for name in WEIGHTS}
    return Sample(
        images=torch.zeros(count, 1, 1, 1, 3, dtype=torch.uint8),
        proprio=some(count, 2),
        instruction="go",
        actions=some(count, chunk, 1),
        executed=executed,
        trace={"action": some(count, chunk)},
        log_probs=some(count, chunk),
        rewards=sum(parts.values()),
        reward_components=parts,
        finish_step=sum(steps),
        success_once=False,
        success_at_end=False,
        terminated=False,
        truncated=True,
        last_images=torch.zeros(1, 1, 1, 3, dtype=torch.uint8),
        last_proprio=some(2),
        uid="u",
        suite=TASK.suite,
        task_id=TASK.task_id,
        init_state_id=7,
        seed=0,
        scores={"rm": some(count, 2).abs().clamp(0, 1)},
        step_events=[(frozenset(letters), "c" in letters) for letters in trace],
    )


def episode_of(sample: Sample) -> Episode:
    columns = {
        "action": sample.trace["action"].numpy(),
        "proprio": torch.cat([sample.proprio, sample.last_proprio[None]]).numpy(),
        "goal": np.zeros(sample.num_decisions + 1, np.int32),
    }
    scores = sample.scores["rm"].numpy()
    steps = sample.executed.sum(1).numpy()
    return Episode(columns, SCALE * sample.rewards.numpy(), steps, False, True, 7, 5, scores[:, 0], scores[:, 1])


def hindsight(**settings) -> Hindsight:
    config = RewardConfig(rm_machine=json.dumps(CHAIN), rm_grace=GRACE, gamma_shaping=GAMMA)
    replay = ReplayConfig(**{"her_ratio": 4.0, "replay_score_source": "rm", **settings})
    return Hindsight(replay, MachineSource(config), [TASK], success_reward=1.5)


def copies(sample: Sample, rng: np.random.Generator, **settings) -> list[Episode]:
    made = hindsight(**settings)
    return made.copies(sample, episode_of(sample), weights=WEIGHTS, scale=SCALE, rng=rng)


def reference(trace: list[str], goal: int) -> tuple[list[float], list[float]]:
    """Machine rewards and progress after each step until stage `goal` is reached, written down for the chain."""
    stage, taken, violations = 0, set(), 0
    paid, progress = [], []
    for letters in trace:
        before, reward = stage, 0.0
        if "abc"[stage] in letters:
            stage, violations = stage + 1, 0
            if stage not in taken:
                reward += 0.25
            taken.add(stage)
        elif stage == 1 and "a" not in letters:
            violations += 1
            if violations == GRACE:
                stage, violations = 0, 0
                reward -= 0.1
        else:
            violations = 0
        reward += 0.1 * (GAMMA * (stage - goal) / goal - (before - goal) / goal)
        reward += 1.0 * (stage == goal)
        paid.append(reward)
        progress.append(stage / goal)
        if stage == goal:
            return paid, progress
    raise AssertionError("not reached")


POSSIBLE = {
    "final": {(2, 0): 1.0},
    "episode": {(1, 0): 1 / 2, (2, 0): 1 / 2},
    "future": {(1, 0): 1 / 6, (2, 0): 1 / 6, (2, 1): 1 / 3, (2, 2): 1 / 3},
}


def begins_at(copy: Episode, sample: Sample) -> int:
    (first,) = np.flatnonzero((sample.proprio.numpy() == np.asarray(copy.columns["proprio"])[0]).all(1))
    return int(first)


@pytest.mark.parametrize("source", ["rm", "vlm"])
@pytest.mark.parametrize("rule", POSSIBLE)
def test_a_copy_is_an_episode_of_the_shorter_task(rule: str, source: str) -> None:
    sample, rng, seen = sample_of(), np.random.default_rng(0), set()
    ends = np.cumsum(STEPS)
    for _ in range(12):
        for copy in copies(sample, rng, her_goal=rule, replay_score_source=source):
            goal, first = int(np.asarray(copy.columns["goal"])[0]), begins_at(copy, sample)
            seen.add((goal, first))
            paid, progress = reference(TRACE, goal)
            last = int(np.searchsorted(ends, len(paid)))  # the decision in which the goal is reached
            steps = [*STEPS[first:last], len(paid) - sum(STEPS[:last])]
            assert copy.terminated and not copy.truncated and np.asarray(copy.steps).tolist() == steps
            assert (
                (np.asarray(copy.columns["goal"]) == goal).all() and copy.init_state == 7 and copy.policy_version == 5
            )
            whole = episode_of(sample)
            assert np.array_equal(copy.columns["action"], whole.columns["action"][first : last + 1])
            assert np.array_equal(copy.columns["proprio"], whole.columns["proprio"][first : last + 2])
            for row, taken in enumerate(steps, first):
                for column in range(taken):
                    step = sum(STEPS[:row]) + column
                    expected = float(sample.reward_components["env"][row, column]) + 0.5 * paid[step]
                    expected += 2.0 * 1.5 * (step == len(paid) - 1)
                    assert np.asarray(copy.rewards)[row - first, column] == pytest.approx(SCALE * expected, abs=1e-5)
            known = [0.0, *(progress[min(end, len(paid)) - 1] for end in ends[: last + 1])]
            scores = [0.5 + 0.5 * np.sign(now - before) for before, now in zip(known, known[1:])]
            if source == "vlm":
                known, scores = [0.0, *whole.progress], list(whole.action_score)
            assert np.allclose(copy.progress, known[1:][first : last + 1])
            assert np.allclose(copy.action_score, scores[first : last + 1])
    assert seen == set(POSSIBLE[rule])


@pytest.mark.parametrize("rule", POSSIBLE)
def test_goals_and_beginnings_are_equally_likely(rule: str) -> None:
    sample, rng, count = sample_of(), np.random.default_rng(3), Counter()
    for _ in range(150):
        for copy in copies(sample, rng, her_goal=rule, her_ratio=8.0):
            count[int(np.asarray(copy.columns["goal"])[0]), begins_at(copy, sample)] += 1
    expected = POSSIBLE[rule]
    assert set(count) == set(expected) and sum(count.values()) == 150 * 8
    if len(expected) > 1:
        assert stats.chisquare([count[c] for c in expected], [1200 * p for p in expected.values()]).pvalue > 1e-3


@pytest.mark.parametrize("ratio", [0.3, 1.0, 2.6])
def test_the_ratio_is_the_mean_number_of_copies(ratio: float) -> None:
    sample, rng = sample_of(), np.random.default_rng(1)
    counts = [len(copies(sample, rng, her_ratio=ratio)) for _ in range(400)]
    assert set(counts) <= {int(ratio), int(ratio) + (ratio % 1 > 0)}
    assert np.mean(counts) == pytest.approx(ratio, abs=4 * 0.5 / np.sqrt(400))


@pytest.mark.parametrize(
    ("trace", "goals"),
    [
        (["", "", "b"], {"final": set(), "future": set(), "episode": set()}),  # nothing was reached
        (["a", "ab", "c"], {"final": set(), "future": {1, 2}, "episode": {1, 2}}),  # the task itself was
        (["a", "d", "ab"], {"final": {1}, "future": {1}, "episode": {1}}),  # failed: nothing counts after that
        (["a", "", "", ""], {"final": {1}, "future": {1}, "episode": {1}}),  # the last one was lost again
    ],
)
def test_what_can_be_a_goal(trace: list[str], goals: dict[str, set[int]]) -> None:
    for rule, expected in goals.items():
        sample, rng = sample_of((1,) * len(trace), trace, chunk=1), np.random.default_rng(0)
        made = [copy for _ in range(20) for copy in copies(sample, rng, her_goal=rule, her_ratio=1.0)]
        assert {int(np.asarray(copy.columns["goal"])[0]) for copy in made} == expected
        assert len(made) == (20 if expected else 0)


def memory(folder: Path, capacity: int = 400) -> Memory:
    config = SoftActorConfig(action_dim=1, action_chunk_len=3, proprio_dim=2, hidden_sizes=(8,), goals=5)
    settings = ReplayConfig(
        replay_priority="td",
        replay_capacity=capacity,
        replay_eviction="value",
        priority_options=TDOptions(replay_alpha=1.0, replay_eps=1e-6),
    )
    return Memory(SoftActorPolicy(config), settings, folder)


def fill(made: Memory, count: int, seed: int) -> None:
    relabel = partial(hindsight(her_ratio=2.0).copies, weights=WEIGHTS, scale=1.0, rng=np.random.default_rng(seed))
    made.append([sample_of() for _ in range(count)], scale=1.0, version=0, now=0, relabel=relabel)


def test_draws_follow_priorities_over_both_kinds(tmp_path: Path) -> None:
    made = memory(tmp_path / "buffer")
    fill(made, 4, seed=0)
    buffer, rng = made.buffer, np.random.default_rng(1)
    rows = np.flatnonzero(buffer.drawable)
    found = buffer.gather(rows, ["goal", "episode"])
    assert made.relabelled == (found["goal"] > 0).sum() == len(rows) - 16 > 8 and buffer.num_episodes == 12
    errors = rng.uniform(0.1, 2.0, len(rows))
    buffer.update(rows, found["episode"], now=1, td_error=errors)
    counts = np.zeros(len(rows))
    for _ in range(300):
        drawn = buffer.sample(30, rng)
        np.add.at(counts, np.searchsorted(rows, drawn.rows), 1)
        assert np.allclose(drawn.weights, errors.min() / errors[np.searchsorted(rows, drawn.rows)], atol=1e-4)
    assert stats.chisquare(counts, 9000 * errors / errors.sum()).pvalue > 1e-3


def test_networks_are_told_the_goal_of_each_decision(tmp_path: Path) -> None:
    made = memory(tmp_path / "buffer")
    fill(made, 3, seed=0)
    drawn = made.buffer.sample(200, np.random.default_rng(0), share=0.0)
    found = made.buffer.gather(drawn.rows, ["goal", "proprio"])
    batch = make_batch([made.rows(drawn, 1, 0.9)], made._actor, "cpu")
    assert set(found["goal"]) == {0, 1, 2}
    for seen in (batch.now, batch.later):
        assert torch.equal(seen.proprio[:, 2:], torch.eye(5)[found["goal"]])
    assert np.array_equal(batch.now.proprio[:, :2].numpy(), found["proprio"])


def test_copies_leave_and_move_like_episodes(tmp_path: Path) -> None:
    made = memory(tmp_path / "buffer", capacity=30)
    for seed in range(6):
        fill(made, 1, seed)
        assert 0 < made.relabelled < len(made.buffer) <= 30
        for episode in made.buffer.stored_episodes():
            assert len(set(np.asarray(episode.columns["goal"]).tolist())) == 1
            assert episode.terminated == (np.asarray(episode.columns["goal"])[0] > 0)
    other = memory(tmp_path / "other", capacity=30)
    other.take_over([(tmp_path / "buffer", made.save())], slice(None))
    assert (other.relabelled, len(other.buffer)) == (made.relabelled, len(made.buffer))
