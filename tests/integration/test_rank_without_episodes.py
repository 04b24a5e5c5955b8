"""A rank whose episodes all failed: it judges and trains along with the other one, which has some."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cli.train_ppo_vla import main as train
from rlvla.models.value_models import RewardModel
from rlvla.trainer.group_collector import reshard_if_any_empty
from rlvla.utils.files import read_metrics
from tests.support import failing_reach
from tests.support.experience import SAMPLES
from tests.support.ranks import ManyRanks
from tests.support.two_ranks import run

MODULE = str(Path(failing_reach.__file__))
FLAGS = ["--task_suite_name", "failing_reach", "--custom_module", MODULE, "--max_dropped_fraction", "1"]
FLAGS += ["--max_env_retries", "0", "--num_episodes", "8", "--rollout_batch_size", "8", "--train_batch_size", "4"]
FLAGS += ["--num_envs", "1", "--eval_episodes", "2", "--no-val_before_train", "--no-use_tensorboard"]
FLAGS += ["--max_steps", "8", "--no-check_start", "--max_epochs", "1"]


def test_episodes_are_dealt_out_by_group_where_a_rank_has_none() -> None:
    """Groups stay whole, nobody is left without, and nothing moves where all have some."""
    world = ManyRanks(2)
    a, b = (run_both(world, lambda s, own=own: reshard_if_any_empty(own[s.rank], s)) for own in (_SOME, _NONE))
    assert a == [(_SOME[0], 2), (_SOME[1], 2)]
    assert [total for _, total in b] == [2, 2]
    assert [{s.uid for s in samples} for samples, _ in b] == [{"a"}, {"b"}]
    assert sorted(s.seed for samples, _ in b for s in samples) == [1, 2, 3, 4, 5]
    few = [SAMPLES[:1], []]
    assert run_both(world, lambda s: reshard_if_any_empty(few[s.rank], s)) == [([], 0), ([], 0)]


_SOME = [[s for s in SAMPLES if s.uid == uid] for uid in "ab"]
_NONE = [list(SAMPLES), []]


def run_both(world: ManyRanks, function: Callable) -> list:
    with ThreadPoolExecutor(2) as pool:
        return [f.result(timeout=300) for f in [pool.submit(function, world.of(rank)) for rank in range(2)]]


def train_on_a_rank(rank: int, failing: str, runs: list[list[str]]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", failing_reach.FAILING_RANKS: failing}
    for flags in runs:
        train(flags)


@pytest.mark.slow
def test_training_goes_on_with_what_the_other_rank_has(policy_folder: Path, tmp_path: Path) -> None:
    RewardModel.from_policy(policy_folder).save_pretrained(tmp_path / "reward")
    variants = {
        "gae": ["--reward_pretrain", str(tmp_path / "reward"), "--dump_rollouts"],
        "filtered": ["--advantage_estimator", "grpo", "--n_samples_per_prompt", "2", "--rollout_batch_size", "4"],
    }
    variants["filtered"] += ["--filter_truncated", "--max_rollout_rounds", "1"]
    common = ["--pretrain", str(policy_folder), *FLAGS]
    runs = [[*common, "--save_path", str(tmp_path / name), *flags] for name, flags in variants.items()]
    run(train_on_a_rank, "1", runs)  # ends: nobody waits for a rank that has left the others
    (first,) = [record for record in read_metrics(tmp_path / "gae") if "rollout/kept_groups" in record]
    assert first["rollout/dropped"] >= 4 and first["rollout/kept_groups"] == 4
    assert first["actor/optimizer_steps"] >= 1, "the four episodes that were played are trained on"
    assert len(list((tmp_path / "gae" / "rollouts").iterdir())) == 1
