"""What has been done of a recipe: `state.json` in the folder of --output, replaced whole after every step."""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlvla.commands.problem_texts import problem
from rlvla.recipes.recipe import Stage
from rlvla.recipes.stages import KINDS, OUTPUT, POLICY_FOLDER
from rlvla.utils.data_files import check_types, read_json
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import write_json

STATE_FILE = "state.json"
_LOCK = ".recipe_lock"
_SECONDS_OF_SCRIPTS = "seconds.txt"  # of the shell scripts that were here before recipes
_LOCK_SECONDS = 60.0  # what a killed attempt had started ends within this time
RUNNING, DONE = "running", "done"
# Settings that change nothing of what a stage makes.
_WITHOUT_EFFECT = {"quiet", "log_level", "num_envs", "use_tensorboard", "use_wandb", "load_checkpoint"}


@dataclass(frozen=True)
class Record:
    """What is known of a stage that was begun.

    Attributes:
        stage: its name.
        status: "running" (or ended before it was done) or "done".
        output: what it writes; relative to the folder of --output if it lies there.
        settings: setting -> value, as text, of the last attempt; None if it was made by another program.
        seconds: how long all attempts took together, in seconds.
        cpu_seconds: processor time, without attempts during which the recipe was killed; None if it was not measured.
    """

    stage: str
    status: str
    output: str
    settings: dict[str, Any] | None = None
    seconds: float = 0.0
    cpu_seconds: float | None = None


@dataclass
class State:
    """The records of a folder, by what the stages write: the same stage may write to several places.

    Attributes:
        folder: of --output.
        records: output -> record.
        earlier: stage -> seconds that it took before it was repeated.
    """

    folder: Path
    records: dict[str, Record] = field(default_factory=dict)
    earlier: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> State:
        """The state of a folder; empty if nothing was done there.

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
            records = {key: Record(**{name: e.get(name) for name in hints}) for key, e in content["stages"].items()}
        except ConfigError as error:
            raise ConfigError(problem("recipe", "invalid_state", error=error)) from error
        return cls(folder, records, dict(content.get("earlier", {})))

    def write(self) -> None:
        """Replace the file."""
        stages = {key: asdict(record) for key, record in self.records.items()}
        write_json(self.folder / STATE_FILE, {"stages": stages, "earlier": self.earlier})

    def of(self, stage: Stage) -> Record | None:
        """The record of a stage that writes where this one does."""
        return self.records.get(self._key(stage))

    def is_done(self, stage: Stage) -> bool:
        """Whether the stage need not run."""
        record = self.of(stage)
        return record is not None and record.status == DONE

    def note(self, stage: Stage, status: str, seconds: float, cpu_seconds: float | None = None) -> None:
        """Record an attempt, with the seconds of all attempts so far, and write the file."""
        key = self._key(stage)
        self.records[key] = Record(stage.name, status, key, self._as_recorded(stage), seconds, cpu_seconds)
        self.write()

    def changes(self, stage: Stage) -> list[str]:
        """How the settings of a stage that is done differ from those now, e.g. `seed 0 -> 1`; [] if they do not."""
        record = self.of(stage)
        if record is None or record.status != DONE or record.settings is None:
            return []
        now, before = self._as_recorded(stage), record.settings
        names = [name for name in {**before, **now} if name not in _WITHOUT_EFFECT]
        shown = [(name, before.get(name), now.get(name)) for name in names]
        return [f"{name} {_typed(old)} -> {_typed(new)}" for name, old, new in shown if old != new]

    def begin_again(self, stages: Sequence[Stage], first: str) -> None:
        """Forget `first` and all later stages, whatever they wrote to; what they left is set aside."""
        order = list(KINDS)
        late = {key: r for key, r in self.records.items() if order.index(r.stage) >= order.index(first)}
        for stage in stages:
            record = self.of(stage)
            if self._key(stage) in late and record is not None and record.status == DONE:
                self.earlier[stage.name] = record.seconds
        for record in late.values():
            _set_aside(self.folder, Path(record.output))
        self.records = {key: record for key, record in self.records.items() if key not in late}
        self.write()

    def remove_remains(self, stage: Stage) -> None:
        """Remove what an attempt that was interrupted left, unless the command continues from it."""
        key, record = self._key(stage), self.of(stage)
        if record is None or KINDS[stage.name].resumes or Path(key).is_absolute():
            return
        path = self.folder / key
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    @classmethod
    def opened(cls, folder: Path, stages: Sequence[Stage]) -> State:
        """The state of a folder, with what the shell scripts of earlier versions, which had no such file, did there."""
        state = cls.read(folder)
        if not state.records:
            state._adopt(stages)
        return state

    def _adopt(self, stages: Sequence[Stage]) -> None:
        seconds: dict[str, float] = {}
        path = self.folder / _SECONDS_OF_SCRIPTS
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            name, _, value = line.partition(" ")
            name = name.removesuffix("/interrupted")
            seconds[name] = seconds.get(name, 0.0) + float(value)
        trained = any(s.name == "sft" and (s.output / POLICY_FOLDER).is_dir() for s in stages)
        for stage in stages:
            evaluated = stage.name.startswith("eval_") and stage.output.is_file()
            if evaluated or (trained and stage.name in ("demos", "sft")):
                key = self._key(stage)
                self.records[key] = Record(stage.name, DONE, key, None, seconds.get(stage.name, 0.0))
            elif stage.name in seconds and stage.output.exists():
                key = self._key(stage)
                self.records[key] = Record(stage.name, RUNNING, key, None, seconds[stage.name])

    def _key(self, stage: Stage) -> str:
        output = stage.output.absolute()
        folder = self.folder.absolute()
        return str(output.relative_to(folder)) if output.is_relative_to(folder) else str(output)

    def _as_recorded(self, stage: Stage) -> dict[str, Any]:
        """The settings as text, without those left to their defaults and independent of where the folder lies."""
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


def _typed(value: str | None) -> str:
    return "(default)" if value is None else value


def _set_aside(folder: Path, output: Path) -> None:
    """Rename what a stage wrote below the folder; what was set aside before is removed."""
    path = folder / output
    if output.is_absolute() or not path.exists():
        return
    aside = path.with_name(f"superseded_{path.name}")
    if aside.is_dir():
        shutil.rmtree(aside)
    path.replace(aside)


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Hold the lock of a folder, which is created; yields the descriptor, for the processes that share the lock.

    What a killed attempt had started holds the lock until it has ended, which is waited for.

    Raises:
        ConfigError: another process is running a recipe there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("a", encoding="utf-8") as file:
        ends = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > ends:
                    raise ConfigError(
                        replace(problem("recipe", "folder_in_use", value=folder), flag="output")
                    ) from None
                time.sleep(0.2)
            except OSError:
                break  # a file system without locks
        yield file.fileno()
