"""Checks of the configuration of `cli/eval_vla.py`, made before anything is started: suites, policies, protocols."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from rlvla.checkpoints.policy_folder import learned_states, recorded_environment
from rlvla.commands.demos.scene import scene_problems
from rlvla.commands.model_checks import ObservationSpec, folder_problems
from rlvla.commands.remote_checks import check_remote, describe_remote, learned_from_of
from rlvla.commands.setup import CheckedRun, check_run
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.splits import LearnedStates, describe_learned_from
from rlvla.envs.workers.config import WorkerConfig
from rlvla.evaluation.config import EvalConfig
from rlvla.evaluation.journal import fingerprint
from rlvla.evaluation.protocol import condition_labels, describe_differences, describe_protocol, known_instructions
from rlvla.evaluation.report import PolicyEvaluation
from rlvla.models.config import PolicyConfig
from rlvla.models.vla.checkpoint_files import EVALUATION_FILE
from rlvla.rewards import RewardPlan, SuccessConfig, make_success_source
from rlvla.rewards.config import JudgeConfig
from rlvla.serving.client import RemoteCheckpoint
from rlvla.serving.config import RemoteConfig
from rlvla.trainer import reward_sources as _reward_model  # noqa: F401  registers rm_model
from rlvla.utils.cli.flags import no_effect_problems, range_problems
from rlvla.utils.deepspeed.config import launch_problems
from rlvla.utils.errors import ConfigError, Problem, require
from rlvla.utils.files import target_problem

# Results of remote policies; a folder for each address.
REMOTE_FOLDER = Path("runs/remote")


@dataclass(frozen=True)
class EvaluatedPolicy:
    """A policy to evaluate.

    Attributes:
        folder: its checkpoint folder, as given by the user, or its address.
        setting: its checked configuration.
        protocols: mode -> `describe_protocol`.
    """

    folder: str
    setting: CheckedRun
    protocols: dict[str, dict[str, Any]]

    @property
    def remote(self) -> RemoteCheckpoint | None:
        """The remote policy; None for a folder."""
        return self.setting.checkpoint if isinstance(self.setting.checkpoint, RemoteCheckpoint) else None

    @property
    def learned_from(self) -> list[LearnedStates] | None:
        """The initial states that it was trained on; None if they are not recorded."""
        if self.remote is not None:
            return learned_from_of(self.remote.metadata, self.remote.config)
        return learned_states(recorded_environment(self.folder))

    @property
    def trained_on(self) -> str:
        """Description of `learned_from` with respect to the evaluated tasks."""
        describe = describe_learned_from if self.remote is None else describe_remote
        return describe(self.setting.tasks, self.learned_from)

    @property
    def identity(self) -> list[Any]:
        """The name, and the version as far as it can be told."""
        if self.remote is not None:
            asked = [self.remote.spec.action_chunk_len, sorted(self.remote.keys.items())]
            return [self.folder, str(self.remote.metadata), *asked]
        return [str(Path(self.folder).resolve()), fingerprint(Path(self.folder))]


@dataclass(frozen=True)
class SuitePlan:
    """The evaluations of a suite.

    Attributes:
        policies: the policies to evaluate, --pretrain first.
        earlier: results of earlier evaluations by file name.
        given: kinds of `instructions` and `images` that the policies receive, see `rlvla.evaluation.config`.
    """

    policies: tuple[EvaluatedPolicy, ...]
    earlier: Mapping[str, PolicyEvaluation]
    given: Mapping[str, Any]


@dataclass(frozen=True)
class JudgedSuccess:
    """The success detector of an evaluation.

    Attributes:
        config: the source of success.
        models: the models it may use.
    """

    config: SuccessConfig = SuccessConfig()
    models: JudgeConfig = JudgeConfig()

    def problems(self) -> list[Problem]:
        """Problems that do not depend on the policy; the model's server is asked whether it can judge."""
        problems: list[Problem] = []
        try:
            self.plan().close()
        except ConfigError as error:
            problems += error.problems
        return problems

    def model_problems(self, setting: CheckedRun) -> list[Problem]:
        """Problems if a reward model gets other observations than in training."""
        if self.config.success_source != "rm_model":
            return []
        return folder_problems({"rm_model_path": self.models.rm_model_path}, ObservationSpec.of(setting))

    def plan(self) -> RewardPlan:
        """Success as the only reward; ConfigError if the source cannot be used."""
        return RewardPlan({"success": 1.0}, success=make_success_source(self.config, self.models))

    @property
    def description(self) -> str | None:
        """See `SuccessConfig.description`."""
        return self.config.description(self.models)


