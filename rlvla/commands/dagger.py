"""DAgger (Ross et al. 2011): rounds of corrections by the scripted expert, for `cli/dagger_vla.py`.

Rounds of more demonstrations and of reinforcement learning compete with them by their measured gain per minute.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlvla.commands.sft_rounds import POLICY_FOLDER, evaluation_command, round_name, success_of
from rlvla.commands.sft_runs import TRAINING, run_logged
from rlvla.options import Condition
from rlvla.utils.cli.flags import arg
from rlvla.utils.files import write_json
from rlvla.utils.launcher import ranks_module, ranks_of
from rlvla.utils.seeding import derive_seed
from rlvla.utils.terminal import SUMMARY, duration, log, show, table

if TYPE_CHECKING:
    from rlvla.evaluation.results import Rate

OUTPUT = "runs/dagger"  # default of --save_path
ROUNDS_FILE = "rounds.json"
CORRECTIONS, DEMONSTRATIONS, RL = "corrections", "demonstrations", "rl"
RL_TRAINING = "train_ppo_vla"
REPLACED = {
    "max_steps": "give --round_steps",
    "heldout_share": "--round_episodes measure success",
    "save_steps": "a round cannot be resumed",
    "fallback_path": "a round is not continued from there",
}
_RECORDING_SHARE = 0.5  # of the time left, at most
_WITH_RL = Condition(lambda flags: RL in flags["round_sources"], f"no effect without {RL} in --round_sources")


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
        "takeover by the expert: random (at a random step, until the episode ends) or intervene (as with "
        "collect_demos.py --intervene expert)",
        choices=("random", "intervene"),
    )
    round_sources: tuple[str, ...] = arg(
        (CORRECTIONS,),
        "kinds of rounds: corrections, demonstrations of the expert alone, or reinforcement learning; of several, each "
        "is tried once, then the one whose last round gained the most success per minute",
        choices=(CORRECTIONS, DEMONSTRATIONS, RL),
    )
    round_demos: int = arg(300, "episodes that a round records, per task", minimum=1, essential=True)
    round_max_steps: int | None = arg(
        None, "step limit of the recorded episodes; default: that of the policy's environment", minimum=1
    )
    round_steps: int = arg(1000, "optimizer steps per round", minimum=1, essential=True)
    round_episodes: int = arg(100, "episodes per task that measure the success of a round", minimum=1)
    round_rl_flags: str | None = arg(
        None,
        'flags of train_ppo_vla.py for rounds of rl, in one text: --round_rl_flags="--gamma=0.99 --share_backbone"',
        metavar="FLAGS",
        read_if=_WITH_RL,
    )
    round_rl_minutes: float = arg(2.0, "minutes of training of a round of rl", above=0, read_if=_WITH_RL)
    round_rl_processes: int = arg(
        1, "processes of the training of a round of rl, at most one per GPU", minimum=1, read_if=_WITH_RL
    )


@dataclass(frozen=True)
class RLRun:
    """A run of reinforcement learning, which several rounds may continue.

    Attributes:
        policy: folder of the policy that it started from.
        folder: its --save_path.
        seed: its --seed.
    """

    policy: Path
    folder: Path
    seed: int


@dataclass(frozen=True)
class RoundCommands:
    """The commands of a round, as arguments of Python.

    Attributes:
        programs: name of a command -> its program.
        training: flags of the training.
        recording: flags of `collect_demos.py`.
        common: flags of recording and evaluation.
        environment: flags of the policy's environment.
    """

    programs: Mapping[str, Sequence[str]]
    training: Sequence[str]
    recording: Sequence[str]
    common: Sequence[str]
    environment: Sequence[str] = ()

    def collect(
        self, config: DaggerConfig, source: str, policy: Path, output: Path, minutes: float, seed: int
    ) -> list[str]:
        """Corrections of a policy, or demonstrations in its environment."""
        if source == DEMONSTRATIONS:
            player = list(self.environment)
        else:
            takeover = "--corrections" if config.takeover == "random" else "--intervene=expert"
            player = [takeover, "--temperature=1.0", f"--policy={policy}"]
        flags = [*player, f"--num_demos={config.round_demos}", *self.recording]
        if config.round_max_steps is not None:
            flags.append(f"--max_steps={config.round_max_steps}")
        flags += [f"--max_minutes={minutes:.3f}", f"--output={output}", f"--seed={seed}"]
        return [*self.programs["collect_demos"], *flags, *self.common]

    def train(self, config: DaggerConfig, policy: Path, demos: Sequence[str], folder: Path) -> list[str]:
        """Training of a policy on demonstrations and corrections."""
        flags = ["--demos", *demos, f"--pretrain={policy}", f"--save_path={folder}"]
        return [*self.programs[TRAINING], *self.training, f"--max_steps={config.round_steps}", *flags]

    def reinforce(self, config: DaggerConfig, run: RLRun, minutes: float) -> list[str]:
        """Reinforcement learning for some minutes, from the newest checkpoint if the run has any."""
        flags = [*self.common, *shlex.split(config.round_rl_flags or ""), "--load_checkpoint", f"--seed={run.seed}"]
        flags += ["--no-val_before_train", "--eval_episodes=1"]  # `evaluate` measures the policy
        flags += [f"--max_minutes={minutes:.3f}", f"--pretrain={run.policy}", f"--save_path={run.folder}"]
        return [*ranks_module(ranks_of(config.round_rl_processes)), *self.programs[RL_TRAINING], *flags]

    def evaluate(self, config: DaggerConfig, policy: Path, output: Path) -> list[str]:
        """See `evaluation_command`."""
        return evaluation_command(self.programs, self.common, config.round_episodes, policy, output)


@dataclass(frozen=True)
class Round:
    """A policy and its success; round 0 is the initial policy.

    Attributes:
        policy: its folder.
        success: success at the end of greedy episodes from held-out states.
        seconds: of recording, training and evaluation.
        source: kind of the round; None of round 0.
        gain: success less that of the best policy before it; 0 of round 0.
        run: the reinforcement learning that led to the policy, or None.
    """

    policy: Path
    success: Rate
    seconds: float
    source: str | None = None
    gain: float = 0.0
    run: RLRun | None = None

    @property
    def slope(self) -> float:
        """Gain in points of success per minute."""
        return 100 * self.gain / (self.seconds / 60)


def run_dagger(
    config: DaggerConfig, policy: Path, demos: Sequence[str], folder: Path, commands: RoundCommands, seed: int
) -> Path:
    """Rounds of recording and training, until none of the sources improves; returns the folder of the best policy.

    A round continues the training of the best policy so far: on the demonstrations and all recorded episodes, or by
    reinforcement learning, whose run goes on as long as its policy is the best.

    Args:
        config: the rounds.
        policy: folder of the initial policy.
        demos: its demonstrations.
        folder: receives a folder per round, `rounds.json` and the best policy.
        commands: commands of a round.
        seed: of the recorded episodes.

    Raises:
        SystemExit: a command of a round failed.
    """
    end = time.monotonic() + 60 * config.max_minutes
    rounds: list[Round] = []
    recorded: list[str] = []
    best: Round | None = None
    source: str | None = None
    while True:
        number, started = len(rounds), time.monotonic()
        place, name, run = folder / f"round_{number}", round_name(number), None
        left = (end - started) / 60
        seed_of_round = derive_seed(seed, "dagger", number) % 2**31
        if source is not None:
            name += f", {source}"
        if best is not None and source == RL:
            run = best.run or RLRun(best.policy, place / RL, seed_of_round)
            policy = place / POLICY_FOLDER
            minutes = max(0.01, min(config.round_rl_minutes, left))
            run_logged(commands.reinforce(config, run, minutes), place / "rl.log")
            shutil.copytree(run.folder / POLICY_FOLDER, policy)
        elif best is not None and source is not None:
            output = place / source
            minutes = max(0.01, _RECORDING_SHARE * left / _untried(config.round_sources, rounds))
            recording = commands.collect(config, source, best.policy, output, minutes, seed_of_round)
            run_logged(recording, place / f"{source}.log")
            recorded.append(str(output / "demos.hdf5"))
            run_logged(commands.train(config, best.policy, [*demos, *recorded], place / "sft"), place / "sft.log")
            policy = place / "sft" / POLICY_FOLDER
        run_logged(commands.evaluate(config, policy, place / "eval.json"), place / "eval.log")
        success, seconds = success_of(place / "eval.json"), time.monotonic() - started
        gain = success.rate - best.success.rate if best is not None else 0.0
        rounds.append(Round(policy, success, seconds, source, gain, run))
        best = rounds[-1] if best is None or gain > 0 else best
        log.info(f"{name}: {success} of {success.n} episodes succeed ({duration(seconds)})")
        source = next_source(config.round_sources, rounds)
        if best.success.rate >= config.target_success:
            why = f"target reached (--target_success {config.target_success:g})"
        elif source is None:
            why = "the last round did not improve success"
            why += "" if len(config.round_sources) == 1 else ", of any source"
        elif end - time.monotonic() <= _expected_seconds(source, rounds):
            why = f"time budget spent (--max_minutes {config.max_minutes:g})"
        else:
            _record(folder, rounds, best, "not finished")
            if slopes := {one.source: one.slope for one in rounds if one.source}:
                gains = ", ".join(f"{name} {slope:+.1f}" for name, slope in slopes.items())
                log.info(f"points of success a minute: {gains}; next: {source}")
            continue
        break
    shutil.copytree(best.policy, folder / POLICY_FOLDER)
    _record(folder, rounds, best, why)
    rows = [
        (
            number,
            one.source or "-",
            one.success.n,
            str(one.success),
            duration(one.seconds),
            "-" if one.source is None else f"{one.slope:+.1f}",
        )
        for number, one in enumerate(rounds)
    ]
    show(table(("round", "source", "n", "success at end [95 %]", "time", "points a minute"), rows))
    chosen = rounds.index(best)
    show(f"ended: {why}\nwritten: {folder / POLICY_FOLDER} ({round_name(chosen)})")
    return folder / POLICY_FOLDER


def next_source(sources: Sequence[str], rounds: Sequence[Round]) -> str | None:
    """The source of the next round: one not tried yet, else that of the largest gain per minute in its last round.

    None once the last round of no source has gained.
    """
    last = {one.source: one for one in rounds}
    for source in sources:
        if source not in last:
            return source
    best = max(sources, key=lambda source: last[source].slope)
    return best if last[best].gain > 0 else None


def _untried(sources: Sequence[str], rounds: Sequence[Round]) -> int:
    """Number of sources without a round, at least 1: they share the time left."""
    return max(1, len({*sources} - {one.source for one in rounds}))


def _expected_seconds(source: str, rounds: Sequence[Round]) -> float:
    """Duration of the last round of a source, else of the last round of any; 0 before the first."""
    seconds = [one.seconds for one in rounds if one.source == source] or [one.seconds for one in rounds[1:]]
    return seconds[-1] if seconds else 0.0


def _record(folder: Path, rounds: Sequence[Round], best: Round, why: str) -> None:
    entries = [
        {"policy": str(one.policy), "seconds": one.seconds, "source": one.source, **asdict(one.success)}
        for one in rounds
    ]
    chosen = rounds.index(best)
    text = " -> ".join(str(one.success) + (f" ({one.source})" if one.source else "") for one in rounds)
    summary = f"{text}, of {rounds[0].success.n} episodes each; "
    summary += f"{round_name(chosen)} kept; {why}"
    write_json(folder / ROUNDS_FILE, {"rounds": entries, "best": chosen, SUMMARY: summary})
