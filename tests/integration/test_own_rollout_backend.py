"""A rollout backend of the user's own, from `--custom_module` to a run that plays with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.train_ppo_vla import build_parser
from cli.train_ppo_vla import main as train
from rlvla.commands.custom_modules import load_custom_modules
from rlvla.commands.ppo_flags import PPORun
from rlvla.commands.train_ppo import run_ppo
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import read_metrics
from tests.support.flow_folders import QUICK, write_flow

MODULE = ["--custom_module", str(Path(__file__).parents[2] / "examples/plugins/bf16_rollouts.py")]
RUN = [
    *("--rollout_batch_size", "4", "--train_batch_size", "4", "--num_episodes", "8", "--eval_episodes", "2"),
    *("--max_steps", "8", "--num_envs", "1", "--no-check_start", "--no-val_before_train", "--no-use_tensorboard"),
    *("--advantage_estimator", "reinforce_baseline", "--n_samples_per_prompt", "2", "--rollout_is", "tis"),
]


def test_it_plays_and_its_rounding_is_measured(policy_folder: Path, tmp_path: Path) -> None:
    flags = [*MODULE, "--pretrain", str(policy_folder), "--save_path", str(tmp_path / "run"), *RUN]
    train([*flags, "--rollout_backend", "bf16"])
    (found,) = [record for record in read_metrics(tmp_path / "run") if "actor/pg_loss" in record]
    assert found["async/staleness_max"] == 0.0, "the version of the weights is recorded"
    assert 1e-6 < abs(found["rollout_corr/ess"] - 1.0) < 0.1, "log-probs of rollout and training differ a little"


def test_what_it_cannot_serve_is_refused(tmp_path: Path) -> None:
    load_custom_modules(MODULE)
    assert "bf16" in build_parser().format_help()
    start = write_flow(tmp_path / "start")
    flags = [*QUICK, "--pretrain", str(start), "--save_path", str(tmp_path / "run"), "--rollout_backend", "bf16"]
    with pytest.raises(ConfigError) as caught:
        run_ppo(PPORun.from_namespace(build_parser().parse_args(flags)))
    assert [(problem.flag, problem.reason) for problem in caught.value.problems] == [("rollout_backend", "mismatch")]
    assert not (tmp_path / "run").exists()
