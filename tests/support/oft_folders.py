"""Checkpoint folders as OpenVLA-OFT's fine-tuning leaves them: LoRA (peft 0.11, all-linear) and FiLM, merged or not."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

RANK, SCALE = 32, 16 / 32  # OFT: lora_alpha = min(rank, 16)
FILM_FILE, PROPRIO_FILE = "vision_backbone--7_checkpoint.pt", "proprio_projector--7_checkpoint.pt"
ADAPTED = re.compile(r"(qkv|proj|fc1|fc2|fc3|q|kv|[qkvo]_proj|gate_proj|up_proj|down_proj|lm_head)\.weight$")
VISION, PROPRIO = "vision_backbone.", "proprio_projector."


def finetuned(base: Path, folder: Path, *, film: bool, merged: bool) -> dict[str, Tensor]:
    """Write what fine-tuning `base` leaves in `folder`; returns every weight of the resulting model by its name.

    `all-linear` also matches the patch convolutions, by their name "proj", and the output head.
    """
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int, std: float = 0.1) -> Tensor:
        return std * torch.randn(shape, generator=generator)

    state = load_file(base / "model.safetensors")
    folder.mkdir()
    for path in base.iterdir():
        if path.name not in ("model.safetensors", "config.json"):
            shutil.copy(path, folder)
    trained, adapter, wrapped = {}, {}, {}
    if film:
        for name in [name for name in state if name.endswith("attn.qkv.weight")]:
            stem, width = name.removesuffix("attn.qkv.weight"), state[name].shape[1]
            for part in ("scale", "shift"):
                trained[f"{stem}{part}.weight"] = noise(width, state["projector.fc3.weight"].shape[0])
                trained[f"{stem}{part}.bias"] = noise(width)
        wrapped |= trained
    for name, weight in state.items():
        in_file = re.sub(r"\.blocks\.(\d+)\.", r".blocks.\1.block.", name) if film and name.startswith(VISION) else name
        if name.startswith(PROPRIO):
            trained[name] = weight + noise(*weight.shape)
        elif ADAPTED.search(name):
            down, up = noise(RANK, *weight.shape[1:]), noise(len(weight), RANK, *(1 for _ in weight.shape[2:]))
            trained[name] = weight + SCALE * torch.einsum("or,r...->o...", up.flatten(1), down)
            stem = in_file.removesuffix("weight")
            peft_stem = "base_model.model." + (VISION + stem if stem != name.removesuffix("weight") else stem)
            adapter |= {f"{peft_stem}lora_A.weight": down, f"{peft_stem}lora_B.weight": up}
            wrapped |= {f"{stem}lora_A.default.weight": down, f"{stem}lora_B.default.weight": up}
            wrapped[f"{stem}base_layer.weight"] = weight
            bias = name.removesuffix("weight") + "bias"
            if bias in state:
                wrapped[f"{stem}base_layer.bias"] = state[bias]
            if name.endswith("lm_head.weight"):
                adapter[f"{peft_stem}base_layer.weight"] = weight
        else:
            trained[name] = weight
            wrapped.setdefault(in_file, weight)
    for name in [name for name in wrapped if name.endswith(".bias")]:
        if name.replace(".bias", ".base_layer.bias") in wrapped:
            del wrapped[name]
    _write(base, folder, trained, adapter, wrapped if film else {}, merged, state)
    return trained


def _write(
    base: Path,
    folder: Path,
    trained: dict[str, Tensor],
    adapter: dict[str, Tensor],
    wrapped: dict[str, Tensor],
    merged: bool,
    state: dict[str, Tensor],
) -> None:
    (folder / "lora_adapter").mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in adapter.items()},
        folder / "lora_adapter/adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "bias": "none", "target_modules": ["proj", "lm_head"]}
    (folder / "lora_adapter/adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": str(base), "init_lora_weights": "gaussian"})
    )
    proprio = {f"module.{n.removeprefix(PROPRIO)}": t for n, t in trained.items() if n.startswith(PROPRIO)}
    torch.save(proprio, folder / PROPRIO_FILE)
    if wrapped:
        torch.save({name: tensor for name, tensor in wrapped.items() if name.startswith(VISION)}, folder / FILM_FILE)
    if merged:
        shutil.copy(base / "config.json", folder)
        # Adapters of towers with FiLM have other names than the towers of the base model, and are not merged.
        kept = state if wrapped else trained
        body = {n: kept[n] if n.startswith(VISION) else trained[n] for n in state if not n.startswith(PROPRIO)}
        save_file({name: tensor.contiguous() for name, tensor in body.items()}, folder / "model.safetensors")
