"""Inspect a reward before training on it: score recorded episodes and plot the reward components over time.

Example:
  python cli/score_episodes.py --demos runs/demos/demos.hdf5 --reward success:1.0 rm:0.5 --output runs/scores
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.signals import begin

begin(__name__)

from rlvla.commands.custom_modules import CustomConfig, parse_command_line
from rlvla.data.options import ReadOptions, dataset_camera_flag
from rlvla.data.reading import check_options, read_demonstrations
from rlvla.data.replayed_episodes import recorded_env, replay_problem
from rlvla.rewards import RewardConfig, RewardPlan
from rlvla.utils.cli.command import command, heavy_imports
from rlvla.utils.cli.flags import Parser, add_arguments, arg, from_namespace, range_problems
from rlvla.utils.errors import ConfigError, Problem
from rlvla.utils.files import output_folder_problem, write_json
from rlvla.utils.terminal import show, table


@dataclass(frozen=True)
class ScoreConfig:
    """Episodes to score, and output folder."""

    demos: str = arg("runs/demos/demos.hdf5", "recorded episodes (cli/collect_demos.py)", metavar="FILE")
    episodes: tuple[int, ...] = arg((0,), "numbers of the episodes in the file", minimum=0, metavar="N")
    dataset_camera: tuple[str, ...] = dataset_camera_flag()
    output: str = arg(
        "runs/scores", "folder for a plot of each episode and scores.json", metavar="DIR", writes="folder"
    )


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_arguments(parser, ScoreConfig, "episodes")
    add_arguments(parser, RewardConfig, "rewards")
    add_arguments(parser, CustomConfig, "own code")
    return parser


def run(config: ScoreConfig, rewards: RewardConfig) -> None:
    """Check the configuration, score the episodes, draw the plots."""
    with heavy_imports():
        import rlvla.trainer.reward_sources  # noqa: F401  registers the learned source
        from rlvla.commands.model_checks import recorded_source_problems
        from rlvla.commands.score_episodes import draw_episode, score_recorded

    problems = range_problems(config) + range_problems(rewards)
    demos = plan = None
    try:
        options = ReadOptions(config.dataset_camera)
        check_options(options, [config.demos])
        demos = read_demonstrations(config.demos, options=options)
    except ConfigError as error:
        problems += error.problems
    try:
        plan = RewardPlan.from_config(rewards)
    except ConfigError as error:
        problems += error.problems
    if demos is not None:
        if missing := " ".join(str(n) for n in config.episodes if n >= len(demos.actions)):
            text = f"--episodes {missing}: {config.demos} has {len(demos.actions)} episodes"
            problems.append(Problem("episodes", "out_of_range", text))
        if unplayable := replay_problem(config.demos, demos):
            problems.append(Problem("demos", "not_playable", f"--demos: {unplayable}"))
        elif plan is not None:
            chosen = {demos.init_states[n][0] for n in config.episodes if n < len(demos.actions)}
            problems += recorded_source_problems(rewards, demos)
            problems += plan.problems([task for task in recorded_env(demos).tasks() if task.task_id in chosen])
    if folder := output_folder_problem(config.output):
        problems.append(Problem("output", "folder_in_use", f"--output: {folder}"))
    if problems or demos is None or plan is None:
        raise ConfigError(problems)
    try:
        plan.start()
        scored = score_recorded(Path(config.demos), demos, config.episodes, plan)
    finally:
        plan.close()
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    for episode in scored:
        draw_episode(episode, output / f"{episode.name}.png")
    write_json(output / "scores.json", [episode.as_dict() for episode in scored])
    rows = [(e.name, e.success_at_end, *(f"{r.sum():.3f}" for r in e.components.values())) for e in scored]
    show(table(("episode", "success", *plan.names), rows))
    show(f"pictures and scores.json: {output}")


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    namespace = parse_command_line(build_parser, argv)
    run(from_namespace(ScoreConfig, namespace), from_namespace(RewardConfig, namespace))


if __name__ == "__main__":
    main()
