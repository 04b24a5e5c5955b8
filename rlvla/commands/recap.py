"""RECAP: rounds of autonomous episodes, return model and advantage-conditioned training, for `cli/recap_vla.py`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlvla.commands.sft_rounds import POLICY_FOLDER, evaluation_command, round_name, success_of
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
    "fallback_path": "a round is not continued from there",
}


@dataclass(frozen=True)
class RecapConfig:
    """Rounds of autonomous episodes, return model and training."""

    rounds: int = arg(2, "rounds of recording, return model and training", minimum=1, maximum=1000, essential=True)
    round_demos: int = arg(300, "autonomous episodes per task and round, failures included", minimum=1, essential=True)
    round_temperature: float = arg(
        1.0,
        "sampling temperature of the autonomous episodes; greedy actions do not vary within a state, so advantages "
        "would have nothing to compare",
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
        """Autonomous episodes of a policy."""
        flags = ["--keep=all", f"--num_demos={config.round_demos}", f"--temperature={config.round_temperature}"]
        flags += [f"--policy={policy}", f"--seed={seed}"]
        return [*self.programs["collect_demos"], *flags, f"--output={output}", *self.common]

    def train_value(self, config: RecapConfig, demos: Sequence[str], folder: Path) -> list[str]:
        """Training of a return model on demonstrations and autonomous episodes."""
        flags = ["--pretrain=compact", f"--max_epochs={config.value_epochs}", *self.value, f"--save_path={folder}"]
        return [*self.programs["train_value_vla"], "--demos", *demos, *flags, "--load_checkpoint"]

    def train(self, config: RecapConfig, policy: Path, demos: Sequence[str], value: Path | None, folder: Path) -> list:
        """Training of the initial policy on demonstrations and autonomous episodes; without `value` unconditioned."""
        flags = [f"--max_steps={config.round_steps}", f"--pretrain={policy}", f"--save_path={folder}"]
        flags += [] if value is None else [f"--advantage_conditioning={value}"]
        return [*self.programs[TRAINING], *self.training, *flags, "--load_checkpoint", "--demos", *demos]

    def evaluate(self, config: RecapConfig, policy: Path, output: Path) -> list[str]:
        """See `evaluation_command`."""
        return evaluation_command(self.programs, self.common, config.round_episodes, policy, output)


def run_recap(
    config: RecapConfig, policy: Path, demos: Sequence[str], folder: Path, commands: RoundCommands, seed: int
) -> Path:
    """Rounds of autonomous episodes, return model and training; returns the folder of the best policy.

    Each round fine-tunes the initial policy on the demonstrations and the autonomous episodes of all rounds. The
    same call continues after an interruption: finished commands are not repeated.

    Args:
        config: the rounds.
        policy: folder of the initial policy.
        demos: demonstrations, corrections, earlier autonomous episodes.
        folder: receives a folder per round, `rounds.json` and the best policy.
        commands: commands of a round.
        seed: of the episodes' initial states.

    Raises:
        ConfigError: the folder holds rounds with other flags.
        SystemExit: a command of a round failed.
    """
    flags = {"rounds": asdict(config), "policy": str(policy), "demos": list(demos), "seed": seed}
    common = [token for token in commands.common if not token.startswith("--num_envs=")]  # without effect
    flags |= {"training": list(commands.training), "common": common}
    check_same_flags(folder, flags)
    start, own, rounds = policy, list[str](), []
    for number in range(config.rounds + 1):
        place, name = folder / f"round_{number}", round_name(number)
        if number:
            recorded, seed_of_round = place / "own", derive_seed(seed, "recap", number) % 2**31
            _run_once(commands.collect(config, policy, recorded, seed_of_round), recorded, recorded / "demos.hdf5")
            own.append(str(recorded / "demos.hdf5"))
            everything, value = [*demos, *own], place / "value"
            _run_once(commands.train_value(config, everything, value), value, value / "metrics.json")
            if useless := _useless_return_model(value):
                log.warning(f"{name}: {useless}; rounds end (raise --round_demos or --value_epochs in another folder)")
                break
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
    show(table(("round", "autonomous episodes per task", "n", "success at end [95 %]"), rows))
    show(f"written: {folder / POLICY_FOLDER} ({round_name(best)})")
    return folder / POLICY_FOLDER


def _useless_return_model(value: Path) -> str | None:
    """Why the return model of a round cannot be trained on, as text; None if it can."""
    from rlvla.trainer.supervised.return_model_trainer import LEAST_EXPLAINED, ReturnModelTrainer  # loads torch

    explained = read_json(value / "metrics.json")[ReturnModelTrainer.selects_by]
    if explained >= LEAST_EXPLAINED:
        return None
    return f"the return model explains {explained:.2f} of the variance of held-out returns"


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
