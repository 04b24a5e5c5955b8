"""Evaluation of policies for `cli/eval_vla.py`: tables, JSON, Markdown, videos and a report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlvla.commands.custom_modules import CustomConfig, modules_with_suites
from rlvla.commands.demos.scene import scene_film
from rlvla.commands.evaluate_checks import (
    EvaluatedPolicy,
    JudgedSuccess,
    SuitePlan,
    check,
    modes_of,
    output_of,
    remote_problems,
    samples_of,
)
from rlvla.commands.run_policies import policy_folder
from rlvla.commands.setup import start_workers
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.workers.config import WorkerConfig
from rlvla.envs.workers.watchdog import WatchedPool
from rlvla.evaluation.config import EvalConfig
from rlvla.evaluation.evaluate import evaluate
from rlvla.evaluation.journal import EpisodeJournal, journal_folder, remove_journals
from rlvla.evaluation.protocol import condition_labels
from rlvla.evaluation.report import (
    EvaluationReport,
    PolicyEvaluation,
    SuiteEvaluation,
    package_versions,
    write_figures,
)
from rlvla.evaluation.report_page import write_report
from rlvla.evaluation.results import EvalResult
from rlvla.evaluation.videos import choose_episodes, machines_of_run, record_videos, recorded_state
from rlvla.models.config import PolicyConfig
from rlvla.rewards import RewardPlan, SuccessConfig
from rlvla.rewards.config import JudgeConfig
from rlvla.rollout import RolloutConfig, RolloutEngine
from rlvla.serving.config import RemoteConfig
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import ConfigError
from rlvla.utils.terminal import page_words, passing_note, quiet_libraries, show, table


@dataclass(frozen=True)
class _Evaluation:
    """Settings common to all suites.

    Attributes:
        config: episodes, seeds and outputs of the evaluation.
        workers: settings of the environment workers.
        rollout: settings of the rollout engine.
        modules: custom modules that the workers import.
        output: the JSON file to write; journals and videos go next to it.
        several: whether there is more than one suite.
        judged: the success detector.
        rewards: success as the only reward.
    """

    config: EvalConfig
    workers: WorkerConfig
    rollout: RolloutConfig | None
    modules: Sequence[str]
    output: Path
    several: bool
    judged: JudgedSuccess
    rewards: RewardPlan


def run_eval(
    policy: PolicyConfig,
    env: EnvConfig,
    split: SplitConfig,
    config: EvalConfig,
    workers: WorkerConfig | None = None,
    rollout: RolloutConfig | None = None,
    custom: CustomConfig | None = None,
    success: SuccessConfig | None = None,
    models: JudgeConfig | None = None,
    remote: RemoteConfig | None = None,
) -> EvaluationReport:
    """Evaluate a policy and its baselines in each suite, compare them, print tables and write the files.

    Suites are evaluated one by one, each with its own workers. Only journals are written before the last suite is done,
    so that an interrupted evaluation continues where it stopped.

    Raises:
        ConfigError: the configuration has problems, such as protocols that differ without `--allow_unpaired`; all of
            them are raised before anything is started.
        VLMFailuresError: more requests of a mode failed than `--vlm_max_failures` allows.
    """
    remote = remote or RemoteConfig()
    problems = remote_problems(policy, config, remote)
    if problems:
        raise ConfigError(problems)
    policy = replace(policy, pretrain=remote.remote or policy_folder(policy.pretrain, env_python=env.env_python))
    config = replace(config, compare=tuple(policy_folder(name, "compare", env.env_python) for name in config.compare))
    workers = workers or WorkerConfig()
    judged = JudgedSuccess(success or SuccessConfig(), models or JudgeConfig())
    plans = check(policy, env, split, config, workers, judged, remote, *filter(None, (rollout,)))
    quiet_libraries()
    output = output_of(policy, config)
    modules = modules_with_suites(custom or CustomConfig())
    rewards = judged.plan()
    rewards.start()
    try:
        evaluation = _Evaluation(config, workers, rollout, modules, output, len(plans) > 1, judged, rewards)
        report = EvaluationReport.of({suite: _evaluate_suite(suite, plan, evaluation) for suite, plan in plans.items()})
    finally:
        rewards.close()
    strategy = DeepspeedStrategy(StrategyConfig(rank_timeout=config.rank_timeout), seed=config.seed)
    if strategy.is_main:
        _finish(report, evaluation)
    strategy.barrier()
    return report


def _evaluate_suite(suite: str, plan: SuitePlan, evaluation: _Evaluation) -> SuiteEvaluation:
    config, first = evaluation.config, plan.policies[0].setting
    with start_workers(config.num_envs, first.played_env, first.tasks, evaluation.modules, evaluation.workers) as pool:
        strategy = DeepspeedStrategy(StrategyConfig(rank_timeout=config.rank_timeout), seed=config.seed)
        evaluations = [_evaluate_policy(suite, policy, plan, pool, strategy, evaluation) for policy in plan.policies]
        if config.num_videos and len(evaluations) > 1:  # of states that were gained and lost
            states = _filmed_states(config, plan, evaluations)
            for policy, of_policy in zip(plan.policies, evaluations):
                loaded = _load(policy, pool, strategy, evaluation)
                made = _film(suite, policy, plan, pool, strategy, evaluation, loaded, of_policy.results, states)
                of_policy.videos.update(made)
                del loaded  # before the next one is in memory
    by_name = {policy.folder: result for policy, result in zip(plan.policies, evaluations)} | dict(plan.earlier)
    result = SuiteEvaluation.of(evaluations[0], [by_name[name] for name in config.compare])
    if strategy.is_main:
        for comparison in result.comparisons:
            show(f"{suite}: {comparison.as_table()}\n" if evaluation.several else f"{comparison.as_table()}\n")
    return result


def _evaluate_policy(
    suite: str,
    policy: EvaluatedPolicy,
    plan: SuitePlan,
    pool: WatchedPool,
    strategy: DeepspeedStrategy,
    evaluation: _Evaluation,
) -> PolicyEvaluation:
    """Evaluate a policy in a suite, in all modes; it is filmed at once if it is the only one.

    Args:
        suite: name of the suite.
        policy: the policy.
        plan: that of the suite.
        pool: environment workers.
        strategy: distributes episodes over ranks.
        evaluation: settings common to all suites.
    """
    setting, config, output = policy.setting, evaluation.config, evaluation.output
    env = setting.resolved
    actor, rollout = _load(policy, pool, strategy, evaluation)
    if evaluation.rewards.success is not None and hasattr(evaluation.rewards.success.judge, "device"):
        evaluation.rewards.success.judge.device = strategy.device
    learned_from, trained_on = policy.learned_from, policy.trained_on
    unseen: tuple[int, ...] = ()
    if learned_from and any(seen.suite == env.suite for seen in learned_from):
        unseen = tuple(t.task_id for t in env.tasks if not any(seen.may_be_of(t) for seen in learned_from))
    results: list[EvalResult] = []
    for mode, temperature in modes_of(config).items():
        identity: dict[str, Any] = {
            "policy": policy.identity,
            "environment": env.record,
            "options": [setting.checkpoint.unnorm_key, setting.overrides, config.seed, mode, temperature],
        }
        samples = samples_of(config, temperature)
        if samples > 1:
            identity["samples"] = samples
        identity |= {name: kind for name, kind in plan.given.items() if kind != "own"}
        if evaluation.judged.description is not None:
            identity["success"] = evaluation.judged.description
        result = evaluate(
            rollout,
            actor,
            env.tasks,
            strategy,
            episodes_per_task=config.eval_episodes,
            split=env.split,
            seed=config.seed,
            greedy=temperature is None,
            temperature=temperature or 1.0,
            samples=samples,
            **plan.given,
            description=f"evaluate {mode}, {suite}" if evaluation.several else f"evaluate {mode}",
            journal=EpisodeJournal(journal_folder(output), identity, strategy.rank),
        )
        result = replace(result, unseen_tasks=unseen)
        evaluation.rewards.check(strategy.all_reduce(evaluation.rewards.metrics(), "sum"))
        results.append(result)
        if strategy.is_main:
            heading = [suite] * evaluation.several + [policy.folder] * bool(config.compare)
            note = "; ".join(filter(None, [trained_on, *condition_labels(plan.given)]))
            show("\n".join([*([", ".join(heading)] if heading else []), f"{result.as_table(note)}\n"]))
    versions = package_versions(env.config.simulator_versions())
    done = PolicyEvaluation(policy.folder, env.record, policy.protocols, results, {}, versions, trained_on)
    if config.num_videos and len(plan.policies) == 1:
        states = _filmed_states(config, plan, [done])
        loaded = actor, rollout
        done.videos.update(_film(suite, policy, plan, pool, strategy, evaluation, loaded, results, states))
    return done


def _load(
    policy: EvaluatedPolicy, pool: WatchedPool, strategy: DeepspeedStrategy, evaluation: _Evaluation
) -> tuple[Any, RolloutEngine]:
    """The policy on the device, and an engine for it."""
    setting = policy.setting
    with passing_note(f"loading {policy.folder}"):
        actor: Any = setting.checkpoint.load_policy()
        actor.eval().to(strategy.device)
    watched = bool(evaluation.config.num_videos) or evaluation.judged.description is not None
    engine = RolloutEngine(
        pool,
        setting.options(watched=watched),
        evaluation.rewards,
        evaluation.rollout,
        setting.resolved.tasks,
        setting.state_input,
        instructions=setting.instructions,
    )
    return actor, engine


def _filmed_states(
    config: EvalConfig, plan: SuitePlan, evaluations: Sequence[PolicyEvaluation]
) -> dict[str, list[tuple[int, int]]]:
    """Mode -> (task, initial state) of the videos of all policies; the first one is compared with the others."""
    states = {}
    others = [*evaluations[1:], *plan.earlier.values()]
    for result in evaluations[0].results:
        recorded = {recorded_state(path) for e in plan.earlier.values() for path in e.videos.get(result.mode, ())}
        baselines = [base for e in others if (base := e.result(result.mode)) is not None]
        chosen = choose_episodes(result, config.num_videos, recorded, baselines)
        states[result.mode] = [(e.task_id, e.init_state_id) for e in chosen]
    return states


def _film(
    suite: str,
    policy: EvaluatedPolicy,
    plan: SuitePlan,
    pool: WatchedPool,
    strategy: DeepspeedStrategy,
    evaluation: _Evaluation,
    loaded: tuple[Any, RolloutEngine],
    results: Sequence[EvalResult],
    states: Mapping[str, Sequence[tuple[int, int]]],
) -> dict[str, list[Path]]:
    """Record the videos of a policy: mode -> files."""
    (actor, rollout), config, videos = loaded, evaluation.config, {}
    for result, temperature in zip(results, modes_of(config).values()):
        recorded = record_videos(
            rollout,
            actor,
            policy.setting.resolved.tasks,
            strategy,
            result,
            _video_folder(suite, policy.folder, evaluation) / result.mode,
            count=config.num_videos,
            seed=config.seed,
            temperature=temperature or 1.0,
            **plan.given,
            machines=machines_of_run(Path(policy.folder)),
            states=states[result.mode],
            scene=scene_film(pool, policy.setting, config.video_cameras),
        )
        evaluation.rewards.metrics()  # questions about videos count in no mode
        videos[result.mode] = [video.path for video in recorded]
    return videos


def _all_videos(output: Path) -> Path:
    """The folder of all videos, next to the JSON file."""
    return output.with_name(f"{output.stem}_videos")


def _video_folder(suite: str, policy: str, evaluation: _Evaluation) -> Path:
    """The folder of a policy's videos, with a level per suite if there are several, and per policy with baselines."""
    parts = [suite] * evaluation.several + [policy] * bool(evaluation.config.compare)
    return _all_videos(evaluation.output).joinpath(*(re.sub(r"[^\w.-]+", "_", part).strip("_") for part in parts))


def _finish(report: EvaluationReport, evaluation: _Evaluation) -> None:
    """Print the tables over several suites and write the files."""
    for text in [*(r.as_table() for r in report.results), *(c.as_table() for c in report.comparisons)]:
        show(f"{text}\n")
    for rows, over in ((report.conditions, ""), (report.categories, " over tasks")):
        if rows:
            show(f"{table(rows[0], rows[1:])}\n(success at end, 95 % intervals{over})\n")
    output = evaluation.output
    markdown = write_figures(output, report)
    remove_journals(output)
    show(f"results: {output}, {markdown}")
    if report.first.own.videos:
        show(f"videos: {_all_videos(output)}")
    if evaluation.config.report:
        show(page_words("report", write_report(Path(evaluation.config.report), report)))
