"""Speed and memory of policies of the published sizes on one GPU, and whether acting and scoring agree there.

    python benchmarks/gpu.py --output runs/gpu                         every part, about 25 minutes
    python benchmarks/gpu.py --output runs/gpu --minutes 8             the parts that fit into 8 minutes
    python benchmarks/gpu.py --output runs/gpu --parts smolvla pi0_lora   parts that have a result are not run again
    python benchmarks/gpu.py --output runs/rehearsal --rehearse        every part on a CPU with tiny policies
    python benchmarks/gpu.py --output runs/gpu --table                 the results so far as Markdown

Needs a CUDA GPU (except for `--rehearse`, `--table` and the part `plans`), no network, no simulator, no checkpoints:
weights are random and made on the device, images are noise. Each part is a process of its own and writes PART.json when
it is done. FLOPs are counted by torch as executed, recomputation included; "of peak" is relative to the measured rate
of a bfloat16 matrix product, "of bound" to the time that weights take to be read once, or the FLOPs, whichever is more.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import full_size
from benchmarks.async_rollout import SUITE, WAYS, command, times
from benchmarks.gpu_report import markdown, rates_of
from benchmarks.random_policies import random_rows
from rlvla.experience import Experience
from rlvla.models.actor import Actor
from rlvla.models.config import ActorConfig
from rlvla.models.vla import decoder
from rlvla.trainer.algorithm_config import AlgorithmConfig
from rlvla.trainer.config import BatchConfig
from rlvla.trainer.metrics import Metrics
from rlvla.trainer.updater import Updater
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.engine import Engine, OptimConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy

GIB = 2**30
OPTIM = OptimConfig(5e-6, (0.9, 0.999), 0.01, "constant", 0.0, 1000)
IMAGE_SIZE = 224  # of prepared images
ROWS = 64  # decisions per optimizer step
SECONDS = 1.0  # a measurement is repeated for about this long
LEROBOT = {
    "platform": "libero",
    "cameras": ("agentview", "wrist"),
    "camera_map": ("agentview=image", "wrist=image2"),
    "action_chunk_len": 10,
    "flow_steps": 5,
}
OFT = {"platform": "libero", "model_variant": "oft"}
WHOLE = {"train_expert_only": False}
ADAPTERS = {"lora_rank": 32, "lora_alpha": 16, "lora_targets": ("all-linear",), "gradient_checkpointing": True}
TOY_REACH = {"cameras": ("top",), "state_dim": 2, "action_dim": 2}
ITERATIONS = [
    *("--bf16", "--train_expert_only", "--action_chunk_len", "1", "--flow_steps", "5", "--use_proprio"),
    *("--advantage_estimator", "grpo", "--n_samples_per_prompt", "8", "--rollout_batch_size", "4", "--num_envs", "16"),
    *("--train_batch_size", "32", "--max_epochs", "2", "--micro_train_batch_size", "64", "--num_episodes", "160"),
    *("--no-check_start", "--no-val_before_train", "--eval_episodes", "1", "--no-use_tensorboard"),
    *("--max_idle_iterations", "0", "--actor_learning_rate", "1e-6"),
]
TINY_ITERATIONS = [
    *(*ITERATIONS, "--n_samples_per_prompt", "2", "--rollout_batch_size", "2", "--train_batch_size", "4"),
    *("--num_episodes", "12", "--num_envs", "2", "--max_steps", "4", "--max_epochs", "1"),
]


@dataclass(frozen=True)
class Policy:
    """A policy and how it is trained.

    Attributes:
        title: for tables.
        family: `model_type` or `type` of its config.json.
        trained: "lora", "expert" or "all".
        build: writes its folder.
        settings: overrides of its config.json.
        actor: trained layers and memory options.
        acting: batch sizes of decisions.
        micro: decisions per micro-batch of an update, ascending.
        strategy: ZeRO and offloading.
    """

    title: str
    family: str
    trained: str
    build: Callable[..., Path]
    settings: dict[str, Any]
    actor: dict[str, Any]
    acting: tuple[int, ...] = (1, 8, 32)
    micro: tuple[int, ...] = (4, 16, 64)
    strategy: dict[str, Any] = field(default_factory=lambda: {"zero_stage": 2})


POLICIES = {
    "openvla": Policy("OpenVLA-OFT 7B, LoRA 32, 1 image", "openvla", "lora", full_size.openvla, OFT, ADAPTERS),
    "openvla_two_images": Policy(
        "OpenVLA-OFT 7B, LoRA 32, 2 images, proprio",
        "openvla",
        "lora",
        partial(full_size.openvla, images=2, proprio=True),
        {**OFT, "cameras": ("agentview", "wrist"), "use_proprio": True},
        ADAPTERS,
        acting=(1, 32),
        micro=(4, 32),
    ),
    "smolvla_expert": Policy(
        "SmolVLA, expert", "smolvla", "expert", full_size.smolvla, LEROBOT, {"train_expert_only": True}
    ),
    "smolvla": Policy("SmolVLA, all weights", "smolvla", "all", full_size.smolvla, LEROBOT, WHOLE, acting=()),
    "pi0_lora": Policy(
        "pi0, LoRA 16 on the expert",
        "pi0",
        "lora",
        full_size.pi0,
        LEROBOT,
        {"lora_rank": 16, "lora_targets": ("expert",)},
    ),
    "pi0_expert": Policy(
        "pi0, expert", "pi0", "expert", full_size.pi0, LEROBOT, {"train_expert_only": True}, acting=()
    ),
    "pi0": Policy("pi0, all weights", "pi0", "all", full_size.pi0, LEROBOT, WHOLE, acting=(), micro=(4, 16)),
    "pi0_offloaded": Policy(
        "pi0, all weights, ZeRO-3, offloaded",
        "pi0",
        "all",
        full_size.pi0,
        LEROBOT,
        WHOLE,
        acting=(),
        micro=(4, 16),
        strategy={"zero_stage": 3, "adam_offload": True, "param_offload": True},
    ),
}


@dataclass
class Machine:
    """Where a part runs.

    Attributes:
        device: the GPU, or the CPU in a rehearsal.
        tiny: a rehearsal, with tiny policies and one repetition.
        output: folder of the results.
    """

    device: torch.device
    tiny: bool
    output: Path

    def seconds(self, work: Callable[[], object]) -> float:
        """Median wall-clock seconds of a call, after one or two that warm up."""
        begin = self.now()
        work()
        if self.now() - begin < SECONDS:
            begin = self.now()
            work()
        first = self.now() - begin
        times = []
        for _ in range(1 if self.tiny else max(1, min(30, int(SECONDS / first)))):
            begin = self.now()
            work()
            times.append(self.now() - begin)
        return statistics.median(times)

    def now(self) -> float:
        """Seconds, once the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def memory(self) -> float:
        """GiB that torch has allocated on the device."""
        return torch.cuda.memory_allocated(self.device) / GIB if self.device.type == "cuda" else 0.0

    def peak_memory(self, *, reset: bool = False) -> dict[str, float]:
        """Largest GiB allocated by torch, and reserved by it for that."""
        if self.device.type != "cuda":
            return {"allocated_gib": 0.0, "reserved_gib": 0.0}
        peaks = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        if reset:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        return dict(zip(("allocated_gib", "reserved_gib"), (peak / GIB for peak in peaks)))

    def ceilings(self) -> dict[str, float]:
        """The result of the part `device`; empty if it has not run."""
        path = self.output / "device.json"
        return json.loads(path.read_text())["figures"] if path.exists() else {}


