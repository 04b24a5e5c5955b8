"""The static part of a reward machine: states, guarded edges, validators, distances."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlvla.rewards.ltlf import DFA
from rlvla.rewards.ltlf_syntax import Formula, parse_ltlf, propositions_of
from rlvla.utils.errors import ConfigError


class Guard:
    """A boolean formula over propositions: names, ! & | -> <-> and parentheses.

    Raises:
        ConfigError: invalid formula, or one with temporal operators (X WX F G U R).
    """

    def __init__(self, text: str):
        self.text = text
        self._formula = parse_ltlf(text)
        self.propositions = propositions_of(self._formula)
        self._check(self._formula)

    def holds(self, events: Iterable[str]) -> bool:
        """Whether the formula is true if exactly `events` hold."""
        return _evaluate(self._formula, frozenset(events))

    def _check(self, f: Formula) -> None:
        if f[0] in ("next", "weak_next", "until", "release"):
            raise ConfigError(f"the guard {self.text!r} looks beyond one step; use ! & | -> <-> and names only")
        if f[0] in ("and", "or"):
            self._check(f[1])
            self._check(f[2])


def _evaluate(f: Formula, events: frozenset[str]) -> bool:
    kind = f[0]
    if kind in ("true", "false"):
        return kind == "true"
    if kind in ("atom", "not_atom"):
        return (f[1] in events) == (kind == "atom")
    left, right = _evaluate(f[1], events), _evaluate(f[2], events)
    return (left and right) if kind == "and" else (left or right)


@dataclass(frozen=True)
class Edge:
    """A transition out of a state.

    Attributes:
        target: target state.
        label: human-readable guard.
        progress: steps of progress; the transition reward is multiplied by this.
    """

    target: str
    label: str
    progress: float


@dataclass(frozen=True)
class Validator:
    """A condition that must keep holding in a state; otherwise the machine falls back.

    Attributes:
        needs: boolean formula over propositions.
        penalty: penalty for each fallback, not negative.
        target: state to fall back to.
    """

    needs: Guard
    penalty: float
    target: str


@dataclass(frozen=True)
class MachineGraph:
    """The static part of a reward machine.

    Attributes:
        states: names in order of appearance; the first is the initial one.
        edges: state -> (guard, edge) pairs in order of priority. Empty if `automaton` is given.
        validators: state -> its validator.
        success: terminal goal states.
        failure: terminal states from which the goal is unreachable.
        propositions: propositions used by the machine.
        automaton: automaton of a formula; its state i is `states[i]`.
        distances: state -> cost of the shortest path to the goal, infinite in failure states.
        potentials: state -> potential in [-1, 0]; None derives it from the distances.
    """

    states: tuple[str, ...]
    edges: Mapping[str, Sequence[tuple[Guard, Edge]]]
    validators: Mapping[str, Validator]
    success: frozenset[str]
    failure: frozenset[str]
    propositions: tuple[str, ...]
    distances: Mapping[str, float]
    automaton: DFA | None = None
    potentials: Mapping[str, float] | None = None

    def potential(self, state: str) -> float:
        """Closeness to the goal in [-1, 0]: 0 at the goal, -1 in a failure state; else -distance / largest distance."""
        if self.potentials is not None:
            return self.potentials[state]
        return -min(1.0, self.distances[state] / self.max_distance)

    def next_edge(self, state: str, events: frozenset[str]) -> Edge | None:
        """The edge taken from `state` if `events` hold, or None to stay."""
        if self.automaton is None:
            return next((edge for guard, edge in self.edges[state] if guard.holds(events)), None)
        number = self.states.index(state)
        target = self.automaton.step(number, events)
        if target == number:
            return None
        name, shown = self.states[target], sorted(set(events) & set(self.propositions))
        return Edge(name, " & ".join(shown) or "nothing", self._gain(state, name))

    def _gain(self, state: str, target: str) -> float:
        gain = self.distances[state] - self.distances[target]
        return gain if math.isfinite(gain) else 0.0

    @property
    def max_distance(self) -> float:
        """The largest finite distance of any state."""
        return max((d for d in self.distances.values() if math.isfinite(d)), default=0.0)

    @property
    def stages(self) -> tuple[str, ...]:
        """The states on the way: neither the initial one nor terminal."""
        return tuple(state for state in self.states[1:] if state not in self.success | self.failure)

    def towards(self, goal: str) -> MachineGraph:
        """The machine of the shorter task that ends in the state `goal`, its only success.

        Edges and validators are the same; potentials follow from the distances to `goal`, even if they were given.
        """
        if self.automaton is None:
            costs = _edge_costs(self.edges)
        else:
            dfa, names = self.automaton, self.states
            costs = {n: {names[t]: float(c) for t, c in dfa.edge_costs(i).items()} for i, n in enumerate(names)}
        distances = shortest_distances(self.states, costs, [goal])
        return replace(self, success=frozenset([goal]), distances=distances, potentials=None)

    def check(self) -> MachineGraph:
        """Return self; ConfigError if the goal is unreachable or already reached in the initial state."""
        distance = self.distances[self.states[0]]
        if not math.isfinite(distance):
            raise ConfigError(
                "no terminal state of the machine can be reached from its initial state: the goal contradicts itself"
            )
        if distance == 0:
            raise ConfigError(
                "the machine accepts before anything has happened, so that there is nothing to reach; a formula needs "
                "a goal, e.g. G(!collision) & F(done)"
            )
        return self


def guarded_graph(
    edges: Mapping[str, Sequence[tuple[str, str, float]]],
    success: Iterable[str],
    failure: Iterable[str] = (),
    validators: Mapping[str, tuple[str, float]] | None = None,
) -> MachineGraph:
    """Create a machine from explicit edges.

    Args:
        edges: state -> (guard, target, steps of progress) in order of priority; the first state is the initial one. An
            edge of several steps is as long as they are.
        success: terminal goal states.
        failure: terminal states from which the goal is unreachable.
        validators: state -> (guard that must hold, penalty); all fall back to the initial state.
    """
    goal, failed = frozenset(success), frozenset(failure)
    states = tuple(dict.fromkeys([*edges, *goal, *failed]))
    guarded = {
        state: [(Guard(guard), Edge(target, guard, progress)) for guard, target, progress in edges.get(state, ())]
        for state in states
    }
    kept = {
        state: Validator(Guard(needs), penalty, states[0]) for state, (needs, penalty) in (validators or {}).items()
    }
    names: dict[str, None] = {}
    for outgoing in guarded.values():
        names.update(dict.fromkeys(name for guard, _ in outgoing for name in guard.propositions))
    for validator in kept.values():
        names.update(dict.fromkeys(validator.needs.propositions))
    return MachineGraph(
        states, guarded, kept, goal, failed, tuple(names), shortest_distances(states, _edge_costs(guarded), goal)
    ).check()


def _edge_costs(edges: Mapping[str, Sequence[tuple[Guard, Edge]]]) -> dict[str, dict[str, float]]:
    return {state: {e.target: max(1.0, e.progress) for _, e in outgoing} for state, outgoing in edges.items()}


def chain_graph(propositions: Sequence[str], validators: Mapping[str, tuple[str, float]] | None = None) -> MachineGraph:
    """u0 -> u1 -> ... in the order of the propositions; the last state is the goal."""
    edges = {f"u{i}": [(name, f"u{i + 1}", 1.0)] for i, name in enumerate(propositions)}
    return guarded_graph(edges, [f"u{len(propositions)}"], validators=validators)


def compiled_graph(dfa: DFA) -> MachineGraph:
    """Create a machine from a formula's automaton; accepting states are the goal, the reject sink is failure.

    u0 is the initial state, the reject sink is called `reject`.
    """
    failed = [s for s in range(dfa.num_states) if math.isinf(dfa.distance(s))]
    names = [f"u{s}" for s in range(dfa.num_states)]
    if dfa.initial not in failed:
        remaining = iter(range(dfa.num_states))
        names = ["reject" if s in failed else f"u{next(remaining)}" for s in range(dfa.num_states)]
    return MachineGraph(
        states=tuple(names),
        edges={},
        validators={},
        success=frozenset(names[s] for s in dfa.accepting),
        failure=frozenset(names[s] for s in failed),
        propositions=dfa.propositions,
        distances={names[s]: dfa.distance(s) for s in range(dfa.num_states)},
        automaton=dfa,
    ).check()


def shortest_distances(
    states: Sequence[str], costs: Mapping[str, Mapping[str, float]], goals: Iterable[str]
) -> dict[str, float]:
    """State -> cost of the cheapest path to a goal (Dijkstra on reversed edges); infinite if there is none."""
    distances = dict.fromkeys(states, math.inf)
    queue = [(0.0, goal) for goal in sorted(goals)]
    while queue:
        distance, state = heapq.heappop(queue)
        if distance >= distances[state]:
            continue
        distances[state] = distance
        for before, outgoing in costs.items():
            if state in outgoing:
                heapq.heappush(queue, (distance + outgoing[state], before))
    return distances
