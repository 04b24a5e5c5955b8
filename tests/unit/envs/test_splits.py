from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvla.envs import list_tasks
from rlvla.envs.config import SplitConfig
from rlvla.envs.splits import (
    LearnedStates,
    UnseenStates,
    check_disjoint,
    describe_learned_from,
    eval_init_states,
    train_init_states,
)
from rlvla.utils.errors import ConfigError

TOY = list_tasks("toy_reach")[0]


def task_with(count):
    return replace(TOY, num_init_states=count)


def test_the_last_fifth_is_held_out():
    assert train_init_states(TOY, "heldout") == range(8000)
    assert eval_init_states(TOY, "heldout", 200) == list(range(8000, 8200))
    assert eval_init_states(task_with(50), "heldout", 10) == list(range(40, 50))


def test_shared_uses_all_for_both():
    assert train_init_states(task_with(50), "shared") == range(50)
    assert eval_init_states(task_with(50), "shared", 50) == list(range(50))


@given(st.integers(2, 3000))
def test_held_out_states_are_a_partition(count):
    task = task_with(count)
    train = train_init_states(task)
    evaluation = eval_init_states(task, "heldout", count - len(train))
    assert sorted([*train, *evaluation]) == list(range(count))
    assert len(train) >= 1 and len(evaluation) >= 1
    check_disjoint(train, evaluation)


@pytest.mark.parametrize(("n", "message"), [(11, "1 to 10"), (0, "1 to 10"), (-3, "-3")])
def test_more_states_than_there_are(n, message):
    with pytest.raises(ConfigError, match=message):
        eval_init_states(task_with(50), "heldout", n)


def test_unknown_protocol_and_too_few_states():
    with pytest.raises(ConfigError, match="heldout, shared"):
        train_init_states(TOY, "leaky")
    with pytest.raises(ConfigError, match="shared"):
        train_init_states(task_with(1), "heldout")


def test_overlap_is_named():
    for train in (range(100), list(range(100))):
        with pytest.raises(ConfigError, match=r"2 initial states .*98, 99.*--eval_protocol shared"):
            check_disjoint(train, [98, 99, 100])
        check_disjoint(train, range(100, 200))


def test_states_from_a_file(tmp_path: Path) -> None:
    def states(content: str, n: int = 2) -> list[int]:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text(content)
        return SplitConfig(eval_states_file=str(path)).eval_states(TOY, n)

    assert states("[9, 8, 7]") == states('{"reach": [9, 8]}') == states("0: [9, 8, 3]") == [9, 8]
    for content, message in [
        ("[9, 9]", "twice"),
        ("[]", "give a list"),
        ("{}", "give a list"),
        ("nine", "give a list"),
        ("[true, 1]", "give a list"),
        ("[1", "is not valid YAML"),
        ("push: [1, 2]", "does not name task reach; it names push"),
        ("[1, 10000]", "not 10000"),
        ("[1]", "fewer than 2"),
    ]:
        with pytest.raises(ConfigError, match=message):
            states(content)
    with pytest.raises(ConfigError, match="give one of them"):
        SplitConfig(eval_states_file="x", eval_init_states=(0, 9)).eval_states(TOY, 1)
    with pytest.raises(ConfigError, match="is missing"):
        SplitConfig(eval_states_file=str(tmp_path / "none")).eval_states(TOY, 1)


def test_states_of_other_tasks_are_other_states() -> None:
    evaluated = eval_init_states(TOY, "heldout", 10)
    same = LearnedStates("toy_reach", 0, evaluated[0], evaluated[-1] + 1)
    others = [replace(same, suite="other"), replace(same, task_id=1)]
    assert SplitConfig().problems([TOY], 10, others) == []
    for states in (same, replace(same, task_id=None)):
        (problem,) = SplitConfig().problems([TOY], 10, [*others, states])
        assert "10 initial states are used for training and for evaluation" in problem
    assert SplitConfig(eval_protocol="shared").problems([TOY], 10, [same]) == []


def test_it_is_said_where_a_policy_was_trained() -> None:
    learned = LearnedStates("toy_reach", 0, 0, 8000)
    tasks = [TOY, replace(TOY, task_id=1, name="push")]
    assert describe_learned_from([TOY], [learned]) == "trained on initial states 0..7999 of reach"
    assert describe_learned_from(tasks, [learned]).endswith("0..7999 of 1 of these 2 tasks")
    assert describe_learned_from(tasks, [learned, replace(learned, task_id=1, stop=9)]).endswith("0..7999 of each task")
    assert describe_learned_from([TOY], [replace(learned, suite="lift")]).startswith(
        "trained in lift; no initial state"
    )
    assert describe_learned_from([TOY], [replace(learned, task_id=1)]).startswith("no initial state")
    assert "not recorded" in describe_learned_from([TOY], None)
    task_alone = replace(learned, stop=0)
    any_task = LearnedStates("toy_reach", None, 0, 0)
    for unknown in (any_task, LearnedStates("a_folder", None, 0, 0)):
        assert (
            describe_learned_from([TOY], [unknown])
            == "which tasks and initial states it was trained on is not recorded"
        )
        text = "trained on initial states 0..7999 of reach, and on others that are not recorded"
        assert describe_learned_from([TOY], [unknown, learned]) == text
    assert "trained in metaworld; no initial" in describe_learned_from([TOY], [LearnedStates("metaworld", None, 0, 0)])
    assert describe_learned_from([TOY], [task_alone]) == "trained on reach; from which initial states is not recorded"
    both = describe_learned_from([TOY], [learned, task_alone])
    assert both == "trained on initial states 0..7999 of reach, and on others that are not recorded"
    assert SplitConfig().problems([TOY], 10, [task_alone]) == []


def test_unseen_states_are_training_states_outside_of_the_data():
    used = {0: frozenset({0, 2, 3}), 1: frozenset(range(50))}
    assert UnseenStates(used).eval_states(task_with(50), 4) == [1, 4, 5, 6]
    before = (LearnedStates("toy_reach", 0, 4, 30), LearnedStates("other", 0, 30, 40))
    assert UnseenStates(used, before).eval_states(task_with(50), 4) == [1, 30, 31, 32]


def test_unseen_states_are_those_for_evaluation_if_the_data_take_the_others():
    states = UnseenStates({0: frozenset(range(38)) | {41}})
    assert states.eval_states(task_with(50), 2) == [38, 39]
    assert states.eval_states(task_with(50), 5) == [40, 42, 43, 44, 45]
    with pytest.raises(ConfigError) as refused:
        states.eval_states(task_with(50), 10)
    assert [(p.flag, p.reason) for p in refused.value.problems] == [("eval_episodes", "too_few")]
