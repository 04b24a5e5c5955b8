"""Critics and reward models that could not judge what the policy is shown are refused before anything starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cli import score_episodes, train_ppo_vla, train_rm_vla, train_sft_vla
from rlvla.commands.model_checks import ObservationSpec, observation_problems, value_model_problems
from rlvla.commands.ppo_flags import PPORun
from rlvla.commands.setup import check_run
from rlvla.data.demonstrations import dataset_entry
from rlvla.data.reading import read_demonstrations
from rlvla.envs.config import EnvConfig
from rlvla.experience import Experience
from rlvla.models.actor import policy_spec
from rlvla.models.families import check_checkpoint
from rlvla.models.value_models import REWARD_HEAD_FILE, Critic, scalar_head
from rlvla.models.vla.configuration_openvla import OpenVLAConfig
from rlvla.models.vla.tiny import build_tiny
from rlvla.utils.errors import ConfigError, Problem


def build_judge(folder: Path, demos_file: Path, **options: object) -> Path:
    """A model for toy_reach with the head of a reward model; `options` of `build_tiny`."""
    demos = read_demonstrations(demos_file)
    proprio = [torch.cat([torch.from_numpy(p)] * 2, 1)[:, :3].numpy() for p in demos.proprio]
    sizes = {"vision_dim": 16, "vision_depth": 2, "llm_dim": 32, "llm_mlp_dim": 64, "llm_layers": 1, "patch_size": 16}
    build_tiny(
        folder,
        sentences=["reach the red disc"],
        dataset_statistics={"toy_reach": dataset_entry(demos.actions, proprio)},
        **{"image_size": 64, "action_chunk_len": 4, "action_dim": 2, **sizes, **options},
    )
    head = scalar_head(check_checkpoint(folder).config.text_config.hidden_size)
    save_file({f"head.{name}": tensor for name, tensor in head.state_dict().items()}, str(folder / REWARD_HEAD_FILE))
    return folder


@pytest.fixture(scope="module")
def foreign(demos_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of smaller pictures, and another proprio."""
    options = {"image_size": 32, "use_proprio": True, "proprio_dim": 3, "action_chunk_len": 2}
    return build_judge(tmp_path_factory.mktemp("judges") / "foreign", demos_file, **options)


