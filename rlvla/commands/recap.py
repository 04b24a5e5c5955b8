"""RECAP: rounds of own episodes, return model and advantage-conditioned training, for `cli/recap_vla.py`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlvla.commands.sft_rounds import POLICY_FOLDER, success_of
from rlvla.commands.sft_runs import TRAINING, run_logged
from rlvla.utils.cli.flags import arg
from rlvla.utils.data_files import read_json
from rlvla.utils.errors import ConfigError
from rlvla.utils.files import write_json
from rlvla.utils.seeding import derive_seed
from rlvla.utils.terminal import SUMMARY, log, show, table

OUTPUT = "runs/recap"  # default of --save_path
ROUNDS_FILE, FLAGS_FILE = "rounds.json", "flags.json"
CONDITIONING = (
    *("advantage_conditioning", "advantage_horizon", "positive_share", "label_demonstrations"),
    *("condition_dropout", "guidance"),
)
REPLACED = {
    "max_steps": "give --round_steps",
    "advantage_conditioning": "each round trains its own return model",
    "advantage_weighting": "rounds train on a condition",
}


@dataclass(frozen=True)
class RecapConfig:
    """Rounds of own episodes, return model and training."""

    rounds: int = arg(2, "rounds of recording, return model and training", minimum=1, maximum=1000, essential=True)
    round_demos: int = arg(300, "own episodes per task and round, failures included", minimum=1, essential=True)
    round_temperature: float = arg(
        1.0,
        "sampling temperature of the own episodes; greedy actions in a state are always the same, so that no advantage "
        "tells better from worse ones",
        above=0,
    )
    round_steps: int = arg(1000, "optimizer steps of the policy per round", minimum=1, essential=True)
    value_epochs: int = arg(6, "epochs of the return model, a new compact one in each round", minimum=1)
    round_episodes: int = arg(100, "episodes per task that measure the success of a round", minimum=1)


@dataclass(frozen=True)
class RoundCommands:
    """The commands of a round, as arguments of Python.

    Attributes:
        programs: name of a command -> its program.
        training: flags of the policy's training.
        value: flags of the return model.
        common: flags of recording and evaluation.
    """

    programs: Mapping[str, Sequence[str]]
    training: Sequence[str]
    value: Sequence[str]
    common: Sequence[str]

    def collect(self, config: RecapConfig, policy: Path, output: Path, seed: int) -> list[str]:
        """Own episodes of a policy."""
        flags = ["--keep=all", f"--num_demos={config.round_demos}", f"--temperature={config.round_temperature}"]
        flags += [f"--policy={policy}", f"--seed={seed}"]
        return [*self.programs["collect_demos"], *flags, f"--output={output}", *self.common]

    def train_value(self, config: RecapConfig, demos: Sequence[str], folder: Path) -> list[str]:
        """Training of a return model on demonstrations and own episodes."""
        flags = ["--pretrain=compact", f"--max_epochs={config.value_epochs}", *self.value, f"--save_path={folder}"]
        return [*self.programs["train_value_vla"], "--demos", *demos, *flags, "--load_checkpoint"]

    def train(self, config: RecapConfig, policy: Path, demos: Sequence[str], value: Path | None, folder: Path) -> list:
        """Training of the initial policy on demonstrations and own episodes; without `value` unconditioned."""
        flags = [f"--max_steps={config.round_steps}", f"--pretrain={policy}", f"--save_path={folder}"]
        flags += [] if value is None else [f"--advantage_conditioning={value}"]
        return [*self.programs[TRAINING], *self.training, *flags, "--load_checkpoint", "--demos", *demos]

    def evaluate(self, config: RecapConfig, policy: Path, output: Path) -> list[str]:
        """Greedy success of a policy on held-out states."""
        flags = [f"--eval_episodes={config.round_episodes}", f"--pretrain={policy}", f"--output={output}"]
        return [*self.programs["eval_vla"], *flags, *self.common]


def run_recap(
    config: RecapConfig, policy: Path, demos: Sequence[str], folder: Path, commands: RoundCommands, seed: int
) -> Path:
    """Rounds of own episodes, return model and training; returns the folder of the best policy.

    Each round fine-tunes the initial policy on the demonstrations and the autonomous episodes of all rounds. The
    same call continues after an interruption: finished commands are not repeated.

    Args:
        config: the rounds.
        policy: folder of the initial policy.
        demos: demonstrations, corrections, earlier own episodes.
        folder: receives a folder per round, `rounds.json` and the best policy.
        commands: commands of a round.
        seed: of the episodes' initial states.

    Raises:
        ConfigError: the folder holds rounds with other flags.
        SystemExit: a command of a round failed.
    """
    flags = {"rounds": asdict(config), "policy": str(policy), "demos": list(demos), "seed": seed}
    flags |= {"training": list(commands.training), "common": list(commands.common)}
    check_same_flags(folder, flags)
    start, own, rounds = policy, list[str](), []
    for number in range(config.rounds + 1):
        place, name = folder / f"round_{number}", f"round {number}" if number else "initial policy"
        if number:
            recorded, seed_of_round = place / "own", derive_seed(seed, "recap", number) % 2**31
            _run_once(commands.collect(config, policy, recorded, seed_of_round), recorded, recorded / "demos.hdf5")
            own.append(str(recorded / "demos.hdf5"))
            everything, value = [*demos, *own], place / "value"
            _run_once(commands.train_value(config, everything, value), value, value / "metrics.json")
            policy = place / "sft" / POLICY_FOLDER
            _run_once(commands.train(config, start, everything, value, place / "sft"), place / "sft", policy)
        evaluated = place / "eval" / "eval.json"  # an evaluation continues by itself
        if not evaluated.exists():
            run_logged(commands.evaluate(config, policy, evaluated), place / "eval.log")
        rounds.append((policy, success_of(evaluated)))
        log.info(f"{name}: {rounds[-1][1]} of {rounds[-1][1].n} episodes succeed")
    best = max(range(len(rounds)), key=lambda number: rounds[number][1].rate)
    shutil.rmtree(folder / POLICY_FOLDER, ignore_errors=True)
    shutil.copytree(rounds[best][0], folder / POLICY_FOLDER)
    entries = [{"policy": str(of_round), **asdict(success)} for of_round, success in rounds]
    summary = f"{rounds[0][1]} -> {rounds[best][1]} after {best} round(s), of {rounds[0][1].n} episodes"
    write_json(folder / ROUNDS_FILE, {"rounds": entries, "best": best, SUMMARY: summary})
    rows = [(n, config.round_demos * n, success.n, str(success)) for n, (_, success) in enumerate(rounds)]
    show(table(("round", "own episodes per task", "n", "success at end [95 %]"), rows))
    show(f"written: {folder / POLICY_FOLDER} ({f'round {best}' if best else 'the initial policy'})")
    return folder / POLICY_FOLDER


def check_same_flags(folder: Path, flags: Mapping[str, object]) -> None:
    """Record the flags of a new folder; ConfigError if it holds rounds with others, or something else."""
    path = folder / FLAGS_FILE
    if path.is_file():
        recorded = read_json(path)
        changed = [name for name, value in flags.items() if recorded.get(name) != value]
        if changed:
            text = f"--save_path {folder} holds rounds with other flags ({', '.join(changed)}); name another folder"
            raise ConfigError.of("save_path", "changed", text)
    elif folder.is_dir() and any(folder.iterdir()):
        raise ConfigError.of("save_path", "folder_in_use", f"--save_path {folder} is not empty; name another folder")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, dict(flags))


def _run_once(argv: Sequence[str], folder: Path, written: Path) -> None:
    """Run a command that writes a folder, unless it has finished; an interrupted training resumes."""
    if not written.exists():
        if "--load_checkpoint" not in argv:
            shutil.rmtree(folder, ignore_errors=True)
        run_logged(argv, folder.with_suffix(".log"))
