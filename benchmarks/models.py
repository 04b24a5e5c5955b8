"""Speed and memory of OpenVLA models: decisions per second, updates, and what skipping most of the head saves.

    python benchmarks/models.py                 tiny and middle sizes on this machine's CPU
    python benchmarks/models.py --sizes 7b      full size with random bfloat16 weights; needs a GPU
    deepspeed -q --num_accelerators 8 benchmarks/models.py --sizes 7b --offload    and the memory of full training

On a CPU, times are CPU seconds of one thread, so other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.models.lora import add_adapters, lora_layers
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.engine import OptimConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import ConfigError
from rlvla.utils.terminal import table

PROMPT_TOKENS = 24
# Dense bfloat16 peak in TFLOP/s by a part of the device's name.
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40": 181.0}
SMALL_VOCABULARY = 32064
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"image": 64, "patch": 8, "vision": 48, "depth": 3, "width": 64, "mlp": 192, "layers": 3},
    "small": {"image": 64, "patch": 8, "vision": 96, "depth": 4, "width": 128, "mlp": 384, "layers": 4},
    "middle": {"image": 112, "patch": 14, "vision": 256, "depth": 6, "width": 512, "mlp": 1376, "layers": 8},
}


def configuration(size: str, variant: str) -> OpenVLAConfig:
    """The configuration of a size; all have the public vocabulary, so that the head's share is the real one."""
    if size == "7b":
        return OpenVLAConfig(model_variant=variant, num_images_in_input=1)
    s = SIZES[size]
    tower = {"patch_size": s["patch"], "embed_dim": s["vision"], "depth": s["depth"], "num_heads": s["vision"] // 16}
    return OpenVLAConfig(
        text_config={
            "vocab_size": SMALL_VOCABULARY,
            "hidden_size": s["width"],
            "intermediate_size": s["mlp"],
            "num_hidden_layers": s["layers"],
            "num_attention_heads": s["width"] // 32,
            "pad_token_id": 32000,
        },
        timm_model_ids=["dino", "siglip"],
        image_sizes=[s["image"]] * 2,
        timm_model_kwargs=[
            {**tower, "init_values": 1.0, "no_embed_class": True},
            {**tower, "class_token": False, "global_pool": "map"},
        ],
        model_variant=variant,
        num_images_in_input=1,
    )


def build(config: OpenVLAConfig, device: torch.device, dtype: torch.dtype) -> OpenVLAForActionPrediction:
    """A model with random weights, made where it stays."""
    with torch.device("meta"):
        model = OpenVLAForActionPrediction(config)
    model = model.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.02) if parameter.ndim > 1 else parameter.fill_(float("norm" in name))
    return model


