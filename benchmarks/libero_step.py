"""Where LIBERO's time goes: CPU time of building, images and control steps, and what a solver tolerance changes.

    python benchmarks/libero_step.py [--tasks libero_spatial:0 libero_object:0] [--tolerances 1e-5] [--steps 80]

Times are milliseconds of process CPU time on one core, the best of five repetitions. "hand" is the largest distance of
the hand from its path with LIBERO's tolerance, over an episode of random actions.
"""

import argparse
import os
import time

os.environ.setdefault("LP_NUM_THREADS", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from robosuite_step import cpu_ms

from rlvla.envs.registry import make_env
from rlvla.utils.terminal import table


def episode(env, actions):
    """Milliseconds of CPU time of a step, and positions of the hand [T, 3]."""
    env.reset(0, seed=0)
    path, start = [], time.process_time()
    for action in actions:
        env._sim.step(action)
        path.append(env._sim.data.site_xpos[env._sim.eef_site].copy())
    return (time.process_time() - start) / len(actions) * 1e3, np.array(path)


def main():
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["libero_spatial:0", "libero_object:0", "libero_goal:0"])
    parser.add_argument("--tolerances", nargs="+", type=float, default=[1e-5])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--image_size", type=int, default=64)
    args = parser.parse_args()
    actions = np.random.default_rng(0).uniform(-0.5, 0.5, (args.steps, 7)).astype(np.float32)
    rows = []
    for task in args.tasks:
        suite, _, number = task.partition(":")
        cameras, size = ("agentview", "wrist"), args.image_size
        for quality in ("full", "fast"):
            start = time.process_time()
            env = make_env(suite, int(number), cameras=cameras, image_size=size, render_quality=quality)
            build, options = time.process_time() - start, env._sim.model.opt
            tolerances = [options.tolerance, *(args.tolerances if quality == "fast" else ())]
            runs = {tolerance: [] for tolerance in tolerances}
            for _ in range(5):  # take turns, because other processes slow down all that run at a time
                for tolerance in tolerances:
                    options.tolerance = tolerance
                    runs[tolerance].append(episode(env, actions))
            image = cpu_ms(env._observe, 5)
            check = cpu_ms(env._stages, 20)
            for tolerance, results in runs.items():
                apart = np.linalg.norm(results[0][1] - runs[tolerances[0]][0][1], axis=1).max() * 1e3
                step = min(milliseconds for milliseconds, _ in results)
                times = f"{build:.1f} s", f"{image:.1f}", f"{step:.2f}", f"{check:.2f}", f"{apart:.4f} mm"
                rows.append((task, quality, f"{tolerance:g}", *times))
            env.close()
    print(table(("task", "quality", "tolerance", "build", "two images", "step", "propositions", "hand"), rows))


if __name__ == "__main__":
    main()