# ----------------------------------------------------------------------------------------------------------- ceilings
def ceilings(machine: Machine, results: dict[str, Any]) -> None:
    """Rates of a matrix product and of copies; error of convolutions with TF32 allowed and not."""
    size = 64 if machine.tiny else 8192
    for name, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32)):
        factors = [torch.randn(size, size, device=machine.device, dtype=dtype) for _ in range(2)]
        results[f"matmul_{name}_tflops"] = 2 * size**3 / machine.seconds(partial(torch.matmul, *factors)) / 1e12
    source = torch.randn(2**14 if machine.tiny else 2**30, device=machine.device)
    target = torch.empty_like(source)
    results["device_copy_gb_per_s"] = 2 * source.nbytes / machine.seconds(lambda: target.copy_(source)) / 1e9
    host = torch.empty(source.shape[0] // 4, pin_memory=machine.device.type == "cuda")
    quarter = target[: len(host)]
    results["host_copy_gb_per_s"] = host.nbytes / machine.seconds(lambda: quarter.copy_(host, non_blocking=True)) / 1e9
    layer, images = torch.nn.Conv2d(32, 64, 4, 2), torch.randn(14, 32, 31, 31)
    expected, before = layer(images), torch.backends.cudnn.allow_tf32
    layer, images = layer.to(machine.device), images.to(machine.device)
    for allowed in (True, False):
        torch.backends.cudnn.allow_tf32 = allowed
        error = (layer(images).cpu() - expected).abs().max().detach()
        results["convolution_error_tf32" if allowed else "convolution_error"] = float(error)
    torch.backends.cudnn.allow_tf32 = before


# ----------------------------------------------------------------------------------------------------------- policies
def measure_policy(policy: Policy, machine: Machine, results: dict[str, Any]) -> None:
    """Acting, scoring and updating of a policy."""
    results["policy"] = {"title": policy.title, "family": policy.family, "trained": policy.trained}
    begin = machine.now()
    actor = load(policy, ActorConfig(**policy.actor), machine)
    results["load_s"] = machine.now() - begin
    results["parameters"] = sum(p.numel() for p in actor.parameters())
    results["trained_parameters"] = sum(p.numel() for p in actor.parameters() if p.requires_grad)
    size = 64 if machine.tiny else IMAGE_SIZE
    rows = random_rows(actor, 4 if machine.tiny else ROWS, size, full_size.SENTENCE)
    results["tokens_per_decision"] = actor.row_tokens(rows.instructions[:1], rows.images.shape[1])[0]
    machine.peak_memory(reset=True)
    if policy.acting:
        batches = [batch for batch in policy.acting if batch <= len(rows)]
        flops = count_flops(partial(act, actor, rows, 1))
        results["acting"] = [acting(actor, rows, batch, flops, machine) for batch in batches]
        if machine.device.type == "cuda":
            actor.use_cuda_graphs()
            results["acting_with_graphs"] = [acting(actor, rows, batch, flops, machine) for batch in batches]
            replayed = [act(actor, rows, count).log_probs for count in (3, 8)]
            actor.use_cuda_graphs(False)
            apart = zip(replayed, (act(actor, rows, count).log_probs for count in (4, 8)))
            results["graphs_differ_by"] = [float(np.abs(a - b[: len(a)]).max()) for a, b in apart]
        results["acting_memory"] = machine.peak_memory(reset=True)
        results["preparation_s"] = preparation(actor, machine)
        results["scoring"] = [scoring(actor, rows, batch, machine) for batch in batches]
        results["scoring_memory"] = machine.peak_memory(reset=True)
        results["agreement"] = agreement(actor, rows, batches)
        results["acting_profile"] = {
            batch: profile(partial(act, actor, rows, batch), machine) for batch in (batches[0], batches[-1])
        }
        gc.collect()
    updates(policy, actor, rows, machine, results)


def act(actor: Any, rows: Experience, count: int, *, greedy: bool = False) -> Any:
    """The policy's decisions for the first rows, as a rollout makes them."""
    spec, noise, options = actor.spec, None, {}
    if not greedy or spec.greedy_noise:
        noise = np.stack([spec.draw(np.random.default_rng(row)) for row in range(count)])
        options = {"greedy": True} if greedy else {}
    proprio = None if rows.proprio is None else rows.proprio[:count].numpy()
    return actor.act(rows.images[:count].numpy(), proprio, rows.instructions[:count], noise=noise, **options)


def acting(actor: Any, rows: Experience, batch: int, flops: float, machine: Machine) -> dict[str, float]:
    """Decisions per second at one batch size, and the share of the bound that applies; `flops` of one decision."""
    seconds = machine.seconds(partial(act, actor, rows, batch))
    figures = {"batch": batch, "seconds": seconds, "per_s": batch / seconds, "flops": flops * batch}
    return figures | bounds(machine, seconds, flops * batch, weight_bytes(actor))


def bounds(machine: Machine, seconds: float, flops: float, weights: float) -> dict[str, float]:
    """The least time that arithmetic and reading the weights take, as shares of `seconds`."""
    measured = machine.ceilings()
    if not measured:
        return {}
    arithmetic = flops / (measured["matmul_bf16_tflops"] * 1e12)
    reading = weights / (measured["device_copy_gb_per_s"] * 1e9)
    return {"of_peak": arithmetic / seconds, "of_bound": max(arithmetic, reading) / seconds}


def weight_bytes(actor: Any) -> float:
    """Bytes of weights that a decision reads at least: each once, those of a flow's expert once per denoising step."""
    network = getattr(actor, "network", None)
    total = 0.0
    for name, parameter in actor.named_parameters():
        if "embed_tokens" in name:
            continue
        steps = 1
        if network is not None and network.part_of(name.removeprefix("network.")) in ("expert", "output"):
            steps = actor.settings.flow.steps
        total += steps * parameter.numel() * parameter.element_size()
    return total


def preparation(actor: Any, machine: Machine) -> float:
    """Seconds on the host to prepare the rendered images of one decision."""
    side = 64 if machine.tiny else 256
    images = np.random.default_rng(0).integers(0, 256, (1, actor.spec.cameras or 1, side, side, 3), dtype=np.uint8)
    proprio = np.zeros((1, actor.spec.proprio_dim), np.float32) if actor.spec.proprio_dim else None
    return machine.seconds(lambda: actor.prepare(images, proprio))


@torch.no_grad()
def scoring(actor: Any, rows: Experience, batch: int, machine: Machine) -> dict[str, float]:
    """Decisions per second of a forward pass that gives their log-probs."""
    some = rows.index(torch.arange(batch))
    seconds = machine.seconds(lambda: actor(**actor.score(some, 1.0), wants=("log_probs",))["log_probs"].cpu())
    return {"batch": batch, "seconds": seconds, "per_s": batch / seconds}


@torch.no_grad()
def agreement(actor: Any, rows: Experience, batches: list[int]) -> dict[str, Any]:
    """Ratio of scored to sampled probabilities at unchanged weights, and greedy actions, at different batch sizes."""
    most = batches[-1]
    sampled = torch.from_numpy(act(actor, rows, most).log_probs)
    decided = act(actor, rows, most)
    some = rows.index(torch.arange(most)).with_fields(
        trace={name: torch.from_numpy(value) for name, value in decided.trace.items()}
    )
    report: dict[str, Any] = {}
    for batch in batches:
        parts = [some.index(torch.arange(at, min(at + batch, most))) for at in range(0, most, batch)]
        scored = torch.cat([actor(**actor.score(part, 1.0), wants=("log_probs",))["log_probs"].cpu() for part in parts])
        distance = ((scored - sampled).exp() - 1).abs().flatten().float()
        kl = float((sampled - scored).mean())
        quantiles = torch.quantile(distance, torch.tensor([0.5, 0.9, 0.99, 1.0])).tolist()
        report[f"ratio_scored_at_{batch}"] = dict(zip(("median", "p90", "p99", "max"), quantiles)) | {
            "mean": float(distance.mean()),
            "mean_kl": kl,
        }
    together = act(actor, rows, most, greedy=True).actions
    for batch in batches[:-1]:
        apart = act(actor, rows, batch, greedy=True).actions
        differences = np.abs(apart - together[:batch])
        equal = float((differences == 0).mean())
        report[f"greedy_at_{batch}_and_{most}"] = {"equal": equal, "largest_difference": float(differences.max())}
    return report


def updates(policy: Policy, actor: Any, rows: Experience, machine: Machine, results: dict[str, Any]) -> None:
    """Optimizer steps at growing micro-batches, until one does not fit; optimizer states moved to the host and back."""
    strategy = DeepspeedStrategy(StrategyConfig(bf16=True, **policy.strategy))
    engine = strategy.prepare(actor, OPTIM)
    results["update"] = []
    results["weights_and_states_gib"] = machine.memory()
    flops = count_flops(optimizer_step(engine, strategy, rows.index(torch.arange(2)), 2)) / 2
    for micro in policy.micro:
        if micro > len(rows):
            break
        step = rows.index(torch.arange(min(len(rows), max(8, 2 * micro))))
        machine.peak_memory(reset=True)
        try:
            results["update"] = [*results["update"], update(engine, strategy, step, micro, flops, machine)]
        except torch.OutOfMemoryError:
            results["update"] = [*results["update"], {"micro": micro, "error": "out of memory"}]
            return
    micro = min(policy.micro[-1], len(rows))
    step = optimizer_step(engine, strategy, rows.index(torch.arange(micro)), micro)
    results["update_profile"] = {micro: profile(step, machine)}
    if not policy.strategy.get("adam_offload"):
        begin, before = machine.now(), machine.memory()
        engine.offload_states(weights=True)
        moved, freed = machine.now(), before - machine.memory()
        engine.reload_states()
        seconds = {"offload_s": moved - begin, "reload_s": machine.now() - moved}
        results["offload_during_rollout"] = {"freed_gib": freed, **seconds}


def optimizer_step(engine: Engine, strategy: DeepspeedStrategy, rows: Experience, micro: int) -> Callable[[], float]:
    """An optimizer step of PPO as the trainer takes it."""
    updater = Updater(strategy, BatchConfig(micro_train_batch_size=micro), AlgorithmConfig(), engine.module)
    return lambda: updater.policy_step(engine, rows, 0.0, Metrics(), first_of_iteration=False)


def update(
    engine: Engine, strategy: DeepspeedStrategy, rows: Experience, micro: int, flops: float, machine: Machine
) -> dict[str, Any]:
    """Trained decisions per second at one micro-batch size; `flops` executed for one decision."""
    seconds, flops = machine.seconds(optimizer_step(engine, strategy, rows, micro)), flops * len(rows)
    figures = {"micro": micro, "rows": len(rows), "seconds": seconds, "per_s": len(rows) / seconds, "flops": flops}
    figures |= machine.peak_memory()
    tokens = engine.module.row_tokens(rows.instructions[:1], rows.images.shape[1])[0]
    useful = engine.module.training_flops(engine.module, tokens, rows.images.shape[1]) * len(rows)
    measured = machine.ceilings()
    if measured:
        peak = measured["matmul_bf16_tflops"] * 1e12
        figures |= {"of_peak": flops / seconds / peak, "mfu": useful / seconds / peak}
    return figures


# ----------------------------------------------------------------------------------------------------------- profiles
def count_flops(work: Callable[[], object]) -> float:
    """Executed floating-point operations of matrix products, convolutions and attention."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops())


KINDS = (
    ("matrix products", r"gemm|nvjet|cutlass|xmma|matmul|addmm|splitK"),
    ("attention", r"flash|fmha|attention|softmax_warp|sdpa"),
    ("convolutions", r"conv|cudnn"),
    ("copies between host and device", r"Memcpy HtoD|Memcpy DtoH"),
    ("copies and casts", r"Memcpy|copy|CatArray|fill|Memset|index|gather|scatter"),
    ("reductions and norms", r"reduce|norm|softmax"),
    ("elementwise", r"elementwise|vectorized|pow|mul|add"),
)


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE)), "other")


def profile(work: Callable[[], object], machine: Machine) -> dict[str, Any]:
    """Kernel time of one call by kind, and its most expensive kernels and operators."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    work()
    begin = machine.now()
    work()
    seconds = machine.now() - begin
    on_gpu = machine.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with recorded(activities=activities) as recording:
        work()
        machine.now()
    events = list(recording.key_averages())
    kernels = [e for e in events if (e.device_type != torch.autograd.DeviceType.CPU) == on_gpu]
    of = (lambda e: e.self_device_time_total / 1e6) if on_gpu else (lambda e: e.self_cpu_time_total / 1e6)
    kernels = [event for event in kernels if of(event) > 0 and not event.key.startswith(("ProfilerStep", "Optimizer."))]
    by_kind: dict[str, float] = {}
    for event in kernels:
        by_kind[kind_of(event.key)] = by_kind.get(kind_of(event.key), 0.0) + of(event)
    operators = [e for e in events if e.device_type == torch.autograd.DeviceType.CPU and of(e) > 0]

    def most(entries: list[Any]) -> list[dict[str, Any]]:
        largest = sorted(entries, key=of, reverse=True)[:16]
        return [{"name": e.key[:120], "seconds": of(e), "calls": e.count} for e in largest]

    return {
        "seconds": seconds,
        "kernel_seconds": sum(by_kind.values()),
        "kernel_launches": sum(event.count for event in kernels),
        "by_kind": by_kind,
        "kernels": most(kernels),
        "operators": most(operators),
    }


# -------------------------------------------------------------------------------------------------------- other parts
def attention(machine: Machine, results: dict[str, Any]) -> None:
    """Attention kernels at the shapes of OpenVLA-OFT's decoder, with and without padding, forward and backward."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as attend

    batch, heads, length, width = (2, 2, 16, 16) if machine.tiny else (32, 32, 352, 128)
    dtype = torch.float32 if machine.tiny else torch.bfloat16
    query, key, value = (
        torch.randn(batch, heads, length, width, device=machine.device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    mask = torch.ones(batch, 1, 1, length, dtype=torch.bool, device=machine.device)
    mask[:, :, :, -3:] = False
    for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"):
        for padding, masked in (("", None), (", padded", mask)):

            def work(kernel: str = name, masked: Any = masked) -> None:
                with sdpa_kernel(getattr(SDPBackend, kernel)):
                    attend(query, key, value, attn_mask=masked).sum().backward()

            try:
                results[f"{name.lower()}{padding}"] = machine.seconds(work)
            except RuntimeError as error:
                results[f"{name.lower()}{padding}"] = str(error).split("\n")[0][:120]


def compiled(machine: Machine, results: dict[str, Any]) -> None:
    """Decisions of SmolVLA and OpenVLA-OFT with `torch.compile`: seconds of a decision, and of compiling."""
    for name in ("smolvla_expert", "openvla"):
        results[name] = compiled_policy(POLICIES[name], machine)


def compiled_policy(policy: Policy, machine: Machine) -> dict[str, Any]:
    """Seconds of a decision by batch size before and after compiling, and how far greedy actions differ."""
    actor = load(policy, ActorConfig(), machine)
    rows = random_rows(actor, 8, 64 if machine.tiny else IMAGE_SIZE, full_size.SENTENCE)
    report: dict[str, Any] = {}
    batches = (1,) if machine.tiny else (1, 8)
    for batch in batches:
        report[f"eager_s_at_{batch}"] = machine.seconds(partial(act, actor, rows, batch))
    before = act(actor, rows, batches[-1], greedy=True).actions
    if hasattr(actor, "network"):
        actor.network.velocity = torch.compile(actor.network.velocity, dynamic=False)
        actor.network.prefix = torch.compile(actor.network.prefix, dynamic=False)
    else:
        decoder.decoder_layer = torch.compile(decoder.decoder_layer, dynamic=False)
    for batch in batches:
        begin = machine.now()
        act(actor, rows, batch)
        report[f"compile_s_at_{batch}"] = machine.now() - begin
        report[f"compiled_s_at_{batch}"] = machine.seconds(partial(act, actor, rows, batch))
    difference = np.abs(act(actor, rows, batches[-1], greedy=True).actions - before)
    report["largest_difference_of_greedy_actions"] = float(difference.max())
    return report


def async_rollout(machine: Machine, results: dict[str, Any]) -> None:
    """Seconds per iteration of SmolVLA's expert, by seconds that the simulators sleep per decision."""
    policy = Policy("", "smolvla", "expert", partial(full_size.smolvla, **TOY_REACH), {"action_chunk_len": 1}, {})
    with tempfile.TemporaryDirectory() as place:
        actor = load(policy, ActorConfig(), machine)
        actor.save_pretrained(Path(place) / "policy")
        del actor
        for slept in (0.001,) if machine.tiny else (0.3, 0.1, 1.0):
            for way in ("synchronous", "--max_staleness 1"):
                folder = Path(place) / f"{way.strip('-')}_{slept}"
                amounts = TINY_ITERATIONS if machine.tiny else ITERATIONS
                flags = ["--pretrain", f"{place}/policy", "--save_path", str(folder), *SUITE, *amounts, *WAYS[way]]
                command("train_ppo_vla.py", *flags, milliseconds=1000 * slept)
                results[f"{way}, {slept} s"] = times(folder)


def load(policy: Policy, config: ActorConfig, machine: Machine) -> Any:
    """A policy with random weights in bfloat16 on the device."""
    with tempfile.TemporaryDirectory() as place:
        folder = policy.build(Path(place) / "policy", tiny=machine.tiny)
        settings = {**policy.settings, "dtype": torch.bfloat16, "device": machine.device}
        actor = Actor.from_pretrained(folder, config, **settings)
    actor.to(device=machine.device, dtype=torch.bfloat16).eval()
    full_size.randomize(actor)
    return actor


def plans(machine: Machine, results: dict[str, Any]) -> None:
    """Memory planned by `--dry_run` for the policies, in GiB; needs no GPU."""
    from benchmarks.one_gpu import TOTALS, planned

    common = (
        "--task_suite_name libero_spatial --bf16 --advantage_estimator grpo --n_samples_per_prompt 8 "
        "--rollout_batch_size 8 --train_batch_size 32"
    )
    for name, policy in POLICIES.items():
        if machine.tiny and name not in ("openvla", "smolvla_expert"):
            continue
        with tempfile.TemporaryDirectory() as place:
            folder = policy.build(Path(place) / "policy")
            for micro in policy.micro:
                flags = f"{common} --num_episodes 6400 --num_envs 8 --eval_episodes 10 {flags_of(policy, micro)}"
                rows = planned(folder, flags)
                results.setdefault(name, {})[micro] = {total: rows[f"total on the device {total}"] for total in TOTALS}
                if machine.tiny:
                    break


def flags_of(policy: Policy, micro: int) -> str:
    """A policy's settings as flags of the trainer."""
    words = [f"--micro_train_batch_size {micro} --micro_rollout_batch_size {max(policy.acting, default=8)}"]
    for name, value in {**policy.settings, **policy.actor, **policy.strategy}.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words.append(f"--{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}")
    return " ".join(words)


def gpu_tests(machine: Machine, results: dict[str, Any]) -> None:
    """The tests that need a GPU; without one they are skipped."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", "tests/gpu"]
    words += ["--collect-only"] if machine.tiny else ["-n", "4"] if shutil.which("nvidia-smi") else []
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    results["summary"] = done.stdout.strip().splitlines()[-1:]
    results["failed"] = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]


@dataclass(frozen=True)
class Part:
    """A part of the measurement.

    Attributes:
        run: adds its figures to a dictionary.
        minutes: an estimate on an H100.
        needs_gpu: it measures the GPU.
    """

    run: Callable[[Machine, dict[str, Any]], None]
    minutes: float
    needs_gpu: bool = True


PARTS = {
    "device": Part(ceilings, 0.4),
    **{name: Part(partial(measure_policy, policy), 1.5) for name, policy in POLICIES.items()},
    "attention": Part(attention, 0.5),
    "async_rollout": Part(async_rollout, 5.0),
    "compiled": Part(compiled, 3.0),
    "tests": Part(gpu_tests, 4.0),
    "plans": Part(plans, 3.0, needs_gpu=False),
}


# ------------------------------------------------------------------------------------------------------------- running
class Figures(dict[str, Any]):
    """Results that are saved whenever one is set."""

    def __init__(self, save: Callable[[dict[str, Any]], None]):
        super().__init__()
        self._save = save

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._save(self)


def run_part(name: str, output: Path, *, rehearse: bool) -> None:
    """Run a part in this process and write its JSON; meanwhile, figures so far are in PART.partial.json."""
    on_gpu = torch.cuda.is_available() and not rehearse
    machine = Machine(torch.device("cuda", 0) if on_gpu else torch.device("cpu"), rehearse, output)
    about = {**described(machine), "part": name}
    figures = Figures(lambda figures: write(output / f"{name}.partial.json", {**about, "figures": figures}))
    begin = time.perf_counter()
    PARTS[name].run(machine, figures)
    result = {**about, "seconds": time.perf_counter() - begin, "figures": figures}
    write(output / f"{name}.json", result)
    (output / f"{name}.partial.json").unlink(missing_ok=True)


def described(machine: Machine) -> dict[str, Any]:
    """Device, driver and versions."""
    import deepspeed
    import transformers

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    versions |= {"rlvla": commit[:12]} if commit else {}
    versions |= {"deepspeed": deepspeed.__version__, "transformers": transformers.__version__}
    if machine.device.type != "cuda":
        return {"device": "CPU, rehearsal" if machine.tiny else "CPU", "versions": versions}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.strip() if shutil.which(query[0]) else ""
    memory = torch.cuda.get_device_properties(machine.device).total_memory / GIB
    return {
        "device": torch.cuda.get_device_name(machine.device),
        "memory_gib": memory,
        "driver": driver,
        "versions": versions,
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file in one piece."""
    path.with_suffix(".new").write_text(json.dumps(content, indent=1) + "\n")
    path.with_suffix(".new").replace(path)


def results_in(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of a folder by part."""
    return {name: json.loads(path.read_text()) for name in PARTS if (path := folder / f"{name}.json").exists()}


def run_all(names: list[str], output: Path, minutes: float | None, *, rehearse: bool) -> bool:
    """Run parts that have no result yet, each in a process; returns whether all have one."""
    end = time.monotonic() + 60 * minutes if minutes is not None else None
    for name in names:
        if (output / f"{name}.json").exists():
            continue
        left = None if end is None else end - time.monotonic()
        if left is not None and left < (5 if rehearse else 60 * PARTS[name].minutes):
            print(f"{name}: not started, {max(0, left):.0f} s are left", flush=True)
            continue
        words = [sys.executable, str(Path(__file__)), "--output", str(output), "--part", name]
        words += ["--rehearse"] if rehearse else []
        begin = time.monotonic()
        with (output / f"{name}.log").open("w") as log:
            try:
                code = subprocess.run(words, stdout=log, stderr=log, timeout=left, cwd=ROOT).returncode
            except subprocess.TimeoutExpired:
                code = "no time left"
        outcome = "done" if code == 0 else f"failed ({code}), see {output / name}.log"
        print(f"{name}: {outcome}, {time.monotonic() - begin:.0f} s", flush=True)
    return all((output / f"{name}.json").exists() for name in names)


def main() -> None:
    """Run the parts, or print their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the results", metavar="DIR")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all, in this order")
    parser.add_argument("--minutes", type=float, help="start no part that would take longer than this in all")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny policies")
    parser.add_argument("--table", action="store_true", help="print the results in the folder as Markdown")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # run it in this process
    flags = parser.parse_args()
    output = flags.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    if flags.part:
        run_part(flags.part, output, rehearse=flags.rehearse)
        return
    if flags.table:
        print(markdown(results_in(output), PARTS), end="")
        return
    if not flags.rehearse and not torch.cuda.is_available() and any(PARTS[name].needs_gpu for name in flags.parts):
        parser.error("there is no CUDA GPU here; --rehearse runs on the CPU, and --parts plans needs none")
    complete = run_all(flags.parts, output, flags.minutes, rehearse=flags.rehearse)
    write(output / "rates.json", rates_of(results_in(output)))
    print(f"next: python benchmarks/gpu.py --output {flags.output} --table")
    print(f"or: python cli/train_ppo_vla.py --dry_run --hours --measured {flags.output}/rates.json ...")
    if not complete:
        sys.exit(1)


if __name__ == "__main__":
    main()
