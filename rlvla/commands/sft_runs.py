"""Supervised runs that a command starts as processes, with flags of `cli/train_sft_vla.py` among its own."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Collection, Container, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from rlvla.envs.workers.guardian import MARK, new_mark
from rlvla.utils.cli.flags import Parser

TRAINING = "train_sft_vla"
VERDICT_FILE = "verdict.json"  # the last file of a run
_SHOWN_LINES = 8  # of the output of a failed command


def training_parser(package: str | None, without: Collection[str] = ()) -> Parser:
    """The command line of `train_sft_vla.py`.

    Args:
        package: of the commands, None where they are run as files.
        without: flags that the calling command redefines.
    """
    return importlib.import_module(f"{package or 'cli'}.{TRAINING}").build_parser(without)


def program_of(name: str, package: str | None, file: str) -> list[str]:
    """Arguments of Python that run another command: a file, or -m and a module; `file`: of this command."""
    if package and package != "cli":
        return ["-m", f"{package}.{name}"]
    return [str(Path(file).resolve().with_name(f"{name}.py"))]


def without_flags(parser: Parser, tokens: Sequence[str], names: Container[str]) -> Iterator[str]:
    """The arguments without these flags, under any of their names, and their values."""
    skipped = False
    for token in tokens:
        if token.startswith("--"):
            action = parser._option_string_actions.get(token.partition("=")[0])
            skipped = action is not None and action.dest in names
        if not skipped:
            yield token


def marked_environment(**variables: str) -> dict[str, str]:
    """Environment of a process that ends with this one, however this one ends."""
    return {**os.environ, MARK: new_mark(), **variables}


def check_command(argv: Sequence[str], *, quiet: bool) -> None:
    """Let a command check its flags and files (--dry_run); SystemExit after its messages if it cannot use them."""
    output = subprocess.DEVNULL if quiet else None
    status = subprocess.run([sys.executable, *argv, "--dry_run"], stdout=output, check=False).returncode
    if status:
        raise SystemExit(status)


def run_logged(argv: Sequence[str], log: Path) -> None:
    """Run a command of Python to its end, its output in a file.

    Raises:
        SystemExit: it failed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        child = subprocess.Popen([sys.executable, *argv], env=marked_environment(), stdout=file, stderr=file)
        try:
            status = child.wait()
        finally:
            child.kill()
            child.wait()
    if status:
        *_, program = takewhile(lambda token: not token.startswith("--"), argv)
        name = Path(program).name
        last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:])
        raise SystemExit(f"{last}\n{name} failed; its output: {log}")
