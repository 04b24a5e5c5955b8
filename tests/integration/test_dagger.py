"""`dagger_vla.py`: rounds of corrections by the expert."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli import dagger_vla
from rlvla.checkpoints.policy_folder import learned_states, recorded_environment
from rlvla.commands import dagger
from rlvla.commands.dagger import (
    CORRECTIONS,
    DEMONSTRATIONS,
    RL,
    RL_TRAINING,
    DaggerConfig,
    Round,
    RoundCommands,
    next_source,
    run_dagger,
)
from rlvla.commands.sft_runs import TRAINING
from rlvla.data.reading import read_demonstrations
from rlvla.evaluation.results import Rate
from rlvla.models.families import check_checkpoint

COMMANDS = RoundCommands(
    {"collect_demos": ["collect"], TRAINING: ["train"], "eval_vla": ["evaluate"], RL_TRAINING: ["reinforce"]},
    *([], [], []),
)


def rate(successes: int) -> Rate:
    return Rate.of([True] * successes + [False] * (100 - successes))


def value_of(argv: list[str], flag: str) -> str:
    return next(token.partition("=")[2] for token in argv if token.startswith(f"--{flag}="))


@pytest.mark.parametrize(
    ("successes", "flags", "best", "end"),
    [
        ([96], {}, 0, "target reached (--target_success 0.95)"),
        ([40, 70, 97], {}, 2, "target reached"),
        ([40, 70, 70], {}, 1, "the last round did not improve success"),  # of equals the former
        ([40, 30], {}, 0, "the last round did not improve success"),
        ([40, 70, 90], {"max_minutes": 25.0}, 2, "time budget spent (--max_minutes 25)"),
        ([40], {"target_success": 0.4}, 0, "target reached"),
    ],
)
def test_rounds_end_with_the_best_policy(
    successes: list[int],
    flags: dict[str, float],
    best: int,
    end: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A round takes ten minutes; each continues from the best policy, on all data so far."""
    now, seeds = 0.0, set()
    start, folder = tmp_path / "start", tmp_path / "dagger"
    start.mkdir()
    (start / "weights").write_text("0")
    policies = [start]

    def run(argv: list[str], log: Path) -> None:
        nonlocal now
        if argv[0] == "collect":
            assert value_of(argv, "policy") == str(policies[-1]) and value_of(argv, "seed") not in seeds
            seeds.add(value_of(argv, "seed"))
            left = 60 * flags.get("max_minutes", 60.0) - now
            assert float(value_of(argv, "max_minutes")) == pytest.approx(left / 120)
        elif argv[0] == "train":
            now += 600.0
            data = argv[argv.index("--demos") + 1 : -2]
            rounds = [str(folder / f"round_{n}" / "corrections" / "demos.hdf5") for n in range(1, len(policies) + 1)]
            assert data == ["a.hdf5", *rounds] and value_of(argv, "pretrain") == str(policies[-1])
            policy = Path(value_of(argv, "save_path")) / "policy"
            policy.mkdir(parents=True)
            (policy / "weights").write_text(str(len(policies)))
            policies.append(policy)
        else:
            assert value_of(argv, "pretrain") == str(policies[-1])

    outcomes = iter(successes)
    monkeypatch.setattr(dagger, "run_logged", run)
    monkeypatch.setattr(dagger, "success_of", lambda path: rate(next(outcomes)))
    monkeypatch.setattr(dagger, "time", SimpleNamespace(monotonic=lambda: now))
    result = run_dagger(DaggerConfig(**{"max_minutes": 60.0, **flags}), start, ["a.hdf5"], folder, COMMANDS, 3)
    assert result == folder / "policy" and (result / "weights").read_text() == str(best)
    record = json.loads((folder / "rounds.json").read_text())
    assert [round(100 * entry["rate"]) for entry in record["rounds"]] == successes and record["best"] == best
    assert end in record["summary"] and end in capsys.readouterr().out and next(outcomes, None) is None


def played(source: str | None, success: int, before: int, minutes: float) -> Round:
    return Round(Path(), rate(success), 60 * minutes, source, (success - before) / 100)


