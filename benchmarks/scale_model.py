"""How fast runs would be on n GPUs with m simulator hosts: a simulation on a clock of its own, from measured times.

    python benchmarks/scale_model.py predict --times measured.json --gpus 1 8 64 512
    python benchmarks/scale_model.py validate --output runs/scale

`predict` plays iterations of a run: episodes start in free slots, wait in the batches of `rlvla.rollout.session`, take
chunks of random length, fail now and then and are played again; all ranks wait for the slowest before an update. The
amounts are per GPU (weak scaling). "efficiency" is the episodes per second and GPU, to those of one GPU.

`validate` compares it with real runs of this machine, synchronous and asynchronous, whose simulators sleep (some with a
heavy tail): the times of single steps are read off the first run, the iterations of the others are predicted from them.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.async_rollout import SUITE, UPDATE, start
from rlvla.rollout.session import Batcher
from rlvla.utils.files import read_metrics
from rlvla.utils.terminal import table

_ROLLOUTS = 500  # that are simulated; iterations draw from them


@dataclass(frozen=True)
class Times:
    """What single steps take, in seconds.

    Attributes:
        chunk_s: mean of a chunk of actions in the simulator, rendering included.
        chunk_sigma: spread of its logarithm; 0: always the same.
        reset_s: start of an episode.
        decision_s, decision_row_s: a batch of decisions, and each row of it.
        update_row_s: old log-probs and update, per decision.
        iteration_s: what an iteration takes besides.
        gradient_gb: gradients that are reduced over the ranks in each optimizer step.
        weights_gb: weights that are copied for playing ahead.
        link_gb_s: of the network between GPUs; copies on a GPU are counted ten times as fast.
        failure: probability that a chunk fails; the episode is played again.
        timeout_s: until a failure is noticed.
    """

    chunk_s: float = 0.1
    chunk_sigma: float = 0.0
    reset_s: float = 0.1
    decision_s: float = 0.005
    decision_row_s: float = 0.0005
    update_row_s: float = 0.002
    iteration_s: float = 0.05
    gradient_gb: float = 0.0
    weights_gb: float = 0.0
    link_gb_s: float = 50.0
    failure: float = 0.0
    timeout_s: float = 60.0


@dataclass(frozen=True)
class Load:
    """Amounts per GPU.

    Attributes:
        episodes: per iteration.
        decisions: of an episode that does not end early; 2.5: two as often as three.
        success: share of episodes that end early, at a uniformly drawn decision.
        slots: episodes at the same time.
        steps: optimizer steps per iteration.
        epochs: passes over the decisions.
    """

    episodes: int = 64
    decisions: float = 40
    success: float = 0.5
    slots: int = 16
    steps: int = 4
    epochs: int = 1


def rollout(times: Times, load: Load, rng: np.random.Generator) -> tuple[float, int]:
    """Seconds and decisions of the rollout of one rank."""
    batcher = Batcher(load.slots, 0.02, max(1, load.slots // 2))
    pending, playing, now, decisions = load.episodes, 0, 0.0, 0
    left: dict[int, int] = {}
    events: list[tuple[float, int, bool]] = []  # (time, slot, whether it failed)
    mu = math.log(times.chunk_s) - times.chunk_sigma**2 / 2 if times.chunk_s else -math.inf

    def begin(slot: int) -> None:
        whole = int(load.decisions + rng.random())
        left[slot] = int(rng.integers(1, whole + 1)) if rng.random() < load.success else whole
        heapq.heappush(events, (now + times.reset_s, slot, False))

    for slot in range(min(load.slots, pending)):
        begin(slot)
        pending, playing = pending - 1, playing + 1
    while playing:
        slots = batcher.take(now, playing - len(batcher))
        if slots:
            now += times.decision_s + len(slots) * times.decision_row_s
            decisions += len(slots)
            for slot in slots:
                failed = rng.random() < times.failure
                took = times.timeout_s if failed else float(np.exp(rng.normal(mu, times.chunk_sigma)))
                heapq.heappush(events, (now + took, slot, failed))
        due = batcher.time_until_due(now)
        if events and (due is None or events[0][0] <= now + due):
            now, slot, failed = max(now, events[0][0]), *heapq.heappop(events)[1:]
            if failed:
                begin(slot)
            elif left[slot] == 0:
                playing -= 1
                if pending:
                    begin(slot)
                    pending, playing = pending - 1, playing + 1
            else:
                left[slot] -= 1
                batcher.add(slot, now)
        elif due is not None and not slots:
            now += max(due, 1e-9)
    return now, decisions


def iterations(times: Times, load: Load, gpus: int, staleness: int, count: int, seed: int = 0) -> float:
    """Mean seconds per iteration once all is under way; up to `staleness` iterations are played ahead."""
    rng = np.random.default_rng(seed)
    reduction = 2 * (gpus - 1) / gpus * times.gradient_gb / times.link_gb_s * load.steps * load.epochs
    copy = times.weights_gb / (10 * times.link_gb_s) if staleness else 0.0
    drawn = [rollout(times, load, rng) for _ in range(min(_ROLLOUTS, gpus * count))]
    free = np.zeros(gpus)  # when the rollout of each rank may go on
    trained = [0.0]  # when version k was there
    for k in range(count):
        seconds, decisions = np.array([drawn[i] for i in rng.integers(len(drawn), size=gpus)]).T
        free = np.maximum(free, trained[max(0, k - staleness)] + copy) + seconds
        # With --balance_ranks all ranks have as many decisions.
        update = decisions.mean() * load.epochs * times.update_row_s + reduction + times.iteration_s
        trained.append(max(trained[-1], float(free.max())) + update)
    warm = min(2 + staleness, count - 1)
    return (trained[-1] - trained[warm]) / (count - warm)


def predict(times: Times, load: Load, gpus: list[int], count: int) -> None:
    """The table of `predict`."""
    rows, alone = [], {}
    for n in gpus:
        seconds = {s: iterations(times, load, n, s, count) for s in (0, 1)}
        rates = {s: n * load.episodes / t for s, t in seconds.items()}
        for s, rate in rates.items():
            alone.setdefault(s, rate / n)
        cells = [f"{rates[s]:.1f} ({100 * rates[s] / n / alone[s]:.0f} %)" for s in (0, 1)]
        rows.append((n, *cells, f"{rates[1] / rates[0]:.2f}"))
    print(json.dumps(asdict(times) | asdict(load)))
    print(table(("GPUs", "synchronous, episodes/s (efficiency)", "one ahead", "ratio"), rows))


# ---------------------------------------------------------------------------------------------------------- validation
EPISODES, CHUNK = 64, 3


def real(policy: Path, folder: Path, milliseconds: float, sigma: float, slots: int, ahead: bool) -> dict[str, float]:
    """Medians of a real run, and the means that the model is made of."""
    if not (folder / "evaluations.json").exists():
        flags = ["--pretrain", str(policy), "--save_path", str(folder), *SUITE, *UPDATE, "--num_envs", str(slots)]
        flags += ["--num_episodes", str(EPISODES * 12), "--no-use_tensorboard", *(["--async_rollout"] if ahead else [])]
        environment = os.environ | {"SLEEPING_REACH_MS": str(milliseconds), "SLEEPING_REACH_SIGMA": str(sigma)}
        words = [sys.executable, str(ROOT / "cli/train_ppo_vla.py"), *flags]
        subprocess.run(words, cwd=ROOT, check=True, env=environment, stdout=subprocess.DEVNULL)
    lines = [line for line in read_metrics(folder) if "timing_s/iteration" in line][3:]
    names = ("timing_s/iteration", "timing_s/rollout", "timing_s/rollout_policy", "timing_s/update")
    names += ("timing_s/make_experience", "rollout/policy_batch", "rollout/env_steps", "rollout/success_at_end")
    found = {name: statistics.fmean(line[name] for line in lines) for name in names}
    return found | {"median": statistics.median(line["timing_s/iteration"] for line in lines)}


def validate(output: Path) -> None:
    """The table of `validate`."""
    policy = start(output / "start_0", 0)
    first = real(policy, output / "real_10_0_4_sync", 10.0, 0.0, 4, ahead=False)
    decisions = first["rollout/env_steps"] / CHUNK
    calls = decisions / first["rollout/policy_batch"]
    learning = first["timing_s/update"] + first["timing_s/make_experience"]
    load = Load(EPISODES, decisions / EPISODES, success=0.0, slots=4, steps=4)
    times = Times(
        chunk_s=0.01 * CHUNK,
        reset_s=0.0,
        decision_s=first["timing_s/rollout_policy"] / calls,
        decision_row_s=0.0,
        update_row_s=learning / decisions,
        iteration_s=first["timing_s/iteration"] - first["timing_s/rollout"] - learning,
    )
    overhead = first["timing_s/rollout"] - rollout(times, load, np.random.default_rng(0))[0]
    times = replace(times, reset_s=max(0.0, overhead / EPISODES * 4))
    print(json.dumps(asdict(times) | asdict(load)))
    rows = []
    for milliseconds, sigma, slots in ((10.0, 0.0, 4), (10.0, 0.0, 8), (30.0, 0.0, 8), (10.0, 1.0, 8)):
        for ahead in (False, True):
            folder = output / f"real_{milliseconds:g}_{sigma:g}_{slots}_{'ahead' if ahead else 'sync'}"
            wanted = real(policy, folder, milliseconds, sigma, slots, ahead)
            setting = replace(times, chunk_s=CHUNK * milliseconds / 1000, chunk_sigma=sigma)
            found = iterations(setting, replace(load, slots=slots), 1, int(ahead), 30)
            name = f"{CHUNK * milliseconds:g} ms a chunk{', heavy tail' if sigma else ''}, {slots} slots"
            measured = wanted["timing_s/iteration"]
            row = (name, "one ahead" if ahead else "synchronous", f"{measured:.2f}", f"{found:.2f}")
            rows.append((*row, f"{100 * (found / measured - 1):+.0f} %"))
    print(table(("simulators", "", "measured, s", "predicted, s", "error"), rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "validate"))
    parser.add_argument("--times", type=Path, help="JSON file with fields of Times and Load; defaults for others")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("runs/scale"))
    args = parser.parse_args()
    if args.what == "validate":
        return validate(args.output.resolve())
    given = {} if args.times is None else json.loads(args.times.read_text())
    times, load = (kind(**{f.name: given[f.name] for f in fields(kind) if f.name in given}) for kind in (Times, Load))
    return predict(times, load, args.gpus, args.iterations)


if __name__ == "__main__":
    main()
