"""From the flags of `cli/train_sft_vla.py` to a trained policy folder: checks, model, trainer, closing words."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from rlvla.envs.config import EnvConfig
from rlvla.envs.splits import LearnedStates
from rlvla.models.actor import Actor
from rlvla.models.config import ActorConfig
from rlvla.models.inputs import VLAInputs
from rlvla.models.vla.tiny import LLM_HEAD_WIDTH, build_tiny, default_heads
from rlvla.trainer.custom_modules import CustomConfig, words_for_later_commands
from rlvla.trainer.demonstrations import Demonstrations
from rlvla.trainer.dry_run import sft_report
from rlvla.trainer.joined_demonstrations import read_several
from rlvla.trainer.model_checks import actor_problems, checkpoint_overrides, mismatch_with_policy
from rlvla.trainer.policy_export import PolicyRecord, learned_states, recorded_environment
from rlvla.trainer.reward_model_config import RewardRunConfig
from rlvla.trainer.setup import check_checkpoint
from rlvla.trainer.sft_config import SFTConfig, SFTRunConfig, TinyConfig
from rlvla.trainer.sft_trainer import SFTTrainer
from rlvla.utils.arguments import range_problems
from rlvla.utils.config_file import write_config_file
from rlvla.utils.errors import ConfigError, require
from rlvla.utils.logging import duration, passing_note, quiet_libraries, table
from rlvla.utils.run_folder import claimed_run_folder, run_folder_problem
from rlvla.utils.seeding import seed_everything
from rlvla.utils.strategy import DeepspeedStrategy
from rlvla.utils.strategy_config import StrategyConfig, launched_rank, launched_world_size


def run_sft(
    run: SFTRunConfig,
    tiny: TinyConfig,
    config: SFTConfig,
    actor_config: ActorConfig,
    strategy_config: StrategyConfig,
    custom: CustomConfig,
) -> Path | None:
    """Train and return the policy folder; None for a dry run.

    Every configuration problem is raised before anything is started.
    """
    parts = (run, tiny, config, actor_config, strategy_config)
    problems = [p for part in parts for p in range_problems(part)]
    problems += _problems(run, config) + strategy_config.problems()
    demos = None
    try:
        demos = read_several(run.demos, run.cameras or None)
        if demos.num_rows < launched_world_size():
            problems.append(
                f"--demos {' '.join(run.demos)}: {demos.num_rows} decisions cannot be shared by "
                f"{launched_world_size()} ranks; use fewer ranks or more demonstrations"
            )
    except ConfigError as error:
        problems += error.problems
    try:
        problems += (
            _new_model_problems(run, tiny, demos)
            if run.pretrain == "tiny"
            else _start_problems(run, tiny, demos, actor_config)
        )
    except ConfigError as error:
        problems += error.problems
    if problems or demos is None:
        raise ConfigError(problems)
    if run.dry_run:
        if launched_rank() == 0:
            print(sft_report(_inputs_of(run, tiny, demos), demos, config, actor_config, strategy_config))
        return None
    if config.use_wandb:
        require("wandb", extra="wandb")
    quiet_libraries()
    strategy = DeepspeedStrategy(strategy_config, seed=run.seed)
    seed_everything(run.seed)
    with claimed_run_folder(Path(run.save_path), is_main=strategy.is_main):
        return _train(run, tiny, config, actor_config, strategy, demos, [*parts, custom])


def _train(
    run: SFTRunConfig,
    tiny: TinyConfig,
    config: SFTConfig,
    actor_config: ActorConfig,
    strategy: DeepspeedStrategy,
    demos: Demonstrations,
    parts: Sequence[Any],
) -> Path:
    """Of a configuration that has been checked; `parts` are all groups of flags."""
    start = time.perf_counter()
    save_path = Path(run.save_path)
    pretrain = Path(run.pretrain)
    if strategy.is_main:
        write_config_file(save_path, parts)
    if run.pretrain == "tiny":
        pretrain = save_path / "start"
        if strategy.is_main:
            new_tiny(pretrain, demos, run, tiny, run.model_variant)
        strategy.barrier()
    overrides = _overrides(pretrain, run, tiny)
    with passing_note(f"loading {pretrain}"):
        actor = Actor.from_pretrained(pretrain, actor_config, unnorm_key=run.unnorm_key, **overrides)
    actor.forget_action_heads()
    record = _record(demos, run, actor, learned_states(recorded_environment(pretrain)) or [])
    trainer = SFTTrainer(actor, demos, strategy, config, save_path, record)
    trainer.logger.describe(parts, outcomes=("sft/accuracy",))
    metrics = trainer.fit()
    policy = save_path / "policy"
    if strategy.is_main:
        rows = [(name, f"{value:.4g}") for name, value in metrics.items()]
        print(table(("metric (last steps)", "value"), rows))
        print(f"{policy} ({duration(time.perf_counter() - start)})")
        print(f"next: python cli/eval_vla.py --pretrain {policy}{words_for_later_commands()}")
    return policy


def _inputs_of(run: SFTRunConfig, tiny: TinyConfig, demos: Demonstrations) -> VLAInputs:
    """Prompts, statistics and configuration of the model that would be trained."""
    if run.pretrain != "tiny":
        overrides = _overrides(run.pretrain, run, tiny)
        config, key = check_checkpoint(Path(run.pretrain), run.unnorm_key, overrides=overrides)
        return VLAInputs.from_pretrained(run.pretrain, config=config, unnorm_key=key)
    with TemporaryDirectory() as folder:
        new_tiny(Path(folder), demos, run, tiny, run.model_variant)
        config, key = check_checkpoint(Path(folder), run.unnorm_key)
        return VLAInputs.from_pretrained(folder, config=config, unnorm_key=key)


def _record(demos: Demonstrations, run: SFTRunConfig, actor: Actor, before: Sequence[LearnedStates]) -> PolicyRecord:
    """What the trained policy sees, and the initial states it and its start have learned from."""
    seen_as = {
        "cameras": list(run.cameras or demos.env_args["cameras"]),
        "use_proprio": bool(actor.inputs.config.use_proprio),
    }
    return PolicyRecord(EnvConfig().completed(demos.env_args | seen_as), (*before, *demos.states_learned_from))


def _problems(run: SFTRunConfig, config: SFTConfig) -> list[str]:
    problems = []
    folder = run_folder_problem(run.save_path)
    if folder:
        problems.append(f"--save_path: {folder}")
    world = launched_world_size()
    if config.train_batch_size % world:
        problems.append(
            f"--train_batch_size {config.train_batch_size} must be divisible by the number of ranks {world}"
        )
    return problems


def _new_model_problems(run: SFTRunConfig, tiny: TinyConfig, demos: Demonstrations | None) -> list[str]:
    """Sizes that no tiny model can have, and a statistics key that the demonstrations do not have."""
    problems = []
    if tiny.tiny_vision_dim % 4:
        problems.append(f"--tiny_vision_dim {tiny.tiny_vision_dim} must be a multiple of 4")
    heads = default_heads(max(1, tiny.tiny_llm_dim), LLM_HEAD_WIDTH)
    if tiny.tiny_llm_dim // heads % 2:  # rotary embeddings turn pairs of channels
        problems.append(
            f"--tiny_llm_dim {tiny.tiny_llm_dim} gives {heads} head(s) of odd width; take a multiple of "
            f"{LLM_HEAD_WIDTH}"
        )
    if run.model_variant == "autoregressive" and tiny.action_chunk_len not in (None, 1):
        problems.append(
            f"--action_chunk_len {tiny.action_chunk_len}: an autoregressive model predicts one action; leave it out"
        )
    if run.platform is not None:
        problems.append("--platform describes a public checkpoint; leave it out with --pretrain tiny")
    if demos is None:
        return problems
    size = demos.images[0].shape[2]
    if tiny.tiny_patch_size > 0 and size % tiny.tiny_patch_size:
        problems.append(f"--tiny_patch_size {tiny.tiny_patch_size} must divide the image size {size}")
    if run.unnorm_key is not None and run.unnorm_key not in demos.statistics:
        problems.append(f"--unnorm_key {run.unnorm_key}: {run.demos[0]} has statistics for {sorted(demos.statistics)}")
    return problems


def _overrides(folder: str | Path, run: SFTRunConfig, tiny: TinyConfig) -> dict[str, Any]:
    flags = SimpleNamespace(
        center_crop=run.center_crop,
        model_variant=run.model_variant,
        platform=run.platform,
        action_chunk_len=tiny.action_chunk_len,
    )
    return checkpoint_overrides(Path(folder), flags)


def _start_problems(
    run: SFTRunConfig, tiny: TinyConfig, demos: Demonstrations | None, actor_config: ActorConfig
) -> list[str]:
    """Whether the checkpoint to start from is whole and fits the demonstrations."""
    config, _ = check_checkpoint(Path(run.pretrain), run.unnorm_key, overrides=_overrides(run.pretrain, run, tiny))
    problems = actor_problems(config, actor_config)
    if tiny.action_chunk_len not in (None, config.action_chunk_len):
        problems.append(
            f"--action_chunk_len {tiny.action_chunk_len} contradicts {run.pretrain}, built for "
            f"{config.action_chunk_len}"
        )
    if demos is not None:
        problems += mismatch_with_policy(demos, " ".join(run.demos), config, run.pretrain, run.center_crop)
    return problems


def new_tiny(
    folder: Path,
    demos: Demonstrations,
    run: SFTRunConfig | RewardRunConfig,
    tiny: TinyConfig,
    model_variant: str | None = None,
) -> None:
    """Build the tiny model that fits the demonstrations; `model_variant` by default oft."""
    with_proprio = run.use_proprio and demos.proprio is not None
    build_tiny(
        folder,
        sentences=sorted(set(demos.instructions)),
        dataset_statistics=demos.statistics,
        image_size=demos.images[0].shape[2],
        patch_size=tiny.tiny_patch_size,
        vision_dim=tiny.tiny_vision_dim,
        vision_depth=tiny.tiny_vision_depth,
        llm_dim=tiny.tiny_llm_dim,
        llm_mlp_dim=3 * tiny.tiny_llm_dim,
        llm_layers=tiny.tiny_llm_layers,
        model_variant=model_variant or "oft",
        action_chunk_len=tiny.action_chunk_len,
        action_dim=demos.actions[0].shape[1],
        num_images_in_input=demos.images[0].shape[1],
        use_proprio=with_proprio,
        proprio_dim=demos.proprio[0].shape[1] if with_proprio and demos.proprio else None,
        center_crop=bool(run.center_crop),
        seed=run.seed,
    )
