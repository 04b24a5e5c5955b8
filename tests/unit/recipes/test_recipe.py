"""Recipes: reading, merging, completion, and validation with line numbers before anything starts."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from cli.run_recipe import main
from rlvla.recipes.recipe import Stage, changes, chosen_variants, flags_of_stage, parsers_needed, plan, read_recipe
from rlvla.recipes.training_checks import require_extras, training_problems
from rlvla.utils.cli.flags import Parser
from rlvla.utils.errors import ConfigError, MissingExtraError

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.fixture(scope="module")
def parsers() -> dict[str, Parser]:
    commands = {name for path in SHIPPED for name in parsers_needed(read_recipe(path))}
    return {name: importlib.import_module(f"cli.{name}").build_parser() for name in commands}


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


WHOLE = """\
all: {seed: 0}
stages:
  demos: {task_suite_name: toy_reach, minutes: 1}
  sft: {max_epochs: 3, processes: 2, learning_rate: 2e-3}
  eval_sft:
  rl: {save_path: $output/ppo, eps_clip_low_high: [0.2, 0.28], bootstrap_truncated: false}
  eval_rl: {sampled: true}
variants:
  long: {sft: {max_epochs: 9}, all: {seed: 5}}
"""


def planned(
    folder: Path, parsers: dict[str, Parser], text: str = WHOLE, *, variant: str = "", **options
) -> dict[str, Stage]:
    recipe = read_recipe(written(folder, text))
    assignments, further = options.pop("assignments", ()), options.pop("further", ())
    sources = [
        *chosen_variants(recipe, [variant] if variant else []),
        changes(assignments),
        flags_of_stage("rl", further),
    ]
    return {stage.name: stage for stage in plan(recipe, parsers, folder / "run", sources, **options)}


def refused(folder: Path, parsers: dict[str, Parser], text: str, **options) -> dict[str | None, tuple[str, str]]:
    """Place -> (reason, text) of all problems."""
    with pytest.raises(ConfigError) as error:
        planned(folder, parsers, text, **options)
    return {problem.flag: (problem.reason, problem.text) for problem in error.value.problems}


def test_trials_have_the_settings_of_the_training_which_reads_the_choice(
    tmp_path: Path, parsers: dict[str, Parser]
) -> None:
    tune = '  tune: {candidates: ["action_chunk_len=[5,2]"], trial_steps: 100, eval_episodes: 30}\n  sft:'
    stages, run = planned(tmp_path, parsers, WHOLE.replace("  sft:", tune, 1)), tmp_path / "run"
    assert list(stages) == ["demos", "tune", "sft", "eval_sft", "rl", "eval_rl"]
    trials, training = stages["tune"], stages["sft"]
    assert trials.processes == 1 and training.processes == 2
    for word in ("--learning_rate=2e-3", "--max_epochs=3", f"--demos={run}/demos/demos.hdf5", "--trial_steps=100"):
        assert word in trials.argv
    assert f"--config={run}/tune/choice.yaml" in training.argv and f"--save_path={run}/tune" in trials.argv
    assert not {"--trial_steps=100", "--eval_episodes=30"} & set(training.argv)


def test_the_expert_of_the_demonstrations_corrects_the_policy(tmp_path: Path, parsers: dict[str, Parser]) -> None:
    """Later stages read the corrected policy; recorded demonstrations may have no expert."""
    text = WHOLE.replace("  eval_sft:", "  dagger: {learning_rate: 1e-3}\n  eval_sft:", 1)
    expert = ["demos.noise_std=0.1", "demos.offset_bias=[0,-0.2]"]
    stages, run = planned(tmp_path, parsers, text, assignments=expert), tmp_path / "run"
    assert list(stages) == ["demos", "sft", "dagger", "eval_sft", "rl", "eval_rl"]
    rounds = list(stages["dagger"].argv)
    assert {"--noise_std=0.1", f"--pretrain={run}/sft/policy", f"--demos={run}/demos/demos.hdf5"} <= set(rounds)
    assert rounds[rounds.index("--offset_bias") : rounds.index("--offset_bias") + 3] == ["--offset_bias", "0", "-0.2"]
    assert not any("num_demos" in word for word in rounds), "no other setting"
    for name in ("eval_sft", "rl"):
        assert f"--pretrain={run}/dagger/policy" in stages[name].argv
    more = ["dagger.round_sources=[corrections,rl]", "rl.gamma=0.9", "rl.eval_steps=3", "rl.processes=2"]
    with_rl = planned(tmp_path, parsers, text, assignments=more)["dagger"].argv
    (flags,) = (word for word in with_rl if word.startswith("--round_rl_flags="))
    assert "--gamma=0.9" in flags and not any(name in flags for name in ("eval_steps", "save_path", "pretrain"))
    assert "--round_rl_processes=2" in with_rl
    assert f"--pretrain={run}/ppo/policy" in stages["eval_rl"].argv
    (mine := tmp_path / "mine.hdf5").touch()
    recorded = planned(tmp_path, parsers, text, demos=[str(mine)])
    assert list(recorded) == ["sft", "eval_sft", "rl", "eval_rl"]
    assert f"--pretrain={run}/sft/policy" in recorded["rl"].argv


def test_candidates_are_checked_with_the_recipe(tmp_path: Path, parsers: dict[str, Parser]) -> None:
    text = WHOLE.replace("  sft:", '  tune: {candidates: ["action_chunk_len=[5,2]"]}\n  sft:', 1)
    several = planned(tmp_path, parsers, text, assignments=["tune.candidates=action_chunk_len=[8,4]"])
    assert "--candidates=action_chunk_len=[8,4]" in several["tune"].argv
    own = planned(
        tmp_path, parsers, text, assignments=["sft.save_path=$output/mine", "sft.minutes=7", "sft.max_minutes=9"]
    )
    assert "--max_minutes=9" in own["sft"].argv and "--max_minutes=9" not in own["tune"].argv
    assert f"--save_path={tmp_path / 'run'}/tune" in own["tune"].argv and own["tune"].minutes is None
    assert "tune" not in planned(tmp_path, parsers, text, assignments=["sft.action_chunk_len=8"])
    for candidates in ("[foo=[1,2]]", "null", "action_chunk_len=[0,2]"):
        assert "candidates" in refused(tmp_path, parsers, text, assignments=[f"tune.candidates={candidates}"])


def test_stages_read_the_outputs_of_earlier_ones(tmp_path: Path, parsers: dict[str, Parser]) -> None:
    stages, run = planned(tmp_path, parsers), tmp_path / "run"
    assert list(stages) == ["demos", "sft", "eval_sft", "rl", "eval_rl"]
    assert f"--demos={run}/demos/demos.hdf5" in stages["sft"].argv
    assert f"--pretrain={run}/sft/policy" in stages["eval_sft"].argv
    assert f"--pretrain={run}/sft/policy" in stages["rl"].argv and "--load_checkpoint" in stages["rl"].argv
    assert "--load_checkpoint" not in stages["sft"].argv
    assert "--load_checkpoint" in planned(tmp_path, parsers, assignments=["sft.save_steps=100"])["sft"].argv
    assert f"--pretrain={run}/ppo/policy" in stages["eval_rl"].argv
    assert stages["eval_rl"].output == run / "eval_rl.json"
    assert (stages["sft"].processes, stages["demos"].processes, stages["demos"].minutes) == (2, 1, 1)
    assert {"--seed=0", "--no-bootstrap_truncated"} <= set(stages["rl"].argv)
    other = planned(tmp_path, parsers, assignments=[f"rl.pretrain={tmp_path}"])
    assert f"--pretrain={tmp_path}" in other["rl"].argv, "what is given takes precedence"


def test_later_settings_take_precedence(tmp_path: Path, parsers: dict[str, Parser]) -> None:
    assert planned(tmp_path, parsers, variant="long")["sft"].settings["max_epochs"] == 9
    stages = planned(
        tmp_path,
        parsers,
        variant="long",
        assignments=["sft.max_epochs=1", "all.seed=7", "rl.eps_clip_low_high=[0.1, 0.3]", "all.processes=4"],
        further=["--num_episodes", "64", "--no-check_start", "--task_ids", "0", "1", "--eps_clip=0.1"],
    )
    assert stages["sft"].settings["max_epochs"] == 1
    assert {stage.settings["seed"] for stage in stages.values()} == {7}
    assert [stage.processes for stage in stages.values()] == [1, 4, 4, 4, 4]
    rl = stages["rl"].settings
    assert rl["eps_clip_low_high"] == [0.1, 0.3]
    assert (rl["num_episodes"], rl["check_start"], rl["task_ids"], rl["eps_clip"]) == ("64", False, ["0", "1"], "0.1")


def test_a_flag_may_have_the_name_of_another_tool(tmp_path: Path, parsers: dict[str, Parser]) -> None:
    text = WHOLE.replace("save_path: $output/ppo", "output_dir: $output/other, kl_coef: 0.1")
    stages = planned(tmp_path, parsers, text, assignments=["rl.init_kl_coef=0.2"], further=["--kl_coef", "0.3"])
    assert (stages["rl"].settings["init_kl_coef"], stages["rl"].output) == ("0.3", tmp_path / "run" / "other")
    assert not {"kl_coef", "output_dir"} & set(stages["rl"].settings)
    assert f"--pretrain={tmp_path}/run/other/policy" in stages["eval_rl"].argv


def test_null_is_the_default(tmp_path: Path, parsers: dict[str, Parser]) -> None:
    words = planned(tmp_path, parsers, assignments=["rl.eps_clip_low_high=", "sft.learning_rate=null"])
    assert not [w for name in ("rl", "sft") for w in words[name].argv if "eps_clip" in w or "learning" in w]


def test_recorded_demonstrations_replace_the_stage(tmp_path: Path, parsers: dict[str, Parser]) -> None:
    file = tmp_path / "my demos.hdf5"
    file.touch()
    stages = planned(tmp_path, parsers, demos=[str(file)])
    assert list(stages) == ["sft", "eval_sft", "rl", "eval_rl"]
    words = stages["sft"].argv
    assert words[words.index("--demos") + 1] == str(file)


EXPERT = """\
stages:
  sac: {task_suite_name: robosuite, action_space: primitives, policy: primitives, object_state: true}
  demos: {image_size: 32}
  sft:
