"""The settings of an evaluation. Each field is a flag of `cli/eval_vla.py`."""

from __future__ import annotations

from dataclasses import dataclass

from rlvla.envs.registry import suite_names_in_short
from rlvla.options import arg, given, switched_on
from rlvla.utils.cli.flags import MAX_SEED
from rlvla.utils.deepspeed.config import rank_timeout_flag

INSTRUCTIONS = ("own", "shuffled", "none")  # of the episode, of another evaluated episode, or empty
IMAGES = ("own", "none")  # of the episode, or gray


@dataclass(frozen=True)
class EvalConfig:
    """Evaluated policy, suites and baselines, and the output files."""

    task_suite_name: tuple[str, ...] = arg(
        (),
        lambda: (
            "one or more task suites; --task_ids and all other flags apply to each of them "
            f"(default: that of the checkpoint); known: {suite_names_in_short()}"
        ),
        metavar="SUITE",
        essential=True,
    )
    compare: tuple[str, ...] = arg(
        (),
        "baselines: checkpoint folders, evaluated on the same episodes, or JSON files of earlier evaluations",
        metavar="DIR_OR_FILE",
        essential=True,
    )
    allow_unpaired: bool = arg(
        False,
        "allow baselines with another protocol; such differences are marked and not tested",
        read_if=given("compare"),
    )
    each_perturbation: bool = arg(
        False,
        "evaluate without a perturbation, and with each of --perturb alone, instead of with all of them at once; each "
        "is listed like a suite",
    )
    instructions: tuple[str, ...] = arg(
        ("own",),
        "instruction given to the policy: own, of the episode; shuffled, of another evaluated task or initial state; "
        "none, empty. Each is listed like a suite",
        nargs="+",
        choices=INSTRUCTIONS,
    )
    images: tuple[str, ...] = arg(
        ("own",),
        "images given to the policy: own, of the episode; none, gray. Each is listed like a suite",
        nargs="+",
        choices=IMAGES,
    )
    eval_episodes: int = arg(100, "episodes per task, each from a different initial state", minimum=1, essential=True)
    sampled: bool = arg(False, "also sample actions, on the same initial states", essential=True)
    temperature: float = arg(1.0, "sampling temperature (with --sampled)", above=0, read_if=switched_on("sampled"))
    eval_samples: int = arg(
        1,
        "sampled episodes per initial state (with --sampled): the mean, and pass@k for all of them",
        minimum=1,
        maximum=10_000,
        read_if=switched_on("sampled"),
    )
    num_envs: int = arg(4, "environment processes per rank", minimum=1, maximum=10_000, essential=True)
    output: str | None = arg(
        None,
        "JSON file for the results, with a Markdown file next to it (default: eval.json in the checkpoint folder)",
        metavar="FILE",
        writes="file",
        essential=True,
    )
    num_videos: int = arg(
        0,
        "episodes per policy and mode to record as mp4, half of them failures if there are any; they are replayed with "
        "every frame rendered",
        minimum=0,
        essential=True,
    )
    video_cameras: tuple[str, ...] = arg(
        (),
        "further cameras of the scene in videos, beside the policy's images (with --num_videos); the recorded actions "
        "are replayed for them",
        metavar="NAME",
        read_if=given("num_videos"),
    )
    report: str | None = arg(
        None,
        "folder for report.html, a single file with tables, curves, videos and configuration",
        metavar="DIR",
        writes="folder",
        essential=True,
    )
    seed: int = arg(0, "seed of the episodes", minimum=0, maximum=MAX_SEED, essential=True)
    rank_timeout: float = rank_timeout_flag()
    local_rank: int = arg(-1, "set by the deepspeed launcher")