def refused(main, capsys: pytest.CaptureFixture, *flags: object) -> str:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in flags])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_every_judge_of_a_run_is_compared_with_what_it_will_be_shown(
    foreign: Path, policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    flags = ["--pretrain", policy_folder, "--save_path", tmp_path / "run", "--advantage_estimator", "gae"]
    judges = ["--critic_pretrain", foreign, "--reward_pretrain", foreign]
    err = refused(
        train_ppo_vla.main, capsys, *flags, *judges, "--reward", "rm_model", "--rm_model_path", foreign, "--dry_run"
    )
    for flag in ("--critic_pretrain", "--reward_pretrain", "--rm_model_path"):
        assert f"{flag}: {foreign} takes images of 32 pixels; these have 64" in err
        assert f"{flag}: {foreign} takes 3 numbers of proprioception; there are 2" in err
    assert f"--critic_pretrain: {foreign} values chunks of 2 x 2 action tokens; the policy acts in 4 x 2" in err
    assert err.count("values chunks") == 1, "a reward model has no part in actions"
    assert not (tmp_path / "run").exists()


def changed(policy: Path, folder: Path, file: str, change: Callable[[dict], object]) -> Path:
    """A copy of a checkpoint folder with one of its JSON files changed."""
    path = Path(shutil.copytree(policy, folder)) / file
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return folder


def critic_problems(policy: Path, critic: Path, *flags: str) -> list[Problem]:
    words = ["--pretrain", str(policy), "--critic_pretrain", str(critic), *flags]
    given = train_ppo_vla.build_parser().parse_args(words)
    run = PPORun.from_namespace(given)
    setting, problems = check_run(run.policy, run.env, run.split, run.schedule.eval_episodes, run.rewards)
    assert not problems
    return value_model_problems(run, setting)


def test_a_critic_that_prepares_observations_otherwise_is_refused(policy_folder: Path, tmp_path: Path) -> None:
    """Every network of a run reads what the policy has prepared."""

    def other_robot(statistics: dict) -> None:
        statistics["toy_reach"]["proprio"]["q99"][0] += 0.5

    robot = changed(policy_folder, tmp_path / "robot", "dataset_statistics.json", other_robot)
    cropped = changed(policy_folder, tmp_path / "cropped", "config.json", lambda c: c.update(center_crop=True))
    for critic, what in ((robot, "proprio statistics"), (cropped, "center_crop")):
        (found,) = critic_problems(policy_folder, critic)
        assert (found.flag, found.reason) == ("critic_pretrain", "mismatch")
        assert str(found) == (
            f"--critic_pretrain: {critic} prepares observations differently ({what}); train a critic from this policy, "
            "or leave the flag out"
        )
    same = Path(shutil.copytree(policy_folder, tmp_path / "same"))
    assert not critic_problems(policy_folder, same)


def test_a_critic_takes_the_size_that_the_policy_has_prepared(policy_folder: Path, tmp_path: Path) -> None:
    cropped = changed(policy_folder, tmp_path / "cropped", "config.json", lambda c: c.update(center_crop=True))
    again = Path(shutil.copytree(cropped, tmp_path / "again"))
    assert not critic_problems(cropped, again, "--image_size", "128")
    (found,) = critic_problems(cropped, policy_folder, "--image_size", "128")
    assert "differently (center_crop)" in str(found) and "pixels" not in str(found)


def test_recorded_episodes_are_scored_by_what_can_see_them(
    foreign: Path, demos_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    flags = ["--demos", demos_file, "--output", tmp_path / "out", "--reward", "rm_model", "--rm_model_path"]
    assert "takes images of 32 pixels; these have 64" in refused(score_episodes.main, capsys, *flags, foreign)
    fits = build_judge(tmp_path / "fits", demos_file, use_proprio=True, proprio_dim=3)
    config = json.loads((fits / "config.json").read_text())
    assert config["proprio_dim"] == 3
    assert "takes 3 numbers of proprioception; there are 2" in refused(score_episodes.main, capsys, *flags, fits)


def test_a_reward_model_with_proprio_scores_recorded_episodes(
    policy_folder: Path, demos_file: Path, tmp_path: Path
) -> None:
    judge = shutil.copytree(policy_folder, tmp_path / "judge")
    head = scalar_head(check_checkpoint(judge).config.text_config.hidden_size)
    save_file({f"head.{name}": tensor for name, tensor in head.state_dict().items()}, str(judge / REWARD_HEAD_FILE))
    flags = ["--demos", demos_file, "--output", tmp_path / "out", "--reward", "rm_model", "--rm_model_path", judge]
    score_episodes.main([str(word) for word in flags])
    (score,) = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert score["totals"]["rm_model"] == pytest.approx(0), "a head of zeros sees no progress"


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (train_ppo_vla.main, "suite toy_reach has 2 numbers of proprioception; the checkpoint takes 3"),
        (train_sft_vla.main, "has 2 numbers of proprioception; {folder} takes 3"),
        (train_rm_vla.main, "has 2 numbers of proprioception; {folder} takes 3"),
    ],
)
def test_a_start_that_takes_another_proprio_is_refused(
    main, words: str, foreign: Path, demos_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    given = ["--task_suite_name", "toy_reach"] if main is train_ppo_vla.main else ["--demos", demos_file]
    err = refused(main, capsys, "--pretrain", foreign, "--save_path", tmp_path / "run", *given)
    assert words.format(folder=foreign) in err and not (tmp_path / "run").exists()


def test_demonstrations_beside_the_reward_have_the_proprio_of_the_policy(
    policy_folder: Path, demos_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    other = Path(shutil.copytree(demos_file.parent, tmp_path / "demos")) / "demos.hdf5"
    with h5py.File(other, "r+") as file:
        for demo in file["data"].values():
            longer = np.repeat(demo["obs/proprio"][:], 3, axis=1)
            del demo["obs/proprio"]
            demo["obs/proprio"] = longer
    beside = other.parent / "dataset_statistics.json"
    statistics = json.loads(beside.read_text())
    proprio = statistics["toy_reach"]["proprio"]
    proprio |= {name: value * 3 for name, value in proprio.items() if isinstance(value, list)}
    beside.write_text(json.dumps(statistics))
    flags = ["--pretrain", policy_folder, "--save_path", tmp_path / "run", "--ptx_coef", "0.1", "--ptx_demos", other]
    err = refused(train_ppo_vla.main, capsys, *flags)
    assert f"--ptx_demos: {other} has 6 numbers of proprioception; {policy_folder} takes 2" in err


GYM = {"task_suite_name": "gym:X-v0"}
CONFIG = OpenVLAConfig(num_images_in_input=1, center_crop=False, image_preprocessing="none")


@pytest.mark.parametrize(
    ("recorded", "env", "words"),
    [
        ({"cameras": ["agentview"]}, {}, ""),
        ({}, {}, ""),
        ({"cameras": ["wrist"]}, {}, r"was trained on the camera\(s\) wrist, and would be shown agentview"),
        ({"cameras": ["image"]}, {}, ""),  # the name in a dataset made elsewhere
        ({"cameras": ["image"], "task_suite_name": "robosuite"}, {}, ""),
        (
            {"cameras": ["pixels"], "task_suite_name": "gym:X-v0"},
            GYM,
            r"the camera\(s\) pixels, and .* shown agentview",
        ),
        ({"cameras": ["pixels"], "task_suite_name": "own"}, GYM, ""),
        ({"cameras": ["agentview"]}, {"cameras": ("agentview", "wrist")}, "takes 1 image.* agentview, wrist"),
        ({"render_quality": "full"}, {}, "--render_quality full, and would be shown fast"),
        ({"render_quality": "fast"}, {"render_quality": "full"}, "--render_quality fast, and would be shown full"),
        ({"render_quality": None}, {"render_quality": "full"}, ""),
        ({"render_quality": "fast"}, {}, ""),
        ({}, {"image_size": 128}, "takes images of 224 pixels; these have 128"),
    ],
)
def test_what_a_judge_was_trained_to_see(recorded: dict, env: dict, words: str, tmp_path: Path) -> None:
    (tmp_path / "rlvla_environment.json").write_text(json.dumps(recorded))
    shown = ObservationSpec(
        EnvConfig(**{"task_suite_name": "robosuite", "cameras": ("agentview",), "image_size": 224, **env}), 0
    )
    found = observation_problems(tmp_path, policy_spec(CONFIG), shown)
    if not words:
        assert not found
    else:
        assert len(found) == 1
        with pytest.raises(ConfigError, match=words):
            raise ConfigError(found)


def test_a_critic_may_do_without_proprio(demos_file: Path, tmp_path: Path) -> None:
    critic = Critic.from_pretrained(build_judge(tmp_path / "blind", demos_file))
    rows = Experience(
        images=torch.zeros(2, 1, 64, 64, 3, dtype=torch.uint8),
        proprio=torch.zeros(2, 2),
        instructions=["reach the red disc"] * 2,
    )
    assert critic(**critic.score(rows)).shape == (2, 8)
