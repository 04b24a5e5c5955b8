"""Progress of a recipe: `state.json` in the folder of --output, rewritten after every step."""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlvla.recipes.recipe import KINDS, OUTPUT, POLICY_FOLDER, Stage
from rlvla.utils.data_files import check_types, read_json
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import write_json

STATE_FILE = "state.json"
_LOCK = ".recipe_lock"
_SCRIPT_SECONDS = "seconds.txt"  # of the shell scripts that recipes have replaced
_LOCK_SECONDS = 60.0  # for the processes of a killed attempt to end
RUNNING, DONE = "running", "done"
# Settings that do not affect the output of a stage.
_WITHOUT_EFFECT = {"quiet", "log_level", "num_envs", "use_tensorboard", "use_wandb", "load_checkpoint"}


@dataclass(frozen=True)
class Record:
    """Record of a started stage.

    Attributes:
        stage: its name.
        status: "running" (or interrupted) or "done".
        output: its output; relative to the folder of --output if inside.
        settings: setting -> value, as text, of the last attempt; None if another program ran it.
        seconds: duration of all attempts.
        cpu_seconds: processor time, without attempts during which the recipe was killed; None if not measured.
    """

    stage: str
    status: str
    output: str
    settings: dict[str, Any] | None = None
    seconds: float = 0.0
    cpu_seconds: float | None = None


