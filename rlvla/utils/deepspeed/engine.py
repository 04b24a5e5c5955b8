"""A model and its optimizer under DeepSpeed."""

from __future__ import annotations

import io
import math
import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.schedules import falling
from rlvla.utils.files import flushed_file
from rlvla.utils.torch_files import restricted_loading


class _CheckpointWriter:
    """DeepSpeed's checkpoint writer, except that failed writes are recorded instead of raised."""

    def __init__(self, writer: Any):
        self._writer = writer
        self.problems: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def save(self, state_dict: Any, path: str) -> None:
        try:
            with flushed_file(Path(path)) as file:
                torch.save(state_dict, file)
        except (OSError, RuntimeError) as error:
            self.problems.append(str(error))


def classes_of_deepspeed() -> list[type]:
    """Classes in DeepSpeed's checkpoint files, beside tensors and plain values."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


class Engine:
    """A DeepSpeed engine whose caller controls gradient accumulation."""

    def __init__(self, engine: Any, config: StrategyConfig):
        self.engine = engine
        self.config = config

    @property
    def module(self) -> Any:
        """The wrapped model, with the type that was given to `DeepspeedStrategy.prepare`."""
        return self.engine.module

    def __call__(self, *args: Any, **kw: Any) -> Any:
        """Forward pass through DeepSpeed."""
        return self.engine(*args, **kw)

    def train(self, mode: bool = True) -> None:
        """Set the training mode."""
        self.engine.train(mode)

    def backward(self, loss: torch.Tensor, *, last: bool) -> float | None:
        """Accumulate the gradient of `loss`; on the `last` micro-batch also take an optimizer step.

        If the gradient, or the loss of any micro-batch on any rank, is NaN or infinite, the step is skipped on all
        ranks: weights, moments and schedule stay as they are.

        Returns:
            The gradient norm before clipping, NaN or infinite if the step was skipped; None before the last
            micro-batch.
        """
        self.engine.set_gradient_accumulation_boundary(last)
        # A non-finite loss may have a finite gradient; this factor makes the gradient NaN as well, on any rank.
        self.engine.backward(loss * torch.where(loss.detach().isfinite(), 1.0, math.nan))
        norm = None
        if last and self.config.engine_stage == 0:  # gradients are whole, and DeepSpeed keeps no norm of them
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

    @property
    def peak_learning_rate(self) -> float:
        """The highest learning rate of the schedule."""
        return self.engine.lr_scheduler.base_lrs[0]

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the learning rates of all later steps; stored in checkpoints."""
        scheduler = self.engine.lr_scheduler
        scheduler.base_lrs = [factor * rate for rate in scheduler.base_lrs]
        for group in scheduler.optimizer.param_groups:
            group["lr"] *= factor

    def set_schedule_step(self, step: int) -> None:
        """Continue the schedule at this step, counted from 0, e.g. after planned steps that were not taken."""
        scheduler = self.engine.lr_scheduler
        rates = [rate * factor(step) for rate, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas)]
        current = [group["lr"] for group in scheduler.optimizer.param_groups]
        if scheduler.last_epoch == step and all(map(math.isclose, current, rates)):
            return
        scheduler.last_epoch = step
        for group, rate in zip(scheduler.optimizer.param_groups, rates):
            group["lr"] = rate
        scheduler._last_lr = rates

    def cool_down(self, steps: int) -> None:
        """Replace the rest of the schedule by a linear decay of the learning rate to 0 over `steps`."""
        scheduler = self.engine.lr_scheduler
        now = scheduler.last_epoch
        scheduler.lr_lambdas = [partial(falling, factor(now), now, steps) for factor in scheduler.lr_lambdas]

    @contextmanager
    def full_parameters(self) -> Iterator[Any]:
        """The module with complete parameters on every rank, for reading them or for forward passes.

        Under ZeRO-3 the parameters are gathered once, for the duration of the block. Inside it the module takes part in
        no collective operation, so ranks may call it at different times and a different number of times.
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
        """Move the optimizer states to host memory until `reload_states`; not available with ZeRO-0.

        ZeRO-1 and 2: moments and master weights. ZeRO-3: the moments only; DeepSpeed would move more only with one of
        its own optimizers.

        Args:
            weights: also move the parameters, with ZeRO-1 and 2; with ZeRO-3 they are sharded and stay.
        """
        if self.config.engine_stage == 3:
            self._move_moments(torch.device("cpu"))
            return
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind

        self.engine.offload_states(include=[Kind.optim_states, Kind.hp_params, *([Kind.lp_params] if weights else [])])

    def reload_states(self) -> None:
        """Undo `offload_states`; nothing happens if nothing is offloaded."""
        if self.config.engine_stage == 3:
            self._move_moments(self.engine.device)
            return
        optimizer = self.engine.optimizer
        if optimizer.offloaded_states:
            optimizer.reload_states()
            # DeepSpeed links parameters to their moments before these are back.
            optimizer._link_all_hp_params()

    def _move_moments(self, device: Any) -> None:
        for state in self.engine.optimizer.optimizer.state.values():
            for name, value in state.items():
                if torch.is_tensor(value) and value.dim():  # the step count is on the host anyway
                    state[name] = value.to(device)

    def parameter_shapes(self) -> dict[str, list[int]]:
        """Full (unsharded) shape of each parameter, by which a checkpoint's model is identified."""
        return {name: list(getattr(p, "ds_shape", p.shape)) for name, p in self.module.named_parameters()}

    def save(self, folder: Path, tag: str) -> str | None:
        """Write parameters, optimizer and scheduler state; called on every rank.

        Args:
            folder: parent of the folder `tag` that is written.
            tag: name of the engine.

        Returns:
            Why this rank could not write its files, or None. An exception would leave the other ranks waiting in one
            of DeepSpeed's barriers.
        """
        before = self.engine.checkpoint_engine
        self.engine.checkpoint_engine = writer = _CheckpointWriter(before)
        # DeepSpeed also copies its conversion scripts into the folder, and raises on a single rank if it cannot.
        self.engine._copy_recovery_script = lambda _: None
        try:
            self.engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
        finally:
            self.engine.checkpoint_engine = before
            del self.engine._copy_recovery_script
        return writer.problems[0] if writer.problems else None

    def load(self, folder: Path, tag: str, *, universal: bool = False) -> None:
        """Load a checkpoint of `save` with the same world size, or one converted by `convert`; no code in it is run.

        Raises:
            RuntimeError: there is no such checkpoint.
            pickle.UnpicklingError: a file names more than `classes_of_deepspeed`.
        """
        settings = self.engine._config
        # Without ZeRO each rank has the full state, which DeepSpeed reads with any number of ranks.
        settings.load_universal_checkpoint = universal and self.config.engine_stage > 0
        try:
            with restricted_loading(classes_of_deepspeed()):
                path, _ = self.engine.load_checkpoint(str(folder), tag=tag)
        finally:
            settings.load_universal_checkpoint = False
        if path is None:
            raise RuntimeError(f"no DeepSpeed checkpoint '{tag}' in {folder}")

    def convert(self, source: Path, target: Path) -> None:
        """Convert a checkpoint of `save` to a form that any number of ranks can load; called on one rank.

        Raises:
            pickle.UnpicklingError: as `load`.
        """
        if self.config.engine_stage == 0:
            shutil.copytree(source, target)
            return
        from deepspeed.checkpoint import ds_to_universal

        settings = {"num_extract_workers": 1, "num_merge_workers": 1, "inject_missing_state": True}
        settings |= {"keep_temp_folder": False, "strict": True}
        with (
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
            restricted_loading(classes_of_deepspeed()),
        ):
            ds_to_universal.main(Namespace(input_folder=str(source), output_folder=str(target), **settings))


