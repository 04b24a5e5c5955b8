"""DeepSpeed behind a small interface: engines, collective operations, checkpoints of engine state.

Gradient accumulation is driven by the caller (`backward(..., last=True)` on the last micro-batch of an optimiser step),
because the number of micro-batches varies from step to step. DeepSpeed's own division by the accumulation count is
therefore 1, and its averaging over ranks is undone by the losses' `dp_size` factor.
"""

from __future__ import annotations

import atexit
import io
import math
import os
import shutil
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlvla.utils.durable_files import checked_file
from rlvla.utils.errors import RunEnded, require
from rlvla.utils.logging import log
from rlvla.utils.strategy_config import SCHEDULERS, StrategyConfig


@dataclass(frozen=True)
class OptimConfig:
    """One AdamW optimizer with its learning-rate schedule."""

    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    scheduler: str
    warmup_ratio: float
    total_steps: int


def bucket_elements(trainable: int) -> int:
    """Size of the buffer through which ZeRO reduces gradients: DeepSpeed's own, or less for a model below that."""
    return max(1, min(500_000_000, trainable))


def _no_meeting(error: Exception) -> str:
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if "address already in use" in str(error):
        return (
            f"port {place} is taken, perhaps by another run on this machine; give the launcher another one: "
            "deepspeed --master_port 29600 ..."
        )
    return f"the ranks do not meet at {place} ({error}); --master_addr and --master_port of the launcher say where"


