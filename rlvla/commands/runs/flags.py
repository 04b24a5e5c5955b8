"""Flags of reinforcement-learning commands: groups, parser, report of a stop."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from rlvla.checkpoints.run_folder import CHECKPOINTS
from rlvla.commands.custom_modules import CustomConfig, parse_command_line
from rlvla.envs.config import EnvConfig
from rlvla.envs.suite_flags import add_suite_flags
from rlvla.envs.workers.config import WorkerConfig
from rlvla.utils.cli.flags import Parser, add_arguments, from_namespace, unselected_options
from rlvla.utils.data_files import field_types
from rlvla.utils.deepspeed.config import launched_rank
from rlvla.utils.cli.programs import resume_command
from rlvla.utils.signals import StopRequested
from rlvla.utils.terminal import log

NOTHING_LOST = "no training was under way, and no iteration is lost"
# Groups with their titles, in the order of --help: what is trained and where, how it learns, how it runs.
_TITLES = {
    "run": "run",
    "policy": "policy",
    "env": "environment",
    "split": "initial states",
    "rewards": "rewards",
    "success": "what counts as success",
    "batch": "batch sizes",
    "algorithm": "algorithm",
    "filters": "group filters (dynamic sampling)",
    "correction": "correction of the mismatch between rollout and training",
    "optimization": "optimization",
    "actor": "adapters and memory",
    "sac": "soft actor-critic",
    "noise": "noise of a flow policy",
    "replay": "replay",
    "strategy": "DeepSpeed",
    "schedule": "evaluation, checkpoints, logging (in iterations)",
    "guards": "early termination of failing runs",
    "rollout": "rollout engine",
    "backend": "where the policy plays",
    "asynchronous": "playing while training",
    "workers": "environment workers",
    "custom": "own code",
}
_NO_GROUPS = {"given", "unselected"}


class TrainingRun:
    """All groups of flags of a reinforcement-learning command; a command's own is a dataclass of them.

    Attributes:
        run: folders, workers and seed (`BasicRunConfig`).
        batch: how many episodes are played and learned from.
        schedule: evaluation, checkpoints, logging (`ScheduleConfig`).
        strategy: how DeepSpeed is run (`StrategyConfig`).
        env: the environment.
        workers: its processes.
        custom: the user's modules.
        given: names of the flags present on the command line.
        unselected: options of registered code that is not selected, see `rlvla.utils.cli.flags.unselected_options`.
    """

    run: Any
    batch: Any
    schedule: Any
    strategy: Any
    env: EnvConfig
    workers: WorkerConfig
    custom: CustomConfig
    given: frozenset[str]
    unselected: Mapping[str, Any]

    @classmethod
    def kinds(cls) -> dict[str, type]:
        """The dataclass of each group, in the order of --help."""
        hints = field_types(cls)
        return {name: hints[name] for name in sorted(hints.keys() - _NO_GROUPS, key=list(_TITLES).index)}

    @classmethod
    def from_namespace(cls, namespace: Namespace) -> Self:
        """The flags as parsed."""
        groups: dict[str, Any] = {name: from_namespace(kind, namespace) for name, kind in cls.kinds().items()}
        unselected: dict[str, Any] = {}
        for group in groups.values():
            unselected |= unselected_options(group, namespace)
        groups["env"] = groups["env"].with_suite_flags(namespace)
        create: Callable[..., Self] = cls
        return create(**groups, given=namespace.given, unselected=unselected)

    @property
    def policies_on_ray(self) -> bool:
        """Whether policies run on the cluster of --ray_address."""
        return False

    @property
    def groups(self) -> dict[str, Any]:
        """The groups by name."""
        return {name: group for name, group in vars(self).items() if name not in _NO_GROUPS}

    @property
    def ckpt_path(self) -> Path:
        """Folder of the training checkpoints."""
        return Path(self.run.ckpt_path) if self.run.ckpt_path else Path(self.run.save_path) / CHECKPOINTS


Run = TypeVar("Run", bound=TrainingRun)


def training_parser(description: str, run: type[TrainingRun]) -> Parser:
    """The command line of a reinforcement-learning command."""
    parser = Parser(description)
    for name, kind in run.kinds().items():
        add_arguments(parser, kind, _TITLES[name])
    add_suite_flags(parser)
    return parser


@contextmanager
def flags_of(run: type[Run], build_parser: Callable[[], Parser], argv: Sequence[str] | None) -> Iterator[Run]:
    """The flags of a command line; after a stop in the block, the command that goes on is logged."""
    flags = run.from_namespace(parse_command_line(build_parser, argv))
    try:
        yield flags
    except StopRequested as stop:
        if launched_rank() == 0:
            again = resume_command(sys.argv, stop.ckpt_path, trains=not flags.schedule.val_only)
            log.info(f"continue with: {again}")
        raise
