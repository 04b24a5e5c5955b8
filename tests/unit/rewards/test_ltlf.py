"""The compiler against the definition of LTLf, and the automata against what minimality means."""

from __future__ import annotations

import itertools
import math
import random
import time

import numpy as np
import pytest

from rlvla.rewards.ltlf import DFA, FormulaError, compile_ltlf
from rlvla.utils.errors import ConfigError
from tests.support.trace_semantics import holds, random_formula, text_of

A, B, C = (("name", name) for name in "abc")
OPERATORS = [
    A,
    ("!", A),
    ("X", A),
    ("WX", A),
    ("F", A),
    ("G", A),
    ("&", A, B),
    ("|", A, B),
    ("->", A, B),
    ("<->", A, B),
    ("U", A, B),
    ("R", A, B),
    ("X", ("WX", A)),
    ("!", ("X", A)),
    ("!", ("U", A, B)),
    ("G", ("->", A, ("X", B))),
    ("G", ("->", A, ("WX", B))),
    ("G", ("F", A)),
    ("F", ("G", A)),
    ("R", ("U", A, B), ("X", A)),
    ("X", ("true",)),
    ("WX", ("false",)),
]


def letters(names: str) -> list[frozenset[str]]:
    return [frozenset(c) for n in range(len(names) + 1) for c in itertools.combinations(names, n)]


def traces(names: str, longest: int) -> list[list[frozenset[str]]]:
    return [list(t) for n in range(1, longest + 1) for t in itertools.product(letters(names), repeat=n)]


@pytest.mark.parametrize("formula", OPERATORS, ids=text_of)
def test_every_short_trace(formula: tuple) -> None:
    dfa = compile_ltlf(text_of(formula))
    for trace in traces("ab", 5):
        assert dfa.accepts(trace) == holds(formula, trace), trace


def test_random_formulas_on_short_and_long_traces() -> None:
    rng = random.Random(5)
    short = traces("ab", 3)
    for _ in range(150):
        formula = random_formula(rng, "abc", 4)
        dfa = compile_ltlf(text_of(formula))
        for trace in short:
            assert dfa.accepts(trace) == holds(formula, trace), text_of(formula)
        for _ in range(8):
            trace = [frozenset(rng.sample("abc", rng.randrange(4))) for _ in range(rng.randrange(4, 25))]
            assert dfa.accepts(trace) == holds(formula, trace), text_of(formula)


def test_random_automata_are_minimal_and_complete() -> None:
    rng = random.Random(6)
    for _ in range(150):
        dfa = compile_ltlf(text_of(random_formula(rng, "abc", 4)))
        assert dfa.edges.shape == (dfa.num_states, 2 ** len(dfa.propositions))
        assert set(np.unique(dfa.edges)) <= set(range(dfa.num_states))
        assert_minimal(dfa)


def assert_minimal(dfa: DFA) -> None:
    """Every state is reached, and of any two some trace is accepted from one only.

    The initial state is told apart by non-empty traces: before the first letter nothing is accepted or rejected.
    """
    reached = {dfa.initial}
    todo = [dfa.initial]
    while todo:
        for successor in set(dfa.edges[todo.pop()].tolist()) - reached:
            reached.add(successor)
            todo.append(successor)
    assert reached == set(range(dfa.num_states))
    entered_again = (dfa.edges == dfa.initial).any()
    apart = {
        (p, q)
        for p, q in itertools.product(range(dfa.num_states), repeat=2)
        if (p in dfa.accepting) != (q in dfa.accepting) and (entered_again or dfa.initial not in (p, q))
    }
    while True:
        more = {
            (p, q)
            for p, q in itertools.product(range(dfa.num_states), repeat=2)
            if (p, q) not in apart and any((int(a), int(b)) in apart for a, b in zip(dfa.edges[p], dfa.edges[q]))
        }
        if not more:
            break
        apart |= more
    assert len(apart) == dfa.num_states * (dfa.num_states - 1)


@pytest.mark.parametrize(
    ("formula", "states"),
    [
        ("F(grasped & F(lifted & F(aligned & F(stacked))))", 5),
        ("G(!collision) & F(grasped & F(lifted & F(stacked)))", 5),
        ("F a", 2),
        ("G a", 2),
        ("a", 3),
        ("X a", 4),
        ("a | !a", 1),
        ("a & !a", 1),
    ],
)
def test_sizes(formula: str, states: int) -> None:
    assert compile_ltlf(formula).num_states == states


def test_distances_count_propositions() -> None:
    dfa = compile_ltlf("F(grasped & F(lifted & F(aligned & F(stacked))))")
    assert dfa.step(dfa.initial, {"grasped", "lifted", "aligned", "stacked"}) in dfa.accepting
    walked, state = [], dfa.initial
    for event in ("grasped", "lifted", "aligned", "stacked"):
        walked.append(dfa.distance(state))
        state = dfa.step(state, {event})
    assert [*walked, dfa.distance(state)] == [4, 3, 2, 1, 0]
    dfa = compile_ltlf("G(!collision) & F(done)")
    assert math.isinf(dfa.distance(dfa.step(dfa.initial, {"collision"})))
    assert compile_ltlf("F(a & b) | F(c & X(true))").distance(0) == 2


def test_names_that_do_not_matter_are_ignored() -> None:
    dfa = compile_ltlf("F done_1")
    assert dfa.accepts([{"x"}, {"done_1", "y"}]) and not dfa.accepts([{"done"}])


def test_an_empty_trace_has_no_value() -> None:
    with pytest.raises(ValueError, match="empty"):
        compile_ltlf("G a").accepts([])


def test_eight_propositions_in_a_chain_compile_in_a_second() -> None:
    formula = "true"
    for i in reversed(range(8)):
        formula = f"F(p{i} & {formula})"
    start = time.process_time()
    assert compile_ltlf(formula).num_states == 9
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("a -> b -> c", "a -> (b -> c)"),
        ("a U b U c", "a U (b U c)"),
        ("! a & b", "(!a) & b"),
        ("a | b & c", "a | (b & c)"),
        ("F a & b", "(F a) & b"),
        ("a & b U c", "a & (b U c)"),
        ("a <-> b -> c", "a <-> (b -> c)"),
        ("FX & G_", "(FX) & (G_)"),
    ],
)
def test_precedence(text: str, same: str) -> None:
    a, b = compile_ltlf(text), compile_ltlf(same)
    assert a.propositions == b.propositions and (a.edges == b.edges).all() and a.accepting == b.accepting


@pytest.mark.parametrize(
    ("text", "position"),
    [("F(a & ", 6), ("a b", 2), ("a & )", 4), ("a $ b", 2), ("", 0), ("  ", 0), ("X", 1), ("(a", 2), ("a U", 3)],
)
def test_mistakes_are_shown_with_a_caret(text: str, position: int) -> None:
    with pytest.raises(FormulaError) as error:
        compile_ltlf(text)
    _, shown, caret = str(error.value).split("\n")
    assert error.value.position == position and f"at position {position}" in str(error.value)
    assert caret.index("^") - len(shown) + len(text) == position


def test_limits() -> None:
    with pytest.raises(ConfigError, match="13 propositions"):
        compile_ltlf(" & ".join(f"p{i}" for i in range(13)))
    with pytest.raises(ConfigError, match="more than 256 states"):
        compile_ltlf(" & ".join(f"F p{i}" for i in range(12)))
    with pytest.raises(ConfigError, match="too deeply"):
        compile_ltlf("(" * 5000 + "a" + ")" * 5000)
