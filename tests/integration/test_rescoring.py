"""Decisions of the replay buffer about which a model on a server is asked again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cli.train_sac_vla import main as train
from rlvla.utils.files import read_metrics
from tests.support.judge_server import JudgeServer, images_of, judge_server, judging

pytest.importorskip("pydantic", reason="the extra vlm is not installed")

SMALL = [
    *("--custom_module", "tests/support/state_reach.py", "--task_suite_name", "state_reach", "--num_envs", "1"),
    *("--deterministic_rollout", "--hidden_sizes", "16", "--train_batch_size", "16", "--rollout_batch_size", "4"),
    *("--random_episodes", "4", "--eval_episodes", "2", "--no-val_before_train", "--action_chunk_len", "3"),
    *("--no-use_tensorboard", "--read_images", "--image_size", "16", "--utd_ratio", "0.5", "--num_episodes", "16"),
    *("--reward", "success", "vlm:0", "--replay_priority", "vlm", "--replay_score_source", "vlm", "--max_steps", "12"),
    *("--vlm_model", "judge", "--vlm_max_failures", "1", "--vlm_warmup", "0", "--vlm_retries", "0"),
]
AGAIN = ["--replay_rescore_interval", "2", "--replay_rescore_budget", "30"]


def brightness(request: dict) -> float:
    return float(np.mean([image.mean() for image in images_of(request)])) / 255.0


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server() as running:
        running.answer = judging(progress=lambda r: {"action_score": 1, "progress": brightness(r)})
        yield running


def run(server: JudgeServer, folder: Path, *more: str) -> list[dict[str, float]]:
    train([*SMALL, "--vlm_url", f"{server.url}/v1", "--save_path", str(folder), *more])
    return [line for line in read_metrics(folder) if "rollout/episodes" in line]


def test_what_got_no_answer_is_asked_again(server: JudgeServer, tmp_path: Path) -> None:
    answer = server.answer

    def after_a_while(request: dict) -> tuple:
        # The first ones are asked before the run begins, which would not otherwise.
        return (400, {"error": "not yet"}) if 5 <= len(server.requests) <= 24 else answer(request)

    server.answer = after_a_while
    without = run(server, tmp_path / "once")
    server.requests.clear()
    again = run(server, tmp_path / "again", *AGAIN)
    assert min(lines[0]["replay/unjudged_share"] for lines in (without, again)) > 0.5
    assert without[-1]["replay/unjudged_share"] > 0.2 and again[-1]["replay/unjudged_share"] == 0
    assert 0 < max(line.get("replay/rescored", 0) for line in again) < 30 + 4, "the last episode may exceed the budget"
    assert "replay/rescored" not in without[0] and again[-1]["replay/score_age_mean"] >= 0


def test_old_scores_are_asked_for_again(server: JudgeServer, tmp_path: Path) -> None:
    lines = run(server, tmp_path / "run", "--replay_rescore_interval", "1", "--vlm_cache_size", "0")
    assert lines[0]["replay/unjudged_share"] == 0 and lines[1]["replay/rescored"] > 0
    assert lines[-1]["replay/score_age_mean"] < lines[-1]["critic/updates"] / 2


def test_a_run_that_waits_for_answers_resumes_to_the_bit(server: JudgeServer, tmp_path: Path) -> None:
    options = ["--replay_rescore_interval", "1", "--save_steps", "1", "--max_ckpt_num", "4"]
    whole = run(server, tmp_path / "whole", *options)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    parts = run(server, tmp_path / "parts", *options, "--load_checkpoint", "iteration_000002")
    weights = [load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("whole", "parts")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    same = [name for name in whole[-1] if name.startswith(("actor/", "critic/", "replay/"))]
    assert {name: whole[-1][name] for name in same} == {name: parts[-1][name] for name in same}
    assert whole[-2]["replay/rescored"] > 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--replay_score_source", "rm", "--reward", "success", "rm:0"], "only a model on a server"),
        (["--no-read_images"], "give --read_images"),
        (["--replay_rescore_interval", "0"], "--replay_rescore_budget 30: no effect without --replay_rescore_interval"),
    ],
)
def test_what_cannot_be_asked_again(
    changed: list[str], said: str, server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        run(server, tmp_path / "run", *AGAIN, *changed)
    assert said in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "run").exists()