def has_accelerator() -> bool:
    """Whether a strategy of this process computes on something else than the CPU."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    require("deepspeed", extra="all")
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().device_name() != "cpu"


class DeepspeedStrategy:
    """Process group, engines and collectives of one run.

    Without a launcher the process is its own world of one. The device is the accelerator's.
    """

    def __init__(self, config: StrategyConfig, seed: int = 0):
        self.config = config
        self.seed = seed
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # DeepSpeed reads it at any time; alone it is no sign of a launcher to a process that inherits it.
        os.environ.setdefault("LOCAL_RANK", "0")
        deepspeed = require("deepspeed", extra="all")
        from deepspeed.accelerator import get_accelerator

        # Otherwise the first engine on a CPU compiles a shared-memory communication op for over a minute.
        require("deepspeed.ops", extra="all").__compatible_ops__["deepspeed_shm_comm"] = False
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        accelerator = get_accelerator()
        on_cpu = accelerator.device_name() == "cpu"
        backend = "gloo" if on_cpu else accelerator.communication_backend_name()
        if not dist.is_initialized():
            # Once per process, left at its end: DeepSpeed keeps handles of the group beyond any one run.
            if "RANK" not in os.environ:
                # A store of its own and not the launcher's variables: these would reach every process started later.
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            try:
                deepspeed.init_distributed(dist_backend=backend, verbose=False)
            except dist.DistNetworkError as error:
                raise RunEnded(_no_meeting(error)) from error
            atexit.register(_leave_process_group)
        self._deepspeed = deepspeed
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if on_cpu:
            self.device = torch.device("cpu")
        else:
            local_rank = int(os.environ["LOCAL_RANK"])
            accelerator.set_device(local_rank)
            self.device = torch.device(accelerator.device_name(local_rank))
        if self.is_main and config.engine_stage != config.zero_stage:
            stages = f"{config.zero_stage} runs as {config.engine_stage}"
            log.info(f"--bf16: ZeRO stage {stages}, which sums gradients in float32")

    @property
    def is_main(self) -> bool:
        """True on the rank that writes files and prints."""
        return self.rank == 0

    # ------------------------------------------------------------------ engines
    def _place(self, model: nn.Module, settings: dict[str, Any]) -> None:
        """Put a model on the device, in the type of the run; under ZeRO-3 this rank's share of it.

        There parameters pass through the device one by one: a model that is larger than the device can be shared out.
        """
        model.to(dtype=torch.bfloat16 if self.config.bf16 else torch.float32)
        if self.config.engine_stage == 3:
            self._deepspeed.zero.Init(module=model, config_dict_or_path=settings)
        model.to(self.device)  # parameters that are shared out are empty now; buffers are whole on every rank

    def prepare(self, model: nn.Module, optim: OptimConfig) -> Engine:
        """Wrap a model for training; frozen parameters stay out of the optimizer."""
        from transformers import get_scheduler

        settings = self._deepspeed_config(sum(p.numel() for p in model.parameters() if p.requires_grad))
        self._place(model, settings)
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            trainable, lr=optim.learning_rate, betas=optim.betas, weight_decay=optim.weight_decay
        )
        scheduler = get_scheduler(
            SCHEDULERS[optim.scheduler],
            optimizer,
            num_warmup_steps=int(optim.warmup_ratio * optim.total_steps),
            num_training_steps=optim.total_steps,
        )
        engine, *_ = self._deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=settings
        )
        return Engine(engine, self.config)

    def prepare_frozen(self, model: nn.Module) -> None:
        """Freeze a model and place it for passes without gradients.

        Under ZeRO-3 its parameters are shared out like those of trained models, and gathered layer by layer in each
        pass: all ranks must call it equally often.
        """
        model.requires_grad_(False).eval()
        settings = self._deepspeed_config(trainable=0)
        self._place(model, settings)
        if self.config.engine_stage == 3:
            self._deepspeed.initialize(model=model, config=settings)  # its hooks on the modules gather and give up

    def move_frozen(self, model: nn.Module, device: torch.device) -> None:
        """Move what this rank holds of a frozen model; the shares of `param_offload` stay in host memory."""
        model.to(device)
        for parameter in model.parameters():
            share = getattr(parameter, "ds_tensor", None)
            if share is not None and not self.config.param_offload:
                share.data = share.data.to(device)

    def _deepspeed_config(self, trainable: int) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.config.engine_stage, "reduce_bucket_size": bucket_elements(trainable)}
        if self.config.adam_offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.config.param_offload:
            # Pinned memory makes copies to an accelerator faster; without one there is nothing to copy to.
            zero["offload_param"] = {"device": "cpu", "pin_memory": self.device.type != "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.config.max_norm,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            # torch's AdamW steps on offloaded states as well; DeepSpeed's own would be compiled at first use.
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": self.config.bf16},
            "data_types": {"grad_accum_dtype": "fp32"},  # see `StrategyConfig.engine_stage`
            "steps_per_print": 10**9,
        }

    # -------------------------------------------------------------- collectives
    def all_reduce(self, values: dict[str, float], op: str = "mean") -> dict[str, float]:
        """Reduce named numbers over the ranks (`op` mean, sum, max or min); every rank passes equal names."""
        if self.world_size == 1 or not values:
            return dict(values)
        tensor = torch.tensor([float(v) for v in values.values()], dtype=torch.float64, device=self.device)
        kind = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        dist.all_reduce(tensor, op=kind[op])
        if op == "mean":
            tensor /= self.world_size
        return dict(zip(values, tensor.tolist()))

    def any(self, condition: bool) -> bool:
        """Whether the condition holds on any rank."""
        return bool(self.all_reduce({"any": float(condition)}, "max")["any"])

    def gather_objects(self, item: Any) -> list[Any]:
        """What every rank passed, in rank order, on every rank."""
        if self.world_size == 1:
            return [item]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, item)
        return gathered

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()


def _leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
        # Gloo's threads may still be giving up the tensors of the last operations. One that needs the interpreter for
        # that when it is gone ends the process with "terminate called without an active exception".
        time.sleep(0.1)


@contextmanager
def _without_deepspeed_hooks(module: nn.Module) -> Iterator[None]:
    """No layer of the module fetches its parameters from other ranks, or gives them up again, inside the block."""
    tables = [table for part in module.modules() for table in (part._forward_pre_hooks, part._forward_hooks)]
    before = [dict(table) for table in tables]
    for table in tables:
        for key in [key for key, hook in table.items() if (hook.__module__ or "").startswith("deepspeed.")]:
            del table[key]
    try:
        yield
    finally:
        for table, hooks in zip(tables, before):
            table.clear()
            table.update(hooks)


class Engine:
    """A DeepSpeed engine with caller-driven gradient accumulation."""

    def __init__(self, engine: Any, config: StrategyConfig):
        self.engine = engine
        self.config = config

    @property
    def module(self) -> nn.Module:
        """The wrapped model."""
        return self.engine.module

    def __call__(self, *args: Any, **kw: Any) -> Any:
        """Forward through DeepSpeed."""
        return self.engine(*args, **kw)

    def train(self, mode: bool = True) -> None:
        """Set the training mode."""
        self.engine.train(mode)

    def backward(self, loss: torch.Tensor, *, last: bool) -> float | None:
        """Accumulate the gradient of `loss`; on the `last` micro-batch also step.

        A step with a NaN or an infinity in its gradient, or in the loss of any of its micro-batches on any rank, is
        left out on all ranks: weights, moments and schedule stay as they are.

        Returns:
            The gradient norm before clipping after a step, NaN or infinity if the step was left out; before the
            last micro-batch None.
        """
        self.engine.set_gradient_accumulation_boundary(last)
        # A loss that is not finite may have a gradient that is; through this factor it never has, on any rank.
        self.engine.backward(loss * torch.where(loss.detach().isfinite(), 1.0, math.nan))
        norm = None
        if last and self.config.engine_stage == 0:  # only then are whole gradients at hand, and no norm is kept
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0
            if not math.isfinite(norm):
                self.engine.optimizer.zero_grad()
                return norm
        self.engine.step()
        if last and norm is None:
            norm = float(self.engine.get_global_grad_norm() or 0.0)
        return norm

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self.engine.get_lr()[0]

    @contextmanager
    def full_parameters(self) -> Iterator[nn.Module]:
        """The module with whole parameters on every rank, to be read or to compute with by itself.

        ZeRO-3 gathers them once, for the time of the block. Inside it the module takes part in no collective operation,
        so that ranks may call it at their own pace and differently often.
        """
        if self.config.engine_stage < 3:
            yield self.module
            return
        import deepspeed

        with (
            deepspeed.zero.GatheredParameters(list(self.module.parameters()), modifier_rank=None),
            _without_deepspeed_hooks(self.module),
        ):
            yield self.module

    def offload_states(self, *, weights: bool = False) -> None:
        """Move what only a step needs to host memory until `reload_states`; not with ZeRO-0.

        ZeRO-1 and 2: moments and master weights. ZeRO-3: the moments; DeepSpeed moves more for an optimizer of its own
        only.

        Args:
            weights: the parameters as well, with ZeRO-1 and 2; with ZeRO-3 they are shards and stay.
        """
        if self.config.engine_stage == 3:
            self._move_moments(torch.device("cpu"))
            return
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind

        self.engine.offload_states(include=[Kind.optim_states, Kind.hp_params, *([Kind.lp_params] if weights else [])])

    def reload_states(self) -> None:
        """Bring back what `offload_states` has moved; nothing, if that is nothing."""
        if self.config.engine_stage == 3:
            self._move_moments(self.engine.device)
            return
        optimizer = self.engine.optimizer
        if optimizer.offloaded_states:
            optimizer.reload_states()
            # DeepSpeed ties parameters to their moments before these are back.
            optimizer._link_all_hp_params()

    def _move_moments(self, device: Any) -> None:
        for state in self.engine.optimizer.optimizer.state.values():
            for name, value in state.items():
                if torch.is_tensor(value) and value.dim():  # the number of steps lives on the host anyhow
                    state[name] = value.to(device)

    def parameter_shapes(self) -> dict[str, list[int]]:
        """Whole shape of every parameter: what tells one model from another."""
        return {name: list(getattr(p, "ds_shape", p.shape)) for name, p in self.module.named_parameters()}

    def save(self, folder: Path, tag: str, entries: dict[Path, dict[str, Any]]) -> str | None:
        """Write parameters, optimizer and scheduler state; called on every rank.

        Args:
            folder: receives the folder `tag`.
            tag: name of the engine.
            entries: receives size and checksum of this rank's files.

        Returns:
            What this rank could not write, or None. An exception here would leave the other ranks waiting in one of
            DeepSpeed's barriers.
        """
        writer = self.engine.checkpoint_engine
        problems: list[str] = []

        def save(state_dict: Any, path: str) -> None:
            try:
                with checked_file(Path(path), entries) as file:
                    torch.save(state_dict, file)
            except (OSError, RuntimeError) as error:
                problems.append(str(error))

        # The copy of a conversion script would be the one file written without these precautions.
        replaced = {(writer, "save"): save, (self.engine, "_copy_recovery_script"): lambda _: None}
        for (owner, name), function in replaced.items():
            setattr(owner, name, function)
        try:
            self.engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
        finally:
            for owner, name in replaced:
                delattr(owner, name)
        return problems[0] if problems else None

    def load(self, folder: Path, tag: str, *, universal: bool = False) -> None:
        """Read what `save` wrote with the same world size, or what `convert` made of it.

        Raises:
            RuntimeError: it is not there.
        """
        settings = self.engine._config
        # Without ZeRO every rank holds everything, and DeepSpeed reads it whatever the number of ranks was.
        settings.load_universal_checkpoint = universal and self.config.engine_stage > 0
        try:
            path, _ = self.engine.load_checkpoint(str(folder), tag=tag)
        finally:
            settings.load_universal_checkpoint = False
        if path is None:
            raise RuntimeError(f"no DeepSpeed checkpoint '{tag}' in {folder}")

    def convert(self, source: Path, target: Path) -> None:
        """Bring what `save` wrote into a form that any number of ranks can load; called on one rank."""
        if self.config.engine_stage == 0:
            shutil.copytree(source, target)
            return
        from deepspeed.checkpoint import ds_to_universal

        settings = {"num_extract_workers": 1, "num_merge_workers": 1, "inject_missing_state": True}
        settings |= {"keep_temp_folder": False, "strict": True}
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            ds_to_universal.main(Namespace(input_folder=str(source), output_folder=str(target), **settings))
