"""From the flags of `cli/eval_vla.py` to tables, JSON, Markdown, videos and a report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.watchdog import WatchedPool
from rlvla.envs.worker_config import WorkerConfig
from rlvla.models.actor import Actor
from rlvla.models.vla.checkpoint import EVALUATION_FILE
from rlvla.rollout import RolloutConfig, RolloutEngine
from rlvla.trainer.custom_modules import CustomConfig, modules_with_suites
from rlvla.trainer.eval_comparison import Comparison, compare, describe_differences
from rlvla.trainer.eval_journal import EpisodeJournal, fingerprint, journal_folder, remove_journals
from rlvla.trainer.eval_record import PolicyEvaluation, describe_protocol, package_versions
from rlvla.trainer.eval_report import write_report
from rlvla.trainer.eval_videos import record_videos
from rlvla.trainer.evaluation import EvalResult, evaluate
from rlvla.trainer.setup import PolicyConfig, Setting, check_setting, start_workers
from rlvla.utils.arguments import arg, range_problems
from rlvla.utils.errors import ConfigError, require
from rlvla.utils.logging import markdown_table, quiet_libraries
from rlvla.utils.runs import write_atomic, write_json
from rlvla.utils.strategy import DeepspeedStrategy, StrategyConfig


@dataclass(frozen=True)
class EvalConfig:
    """How much is played, what with, and where the figures go."""

    compare: tuple[str, ...] = arg(
        (),
        "baselines: further checkpoint folders, which play the same episodes, or JSON files of earlier evaluations",
        metavar="DIR_OR_FILE",
    )
    allow_unpaired: bool = arg(
        False, "compare with a baseline of another protocol too; the difference is then marked and not tested"
    )
    eval_episodes: int = arg(100, "episodes per task, each from another initial state", minimum=1)
    sampled: bool = arg(False, "also sample actions, on the same initial states")
    temperature: float = arg(1.0, "sampling temperature (with --sampled)", above=0)
    num_envs: int = arg(4, "environment processes per rank", minimum=1)
    output: str | None = arg(
        None,
        "JSON file for the figures, with a Markdown file beside it (default: eval.json in the checkpoint folder)",
        metavar="FILE",
    )
    num_videos: int = arg(
        0,
        "episodes per policy and mode that are recorded as mp4, half of them failures where there are any; they are "
        "played again with every frame",
        minimum=0,
    )
    report: str | None = arg(
        None, "folder for report.html, a single file with tables, curves, videos and configuration", metavar="DIR"
    )
    seed: int = arg(0, "seed of the episodes", minimum=0)
    local_rank: int = arg(-1, "set by the deepspeed launcher")


@dataclass(frozen=True)
class Entrant:
    """A policy that is going to play.

    Attributes:
        folder: its checkpoint, as the user named it.
        setting: what it sees, checked.
        protocols: mode -> `describe_protocol`.
    """

    folder: str
    setting: Setting
    protocols: dict[str, dict[str, Any]]


def run_eval(
    policy: PolicyConfig,
    env: EnvConfig,
    split: SplitConfig,
    config: EvalConfig,
    workers: WorkerConfig | None = None,
    rollout: RolloutConfig | None = None,
    custom: CustomConfig | None = None,
) -> PolicyEvaluation:
    """Evaluate a policy and its baselines, compare them, print the tables and write the files.

    Raises:
        ConfigError: before anything is started, with every problem; protocols that differ are one, unless allowed.
    """
    workers = workers or WorkerConfig()
    entrants, earlier = check(policy, env, split, config, workers, *filter(None, (rollout,)))
    quiet_libraries()
    output = Path(config.output) if config.output else Path(policy.pretrain) / EVALUATION_FILE
    first, modules = entrants[0].setting, modules_with_suites(custom or CustomConfig())
    with start_workers(config.num_envs, first.env, first.tasks[0], modules, workers) as pool:
        strategy = DeepspeedStrategy(StrategyConfig(), seed=config.seed)
        played = [_play(entrant, pool, strategy, split, config, output, rollout) for entrant in entrants]
        by_name = {e.folder: found for e, found in zip(entrants, played)} | earlier
        baselines = [by_name[name] for name in config.compare]
        comparisons = compare_all(played[0], baselines)
        if strategy.is_main:
            for comparison in comparisons:
                print(comparison.as_table())
            _write(output, played[0], baselines, comparisons)
            if config.report:
                print(f"report: {write_report(Path(config.report), played[0], baselines, comparisons)}")
        strategy.barrier()
    return played[0]


def check(
    policy: PolicyConfig,
    env: EnvConfig,
    split: SplitConfig,
    config: EvalConfig,
    workers: WorkerConfig,
    *more_flags: Any,
) -> tuple[list[Entrant], dict[str, PolicyEvaluation]]:
    """The policies that will play, --pretrain first, and earlier results by file name."""
    problems = [p for part in (policy, env, split, config, workers, *more_flags) for p in range_problems(part)]
    problems += workers.problems(env.env_python)
    folders = [policy.pretrain, *config.compare]
    if config.num_videos:
        require("av", extra="video")
    if config.report and Path(config.report).exists() and not Path(config.report).is_dir():
        problems.append(f"--report {config.report} is a file; name a folder")
    problems += [f"--compare {name} is given twice" for name in {n for n in folders if folders.count(n) > 1}]
    entrants: list[Entrant] = []
    earlier: dict[str, PolicyEvaluation] = {}
    for name in dict.fromkeys(folders):
        label = "" if name == policy.pretrain else f"--compare {name}: "
        try:
            if label and Path(name).is_file():
                earlier[name] = PolicyEvaluation.read(Path(name))
                continue
            setting, more = check_setting(replace(policy, pretrain=name), env, split, config.eval_episodes)
            problems += [f"{label}{problem}" for problem in more]
            if setting is not None and not more and not problems:
                entrants.append(Entrant(name, setting, _protocols(setting, split, config)))
        except ConfigError as error:
            problems += [f"{label}{problem}" for problem in error.problems]
    if not problems:
        own = entrants[0].protocols
        others = {e.folder: e.protocols for e in entrants[1:]} | {name: e.protocols for name, e in earlier.items()}
        problems += [p for name, protocols in others.items() for p in _pairing_problems(name, own, protocols, config)]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return entrants, earlier


def _modes(config: EvalConfig) -> dict[str, float | None]:
    """Mode -> temperature."""
    return {"greedy": None} | ({"sampled": config.temperature} if config.sampled else {})


def _protocols(setting: Setting, split: SplitConfig, config: EvalConfig) -> dict[str, dict[str, Any]]:
    return {
        mode: describe_protocol(
            setting.tasks, split, config.eval_episodes, config.seed, temperature, setting.env.success_hold_steps
        )
        for mode, temperature in _modes(config).items()
    }


def _pairing_problems(
    name: str, own: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]], config: EvalConfig
) -> list[str]:
    common = [mode for mode in own if mode in other]
    if not common:
        return [f"--compare {name} was evaluated {' and '.join(other)} only; this evaluation is {' and '.join(own)}"]
    found = [phrase for mode in common for phrase in describe_differences(own[mode], other[mode])]
    if not found or config.allow_unpaired:
        return []
    return [
        f"--compare {name} was not measured by the same protocol ({'; '.join(dict.fromkeys(found))}); evaluate both "
        "alike, or give --allow_unpaired for a marked comparison without pairs"
    ]


def _play(
    entrant: Entrant,
    pool: WatchedPool,
    strategy: DeepspeedStrategy,
    split: SplitConfig,
    config: EvalConfig,
    output: Path,
    rollout_config: RolloutConfig | None,
) -> PolicyEvaluation:
    """All modes of one policy."""
    setting = entrant.setting
    actor = Actor.from_pretrained(entrant.folder, unnorm_key=setting.unnorm_key, **setting.overrides).eval()
    actor.to(strategy.device)
    rollout = RolloutEngine(
        pool, setting.env.env_kwargs(), {"success": 1.0}, rollout_config, setting.tasks, setting.state_input
    )
    results: list[EvalResult] = []
    videos: dict[str, list[Path]] = {}
    for mode, temperature in _modes(config).items():
        identity = {
            "policy": [str(Path(entrant.folder).resolve()), fingerprint(Path(entrant.folder))],
            "environment": setting.env.as_dict(),
            "options": [setting.unnorm_key, setting.overrides, config.seed, mode, temperature],
        }
        result = evaluate(
            rollout,
            actor,
            setting.tasks,
            strategy,
            episodes_per_task=config.eval_episodes,
            split=split,
            seed=config.seed,
            greedy=temperature is None,
            temperature=temperature or 1.0,
            description=f"evaluate {mode}",
            journal=EpisodeJournal(journal_folder(output), identity, strategy.rank),
        )
        results.append(result)
        if config.num_videos:
            recorded = record_videos(
                rollout,
                actor,
                setting.tasks,
                strategy,
                result,
                _video_folder(output, entrant.folder, config) / mode,
                count=config.num_videos,
                split=split,
                seed=config.seed,
                temperature=temperature or 1.0,
            )
            videos[mode] = [video.path for video in recorded]
        if strategy.is_main:
            print(f"{entrant.folder}\n{result.as_table()}" if config.compare else result.as_table())
    versions = package_versions(setting.env.simulator_versions())
    return PolicyEvaluation(entrant.folder, setting.env.as_dict(), entrant.protocols, results, videos, versions)


def _video_folder(output: Path, policy: str, config: EvalConfig) -> Path:
    """Beside the figures; with baselines, a folder for each policy."""
    folder = output.with_name(f"{output.stem}_videos")
    return folder / re.sub(r"[^\w.-]+", "_", policy).strip("_") if config.compare else folder


def compare_all(own: PolicyEvaluation, baselines: Sequence[PolicyEvaluation]) -> list[Comparison]:
    """The policy against every baseline, in every mode that both were evaluated in."""
    found = []
    for base in baselines:
        for result in own.results:
            other = base.result(result.mode)
            if other is not None:
                differing = describe_differences(own.protocols[result.mode], base.protocols[result.mode])
                found.append(compare(own.policy, result, base.policy, other, differing))
    return found


def _write(
    output: Path, own: PolicyEvaluation, baselines: Sequence[PolicyEvaluation], comparisons: Sequence[Comparison]
) -> None:
    content = own.as_dict()
    if baselines:
        content["baselines"] = [base.as_dict() for base in baselines]
        content["comparisons"] = [comparison.as_dict() for comparison in comparisons]
    write_json(output, content)
    markdown = output.with_suffix(".md")
    write_atomic(markdown, as_markdown(own, baselines, comparisons).encode())
    remove_journals(output)
    print(f"figures: {output}, {markdown}")
    if own.videos:
        print(f"videos: {output.with_name(f'{output.stem}_videos')}")


def as_markdown(own: PolicyEvaluation, baselines: Sequence[PolicyEvaluation], comparisons: Sequence[Comparison]) -> str:
    """All tables, for an issue or a lab book."""
    parts = []
    for evaluation in [own, *baselines]:
        for result in evaluation.results:
            dropped = f" **{result.dropped} episodes could not be played.**" if result.dropped else ""
            parts += [
                f"## {evaluation.policy}, {result.mode}",
                f"Protocol {result.protocol}, seed {evaluation.protocols[result.mode]['seed']}; "
                f"95 % Wilson intervals.{dropped}",
                markdown_table(result.HEADERS, result.rows()),
            ]
    for comparison in comparisons:
        note = comparison.note()
        parts += [
            f"## {comparison.heading()}",
            f"{note[0].upper()}{note[1:]}.",
            markdown_table(comparison.HEADERS, comparison.rows()),
        ]
    parts.append("Measured with " + ", ".join(f"{name} {number}" for name, number in own.versions.items()) + ".")
    return "\n\n".join(parts) + "\n"
