"""RECAP and AWR beside controls at equal numbers of episodes: supervised on successes, on all, demonstrations, PPO.

    python benchmarks/recap.py --task toy_push --seeds 0 1 2 --output runs/recap_benchmark

One supervised policy per seed that succeeds in 30 to 60 % of its episodes on held-out states. In each round an arm's
latest policy records --round_demos autonomous episodes (sampled), and the start is fine-tuned on its demonstrations
and all of these: on all steps with RECAP's condition, weighted by their advantages (AWR), all alike, or on the steps of
successful episodes. The first round's episodes and return model are those of the start, for all arms. Beside them as
many demonstrations of the expert, and PPO with as many episodes and with ten times as many. The table has greedy
success on held-out states, and the differences to the start and to RECAP, paired by initial state. Finished commands
are not repeated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import arms
from rlvla.data.reading import read_demonstrations

_ADVANTAGES = {"RECAP": "--advantage_conditioning", "AWR": "--advantage_weighting"}


def policies(name: str, folder: Path, seed: int, args: argparse.Namespace) -> Iterator[arms.Arm]:
    """The arms of a seed, the start first."""
    task = arms.TASKS[name]
    demos, start = arms.start_of(task, folder, seed)
    yield "start", 0, start
    more, count = arms.continued(task, start), 0
    latest = dict.fromkeys(("RECAP", "AWR", "all", "successes"), start)
    own: dict[str, list[Path]] = {arm: [] for arm in latest}
    for number in range(1, args.rounds + 1):
        count += args.round_demos
        for arm, policy in latest.items():
            of_arm = folder / (arm.lower() if number > 1 else "start") / f"round_{number}"
            flags = f"--policy {policy} --keep all --temperature {args.temperature} --num_envs 1"
            recorded = arms.collect(of_arm / "own", flags, args.round_demos, 1000 * number + seed)
            if arm == "successes":
                recorded = successes(recorded, of_arm / "successes")
            own[arm].append(recorded)
            trained, data, extra = folder / arm.lower() / f"sft_{number}", [demos, *own[arm]], list[str]()
            if arm in _ADVANTAGES:
                extra = [_ADVANTAGES[arm], str(value_of(of_arm / "value", data, seed))]
            latest[arm] = arms.fine_tune(trained, [*more, *extra], data, seed)
            yield arm, count, latest[arm]
        others = arms.collect(folder / f"demos_{count}", task.demos, count, 2000 + seed)
        yield "demonstrations", count, arms.fine_tune(folder / f"more_{count}", more, [demos, others], seed)
        yield "PPO", count, arms.ppo(folder / f"ppo_{count}", task, start, count, seed)
    if args.long_ppo:
        yield "PPO", 10 * count, arms.ppo(folder / f"ppo_{10 * count}", task, start, 10 * count, seed)


def value_of(folder: Path, demos: list[Path], seed: int) -> Path:
    """The return model of a round."""
    flags = ["--pretrain", "compact", "--use_proprio", "--no-use_tensorboard", "--seed", seed, "--save_path", folder]
    arms.command("train_value_vla", folder / "metrics.json", "--demos", *demos, *flags)
    return folder


def successes(recorded: Path, folder: Path) -> Path:
    """The successful episodes of a recording."""
    kept = [str(number) for number, success in enumerate(read_demonstrations(recorded).success) if success]
    words = ["--demos", recorded, "--format", "hdf5", "--episodes", *kept, "--output", folder]
    arms.command("convert_demos", folder / "demos.hdf5", *words)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--round_demos", type=int, default=300, help="autonomous episodes of a round")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the autonomous episodes")
    parser.add_argument("--long_ppo", action=argparse.BooleanOptionalAction, default=True)
    arms.compare(parser, policies, "RECAP")