"""


def test_a_policy_of_the_stage_before_records_the_demonstrations(tmp_path: Path, parsers: dict[str, Parser]) -> None:
    stages, run = planned(tmp_path, parsers, EXPERT), tmp_path / "run"
    assert list(stages) == ["sac", "demos", "sft"]
    assert f"--policy={run}/sac/policy" in stages["demos"].argv
    assert f"--save_path={run}/sac" in stages["sac"].argv and "--load_checkpoint" in stages["sac"].argv
    assert f"--demos={run}/demos/demos.hdf5" in stages["sft"].argv
    alone = EXPERT.replace("demos: {", f"demos: {{policy: {tmp_path}, ").replace("  sac", "  #sac")
    assert f"--policy={tmp_path}" in planned(tmp_path, parsers, alone)["demos"].argv, "it knows its suite"
    nowhere = EXPERT.replace("demos: {", "demos: {policy: /nowhere, ").replace("  sac", "  #sac")
    assert refused(tmp_path, parsers, nowhere).keys() == {"demos.policy"}
    (tmp_path / "known.hdf5").touch()
    assert list(planned(tmp_path, parsers, EXPERT, demos=[tmp_path / "known.hdf5"])) == ["sft"]


def test_all_problems_are_reported_at_once_with_their_lines(tmp_path: Path, parsers: dict[str, Parser]) -> None:
    text = """\
