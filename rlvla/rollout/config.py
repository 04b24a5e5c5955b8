"""Flags of the rollout engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlvla.algorithms.curricula import list_task_samplings
from rlvla.algorithms.registry import Registry
from rlvla.models.config import ActorConfig
from rlvla.utils.cli.flags import arg

if TYPE_CHECKING:
    import torch

    from rlvla.models.families import Checkpoint

# Where the policy of training episodes runs, by name; see `rlvla.rollout.backends`.
COLOCATED, VLLM = "colocated", "vllm"
ROLLOUT_BACKENDS: Registry = Registry(
    "rollout backend",
    {
        "rlvla.rollout.backends.colocated": (COLOCATED,),
        "rlvla.rollout.backends.actors": ("actors",),
        "rlvla.rollout.vllm.backend": (VLLM,),
    },
)


@dataclass(frozen=True)
class RolloutConfig:
    """Batching of episodes for the policy, and handling of environment failures."""

    rollout_max_batch: int | None = arg(
        None,
        "maximum episodes per forward pass of the policy (default: --num_envs; a batch of half that size does "
        "not wait, so that one half simulates while the policy answers the other)",
        minimum=1,
    )
    rollout_max_wait_ms: float = arg(
        20.0, "milliseconds a smaller batch waits for more episodes while others simulate", minimum=0, maximum=60_000
    )
    deterministic_rollout: bool = arg(
        False,
        "the policy waits for all running episodes and answers them in a fixed order: log-probs are then bitwise "
        "reproducible regardless of worker timing, but simulation and inference no longer overlap",
    )
    max_env_retries: int = arg(
        2, "how often an episode is retried from its initial state after its environment failed", minimum=0, maximum=100
    )
    max_dropped_fraction: float = arg(
        0.05,
        "stop if more than this fraction of a rollout's episodes is dropped (they are counted, never scored)",
        minimum=0,
        maximum=1,
    )


@dataclass(frozen=True)
class BackendConfig:
    """Where the policy runs that plays the training episodes."""

    rollout_backend: str = arg(
        COLOCATED,
        "where the policy runs that plays the training episodes: colocated (in this process), actors (copies of it on "
        "a Ray cluster, see --ray_address), vllm (its decoder in vLLM, for policies that decode token by token), or a "
        "backend of your own",
        choices=ROLLOUT_BACKENDS.names,
    )
    rollout_actors: int | None = arg(
        None,
        "copies of the policy for each rank that --rollout_backend actors starts (default: 1)",
        minimum=1,
        maximum=1000,
    )
    rollout_python: str | None = arg(
        None,
        "Python interpreter with vLLM, for --rollout_backend vllm (default: that of .venv-vllm, which "
        "examples/scripts/install_vllm.sh makes)",
        metavar="PATH",
    )


@dataclass(frozen=True)
class BackendSetup:
    """What a rollout backend is told of the run.

    Attributes:
        config: its flags.
        checkpoint: the folder that the policy was read from; None: it could not be read, which is reported elsewhere.
        actor: adapters and memory options of the policy.
        ray_address: Ray cluster, see `rlvla.envs.workers.ray_backend.RayBackend`.
        custom_modules: the user's modules, which processes that load the policy must import first.
        folder: run folder, for logs; None: there is none.
        bf16: whether the weights in training are bfloat16, else float32.
        episodes: how many may be played at once, on this rank.
        device: of the policy in training; None: the CPU.
        rank, ranks: this process and the number of them; each has its own backend.
    """

    config: BackendConfig = BackendConfig()
    checkpoint: Checkpoint | None = None
    actor: ActorConfig = field(default_factory=ActorConfig)
    ray_address: str = "auto"
    custom_modules: tuple[str, ...] = ()
    folder: Path | None = None
    bf16: bool = False
    episodes: int = 64
    device: torch.device | None = None
    rank: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class TaskSamplingConfig:
    """Which task instances are played in training."""

    task_sampling: str = arg(
        "uniform",
        "how the tasks of groups are drawn: uniform (every initial state equally often), inverse_success (by their "
        "share of failures), learning_progress (by how far their success has moved), or a curriculum of your own",
        choices=list_task_samplings,
    )
    task_sampling_floor: float = arg(
        0.2, "share of the groups that all tasks have in equal parts, whatever the curriculum", above=0, maximum=1
    )
    task_success_horizon: float = arg(
        64.0, "episodes of a task over which the curriculum averages its success", above=0, maximum=1e6
    )
    task_weights: tuple[str, ...] = arg(
        (),
        "weights by which the tasks of groups are drawn, 1 for tasks not named; factors of what a curriculum gives "
        "(default: every initial state equally often)",
        metavar="TASK:WEIGHT",
    )
    task_sampler: str | None = arg(
        None, "a class of your own that chooses task and initial state of each group", metavar="FILE.py:CLASS"
    )

    @property
    def favours_some(self) -> bool:
        """Whether tasks or states are chosen by how they go, so that success over all episodes says little."""
        return self.task_sampler is not None or self.task_sampling != "uniform"
