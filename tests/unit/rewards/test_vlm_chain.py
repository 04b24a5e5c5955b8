"""From judgements to rewards: worked numbers, failures, telescoping."""

from __future__ import annotations

import random

import pytest

from rlvla.rewards.vlm.chain import ChainSettings, FrameJudgment, chain_rewards, progress_term, spread


def test_worked_numbers_of_the_window() -> None:
    """raw .2 over 5 steps: .04 each, .08 scaled."""
    settings = ChainSettings(progress_weight=0.8, scale=2.0)
    rewards = chain_rewards(FrameJudgment(0, 0.25), [FrameJudgment(5, 0.5)], settings, False)
    assert rewards == pytest.approx([0.08] * 5)


def test_what_the_action_score_would_pay() -> None:
    """a = .5 at weight .2: .1 a window, 6.0 over 150 steps of five, against a terminal reward of 1."""
    settings = ChainSettings(action_weight=0.2, progress_weight=0.8, scale=2.0)
    windows = [FrameJudgment(5, 0.0, action_score=0.5)] * 30
    assert sum(chain_rewards(FrameJudgment(0, 0.0), windows, settings, False)) == pytest.approx(6.0)
    assert sum(chain_rewards(FrameJudgment(0, 0.0), windows, ChainSettings(), False)) == 0


def test_standing_still_costs_with_a_potential() -> None:
    settings = ChainSettings(term="potential", gamma=0.99, progress_weight=1.0, scale=1.0)
    for n in (1, 5):
        rewards = chain_rewards(FrameJudgment(0, 0.3), [FrameJudgment(n, 0.3)], settings, False)
        assert rewards == pytest.approx([-0.003] * n)
    assert progress_term(settings, 1, 0.3, 0.3, 1, 1) == pytest.approx(-0.003)


def test_terms() -> None:
    def term(name: str, before: float, after: float) -> float:
        return progress_term(ChainSettings(term=name, gamma=0.9), 2, before, after, 1.0, 0.5)

    assert term("delta", 0.6, 0.2) == pytest.approx(-0.2)
    assert term("clipped_delta", 0.6, 0.2) == 0 and term("clipped_delta", 0.2, 0.6) == pytest.approx(0.2)
    assert term("potential", 0.6, 0.2) == pytest.approx(0.81 * 0.5 * 0.2 - 0.6)
    assert term("change", 0.6, -1) == -0.5
    outside = ChainSettings(term="potential", gamma=0.9, weight_inside=False)
    assert progress_term(outside, 2, 0.6, 0.2, 1.0, 0.5) == pytest.approx(0.5 * (0.81 * 0.2 - 0.6))


def test_back_and_forth_pays_only_when_clipped() -> None:
    windows = [FrameJudgment(5, 0.8), FrameJudgment(5, 0.2)] * 10
    assert sum(chain_rewards(FrameJudgment(0, 0.2), windows, ChainSettings(), False)) == pytest.approx(0)
    assert sum(chain_rewards(FrameJudgment(0, 0.2), windows, ChainSettings(term="clipped_delta"), False)) > 5


@pytest.mark.parametrize("gamma", [0.9, 0.99, 1.0])
@pytest.mark.parametrize("ends", [True, False])
def test_the_potential_telescopes_with_a_changing_weight(gamma: float, ends: bool) -> None:
    rng = random.Random(3)
    settings = ChainSettings(term="potential", gamma=gamma, progress_weight=0.8, scale=2.0)
    for _ in range(50):
        judged = [
            FrameJudgment(rng.randrange(1, 7), rng.random(), 0.0, rng.random()) for _ in range(rng.randrange(2, 9))
        ]
        rewards = chain_rewards(judged[0], judged[1:], settings, ends)
        steps = sum(j.steps for j in judged[1:])
        assert len(rewards) == steps
        end = 0.0 if ends else gamma**steps * judged[-1].weight * judged[-1].progress
        discounted = sum(gamma**t * r for t, r in enumerate(rewards))
        assert discounted == pytest.approx(1.6 * (end - judged[0].weight * judged[0].progress))


def test_failures_hold_the_last_progress() -> None:
    judged = [FrameJudgment(5, 0.5), FrameJudgment(5, None), FrameJudgment(3, 0.75)]
    rewards = chain_rewards(FrameJudgment(0, 0.25), judged, ChainSettings(), False)
    assert rewards == pytest.approx([0.08] * 5 + [0] * 5 + [2 * 0.8 * 0.25 / 3] * 3)
    rewards = chain_rewards(
        FrameJudgment(0, None), [FrameJudgment(5, 0.5), FrameJudgment(5, 0.75)], ChainSettings(), False
    )
    assert rewards == pytest.approx([0] * 5 + [0.08] * 5), "without a first frame there is nothing to compare with"


@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_the_end_of_an_episode_is_known_without_an_answer(gamma: float) -> None:
    """The potential is paid back although the request for the last frame failed."""
    settings = ChainSettings(term="potential", gamma=gamma, progress_weight=1.0, scale=1.0, action_weight=0.5)
    later = [FrameJudgment(5, 0.5), FrameJudgment(5, None), FrameJudgment(3, None)]
    rewards = chain_rewards(FrameJudgment(0, 0.25), later, settings, True)
    assert rewards[5:10] == [0.0] * 5 and len(rewards) == 13
    after = sum(gamma**t * r for t, r in enumerate(rewards[10:]))
    assert after == pytest.approx(-0.5), "from the last frame that was judged"
    assert chain_rewards(FrameJudgment(0, 0.25), later, settings, False)[5:] == [0.0] * 8, "it may go on"
    assert chain_rewards(FrameJudgment(0, None), later[1:], settings, True) == [0.0] * 8, "nothing was ever judged"
    delta = ChainSettings(term="delta", action_weight=0.5)
    assert chain_rewards(FrameJudgment(0, 0.25), later, delta, True)[5:] == [0.0] * 8


def test_spread_is_worth_its_value() -> None:
    for gamma in (0.5, 1.0):
        assert sum(gamma**k * spread(0.7, 4, gamma) for k in range(4)) == pytest.approx(0.7)
