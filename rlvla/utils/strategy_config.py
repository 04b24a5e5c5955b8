"""How DeepSpeed is run: its flags, and what its launcher tells before there is a process group."""

from __future__ import annotations

import os
from dataclasses import dataclass

from rlvla.utils.arguments import arg

# What follows the warm-up -> the name transformers has for it; its plain "constant" would ignore the warm-up.
SCHEDULERS = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


@dataclass(frozen=True)
class StrategyConfig:
    """How DeepSpeed is run."""

    zero_stage: int = arg(
        0,
        "DeepSpeed ZeRO stage: 0 replicates, 1 shards optimizer states, 2 gradients, 3 parameters (with --bf16 0 and 1 "
        "run as 2)",
        choices=(0, 1, 2, 3),
    )
    bf16: bool = arg(False, "train in bfloat16 (pays on GPUs, and on CPUs only from about 10 M parameters)")
    adam_offload: bool = arg(False, "keep optimizer states in host memory (needs zero_stage >= 1, or bf16)")
    param_offload: bool = arg(
        False,
        "keep each rank's share of all parameters, frozen models too, in host memory between passes (needs "
        "zero_stage 3)",
    )
    max_norm: float = arg(1.0, "gradient norm is clipped to this", above=0)
    local_rank: int = arg(-1, "set by the deepspeed launcher")

    @property
    def engine_stage(self) -> int:
        """The ZeRO stage that runs.

        A step with many micro-batches needs a float32 sum of their gradients: in bfloat16 the 257th of equal ones adds
        nothing any more. With bfloat16 weights DeepSpeed has that sum from stage 2 on. Below, stage 0 refuses it, and
        stage 1 takes an optimizer for it whose states cannot be moved to the host.
        """
        return max(self.zero_stage, 2) if self.bf16 else self.zero_stage

    def problems(self) -> list[str]:
        """What contradicts itself; every command that trains asks."""
        found = []
        if self.adam_offload and self.engine_stage == 0:
            found.append("--adam_offload needs --zero_stage 1, 2 or 3")
        if self.param_offload and self.zero_stage != 3:
            found.append(
                f"--param_offload needs --zero_stage 3, under which parameters are shared out; --zero_stage is "
                f"{self.zero_stage}"
            )
        return found


def launched_world_size() -> int:
    """Ranks of this run, known before the process group exists: the launcher's WORLD_SIZE, else 1."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """This process's rank, known before the process group exists: the launcher's RANK, else 0."""
    return int(os.environ.get("RANK", "0"))
