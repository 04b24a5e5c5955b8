"""Draws reward machines: Graphviz text and images."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from rlvla.rewards.ltlf import DFA
from rlvla.rewards.machine_graph import MachineGraph

_MOST_LETTERS = 3  # alternatives shown on an edge
_COLUMN, _ROW = 3.2, 1.5  # inches between states


def labeled_edges(graph: MachineGraph) -> dict[tuple[str, str], str]:
    """(source, target) -> condition. Edges out of terminal states and self-loops are omitted.

    An edge of a compiled machine shows its smallest sets of propositions, and what must not hold beside them.
    """
    labels: dict[tuple[str, str], str] = {}
    for number, state in enumerate(graph.states):
        if state in graph.success | graph.failure:
            continue
        if graph.automaton is None:
            for guard, edge in graph.edges[state]:
                key = (state, edge.target)
                labels[key] = f"{labels[key]} | {guard.text}" if key in labels else guard.text
            continue
        for successor, label in _letters(graph.automaton, number).items():
            if successor != number:
                labels[state, graph.states[successor]] = label
    return labels


def _letters(dfa: DFA, state: int) -> dict[int, str]:
    """Successor -> label."""
    smallest: dict[int, list[int]] = defaultdict(list)
    for letter in sorted(range(len(dfa.edges[state])), key=int.bit_count):
        kept = smallest[int(dfa.edges[state, letter])]
        if not any(other & letter == other for other in kept):
            kept.append(letter)
    return {successor: _shown(dfa, letters) for successor, letters in smallest.items()}


def _shown(dfa: DFA, letters: list[int]) -> str:
    sets = [[name for i, name in enumerate(dfa.propositions) if letter >> i & 1] for letter in letters]
    texts = [" & ".join(names) or "nothing" for names in sets]
    more = [f"... ({len(texts) - _MOST_LETTERS} more)"] if len(texts) > _MOST_LETTERS else []
    return " | ".join(texts[:_MOST_LETTERS] + more)


def _caption(graph: MachineGraph, state: str) -> list[str]:
    distance = graph.distances[state]
    lines = [state, "failure" if math.isinf(distance) else f"distance {distance:g}"]
    if state in graph.validators:
        validator = graph.validators[state]
        lines.append(f"needs {validator.needs.text}, else -{validator.penalty:g}")
    return lines


def _quoted(*lines: str) -> str:
    """Lines of text as one quoted string of the DOT language."""
    text = "\n".join(lines).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + text.replace("\r", "\\r").replace("\n", "\\n") + '"'


def to_dot(graph: MachineGraph) -> str:
    """The machine in the DOT language of Graphviz."""
    start = "start"
    while start in graph.states:
        start += "_"
    lines = ["digraph reward_machine {", "  rankdir=LR;", f"  {start} [shape=point];"]
    lines.append(f"  {start} -> {_quoted(graph.states[0])};")
    for state in graph.states:
        shape = "doublecircle" if state in graph.success else "box" if state in graph.failure else "ellipse"
        lines.append(f"  {_quoted(state)} [shape={shape}, label={_quoted(*_caption(graph, state))}];")
    for (source, target), label in labeled_edges(graph).items():
        lines.append(f"  {_quoted(source)} -> {_quoted(target)} [label={_quoted(label)}];")
    for state, validator in graph.validators.items():
        label = _quoted(f"!({validator.needs.text})")
        lines.append(f"  {_quoted(state)} -> {_quoted(validator.target)} [style=dashed, label={label}];")
    return "\n".join([*lines, "}"]) + "\n"


def draw_machine(graph: MachineGraph, path: Path) -> None:
    """Draw the machine: columns are distances to the goal, dashed arrows are fallbacks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    places = _places(graph)
    columns, rows = (1 + max(p[axis] for p in places.values()) for axis in (0, 1))
    figure, axes = plt.subplots(figsize=(_COLUMN * columns + 0.6, _ROW * rows + 1.4))
    for (source, target), label in labeled_edges(graph).items():
        _arrow(axes, places[source], places[target], label, dashed=False)
    for state, validator in graph.validators.items():
        _arrow(axes, places[state], places[validator.target], "", dashed=True)
    for state, place in places.items():
        good, bad = state in graph.success, state in graph.failure
        color = "#cfe8cf" if good else "#f2cfcf" if bad else "#e4ebf5"
        box = {"boxstyle": "round,pad=0.5", "facecolor": color, "edgecolor": "#333333", "linewidth": 2 if good else 1}
        caption = "\n".join(_caption(graph, state)).replace(", else", ",\nelse")
        axes.text(*place, caption, ha="center", va="center", fontsize=8, bbox=box, zorder=3)
    axes.set_xlim(-0.6, columns - 0.4)
    axes.set_ylim(rows - 0.3, -1.0)
    axes.axis("off")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def _places(graph: MachineGraph) -> dict[str, tuple[float, float]]:
    """Column by distance (far on the left, failure below the middle), row by order of appearance."""
    distances = sorted({d for d in graph.distances.values() if math.isfinite(d)}, reverse=True)
    used: dict[int, int] = defaultdict(int)
    places = {}
    for state in sorted(graph.states, key=lambda s: math.isinf(graph.distances[s])):
        distance = graph.distances[state]
        column = distances.index(distance) if math.isfinite(distance) else len(distances) // 2
        row = used[column] if math.isfinite(distance) else max(used.values())
        used[column] += 1
        places[state] = (float(column), float(row))
    return places


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], label: str, *, dashed: bool) -> None:
    bend = 0.35 if dashed else 0.0 if start[1] == end[1] and abs(start[0] - end[0]) <= 1 else -0.15
    style: dict[str, Any] = {
        "arrowstyle": "-|>",
        "color": "#888888" if dashed else "#333333",
        "linestyle": "--" if dashed else "-",
    }
    style |= {"shrinkA": 62, "shrinkB": 62 if start[0] != end[0] else 30, "connectionstyle": f"arc3,rad={bend}"}
    axes.annotate("", xy=end, xytext=start, arrowprops=style, zorder=1)
    if label:
        rise = abs(bend) * abs(end[0] - start[0]) * _COLUMN / _ROW / 2  # of the bent arrow over the straight one
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - 0.05 - rise)
        axes.text(*middle, label.replace(" & ", " &\n"), ha="center", va="bottom", fontsize=7, zorder=4)
