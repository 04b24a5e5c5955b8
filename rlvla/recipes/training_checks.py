"""Validate later stages before running earlier ones."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rlvla.commands.ppo_checks import (
    algorithm_problems,
    backend_problems,
    batch_problems,
    early_stopping_problems,
)
from rlvla.commands.ppo_flags import PPORun
from rlvla.commands.runs.asynchronous import async_problems
from rlvla.recipes.recipe import KINDS, Parsers, Stage
from rlvla.utils.cli.flags import no_effect_problems
from rlvla.utils.errors import Problem, require


def training_problems(stages: Sequence[Stage], parsers: Parsers) -> list[Problem]:
    """Problems of the stage `rl` that can be checked without its policy and environment."""
    return [problem for stage in stages if stage.name == "rl" for problem in _problems_of(stage, parsers)]


def require_extras(stages: Sequence[Stage]) -> None:
    """Raise MissingExtraError if a stage records videos and the encoder is not installed."""
    if any(KINDS[stage.name].command == "eval_vla" and stage.settings.get("num_videos") for stage in stages):
        require("av", extra="video")


def _problems_of(stage: Stage, parsers: Parsers) -> Iterator[Problem]:
    namespace = argparse.Namespace()
    parsers[KINDS[stage.name].command].read_flags(stage.argv, namespace)
    namespace.given = frozenset(name for name, value in stage.settings.items() if value is not None)
    flags = PPORun.from_namespace(namespace)
    with _launched_on(stage.processes):
        problems = [
            *batch_problems(flags),
            *no_effect_problems(flags.groups.values(), flags.unselected, flags.given),
            *algorithm_problems(flags),
            *async_problems(flags),
            *backend_problems(flags, None),
        ]
        problems += early_stopping_problems(flags.schedule, 0)
    yield from (
        Problem(f"{stage.name}.{p.flag}", p.reason, f"stage {stage.name}: {p}") for p in dict.fromkeys(problems)
    )


@contextmanager
def _launched_on(ranks: int) -> Iterator[None]:
    """Set the number of ranks for checks within the block."""
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(ranks)
    try:
        yield
    finally:
        if before is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = before
