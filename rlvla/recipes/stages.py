"""The stages of a recipe: which command each one runs, and what it takes over from those before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Settings = dict[str, Any]  # flag, without dashes -> value as YAML has it; None for the default
DEMOS_FILE = "demos.hdf5"
POLICY_FOLDER = "policy"
OUTPUT = "$output"  # in values of a recipe: the folder of --output


@dataclass(frozen=True)
class StageKind:
    """What a stage is, whatever the recipe.

    Attributes:
        name: its name in recipes.
        command: the file in `cli/` that it runs, without suffix; None for the report, which is made in the process of
            the recipe.
        writes: the flag that names what it writes.
        resumes: whether the command continues its own half-done work; otherwise what an interrupted attempt left is
            removed.
        takes_ranks: whether the command can be launched on several ranks.
        reads: flag -> the input it names, "demonstrations" or "policy".
        can_do_without: those of these flags that name nothing where no earlier stage writes it.
    """

    name: str
    command: str | None
    writes: str | None = None
    resumes: bool = False
    takes_ranks: bool = True
    reads: Mapping[str, str] | None = None
    can_do_without: tuple[str, ...] = ()


DEMONSTRATIONS, POLICY = "demonstrations", "policy"
REPORT = "report"
TRAINED = ("sac", "rl")  # stages of reinforcement learning, which go on from their checkpoints
BEFORE_DEMOS = ("sac", "demos")  # stages that recorded demonstrations make superfluous
KINDS = {
    kind.name: kind
    for kind in (
        StageKind("sac", "train_sac_vla", "save_path", resumes=True),
        StageKind(
            "demos",
            "collect_demos",
            "output",
            takes_ranks=False,
            reads={"policy": POLICY},
            can_do_without=("policy",),
        ),
        StageKind("check", "check_demos", "output", takes_ranks=False, reads={"demos": DEMONSTRATIONS}),
        StageKind("sft", "train_sft_vla", "save_path", reads={"demos": DEMONSTRATIONS}),
        StageKind("eval_sft", "eval_vla", "output", resumes=True, reads={"pretrain": POLICY}),
        StageKind("rl", "train_ppo_vla", "save_path", resumes=True, reads={"pretrain": POLICY}),
        StageKind("eval_rl", "eval_vla", "output", resumes=True, reads={"pretrain": POLICY}),
        StageKind(REPORT, None),
    )
}
COMMANDS = tuple(dict.fromkeys(kind.command for kind in KINDS.values() if kind.command is not None))
# The stages whose policy a stage starts from, the nearest first.
_POLICY_OF = {"demos": ("sac",), "eval_sft": ("sft",), "rl": ("sft",), "eval_rl": ("rl",)}


def written_by(name: str, settings: Settings, folder: Path) -> Path:
    """The file or folder that a stage writes, with its settings, in the folder of --output."""
    kind = KINDS[name]
    given = settings.get(kind.writes) if kind.writes else None
    if given is not None:
        return Path(str(given))
    return folder / (f"{name}.json" if kind.command == "eval_vla" else name)


def with_references(name: str, settings: Settings, earlier: Mapping[str, Settings], folder: Path) -> Settings:
    """The settings of a stage, completed with what it takes over from earlier stages and with where it writes.

    Args:
        name: the stage.
        settings: what the recipe says; it takes precedence.
        earlier: completed settings of the stages before it.
        folder: of --output.
    """
    kind, filled = KINDS[name], dict(settings)
    if kind.writes and filled.get(kind.writes) is None:
        filled[kind.writes] = str(written_by(name, settings, folder))
    if name in TRAINED and filled.get("load_checkpoint") is None:
        filled["load_checkpoint"] = True
    for flag, what in (kind.reads or {}).items():
        if filled.get(flag) is None:
            source = _source_of(name, what, earlier, folder)
            if source is not None:
                filled[flag] = source
    return filled


def _source_of(name: str, what: str, earlier: Mapping[str, Settings], folder: Path) -> Any:
    if what == DEMONSTRATIONS:
        if "demos" in earlier:
            return str(written_by("demos", earlier["demos"], folder) / DEMOS_FILE)
        return earlier.get("check", {}).get("demos")
    for stage in _POLICY_OF[name]:
        if stage in earlier:
            return str(written_by(stage, earlier[stage], folder) / POLICY_FOLDER)
    return None


def inputs_of(name: str, settings: Settings) -> list[Path]:
    """The files and folders that a stage reads, with its completed settings."""
    named = [settings.get(flag) for flag in KINDS[name].reads or {}]
    several = [one for value in named for one in (value if isinstance(value, list) else [value])]
    return [Path(str(value)) for value in several if value is not None]
