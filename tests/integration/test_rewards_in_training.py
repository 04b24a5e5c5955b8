"""All kinds of reward sources in one short training run: logged, weighted, scheduled, stopped where they must be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cli import train_ppo_vla
from rlvla.trainer import experience_maker
from tests.support.judge_server import completion, judge_server, of_start_check


@pytest.fixture
def train(policy_folder: Path, tmp_path: Path) -> Callable[..., list[dict]]:
    def run(*flags: str) -> list[dict]:
        words = ["--pretrain", str(policy_folder), "--save_path", str(tmp_path / "ppo"), "--num_episodes", "16"]
        words += ["--rollout_batch_size", "8", "--train_batch_size", "8", "--num_envs", "1", "--eval_episodes", "2"]
        words += ["--no-val_before_train", "--no-use_tensorboard", *flags]
        train_ppo_vla.main(words)
        lines = (tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if "rollout/success_at_end" in line]

    return run


def test_components_are_logged_and_scheduled(train: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("pydantic", reason="the extra vlm is not installed")
    mine = tmp_path / "mine.py"
    mine.write_text("def score(samples, pay):\n    return [(pay, {'steps': s.finish_step}) for s in samples]\n")
    flags = ["--reward", "success:1", "rm:0.5", "reward_fn:2", "vlm:1", "--reward_fn", f"{mine}:score"]
    flags += ["--reward_fn_kwargs", "pay=1.0", "--normalize_reward", "--reward_clip_range", "-5", "5"]
    flags += [
        "--overlong_buffer_len",
        "10",
        "--task_weights",
        "0:2",
        "--eval_temperature",
        "0.7",
        "--eval_samples",
        "2",
    ]
    flags += ["--reward_schedule", "reward_fn:linear:1:0.25", "--rm_formula", "F(near & F success)"]
    with judge_server() as server:
        server.answer = lambda request: (200, completion('{"action_score": 0.5, "progress": 0.5}'))
        flags += ["--vlm_url", f"{server.url}/v1", "--vlm_model", "judge", "--vlm_timeout", "120"]
        first, last = train(*flags)
    assert first["reward/reward_fn"] == 2 and last["reward/reward_fn"] == 0.5
    assert first["reward/vlm"] == 0 and first["reward/vlm_requests"] > 0 and first["reward/vlm_failures"] == 0
    assert 0 <= first["reward/rm_progress"] <= 1 and first["reward/rm_regressions"] == 0
    assert first["reward/reward_fn_steps"] == first["rollout/episode_length"]
    assert last["reward/normalizer_std"] > 0 and -1 <= first["reward/overlong"] < 0
    assert 0 < first["global_seqlen/mean"] == first["global_seqlen/balanced_max"]
    parts = sum(first[f"reward/{name}"] for name in ("success", "rm", "reward_fn", "vlm", "overlong"))
    assert first["reward/total"] == pytest.approx(parts, abs=1e-4)
    printed = capsys.readouterr().out
    assert f", reward {first['reward/total']:.3g}, " in printed
    assert "(sampled at temperature 0.7, 2 episodes per state: pass@2 " in printed
    evaluated = [line for line in (tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines() if "eval/n" in line]
    assert [json.loads(line)["eval/n"] for line in evaluated] == [4.0] and "eval/pass_at_2" in evaluated[0]


def test_the_total_is_that_of_the_episodes_that_are_trained_on(train: Callable) -> None:
    flags = ["--filter_zero_variance", "--n_samples_per_prompt", "2", "--advantage_estimator", "grpo"]
    for line in train(*flags, "--reward", "success", "rm:0.5"):
        assert line["reward/total"] == pytest.approx(line["critic/score/mean"])
        assert line["reward/total"] != pytest.approx(line["reward/success"] + line["reward/rm"]), (
            "of all that were played"
        )


def test_gdpo_weighs_components_by_the_weights_of_the_iteration(
    train: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, float]] = []
    estimator = experience_maker.get_advantage_estimator("gdpo")

    def listen(rewards, mask, *, component_weights, **options):
        seen.append(dict(component_weights))
        return estimator(rewards, mask, component_weights=component_weights, **options)

    monkeypatch.setattr(experience_maker, "get_advantage_estimator", lambda name: listen)
    flags = ["--advantage_estimator", "gdpo", "--n_samples_per_prompt", "4", "--rollout_batch_size", "2"]
    flags += ["--reward", "success:1", "rm:0.5", "--rm_formula", "F(near & F success)", "--no-check_start"]
    train(*flags, "--reward_schedule", "rm:linear:1:0.5")
    assert seen == [{"success": 1.0, "rm": 0.5}, {"success": 1.0, "rm": 0.25}]


def test_a_judge_that_fails_stops_training(train: Callable, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("pydantic", reason="the extra vlm is not installed")
    with judge_server() as server:
        good = completion('{"action_score": 0.5, "progress": 0.5}')
        server.answer = lambda request: (200, good if of_start_check(request) else completion("no idea"))
        flags = ["--reward", "vlm:1", "--vlm_url", f"{server.url}/v1", "--vlm_model", "judge"]
        with pytest.raises(SystemExit, match="1"):
            train(*flags)
    err = capsys.readouterr().err
    assert "the run was ended: 24 of 24 requests" in err and "AnswerError: no JSON object" in err


def test_bad_rewards_are_refused_before_anything_starts(train: Callable, capsys: pytest.CaptureFixture) -> None:
    flags = ["--reward", "succes:1", "--gamma_shaping", "0.5", "--rm_formula", "F(a &"]
    with pytest.raises(SystemExit) as stop:
        train(*flags)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and "unknown source 'succes'" in err and "--gamma_shaping 0.5 must equal" in err
