"""What `cli/eval_vla.py` is asked for, checked in full before anything is started: suites, policies, protocols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.worker_config import WorkerConfig
from rlvla.trainer.eval_comparison import describe_differences
from rlvla.trainer.eval_config import EvalConfig
from rlvla.trainer.eval_record import PolicyEvaluation, describe_protocol
from rlvla.trainer.policy_config import PolicyConfig
from rlvla.trainer.setup import Setting, check_setting
from rlvla.utils.arguments import range_problems
from rlvla.utils.errors import ConfigError, require


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


@dataclass(frozen=True)
class SuitePlan:
    """What is done in one suite.

    Attributes:
        entrants: the policies that will play, --pretrain first.
        earlier: results of earlier evaluations by file name.
    """

    entrants: tuple[Entrant, ...]
    earlier: Mapping[str, PolicyEvaluation]


def check(
    policy: PolicyConfig,
    env: EnvConfig,
    split: SplitConfig,
    config: EvalConfig,
    workers: WorkerConfig,
    *more_flags: Any,
) -> dict[str, SuitePlan]:
    """What is to be played, by suite, in the order of the command line.

    Raises:
        ConfigError: every problem of every suite; what concerns one of several suites begins with its name.
    """
    problems = [p for part in (policy, env, split, config, workers, *more_flags) for p in range_problems(part)]
    problems += workers.problems(env.env_python)
    folders = [policy.pretrain, *config.compare]
    if config.num_videos:
        require("av", extra="video")
    if config.report and Path(config.report).exists() and not Path(config.report).is_dir():
        problems.append(f"--report {config.report} is a file; name a folder")
    problems += [f"--compare {name} is given twice" for name in folders if folders.count(name) > 1]
    suites = config.task_suite_name or (env.task_suite_name,)
    problems += [f"--task_suite_name names {suite} twice" for suite in suites if suites.count(suite) > 1]
    plans: dict[str, SuitePlan] = {}
    found: dict[str | None, list[str]] = {}
    for suite in dict.fromkeys(suites):
        try:
            plan = _plan(policy, replace(env, task_suite_name=suite), split, config)
            plans[plan.entrants[0].setting.env.suite] = plan
        except ConfigError as error:
            found[suite] = error.problems
    if len(plans) > 1:  # --allow_unpaired would let another suite's figures stand in a suite's row
        problems += [
            f"--compare {name} is an evaluation of {earlier.suite} alone; compare with one of all these suites"
            for suite, plan in plans.items()
            for name, earlier in plan.earlier.items()
            if earlier.suite != suite
        ]
    if problems or found:
        raise ConfigError(dict.fromkeys([*problems, *_merged(found, len(set(suites)))]))
    return plans


def _merged(found: Mapping[str | None, Sequence[str]], suites: int) -> list[str]:
    """Problems of single suites with the suite's name, what all of them share without."""
    lists = list(found.values())
    common = [p for p in lists[0] if len(lists) == suites and all(p in more for more in lists)] if lists else []
    named = [(suite, p) for suite, more in found.items() for p in more if p not in common]
    told = {suite: (str(suite), f"suite {suite} ", "unknown task suite ") for suite in found}  # how such a one begins
    return [*common, *(p if suite is None or p.startswith(told[suite]) else f"{suite}: {p}" for suite, p in named)]


def _plan(policy: PolicyConfig, env: EnvConfig, split: SplitConfig, config: EvalConfig) -> SuitePlan:
    """The checked policies of one suite; ConfigError with every problem."""
    problems: list[str] = []
    entrants: list[Entrant] = []
    earlier: dict[str, PolicyEvaluation] = {}
    for name in dict.fromkeys([policy.pretrain, *config.compare]):
        label = "" if name == policy.pretrain else f"--compare {name}: "
        try:
            if label and Path(name).is_file():
                suite = entrants[0].setting.env.suite if entrants else env.task_suite_name
                if suite is not None:  # otherwise the policy itself is not there, which is said already
                    earlier[name] = PolicyEvaluation.read(Path(name), suite)
                continue
            setting, more = check_setting(replace(policy, pretrain=name), env, split, config.eval_episodes)
            problems += [f"{label}{problem}" for problem in more]
            if setting is not None and not more:
                entrants.append(Entrant(name, setting, _protocols(setting, split, config)))
        except ConfigError as error:
            problems += [f"{label}{problem}" for problem in error.problems]
    if not problems:
        own = entrants[0].protocols
        others = {e.folder: e.protocols for e in entrants[1:]} | {name: e.protocols for name, e in earlier.items()}
        problems += [p for name, protocols in others.items() for p in _pairing_problems(name, own, protocols, config)]
    if problems:
        raise ConfigError(problems)
    return SuitePlan(tuple(entrants), earlier)


def modes_of(config: EvalConfig) -> dict[str, float | None]:
    """Mode -> temperature."""
    return {"greedy": None} | ({"sampled": config.temperature} if config.sampled else {})


def _protocols(setting: Setting, split: SplitConfig, config: EvalConfig) -> dict[str, dict[str, Any]]:
    return {
        mode: describe_protocol(
            setting.tasks, split, config.eval_episodes, config.seed, temperature, setting.env.success_hold_steps
        )
        for mode, temperature in modes_of(config).items()
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
