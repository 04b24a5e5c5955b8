"""Progress of a recipe, and estimated durations."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rlvla.recipes.recipe import Stage
from rlvla.recipes.runner import Timing, check_state
from rlvla.recipes.state import DONE, RUNNING, STATE_FILE, State, locked
from rlvla.utils.errors import ConfigError


def stage(folder: Path, name: str, output: str = "", minutes: float | None = None, **settings) -> Stage:
    reads = {"sft": "demos", "rl": "sft/policy"}
    if name in reads:
        settings = {"demos" if name == "sft" else "pretrain": str(folder / reads[name]), **settings}
    return Stage(name, settings, (), folder / (output or name), minutes=minutes)


def chain(folder: Path, **seeds: int) -> list[Stage]:
    return [stage(folder, name, seed=seeds.get(name, 0)) for name in ("demos", "sft", "rl")]


def done(stages: list[Stage], folder: Path) -> State:
    state = State(folder)
    for one in stages:
        (one.output / "policy" if one.name == "sft" else one.output).mkdir(parents=True, exist_ok=True)
        state.note(one, DONE, 10.0)
    return State.read(folder)


def reasons(stages: list[Stage], state: State, first: str | None = None) -> list[tuple[str | None, str]]:
    try:
        check_state(stages, state, first)
    except ConfigError as error:
        return [(problem.flag, problem.reason) for problem in error.problems]
    return []


def test_changed_settings_of_done_stages_are_refused_until_they_are_repeated(tmp_path: Path) -> None:
    state = done(chain(tmp_path), tmp_path)
    assert reasons(chain(tmp_path), state) == []
    changed = chain(tmp_path, sft=1, rl=2)
    assert state.changes(changed[1]) == ["seed 0 -> 1"]
    assert reasons(changed, state) == [("sft", "changed")], "one command repeats all of them"
    with pytest.raises(ConfigError, match=r"sft \(seed 0 -> 1\); rl \(seed 0 -> 2\); .* --from sft$"):
        check_state(changed, state, None)
    assert reasons(changed, state, "rl") == [("sft", "changed")]
    assert reasons(changed, state, "sft") == []
    assert reasons(changed, state, "eval_sft") == [("from", "no_such_start")]
    ranks = [replace(one, processes=2) for one in chain(tmp_path)]
    assert state.changes(ranks[1]) == ["processes (default) -> 2"]


def test_values_are_compared_as_typed_and_wherever_the_folder_lies(tmp_path: Path) -> None:
    state = done([stage(tmp_path, "sft", seed=1, task_ids=[0, 1], quiet=True)], tmp_path)
    assert state.changes(stage(tmp_path, "sft", seed="1", task_ids=["0", "1"], num_envs=4)) == []
    moved = tmp_path / "moved"
    moved.mkdir()
    (tmp_path / STATE_FILE).rename(moved / STATE_FILE)
    assert State.read(moved).changes(stage(moved, "sft", seed=1, task_ids=[0, 1])) == []


def test_the_same_stage_may_write_to_several_places(tmp_path: Path) -> None:
    state = done([stage(tmp_path, "rl", "ppo", advantage_estimator="gae")], tmp_path)
    other = stage(tmp_path, "rl", "grpo", advantage_estimator="grpo")
    assert not state.is_done(other) and reasons([other], state) == []


def test_repeating_a_stage_resets_all_later_ones_and_keeps_their_outputs(tmp_path: Path) -> None:
    ppo, grpo = stage(tmp_path, "rl", "ppo"), stage(tmp_path, "rl", "grpo")
    stages = [*chain(tmp_path)[:2], ppo]
    state = done([*stages, grpo], tmp_path)
    for _ in range(2):
        state.begin_again(stages, "sft")
        again = State.read(tmp_path)
        assert [again.is_done(one) for one in (*stages, grpo)] == [True, False, False, False]
        names = {path.name for path in tmp_path.iterdir() if path.is_dir()}
        assert names == {"demos", "superseded_sft", "superseded_ppo", "superseded_grpo"}
        assert Timing(stages, again).left(stages[1]) == 10.0
        (tmp_path / "sft").mkdir()
        state.note(stages[1], RUNNING, 1.0)
        shutil.rmtree(tmp_path / "sft")


def test_lost_inputs_are_reported_before_anything_starts(tmp_path: Path) -> None:
    stages = chain(tmp_path)
    state = done(stages[:2], tmp_path)
    (tmp_path / "demos").rmdir()
    assert reasons(stages, state) == [], "what no stage needs any more may be removed"
    (tmp_path / "sft/policy").rmdir()
    assert reasons(stages, state) == [("rl", "lost_input")]


def test_only_outputs_of_interrupted_attempts_are_removed(tmp_path: Path) -> None:
    demos, sft, rl = chain(tmp_path)
    resuming = stage(tmp_path, "sft", load_checkpoint=True)
    state = State(tmp_path)
    for one in (demos, sft, rl):
        one.output.mkdir()
    state.remove_unfinished(demos)
    assert demos.output.is_dir(), "somebody else's"
    for one in (demos, resuming, rl):
        state.note(one, RUNNING, 1.0)
        state.remove_unfinished(one)
    assert not demos.output.exists()
    assert rl.output.is_dir() and sft.output.is_dir(), "the commands continue"
    state.remove_unfinished(sft)
    assert not sft.output.exists(), "without checkpoints"


def test_folders_of_the_scripts_before_recipes_are_taken_over(tmp_path: Path) -> None:
    (tmp_path / "sft/policy").mkdir(parents=True)
    (tmp_path / "ppo").mkdir()
    (tmp_path / "eval_sft.json").touch()
    lines = "demos 39.0\nsft/interrupted 2.0\nsft 240.0\neval_sft 10.0\nrl/interrupted 30.0\n"
    (tmp_path / "seconds.txt").write_text(lines)
    demos, sft, _ = chain(tmp_path, sft=4)
    evaluation, rl = stage(tmp_path, "eval_sft", "eval_sft.json"), stage(tmp_path, "rl", "ppo")
    stages = [demos, sft, evaluation, rl]
    state = State.opened(tmp_path, stages)
    assert [state.is_done(one) for one in stages] == [True, True, True, False]
    assert reasons(stages, state) == []
    assert [state.of(one).seconds for one in stages] == [39.0, 242.0, 10.0, 30.0]


def stored(stage: str, output: str, key: str | None = None) -> str:
    record = {"stage": stage, "status": DONE, "output": output, "settings": None, "seconds": 1.0}
    return json.dumps({"stages": {key or output: record}})


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"stages": {"sft": {"stage": 3}}}', '{"stages": {"sft": []}}'),
        *(
            stored("sft", "../victim"),
            stored("sft", "a/../../victim"),
            stored("sft", "sft", "ppo"),
            stored("old", "sft"),
        ),
    ],
)
def test_a_damaged_state_is_refused_in_words(tmp_path: Path, content: str) -> None:
    (tmp_path / STATE_FILE).write_text(content)
    with pytest.raises(ConfigError) as error:
        State.read(tmp_path)
    assert [problem.reason for problem in error.value.problems] == ["invalid_state"]


def test_a_folder_serves_one_recipe_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlvla.recipes.state._LOCK_SECONDS", 0.0)
    with locked(tmp_path), pytest.raises(ConfigError) as error, locked(tmp_path):
        pass
    assert [(problem.flag, problem.reason) for problem in error.value.problems] == [("output", "folder_in_use")]
    with locked(tmp_path):
        pass


def test_times_follow_the_machine_and_earlier_attempts(tmp_path: Path) -> None:
    demos, sft, rl = (stage(tmp_path, name, minutes=m) for name, m in (("demos", 1.0), ("sft", 4.0), ("rl", 5.0)))
    stages, state = [demos, sft, rl], State(tmp_path)
    timing = Timing(stages, state)
    assert timing.text(stages) == "about 10m00s"
    state.note(demos, DONE, 120.0)  # half as fast as the machine of the recipe; a minute says little
    assert [timing.left(one) for one in stages] == [0.0, 360.0, 450.0]
    state.note(sft, RUNNING, 100.0)  # starts anew
    state.note(rl, RUNNING, 450.0)  # goes on
    assert [timing.left(one) for one in stages] == [0.0, 360.0, 45.0]
    state.note(rl, RUNNING, 900.0)
    assert timing.left(rl) == 45.0
    unknown = stage(tmp_path, "eval_rl", "eval_rl.json")
    assert Timing([*stages, unknown], state).text([sft, unknown]) == "more than 6m00s"
    assert Timing([unknown], state).text([unknown]) == ""


def test_a_budget_limits_stages_to_the_time_that_later_ones_leave(tmp_path: Path) -> None:
    demos, sft, rl = (stage(tmp_path, name, minutes=m) for name, m in (("demos", 1.0), ("sft", 4.0), ("rl", 5.0)))
    demos, rl = replace(demos, settings={"max_minutes": 3.0}, time_limited=True), replace(rl, time_limited=True)
    stages, state = [demos, sft, rl], State(tmp_path)
    assert [Timing(stages, state, 15.0).limit(one) for one in stages] == [3.0, None, 15.0]
    # Halves for demos and rl of what sft is not expected to need.
    assert Timing(stages, state, 8.0).limit(demos) == 2.0
    assert Timing(stages, state).limit(demos) is None
    short = replace(demos, settings={"max_minutes": "1.5"})  # text: from the end of the command line
    assert Timing([short, sft, rl], state, 8.0).limit(short) == 1.5
    ended = State(tmp_path / "ended")
    ended.note(sft, DONE, 240.0)
    ended.note(rl, DONE, 120.0)
    assert Timing([demos, sft, rl], ended, 8.0).limit(demos) == 2.0, "no share for a stage that is done"
    state.note(demos, DONE, 60.0)
    state.note(sft, DONE, 240.0)
    assert Timing(stages, state, 15.0).limit(rl) == 10.0
    assert Timing(stages, state, 4.0).limit(rl) == 0.5  # the budget is spent: a tenth


def test_a_stage_of_seconds_does_not_make_hours_of_the_others_vanish(tmp_path: Path) -> None:
    demos, sft = (stage(tmp_path, name, minutes=m) for name, m in (("demos", 1.0), ("sft", 30.0)))
    state = State(tmp_path)
    state.note(demos, DONE, 1.0)  # a simulator that is none
    assert 900 < Timing([demos, sft], state).left(sft) < 1800
