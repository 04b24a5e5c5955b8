"""Data sets as other tools and cameras make them: images that are not square, files of robomimic."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from cli.convert_demos import main as convert
from cli.eval_vla import main as evaluate
from cli.train_ppo_vla import main as train_ppo
from cli.train_sft_vla import main as train_sft
from rlvla.checkpoints.policy_folder import recorded_environment
from rlvla.commands.model_checks import mismatch_with_policy
from rlvla.data.demonstrations import split_by_state
from rlvla.data.options import ReadOptions
from rlvla.data.reading import read_demonstrations, read_several
from rlvla.envs.config import EnvConfig
from rlvla.envs.pictures import ImageFit
from rlvla.models.families import check_checkpoint
from rlvla.utils.errors import ConfigError
from tests.support.robosuite_reference import require_simulator
from tests.support.tiny_pi0 import build_tiny_pi0
from tests.support.wide_robot import camera_image
from tests.unit.data.test_lerobot import foreign

ROBOT = Path(__file__).parents[2] / "support" / "wide_robot.py"
CASES = Path(__file__).parents[4] / "shared" / "cases"
pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="shared/cases is not beside the repository")
SHORT = ["--max_steps", "1", "--train_batch_size", "2", "--action_chunk_len", "2", "--no-use_tensorboard"]
SMOLVLA = ["--pretrain", "tiny", "--model_family", "smolvla", "--tiny_llm_dim", "32", "--tiny_llm_layers", "1"]


def case(name: str) -> str:
    if not (CASES / name).exists():
        pytest.skip(f"{CASES / name} does not exist")
    return str(CASES / name)


def test_images_keep_the_shape_of_the_camera() -> None:
    demos = read_demonstrations(case("ds_nonsquare"))
    assert demos.image_shape == (48, 64)
    assert (demos.env_args["image_size"], demos.env_args["image_fit"]) == (None, "native")


@pytest.mark.parametrize("how", ["crop", "pad", "stretch"])
def test_images_are_fitted_while_reading(how: str) -> None:
    whole = read_demonstrations(case("ds_nonsquare"))
    options = ReadOptions(image_size=32, image_fit=how)
    demos = read_demonstrations(case("ds_nonsquare"), options=options)
    np.testing.assert_array_equal(demos.images[1], options.fit(whole.images[1]))
    assert (demos.env_args["image_size"], demos.env_args["image_fit"]) == (32, how)


def test_cameras_of_different_sizes_are_joined_by_a_common_size() -> None:
    with pytest.raises(ConfigError, match="different sizes: 64x64, 96x96; make them equal with --image_size"):
        read_demonstrations(case("ds_mixed"))
    demos = read_several([case("ds_mixed"), case("ds_nonsquare")], options=ReadOptions(image_size=32))
    assert demos.image_shape == (32, 32) and len(demos.actions) == 8


def test_conversion_keeps_shape_and_fit(tmp_path: Path) -> None:
    for name, words in (("whole", []), ("fitted", ["--image_size", "24", "--image_fit", "crop"])):
        for format_ in ("hdf5", "lerobot-v3.0"):
            output = tmp_path / name / format_
            convert(["--demos", case("ds_nonsquare"), "--output", str(output), "--format", format_, *words])
            demos = read_demonstrations(output / "demos.hdf5" if format_ == "hdf5" else output)
            assert demos.image_shape == ((24, 24) if words else (48, 64))
            assert demos.env_args["image_fit"] == ("crop" if words else "native")


def test_a_policy_of_squares_names_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_sft(["--demos", case("ds_nonsquare"), "--pretrain", "compact", "--save_path", str(tmp_path / "run")])
    assert "give --image_size N --image_fit crop, pad or stretch" in capsys.readouterr().err


def test_the_policy_records_how_images_were_fitted_and_environments_follow(tmp_path: Path) -> None:
    argv = ["--demos", case("ds_nonsquare"), "--pretrain", "compact", "--image_size", "32", "--image_fit", "crop"]
    train_sft([*argv, *SHORT, "--save_path", str(tmp_path)])
    record = recorded_environment(tmp_path / "policy")
    assert (record["image_size"], record["image_fit"]) == (32, "crop")
    assert EnvConfig(task_suite_name="robot").completed(record).env_kwargs()["image_fit"] == "crop"
    robot = [
        "--custom_module",
        str(ROBOT),
        "--task_suite_name",
        "wide_robot",
        "--eval_episodes",
        "1",
        "--num_envs",
        "1",
    ]
    policy = ["--pretrain", str(tmp_path / "policy")]
    evaluate([*policy, *robot, "--output", str(tmp_path / "eval.json")])
    episodes = ["--rollout_batch_size", "2", "--num_episodes", "2", "--train_batch_size", "2", "--no-val_before_train"]
    estimator = ["--advantage_estimator", "reinforce", "--n_samples_per_prompt", "1", "--no-check_start"]
    flags = [*episodes, *estimator, "--dump_rollouts", "--no-use_tensorboard"]
    train_ppo([*policy, *robot, *flags, "--save_path", str(tmp_path / "ppo")])
    record = recorded_environment(tmp_path / "ppo" / "policy")
    assert (record["image_size"], record["image_fit"]) == (32, "crop"), "also after PPO"
    dumped = sorted(tmp_path.rglob("*.hdf5"))
    assert dumped
    for file in dumped:
        demos = read_demonstrations(file)
        for images, (_, state) in zip(demos.images, demos.init_states, strict=True):
            cropped = ImageFit(32, "crop")(camera_image(np.full(6, state / 40)))
            assert (images == cropped).all() and images.shape[1:] == (2, 32, 32, 3)


def test_smolvla_reads_the_whole_image(tmp_path: Path) -> None:
    argv = ["--demos", case("ds_nonsquare"), *SMOLVLA]
    train_sft([*argv, *SHORT, "--save_path", str(tmp_path)])
    record, checkpoint = recorded_environment(tmp_path / "policy"), check_checkpoint(tmp_path / "policy")
    assert (record["image_size"], record["image_fit"]) == (None, "native")
    assert checkpoint.spec.keeps_aspect_ratio
    demos = read_demonstrations(case("ds_nonsquare"))
    policy = checkpoint.load_policy()
    images, proprio = policy.prepare(demos.images[0][:2], demos.proprio[0][:2])
    assert images.shape == (2, 2, 48, 64, 3) and np.isfinite(proprio).all()


def test_pi0_reads_the_whole_image() -> None:
    checkpoint = check_checkpoint(case("lerobot061_pi0"))
    demos = read_demonstrations(case("ds_nonsquare"))
    problems = mismatch_with_policy(demos, "data", checkpoint.spec, "pi0")
    assert not [problem for problem in problems if problem.reason == "image_size"]


def test_pi0_learns_from_whole_images_and_acts_on_them(tmp_path: Path) -> None:
    demos = read_demonstrations(case("ds_nonsquare"))
    entry = {"observation.state": demos.statistics["ds_nonsquare"]["proprio"]}
    entry["action"] = demos.statistics["ds_nonsquare"]["action"]
    statistics = {key: {n: v for n, v in values.items() if n != "mask"} for key, values in entry.items()}
    build_tiny_pi0(
        tmp_path / "tiny", sentences=sorted(set(demos.instructions)), statistics=statistics,
        cameras=demos.env_args["cameras"], state_dim=6, action_dim=6, chunk_size=2,
    )  # fmt: skip
    start = [
        "--demos",
        case("ds_nonsquare"),
        "--pretrain",
        str(tmp_path / "tiny"),
        "--save_path",
        str(tmp_path / "sft"),
    ]
    train_sft([*start, *SHORT[:4], "--no-use_tensorboard"])
    assert recorded_environment(tmp_path / "sft" / "policy")["image_fit"] == "native"
    robot = ["--custom_module", str(ROBOT), "--task_suite_name", "wide_robot", "--eval_episodes", "1"]
    episodes = ["--rollout_batch_size", "2", "--num_episodes", "2", "--train_batch_size", "2", "--num_envs", "1"]
    flags = [*episodes, "--advantage_estimator", "reinforce", "--n_samples_per_prompt", "1", "--no-check_start"]
    policy = ["--pretrain", str(tmp_path / "sft" / "policy"), "--save_path", str(tmp_path / "ppo"), "--dump_rollouts"]
    train_ppo([*policy, *robot, *flags, "--no-use_tensorboard"])
    (dumped,) = tmp_path.rglob("*.hdf5")
    assert read_demonstrations(dumped).image_shape == (48, 64)


LIFT = "robomimic_lift.hdf5"


def test_a_file_of_robomimic(caplog: pytest.LogCaptureFixture) -> None:
    demos = read_demonstrations(case(LIFT))
    assert demos.env_args["task_suite_name"] == "robosuite" and demos.env_args["task_ids"] == [0]
    assert demos.env_args["cameras"] == ["agentview", "wrist"] and demos.control_freq == 20
    assert demos.instructions == ["lift the red cube"] * 6
    with h5py.File(case(LIFT)) as file:
        demo = file["data/demo_3"]
        np.testing.assert_array_equal(demos.images[3][:, 1], demo["obs/robot0_eye_in_hand_image"])
        keys = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
        expected = np.concatenate([demo[f"obs/{key}"] for key in keys], axis=1, dtype=np.float32)
        np.testing.assert_array_equal(demos.proprio[3], expected)
        assert demos.success == [file[f"data/demo_{i}/rewards"][-1] == 1 for i in range(6)]
    assert demos.success_recorded and demos.actions[0].dtype == np.float32
    assert demos.statistics["robosuite"]["action"]["mask"] == [True] * 6 + [False]
    assert demos.proprio_names[2:4] == ["robot0_eef_pos_2", "robot0_eef_quat_0"] and len(demos.proprio_names) == 9


def test_initial_states_of_other_tasks_are_unknown_as_well(tmp_path: Path) -> None:
    path = Path(shutil.copy(case(LIFT), tmp_path / "stack.hdf5"))
    with h5py.File(path, "r+") as file:
        record = json.loads(file["data"].attrs["env_args"]) | {"env_name": "Stack", "env_kwargs": None}
        file["data"].attrs["env_args"] = json.dumps(record)
    demos = read_demonstrations(path)
    assert demos.init_states == [(1, -1)] * 6 and not demos.starts_recorded
    train, heldout = split_by_state(demos, 0.5, np.random.default_rng(0))
    assert len(train) == len(heldout) == 3, "episode by episode"


def test_parts_of_a_file_of_robomimic() -> None:
    options = ReadOptions(proprio_keys=("robot0_joint_pos",), instruction="lift it", filter_key="valid", image_size=16)
    demos = read_demonstrations(case(LIFT), ["wrist"], options)
    assert demos.names == ["demo_4", "demo_5"] and demos.instructions == ["lift it"] * 2
    assert demos.proprio[0].shape[1] == 7 and demos.images[0].shape[1:] == (1, 16, 16, 3)
    for wrong, message in (
        (ReadOptions(filter_key="test"), "no list mask/test .* it has train, valid"),
        (ReadOptions(proprio_keys=("joints",)), "no obs/joints"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_demonstrations(case(LIFT), options=wrong)
    with pytest.raises(ConfigError, match="--instruction is for HDF5 files"):
        read_several([case("ds_nonsquare")], options=ReadOptions(instruction="lift it"))


def test_a_policy_of_a_robomimic_file_acts_in_robosuite(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    require_simulator()
    start = ["--demos", case(LIFT), "--image_size", "32", "--pretrain", "compact", "--save_path", str(tmp_path)]
    train_sft([*start, *SHORT])
    command = capsys.readouterr().out.rsplit("next: python cli/eval_vla.py ", 1)[1].split()
    recorded = recorded_environment(tmp_path / "policy")
    longest = max(len(actions) for actions in read_demonstrations(case(LIFT)).actions)
    assert recorded["max_steps"] == max(longest, 40) and recorded["control_freq"] == 20
    evaluate([*command, "--eval_episodes", "1", "--num_envs", "1", "--max_steps", "4"])
    assert "Lift" in capsys.readouterr().out


def test_sizes_of_files_made_elsewhere_can_be_joined(tmp_path: Path) -> None:
    paths = [str(foreign(tmp_path / "a", size=(32, 40))), str(foreign(tmp_path / "b"))]
    with pytest.raises(ConfigError, match="--image_size makes them equal"):
        read_several(paths)
    assert read_several(paths, options=ReadOptions(image_size=32)).image_shape == (32, 32)


@pytest.mark.parametrize(
    ("name", "cameras", "success"),
    [
        ("ds_allfail", ["front", "wrist"], [False] * 4),
        ("ds_allgood", ["front", "wrist"], [True] * 4),
        ("ds_images", ["front", "wrist"], [True, True, True, False]),
        ("ds_nonsquare", ["front", "wrist"], [None] * 4),
        ("ds_pusht", ["image"], [True, False, True, False]),
    ],
)
def test_cameras_instructions_and_success_of_lerobot_datasets(
    name: str, cameras: list[str], success: list[bool | None]
) -> None:
    demos = read_demonstrations(case(name))
    assert demos.env_args["cameras"] == cameras
    assert [demos.outcome(index) for index in range(4)] == success
    assert [len(images) for images in demos.images] == [len(actions) for actions in demos.actions] == [12, 17, 9, 14]
    tasks = (
        {"Push the T-shaped block onto the T-shaped target."}
        if name == "ds_pusht"
        else {"pick the cube", "stack the cube"}
    )
    assert set(demos.instructions) == tasks


@pytest.mark.parametrize("name", ["lerobot061_pi0", "lerobot061_pi05"])
def test_policies_of_lerobot_061_act_and_are_written_as_they_were(name: str, tmp_path: Path) -> None:
    checkpoint = check_checkpoint(case(name))
    policy, spec = checkpoint.load_policy().eval(), checkpoint.spec
    observed = policy.prepare(np.zeros((1, spec.cameras, 48, 64, 3), np.uint8), np.zeros((1, 5), np.float32))
    noise = np.stack([spec.draw(np.random.default_rng(0))])
    actions = policy.act(*observed, ["pick the cube"], noise=noise, temperature=1.0).actions
    assert np.isfinite(actions).all() and actions.shape[1:] == (spec.action_chunk_len, 4)
    policy.save_pretrained(tmp_path / "copy")
    folders = [Path(case(name)), tmp_path / "copy"]
    before, after = (json.loads((folder / "config.json").read_text()) for folder in folders)
    for key in ("use_relative_actions", "relative_exclude_joints", "action_feature_names", "pretrained_revision"):
        assert after[key] == before[key]
    steps = [json.loads((folder / "policy_preprocessor.json").read_text())["steps"] for folder in folders]
    names = [[step["registry_name"] for step in listed] for listed in steps]
    assert names[0] == names[1] and "relative_actions_processor" in names[0]
