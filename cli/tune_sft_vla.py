"""Compare values of a setting by short supervised runs, judged by success on held-out initial states.

All flags of train_sft_vla.py apply to every trial. The best setting is written to `choice.yaml` in --save_path, for
`train_sft_vla.py --config`.

Example:
  python cli/tune_sft_vla.py --candidates action_chunk_len=[2,5] --demos runs/demos/demos.hdf5 --pretrain compact
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.signals import begin

begin(__name__)

from rlvla.commands.custom_modules import parse_command_line
from rlvla.commands.tune_sft import OWN_FLAGS, SAVE_PATH, TuneConfig, run_tuning
from rlvla.trainer.supervised.config import SFTRunConfig
from rlvla.utils.cli.command import command
from rlvla.utils.cli.flags import Parser, add_arguments, from_namespace, range_problems
from rlvla.utils.errors import ConfigError, collected

_TRAINING = "train_sft_vla"


def _training_parser() -> Parser:
    return importlib.import_module(f"{__package__ or 'cli'}.{_TRAINING}").build_parser()


def build_parser() -> Parser:
    """The command line: that of the training, with the values to compare."""
    parser = _training_parser()
    parser.description = Parser(__doc__ or "").description
    add_arguments(parser, TuneConfig, "trials")
    return parser


def _program() -> list[str]:
    """How the training is called: its file, or its module where it is installed."""
    if __package__ and __package__ != "cli":
        return ["-m", f"{__package__}.{_TRAINING}"]
    return [str(Path(__file__).resolve().with_name(f"{_TRAINING}.py"))]


def _without(tokens: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """The arguments without these flags and their values."""
    skipped = False
    for token in tokens:
        if token.startswith("--"):
            skipped = token.removeprefix("--").partition("=")[0] in names
        if not skipped:
            yield token


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    tokens = sys.argv[1:] if argv is None else list(argv)
    namespace = parse_command_line(build_parser, tokens)
    config, training = from_namespace(TuneConfig, namespace), _training_parser()
    problems = [*range_problems(config), *range_problems(from_namespace(SFTRunConfig, namespace))]
    trials = collected(problems, lambda: config.combinations(training))
    if trials is None or problems:
        raise ConfigError(problems)
    given = {name: getattr(namespace, name, None) for name in (*namespace.given, SAVE_PATH)}
    of_trials = list(_without(tokens, (*OWN_FLAGS, SAVE_PATH, "max_steps")))
    run_tuning(trials, config.trial_steps, _program(), of_trials, given)


if __name__ == "__main__":
    main()
