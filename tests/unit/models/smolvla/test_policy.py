"""SmolVLA on the policy contract."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlvla.experience import Experience
from rlvla.memory.probe import probe
from rlvla.models import Actor
from rlvla.models.config import ActorConfig
from rlvla.models.families import check_checkpoint, checkpoint_option_problems
from rlvla.models.flow.head import PAIRS
from rlvla.models.flow.settings import MATCHED_PAIRS
from rlvla.models.inspection import describe
from rlvla.models.lerobot.new import NewPolicyFacts
from rlvla.models.lerobot.policy import STD_FILE, LeRobotPolicy
from rlvla.models.lerobot.processors import without_statistics
from rlvla.models.lerobot.settings import SETTINGS_FILE
from rlvla.models.policy import TRAINING_NOISE, Decision
from rlvla.models.smolvla.tiny import TinyVlm, build_tiny_smolvla
from rlvla.models.testing import PolicyContract
from rlvla.utils.errors import ConfigError

VLM = TinyVlm(image_size=32, patch_size=8, vision_dim=32, vision_depth=1, dim=32, layers=2)
STATISTICS = {
    "observation.state": {"mean": [0.1, -0.2], "std": [1.0, 2.0]},
    "action": {"mean": [0.5, -0.5, 0.0], "std": [0.5, 0.2, 1.0]},
}


def build(folder: Path, settings: dict[str, Any], **config: Any) -> Path:
    """Two of three actions are executed; states and actions are padded, cameras in another order than the features."""
    build_tiny_smolvla(
        folder,
        sentences=PolicyContract.instructions,
        statistics=STATISTICS,
        cameras=("top", "wrist"),
        vlm=VLM,
        chunk_size=3,
        n_action_steps=2,
        state_dim=2,
        max_state_dim=4,
        action_dim=3,
        max_action_dim=5,
        num_steps=3,
    )
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **config}))
    cameras = {"cameras": ["hand", "top"], "camera_map": {"hand": "observation.images.wrist"}}
    cameras["camera_map"]["top"] = "observation.images.top"
    (folder / SETTINGS_FILE).write_text(json.dumps({**cameras, **settings}))
    return folder


class TestSmolVLA(PolicyContract):
    value_head = True
    settings: ClassVar[dict[str, Any]] = {}
    files: ClassVar = ()

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return build(tmp_path_factory.mktemp("smolvla") / "policy", cls.settings)


class TestLearnedNoise(TestSmolVLA):
    settings: ClassVar = {"flow_method": "noise", "flow_noisy_steps": "all", "critic_features": "prefix"}


class TestExpertOnly(TestSmolVLA):
    config = ActorConfig(train_expert_only=True)


class TestAdapters(TestSmolVLA):
    config = ActorConfig(lora_rank=2, train_expert_only=True)


class TestStepByStep(TestSmolVLA):
    overrides: ClassVar = {"flow_asked_scores": "step_log_probs"}
    settings: ClassVar = {"flow_noisy_steps": "all", "critic_features": "prefix"}


class TestWithoutNoise(TestSmolVLA):
    value_head = False
    settings: ClassVar = {"flow_method": "ode"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("smolvla") / "policy", {})


@pytest.fixture(scope="module")
def policy(folder: Path) -> LeRobotPolicy:
    return load(folder)


def load(folder: Path, config: ActorConfig | None = None, **overrides: Any) -> LeRobotPolicy:
    policy = check_checkpoint(folder, overrides=overrides).load_policy(config)
    assert isinstance(policy, LeRobotPolicy)
    return policy.eval()


def observed(policy: LeRobotPolicy, rows: int = 3) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Prepared images and states, and instructions."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (rows, 2, 20, 20, 3), dtype=np.uint8)
    prepared, state = policy.prepare(images, rng.normal(size=(rows, 2)).astype(np.float32))
    assert state is not None
    return prepared, state, [PolicyContract.instructions[i % 2] for i in range(rows)]


def decide(policy: LeRobotPolicy) -> Decision:
    rng = np.random.default_rng(1)
    noise = np.stack([policy.spec.draw(rng) for _ in range(3)])
    return policy.act(*observed(policy), noise=noise)


def batch(policy: LeRobotPolicy, trace: Mapping[str, np.ndarray]) -> Experience:
    images, state, instructions = observed(policy)
    return Experience(
        images=torch.from_numpy(images),
        proprio=torch.from_numpy(state),
        instructions=instructions,
        trace={name: torch.from_numpy(value) for name, value in trace.items()},
    )


@pytest.mark.parametrize("noisy", ["one", "all"])
def test_observations_are_encoded_once_per_decision(noisy: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load(folder, flow_noisy_steps=noisy, flow_steps=4)
    calls: list[str] = []
    for name in ("prefix", "expert_states"):
        plain = getattr(policy.network, name)
        monkeypatch.setattr(policy.network, name, lambda *a, n=name, f=plain: (calls.append(n), f(*a))[1])
    decision = decide(policy)
    assert calls == ["prefix"] + 4 * ["expert_states"]
    calls.clear()
    policy(**policy.score(batch(policy, decision.trace), 1.0), wants=("log_probs",))
    assert calls == ["prefix", "expert_states"]


def test_frozen_parts_stay_out_of_the_graph(folder: Path) -> None:
    policy = load(folder, ActorConfig(train_expert_only=True))
    images, state, instructions = observed(policy)
    prepared = policy.observations(torch.from_numpy(images), torch.from_numpy(state), instructions)
    assert not policy.network._embed(
        policy.files.pixels(prepared["images"]),
        torch.ones(3, 2, dtype=torch.bool),
        *(prepared[name] for name in ("tokens", "token_mask")),
    )[0].requires_grad
    trainable = {name for name, parameter in policy.network.named_parameters() if parameter.requires_grad}
    assert trainable and {policy.network.part_of(name) for name in trainable} == {"expert", "output", "state"}


def test_supervision_is_flow_matching_of_the_whole_chunk_without_its_padding(policy: LeRobotPolicy) -> None:
    rng = np.random.default_rng(2)
    actions = rng.normal(size=(3, 3, 3)).astype(np.float32)
    numbers = torch.from_numpy(rng.normal(size=(3, policy.spec.training_noise)).astype(np.float32))
    rows = batch(policy, policy.encode_actions(actions))
    inputs = policy.score(rows.with_fields(trace={**rows.trace, TRAINING_NOISE: numbers}), 1.0)
    with torch.no_grad():
        loss = policy(**inputs, wants=("loss",))["loss"]
        pairs = numbers.view(3, 4, 16)
        t = 0.999 * torch.special.ndtr(pairs[..., 15]) ** (2 / 3) + 0.001
        noise, target = pairs[..., :15].view(3, 4, 3, 5), torch.zeros(3, 1, 3, 5)
        mean, std = (torch.tensor(STATISTICS["action"][name]) for name in ("mean", "std"))
        target[..., :3] = ((torch.from_numpy(actions) - mean) / std)[:, None]
        x = t[..., None, None] * noise + (1 - t[..., None, None]) * target
        images, state, instructions = observed(policy)
        prefix = policy.hidden({}, **policy.observations(rows.images, rows.proprio, instructions))
        expected = (policy.network.velocity(prefix, x, t) - (noise - target)).square()[..., :3].mean(1)
    torch.testing.assert_close(loss, expected.flatten(1), atol=1e-4, rtol=1e-4)


def test_cameras_are_found_by_their_names(policy: LeRobotPolicy, folder: Path) -> None:
    other = load(folder, cameras=("top", "hand"))
    images = np.random.default_rng(0).integers(0, 256, (3, 2, 20, 20, 3), dtype=np.uint8)
    np.testing.assert_array_equal(policy.prepare(images, None)[0], other.prepare(images[:, ::-1], None)[0])
    np.testing.assert_array_equal(policy.prepare(images, None)[0], images[:, ::-1])
    unlike = check_checkpoint(folder, overrides={"cameras": ("top", "hand")})
    assert check_checkpoint(folder).preparation_differences(unlike)


@pytest.mark.parametrize("features", ["expert", "prefix"])
@pytest.mark.parametrize("config", [ActorConfig(), ActorConfig(train_expert_only=True)], ids=["all", "expert only"])
def test_a_critic_trains_the_inputs_of_its_features(
    features: str, config: ActorConfig, folder: Path, tmp_path: Path
) -> None:
    critic = check_checkpoint(folder, overrides={"critic_features": features}).load_critic(config)
    torch.nn.init.normal_(critic.head.weight)
    rows = batch(critic.policy, {})
    values = critic(rows)
    assert values.shape == (3, 6) and values[:, ::3].std() > 0
    values.sum().backward()
    trained = {name for name, parameter in critic.named_parameters() if parameter.requires_grad}
    assert {name for name, parameter in critic.named_parameters() if parameter.grad is not None} == trained
    critic.save_pretrained(tmp_path / "critic")
    again = check_checkpoint(tmp_path / "critic").load_critic()
    torch.testing.assert_close(again(rows), values, atol=1e-5, rtol=0)


def test_without_adapters_it_is_the_policy_it_was(folder: Path, policy: LeRobotPolicy) -> None:
    adapted = load(folder, ActorConfig(lora_rank=2, lora_targets=("expert",), train_expert_only=True))
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert trained and all(".lora_" in name for name in trained)
    assert {adapted.network.part_of(name.removeprefix("network.")) for name in trained} == {"expert"}
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    before = decide(policy).actions
    assert np.abs(decide(adapted).actions - before).max() > 1e-3
    with adapted.adapters_disabled():
        np.testing.assert_allclose(decide(adapted).actions, before, atol=1e-6)


def test_weights_are_loaded_in_the_dtype_that_is_asked_for(folder: Path) -> None:
    policy = Actor.from_pretrained(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.bfloat16}
    assert np.isfinite(decide(policy).actions).all()


def test_without_adapters_its_standard_deviation_is_that_of_the_start(folder: Path) -> None:
    adapted = load(folder, ActorConfig(lora_rank=2, lora_targets=("expert",)), flow_method="noise")
    start = adapted.std_head.bias.detach().clone()
    with torch.no_grad():
        adapted.std_head.bias += 1.0
    with adapted.adapters_disabled():
        torch.testing.assert_close(adapted.std_head.bias, start)
    torch.testing.assert_close(adapted.std_head.bias.detach(), start + 1.0)
    assert "std_head.bias" in adapted.state_dict() and adapted.std_head.bias.requires_grad


def test_a_shorter_chunk_is_remembered_where_lerobot_reads_it(folder: Path, tmp_path: Path) -> None:
    policy = load(folder, action_chunk_len=1, flow_steps=5, flow_noise_level=0.3)
    policy.save_pretrained(tmp_path / "copy")
    raw, before = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "copy", folder))
    assert (raw["n_action_steps"], raw["num_steps"]) == (1, 5) and raw.keys() == before.keys()
    again = load(tmp_path / "copy")
    assert again.settings == policy.settings and again.spec == policy.spec


def test_images_are_turned_as_lerobot_turns_those_of_libero(folder: Path, tmp_path: Path) -> None:
    policy = load(folder, platform="libero")
    images = np.random.default_rng(0).integers(0, 256, (3, 2, 20, 20, 3), dtype=np.uint8)
    np.testing.assert_array_equal(policy.prepare(images, None)[0], np.rot90(images[:, ::-1], 2, (2, 3)))
    policy.save_pretrained(tmp_path / "copy")
    assert load(tmp_path / "copy").settings.turned_images
    with pytest.raises(ConfigError, match="--platform bridge"):
        check_checkpoint(folder, overrides={"platform": "bridge"})


def test_weights_can_be_taken_to_other_data(folder: Path, tmp_path: Path) -> None:
    numbers = {"proprio": 4, "action": 5}
    statistics = {name: {"mean": [0.3] * size, "std": [2.0] * size} for name, size in numbers.items()}
    facts = NewPolicyFacts(["push the cube"], statistics, "pushes", ("front",), (24, 24), 3, 4, 5)
    checkpoint = check_checkpoint(folder)
    assert not checkpoint.refitted(tmp_path / "new", facts)
    new = check_checkpoint(tmp_path / "new")
    spec = new.spec
    assert (spec.cameras, spec.proprio_dim, spec.action_dim, spec.action_chunk_len) == (1, 4, 5, 2)
    assert new.unnorm_key == "pushes" and spec.proprio_limit == 3.0  # mean and standard deviation
    before, after = (check.load_policy().network.state_dict() for check in (checkpoint, new))
    assert all(torch.equal(before[name], after[name]) for name in before)
    policy = new.load_policy()
    np.testing.assert_allclose(policy.prepare(np.zeros((1, 1, 24, 24, 3), np.uint8), np.full((1, 4), 2.3))[1], 1.0)
    wide = replace(facts, state_dim=5, action_dim=6)
    assert [p.flag for p in checkpoint.refitted(tmp_path / "none", wide)] == ["fit_to_demos"] * 2
    assert not (tmp_path / "none").exists()


def test_heads_that_are_not_taken_to_other_data_may_be_damaged(tmp_path: Path) -> None:
    folder = build(tmp_path / "policy", {"flow_method": "noise"})
    (folder / STD_FILE).write_bytes(b"nothing")
    (folder / "value_head.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError) as error:
        check_checkpoint(folder)
    assert [str(folder) in problem for problem in error.value.problems] == [True, True]
    with without_statistics():
        checkpoint = check_checkpoint(folder)
    statistics = {"proprio": {"mean": [0.3] * 2, "std": [2.0] * 2}, "action": {"mean": [0.3] * 3, "std": [2.0] * 3}}
    facts = NewPolicyFacts(["push the cube"], statistics, "pushes", ("front",), (24, 24), 3, 2, 3)
    assert not checkpoint.refitted(tmp_path / "new", facts)
    assert load(tmp_path / "new", flow_method="noise").std_head.weight.abs().max() == 0


@pytest.mark.parametrize("damage", ["unreadable", "nan", "other shape"])
def test_a_damaged_head_of_a_critic_is_named(damage: str, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "critic"
    checkpoint = check_checkpoint(folder)
    checkpoint.load_critic().save_pretrained(copy)
    checkpoint, head = check_checkpoint(copy), copy / "value_head.safetensors"
    stored = load_file(str(head))
    if damage == "unreadable":
        head.write_bytes(head.read_bytes()[:-8])
    else:
        wrong = torch.full_like(stored["head.weight"], torch.nan) if damage == "nan" else stored["head.weight"][:, 1:]
        save_file(stored | {"head.weight": wrong.contiguous()}, head)
        assert damage == "other shape" or "head.weight: NaN or infinity" in problem_of(lambda: check_checkpoint(copy))
    assert str(head) in problem_of(checkpoint.load_critic)


def problem_of(call: Callable[[], Any]) -> str:
    """The only problem that it reports."""
    with pytest.raises(ConfigError) as error:
        call()
    assert len(error.value.problems) == 1
    return str(error.value.problems[0])


def test_unknown_settings_are_named(folder: Path) -> None:
    text = problem_of(lambda: Actor.from_pretrained(folder, flow_stesp=3, device="cpu", center_crop=None))
    assert "smolvla policies have no setting flow_stesp, center_crop; known are flow_method" in text


def test_memory_can_be_estimated(folder: Path) -> None:
    checkpoint = check_checkpoint(folder)
    row = checkpoint.row_shape(PolicyContract.instructions, 2)
    config = ActorConfig(train_expert_only=True)
    policy = checkpoint.load_policy(config)
    measured = probe(checkpoint.sketch(row, config), bf16=True, train_rows=1, forward_rows=1, play_rows=1)
    assert measured.parameters == sum(p.numel() for p in policy.parameters())
    assert measured.trainable == sum(p.numel() for p in policy.parameters() if p.requires_grad)
    assert measured.backward_bytes >= measured.forward_bytes > 0 and measured.decision_bytes > 0
    critic = probe(checkpoint.sketch(row, config, scalar_head=True), bf16=False, train_rows=0, forward_rows=1)
    assert critic.parameters == measured.parameters + policy.spec.feature_dim + 1


@pytest.mark.parametrize(
    ("overrides", "supervised", "evaluations"),
    [
        ({}, False, 1),
        ({}, True, PAIRS),
        ({"flow_noisy_steps": "all"}, False, 3),
        ({"flow_method": "ode"}, False, MATCHED_PAIRS),
    ],
)
def test_estimates_evaluate_the_expert_as_training_does(
    overrides: dict[str, Any], supervised: bool, evaluations: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, velocity = [], LeRobotPolicy.velocity

    def counted(policy: LeRobotPolicy, condition: Any, x: torch.Tensor, t: torch.Tensor) -> Any:
        counts.append(x.shape[:2])
        return velocity(policy, condition, x, t)

    monkeypatch.setattr(LeRobotPolicy, "velocity", counted)
    checkpoint = check_checkpoint(folder, overrides=overrides)
    row = checkpoint.row_shape(PolicyContract.instructions, 2)
    with torch.device("meta"):
        checkpoint.sketch(row, ActorConfig(), supervised=supervised)().loss(2)
    assert counts == [(2, evaluations)]


def test_half_precision_weights_are_used_as_float32(folder: Path, tmp_path: Path) -> None:
    half = shutil.copytree(folder, tmp_path / "half")
    weights = {name: value.half() for name, value in load_file(str(folder / "model.safetensors")).items()}
    save_file(weights, half / "model.safetensors", metadata={"format": "pt"})
    assert np.isfinite(decide(load(half)).actions).all()
    with pytest.raises(ConfigError, match="float16"):
        check_checkpoint(half, overrides={"dtype": torch.float16, "device": "cpu"})


def test_all_problems_are_reported_at_once(folder: Path, tmp_path: Path) -> None:
    bad = Path(shutil.copytree(folder, tmp_path / "bad"))
    shutil.rmtree(bad / "vlm")
    (bad / "policy_postprocessor.json").unlink()
    with pytest.raises(ConfigError) as error:
        check_checkpoint(bad, overrides={"action_chunk_len": 4, "cameras": ("front", "side")})
    measured = {(problem.flag, problem.reason) for problem in error.value.problems}
    assert measured == {
        (None, "missing_file"),
        ("action_chunk_len", "mismatch"),
        ("camera_map", "mismatch"),
    }
    text = str(error.value)
    assert "vlm_model_name" in text and "policy_postprocessor.json" in text and "observation.images.wrist" in text


@pytest.mark.parametrize("damage", ["bytes", "shape", "infinite"])
def test_a_damaged_head_of_the_noise_is_named(damage: str, folder: Path, tmp_path: Path) -> None:
    learned = {"flow_method": "noise", "flow_noisy_steps": "all"}
    bad = tmp_path / "bad"
    policy = load(folder, **learned)
    policy.save_pretrained(bad)
    check_checkpoint(bad)
    tensors = load_file(str(bad / STD_FILE))
    if damage == "bytes":
        (bad / STD_FILE).write_bytes(b"x" * 20)
    elif damage == "shape":
        save_file({**tensors, "bias": torch.zeros(9)}, bad / STD_FILE)
    else:
        save_file({**tensors, "bias": torch.full((3,), float("inf"))}, bad / STD_FILE)
    with pytest.raises(ConfigError) as error:
        check_checkpoint(bad, overrides={"action_chunk_len": 9})
    problems = error.value.problems
    assert [(problem.flag, problem.reason) for problem in problems] == [
        ("action_chunk_len", "mismatch"),
        (None, "invalid_file"),
    ]
    assert str(bad / STD_FILE) in problems[1]
    check_checkpoint(bad, overrides={"flow_method": "ode"}).load_policy()


def test_adapters_of_frozen_layers_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    folder = build(tmp_path / "policy", {}, freeze_vision_encoder=False, train_expert_only=False)
    for config in (ActorConfig(lora_rank=2, lora_targets=("fc1",), freeze_vision_backbone=frozen) for frozen in (0, 1)):
        problems = check_checkpoint(folder).option_problems(config)
        assert [problem.flag for problem in problems] == ["lora_targets"] * config.freeze_vision_backbone


def test_options_without_a_meaning_are_refused(folder: Path) -> None:
    config = ActorConfig(lora_rank=2, lora_targets=("vision_proj",), gradient_checkpointing=True)
    problems = checkpoint_option_problems(check_checkpoint(folder), config)
    assert {(p.flag, p.reason) for p in problems} == {
        ("lora_targets", "unknown_name"),
        ("gradient_checkpointing", "no_effect"),
    }


def test_a_folder_is_described(folder: Path) -> None:
    described = describe(folder)
    assert described.trainable and described.facts["family"] == "smolvla"
    assert "hand" in described.facts["image features"] and "2 executed" in described.facts["chunk"]
