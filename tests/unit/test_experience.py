"""The two data types."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from rlvla.experience import Experience, Sample
from tests.support.experience import SAMPLES, A, D


def rows(n: int, tokens: int, *, seed: int = 0, **changes: object) -> Experience:
    g = torch.Generator().manual_seed(seed)
    values = {
        "images": torch.randint(0, 256, (n, 1, 4, 4, 3), dtype=torch.uint8, generator=g),
        "proprio": torch.rand(n, 2, generator=g),
        "instructions": [f"{seed}/{i}" for i in range(n)],
        "episode_index": torch.arange(n),
        "trace": {
            "tokens": torch.randint(1, 256, (n, tokens), generator=g),
            "latent": torch.rand(n, 3, 2, generator=g),
        },
        "action_mask": torch.ones(n, tokens, dtype=torch.bool),
        "value_mask": torch.ones(n, tokens, dtype=torch.bool),
        "old_log_probs": torch.rand(n, tokens, generator=g) + 1,
        "returns": torch.rand(n, tokens, generator=g) + 1,
    }
    return Experience(**{**values, **changes})


def test_every_field_has_a_role() -> None:
    assert {f.metadata["role"] for f in fields(Experience)} == {"step", "decision"}
    assert {f.name for f in fields(Experience) if f.metadata["role"] == "decision"} == {
        *("images", "proprio", "instructions", "critic_state", "episode_index", "trace", "reference", "staleness"),
        "row_weights",
    }


def test_rows_of_samples_are_their_decisions_in_order() -> None:
    used = torch.arange(A * D) != 3
    made = Experience.from_samples(SAMPLES, used, first_episode=100)
    assert len(made) == 16 == len(made.images) and made.episode_index.tolist() == (
        [100] * 3 + [101] * 4 + [102] + [103] * 4 + [104] * 4
    )
    last = SAMPLES[0].num_decisions - 1
    assert made.action_mask[last].tolist() == [True] * 4 + [False] * 4, "two of four actions were executed"
    assert made.policy_mask[last].tolist() == [True, True, True, False] + [False] * 4
    for index, part in ((0, SAMPLES[0]), (7, SAMPLES[2])):
        assert torch.equal(made.images[index], part.images[0]) and torch.equal(made.proprio[index], part.proprio[0])
        assert torch.equal(made.action_tokens[index], part.action_tokens[0])
    assert torch.equal(Experience.from_samples(SAMPLES).policy_mask, made.action_mask)
    assert made.advantages is None and made.value_mask is None
    prompted = replace(SAMPLES[2], prompted_instructions=["go on", "stop"])
    assert Experience.from_samples([SAMPLES[2], prompted]).instructions == ["reach the red disc", "go on"]


def test_samples_that_make_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        Experience.from_samples([])
    for other in (replace(SAMPLES[1], proprio=None), replace(SAMPLES[1], trace={})):
        with pytest.raises(ValueError, match="samples of different policies"):
            Experience.from_samples([SAMPLES[0], other])


def test_cat_pads_step_fields_and_stacks_the_rest() -> None:
    a, b = rows(2, 3), rows(1, 5, seed=1, trace={"latent": torch.rand(1, 3, 2)})
    a = a.with_fields(trace={"latent": a.trace["latent"]})  # tokens would have to be of equal number
    both = Experience.cat([a, b])
    assert len(both) == 3 and both.instructions == ["0/0", "0/1", "1/0"]
    assert torch.equal(both.images, torch.cat([a.images, b.images]))
    assert both.action_mask.tolist() == [[True] * 3 + [False] * 2] * 2 + [[True] * 5]
    assert both.action_mask.dtype == torch.bool
    assert torch.equal(both.trace["latent"], torch.cat([a.trace["latent"], b.trace["latent"]]))
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
    for name, value in a.trace.items():
        assert torch.equal(picked.trace[name], value[torch.tensor([2, 0, 2])]), name
    assert picked.advantages is None and torch.equal(picked.action_tokens, picked.trace["tokens"])


def test_cat_undoes_index() -> None:
    a = rows(4, 3)
    parts = [a.index(torch.tensor([0])), a.index(torch.tensor([1, 2, 3]))]
    again = Experience.cat(parts)
    assert torch.equal(again.old_log_probs, a.old_log_probs) and again.instructions == a.instructions
    assert again.trace["tokens"].dtype == torch.int64 and torch.equal(again.action_tokens, a.action_tokens)


def test_to_moves_every_tensor() -> None:
    moved = rows(2, 3).to("meta")
    assert all(
        getattr(moved, f.name).device.type == "meta"
        for f in fields(Experience)
        if isinstance(getattr(moved, f.name), torch.Tensor)
    )
    assert {value.device.type for value in moved.trace.values()} == {"meta"}
    assert moved.instructions == ["0/0", "0/1"]


def test_with_fields_leaves_the_original_alone() -> None:
    a = rows(2, 3)
    b = a.with_fields(values=torch.ones(2, 3))
    assert a.values is None and b.values.sum() == 6 and b.images is a.images


def test_rows_without_a_trace_have_no_tokens() -> None:
    with pytest.raises(KeyError, match="no trace"):
        _ = rows(1, 2, trace=None).action_tokens


# ------------------------------------------------------------------------------------------------ samples
def test_executed_actions_are_those_of_the_mask_of_log_probs() -> None:
    for sample in SAMPLES:
        assert sample.action_mask.shape == sample.log_probs.shape == (sample.num_decisions, A * D)
        for decision in range(sample.num_decisions):
            for column in range(A * D):
                assert sample.action_mask[decision, column] == sample.executed[decision, column // D]
        assert sample.last_action == sample.finish_step - 1


def test_what_the_environment_gave_is_what_was_observed_where_that_was_kept() -> None:
    plain = SAMPLES[0]
    assert torch.equal(plain.env_images[:-1], plain.images) and torch.equal(plain.env_images[-1], plain.last_images)
    vars_of = dict(vars(plain))
    seen = torch.zeros(4, 1, 128, 128, 3, dtype=torch.uint8)
    kept = Sample(**vars_of | {"observed_images": seen, "observed_proprio": torch.arange(8.0).view(4, 2)})
    assert kept.env_images is seen
    with_state = Sample(**vars(kept) | {"state_width": 1})
    assert with_state.env_proprio.tolist() == [[0.0], [2.0], [4.0], [6.0]], "without the state of a machine"
    assert Sample(**vars(kept) | {"observed_proprio": None}).env_proprio is None


def pickled_before_0_2(sample: Sample) -> bytes:
    """As a checkpoint of version 0.1 holds this episode: other names, no actions, observations as they were given."""
    state = dict(vars(sample))
    for name in ("actions", "executed", "observed_images", "observed_proprio"):
        del state[name]
    state |= {"action_mask": sample.action_mask, "action_tokens": state.pop("trace")["tokens"]}
    state["rollout_log_probs"] = state.pop("log_probs")
    names = {
        "step_events": "trace",
        "prompted_instructions": "told",
        "images_flipped_vertically": "rows_from_below",
    }
    state = {names.get(name, name): value for name, value in state.items()}
    old = object.__new__(Sample)
    old.__dict__.update(state)
    return pickle.dumps(old)


@pytest.mark.parametrize("has_proprio", [True, False])
def test_episodes_of_checkpoints_before_0_2_are_read_and_then_prepared(has_proprio: bool) -> None:
    changes = {} if has_proprio else {"proprio": None, "last_proprio": None}
    events = [(frozenset({"near"}), True)]
    changes |= {"step_events": events, "prompted_instructions": list("abcd"), "images_flipped_vertically": True}
    sample = Sample(**vars(SAMPLES[0]) | changes)
    read = pickle.loads(pickled_before_0_2(sample))
    assert torch.equal(read.action_tokens, sample.action_tokens) and torch.equal(read.log_probs, sample.log_probs)
    assert torch.equal(read.executed, sample.executed) and torch.equal(read.action_mask, sample.action_mask)
    assert read.step_events == events and read.decision_instructions == list("abc") and read.last_instruction == "d"
    assert read.images_flipped_vertically

    calls = []

    def prepare(images, proprio):
        calls.append(images)
        return images[..., ::2, ::2, :], None if proprio is None else proprio - 1

    ready = read.prepared(prepare)
    assert len(calls) == 1 and np.array_equal(calls[0], sample.env_images.numpy())
    assert torch.equal(ready.images, sample.images[..., ::2, ::2, :])
    assert torch.equal(ready.last_images, sample.last_images[..., ::2, ::2, :])
    assert torch.equal(ready.env_images, sample.env_images)
    if has_proprio:
        assert torch.equal(ready.proprio, sample.proprio - 1) and torch.equal(
            ready.last_proprio, sample.last_proprio - 1
        )
        assert torch.equal(ready.env_proprio, torch.cat([sample.proprio, sample.last_proprio[None]]))
    else:
        assert ready.proprio is ready.last_proprio is ready.env_proprio is None
    assert ready.prepared(prepare) is ready and len(calls) == 1, "once and for all"


def test_an_episode_of_today_survives_a_checkpoint_and_is_not_prepared_again() -> None:
    again = pickle.loads(pickle.dumps(SAMPLES[0]))
    assert again.prepared(lambda *_: pytest.fail("it was prepared when it was observed")) is again
    for f in fields(Sample):
        value, read = getattr(SAMPLES[0], f.name), getattr(again, f.name)
        assert torch.equal(read, value) if isinstance(value, torch.Tensor) else True, f.name
    assert torch.equal(again.action_tokens, SAMPLES[0].action_tokens)
