"""Template of a new suite, for `cli/new_env.py`: a working environment, its tests and a list of parts to fill in."""

from __future__ import annotations

import keyword
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from rlvla.envs.registry import is_known
from rlvla.utils.cli.flags import arg, range_problems
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.files import target_problem, write_atomic

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class NewEnvConfig:
    """Name of the new suite, and folder of its files."""

    name: str | None = arg(
        None, "name of the suite: lower-case letters, digits and underscores, e.g. my_robot (default: none)"
    )
    output: str | None = arg(
        None, "folder for its files, new or empty (default: one of that name)", metavar="FOLDER", writes="folder"
    )

    @property
    def folder(self) -> Path:
        """Folder of the files."""
        return Path(self.output or self.name or ".")


def problems_of(config: NewEnvConfig) -> list[Problem]:
    """All problems of the flags."""
    problems = range_problems(config)  # including an --output that cannot be written
    start = f"--name {config.name}"
    if config.name is None:
        problems.append(Problem("name", "missing", "give the new environment a name, e.g. my_robot"))
    elif not re.fullmatch(r"[a-z][a-z0-9_]*", config.name) or keyword.iskeyword(config.name):
        text = f"{start}: write lower-case letters, digits and underscores, beginning with a letter, e.g. my_robot"
        problems.append(Problem("name", "malformed", text))
    elif is_known(config.name):
        text = f"{start}: a suite of this name ships with rlvla; choose another"
        problems.append(Problem("name", "duplicate", text))
    if config.output is None and problems:
        return problems  # the folder would be named after it
    why = target_problem(config.folder, folder=True)
    if why and config.output is None:
        text = f"{config.folder}: {why}; --output names another place for the results"
        problems.append(Problem("output", "not_writable", text))
    elif not why and config.folder.exists() and (not config.folder.is_dir() or any(config.folder.iterdir())):
        text = f"--output: {config.folder} has something in it; name a folder that is new or empty"
        problems.append(Problem("output", "folder_in_use", text))
    return problems


def write_new_env(config: NewEnvConfig) -> list[Path]:
    """Write the files of a new suite; returns their paths, the suite's first.

    Raises:
        ConfigError: there are mistakes in the flags.
    """
    if problems := problems_of(config):
        raise ConfigError(problems)
    assert config.name is not None
    import jinja2  # not needed for --help

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    suite, test, readme = (
        config.folder / name for name in (f"{config.name}_suite.py", f"test_{config.name}_suite.py", "README.md")
    )
    values = {
        "name": config.name,
        "class_name": "".join(part.capitalize() for part in config.name.split("_")),
        "folder": shlex.quote(str(config.folder)),
        "suite_file": shlex.quote(str(suite)),
    }
    config.folder.mkdir(parents=True, exist_ok=True)
    for path, template in ((suite, "suite.py"), (test, "test_suite.py"), (readme, "README.md")):
        write_atomic(path, templates.get_template(f"{template}.jinja").render(values).encode())
    return [suite, test, readme]
