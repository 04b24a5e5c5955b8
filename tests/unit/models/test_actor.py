"""The policy: sampling, scoring, batching, and LoRA folded into the public checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlvla.experience import Experience
from rlvla.models.actor import Actor, ActorConfig, ActorCritic
from rlvla.models.distributions import sample_by_inverse_cdf
from rlvla.models.lora import MergedWeights
from rlvla.models.reference import ReferenceModel
from rlvla.models.value_models import VALUE_HEAD_FILE, Critic
from rlvla.utils.errors import ConfigError

T = 8  # tokens of a decision of the toy policy


@pytest.fixture(scope="module")
def actor(policy_folder: Path) -> Actor:
    return Actor.from_pretrained(policy_folder).eval()


def observations(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, list[str]]:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (n, 1, 64, 64, 3), dtype=np.uint8)
    names = ["red", "green", "some unheard-of purplish", "blue"]
    instructions = [f"reach the {names[i % len(names)]} disc" for i in range(n)]
    return images, rng.uniform(-1, 1, (n, 2)).astype(np.float32), instructions


def experience(n: int, seed: int = 0) -> Experience:
    images, proprio, instructions = observations(n, seed)
    return Experience(
        images=torch.from_numpy(images),
        proprio=torch.from_numpy(proprio),
        instructions=instructions,
        trace={"tokens": torch.randint(0, 256, (n, T), generator=torch.Generator().manual_seed(seed))},
        action_mask=torch.ones(n, T, dtype=torch.bool),
    )


def test_sampling_frequencies_are_the_probabilities() -> None:
    """Chi-square of 200 000 draws over 6 columns, one of them impossible."""
    p = torch.tensor([0.5, 0.2, 0.15, 0.0, 0.1499, 0.0001])
    n = 200_000
    uniforms = torch.from_numpy(np.random.default_rng(0).random((n, 1)))
    tokens = sample_by_inverse_cdf(p.log().expand(n, 1, 6), uniforms)
    counts = torch.bincount(tokens.flatten(), minlength=6)
    assert counts[3] == 0
    possible = p > 0
    chi_square = float(((counts - n * p)[possible] ** 2 / (n * p)[possible]).sum())
    assert chi_square < 18.5, "the 99.9 % quantile at 4 degrees of freedom"


@pytest.mark.parametrize("u", [0.0, 1.0 - 1e-16, np.nextafter(1.0, 0.0)])
def test_sampling_at_the_ends_of_the_unit_interval(u: float) -> None:
    log_probs = torch.full((1, 1, 256), -np.log(256.0))
    token = int(sample_by_inverse_cdf(log_probs, torch.tensor([[u]], dtype=torch.float64)))
    assert token == (0 if u == 0.0 else 255)
    impossible_ends = torch.tensor([[[-torch.inf, 0.0, -torch.inf]]])
    assert int(sample_by_inverse_cdf(impossible_ends, torch.tensor([[u]], dtype=torch.float64))) == 1


def test_greedy_takes_the_most_likely_tokens(actor: Actor) -> None:
    images, proprio, instructions = observations(3)
    greedy = actor.act(images, proprio, instructions, noise=None, temperature=0.5)
    with torch.no_grad():
        table = actor(**actor.score(experience(3), 1.0), wants=("parameters",))["parameters/log_probs"]
    assert np.array_equal(greedy.trace["tokens"], table.argmax(-1).numpy())
    assert greedy.trace["tokens"].dtype == np.int64 and greedy.actions.shape == (3, 4, 2)


def test_sampling_follows_the_uniforms_of_each_row(actor: Actor) -> None:
    images, proprio, instructions = observations(4)
    uniforms = np.random.default_rng(1).random((4, T))
    batch = actor.act(images, proprio, instructions, noise=uniforms, temperature=1.7)
    again = actor.act(images, proprio, instructions, noise=uniforms, temperature=1.7)
    assert np.array_equal(batch.trace["tokens"], again.trace["tokens"])
    with torch.no_grad():
        rows = experience(4).with_fields(trace={"tokens": torch.from_numpy(batch.trace["tokens"])})
        table = actor(**actor.score(rows, 1.7), wants=("parameters",))["parameters/log_probs"].double().exp().cumsum(-1)
    chosen = torch.from_numpy(batch.trace["tokens"]).unsqueeze(-1)
    upper = table.gather(-1, chosen).squeeze(-1).numpy()
    lower = torch.where(chosen > 0, table.gather(-1, (chosen - 1).clamp_min(0)), 0.0).squeeze(-1).numpy()
    assert (lower - 1e-5 <= uniforms).all() and (uniforms <= upper + 1e-5).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_log_probs_of_sampling_and_of_scoring_agree(actor: Actor, temperature: float) -> None:
    images, proprio, instructions = observations(3)
    uniforms = np.random.default_rng(2).random((3, T))
    batch = actor.act(images, proprio, instructions, noise=uniforms, temperature=temperature)
    rows = experience(3).with_fields(trace={"tokens": torch.from_numpy(batch.trace["tokens"])})
    with torch.no_grad():
        scores = actor(**actor.score(rows, temperature))
        log_probs, entropy = scores["log_probs"], scores["entropy"]
        at_one = actor(**actor.score(rows, 1.0), wants=("parameters",))["parameters/log_probs"]
    np.testing.assert_allclose(batch.log_probs, log_probs.numpy(), atol=1e-5)
    tempered = torch.log_softmax(at_one / temperature, -1)
    np.testing.assert_allclose(
        log_probs.numpy(), tempered.gather(-1, rows.action_tokens.unsqueeze(-1)).squeeze(-1).numpy(), atol=1e-5
    )
    np.testing.assert_allclose(entropy.numpy(), -(tempered.exp() * tempered).sum(-1).numpy(), atol=1e-4)


def test_mixed_prompts_in_a_batch_equal_single_rows(actor: Actor) -> None:
    rows = experience(4)
    assert len({len(actor.inputs.encode_prompt(text)) for text in rows.instructions}) > 1
    with torch.no_grad():
        every = [actor(**actor.score(rows, 1.0), wants=("parameters",))]
        every += [actor(**actor.score(rows.index(torch.tensor([i])), 1.0), wants=("parameters",)) for i in range(4)]
    together, *alone = (scores["parameters/log_probs"] for scores in every)
    assert torch.allclose(together, torch.cat(alone), atol=1e-4)


def test_the_instruction_and_the_image_matter(actor: Actor) -> None:
    rows = experience(2).index(torch.tensor([0, 0]))
    with torch.no_grad():
        base = actor(**actor.score(rows, 1.0))["log_probs"]
        other_text = rows.with_fields(instructions=[rows.instructions[0], "reach the blue disc"])
        moved = actor(**actor.score(other_text, 1.0))["log_probs"]
        other_image = rows.with_fields(images=torch.stack([rows.images[0], 255 - rows.images[0]]))
        scored = actor(**actor.score(other_image, 1.0))["log_probs"]
    for changed in (moved, scored):
        assert torch.allclose(changed[0], base[0], atol=1e-5)
        assert not torch.allclose(changed[1], base[1], atol=1e-4)


def test_actions_are_those_of_the_processor(actor: Actor) -> None:
    images, proprio, instructions = observations(2)
    batch = actor.act(images, proprio, instructions, noise=None)
    again = actor.inputs.encode_actions(batch.actions)
    assert np.array_equal(again, batch.trace["tokens"])


def test_saving_and_loading_changes_nothing(actor: Actor, tmp_path: Path) -> None:
    actor.save_pretrained(tmp_path / "copy")
    copy = Actor.from_pretrained(tmp_path / "copy").eval()
    rows = experience(2)
    with torch.no_grad():
        assert torch.equal(actor(**actor.score(rows, 1.0))["log_probs"], copy(**copy.score(rows, 1.0))["log_probs"])


def test_unknown_statistics_key(policy_folder: Path) -> None:
    with pytest.raises(ConfigError, match="bridge"):
        Actor.from_pretrained(policy_folder, unnorm_key="bridge")


# ------------------------------------------------------------------------------------------------- LoRA
@pytest.fixture
def adapted(policy_folder: Path) -> Actor:
    """A LoRA policy whose adapters do something."""
    actor = Actor.from_pretrained(policy_folder, ActorConfig(lora_rank=3, lora_alpha=12)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0.0, 0.1, generator=generator)
    return actor


def test_lora_starts_as_the_policy_itself(actor: Actor, policy_folder: Path) -> None:
    fresh = Actor.from_pretrained(policy_folder, ActorConfig(lora_rank=3)).eval()
    rows = experience(2)
    with torch.no_grad():
        assert torch.allclose(
            fresh(**fresh.score(rows, 1.0))["log_probs"], actor(**actor.score(rows, 1.0))["log_probs"], atol=1e-6
        )


def test_dropout_of_adapters_acts_in_training_mode_only(adapted: Actor, policy_folder: Path) -> None:
    """So rollouts, evaluations and log-probs of a policy do not change by it."""
    dropping = Actor.from_pretrained(policy_folder, ActorConfig(lora_rank=3, lora_alpha=12, lora_dropout=0.5))
    dropping.load_state_dict(adapted.state_dict())
    rows = experience(2)

    def log_probs(actor: Actor) -> torch.Tensor:
        with torch.no_grad():
            return actor(**actor.score(rows, 1.0))["log_probs"]

    wanted = log_probs(adapted)
    assert torch.equal(log_probs(dropping.eval()), wanted)
    assert not torch.allclose(log_probs(dropping.train()), wanted, atol=1e-4)


def test_lora_trains_adapters_of_the_language_model_only(adapted: Actor) -> None:
    trainable = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert trainable and all(".lora_" in name and "language_model" in name for name in trainable)
    kinds = {name.split(".lora_")[0].rsplit(".", 1)[1] for name in trainable}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_lora_is_saved_merged_in_the_public_format(
    adapted: Actor, actor: Actor, policy_folder: Path, tmp_path: Path
) -> None:
    adapted.save_pretrained(tmp_path / "merged")
    merged = Actor.from_pretrained(tmp_path / "merged").eval()
    assert merged.state_dict().keys() == actor.state_dict().keys()
    assert {p.name for p in (tmp_path / "merged").iterdir()} >= {
        p.name for p in policy_folder.iterdir() if p.name != "rlvla_environment.json"
    }
    rows = experience(3)
    with torch.no_grad():
        wanted = adapted(**adapted.score(rows, 1.0), wants=("parameters",))["parameters/log_probs"]
        got = merged(**merged.score(rows, 1.0), wants=("parameters",))["parameters/log_probs"]
        before = actor(**actor.score(rows, 1.0), wants=("parameters",))["parameters/log_probs"]
    assert torch.allclose(got, wanted, atol=1e-5)
    assert not torch.allclose(wanted, before, atol=1e-2), "the adapters must matter for this test to mean anything"


def test_merging_is_the_formula() -> None:
    w, a, b = torch.randn(4, 3), torch.randn(2, 3), torch.randn(4, 2)
    state = {
        "base_model.model.x.q_proj.base_layer.weight": w,
        "base_model.model.x.q_proj.lora_A.default.weight": a,
        "base_model.model.x.q_proj.lora_B.default.weight": b,
        "base_model.model.x.norm.weight": torch.ones(3),
    }
    merged = MergedWeights(state, 0.5)
    assert merged.keys() == {"x.q_proj.weight", "x.norm.weight"}
    assert torch.allclose(merged["x.q_proj.weight"], w + 0.5 * b @ a, atol=1e-6)


def test_bfloat16_weights_are_merged_in_float32_and_rounded_once() -> None:
    w, a, b = (torch.randn(*shape).bfloat16() for shape in ((64, 48), (4, 48), (64, 4)))
    stem = "base_model.model.x."
    state = {f"{stem}base_layer.weight": w, f"{stem}lora_A.default.weight": a, f"{stem}lora_B.default.weight": b}
    exact = w.float() + 0.01 * b.float() @ a.float()
    merged = MergedWeights(state, 0.01)["x.weight"]
    assert merged.dtype == torch.bfloat16 and torch.equal(merged, exact.bfloat16())
    assert not torch.equal(merged, w + 0.01 * b @ a), "what bfloat16 would give"


def test_merging_moves_greedy_actions_no_more_than_bfloat16_does(policy_folder: Path, tmp_path: Path) -> None:
    """Adapters of 3 % of the weights; distances in bins to the policy in float32, over 256 random observations."""
    Actor.from_pretrained(policy_folder).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    config, generator = ActorConfig(lora_rank=4, lora_alpha=4), torch.Generator().manual_seed(0)
    adapted, exact = (
        Actor.from_pretrained(tmp_path / "base", config).to(dtype).eval() for dtype in (torch.bfloat16, torch.float32)
    )
    with torch.no_grad():
        for layer in (module for module in adapted.modules() if hasattr(module, "lora_A")):
            down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            up.normal_(generator=generator)
            up *= 0.03 * layer.base_layer.weight.float().std() / (up.float() @ down.float()).std()
    exact.load_state_dict(adapted.state_dict())
    adapted.save_pretrained(tmp_path / "merged")
    merged, base = (Actor.from_pretrained(tmp_path / name, dtype=torch.bfloat16).eval() for name in ("merged", "base"))
    images, proprio, instructions = observations(256)

    def bins(actor: Actor) -> np.ndarray:
        return actor.act(*actor.prepare(images, proprio), instructions, noise=None, temperature=1.0).trace["tokens"]

    distances = [float(np.abs(bins(actor) - bins(exact)).mean()) for actor in (adapted, merged, base)]
    assert max(distances[:2]) < distances[2] / 2, distances  # of the order of rounding, with or without a merge


def test_gradient_checkpointing_changes_memory_not_gradients(policy_folder: Path) -> None:
    rows, grads = experience(2), []
    for on in (False, True):
        actor = Actor.from_pretrained(policy_folder, ActorConfig(gradient_checkpointing=on)).train()
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        layer = next(m for name, m in actor.named_modules() if name.endswith("layers.0.self_attn.q_proj"))
        layer.register_forward_hook(count)
        actor(**actor.score(rows, 1.0))["log_probs"].sum().backward()
        assert calls == (2 if on else 1), "with checkpointing the forward pass runs again during backward"
        grads.append({name: p.grad for name, p in actor.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.allclose(grads[0][name], grads[1][name], atol=1e-5) for name in grads[0])


# ------------------------------------------------------------------------------------------- reference
def test_reference_is_frozen_and_scores_like_the_actor(actor: Actor, policy_folder: Path) -> None:
    reference = ReferenceModel.from_pretrained(policy_folder)
    rows = experience(2)
    assert not any(p.requires_grad for p in reference.parameters())
    with torch.no_grad():
        assert torch.equal(reference.log_probs(rows, 1.3), actor(**actor.score(rows, 1.3))["log_probs"])


def test_tokens_of_a_dimension_that_never_moved_are_not_effective(tmp_path: Path) -> None:
    from rlvla.models.vla.tiny import build_tiny

    entry = {"q01": [-1.0, 0.0, -1.0], "q99": [1.0, 0.0, 1.0], "mask": [True, True, False]}  # the last is a gripper
    folder = build_tiny(
        tmp_path / "tiny",
        sentences=["lift the cube"],
        dataset_statistics={"x": {"action": entry}},
        action_chunk_len=2,
        action_dim=3,
    )
    actor = Actor.from_pretrained(folder)
    assert actor.inputs.effective_tokens.tolist() == [True, False, True] * 2


# ------------------------------------------------------------------------- a value head on the same network
def shared(folder: Path, **config: int) -> ActorCritic:
    model = ActorCritic.from_pretrained(folder, ActorConfig(**config))
    torch.nn.init.normal_(model.value_head.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    torch.nn.init.constant_(model.value_head.bias, 0.2)
    return model.eval()


@torch.no_grad()
def test_it_is_the_actor_and_the_critic_of_the_same_weights(policy_folder: Path, rows: Experience) -> None:
    model, actor, critic = (
        shared(policy_folder),
        Actor.from_pretrained(policy_folder).eval(),
        Critic.from_pretrained(policy_folder).eval(),
    )
    critic.head.load_state_dict(model.value_head.state_dict())
    inputs = model.score(rows, 1.3)
    expected, values = actor(**inputs), critic(**critic.score(rows))
    assert float(values.abs().max()) > 0.1
    for wants in (("log_probs", "entropy"), ("log_probs", "entropy", "parameters", "values")):
        scores = model(**inputs, wants=wants)
        assert torch.equal(scores["log_probs"], expected["log_probs"])
        assert torch.equal(scores["entropy"], expected["entropy"])
    every = actor(**inputs, wants=("parameters",))["parameters/log_probs"]
    assert torch.equal(scores["parameters/log_probs"], every) and torch.equal(scores["values"], values)
    assert torch.equal(model(**model.score_values(rows))["values"], values)
    unplayed = model(**model.score_values(rows.with_fields(trace=None)))["values"]
    assert torch.equal(unplayed[:, 0], values[:, 0])


def test_a_new_value_head_is_zero_and_is_trained_with_adapters(policy_folder: Path, rows: Experience) -> None:
    model = ActorCritic.from_pretrained(policy_folder, ActorConfig(lora_rank=2))
    values = model(**model.score(rows, 1.0), wants=("log_probs", "values"))["values"]
    assert values.shape == (3, T) and values.dtype == torch.float32 and not values.any()
    (values - 1).square().mean().backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name or name.startswith("value_head.") for name in trained)
    assert float(model.value_head.bias.grad.abs()) > 0


@pytest.mark.parametrize("config", [{}, {"lora_rank": 2}], ids=["all weights", "adapters"])
def test_the_value_head_is_not_saved(
    policy_folder: Path, rows: Experience, tmp_path: Path, config: dict[str, int]
) -> None:
    model = shared(policy_folder, **config)
    model.save_pretrained(tmp_path / "policy")
    assert not (tmp_path / "policy" / VALUE_HEAD_FILE).exists()
    exported, start = (load_file(folder / "model.safetensors") for folder in (tmp_path / "policy", policy_folder))
    assert exported.keys() == start.keys()
    actor = Actor.from_pretrained(tmp_path / "policy").eval()
    with torch.no_grad():
        assert torch.allclose(
            actor(**actor.score(rows, 1.0))["log_probs"], model(**model.score(rows, 1.0))["log_probs"], atol=1e-6
        )
