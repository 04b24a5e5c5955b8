"""The evaluation of one policy as it is kept on disk, and what it was measured with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlvla.envs.base import TaskSpec
from rlvla.envs.config import SplitConfig
from rlvla.trainer.evaluation import EvalResult
from rlvla.utils.errors import ConfigError
from rlvla.version import __version__

SUITES_KEY = "suites"  # in the JSON file of several suites: name -> what the file of a single one holds
_VERSIONED = ("torch", "numpy", "transformers", "deepspeed")


@dataclass
class PolicyEvaluation:
    """One policy, evaluated in one or two modes.

    Attributes:
        policy: its folder.
        environment: what it saw (`EnvConfig.as_dict`).
        protocols: mode -> `describe_protocol`.
        results: one per mode.
        videos: mode -> files.
        versions: of the packages that it was measured with.
        trained_on: what is known of its training states (`learned_from_words`).
    """

    policy: str
    environment: dict[str, Any]
    protocols: dict[str, dict[str, Any]]
    results: list[EvalResult]
    videos: dict[str, list[Path]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=lambda: package_versions())
    trained_on: str = ""

    def result(self, mode: str) -> EvalResult | None:
        """The figures of a mode, if it was evaluated."""
        return next((result for result in self.results if result.mode == mode), None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it back."""
        return {
            "policy": self.policy,
            "environment": self.environment,
            "seed": next(iter(self.protocols.values()))["seed"],
            "temperature": next((p["temperature"] for p in self.protocols.values() if "temperature" in p), None),
            "versions": self.versions,
            "trained_on": self.trained_on,
            "protocols": self.protocols,
            "videos": {mode: [str(path) for path in paths] for mode, paths in self.videos.items()},
            "results": [result.as_dict() for result in self.results],
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> PolicyEvaluation:
        """The inverse of `as_dict`."""
        return cls(
            policy=content["policy"],
            environment=content["environment"],
            protocols=content["protocols"],
            results=[EvalResult.from_dict(result) for result in content["results"]],
            videos={mode: [Path(p) for p in paths] for mode, paths in content.get("videos", {}).items()},
            versions=content.get("versions", {}),
            trained_on=content.get("trained_on", ""),
        )

    @property
    def suite(self) -> str:
        """The suite's name."""
        return next(iter(self.protocols.values()))["suite"]

    @classmethod
    def read(cls, path: Path, suite: str | None = None) -> PolicyEvaluation:
        """From a file that `cli/eval_vla.py` wrote; ConfigError for any other.

        Args:
            path: the file.
            suite: which one is wanted, of a file with several suites; one that is not there is an error.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            several = content.get(SUITES_KEY)
            if several is not None and suite not in several:
                raise ConfigError(f"{path} holds {', '.join(several)}, not {suite}; evaluate both in the same suites")
            found = cls.from_dict(content if several is None else several[suite])
        except ConfigError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} is not the result of an evaluation ({type(error).__name__}: {error}); make one with "
                "cli/eval_vla.py"
            ) from error
        if not found.results or not all(result.episodes for result in found.results):
            raise ConfigError(f"{path} does not hold the single episodes; evaluate {found.policy} again")
        return found


def describe_protocol(
    tasks: Sequence[TaskSpec],
    split: SplitConfig,
    episodes: int,
    seed: int,
    temperature: float | None,
    success_hold_steps: int | None = None,
) -> dict[str, Any]:
    """Everything two evaluations must share for their episodes to be pairs; `temperature` None: greedy.

    `success_hold_steps` is noted where it is not the suite's.
    """
    described: dict[str, Any] = {"suite": tasks[0].suite, "name": split.protocol_name, "seed": seed}
    if temperature is not None:
        described["temperature"] = temperature
    if success_hold_steps is not None:
        described["success_hold_steps"] = success_hold_steps
    described["tasks"] = [
        {
            "task_id": task.task_id,
            "name": task.name,
            "max_steps": task.max_steps,
            "control_freq": task.control_freq,
            "init_states": split.eval_states(task, episodes),
        }
        for task in tasks
    ]
    return described


def package_versions(simulator: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of rlvla and the packages that results depend on, where they are installed, and of the simulator that played."""
    found = {"rlvla": __version__}
    for name in _VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found | dict(simulator or {})
