"""LeRobot's half of `lerobot_agreement.py`: runs in an environment of its own that has `lerobot`, and not rlvla.

`build FOLDER ...`: in each folder, which has a `request.json` (family, settings of the policy, statistics, seed) and
what else the family needs, save a policy with LeRobot. `evaluate FOLDER INPUTS OUTPUTS ...`: load folders with LeRobot
and record what it computes. `full OUTPUT`: names and shapes of the tensors of pi0 and pi0.5 in their full sizes.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from fixed_numbers import numbers
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies.factory import make_pre_post_processors

CLASSES = {"smolvla": "SmolVLA", "pi0": "PI0", "pi05": "PI05"}


@dataclass
class Seen:
    """A preprocessed batch."""

    images: list[Tensor]
    image_masks: list[Tensor]
    tokens: Tensor
    mask: Tensor
    state: Tensor


def classes(family: str, sizes: dict[str, Any] | None) -> tuple[Any, Any]:
    """LeRobot's classes for the configuration and the policy; those of pi0 build smaller parts if `sizes` are given."""
    name = CLASSES[family]
    config = getattr(import_module(f"lerobot.policies.{family}.configuration_{family}"), f"{name}Config")
    modeling = import_module(f"lerobot.policies.{family}.modeling_{family}")
    if sizes is not None:
        shrink(modeling, sizes)
    return config, getattr(modeling, f"{name}Policy")


def shrink(modeling: Any, sizes: dict[str, Any]) -> None:
    """Replace the sizes that LeRobot has in its code for pi0."""
    try:  # from 0.5 on
        from lerobot.policies.pi_gemma import PaliGemmaForConditionalGenerationWithPiGemma as Vlm
        from lerobot.policies.pi_gemma import PiGemmaForCausalLM as Expert
    except ImportError:
        from transformers.models.gemma.modeling_gemma import GemmaForCausalLM as Expert
        from transformers.models.paligemma.modeling_paligemma import PaliGemmaForConditionalGeneration as Vlm

    parts = {"gemma_2b": sizes["vlm"], "gemma_300m": sizes["expert"]}

    def variant(name: str) -> SimpleNamespace:
        part = parts[name]
        renamed = {"mlp_dim": part["mlp_width"], "num_heads": part["heads"], "num_kv_heads": part["kv_heads"]}
        return SimpleNamespace(**renamed, **{key: part[key] for key in ("width", "depth", "head_dim")})

    def small_vlm(config: Any) -> Any:
        vision = sizes["vision"]
        config.vision_config.hidden_size, config.vision_config.intermediate_size = vision["width"], vision["mlp_width"]
        config.vision_config.num_hidden_layers = vision["depth"]
        config.vision_config.num_attention_heads = vision["heads"]
        config.vision_config.patch_size = vision["patch_size"]
        config.vision_config.projection_dim = sizes["vlm"]["width"]
        config.text_config.vocab_size = config._vocab_size = config.image_token_index = sizes["vocabulary"]
        return Vlm(config=config)

    def small_expert(config: Any) -> Any:
        config.vocab_size = sizes["vocabulary"]
        return Expert(config=config)

    modeling.get_gemma_config = variant
    setattr(modeling, Vlm.__name__, small_vlm)
    setattr(modeling, Expert.__name__, small_expert)


def sizes_here() -> dict[str, Any] | None:
    """Content of the folder's sizes.json."""
    path = Path("sizes.json")
    return json.loads(path.read_text()) if path.exists() else None


