"""The two data types."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from rlvla.experience import Experience


def rows(n: int, tokens: int, *, seed: int = 0, **changes: object) -> Experience:
    g = torch.Generator().manual_seed(seed)
    values = {
        "images": torch.randint(0, 256, (n, 1, 4, 4, 3), dtype=torch.uint8, generator=g),
        "proprio": torch.rand(n, 2, generator=g),
        "instructions": [f"{seed}/{i}" for i in range(n)],
        "episode_index": torch.arange(n),
        "action_tokens": torch.randint(1, 256, (n, tokens), generator=g),
        "action_mask": torch.ones(n, tokens, dtype=torch.bool),
        "value_mask": torch.ones(n, tokens, dtype=torch.bool),
        "old_log_probs": torch.rand(n, tokens, generator=g) + 1,
        "returns": torch.rand(n, tokens, generator=g) + 1,
    }
    return Experience(**{**values, **changes})


def test_every_field_has_a_role() -> None:
    assert {f.metadata["role"] for f in fields(Experience)} == {"step", "episode"}
    assert {f.name for f in fields(Experience) if f.metadata["role"] == "episode"} == {
        *("images", "proprio", "instructions", "episode_index")
    }


def test_cat_pads_step_fields_and_stacks_the_rest() -> None:
    a, b = rows(2, 3), rows(1, 5, seed=1)
    both = Experience.cat([a, b])
    assert len(both) == 3 and both.instructions == ["0/0", "0/1", "1/0"]
    assert torch.equal(both.images, torch.cat([a.images, b.images]))
    assert both.action_mask.tolist() == [[True] * 3 + [False] * 2] * 2 + [[True] * 5]
    assert both.action_mask.dtype == torch.bool and both.action_tokens.dtype == torch.int64
    assert torch.equal(both.returns[:2, :3], a.returns) and not both.returns[:2, 3:].any()
    assert both.values is None


def test_cat_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="nothing to stack"):
        Experience.cat([])
    with pytest.raises(ValueError, match="'values' is present in some parts only"):
        Experience.cat([rows(1, 2), rows(1, 2, values=torch.zeros(1, 2))])


def test_index_picks_rows_of_every_field_in_order() -> None:
    a = rows(4, 3)
    picked = a.index(torch.tensor([2, 0, 2]))
    assert picked.instructions == ["0/2", "0/0", "0/2"]
    for f in fields(Experience):
        value = getattr(a, f.name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(picked, f.name), value[torch.tensor([2, 0, 2])]), f.name
    assert picked.advantages is None


def test_cat_undoes_index() -> None:
    a = rows(4, 3)
    parts = [a.index(torch.tensor([0])), a.index(torch.tensor([1, 2, 3]))]
    again = Experience.cat(parts)
    assert torch.equal(again.old_log_probs, a.old_log_probs) and again.instructions == a.instructions


def test_to_moves_every_tensor() -> None:
    moved = rows(2, 3).to("meta")
    assert all(
        getattr(moved, f.name).device.type == "meta"
        for f in fields(Experience)
        if isinstance(getattr(moved, f.name), torch.Tensor)
    )
    assert moved.instructions == ["0/0", "0/1"]


def test_with_fields_leaves_the_original_alone() -> None:
    a = rows(2, 3)
    b = a.with_fields(values=torch.ones(2, 3))
    assert a.values is None and b.values.sum() == 6 and b.images is a.images
