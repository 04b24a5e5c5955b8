"""Interventions of the scripted expert: when it takes over and gives back, and the episodes that result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlvla.envs.base import ChunkResult, Observation, TaskSpec
from rlvla.envs.experts import ExpertConfig, make_expert
from rlvla.envs.registry import list_tasks, make_env
from rlvla.envs.workers.messages import EnvSpec, Reset, StepExpert
from rlvla.envs.workers.pool import EnvPool
from rlvla.experience import Sample
from rlvla.models.actor import Actor
from rlvla.rollout import EpisodeRequest, RolloutConfig, RolloutEngine
from rlvla.rollout.interventions import EpisodeInterventions, InterventionRule

KWARGS = {"cameras": ("top",), "image_size": 64, "use_proprio": True}


@pytest.fixture(scope="module")
def task() -> TaskSpec:
    return list_tasks("toy_reach")[0]


@pytest.fixture(scope="module")
def actor(policy_folder: Path) -> Actor:
    return Actor.from_pretrained(policy_folder).eval()


def chunk(*events: set[str]) -> ChunkResult:
    """A result of as many steps as there are sets of propositions."""
    count = len(events)
    numbers = np.zeros(count, np.float32), np.zeros(count, bool)
    observation = Observation(np.zeros((1, 2, 2, 3), np.uint8), None, "")
    return ChunkResult(observation, count, *numbers, False, False, False, [frozenset(names) for names in events])


def follow(episode: EpisodeInterventions, *chunks: list[set[str]]) -> str:
    """Who decides in each chunk, P (policy), T (takeover) or E (expert)."""
    letters = ""
    for events in chunks:
        command = episode.command(len(events))
        assert command is None or command.length == len(events)
        letters += "P" if command is None else "E" if command.takeover is None else "T"
        episode.follow(chunk(*events))
    return letters


def test_the_expert_takes_over_without_progress_and_gives_back_with_it(task: TaskSpec) -> None:
    episode = InterventionRule(patience=4, reserve=0).begin(replace(task, max_steps=100), seed=1)
    still, near = [set(), set()], [{"near"}, {"near"}]
    assert follow(episode, still, still, still, still) == "PPTE"
    assert follow(episode, near) == "E", "progress ends the intervention"
    assert follow(episode, near, still, near) == "PPT", "a proposition counts once"
    assert follow(episode, [{"near", "reached"}, set()], still) == "EP"
    assert "".join("E" if flag else "." for flag in episode.flags) == "....EEEEEE....EEEE.."


def test_it_has_control_of_the_last_steps(task: TaskSpec) -> None:
    episode = InterventionRule(patience=100, reserve=task.max_steps - 3).begin(task, seed=1)
    progress = [[{f"p{number}"}, {f"p{number}"}] for number in range(5)]
    assert follow(episode, *progress) == "PPTEE", "progress or not"


def play(actor: Actor, rule: InterventionRule, slots: int = 2, envs_per_worker: int = 1) -> list[Sample]:
    requests = [EpisodeRequest("toy_reach", 0, state, 40 + state, str(state)) for state in range(4)]
    with EnvPool(slots, envs_per_worker=envs_per_worker) as pool:
        engine = RolloutEngine(pool, KWARGS, {"success": 1.0}, RolloutConfig(deterministic_rollout=True))
        return engine.run(requests, actor, temperature=1.0, greedy=True, interventions=rule)


def test_an_expert_with_all_the_steps_plays_as_it_does_alone(actor: Actor, task: TaskSpec) -> None:
    env, expert = make_env("toy_reach", 0, **KWARGS), make_expert("toy_reach", 0, ExpertConfig())
    for sample in play(actor, InterventionRule(reserve=task.max_steps)):
        assert sample.interventions is not None and sample.interventions.all()
        env.reset(sample.init_state_id, sample.seed)
        expert.reset(np.random.default_rng(0))
        for action in sample.played_actions.numpy():
            np.testing.assert_array_equal(action, expert.act(env.privileged_state()))
            result = env.step_chunk(action[None])
        assert sample.success_at_end and result.success_at_end and len(sample.played_actions) == sample.finish_step


def test_flags_say_whose_actions_were_played(actor: Actor, task: TaskSpec) -> None:
    """The policy's before the takeover; the same episodes in a batched environment, and with errors by their seeds."""
    rule = InterventionRule(patience=4, reserve=10)
    alone = play(actor, InterventionRule(patience=1000, reserve=0))
    for sample, other, own in zip(play(actor, rule), play(actor, rule, 4, envs_per_worker=4), alone):
        flags = sample.interventions.numpy()
        assert 0 < flags.sum() < len(flags) == sample.finish_step
        first = int(flags.argmax())
        np.testing.assert_array_equal(sample.played_actions[:first], own.played_actions[:first])
        assert (sample.played_actions[first] - own.played_actions[first]).abs().max() > 1e-3
        np.testing.assert_array_equal(sample.played_actions, other.played_actions)
        assert not own.interventions.any()
    noisy = InterventionRule(4, 10, ExpertConfig(noise_std=0.2))
    for sample, other in zip(play(actor, noisy), play(actor, noisy, slots=1)):
        np.testing.assert_array_equal(sample.played_actions, other.played_actions)


def test_an_expert_chunk_ends_with_its_episode(task: TaskSpec) -> None:
    with EnvPool(1) as pool:
        pool.call(0, Reset(EnvSpec("toy_reach", 0, KWARGS), 0, 0))
        result = pool.call(0, StepExpert(1000, takeover=3))
    assert isinstance(result, ChunkResult) and result.terminated and result.success_at_end
    count = result.steps_executed
    assert result.step_actions.shape == (count, task.action_dim) and len(result.events) == count < len(result.rewards)
    assert result.rewards.sum() == result.rewards[count - 1] == 1 and result.successes[count:].sum() == 0
