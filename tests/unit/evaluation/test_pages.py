"""Short names of policies."""

from __future__ import annotations

import pytest

from rlvla.evaluation.pages import labels, run_name


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("runs/lift/ppo/policy", "lift / ppo"),
        ("runs/lift/ppo/policy/", "lift / ppo"),
        ("/home/me/runs/lift/ppo/best_policy", "lift / ppo (best)"),
        ("runs/ppo/exported/iteration_000040", "ppo (iteration 40)"),
        ("runs/ppo", "ppo"),
        ("org/model", "org / model"),
        ("policy", "policy"),
        ("./runs", "runs"),
        ("", ""),
    ],
)
def test_name_of_a_run(folder: str, name: str) -> None:
    assert run_name(folder) == name


def test_two_of_one_name_keep_their_folders() -> None:
    assert labels(["a/x/ppo/policy", "b/x/ppo/policy", "b/x/sft/policy"]) == {
        "a/x/ppo/policy": "a/x/ppo/policy",
        "b/x/ppo/policy": "b/x/ppo/policy",
        "b/x/sft/policy": "x / sft",
    }
