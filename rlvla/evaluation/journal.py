"""Journal of finished episodes, so that an interrupted evaluation can be resumed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from rlvla.evaluation.results import EpisodeOutcome
from rlvla.utils.files import BestEffortWriter


class EpisodeJournal:
    """Finished episodes of one policy in one mode; each rank writes one file and reads the files of all ranks.

    The file name contains a hash of `identity`, which keeps evaluations apart.

    Args:
        folder: see `journal_folder`.
        identity: all settings that outcomes depend on, JSON-serializable: policy, environment, states, seed, mode.
        rank: rank of this process.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], rank: int = 0):
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        self._folder, self._key = folder, key
        self._path = folder / f"{key}.rank{rank}.jsonl"
        self._best_effort = BestEffortWriter(str(self._path))

    def read(self) -> list[EpisodeOutcome]:
        """Episodes of all ranks without duplicates; incomplete lines are skipped."""
        outcomes: dict[tuple[int, int, int], EpisodeOutcome] = {}
        for path in sorted(self._folder.glob(f"{self._key}.rank*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    outcome = EpisodeOutcome(**json.loads(line))
                except (ValueError, TypeError, RecursionError):  # the process was killed while writing this line
                    continue
                outcomes[outcome.task_id, outcome.init_state_id, outcome.sample] = outcome
        return list(outcomes.values())

    def append(self, outcome: EpisodeOutcome) -> None:
        """Append an episode and flush it to disk; on a full disk it is played again after an interrupt."""
        self._best_effort.attempt(lambda: self._append(outcome))

    def _append(self, outcome: EpisodeOutcome) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b") as file:
            # A truncated last line of an earlier attempt must not merge with this one.
            truncated = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
            file.write((b"\n" if truncated else b"") + json.dumps(outcome.as_dict()).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def journal_folder(output: Path) -> Path:
    """Folder of the journals of an evaluation whose results will be written to `output`."""
    return output.with_name(f".{output.name}.part")


def remove_journals(output: Path) -> None:
    """Delete the journals once the results are written."""
    shutil.rmtree(journal_folder(output), ignore_errors=True)


def fingerprint(folder: Path) -> dict[str, list[int]]:
    """File name -> [size in bytes, mtime in ns] of a checkpoint folder, to detect changes."""
    files = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".json", ".bin", ".pt"))
    kept = [p for p in files if not p.name.startswith((".", "eval"))]  # without the results of evaluations
    return {p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in kept}
