"""Folders of compact policies: checks, settings, and critics and reward models next to the policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlvla.experience import Experience
from rlvla.models import describe
from rlvla.models.compact.config import CompactConfig, layers_for
from rlvla.models.compact.family import build_compact
from rlvla.models.config import ActorConfig
from rlvla.models.families import check_checkpoint, checkpoint_option_problems, checkpoint_overrides
from rlvla.utils.errors import ConfigError

RANGES = {"q01": [-1.0, -1.0], "q99": [1.0, 1.0]}
STATISTICS = {"toy": {"action": RANGES, "proprio": RANGES}}
SIZES: dict[str, Any] = {
    "image_size": 16,
    "num_images_in_input": 1,
    "proprio_dim": 2,
    "action_dim": 2,
    "action_chunk_len": 3,
    "channels": (8, 8),
    "kernels": (4, 3),
    "strides": (4, 2),
    "width": 32,
    "column_width": 16,
    "text_width": 16,
    "text_buckets": 64,
}


def build(folder: Path, **options: Any) -> Path:
    return build_compact(folder, CompactConfig(**(SIZES | options)), STATISTICS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build(tmp_path / "policy")


def rows(count: int = 5) -> Experience:
    rng = np.random.default_rng(0)
    return Experience(
        images=torch.from_numpy(rng.integers(0, 256, (count, 1, 16, 16, 3), dtype=np.uint8)),
        proprio=torch.from_numpy(rng.uniform(-1, 1, (count, 2)).astype(np.float32)),
        instructions=["go left"] * count,
    )


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))


@pytest.mark.parametrize(
    "changes",
    [
        {"image_size": None},
        {"width": "wide"},
        {"action_dim": 0},
        {"channels": []},
        {"channels": [8]},
        {"strides": [4, 0]},
        {"image_size": 1},
        {"action_head": "diffusion"},
        {"action_head": "flow", "flow_noise_level": 2},
        {"action_head": "flow", "flow_method": "cps", "flow_steps": 1},
        {"action_std": "none"},
        {"action_std_init": 0},
        {"action_noise_correlation": 1},
        {"text_width": 18},
        {"width": 10**9},
        {"num_images_in_input": 65_536},
        {"channels": [8] * 2000, "kernels": [3] * 2000, "strides": [1] * 2000},
        {"action_dim": 4096, "action_chunk_len": 4096},
        {"action_std_init": 5000},
        {"column_width": True},
    ],
)
def test_invalid_configurations_are_refused(changes: dict[str, Any], folder: Path) -> None:
    edit(folder, **changes)
    with pytest.raises(ConfigError) as error:
        check_checkpoint(folder)
    assert {problem.reason for problem in error.value.problems} == {"invalid_file"}
    assert all("config.json" in problem for problem in error.value.problems)


def test_damaged_weights_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    state = load_file(str(path))
    state["extra"] = torch.zeros(1)
    state["network.join.bias"] = torch.zeros(3)
    state["network.norm.weight"][0] = float("nan")
    del state["read_out_layer.bias"]
    save_file(state, str(path))
    with pytest.raises(ConfigError) as error:
        check_checkpoint(folder)
    for name in ("extra", "network.join.bias", "network.norm.weight", "read_out_layer.bias"):
        assert any(name in problem for problem in error.value.problems)
    path.write_bytes(b"nothing")
    with pytest.raises(ConfigError):
        check_checkpoint(folder)
    path.unlink()
    with pytest.raises(ConfigError) as error:
        check_checkpoint(folder)
    assert [problem.reason for problem in error.value.problems] == ["missing_file"]


def test_the_same_seed_gives_the_same_files(folder: Path, tmp_path: Path) -> None:
    torch.rand(1)
    again = build(tmp_path / "again")
    for name in ("config.json", "model.safetensors", "dataset_statistics.json"):
        assert (folder / name).read_bytes() == (again / name).read_bytes()


def test_encoders_can_be_frozen(folder: Path) -> None:
    policy = check_checkpoint(folder).load_policy(ActorConfig(freeze_vision_backbone=True))
    frozen = [name for name, parameter in policy.named_parameters() if not parameter.requires_grad]
    assert frozen and frozen == [name for name, _ in policy.named_parameters() if "cameras" in name]


def test_settings_of_other_families_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError):
        checkpoint_overrides(folder, type("Flags", (), {"center_crop": True}))
    with pytest.raises(ConfigError):  # it has no standard deviation
        checkpoint_overrides(folder, type("Flags", (), {"action_std_init": 0.2}))
    config = ActorConfig(lora_rank=4, gradient_checkpointing=True, attn_implementation="flash_attention_2")
    problems = checkpoint_option_problems(check_checkpoint(folder), config)
    assert [problem.flag for problem in problems] == ["lora_rank", "gradient_checkpointing", "attn_implementation"]
    problems = checkpoint_option_problems(check_checkpoint(folder), ActorConfig(), {"attn_implementation"})
    assert [(problem.flag, problem.reason) for problem in problems] == [("attn_implementation", "no_effect")]


@pytest.mark.parametrize(
    ("method", "setting"),
    [("ode", {"noise_level": 0.3}), ("ode", {"noisy_steps": "one"}), ("noise", {"noise_level": 0.3})],
)
def test_noise_that_a_method_does_not_have(tmp_path: Path, method: str, setting: dict[str, object]) -> None:
    folder = build(tmp_path / "policy", action_head="flow")
    ((name, value),) = setting.items()
    with pytest.raises(ConfigError) as error:
        check_checkpoint(folder, overrides={"flow_method": method, f"flow_{name}": value})
    assert [(problem.flag, problem.reason) for problem in error.value.problems] == [(f"flow_{name}", "no_effect")]


def test_the_standard_deviation_can_be_reset(tmp_path: Path) -> None:
    folder = build(tmp_path / "policy", action_head="gaussian", action_std_init=0.5)
    overrides = checkpoint_overrides(folder, type("Flags", (), {"action_std_init": 0.2}))
    policy: Any = check_checkpoint(folder, overrides=overrides).load_policy()
    assert policy.action_std.log_std.exp().tolist() == pytest.approx([0.2, 0.2])
    kept: Any = check_checkpoint(folder, overrides={"action_std": "features"}).load_policy()
    assert kept.action_std.log_std.exp().tolist() == pytest.approx([0.5, 0.5]) and kept.action_std.weight is not None


def test_the_noise_of_a_chunk_can_be_correlated(tmp_path: Path) -> None:
    folder = build(tmp_path / "policy", action_head="gaussian")
    assert "action_noise_correlation" not in json.loads((folder / "config.json").read_text())
    overrides = checkpoint_overrides(folder, type("Flags", (), {"action_noise_correlation": 0.9}))
    policy: Any = check_checkpoint(folder, overrides=overrides).load_policy()
    policy.save_pretrained(tmp_path / "trained")
    noise = torch.zeros(1, 3, 2, dtype=torch.float64)
    noise[:, 0] = 1.0  # of the first action
    for loaded in (policy, check_checkpoint(tmp_path / "trained").load_policy()):
        hidden = torch.zeros(1, 42)
        distribution = loaded._head.distribution(loaded, hidden, 1.0)
        shift = (distribution.rsample(noise) - distribution.mean) / distribution.std
        torch.testing.assert_close(shift[0, :, 0], torch.tensor([1.0, 0.9, 0.81]))
    labels = {"actions": torch.zeros(1, 3, 2)}
    supervised = policy._head.supervised(distribution, labels, {"sft_loss": "nll"})
    torch.testing.assert_close(supervised["loss"], -distribution.marginals.log_prob(labels))


def test_a_value_that_the_flag_cannot_have_is_refused_before_training(tmp_path: Path) -> None:
    folder = build(tmp_path / "policy", action_head="gaussian")
    with pytest.raises(ConfigError) as error:
        check_checkpoint(folder, overrides={"action_std_init": 5000.0})
    assert [problem.flag for problem in error.value.problems] == ["action_std_init"]


def test_a_stored_standard_deviation_is_checked_unless_it_is_reset(tmp_path: Path) -> None:
    folder = build(tmp_path / "policy", action_head="gaussian")
    state = load_file(str(folder / "model.safetensors"))
    state["action_std.log_std"][0] = float("nan")
    save_file(state, str(folder / "model.safetensors"))
    with pytest.raises(ConfigError):
        check_checkpoint(folder, overrides={"action_std": "features"})
    check_checkpoint(folder, overrides={"action_std_init": 0.2})


def test_a_missing_standard_deviation_is_refused_unless_it_is_reset(tmp_path: Path) -> None:
    folder = build(tmp_path / "policy", action_head="gaussian")
    state = load_file(str(folder / "model.safetensors"))
    del state["action_std.log_std"]
    save_file(state, str(folder / "model.safetensors"))
    with pytest.raises(ConfigError):
        check_checkpoint(folder, overrides={"action_noise_correlation": 0.5})
    check_checkpoint(folder, overrides={"action_std_init": 0.2})


def test_damaged_heads_beside_the_weights_are_named(folder: Path) -> None:
    head = folder / "value_head.safetensors"
    save_file({"head.weight": torch.full((1, 16), float("nan")), "head.bias": torch.zeros(1)}, str(head))
    with pytest.raises(ConfigError) as error:
        check_checkpoint(folder)
    assert "head.weight" in error.value.problems[0]
    head.write_bytes(b"nothing")
    with pytest.raises(ConfigError):
        check_checkpoint(folder)


@pytest.mark.parametrize("bounds", [{"min": [-1.0, -1.0], "max": [1.0, 1.0]}, {**RANGES, "q99": None}])
def test_statistics_need_the_range_that_is_used(bounds: dict[str, Any], folder: Path) -> None:
    kept = {name: value for name, value in bounds.items() if value is not None}
    (folder / "dataset_statistics.json").write_text(json.dumps({"toy": {"action": kept, "proprio": RANGES}}))
    with pytest.raises(ConfigError) as error:
        check_checkpoint(folder)
    assert {problem.reason for problem in error.value.problems} == {"invalid_file"}


@pytest.mark.parametrize("head", ["tokens", "gaussian"])
def test_bfloat16(head: str, tmp_path: Path) -> None:
    policy: Any = check_checkpoint(build(tmp_path / "policy", action_head=head)).load_policy()
    batch = rows()
    exact = policy.act(batch.images.numpy(), batch.proprio.numpy(), batch.instructions, noise=None, temperature=1.0)
    policy.bfloat16()
    rounded = policy.act(batch.images.numpy(), batch.proprio.numpy(), batch.instructions, noise=None, temperature=1.0)
    trace = {name: torch.from_numpy(value) for name, value in rounded.trace.items()}
    log_probs = policy(**policy.score(batch.with_fields(trace=trace), 1.0), wants=("log_probs",))["log_probs"]
    assert log_probs.dtype == torch.float32 and torch.isfinite(log_probs).all()
    if head == "gaussian":
        np.testing.assert_allclose(rounded.actions, exact.actions, atol=0.1)


def test_a_compact_folder_is_described(folder: Path) -> None:
    described = describe(folder)
    assert described.trainable and described.facts["family"] == "compact"
    (folder / "model.safetensors").unlink()
    assert not describe(folder).loadable


def test_frozen_cameras(folder: Path) -> None:
    policy: Any = check_checkpoint(folder).load_policy(ActorConfig(freeze_vision_backbone=True))
    frozen = {name for name, parameter in policy.named_parameters() if not parameter.requires_grad}
    assert frozen and all(name.startswith("network.cameras.") for name in frozen)


@pytest.mark.parametrize("kind", ["critic", "reward model"])
def test_networks_beside_the_policy(kind: str, folder: Path, tmp_path: Path) -> None:
    def load(place: Path, new: bool = False) -> Any:
        checkpoint = check_checkpoint(place)
        return checkpoint.load_critic() if kind == "critic" else checkpoint.load_reward_model(new=new)

    model, batch = load(folder, new=True), rows()
    assert not model(**model.score(batch)).any()
    with torch.no_grad():
        model.head.weight.normal_()
    output = model(**model.score(batch))
    assert output.shape == (5, 6 if kind == "critic" else 2)
    output.sum().backward()
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert reached == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not any("read_out_layer" in name for name in reached)
    model.save_pretrained(tmp_path / "saved")
    torch.testing.assert_close(load(tmp_path / "saved")(**model.score(batch)), output, rtol=0, atol=0)
    if kind == "reward model":
        assert torch.equal(model.success_probability(batch), torch.sigmoid(output[:, 0]))
        with pytest.raises(ConfigError):
            load(folder)


def test_preparation_is_compared(folder: Path, tmp_path: Path) -> None:
    mine, larger = check_checkpoint(folder), check_checkpoint(build(tmp_path / "larger", image_size=20))
    assert mine.preparation_differences(larger) == ["image_size"]
    other = {"toy": {"action": RANGES, "proprio": {"q01": [0.0, 0.0], "q99": [1.0, 1.0]}}}
    shifted = check_checkpoint(build_compact(tmp_path / "shifted", CompactConfig(**SIZES), other))
    assert mine.preparation_differences(shifted) == ["proprio statistics"]
    assert mine.preparation_differences(mine) == []


@pytest.mark.parametrize("size", [16, 32, 64, 84, 128, 224])
def test_layers_leave_maps_of_about_8_by_8(size: int) -> None:
    kernels, strides = layers_for(size, 3)
    config = CompactConfig(
        **(SIZES | {"image_size": size, "channels": (8, 8, 8), "kernels": kernels, "strides": strides})
    )
    assert config.problems() == [] and 5 <= config.map_sides()[-1] <= 14


def test_the_tokens_of_a_row_are_positions_and_words(folder: Path) -> None:
    checkpoint = check_checkpoint(folder)
    policy = checkpoint.load_policy()
    sentences = ["go left", "go to the left"]
    positions = 2 * sum(side**2 for side in CompactConfig(**SIZES).map_sides())  # of two cameras
    assert policy.row_tokens(sentences, 2) == checkpoint.row_tokens(sentences, 2) == [positions + 4] * 2
    assert policy.row_tokens([], 2) == []


@pytest.mark.parametrize("head", ["tokens", "gaussian"])
def test_values_have_a_network_of_their_own_on_the_encoder(head: str, tmp_path: Path) -> None:
    """One value per action; zero at first and the same weights in every run; no path through the policy's trunk."""
    folder = build(tmp_path / head, action_head=head)
    policy, again = (check_checkpoint(folder).load_policy(value_head=True) for _ in range(2))
    state = policy.value_head.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in again.value_head.state_dict().items())
    batch = rows()
    assert not policy(**policy.score_values(batch))["values"].any()
    torch.nn.init.normal_(policy.value_head[-1].weight, generator=torch.Generator().manual_seed(0))
    values = policy(**policy.score_values(batch))["values"]
    assert values.shape == (5, 6) and torch.equal(values[:, 0::2], values[:, 1::2])
    assert all(bool((values[:, 0] != values[:, action]).any()) for action in (2, 4))
    values.sum().backward()
    reached = {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    assert not [name for name in reached if name.startswith(("network.join", "network.block", "network.columns"))]
    assert any(name.startswith("network.cameras") for name in reached)


def test_a_value_head_draws_no_random_numbers(folder: Path) -> None:
    states = []
    for value_head in (False, True):
        torch.manual_seed(0)
        check_checkpoint(folder).load_policy(value_head=value_head)
        states.append(torch.rand(3))
    assert torch.equal(*states)
