"""Export of a trained policy as a checkpoint folder, with a record of the environment it was trained in."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rlvla.envs.config import EnvConfig
from rlvla.envs.records import LEARNED_FROM, checked_record
from rlvla.envs.splits import LearnedStates
from rlvla.rewards import StateInputSettings
from rlvla.utils.data_files import read_json
from rlvla.utils.deepspeed.engine import Engine
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import SaveError
from rlvla.utils.files import is_full, put_in_place, write_json
from rlvla.utils.terminal import log

# A policy only works on the observations it was trained on: suite, cameras, image size, rendering, control frequency.
ENVIRONMENT_FILE = "rlvla_environment.json"
MACHINE_STATE = "machine_state"


@dataclass(frozen=True)
class PolicyRecord:
    """The environment of a policy, and the initial states it was trained on.

    Attributes:
        env: suite, cameras and options.
        learned_from: initial states used for training, so that an evaluation cannot reuse them unnoticed.
        machine_state: how the policy observes the state of a reward machine; None if it does not.
    """

    env: EnvConfig
    learned_from: tuple[LearnedStates, ...]
    machine_state: StateInputSettings | None = None

    def write(self, folder: Path) -> None:
        """Write the record into a checkpoint folder."""
        order = sorted(set(self.learned_from), key=lambda s: (s.suite, -1 if s.task_id is None else s.task_id, s.start))
        seen = [asdict(states) for states in order]
        content = self.env.as_dict() | {"cameras": list(self.env.camera_names), LEARNED_FROM: seen}
        if self.machine_state is not None:
            content[MACHINE_STATE] = self.machine_state.as_dict()
        write_json(folder / ENVIRONMENT_FILE, content)


def export_policy(
    engine: Engine, folder: Path, strategy: DeepspeedStrategy, record: PolicyRecord, fallback: str | Path | None = None
) -> Path:
    """Save the module of an engine with `save_pretrained`; called on every rank, written by the main one.

    The folder, complete with its record, is written under a temporary name and then renamed; an existing one is
    replaced.

    Args:
        engine: the trained model.
        folder: the folder to write.
        strategy: used to agree with the other ranks on success or failure.
        record: environment and initial states.
        fallback: where a folder of the same name is written if `folder` cannot be.

    Returns:
        The folder that was written.

    Raises:
        SaveError: on every rank, if none could be written; an existing folder is untouched.
    """
    places = [folder, *([Path(fallback) / folder.name] if fallback else [])]
    problems: list[str] = []
    written: Path | None = None
    with engine.full_parameters() as module:
        for place in places if strategy.is_main else ():
            problem = write_policy(module, place, record)
            if problem is None:
                written = place
                break
            problems.append(f"{place} ({problem})")
    written, problems = strategy.gather_objects((written, problems))[0]
    if written is None:
        raise SaveError(f"the policy could not be written to {' or '.join(problems)}")
    if problems and strategy.is_main:
        log.warning(f"the policy could not be written to {problems[0]}; it is in {written}")
    return written


def write_policy(module: Any, folder: Path, record: PolicyRecord) -> str | None:
    """Write a policy folder atomically with `save_pretrained`; returns what went wrong, or None."""
    temporary = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        module.save_pretrained(temporary)
        record.write(temporary)
        put_in_place(temporary, folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        return f"{error}; make room there" if is_full(error) else str(error)
    return None


def recorded_environment(folder: str | Path) -> dict[str, Any]:
    """The content of the file that `PolicyRecord.write` wrote, {} without one; see `checked_record`.

    Raises:
        ConfigError: the file cannot be read, or holds values of the wrong type.
    """
    path = Path(folder) / ENVIRONMENT_FILE
    return checked_record(read_json(path), path) if path.is_file() else {}


def learned_states(recorded: dict[str, Any]) -> list[LearnedStates] | None:
    """The initial states a policy was trained on, from its `recorded_environment`; None if they are not recorded.

    Early records lack suite and task; their pairs [start, stop) apply to all tasks of the suite.
    """
    if LEARNED_FROM not in recorded:
        return None
    suite = str(recorded.get("task_suite_name"))
    return [
        LearnedStates(**seen) if isinstance(seen, dict) else LearnedStates(suite, None, *seen)
        for seen in recorded[LEARNED_FROM]
    ]
