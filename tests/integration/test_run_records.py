"""What a training run leaves behind: a file that repeats it, dumped rollouts, videos, a TensorBoard page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cli.convert_demos import main as convert
from cli.train_ppo_vla import main as train
from cli.train_sft_vla import main as sft
from rlvla.data.reading import read_demonstrations, read_several
from rlvla.data.rows import DemonstrationRows
from rlvla.envs import list_tasks
from rlvla.models.actor import Actor
from rlvla.utils.files import read_metrics

FLAGS = [
    *("--num_episodes", "16", "--rollout_batch_size", "8", "--train_batch_size", "4", "--num_envs", "2"),
    *("--eval_episodes", "4", "--no-val_before_train", "--max_steps", "8", "--actor_learning_rate", "3e-4"),
]


@pytest.fixture(scope="module")
def run(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("av", reason="videos need the extra rlvla[video]")
    folder = tmp_path_factory.mktemp("records") / "run"
    train(
        ["--pretrain", str(policy_folder), "--save_path", str(folder), *FLAGS, "--dump_rollouts", "--num_videos", "2"]
    )
    return folder


def learned(folder: Path) -> list[dict[str, float]]:
    """What does not depend on the clock."""
    names = ("rollout/success_at_end", "actor/entropy", "actor/grad_norm", "critic/grad_norm", "eval/success_at_end")
    return [{name: record[name] for name in names if name in record} for record in read_metrics(folder)]


def test_the_resolved_configuration_repeats_the_run(run: Path, tmp_path: Path) -> None:
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["actor_learning_rate"] == 3e-4 and saved["dump_rollouts"] is True and "local_rank" not in saved
    again = tmp_path / "again"
    train(["--config", str(run / "config.yaml"), "--save_path", str(again), "--no-dump_rollouts", "--num_videos", "0"])
    assert learned(again) == learned(run) and len(learned(run)) == 2
    assert not (again / "rollouts").exists() and not (again / "videos").exists()


def test_dumped_rollouts_are_demonstrations(run: Path, tmp_path: Path) -> None:
    files = sorted((run / "rollouts").rglob("demos.hdf5"))
    assert [f.parent.name for f in files] == ["iteration_000001_rank0", "iteration_000002_rank0"]
    demos = read_demonstrations(files[0])
    metrics = read_metrics(run)[0]
    assert len(demos.actions) == 8
    assert np.mean(demos.success) == metrics["rollout/success_at_end"]
    assert demos.num_steps == metrics["rollout/env_steps"]
    assert demos.decision_steps is not None
    for starts, images, actions in zip(demos.decision_steps, demos.images, demos.actions):
        assert starts.tolist() == list(range(0, len(actions), 4)) and len(images) == len(starts)
    tiny = ["--tiny_vision_dim", "16", "--tiny_llm_dim", "32", "--tiny_llm_layers", "1", "--action_chunk_len", "4"]
    argv = ["--demos", str(files[0]), "--save_path", str(tmp_path / "sft"), "--max_epochs", "1", "--no-use_tensorboard"]
    sft([*argv, *tiny, "--train_batch_size", "4"])
    assert (tmp_path / "sft" / "config.yaml").is_file()


def test_dumped_rollouts_become_a_lerobot_data_set(run: Path, policy_folder: Path, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="LeRobot datasets need the extra rlvla[lerobot]")
    sources = sorted(str(path) for path in (run / "rollouts").rglob("demos.hdf5"))
    convert(["--demos", *sources, "--output", str(tmp_path / "l")])
    before, after = read_several(sources), read_demonstrations(tmp_path / "l")
    info = json.loads((tmp_path / "l" / "meta" / "info.json").read_text())
    # A row per environment step, at the control frequency.
    assert info["fps"] == list_tasks("toy_reach")[0].control_freq == 10
    assert (info["total_episodes"], info["total_frames"]) == (16, before.num_steps)
    rows = pq.read_table(tmp_path / "l" / "data").sort_by("index").to_pydict()
    assert np.array(rows["action"]).shape == (before.num_steps, 2)
    np.testing.assert_array_equal(np.array(rows["action"], np.float32), np.concatenate(before.actions))
    assert rows["is_decision"] == [step % 4 == 0 for actions in before.actions for step in range(len(actions))]
    assert sum(rows["next.done"]) == 16 and rows["next.done"][-1]
    assert sum(rows["next.reward"]) == sum(before.success)
    for name in ("actions", "decision_steps", "proprio", "rewards"):
        for one, other in zip(getattr(before, name), getattr(after, name), strict=True):
            np.testing.assert_array_equal(one, other)
    for name in ("success", "init_states", "seeds", "instructions"):
        assert getattr(before, name) == getattr(after, name), name
    # What a policy learns from them: the chunk that was executed from each decision on.
    actor = Actor.from_pretrained(policy_folder)
    own, back = DemonstrationRows(before, actor), DemonstrationRows(after, actor)
    everything = np.arange(len(own))
    assert len(own) == len(back) == sum(map(len, before.images)) < before.num_steps
    for name in ("action_tokens", "action_mask", "proprio"):
        assert torch.equal(getattr(own.take(everything), name), getattr(back.take(everything), name)), name


def test_every_step_of_rollouts_can_be_rendered(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = min((run / "rollouts").rglob("demos.hdf5"))
    argv = ["--demos", str(source), "--render_steps", "--format", "hdf5", "--output"]
    convert([*argv, str(tmp_path / "h")])
    before, after = read_demonstrations(source), read_demonstrations(tmp_path / "h" / "demos.hdf5")
    assert after.decision_steps is None and before.decision_steps is not None
    assert [len(images) for images in after.images] == [len(actions) for actions in before.actions]
    for index, starts in enumerate(before.decision_steps):
        np.testing.assert_array_equal(after.images[index][starts], before.images[index])
        np.testing.assert_array_equal(after.proprio[index][starts], before.proprio[index])
        assert (np.diff(after.images[index].astype(int), axis=0) != 0).any(axis=(1, 2, 3, 4)).all(), (
            "no repeated picture"
        )
    with pytest.raises(SystemExit):
        convert(["--demos", str(tmp_path / "h" / "demos.hdf5"), *argv[2:], str(tmp_path / "again")])
    assert "already has an image of each step" in capsys.readouterr().err
    # Another scene than recorded is noticed, and nothing is written.
    changed = Path(shutil.copytree(source.parent, tmp_path / "changed")) / "demos.hdf5"
    with h5py.File(changed, "r+") as file:
        file["data/demo_3"].attrs["init_state_id"] += 1
    with pytest.raises(SystemExit):
        convert(["--demos", str(changed), *argv[2:], str(tmp_path / "none")])
    err = capsys.readouterr().err
    assert "demo_3 looks different at step 0" in err or "demo_3 does not end as recorded" in err
    assert not (tmp_path / "none").exists()


def test_videos_and_configuration_are_in_tensorboard(run: Path) -> None:
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    tags = events.Tags()
    assert len([tag for tag in tags["images"] if tag.startswith("videos/reach/")]) == 2
    assert {"configuration/text_summary", "command/text_summary"} <= set(tags["tensors"])
    assert {"rollout/success_at_end", "actor/ppo_kl", "timing_s/update", "eval/success_at_end"} <= set(tags["scalars"])
    videos = [p.name for p in (run / "videos" / "iteration_000002").iterdir()]
    assert len(videos) == 2 and all(name.endswith(("_success.mp4", "_failure.mp4")) for name in videos)


def test_quiet_leaves_results_only(policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    argv = ["--pretrain", str(policy_folder), "--save_path", str(tmp_path / "q"), *FLAGS, "--num_episodes", "8"]
    train([*argv, "--no-use_tensorboard", "--quiet"])
    out, err = capsys.readouterr()
    assert "iteration 1/1" not in out + err and "rollout" not in err
    assert "success at end [95 %]" in out, "the closing table is a result"
