"""Reward machines: finite-state machines over propositions that reward progress through a task.

Icarte et al., "Reward Machines: Exploiting Reward Function Structure in Reinforcement Learning", JAIR 2022. Shaping by
a potential of the machine's state: Ng, Harada and Russell, "Policy invariance under reward transformations", ICML 1999.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from rlvla.rewards.ltlf import DFA, Formula, parse_ltlf, propositions_of, shortest_distances
from rlvla.utils.errors import ConfigError

MODES = ("sparse", "distance", "progression", "hybrid")
ORDERS = ("transition_first", "validate_first")
ADVANCES = ("one", "cascade")
CREDITS = ("first_visit", "every_edge", "signed")
AFTER_SUCCESS = ("terminate", "run_on")
HOLD_SECONDS = 0.25  # tolerated duration of a violation; equals the time that success must hold
SUCCESS_EVENT = "success"


class Guard:
    """A boolean formula over propositions: names, ! & | -> <-> and parentheses.

    Raises:
        ConfigError: invalid formula, or one with temporal operators (X WX F G U R).
    """

    def __init__(self, text: str):
        self.text = text
        self._formula = parse_ltlf(text)
        self.propositions = propositions_of(self._formula)
        if _has_temporal_operator(self._formula):
            raise ConfigError(f"the guard {text!r} looks beyond one step; use ! & | -> <-> and names only")

    def holds(self, events: Iterable[str]) -> bool:
        """Whether the formula is true if exactly `events` hold."""
        return _evaluate(self._formula, frozenset(events))


def _has_temporal_operator(f: Formula) -> bool:
    if f[0] in ("next", "weak_next", "until", "release"):
        return True
    return f[0] in ("and", "or") and any(map(_has_temporal_operator, f[1:]))


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
        gain = self.distances[state] - self.distances[name]
        return Edge(name, " & ".join(shown) or "nothing", gain if math.isfinite(gain) else 0.0)

    def next_propositions(self, state: str) -> tuple[str, ...]:
        """The fewest propositions that, if only they hold, lead from `state` to the nearest state closer to the goal.

        Of several such sets the first in the order of the guards; () if the goal is reached or unreachable, and where
        only the absence of propositions leads on.
        """
        if self.distances[state] in (0, math.inf):
            return ()
        candidates = self.propositions
        if self.automaton is None:
            guards = [guard for guard, edge in self.edges[state] if self.distances[edge.target] < self.distances[state]]
            candidates = tuple(dict.fromkeys(name for guard in guards for name in guard.propositions))
        for size in range(len(candidates) + 1):
            gains: dict[tuple[str, ...], float] = {}
            for names in itertools.combinations(candidates, size):
                edge = self.next_edge(state, frozenset(names))
                gain = 0.0 if edge is None else self.distances[state] - self.distances[edge.target]
                if gain > 0:
                    gains[names] = gain
            if gains:
                return min(gains, key=lambda names: gains[names])
        return ()

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
            costs = {n: {names[t]: c for t, c in dfa.edge_costs(i).items()} for i, n in enumerate(names)}
        distances = shortest_distances(costs, [goal])
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
        states, guarded, kept, goal, failed, tuple(names), shortest_distances(_edge_costs(guarded), goal)
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


class Transition(TypedDict):
    """Result of a step.

    Attributes:
        state: state after the step.
        regressed: the step increased the distance to the goal.
        penalty: penalty for falling back in this step, not negative.
        shaping: F = gamma phi(u') - phi(u), before `potential_scale`.
        terminal: whether the state is terminal.
    """

    state: str
    regressed: bool
    penalty: float
    shaping: float
    terminal: bool


@dataclass(frozen=True)
class MachineSettings:
    """Reward settings of a machine.

    Attributes:
        mode: "sparse": terminal reward only; "distance": -distance / largest distance of the new state (changes the
            optimal policy); "progression": transition rewards, terminal reward and penalties; "hybrid": progression
            plus shaping.
        gamma: discount of the shaping, equal to that of the learner.
        order: whether the transition or the validator comes first within a step.
        advance: "one" edge per step, or "cascade": as many as the propositions allow.
        grace: consecutive violations that cause a fallback (0 is the same as 1).
        credit: "first_visit": an edge is rewarded once per episode; "every_edge": every time, which can be exploited;
            "signed": every time, and a fallback revokes the credit paid since its target was left.
        transition_reward: reward for one step of progress.
        terminal_reward: one-time reward at the goal.
        potential_scale: weight of the shaping.
        after_success: "terminate": the goal state is absorbing; "run_on": losing success for `grace` steps falls back.
        validation: whether the graph's validators are checked.
    """

    mode: str = "hybrid"
    gamma: float = 0.99
    order: str = "transition_first"
    advance: str = "one"
    grace: int = 5
    credit: str = "first_visit"
    transition_reward: float = 0.25
    terminal_reward: float = 1.0
    potential_scale: float = 0.1
    after_success: str = "terminate"
    validation: bool = True

    def __post_init__(self):
        choices = {
            "mode": MODES,
            "order": ORDERS,
            "advance": ADVANCES,
            "credit": CREDITS,
            "after_success": AFTER_SUCCESS,
        }
        problems = [
            f"{name} of a reward machine must be one of {', '.join(values)}, not {getattr(self, name)!r}"
            for name, values in choices.items()
            if getattr(self, name) not in values
        ]
        if not 0 <= self.gamma <= 1:
            problems.append(f"gamma of a reward machine must lie in [0, 1], not {self.gamma}")
        if self.grace < 0:
            problems.append(f"grace of a reward machine counts steps and cannot be {self.grace}")
        for name in ("transition_reward", "terminal_reward", "potential_scale"):
            if not math.isfinite(getattr(self, name)):
                problems.append(f"{name} of a reward machine must be a finite number, not {getattr(self, name)}")
        if problems:
            raise ConfigError(problems)


def default_grace(control_freq: float) -> int:
    """A quarter of a second in environment steps: 5 at 20 Hz."""
    return math.ceil(HOLD_SECONDS * control_freq)


class RewardMachine:
    """A graph with a current state; `reset` starts a new episode.

    Args:
        graph: states, edges, validators.
        settings: reward settings.
    """

    def __init__(self, graph: MachineGraph, settings: MachineSettings | None = None):
        self.graph = graph
        self.settings = settings or MachineSettings()
        self._terminals = graph.success | graph.failure
        self._validators = dict(graph.validators) if self.settings.validation else {}
        if self.settings.after_success == "run_on":
            keep_success = Validator(Guard(SUCCESS_EVENT), 0.0, graph.states[0])
            self._validators |= dict.fromkeys(graph.success, keep_success)
        self.reset()

    def reset(self) -> str:
        """Start an episode; returns the initial state."""
        self.state = self.graph.states[0]
        self.regressions = 0
        self._violations = 0
        self._taken: set[tuple[str, str]] = set()
        self._bonus_paid = False
        self._credit = 0.0  # paid so far and not revoked
        self._credit_at: dict[str, float] = {self.state: 0.0}  # credit when a state was last entered
        return self.state

    @property
    def is_terminal(self) -> bool:
        """Whether the goal is reached or unreachable."""
        return self.state in self._terminals

    @property
    def failed(self) -> bool:
        """Whether the goal is unreachable."""
        return self.state in self.graph.failure

    @property
    def progress(self) -> float:
        """1 + potential, in [0, 1]."""
        return 1.0 + self.graph.potential(self.state)

    @property
    def entered(self) -> tuple[str, ...]:
        """The initial state, and the states that edges have led to, in the order in which they did so first."""
        return tuple(self._credit_at)

    def distance(self, state: str) -> float:
        """Cost of the shortest path from a state to the goal; infinite in a failure state."""
        return self.graph.distances[state]

    def potential(self, state: str) -> float:
        """See `MachineGraph.potential`."""
        return self.graph.potential(state)

    def step(self, events: Collection[str], *, terminated: bool = False) -> tuple[float, Transition]:
        """Advance by one environment step.

        Args:
            events: propositions that hold after the step.
            terminated: the environment terminated the episode with this step. The potential after it is then 0 in any
                state but a failure state, so that shaping sums to the same value for all such episodes. Truncated
                episodes keep the potential of their state.

        Returns:
            The reward and a description of the step.
        """
        before, true_events = self.state, frozenset(events)
        if before in self.graph.failure:
            return 0.0, Transition(state=before, regressed=False, penalty=0.0, shaping=0.0, terminal=True)
        credit, penalty = self._move(true_events)
        after = self.state
        potential = self.potential(after)
        if terminated and after not in self.graph.failure:
            potential = 0.0
        shaping = self.settings.gamma * potential - self.potential(before)
        bonus = 0.0
        if after in self.graph.success and not self._bonus_paid:
            self._bonus_paid = True
            bonus = self.settings.terminal_reward
        regressed = self.distance(after) > self.distance(before)
        self.regressions += regressed
        info = Transition(
            state=after,
            regressed=regressed,
            penalty=penalty,
            shaping=shaping,
            terminal=after in self._terminals,
        )
        return self._pay(after, credit, shaping, bonus, penalty), info

    def _pay(self, state: str, credit: float, shaping: float, bonus: float, penalty: float) -> float:
        mode = self.settings.mode
        if mode == "sparse":
            return bonus
        if mode == "distance":
            return self.potential(state)
        reward = credit + bonus - penalty
        return reward + self.settings.potential_scale * shaping if mode == "hybrid" else reward

    def _move(self, events: frozenset[str]) -> tuple[float, float]:
        """Transition and validate in the configured order; returns transition credit and penalty."""
        if self.settings.order == "validate_first":
            penalty = self._validate(events)
            if penalty is not None:
                return penalty
            return self._advance(events)[1], 0.0
        moved, credit = self._advance(events)
        if moved:
            return credit, 0.0
        return self._validate(events) or (0.0, 0.0)

    def _advance(self, events: frozenset[str]) -> tuple[bool, float]:
        """Follow edges whose guards hold; returns whether any was taken, and the credit."""
        credit, visited = 0.0, {self.state}
        moved = False
        while self.state not in self._terminals:
            edge = self.graph.next_edge(self.state, events)
            if edge is None or (moved and edge.target in visited):
                break
            credit += self._take(edge)
            moved = True
            visited.add(self.state)
            if self.settings.advance == "one" or self.graph.automaton is not None:
                break
        if moved:
            self._violations = 0
        return moved, credit

    def _take(self, edge: Edge) -> float:
        key = (self.state, edge.target)
        reward = self.settings.transition_reward * edge.progress
        if self.settings.credit != "signed" and edge.progress < 0:
            reward = 0.0
        if self.settings.credit == "first_visit" and key in self._taken:
            reward = 0.0
        self._taken.add(key)
        self._credit += reward
        self.state = edge.target
        self._credit_at[self.state] = self._credit
        return reward

    def _validate(self, events: frozenset[str]) -> tuple[float, float] | None:
        """Count a violation; returns (revoked credit, penalty) if it causes a fallback, else None."""
        validator = self._validators.get(self.state)
        if validator is None or validator.needs.holds(events):
            self._violations = 0
            return None
        self._violations += 1
        if self._violations < self.settings.grace:
            return None
        self._violations = 0
        self.state = validator.target
        if self.settings.credit != "signed":
            return 0.0, validator.penalty
        revoked = self._credit_at.get(self.state, 0.0) - self._credit
        self._credit += revoked
        return revoked, validator.penalty
