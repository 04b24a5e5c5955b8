"""Machines declared in files: they walk as the built-in ones do, and mistakes are reported all at once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlvla.envs.base import TaskSpec
from rlvla.rewards import RewardConfig, StateInput, StateInputSettings
from rlvla.rewards.machine_drawing import to_dot
from rlvla.rewards.machine_files import declaration_of, declared_graph
from rlvla.rewards.machine_source import MachineSource
from rlvla.rewards.machines import make_reward_machine
from rlvla.rewards.reward_machine import MachineSettings, RewardMachine
from rlvla.utils.errors import ConfigError

LIFT = """
states:
  u0: [{when: grasped, to: u1}]
  u1: [{when: lifted, to: u2}]
success: u2
validators:
  u1: {needs: grasped, penalty: 0.1}
"""
TASK = TaskSpec("lab", 0, "lift", "lift it", 50, 10, 7, 0, 20.0, propositions=("grasped", "lifted"))
TRACE = [set(), {"grasped"}, *[set()] * 6, {"grasped"}, {"grasped", "lifted"}]


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "machine.yaml") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


def rewards_of(machine: RewardMachine) -> list[float]:
    return [machine.step(events)[0] for events in TRACE]


def test_the_lift_machine_from_a_file_pays_what_the_built_in_one_pays(write) -> None:
    declared = RewardMachine(declared_graph(write(LIFT)), MachineSettings(gamma=0.9))
    assert rewards_of(declared) == rewards_of(make_reward_machine("lift", gamma=0.9))
    assert declared.regressions == 1, "the validator was violated for the grace of five steps"


def test_without_validation_the_machine_stays(write) -> None:
    machine = RewardMachine(declared_graph(write(LIFT)), MachineSettings(validation=False))
    rewards_of(machine)
    assert machine.regressions == 0 and machine.state == "u2"


def test_validators_and_potentials_of_a_formula(write) -> None:
    text = 'formula: "F(grasped & F lifted)"\nvalidators: {u1: {needs: grasped, penalty: 0.2, to: u0}}\n'
    text += "potentials: {u0: -0.9, u1: -0.2}\n"
    machine = RewardMachine(declared_graph(write(text)), MachineSettings(gamma=1.0, grace=1, potential_scale=1.0))
    assert [machine.step(events)[1]["state"] for events in ({"grasped"}, set())] == ["u1", "u0"]
    machine.reset()
    assert machine.progress == pytest.approx(0.1)
    _, moved = machine.step({"grasped"})
    assert moved["shaping"] == pytest.approx(0.7) and machine.progress == pytest.approx(0.8)
    _, fallen = machine.step(set())
    assert fallen["penalty"] == 0.2 and fallen["shaping"] == pytest.approx(-0.7)


def test_shaping_telescopes_whatever_the_potentials(write) -> None:
    text = LIFT + "potentials: {u0: -0.3, u1: -1.0}\n"
    machine = RewardMachine(declared_graph(write(text)), MachineSettings(gamma=1.0, mode="hybrid"))
    assert sum(machine.step(events)[1]["shaping"] for events in TRACE) == pytest.approx(0.3)


def test_an_edge_of_several_steps_is_as_long_as_they_are(write) -> None:
    text = "states: {a: [{when: done, to: c, progress: 2}, {when: x, to: b}], b: [{when: done, to: c}]}\nsuccess: [c]\n"
    graph = declared_graph(write(text))
    assert graph.distances == {"a": 2.0, "b": 1.0, "c": 0.0}


def test_the_source_takes_the_file_and_checks_its_propositions(write) -> None:
    source = MachineSource(RewardConfig(rm_machine=write(LIFT)))
    assert source.graph(TASK).states == ("u0", "u1", "u2") and source.problems([TASK]) == []
    problems = source.problems([replace(TASK, task_id=1, propositions=("grasped",))])
    assert [p.flag for p in problems] == ["rm_machine"] and "lifted" in problems[0].text


def test_the_record_of_a_policy_holds_the_machine_not_the_path(write) -> None:
    path = write(LIFT)
    source = StateInput.from_config(RewardConfig(rm_machine=path, rm_state_input="proprio"), [TASK])
    Path(path).unlink()
    record = json.loads(json.dumps(source.settings.as_dict()))
    again = StateInput(StateInputSettings.from_dict(record))
    assert again.states(TASK) == ("u0", "u1", "u2") and again.settings == source.settings
    assert path not in json.dumps(record)
    with pytest.raises(ConfigError, match="names a file"):
        StateInputSettings.from_dict(record | {"rm_machine": path})


def test_records_from_before_are_read() -> None:
    record = StateInputSettings("prompt", rm_formula="F near").as_dict()
    for name in ("rm_goal_stages", "rm_validation"):
        del record[name]
    assert StateInputSettings.from_dict(record) == StateInputSettings("prompt", rm_formula="F near")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", ["a list"]),
        ("{}", ["either states or a formula"]),
        ("formula: F a\nstates: {}\n", ["either states or a formula"]),
        ("formula: 3\n", ["formula", "quotes"]),
        ('formula: "F(a"\n', ["formula: "]),
        ('formula: "F a"\nsuccess: u1\n', ["leave them out"]),
        ("states: {}\nsuccess: a\n", ["states is empty"]),
        ("states: {a: [{when: x, to: b}]}\n", ["success names no state", "no state 'b'"]),
        ("states: [a]\nsuccess: a\n", ["states must map"]),
        ("states: {a: x}\nsuccess: b\n", ["its edges must be a list"]),
        ("states: {a: [{when: x}]}\nsuccess: b\n", ["give when and to"]),
        ("states: {a: [{when: F x, to: b}]}\nsuccess: b\n", ["beyond one step"]),
        ("states: {a: [{when: x, to: b, progress: .nan}]}\nsuccess: b\n", ["finite number"]),
        ("states: {a: [{when: x, to: b}], b: [{when: x, to: a}]}\nsuccess: b\n", ["b is terminal"]),
        ("states: {a: [{when: x, to: b}]}\nsuccess: b\nfailure: b\n", ["both success and failure"]),
        ("states: {a: [{when: x, to: a}]}\nsuccess: b\n", ["contradicts itself"]),
        (LIFT + "potentials: {u0: -2, u2: 0}\n", ["u2 has none to give", "u1 has none", r"in \[-1, 0\], not -2"]),
        (LIFT.replace("penalty: 0.1", "penalty: -1, to: u2"), ["at least 0", "cannot fall back to 'u2'"]),
        (LIFT + "reward: 3\n", ["unknown entries reward"]),
        ("states: {a: [{when: x, to: [b]}]}\nsuccess: b\n", ["no state"]),
        ("states: {a: [{when: x, to: {b: 1}}]}\nsuccess: b\n", ["no state"]),
        (f"states: {{a: [{{when: x, to: b, progress: 1{'0' * 350}}}]}}\nsuccess: b\n", ["finite number"]),
        (LIFT.replace("0.1", "1" + "0" * 350), ["penalty must be a finite number"]),
        (LIFT + f"potentials: {{u0: -1{'0' * 350}, u1: 0}}\n", ["potential of u0 must be a finite number"]),
    ],
)
def test_mistakes_in_a_file_are_reported_together(write, text: str, words: list[str]) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as error:
        MachineSource(RewardConfig(rm_machine=path))
    for problem in error.value.problems:
        assert problem.flag == "rm_machine" and "machine.yaml" in problem.text
    for word in words:
        assert error.match(word)


def test_a_file_that_is_missing_or_holds_more_than_plain_values(write, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing"):
        declaration_of(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="JSON"):
        declaration_of(write("{", "machine.json"))
    with pytest.raises(ConfigError, match="more than text"):
        declaration_of(write("states: {a: 2020-01-01}\n"))


def test_any_name_of_a_state_can_be_drawn(write) -> None:
    names = ['a "quoted" name', "ends in \\", "two\nlines"]
    states = {names[0]: [{"when": "x", "to": names[1]}], names[1]: [{"when": "y", "to": names[2]}]}
    validators = {names[1]: {"needs": "x", "to": names[0]}}
    text = to_dot(declared_graph(json.dumps({"states": states, "success": names[2], "validators": validators})))
    assert all(line.count('"') % 2 == 0 for line in text.replace(r"\\", "").replace(r"\"", "").splitlines())
    assert r'"a \"quoted\" name" -> "ends in \\" [label="x"];' in text and r'"two\nlines" [shape=doublecircle' in text


def test_the_mark_of_the_first_state_is_none_of_the_states(write) -> None:
    states = {"start": [{"when": "x", "to": "start_"}], "start_": [{"when": "y", "to": "done"}]}
    text = to_dot(declared_graph(json.dumps({"states": states, "success": "done"})))
    assert "start__ [shape=point];" in text and 'start__ -> "start" [' not in text and 'start__ -> "start";' in text
    assert '"start" -> "start_" [label="x"];' in text
