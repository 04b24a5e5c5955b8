"""The command that continues a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlvla.recipes.recipe import Stage
from rlvla.recipes.runner import command_again, describe_plan
from rlvla.utils import launcher


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


def test_the_command_that_repeats_from_a_stage() -> None:
    """Nothing is only planned, however the plan was asked for."""
    typed = "run_recipe.py r.yaml --set sft.seed=1 --dry_run --from rl -- --lora_rank 4"
    again = "python run_recipe.py r.yaml --set sft.seed=1 --from sft -- --lora_rank 4"
    assert command_again(typed.split(), "sft") == again


def test_a_plan_has_the_commands_that_one_would_type(tmp_path: Path) -> None:
    stages = [
        Stage("demos", {}, ("--num_demos=3",), tmp_path / "demos", 1, None),
        Stage("sft", {}, ("--save_path=a b",), tmp_path / "sft", 2, None),
    ]
    plan = describe_plan(stages, tmp_path, lambda name: [f"cli/{name}.py"])
    assert "  python cli/collect_demos.py --num_demos=3\n" in plan
    assert "  deepspeed -q --num_accelerators 2 cli/train_sft_vla.py '--save_path=a b'\n" in plan


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 4), (1, 1), (2, 2), (3, 2), (4, 4), (8, 4)])
def test_no_more_ranks_than_gpus(gpus: int, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "num_gpus", lambda: gpus)
    stage = Stage("sft", {}, (), tmp_path / "sft", 4, None)
    program = f"deepspeed -q --num_accelerators {ranks}" if ranks > 1 else "python"
    assert f"  {program} cli/train_sft_vla.py\n" in describe_plan([stage], tmp_path, lambda name: [f"cli/{name}.py"])