all:
  seed: many
  sead: 1
stages:
  demos:
    task_suite_name: toy_rech
    num_demos: 0
    processes: 2
  sft:
    max_epoch: 3
    minutes: soon
    dry_run: true
    learning_rate: true
  rl:
    gamma: {of: what}
    no-bootstrap_truncated: true
    task_ids: [0, one]
variants:
  other:
    rl: {temperature: hot}
"""
    problems = refused(
        tmp_path, parsers, text, assignments=["rl.lambd=x", "eval_rl.seed=1"], further=["--num_episode", "3"]
    )
    lines = {flag: text.partition("recipe.yaml, line ")[2].partition(":")[0] for flag, (_, text) in problems.items()}
    assert {(flag, problems[flag][0], lines[flag]) for flag in problems} == {
        ("all.seed", "invalid_value", "2"),
        ("all.sead", "unknown_name", "3"),
        ("demos.task_suite_name", "unknown_name", "6"),
        ("demos.num_demos", "out_of_range", "7"),
        ("demos.processes", "one_process", "8"),
        ("sft.max_epoch", "unknown_name", "10"),
        ("sft.minutes", "no_amount", "11"),
        ("sft.dry_run", "withheld", "12"),
        ("sft.learning_rate", "no_switch", "13"),
        ("rl.gamma", "no_value", "15"),
        ("rl.no-bootstrap_truncated", "write_false", "16"),
        ("rl.task_ids", "invalid_value", "17"),
        ("rl.temperature", "invalid_value", "20"),
        ("rl.lambd", "invalid_value", ""),
        ("eval_rl.seed", "no_stage", ""),
        ("rl.num_episode", "unknown_name", ""),
    }
    assert "--max_epochs" in problems["sft.max_epoch"][1], "a suggestion"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("stages: {demos: {}, train: {}}\nabuot: x", {("abuot", "unknown_part"), ("stages.train", "unknown_stage")}),
        ("stages: [demos, sft]", {("stages", "no_mapping")}),
        ("stages: {sft: [3]}\noutput: 7", {("stages.sft", "no_mapping"), ("output", "no_word")}),
        ("stages: {sft: {}}\nvariants: {a: 3}", {("variants.a", "no_mapping")}),
        ("stages: {all: {seed: 0}, sft: {}}", {("stages.all", "unknown_stage")}),
        ("stages:", {("recipe", "no_recipe")}),
        ("stages: {report: }", {("recipe", "no_recipe")}),
        ("", {("recipe", "no_recipe")}),
        ("- sft", {("recipe", "no_recipe")}),
        ("stages: {on: {}}\n1: 2", {("1", "unknown_part"), ("stages.true", "unknown_stage")}),
        ("stages: {sft: {seed: 1, seed: 2}}", {(None, "invalid_file")}),
        ("stages: !!python/object/apply:os.system [ls]", {(None, "invalid_file")}),
        ("stages: {sft: ", {(None, "invalid_file")}),
    ],
)  # fmt: skip
def test_invalid_recipes(tmp_path: Path, parsers: dict[str, Parser], text: str, expected: set) -> None:
    with pytest.raises(ConfigError) as error:
        plan(read_recipe(written(tmp_path, text)), parsers, tmp_path)
    found = {(problem.flag, problem.reason) for problem in error.value.problems}
    assert {problem for problem in found if problem[1] not in ("no_input", "no_suite")} == expected


def test_unknown_stages_flags_and_types_are_refused_together(tmp_path: Path, parsers: dict[str, Parser]) -> None:
    demos = "demos: {task_suite_name: toy_reach, num_demo: 3, image_size: big}"
    text = f"stages:\n  {demos}\n  fly: {{a: 1}}\n  sft: {{max_epochs: 1.5}}\nabout: [x]"
    problems = refused(tmp_path, parsers, text)
    wanted = {"demos.num_demo": 2, "demos.image_size": 2, "stages.fly": 3, "sft.max_epochs": 4, "about": 5}
    assert set(problems) == set(wanted)
    assert all(f"line {line}:" in problems[place][1] for place, line in wanted.items())


def test_missing_inputs_are_reported(tmp_path: Path, parsers: dict[str, Parser]) -> None:
    problems = refused(tmp_path, parsers, "stages: {sft: {}, eval_rl: {}}")
    assert {flag: reason for flag, (reason, _) in problems.items()} == {
        "sft.demos": "no_input",
        "eval_rl.pretrain": "no_input",
    }
    problems = refused(tmp_path, parsers, "stages: {demos: {}, rl: {pretrain: gone}}", assignments=["rl.demos=1"])
    assert {"demos.task_suite_name": "no_suite", "rl.pretrain": "missing_input"}.items() <= {
        flag: reason for flag, (reason, _) in problems.items()
    }.items()
    for name in ("gone.hdf5", "x" * 300, "a\0b"):
        assert refused(tmp_path, parsers, WHOLE, demos=[name])["sft.demos"][0] == "missing_input"


@pytest.mark.parametrize(
    ("assignment", "reason"),
    [
        ("seed=1", "no_assignment"),
        ("sft.seed", "no_assignment"),
        ("sft.=1", "no_assignment"),
        ("x.seed=1", "unknown_stage"),
        ("sft.save_steps=" + "9" * 4000, "invalid_file"),
        ("sft.demos=&a [*a]", "invalid_file"),
        ("sft.demos=" + "[" * 4000, "invalid_file"),
        ("sft.demos={" + "x" * 900 + ": 1, a: 1, a: 1}", "invalid_file"),
        ("sft.demos=2001-99-99", "invalid_file"),
    ],
)
def test_invalid_assignments(assignment: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        changes([assignment, "sft.seed=1"])
    assert [(problem.flag, problem.reason) for problem in error.value.problems] == [("set", reason)]
    assert len(str(error.value)) < 400


def test_long_names_are_shortened_in_messages(tmp_path: Path, parsers: dict[str, Parser]) -> None:
    name = "x" * 5000
    problems = refused(tmp_path, parsers, f"stages: {{sft: {{? {name} : 1, seed: {name}}}, ? {name} : {{}}}}")
    assert {"no_input", "unknown_stage", "unknown_name", "invalid_value"} == {reason for reason, _ in problems.values()}
    assert all(len(text) < 700 for _, text in problems.values())


@pytest.mark.parametrize("value", ["*.hdf5", "pick: the cube: now", "[open", "%x"])
def test_a_value_that_is_not_yaml_is_a_text(value: str) -> None:
    assert changes([f"sft.demos={value}"]).stages["sft"]["demos"] == value


def test_an_unknown_variant(tmp_path: Path, parsers: dict[str, Parser]) -> None:
    assert refused(tmp_path, parsers, WHOLE, variant="short")["variant"][0] == "unknown_variant"


def test_problems_of_the_training_are_reported_before_the_demonstrations(
    tmp_path: Path, parsers: dict[str, Parser]
) -> None:
    wrong = ["rl.rollout_batch_size=6", "rl.train_batch_size=4", "rl.num_episodes=60", "rl.use_kl_loss=true"]
    wrong.append("rl.rollout_actors=2")
    stages = planned(tmp_path, parsers, assignments=[*wrong, "rl.processes=4", "rl.early_stopping=true"]).values()
    found = {(problem.flag, problem.reason) for problem in training_problems(list(stages), parsers)}
    assert {
        ("rl.rollout_batch_size", "not_divisible"),
        ("rl.train_batch_size", "does_not_divide"),
        ("rl.early_stopping", "needs_flag"),
        ("rl.use_kl_loss", "no_effect"),
        ("rl.rollout_actors", "no_effect"),
    } <= found
    assert training_problems(list(planned(tmp_path, parsers).values())[:3], parsers) == []


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        (["sft.pretrain=compact", "sft.compact_head=tokens", "rl.action_noise_correlation=0.5"], "noise_correlation"),
        (["sft.pretrain=tiny", "sft.model_family=smolvla", "rl.action_noise_correlation=0.5"], "noise_correlation"),
        (["sft.pretrain=FOLDER", "rl.flow_steps=2"], "flow_steps"),
    ],
)
def test_settings_that_the_policy_does_not_have(
    tmp_path: Path, parsers: dict[str, Parser], policy_folder: Path, settings: list[str], flag: str
) -> None:
    settings = [setting.replace("FOLDER", str(policy_folder)) for setting in settings]
    stages = planned(tmp_path, parsers, assignments=settings).values()
    assert [text for text in map(str, training_problems(list(stages), parsers)) if flag in text]


def test_stages_are_checked_with_the_tasks_of_the_demonstrations(tmp_path: Path, parsers: dict[str, Parser]) -> None:
    """What would fail after minutes: too few episodes to stop by, more than there are states, rewards, tasks."""
    stop = ["rl.early_stopping=true", "rl.eval_steps=4", "rl.eval_episodes=40"]
    for wrong, problem in (
        (stop, ("rl.early_stopping", "too_few")),
        (["eval_sft.eval_episodes=100000"], ("eval_sft.eval_episodes", "out_of_range")),
        (["rl.eval_episodes=100000"], ("rl.eval_episodes", "out_of_range")),
        (["rl.reward=[success,nonsense]"], ("rl.reward", "unknown_name")),
        (["demos.task_ids=77"], ("demos.task_ids", "unknown_name")),
        (["rl.task_sampling=inverse_success"], ("rl.task_sampling", "no_effect")),
        (
            ["sft.pretrain=compact", "sft.compact_head=tokens", "rl.action_noise_correlation=0.5"],
            ("rl.action_noise_correlation", "mismatch"),
        ),
    ):
        stages = list(planned(tmp_path, parsers, assignments=wrong).values())
        assert problem in {(found.flag, found.reason) for found in training_problems(stages, parsers)}, wrong


def test_the_video_encoder_is_checked_before_the_first_stage(
    tmp_path: Path, parsers: dict[str, Parser], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)  # as if it were not installed
    require_extras(list(planned(tmp_path, parsers).values()))
    films = planned(tmp_path, parsers, assignments=["eval_rl.num_videos=1"])
    with pytest.raises(MissingExtraError, match=r"rlvla\[video\]"):
        require_extras(list(films.values()))
    recipe = str(written(tmp_path, WHOLE))
    with pytest.raises(SystemExit):
        main([recipe, "--output", str(tmp_path / "run"), "--dry_run", "--set", "eval_sft.num_videos=1"])
    assert "rlvla[video]" in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_recipes_of_the_repository_are_valid(path: Path, tmp_path: Path, parsers: dict[str, Parser]) -> None:
    recipe = read_recipe(path)
    suite = changes([] if "task_suite_name" in recipe.base.stages["demos"] else ["all.task_suite_name=toy_reach"])
    for variant in [(), *((name,) for name in recipe.variants)]:
        stages = plan(recipe, parsers, tmp_path, [*chosen_variants(recipe, variant), suite])
        assert all(stage.minutes for stage in stages) and recipe.about
        assert training_problems(stages, parsers) == []
        assert all(tmp_path in stage.output.parents for stage in stages)
