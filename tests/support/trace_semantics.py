"""LTLf read off the definition, position by position; slow, and written without a look at the compiler."""

from __future__ import annotations

import random

Trace = list[frozenset[str]]


def holds(f: tuple, trace: Trace, i: int = 0) -> bool:
    """Whether formula `f` (a tree of the operators as they are written) holds at position i of a non-empty trace."""
    n = len(trace)
    match f:
        case ("true",):
            return True
        case ("false",):
            return False
        case ("name", name):
            return name in trace[i]
        case ("!", g):
            return not holds(g, trace, i)
        case ("&", g, h):
            return holds(g, trace, i) and holds(h, trace, i)
        case ("|", g, h):
            return holds(g, trace, i) or holds(h, trace, i)
        case ("->", g, h):
            return not holds(g, trace, i) or holds(h, trace, i)
        case ("<->", g, h):
            return holds(g, trace, i) == holds(h, trace, i)
        case ("X", g):
            return i + 1 < n and holds(g, trace, i + 1)
        case ("WX", g):
            return i + 1 >= n or holds(g, trace, i + 1)
        case ("F", g):
            return any(holds(g, trace, k) for k in range(i, n))
        case ("G", g):
            return all(holds(g, trace, k) for k in range(i, n))
        case ("U", g, h):
            return any(holds(h, trace, k) and all(holds(g, trace, j) for j in range(i, k)) for k in range(i, n))
        case ("R", g, h):
            return all(holds(h, trace, k) or any(holds(g, trace, j) for j in range(i, k)) for k in range(i, n))
    raise AssertionError(f)


def text_of(f: tuple) -> str:
    """The formula as one would type it, every operator in parentheses."""
    if f[0] == "name":
        return f[1]
    if len(f) == 1:
        return f[0]
    if len(f) == 2:
        return f"{f[0]} ({text_of(f[1])})"
    return f"({text_of(f[1])}) {f[0]} ({text_of(f[2])})"


def random_formula(rng: random.Random, names: str, depth: int) -> tuple:
    """A tree of all operators over the names."""
    if depth == 0 or rng.random() < 0.15:
        return ("name", rng.choice(names)) if rng.random() < 0.95 else (rng.choice(["true", "false"]),)
    operator = rng.choice(["!", "X", "WX", "F", "G", "&", "|", "->", "<->", "U", "R"])
    count = 1 if operator in ("!", "X", "WX", "F", "G") else 2
    return (operator, *(random_formula(rng, names, depth - 1) for _ in range(count)))
