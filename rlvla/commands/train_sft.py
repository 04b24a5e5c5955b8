"""Running `cli/train_sft_vla.py`: checks, model, trainer, and the final summary."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from rlvla.checkpoints.policy_folder import PolicyRecord, learned_states, recorded_environment
from rlvla.checkpoints.run_folder import claimed_run_folder, run_folder_problem
from rlvla.commands.check_demos import warn_of
from rlvla.commands.custom_modules import CustomConfig, words_for_later_commands
from rlvla.commands.dry_run import sft_report
from rlvla.commands.model_checks import mismatch_with_policy
from rlvla.commands.new_models import is_new, missing_of_new, new_model, new_model_problems
from rlvla.commands.policy_checks import supervision_problems, wandb_problems
from rlvla.commands.problem_texts import problem
from rlvla.data.demonstrations import Demonstrations
from rlvla.data.reading import read_several
from rlvla.envs.config import EnvConfig
from rlvla.envs.splits import LearnedStates
from rlvla.models.config import ActorConfig
from rlvla.models.families import Checkpoint, check_checkpoint, checkpoint_overrides
from rlvla.models.policy import Policy
from rlvla.models.vla.choices import REGRESSION
from rlvla.trainer.supervised.config import NewModelConfig, SFTConfig, SFTRunConfig
from rlvla.trainer.supervised.sft_trainer import SFTTrainer
from rlvla.utils.cli.config_file import write_config_file
from rlvla.utils.cli.flags import range_problems
from rlvla.utils.deepspeed.config import StrategyConfig, launched_rank, launched_world_size
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import ConfigError, Problem, require
from rlvla.utils.files import output_folder_problem
from rlvla.utils.seeding import seed_everything
from rlvla.utils.terminal import duration, passing_note, quiet_libraries, table


def run_sft(
    run: SFTRunConfig,
    tiny: NewModelConfig,
    config: SFTConfig,
    actor_config: ActorConfig,
    strategy_config: StrategyConfig,
    custom: CustomConfig,
) -> Path | None:
    """Train and return the policy folder; None for a dry run.

    All configuration problems are raised before anything is started.
    """
    parts = (run, tiny, config, actor_config, strategy_config)
    problems = [p for part in parts for p in range_problems(part)]
    problems += _problems(run, config, actor_config) + strategy_config.problems() + wandb_problems(config)
    demos = None
    try:
        demos = read_several(run.demos, run.cameras or None)
        if demos.num_rows < launched_world_size():
            amounts = {"value": " ".join(run.demos), "rows": demos.num_rows, "ranks": launched_world_size()}
            problems.append(problem("demos", "too_few", **amounts))
    except ConfigError as error:
        problems += error.problems
    try:
        problems += (
            new_model_problems(run, tiny, demos, actor_config) + supervision_problems(missing_of_new(run, tiny), config)
            if is_new(run.pretrain)
            else _start_problems(run, tiny, demos, actor_config, config)
        )
    except ConfigError as error:
        problems += error.problems
    if problems or demos is None:
        raise ConfigError(problems)
    if launched_rank() == 0:
        warn_of(demos, run.demos)
    if run.dry_run:
        if launched_rank() == 0:
            with _checkpoint(run, tiny, demos) as checkpoint:
                print(sft_report(checkpoint, demos, config, actor_config, strategy_config))
        return None
    if config.use_wandb:
        require("wandb", extra="wandb")
    quiet_libraries()
    strategy = DeepspeedStrategy(strategy_config, seed=run.seed)
    seed_everything(run.seed)
    with claimed_run_folder(Path(run.save_path), strategy):
        return _train(run, tiny, config, actor_config, strategy, demos, [*parts, custom])


def _train(
    run: SFTRunConfig,
    tiny: NewModelConfig,
    config: SFTConfig,
    actor_config: ActorConfig,
    strategy: DeepspeedStrategy,
    demos: Demonstrations,
    parts: Sequence[Any],
) -> Path:
    """Train with a checked configuration; `parts` are all groups of flags."""
    start = time.perf_counter()
    save_path = Path(run.save_path)
    pretrain = Path(run.pretrain)
    if strategy.is_main:
        write_config_file(save_path, parts)
    if is_new(run.pretrain):
        pretrain = save_path / "start"
        if strategy.is_main:
            new_model(pretrain, demos, run, tiny, run.model_variant)
        strategy.barrier()
    overrides = _overrides(pretrain, run, tiny)
    with passing_note(f"loading {pretrain}"):
        checkpoint = check_checkpoint(pretrain, run.unnorm_key, overrides=overrides)
        actor = checkpoint.load_policy(actor_config)
    checkpoint.begin_supervised(actor, mean_alone=config.trains_mean_alone)
    record = _record(demos, run, actor, learned_states(recorded_environment(pretrain)) or [])
    trainer = SFTTrainer(actor, demos, strategy, config, save_path, record, run.fallback_path)
    trainer.logger.describe(parts, outcomes=("sft/accuracy",))
    metrics = trainer.fit()
    policy = trainer.exported
    if strategy.is_main:
        rows = [(name, f"{value:.4g}") for name, value in metrics.items()]
        print(table(("metric (last steps)", "value"), rows))
        print(f"{policy} ({duration(time.perf_counter() - start)})")
        print(f"next: python cli/eval_vla.py --pretrain {policy}{words_for_later_commands()}")
    return policy


@contextmanager
def _checkpoint(run: SFTRunConfig, tiny: NewModelConfig, demos: Demonstrations) -> Iterator[Checkpoint]:
    """The checkpoint to train; a tiny model is built in a temporary folder for the duration of the block."""
    if not is_new(run.pretrain):
        yield check_checkpoint(run.pretrain, run.unnorm_key, overrides=_overrides(run.pretrain, run, tiny))
        return
    with TemporaryDirectory() as folder:
        new_model(Path(folder), demos, run, tiny, run.model_variant)
        yield check_checkpoint(folder, run.unnorm_key)


def _record(demos: Demonstrations, run: SFTRunConfig, actor: Policy, before: Sequence[LearnedStates]) -> PolicyRecord:
    """The record of the trained policy, with the initial states of the demonstrations and of the checkpoint."""
    seen_as = {
        "cameras": list(run.cameras or demos.env_args["cameras"]),
        "use_proprio": bool(actor.spec.proprio_dim),
    }
    return PolicyRecord(EnvConfig().completed(demos.env_args | seen_as), (*before, *demos.states_learned_from))


def _problems(run: SFTRunConfig, config: SFTConfig, actor: ActorConfig) -> list[Problem]:
    problems = []
    folder = run_folder_problem(run.save_path)
    if folder:
        problems.append(problem("save_path", "folder_in_use", why=folder))
    fallback = output_folder_problem(run.fallback_path) if run.fallback_path else None
    problems += [problem("fallback_path", "folder_in_use", why=fallback)] if fallback else []
    ranks = launched_world_size()
    if config.train_batch_size % ranks:
        problems.append(problem("train_batch_size", "not_divisible", value=config.train_batch_size, ranks=ranks))
    if actor.lora_dropout and not actor.lora_rank and is_new(run.pretrain):
        problems.append(problem("lora_dropout", "needs_flag", value=actor.lora_dropout))
    return problems


def _overrides(folder: str | Path, run: SFTRunConfig, tiny: NewModelConfig) -> dict[str, Any]:
    flags = SimpleNamespace(
        center_crop=run.center_crop,
        model_variant=run.model_variant,
        platform=run.platform,
        action_std=run.action_std,
        action_std_init=run.action_std_init,
        action_chunk_len=tiny.action_chunk_len,
    )
    # Fine-tuning may add a regression head to a checkpoint with action tokens.
    return {**checkpoint_overrides(Path(folder), flags), "new_head": run.model_variant == REGRESSION}


def _start_problems(
    run: SFTRunConfig,
    tiny: NewModelConfig,
    demos: Demonstrations | None,
    actor_config: ActorConfig,
    sft: SFTConfig,
) -> list[str]:
    """Problems if the initial checkpoint is incomplete or does not fit the demonstrations."""
    checkpoint = check_checkpoint(run.pretrain, run.unnorm_key, overrides=_overrides(run.pretrain, run, tiny))
    spec = checkpoint.spec
    problems = [*checkpoint.option_problems(actor_config), *supervision_problems(spec.missing, sft)]
    if tiny.action_chunk_len not in (None, spec.action_chunk_len):
        problems.append(
            f"--action_chunk_len {tiny.action_chunk_len} contradicts {run.pretrain}, built for {spec.action_chunk_len}"
        )
    if demos is not None:
        problems += mismatch_with_policy(demos, " ".join(run.demos), spec, run.pretrain)
    return problems
