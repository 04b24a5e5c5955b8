"""The command that continues a recipe."""

from __future__ import annotations

import pytest

from rlvla.recipes.runner import command_again


@pytest.mark.parametrize(
    ("typed", "again"),
    [
        ("run_recipe.py r.yaml --output runs/x", "run_recipe.py r.yaml --output runs/x"),
        ("run_recipe.py r.yaml --variant --set --", "run_recipe.py r.yaml"),
        ("run_recipe.py r.yaml --set -- --lora_rank 4", "run_recipe.py r.yaml -- --lora_rank 4"),
        ("run_recipe.py --variant a b --set all.seed=1 --", "run_recipe.py --variant a b --set all.seed=1"),
        ("run_recipe.py --from sft r.yaml --from=rl -- --from x", "run_recipe.py r.yaml -- --from x"),
    ],
)
def test_the_command_that_continues(typed: str, again: str) -> None:
    assert command_again(typed.split()) == f"python {again}"
