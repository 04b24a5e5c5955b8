"""Several questions to one server, questions of one's own, propositions and success told by a model."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlvla.rewards import EpisodeStart, RewardConfig, RewardPlan, SuccessConfig
from rlvla.rewards.base import parse_rewards
from rlvla.rewards.judged_machine import JudgedMachineReward
from rlvla.rewards.machine_source import MachineReward
from rlvla.rewards.machines import formula_graph
from rlvla.rewards.reward_machine import RewardMachine
from rlvla.rewards.success_source import EpisodeSuccess
from rlvla.rewards.vlm.propositions import EpisodePropositions, parse_sentences, sentence_of
from rlvla.rewards.vlm.questions import _QUESTIONS, PROPOSITION, OneOf, Question, Score, register_question
from rlvla.rewards.vlm.scorers import Scorer
from rlvla.rollout.episode import Episode, EpisodeRequest, Phase
from rlvla.utils.errors import ConfigError
from tests.support.judge_server import (
    JudgeServer,
    completion,
    images_of,
    judge_server,
    judging,
    prompt_of,
    question_of,
)
from tests.support.policies import ScriptedPolicy
from tests.support.reward_cases import make_chunk, make_observation, make_task, play

pytest.importorskip("pydantic", reason="the extra vlm is not installed")
TASK = make_task("Lift", ("reached", "grasped", "lifted"))
NAMES = ("grasped", "lifted")


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server() as running:
        running.answer = judging()
        yield running


def plan_of(server: JudgeServer, *rewards: str, success: SuccessConfig | None = None, **options: Any) -> RewardPlan:
    """A plan that has passed the check of the server; what the check asked is forgotten."""
    limits = {"vlm_url": f"{server.url}/v1", "vlm_model": "judge", "vlm_timeout": 120.0, "vlm_retries": 0}
    answer, server.answer = server.answer, judging()
    plan = RewardPlan.from_config(RewardConfig(reward=rewards, **{**limits, **options}), success)
    server.answer = answer
    server.requests.clear()
    return plan


def shade(request: dict) -> int:
    """What `make_observation` painted into the last image."""
    return int(images_of(request)[-1][0, 0, 0])


def frames(*values: int, **last: bool) -> list:
    chunks = [make_chunk([set()] * 5, value=value) for value in values]
    return [*chunks[:-1], make_chunk([set()] * 5, value=values[-1], **last)]


def reasons(error: pytest.ExceptionInfo[ConfigError]) -> set[tuple[str | None, str]]:
    return {(problem.flag, problem.reason) for problem in error.value.problems}


# ---------------------------------------------------------------- several questions
def test_each_question_is_a_component_of_its_own(server: JudgeServer) -> None:
    server.answer = judging(
        progress=lambda r: {"action_score": 0, "progress": shade(r) / 100},
        grasp=lambda r: {"grasp": float(shade(r) >= 50)},
    )
    plan = plan_of(server, "success", "vlm:progress:0.3", "vlm:grasp:0.1", vlm_curriculum=(1.0, 1.0))
    assert plan.names == ["success", "vlm_progress", "vlm_grasp"]
    sample, _ = play(plan, TASK, frames(25, 50))
    paid = {name: float(grid.sum()) for name, grid in sample.reward_components.items()}
    assert paid == pytest.approx({"success": 0, "vlm_progress": 0.3 * 1.6 * 0.5, "vlm_grasp": 0.1 * 1.6})
    assert sample.reward_info["vlm_grasp_progress"] == 1 and sample.reward_info["vlm_progress_failed"] == 0
    metrics = plan.metrics()
    assert metrics["reward/vlm_requests"] == len(server.requests) == 6, "both questions are counted together, once"
    assert sorted(map(question_of, server.requests)) == ["grasp"] * 3 + ["progress"] * 3
    plan.close()


def test_all_questions_share_one_limit(server: JudgeServer) -> None:
    under_way, most, lock, full = [0], [0], threading.Lock(), threading.Event()

    def slow(request: dict) -> tuple[int, Any]:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
            if under_way[0] == 2:
                full.set()
        full.wait(60)
        time.sleep(0.02)  # a third request would come now, if there were two limits
        with lock:
            under_way[0] -= 1
        return judging()(request)

    server.answer = slow
    plan = plan_of(server, "vlm:progress", "vlm:grasp", "vlm:affordance", vlm_concurrency=2, vlm_cache_size=0)
    play(plan, TASK, frames(1, 2, 3))
    assert most[0] == 2 and len(server.requests) == 12
    plan.close()


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        (["vlm:grsp:0.1"], "unknown_name"),
        (["vlm:grasp:much"], "out_of_range"),
        (["vlm:grasp:0.1", "vlm:grasp:0.2"], "duplicate"),
        (["vlm:0.3", "vlm:grasp:0.1"], "contradiction"),
        (["success:grasp:0.1"], "out_of_range"),
    ],
)
def test_mistakes_in_questions(specs: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_rewards(specs)
    assert reasons(error) == {("reward", reason)}


def test_one_server_that_does_not_answer_is_one_problem() -> None:
    """However many questions it would have been asked; settings that nothing reads are named beside it."""
    config = RewardConfig(reward=("vlm:progress", "vlm:grasp"), vlm_url="http://127.0.0.1:9", vlm_model="m")
    with pytest.raises(ConfigError) as error:
        RewardPlan.from_config(replace(config, vlm_scorer="grasp"))
    assert [p.flag for p in error.value.problems] == ["vlm_url", "vlm_scorer"] or len(error.value.problems) == 2
    assert ("vlm_scorer", "no_effect") in reasons(error)


def test_a_schedule_for_a_question(server: JudgeServer) -> None:
    plan = plan_of(server, "vlm:grasp:2", reward_schedule=("vlm_grasp:linear:1:0.5",))
    plan.start_iteration(1, 2)
    assert plan.weights() == {"vlm_grasp": 1.0}
    plan.close()


def test_contact_sees_two_frames_and_begins_without(server: JudgeServer) -> None:
    seen = []

    def contact(request: dict) -> dict:
        seen.append([int(image[0, 0, 0]) for image in images_of(request)])
        return {"contact": float(shade(request) >= 20)}

    server.answer = judging(contact=contact)
    plan = plan_of(server, "vlm:contact:1", vlm_curriculum=(1.0, 1.0))
    sample, _ = play(plan, TASK, frames(10, 20, 30))
    assert sorted(seen) == [[0, 10], [10, 20], [20, 30]], "the frame before, and the frame"
    assert sample.rewards.sum(1).tolist() == pytest.approx([0, 1.6, 0]), "touching pays once"
    plan.close()


def test_affordance_is_asked_of_a_skill(server: JudgeServer) -> None:
    plan = plan_of(server, "vlm:affordance")
    play(plan, replace(TASK, name="open_the-drawer"), frames(1))
    assert all("Skill: open the drawer" in prompt_of(r) and "Task: do it" in prompt_of(r) for r in server.requests)
    plan.close()


def test_a_question_of_your_own_costs_one_registration(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_QUESTIONS, "tidy", None)
    register_question(
        Question(
            "tidy",
            'Task: {task} How tidy is the table? Answer with JSON only: {{"tidy": <low, middle or high>}}',
            answer={"tidy": OneOf(("low", "middle", "high"))},
            score=lambda answer: Score(("low", "middle", "high").index(answer["tidy"]) / 2),
        )
    )
    server.answer = lambda r: (200, completion('{"tidy": "%s"}' % ("low" if shade(r) < 50 else "high")))
    config = RewardConfig(reward=("vlm:tidy:1",), vlm_url=f"{server.url}/v1", vlm_model="judge", vlm_timeout=120.0)
    plan = RewardPlan.from_config(replace(config, vlm_curriculum=(1.0, 1.0)))
    assert play(plan, TASK, frames(10, 90))[0].score == pytest.approx(1.6)
    plan.close()
    with pytest.raises(ValueError, match="braces"):
        register_question(Question("untidy", "{tsk}"))


# ---------------------------------------------------------------- propositions
def holds(request: dict) -> dict:
    """Grasped from shade 20 on, lifted from 40 on; read from the sentence that is asked about."""
    lifted = sentence_of("lifted") in prompt_of(request)
    assert lifted or sentence_of("grasped") in prompt_of(request)
    return {"answer": "yes" if shade(request) >= (40 if lifted else 20) else "no"}


@pytest.mark.parametrize("wait", [False, True])
def test_a_machine_that_a_model_drives_pays_as_one_that_the_simulator_drives(server: JudgeServer, wait: bool) -> None:
    """With one step per decision every frame is seen, so the two must agree step by step."""
    server.answer = judging(proposition=holds)
    values = [0, 20, 30, 10, 25, 45, 45]
    events = [{name for name, least in zip(NAMES, (20, 40)) if value >= least} for value in values]
    told = [make_chunk([set()], value=value) for value in values[:-1]] + [make_chunk([set()], value=45, truncated=True)]
    known = [make_chunk([e], value=v) for v, e in zip(values[:-1], events)]
    known.append(make_chunk([events[-1]], value=45, truncated=True))
    options = {"rm_formula": "F(grasped & F lifted)", "rm_grace": 1}
    plan = plan_of(server, "rm", rm_propositions="vlm", rm_propositions_wait=wait, **options)
    judged, episode = play(plan, TASK, told)
    expected, reference = play(RewardPlan.from_config(RewardConfig(reward=("rm",), **options)), TASK, known)
    assert judged.rewards.tolist() == expected.rewards.tolist() and judged.score > 0
    assert episode.source("rm").states == reference.source("rm").states
    assert judged.reward_info == {**expected.reward_info, "rm_unanswered": 0}
    plan.close()


def test_between_judged_frames_the_earlier_answers_hold(server: JudgeServer) -> None:
    server.answer = judging(proposition=holds)
    options = {"rm_formula": "F(grasped & F lifted)", "rm_propositions": "vlm", "rm_propositions_every": 2}
    plan = plan_of(server, "rm", **options)
    sample, episode = play(plan, TASK, frames(20, 20, 45, 45, 45, truncated=True))
    asked = sorted({shade(r) for r in server.requests})
    assert asked == [0, 20, 45] and len(server.requests) == 2 * 3, "frames 0, 2, 4 and the last, equal ones once"
    states = episode.source("rm").states
    assert states[9] == states[0] and states[10] != states[0], "grasped is known with the second decision"
    assert sample.rewards.flatten().nonzero().flatten().tolist() != []
    plan.close()


def test_the_last_frame_is_judged_whatever_ended_the_episode(server: JudgeServer) -> None:
    server.answer = judging(proposition=holds)
    plan = plan_of(server, "rm", rm_formula="F grasped", rm_propositions="vlm", rm_propositions_every=10)
    sample, _ = play(plan, TASK, frames(10, 30))  # neither terminated nor truncated by the environment
    assert sample.reward_info["rm_reached"] == 1
    plan.close()


@pytest.mark.parametrize("wait", [False, True])
def test_an_unanswered_question_keeps_the_last_value(server: JudgeServer, wait: bool) -> None:
    def sometimes(request: dict) -> tuple[int, Any]:
        return (500, {}) if shade(request) == 30 else judging(proposition=holds)(request)

    server.answer = sometimes
    plan = plan_of(server, "rm", rm_formula="F(grasped & F lifted)",
                   rm_propositions="vlm", rm_propositions_wait=wait)  # fmt: skip
    sample, episode = play(plan, TASK, frames(25, 30, 45, truncated=True))
    assert sample.reward_info["rm_unanswered"] == 2 and sample.reward_info["rm_reached"] == 1
    assert plan.metrics()["reward/vlm_failures"] == 2
    plan.close()


def test_a_machine_that_waits_can_end_an_episode(server: JudgeServer) -> None:
    wall = "The arm hits the wall."
    server.answer = judging(
        proposition=lambda r: {"answer": "yes" if shade(r) >= 20 and wall in prompt_of(r) else "no"}
    )
    options = {"rm_formula": "G(!collision) & F lifted", "rm_sentences": (f"collision={wall}",)}
    plan = plan_of(server, "rm", rm_propositions="vlm", rm_propositions_wait=True, **options)
    rewards = plan.begin(TASK, EpisodeStart(make_observation()))
    for value, failed, frames in ((10, False, 2), (20, True, 1)):
        chunk = make_chunk([set()] * 5, value=value)
        answers = [answer.result(60) for answer in rewards.look(chunk)]
        assert len(answers) == 2 * frames, "also a proposition of one's own; first with the frame after the reset"
        rewards.score_chunk(chunk)
        assert rewards.failed == failed
    plan.close()


class Held:
    """A server of questions whose answers are given by the test."""

    def __init__(self) -> None:
        self.questions: list[Future] = []

    def ask(self, scorer: Any, words: Any, images: Any) -> Future:
        self.questions.append(Future())
        return self.questions[-1]

    def answer(self) -> None:
        for question in self.questions:
            if not question.done():
                question.set_result(Score(1.0))


def waiting(formula: str, every: int) -> tuple[Held, JudgedMachineReward]:
    held, graph = Held(), formula_graph(formula)
    statements = {name: name for name in graph.propositions}
    judged = EpisodePropositions(held, Scorer(PROPOSITION), TASK, make_observation(), statements)
    return held, JudgedMachineReward(MachineReward(RewardMachine(graph), False), judged, every, wait=True)


@pytest.mark.parametrize("every", [1, 2])
def test_a_machine_that_waits_names_every_answer_that_it_needs(every: int) -> None:
    """Otherwise it would block all episodes when the first chunk is scored: that after the reset is needed, too."""
    held, machine = waiting("F grasped", every)
    answers = machine.look(make_chunk([set()]))
    assert list(answers) == held.questions and len(held.questions) == 3 - every
    held.answer()
    assert machine.look(make_chunk([set()])) == held.questions, "none has been read yet"


@pytest.mark.parametrize("wait", [False, True])
def test_a_verdict_that_ends_an_episode_lets_the_machine_look_at_the_last_frame(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    """It is not due; the episode waits for its answers as for any others, without holding up the rollout."""
    held = Held()
    options = {"rm_propositions": "vlm", "rm_propositions_wait": wait, "rm_propositions_every": 9}
    plan = plan_of(server, "rm", success=SuccessConfig("vlm"), rm_formula="F grasped", **options)
    monkeypatch.setattr(plan.sources["rm"]._propositions, "server", held)
    verdict: Future = Future()
    monkeypatch.setattr(plan.success.judge, "ask", lambda task, observation: verdict)
    policy = ScriptedPolicy(2, 2)
    episode = Episode(EpisodeRequest("robosuite", 0, 0, 0, "u"), TASK, plan, policy)
    episode.on_observation(make_observation())
    episode.on_decision(np.zeros((1, 2), np.float32), np.zeros(2, np.float32), {"tokens": np.zeros(2, np.int64)})
    episode.on_chunk(make_chunk([set()], value=9))
    assert episode.phase is Phase.JUDGING and len(held.questions) == 1
    held.answer()
    verdict.set_result(Score(1.0))
    assert not episode.answers
    episode.on_answers()
    assert len(held.questions) == 2, "the last frame is asked about because the episode is over"
    if wait:
        assert episode.phase is Phase.JUDGING and episode.answers == held.questions[1:]
        held.answer()
        episode.on_answers()
    assert episode.phase is Phase.COMPLETED and episode.to_sample().success_at_end
    held.answer()
    assert episode.final_sample(episode.to_sample(), {}).reward_info["rm_reached"] == 1
    plan.close()


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"rm_formula": "G(!grasped) & F lifted"}, True),
        ({"rm_formula": "F lifted"}, False),
        ({"rm_formula": "F lifted", "dynamic_truncation": True}, True),
    ],
)
def test_what_ends_episodes_needs_every_frame_judged(server: JudgeServer, options: dict, refused: bool) -> None:
    for every in (1, 4):
        plan = plan_of(server, "rm", success=SuccessConfig("vlm", success_every=every), **options)
        expected = [("success_every", "contradiction")] * (refused and every > 1)
        assert [(p.flag, p.reason) for p in plan.problems([TASK])] == expected
        plan.close()


def test_a_machine_that_follows_late_ends_no_episode(server: JudgeServer) -> None:
    success = SuccessConfig("vlm", success_every=4)
    for wait in (False, True):
        options = {"rm_propositions": "vlm", "rm_propositions_wait": wait}
        plan = plan_of(server, "rm", success=success, rm_formula="G(!grasped) & F lifted", **options)
        assert len(plan.problems([TASK])) == wait
        plan.close()


def test_sentences() -> None:
    assert sentence_of("on_akita_black_bowl_1_plate_1") == "The akita black bowl is on the plate."
    assert sentence_of("grasped_akita_black_bowl_1") == "The gripper holds the akita black bowl."
    assert sentence_of("touched_wooden_cabinet_1") == "The gripper touches the wooden cabinet."
    assert sentence_of("in_bowl_1_wooden_cabinet_1_top_region") == "The bowl is in the wooden cabinet top region."
    assert sentence_of("open_wooden_cabinet_1_middle_region") == "The wooden cabinet middle region is open."
    assert sentence_of("some_thing") == "This is the case: some thing."
    assert parse_sentences(["a= b=c "]) == {"a": "b=c"}
    with pytest.raises(ConfigError) as error:
        parse_sentences(["a", "=b", "a=x", "a=y"])
    assert reasons(error) == {("rm_sentences", "out_of_range"), ("rm_sentences", "duplicate")}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rm_sentences": ("a=b",)}, ("rm_sentences", "no_effect")),
        ({"rm_propositions_every": 2}, ("rm_propositions_every", "no_effect")),
        ({"rm_propositions": "vlm"}, ("vlm_url", "needs_flag")),
        ({"rm_propositions": "vlm", "rm_state_input": "prompt"}, ("rm_state_input", "contradiction")),
        ({"rm_propositions": "vlm", "rm_sentences": ("a",)}, ("rm_sentences", "out_of_range")),
    ],
)
def test_mistakes_in_propositions(options: dict, expected: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as error:
        RewardPlan.from_config(RewardConfig(reward=("rm",), rm_formula="F near", **options))
    assert expected in reasons(error)


# ---------------------------------------------------------------- success
class Told:
    """A judge that says what the frame's shade is, or nothing for shade 99."""

    def ask(self, task: Any, observation: Any) -> Any:
        from concurrent.futures import Future

        answer: Future[int] = Future()
        answer.set_result(int(observation.images[0, 0, 0, 0]))
        return answer

    def probability(self, answer: int) -> float | None:
        return None if answer == 99 else answer / 100


