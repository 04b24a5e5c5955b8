"""One episode: statistics, stored data, preparation of observations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlvla.envs import list_tasks
from rlvla.envs.base import ChunkResult, Observation
from rlvla.models.policy import PolicySpec
from rlvla.rewards import RewardPlan
from rlvla.rollout.episode import Episode, EpisodeRequest, Phase
from tests.support.policies import ScriptedPolicy

REFERENCE = Path(__file__).resolve().parents[2] / "data" / "simplevla" / "reward_placement.npz"
POLICY = ScriptedPolicy(2, 2)
OBSERVATION = Observation(np.zeros((1, 8, 8, 3), np.uint8), None, "reach")


def begin(
    plan: RewardPlan,
    policy: ScriptedPolicy = POLICY,
    first: Observation = OBSERVATION,
    *,
    video: bool = False,
    seed: int = 0,
    told: tuple[str, ...] = (),
    blind: bool = False,
    **options,
) -> Episode:
    """An episode that has been reset."""
    request = EpisodeRequest("toy_reach", 0, 0, seed, "u", video, other_instructions=told, blind=blind)
    episode = Episode(request, list_tasks("toy_reach")[0], plan, policy, **options)
    episode.on_observation(first)
    return episode


@pytest.mark.parametrize(
    ("told", "heard"), [((), "reach"), (("reach", "push", "pull"), "push"), (("",), ""), (("reach",), "reach")]
)
def test_the_policy_gets_another_instruction(told: tuple[str, ...], heard: str) -> None:
    """In each decision; the sample keeps the instruction of the task, by which others judge it."""
    episode = begin(RewardPlan({"success": 1.0}), told=told)
    assert episode.observation.instruction == heard
    decide(episode, 1)
    episode.on_chunk(ChunkResult(OBSERVATION, 1, np.zeros(1, np.float32), np.array([False]), False, True, False))
    assert episode.observation.instruction == heard and episode.to_sample().instruction == "reach"


def test_a_blind_policy_sees_gray_and_judges_see_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each decision, whatever the policy makes of its images."""
    plan = RewardPlan({"success": 1.0})
    monkeypatch.setattr(type(plan), "looks_at_images", True)
    first, second = shown(1, False), shown(2, False)
    episode = begin(plan, first=first, blind=True)
    for observation, last in ((second, False), (second, True)):
        assert np.unique(episode.observation.images).tolist() == [128]
        decide(episode, 1)
        done = np.array([False])
        episode.on_chunk(ChunkResult(observation, 1, np.zeros(1, np.float32), done, False, last, False))
    sample = episode.to_sample()
    assert np.unique(sample.images).tolist() == [128] and np.unique(sample.last_images).tolist() == [128]
    assert sample.observed_images is not None
    assert [int(images.max()) for images in sample.observed_images] == [10, 20, 20]


@pytest.mark.parametrize("read", [0, 2])
def test_privileged_state_reaches_the_sample_alone(monkeypatch: pytest.MonkeyPatch, read: int) -> None:
    """Of four numbers of proprio the policy reads the first two or none; rewards and dumps get the same."""
    begun, plan = [], RewardPlan({"success": 1.0})
    begin_rewards = plan.begin
    monkeypatch.setattr(
        plan, "begin", lambda task, start: begun.append(start.observation) or begin_rewards(task, start)
    )
    observed = [replace(OBSERVATION, proprio=np.arange(4, dtype=np.float32) + 10 * k) for k in range(3)]
    episode = begin(plan, first=observed[0], policy_proprio=read)
    for observation, last in ((observed[1], False), (observed[2], True)):
        decide(episode, 3)
        done = np.zeros(3, bool)
        episode.on_chunk(ChunkResult(observation, 3, np.zeros(3, np.float32), done, False, last, False))
    sample = episode.to_sample()
    shown = [begun[0].proprio, episode.observation.proprio]
    assert [None if p is None else p.tolist() for p in shown] == ([[0, 1], [20, 21]] if read else [None, None])
    assert (None if sample.env_proprio is None else sample.env_proprio.tolist()) == (
        [[0, 1], [10, 11], [20, 21]] if read else None
    )
    elapsed = [0.0, 0.25, 0.5]  # of 12 steps
    assert sample.critic_state.tolist() == [[e, *o.proprio] for e, o in zip(elapsed, observed)]


def decide(episode: Episode, actions: int) -> None:
    """Any chunk of so many actions of two dimensions."""
    tokens = 2 * actions
    trace = {"tokens": np.zeros(tokens, np.int64)}
    episode.on_decision(np.zeros((actions, 2), np.float32), np.zeros(tokens, np.float32), trace)


