"""Parsing of LTLf formulas to negation normal form.

A formula is a nested tuple: `("true",)`, `("false",)`, `("atom", name)`, `("not_atom", name)`, `("and", f, g)`,
`("or", f, g)`, `("next", f)`, `("weak_next", f)`, `("until", f, g)`, `("release", f, g)`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rlvla.utils.errors import ConfigError

Formula = tuple[Any, ...]
TRUE: Formula = ("true",)
FALSE: Formula = ("false",)

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

    def _unexpected(self, wanted: str) -> FormulaError:
        token = self._peek()
        what = f"unexpected {token.text!r}" if token.text else "the formula ends too early"
        return FormulaError(self._formula, token.position, f"{what}, {wanted} was expected,")

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
    kind, *parts = f
    if kind == "!":
        return _normal_form(parts[0], not negated)
    if kind == "->":
        return _normal_form(("or", ("!", parts[0]), parts[1]), negated)
    if kind == "<->":
        a, b = parts
        return _normal_form(("or", ("and", a, b), ("and", ("!", a), ("!", b))), negated)
    if kind in ("F", "G"):
        kind, parts = ("until", [TRUE, *parts]) if kind == "F" else ("release", [FALSE, *parts])
    name = _DUALS[kind] if negated else _PLAIN.get(kind, kind)
    if kind == "atom":
        return (name, parts[0])
    return (name, *(_normal_form(part, negated) for part in parts))


def parse_ltlf(formula: str) -> Formula:
    """Parse a formula: operators ! & | -> <-> X WX F G U R, parentheses, `true`, `false`, names.

    A name is `[A-Za-z_][A-Za-z0-9_]*`.

    Returns:
        The negation normal form, as described in the module docstring.

    Raises:
        FormulaError: the formula is invalid.
    """
    return _normal_form(_Parser(formula).parse(), False)


def propositions_of(formula: Formula) -> tuple[str, ...]:
    """Propositions of a formula, in order of first appearance."""
    names: dict[str, None] = {}
    todo = [formula]
    while todo:
        kind, *parts = todo.pop()
        if kind in ("atom", "not_atom"):
            names[parts[0]] = None
        else:
            todo.extend(reversed(parts))
    return tuple(names)