def verdicts(config: SuccessConfig, chunks: list) -> tuple[list, EpisodeSuccess, int]:
    episode, asked, decided = EpisodeSuccess(config, Told(), TASK), 0, []
    for chunk in chunks:
        asked += len(episode.look(chunk))
        decided.append(episode.decide(chunk))
    return decided, episode, asked


def test_a_verdict_holds_from_its_frame_to_the_next() -> None:
    own = [make_chunk([set()] * 3, successes=[False, True, True], value=v) for v in (10, 60, 99, 40)]
    decided, episode, asked = verdicts(SuccessConfig("vlm", success_frames=3), own)
    assert [list(r.successes) for r in decided] == [
        [False] * 3,
        [False, False, True],
        [True, True, True],  # not answered: the last verdict holds
        [True, True, False],
    ]
    assert not any(r.terminated or r.truncated or r.success_at_end for r in decided)
    assert asked == 4 and episode.unanswered == 1 and episode.simulator.once and episode.simulator.at_end


def test_enough_frames_in_a_row_end_an_episode_and_a_last_frame_is_always_judged() -> None:
    config = SuccessConfig("vlm", success_frames=2, success_every=2, success_threshold=0.6)
    values = (90, 60, 90, 59, 90, 70, 0, 80)
    decided, _, asked = verdicts(config, [make_chunk([set()], value=v) for v in values])
    assert asked == 4 and [r.terminated for r in decided] == [False] * 7 + [True], "60, 59, 70, 80 were judged"
    late, _, asked = verdicts(config, [make_chunk([set()], value=90), make_chunk([set()], value=90, truncated=True)])
    assert asked == 1 and late[-1].truncated and not late[-1].success_at_end, "one frame is not enough"
    last, *_ = verdicts(SuccessConfig("vlm", success_every=5), [make_chunk([set()], value=90, truncated=True)])
    assert last[0].terminated and not last[0].truncated and last[0].success_at_end


