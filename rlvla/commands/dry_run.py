"""`--dry_run`: step counts and memory of a checked configuration, without loading weights or starting workers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlvla.commands.hours import hours_report, rows_per_micro_batch
from rlvla.commands.load_models import state_critic
from rlvla.commands.setup import CheckedRun
from rlvla.data.demonstrations import Demonstrations
from rlvla.data.options import options_like
from rlvla.data.reading import read_demonstrations
from rlvla.envs.registry import get_suite
from rlvla.memory.plan import FrozenMemory, MemoryPlan, engine_memory, frozen_memory
from rlvla.memory.probe import Probe, probe
from rlvla.models.config import ActorConfig
from rlvla.models.families import Checkpoint, RowShape, check_checkpoint
from rlvla.models.state_critic import StateCriticSketch
from rlvla.rewards.config import REWARD_MODEL
from rlvla.rollout.config import ROLLOUT_BACKENDS
from rlvla.trainer.algorithm_config import LEARNERS, STATE, learner_needs_critic, learner_needs_reference
from rlvla.trainer.reward_sources import waits_on_host
from rlvla.utils.deepspeed.config import StrategyConfig, launched_world_size
from rlvla.utils.terminal import table

if TYPE_CHECKING:
    from rlvla.commands.ppo_flags import PPORun
    from rlvla.trainer.supervised.config import SFTConfig

_STAGE = "ZeRO stage (with --bf16 at least 2)"
_JUDGE = "judge of success"
RESERVED_GIB = 1.5  # beyond the plan
_UPDATE, _SCORING, _ROLLOUT = "the update", "scoring", "the rollout"
_OF_STATES = (
    "train fewer weights (--lora_rank 32), keep their states on the host (--adam_offload), or shard them over more "
    "GPUs (--zero_stage 2 or 3)"
)
_OF_WEIGHTS = "give --bf16, shard them over more GPUs (--zero_stage 3), or keep them on the host (--param_offload)"
# Words in the name of a part of the plan -> the phases that need it (all: ()), and the flags that reduce it.
_REDUCED_BY: dict[str, tuple[tuple[str, ...], str]] = {
    "activations": ((_UPDATE,), "lower --micro_train_batch_size, or give --gradient_checkpointing"),
    "pass without gradients": ((_SCORING,), "lower --micro_rollout_batch_size"),
    "decisions": ((_ROLLOUT,), "lower --num_envs or --rollout_max_batch"),
    "copy of the actor": ((), "leave out --async_rollout"),
    "optimizer step": ((_UPDATE,), _OF_STATES),
    "gradients": ((_UPDATE,), _OF_STATES),
    "optimizer states": ((), _OF_STATES),
    "master copy": ((), _OF_STATES),
    "gathered": ((), "give --zero_stage 2 if the weights fit on one GPU"),
    "weights": ((), _OF_WEIGHTS),
}
NOT_COUNTED = "not counted: the policy of --rollout_backend {backend}, {what}"
NO_MEMORY = "the memory is not known: the policy's family offers no sketch of its networks"


def ppo_report(flags: PPORun, setting: CheckedRun) -> str:
    """The tables of `cli/train_ppo_vla.py --dry_run`."""
    arithmetic, plan = ppo_arithmetic(flags, setting), ppo_memory(flags, setting)
    parts = [table(("amounts", ""), arithmetic), memory_table(plan) if plan else NO_MEMORY]
    if plan is not None and flags.run.gpu_memory is not None:
        parts.append(fit_on_gpu(plan, flags.run.gpu_memory))
    if flags.run.hours:
        parts.append(hours_report(flags, setting, plan))
    name = flags.backend.rollout_backend
    backend = ROLLOUT_BACKENDS.get(name)
    if not backend.in_process:
        parts.append(NOT_COUNTED.format(backend=name, what=backend.uncounted))
    return "\n\n".join(parts)


def _longest_episode(setting: CheckedRun) -> int:
    """Decisions of the longest episode."""
    return max(-(-task.max_steps // setting.spec.action_chunk_len) for task in setting.tasks)


def ppo_arithmetic(flags: PPORun, setting: CheckedRun) -> list[tuple[str, int]]:
    """Counts by name; numbers of decisions are upper bounds, since episodes may end early."""
    batch, world = flags.batch, launched_world_size()
    decisions = _longest_episode(setting)
    steps = batch.episodes_per_iteration // batch.train_batch_size * batch.max_epochs
    micro = rows_per_micro_batch(flags, setting)
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
        ("log-probs per decision", setting.spec.columns),
        ("decisions per iteration, at most", batch.episodes_per_iteration * decisions),
        ("optimizer steps per iteration", steps),
        ("optimizer steps of the actor", actor_iterations * steps),
        ("optimizer steps of the critic", batch.iterations * steps),
        ("episodes per optimizer step", batch.train_batch_size),
        ("decisions per optimizer step and rank, at most", step_decisions),
        ("decisions per micro-batch", micro),
        ("micro-batches per optimizer step (accumulation), at most", -(-step_decisions // micro)),
    ]
    return [row for row in rows if learner_needs_critic(flags.algorithm) or "critic" not in row[0]]


def ppo_memory(flags: PPORun, setting: CheckedRun) -> MemoryPlan | None:
    """Memory of one rank; None if the family of a network offers no sketch."""
    decisions, world, strategy = _longest_episode(setting), launched_world_size(), flags.strategy
    backend = ROLLOUT_BACKENDS.get(flags.backend.rollout_backend)
    cameras, optimization = len(setting.env.camera_names), flags.optimization
    row = setting.checkpoint.row_shape([task.instruction for task in setting.tasks], cameras)
    own = flags.batch.train_batch_size // world * decisions
    micro = min(rows_per_micro_batch(flags, setting), own)
    episodes = flags.batch.episodes_per_iteration // world
    scored = min(flags.batch.micro_rollout_batch_size, episodes * decisions)
    amounts: dict[str, Any] = {"bf16": strategy.bf16, "forward_rows": scored}
    accumulates = own > micro or bool(optimization.ptx_coef)
    # The supervised loss has separate micro-batches.
    supervised = min(flags.batch.micro_train_batch_size, -(-optimization.ptx_batch_size // world))
    actor_rows = max(micro, supervised) if optimization.ptx_coef else micro
    asked = min(flags.rollout.rollout_max_batch or flags.run.num_envs, flags.run.num_envs)
    policy = setting.checkpoint.sketch(row, flags.actor, supervised=optimization.ptx_coef > 0)
    if policy is None:
        return None
    probes = {"actor": probe(policy, train_rows=actor_rows, play_rows=asked, **amounts)}
    if learner_needs_critic(flags.algorithm) and flags.algorithm.critic_input == STATE:
        probes["critic"] = probe(lambda: StateCriticSketch(state_critic(setting)), train_rows=micro, **amounts)
    elif learner_needs_critic(flags.algorithm) and not flags.algorithm.share_backbone:
        critic, start = setting.checkpoint, flags.critic_folder
        if start:
            critic = check_checkpoint(start, setting.checkpoint.unnorm_key, overrides=setting.overrides)
        sketch = critic.sketch(row, flags.actor.without_adapters(), scalar_head=True)
        if sketch is None:
            return None
        probes["critic"] = probe(sketch, train_rows=micro, **amounts)
    frozen = _frozen_probes(flags, setting, row, amounts)
    size = setting.env.image_size or setting.spec.image_size or get_suite(setting.env.suite).default_image_size
    decision_bytes = cameras * size * size * 3 + setting.spec.columns * (8 + 4 * 6)
    demos, like = optimization.ptx_demos, options_like(setting.env, optimization.dataset_camera)
    averages = optimization.ema_beta or LEARNERS.get(flags.algorithm.algorithm).played_tensors
    return MemoryPlan(
        {name: engine_memory(p, strategy, world, accumulates=accumulates) for name, p in probes.items()},
        {name: _frozen(name, p, flags) for name, p in frozen.items()},
        average=4 * probes["actor"].trainable if averages else 0,
        copies=flags.asynchronous.copies * probes["actor"].weight_bytes if backend.in_process else 0,
        passes={name: p.forward_bytes for name, p in {**probes, **frozen}.items()},
        decision=probes["actor"].decision_bytes,
        offloads=optimization.offload_during_rollout,
        episodes=episodes * decisions * decision_bytes * (1 + flags.asynchronous.iterations_ahead),
        demonstrations=0 if demos is None else read_demonstrations(demos, setting.env.camera_names, like).image_bytes,
    )


def _frozen_probes(flags: PPORun, setting: CheckedRun, row: RowShape, amounts: dict[str, Any]) -> dict[str, Probe]:
    """Probes of the reference and of reward models."""
    sketches = {}
    if learner_needs_reference(flags.algorithm) and not flags.actor.lora_rank:  # else: adapters switched off
        sketches["reference"] = setting.checkpoint.sketch(row, ActorConfig()), amounts
    rewards, folders = flags.rewards, {}
    if "rm_model" in rewards.source_names and rewards.rm_model_path:
        folders["rm_model"] = (rewards.rm_model_path, rewards.rm_model_pay)
    if flags.success.success_source == "rm_model" and rewards.rm_model_path:
        folders[_JUDGE] = (rewards.rm_model_path, "final")
    if rewards.reward_pretrain:
        folders[REWARD_MODEL] = (rewards.reward_pretrain, "final")
    for name, (folder, pay) in folders.items():
        model = check_checkpoint(folder)
        row = model.row_shape([task.instruction for task in setting.tasks], len(setting.env.camera_names))
        sketch = model.sketch(row, ActorConfig(), scalar_head=True)
        amounts = {"bf16": flags.strategy.bf16 and pay == "final", "forward_rows": rewards.rm_model_batch_size}
        sketches[name] = sketch, amounts
    return {name: probe(build, train_rows=0, **sizes) for name, (build, sizes) in sketches.items() if build is not None}


def _frozen(name: str, measured: Probe, flags: PPORun) -> FrozenMemory:
    """Memory of a frozen model; reward models are not sharded, and may be offloaded while they are not scoring."""
    if name == "reference":
        return frozen_memory(measured, flags.strategy, launched_world_size())
    memory = FrozenMemory(measured.weight_bytes, source=True, judge=name == _JUDGE)
    if waits_on_host(flags.strategy, flags.optimization):
        return replace(memory, gathered=memory.weights, host=frozenset({"weights"}))
    return memory


def sft_report(
    checkpoint: Checkpoint,
    demos: Demonstrations,
    sft: SFTConfig,
    actor: ActorConfig,
    strategy: StrategyConfig,
    rows: int | None = None,
    gpu_memory: float | None = None,
) -> str:
    """The tables of `cli/train_sft_vla.py --dry_run` for a policy that starts from this checkpoint.

    `rows` are the training rows, by default all; `gpu_memory`: see `fit_on_gpu`.
    """
    world = launched_world_size()
    rows = demos.num_rows if rows is None else rows
    own = -(-min(sft.train_batch_size, rows) // world)
    arithmetic = [
        ("ranks", world),
        (_STAGE, strategy.engine_stage),
        ("episodes", len(demos.actions)),
        ("decisions", rows),
        ("log-probs per decision", checkpoint.spec.columns),
        ("epochs", sft.max_epochs),
        ("optimizer steps", sft.optimizer_steps(rows)),
        ("decisions per optimizer step and rank", own),
        ("micro-batches per optimizer step (accumulation)", -(-own // sft.micro_train_batch_size)),
    ]
    tables = [table(("amounts", ""), arithmetic)]
    micro = min(own, sft.micro_train_batch_size)
    row = checkpoint.row_shape(demos.distinct_instructions, demos.images[0].shape[1])
    sketch = checkpoint.sketch(row, actor, supervised=True)
    if sketch is None:
        return "\n\n".join((*tables, NO_MEMORY))
    probed = probe(sketch, bf16=strategy.bf16, train_rows=micro, forward_rows=1)
    engine = engine_memory(probed, strategy, world, accumulates=own > micro)
    plan = MemoryPlan({"policy": engine}, average=4 * probed.trainable if sft.ema_decay else 0)
    plan.demonstrations = demos.image_bytes
    tables.append(memory_table(plan, plays=False))
    if gpu_memory is not None:
        tables.append(fit_on_gpu(plan, gpu_memory, plays=False))
    return "\n\n".join(tables)


def fit_on_gpu(plan: MemoryPlan, gib: float, *, plays: bool = True) -> str:
    """Whether the plan fits on a GPU of `gib` GiB; if not, the flags that reduce the largest part of the phase."""
    phases = {_UPDATE: plan.at_update}
    if plays:
        phases |= {_ROLLOUT: plan.at_playing, _SCORING: plan.at_scoring}
    phase = max(phases, key=lambda name: phases[name])
    needed = phases[phase] / 2**30
    sizes = f"{needed:.1f} GiB in {phase}, and {RESERVED_GIB:g} for the CUDA context, workspaces and fragmentation"
    left = gib - needed - RESERVED_GIB
    if left >= 0:
        return f"fits on a GPU of {gib:g} GiB: {sizes}; {left:.1f} GiB are left"
    parts: list[tuple[int, str, str]] = []
    for name, size in plan.rows():
        of_phases, flags = next((by for words, by in _REDUCED_BY.items() if words in name), ((), ""))
        if flags and "(host)" not in name and phase in (of_phases or phases):
            parts.append((size, name, flags))
    # Weights come last: in bfloat16 one GPU has to hold them.
    size, name, flags = max(parts, key=lambda part: (part[2] != _OF_WEIGHTS, part[0]))
    return (
        f"does NOT fit on a GPU of {gib:g} GiB: {sizes}; {-left:.1f} GiB too much. Largest part besides the weights: "
        f"{name}, {size / 2**30:.1f} GiB; {flags} (docs/one_gpu.md)"
    )


def memory_table(plan: MemoryPlan, *, plays: bool = True) -> str:
    """The plan as a table; with `plays` including the totals during rollout and scoring."""
    rows = list(plan.rows())
    if plays:
        rows.append(("total on the device while episodes are played", plan.at_playing))
        rows.append(("total on the device while they are scored", plan.at_scoring))
    rows.append(("total on the device at update, at most", plan.at_update))
    if plan.on_host:
        rows.append(("total in host memory (on a CPU: besides the above)", plan.on_host))
    return table(("memory per rank", "MiB"), [(name, f"{size / 2**20:.1f}") for name, size in rows])
