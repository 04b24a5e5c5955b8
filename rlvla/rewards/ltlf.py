"""Linear temporal logic on finite traces (LTLf): parser and compiler to minimal complete DFAs by formula progression.

De Giacomo and Vardi, "Linear Temporal Logic and Linear Dynamic Logic on Finite Traces", IJCAI 2013. A trace has at
least one letter.

The parser returns the negation normal form as nested tuples: `("true",)`, `("false",)`, `("atom", name)`,
`("not_atom", name)`, `("and", f, g)`, `("or", f, g)`, `("next", f)`, `("weak_next", f)`, `("until", f, g)`,
`("release", f, g)`.

The compiler represents the formula that remains after a letter as a disjunction of conjunctions of *obligations* on the
rest of the trace: `(True, f)`, "the rest is not empty and f holds on it", and `(False, f)`, "the rest is empty or f
holds on it". Both levels are sets with absorption, so there are finitely many of them.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from rlvla.utils.errors import ConfigError

Node = TypeVar("Node", bound=Hashable)
Formula = tuple[Any, ...]
TRUE: Formula = ("true",)
FALSE: Formula = ("false",)
MAX_PROPOSITIONS = 12  # a DFA has an edge for each of the 2^n letters
MAX_EDGES = 1 << 20  # about ten seconds of compilation


_TOKEN = re.compile(r"\s*(?:(<->|->|[!&|()])|([A-Za-z_][A-Za-z0-9_]*))")
_UNARY = ("!", "X", "WX", "F", "G")
_RESERVED = {"X", "WX", "F", "G", "U", "R"}
_CONSTANTS = {"true": TRUE, "false": FALSE}


class FormulaError(ConfigError):
    """A formula is invalid; the message marks the position with a caret."""

    def __init__(self, formula: str, position: int, problem: str):
        shown = formula.replace("\n", " ").replace("\t", " ")
        super().__init__(f"{problem} at position {position}:\n      {shown}\n      {' ' * position}^")
        self.position = position


@dataclass(frozen=True)
class _Token:
    text: str
    position: int


def _tokens(formula: str) -> list[_Token]:
    tokens, position = [], 0
    end = len(formula.rstrip())
    while position < end:
        match = _TOKEN.match(formula, position)
        if match is None:
            start = position + len(formula[position:]) - len(formula[position:].lstrip())
            raise FormulaError(formula, start, f"{formula[start]!r} is not part of the language")
        text = match[1] or match[2]
        tokens.append(_Token(text, match.end() - len(text)))
        position = match.end()
    return [*tokens, _Token("", len(formula))]


class _Parser:
    """Recursive descent; precedence from low to high: `<->`, `->` (right), `|`, `&`, `U` and `R` (right), unary."""

    def __init__(self, formula: str):
        self._formula = formula
        self._tokens = _tokens(formula)
        self._next = 0

    def parse(self) -> Formula:
        if self._peek().text == "":
            raise FormulaError(self._formula, 0, "the formula is empty")
        try:
            result = self._equivalence()
        except RecursionError:
            raise ConfigError("the formula is nested too deeply to be read") from None
        if self._peek().text:
            raise self._unexpected("an operator or the end")
        return result

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _take(self, *texts: str) -> str | None:
        if self._peek().text in texts:
            self._next += 1
            return self._tokens[self._next - 1].text
        return None

    def _unexpected(self, expected: str) -> FormulaError:
        token = self._peek()
        problem = f"unexpected {token.text!r}" if token.text else "the formula ends too early"
        return FormulaError(self._formula, token.position, f"{problem}, {expected} was expected,")

    def _equivalence(self) -> Formula:
        left = self._implication()
        while self._take("<->"):
            left = ("<->", left, self._implication())
        return left

    def _implication(self) -> Formula:
        left = self._disjunction()
        return ("->", left, self._implication()) if self._take("->") else left

    def _disjunction(self) -> Formula:
        left = self._conjunction()
        while self._take("|"):
            left = ("or", left, self._conjunction())
        return left

    def _conjunction(self) -> Formula:
        left = self._binary_temporal()
        while self._take("&"):
            left = ("and", left, self._binary_temporal())
        return left

    def _binary_temporal(self) -> Formula:
        left = self._unary()
        operator = self._take("U", "R")
        if operator is None:
            return left
        return ("until" if operator == "U" else "release", left, self._binary_temporal())

    def _unary(self) -> Formula:
        operator = self._take(*_UNARY)
        if operator:
            return (operator, self._unary())
        if self._take("("):
            inner = self._equivalence()
            if not self._take(")"):
                raise self._unexpected("')'")
            return inner
        token = self._peek()
        if not re.match(r"[A-Za-z_]", token.text) or token.text in _RESERVED:
            raise self._unexpected("a proposition")
        self._next += 1
        return _CONSTANTS.get(token.text, ("atom", token.text))


_DUALS = {
    "true": "false",
    "false": "true",
    "atom": "not_atom",
    "and": "or",
    "or": "and",
    "X": "weak_next",
    "WX": "next",
    "until": "release",
    "release": "until",
}
_PLAIN = {"X": "next", "WX": "weak_next"}


def _normal_form(f: Formula, negated: bool) -> Formula:
    kind, *operands = f
    if kind == "!":
        return _normal_form(operands[0], not negated)
    if kind == "->":
        return _normal_form(("or", ("!", operands[0]), operands[1]), negated)
    if kind == "<->":
        a, b = operands
        return _normal_form(("or", ("and", a, b), ("and", ("!", a), ("!", b))), negated)
    if kind in ("F", "G"):
        kind, operands = ("until", [TRUE, *operands]) if kind == "F" else ("release", [FALSE, *operands])
    name = _DUALS[kind] if negated else _PLAIN.get(kind, kind)
    if kind == "atom":
        return (name, operands[0])
    return (name, *(_normal_form(operand, negated) for operand in operands))


def parse_ltlf(formula: str) -> Formula:
    """Parse a formula: operators ! & | -> <-> X WX F G U R, parentheses, `true`, `false`, names.

    A name is `[A-Za-z_][A-Za-z0-9_]*`.

    Returns:
        The negation normal form, see the docstring of the module.

    Raises:
        FormulaError: the formula is invalid.
    """
    return _normal_form(_Parser(formula).parse(), False)


def propositions_of(formula: Formula) -> tuple[str, ...]:
    """Propositions of a formula, in order of first appearance."""
    names: dict[str, None] = {}
    todo = [formula]
    while todo:
        kind, *operands = todo.pop()
        if kind in ("atom", "not_atom"):
            names[operands[0]] = None
        else:
            todo.extend(reversed(operands))
    return tuple(names)


_Obligation = tuple[bool, int]  # strong or weak, number of the formula
_Clause = frozenset[_Obligation]
_Clauses = frozenset[_Clause]

_HOLDS: _Clauses = frozenset([frozenset()])
_FAILS: _Clauses = frozenset()


class DFA:
    """A complete deterministic automaton over the letters of some propositions.

    A letter is a set of propositions, numbered by its bits: bit i stands for `propositions[i]`.

    Args:
        propositions: propositions of the alphabet; other names are ignored.
        edges: [num_states, 2^n] int, the successor for each letter.
        accepting: states in which a trace may end.
        initial: the state before the first letter. Whether it is itself accepting says nothing, because a trace has
            at least one letter.
    """

    def __init__(self, propositions: Sequence[str], edges: np.ndarray, accepting: Collection[int], initial: int = 0):
        self.propositions = tuple(propositions)
        self.edges = edges
        self.accepting = frozenset(accepting)
        self.initial = initial
        self._bits = {name: 1 << i for i, name in enumerate(self.propositions)}
        self._distances = shortest_distances({s: self.edge_costs(s) for s in range(len(edges))}, accepting)

    @property
    def num_states(self) -> int:
        """Number of states, the reject sink included."""
        return len(self.edges)

    def letter(self, events: Iterable[str]) -> int:
        """Number of the letter of those propositions."""
        return sum(self._bits.get(name, 0) for name in set(events))

    def step(self, state: int, events: Iterable[str]) -> int:
        """The successor of `state` when exactly `events` hold."""
        return int(self.edges[state, self.letter(events)])

    def accepts(self, trace: Iterable[Iterable[str]]) -> bool:
        """Whether the formula holds on a trace; ValueError for an empty one, on which it has no value."""
        state = None
        for events in trace:
            state = self.step(self.initial if state is None else state, events)
        if state is None:
            raise ValueError("a formula has no value on an empty trace")
        return state in self.accepting

    def distance(self, state: int) -> float:
        """Cost of the cheapest path to an accepting state; infinite if none is reachable.

        An edge costs the number of propositions that must hold in its cheapest letter, at least 1. One letter in which
        everything holds would otherwise make every distance 1.
        """
        return self._distances[state]

    def edge_costs(self, state: int) -> dict[int, float]:
        """Successor -> cost of the edge."""
        costs: dict[int, float] = {}
        for letter, successor in enumerate(self.edges[state].tolist()):
            costs[successor] = min(costs.get(successor, len(self._bits) + 1), max(1, letter.bit_count()))
        return costs


def shortest_distances(costs: Mapping[Node, Mapping[Node, float]], goals: Iterable[Node]) -> dict[Node, float]:
    """Cost of the cheapest path from each node to a goal (Dijkstra on reversed edges); infinite if there is none.

    Args:
        costs: node -> successor -> cost of the edge, not negative; has an entry for every node.
        goals: nodes at distance 0.
    """
    reversed_edges: dict[Node, list[tuple[Node, float]]] = {node: [] for node in costs}
    for node, successors in costs.items():
        for successor, cost in successors.items():
            reversed_edges[successor].append((node, cost))
    distances = dict.fromkeys(costs, math.inf)
    queue: list[tuple[float, Any]] = [(0.0, goal) for goal in goals]
    heapq.heapify(queue)
    while queue:
        distance, node = heapq.heappop(queue)
        if distance >= distances[node]:
            continue
        distances[node] = distance
        for before, cost in reversed_edges[node]:
            heapq.heappush(queue, (distance + cost, before))
    return distances


def compile_ltlf(formula: str) -> DFA:
    """The minimal complete DFA that accepts the non-empty traces on which `formula` holds.

    Operators: ! & | -> <-> X (strong next) WX (weak next) F G U R, parentheses, `true`, `false`.

    Raises:
        FormulaError: the formula cannot be read.
        ConfigError: more than 12 propositions.
    """
    parsed = parse_ltlf(formula)
    names = propositions_of(parsed)
    if len(names) > MAX_PROPOSITIONS:
        raise ConfigError(
            f"the formula has {len(names)} propositions ({', '.join(names)}); at most {MAX_PROPOSITIONS} can be "
            f"compiled, because a state has an edge for each of the 2^n letters"
        )
    edges, accepting, initial_is_free = _progress(parsed, names)
    choices = [accepting, accepting ^ {0}] if initial_is_free else [accepting]
    return min((_minimize(names, edges, chosen) for chosen in choices), key=lambda dfa: dfa.num_states)


def _progress(formula: Formula, names: Sequence[str]) -> tuple[np.ndarray, frozenset[int], bool]:
    """All states reachable from the formula; state 0 is the initial one.

    Returns:
        Edges [states, 2^n], the accepting states, and whether the initial state is never entered again.
    """
    progression = _Progression({name: 1 << i for i, name in enumerate(names)})
    numbers: dict[_Clauses, int] = {frozenset([frozenset([(True, progression.number(formula))])]): 0}
    states = list(numbers)
    rows: list[list[int]] = []
    while len(rows) < len(states):
        row = []
        for letter in range(1 << len(names)):
            after = progression.after(states[len(rows)], letter)
            if after not in numbers:
                numbers[after] = len(states)
                states.append(after)
            row.append(numbers[after])
        rows.append(row)
        if len(states) << len(names) > MAX_EDGES:
            raise ConfigError(
                f"the automaton of the formula needs more than {MAX_EDGES >> len(names)} states over its {len(names)} "
                "propositions, more than can be compiled; split it, or leave propositions out"
            )
    edges = np.array(rows, dtype=np.int64)
    # At the end of the trace "the rest is not empty" is false and "the rest is empty" is true.
    accepting = frozenset(i for i, state in enumerate(states) if any(not any(s for s, _ in c) for c in state))
    return edges, accepting, not (edges == 0).any()


class _Progression:
    """Obligations that remain after a letter; results are cached, because subformulas recur in many states.

    Formulas are interned as numbers, so that equality is cheap.
    """

    def __init__(self, bits: dict[str, int]):
        self._bits = bits
        self._numbers: dict[Formula, int] = {}
        self._nodes: list[Formula] = []  # kind and numbers of the operands, or the name of a proposition
        self._relevant: list[int] = []  # bits of its propositions
        self._cache: dict[tuple[int, int], _Clauses] = {}

    def number(self, f: Formula) -> int:
        """The number of a formula; subformulas are numbered first."""
        kind, *operands = f
        if kind in ("atom", "not_atom"):
            node, relevant = f, self._bits[operands[0]]
        else:
            node, relevant = (kind, *(self.number(operand) for operand in operands)), 0
            for number in node[1:]:
                relevant |= self._relevant[number]
        if node not in self._numbers:
            self._numbers[node] = len(self._nodes)
            self._nodes.append(node)
            self._relevant.append(relevant)
        return self._numbers[node]

    def after(self, state: _Clauses, letter: int) -> _Clauses:
        """The obligations that remain of `state` after the letter."""
        result = _FAILS
        for clause in state:
            left = _HOLDS
            for _, formula in clause:
                left = _and(left, self._expand(formula, letter))
                if not left:
                    break
            result = _or(result, left)
        return result

    def _expand(self, f: int, letter: int) -> _Clauses:
        """Obligations of `f` on the rest of the trace after this letter."""
        key = (f, letter & self._relevant[f])
        if key not in self._cache:
            self._cache[key] = self._expand_uncached(f, letter)
        return self._cache[key]

    def _expand_uncached(self, f: int, letter: int) -> _Clauses:
        kind, *operands = self._nodes[f]
        if kind in ("true", "false"):
            return _HOLDS if kind == "true" else _FAILS
        if kind in ("atom", "not_atom"):
            return _HOLDS if bool(letter & self._bits[operands[0]]) == (kind == "atom") else _FAILS
        if kind in ("next", "weak_next"):
            return self._obligation(kind == "next", operands[0])
        left, right = (self._expand(operand, letter) for operand in operands)
        if kind in ("and", "or"):
            return _and(left, right) if kind == "and" else _or(left, right)
        if kind == "until":
            return _or(right, _and(left, self._obligation(True, f)))
        return _and(right, _or(left, self._obligation(False, f)))

    def _obligation(self, strong: bool, f: int) -> _Clauses:
        if self._nodes[f] == (FALSE if strong else TRUE):
            return _FAILS if strong else _HOLDS
        return frozenset([frozenset([(strong, f)])])


def _or(a: _Clauses, b: _Clauses) -> _Clauses:
    """Union, without the clauses that contain another one."""
    together = a | b
    if len(together) < 2:
        return together
    return frozenset(c for c in together if not any(other < c for other in together))


def _and(a: _Clauses, b: _Clauses) -> _Clauses:
    """Every clause of one joined with every clause of the other."""
    joined = (x | y for x in a for y in b)
    # (False, f) follows from (True, f)
    together = {frozenset(o for o in clause if o[0] or (True, o[1]) not in clause) for clause in joined}
    return frozenset(c for c in together if not any(other < c for other in together))


def _minimize(names: Sequence[str], edges: np.ndarray, accepting: frozenset[int]) -> DFA:
    """Moore's partition refinement; states are renumbered in the order in which they are first reached."""
    block = np.array([int(state in accepting) for state in range(len(edges))])
    count = len(np.unique(block))
    while True:
        signature = np.concatenate([block[:, None], block[edges]], axis=1)
        _, block = np.unique(signature, axis=0, return_inverse=True)
        block = block.reshape(-1)
        if block.max() + 1 == count:
            break
        count = int(block.max()) + 1
    order: dict[int, int] = {int(block[0]): 0}
    representatives = [0]
    for state in representatives:
        for successor in edges[state].tolist():
            if int(block[successor]) not in order:
                order[int(block[successor])] = len(order)
                representatives.append(successor)
    renamed = np.array([order[int(b)] for b in block])
    final = {order[int(block[state])] for state in accepting}
    return DFA(names, renamed[edges[representatives]], final)
