"""The regression head of OFT, and its files, which survive a round trip to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rlvla.models.actor import ActorConfig
from rlvla.models.inspection import describe
from rlvla.models.lora import MergedWeights, add_adapters, lora_layers
from rlvla.models.value_models import Critic
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.models.vla.regression_head import MAX_STD, ActionStd, RegressionHead
from rlvla.models.vla.tiny import build_tiny
from rlvla.utils.errors import ConfigError

HEAD = "action_head--150000_checkpoint.pt"


def load(folder: Path, **overrides) -> OpenVLAForActionPrediction:
    return OpenVLAForActionPrediction.from_pretrained(folder, **overrides)


def head_state(config, prefix: str = "module.") -> dict[str, torch.Tensor]:
    """As OFT saves it: half precision, in the order of its modules."""
    width, dim = config.text_config.hidden_size, config.action_dim
    g = torch.Generator().manual_seed(5)
    shapes = {
        "model.layer_norm1.weight": (width * dim,),
        "model.layer_norm1.bias": (width * dim,),
        "model.fc1.weight": (width, width * dim),
        "model.fc1.bias": (width,),
    }
    for block in range(2):
        stem = f"model.mlp_resnet_blocks.{block}.ffn"
        shapes |= {f"{stem}.{part}.{name}": (width,) for part in (0, 1) for name in ("weight", "bias")}
        shapes[f"{stem}.1.weight"] = (width, width)
    shapes |= {"model.layer_norm2.weight": (width,), "model.layer_norm2.bias": (width,)}
    shapes |= {"model.fc2.weight": (dim, width), "model.fc2.bias": (dim,)}
    return {prefix + name: torch.randn(shape, generator=g).bfloat16() for name, shape in shapes.items()}


@pytest.fixture
def public(tiny_folder: Path, tmp_path: Path) -> Path:
    """A folder as OpenVLA-OFT publishes it: no word of ours in config.json, the head in its own file."""
    folder = shutil.copytree(tiny_folder, tmp_path / "public")
    config = load(folder).config
    torch.save(head_state(config), folder / HEAD)
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("model_variant")
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def inputs(model: OpenVLAForActionPrediction, batch: int = 2) -> dict[str, torch.Tensor]:
    config = model.config
    g = torch.Generator().manual_seed(2)
    return {
        "input_ids": torch.randint(3, 20, (batch, 5), generator=g),
        "attention_mask": torch.ones(batch, 5, dtype=torch.long),
        "pixel_values": torch.randn(batch, 12, config.image_size, config.image_size, generator=g),
        "proprio": torch.rand(batch, 6, generator=g),
    }


def reference_head(state: dict[str, torch.Tensor], hidden: torch.Tensor, actions: int) -> torch.Tensor:
    """The formula of the public head, written out."""
    p = {name.removeprefix("module.model."): value.float() for name, value in state.items()}
    x = hidden.reshape(len(hidden), actions, -1)
    norm = nn.functional.layer_norm
    x = norm(x, x.shape[-1:], p["layer_norm1.weight"], p["layer_norm1.bias"])
    x = (x @ p["fc1.weight"].T + p["fc1.bias"]).clamp_min(0)
    for block in ("mlp_resnet_blocks.0.ffn", "mlp_resnet_blocks.1.ffn"):
        y = norm(x, x.shape[-1:], p[f"{block}.0.weight"], p[f"{block}.0.bias"])
        x = (y @ p[f"{block}.1.weight"].T + p[f"{block}.1.bias"]).clamp_min(0) + x
    x = norm(x, x.shape[-1:], p["layer_norm2.weight"], p["layer_norm2.bias"])
    return x @ p["fc2.weight"].T + p["fc2.bias"]


def test_the_head_equals_the_public_one(public: Path) -> None:
    model = load(public, model_variant="oft_regression", dtype=torch.float32)
    given = inputs(model)
    with torch.no_grad():
        mean, log_std = model(**given)
        expected = reference_head(torch.load(public / HEAD), model.action_hidden_states(**given), 3)
    torch.testing.assert_close(mean, expected, rtol=1e-4, atol=1e-4)
    assert mean.shape == (2, 3, 7) and torch.allclose(log_std.exp(), torch.full((7,), 0.1))


@pytest.mark.parametrize("prefix", ["module.", ""])
def test_every_tensor_and_file_survives_a_round_trip(public: Path, tmp_path: Path, prefix: str) -> None:
    torch.save(head_state(load(public).config, prefix), public / HEAD)
    load(public, model_variant="oft_regression").save_pretrained(tmp_path / "out")
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {path.name for path in public.iterdir()} | {"action_std.safetensors"}
    before, after = (torch.load(f / HEAD, weights_only=True) for f in (public, tmp_path / "out"))
    assert list(before) == list(after)
    assert all(before[key].dtype == after[key].dtype and torch.equal(before[key], after[key]) for key in before)
    main, again = (load_file(f / "model.safetensors") for f in (public, tmp_path / "out"))
    assert main.keys() == again.keys() and all(torch.equal(main[key], again[key]) for key in main)
    again = load(tmp_path / "out")  # config.json says the variant now
    assert again.config.model_variant == "oft_regression" and again.config.action_std == "learned"
    assert all(
        torch.equal(value, again.state_dict()[name]) for name, value in load(tmp_path / "out").state_dict().items()
    )


def test_the_same_folder_is_still_one_of_tokens(public: Path) -> None:
    model = load(public)
    assert model.config.model_variant == "oft" and model.action_head is None
    assert model(**inputs(model)).shape == (2, 21, 256)


def test_a_tiny_model_starts_with_small_actions(tmp_path: Path, statistics: dict) -> None:
    folder = build_tiny(
        tmp_path, sentences=["reach"], dataset_statistics=statistics, image_size=32, model_variant="oft_regression",
        action_std="features", action_std_init=0.3,
    )  # fmt: skip
    assert {"action_head--0_checkpoint.pt", "action_std.safetensors"} <= {path.name for path in folder.iterdir()}
    assert all(key.startswith("module.model.") for key in torch.load(folder / "action_head--0_checkpoint.pt"))
    assert not [key for key in load_file(folder / "model.safetensors") if key.startswith("action_")]
    model = load(folder)
    given = inputs(model) | {"proprio": None}
    given["pixel_values"] = given["pixel_values"][:, :6]
    with torch.no_grad():
        mean, log_std = model(**given)
    assert mean.abs().max() < 0.6 and torch.allclose(log_std.exp(), torch.full((2, 8, 7), 0.3))


def test_the_standard_deviation_is_kept_and_can_be_reset(public: Path, tmp_path: Path) -> None:
    model = load(public, model_variant="oft_regression", action_std="features")
    with torch.no_grad():
        model.action_std.log_std.fill_(-1.0)
        model.action_std.weight.fill_(0.01)
    model.save_pretrained(tmp_path / "out")
    kept = load(tmp_path / "out").action_std
    assert torch.equal(kept.log_std, model.action_std.log_std) and torch.equal(kept.weight, model.action_std.weight)
    other = load(tmp_path / "out", action_std="fixed").action_std
    assert torch.equal(other.log_std, model.action_std.log_std) and not list(other.parameters())
    reset = load(tmp_path / "out", action_std_init=0.5).action_std
    assert torch.allclose(reset.log_std.exp(), torch.tensor(0.5)) and not reset.weight.any()


def test_features_move_the_standard_deviation_within_bounds() -> None:
    std = ActionStd("features", 4, 2, 0.1)
    hidden = torch.randn(3, 6, 4)
    with torch.no_grad():
        std.weight[1] = 100.0
        log_std = std(hidden)
    assert log_std.shape == (3, 3, 2)
    torch.testing.assert_close(log_std[..., 0].exp(), torch.full((3, 3), 0.1))
    assert log_std.exp().max() <= MAX_STD + 1e-6 and log_std[..., 1].std() > 0


def test_an_action_depends_on_its_hidden_states_only() -> None:
    torch.manual_seed(0)
    head, hidden = RegressionHead(4, 2), torch.randn(1, 6, 4)
    changed = hidden.clone()
    changed[:, 2, 0] += 1.0  # of the second action
    moved = (head(changed) != head(hidden)).any(-1)
    assert moved.tolist() == [[False, True, False]]


def test_adapters_leave_the_head_trainable_and_in_the_export(public: Path, tmp_path: Path) -> None:
    model = load(public, model_variant="oft_regression", dtype=torch.float32)
    layers = lora_layers(model, ("all-linear",))
    assert not [name for name in layers if name.startswith("action_")]
    adapted = add_adapters(model, layers, 2, 4)
    trainable = {name.removeprefix("base_model.model.") for name, p in adapted.named_parameters() if p.requires_grad}
    names = {f"{part}.{name}" for part in ("action_head", "action_std") for name in getattr(model, part).state_dict()}
    assert names == {name for name in trainable if ".lora_" not in name}
    with torch.no_grad():
        model.action_std.log_std.fill_(-1.5)
    plain = load(public, model_variant="oft_regression", dtype=torch.float32)
    plain.save_pretrained(tmp_path / "out", state_dict=MergedWeights(adapted.state_dict(), 2.0))
    assert torch.equal(load(tmp_path / "out").action_std.log_std.detach(), torch.full((7,), -1.5))


def test_networks_that_judge_leave_the_head_out(public: Path, tmp_path: Path) -> None:
    load(public, model_variant="oft_regression").save_pretrained(tmp_path / "out")
    for folder, overrides in ((public, {"model_variant": "oft_regression"}), (tmp_path / "out", {})):
        critic = Critic.from_pretrained(folder, config=ActorConfig(), **overrides)
        assert critic.vla.config.model_variant == "oft" and critic.vla.action_head is None


def refuse(folder: Path, part: str, **overrides) -> None:
    with pytest.raises(ConfigError, match=part):
        load(folder, **{"model_variant": "oft_regression", **overrides})


def test_other_heads_are_refused(public: Path, tiny_folder: Path) -> None:
    refuse(tiny_folder, "has no regression head")
    refuse(public, "action_std 'none' is unknown", action_std="none")
    refuse(public, "action_std_init is 0.0;", action_std_init=0.0)
    refuse(public, "action_noise_correlation is 1.0;", action_noise_correlation=1.0)
    refuse(public, "belong to model_variant oft_regression", model_variant="oft", action_std="fixed")
    shutil.copy(public / HEAD, public / "action_head--2_checkpoint.pt")
    refuse(public, "several regression heads")
    (public / "action_head--2_checkpoint.pt").unlink()
    torch.save({"module.noise_predictor.fc1.weight": torch.ones(2)}, public / HEAD)
    refuse(public, "is not an L1 regression head")
    torch.save({}, public / "noisy_action_projector--150000_checkpoint.pt")
    refuse(public, "diffusion head")


def test_a_head_of_another_width_is_named(public: Path) -> None:
    state = torch.load(public / HEAD)
    state["module.model.fc2.weight"] = state["module.model.fc2.weight"][:-1]
    torch.save(state, public / HEAD)
    refuse(public, r"action_head.model.fc2.weight is \[6, ")


def test_a_new_head_is_made_where_one_is_asked_for(tiny_folder: Path) -> None:
    model = load(tiny_folder, model_variant="oft_regression", new_head=True)
    again = load(tiny_folder, model_variant="oft_regression", new_head=True)
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.action_head.state_dict().values(), again.action_head.state_dict().values())
    )


def test_the_folder_is_described(public: Path) -> None:
    described = describe(public, model_variant="oft_regression")
    assert described.trainable and "learned, 0.1" in described.facts["standard deviation"]
    assert not describe(public).trainable
