"""CPU time of a robosuite Lift control step and of an image, rlvla's and stock, in one run.

    python benchmarks/robosuite_step.py [--steps 200] [--image_size 64] [--output result.json]

Times are milliseconds of process CPU time, which a busy machine disturbs less than wall-clock time; each is the best of
five repetitions. The software renderer stays on the main thread (LP_NUM_THREADS=0).
"""

import argparse
import json
import os
import time

os.environ.setdefault("LP_NUM_THREADS", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from rlvla.envs.registry import make_env
from rlvla.envs.robosuite.importing import import_robosuite

REPETITIONS = 5
ACTION = np.array([0.1, 0.0, -0.1, 0.0, 0.0, 0.0, -1.0], dtype=np.float32)


def cpu_ms(work, count):
    """Milliseconds of CPU time per call of `work`, best of the repetitions of `count` calls."""
    times = []
    for _ in range(REPETITIONS):
        start = time.process_time()
        for _ in range(count):
            work()
        times.append((time.process_time() - start) / count * 1e3)
    return min(times)


def stock_env(image_size):
    """Robosuite's own environment with one camera, or none where `image_size` is 0."""
    robosuite = import_robosuite()
    return robosuite.make(
        "Lift",
        robots="Panda",
        controller_configs=robosuite.load_controller_config(default_controller="OSC_POSE"),
        has_renderer=False,
        has_offscreen_renderer=image_size > 0,
        use_camera_obs=image_size > 0,
        camera_names="agentview",
        camera_heights=image_size or 1,
        camera_widths=image_size or 1,
        control_freq=20,
        hard_reset=False,
        ignore_done=True,
    )


def measure_stock(steps, image_size):
    """CPU times of the stock environment: step without and with a camera, reset."""
    env = stock_env(0)
    env.reset()
    action = ACTION.astype(np.float64)
    result = {"step": cpu_ms(lambda: env.step(action), steps), "reset": cpu_ms(env.reset, 10)}
    env.close()
    env = stock_env(image_size)
    env.reset()
    result["step with image"] = cpu_ms(lambda: env.step(action), 20)
    env.close()
    return result


def measure(steps, image_size, render_quality):
    """CPU times of our environment: step, reset, one image, a step with an image."""
    env = make_env("robosuite", 0, image_size=image_size, render_quality=render_quality, max_steps=10**9)
    env.reset(0, seed=0)
    chunk = np.repeat(ACTION[None], steps, axis=0)
    image = cpu_ms(env._observe, 20)
    result = {
        "step": (cpu_ms(lambda: env.step_chunk(chunk), 1) - image) / steps,
        "reset": cpu_ms(lambda: env.reset(0, seed=0), 10) - image,
        "image": image,
        "step with image": cpu_ms(lambda: env.step_chunk(chunk[:1]), 20),
    }
    env.close()
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="control steps per repetition")
    parser.add_argument("--image_size", type=int, default=64, help="height and width in pixels")
    parser.add_argument("--output", help="write the figures to this JSON file as well")
    args = parser.parse_args()
    results = {"ours, " + quality: measure(args.steps, args.image_size, quality) for quality in ("fast", "full")}
    results["stock"] = measure_stock(args.steps, args.image_size)
    columns = ("step", "reset", "image", "step with image")
    print(f"{'CPU ms, best of ' + str(REPETITIONS):24}" + "".join(f"{name:>18}" for name in columns))
    for name, row in results.items():
        print(f"{name:24}" + "".join(f"{row[c]:18.2f}" if c in row else f"{'':18}" for c in columns))
    ratios = {c: results["stock"][c] / results["ours, fast"][c] for c in columns if c in results["stock"]}
    print(f"{'stock / ours, fast':24}" + "".join(f"{ratios[c]:17.1f}x" if c in ratios else f"{'':18}" for c in columns))
    if args.output:
        with open(args.output, "w", encoding="utf-8") as file:
            json.dump({"cpu_ms": results, "ratio": ratios}, file, indent=2)


if __name__ == "__main__":
    main()