def build(folder: Path) -> None:
    """Save a policy with the settings in `request.json`."""
    os.chdir(folder)
    request = json.loads(Path("request.json").read_text())
    make_config, make_policy = classes(request["family"], sizes_here())
    features = {
        side: {key: PolicyFeature(FeatureType(kind), tuple(shape)) for key, (kind, shape) in request[side].items()}
        for side in ("input_features", "output_features")
    }
    modes = {kind: NormalizationMode(mode) for kind, mode in request["normalization_mapping"].items()}
    config = make_config(
        device="cpu", push_to_hub=False, normalization_mapping=modes, **features, **request["settings"]
    )
    policy = make_policy(config)
    rng = np.random.default_rng(request["seed"])
    state = policy.state_dict()
    policy.load_state_dict(
        {name: torch.from_numpy(numbers(name, tuple(state[name].shape), rng)) for name in sorted(state)}
    )
    statistics = {
        key: {name: np.asarray(values, np.float32) for name, values in entry.items()}
        for key, entry in request["statistics"].items()
    }
    before, after = make_pre_post_processors(config, dataset_stats=statistics)
    Path("request.json").unlink()
    policy.save_pretrained(".")
    before.save_pretrained(".")
    after.save_pretrained(".")


def smolvla_record(policy: Any, seen: Seen, x: Tensor, t: Tensor) -> dict[str, Tensor]:
    """Positions of patches, mask, keys and values of the prefix, and velocities, of SmolVLA."""
    from lerobot.policies.smolvla.modeling_smolvla import make_att_2d_masks

    model, towers = policy.model, policy.model.vlm_with_expert
    positions: list[Tensor] = []
    embedding = towers.get_vlm_model().vision_model.embeddings.position_embedding
    embedding.register_forward_hook(lambda module, args, output: positions.append(args[0]))
    embedded, padding, blocks = model.embed_prefix(
        seen.images, seen.image_masks, seen.tokens, seen.mask, state=seen.state
    )
    before_05 = "fill_kv_cache" in inspect.signature(towers.forward).parameters
    _, cache = towers.forward(
        attention_mask=make_att_2d_masks(padding, blocks),
        position_ids=torch.cumsum(padding, dim=1) - 1,
        past_key_values=None,
        inputs_embeds=[embedded, None],
        use_cache=True,
        **({"fill_kv_cache": True} if before_05 else {}),
    )
    record = {"positions": positions[0][0], "prefix_mask": padding}
    _, layers = towers.get_model_layers([towers.get_vlm_model().text_model, towers.lm_expert])
    used = [index for index, layer in enumerate(layers) if layer is not None]
    for number, index in enumerate(used):
        if before_05:
            keys, values = cache[index]["key_states"], cache[index]["value_states"]
        else:
            keys, values = cache.layers[index].keys.transpose(1, 2), cache.layers[index].values.transpose(1, 2)
        every = towers.self_attn_every_n_layers
        if "cross" in towers.attention_mode and not (every > 0 and index % every == 0):
            attention = layers[index].self_attn
            keys, values = attention.k_proj(keys.flatten(2)), attention.v_proj(values.flatten(2))
            keys, values = (part.unflatten(-1, (-1, attention.head_dim)) for part in (keys, values))
        record |= {f"keys/{number}": keys.transpose(1, 2), f"values/{number}": values.transpose(1, 2)}
    velocities = [
        model.denoise_step(x_t=x[:, index], prefix_pad_masks=padding, past_key_values=cache, timestep=t[:, index])
        for index in range(x.shape[1])
    ]
    return record | {"velocity": torch.stack(velocities, dim=1)}


