"""Parts of HTML pages: template rendering, tables, charts, short names of policies."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLORS = ("#2f7df6", "#e0563b", "#2f9e5b", "#b07cf0", "#d29a1f", "#1aa7b5", "#e05fa8")  # one per action of an arm
INK = "#7b8494"  # axes and text of charts; `svg` turns it into the current text color
NOT_RECORDED = "not recorded"
_TICKS = 5  # labels of an axis at most, so that long numbers do not touch
LABEL_SIZE, TICK_SIZE = 10.5, 10  # points, in a figure that is shown a little larger than drawn


def render(template: str, **values: Any) -> str:
    """Render a file of `rlvla/evaluation/templates`; its variables: `values`, `table`, `counted`, `outcome_text`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("rlvla.evaluation", "templates"), autoescape=True, undefined=StrictUndefined
    )
    functions = {"table": html_table, "counted": counted, "outcome_text": outcome_text, "shortened": shortened}
    return environment.get_template(template).render(**functions, **values)


def counted(number: int, noun: str) -> str:
    """For example "3 episodes"."""
    return f"{number} {noun}" + "s" * (number != 1)


def outcome_text(success: bool | None) -> str:
    """The outcome of an episode; None: not recorded."""
    return {True: "success", False: "no success", None: f"success {NOT_RECORDED}"}[success]


def shortened(text: str, count: int = 5) -> str:
    """The first words of a text, for a table of contents."""
    words = text.split()
    return text if len(words) <= count else f"{' '.join(words[:count])} …"


def html_table(headers: Sequence[str], rows: Sequence[Sequence[Any]], narrow: Sequence[str] | None = None) -> Any:
    """A table as markup; columns without a number are aligned to the left.

    On phones only the columns in `narrow` are shown (default: all).
    """
    from markupsafe import Markup, escape

    numeric = [i > 0 and any(char.isdigit() for row in rows for char in str(row[i])) for i in range(len(headers))]
    wide = [narrow is not None and header not in narrow for header in headers]
    classes = [" ".join(["words"] * (not n) + ["wide"] * w) for n, w in zip(numeric, wide)]
    kinds = [f' class="{names}"' if names else "" for names in classes]

    def line(tag: str, cells: Sequence[Any]) -> str:
        return "<tr>" + "".join(f"<{tag}{kind}>{escape(str(c))}</{tag}>" for c, kind in zip(cells, kinds)) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    return Markup(f"<table><thead>{line('th', headers)}</thead><tbody>{body}</tbody></table>")


@dataclass(frozen=True)
class Chart:
    """A chart with its title; `svg` is markup, and a template renders the chart as a figure."""

    title: str
    svg: Any

    def __html__(self) -> str:
        from markupsafe import escape

        return f"<figure><figcaption>{escape(self.title)}</figcaption>{self.svg}</figure>"


def new_figure(xlabel: str) -> tuple[Any, Any]:
    """An empty figure with axes, in the style of the pages."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4, 2.9), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.25, color=INK, linewidth=0.6)
    axes.tick_params(colors=INK, labelsize=TICK_SIZE)
    axes.locator_params(axis="x", nbins=_TICKS)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
    axes.set_xlabel(xlabel, color=INK, fontsize=LABEL_SIZE)
    return figure, axes


def widen(axes: Any, span: float) -> None:
    """Make the vertical axis cover at least `span` around its values, so that noise does not fill a chart."""
    low, high = axes.get_ylim()
    if high - low < span:
        middle = (low + high) / 2
        axes.set_ylim(middle - span / 2, middle + span / 2)


def svg(figure: Any, axes: Any, *, legend: bool = True) -> Any:
    """The figure as markup for a page."""
    import matplotlib
    from markupsafe import Markup

    if legend:
        axes.legend(fontsize=TICK_SIZE, frameon=False, labelcolor=INK)
    buffer = io.StringIO()
    # Text instead of glyph outlines: a tenth of the size. The salt makes element ids reproducible.
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": axes.get_xlabel(), "font.family": "sans-serif"}
    ):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawing = buffer.getvalue()
    drawing = drawing[drawing.index("<svg") :].replace(INK, "currentColor")
    return Markup(re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", drawing)))


# Folders of a run that hold a policy -> note in its name.
_POLICY_FOLDERS = {"policy": "", "best_policy": "best", "policies": "", "exported": ""}


def run_name(policy: str) -> str:
    """Short name of a policy folder: `runs/lift/ppo/policy` is "lift / ppo".

    Policies beside the last one of a run are marked: "lift / ppo (best)", "lift / ppo (iteration 40)".
    """
    folders = [name for name in Path(policy).parts if name not in ("/", ".", "..")]
    notes = []
    if len(folders) > 1 and (match := re.fullmatch(r"iteration_(\d+)", folders[-1])):
        notes.append(f"iteration {int(match[1])}")
        folders.pop()
    if len(folders) > 1 and folders[-1] in _POLICY_FOLDERS:
        notes += filter(None, [_POLICY_FOLDERS[folders.pop()]])
    if len(folders) > 1 and folders[0] == "runs":  # the default parent of run folders
        folders = folders[1:]
    name = " / ".join(folders[-2:]) or policy
    return f"{name} ({', '.join(notes)})" if notes else name


def labels(policies: Iterable[str]) -> dict[str, str]:
    """Policy -> its `run_name`, or the policy itself where the name is not unique."""
    names = {policy: run_name(policy) for policy in policies}
    counts = Counter(names.values())
    return {policy: name if counts[name] == 1 else policy for policy, name in names.items()}
