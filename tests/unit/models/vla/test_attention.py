"""The flash kernel's packing, against torch's attention, with a stand-in for the package."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.decoder import Attention, require_flash_attention
from rlvla.utils.errors import ConfigError


def slow_flash(q, k, v, causal=False):
    """[B, tokens, heads, d]; the causal mask is aligned to the end, as flash-attn documents it."""
    reads, length = q.shape[1], k.shape[1]
    mask = torch.ones(reads, length, dtype=torch.bool).tril(length - reads) if causal else None
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask)
    return out.transpose(1, 2)


def slow_packed(q, k, v, starts_q, starts_k, longest_q, longest_k, causal=False):
    attended = []
    for i in range(len(starts_q) - 1):
        rows, keys = slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])
        assert rows.stop - rows.start <= longest_q and keys.stop - keys.start <= longest_k
        attended.append(slow_flash(q[None, rows], k[None, keys], v[None, keys], causal)[0])
    return torch.cat(attended)


@pytest.fixture
def _flash(monkeypatch):
    package = SimpleNamespace(flash_attn_func=slow_flash, flash_attn_varlen_func=slow_packed)
    monkeypatch.setitem(sys.modules, "flash_attn", package)


@pytest.mark.usefixtures("_flash")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("all_positions", [False, True])
def test_flash_attention_equals_sdpa(causal, padded, all_positions):
    torch.manual_seed(0)
    key, value = torch.randn(2, 3, 9, 4), torch.randn(2, 3, 9, 4)
    lengths = torch.tensor([9, 6]) if padded else None
    last = lengths[:, None] if padded else torch.full((2, 1), 9)
    read = None if all_positions else last - 3 + torch.arange(3)
    query = torch.randn(2, 3, 9 if all_positions else 3, 4)
    outputs = [Attention(causal, lengths, kind)(query, key, value, read) for kind in ("sdpa", "flash_attention_2")]
    real = torch.arange(query.shape[2]) < (lengths[:, None] if padded and all_positions else 99)
    difference = (outputs[0] - outputs[1]).abs().amax((1, 3))
    assert difference[real.expand_as(difference)].max() < 1e-5


def test_a_kernel_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ConfigError, match="flash-attn package"):
        require_flash_attention()


@pytest.mark.usefixtures("_flash")
@pytest.mark.parametrize("variant", ["oft", "autoregressive"])
@torch.no_grad()
def test_the_whole_model_is_the_same_with_either_kernel(tmp_path, statistics, variant):
    from rlvla.models.vla.openvla import OpenVLAForActionPrediction
    from rlvla.models.vla.tiny import build_tiny

    chunk = {"oft": 2, "autoregressive": 1}[variant]
    folder = build_tiny(
        tmp_path,
        sentences=["go"],
        dataset_statistics=statistics,
        image_size=16,
        model_variant=variant,
        action_chunk_len=chunk,
    )
    model = OpenVLAForActionPrediction.from_pretrained(folder)
    ids = torch.tensor([[1, 5, 6, 3], [0, 0, 1, 3]])
    pixels, tokens = torch.randn(2, 6, 16, 16), torch.randint(260, 300, (2, 7 * chunk))
    expected = model.action_logits(ids, (ids > 0).long(), pixels, None, tokens)
    model.set_attention("flash_attention_2")
    assert torch.allclose(model.action_logits(ids, (ids > 0).long(), pixels, None, tokens), expected, atol=1e-5)
    with pytest.raises(ConfigError, match="'eager' is unknown"):
        model.set_attention("eager")


def test_kernels_in_the_configuration_are_ignored():
    """The kernel is the machine's affair, not the checkpoint's."""
    assert "attn_implementation" not in OpenVLAConfig().to_dict()
