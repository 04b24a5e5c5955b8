"""The documentation as tests read it: pages, code blocks, commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(rf"^[ ]*```{language}\n(.*?)^[ ]*```", text, re.MULTILINE | re.DOTALL)


def without_blocks(text: str) -> str:
    """The text between fenced code blocks."""
    return re.sub(r"^[ ]*```.*?^[ ]*```", "", text, flags=re.MULTILINE | re.DOTALL)


def shell_commands(text: str) -> list[list[str]]:
    """The commands of all bash blocks as words, without leading assignments of variables."""
    lines = "\n".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    commands = []
    for line in lines:
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            del words[0]
        if words:
            commands.append(words)
    return commands
