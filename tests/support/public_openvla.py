"""Runs OpenVLA-OFT's own code on checkpoint folders, in an environment made by examples/scripts/install_openvla.sh.

A script for that environment's interpreter; it imports nothing of this package:

    python tests/support/public_openvla.py predict FOLDER INPUTS OUTPUT [--film]
    python tests/support/public_openvla.py merge BASE INPUTS OUTPUT --folder ADAPTER
    python tests/support/public_openvla.py finetune BASE INPUTS OUTPUT --folder FOLDER [--film]

`predict` loads a folder with the public classes, `merge` adds an adapter with peft. `finetune` wraps BASE as
`finetune.py` does (LoRA on all linear layers, FiLM), gives the adapters random weights, and writes FOLDER/unmerged and
FOLDER/merged. INPUTS and OUTPUT are safetensors.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import types
from pathlib import Path

PACKAGES = ("extern", "extern.hf", "models", "training", "vla")
RANK = 8
LLAMA_SPACE = 29871  # the public code adds it to prompts that do not end with it
FILM_FILE, PROPRIO_FILE = "vision_backbone--7_checkpoint.pt", "proprio_projector--7_checkpoint.pt"


def import_public_code() -> types.SimpleNamespace:
    """The few modules that are needed, without those that their packages import (TensorFlow among them)."""
    spec = importlib.util.find_spec("prismatic")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("this interpreter has no package prismatic")
    root = Path(spec.submodule_search_locations[0])
    for name in ("", *PACKAGES):
        module = types.ModuleType(f"prismatic.{name}".rstrip("."))
        module.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[module.__name__] = module
    from prismatic.extern.hf import configuration_prismatic, modeling_prismatic
    from prismatic.models import film_vit_wrapper, projectors
    from prismatic.training import train_utils

    return types.SimpleNamespace(
        config=configuration_prismatic,
        model=modeling_prismatic,
        film=film_vit_wrapper,
        projectors=projectors,
        train=train_utils,
    )


def load(public: types.SimpleNamespace, folder: Path):
    """The model of a folder, with the small towers that timm does not know and attention in both directions."""
    import torch
    from transformers.models.llama import modeling_llama

    config = public.config.OpenVLAConfig.from_pretrained(folder)
    for name, sizes in zip(config.timm_model_ids, getattr(config, "timm_model_kwargs", None) or []):
        register_tower(name, sizes)
    # The public constants are those of Llama's vocabulary and of LIBERO.
    first_action = config.text_config.vocab_size - config.pad_to_multiple_of - config.n_action_bins
    for module in (public.model, public.train):
        module.ACTION_TOKEN_BEGIN_IDX = first_action - 1
        module.ACTION_DIM, module.NUM_ACTIONS_CHUNK = config.action_dim, config.action_chunk_len

    def both_directions(self, attention_mask, inputs, *args, **kwargs):
        """What the authors' fork of transformers changes: only padding is masked."""
        length = inputs.shape[1]
        mask = torch.zeros(len(inputs), 1, length, length, dtype=inputs.dtype)
        return mask.masked_fill(~attention_mask.bool()[:, None, None], torch.finfo(inputs.dtype).min)

    modeling_llama.LlamaModel._update_causal_mask = both_directions
    return public.model.OpenVLAForActionPrediction.from_pretrained(folder, config=config, torch_dtype=torch.float32)


def register_tower(name: str, sizes: dict) -> None:
    from timm.models import register_model
    from timm.models.vision_transformer import VisionTransformer

    def tower(pretrained: bool = False, **given):
        chosen = {key: given[key] for key in ("img_size", "num_classes", "act_layer") if key in given}
        return VisionTransformer(**sizes, **chosen)

    tower.__name__ = name
    register_model(tower)


def with_adapters(public: types.SimpleNamespace, model, rank: int, film: bool):
    """Adapters on everything linear and FiLM around the towers, as in fine-tuning and, with FiLM, in evaluation."""
    import peft

    config = peft.LoraConfig(
        r=rank, lora_alpha=min(rank, 16), lora_dropout=0.0, target_modules="all-linear", init_lora_weights="gaussian"
    )
    adapted = peft.get_peft_model(model, config)
    if film:
        adapted.model.vision_backbone = public.film.FiLMedPrismaticVisionBackbone(
            vision_backbone=adapted.model.vision_backbone, llm_dim=model.llm_dim
        )
    return adapted


