"""DAgger (Ross et al. 2011): rounds of corrections by the scripted expert, for `cli/dagger_vla.py`."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlvla.commands.sft_rounds import POLICY_FOLDER, success_of
from rlvla.commands.sft_runs import TRAINING, run_logged
from rlvla.utils.cli.flags import arg
from rlvla.utils.files import write_json
from rlvla.utils.seeding import derive_seed
from rlvla.utils.terminal import SUMMARY, duration, log, show, table

if TYPE_CHECKING:
    from rlvla.evaluation.results import Rate

OUTPUT = "runs/dagger"  # default of --save_path
ROUNDS_FILE = "rounds.json"
REPLACED = {"max_steps": "give --round_steps", "heldout_share": "--round_episodes measure success"}
_RECORDING_SHARE = 0.5  # of the time left, at most


@dataclass(frozen=True)
class DaggerConfig:
    """Rounds of corrections."""

    max_minutes: float = arg(
        5.0,
        "time budget; a round starts only if another as long as the previous one would fit, and records for at most "
        "half of the time left",
        above=0,
    )
    target_success: float = arg(
        0.95, "end once the policy succeeds in this fraction of its episodes on held-out states", above=0, maximum=1
    )
    takeover: str = arg(
        "random",
        "the expert takes over for good at a random step of each episode, or as of collect_demos.py --intervene expert",
        choices=("random", "intervene"),
    )
    round_demos: int = arg(300, "corrections per task and round", minimum=1, essential=True)
    round_max_steps: int | None = arg(
        None, "step limit of the recorded episodes; default: that of the policy's environment", minimum=1
    )
    round_steps: int = arg(1000, "optimizer steps per round", minimum=1, essential=True)
    round_episodes: int = arg(100, "episodes per task that measure the success of a round", minimum=1)


@dataclass(frozen=True)
class RoundCommands:
    """The commands of a round, as arguments of Python.

    Attributes:
        programs: name of a command -> its program.
        training: flags of the training.
        recording: flags of `collect_demos.py`.
        common: flags of recording and evaluation.
    """

    programs: Mapping[str, Sequence[str]]
    training: Sequence[str]
    recording: Sequence[str]
    common: Sequence[str]

    def collect(self, config: DaggerConfig, policy: Path, output: Path, minutes: float, seed: int) -> list[str]:
        """Corrections of a policy."""
        takeover = ["--corrections"] if config.takeover == "random" else ["--intervene=expert"]
        flags = [*takeover, "--temperature=1.0", f"--num_demos={config.round_demos}", *self.recording]
        if config.round_max_steps is not None:
            flags.append(f"--max_steps={config.round_max_steps}")
        flags += [f"--max_minutes={minutes:.3f}", f"--policy={policy}", f"--output={output}", f"--seed={seed}"]
        return [*self.programs["collect_demos"], *flags, *self.common]

    def train(self, config: DaggerConfig, policy: Path, demos: Sequence[str], folder: Path) -> list[str]:
        """Training of a policy on demonstrations and corrections."""
        flags = ["--demos", *demos, f"--pretrain={policy}", f"--save_path={folder}"]
        return [*self.programs[TRAINING], *self.training, f"--max_steps={config.round_steps}", *flags]

    def evaluate(self, config: DaggerConfig, policy: Path, output: Path) -> list[str]:
        """Greedy success of a policy on held-out states."""
        flags = [f"--eval_episodes={config.round_episodes}", f"--pretrain={policy}", f"--output={output}"]
        return [*self.programs["eval_vla"], *flags, *self.common]


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
    config: DaggerConfig, policy: Path, demos: Sequence[str], folder: Path, commands: RoundCommands, seed: int
) -> Path:
    """Rounds of corrections and training, until one does not improve; returns the folder of the best policy.

    A round continues the training of the policy on the demonstrations and all corrections.

    Args:
        config: the rounds.
        policy: folder of the initial policy.
        demos: its demonstrations.
        folder: receives a folder per round, `rounds.json` and the best policy.
        commands: commands of a round.
        seed: of the corrections.

    Raises:
        SystemExit: a command of a round failed.
    """
    end = time.monotonic() + 60 * config.max_minutes
    rounds: list[Round] = []
    corrections: list[str] = []
    while True:
        number, started = len(rounds), time.monotonic()
        place, name = folder / f"round_{number}", "initial policy"
        if rounds:
            name, recorded = f"round {number}", place / "corrections"
            minutes = max(0.01, _RECORDING_SHARE * (end - started) / 60)
            seed_of_round = derive_seed(seed, "dagger", number) % 2**31
            run_logged(commands.collect(config, policy, recorded, minutes, seed_of_round), place / "corrections.log")
            corrections.append(str(recorded / "demos.hdf5"))
            run_logged(commands.train(config, policy, [*demos, *corrections], place / "sft"), place / "sft.log")
            policy = place / "sft" / POLICY_FOLDER
        run_logged(commands.evaluate(config, policy, place / "eval.json"), place / "eval.log")
        rounds.append(Round(policy, success_of(place / "eval.json"), time.monotonic() - started))
        success = rounds[-1].success
        log.info(f"{name}: {success} of {success.n} episodes succeed ({duration(rounds[-1].seconds)})")
        improved = len(rounds) < 2 or success.rate > rounds[-2].success.rate
        best = number if improved else number - 1
        if why := _end(config, success, improved, end - time.monotonic() - rounds[-1].seconds * bool(number)):
            break
        _record(folder, rounds, best, "not finished")
    shutil.copytree(rounds[best].policy, folder / POLICY_FOLDER)
    _record(folder, rounds, best, why)
    rows = [
        (number, config.round_demos * bool(number), one.success.n, str(one.success), duration(one.seconds))
        for number, one in enumerate(rounds)
    ]
    show(table(("round", "corrections per task", "n", "success at end [95 %]", "time"), rows))
    show(f"ended: {why}\nwritten: {folder / POLICY_FOLDER} ({f'round {best}' if best else 'the initial policy'})")
    return folder / POLICY_FOLDER


def _end(config: DaggerConfig, success: Rate, improved: bool, seconds_left: float) -> str:
    """Why no further round starts, or ""."""
    if success.rate >= config.target_success:
        return f"target reached (--target_success {config.target_success:g})"
    if not improved:
        return "the last round did not improve success"
    return f"time budget spent (--max_minutes {config.max_minutes:g})" if seconds_left <= 0 else ""


def _record(folder: Path, rounds: Sequence[Round], best: int, why: str) -> None:
    entries = [{"policy": str(one.policy), "seconds": one.seconds, **asdict(one.success)} for one in rounds]
    text = str(rounds[0].success)
    if len(rounds) > 1:
        text += f" -> {rounds[best].success} after {best} round{'' if best == 1 else 's'}"
    summary = f"{text}, of {rounds[0].success.n} episodes; {why}"
    write_json(folder / ROUNDS_FILE, {"rounds": entries, "best": best, SUMMARY: summary})
