"""The parts of the program that need no vLLM; tests/integration/test_vllm_rollout.py runs it whole."""

from __future__ import annotations

import importlib.util
import math
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlvla.models.distributions import sample_by_inverse_cdf
from rlvla.rollout.vllm.process import ENGINE


@pytest.fixture(scope="module")
def engine() -> Any:
    """The program as a module, with vLLM's names."""
    names = {"vllm": ("LLM", "SamplingParams"), "vllm.v1.sample.logits_processor": ("LogitsProcessor",)}
    with pytest.MonkeyPatch.context() as patch:
        for name, classes in names.items():
            module: Any = ModuleType(name)
            for each in classes:
                setattr(module, each, type(each, (), {}))
            module.MoveDirectionality = Enum("MoveDirectionality", ["UNIDIRECTIONAL", "SWAP"])
            patch.setitem(sys.modules, name, module)
        spec = importlib.util.spec_from_file_location("vllm_engine_of_a_test", ENGINE)
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    return loaded


def test_it_samples_as_the_policy_does(engine: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.log_softmax(4 * torch.randn(500, 256, generator=generator), -1)
    uniforms = torch.rand(500, dtype=torch.float64, generator=generator)
    uniforms[:2] = torch.tensor([0.0, 1.0 - 2.0**-53])
    wanted = sample_by_inverse_cdf(log_probs[:, None], uniforms[:, None])[:, 0]
    assert torch.equal(engine.by_inverse_cdf(log_probs, uniforms), wanted)


def request(row: int | None) -> tuple[Any, list[int]]:
    """Parameters of a request, and its tokens so far."""
    return SimpleNamespace(extra_args=None if row is None else {"row": row}), []


def updated(processor: Any, removed: Any = (), added: Any = (), moved: Any = ()) -> None:
    processor.update_state(SimpleNamespace(removed=removed, added=added, moved=moved))


def test_each_row_is_decoded_with_its_own_numbers_wherever_it_is_in_the_batch(engine: Any) -> None:
    """Rows 0 to 3 enter, row 1 leaves, row 3 takes its place, 0 and 2 change places, and row 2 is a token ahead."""
    processor, steps = engine.ChosenByDraws(None, torch.device("cpu"), False), 2
    uniforms = np.random.default_rng(0).random((4, steps))
    engine.DRAWS.begin(4, steps, uniforms.tolist(), 1.3)
    requests = [request(row) for row in range(4)]
    updated(processor, added=[(place, params, None, tokens) for place, (params, tokens) in enumerate(requests)])
    moves = type(processor).update_state.__globals__["MoveDirectionality"]
    updated(processor, removed=[1], moved=[(3, 1, moves.UNIDIRECTIONAL), (0, 2, moves.SWAP)])
    requests[2][1].append(17)
    logits = 3 * torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    chosen = processor.apply(logits.clone())
    log_probs = torch.log_softmax(logits / 1.3, -1)
    for place, (row, step) in enumerate([(2, 1), (3, 0), (0, 0)]):
        drawn = torch.tensor([[uniforms[row, step]]])
        token = int(sample_by_inverse_cdf(log_probs[place : place + 1, None], drawn))
        assert int(chosen[place].argmax()) == token
        assert int(chosen[place].isfinite().sum()) == 1
        assert float(engine.DRAWS.log_probs[row, step]) == pytest.approx(float(log_probs[place, token]), abs=1e-6)


def test_a_request_may_replace_another(engine: Any) -> None:
    processor = engine.ChosenByDraws(None, torch.device("cpu"), False)
    engine.DRAWS.begin(2, 1, None, 1.0)
    (first, tokens), (second, others) = request(0), request(1)
    updated(processor, added=[(0, first, None, tokens)])
    updated(processor, added=[(0, second, None, others)])
    logits = torch.zeros(1, 256)
    logits[0, 5] = 2.0
    assert int(processor.apply(logits).argmax()) == 5
    assert float(engine.DRAWS.log_probs[0, 0]) == 0.0
    assert float(engine.DRAWS.log_probs[1, 0]) == pytest.approx(2 - math.log(255 + math.exp(2)))
    updated(processor, added=[(0, request(None)[0], None, [])])
    assert processor.apply(logits) is logits, "a request that is not ours is left alone"


def test_the_cache_holds_a_batch(engine: Any) -> None:
    """Keys and values, 2 layers, 4 heads of width 8 in bfloat16: 256 bytes a position; blocks of 128 positions."""
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "max_position_embeddings": 500}
    settings = {"config": config, "batch": 3, "positions": 130, "dtype": "bfloat16"}
    assert engine.cache_bytes(settings) == 256 * (3 * 256 + 128)
    assert engine.cache_bytes(settings | {"batch": 1}) == 256 * (512 + 128), "one sequence of the greatest length"
    assert engine.cache_bytes(settings | {"config": config | {"num_key_value_heads": 1}}) == 64 * (3 * 256 + 128)
