from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.openvla import OpenVLAForActionPrediction

DATA = Path(__file__).resolve().parents[3] / "data" / "simplevla"


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def tiny(tiny_folder) -> OpenVLAForActionPrediction:
    return OpenVLAForActionPrediction.from_pretrained(tiny_folder)


@pytest.fixture(scope="session")
def reference() -> dict[str, np.ndarray]:
    with np.load(DATA / "tiny_oft_model_a.npz") as file:
        return {key: file[key] for key in file.files}


@pytest.fixture(scope="session")
def reference_model(reference) -> OpenVLAForActionPrediction:
    """The public implementation's tiny OFT model; rows of the vocabulary that were not recorded are NaN."""
    config = OpenVLAConfig(
        text_config={
            "vocab_size": 32064,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "pad_token_id": 32000,
        },
        image_sizes=[28, 28],
        timm_model_kwargs=[
            {"embed_dim": 16, "depth": 3, "num_heads": 2},
            {"embed_dim": 24, "depth": 4, "num_heads": 2},
        ],
    )
    state = {key[3:]: torch.from_numpy(value) for key, value in reference.items() if key.startswith("sd/")}
    for rows, name in (("embed", "model.embed_tokens"), ("lm_head", "lm_head")):
        table = torch.full((32064, 32), torch.nan)
        table[torch.from_numpy(reference[f"{rows}_rows"])] = torch.from_numpy(reference[f"{rows}_values"])
        state[f"language_model.{name}.weight"] = table
    model = OpenVLAForActionPrediction(config)
    model.load_state_dict(state)
    return model.eval()
