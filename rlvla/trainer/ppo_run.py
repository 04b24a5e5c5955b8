"""From the flags of `cli/train_ppo_vla.py` to a trained policy: checks, models, workers, trainer, closing words."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.splits import LearnedStates
from rlvla.envs.worker_config import WorkerConfig
from rlvla.models.config import ActorConfig
from rlvla.models.inputs import VLAInputs
from rlvla.rewards import RewardConfig, RewardPlan
from rlvla.rollout import RolloutConfig, RolloutEngine
from rlvla.trainer.checkpoints import list_checkpoints
from rlvla.trainer.config import (
    AlgorithmConfig,
    BatchConfig,
    CorrectionConfig,
    FilterConfig,
    GuardConfig,
    OptimizationConfig,
    RunConfig,
    ScheduleConfig,
)
from rlvla.trainer.custom_modules import CustomConfig, modules_with_suites
from rlvla.trainer.demonstrations import Demonstrations, read_demonstrations
from rlvla.trainer.dry_run import ppo_report
from rlvla.trainer.early_stopping import early_stopping_problems
from rlvla.trainer.judge_checks import judge_problems
from rlvla.trainer.micro_batching import row_tokens
from rlvla.trainer.model_checks import actor_problems, check_tokens_mean_something, mismatch_with_policy
from rlvla.trainer.policy_config import PolicyConfig
from rlvla.trainer.policy_export import PolicyRecord, learned_states, recorded_environment
from rlvla.trainer.ppo_checks import algorithm_problems, batch_problems
from rlvla.trainer.ppo_config import PPOConfig
from rlvla.trainer.ppo_trainer import PPOTrainer
from rlvla.trainer.reward_setup import reward_problems, tie_to_learner, waits_on_host
from rlvla.trainer.run_models import load_models
from rlvla.trainer.setup import Setting, check_checkpoint, check_setting, first_observations, start_workers
from rlvla.trainer.summary import closing_words, save_learning_curve
from rlvla.utils.arguments import range_problems
from rlvla.utils.config_file import write_config_file
from rlvla.utils.errors import ConfigError, require
from rlvla.utils.logging import log, passing_note, quiet_libraries
from rlvla.utils.run_folder import (
    CHECKPOINTS,
    RUN_FILE,
    checkpoint_folder_problem,
    claimed_run_folder,
    ended_early,
    run_folder_problem,
)
from rlvla.utils.runs import write_json
from rlvla.utils.seeding import seed_everything
from rlvla.utils.stopping import StopSignals
from rlvla.utils.strategy import DeepspeedStrategy
from rlvla.utils.strategy_config import StrategyConfig, launched_rank


@dataclass(frozen=True)
class PPORun:
    """All groups of flags.

    Attributes:
        given: names of the flags that stood on the command line.
    """

    run: RunConfig
    rewards: RewardConfig
    policy: PolicyConfig
    env: EnvConfig
    split: SplitConfig
    batch: BatchConfig
    algorithm: AlgorithmConfig
    filters: FilterConfig
    correction: CorrectionConfig
    optimization: OptimizationConfig
    schedule: ScheduleConfig
    actor: ActorConfig
    strategy: StrategyConfig
    workers: WorkerConfig = WorkerConfig()
    rollout: RolloutConfig = RolloutConfig()
    guards: GuardConfig = GuardConfig()
    custom: CustomConfig = CustomConfig()
    given: frozenset[str] = frozenset()

    @property
    def groups(self) -> dict[str, Any]:
        """The groups by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "given"}

    @property
    def ckpt_path(self) -> Path:
        """Where training checkpoints go."""
        return Path(self.run.ckpt_path) if self.run.ckpt_path else Path(self.run.save_path) / CHECKPOINTS


def check(flags: PPORun) -> Setting:
    """The checked setting; ConfigError with every problem otherwise."""
    problems = [p for group in flags.groups.values() for p in range_problems(group)]
    out_of_range = {problem.split()[0] for problem in problems}  # one message for each of them is enough
    problems += batch_problems(flags) + flags.workers.problems(flags.env.env_python) + flags.strategy.problems()
    problems += [p for p in algorithm_problems(flags) if p.split()[0].rstrip(":") not in out_of_range]
    problem = run_folder_problem(flags.run.save_path, resuming=flags.run.load_checkpoint)
    problems += [f"--save_path: {problem}"] if problem else []
    if flags.run.ckpt_path is not None:
        problem = checkpoint_folder_problem(flags.run.ckpt_path, resuming=flags.run.load_checkpoint)
        problems += [f"--ckpt_path: {problem}"] if problem else []
    if flags.schedule.num_videos:
        require("av", extra="video")
    if flags.schedule.use_wandb:
        require("wandb", extra="wandb")
    problems += _resume_problems(flags)
    setting, more = check_setting(flags.policy, flags.env, flags.split, flags.schedule.eval_episodes, flags.rewards)
    problems += more + judge_problems(flags, setting)
    problems += early_stopping_problems(flags.schedule, len(setting.tasks) if setting is not None else 0)
    problems += reward_problems(flags.rewards, flags.algorithm, setting.tasks if setting is not None else [])
    if setting is not None:
        problems += _changed_flags(flags, setting) + actor_problems(setting.config, flags.actor)
        problems += _token_problems(flags, setting) + _demonstration_problems(flags, setting)
    if problems or setting is None:
        raise ConfigError(problems)
    return setting


