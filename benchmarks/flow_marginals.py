"""What the step distributions of flow-matching policies do to the samples, and what each gradient estimate leaves out.

    python benchmarks/flow_marginals.py

Data N(.7, .3^2), for which the velocity is known in closed form and linear in x. Samples then stay normal through all
steps, so means, standard deviations and derivatives of expected rewards are computed, not simulated. Takes a second.

The first table shows the standard deviation at t = 0. The second shows, for the reward -(x_0 - 1)^2 and a velocity with
two parameters (a shift and a slope, the same at all times), the expected policy-gradient estimate along the exact
gradient, as a share of its length, and the cosine between both. For one noisy step the estimate is multiplied by the
number of noisy steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.algorithms.flow import flow_matching_time, noisy_step_count, step_distribution, time_grid

MEAN, STD, TARGET = 0.7, 0.3, 1.0
LEARNED_STD = 0.08 * 2.0**0.5
DIFFERENCE = 1e-5
TIMES = 1000


def slope(t: Tensor) -> Tensor:
    """Slope of the exact velocity around the line from the mean of the data to 0."""
    return (t - (1 - t) * STD**2) / variance(t)


def variance(t: Tensor) -> Tensor:
    return t**2 + (1 - t) ** 2 * STD**2


def velocity(x: Tensor, t: Tensor, parameters: Tensor) -> Tensor:
    return -MEAN + slope(t) * (x - (1 - t) * MEAN) + parameters[0] + parameters[1] * x


def moments(methods: Sequence[str], level: float, parameters: Tensor) -> tuple[float, float]:
    """Mean and standard deviation at t = 0 if step i uses methods[i] and parameters[i]."""
    times = time_grid(len(methods), dtype=torch.float64)
    mean, var = 0.0, 1.0
    for i, method in enumerate(methods):
        x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
        std = torch.tensor(LEARNED_STD) if method == "noise" else None
        v = velocity(x, times[i], parameters[i])
        line, noise = step_distribution(x, v, times[i], 1 / len(methods), method=method, noise_level=level, std=std)
        factor = float(line[1] - line[0])
        mean, var = float(line[0]) + factor * mean, factor**2 * var + float(noise[0]) ** 2
    return mean, var**0.5


def gradient(methods: Sequence[str], level: float, perturbed: Callable[[int], bool]) -> Tensor:
    """Derivative [2] of the expected reward in the parameters of the steps for which `perturbed` holds."""

    def reward(shift: Tensor) -> float:
        rows = torch.stack([shift * perturbed(i) for i in range(len(methods))])
        mean, std = moments(methods, level, rows)
        return -(std**2 + (mean - TARGET) ** 2)

    steps = DIFFERENCE * torch.eye(2, dtype=torch.float64)
    return torch.tensor([(reward(s) - reward(-s)) / (2 * DIFFERENCE) for s in steps], dtype=torch.float64)


def estimates(method: str, steps: int, level: float, noisy: str) -> tuple[Tensor, Tensor]:
    """The expected estimate, which sees the noisy steps only, and the exact gradient."""
    count = noisy_step_count(method, steps)
    if noisy == "all":
        chain = [method] * steps
        return gradient(chain, level, lambda i: i < count), gradient(chain, level, lambda i: True)
    seen = exact = torch.zeros(2, dtype=torch.float64)
    for index in range(count):
        chain = [method if i == index else "ode" for i in range(steps)]
        seen = seen + gradient(chain, level, lambda i, index=index: i == index)
        exact = exact + gradient(chain, level, lambda i: True) / count
    return seen, exact


def fpo(steps: int) -> tuple[Tensor, Tensor]:
    """Expected gradient of FPO's surrogate at unchanged weights, and the exact one of the ODE sampler.

    The gradient of -loss given the action is -2 E[(v - u) (1, x_t)]; actions and noise are integrated by quadrature.
    """
    t = flow_matching_time((torch.arange(TIMES, dtype=torch.float64) + 0.5) / TIMES)
    mean, std = moments(["ode"] * steps, 0.0, torch.zeros(steps, 2))
    nodes, weights = normal_nodes(10)
    action = (mean + std * nodes)[:, None, None]
    noise = nodes[None, :, None]
    x = t * noise + (1 - t) * action
    error = velocity(x, t, torch.zeros(2)) - (noise - action)
    advantage = -((action - TARGET) ** 2)
    advantage = advantage - (advantage[:, 0, 0] * weights).sum()
    joint = weights[:, None] * weights[None, :]
    seen = torch.stack([((-2 * advantage * error * part).mean(-1) * joint).sum() for part in (torch.ones_like(x), x)])
    return seen, gradient(["ode"] * steps, 0.0, lambda i: True)


def normal_nodes(count: int) -> tuple[Tensor, Tensor]:
    """Quadrature of the standard normal distribution."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())


def compare(name: str, seen: Tensor, exact: Tensor) -> None:
    share = float(seen @ exact / exact.square().sum())
    cosine = float(seen @ exact / (seen.norm() * exact.norm()))
    print(f"{name:28s} {share:8.3f} {cosine:8.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[4, 10, 200, 800], help="denoising steps of the samples"
    )
    steps = parser.parse_args().steps
    print(f"data {MEAN} +- {STD}\n{'method, noise level':28s} " + " ".join(f"{f'K = {k}':>14s}" for k in steps))
    for method, levels in (("ode", [0.0]), ("sde", [0.1, 0.5, 0.9, 1.0]), ("cps", [0.1, 0.5, 0.9]), ("noise", [0.0])):
        for level in levels:
            found = [moments([method] * k, level, torch.zeros(k, 2)) for k in steps]
            print(f"{f'{method} {level}':28s} " + " ".join(f"{f'{m:.3f} +- {s:.3f}':>14s}" for m, s in found))
    print(f"\n{'gradient, K = 4':28s} {'share':>8s} {'cosine':>8s}")
    for method in ("sde", "cps", "noise"):
        for noisy in ("all", "one"):
            compare(f"{method} {noisy}", *estimates(method, 4, 0.5, noisy))
    compare("fpo", *fpo(4))


if __name__ == "__main__":
    main()