@dataclass
class State:
    """Records of the stages in a folder, by output, since the same stage may have several.

    Attributes:
        folder: folder of --output.
        records: output -> record.
        earlier: stage -> seconds of the last run before it was repeated.
    """

    folder: Path
    records: dict[str, Record] = field(default_factory=dict)
    earlier: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> State:
        """The state of a folder; empty for a new one.

        Raises:
            ConfigError: the file is damaged.
        """
        path = folder / STATE_FILE
        if not path.exists():
            return cls(folder)
        try:
            content = read_json(path)
            check_types({"stages": None} | content, {"stages": dict[str, dict], "earlier": dict[str, float]}, path)
            hints = {"stage": str, "status": str, "output": str, "settings": dict | None, "seconds": float}
            hints["cpu_seconds"] = float | None
            for key, entry in content["stages"].items():
                check_types(dict.fromkeys(hints) | entry, hints, f"{path}: {key}")
                if entry["stage"] not in KINDS or entry["output"] != key or ".." in Path(key).parts:
                    raise ConfigError(f"{path}: {key} is not the output of a stage")
            records = {key: Record(**{name: e.get(name) for name in hints}) for key, e in content["stages"].items()}
        except ConfigError as error:
            text = f"{error}; remove the file to run all stages again, in another folder or an empty one"
            raise ConfigError.of("recipe", "invalid_state", text) from error
        return cls(folder, records, dict(content.get("earlier", {})))

    def write(self) -> None:
        """Write `state.json`."""
        stages = {key: asdict(record) for key, record in self.records.items()}
        write_json(self.folder / STATE_FILE, {"stages": stages, "earlier": self.earlier})

    def of(self, stage: Stage) -> Record | None:
        """The record with the output of this stage."""
        return self.records.get(self._key(stage))

    def is_done(self, stage: Stage) -> bool:
        """Whether the stage need not run: its command has ended, or was killed after its last file."""
        record, last_file = self.of(stage), KINDS[stage.name].last_file
        if record is None:
            return False
        return record.status == DONE or (last_file is not None and (self.folder / record.output / last_file).exists())

    def note(self, stage: Stage, status: str, seconds: float, cpu_seconds: float | None = None) -> None:
        """Record an attempt, with the seconds of all attempts so far, and write the file."""
        key = self._key(stage)
        self.records[key] = Record(stage.name, status, key, self._as_recorded(stage), seconds, cpu_seconds)
        self.write()

    def changes(self, stage: Stage) -> list[str]:
        """Differences between the settings of a finished stage and the current ones, e.g. `seed 0 -> 1`."""
        record = self.of(stage)
        if record is None or not self.is_done(stage) or record.settings is None:
            return []
        now, before = self._as_recorded(stage), record.settings
        names = [name for name in {**before, **now} if name not in _WITHOUT_EFFECT]
        values = [(name, before.get(name, "(default)"), now.get(name, "(default)")) for name in names]
        return [f"{name} {old} -> {new}" for name, old, new in values if old != new]

    def begin_again(self, stages: Sequence[Stage], first: str) -> None:
        """Reset `first` and all later stages with any output; outputs are renamed to `superseded_...`."""
        order = list(KINDS)
        late = {key: r for key, r in self.records.items() if order.index(r.stage) >= order.index(first)}
        for stage in stages:
            record = self.of(stage)
            if self._key(stage) in late and record is not None and record.status == DONE:
                self.earlier[stage.name] = record.seconds
        for record in late.values():
            path = self.folder / record.output
            if not Path(record.output).is_absolute() and path.exists():
                superseded = path.with_name(f"superseded_{path.name}")
                if superseded.is_dir():
                    shutil.rmtree(superseded)
                path.replace(superseded)
        self.records = {key: record for key, record in self.records.items() if key not in late}
        self.write()

    def remove_unfinished(self, stage: Stage) -> None:
        """Remove the output of an interrupted attempt, unless the command continues from it."""
        key, record = self._key(stage), self.of(stage)
        path = self.folder / key
        resumes = KINDS[stage.name].resumes or stage.settings.get("load_checkpoint")
        if record is None or resumes or Path(key).is_absolute():
            return
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    @classmethod
    def opened(cls, folder: Path, stages: Sequence[Stage]) -> State:
        """The state of a folder; a folder of the former shell scripts, which had no `state.json`, is converted."""
        state = cls.read(folder)
        if state.records:
            return state
        seconds: dict[str, float] = {}
        path = folder / _SCRIPT_SECONDS
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            name, _, value = line.partition(" ")
            name = name.removesuffix("/interrupted")
            seconds[name] = seconds.get(name, 0.0) + float(value)
        trained = any(s.name == "sft" and (s.output / POLICY_FOLDER).is_dir() for s in stages)
        for stage in stages:
            evaluated = stage.name.startswith("eval_") and stage.output.is_file()
            done = evaluated or (trained and stage.name in ("demos", "sft"))
            if done or (stage.name in seconds and stage.output.exists()):
                key, status = state._key(stage), DONE if done else RUNNING
                state.records[key] = Record(stage.name, status, key, None, seconds.get(stage.name, 0.0))
        return state

    def _key(self, stage: Stage) -> str:
        output = stage.output.absolute()
        folder = self.folder.absolute()
        return str(output.relative_to(folder)) if output.is_relative_to(folder) else str(output)

    def _as_recorded(self, stage: Stage) -> dict[str, Any]:
        """The settings as text, without defaults and independent of the place of the folder."""
        settings = {name: value for name, value in stage.settings.items() if value is not None}
        if stage.processes > 1:
            settings["processes"] = stage.processes
        return {name: _as_text(value, self.folder) for name, value in settings.items()}


def _as_text(value: Any, folder: Path) -> str:
    if isinstance(value, list):
        return " ".join(_as_text(one, folder) for one in value)
    if isinstance(value, bool):
        return str(value).lower()
    inside = isinstance(value, str) and Path(value).is_relative_to(folder)
    return str(Path(OUTPUT) / Path(value).relative_to(folder)) if inside else str(value)


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Lock a folder, created if missing; yields the descriptor, which child processes inherit.

    The processes of a killed attempt hold the lock until they have ended, which is waited for.

    Raises:
        ConfigError: another process is running a recipe there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("a", encoding="utf-8") as file:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    text = f"--output {folder}: another process is running a recipe there; wait until it has ended"
                    raise ConfigError.of("output", "folder_in_use", text) from None
                time.sleep(0.2)
            except OSError:
                break  # a file system without locks
        yield file.fileno()