def proprio_projector(public: types.SimpleNamespace, folder: Path, width: int):
    """From its own file, else from the main one."""
    import torch
    from safetensors.torch import load_file

    paths = sorted(folder.glob("proprio_projector--*_checkpoint.pt"))
    if paths:
        state = {key.removeprefix("module."): value for key, value in torch.load(paths[0], weights_only=True).items()}
    else:
        prefix = "proprio_projector."
        main = load_file(folder / "model.safetensors")
        state = {key.removeprefix(prefix): value for key, value in main.items() if key.startswith(prefix)}
    projector = public.projectors.ProprioProjector(llm_dim=width, proprio_dim=state["fc1.weight"].shape[1])
    projector.load_state_dict(state)
    return projector


def decide(public: types.SimpleNamespace, model, projector, inputs, film: bool):
    """Logits [B, A*D, vocabulary], row by row as the public code does; and its actions if the prompts are Llama's."""
    import torch

    logits, actions = [], []
    for ids, mask, pixels, proprio in zip(*(inputs[k] for k in ("ids", "mask", "pixels", "proprio"))):
        ids, mask = ids[mask.bool()][None], mask[mask.bool()][None]
        labels = torch.full_like(ids, public.model.IGNORE_INDEX)
        whole, whole_mask = model._prepare_input_for_action_prediction(ids, mask)
        labels = model._prepare_labels_for_action_prediction(labels, whole)
        given = {"proprio": proprio[None], "proprio_projector": projector, "use_film": film}
        output = model(whole, whole_mask, pixels[None], labels, **given, return_dict=True)
        count = public.model.ACTION_DIM * public.model.NUM_ACTIONS_CHUNK
        first = output.projector_features.shape[1] + ids.shape[1] - 1
        logits.append(output.logits[0, first : first + count])
        if ids[0, -1] == LLAMA_SPACE:
            given["proprio"] = proprio.numpy()
            chunk, _ = model.predict_action(ids, None, pixel_values=pixels[None], attention_mask=mask, **given)
            actions.append(torch.from_numpy(chunk))
    outputs = {"logits": torch.stack(logits)}
    return outputs | ({"actions": torch.stack(actions).double()} if actions else {})


def finetune(public: types.SimpleNamespace, base: Path, folder: Path, film: bool):
    """Random adapters on BASE, written as `finetune.py` does; returns the fine-tuned model."""
    import peft
    import torch

    torch.manual_seed(0)
    model = load(public, base)
    adapted = with_adapters(public, model, RANK, film)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or ".scale." in name or ".shift." in name:
                parameter.normal_(0.0, 0.1)
    for kind in ("unmerged", "merged"):
        adapted.save_pretrained(folder / kind / "lora_adapter")
        for path in base.iterdir():
            if path.name in ("config.json", "model.safetensors") or path.is_dir():
                continue
            shutil.copy(path, folder / kind)
        projector = proprio_projector(public, base, model.llm_dim)
        torch.save({f"module.{k}": v for k, v in projector.state_dict().items()}, folder / kind / PROPRIO_FILE)
        if film:
            torch.save(adapted.model.vision_backbone.state_dict(), folder / kind / FILM_FILE)
    config = folder / "unmerged" / "lora_adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": str(base)}))
    merged = peft.PeftModel.from_pretrained(load(public, base), folder / "merged" / "lora_adapter").merge_and_unload()
    merged.save_pretrained(folder / "merged")
    return adapted.model, projector


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["predict", "finetune", "merge"])
    parser.add_argument("base", type=Path)
    parser.add_argument("inputs", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--film", action="store_true")
    parser.add_argument("--sentences", nargs="*", default=[])
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    public = import_public_code()
    inputs = load_file(args.inputs)
    if args.mode == "finetune":
        model, projector = finetune(public, args.base, args.folder, args.film)
    else:
        model = load(public, args.base)
        projector = proprio_projector(public, args.base, model.llm_dim)
        if args.film:
            state = torch.load(next(iter(args.base.glob("vision_backbone--*"))), weights_only=True)
            rank = next(value.shape[0] for key, value in state.items() if ".lora_A." in key)
            adapted = with_adapters(public, model, rank, film=True)
            adapted.model.vision_backbone.load_state_dict(state)
            model = adapted.model
        elif args.mode == "merge":
            import peft

            model = peft.PeftModel.from_pretrained(model, args.folder).merge_and_unload()
    images = inputs["pixels"].shape[1] // 6
    model.vision_backbone.set_num_images_in_input(images)
    statistics = args.base / "dataset_statistics.json"
    if statistics.is_file():
        model.norm_stats = json.loads(statistics.read_text())
    model.eval()
    with torch.no_grad():
        outputs = decide(public, model, projector, inputs, args.film)
    for number, sentence in enumerate(args.sentences):
        tokenizer = AutoTokenizer.from_pretrained(args.base)
        outputs[f"ids{number}"] = torch.tensor(tokenizer(sentence).input_ids)
    save_file({name: tensor.contiguous() for name, tensor in outputs.items()}, args.output)


if __name__ == "__main__":
    main()