def test_a_failure_of_the_simulator_remains_one_unless_success_has_held() -> None:
    failure = replace(make_chunk([set()], terminated=True, value=90), success_at_end=False)
    for frames in (1, 2):
        (decided,), *_ = verdicts(SuccessConfig("vlm", success_frames=frames), [failure])
        held = frames == 1
        assert decided.terminated and not decided.truncated
        assert decided.success_at_end == held and decided.successes.tolist() == [held]
    (decided,), *_ = verdicts(SuccessConfig("vlm"), [make_chunk([set()], terminated=True, value=0)])
    assert decided.truncated and not decided.terminated, "the simulator's success, which the detector denies"


def test_success_is_asked_beside_the_rewards_and_counted_with_them(server: JudgeServer) -> None:
    server.answer = judging(success=lambda r: {"success": shade(r) / 100})
    plan = plan_of(server, "success", "vlm:grasp", success=SuccessConfig("vlm"))
    assert plan.success_source == "vlm"
    judge = plan.success.judge
    assert judge.probability(judge.ask(TASK, make_observation(70)).result(60)) == 0.7
    play(plan, TASK, frames(5))
    assert plan.metrics()["reward/vlm_requests"] == len(server.requests) == 3
    plan.close()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SuccessConfig("vlm"), ("vlm_url", "needs_flag")),
        (SuccessConfig(success_threshold=0.7), ("success_threshold", "no_effect")),
    ],
)
def test_mistakes_in_what_tells_success(config: SuccessConfig, expected: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as error:
        RewardPlan.from_config(RewardConfig(), config)
    assert expected in reasons(error)


# ---------------------------------------------------------------- warm-up
def test_first_answers_may_take_longer(server: JudgeServer) -> None:
    """A server that compiles at its first request: without a warm-up it counts as one that does not answer."""
    ready, seconds = threading.Event(), [0.8]  # longer than --vlm_timeout

    def compiling(request: dict) -> tuple[int, Any]:
        ready.wait(seconds[0])
        ready.set()
        return judging()(request)

    server.answer = compiling
    config = RewardConfig(reward=("vlm:grasp",), vlm_url=f"{server.url}/v1", vlm_model="judge", vlm_retries=0)
    config = replace(config, vlm_warmup=60.0, vlm_timeout=0.4, vlm_concurrency=3)
    plan = RewardPlan.from_config(config)
    server.requests.clear()
    ready.clear()
    plan.start()
    assert len(server.requests) == 3, "as many as may be under way at a time"
    assert plan.metrics()["reward/vlm_requests"] == 0
    plan.close()
    ready.clear()
    seconds[0] = 60.0
    with pytest.raises(ConfigError) as error:
        RewardPlan.from_config(replace(config, vlm_warmup=0.0))
    ready.set()
    assert {flag for flag, _ in reasons(error)} == {"vlm_url"}
