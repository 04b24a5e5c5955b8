"""Encoding, decoding and contract checks of answers, without a process."""

import socket
import struct
from dataclasses import replace

import numpy as np
import pytest

from rlvla.envs.workers.answer_checks import AnswerChecker, BadAnswerError
from rlvla.envs.workers.codec import (
    DecodeError,
    decode_message,
    encode_answer,
    encode_hello,
    join_answers,
    readable,
)
from rlvla.envs.workers.processes import Inbox
from rlvla.envs.workers.ray_backend import ArrayWriter, Envelope, read_reply, write_reply
from rlvla.envs.workers.worker import describe_failure, hello
from rlvla.utils.errors import ConfigError, Problem
from tests.support import faulty_suite

OPTIONS = {"use_proprio": True, "image_size": faulty_suite.SIZE}
ACTIONS = np.zeros((faulty_suite.CHUNK, 1), np.float32)


def result_of(seed, chunks=1):
    env = faulty_suite.make(0)
    env.reset(0, seed)
    return [env.step_chunk(ACTIONS) for _ in range(chunks)][-1]


def received(answer):
    """The answer as it arrives."""
    arrays = ArrayWriter("raw")
    message = join_answers([(0, encode_answer(answer, arrays.store))])
    _, [(_, answer)] = read_reply(write_reply(Envelope(1, "here", 1), message, arrays.chunks))
    return answer


@pytest.mark.parametrize("seed", [1017, 1001, 1007], ids=["success", "truncated", "goes on"])
@pytest.mark.parametrize("fault", faulty_suite.CONTRACT)
def test_results_that_break_the_contract(fault, seed):
    good = result_of(seed)
    checker = AnswerChecker(faulty_suite.task(), OPTIONS)
    checker.chunk(received(good), len(ACTIONS))
    bad = faulty_suite.CONTRACT[fault](good)
    # From encoding in the worker; or from decoding and checking.
    expected = (TypeError, ValueError) if fault in faulty_suite.KINDS else (DecodeError, BadAnswerError)
    with pytest.raises(expected) as error:
        checker.chunk(received(bad), len(ACTIONS))
    assert len(str(error.value)) < 500 and str(error.value).isprintable()


def test_an_episode_beyond_its_step_limit():
    checker, result = AnswerChecker(faulty_suite.task(), OPTIONS), result_of(1007)
    checker.chunk(result, 2, steps_before=6)
    with pytest.raises(BadAnswerError, match="9 steps were executed, more than the limit of 8"):
        checker.chunk(result, 2, steps_before=7)


def test_an_episode_may_terminate_with_failure():
    failure = replace(result_of(1001), terminated=True, truncated=False)
    assert not failure.success_at_end
    AnswerChecker(faulty_suite.task(), OPTIONS).chunk(received(failure), len(ACTIONS))


def test_rewards_are_free_where_no_range_is_declared():
    task = replace(faulty_suite.task(), reward_range=None)
    AnswerChecker(task, OPTIONS).chunk(faulty_suite.CONTRACT["absurd_reward"](result_of(1007)), 2)


def test_events_are_names_where_the_task_declares_none():
    checker = AnswerChecker(replace(faulty_suite.task(), propositions=()), OPTIONS)
    checker.chunk(faulty_suite.CONTRACT["events_unknown"](result_of(1007)), 2)
    with pytest.raises(BadAnswerError, match="names"):
        checker.chunk(faulty_suite.CONTRACT["events_numbers"](result_of(1007)), 2)
    with pytest.raises(BadAnswerError, match="frozenset"):
        checker.chunk(faulty_suite.CONTRACT["events_words"](result_of(1007)), 2)


def no_arrays(reference):
    raise AssertionError


def test_a_message_in_pieces():
    ours, theirs = socket.socketpair()
    ours.settimeout(1.0)
    with ours, theirs:
        inbox, data = Inbox(ours), struct.pack("!i", 3) + b"abc" + struct.pack("!i", 0)
        for byte in data[:6]:
            theirs.send(bytes([byte]))
            inbox.fill()
            assert not inbox.is_ready and inbox.take() is None
        theirs.send(data[6:])
        inbox.fill()
        assert [inbox.take(), inbox.take(), inbox.take()] == [b"abc", b"", None]
        theirs.close()
        inbox.fill()
        assert inbox.is_ready and inbox.at_end


def test_every_answer_comes_back_as_it_was():
    failure = describe_failure("make", ConfigError([Problem(None, "r", "a"), Problem("f", "", "b")]))
    assert received(replace(failure, closed=[2])) == replace(failure, closed=[2])
    assert received(faulty_suite.task()) == faulty_suite.task()
    assert decode_message(encode_hello(hello()), no_arrays) == hello()
    result = replace(result_of(1001), steps_executed=np.int64(2), terminated=np.bool_(False))
    again = received(result)
    assert type(again.steps_executed) is int and again.terminated is False and again.events == result.events


def test_an_exception_of_megabytes_is_cut():
    try:
        raise ValueError("x" * 30_000_000 + "the end")
    except ValueError as error:
        answer = encode_answer(describe_failure("reset", error), no_arrays)
    assert len(answer) < 50_000
    failure = decode_message(join_answers([(0, answer)]), no_arrays)[0][1]
    assert failure.message.endswith("the end") and "characters left out" in failure.message
    assert "test_answers.py" in failure.traceback and failure.traceback.rstrip().endswith("the end")


def test_text_that_cannot_be_printed():
    text = readable("a\ud800b\x1b[2Jc\0d\ne\tf\u00e4\u4e2d", 100)
    assert text == "a\ufffdb\ufffd[2Jc\ufffdd\ne\tf\u00e4\u4e2d"
    assert text.encode()


