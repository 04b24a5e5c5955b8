"""The evaluation command: baselines, earlier results, protocols that differ, interruptions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cli.eval_vla import main
from rlvla.commands import evaluate as eval_run
from rlvla.evaluation.report import PolicyEvaluation
from rlvla.rollout import RolloutEngine
from rlvla.utils import bars

ARGS = ["--num_envs", "2", "--eval_episodes", "6"]


@pytest.fixture
def other_policy(policy_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(policy_folder, tmp_path / "other"))


def refused(capsys: pytest.CaptureFixture, *argv: object) -> str:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in argv])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_baselines_play_the_same_episodes(
    policy_folder: Path, other_policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    output = tmp_path / "figures" / "new.json"
    argv = ["--pretrain", policy_folder, "--compare", other_policy, "--output", output, "--sampled"]
    main([str(word) for word in [*argv, "--report", output.parent, "--num_videos", 1, "--video_cameras", "top", *ARGS]])
    page = (output.parent / "report.html").read_text()
    assert page.count("data:video/mp4") == 4 and page.count('<div class="pair">') == 2, "each beside the other's"
    videos = list((output.parent / "new_videos").rglob("*.mp4"))
    assert len(videos) == 4 and {v.parent.name for v in videos} == {"greedy", "sampled"}
    assert {v.parent.parent.name for v in videos} == {
        str(p).replace("/", "_")[1:] for p in (policy_folder, other_policy)
    }
    content = json.loads(output.read_text())
    (base,) = content["baselines"]
    assert base["policy"] == str(other_policy) and base["results"] == content["results"]
    assert [c["mode"] for c in content["comparisons"]] == ["greedy", "sampled"]
    for comparison in content["comparisons"]:
        assert comparison["paired"] and comparison["lost_states"] == []
        assert [(d["n"], d["difference"], d["p_value"]) for d in comparison["differences"]] == [(6, 0.0, 1.0)] * 2
    text = output.with_suffix(".md").read_text()
    assert f"## {policy_folder}, greedy" in text and f"## {policy_folder} minus {other_policy} (sampled" in text
    assert "| reach | 6 |" in text and "Measured with rlvla" in text
    told = capsys.readouterr().out
    assert "minus" in told and told.count(")\n\n") == 6, "a blank line after each table"
    assert content["trained_on"].startswith("trained on initial states") and f"{content['trained_on']})\n\n" in told
    assert content["trained_on"] in text
    # An earlier result takes the place of its policy.
    main(["--pretrain", str(other_policy), "--compare", str(output), *ARGS])
    again = json.loads((other_policy / "eval.json").read_text())
    assert again["comparisons"][0]["baseline"] == str(policy_folder)
    assert len(again["comparisons"]) == 1  # only one of them was sampled


def test_another_protocol_is_refused_before_anything_starts(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier, output = tmp_path / "earlier.json", tmp_path / "new.json"
    main(["--pretrain", str(policy_folder), "--output", str(earlier), *ARGS])
    capsys.readouterr()
    argv = ["--pretrain", policy_folder, "--compare", earlier, *ARGS, "--seed", 1, "--eval_episodes", 4]
    with monkeypatch.context() as patch:
        patch.setattr(eval_run, "start_workers", None)
        err = refused(capsys, *argv, "--output", output)
    assert "seed 1 and 0" in err and "initial states of reach (4 and 6)" in err and "--allow_unpaired" in err
    assert not output.exists()
    main([str(word) for word in [*argv, "--output", output, "--allow_unpaired"]])
    (comparison,) = json.loads(output.read_text())["comparisons"]
    assert not comparison["paired"] and comparison["differences"][0]["p_value"] is None
    assert "THE PROTOCOLS DIFFER" in capsys.readouterr().out
    assert "THE PROTOCOLS DIFFER" in output.with_suffix(".md").read_text()


def test_all_problems_of_baselines_at_once(policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    broken, old = tmp_path / "broken.json", tmp_path / "old.json"
    broken.write_text("{")
    old.write_text(json.dumps({"policy": "x", "environment": {}, "protocols": {}, "results": []}))
    err = refused(capsys, "--pretrain", policy_folder, "--compare", broken, tmp_path / "none", policy_folder, *ARGS)
    assert f"{broken} is not valid JSON" in err and str(tmp_path / "none") in err
    assert "is given twice" in err and err.count("  - ") == 3
    assert "does not hold the single episodes" in refused(capsys, "--pretrain", policy_folder, "--compare", old, *ARGS)


def test_a_killed_evaluation_continues(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    argv = ["--pretrain", str(policy_folder), "--sampled", *ARGS]
    main([*argv, "--output", str(tmp_path / "whole.json")])
    run, played = RolloutEngine.run, []

    def dying(self, requests, policy, *, on_episode, **options):
        def seen(sample):
            on_episode(sample)
            played.append(sample.init_state_id)
            if len(played) == 9:
                raise KeyboardInterrupt

        return run(self, requests, policy, on_episode=seen, **options)

    output = tmp_path / "parts.json"
    with monkeypatch.context() as patch:
        patch.setattr(RolloutEngine, "run", dying)
        with pytest.raises(SystemExit, match="130"):
            main([*argv, "--output", str(output)])
        assert not output.exists() and not output.with_suffix(".md").exists()
        capsys.readouterr()
        patch.setattr(bars, "_LOG_SECONDS", 0)
        main([*argv, "--output", str(output)])  # what is left is 3 of 12
    assert len(played) == 12
    told, shown = capsys.readouterr()
    assert "evaluate greedy: 6 of 6 episodes are kept from the interrupted evaluation" in told
    assert "evaluate sampled: 3 of 6 episodes" in told and "evaluate sampled: 3/6" in shown and ": 0/6" not in shown
    assert json.loads(output.read_text())["results"] == json.loads((tmp_path / "whole.json").read_text())["results"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["parts.json", "parts.md", "whole.json", "whole.md"]


def test_states_from_a_file(policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    states, output = tmp_path / "states.yaml", tmp_path / "own.json"
    states.write_text("reach: [9001, 9003, 9005]")
    argv = ["--pretrain", policy_folder, "--eval_states_file", states, "--output", output, "--num_envs", 1]
    assert "holds 3 initial states of reach, fewer than 100" in refused(capsys, *argv)
    main([str(word) for word in [*argv, "--eval_episodes", 3]])
    (result,) = json.loads(output.read_text())["results"]
    assert [e["init_state_id"] for e in result["episodes"]] == [9001, 9003, 9005]
    assert result["protocol"] == "states of states.yaml, trained on heldout"


def test_other_figures_are_kept(policy_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "mine.json"
    argv = ["--pretrain", str(policy_folder), "--output", str(output), "--num_envs", "1", "--eval_episodes"]
    for episodes in ("3", "2", "2", "1"):
        main([*argv, episodes])
    found = {path.name: len(PolicyEvaluation.read(path).results[0].episodes) for path in tmp_path.glob("*.json")}
    assert found == {"mine_1.json": 3, "mine_2.json": 2, "mine.json": 1}, "what is the same again is kept once"
    assert sorted(path.name for path in tmp_path.glob("*.md")) == ["mine.md", "mine_1.md", "mine_2.md"]
