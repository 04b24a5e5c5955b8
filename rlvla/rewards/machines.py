"""Reward machines: eight predefined ones, and machines for LTLf formulas and goal conjunctions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlvla.rewards.ltlf import compile_ltlf
from rlvla.rewards.reward_machine import (
    MachineGraph,
    MachineSettings,
    RewardMachine,
    chain_graph,
    compiled_graph,
    default_grace,
    guarded_graph,
)
from rlvla.utils.errors import ConfigError

if TYPE_CHECKING:
    from rlvla.envs.base import TaskSpec

DEFAULT_CONTROL_FREQ = 20.0
PENALTIES = (0.1, 0.15, 0.2)  # of fallbacks from u1, u2, u3
_MOST_STATES = 2**8  # of a machine of unordered goals: eight goals of one stage
GOAL_STAGES = ("predicates", "manipulation")


def _chain(*propositions: str, needs: str = "grasped", states: int) -> Callable[[], MachineGraph]:
    """A chain whose first `states` stages fall back when `needs` is lost."""
    return lambda: chain_graph(propositions, {f"u{i + 1}": (needs, PENALTIES[i]) for i in range(states)})


def _door(latch: bool = True) -> MachineGraph:
    return chain_graph(["reached", *["unlatched"] * latch, "opened"], {"u1": ("reached", 0.05)})


def _wipe() -> MachineGraph:
    """G(!collision) & F(contact & F(w25 & F(w50 & F(w100)))), one stage per step."""
    stages = ["contact", "w25", "w50", "w100"]
    edges = {
        f"u{i}": [("collision", "reject", 0.0), (f"!collision & {name}", f"u{i + 1}", 1.0)]
        for i, name in enumerate(stages)
    }
    return guarded_graph(edges, ["u4"], ["reject"])


def _cleanup() -> MachineGraph:
    """F(grasped & F in_bin) and F pushed in any order, then both at once.

    u0..u2: the object is untouched, grasped, in the bin; u3..u5: the same after the push; u6: both hold.
    """
    edges = {
        "u0": [("grasped", "u1", 1.0), ("pushed", "u3", 1.0)],
        "u1": [("in_bin", "u2", 1.0), ("pushed", "u4", 1.0)],
        "u2": [("pushed", "u5", 1.0)],
        "u3": [("grasped", "u4", 1.0)],
        "u4": [("in_bin", "u5", 1.0)],
        "u5": [("in_bin & pushed", "u6", 1.0)],
    }
    return guarded_graph(edges, ["u6"])


_GRAPHS: dict[str, Callable[[], MachineGraph]] = {
    "lift": _chain("grasped", "lifted", states=1),
    "stack": _chain("cubeA_grasped", "cubeA_lifted", "cubes_aligned", "stacked", needs="cubeA_grasped", states=3),
    "door": _door,
    "pick_place": _chain("grasped", "lifted", "above_bin", "placed", states=3),
    "wipe": _wipe,
    "nut": _chain("grasped", "lifted", "aligned", "placed", states=3),
    "cleanup": _cleanup,
    "peg_in_hole": lambda: chain_graph(
        ["grasped", "aligned", "inserted"], {"u1": ("grasped", 0.15), "u2": ("grasped", 0.15)}
    ),
}
TASKS = tuple(_GRAPHS)


def machine_graph(task: str, *, latch: bool = True) -> MachineGraph:
    """Graph of a predefined machine.

    Args:
        task: lift, stack, door, pick_place, wipe, nut, cleanup or peg_in_hole.
        latch: `door` only: the door has a latch (robosuite's default), which must be turned before it opens.

    Raises:
        ConfigError: unknown task.
    """
    if task not in _GRAPHS:
        raise ConfigError(f"there is no reward machine for task {task!r}; there are: {', '.join(TASKS)}")
    return _door(latch) if task == "door" else _GRAPHS[task]()


def make_reward_machine(
    task: str,
    *,
    mode: str = "hybrid",
    gamma: float = 0.99,
    order: str = "transition_first",
    advance: str = "one",
    grace: int | None = None,
    credit: str = "first_visit",
    transition_reward: float = 0.25,
    terminal_reward: float = 1.0,
    potential_scale: float = 0.1,
    after_success: str = "terminate",
    control_freq: float = DEFAULT_CONTROL_FREQ,
    latch: bool = True,
) -> RewardMachine:
    """Create a predefined machine; arguments as in `MachineSettings`.

    Args:
        task: lift, stack, door, pick_place, wipe, nut, cleanup or peg_in_hole.
        mode: sparse, distance, progression or hybrid.
        gamma: discount of the shaping.
        order: transition_first or validate_first.
        advance: one or cascade.
        grace: consecutive violations that cause a fallback; by default a quarter of a second at `control_freq`.
        credit: first_visit, every_edge or signed.
        transition_reward: reward for each edge of a chain.
        terminal_reward: one-time reward at the goal.
        potential_scale: weight of the shaping.
        after_success: terminate or run_on.
        control_freq: environment steps per simulated second.
        latch: `door` only: the door has a latch (robosuite's default).

    Raises:
        ConfigError: unknown task or setting.
    """
    settings = MachineSettings(
        mode=mode,
        gamma=gamma,
        order=order,
        advance=advance,
        grace=default_grace(control_freq) if grace is None else grace,
        credit=credit,
        transition_reward=transition_reward,
        terminal_reward=terminal_reward,
        potential_scale=potential_scale,
        after_success=after_success,
    )
    return RewardMachine(machine_graph(task, latch=latch), settings)


def formula_graph(formula: str, available: Sequence[str] | None = None) -> MachineGraph:
    """Create the machine of an LTLf formula.

    Args:
        formula: see `compile_ltlf`.
        available: propositions that the environment provides; None skips the check.

    Raises:
        ConfigError: invalid formula, unknown proposition, or unreachable goal.
    """
    graph = compiled_graph(compile_ltlf(formula))
    check_propositions(graph, available)
    return graph


def check_propositions(graph: MachineGraph, available: Sequence[str] | None) -> None:
    """ConfigError if the environment does not provide a proposition of the machine; None skips the check."""
    missing = [name for name in graph.propositions if available is not None and name not in available]
    if missing:
        names = ", ".join(sorted(available or ())) or "none"
        raise ConfigError(f"unknown proposition {', '.join(missing)}; the environment registers: {names}")


def goal_graph(goals: Sequence[str | Sequence[str]], *, ordered: bool) -> MachineGraph:
    """Create the machine of a conjunction of goals, such as the predicates of a LIBERO task.

    The last edge requires all goals at once.

    Args:
        goals: for each goal its proposition, or the propositions that lead to it, the goal's own last.
        ordered: whether goals must be reached in the listed order.

    Raises:
        ConfigError: no goal, or too many unordered goals.
    """
    chains = list(dict.fromkeys((goal,) if isinstance(goal, str) else tuple(goal) for goal in goals))
    if not chains:
        raise ConfigError("a goal machine needs at least one goal")
    if ordered:
        return _ordered_goals(chains)
    if math.prod(len(chain) + 1 for chain in chains) > _MOST_STATES:
        raise ConfigError(
            f"{len(chains)} goals in any order are too many: the machine would have more than {_MOST_STATES} states"
        )
    return _unordered_goals(chains)


def _all_goals(chains: Sequence[tuple[str, ...]]) -> str:
    return " & ".join(dict.fromkeys(chain[-1] for chain in chains))


def _next_stages(chain: tuple[str, ...], left: int) -> list[tuple[str, int]]:
    """(proposition, number of stages advanced) with `left` stages to go: to the goal, or to the next stage."""
    to_goal = [(chain[-1], left)] if left > 1 else []
    return to_goal + ([(chain[-left], 1)] if left else [])


def _ordered_goals(chains: Sequence[tuple[str, ...]]) -> MachineGraph:
    """One state per stage; a goal that holds early skips its remaining stages."""
    ends = list(itertools.accumulate(map(len, chains)))
    last = ends[-1]
    edges: dict[str, list[tuple[str, str, float]]] = {}
    for chain, end in zip(chains, ends):
        for left in range(len(chain), 0, -1):
            number = end - left
            outgoing = [(guard, stages) for guard, stages in _next_stages(chain, left) if number + stages < last]
            if len(chain) > 1 or number + 1 == last:
                outgoing.insert(0, (_all_goals(chains), last - number))
            edges[f"u{number}"] = [(guard, f"u{number + stages}", float(stages)) for guard, stages in outgoing]
    return guarded_graph(edges, [f"u{last}"])


def _unordered_goals(chains: Sequence[tuple[str, ...]]) -> MachineGraph:
    """The digits of a state's number count the stages reached of each goal, lowest digit first.

    A goal that holds early skips its remaining stages.
    """
    sizes = [len(chain) + 1 for chain in chains]
    places = [math.prod(sizes[:i]) for i in range(len(sizes))]
    full, staged = math.prod(sizes) - 1, max(sizes) > 2
    edges: dict[str, list[tuple[str, str, float]]] = {}
    for number in range(full):
        left = [len(chain) - number // place % size for chain, place, size in zip(chains, places, sizes)]
        edges[f"u{number}"] = [
            (guard, f"u{number + place * stages}", float(stages))
            for chain, place, open_stages in zip(chains, places, left)
            for guard, stages in _next_stages(chain, open_stages)
            if number + place * stages < full
        ]
        if staged or sum(left) == 1:
            edges[f"u{number}"].insert(0, (_all_goals(chains), f"u{full}", float(sum(left))))
    return guarded_graph(edges, [f"u{full}"])


def task_graph(task: TaskSpec, *, ordered: bool = False, stages: str = "predicates") -> MachineGraph:
    """Create the machine of a task, as given by `TaskSpec.machine`.

    Args:
        task: the task; `chain` uses its propositions, `goals` its goals (in LIBERO, the predicates of its BDDL goal).
        ordered: whether goals must be reached in the listed order.
        stages: "predicates": one stage per goal; "manipulation": all stages of `TaskSpec.goals`.

    Raises:
        ConfigError: the task has no machine, or it is neither a known name nor a valid formula.
    """
    if task.machine is None:
        raise ConfigError(
            f"no reward machine belongs to {task.suite} task {task.name}; name one with --rm_machine, or give a goal "
            "with --rm_formula"
        )
    if task.machine == "chain":
        return chain_graph(task.propositions)
    if task.machine == "goals":
        goals = task.goals or tuple((name,) for name in task.propositions)
        return goal_graph(goals if stages == "manipulation" else [goal[-1] for goal in goals], ordered=ordered)
    return machine_graph(task.machine) if task.machine in _GRAPHS else formula_graph(task.machine)