@pytest.mark.parametrize(
    ("rounds", "source"),
    [
        ([], CORRECTIONS),
        ([(CORRECTIONS, 60, 40, 1)], DEMONSTRATIONS),
        ([(CORRECTIONS, 30, 40, 1)], DEMONSTRATIONS),
        ([(CORRECTIONS, 60, 40, 1), (DEMONSTRATIONS, 70, 60, 0.4)], DEMONSTRATIONS),  # 20 and 25 points a minute
        ([(CORRECTIONS, 60, 40, 1), (DEMONSTRATIONS, 70, 60, 0.6)], CORRECTIONS),
        ([(CORRECTIONS, 60, 40, 1), (DEMONSTRATIONS, 59, 60, 0.1)], CORRECTIONS),
        ([(CORRECTIONS, 60, 40, 1), (DEMONSTRATIONS, 70, 60, 1), (CORRECTIONS, 70, 70, 1)], DEMONSTRATIONS),
        ([(CORRECTIONS, 30, 40, 1), (DEMONSTRATIONS, 40, 40, 1)], None),
    ],
)
def test_the_source_with_the_largest_gain_per_minute_goes_on(
    rounds: list[tuple[str, int, int, float]], source: str | None
) -> None:
    results = [played(None, 40, 40, 1), *(played(*one) for one in rounds)]
    assert next_source((CORRECTIONS, DEMONSTRATIONS), results) == source


