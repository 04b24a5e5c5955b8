"""Success against the number of corrected episodes: HG-DAgger, as many demonstrations, as many episodes of PPO.

    python benchmarks/interventions.py --task toy_push --seeds 0 1 2 --output runs/interventions
    python benchmarks/interventions.py --task lift --seeds 0 1 2 --output runs/interventions_lift

One supervised policy per seed that succeeds in 30 to 60 % of its episodes on held-out states. The scripted expert
corrects it (`collect_demos.py --intervene expert`) in N successful episodes; training continues on the demonstrations
and the expert's steps of these. Beside it training continues on the demonstrations and N more of the expert, with as
many optimizer steps, and PPO plays N episodes. The table has greedy success on held-out states, and the differences to
the start and to the corrected policy, paired by initial state. Finished commands are not repeated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import arms

COUNTS = (25, 50, 100, 200)
MAX_STEPS = {"toy_push": 120, "lift": 60}  # of corrected episodes


def policies(name: str, folder: Path, seed: int, args: argparse.Namespace) -> Iterator[arms.Arm]:
    """The arms of a seed, the start first."""
    task = arms.TASKS[name]
    demos, start = arms.start_of(task, folder, seed)
    yield "start", 0, start
    more = arms.continued(task, start)
    for count in args.counts:
        flags = f"--policy {start} --intervene expert --max_steps {MAX_STEPS[name]} --num_envs 1"
        corrected = arms.collect(folder / f"corrected_{count}", flags, count, 1000 + seed)
        yield "corrected", count, arms.fine_tune(folder / f"hg_dagger_{count}", more, [demos, corrected], seed)
        others = arms.collect(folder / f"demos_{count}", task.demos, count, 2000 + seed)
        yield "demonstrations", count, arms.fine_tune(folder / f"more_{count}", more, [demos, others], seed)
        yield "PPO", count, arms.ppo(folder / f"ppo_{count}", task, start, count, seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, help="numbers of episodes")
    arms.compare(parser, policies, "corrected")
