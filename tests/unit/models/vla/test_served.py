"""The decoder that another program runs: a stock Llama with these weights decides as the policy does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlvla.models.actor import Actor
from rlvla.models.config import ActorConfig
from rlvla.models.distributions import pick_tokens
from rlvla.models.families import check_checkpoint
from rlvla.models.policy import undecodable
from rlvla.models.testing import PolicyContract
from tests.support.autoregressive import trained_adapters, write_autoregressive

CASES = PolicyContract()
TEMPERATURE = 1.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_autoregressive(tmp_path_factory.mktemp("autoregressive") / "policy")


@pytest.fixture(scope="module", params=[0, 2], ids=["plain", "adapters"])
def policy(folder: Path, request: pytest.FixtureRequest) -> Any:
    config = ActorConfig(lora_rank=request.param, lora_targets=("all-linear",) if request.param else ("language",))
    return trained_adapters(Actor.from_pretrained(folder, config).eval())


def decode(llama: LlamaForCausalLM, prompt: torch.Tensor, uniforms: torch.Tensor | None, steps: int) -> Any:
    """Tokens and log-probs [K] after one prompt [S, d], without a cache."""
    tokens: list[torch.Tensor] = []
    log_probs = []
    for step in range(steps):
        embeddings = llama.model.embed_tokens(torch.stack(tokens)) if tokens else prompt[:0]
        logits = llama(inputs_embeds=torch.cat([prompt, embeddings])[None]).logits[:, -1:].float()
        drawn = None if uniforms is None else uniforms[None, step : step + 1]
        tokens.append(pick_tokens(logits, TEMPERATURE, drawn)[0, 0])
        log_probs.append(torch.log_softmax(logits[0, 0] / TEMPERATURE, -1)[tokens[-1]])
    return torch.stack(tokens).numpy(), torch.stack(log_probs).numpy()


@pytest.mark.parametrize("greedy", [True, False])
def test_a_stock_llama_decides_as_the_policy_does(policy: Any, greedy: bool) -> None:
    served = policy.token_decoder()
    llama = LlamaForCausalLM(LlamaConfig(**served.config())).eval()
    llama.load_state_dict(dict(served.weights()))
    observed, noise = CASES.prepared(policy), CASES.noise(policy)
    prompts = policy.without_decoder().token_decoder().embed(*observed)
    assert len(set(prompts.lengths)) > 1, "prompts of several lengths"
    wanted = policy.act(*observed, noise=None if greedy else noise, temperature=TEMPERATURE)
    with torch.no_grad():
        decided = [
            decode(llama, prompt[:length], None if greedy else torch.from_numpy(drawn), policy.spec.columns)
            for prompt, length, drawn in zip(prompts.embeddings, prompts.lengths, noise)
        ]
    decision = served.decision(*map(np.stack, zip(*decided)))
    np.testing.assert_array_equal(decision.trace["tokens"], wanted.trace["tokens"])
    np.testing.assert_allclose(decision.log_probs, wanted.log_probs, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(decision.actions, wanted.actions)


def test_its_vocabulary_is_the_action_tokens(policy: Any) -> None:
    served = policy.token_decoder()
    assert served.config()["vocab_size"] == policy.inputs.config.n_action_bins
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert len(served.weights()[name]) == policy.inputs.config.n_action_bins


def test_the_copy_for_prompts_has_no_decoder_and_does_not_change_the_policy(policy: Any) -> None:
    before = sum(p.numel() for p in policy.parameters())
    embedder = policy.without_decoder()
    assert not any("layers" in name or "lm_head" in name for name, _ in embedder.named_parameters())
    assert sum(p.numel() for p in policy.parameters()) == before
    theirs = {p.data_ptr() for p in policy.parameters()}
    assert not any(p.data_ptr() in theirs for p in embedder.parameters())


def test_policies_that_decode_at_once_are_not_served(policy: Any, policy_folder: Path) -> None:
    assert undecodable(policy.spec) is None
    assert "in one pass" in str(undecodable(check_checkpoint(policy_folder).spec))
    assert "continuous actions" in str(undecodable(replace(policy.spec, token_by_token=False, noise="normal")))