# What may differ when a run is continued: lengths, portions that change no result, schedules of evaluation and saving.
_FREE_GROUPS = ("schedule", "workers", "rollout", "guards")
_FREE_FLAGS = {
    *("num_episodes", "micro_rollout_batch_size", "micro_train_batch_size", "balance_ranks"),
    *("use_dynamic_batch", "train_max_tokens_per_gpu", "custom_module"),
    *("offload_during_rollout", "param_offload"),
    *("save_path", "ckpt_path", "load_checkpoint", "num_envs", "local_rank", "dry_run"),
}


def _changed_flags(flags: PPORun, setting: Setting) -> list[str]:
    """Flags that differ from those the run to be continued was started with."""
    path = Path(flags.run.save_path) / RUN_FILE
    if not flags.run.load_checkpoint or not path.is_file() or ended_early(path.parent):
        return []
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return [f"{path} is not valid JSON ({error}); name another --save_path"]
    found = []
    for group, now in json.loads(json.dumps(describe(flags, setting))).items():
        if group in _FREE_GROUPS:
            continue
        for name, value in now.items():
            known = before.get(group, {}).get(name, value)
            if name not in _FREE_FLAGS and known != value:
                found.append(
                    f"--{name} {value}: the run in {flags.run.save_path} was started with {known}; repeat that, or "
                    "name another --save_path"
                )
    return found


def _resume_problems(flags: PPORun) -> list[str]:
    """A folder to continue in must be this command's: its policy/ will be replaced."""
    folder = Path(flags.run.save_path)
    if _evaluates_a_checkpoint(flags) and not list_checkpoints(flags.ckpt_path):
        return [_nothing_to_evaluate(flags)]
    if not flags.run.load_checkpoint or not folder.is_dir() or (folder / RUN_FILE).is_file():
        return []
    # A kill while that file is written leaves a part of it under a hidden name, and nothing else.
    if any(not path.name.startswith(".") for path in folder.iterdir()):
        return [f"--save_path: {folder} holds no run of this command ({RUN_FILE} is missing); name another folder"]
    return []


def _token_problems(flags: PPORun, setting: Setting) -> list[str]:
    """A cap of tokens below that of a single decision."""
    if not flags.batch.use_dynamic_batch:
        return []
    folder, cap = Path(flags.policy.pretrain), flags.batch.train_max_tokens_per_gpu
    config, key = check_checkpoint(folder, setting.unnorm_key)
    inputs = VLAInputs.from_pretrained(folder, config=config, unnorm_key=key)
    needed = max(row_tokens(inputs, [task.instruction for task in setting.tasks], len(setting.env.camera_names)))
    if needed <= cap:
        return []
    return [f"--train_max_tokens_per_gpu {cap}: one decision has {needed} tokens; give at least that"]


def _demonstration_problems(flags: PPORun, setting: Setting) -> list[str]:
    """Whether --ptx_demos can be read and fit the policy."""
    path = flags.optimization.ptx_demos
    if path is None:
        return []
    try:
        demos = read_demonstrations(path, setting.env.camera_names)
    except ConfigError as error:
        return [f"--ptx_demos: {problem}" for problem in error.problems]
    found = mismatch_with_policy(demos, path, setting.config, flags.policy.pretrain, flags.policy.center_crop)
    found += flags.split.problems(setting.tasks, flags.schedule.eval_episodes, demos.states_learned_from)
    return [f"--ptx_demos: {problem}" for problem in found]


