"""DeepSpeed behind a small interface: engines, collective operations, checkpoints of engine state.

The caller controls gradient accumulation (`backward(..., last=True)` on the last micro-batch of an optimizer step),
because the number of micro-batches varies from step to step. DeepSpeed therefore divides by an accumulation count of 1,
and the `dp_size` factor of the losses undoes its averaging over ranks.
"""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import threading
import time
import warnings
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous

from rlvla.utils.deepspeed.config import StrategyConfig, taken_port
from rlvla.utils.deepspeed.engine import Engine, OptimConfig, ReplicatedEngine, bucket_elements
from rlvla.utils.deepspeed.heartbeat import Heartbeat, accept, connect, listen
from rlvla.utils.deepspeed.schedules import scheduled
from rlvla.utils.errors import RunEnded, require
from rlvla.utils.terminal import log

# A rank that waits for another's episodes waits as long as that one gives signs of life (`Heartbeat`).
_COLLECTIVE_TIMEOUT = timedelta(days=1)
_RENDEZVOUS_TIMEOUT = timedelta(minutes=30)
_heartbeat: Heartbeat | None = None
_EPISODE = 1 << 32  # of a tally: successes are counted below it, so that both numbers change at once
_tally_number = itertools.count()  # the ranks of a process group make the same tallies in the same order
_tally_store: dist.Store | None = None  # None: each rank counts its own episodes


def _rendezvous_failure(error: Exception) -> str:
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if "address already in use" in str(error):
        return taken_port(place)
    return f"the ranks could not connect at {place} ({error}); set the launcher's --master_addr and --master_port"


def _join_ranks(backend: str) -> None:
    """Create the process group of the launcher's ranks.

    Raises:
        RunEnded: the ranks did not meet.
    """
    in_main = threading.current_thread() is threading.main_thread()
    # While the main thread waits in C++ only the default action ends it, as the launcher wants if a rank has failed.
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL) if in_main else None
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=_RENDEZVOUS_TIMEOUT))
        share_tallies(store)
        shared = dist.PrefixStore("default_pg", store)
        dist.init_process_group(backend, store=shared, rank=rank, world_size=world_size, timeout=_COLLECTIVE_TIMEOUT)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise RunEnded(_rendezvous_failure(error)) from error
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)


def _choose_deterministic_kernels() -> None:
    """For the rest of this process; before a GPU multiplies its first matrix.

    https://pytorch.org/docs/stable/notes/randomness.html
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


def has_accelerator() -> bool:
    """Whether this process would compute on an accelerator rather than the CPU."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    require("deepspeed", extra="all")
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().device_name() != "cpu"


