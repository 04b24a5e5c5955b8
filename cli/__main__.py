"""Lists the commands, or runs one: `python -m cli [COMMAND ...]`, or `rlvla` where they are installed."""

from __future__ import annotations

import argparse
import ast
import runpy
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a folder, not as a package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.cli.programs import COMMANDS, as_installed
from rlvla.utils.terminal import columns, put, style
from rlvla.version import __version__

_HEAD = """Reinforcement-learning post-training of vision-language-action robot policies: a program for each task
(also as rlvla COMMAND). Each has --help (what matters), --help all (every flag) and --version."""
_INDENT = 6 * " "


def purposes(folder: Path) -> dict[str, str]:
    """Command -> the first line of its description, read from the files in `folder` without importing them."""
    files = {path.stem: path for path in sorted(folder.glob("[a-z]*.py"))}
    names = [*(name for name in COMMANDS if name in files), *(name for name in files if name not in COMMANDS)]
    texts = {name: ast.get_docstring(ast.parse(files[name].read_text(encoding="utf-8"))) for name in names}
    return {name: (text or "").partition("\n")[0] for name, text in texts.items()}


def listing(folder: Path) -> str:
    """The commands in `folder` as they are called here, each with its purpose."""
    width = min(columns(), 120)
    lines = [*(textwrap.fill(line, width) for line in _HEAD.split("\n")), ""]
    for name, purpose in purposes(folder).items():
        lines.append(f"  {style(as_installed(f'python cli/{name}.py'), 'cyan')}")
        lines.append(textwrap.fill(purpose, width, initial_indent=_INDENT, subsequent_indent=_INDENT))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:  # of a command, or of all
        arguments = [*arguments[1:2], "--help"] if arguments[1:2] not in ([], ["all"]) else []
    if arguments and (name := arguments[0].replace("-", "_")) in COMMANDS:
        sys.argv = [name, *arguments[1:]]
        runpy.run_module(f"{__package__ or 'cli'}.{name}", run_name="__main__", alter_sys=True)
        return
    parser = argparse.ArgumentParser("rlvla", usage="rlvla [--version] [COMMAND ...]", add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--version", action="version", version=f"rlvla {__version__}")
    _, arguments = parser.parse_known_args(arguments)
    if arguments:
        parser.error(f"unrecognized arguments: {' '.join(arguments)}")
    put(listing(Path(__file__).resolve().parent))
    parser.exit()


if __name__ == "__main__":
    main()
