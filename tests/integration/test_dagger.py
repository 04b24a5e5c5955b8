"""`dagger_vla.py`: rounds of corrections by the expert."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli import dagger_vla
from rlvla.commands import dagger
from rlvla.commands.dagger import DaggerConfig, Programs, run_dagger
from rlvla.evaluation.results import Rate

PROGRAMS = Programs(["collect.py"], ["train.py"], ["evaluate.py"])


def rate(successes: int) -> Rate:
    return Rate.of([True] * successes + [False] * (100 - successes))


@pytest.mark.parametrize(
    ("successes", "flags", "best", "end"),
    [
        ([96], {}, 0, "96% of the episodes succeed"),
        ([40, 70, 97], {}, 2, "97% of the episodes succeed"),
        ([40, 70, 70], {}, 1, "the last round gained nothing"),  # of equals the former
        ([40, 30], {}, 0, "the last round gained nothing"),
        ([40, 70, 90], {"max_minutes": 25.0}, 2, "--max_minutes 25 are over"),
        ([40], {"target_success": 0.4}, 0, "40% of the episodes succeed"),
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
    clock, trained = [0.0], []
    (start := tmp_path / "start").mkdir()
    (start / "weights").write_text("0")

    def run(argv: list[str], log: Path) -> None:
        value = {name: argv[argv.index(name) + 1] for name in ("--policy", "--pretrain") if name in argv}
        if argv[0] == "collect.py":
            assert value["--policy"] == str(expected_policy()) and argv[argv.index("--seed") + 1] not in seen
            seen.add(argv[argv.index("--seed") + 1])
        elif argv[0] == "train.py":
            clock[0] += 600.0
            data = argv[argv.index("--demos") + 1 : argv.index("--save_path")]
            rounds = [str(folder / f"round_{n}" / "corrections" / "demos.hdf5") for n in range(1, len(trained) + 2)]
            assert data == ["a.hdf5", *rounds] and value["--pretrain"] == str(expected_policy())
            policy = Path(argv[argv.index("--save_path") + 1]) / "policy"
            policy.mkdir(parents=True)
            (policy / "weights").write_text(str(len(trained) + 1))
            trained.append(policy)

    def expected_policy() -> Path:
        return trained[-1] if trained else start

    seen: set[str] = set()
    outcomes = iter(successes)
    folder = tmp_path / "dagger"
    monkeypatch.setattr(dagger, "run_logged", run)
    monkeypatch.setattr(dagger, "_success", lambda path: rate(next(outcomes)))
    monkeypatch.setattr(dagger.time, "monotonic", lambda: clock[0])
    result = run_dagger(DaggerConfig(**{"max_minutes": 60.0, **flags}), start, ["a.hdf5"], folder, PROGRAMS, 3)
    assert result == folder / "policy" and (result / "weights").read_text() == str(best)
    record = json.loads((folder / "rounds.json").read_text())
    assert [round(100 * entry["rate"]) for entry in record["rounds"]] == successes and record["best"] == best
    assert end in record["summary"] and end in capsys.readouterr().out and next(outcomes, None) is None


@pytest.mark.slow
def test_real_rounds_on_toy_reach(demos_file: Path, policy_folder: Path, tmp_path: Path) -> None:
    flags = ["--demos", str(demos_file), "--pretrain", str(policy_folder), "--save_path", str(tmp_path / "dagger")]
    sizes = ["--round_demos", "20", "--round_steps", "20", "--round_episodes", "10", "--train_batch_size", "16"]
    dagger_vla.main([*flags, *sizes, "--target_success", "1", "--no-use_tensorboard"])
    record = json.loads((tmp_path / "dagger" / "rounds.json").read_text())
    assert len(record["rounds"]) > 1 and (tmp_path / "dagger" / "policy" / "config.json").exists()
    assert (tmp_path / "dagger" / "round_1" / "sft" / "metrics.jsonl").exists()
    with pytest.raises(SystemExit):  # its folder is in use
        dagger_vla.main([*flags, *sizes])


def test_problems_come_before_the_first_round(
    demos_file: Path, policy_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "dagger"
    flags = ["--demos", str(demos_file), "--save_path", str(folder)]
    for more, words in (
        (["--pretrain", "compact"], "--pretrain compact: a trained policy is corrected"),
        (["--pretrain", str(policy_folder), "--round_steps", "0"], "round_steps"),
        (["--pretrain", str(policy_folder), "--sft_loss", "nothing"], "sft_loss"),
        (["--pretrain", str(policy_folder), "--demos", str(tmp_path / "none.hdf5")], "none.hdf5"),
    ):
        with pytest.raises(SystemExit) as ended:
            dagger_vla.main([*flags, *more])
        assert ended.value.code == 2 and words in capfd.readouterr().err
    dagger_vla.main([*flags, "--pretrain", str(policy_folder), "--dry_run"])
    assert "total in host memory" in capfd.readouterr().out and not folder.exists()


def test_flags_reach_the_commands_that_read_them(
    demos_file: Path, policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, settings = tmp_path / "mine.py", tmp_path / "flags.yaml"
    module.write_text("")
    settings.write_text("learning_rate: 0.003\nround_episodes: 7\n")
    given: list[Programs] = []

    def run(config: DaggerConfig, policy: Path, demos: list[str], folder: Path, programs: Programs, seed: int) -> Path:
        given.append(programs)
        return folder

    monkeypatch.setattr(dagger_vla, "run_dagger", run)
    flags = ["--demos", str(demos_file), "--pretrain", str(policy_folder), "--save_path", str(tmp_path / "dagger")]
    more = ["--config", str(settings), "--custom_module", str(module), "--offset_bias", "0.0", "-0.2", "--seed", "5"]
    dagger_vla.main([*flags, *more, "--num_envs", "3", "--round_demos", "20", "--train_batch_size=16"])
    (programs,) = given
    own = ["--custom_module", str(module)]
    collect, train, evaluate = (list(words[1:]) for words in (programs.collect, programs.train, programs.evaluate))
    both = ["--num_envs=3", *own]
    assert collect == [
        *("--corrections", "--temperature=1.0", "--num_demos=20", "--offset_bias", "0.0", "-0.2"),
        *both,
    ]
    assert evaluate == ["--eval_episodes=7", *both]
    assert train == [
        *("--learning_rate=0.003", *own, "--seed", "5", "--train_batch_size=16", "--max_epochs=1000"),
        "--max_steps=1000",
    ]


def test_a_failed_command_ends_the_rounds_with_its_log(tmp_path: Path) -> None:
    program = tmp_path / "evaluate.py"
    program.write_text("print('the reason')\nraise SystemExit(3)\n")
    with pytest.raises(SystemExit, match=r"evaluate\.py failed; its output: .*eval\.log"):
        run_dagger(DaggerConfig(), tmp_path, [], tmp_path / "dagger", Programs([], [], [str(program)]), 0)
    assert (tmp_path / "dagger/round_0/eval.log").read_text() == "the reason\n"