def play(*chunks: str, weight: float = 1.0, terminates: bool = False) -> Episode:
    """Chunks as strings: `1` success, `0` none, `-` not executed. The last one terminates or truncates the episode."""
    episode = begin(RewardPlan({"success": weight}))
    for index, chunk in enumerate(chunks):
        steps, last = len(chunk.rstrip("-")), index == len(chunks) - 1
        held = np.array([c == "1" for c in chunk])
        decide(episode, len(chunk))
        rewards = np.zeros(len(chunk), np.float32)
        episode.on_chunk(
            ChunkResult(OBSERVATION, steps, rewards, held, terminates and last, last and not terminates, False)
        )
    return episode


@pytest.mark.parametrize(
    ("chunks", "regressions", "once"),
    [
        (("000", "000"), 0, False),
        (("011", "111"), 0, True),
        (("001", "000"), 1, True),
        (("101", "010"), 3, True),
        (("111", "1--"), 0, True),  # an end inside a chunk loses nothing
    ],
)
def test_success_lost_again(chunks: tuple[str, ...], regressions: int, once: bool) -> None:
    sample = play(*chunks).to_sample()
    assert (sample.regressions, sample.success_once) == (regressions, once)


def test_primitives_that_end_early() -> None:
    """Decisions of two, four and one steps, in the middle of an episode that ends with success."""
    sample = play("00--", "0000", "1---", weight=2.0, terminates=True).to_sample()
    assert sample.executed.tolist() == [[True] * n + [False] * (4 - n) for n in (2, 4, 1)]
    assert sample.finish_step == 7 and sample.last_action == 8 and sample.terminated
    assert sample.rewards.tolist() == [[0.0] * 4, [0.0] * 4, [2.0, 0.0, 0.0, 0.0]]