def check(
    policy: PolicyConfig,
    env: EnvConfig,
    split: SplitConfig,
    config: EvalConfig,
    workers: WorkerConfig,
    success: JudgedSuccess,
    remote: RemoteConfig,
    *more_flags: Any,
) -> dict[str, SuitePlan]:
    """The plans by suite, in the order of the command line.

    Raises:
        ConfigError: all problems of all suites; a problem of one among several suites starts with the suite's name.
    """
    parts = (policy, env, split, config, workers, success.config, success.models, remote, *more_flags)
    problems: list[str | Problem] = [p for part in parts for p in range_problems(part)]
    out_of_range = {p.flag for p in problems if isinstance(p, Problem)}  # reported once is enough
    problems += [p for p in no_effect_problems(parts, {}, ()) if p.flag not in out_of_range]
    problems += [*workers.problems(env.env_python), *launch_problems(), *success.problems()]
    folders = [policy.pretrain, *config.compare]
    if config.num_videos:
        require("av", extra="video")
    if config.report and os.path.isfile(config.report):
        problems.append(Problem("report", "invalid_file", f"--report {config.report} is a file; name a folder"))
    if config.output is not None and Path(config.output).suffix == ".md":
        text = f"--output {config.output}: it is for JSON, and a page .md is written beside it; name a .json file"
        problems.append(Problem("output", "invalid_file", text))
    if config.output is None and (why := target_problem(output_of(policy, config), folder=False)):
        problems.append(Problem("output", "not_writable", f"{why}; --output names another place for the results"))
    if config.eval_samples > 1 and config.compare:
        text = f"--eval_samples {config.eval_samples}: baselines are compared with one episode for each initial state"
        problems.append(Problem("eval_samples", "contradiction", f"{text}; leave out --compare, or this"))
    suites = config.task_suite_name or (env.task_suite_name,)
    lists: dict[str, Sequence[str | None]] = {"compare": folders, "task_suite_name": suites}
    lists |= {"instructions": config.instructions, "images": config.images}
    problems += [
        Problem(flag, "duplicate", f"--{flag}: {value} is given twice")
        for flag, values in lists.items()
        for value in values
        if values.count(value) > 1
    ]
    if config.each_perturbation and not env.options.get("perturb"):
        text = "--each_perturbation: there is none; give --perturb KIND=LEVEL ..."
        problems.append(Problem("each_perturbation", "needs_flag", text))
    plans: dict[str, SuitePlan] = {}
    of_suites: dict[str | None, list[Problem]] = {}
    for suite in dict.fromkeys(suites):
        for condition, given in _conditions(replace(env, task_suite_name=suite), config):
            try:
                plans |= [_plan(policy, condition, split, config, success, given, remote)]
            except ConfigError as error:
                of_suites[suite] = list(dict.fromkeys([*of_suites.get(suite, ()), *error.problems]))
    if len(plans) > 1:  # --allow_unpaired would put the results of another suite or condition into a row
        problems += [
            Problem(
                "compare",
                "mismatch",
                f"--compare {name} is an evaluation of {', '.join(_condition(earlier.protocols))} alone; "
                "compare with one of all these suites",
            )
            for plan in plans.values()
            for name, earlier in plan.earlier.items()
            if _condition(earlier.protocols) != _condition(plan.policies[0].protocols)
        ]
    if problems or of_suites:
        raise ConfigError(dict.fromkeys([*problems, *_merged(of_suites, len(set(suites)))]))
    return plans


def _merged(of_suites: Mapping[str | None, Sequence[Problem]], suites: int) -> list[Problem]:
    """Problems common to all suites as they are, the others prefixed by the name of their suite."""
    lists = list(of_suites.values())
    common = [p for p in lists[0] if len(lists) == suites and all(p in more for more in lists)] if lists else []
    named = [(suite, p) for suite, more in of_suites.items() for p in more if p not in common]
    plain = ("task_suite_name", "task_ids", "task_names")  # their texts already name the suite
    return [*common, *(p if suite is None or p.flag in plain else p.prefixed(f"{suite}: ") for suite, p in named)]


def _conditions(env: EnvConfig, config: EvalConfig) -> list[tuple[EnvConfig, dict[str, str]]]:
    """All combinations of perturbations (as given, or none and each alone), instructions and images."""
    perturbed = [env]
    if config.each_perturbation:
        kinds = [(), *((kind,) for kind in env.options.get("perturb", ()))]
        perturbed = [replace(env, options={**env.options, "perturb": alone}) for alone in kinds]
    combinations = product(perturbed, dict.fromkeys(config.instructions), dict.fromkeys(config.images))
    return [
        (condition, {"instructions": instruction, "images": image}) for condition, instruction, image in combinations
    ]


def _condition(protocols: Mapping[str, dict[str, Any]]) -> list[str]:
    """The suite, the perturbations, the instructions and the images of an evaluation."""
    first = next(iter(protocols.values()))
    return [first["suite"], *first.get("perturb", ()), *condition_labels(first)]


