"""The model card: recorded facts, without paths and addresses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from rlvla.checkpoints.policy_folder import PolicyRecord
from rlvla.envs.config import EnvConfig
from rlvla.envs.splits import LearnedStates
from rlvla.evaluation.model_card import model_card, read_card_record
from rlvla.utils.errors import ConfigError
from tests.support.shared_policies import evaluation, make_run


def test_a_card_of_an_evaluated_policy(tmp_path: Path) -> None:
    policy = make_run(tmp_path / "ppo")
    (policy / "eval.json").write_text(json.dumps(evaluation(18, str(policy))))
    text = model_card(read_card_record(policy), "me/toy-reach", "apache-2.0")
    for phrase in (
        "| suite | toy_reach |",
        "| tasks | reach |",
        "- initial states 0 to 7999 of toy_reach, task 0\n\n",
        "2.0 k episodes of reinforcement learning, 20.5 k environment steps",
        "python train_ppo_vla.py --save_path=ppo --vlm_url URL --seed 0",
        "Code: rlvla 9.8.7, commit 0123abc.",
        "### toy_reach, greedy",
        "Protocol heldout; seed 3; trained on initial states 0..7999 of reach",
        "| reach | 20 | 90.0% [69.9, 97.2] |",
        "Measured with rlvla 9.8.7, torch 2.13.0; every episode is in eval.json",
        "hf download me/toy-reach --local-dir toy-reach",
        "`apache-2.0`",
    ):
        assert phrase in text, f"{phrase}\n{text}"
    assert str(tmp_path) not in text and "10.0.0.7" not in text and "/home/me" not in text
    assert "32 to 7994" not in text, "these are among the others"
    head = ModelCard(text).data
    assert (head.license, head.library_name, head.pipeline_tag) == ("apache-2.0", "rlvla", "robotics")
    (figure,) = head.eval_results
    assert (head.model_name, figure.dataset_type, figure.metric_value) == ("toy-reach", "toy_reach", 90.0)
    assert figure.metric_name == "success at end, greedy, % [69.9, 97.2], n = 20"


def test_tasks_whose_initial_states_are_not_recorded_are_listed(tmp_path: Path) -> None:
    env = EnvConfig(task_suite_name="libero_spatial", task_ids=(3,))
    (tmp_path / "config.json").write_text('{"type": "smolvla"}')
    of_task = LearnedStates("libero_spatial", 3, 0, 0)
    PolicyRecord(env, (of_task, replace(of_task, stop=40), replace(of_task, start=5, stop=9))).write(tmp_path)
    card = model_card(read_card_record(tmp_path), "me/toy")
    assert "- unrecorded initial states of libero_spatial, task 3" in card
    assert "- initial states 0 to 39 of libero_spatial, task 3" in card and "5 to 8" not in card


def test_several_suites_have_figures_each(tmp_path: Path) -> None:
    policy = make_run(tmp_path / "ppo")
    suites = {name: evaluation(count, "p") for name, count in (("far", 3), ("near", 20))}
    (policy / "eval.json").write_text(json.dumps({"policy": "p", "suites": suites}))
    text = model_card(read_card_record(policy), "me/toy")
    assert text.index("### far, greedy") < text.index("15.0%") < text.index("### near, greedy")
    assert text.index("### near, greedy") < text.index("| reach | 20 | 100.0%")
    assert [e.metric_value for e in ModelCard(text).data.eval_results] == [15.0, 100.0]


def test_without_an_evaluation_the_last_one_of_the_training_counts(tmp_path: Path) -> None:
    policy = make_run(tmp_path / "ppo")
    text = model_card(read_card_record(policy), "me/toy")
    assert "the evaluation after iteration 8 of the training" in text and "75.0%" in text and "Measured" not in text
    assert "No license has been chosen yet" in text and ModelCard(text).data.license == "unknown"
    other = policy.rename(policy.with_name("best_policy"))  # of another iteration
    assert "Not evaluated yet" in model_card(read_card_record(other), "me/toy")


def test_a_card_without_records_states_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"type": "smolvla"}')
    text = model_card(read_card_record(tmp_path), "me/toy")
    for phrase in (
        *("family smolvla,", "is not recorded", "Not evaluated yet", "Code: not recorded."),
        "The initial states of its training are not recorded.",
    ):
        assert phrase in text
    head = yaml.safe_load(text.split("---")[1])
    assert "model-index" not in head and head["tags"] == [
        *("robotics", "reinforcement-learning", "vision-language-action")
    ]


def test_damaged_records_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        read_card_record(tmp_path / "nothing")
    policy = make_run(tmp_path / "ppo")
    (tmp_path / "ppo/evaluations.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"evaluations\.json does not hold evaluations \(IndexError"):
        read_card_record(policy)


MARKUP = "x` <script>alert(1)</script> ![](http://evil) [a](b)\n# Heading\n---\n| cell |"


def test_texts_of_a_folder_add_no_markup(tmp_path: Path) -> None:
    policy = make_run(tmp_path / "ppo")
    config = {"model_type": MARKUP}
    (policy / "config.json").write_text(json.dumps(config))
    environment = json.loads((policy / "rlvla_environment.json").read_text())
    environment |= {"task_suite_name": MARKUP, "cameras": [MARKUP], "render_quality": MARKUP}
    learned = {"suite": MARKUP, "task_id": None, "start": 0, "stop": 5}
    (policy / "rlvla_environment.json").write_text(json.dumps(environment | {"learned_from": [learned]}))
    content = evaluation(18, MARKUP) | {"trained_on": MARKUP, "versions": {MARKUP: MARKUP}}
    protocol = content["protocols"]["greedy"]
    content["protocols"]["greedy"] = protocol | {"suite": MARKUP, "seed": MARKUP}
    for result in content["results"]:
        result |= {"protocol": MARKUP, "dropped": MARKUP, "success_source": MARKUP}
        for task in result["tasks"]:
            task |= {"name": MARKUP}
    (policy / "eval.json").write_text(json.dumps(content))
    header = f"# rlvla 9.8.7 {MARKUP!r}\n# python train.py --a '```' '{MARKUP[:50]}'\n"
    (policy.parent / "config.yaml").write_text(header)
    card = model_card(read_card_record(policy), "me/toy")
    head, body = card.split("\n---\n", 1)
    assert yaml.safe_load(head)["tags"][-1] == MARKUP, "one value"
    prose = re.sub(r"(?ms)^```bash\n.*?\n```$", "", body)
    prose = prose.replace("(`--license`)", "")
    assert "```" not in prose and "<" not in prose and "\n# Heading" not in prose and "\n---" not in prose
    assert not re.search(r"(?<!\\)(\][\[(:]|`)", prose), "neither links nor code"


def test_totals_of_another_type_are_an_error(tmp_path: Path) -> None:
    policy = make_run(tmp_path / "ppo")
    (policy.parent / "totals.json").write_text('{"episodes": "<b>many</b>", "env_steps": 3}')
    with pytest.raises(ConfigError, match="episodes is"):
        read_card_record(policy)
