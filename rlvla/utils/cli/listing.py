"""The list of all commands, shown by `rlvla` and `python -m cli`."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

from rlvla.utils.cli.programs import COMMANDS, as_installed
from rlvla.utils.terminal import columns, style

_HEAD = """Reinforcement-learning post-training of vision-language-action robot policies: a program for each task.
Each has --help (what matters), --help all (every flag) and --version."""
_INDENT = 6


def purposes(folder: Path) -> dict[str, str]:
    """Command -> the first line of its description, read from the files in `folder` without importing them."""
    files = {path.stem: path for path in sorted(folder.glob("[a-z]*.py"))}
    names = [*(name for name in COMMANDS if name in files), *(name for name in files if name not in COMMANDS)]
    texts = {name: ast.get_docstring(ast.parse(files[name].read_text(encoding="utf-8"))) for name in names}
    return {name: (text or "").partition("\n")[0] for name, text in texts.items()}


def listing(folder: Path) -> str:
    """The commands in `folder` as one calls them here, each with its purpose."""
    width = min(columns(), 120)
    blocks = ["\n".join(textwrap.fill(line, width) for line in _HEAD.split("\n"))]
    for name, purpose in purposes(folder).items():
        called = style(as_installed(f"python cli/{name}.py"), "cyan")
        indent = " " * _INDENT
        blocks.append(f"  {called}\n{textwrap.fill(purpose, width, initial_indent=indent, subsequent_indent=indent)}")
    return "\n".join([blocks[0], "", *blocks[1:]])
