"""Writing a trained policy as a checkpoint folder in the public format, and what it was trained to see."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlvla.envs.config import EnvConfig
from rlvla.envs.splits import LearnedStates
from rlvla.rewards import StateInputSettings
from rlvla.utils.durable_files import put_in_place
from rlvla.utils.errors import ConfigError
from rlvla.utils.runs import write_json
from rlvla.utils.strategy import DeepspeedStrategy, Engine

# What the policy sees is part of what it is: suite, cameras, image size, rendering, control frequency.
ENVIRONMENT_FILE = "rlvla_environment.json"
MACHINE_STATE = "machine_state"


@dataclass(frozen=True)
class PolicyRecord:
    """What a policy was trained to see, and which initial states it has seen.

    Attributes:
        env: suite, cameras and options.
        learned_from: initial states, so that no evaluation can reuse them unnoticed.
        machine_state: how it was told the state of a reward machine; None: not at all.
    """

    env: EnvConfig
    learned_from: tuple[LearnedStates, ...]
    machine_state: StateInputSettings | None = None

    def write(self, folder: Path) -> None:
        """Note it in a checkpoint folder."""
        order = sorted(set(self.learned_from), key=lambda s: (s.suite, -1 if s.task_id is None else s.task_id, s.start))
        seen = [asdict(states) for states in order]
        content = self.env.as_dict() | {"cameras": list(self.env.camera_names), "learned_from": seen}
        if self.machine_state is not None:
            content[MACHINE_STATE] = self.machine_state.as_dict()
        write_json(folder / ENVIRONMENT_FILE, content)


def export_policy(engine: Engine, folder: Path, strategy: DeepspeedStrategy, record: PolicyRecord) -> None:
    """Write `engine.module.save_pretrained` with whole parameters; called on every rank, written by one.

    The folder is written beside its place, complete with its record, and renamed; one that is there is replaced.
    """
    with engine.full_parameters() as module:
        if strategy.is_main:
            temporary = folder.with_name(f".{folder.name}.part")
            shutil.rmtree(temporary, ignore_errors=True)
            module.save_pretrained(temporary)
            record.write(temporary)
            put_in_place(temporary, folder)
    strategy.barrier()


def recorded_environment(folder: str | Path) -> dict[str, Any]:
    """What `PolicyRecord.write` wrote; empty where there is nothing, ConfigError where it cannot be read."""
    path = Path(folder) / ENVIRONMENT_FILE
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); copy the checkpoint again") from error


def learned_states(recorded: dict[str, Any]) -> list[LearnedStates] | None:
    """Initial states that a policy has learned from, out of its `recorded_environment`; None where nothing tells.

    Records written before suite and task were noted hold pairs [start, stop): states of any task of their suite.
    """
    if "learned_from" not in recorded:
        return None
    suite = str(recorded.get("task_suite_name"))
    return [
        LearnedStates(**seen) if isinstance(seen, dict) else LearnedStates(suite, None, *seen)
        for seen in recorded["learned_from"]
    ]