def test_success_is_paid_and_steps_are_counted_as_in_simplevla_rl() -> None:
    """Chunks of 8 actions; the reference pays 5 at the last token of the step at which an episode succeeds."""
    with np.load(REFERENCE) as file:
        finish, success, paid = file["finish_step"], file["acc"].astype(bool), file["all"].reshape(32, 64, 7)
    assert 10 < success.sum() < 32
    for steps, won, reference in zip(finish.tolist(), success.tolist(), paid):
        held = ("0" * (steps - 1) + "01"[won]).ljust(-(-steps // 8) * 8, "-")
        chunks = [held[start : start + 8] for start in range(0, len(held), 8)]
        sample = play(*chunks, weight=5.0, terminates=won).to_sample()
        rewards = sample.rewards.flatten().numpy()
        assert np.array_equal(rewards, reference[: len(rewards), -1]) and rewards.sum() == reference.sum()
        executed = sample.action_mask.view(-1, 2)
        assert sample.finish_step == steps and executed[:steps].all() and not executed[steps:].any()


class Ending:
    """A source that fails in a given step, and records the reported end."""

    def __init__(self, fails_at: int | None):
        self.fails_at, self.steps, self.told = fails_at, 0, []

    def create(self, task, episode):
        return self

    @property
    def failed(self) -> bool:
        return self.fails_at is not None and self.steps >= self.fails_at

    def step(self, observation, events, info):
        self.steps += 1
        return 0.0

    def end(self, *, terminated: bool, truncated: bool) -> None:
        self.told.append((terminated, truncated))

    def finish(self):
        return {}

    def release(self) -> None:
        pass


@pytest.mark.parametrize(
    ("fails_at", "limit", "ended"),
    [
        (None, 4, (False, True)),
        (4, None, (True, False)),
        (4, 4, (True, False)),  # what has failed is not truncated: it must not count as if it went on
        (3, 4, (True, False)),
    ],
)
def test_who_ends_an_episode(fails_at: int | None, limit: int | None, ended: tuple[bool, bool]) -> None:
    source = Ending(fails_at)
    plan = RewardPlan({"ending": 1.0}, sources={"ending": source})
    episode = begin(plan)
    for executed in (2, 4):
        assert not source.told and episode.phase is Phase.READY
        decide(episode, 2)
        nothing = np.zeros(2, bool)
        episode.on_chunk(ChunkResult(OBSERVATION, 2, np.zeros(2), nothing, False, executed == limit, False))
    sample = episode.to_sample()
    assert (sample.terminated, sample.truncated) == ended
    assert source.told == [ended], "once, and before the rewards are settled"


def test_an_episode_that_the_environment_ends_with_failure() -> None:
    source = Ending(None)
    episode = begin(RewardPlan({"ending": 1.0, "success": 1.0}, sources={"ending": source}))
    decide(episode, 2)
    episode.on_chunk(ChunkResult(OBSERVATION, 2, np.zeros(2), np.zeros(2, bool), True, False, False))
    sample = episode.to_sample()
    assert sample.terminated and not sample.truncated and not sample.success_at_end
    assert source.told == [(True, False)] and float(sample.rewards.sum()) == 0


class Darkening(ScriptedPolicy):
    """Reads images of another size and darker, and proprio of twice the size; remembers what it is given."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: list[np.ndarray] = []

    def prepare(self, images, proprio):
        super().prepare(images, proprio)
        self.seen.append(images)
        return images[..., ::2, ::2, :] // 2, None if proprio is None else 2 * proprio


def shown(number: int, proprio: bool = True) -> Observation:
    """The observation of this number."""
    state = np.full(3, number, np.float32) if proprio else None
    return Observation(np.full((1, 8, 8, 3), 10 * number, np.uint8), state, "reach")


def play_two_chunks(policy: ScriptedPolicy, *, proprio: bool = True, **options) -> Episode:
    episode = begin(RewardPlan({"success": 1.0}), policy, shown(1, proprio), **options)
    for number in (2, 3):
        decide(episode, 2)
        nothing = np.zeros(2, bool)
        frames = np.zeros((2, 8, 8, 3), np.uint8) if options.get("video") else None
        result = ChunkResult(shown(number, proprio), 2, np.zeros(2), nothing, False, number == 3, False, frames=frames)
        episode.on_chunk(result)
    return episode


@pytest.mark.parametrize("proprio", [True, False])
def test_every_observation_is_prepared_once_and_stored_as_prepared(proprio: bool) -> None:
    policy = Darkening()
    episode = play_two_chunks(policy, proprio=proprio)
    samples = [episode.to_sample() for _ in range(2)]
    assert policy.prepared == 3 and [int(images.max()) for images in policy.seen] == [10, 20, 30]
    assert episode.observation.images.max() == 15, "what the policy is given to decide on is prepared as well"
    for sample in samples:
        assert sample.images.shape == (2, 1, 4, 4, 3) and sample.images.amax((1, 2, 3, 4)).tolist() == [5, 10]
        assert sample.last_images.shape == (1, 4, 4, 3) and sample.last_images.max() == 15
        if not proprio:
            assert sample.proprio is sample.last_proprio is sample.observed_proprio is sample.env_proprio is None
        else:
            assert sample.proprio.tolist() == [[2.0] * 3, [4.0] * 3] and sample.last_proprio.tolist() == [6.0] * 3
            assert sample.env_proprio.tolist() == [[1.0] * 3, [2.0] * 3, [3.0] * 3], "as the environment gave it"


@pytest.mark.parametrize("options", [{"keep_observed": True}, {"video": True}, {}], ids=str)
def test_images_of_the_environment_are_kept_only_where_asked_for(options: dict) -> None:
    sample = play_two_chunks(Darkening(), **options).to_sample()
    if not options:
        assert sample.observed_images is None
        with pytest.raises(ValueError, match="keep_observed"):
            _ = sample.env_images  # those that the policy saw would pass for the environment's
        return
    assert sample.env_images.shape == (3, 1, 8, 8, 3)
    assert sample.env_images.amax((1, 2, 3, 4)).tolist() == [10, 20, 30]


def test_images_that_the_policy_sees_as_they_are_lie_in_a_sample_once() -> None:
    sample = play_two_chunks(ScriptedPolicy(2, 2), keep_observed=True).to_sample()
    assert sample.observed_images is None
    assert sample.env_images.amax((1, 2, 3, 4)).tolist() == [10, 20, 30]


def test_the_trace_of_each_decision_is_stacked_by_name() -> None:
    episode = begin(RewardPlan({"success": 1.0}))
    for number in (1, 2):
        trace = {"latent": np.full((2, 3), number, np.float32), "steps": np.array(number)}
        episode.on_decision(np.full((2, 2), number, np.float32), np.full(2, -number, np.float32), trace)
        episode.on_chunk(
            ChunkResult(OBSERVATION, 3 - number, np.zeros(2), np.zeros(2, bool), False, number == 2, False)
        )
    sample = episode.to_sample()
    assert sample.trace["latent"].shape == (2, 2, 3) and sample.trace["steps"].tolist() == [1, 2]
    assert sample.actions[:, 0, 0].tolist() == [1.0, 2.0] and sample.log_probs[:, 0].tolist() == [-1.0, -2.0]
    assert sample.executed.tolist() == [[True, True], [True, False]]
    assert sample.action_mask.tolist() == sample.executed.tolist(), "one log-prob per action here"


def test_noise_comes_from_the_seed_of_the_episode_and_has_the_shape_of_the_spec() -> None:
    class Normal(ScriptedPolicy):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.spec = PolicySpec(2, 2, columns=4, noise_shape=(5, 200), noise="normal")

    uniform, normal = (begin(RewardPlan({"success": 1.0}), policy) for policy in (POLICY, Normal()))
    first, second = uniform.noise(), uniform.noise()
    assert first.shape == (4,) and not np.array_equal(first, second) and (first >= 0).all() and (first < 1).all()
    assert np.array_equal(begin(RewardPlan({"success": 1.0})).noise(), first)
    assert not np.array_equal(begin(RewardPlan({"success": 1.0}), seed=1).noise(), first), "of this seed alone"
    drawn = normal.noise()
    assert drawn.shape == (5, 200) and abs(drawn.mean()) < 0.15 and 0.85 < drawn.std() < 1.15 and drawn.min() < -1