def pi0_record(policy: Any, seen: Seen, x: Tensor, t: Tensor) -> dict[str, Tensor]:
    """Mask, keys and values of the prefix, and velocities, of pi0 and pi0.5."""
    model = policy.model
    modeling = import_module(type(policy).__module__)
    masks = modeling.make_att_2d_masks
    four_dims = getattr(modeling, "prepare_attention_masks_4d", None) or model._prepare_attention_masks_4d
    embedded, padding, blocks = model.embed_prefix(seen.images, seen.image_masks, seen.tokens, seen.mask)
    model.paligemma_with_expert.paligemma.language_model.config._attn_implementation = "eager"
    _, cache = model.paligemma_with_expert.forward(
        attention_mask=four_dims(masks(padding, blocks)),
        position_ids=torch.cumsum(padding, dim=1) - 1,
        past_key_values=None,
        inputs_embeds=[embedded, None],
        use_cache=True,
    )
    record = {"prefix_mask": padding}
    layers = [(layer.keys, layer.values) for layer in cache.layers] if hasattr(cache, "layers") else list(cache)
    for index, (keys, values) in enumerate(layers):
        record |= {f"keys/{index}": keys.clone(), f"values/{index}": values.clone()}
    state = {"state": seen.state} if policy.name == "pi0" else {}
    velocities = [
        model.denoise_step(
            **state, x_t=x[:, index], prefix_pad_masks=padding, past_key_values=cache, timestep=t[:, index]
        )
        for index in range(x.shape[1])
    ]
    return record | {"velocity": torch.stack(velocities, dim=1)}


@torch.no_grad()
def evaluate(folder: Path, inputs: Path, outputs: Path) -> None:
    """Record prefix, velocities, sampled actions and what the processors make of observations."""
    given = dict(np.load(inputs, allow_pickle=False))
    os.chdir(folder)
    family = json.loads(Path("config.json").read_text())["type"]
    _, make_policy = classes(family, sizes_here())
    policy = make_policy.from_pretrained(".", strict=True)
    before, after = make_pre_post_processors(policy.config, pretrained_path=".")
    batch = {key: torch.from_numpy(given[key]) for key in given if key.startswith("observation.")}
    for key in [key for key in batch if key.startswith("observation.images.")]:
        batch[key] = batch[key].movedim(-1, -3).float() / 255
    batch = before({**batch, "task": [str(task) for task in given["tasks"]]})
    tokens, mask = batch["observation.language.tokens"], batch["observation.language.attention_mask"]
    smol = family == "smolvla"
    images, image_masks = policy.prepare_images(batch) if smol else policy._preprocess_images(batch)
    state = policy.prepare_state(batch) if family != "pi05" else batch["observation.state"]
    seen = Seen(images, image_masks, tokens, mask.bool(), state)
    record = {
        "tokens": tokens,
        "token_mask": seen.mask,
        "images": torch.stack(images, dim=1),
        "image_mask": torch.stack(image_masks, dim=1),
        "state": state,
    }
    x, t, noise = (torch.from_numpy(given[name]) for name in ("x", "t", "noise"))
    record |= (smolvla_record if smol else pi0_record)(policy, seen, x, t)
    states = () if family == "pi05" else (state,)
    record["sampled"] = policy.model.sample_actions(images, image_masks, tokens, seen.mask, *states, noise=noise)
    record["actions"] = after(policy.predict_action_chunk(batch, noise=noise))
    one = {**batch, "task": ["x"] * len(tokens), "action": torch.from_numpy(given["actions"])}
    record["normalized_actions"] = before(one)["action"]
    np.savez_compressed(outputs, **{name: value.numpy() for name, value in record.items()})


def full_sizes(output: Path) -> None:
    """Write the names and shapes of pi0's and pi0.5's tensors, and how many parameters they are."""
    record = {}
    for family in ("pi0", "pi05"):
        make_config, _ = classes(family, None)
        modeling = import_module(f"lerobot.policies.{family}.modeling_{family}")
        with torch.device("meta"):
            model = getattr(modeling, f"{CLASSES[family]}Pytorch")(make_config(device="cpu"))
        shapes = {f"model.{name}": list(value.shape) for name, value in model.state_dict().items()}
        record[family] = {"shapes": shapes, "parameters": sum(value.numel() for value in model.parameters())}
    output.write_text(json.dumps(record))


if __name__ == "__main__":
    paths = [Path(argument).resolve() for argument in sys.argv[2:]]
    if sys.argv[1] == "build":
        for path in paths:
            build(path)
    elif sys.argv[1] == "full":
        full_sizes(*paths)
    else:
        for number in range(0, len(paths), 3):
            evaluate(*paths[number : number + 3])