def run_ppo(flags: PPORun) -> PPOTrainer | None:
    """Check, train, report. Every configuration problem is raised before anything is started.

    Returns:
        The trainer after the run; None for a dry run.
    """
    setting = check(flags)
    if flags.run.dry_run:
        if launched_rank() == 0:
            print(ppo_report(flags, setting))
        return None
    quiet_libraries()
    signals, modules = StopSignals(), modules_with_suites(flags.custom)
    with (
        signals.caught(),
        start_workers(flags.run.num_envs, setting.env, setting.tasks[0], modules, flags.workers) as pool,
        ExitStack() as stack,
    ):
        seed_everything(flags.run.seed)  # LoRA adapters start from random numbers
        with passing_note(f"loading {flags.policy.pretrain}"):
            models = load_models(flags, setting)
            strategy = DeepspeedStrategy(flags.strategy, seed=flags.run.seed)
        save_path = Path(flags.run.save_path)
        stack.enter_context(claimed_run_folder(save_path, is_main=strategy.is_main))
        if strategy.is_main and not _evaluates_a_checkpoint(flags):  # the records are those of the training
            write_json(save_path / RUN_FILE, describe(flags, setting))
            write_config_file(save_path, list(flags.groups.values()))
        plan = RewardPlan.from_config(flags.rewards)
        waits = waits_on_host(flags.strategy, flags.optimization)
        tie_to_learner(plan, flags.algorithm, strategy.device, waits_on_host=waits)
        rollout = RolloutEngine(pool, setting.env.env_kwargs(), plan, flags.rollout, setting.tasks, setting.state_input)
        demos = None
        if flags.optimization.ptx_demos is not None:
            demos = read_demonstrations(flags.optimization.ptx_demos, setting.env.camera_names)
        config = PPOConfig(
            flags.batch,
            flags.algorithm,
            flags.optimization,
            flags.schedule,
            flags.split,
            _record(flags, setting, demos),
            flags.filters,
            flags.correction,
            plan.weights,
            flags.run.reward_model_coef,
            flags.guards,
        )
        folders = (save_path, flags.ckpt_path)
        trainer = PPOTrainer(models, strategy, rollout, setting.tasks, config, *folders, signals, demos)
        trainer.logger.describe(list(flags.groups.values()))
        if flags.run.load_checkpoint:
            _resume(trainer, flags)
        if trainer.iteration == 0:
            check_tokens_mean_something(models.actor, first_observations(pool, setting))
        plan.start()
        try:
            trainer.fit()
        finally:
            plan.close()
        if strategy.is_main:
            _conclude(trainer, flags, save_path)
        strategy.barrier()
    return trainer


def _resume(trainer: PPOTrainer, flags: PPORun) -> None:
    """Continue from the newest intact checkpoint; without one only training may begin anew."""
    resumed, alone = trainer.resume(), _evaluates_a_checkpoint(flags)
    if alone and not resumed:  # those there are have turned out to be damaged
        raise ConfigError(_nothing_to_evaluate(flags))
    if resumed and trainer.strategy.is_main:
        what = "evaluating the checkpoint" if alone else "continuing"
        log.info(f"{what} after iteration {trainer.iteration} of {flags.batch.iterations}")


def _evaluates_a_checkpoint(flags: PPORun) -> bool:
    return flags.schedule.val_only and flags.run.load_checkpoint


def _nothing_to_evaluate(flags: PPORun) -> str:
    return (
        f"--val_only --load_checkpoint: there is no checkpoint in {flags.ckpt_path}; name the run with --save_path, or "
        "leave out --load_checkpoint to evaluate --pretrain"
    )


def _record(flags: PPORun, setting: Setting, demos: Demonstrations | None) -> PolicyRecord:
    """What the trained policy sees, and the initial states it, its start and its demonstrations know."""
    before = learned_states(recorded_environment(flags.policy.pretrain)) or []
    now = [(task, flags.split.train_states(task)) for task in setting.tasks]
    own = [LearnedStates(task.suite, task.task_id, states.start, states.stop) for task, states in now]
    told = setting.state_input.settings if setting.state_input else None
    mixed_in = demos.states_learned_from if demos is not None else []
    return PolicyRecord(setting.env, (*before, *own, *mixed_in), told)


def _conclude(trainer: PPOTrainer, flags: PPORun, save_path: Path) -> None:
    write_json(save_path / "totals.json", trainer.totals)
    write_json(
        save_path / "evaluations.json",
        [{"iteration": iteration, **result.as_dict()} for iteration, result in trainer.evaluations],
    )
    if not flags.schedule.val_only:
        save_learning_curve(save_path)
    print(closing_words(trainer, save_path))


def describe(flags: PPORun, setting: Setting) -> dict[str, Any]:
    """Every flag with its value, for the run folder."""
    described = {name: asdict(group) for name, group in flags.groups.items()}
    described["env"] = setting.env.as_dict()
    return described
