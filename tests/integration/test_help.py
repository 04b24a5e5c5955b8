"""What the help promises: every flag with its default, and no flag that is accepted and ignored."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cli import (
    check_demos,
    check_env,
    collect_demos,
    compare_runs,
    convert_demos,
    draw_reward_machine,
    eval_vla,
    export_policy,
    new_env,
    push_to_hub,
    replay_batch,
    run_recipe,
    score_episodes,
    train_ppo_vla,
    train_rm_vla,
    train_sac_vla,
    train_sft_vla,
    view_data,
)
from rlvla.commands.off_policy.flags import SACRun
from rlvla.commands.ppo_flags import PPORun
from rlvla.envs import registry
from rlvla.envs.config import EnvConfig, SplitConfig
from rlvla.envs.experts import ExpertConfig
from rlvla.envs.registry import get_suite
from rlvla.models.actor import ActorConfig
from rlvla.models.config import PolicyConfig
from rlvla.models.flow.settings import PREFIX, FlowSettings
from rlvla.trainer.supervised.config import RewardModelConfig, SFTConfig
from rlvla.utils.cli.flags import Parser
from rlvla.utils.deepspeed.config import StrategyConfig

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [
    check_demos,
    check_env,
    collect_demos,
    compare_runs,
    convert_demos,
    draw_reward_machine,
    eval_vla,
    export_policy,
    new_env,
    push_to_hub,
    replay_batch,
    run_recipe,
    score_episodes,
    train_ppo_vla,
    train_rm_vla,
    train_sac_vla,
    train_sft_vla,
    view_data,
]
CONFIGS = [
    *PPORun.kinds().values(),
    *SACRun.kinds().values(),
    check_demos.CheckDemosConfig,
    check_env.CheckConfig,
    convert_demos.ConvertConfig,
    *(export_policy.ExportConfig, new_env.NewEnvConfig, push_to_hub.PushConfig),
    *(replay_batch.ReplayConfig, run_recipe.RecipeConfig),
    *(compare_runs.CompareConfig, view_data.ViewConfig),
    *(draw_reward_machine.DrawConfig, score_episodes.ScoreConfig, train_rm_vla.RewardRunConfig, RewardModelConfig),
    *(collect_demos.CollectConfig, eval_vla.EvalConfig, train_sft_vla.SFTRunConfig, train_sft_vla.NewModelConfig),
    train_sft_vla.ValidationConfig,
    *(EnvConfig, SplitConfig, ExpertConfig, ActorConfig, PolicyConfig, SFTConfig, StrategyConfig),
    *(get_suite(name).options for name in ("toy_reach", "robosuite", "libero_10", "robotwin", "gym:ENV_ID")),
]
# The deepspeed launcher passes it; the same number reaches the process as LOCAL_RANK, which is what is read.
NOT_READ = {"local_rank"}

# The vocabulary that users of OpenRLHF know, and the settings of a VLA in a simulator.
PPO_FLAGS = """
pretrain critic_pretrain reward_pretrain save_path ckpt_path load_checkpoint save_steps eval_steps logging_steps
num_episodes max_epochs rollout_batch_size micro_rollout_batch_size n_samples_per_prompt train_batch_size
micro_train_batch_size actor_learning_rate critic_learning_rate lr_warmup_ratio lr_scheduler adam_betas l2 max_norm
eps_clip eps_clip_low_high value_clip gamma lambd init_kl_coef kl_estimator use_kl_loss entropy_loss_coef
advantage_estimator temperature zero_stage bf16 adam_offload gradient_checkpointing lora_rank lora_alpha seed
use_tensorboard task_suite_name task_ids num_envs action_chunk_len num_images_in_input use_proprio center_crop
max_steps eval_protocol render_quality val_before_train val_only unnorm_key
"""


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "500")


def help_entries(parser: Parser, capsys: pytest.CaptureFixture) -> dict[str, str]:
    """Flag -> its text, in one line."""
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    entries = re.split(r"\n  (?=--?\w)", text)[1:]
    flat = [" ".join(entry.split("\n\n")[0].split()) for entry in entries]
    return {re.search(r"--(\w+)", entry).group(1): entry for entry in flat}


def as_typed(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.__name__)
def test_every_flag_is_explained_with_its_default(command: object, capsys: pytest.CaptureFixture) -> None:
    parser = command.build_parser()
    entries = help_entries(parser, capsys)
    for action in parser._actions:
        if not action.option_strings:  # a word without a flag has a flag of the same name beside it
            assert any(action.dest == other.dest for other in parser._actions if other.option_strings)
            continue
        name = action.option_strings[0].removeprefix("--")
        if name == "-h":
            continue
        assert len(action.help.split()) >= 2, name
        if action.default in (None, ()):
            assert "None" not in entries[name] and "()" not in entries[name]
        else:
            assert f"(default: {as_typed(action.default)})" in entries[name], name


def test_ppo_speaks_the_vocabulary_of_the_field(capsys: pytest.CaptureFixture) -> None:
    entries = help_entries(train_ppo_vla.build_parser(), capsys)
    assert set(PPO_FLAGS.split()) <= set(entries)
    for name in ("unnorm_key", "task_ids", "cameras", "max_steps", "critic_pretrain", "ckpt_path"):
        assert "(default:" in entries[name], f"{name} has no default of its own: the help must say what happens"


@pytest.mark.parametrize("command", [check_env, collect_demos], ids=lambda c: c.__name__)
def test_where_there_is_no_checkpoint_none_is_spoken_of(command: object, capsys: pytest.CaptureFixture) -> None:
    entries = help_entries(command.build_parser(), capsys)
    assert not [name for name, entry in entries.items() if "checkpoint" in entry]
    assert entries["cameras"].endswith("(default: the suite's)")


@pytest.mark.parametrize("command", [check_env, collect_demos, eval_vla, train_ppo_vla], ids=lambda c: c.__name__)
def test_flags_of_a_suite_stand_under_its_name(command: object, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        command.build_parser().parse_args(["--help"])
    groups = dict(re.findall(r"\n(suites? .*):\n((?:  .*\n?)+)", capsys.readouterr().out))
    libero = "suites libero_10, libero_90, libero_goal, libero_object, libero_plus_10, libero_plus_goal, "
    libero += "libero_plus_object, libero_plus_spatial, libero_spatial"
    flags = {title: re.findall(r"--(\w+)", text) for title, text in groups.items()}
    assert flags["suite robosuite"] == ["control_freq", "action_space", "primitives"]
    assert flags["suites metaworld, robosuite"] == ["perturb"]
    assert flags["suites maniskill, metaworld, robosuite"] == ["object_state", "no"]
    assert flags[libero] == ["libero_assets"]
    assert flags["suite robotwin"] == ["robotwin_root", "robotwin_config"]


def attribute_reads() -> set[str]:
    """Names read as attributes anywhere in the product; a dataclass field's own definition is no read."""
    found = set()
    for path in [*(ROOT / "rlvla").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
    return found


def test_no_flag_is_accepted_and_ignored() -> None:
    read = attribute_reads()
    # The settings of flow policies carry their prefix among the flags, and lose it where they are used.
    read |= {PREFIX + field.name for field in dataclasses.fields(FlowSettings) if field.name in read}
    fields = {field.name for config in CONFIGS for field in dataclasses.fields(config)}
    assert {name for name in fields if name not in read} == NOT_READ


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.__name__)
def test_flags_come_from_the_dataclasses(command: object, monkeypatch: pytest.MonkeyPatch) -> None:
    # Suites that other test modules registered when they were imported bring flags, too.
    shipped = {name: suite for name, suite in registry._SUITES.items() if registry.ships_with_rlvla(name)}
    monkeypatch.setattr(registry, "_SUITES", shipped)
    fields = {field.name for config in CONFIGS for field in dataclasses.fields(config)}
    flags = {action.dest for action in command.build_parser()._actions} - {
        "help",
        "config",
        "log_level",
        "quiet",
    }  # the parser's own
    assert flags <= fields


@pytest.mark.parametrize("command", [eval_vla, train_ppo_vla, train_sft_vla], ids=lambda c: c.__name__)
def test_commands_that_know_ranks_take_what_the_launcher_adds(command: object) -> None:
    assert command.build_parser().parse_args(["--local_rank=1"]).local_rank == 1


@pytest.mark.parametrize("main", [c.main for c in COMMANDS], ids=[c.__name__ for c in COMMANDS])
def test_help_exits_with_status_zero(main: Callable, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")
