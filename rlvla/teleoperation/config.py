"""Flags of `cli/teleoperate.py`."""

from __future__ import annotations

from dataclasses import dataclass

from rlvla.options import arg
from rlvla.utils.cli.flags import MAX_SEED


@dataclass(frozen=True)
class TeleoperationConfig:
    """Page, controls and output of a teleoperation."""

    output: str = arg(
        "runs/teleoperation",
        "folder for demos.hdf5 and dataset_statistics.json",
        metavar="DIR",
        writes="folder",
        essential=True,
    )
    port: int = arg(8010, "port of the page on 127.0.0.1; 0: any free one", minimum=0, maximum=65_535, essential=True)
    keys: tuple[str, ...] = arg(
        (),
        "keys of the action dimensions, DIM:NEGATIVE/POSITIVE, or DIM:KEY for one that a key toggles, e.g. 0:a/d "
        "1:s/w 2:space; other dimensions stay at 0 (default: two keys per dimension, and one per gripper)",
        nargs="+",
        metavar="DIM:KEYS",
        essential=True,
    )
    speed: float = arg(
        0.5, "share of the largest action that a key commands at first; the page changes it", above=0, maximum=1
    )
    gripper_start: int = arg(
        -1,
        "gripper command at the start of an episode: -1 is open in robosuite, LIBERO and Meta-World, 1 in ManiSkill",
        choices=(-1, 1),
    )
    clock: bool = arg(
        False,
        "from the first key of an episode on, step at the control frequency, with zero actions while no key is held "
        "(default: the simulator waits)",
        essential=True,
    )
    num_demos: int | None = arg(None, "end after this many kept episodes (default: the person ends it)", minimum=1)
    seed: int = arg(0, "seed of the choice of initial states, and of the simulator", minimum=0, maximum=MAX_SEED)
