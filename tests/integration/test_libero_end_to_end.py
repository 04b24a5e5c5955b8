"""From LIBERO's demonstrations to a trained and evaluated policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlvla.envs.libero import install as libero_install
from rlvla.envs.mujoco.gl import make_gl_context
from rlvla.utils.errors import ConfigError, MissingExtraError
from tests.support.libero_files import write_demos

SMALL = ["--tiny_vision_dim", "16", "--tiny_llm_dim", "32", "--tiny_llm_layers", "1", "--tiny_patch_size", "16"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "task_id"),
    # tests/integration/test_documented_commands.py has libero_spatial and libero_10, and
    # tests/unit/envs/libero/test_env.py the simulator of each suite.
    [("libero_90", 30)],
)
def test_sft_from_hdf5_then_ppo_then_evaluation(suite: str, task_id: int, tmp_path: Path) -> None:
    try:
        name = libero_install.task_names()[suite][task_id]
        libero_install.find_assets(None)
        make_gl_context(1, 1).free()
    except (MissingExtraError, ConfigError) as error:
        pytest.skip(str(error))
    from cli.eval_vla import main as evaluate
    from cli.train_ppo_vla import main as train_ppo
    from cli.train_sft_vla import main as train_sft

    write_demos(tmp_path / "demos" / f"{name}_demo.hdf5")
    sft, ppo = tmp_path / "sft", tmp_path / "ppo"
    train_sft(
        ["--demos", str(tmp_path / "demos"), "--save_path", str(sft), "--cameras", "agentview", "wrist"]
        + ["--action_chunk_len", "4", "--max_epochs", "1", "--no-use_tensorboard", *SMALL]
    )
    train_ppo(
        ["--pretrain", str(sft / "policy"), "--task_suite_name", suite, "--save_path", str(ppo), "--max_steps", "8"]
        + ["--num_episodes", "4", "--rollout_batch_size", "2", "--train_batch_size", "2", "--num_envs", "1"]
        + ["--no-val_before_train", "--eval_episodes", "1", "--no-use_tensorboard"]
    )
    totals = json.loads((ppo / "totals.json").read_text())
    assert totals["episodes"] == 4 and totals["env_steps"] == 32
    recorded = json.loads((ppo / "run_config.json").read_text())["env"]
    assert recorded["task_suite_name"] == suite and recorded["task_ids"] == [task_id]
    assert recorded["cameras"] == ["agentview", "wrist"] and recorded["use_proprio"] and recorded["image_size"] == 64
    evaluate(["--pretrain", str(ppo / "policy"), "--eval_episodes", "2", "--num_envs", "1", "--max_steps", "8"])
    (result,) = json.loads((ppo / "policy" / "eval.json").read_text())["results"]
    assert result["success_at_end"]["n"] == 2 and result["protocol"] == "heldout"
