"""Reward machines on event traces: worked numbers, telescoping, validators, and attempts to farm them."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from rlvla.rewards.ltlf import compile_ltlf
from rlvla.rewards.machines import TASKS, formula_graph, goal_graph, machine_graph, make_reward_machine
from rlvla.rewards.reward_machine import Guard, MachineSettings, RewardMachine, chain_graph, compiled_graph
from rlvla.utils.errors import ConfigError

GRASPED, LIFTED, ALIGNED, STACKED = "cubeA_grasped", "cubeA_lifted", "cubes_aligned", "stacked"
PERFECT = [set(), {GRASPED}, {GRASPED, LIFTED}, {GRASPED, LIFTED, ALIGNED}, {LIFTED, ALIGNED}, {LIFTED, STACKED}]


def total(machine: RewardMachine, trace: list[set[str]]) -> float:
    machine.reset()
    return sum(machine.step(events)[0] for events in trace)


def test_worked_numbers_of_the_stack_machine() -> None:
    machine = make_reward_machine("stack", gamma=0.99)
    states = ["u0", "u1", "u2", "u3", "u4"]
    assert [machine.distance(s) for s in states] == [4, 3, 2, 1, 0]
    assert [machine.potential(s) for s in states] == [-1, -0.75, -0.5, -0.25, 0]
    reward, info = machine.step(set())
    assert info == {"state": "u0", "regressed": False, "penalty": 0, "shaping": pytest.approx(0.01), "terminal": False}
    assert reward == pytest.approx(0.001)
    reward, info = machine.step({GRASPED})
    assert info["state"] == "u1" and info["shaping"] == pytest.approx(0.2575)
    assert reward == pytest.approx(0.25 + 0.1 * 0.2575)
    machine.step({GRASPED, LIFTED})
    for _ in range(4):
        assert machine.step({LIFTED})[1]["state"] == "u2", "within the grace"
    reward, info = machine.step({LIFTED})
    assert info["state"] == "u0" and info["regressed"] and info["penalty"] == 0.15
    assert info["shaping"] == pytest.approx(-0.49) and reward == pytest.approx(-0.15 - 0.049)
    for events in PERFECT[1:4]:
        machine.step(events)
    reward, info = machine.step({STACKED})
    assert info["shaping"] == pytest.approx(0.25) and info["terminal"]
    assert reward == pytest.approx(0.25 + 0.025 + 1.0), "the edge u3 -> u4 had not been taken before"
    assert machine.step({STACKED})[0] == 0.0


def test_modes() -> None:
    def rewards(mode: str) -> list[float]:
        machine = make_reward_machine("stack", mode=mode, gamma=0.99)
        return [machine.step(events)[0] for events in PERFECT]

    assert rewards("sparse") == [0, 0, 0, 0, 0, 1]
    assert rewards("distance") == [-1, -0.75, -0.5, -0.25, -0.25, 0]
    assert rewards("progression") == [0, 0.25, 0.25, 0.25, 0, 1.25]
    stay, step = 0.1 * 0.01, lambda new, old: 0.25 + 0.1 * (0.99 * new - old)
    expected = [stay, step(-0.75, -1), step(-0.5, -0.75), step(-0.25, -0.5), 0.1 * 0.0025, step(0, -0.25) + 1]
    assert rewards("hybrid") == pytest.approx(expected)


@pytest.mark.parametrize("gamma", [0.99, 1.0])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("order", "grace"), [("transition_first", 0), ("validate_first", 3)])
def test_shaping_telescopes(task: str, gamma: float, order: str, grace: int) -> None:
    machine = make_reward_machine(task, gamma=gamma, order=order, grace=grace)
    rng = random.Random(1)
    ended = set()
    for _ in range(150):
        start = machine.potential(machine.reset())
        steps, terminated = rng.randrange(1, 40), rng.random() < 0.5
        shaped = 0.0
        for t in range(steps):
            events = {p for p in machine.graph.propositions if rng.random() < 0.3}
            last = t == steps - 1
            _, info = machine.step(events, terminated=terminated and last)
            shaped += gamma**t * info["shaping"]
            if machine.failed:
                break
        end = 0.0 if terminated and not machine.failed else machine.potential(machine.state)
        assert shaped == pytest.approx(gamma ** (t + 1) * end - start)
        ended.add((machine.is_terminal, terminated))
    assert len(ended) >= 3, "the traces must end in all ways"


@pytest.mark.parametrize("name", [*TASKS, "F(a & F(b & F c))", "G(!d) & F a & F(b & c)"])
def test_the_machine_towards_its_own_goal_is_the_same(name: str) -> None:
    graph = machine_graph(name) if name in TASKS else formula_graph(name)
    (goal,) = graph.success
    same, rng = graph.towards(goal), random.Random(2)
    assert same.distances == graph.distances and same.success == graph.success and same.failure == graph.failure
    for _ in range(20):
        machines = [RewardMachine(g, MachineSettings(grace=2)) for g in (graph, same)]
        for _ in range(30):
            events = {p for p in graph.propositions if rng.random() < 0.3}
            first, second = (machine.step(events) for machine in machines)
            assert first == second


def test_the_machine_towards_a_state_on_the_way() -> None:
    chain = machine_graph("stack")
    assert chain.stages == ("u1", "u2", "u3")
    part = RewardMachine(chain.towards("u2"), MachineSettings(gamma=0.99))
    assert [part.distance(s) for s in chain.states] == [2, 1, 0, math.inf, math.inf]
    assert [part.potential(s) for s in chain.states] == [-1, -0.5, 0, -1, -1]
    rewards = [part.step(events)[0] for events in PERFECT[:4]]
    expected = [0.1 * 0.01, 0.25 + 0.1 * (1 - 0.99 * 0.5), 0.25 + 0.1 * 0.5 + 1.0, 0.0]
    assert rewards == pytest.approx(expected) and part.state == "u2", "it stays where it has ended"
    branches = machine_graph("cleanup").towards("u4")  # by u1 or by u3
    assert [branches.distances[f"u{i}"] for i in range(7)] == [2, 1, math.inf, 1, 0, math.inf, math.inf]
    formula = formula_graph("F(a & F(b & F c))")
    (last,) = (s for s in formula.stages if formula.distances[s] == 1)
    assert formula.towards(last).distances[formula.states[0]] == 2, "one letter with a and b costs 2"
    given = replace(chain, potentials=dict.fromkeys(chain.states, -0.5))
    assert given.towards("u1").potential("u0") == -1, "given potentials are those of another goal"
    assert set(machine_graph("wipe").stages) == {"u1", "u2", "u3"}, "failure is no stage"


def test_the_states_that_were_entered() -> None:
    machine = make_reward_machine("cleanup", advance="cascade")
    assert machine.entered == ("u0",)
    machine.step({"pushed"})
    machine.step({"grasped", "in_bin"})
    assert machine.entered == ("u0", "u3", "u4", "u5"), "those passed within a step as well"
    back = make_reward_machine("lift", grace=1)
    for events in ({"grasped"}, set(), {"grasped"}):
        back.step(events)
    assert back.entered == ("u0", "u1")


def test_without_grace_a_perfect_stack_episode_fails() -> None:
    assert total(make_reward_machine("stack", mode="sparse"), PERFECT) == 1
    assert total(make_reward_machine("stack", mode="sparse", grace=0), PERFECT) == 0
    # Released and stacked within one step: the transition must come before the validator.
    at_once = [*PERFECT[:4], PERFECT[5]]
    assert total(make_reward_machine("stack", mode="sparse", grace=0), at_once) == 1
    assert total(make_reward_machine("stack", mode="sparse", grace=0, order="validate_first"), at_once) == 0
    assert total(make_reward_machine("stack", mode="sparse", order="validate_first"), at_once) == 1


@pytest.mark.parametrize("grace", [0, 1, 2, 5])
def test_grace_counts_consecutive_violations(grace: int) -> None:
    machine = make_reward_machine("lift", grace=grace, mode="progression")
    machine.step({"grasped"})
    for _ in range(3):  # a violation shorter than the grace is forgiven, each time anew
        for _ in range(max(0, grace - 1)):
            assert machine.step(set())[1]["state"] == "u1"
        machine.step({"grasped"})
    rewards = [machine.step(set()) for _ in range(max(1, grace))]
    assert [info["state"] for _, info in rewards] == ["u1"] * (len(rewards) - 1) + ["u0"]
    assert rewards[-1][0] == -0.1 and machine.regressions == 1
    assert machine.step(set())[0] == 0.0, "the penalty is paid once"


def test_default_grace_is_a_quarter_of_a_second() -> None:
    assert make_reward_machine("lift").settings.grace == 5
    assert make_reward_machine("lift", control_freq=10).settings.grace == 3


def test_orders_advances_and_credits() -> None:
    """Every combination against the rules, on a trace that exercises each of them."""
    trace = [{"grasped"}, set(), {"grasped"}, {"grasped", "lifted"}]
    jump = [{"grasped", "lifted"}]
    for order, advance, credit in itertools.product(
        ("transition_first", "validate_first"), ("one", "cascade"), ("first_visit", "every_edge", "signed")
    ):
        machine = make_reward_machine(
            "lift", mode="progression", order=order, advance=advance, credit=credit, grace=0, terminal_reward=0
        )
        paid = [machine.step(events)[0] for events in trace]
        fallen = -0.1 - (0.25 if credit == "signed" else 0.0)
        again = 0.0 if credit == "first_visit" else 0.25
        assert paid == pytest.approx([0.25, fallen, again, 0.25]), (order, advance, credit)
        assert total(machine, jump) == (0.5 if advance == "cascade" else 0.25)
        assert machine.is_terminal == (advance == "cascade")


def farm(credit: str, cycles: int, mode: str = "progression") -> float:
    machine = make_reward_machine("stack", mode=mode, credit=credit, gamma=1.0, grace=0)
    return total(machine, [{GRASPED}, {GRASPED, LIFTED}, set()] * cycles)


def test_grasp_drop_cycles_pay_at_most_once() -> None:
    assert farm("first_visit", 1) == pytest.approx(0.5 - 0.15)
    assert farm("first_visit", 10) == pytest.approx(0.5 - 10 * 0.15)
    assert farm("signed", 10) == pytest.approx(-10 * 0.15)
    assert farm("every_edge", 10) == pytest.approx(10 * (0.5 - 0.15)), "this is why it is not the default"
    assert farm("first_visit", 10, "hybrid") == pytest.approx(farm("first_visit", 10)), "shaping adds nothing"


def test_after_success() -> None:
    lost_and_found = [*PERFECT, {STACKED, "success"}, *([set()] * 5), *PERFECT]
    stays = make_reward_machine("stack", mode="sparse")
    assert total(stays, lost_and_found) == 1 and stays.regressions == 0
    goes_on = make_reward_machine("stack", mode="sparse", after_success="run_on")
    assert total(goes_on, lost_and_found) == 1, "the bonus is paid once"
    assert goes_on.regressions == 1 and goes_on.state == "u4"


def test_a_reject_sink_is_failure() -> None:
    for machine in (
        make_reward_machine("wipe"),
        RewardMachine(formula_graph("G(!collision) & F(contact & F(w25 & F(w50 & F w100)))")),
    ):
        machine.step({"contact"})
        before = machine.potential(machine.state)
        reward, info = machine.step({"collision", "w25", "w50", "w100"})
        assert info["terminal"] and machine.failed and machine.potential(info["state"]) == -1
        assert info["shaping"] == pytest.approx(-0.99 - before) and reward == pytest.approx(0.1 * info["shaping"])
        assert machine.step({"w100"})[0] == 0.0, "the episode is over"


def test_a_compiled_machine_advances_as_its_automaton() -> None:
    formula = "F(grasped & F(lifted & F(aligned & F stacked)))"
    machine = RewardMachine(formula_graph(formula), MachineSettings(mode="progression"))
    assert [machine.distance(f"u{i}") for i in range(5)] == [4, 3, 2, 1, 0]
    reward, info = machine.step({"grasped", "lifted"})
    assert info["state"] == "u2" and reward == 0.5, "two steps of progress are worth two edges"
    dfa = compile_ltlf(formula)
    rng = random.Random(2)
    for _ in range(100):
        machine.reset()
        state = dfa.initial
        for _ in range(10):
            events = {p for p in dfa.propositions if rng.random() < 0.2}
            if not machine.is_terminal:
                state = dfa.step(state, events)
            machine.step(events)
            assert machine.is_terminal == (state in dfa.accepting)


def test_the_eight_machines_can_be_walked() -> None:
    walks = {
        "lift": [{"grasped"}, {"lifted"}],
        "stack": [{GRASPED}, {LIFTED}, {ALIGNED}, {STACKED}],
        "door": [{"reached"}, {"unlatched"}, {"opened"}],
        "pick_place": [{"grasped"}, {"lifted"}, {"above_bin"}, {"placed"}],
        "nut": [{"grasped"}, {"lifted"}, {"aligned"}, {"placed"}],
        "wipe": [{"contact"}, {"w25"}, {"w50"}, {"w100"}],
        "peg_in_hole": [{"grasped"}, {"aligned"}, {"inserted"}],
        "cleanup": [{"grasped"}, {"in_bin"}, {"pushed"}, {"in_bin", "pushed"}],
    }
    assert set(walks) == set(TASKS)
    for task, walk in walks.items():
        machine = make_reward_machine(task, mode="progression")
        paid = [machine.step(events) for events in walk]
        assert paid[-1][1]["terminal"] and not paid[-2][1]["terminal"], task
        assert sum(reward for reward, _ in paid) == pytest.approx(1.0 + 0.25 * len(walk))
        for skipped in range(len(walk) - 1):
            machine.reset()
            for events in walk[:skipped] + walk[skipped + 1 :]:
                machine.step(events)
            assert not machine.is_terminal, f"{task} without {walk[skipped]}"
    no_latch = make_reward_machine("door", latch=False)
    assert no_latch.step({"reached"})[1]["state"] == "u1" and no_latch.step({"opened"})[1]["terminal"]


def test_cleanup_in_either_order_and_held_together() -> None:
    for walk in ([{"pushed"}, {"grasped"}, {"in_bin"}], [{"grasped"}, {"pushed"}, {"in_bin"}]):
        machine = make_reward_machine("cleanup")
        for events in walk:
            machine.step(events)
        assert machine.distance(machine.state) == 1
        assert not machine.step({"in_bin"})[1]["terminal"]
        assert machine.step({"in_bin", "pushed"})[1]["terminal"]


@pytest.mark.parametrize("ordered", [True, False])
def test_goal_conjunctions(ordered: bool) -> None:
    machine = RewardMachine(goal_graph(["on_a", "in_b", "open_c"], ordered=ordered))
    machine.step({"in_b"})
    assert machine.distance(machine.state) == (3 if ordered else 2)
    for events in ({"on_a"}, {"in_b"}, {"open_c"}):
        machine.step(events)
    assert machine.distance(machine.state) == 1, "all goals must hold at once"
    assert machine.step({"on_a", "in_b", "open_c"})[1]["terminal"]


STAGES = [("near_a", "grasped_a", "on_a"), ("touched_b", "open_b")]


@pytest.mark.parametrize("ordered", [True, False])
def test_goals_with_stages(ordered: bool) -> None:
    machine = RewardMachine(goal_graph(STAGES, ordered=ordered))
    assert machine.distance("u0") == 5
    walked = [machine.distance(machine.step({name})[1]["state"]) for goal in STAGES for name in goal]
    assert walked == [4, 3, 2, 1, 1], "all goals must hold at once"
    assert machine.step({"on_a", "open_b"})[1]["terminal"]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_goal_reached_without_its_stages_skips_them_and_pays_for_them(ordered: bool) -> None:
    settings = MachineSettings(mode="progression", transition_reward=1.0, terminal_reward=0.0)
    machine = RewardMachine(goal_graph(STAGES, ordered=ordered), settings)
    assert machine.step({"on_a"})[0] == 3 and machine.distance(machine.state) == 2
    assert machine.step({"on_a", "open_b"})[0] == 2 and machine.is_terminal
    machine.reset()
    assert machine.step({"on_a", "open_b"})[0] == 5 and machine.is_terminal


def test_guards() -> None:
    guard = Guard("a & !(b | c) -> d")
    for n in range(5):
        for names in itertools.combinations("abcd", n):
            a, b, c, d = (x in names for x in "abcd")
            assert guard.holds(names) == (not (a and not (b or c)) or d)
    with pytest.raises(ConfigError, match="beyond one step"):
        Guard("a & F b")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: formula_graph("a & !a"), "no terminal state"),
        (lambda: formula_graph("G(!collision)"), "accepts before anything"),
        (
            lambda: formula_graph("F(grasped & F lifted)", ["lifted", "near"]),
            "unknown proposition grasped.*lifted, near",
        ),
        (lambda: make_reward_machine("fold_laundry"), "fold_laundry.*lift, stack"),
        (lambda: make_reward_machine("lift", mode="dense"), "mode.*sparse, distance.*'dense'"),
        (lambda: make_reward_machine("lift", grace=-1), "grace"),
        (lambda: make_reward_machine("lift", gamma=1.5), "gamma"),
        (lambda: make_reward_machine("lift", terminal_reward=float("nan")), "finite"),
        (lambda: goal_graph([], ordered=True), "at least one"),
        (lambda: goal_graph([f"g{i}" for i in range(9)], ordered=False), "too many"),
    ],
)
def test_mistakes(make, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_settings_report_everything_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        MachineSettings(mode="x", order="y", gamma=2)
    assert len(error.value.problems) == 3


def test_graphs_know_their_propositions() -> None:
    assert make_reward_machine("stack").graph.propositions == (GRASPED, LIFTED, ALIGNED, STACKED)
    assert set(make_reward_machine("wipe").graph.propositions) == {"collision", "contact", "w25", "w50", "w100"}
    assert compiled_graph(compile_ltlf("G(!c) & F d")).failure == {"reject"}
    assert chain_graph(["x"]).max_distance == 1
