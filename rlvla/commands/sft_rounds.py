"""Rounds of recorded episodes and supervised training (DAgger, RECAP): command line, and success of a round."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from rlvla.commands.custom_modules import CustomConfig
from rlvla.commands.sft_runs import TRAINING, program_of, training_parser, without_flags
from rlvla.envs.config import SplitConfig
from rlvla.utils.cli.config_file import config_file_arguments, flag_arguments
from rlvla.utils.cli.flags import Parser, add_arguments, given_flags
from rlvla.utils.errors import Problem

if TYPE_CHECKING:
    from rlvla.evaluation.results import Rate

POLICY_FOLDER = "policy"
_PLAYING = ("num_envs", "env_python")  # flags of the training that apply to recording and evaluation
_OF_TRAINING = ("heldout_tasks",)  # of `SplitConfig`: the training has this flag
# Training flags that rounds set themselves.
_REPLACED = ("config", "demos", "dry_run", "load_checkpoint", "max_steps", "pretrain", "save_path")


def rounds_parser(package: str | None, description: str, output: str, groups: Mapping[str, type]) -> Parser:
    """The command line of the training, with further groups of flags, title -> kind.

    Args:
        package: of the commands, None where they are run as files.
        description: docstring of the command.
        output: default of --save_path.
        groups: options of the rounds.
    """
    own = {field.name for kind in groups.values() for field in fields(kind)}
    parser = training_parser(package, without={"max_minutes", *own})  # a time budget would be one of all rounds
    parser.description = Parser(description).description
    for title, kind in groups.items():
        add_arguments(parser, kind, title)
    add_arguments(parser, SplitConfig, "initial states", without=_OF_TRAINING)
    parser.set_defaults(save_path=output, pretrain="runs/sft/policy", max_epochs=1000)
    return parser


class RoundFlags:
    """The flags of rounds, divided among their commands.

    Args:
        parser: of `rounds_parser`.
        argv: the command line.
        namespace: its values.
        kinds: the groups of `rounds_parser`.

    Attributes:
        given: names of the flags on the command line and in its configuration file.
        training: flags of the training as typed, without those that rounds replace.
        common: flags of recording and evaluation.
    """

    def __init__(self, parser: Parser, argv: Sequence[str], namespace: Namespace, kinds: Sequence[type]):
        tokens = [*config_file_arguments(argv, parser.repeated_flags()), *argv]
        self.given, self._namespace = given_flags(parser, tokens), namespace
        own = {field.name for kind in (*kinds, SplitConfig) for field in fields(kind)} - set(_OF_TRAINING)
        unused = () if namespace.eval_epochs else _PLAYING
        self.training = [*without_flags(parser, tokens, own | {*_REPLACED, *unused})]
        if "max_epochs" not in self.given:
            self.training.append(f"--max_epochs={namespace.max_epochs}")
        self.common = [token for name in _PLAYING for token in flag_arguments(name, getattr(namespace, name))]
        self.common += self.of(SplitConfig, CustomConfig)

    def of(self, *kinds: type) -> list[str]:
        """The given flags of these groups."""
        names = sorted({field.name for kind in kinds for field in fields(kind)} & self.given)
        return [token for name in names for token in flag_arguments(name, getattr(self._namespace, name))]

    def problems(self, pretrain: str, purpose: str, replaced: Mapping[str, str]) -> list[Problem]:
        """No policy to start from, or flags that rounds replace.

        Args:
            pretrain: the policy's folder.
            purpose: predicate of the message, e.g. "is corrected".
            replaced: name of a flag -> advice on its replacement.
        """
        problems = []
        if not Path(pretrain).is_dir():
            text = f"--pretrain {pretrain}: a trained policy {purpose}; give its folder"
            problems.append(Problem("pretrain", "missing", text))
        for flag, instead in replaced.items():
            if flag in self.given:
                problems.append(Problem(flag, "no_effect", f"--{flag}: {instead}; leave it out"))
        return problems


def programs_of(package: str | None, file: str, *names: str) -> dict[str, list[str]]:
    """Programs of the commands of a round, name -> arguments of Python; see `program_of`."""
    return {name: program_of(name, package, file) for name in (TRAINING, "collect_demos", "eval_vla", *names)}


def evaluation_command(
    programs: Mapping[str, Sequence[str]], common: Sequence[str], episodes: int, policy: Path, output: Path
) -> list[str]:
    """Greedy success of a policy on held-out states, as arguments of Python.

    Args:
        programs: of `programs_of`.
        common: see `RoundFlags`.
        episodes: per task.
        policy: its folder.
        output: file of the results.
    """
    flags = [f"--eval_episodes={episodes}", f"--pretrain={policy}", f"--output={output}"]
    return [*programs["eval_vla"], *flags, *common]


def round_name(number: int) -> str:
    """Of a round, in messages; 0 is the initial policy."""
    return f"round {number}" if number else "initial policy"


def success_of(path: Path) -> Rate:
    """Success at end in a file of `cli/eval_vla.py`."""
    from rlvla.evaluation.report import PolicyEvaluation  # loads torch

    (result,) = PolicyEvaluation.read(path).results
    return result.success_at_end
