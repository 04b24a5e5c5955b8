"""A checkpoint as others publish it, through SFT, reinforcement learning, export and loading again; both variants."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cli.train_ppo_vla import main as train_ppo
from cli.train_sft_vla import main as train_sft
from rlvla.data.reading import read_demonstrations
from rlvla.experience import Experience
from rlvla.models.actor import Actor, ActorConfig
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.models.vla.tiny import build_tiny

UNUSED = "vision_backbone.fused_featurizer.attn_pool.latent"
NOT_PUBLIC = ("model_variant", "use_proprio", "proprio_dim", "image_preprocessing", "action_normalization")


def publish(folder: Path, demos_file: Path, variant: str) -> Path:
    """Two shards, statistics inside config.json among those of another robot, proprio projector in its own file."""
    demos = read_demonstrations(str(demos_file), None)
    build_tiny(
        folder,
        sentences=sorted(set(demos.instructions)),
        dataset_statistics=demos.statistics,
        model_variant=variant,
        action_chunk_len=2 if variant == "oft" else 1,
        action_dim=2,
        vision_dim=16,
        llm_dim=32,
        llm_layers=2,
        use_proprio=variant == "oft",
        proprio_dim=2 if variant == "oft" else None,
    )
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in NOT_PUBLIC}
    action = {"q01": [0.0] * 7, "q99": [1.0] * 7}
    config["norm_stats"] = {"bridge_orig": {"action": action}, **demos.statistics}
    config["hf_llm_id"] = "meta-llama/Llama-2-7b-hf"
    if variant == "autoregressive":
        config["auto_map"] = {"AutoModelForVision2Seq": "openvla/openvla-7b--modeling_prismatic.OpenVLA"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "dataset_statistics.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    proprio = {k.removeprefix("proprio_projector."): v for k, v in tensors.items() if k.startswith("proprio")}
    if proprio:
        torch.save(proprio, folder / "proprio_projector--100_checkpoint.pt")
    names = sorted(name for name in tensors if not name.startswith("proprio"))
    shards = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in (0, 1)}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return folder


def rows(demos_file: Path, proprio: bool) -> Experience:
    demos = read_demonstrations(str(demos_file), None)
    return Experience(
        images=torch.from_numpy(np.stack([images[0] for images in demos.images[:3]])),
        proprio=torch.from_numpy(np.stack([p[0] for p in demos.proprio[:3]])) if proprio else None,
        instructions=demos.instructions[:3],
        trace={"tokens": torch.randint(0, 256, (3, 4 if proprio else 2), generator=torch.Generator().manual_seed(0))},
    )


def log_probs(actor: Actor, batch: Experience) -> torch.Tensor:
    with torch.no_grad():
        return actor.eval()(**actor.score(batch, 1.0), wants=("parameters",))["parameters/log_probs"]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["oft", pytest.param("autoregressive", marks=pytest.mark.nightly)])
def test_published_checkpoint_is_trained_exported_and_loaded(
    tmp_path: Path, demos_file: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlvla.checkpoints import policy_folder as policy_export

    public = publish(tmp_path / "public", demos_file, variant)
    sft = ["--pretrain", str(public), "--demos", str(demos_file), "--unnorm_key", "toy_reach", "--max_epochs", "1"]
    train_sft([*sft, "--save_path", str(tmp_path / "sft"), "--no-use_tensorboard"])
    start = tmp_path / "sft" / "policy"
    assert json.loads((start / "config.json").read_text())["model_variant"] == variant

    batch = rows(demos_file, proprio=variant == "oft")
    scored = {}
    export = policy_export.export_policy

    def remember(engine, folder, *rest, **options):
        """The log-probs of the policy in memory, before it is written."""
        scored[folder] = log_probs(engine.module, batch)
        return export(engine, folder, *rest, **options)

    monkeypatch.setattr("rlvla.trainer.trainer.export_policy", remember)
    for name, flags in {
        "lora": ["--lora_rank", "2", "--lora_targets", "all-linear", "--init_kl_coef", "0.01"],
        "full": ["--advantage_estimator", "grpo", "--n_samples_per_prompt", "2", "--freeze_vision_backbone"],
    }.items():
        run = tmp_path / name
        train_ppo(
            ["--pretrain", str(start), "--save_path", str(run), "--unnorm_key", "toy_reach", "--num_envs", "1"]
            + ["--num_episodes", "4", "--rollout_batch_size", "4" if name == "lora" else "2", "--train_batch_size", "4"]
            + ["--max_steps", "6", "--eval_episodes", "1", "--no-val_before_train", "--no-use_tensorboard"]
            # An entropy bonus moves the policy also when no episode succeeds.
            + ["--actor_learning_rate", "1e-2", "--entropy_loss_coef", "1", *flags]
        )
        policy = run / "policy"
        loaded = Actor.from_pretrained(policy, unnorm_key="toy_reach")
        again = log_probs(loaded, batch)
        assert torch.allclose(again, scored[policy], atol=1e-5 if name == "lora" else 0.0)
        before = Actor.from_pretrained(start, unnorm_key="toy_reach")
        assert not torch.allclose(again, log_probs(before, batch), atol=1e-4), "training must have changed the policy"
        state, old = loaded.vla.state_dict(), before.vla.state_dict()
        assert torch.equal(state[UNUSED], old[UNUSED])
        tower = "vision_backbone.featurizer.blocks.0.attn.qkv.weight"
        assert torch.equal(state[tower], old[tower]) == (name == "full"), "frozen in one run, adapted in the other"
    alone = OpenVLAForActionPrediction.from_pretrained(tmp_path / "lora" / "policy" / "lora_adapter")
    merged = OpenVLAForActionPrediction.from_pretrained(tmp_path / "lora" / "policy")
    assert all(torch.equal(p, merged.state_dict()[name]) for name, p in alone.state_dict().items())


@pytest.mark.parametrize("variant", ["oft", "autoregressive"])
def test_loading_and_saving_a_public_folder_loses_nothing(tmp_path: Path, demos_file: Path, variant: str) -> None:
    public = publish(tmp_path / "public", demos_file, variant)
    (public / "tokenizer.model").write_bytes(b"\x00\x01sentencepiece")
    OpenVLAForActionPrediction.from_pretrained(public).save_pretrained(tmp_path / "out")

    def tensors(folder: Path) -> dict[str, torch.Tensor]:
        return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}

    before, after = tensors(public), tensors(tmp_path / "out")
    assert UNUSED in before and before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) and before[k].dtype == after[k].dtype for k in before)
    config, saved = (json.loads((f / "config.json").read_text()) for f in (public, tmp_path / "out"))
    assert {key: saved[key] for key in config} == config
    assert saved["model_variant"] == variant, "what public files leave open is explicit now"
    assert not (tmp_path / "out" / "dataset_statistics.json").exists()
    for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "preprocessor_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (public / name).read_bytes(), name


def test_adapters_disabled_are_the_start_policy(policy_folder: Path, demos_file: Path) -> None:
    from rlvla.models.reference import ReferenceModel

    actor = Actor.from_pretrained(policy_folder, ActorConfig(lora_rank=2))
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            if ".lora_B" in name:
                parameter.fill_(0.1)
    demos = read_demonstrations(str(demos_file), None)
    batch = Experience(
        images=torch.from_numpy(np.stack([images[0] for images in demos.images[:3]])),
        proprio=torch.from_numpy(np.stack([p[0] for p in demos.proprio[:3]])),
        instructions=demos.instructions[:3],
        trace={"tokens": torch.zeros(3, actor.spec.columns, dtype=torch.int64)},
    )
    shared = ReferenceModel(actor, without_adapters=True)
    copy = ReferenceModel.from_pretrained(policy_folder)
    assert torch.allclose(shared.log_probs(batch, 1.6), copy.log_probs(batch, 1.6), atol=1e-6)
    assert not list(shared.parameters()), "no second copy, and not placed or frozen by others"
    assert any(p.requires_grad for p in actor.parameters())
    moved = actor(**actor.score(batch, 1.6))["log_probs"]
    assert not torch.allclose(moved, copy.log_probs(batch, 1.6), atol=1e-3), "the adapters are on again"
