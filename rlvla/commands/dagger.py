"""DAgger (Ross et al. 2011): rounds of corrections by the scripted expert, for `cli/dagger_vla.py`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rlvla.commands.sft_runs import SUMMARY, TRAINING, run_logged
from rlvla.envs.experts import ExpertConfig
from rlvla.evaluation.report import PolicyEvaluation
from rlvla.evaluation.results import Rate
from rlvla.trainer.supervised.config import SFTRunConfig
from rlvla.utils.cli.flags import arg
from rlvla.utils.errors import Problem
from rlvla.utils.files import write_json
from rlvla.utils.seeding import derive_seed
from rlvla.utils.terminal import duration, log, show, table

OUTPUT = "runs/dagger"  # default of --save_path
ROUNDS_FILE, POLICY_FOLDER = "rounds.json", "policy"


@dataclass(frozen=True)
class DaggerConfig:
    """Rounds of corrections."""

    max_minutes: float = arg(
        5.0, "time budget: no round starts that would end later, judged by the round before", above=0
    )
    target_success: float = arg(
        0.95, "end once the policy succeeds in this fraction of its episodes on held-out states", above=0, maximum=1
    )
    round_demos: int = arg(300, "corrections per task and round", minimum=1, essential=True)
    round_steps: int = arg(1000, "optimizer steps per round", minimum=1, essential=True)
    round_episodes: int = arg(100, "episodes per task that measure the success of a round", minimum=1)

    def problems(self, run: SFTRunConfig, folder: Path) -> list[Problem]:
        """A folder in use, or no policy to start from; `run`: settings of the training, `folder`: --save_path."""
        problems = []
        if (folder / ROUNDS_FILE).exists() or any(folder.glob("round_*")):
            text = f"--save_path {folder} holds rounds; name another folder or remove it"
            problems.append(Problem("save_path", "folder_in_use", text))
        if not Path(run.pretrain).is_dir():
            text = f"--pretrain {run.pretrain}: a trained policy is corrected; give its folder"
            problems.append(Problem("pretrain", "missing", text))
        return problems


EXPERT_FLAGS = frozenset(field.name for field in fields(ExpertConfig))
# Flags of the command line that are not passed on to the training as they are.
WITHHELD = (
    *(field.name for field in fields(DaggerConfig)),
    *EXPERT_FLAGS,
    *("config", "demos", "dry_run", "max_steps", "num_envs", "pretrain", "save_path"),
)


@dataclass(frozen=True)
class Programs:
    """Arguments of Python for the commands of a round.

    Attributes:
        collect: `collect_demos.py`, without `--policy`, `--output` and `--seed`.
        train: `train_sft_vla.py`, without `--demos`, `--pretrain` and `--save_path`.
        evaluate: `eval_vla.py`, without `--pretrain` and `--output`.
    """

    collect: Sequence[str]
    train: Sequence[str]
    evaluate: Sequence[str]


def programs_of_rounds(
    config: DaggerConfig,
    commands: Mapping[str, list[str]],
    training: Sequence[str],
    expert: Sequence[str],
    common: Sequence[str],
) -> Programs:
    """The commands of a round.

    Args:
        config: the rounds.
        commands: name -> arguments of Python.
        training: flags of the training, without `WITHHELD`.
        expert: flags of the expert.
        common: flags of collecting and evaluating.
    """
    collect = ["--corrections", "--temperature=1.0", f"--num_demos={config.round_demos}", *expert, *common]
    epochs = [] if any(token.startswith("--max_epochs") for token in training) else ["--max_epochs=1000"]
    return Programs(
        [*commands["collect_demos"], *collect],
        [*commands[TRAINING], *training, *epochs, f"--max_steps={config.round_steps}"],
        [*commands["eval_vla"], f"--eval_episodes={config.round_episodes}", *common],
    )


def check_training(programs: Programs, policy: str, demos: Sequence[str], folder: Path, *, quiet: bool) -> None:
    """Let the training check its flags and files; SystemExit after its messages if it cannot use them."""
    flags = ["--pretrain", policy, "--demos", *demos, "--save_path", str(folder / "round_1" / "sft"), "--dry_run"]
    argv = [sys.executable, *programs.train, *flags]
    status = subprocess.run(argv, stdout=subprocess.DEVNULL if quiet else None, check=False).returncode
    if status:
        raise SystemExit(status)


@dataclass(frozen=True)
class Round:
    """A policy and its success; round 0 is the initial policy.

    Attributes:
        policy: its folder.
        success: success at the end of greedy episodes from held-out states.
        seconds: of corrections, training and evaluation.
    """

    policy: Path
    success: Rate
    seconds: float


def run_dagger(
    config: DaggerConfig, policy: Path, demos: Sequence[str], folder: Path, programs: Programs, seed: int
) -> Path:
    """Rounds of corrections and training, until one gains nothing; returns the folder of the best policy.

    A round continues the training of the best policy so far on the demonstrations and all corrections.

    Args:
        config: the rounds.
        policy: folder of the initial policy.
        demos: its demonstrations.
        folder: receives a folder per round, `rounds.json` and the best policy.
        programs: commands of a round.
        seed: of the corrections.

    Raises:
        SystemExit: a command of a round failed.
    """
    end = time.monotonic() + 60 * config.max_minutes
    rounds = [_evaluated(policy, folder / "round_0", programs, time.monotonic())]
    best, corrections = rounds[0], []
    log.info(f"initial policy: {best.success} of {best.success.n} episodes succeed")
    while True:
        if best.success.rate >= config.target_success:
            why = f"{best.success.rate:.0%} of the episodes succeed (--target_success {config.target_success:g})"
            break
        if len(rounds) > 1 and best is not rounds[-1]:
            why = "the last round gained nothing"
            break
        if time.monotonic() + (rounds[-1].seconds if len(rounds) > 1 else 0.0) > end:
            why = f"--max_minutes {config.max_minutes:g} are over"
            break
        started, number = time.monotonic(), len(rounds)
        place = folder / f"round_{number}"
        recording = ["--policy", str(best.policy), "--output", str(place / "corrections")]
        recording += ["--seed", str(derive_seed(seed, "dagger", number) % 2**31)]
        run_logged([*programs.collect, *recording], place / "corrections.log")
        corrections.append(str(place / "corrections" / "demos.hdf5"))
        training = ["--pretrain", str(best.policy), "--demos", *demos, *corrections, "--save_path", str(place / "sft")]
        run_logged([*programs.train, *training], place / "sft.log")
        rounds.append(_evaluated(place / "sft" / POLICY_FOLDER, place, programs, started))
        log.info(f"round {number}: {rounds[-1].success} ({duration(rounds[-1].seconds)})")
        best = max(best, rounds[-1], key=lambda one: one.success.rate)  # the former of equals
    shutil.copytree(best.policy, folder / POLICY_FOLDER)
    record = [{"policy": str(one.policy), "seconds": one.seconds, **asdict(one.success)} for one in rounds]
    summary = f"{rounds[0].success} -> {best.success} of {best.success.n} after {rounds.index(best)} rounds; {why}"
    write_json(folder / ROUNDS_FILE, {"rounds": record, "best": rounds.index(best), SUMMARY: summary})
    rows = [
        (number, config.round_demos * bool(number), one.success.n, str(one.success), duration(one.seconds))
        for number, one in enumerate(rounds)
    ]
    show(table(("round", "corrections per task", "n", "success at end [95 %]", "time"), rows))
    show(f"ended: {why}\nwritten: {folder / POLICY_FOLDER} (round {rounds.index(best)})")
    return folder / POLICY_FOLDER


def _evaluated(policy: Path, place: Path, programs: Programs, started: float) -> Round:
    """The success of a policy whose round started at that time."""
    path = place / "eval.json"
    run_logged([*programs.evaluate, "--pretrain", str(policy), "--output", str(path)], place / "eval.log")
    return Round(policy, _success(path), time.monotonic() - started)


def _success(path: Path) -> Rate:
    """Success at end in a file of `cli/eval_vla.py`."""
    (result,) = PolicyEvaluation.read(path).results
    return result.success_at_end