class ReplicatedEngine(Engine):
    """An engine of ZeRO stage 0 for networks so small that DeepSpeed's own steps take longer than theirs.

    Steps are plain ones of torch, with a single reduction over the ranks; DeepSpeed writes and reads the checkpoints.
    Each step takes one backward pass. Gradients are averaged over ranks, as by DeepSpeed.
    """

    def __init__(self, engine: Any, config: StrategyConfig):
        super().__init__(engine, config)
        self._trained = [p for p in self.module.parameters() if p.requires_grad]
        self._world_size = dist.get_world_size()

    def __call__(self, *args: Any, **kw: Any) -> Any:
        """Forward pass."""
        return self.module(*args, **kw)

    def backward(self, loss: torch.Tensor, *, last: bool) -> float:
        """See `Engine.backward`; ValueError unless `last`."""
        if not last:
            raise ValueError("a step of this engine takes one backward pass")
        loss.backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._trained]
        # A non-finite loss may have a finite gradient, which must not be used either.
        flat = torch.cat([*(g.flatten() for g in gradients), loss.detach().float().view(1)])
        if self._world_size > 1:
            dist.all_reduce(flat)
            flat /= self._world_size
        norm = float(torch.linalg.vector_norm(flat[:-1])) if bool(flat[-1].isfinite()) else math.nan
        if math.isfinite(norm):
            flat *= min(1.0, self.config.max_norm / (norm + 1e-6))
            for parameter, gradient in zip(self._trained, flat[:-1].split([p.numel() for p in self._trained])):
                parameter.grad = gradient.view_as(parameter)
            self.engine.optimizer.step()
            self.engine.lr_scheduler.step()
        self.engine.optimizer.zero_grad()
        return norm


@dataclass(frozen=True)
class OptimConfig:
    """An AdamW optimizer and its learning-rate schedule."""

    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    scheduler: str
    warmup_ratio: float
    total_steps: int


def bucket_elements(trainable: int) -> int:
    """Elements of ZeRO's gradient-reduction bucket: DeepSpeed's default, or fewer for a smaller model."""
    return max(1, min(500_000_000, trainable))


@contextmanager
def _without_deepspeed_hooks(module: nn.Module) -> Iterator[None]:
    """Disable DeepSpeed's gathering and releasing of ZeRO-3 parameters inside the block."""
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
