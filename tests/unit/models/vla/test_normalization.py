from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlvla.models.vla.normalization import libero_gripper, normalize_actions, normalize_proprio, unnormalize_actions
from rlvla.utils.errors import ConfigError

DATA = Path(__file__).resolve().parents[3] / "data" / "simplevla"


@pytest.fixture(scope="module")
def libero():
    return json.loads((DATA / "dataset_statistics_libero_spatial.json").read_text())["libero_spatial_no_noops"]


def test_tiny_oft_actions_equal_public_implementation(reference, libero):
    from rlvla.models.vla.action_tokenizer import ActionTokenizer

    normalized = ActionTokenizer().decode(reference["greedy_ids"]).reshape(3, 8, 7)
    assert np.allclose(unnormalize_actions(normalized, libero), reference["actions_unnorm"], atol=1e-7)


def test_masked_out_gripper_passes(libero):
    action = unnormalize_actions(np.full(7, 0.5), libero)
    assert action[6] == 0.5
    assert action[0] == pytest.approx(0.75 * (0.9375 + 0.7454732114) - 0.7454732114, abs=1e-6)


@pytest.mark.parametrize("mode", ["q99", "bounds"])
def test_round_trip(libero, mode):
    stats = libero["action"]
    low, high = (np.array(stats[key]) for key in (("q01", "q99") if mode == "q99" else ("min", "max")))
    actions = np.random.default_rng(0).uniform(low, high, (50, 7))
    normalized = normalize_actions(actions, libero, mode=mode)
    assert np.abs(normalized[:, :6]).max() <= 1.0
    assert np.array_equal(normalized[:, 6], actions[:, 6])
    assert np.allclose(unnormalize_actions(normalized, libero, mode=mode), actions, atol=1e-6)


def test_modes_use_different_ranges(libero):
    assert not np.allclose(
        unnormalize_actions(np.zeros(7), libero), unnormalize_actions(np.zeros(7), libero, mode="bounds"), atol=1e-3
    )


def test_constant_dimension_stays_constant():
    stats = {"q01": [2.0, -1.0], "q99": [2.0, 1.0]}
    normalized = normalize_actions([[2.0, 0.3]], stats)
    assert normalized[0, 0] == 0.0
    assert np.allclose(unnormalize_actions(normalized, stats), [[2.0, 0.3]], atol=1e-6)


def test_proprio_is_clipped(libero):
    stats = libero["proprio"]
    low, high = np.array(stats["q01"]), np.array(stats["q99"])
    assert np.allclose(
        normalize_proprio([low, (low + high) / 2, high], libero), [[-1.0] * 8, [0.0] * 8, [1.0] * 8], atol=1e-5
    )
    beyond = normalize_proprio(high + 1.0, libero)
    assert beyond.dtype == np.float32 and np.array_equal(beyond, np.ones(8))


def test_gripper_equals_public_implementation():
    table = np.load(DATA / "gripper_post.npz")
    assert np.array_equal(libero_gripper(table["action"]), table["env_action"])
    assert libero_gripper([0.5])[0] == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: unnormalize_actions(np.zeros(7), s, mode="max"), "mode 'max' is unknown"),
        (lambda s: unnormalize_actions(np.zeros(5), s), "7 dimensions .* but the data have 5"),
        (lambda s: unnormalize_actions(np.zeros(7), {"min": [0] * 7}), r"lack \['q01', 'q99'\]"),
        (lambda s: normalize_proprio(np.zeros(6), s), "8 dimensions .* but the data have 6"),
    ],
)
def test_bad_statistics_are_named(libero, call, message):
    with pytest.raises(ConfigError, match=message):
        call(libero)
