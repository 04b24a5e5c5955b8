"""`--dry_run`: the step arithmetic and the memory of a checked configuration, without weights, workers or engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlvla.models.config import ActorConfig
from rlvla.models.inputs import VLAInputs
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.trainer.demonstrations import Demonstrations, read_demonstrations
from rlvla.trainer.memory_plan import FrozenMemory, MemoryPlan, engine_memory, frozen_memory
from rlvla.trainer.memory_probe import Probe, RowShape, probe
from rlvla.trainer.micro_batching import row_tokens
from rlvla.trainer.reward_setup import waits_on_host
from rlvla.trainer.setup import Setting, check_checkpoint
from rlvla.utils.logging import table
from rlvla.utils.strategy_config import StrategyConfig, launched_world_size

if TYPE_CHECKING:
    from rlvla.trainer.ppo_run import PPORun
    from rlvla.trainer.sft_config import SFTConfig

_STAGE = "ZeRO stage (with --bf16 at least 2)"


def ppo_report(flags: PPORun, setting: Setting) -> str:
    """The tables of `cli/train_ppo_vla.py --dry_run`."""
    inputs = _inputs(flags, setting)
    arithmetic = ppo_arithmetic(flags, setting, inputs)
    return "\n\n".join((table(("amounts", ""), arithmetic), memory_table(ppo_memory(flags, setting, inputs))))


def _inputs(flags: PPORun, setting: Setting) -> VLAInputs:
    folder = Path(flags.policy.pretrain)
    return VLAInputs.from_pretrained(folder, config=setting.config, unnorm_key=setting.unnorm_key)


def _rows_per_micro_batch(flags: PPORun, setting: Setting, inputs: VLAInputs) -> int:
    if not flags.batch.use_dynamic_batch:
        return flags.batch.micro_train_batch_size
    tokens = row_tokens(inputs, [task.instruction for task in setting.tasks], len(setting.env.camera_names))
    return flags.batch.train_max_tokens_per_gpu // max(tokens)


def _longest_episode(setting: Setting) -> int:
    """Decisions."""
    return max(-(-task.max_steps // setting.config.action_chunk_len) for task in setting.tasks)


def ppo_arithmetic(flags: PPORun, setting: Setting, inputs: VLAInputs) -> list[tuple[str, int]]:
    """Names and numbers; decisions are the most there can be, as episodes may end early."""
    batch, world = flags.batch, launched_world_size()
    decisions, tokens = _longest_episode(setting), setting.config.num_action_tokens
    steps = batch.episodes_per_iteration // batch.train_batch_size * batch.max_epochs
    micro = _rows_per_micro_batch(flags, setting, inputs)
    step_decisions = batch.train_batch_size // world * decisions
    actor_iterations = batch.iterations - flags.optimization.freezing_actor_steps
    rows = [
        ("ranks", world),
        (_STAGE, flags.strategy.engine_stage),
        ("iterations", batch.iterations),
        ("episodes of the run", batch.num_episodes),
        ("episodes per iteration", batch.episodes_per_iteration),
        ("episodes per iteration and rank", batch.episodes_per_iteration // world),
        ("decisions per episode, at most", decisions),
        ("action tokens per decision", tokens),
        ("decisions per iteration, at most", batch.episodes_per_iteration * decisions),
        ("optimizer steps per iteration", steps),
        ("optimizer steps of the actor", actor_iterations * steps),
        ("optimizer steps of the critic", batch.iterations * steps),
        ("episodes per optimizer step", batch.train_batch_size),
        ("decisions per optimizer step and rank, at most", step_decisions),
        ("decisions per micro-batch", micro),
        ("micro-batches per optimizer step (accumulation), at most", -(-step_decisions // micro)),
    ]
    return [row for row in rows if flags.algorithm.needs_critic or "critic" not in row[0]]


def ppo_memory(flags: PPORun, setting: Setting, inputs: VLAInputs) -> MemoryPlan:
    """Memory of one rank."""
    decisions, world, strategy = _longest_episode(setting), launched_world_size(), flags.strategy
    cameras, optimization = len(setting.env.camera_names), flags.optimization
    row = _row(inputs, [task.instruction for task in setting.tasks], cameras)
    own = flags.batch.train_batch_size // world * decisions
    micro = min(_rows_per_micro_batch(flags, setting, inputs), own)
    episodes = flags.batch.episodes_per_iteration // world
    scored = min(flags.batch.micro_rollout_batch_size, episodes * decisions)
    amounts = {"bf16": strategy.bf16, "forward_rows": scored}
    accumulates = own > micro or bool(optimization.ptx_coef)
    # The supervised loss has micro-batches of its own.
    supervised = min(flags.batch.micro_train_batch_size, -(-optimization.ptx_batch_size // world))
    actor_rows = max(micro, supervised) if optimization.ptx_coef else micro
    asked = min(flags.rollout.rollout_max_batch or flags.run.num_envs, flags.run.num_envs)
    probes = {"actor": probe(setting.config, row, flags.actor, train_rows=actor_rows, play_rows=asked, **amounts)}
    if flags.algorithm.needs_critic and not flags.algorithm.share_backbone:
        config = setting.config
        if flags.run.critic_pretrain:
            config, _ = check_checkpoint(Path(flags.run.critic_pretrain), flags.policy.unnorm_key)
        beside = flags.actor.without_adapters()
        probes["critic"] = probe(config, row, beside, train_rows=micro, scalar_head=True, **amounts)
    judges = _judges(flags, setting, row, amounts)
    size = setting.env.image_size or setting.config.image_size
    decision_bytes = cameras * size * size * 3 + setting.config.num_action_tokens * (8 + 4 * 6)
    return MemoryPlan(
        {name: engine_memory(p, strategy, world, accumulates=accumulates) for name, p in probes.items()},
        {name: _frozen(name, p, flags) for name, p in judges.items()},
        average=4 * probes["actor"].trainable if optimization.ema_beta else 0,
        passes={name: p.forward_bytes for name, p in {**probes, **judges}.items()},
        decision=probes["actor"].decision_bytes,
        offloads=optimization.offload_during_rollout,
        episodes=episodes * decisions * decision_bytes,
        demonstrations=_demonstration_bytes(flags, setting),
    )


def _judges(flags: PPORun, setting: Setting, row: RowShape, amounts: dict[str, Any]) -> dict[str, Probe]:
    """Frozen models."""
    found = {}
    if flags.algorithm.init_kl_coef and not flags.actor.lora_rank:  # adapters switched off are the reference
        found["reference"] = probe(setting.config, row, ActorConfig(), train_rows=0, **amounts)
    if flags.run.reward_pretrain:
        config, _ = check_checkpoint(Path(flags.run.reward_pretrain), None)
        found["reward model"] = probe(config, row, ActorConfig(), train_rows=0, scalar_head=True, **amounts)
    if "rm_model" in {spec.partition(":")[0] for spec in flags.rewards.reward} and flags.rewards.rm_model_path:
        config, _ = check_checkpoint(Path(flags.rewards.rm_model_path), None)
        # A source has its own way: float32, and frames of many decisions at once.
        amounts = {"bf16": False, "forward_rows": flags.rewards.rm_model_batch_size}
        found["rm_model"] = probe(config, row, ActorConfig(), train_rows=0, scalar_head=True, **amounts)
    return found


def _frozen(name: str, judge: Probe, flags: PPORun) -> FrozenMemory:
    """The model of `--reward rm_model` is whole on every rank, and maybe in host memory while it does not judge."""
    if name != "rm_model":
        return frozen_memory(judge, flags.strategy, launched_world_size())
    if waits_on_host(flags.strategy, flags.optimization):
        return FrozenMemory(judge.weight_bytes, gathered=judge.weight_bytes, host=frozenset({"weights"}))
    return FrozenMemory(judge.weight_bytes)


def _demonstration_bytes(flags: PPORun, setting: Setting) -> int:
    if flags.optimization.ptx_demos is None:
        return 0
    return read_demonstrations(flags.optimization.ptx_demos, setting.env.camera_names).image_bytes


def _row(inputs: VLAInputs, instructions: Sequence[str], cameras: int) -> RowShape:
    return RowShape(cameras, inputs.prompt(list(instructions), torch.device("cpu"))[0].shape[1])


def sft_report(
    inputs: VLAInputs, demos: Demonstrations, sft: SFTConfig, actor: ActorConfig, strategy: StrategyConfig
) -> str:
    """The tables of `cli/train_sft_vla.py --dry_run` for a model with these inputs."""
    config = inputs.config
    world = launched_world_size()
    rows = demos.num_rows
    own = -(-min(sft.train_batch_size, rows) // world)
    arithmetic = [
        ("ranks", world),
        (_STAGE, strategy.engine_stage),
        ("episodes", len(demos.actions)),
        ("decisions", rows),
        ("action tokens per decision", config.num_action_tokens),
        ("epochs", sft.max_epochs),
        ("optimizer steps", sft.optimizer_steps(rows)),
        ("decisions per optimizer step and rank", own),
        ("micro-batches per optimizer step (accumulation)", -(-own // sft.micro_train_batch_size)),
    ]
    prompt = _row(inputs, demos.instructions, 1).prompt_tokens
    cameras = demos.images[0].shape[1]
    plan = sft_memory(config, RowShape(cameras, prompt), own, sft.micro_train_batch_size, actor, strategy)
    plan.demonstrations = demos.image_bytes
    return "\n\n".join((table(("amounts", ""), arithmetic), memory_table(plan, plays=False)))


def sft_memory(
    config: OpenVLAConfig, row: RowShape, rows: int, micro: int, actor: ActorConfig, strategy: StrategyConfig
) -> MemoryPlan:
    """Memory of one rank in supervised training.

    Args:
        config: of the model.
        row: size of a decision.
        rows: decisions of an optimizer step on this rank.
        micro: decisions per micro-batch.
        actor: adapters and memory options.
        strategy: DeepSpeed.
    """
    micro = min(rows, micro)
    found = probe(config, row, actor, bf16=strategy.bf16, train_rows=micro, forward_rows=1)
    engine = engine_memory(found, strategy, launched_world_size(), accumulates=rows > micro)
    return MemoryPlan({"policy": engine})


def memory_table(plan: MemoryPlan, *, plays: bool = True) -> str:
    """The plan for a reader; with `plays` also the total while episodes are played."""
    rows = list(plan.rows())
    if plays:
        rows.append(("total on the device while episodes are played", plan.at_playing))
        rows.append(("total on the device while they are scored", plan.at_scoring))
    rows.append(("total on the device at update, at most", plan.at_update))
    if plan.on_host:
        rows.append(("total in host memory (on a CPU: besides the above)", plan.on_host))
    return table(("memory per rank", "MiB"), [(name, f"{size / 2**20:.1f}") for name, size in rows])
