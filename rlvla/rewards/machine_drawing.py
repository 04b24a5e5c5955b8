"""Drawings of reward machines: DOT text and images."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

from rlvla.rewards.ltlf import DFA
from rlvla.rewards.reward_machine import MachineGraph

_MOST_LETTERS = 3  # alternatives shown on an edge
_COLUMN, _ROW = 3.6, 1.6  # inches between states
_STYLE = (
    '  node [fontname="Helvetica,Arial,sans-serif", fontsize=11, style=filled];',
    '  edge [fontname="Helvetica,Arial,sans-serif", fontsize=10];',
)
_GRAPHVIZ_SECONDS = 60.0
_LINE = "#333333"
_HEAD = "-|>,head_length=0.55,head_width=0.25"
_AHEAD, _BACK = 0.13, 0.3  # arcs of edges that would meet other states, and of fallbacks, as a share of their length


def labeled_edges(graph: MachineGraph) -> dict[tuple[str, str], str]:
    """(source, target) -> condition. Edges out of terminal states and self-loops are omitted.

    An edge of a compiled machine shows its smallest sets of propositions.
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
    """The machine in the DOT language of Graphviz; dashed arrows are fallbacks."""
    start = "start"
    while start in graph.states:
        start += "_"
    lines = ["digraph reward_machine {", "  rankdir=LR;", *_STYLE, f"  {start} [shape=point];"]
    lines.append(f"  {start} -> {_quoted(graph.states[0])};")
    for state in graph.states:
        shape = "doublecircle" if state in graph.success else "box" if state in graph.failure else "ellipse"
        looks = f'shape={shape}, fillcolor="{_color(graph, state)}"'
        lines.append(f"  {_quoted(state)} [{looks}, label={_quoted(*_caption(graph, state))}];")
    for (source, target), label in labeled_edges(graph).items():
        lines.append(f"  {_quoted(source)} -> {_quoted(target)} [label={_quoted(label)}];")
    for state, validator in graph.validators.items():
        label = _quoted(f"!({validator.needs.text})")
        lines.append(f"  {_quoted(state)} -> {_quoted(validator.target)} [style=dashed, label={label}];")
    return "\n".join([*lines, "}"]) + "\n"


def draw_machine(graph: MachineGraph, path: Path) -> None:
    """Draw the machine, by Graphviz if its program `dot` is installed.

    Otherwise columns are distances to the goal. Dashed arrows are fallbacks, an arrow from a dot points at the start.
    """
    if _drawn_by_graphviz(graph, path):
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    places = _places(graph)
    columns, rows = (1 + max(p[axis] for p in places.values()) for axis in (0, 1))
    reach = max((abs(places[s][0] - places[v.target][0]) for s, v in graph.validators.items()), default=0)
    above = 0.75 + _BACK * reach * _COLUMN / _ROW / 2  # room for the highest fallback
    figure, axes = plt.subplots(figsize=(_COLUMN * columns + 0.6, _ROW * (rows + above)))
    axes.set_xlim(-0.75, columns - 0.4)
    axes.set_ylim(rows - 0.3, -above)
    axes.axis("off")
    boxes = {state: _state_box(axes, graph, state, place) for state, place in places.items()}
    edges = labeled_edges(graph)
    for (source, target), label in edges.items():
        (x0, y0), (x1, y1) = places[source], places[target]
        neighbors = abs(x0 - x1) <= 1 and abs(y0 - y1) <= 1  # a straight line meets no third state
        straight = neighbors and (target, source) not in edges
        _arrow(axes, boxes[source], boxes[target], label, bend=0.0 if straight else _AHEAD)
    for state, validator in graph.validators.items():
        _arrow(axes, boxes[state], boxes[validator.target], "", bend=_BACK, dashed=True)
    x, y = places[graph.states[0]]
    first = boxes[graph.states[0]].get_bbox_patch()
    style = {"arrowstyle": _HEAD, "color": _LINE, "patchB": first, "shrinkA": 0, "shrinkB": 1, "linewidth": 1.3}
    axes.annotate("", xy=(x, y), xytext=(x - 0.6, y), arrowprops=style)
    axes.plot([x - 0.6], [y], marker="o", markersize=5, color=_LINE)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def _drawn_by_graphviz(graph: MachineGraph, path: Path) -> bool:
    """Draw with Graphviz; False if `dot` is not installed or fails."""
    program = shutil.which("dot")
    if program is None:
        return False
    command = [program, f"-T{path.suffix[1:]}", "-Gdpi=110" if path.suffix == ".png" else "-Gpad=0.1"]
    try:
        done = subprocess.run(command, input=to_dot(graph).encode(), capture_output=True, timeout=_GRAPHVIZ_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return False
    if done.returncode or not done.stdout:
        return False
    path.write_bytes(done.stdout)
    return True


def _color(graph: MachineGraph, state: str) -> str:
    return "#cfe8cf" if state in graph.success else "#f2cfcf" if state in graph.failure else "#e4ebf5"


def _state_box(axes: Any, graph: MachineGraph, state: str, place: tuple[float, float]) -> Any:
    width = 2.4 if state in graph.success else 1.1
    box = {"boxstyle": "round,pad=0.5", "facecolor": _color(graph, state), "edgecolor": _LINE, "linewidth": width}
    caption = "\n".join(_caption(graph, state)).replace(", else", ",\nelse")
    return axes.text(*place, caption, ha="center", va="center", fontsize=9, bbox=box, zorder=3, parse_math=False)


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


def _arrow(axes: Any, source: Any, target: Any, label: str, *, bend: float, dashed: bool = False) -> None:
    """An arrow from the border of one box of text to that of another.

    Its label stands above a straight arrow, and outside of a bent one. `bend` is the height of the arc as a share of
    its length: arcs that lead to the right lie below, others above.
    """
    from matplotlib.patches import FancyArrowPatch

    ends = source.get_position(), target.get_position()
    patch = FancyArrowPatch(
        *ends,
        patchA=source.get_bbox_patch(),
        patchB=target.get_bbox_patch(),
        shrinkA=1,
        shrinkB=2,
        arrowstyle=_HEAD,
        mutation_scale=13,
        connectionstyle=f"arc3,rad={bend}",
        color="#8a8a8a" if dashed else _LINE,
        linestyle=(0, (4, 3)) if dashed else "-",
        linewidth=1.3,
        zorder=4,  # after the boxes, which get their places when they are drawn
    )
    axes.add_patch(patch)
    if not label:
        return
    # Midpoint of the quadratic Bezier curve whose control point is `bend` lengths off the straight line.
    (x0, y0), (x1, y1) = axes.transData.transform(ends)
    middle = (x0 + x1) / 2 + bend * (y1 - y0) / 2, (y0 + y1) / 2 - bend * (x1 - x0) / 2
    level = abs(y1 - y0) < abs(x1 - x0) / 4
    axes.annotate(
        label.replace(" & ", " &\n").replace(" | ", " |\n"),
        xy=axes.transData.inverted().transform(middle),
        xytext=(0, (3 if bend <= 0 else -3)) if level else (5, -8),
        textcoords="offset points",
        ha="center" if level else "left",
        va=("bottom" if bend <= 0 else "top") if level else "center",
        fontsize=8,
        bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
        zorder=5,
        parse_math=False,
    )
