from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlvla.models.vla.action_tokenizer import ActionTokenizer

DATA = Path(__file__).resolve().parents[3] / "data" / "simplevla"


def test_equals_public_tables():
    table = np.load(DATA / "action_tokenizer.npz")
    tokenizer = ActionTokenizer()
    assert np.array_equal(tokenizer.encode(table["actions"]), table["ids"])
    assert np.allclose(tokenizer.decode(table["ids"]), table["decoded"], atol=1e-10, rtol=0)
    assert np.allclose(tokenizer.decode(table["all_ids"]), table["all_decoded"], atol=1e-10, rtol=0)
    assert np.allclose(tokenizer.bins, table["bins"], atol=1e-10, rtol=0)
    assert np.allclose(tokenizer.bin_centers, table["bin_centers"], atol=1e-10, rtol=0)


def test_known_values():
    assert ActionTokenizer().encode([-1.0, 0.0, 0.25, 1.0]).tolist() == [31999, 31872, 31840, 31744]


@given(st.floats(-1, 1), st.integers(300, 40000))
def test_round_trip_error_is_half_a_bin(action, vocab_size):
    tokenizer = ActionTokenizer(vocab_size)
    token = tokenizer.encode(action)
    assert vocab_size - 256 <= token < vocab_size
    assert abs(tokenizer.decode(token) - action) <= 1 / 255 + 1e-12


@given(st.floats(allow_nan=False))
def test_values_outside_are_clipped(action):
    tokenizer = ActionTokenizer()
    assert tokenizer.encode(action) == tokenizer.encode(np.clip(action, -1, 1))


def test_columns_ids_and_centers_agree():
    tokenizer = ActionTokenizer(1000)
    columns = np.arange(256)
    ids = tokenizer.columns_to_ids(columns)
    assert ids[0] == 744 and ids[-1] == 999
    assert np.array_equal(tokenizer.ids_to_columns(ids), columns)
    assert np.array_equal(tokenizer.decode(ids), tokenizer.column_centers)
    assert torch.equal(tokenizer.ids_to_columns(torch.tensor([744, 999])), torch.tensor([0, 255]))


def test_bad_values_are_refused():
    with pytest.raises(ValueError, match="NaN"):
        ActionTokenizer().encode([0.0, np.nan])
    with pytest.raises(ValueError, match="n_bins is 1"):
        ActionTokenizer(n_bins=1)
