"""Runs of full-size policies up to the first kernel: the flags checked, the networks without their weights."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu import POLICIES, flags_of
from cli.train_ppo_vla import build_parser
from rlvla.commands.dry_run import ppo_arithmetic
from rlvla.commands.ppo_checks import check
from rlvla.commands.ppo_flags import PPORun
from rlvla.commands.run_policies import policy_record
from rlvla.commands.setup import CheckedRun
from rlvla.models.actor import Actor
from rlvla.models.footprint import FakeBytes, place
from rlvla.models.lerobot.policy import LeRobotPolicy
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.trainer.algorithm import AlgorithmSetup
from rlvla.trainer.config import PPOConfig
from rlvla.trainer.models import Models
from rlvla.trainer.ppo_trainer import PPO
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy

# As the published GRPO runs on LIBERO: 64 episodes in groups of eight, two optimizer steps per iteration.
RUN = (
    "--task_suite_name libero_spatial --bf16 --advantage_estimator grpo --n_samples_per_prompt 8 "
    "--rollout_batch_size 8 --train_batch_size 32 --num_episodes 6400 --num_envs 8 --eval_episodes 10 "
    "--lr_scheduler cosine --lr_warmup_ratio 0.05 --actor_learning_rate 5e-6"
)


def checked(name: str, folder: Path, micro: int) -> tuple[PPORun, CheckedRun]:
    """The checked flags of a run of `benchmarks/gpu.py`'s policy, whose folder is written first.

    Args:
        name: a key of `POLICIES`.
        folder: where the policy is written.
        micro: decisions per micro-batch.
    """
    policy = POLICIES[name]
    policy.build(folder)
    words = f"--pretrain {folder} --save_path {folder}/run {RUN} {flags_of(policy, micro)}"
    flags = PPORun.from_namespace(build_parser().parse_args(words.split()))
    return flags, check(flags)


def on_meta(flags: PPORun, setting: CheckedRun) -> Any:
    """The policy that a run trains, with adapters, its tensors on the meta device."""
    checkpoint: Any = setting.checkpoint
    with torch.device("meta"):
        if hasattr(checkpoint, "files"):
            files = checkpoint.files
            return LeRobotPolicy(files, checkpoint.settings, flags.actor, network=files.empty_network())
        return Actor(OpenVLAForActionPrediction(checkpoint.config), checkpoint.inputs, flags.actor)


@dataclass
class Begun:
    """A learner before its first iteration, on the first of several ranks.

    Attributes:
        trained: name and elements of the parameters in the optimizer.
        dtypes: of the trained weights and of this rank's master copy.
        stage: ZeRO stage.
        bucket: elements of the bucket of the gradient reduction.
        shard: elements of this rank's master copy.
        live_bytes: weights and master copy.
        learning_rates: of each optimizer step of the run.
        amounts: the counts of `--dry_run`.
    """

    trained: dict[str, int]
    dtypes: tuple[str, str]
    stage: int
    bucket: int
    shard: int
    live_bytes: int
    learning_rates: list[float]
    amounts: dict[str, int]


def begin(name: str, folder: Path, micro: int, ranks: int) -> dict[str, Any]:
    """Construct the learner of a run on fake tensors with DeepSpeed's engine; `Begun` as a dictionary.

    For a process of its own, which becomes the first rank of a group whose other ranks do not exist.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": str(ranks)}
    flags, setting = checked(name, folder, micro)
    policy = on_meta(flags, setting)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    live = FakeBytes()
    with FakeTensorMode(), live:
        place(policy, torch.bfloat16)
        live.count(list(policy.parameters()), list(policy.buffers()))
        policy.to = lambda *_, **__: policy  # fake parameters cannot be swapped, and have their dtype and device
        learner = learner_of(flags, setting, policy)
    return asdict(described(learner, policy, live.now, dict(ppo_arithmetic(flags, setting))))


def learner_of(flags: PPORun, setting: CheckedRun, policy: nn.Module) -> PPO:
    """The learner as `PPOTrainer` constructs it."""
    config = PPOConfig(
        batch=flags.batch,
        algorithm=flags.algorithm,
        optimization=flags.optimization,
        schedule=flags.schedule,
        split=flags.split,
        record=policy_record(flags.policy.pretrain, flags.split, setting, None),
    )
    models: Any = Models(policy, None, None, setting.overrides)
    return PPO(AlgorithmSetup(models, DeepspeedStrategy(flags.strategy), config, setting.tasks))


def described(learner: PPO, policy: nn.Module, live_bytes: int, amounts: dict[str, int]) -> Begun:
    """Facts about the engine of a learner."""
    engine = learner.actor.engine
    zero, (schedule,) = engine.optimizer, engine.lr_scheduler.lr_lambdas
    names = {id(parameter): name for name, parameter in policy.named_parameters()}
    trained = [parameter for group in zero.bit16_groups for parameter in group]
    (shard,) = zero.single_partition_of_fp32_groups
    rate = learner.setup.config.optimization.actor_learning_rate
    return Begun(
        trained={names[id(parameter)]: parameter.numel() for parameter in trained},
        dtypes=(str(trained[0].dtype), str(shard.dtype)),
        stage=engine.zero_optimization_stage(),
        bucket=zero.reduce_bucket_size,
        shard=shard.numel(),
        live_bytes=live_bytes,
        learning_rates=[rate * schedule(step) for step in range(amounts["optimizer steps of the actor"])],
        amounts=amounts,
    )