class DeepspeedStrategy:
    """Process group, engines and collective operations of a run.

    Without a launcher the world size is 1. `device` is this rank's accelerator, or the CPU if there is none.
    """

    def __init__(self, config: StrategyConfig, seed: int = 0):
        self.config = config
        self.seed = seed
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # DeepSpeed may read it at any time. On its own, it does not look like a launcher to processes that inherit it.
        os.environ.setdefault("LOCAL_RANK", "0")
        deepspeed = require("deepspeed", extra="all")
        from deepspeed.accelerator import get_accelerator

        # Otherwise the first engine on a CPU spends over a minute compiling a shared-memory communication op.
        require("deepspeed.ops", extra="all").__compatible_ops__["deepspeed_shm_comm"] = False
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        accelerator = get_accelerator()
        on_cpu = accelerator.device_name() == "cpu"
        backend = "gloo" if on_cpu else accelerator.communication_backend_name()
        if on_cpu:
            self.device = torch.device("cpu")
        else:
            local_rank = int(os.environ["LOCAL_RANK"])
            accelerator.set_device(local_rank)
            self.device = torch.device(accelerator.device_name(local_rank))
            # Rounded to TF32, log-probs of the same decision differ by 1e-3 with the number of rows beside it.
            torch.backends.cudnn.allow_tf32 = False
            if config.full_determinism:
                _choose_deterministic_kernels()
        joined = not dist.is_initialized()
        if joined:
            # Once per process, and destroyed only at exit: DeepSpeed keeps handles of the group beyond a single run.
            if "RANK" not in os.environ:
                # A private store rather than the launcher's variables, which all later child processes would inherit.
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            elif {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():  # otherwise DeepSpeed asks MPI
                _join_ranks(backend)
            deepspeed.init_distributed(dist_backend=backend, timeout=_COLLECTIVE_TIMEOUT, verbose=False)
            atexit.register(_leave_process_group)
        self._deepspeed = deepspeed
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if joined:
            self._start_heartbeat()
        if self.is_main and config.engine_stage != config.zero_stage:
            stages = f"{config.zero_stage} runs as {config.engine_stage}"
            log.info(f"--bf16: ZeRO stage {stages}, which accumulates gradients in float32")

    def _start_heartbeat(self) -> None:
        """Watch the other ranks from now on; see `Heartbeat`."""
        global _heartbeat
        if self.world_size == 1:
            return
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        server = token = None
        if self.is_main:
            server, token = listen(address)
        port = server.getsockname()[1] if server is not None else None
        port, token = self.gather_objects((port, token))[0]
        try:
            peers = (
                connect(address, port, token, self.rank) if server is None else accept(server, token, self.world_size)
            )
        except OSError as error:
            log.warning(f"rank {self.rank}: a rank that freezes will not be noticed ({address}:{port}: {error})")
            return
        _heartbeat = Heartbeat(self.rank, peers, self.config.rank_timeout)
        _heartbeat.start()

    @property
    def is_main(self) -> bool:
        """True on the rank that writes files and prints."""
        return self.rank == 0

    @property
    def described(self) -> str:
        """Number of ranks and their device, for people."""
        return f"{self.world_size} rank{'s' if self.world_size > 1 else ''} on {self.device.type}"

    # ------------------------------------------------------------------ engines
    def _place(self, model: nn.Module, settings: dict[str, Any]) -> None:
        """Move a model to the device in the dtype of the run; under ZeRO-3 only this rank's shard of it.

        ZeRO-3 moves the parameters one by one, so a model larger than the device can be sharded.
        """
        model.to(dtype=torch.bfloat16 if self.config.bf16 else torch.float32)
        if self.config.engine_stage == 3:
            self._deepspeed.zero.Init(module=model, config_dict_or_path=settings)
        model.to(self.device)  # sharded parameters are empty by now; buffers are complete on every rank

    def prepare(self, model: nn.Module, optim: OptimConfig, *, small: bool = False) -> Engine:
        """Wrap a model for training; frozen parameters are left out of the optimizer.

        Args:
            model: its parameters are moved to the device.
            optim: optimizer and schedule.
            small: without ZeRO make it a `ReplicatedEngine`.
        """
        settings = self._deepspeed_config(sum(p.numel() for p in model.parameters() if p.requires_grad))
        self._place(model, settings)
        replicated = small and self.config.engine_stage == 0
        trainable = [p for p in model.parameters() if p.requires_grad]
        options: dict[str, Any] = {"betas": optim.betas, "weight_decay": optim.weight_decay}
        if replicated:
            options["fused"] = True
        optimizer = torch.optim.AdamW(trainable, lr=optim.learning_rate, **options)
        warmup = int(optim.warmup_ratio * optim.total_steps)
        factor = partial(scheduled, optim.scheduler, warmup, optim.total_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        engine, *_ = self._deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=settings
        )
        return (ReplicatedEngine if replicated else Engine)(engine, self.config)

    def prepare_frozen(self, model: nn.Module) -> None:
        """Freeze a model and move it to the device for forward passes without gradients.

        Under ZeRO-3 its parameters are sharded and gathered layer by layer in each pass, so all ranks must call it the
        same number of times.
        """
        model.requires_grad_(False).eval()
        settings = self._deepspeed_config(trainable=0)
        self._place(model, settings)
        if self.config.engine_stage == 3:
            self._deepspeed.initialize(model=model, config=settings)  # installs the hooks that gather and release

    def move_frozen(self, model: nn.Module, device: torch.device) -> None:
        """Move this rank's part of a frozen model; shards kept on the host by `param_offload` stay there."""
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
            # Pinned memory speeds up copies to an accelerator; on a CPU there are none.
            zero["offload_param"] = {"device": "cpu", "pin_memory": self.device.type != "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.config.max_norm,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            # torch's AdamW also works on offloaded states; DeepSpeed's would be compiled at first use.
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": self.config.bf16},
            "data_types": {"grad_accum_dtype": "fp32"},  # see `StrategyConfig.engine_stage`
            "steps_per_print": 10**9,
        }

    # -------------------------------------------------------------- collectives
    def all_reduce(self, values: dict[str, float], op: str = "mean") -> dict[str, float]:
        """Reduce named numbers over the ranks (`op` mean, sum, max or min); all ranks pass the same names."""
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
        """The items passed by all ranks, in rank order; every rank gets the list."""
        if self.world_size == 1:
            return [item]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, item)
        return gathered

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            # NCCL guesses the GPU from the rank otherwise; other backends take none.
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)


class OneProcess:
    """The part of `DeepspeedStrategy` that evaluations use, for a single process without DeepSpeed."""

    rank: ClassVar[int] = 0
    world_size: ClassVar[int] = 1
    is_main: ClassVar[bool] = True

    def any(self, condition: bool) -> bool:
        """The condition."""
        return condition

    def gather_objects(self, item: Any) -> list[Any]:
        """The item in a list."""
        return [item]


def share_tallies(store: dist.Store) -> None:
    """Count tallies in this store from now on."""
    global _tally_store
    own: Any = store  # torch does not declare `clone`
    _tally_store = dist.PrefixStore("tally", own.clone())  # a separate connection, which is never blocked


class Tally:
    """Counts finished episodes without waiting for other ranks; all ranks make the same tallies in the same order."""

    def __init__(self) -> None:
        number = next(_tally_number)
        self._key, self._own = str(number), 0
        if _tally_store is not None and number > 1:
            with suppress(RuntimeError):
                _tally_store.delete_key(str(number - 2))  # a collective operation lies between

    def add(self, success: bool) -> tuple[int, int]:
        """Count an episode of this rank; returns (episodes, successes) of all ranks so far."""
        self._own += _EPISODE + success
        total = self._own
        if _tally_store is not None:
            with suppress(RuntimeError):  # another rank is gone, which the next collective operation reports
                total = _tally_store.add(self._key, _EPISODE + success)
        return divmod(total, _EPISODE)


def _leave_process_group() -> None:
    if _heartbeat is not None:
        _heartbeat.leave()
    if dist.is_initialized():
        dist.destroy_process_group()
        # Gloo's threads may still be releasing the tensors of the last operations. One that does so after the
        # interpreter is gone aborts the process with "terminate called without an active exception".
        time.sleep(0.1)
