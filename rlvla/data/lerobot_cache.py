"""LeRobot datasets by their repository id, in the caches of LeRobot and of the Hub; nothing is downloaded."""

from __future__ import annotations

import os
from pathlib import Path

INFO = Path("meta") / "info.json"  # in every LeRobot dataset


def cache_folders(repo_id: str) -> list[Path]:
    """Candidate folders of a dataset: LeRobot's own folder, its copy of the Hub's cache, the Hub's cache.

    `HF_LEROBOT_HOME`, `HF_HUB_CACHE` and `HF_HOME` move them, as they do for LeRobot and `huggingface_hub`.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    home = Path(os.environ.get("HF_HOME", default)).expanduser()
    lerobot = Path(os.environ.get("HF_LEROBOT_HOME", home / "lerobot")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    inside = f"datasets--{repo_id.replace('/', '--')}"
    return [lerobot / repo_id, lerobot / "hub" / inside, hub / inside]


def cached_dataset(repo_id: str) -> Path | None:
    """The folder of a dataset in one of the `cache_folders`; None if it is in none.

    Of several snapshots in a cache: the one of the branch `main`, else the newest.
    """
    for folder in cache_folders(repo_id):
        if (folder / INFO).is_file():
            return folder
        snapshots = [info.parents[1] for info in folder.glob(f"snapshots/*/{INFO}")]
        if snapshots:
            main = folder / "refs" / "main"
            commit = main.read_text(encoding="utf-8").strip() if main.is_file() else None
            return max(snapshots, key=lambda snapshot: (snapshot.name == commit, snapshot.stat().st_mtime))
    return None
