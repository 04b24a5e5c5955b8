"""The flags of a new model: refused where they describe another one, or do not fit together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlvla.commands import new_models, train_sft
from rlvla.commands.custom_modules import CustomConfig
from rlvla.commands.new_models import new_model_problems
from rlvla.commands.train_reward_model import run_reward_model
from rlvla.commands.train_sft import run_sft
from rlvla.models.config import ActorConfig
from rlvla.trainer.supervised.config import NewModelConfig, RewardModelConfig, RewardRunConfig, SFTConfig, SFTRunConfig
from rlvla.utils.cli.flags import no_effect_problems
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.errors import ConfigError, Problem

SIZES = NewModelConfig(tiny_llm_dim=48, tiny_patch_size=4, compact_head="gaussian", compact_channels=(8, 8))
OF_TINY, OF_COMPACT = {"tiny_llm_dim", "tiny_patch_size"}, {"compact_head", "compact_channels"}


def kinds(problems: list[Problem]) -> list[tuple[str | None, str]]:
    return [(problem.flag, problem.reason) for problem in problems]


def all_problems(run: SFTRunConfig, sizes: NewModelConfig, actor: ActorConfig | None = None) -> list[Problem]:
    return [*no_effect_problems([run, sizes], {}, ()), *new_model_problems(run, sizes, None, actor)]


@pytest.mark.parametrize(
    ("pretrain", "flags"), [("tiny", OF_COMPACT), ("compact", OF_TINY), ("runs/sft/policy", OF_TINY | OF_COMPACT)]
)
def test_sizes_of_another_model_are_refused(pretrain: str, flags: set[str]) -> None:
    problems = no_effect_problems([SFTRunConfig(pretrain=pretrain), SIZES], {}, ())
    assert set(kinds(problems)) == {(flag, "no_effect") for flag in flags}
    assert not no_effect_problems([SFTRunConfig(pretrain=pretrain), NewModelConfig(action_chunk_len=4)], {}, ())


@pytest.mark.parametrize(
    ("suite", "asked", "length"), [("metaworld", None, 5), ("metaworld", 8, 8), ("robosuite", None, 8), (None, None, 8)]
)
def test_a_suite_has_its_usual_number_of_actions_per_decision(
    suite: str | None, asked: int | None, length: int
) -> None:
    demos: Any = SimpleNamespace(env_args={"task_suite_name": suite})
    assert new_models.new_chunk_len(NewModelConfig(action_chunk_len=asked), demos) == length


def test_both_commands_refuse_them(tmp_path: Path) -> None:
    given: dict[str, Any] = {"pretrain": "compact", "demos": (str(tmp_path / "none"),)}
    given["save_path"] = str(tmp_path / "run")
    commands = [
        lambda: run_sft(SFTRunConfig(**given), SIZES, SFTConfig(), ActorConfig(), StrategyConfig(), CustomConfig()),
        lambda: run_reward_model(RewardRunConfig(**given), SIZES, RewardModelConfig(), StrategyConfig()),
    ]
    for run in commands:
        with pytest.raises(ConfigError) as error:
            run()
        assert {(flag, "no_effect") for flag in OF_TINY} <= set(kinds(error.value.problems))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("pretrain", "options", "sizes", "expected"),
    [
        ("tiny", {}, {"tiny_vision_dim": 18}, ("tiny_vision_dim", "not_divisible")),
        ("tiny", {}, {"tiny_llm_dim": 33}, ("tiny_llm_dim", "not_divisible")),
        ("tiny", {"model_variant": "autoregressive"}, {"action_chunk_len": 4}, ("action_chunk_len", "contradiction")),
        ("tiny", {"action_std_init": 0.2}, {}, ("action_std_init", "needs_flag")),
        ("tiny", {"platform": "libero"}, {}, ("platform", "no_effect")),
        ("compact", {"center_crop": True}, {}, ("center_crop", "no_effect")),
        ("compact", {"model_variant": "oft"}, {}, ("model_variant", "no_effect")),
        ("compact", {"action_std": "fixed"}, {}, ("action_std", "needs_flag")),
    ],
)
def test_flags_that_do_not_fit_together(
    pretrain: str, options: dict[str, Any], sizes: dict[str, Any], expected: tuple[str, str]
) -> None:
    run = SFTRunConfig(pretrain=pretrain, **options)
    assert kinds(all_problems(run, NewModelConfig(**sizes))) == [expected]


def of_flow(options: dict[str, Any], sizes: dict[str, Any], actor: ActorConfig | None = None) -> list[Problem]:
    run = SFTRunConfig(pretrain="tiny", **options)
    return all_problems(run, NewModelConfig(model_family="smolvla", **sizes), actor)


@pytest.mark.parametrize(
    ("options", "sizes", "actor", "expected"),
    [
        ({}, {}, ActorConfig(), []),
        ({}, {"tiny_vision_dim": 48, "tiny_llm_dim": 40}, None, ["tiny_vision_dim", "tiny_llm_dim"]),
        ({"use_proprio": False, "model_variant": "oft"}, {}, None, ["model_variant", "use_proprio"]),
        ({}, {}, ActorConfig(lora_rank=2), ["lora_rank"]),
        ({"camera_map": ("agentview=image", "wrist=image2"), "platform": "libero"}, {}, None, []),
        ({"platform": "bridge"}, {}, None, ["platform"]),
        ({}, {}, ActorConfig(train_expert_only=True), ["train_expert_only"]),
    ],
)
def test_flags_of_a_new_flow_policy(
    options: dict[str, Any], sizes: dict[str, Any], actor: ActorConfig | None, expected: list[str]
) -> None:
    assert [problem.flag for problem in of_flow(options, sizes, actor)] == expected


@pytest.mark.parametrize("pretrain", ["tiny", "compact"])
def test_flags_of_flow_policies_for_another_model(pretrain: str) -> None:
    run = SFTRunConfig(pretrain=pretrain, camera_map=("a=b",))
    problems = all_problems(run, NewModelConfig(), ActorConfig(train_expert_only=False))
    assert {("camera_map", "no_effect"), ("train_expert_only", "no_effect")} <= set(kinds(problems))


def test_a_moving_average_needs_whole_parameters(tmp_path: Path) -> None:
    run = SFTRunConfig(demos=(str(tmp_path / "none"),), save_path=str(tmp_path / "run"))
    strategy = StrategyConfig(zero_stage=3)
    with pytest.raises(ConfigError) as error:
        run_sft(run, NewModelConfig(), SFTConfig(ema_decay=0.9), ActorConfig(), strategy, CustomConfig())
    assert ("ema_decay", "contradiction") in kinds(error.value.problems)


@pytest.mark.parametrize(("suite", "warned"), [("toy_push", True), ("toy_reach", False), (None, False)])
def test_demonstrations_of_another_suite_are_pointed_out(
    suite: str | None, warned: bool, policy_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    demos = SimpleNamespace(env_args={"task_suite_name": suite})
    train_sft._warn_of_another_suite(demos, str(policy_folder))
    assert ("recorded in toy_push, and" in capsys.readouterr().err) is warned
    train_sft._warn_of_another_suite(demos, "compact")
    assert not capsys.readouterr().err
