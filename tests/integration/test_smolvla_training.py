"""SmolVLA through the commands: a new tiny one, PPO with all kinds of critics and rewards, resume, LeRobot data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli.collect_demos import main as collect
from cli.convert_demos import main as convert_demos
from cli.eval_vla import main as evaluate
from cli.inspect_vla import main as inspect
from cli.train_ppo_vla import main as train_ppo
from cli.train_rm_vla import main as train_reward_model
from cli.train_sft_vla import main as train_sft
from rlvla.checkpoints.policy_folder import ENVIRONMENT_FILE
from rlvla.data.reading import read_demonstrations
from rlvla.models.families import check_checkpoint
from rlvla.models.lerobot.policy import STD_FILE
from rlvla.models.smolvla.tiny import TinyVlm, build_tiny_smolvla
from rlvla.utils.files import read_metrics
from tests.support.judge_server import judge_server, judging, prompt_of
from tests.support.launching import PPO_SCRIPT, launch

WEIGHTS = "model.safetensors"
TINY = ["--model_family", "smolvla", "--tiny_vision_dim", "32", "--tiny_llm_dim", "32", "--tiny_llm_layers", "2"]
SFT = [*TINY, "--max_steps", "2", "--no-use_tensorboard", "--ema_decay", "0.9"]
PPO = [
    *("--task_suite_name", "toy_reach", "--num_envs", "2", "--rollout_batch_size", "8", "--train_batch_size", "8"),
    *("--n_samples_per_prompt", "1", "--eval_episodes", "2", "--actor_learning_rate", "1e-2", "--save_steps", "1"),
    *("--deterministic_rollout", "--lr_scheduler", "constant", "--no-use_tensorboard", "--no-val_before_train"),
    *("--max_steps", "4", "--reward", "success:1", "rm:0.5", "--n_action_steps", "2"),
]


@pytest.fixture(scope="module")
def start(demos_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that predicts four actions, from demonstrations in LeRobot's format."""
    folder = tmp_path_factory.mktemp("smolvla")
    convert_demos(["--demos", str(demos_file), "--output", str(folder / "data")])
    words = ["--demos", str(folder / "data"), "--save_path", str(folder / "sft"), "--n_action_steps", "4"]
    train_sft([*words, *SFT])
    return folder / "sft" / "policy"


def ppo(start: Path, out: Path, episodes: int, *more: str) -> Path:
    train_ppo(["--pretrain", str(start), "--save_path", str(out), "--num_episodes", str(episodes), *PPO, *more])
    return out / "policy"


def test_runs_are_planned_and_a_policy_described(
    start: Path, demos_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["--pretrain", str(start), "--demos", str(demos_file), "--save_path", str(tmp_path / "sft")]
    train_sft([*words, "--fit_to_demos", "--camera_map", "top=image", "--dry_run"])
    assert "total on the device at update" in capsys.readouterr().out
    inspect(["--pretrain", str(start)])
    assert "smolvla" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["ppo", "eval", "sft"])
def test_cameras_without_a_mapping(
    command: str, start: Path, demos_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """And with a wrong one: both sides are listed before anything is started."""
    folder, out = Path(shutil.copytree(start, tmp_path / "policy")), str(tmp_path / "out")
    (folder / "rlvla_policy.json").unlink()
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("images.top", "images.front"))
    words = ["--pretrain", str(folder), "--camera_map", "hand=front"]
    one_step = ["--flow_method", "cps", "--flow_steps", "1"]
    commands = {
        "ppo": lambda: train_ppo([*words, "--save_path", out, *PPO, *one_step]),
        "eval": lambda: evaluate([*words, "--task_suite_name", "toy_reach", *one_step]),
        "sft": lambda: train_sft([*words, "--demos", str(demos_file), "--save_path", out]),
    }
    with pytest.raises(SystemExit):
        commands[command]()
    said = capsys.readouterr().err
    assert "hand" in said and "observation.images.front" in said and "--camera_map" in said
    assert command == "sft" or "--flow_steps" in said
    assert not Path(out).exists()


def test_only_the_expert_is_trained_beside_a_critic_of_its_own(start: Path, tmp_path: Path) -> None:
    """By default, although config.json of this folder says otherwise."""
    flags = ("--critic_features", "prefix", "--critic_learning_rate", "1e-2")
    flags += ("--init_kl_coef", "0.1", "--save_value_network")
    after = load_file(ppo(start, tmp_path, 8, *flags) / WEIGHTS)
    before = load_file(start / WEIGHTS)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and changed and not any(".vlm." in name for name in changed)
    assert check_checkpoint(tmp_path / "policy").spec.action_chunk_len == 2
    check_checkpoint(tmp_path / "critic").load_critic()


