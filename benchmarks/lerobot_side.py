"""LeRobot's half of `lerobot_agreement.py`: runs in an environment of its own that has `lerobot`, and not rlvla.

`build FOLDER`: in a folder with a `vlm` and a `request.json` (settings of the policy, statistics, seed), save a policy
with LeRobot. `evaluate FOLDER INPUTS OUTPUTS`: load a folder with LeRobot and record what it computes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from fixed_numbers import numbers
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy, make_att_2d_masks


def build(folder: Path) -> None:
    """Save a policy with the settings in `request.json`."""
    os.chdir(folder)
    request = json.loads(Path("request.json").read_text())
    features = {
        side: {key: PolicyFeature(FeatureType(kind), tuple(shape)) for key, (kind, shape) in request[side].items()}
        for side in ("input_features", "output_features")
    }
    modes = {kind: NormalizationMode(mode) for kind, mode in request["normalization_mapping"].items()}
    config = SmolVLAConfig(
        device="cpu", push_to_hub=False, normalization_mapping=modes, **features, **request["settings"]
    )
    policy = SmolVLAPolicy(config)
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


@torch.no_grad()
def evaluate(folder: Path, inputs: Path, outputs: Path) -> None:
    """Record prefix, velocities, sampled actions and what the processors make of observations."""
    given = dict(np.load(inputs, allow_pickle=False))
    os.chdir(folder)
    policy = SmolVLAPolicy.from_pretrained(".", strict=True)
    before, after = make_pre_post_processors(policy.config, pretrained_path=".")
    batch = {key: torch.from_numpy(given[key]) for key in given if key.startswith("observation.")}
    for key in [key for key in batch if key.startswith("observation.images.")]:
        batch[key] = batch[key].movedim(-1, -3).float() / 255
    batch = before({**batch, "task": [str(task) for task in given["tasks"]]})
    tokens, mask = batch["observation.language.tokens"], batch["observation.language.attention_mask"]
    images, image_masks = policy.prepare_images(batch)
    positions: list[torch.Tensor] = []
    embedding = policy.model.vlm_with_expert.get_vlm_model().vision_model.embeddings.position_embedding
    embedding.register_forward_hook(lambda module, args, output: positions.append(args[0]))
    state = policy.prepare_state(batch)
    model, towers = policy.model, policy.model.vlm_with_expert
    embedded, padding, blocks = model.embed_prefix(images, image_masks, tokens, mask, state=state)
    _, cache = towers.forward(
        attention_mask=make_att_2d_masks(padding, blocks),
        position_ids=torch.cumsum(padding, dim=1) - 1,
        past_key_values=None,
        inputs_embeds=[embedded, None],
        use_cache=True,
        fill_kv_cache=True,
    )
    record = {
        "positions": positions[0][0],
        "tokens": tokens,
        "token_mask": mask,
        "images": torch.stack(images, dim=1),
        "image_mask": torch.stack(image_masks, dim=1),
        "state": state,
        "prefix_mask": padding,
    }
    _, layers = towers.get_model_layers([towers.get_vlm_model().text_model, towers.lm_expert])
    used = [index for index, layer in enumerate(layers) if layer is not None]
    for number, index in enumerate(used):
        keys, values = cache[index]["key_states"], cache[index]["value_states"]
        every = towers.self_attn_every_n_layers
        if "cross" in towers.attention_mode and not (every > 0 and index % every == 0):
            attention = layers[index].self_attn
            keys, values = attention.k_proj(keys.flatten(2)), attention.v_proj(values.flatten(2))
            keys, values = (part.unflatten(-1, (-1, attention.head_dim)) for part in (keys, values))
        record |= {f"keys/{number}": keys.transpose(1, 2), f"values/{number}": values.transpose(1, 2)}
    x, t = torch.from_numpy(given["x"]), torch.from_numpy(given["t"])
    velocities = [
        model.denoise_step(x_t=x[:, index], prefix_pad_masks=padding, past_key_values=cache, timestep=t[:, index])
        for index in range(x.shape[1])
    ]
    record["velocity"] = torch.stack(velocities, dim=1)
    noise = torch.from_numpy(given["noise"])
    record["sampled"] = model.sample_actions(images, image_masks, tokens, mask, state, noise=noise)
    record["actions"] = after(policy.predict_action_chunk(batch, noise=noise))
    record["normalized_actions"] = before({**batch, "task": ["x"], "action": torch.from_numpy(given["actions"])})[
        "action"
    ]
    np.savez_compressed(outputs, **{name: value.numpy() for name, value in record.items()})


if __name__ == "__main__":
    if sys.argv[1] == "build":
        build(Path(sys.argv[2]))
    else:
        evaluate(*(Path(argument).resolve() for argument in sys.argv[2:5]))