def inputs(config: OpenVLAConfig, batch: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Prompts of one length, images, no proprio, action tokens."""
    ids = torch.randint(3, 31000, (batch, PROMPT_TOKENS), device=device)
    pixels = torch.randn(batch, 6, config.image_size, config.image_size, device=device)
    actions = torch.randint(31744, 32000, (batch, config.num_action_tokens), device=device)
    return ids, torch.ones_like(ids), pixels, None, actions


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Of one call: CPU time on a CPU, wall-clock time on an accelerator; the median of `repeats` after a first one."""
    on_cpu = device.type == "cpu"
    clock, figures = time.process_time if on_cpu else time.perf_counter, []
    for _ in range(repeats + 1):
        start = clock()
        work()
        if not on_cpu:
            torch.cuda.synchronize(device)
        figures.append(clock() - start)
    return sorted(figures[1:])[repeats // 2]


def update(model: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
    """Forward and backward of a policy-gradient step."""
    model.zero_grad()
    model(*given).float().log_softmax(-1)[..., 7].mean().backward()


def head_share(
    model: OpenVLAForActionPrediction, batch: int, device: torch.device, repeats: int
) -> tuple[float, float]:
    """Seconds of the 256 action rows and of the whole head, for the hidden states of one batch."""
    head, count = model.language_model.lm_head, model.config.num_action_tokens
    hidden = torch.randn(batch, count, head.in_features, device=device, dtype=head.weight.dtype)
    with torch.no_grad():
        rows = seconds(lambda: head(hidden), device, repeats)
        whole = seconds(lambda: torch.nn.functional.linear(hidden, head.weight), device, repeats)
    return rows, whole


def flops_per_decision(model: OpenVLAForActionPrediction, batch: int, given: tuple[torch.Tensor, ...]) -> float:
    """Multiplications and additions of a forward pass, counted by torch."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*given)
    return counter.get_total_flops() / batch


def measure(size: str, variant: str, batch: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """One row of the table."""
    config = configuration(size, variant)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = build(config, device, dtype).eval()
    given = inputs(config, batch, device)
    acts = model.act_step_by_step if config.is_autoregressive else model
    with torch.no_grad():
        forward = seconds(lambda: acts(*given[:4]), device, repeats)
    row = {
        "size": size,
        "variant": variant,
        "parameters_m": sum(p.numel() for p in model.parameters()) / 1e6,
        "batch": batch,
        "forward_per_s": batch / forward,
    }
    rows, whole = head_share(model, batch, device, repeats)
    row |= {
        "head_rows_ms": 1e3 * rows,
        "whole_head_ms": 1e3 * whole,
        "forward_saved": (whole - rows) / (forward + whole - rows),
    }
    trained: torch.nn.Module = model.train()
    if size == "7b":  # the weights alone fill a fifth of the device: adapters, as one would on one GPU
        model.gradient_checkpointing_enable()
        trained = add_adapters(model, lora_layers(model, ["all-linear"]), 32, 16)
        trained.to(dtype)
        torch.cuda.reset_peak_memory_stats(device)
    step = seconds(lambda: update(trained, given), device, repeats)
    row["update_per_s"] = batch / step
    if device.type != "cpu":
        row["memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        peak = next((v for k, v in PEAK_TFLOPS.items() if k in torch.cuda.get_device_name(device)), None)
        if peak is not None:
            # Forward and the gradients of activations; recomputation and frozen weights' gradients are not useful work.
            row["share_of_peak"] = 2 * flops_per_decision(model, batch, given) * batch / step / (peak * 1e12)
    return row


def full_training_memory(batch: int) -> dict[str, Any]:
    """Memory of a full update of the 7B model with ZeRO-3, optimizer states in host memory; called on every rank."""
    strategy = DeepspeedStrategy(StrategyConfig(zero_stage=3, bf16=True, adam_offload=True))
    config = configuration("7b", "oft")
    model = build(config, strategy.device, torch.bfloat16).train()
    model.gradient_checkpointing_enable()
    engine = strategy.prepare(model, OptimConfig(5e-6, (0.9, 0.999), 0.01, "constant", 0.0, 1))
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    logits = engine(*inputs(config, batch, strategy.device))
    engine.backward(logits.float().log_softmax(-1)[..., 7].mean(), last=True)
    torch.cuda.synchronize()
    return {
        "size": "7b full, ZeRO-3, offload",
        "ranks": strategy.world_size,
        "batch": batch,
        "step_s": time.perf_counter() - start,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def main() -> None:
    """Measure, print a table and JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, "7b"], default=["tiny", "small", "middle"])
    parser.add_argument("--variants", nargs="+", choices=["oft", "autoregressive"], default=["oft", "autoregressive"])
    parser.add_argument("--batches", nargs="+", type=int, help="default: 8; for 7b 1 4 16 64")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--offload", action="store_true", help="7b: also a full update with ZeRO-3 and offload")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    has_gpu = torch.cuda.is_available()
    results = []
    for size in args.sizes:
        if size == "7b" and not has_gpu:
            raise SystemExit("size 7b needs a GPU, and there is none here; its shapes are checked by the tests")
        device = torch.device("cuda" if size == "7b" else "cpu")
        for variant in args.variants:
            for batch in args.batches or ([1, 4, 16, 64] if size == "7b" else [8]):
                try:
                    results.append(measure(size, variant, batch, device, args.repeats))
                except torch.OutOfMemoryError:
                    results.append({"size": size, "variant": variant, "batch": batch, "memory_gib": float("inf")})
    if args.offload:
        if not has_gpu:
            raise ConfigError("--offload measures the 7B model and needs a GPU")
        results.append(full_training_memory(args.batches[0] if args.batches else 8))
    names = list(dict.fromkeys(name for row in results for name in row))
    cells = [
        [row.get(n, "") if isinstance(row.get(n, ""), (str, int)) else f"{row[n]:.3g}" for n in names]
        for row in results
    ]
    print(table(names, cells))
    if not has_gpu:
        print("no GPU here: the 7B figures were not measured")
    if args.output:
        args.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