def test_a_round_without_gain_is_left_to_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next round starts from the best policy, on the data of all rounds."""
    start, folder = tmp_path / "start", tmp_path / "dagger"
    start.mkdir()
    commands: list[list[str]] = []

    def run(argv: list[str], log: Path) -> None:
        commands.append(argv)
        if argv[0] == "train":
            (Path(value_of(argv, "save_path")) / "policy").mkdir(parents=True)

    outcomes = iter([40, 30, 60, 60])
    monkeypatch.setattr(dagger, "run_logged", run)
    monkeypatch.setattr(dagger, "success_of", lambda path: rate(next(outcomes)))
    config = DaggerConfig(round_sources=(CORRECTIONS, DEMONSTRATIONS))
    with caplog.at_level(logging.INFO, "rlvla"):
        run_dagger(config, start, ["a.hdf5"], folder, replace(COMMANDS, environment=["--suite=s"]), 3)
    assert "; next: demonstrations" in caplog.text
    corrections, demonstrations, more = (argv for argv in commands if argv[0] == "collect")
    assert "--corrections" in corrections and f"--policy={start}" in corrections and "--suite=s" not in corrections
    assert demonstrations[1] == "--suite=s" and not any("policy" in word for word in demonstrations)
    assert more[1] == "--suite=s"
    second = [argv for argv in commands if argv[0] == "train"][1]
    files = [str(folder / f"round_{n}" / source / "demos.hdf5") for n, source in enumerate(config.round_sources, 1)]
    assert value_of(second, "pretrain") == str(start) and second[second.index("--demos") + 1 : -2] == ["a.hdf5", *files]
    record = json.loads((folder / "rounds.json").read_text())
    assert record["best"] == 2 and [one["source"] for one in record["rounds"]][:3] == [None, *config.round_sources]
    assert "round 2 kept; the last round did not improve success, of any source" in record["summary"]


def test_reinforcement_learning_continues_while_its_policy_is_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rounds are one run, with one initial policy and seed; one without gain leaves the best policy as it was."""
    start, folder = tmp_path / "start", tmp_path / "dagger"
    start.mkdir()
    runs: list[tuple[str, ...]] = []
    minutes: list[float] = []

    def run(argv: list[str], log: Path) -> None:
        if argv[0] == "train":
            (Path(value_of(argv, "save_path")) / "policy").mkdir(parents=True)
        elif argv[0] == "reinforce":
            assert "--gamma=0.9" in argv and "--load_checkpoint" in argv
            runs.append(tuple(value_of(argv, flag) for flag in ("save_path", "pretrain", "seed")))
            policy = Path(value_of(argv, "save_path")) / "policy"
            policy.mkdir(parents=True, exist_ok=True)
            (policy / "weights").write_text(str(len(runs)))
        elif argv[0] == "collect":
            minutes.append(float(value_of(argv, "max_minutes")))

    # rl gains twice; its third round does not, and corrections go on.
    outcomes = iter([40, 45, 60, 70, 70, 75, 70, 75])
    monkeypatch.setattr(dagger, "run_logged", run)
    monkeypatch.setattr(dagger, "success_of", lambda path: rate(next(outcomes)))
    clock = iter(range(0, 10000, 10))
    monkeypatch.setattr(dagger, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    config = DaggerConfig(60.0, round_sources=(CORRECTIONS, RL), round_rl_flags="--gamma=0.9")
    result = run_dagger(config, start, ["a.hdf5"], folder, COMMANDS, 3)
    first, corrected = folder / "round_2" / "rl", folder / "round_5" / "sft" / "policy"
    assert runs[0][:2] == (str(first), str(folder / "round_1" / "sft" / "policy"))
    assert len(runs) == 3 and len(set(runs)) == 1, "a run refuses to continue with other settings"
    assert (folder / "round_3" / "policy" / "weights").read_text() == "2"
    assert minutes[0] == pytest.approx(15.0, abs=0.5) and minutes[1] > 25  # shared with the source not tried yet
    record = json.loads((folder / "rounds.json").read_text())
    assert [one["source"] for one in record["rounds"]][1:5] == [CORRECTIONS, RL, RL, RL]
    assert Path(record["rounds"][5]["policy"]) == corrected and result == folder / "policy"


@pytest.mark.nightly
@pytest.mark.slow
def test_real_rounds_on_toy_reach(demos_file: Path, policy_folder: Path, tmp_path: Path) -> None:
    """From the folder of a run; the corrections come from training states, and the policy records them."""
    folder, run = tmp_path / "dagger", policy_folder.parent
    flags = ["--demos", str(demos_file), "--pretrain", str(run), "--save_path", str(folder)]
    rl = "--num_episodes=32 --rollout_batch_size=16 --n_samples_per_prompt=1 --train_batch_size=16"
    rl += " --eval_protocol=shared"
    sources = ["--round_sources", "corrections", "rl", f"--round_rl_flags={rl}", "--round_rl_processes=2"]
    sizes = ["--round_demos", "20", "--round_steps", "20", "--round_episodes", "10", "--train_batch_size", "16"]
    states = ["--train_init_states", "100", "300", "--eval_init_states", "400", "500"]
    dagger_vla.main([*flags, *sizes, *states, *sources, "--target_success", "1", "--no-use_tensorboard"])
    record = json.loads((folder / "rounds.json").read_text())
    assert [one["source"] for one in record["rounds"]][:3] == [None, CORRECTIONS, RL]
    check_checkpoint(folder / "round_2" / "policy")
    assert len(record["rounds"]) > 1 and record["rounds"][0]["policy"] == str(policy_folder)
    check_checkpoint(folder / "policy")
    demos = read_demonstrations(folder / "round_1" / "corrections" / "demos.hdf5")
    assert demos.has_corrections and {100 <= state < 300 for _, state in demos.init_states} == {True}
    learned = learned_states(recorded_environment(folder / "round_1" / "sft" / "policy"))
    assert all(any(state in one.states for one in learned) for _, state in demos.init_states)
    evaluated = json.loads((folder / "round_1" / "eval.json").read_text())
    assert set(evaluated["protocols"]["greedy"]["tasks"][0]["init_states"]) <= set(range(400, 500))
    with pytest.raises(SystemExit):  # its folder is in use
        dagger_vla.main([*flags, *sizes])


def test_problems_come_before_the_first_round(
    demos_file: Path, policy_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, used = tmp_path / "dagger", tmp_path / "used"
    used.mkdir()
    (used / "policy").touch()
    common = ["--demos", str(demos_file)]
    start = ["--pretrain", str(policy_folder)]
    for more, words in (
        (["--pretrain", "compact"], "--pretrain compact: a trained policy is corrected"),
        ([*start, "--save_path", str(used)], f"{used} already holds another run"),
        ([*start, "--round_steps", "0"], "round_steps"),
        ([*start, "--round_rl_flags=--gamma=0.9"], "no effect without rl in --round_sources"),
        ([*start, "--round_sources", "rl", "--round_rl_flags=--gamme=0.9"], "--gamme"),
        ([*start, "--max_steps", "3"], "give --round_steps"),
        ([*start, "--heldout_share", "0.1"], "--round_episodes measure success"),
        ([*start, "--offset_prob", "0.5"], "offset_prob"),
        ([*start, "--train_init_states", "0", "20000"], "initial states 0..19999 do not exist"),
    ):
        with pytest.raises(SystemExit) as ended:
            dagger_vla.main(["--save_path", str(folder), *common, *more])
        assert ended.value.code == 2 and words in " ".join(capfd.readouterr().err.split()), more
    dagger_vla.main(["--save_path", str(folder), *common, *start, "--dry_run"])
    assert "total in host memory" in capfd.readouterr().out and not folder.exists()


@pytest.mark.nightly
def test_flags_reach_the_commands_that_read_them(
    demos_file: Path, policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, settings = tmp_path / "mine.py", tmp_path / "flags.yaml"
    module.write_text("")
    settings.write_text("learning_rate: 0.003\nround_episodes: 7\n")
    given: list[RoundCommands] = []

    def run(
        config: DaggerConfig, policy: Path, demos: list[str], folder: Path, commands: RoundCommands, seed: int
    ) -> Path:
        given.append(commands)
        return folder

    monkeypatch.setattr(dagger_vla, "run_dagger", run)
    flags = ["--demos", str(demos_file), "--pretrain", str(policy_folder), "--output_dir", str(tmp_path / "dagger")]
    more = ["--config", str(settings), "--custom_module", str(module), "--offset_bias", "0.0", "-0.2", "--seed", "5"]
    states = ["--train_init_states", "0", "100", "--eval_init_states", "200", "300"]
    dagger_vla.main([*flags, *more, *states, "--num_envs", "3", "--round_demos", "20", "--train_batch_size=16"])
    (commands,) = given
    config = DaggerConfig(round_demos=20, round_episodes=7)
    own, place = ["--custom_module", str(module)], tmp_path / "place"
    both = ["--num_envs=3", *own, "--eval_init_states", "200", "300", "--train_init_states", "0", "100"]
    rest = ["--num_demos=20", "--offset_bias", "0.0", "-0.2", "--max_minutes=2.000", f"--output={place}", "--seed=9"]
    assert commands.collect(config, CORRECTIONS, policy_folder, place, 2.0, 9)[1:] == [
        *("--corrections", "--temperature=1.0", f"--policy={policy_folder}", *rest, *both),
    ]
    intervene = commands.collect(replace(config, takeover="intervene"), CORRECTIONS, policy_folder, place, 2.0, 9)
    assert "--intervene=expert" in intervene and "--corrections" not in intervene
    demonstrations = commands.collect(config, DEMONSTRATIONS, policy_folder, place, 2.0, 9)[1:]
    assert demonstrations[0] == "--task_suite_name=toy_reach" and demonstrations[-len(rest + both) :] == [*rest, *both]
    assert commands.evaluate(config, policy_folder, place)[1:] == [
        *("--eval_episodes=7", f"--pretrain={policy_folder}", f"--output={place}", *both)
    ]
    assert commands.train(config, policy_folder, ["a", "b"], place)[1:] == [
        *("--learning_rate=0.003", *own, "--seed", "5", "--train_batch_size=16", "--max_epochs=1000"),
        *("--max_steps=1000", "--demos", "a", "b", f"--pretrain={policy_folder}", f"--save_path={place}"),
    ]


@pytest.mark.parametrize(("limit", "words"), [(None, []), (60, ["--max_steps=60"])])
def test_recorded_episodes_have_their_own_step_limit(limit: int | None, words: list[str], tmp_path: Path) -> None:
    config = DaggerConfig(round_max_steps=limit)
    argv = COMMANDS.collect(config, CORRECTIONS, tmp_path, tmp_path / "corrections", 1.0, 0)
    assert [word for word in argv if "max_steps" in word] == words


def test_a_failed_command_ends_the_rounds_with_its_output(tmp_path: Path) -> None:
    program = tmp_path / "evaluate.py"
    program.write_text("print('the reason')\nraise SystemExit(3)\n")
    commands = replace(COMMANDS, programs={"eval_vla": [str(program)]})
    with pytest.raises(SystemExit, match=r"the reason\nevaluate\.py failed; its output: .*eval\.log"):
        run_dagger(DaggerConfig(), tmp_path, [], tmp_path / "dagger", commands, 0)
    assert (tmp_path / "dagger/round_0/eval.log").read_text() == "the reason\n"
