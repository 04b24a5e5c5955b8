"""Flags of DeepSpeed, and the launcher's ranks before a process group exists."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from typing import Any

from rlvla.utils.budgets import local_ranks
from rlvla.utils.cli.flags import arg
from rlvla.utils.errors import Problem


def rank_timeout_flag() -> Any:
    """The field `rank_timeout` of every command that runs on several ranks."""
    return arg(
        600.0,
        "seconds without a heartbeat from another rank (frozen, unreachable) after which the run ends; ranks send "
        "heartbeats while they compute or wait",
        minimum=1,
        maximum=86_400,
    )


@dataclass(frozen=True)
class StrategyConfig:
    """How DeepSpeed is run."""

    zero_stage: int = arg(
        0,
        "DeepSpeed ZeRO stage: 0 replicates, 1 shards optimizer states, 2 gradients, 3 parameters (with --bf16 0 and 1 "
        "run as 2)",
        choices=(0, 1, 2, 3),
        essential=True,
    )
    bf16: bool = arg(
        False, "train in bfloat16 (faster on GPUs; on CPUs only from about 10 M parameters)", essential=True
    )
    adam_offload: bool = arg(
        False, "keep optimizer states in host memory (needs zero_stage >= 1, or bf16)", aliases=("optimizer_offload",)
    )
    param_offload: bool = arg(
        False,
        "keep each rank's shard of all parameters, including frozen models, in host memory between passes (needs "
        "zero_stage 3)",
    )
    full_determinism: bool = arg(
        False,
        "on a GPU, use only kernels whose results do not depend on timing, which are slower; with "
        "--deterministic_rollout a run that is resumed is then the same to the bit, as on a CPU; an operation without "
        "such a kernel ends the run",
    )
    max_norm: float = arg(
        1.0,
        "maximum gradient norm; larger gradients are clipped to it",
        above=0,
        aliases=("max_grad_norm", "grad_clip"),
    )
    rank_timeout: float = rank_timeout_flag()
    local_rank: int = arg(-1, "set by the deepspeed launcher")

    @property
    def engine_stage(self) -> int:
        """The ZeRO stage that is run.

        The gradients of many micro-batches must be accumulated in float32: in bfloat16 the 257th of equal summands has
        no effect. With bfloat16 weights DeepSpeed offers this from stage 2 on; stage 0 rejects it, and stage 1 uses an
        optimizer for it whose states cannot be offloaded.
        """
        return max(self.zero_stage, 2) if self.bf16 else self.zero_stage

    def sharding_problems(self, flag: str, value: object) -> list[Problem]:
        """ZeRO-3 beside an option that needs all parameters on every rank."""
        text = f"--{flag} {value} needs whole parameters on every rank: --zero_stage 0, 1 or 2"
        return [Problem(flag, "contradiction", text)] if self.zero_stage == 3 else []

    def kernel_problems(self, attn_implementation: str) -> list[Problem]:
        """An attention kernel for half precision alone, in float32."""
        text = f"--attn_implementation {attn_implementation} computes in half precision only; give --bf16"
        wrong = attn_implementation != "sdpa" and not self.bf16
        return [Problem("attn_implementation", "needs_flag", text)] if wrong else []

    def problems(self) -> list[Problem]:
        """Flags that contradict each other; checked by every training command."""
        problems = launch_problems()
        if self.adam_offload and self.engine_stage == 0:
            problems.append(Problem("adam_offload", "needs_flag", "--adam_offload needs --zero_stage 1, 2 or 3"))
        if self.param_offload and self.zero_stage != 3:
            text = (
                "--param_offload needs --zero_stage 3, which shards the parameters over the ranks; --zero_stage is "
                f"{self.zero_stage}"
            )
            problems.append(Problem("param_offload", "needs_flag", text))
        return problems


def launched_world_size() -> int:
    """Number of ranks, available before the process group exists: the launcher's WORLD_SIZE, else 1."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """Rank of this process, available before the process group exists: the launcher's RANK, else 0."""
    return int(os.environ.get("RANK", "0"))


def launch_problems() -> list[Problem]:
    """Problems of the launch: `port_problems`, `device_problems`."""
    return port_problems() + device_problems()


def port_problems() -> list[Problem]:
    """On the first rank, a problem if another process has taken the rendezvous port."""
    port, is_host = os.environ.get("MASTER_PORT", ""), os.environ.get("RANK") == "0"
    distributed = sys.modules.get("torch.distributed")
    connected = distributed is not None and distributed.is_initialized()
    if not is_host or connected or not port.isdigit() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return []
    try:
        socket.create_server(("", int(port))).close()
    except (OSError, OverflowError):
        return [Problem("master_port", "unavailable", taken_port(port))]
    return []


def device_problems() -> list[Problem]:
    """A problem if more ranks were launched on this machine than it has GPUs."""
    ranks = local_ranks()
    if ranks == 1 or os.environ.get("DS_ACCELERATOR") == "cpu":
        return []
    import torch

    gpus = torch.cuda.device_count()
    if gpus == 0 or ranks <= gpus:
        return []
    text = (
        f"{ranks} ranks were launched on this machine, each needs its own GPU, and {gpus} can be used: launch "
        f"{gpus} (deepspeed --num_accelerators {gpus}), or let all compute on the CPU: export DS_ACCELERATOR=cpu"
    )
    return [Problem("num_accelerators", "unavailable", text)]


def taken_port(place: str) -> str:
    """The message about an occupied rendezvous port."""
    return (
        f"port {place} is taken, perhaps by another run on this machine; give the launcher another one: "
        "deepspeed --master_port 29600 ..."
    )