@pytest.mark.parametrize("message", [b"", b"\x80\x04\xff", b'[[0,{"$type":"Obser', b"7", b'{"hello":[]}'])
def test_messages_that_cannot_be_decoded(message):
    with pytest.raises(DecodeError):
        decode_message(message, no_arrays)


def test_a_task_with_lists_equals_its_copy_from_a_worker():
    task = replace(faulty_suite.task(), propositions=["a", "b"], gripper_dims=[6], goals=[["a"], ["b"]])
    assert task.goals == (("a",), ("b",)) and hash(task) is not None
    copy = decode_message(join_answers([(0, encode_answer(task, no_arrays))]), no_arrays)[0][1]
    assert copy == task
    AnswerChecker(task, OPTIONS).made(copy)


def test_the_limits_of_rewards_are_rounded_like_the_rewards():
    task = replace(faulty_suite.task(), reward_range=(np.float64(-0.7), np.float64(0.1)))
    checker, result = AnswerChecker(task, OPTIONS), result_of(1007)
    for reward in (0.1, -0.7):
        checker.chunk(replace(result, rewards=np.full_like(result.rewards, reward)), 2)
    with pytest.raises(BadAnswerError, match="range"):
        checker.chunk(replace(result, rewards=np.full_like(result.rewards, 0.1001)), 2)


def test_only_a_primitive_may_end_while_the_episode_goes_on():
    length = 4
    result = replace(result_of(1007), rewards=np.zeros(length, np.float32), successes=np.zeros(length, bool), events=[])
    result = replace(result, steps_executed=2, terminated=False, truncated=False, success_at_end=False)
    with pytest.raises(BadAnswerError, match="episode continues"):
        AnswerChecker(faulty_suite.task(), OPTIONS).chunk(result, length)
    task = replace(faulty_suite.task(), primitives=(("go", 1),), macro_steps=length)
    AnswerChecker(task, OPTIONS).chunk(result, length)
    with pytest.raises(ValueError, match="4 actions.*got 5"):
        AnswerChecker(task, OPTIONS).chunk(result, length + 1)


COMPONENTS = {"near": np.array([-0.5, 0.0], np.float32), "far": np.array([0.25, 1.5], np.float32)}


def test_components_come_back_as_they_were():
    task = replace(faulty_suite.task(), reward_components=("near", "far"))
    again = received(replace(result_of(1007), components=dict(COMPONENTS)))
    AnswerChecker(task, OPTIONS).chunk(again, 2)
    assert again.components.keys() == COMPONENTS.keys()
    for name, values in COMPONENTS.items():
        np.testing.assert_array_equal(again.components[name], values)
        assert again.components[name].dtype == np.float32


@pytest.mark.parametrize(
    ("components", "executed", "message"),
    [
        ({}, 2, "must be"),
        ({"near": COMPONENTS["near"]}, 2, "must be"),
        ({**COMPONENTS, "other": COMPONENTS["near"]}, 2, "other"),
        ({**COMPONENTS, "far": np.array([0.25, np.nan], np.float32)}, 2, "NaN"),
        ({**COMPONENTS, "far": np.array([0.25, 1.5])}, 2, "float32"),
        ({**COMPONENTS, "far": np.zeros(3, np.float32)}, 2, "float32"),
        ({**COMPONENTS, "far": 1.0}, 2, "float32"),
        (COMPONENTS, 1, "far after the last of 1"),
    ],
)
def test_components_that_break_the_contract(components, executed, message):
    task = replace(faulty_suite.task(), reward_components=("near", "far"), primitives=(("go", 1),), macro_steps=2)
    good = result_of(1007)
    result = replace(good, components=components, steps_executed=executed, events=good.events[:executed])
    with pytest.raises(BadAnswerError, match=message):
        AnswerChecker(task, OPTIONS).chunk(received(result), 2)


STEP_ACTIONS = np.array([[0.5, -1.0, 0.25]], np.float32)
PRIMITIVE = replace(faulty_suite.task(), primitives=(("go", 1),), macro_steps=2, step_action_dim=3)


def result_of_a_primitive(step_actions):
    good = result_of(1007)
    return replace(good, step_actions=step_actions, steps_executed=1, events=good.events[:1])


def test_actions_of_primitives_come_back_as_they_were():
    again = received(result_of_a_primitive(STEP_ACTIONS))
    np.testing.assert_array_equal(again.step_actions, STEP_ACTIONS)


@pytest.mark.parametrize(
    ("step_actions", "message"),
    [
        (None, "must be"),
        (np.zeros((2, 3), np.float32), "must be"),
        (np.zeros((1, 2), np.float32), "must be"),
        (STEP_ACTIONS.astype(np.float64), "float32"),
        (STEP_ACTIONS * np.nan, "NaN"),
    ],
)
def test_actions_of_primitives_that_break_the_contract(step_actions, message):
    with pytest.raises(BadAnswerError, match=message):
        AnswerChecker(PRIMITIVE, OPTIONS).chunk(received(result_of_a_primitive(step_actions)), 2)


def test_actions_of_primitives_that_nobody_declared():
    task = replace(PRIMITIVE, step_action_dim=0)
    with pytest.raises(BadAnswerError, match="step_action_dim is 0"):
        AnswerChecker(task, OPTIONS).chunk(result_of_a_primitive(STEP_ACTIONS), 2)


def test_components_that_nobody_declared():
    with pytest.raises(BadAnswerError, match="near"):
        AnswerChecker(faulty_suite.task(), OPTIONS).chunk(replace(result_of(1007), components=dict(COMPONENTS)), 2)
