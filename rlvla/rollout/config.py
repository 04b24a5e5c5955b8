"""Flags of the rollout engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvla.algorithms.curricula import TASK_SAMPLINGS
from rlvla.models.config import ActorConfig
from rlvla.options import Condition, Registry, arg, equals, fill_selected, selected

if TYPE_CHECKING:
    import torch

    from rlvla.models.families import Checkpoint

# Where the policy of training episodes runs, by name; see `rlvla.rollout.backends`.
COLOCATED, VLLM = "colocated", "vllm"
ROLLOUT_BACKENDS: Registry = Registry(
    "rollout backend",
    modules={
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
        "not wait, so that one half simulates while the policy decides for the other)",
        minimum=1,
    )
    rollout_max_wait_ms: float = arg(
        20.0,
        "milliseconds a smaller batch waits for more episodes while others simulate",
        minimum=0,
        maximum=60_000,
        read_if=Condition(
            lambda flags: not flags["deterministic_rollout"], "--deterministic_rollout waits for all running episodes"
        ),
    )
    deterministic_rollout: bool = arg(
        False,
        "the policy waits for all running episodes and decides in a fixed order: log-probs are then bitwise "
        "reproducible regardless of worker timing, but simulation and inference no longer overlap",
    )
    cuda_graphs: bool = arg(
        False,
        "capture the kernels of decisions once per batch size and launch them together: faster on a GPU in small "
        "batches",
    )
    max_env_retries: int = arg(
        2, "retries of an episode from its initial state after its environment failed", minimum=0, maximum=100
    )
    max_dropped_fraction: float = arg(
        0.05,
        "stop if more than this fraction of a rollout's episodes is dropped (they are counted, never scored)",
        minimum=0,
        maximum=1,
    )


@dataclass(frozen=True)
class BackendConfig:
    """Where the policy of training episodes runs."""

    rollout_backend: str = arg(
        COLOCATED,
        "where the policy of training episodes runs: colocated (in this process), actors (copies of it on a Ray "
        "cluster, see --ray_address), vllm (its decoder in vLLM, for policies that decode token by token), or a custom "
        "backend",
        choices=ROLLOUT_BACKENDS.names,
    )
    rollout_actors: int | None = arg(
        None,
        "copies of the policy per rank, for --rollout_backend actors (default: 1)",
        minimum=1,
        maximum=1000,
        read_if=equals("rollout_backend", "actors"),
    )
    rollout_python: str | None = arg(
        None,
        "Python interpreter with vLLM, for --rollout_backend vllm (default: .venv-vllm, made by "
        "examples/scripts/install_vllm.sh)",
        metavar="PATH",
        read_if=equals("rollout_backend", VLLM),
    )


@dataclass(frozen=True)
class BackendSetup:
    """Configuration of a rollout backend.

    Attributes:
        config: its flags.
        checkpoint: the checkpoint of the policy; None: unreadable, which is reported elsewhere.
        actor: adapters and memory options of the policy.
        ray_address: Ray cluster, see `rlvla.envs.workers.ray_backend.RayBackend`.
        custom_modules: the user's modules, to be imported before the policy is loaded.
        folder: run folder, for logs; None without one.
        bf16: whether the weights in training are bfloat16, else float32.
        episodes: maximum number of concurrent episodes on this rank.
        device: of the policy in training; None: the CPU.
        rank, ranks: this process and their number; each has its own backend.
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


_CURRICULUM = Condition(lambda flags: flags["task_sampling"] != "uniform", "--task_sampling is uniform")


@dataclass(frozen=True)
class TaskSamplingConfig:
    """Choice of the task instances of training.

    Attributes:
        curriculum_options: options of the curriculum.
    """

    task_sampling: str = arg(
        "uniform",
        "curriculum that draws the task of each group: uniform (every initial state equally often), inverse_success "
        "(by failure rate), learning_progress (by change of the success rate), or a custom one",
        choices=TASK_SAMPLINGS.names,
    )
    task_sampling_floor: float = arg(
        0.2,
        "fraction of the groups that any curriculum divides equally among all tasks",
        above=0,
        maximum=1,
        read_if=_CURRICULUM,
    )
    task_success_horizon: float = arg(
        64.0,
        "episodes of a task over which the curriculum averages its success",
        above=0,
        maximum=1e6,
        read_if=_CURRICULUM,
    )
    task_weights: tuple[str, ...] = arg(
        (),
        "sampling weights of tasks, 1 for tasks not named; they multiply the probabilities of a curriculum (default: "
        "every initial state equally often)",
        metavar="TASK:WEIGHT",
    )
    task_sampler: str | None = arg(
        None, "custom class that chooses task and initial state of each group", metavar="FILE.py:CLASS"
    )
    curriculum_options: Any = selected(TASK_SAMPLINGS)

    def __post_init__(self) -> None:
        fill_selected(self)

    @property
    def favours_some(self) -> bool:
        """Whether sampling depends on success, so that success over all episodes is biased."""
        return self.task_sampler is not None or self.task_sampling != "uniform"