def test_a_judge_and_the_stage_of_a_machine_in_the_prompt(start: Path, tmp_path: Path) -> None:
    """In training and in the evaluation of what was trained: rows are scored with the prompt they were decided with."""
    pytest.importorskip("pydantic", reason="the extra vlm is not installed")
    asked = []
    flags = ["--reward", "success:1", "vlm:progress:0.3", "rm:0.5", "--rm_formula", "F(near & F success)"]
    flags += ["--rm_state_input", "prompt", "--vlm_model", "judge", "--vlm_timeout", "120", "--dump_rollouts"]
    with judge_server() as server:
        server.answer = judging(progress=lambda r: asked.append(prompt_of(r)) or {"action_score": 0.5, "progress": 0.5})
        policy = ppo(start, tmp_path, 8, "--advantage_estimator", "reinforce", *flags, "--vlm_url", f"{server.url}/v1")
    iteration = next(line for line in read_metrics(tmp_path) if "rollout/success_at_end" in line)
    assert asked and any(name.startswith("reward/vlm") and value for name, value in iteration.items())
    assert iteration["rollout_corr/probs_diff_max"] < 1e-5
    assert json.loads((policy / ENVIRONMENT_FILE).read_text())["machine_state"]["rm_state_input"] == "prompt"
    evaluate(
        ["--pretrain", str(policy), "--eval_episodes", "2", "--num_envs", "1", "--output", str(tmp_path / "e.json")]
    )
    assert json.loads((tmp_path / "e.json").read_text())["results"]


def test_the_state_of_a_machine_among_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy with room for it: two numbers of toy_reach and three states."""
    monkeypatch.setattr("rlvla.commands.train_ppo.check_first_decisions", lambda *_: 0.0)  # its weights are random
    unit = {key: {"mean": [0.0] * n, "std": [1.0] * n} for key, n in (("observation.state", 5), ("action", 2))}
    sizes = {"vlm": TinyVlm(vision_dim=32, dim=32), "state_dim": 5, "action_dim": 2, "chunk_size": 4}
    wide = build_tiny_smolvla(tmp_path / "wide", sentences=["reach the red disc"], statistics=unit, **sizes)
    flags = ["--rm_formula", "F(near & F success)", "--use_proprio", "--rm_state_input", "proprio"]
    policy = ppo(wide, tmp_path / "run", 8, "--advantage_estimator", "reinforce", *flags, "--camera_map", "top=image")
    assert json.loads((policy / ENVIRONMENT_FILE).read_text())["machine_state"]["width"] == 3


def test_a_reward_model_from_the_policy(start: Path, tmp_path: Path) -> None:
    """Trained on recorded outcomes, and paid by it."""
    aim = ["--keep", "all", "--offset_prob", "0.6", "--offset_max", "0.6", "--num_envs", "1", "--use_proprio"]
    collect(["--task_suite_name", "toy_reach", *aim, "--num_demos", "24", "--output", str(tmp_path / "mixed")])
    words = ["--pretrain", str(start), "--demos", str(tmp_path / "mixed"), "--save_path", str(tmp_path / "rm")]
    train_reward_model([*words, "--max_epochs", "1", "--no-use_tensorboard"])
    model = ["--reward", "success:1", "rm_model:0.5", "--rm_model_path", str(tmp_path / "rm" / "reward_model")]
    ppo(start, tmp_path / "run", 8, "--advantage_estimator", "reinforce", *model)
    iteration = next(line for line in read_metrics(tmp_path / "run") if "rollout/success_at_end" in line)
    assert iteration["reward/rm_model"] != 0


@pytest.mark.nightly
@pytest.mark.slow
def test_two_ranks_with_adapters_resume_to_the_bit(start: Path, tmp_path: Path) -> None:
    """A learned standard deviation, all steps noisy, values from the shared network; rollouts are written."""
    flags = ["--pretrain", start, *PPO, "--flow_method", "noise", "--flow_noisy_steps", "all", "--share_backbone"]
    flags += ["--entropy_loss_coef", "0.01", "--zero_stage", "2", "--num_envs", "1", "--lora_rank", "2"]
    launch(PPO_SCRIPT, *flags, "--dump_rollouts", "--save_path", tmp_path / "whole", "--num_episodes", "16")
    for more in ([], ["--load_checkpoint"]):
        episodes = "16" if more else "8"
        launch(PPO_SCRIPT, *flags, "--save_path", tmp_path / "parts", "--num_episodes", episodes, *more)
    for name in (WEIGHTS, STD_FILE):
        whole, parts = (load_file(tmp_path / run / "policy" / name) for run in ("whole", "parts"))
        assert whole.keys() == parts.keys() and all(torch.equal(whole[key], parts[key]) for key in whole)
    before, after = load_file(start / WEIGHTS), load_file(tmp_path / "whole" / "policy" / WEIGHTS)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    dumped = sorted((tmp_path / "whole").rglob("*.hdf5"))
    assert dumped and read_demonstrations(dumped[0]).actions