def _plan(
    policy: PolicyConfig,
    env: EnvConfig,
    split: SplitConfig,
    config: EvalConfig,
    success: JudgedSuccess,
    given: Mapping[str, Any],
    remote: RemoteConfig,
) -> tuple[str, SuitePlan]:
    """Name of the suite, with its condition, and its checked policies; raises a ConfigError with all problems."""
    problems: list[Problem] = []
    policies: list[EvaluatedPolicy] = []
    earlier: dict[str, PolicyEvaluation] = {}
    labels = [*(env.options.get("perturb", ()) if config.each_perturbation else ())]
    labels += condition_labels({name: kind for name, kind in given.items() if len(getattr(config, name)) > 1})

    def title(suite: str) -> str:
        return ", ".join([suite, *labels])

    for name in dict.fromkeys([policy.pretrain, *config.compare]):
        label = "" if name == policy.pretrain else f"--compare {name}: "
        try:
            if label and Path(name).is_file():
                suite = policies[0].setting.env.suite if policies else env.task_suite_name
                if suite is not None:  # otherwise the policy itself is missing, which is already reported
                    earlier[name] = PolicyEvaluation.read(Path(name), title(suite))
                continue
            if name == remote.remote:
                setting, more = check_remote(remote, policy, env, split, config.eval_episodes, success.config)
            else:
                setting, more = check_run(
                    replace(policy, pretrain=name), env, split, config.eval_episodes, success=success.config
                )
            problems += [p.prefixed(label) for p in more]
            if setting is None:
                continue
            policies.append(EvaluatedPolicy(name, setting, _protocols(setting, config, success, given)))
            problems += [p for p in success.model_problems(setting) if p not in problems]
            if given["instructions"] == "shuffled" and len(known_instructions(setting.tasks)) == 1:
                text = f"all evaluated tasks have one instruction, '{setting.tasks[0].instruction}'; evaluate several"
                problems.append(Problem("instructions", "too_few", f"--instructions shuffled: {text}"))
            if label:
                continue
            problems += scene_problems(setting, config.video_cameras)
            if given["images"] == "none" and not setting.spec.reads_images:
                problems.append(Problem("images", "no_effect", f"--images none: {name} reads no images; leave it out"))
        except ConfigError as error:
            problems += [p.prefixed(label) for p in error.problems]
    if not problems:
        first = policies[0].protocols
        others = {e.folder: e.protocols for e in policies[1:]} | {name: e.protocols for name, e in earlier.items()}
        problems += [p for name, protocols in others.items() for p in _pairing_problems(name, first, protocols, config)]
    if problems:
        raise ConfigError(problems)
    return title(policies[0].setting.env.suite), SuitePlan(tuple(policies), earlier, given)


def remote_problems(policy: PolicyConfig, config: EvalConfig, remote: RemoteConfig) -> list[Problem]:
    """Flags that do not go with --remote."""
    if remote.remote is None:
        return []
    problems = []
    for module in ("websockets.sync.client", "msgpack"):
        require(module, extra="serve")
    if not re.fullmatch(r"wss?://[^/\s]+(/\S*)?", remote.remote):
        text = f"--remote {remote.remote}: write an address such as ws://127.0.0.1:8000"
        problems.append(Problem("remote", "invalid", text))
    if policy.pretrain not in (PolicyConfig().pretrain, remote.remote):
        text = f"--pretrain {policy.pretrain} and --remote name two policies; name the folder with --compare"
        problems.append(Problem("remote", "contradiction", text))
    if config.sampled:
        text = "--sampled: the server decides how actions are chosen; leave it out"
        problems.append(Problem("sampled", "contradiction", text))
    return problems


def output_of(policy: PolicyConfig, config: EvalConfig) -> Path:
    """The JSON file of an evaluation, by default in the policy's folder, or in `REMOTE_FOLDER`."""
    if config.output:
        return Path(config.output)
    if "://" in policy.pretrain:
        return REMOTE_FOLDER / re.sub(r"\W+", "_", policy.pretrain.partition("://")[2]) / EVALUATION_FILE
    return Path(policy.pretrain) / EVALUATION_FILE


def modes_of(config: EvalConfig) -> dict[str, float | None]:
    """Mode -> sampling temperature, None for greedy actions."""
    return {"greedy": None} | ({"sampled": config.temperature} if config.sampled else {})


def samples_of(config: EvalConfig, temperature: float | None) -> int:
    """Episodes per initial state at this temperature (None: greedy)."""
    return 1 if temperature is None else config.eval_samples


def _protocols(
    setting: CheckedRun, config: EvalConfig, success: JudgedSuccess, given: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    env = setting.resolved
    return {
        mode: describe_protocol(
            env.tasks,
            env.split,
            config.eval_episodes,
            config.seed,
            temperature,
            samples=samples_of(config, temperature),
            success_source=success.description,
            **env.protocol,
            **given,
        )
        for mode, temperature in modes_of(config).items()
    }


def _pairing_problems(
    name: str, first: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]], config: EvalConfig
) -> list[Problem]:
    common = [mode for mode in first if mode in other]
    if not common:
        text = f"--compare {name} was evaluated {' and '.join(other)} only; this evaluation is {' and '.join(first)}"
        return [Problem("compare", "modes_differ", text)]
    differences = [phrase for mode in common for phrase in describe_differences(first[mode], other[mode])]
    if not differences or config.allow_unpaired:
        return []
    text = (
        f"--compare {name} was not measured by the same protocol ({'; '.join(dict.fromkeys(differences))}); evaluate "
        "both alike, or give --allow_unpaired for a marked comparison without pairs"
    )
    return [Problem("compare", "protocols_differ", text)]
