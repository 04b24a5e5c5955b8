"""Draw a reward machine as an image (PNG, SVG, PDF) or export it as Graphviz text (DOT).

Example:
  python cli/draw_reward_machine.py --machine stack --output stack.png
  python cli/draw_reward_machine.py --formula 'G(!collision) & F(grasped & F lifted)' --output lift.dot
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.signals import begin

begin(__name__)

from rlvla.rewards.machine_drawing import draw_machine, to_dot
from rlvla.rewards.machine_files import declared_graph, is_declaration
from rlvla.rewards.machines import TASKS, formula_graph, machine_graph
from rlvla.utils.cli.command import command
from rlvla.utils.cli.flags import Parser, add_arguments, arg, from_namespace, range_problems
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.terminal import show

FORMATS = (".png", ".svg", ".pdf", ".dot")


@dataclass(frozen=True)
class DrawConfig:
    """Machine to draw, and output file."""

    machine: str | None = arg(
        None, f"one of {', '.join(TASKS)}, or a file (.yaml, .json) that declares one (default: that of --formula)"
    )
    formula: str | None = arg(
        None, "an LTLf formula, e.g. 'F(grasped & F lifted)' (default: that of --machine)", lines=True
    )
    output: str = arg("reward_machine.png", "file to write: .png, .svg, .pdf or .dot", metavar="FILE", writes="file")


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_arguments(parser, DrawConfig, "drawing")
    return parser


def draw(config: DrawConfig) -> None:
    """Check the flags, build the machine, write the file."""
    problems: list[str | Problem] = [*range_problems(config)]
    graph = None
    if (config.machine is None) == (config.formula is None):
        problems.append("give either --machine or --formula")
    path = Path(config.output)
    if path.suffix not in FORMATS:
        problems.append(f"--output {path}: the name must end in one of {', '.join(FORMATS)}")
    try:
        if config.machine is not None:
            declared = is_declaration(config.machine)
            graph = declared_graph(config.machine) if declared else machine_graph(config.machine)
        elif config.formula is not None:
            graph = formula_graph(config.formula)
    except ConfigError as error:
        problems += error.problems
    if problems or graph is None:
        raise ConfigError(problems)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".dot":
        path.write_text(to_dot(graph), encoding="utf-8")
    else:
        draw_machine(graph, path)
    show(f"{len(graph.states)} states: {path}")


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    draw(from_namespace(DrawConfig, build_parser().parse_args(argv)))


if __name__ == "__main__":
    main()
