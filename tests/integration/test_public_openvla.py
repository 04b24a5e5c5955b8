"""OpenVLA-OFT's own code on folders written here, and folders written by it here (transformers 4.40, peft 0.11)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlvla.models.actor import Actor, ActorConfig
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.inputs import VLAInputs
from rlvla.models.vla.openvla import OpenVLAForActionPrediction
from rlvla.models.vla.tiny import build_tiny, initialize

ROOT = Path(__file__).resolve().parents[2]
SENTENCES = ["lift the red cube", "put the yellow bowl on the wooden plate"]
RANGES = {"q01": [-1.0] * 7, "q99": [0.5] * 7, "min": [-1.1] * 7, "max": [0.6] * 7}
STATISTICS = {"suite": {"action": {**RANGES, "mask": [True] * 6 + [False]}, "proprio": RANGES}}
# Both compute in float32; the largest difference seen was 3e-6.
TOLERANCE = 1e-4

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python() -> str:
    """The interpreter of the public code; skips where there is none."""
    path = Path(os.environ.get("RLVLA_OPENVLA_PYTHON") or ROOT / ".venv-openvla" / "bin" / "python")
    if not path.is_file():
        pytest.skip(f"no {path}: make it with examples/scripts/install_openvla.sh, or set RLVLA_OPENVLA_PYTHON")
    return str(path)


@pytest.fixture
def public(python: str, tmp_path: Path) -> Callable[..., dict[str, Tensor]]:
    """Runs `tests/support/public_openvla.py`; see there."""

    def run(mode: str, folder: Path, inputs: dict[str, Tensor], *options: str) -> dict[str, Tensor]:
        save_file(inputs, tmp_path / "inputs.safetensors")
        output = tmp_path / "outputs.safetensors"
        script = str(ROOT / "tests" / "support" / "public_openvla.py")
        command = [python, script, mode, str(folder), str(tmp_path / "inputs.safetensors"), str(output), *options]
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return load_file(output)

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    sizes = {"image_size": 32, "num_images_in_input": 2, "use_proprio": True, "proprio_dim": 7}
    return build_tiny(tmp_path / "tiny", sentences=SENTENCES, dataset_statistics=STATISTICS, **sizes)


def inputs_of(folder: Path) -> dict[str, Tensor]:
    inputs, generator = VLAInputs.from_pretrained(folder), torch.Generator().manual_seed(1)
    ids, mask = inputs.collate_prompts(SENTENCES)
    images = torch.randint(0, 256, (2, 2, 32, 32, 3), dtype=torch.uint8, generator=generator)
    proprio = torch.rand(2, 7, generator=generator) * 2 - 1
    return {"ids": ids, "mask": mask.long(), "pixels": inputs.pixel_values(images), "proprio": proprio}


@torch.no_grad()
def logits_of(folder: Path, inputs: dict[str, Tensor]) -> Tensor:
    model = OpenVLAForActionPrediction.from_pretrained(folder)
    return model.action_logits(inputs["ids"], inputs["mask"], inputs["pixels"], inputs["proprio"])


def difference(theirs: dict[str, Tensor], ours: Tensor, folder: Path) -> float:
    """The largest difference of the logits of the action tokens."""
    config = OpenVLAForActionPrediction.from_pretrained(folder).config
    last = config.base_vocab_size
    gap = float((theirs["logits"][..., last - config.n_action_bins : last] - ours).abs().max())
    print(f"largest difference of logits: {gap:.1e}, of {float(ours.abs().max()):.1f}")
    return gap


def test_the_tiny_folder_is_read(public, tiny: Path) -> None:
    inputs = inputs_of(tiny)
    prompt = "In: What action should the robot take to lift the red cube?\nOut:"
    theirs = public("predict", tiny, inputs, "--sentences", prompt, SENTENCES[1])
    assert difference(theirs, logits_of(tiny, inputs), tiny) < TOLERANCE
    tokenizer = VLAInputs.from_pretrained(tiny).tokenizer
    for number, sentence in enumerate((prompt, SENTENCES[1])):
        assert theirs[f"ids{number}"].tolist() == tokenizer(sentence).input_ids


def test_actions_with_the_vocabulary_of_llama(public, tmp_path: Path) -> None:
    tower = {"patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}
    config = OpenVLAConfig(
        text_config={
            **{"vocab_size": 32064, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "pad_token_id": 32000},
        },
        timm_model_ids=["tiny_dinov2", "tiny_siglip"],
        image_sizes=[32, 32],
        timm_model_kwargs=[
            {**tower, "init_values": 1.0, "no_embed_class": True},
            {**tower, "class_token": False, "global_pool": "map"},
        ],
        use_proprio=True,
        proprio_dim=7,
    )
    model = OpenVLAForActionPrediction(config)
    initialize(model, torch.Generator().manual_seed(0))
    model.dataset_statistics = STATISTICS
    model.save_pretrained(tmp_path / "llama")
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 29000, (2, 9), generator=generator)
    ids[:, 0], ids[:, -1] = 1, 29871
    pixels, proprio = torch.randn(2, 12, 32, 32, generator=generator), torch.rand(2, 7, generator=generator)
    inputs = {"ids": ids, "mask": torch.ones_like(ids), "pixels": pixels, "proprio": proprio}
    theirs = public("predict", tmp_path / "llama", inputs)
    ours = logits_of(tmp_path / "llama", inputs)
    assert difference(theirs, ours, tmp_path / "llama") < TOLERANCE
    centers = torch.linspace(-1, 1, 256, dtype=torch.float64).unfold(0, 2, 1).mean(-1)
    normalized = centers[(255 - ours.argmax(-1)).clamp(0, 254)].view(2, 8, 7)
    # Logits of the other 31,808 ids are usually lower, but a random model may prefer one of them.
    same = theirs["logits"].argmax(-1) >= 31744
    actions = normalized.clone()
    actions[..., :6] = 0.5 * (normalized[..., :6] + 1) * (1.5 + 1e-8) - 1.0
    assert same.any()
    assert torch.allclose(theirs["actions"].view(2, -1)[same], actions.view(2, -1)[same], atol=1e-7)


def test_an_adapter_trained_here_is_merged_by_peft(public, tiny: Path, tmp_path: Path) -> None:
    actor = Actor.from_pretrained(tiny, ActorConfig(lora_rank=3, lora_alpha=6, lora_targets=("all-linear",)))
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            if ".lora_" in name and "proprio" not in name:
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    actor.save_pretrained(tmp_path / "trained")
    inputs = inputs_of(tiny)
    theirs = public("merge", tiny, inputs, "--folder", str(tmp_path / "trained" / "lora_adapter"))
    ours = logits_of(tmp_path / "trained", inputs)
    assert (ours - logits_of(tiny, inputs)).abs().max() > 0.1
    assert difference(theirs, ours, tiny) < TOLERANCE


@pytest.mark.parametrize("film", [False, True], ids=["no FiLM", "FiLM"])
def test_a_folder_fine_tuned_there_is_read_and_written_again(public, tiny: Path, tmp_path: Path, film: bool) -> None:
    inputs, options = inputs_of(tiny), ["--film"] if film else []
    theirs = public("finetune", tiny, inputs, "--folder", str(tmp_path / "run"), *options)
    for kind in ("unmerged", "merged"):
        ours = logits_of(tmp_path / "run" / kind, inputs)
        assert (ours - logits_of(tiny, inputs)).abs().max() > 0.1
        assert difference(theirs, ours, tmp_path / "run" / kind) < TOLERANCE, kind
    OpenVLAForActionPrediction.from_pretrained(tmp_path / "run" / "unmerged").save_pretrained(tmp_path / "again")
    back = public("predict", tmp_path / "again", inputs, *options)
    assert (back["logits"] - theirs["logits"]).abs().max() < TOLERANCE
