"""From the flags of `cli/eval_vla.py` to tables, JSON, Markdown, videos and a report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.splits import learned_from_words
from rlvla.envs.watchdog import WatchedPool
from rlvla.envs.worker_config import WorkerConfig
from rlvla.models.actor import Actor
from rlvla.models.vla.checkpoint import EVALUATION_FILE
from rlvla.rollout import RolloutConfig, RolloutEngine
from rlvla.trainer.custom_modules import CustomConfig, modules_with_suites
from rlvla.trainer.eval_checks import Entrant, SuitePlan, check, modes_of
from rlvla.trainer.eval_config import EvalConfig
from rlvla.trainer.eval_files import write_figures
from rlvla.trainer.eval_journal import EpisodeJournal, fingerprint, journal_folder, remove_journals
from rlvla.trainer.eval_record import PolicyEvaluation, package_versions
from rlvla.trainer.eval_report import write_report
from rlvla.trainer.eval_suites import Findings, SuiteEvaluation
from rlvla.trainer.eval_videos import machines_of_run, record_videos
from rlvla.trainer.evaluation import EvalResult, evaluate
from rlvla.trainer.policy_config import PolicyConfig
from rlvla.trainer.policy_export import learned_states, recorded_environment
from rlvla.trainer.setup import start_workers
from rlvla.utils.logging import passing_note, quiet_libraries
from rlvla.utils.strategy import DeepspeedStrategy
from rlvla.utils.strategy_config import StrategyConfig


@dataclass(frozen=True)
class _Evaluation:
    """What holds in every suite.

    Attributes:
        split: which initial states are played.
        config: how much is played.
        workers: how environments are run.
        rollout: how the engine plays.
        modules: custom modules of the workers.
        output: the JSON file that will be written; journals and videos lie beside it.
        several: whether there is more than one suite.
    """

    split: SplitConfig
    config: EvalConfig
    workers: WorkerConfig
    rollout: RolloutConfig | None
    modules: Sequence[str]
    output: Path
    several: bool


def run_eval(
    policy: PolicyConfig,
    env: EnvConfig,
    split: SplitConfig,
    config: EvalConfig,
    workers: WorkerConfig | None = None,
    rollout: RolloutConfig | None = None,
    custom: CustomConfig | None = None,
) -> Findings:
    """Evaluate a policy and its baselines in every suite, compare them, print the tables and write the files.

    Suites are played one after the other, each with workers of its own. Nothing but the journals is written before the
    last one has ended: an interrupted evaluation continues in the suite where it stopped.

    Raises:
        ConfigError: before anything is started, with every problem; protocols that differ are one, unless allowed.
    """
    workers = workers or WorkerConfig()
    plans = check(policy, env, split, config, workers, *filter(None, (rollout,)))
    quiet_libraries()
    output = Path(config.output) if config.output else Path(policy.pretrain) / EVALUATION_FILE
    modules = modules_with_suites(custom or CustomConfig())
    evaluation = _Evaluation(split, config, workers, rollout, modules, output, len(plans) > 1)
    findings = Findings.of({suite: _evaluate_suite(suite, plan, evaluation) for suite, plan in plans.items()})
    strategy = DeepspeedStrategy(StrategyConfig(), seed=config.seed)
    if strategy.is_main:
        _finish(findings, evaluation)
    strategy.barrier()
    return findings


def _evaluate_suite(suite: str, plan: SuitePlan, evaluation: _Evaluation) -> SuiteEvaluation:
    config, first = evaluation.config, plan.entrants[0].setting
    with start_workers(config.num_envs, first.env, first.tasks[0], evaluation.modules, evaluation.workers) as pool:
        strategy = DeepspeedStrategy(StrategyConfig(), seed=config.seed)
        played = [_play(suite, entrant, pool, strategy, evaluation) for entrant in plan.entrants]
    by_name = {e.folder: found for e, found in zip(plan.entrants, played)} | dict(plan.earlier)
    found = SuiteEvaluation.of(played[0], [by_name[name] for name in config.compare])
    if strategy.is_main:
        for comparison in found.comparisons:
            print(f"{suite}: {comparison.as_table()}\n" if evaluation.several else f"{comparison.as_table()}\n")
    return found


def _play(
    suite: str, entrant: Entrant, pool: WatchedPool, strategy: DeepspeedStrategy, evaluation: _Evaluation
) -> PolicyEvaluation:
    """All modes of one policy in one suite."""
    setting, config, split, output = entrant.setting, evaluation.config, evaluation.split, evaluation.output
    with passing_note(f"loading {entrant.folder}"):
        actor = Actor.from_pretrained(entrant.folder, unnorm_key=setting.unnorm_key, **setting.overrides).eval()
        actor.to(strategy.device)
    rollout = RolloutEngine(
        pool, setting.env.env_kwargs(), {"success": 1.0}, evaluation.rollout, setting.tasks, setting.state_input
    )
    trained_on = learned_from_words(setting.tasks, learned_states(recorded_environment(entrant.folder)))
    results: list[EvalResult] = []
    videos: dict[str, list[Path]] = {}
    for mode, temperature in modes_of(config).items():
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
            description=f"evaluate {mode}, {suite}" if evaluation.several else f"evaluate {mode}",
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
                _video_folder(suite, entrant.folder, evaluation) / mode,
                count=config.num_videos,
                seed=config.seed,
                temperature=temperature or 1.0,
                machines=machines_of_run(Path(entrant.folder)),
            )
            videos[mode] = [video.path for video in recorded]
        if strategy.is_main:
            heading = [suite] * evaluation.several + [entrant.folder] * bool(config.compare)
            print("\n".join([*([", ".join(heading)] if heading else []), f"{result.as_table(trained_on)}\n"]))
    versions = package_versions(setting.env.simulator_versions())
    environment = setting.env.as_dict()
    return PolicyEvaluation(entrant.folder, environment, entrant.protocols, results, videos, versions, trained_on)


def _all_videos(output: Path) -> Path:
    """Beside the figures."""
    return output.with_name(f"{output.stem}_videos")


def _video_folder(suite: str, policy: str, evaluation: _Evaluation) -> Path:
    """With several suites a folder for each, with baselines one for each policy."""
    parts = [suite] * evaluation.several + [policy] * bool(evaluation.config.compare)
    return _all_videos(evaluation.output).joinpath(*(re.sub(r"[^\w.-]+", "_", part).strip("_") for part in parts))


def _finish(findings: Findings, evaluation: _Evaluation) -> None:
    """Tables over several suites, and the files."""
    for over_all in [*findings.results, *findings.comparisons]:
        print(f"{over_all.as_table()}\n")
    output = evaluation.output
    markdown = write_figures(output, findings)
    remove_journals(output)
    print(f"figures: {output}, {markdown}")
    if findings.first.own.videos:
        print(f"videos: {_all_videos(output)}")
    if evaluation.config.report:
        print(f"report: {write_report(Path(evaluation.config.report), findings)}")
