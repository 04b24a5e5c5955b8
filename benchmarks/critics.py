"""From which features of a compact policy can returns be predicted? Explained variance on episodes that were held out.

    python benchmarks/critics.py --pretrain runs/sft/policy [--custom_module FILE] --episodes 600

The policy plays sampled episodes; a quarter of them is held out. Values are fitted to the discounted success of the
others: linear and by an MLP on column vectors (where heads of other families read), on the trunk, and on the encoder's
features, and by a separate network initialized from the policy. The table has the explained variance after
64, 128 and 256 optimizer steps of 160 decisions. One thread.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

import rlvla
from rlvla.envs.registry import load_custom_module
from rlvla.models.compact.network import ValueHead
from rlvla.models.value_models import scalar_head
from rlvla.utils.terminal import table

STEPS = (64, 128, 256)
ROWS, GAMMA, RATES = 160, 0.99, (4e-4, 1e-3)


def play(policy: rlvla.Actor, folder: Path, modules: list[str], episodes: int) -> list[rlvla.Sample]:
    """Sampled episodes from training states."""
    env = rlvla.EnvConfig().completed(rlvla.recorded_environment(folder))
    tasks = env.tasks()
    sampler = rlvla.TaskSampler(tasks, [rlvla.train_init_states(task) for task in tasks], 1, seed=0)
    with rlvla.EnvPool(1, custom_modules=modules) as pool:
        engine = rlvla.RolloutEngine(pool, env.env_kwargs(), {"success": 1.0}, tasks=tasks)
        return engine.run(sampler.at(range(episodes)), policy, temperature=1.0)


def returns_of(sample: rlvla.Sample) -> list[float]:
    """Discounted success at each decision."""
    steps = range(0, sample.executed.numel(), sample.executed.shape[1])
    return [float(sample.success_at_end) * GAMMA ** (sample.finish_step - 1 - step) for step in steps]


def explained(values: Tensor, returns: Tensor) -> float:
    """Explained variance."""
    return 1.0 - float((returns - values).var() / returns.var())


@torch.no_grad()
def features_of(policy: rlvla.Actor, rows: rlvla.Experience) -> dict[str, Tensor]:
    """Features [rows, width] by name."""
    trunk: list[Tensor] = []
    hook = policy.network.columns.register_forward_hook(lambda layer, inputs, output: trunk.append(inputs[0]))
    encoded, columns = [], []
    for batch in map(rows.index, torch.arange(len(rows)).split(256)):
        encoded.append(policy.hidden({}, **policy.observations(batch.images, batch.proprio, batch.instructions)))
        columns.append(policy.network(encoded[-1])[:, 0])
    hook.remove()
    return {"columns": torch.cat(columns), "trunk": torch.cat(trunk), "encoder": torch.cat(encoded)}


def fit(model: nn.Module, values: Callable[[Tensor], Tensor], returns: Tensor, held: Tensor, rate: float) -> list[str]:
    """Train a value model; the explained variance of held-out rows after each of `STEPS`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    draw, train, cells = torch.Generator().manual_seed(0), (~held).nonzero()[:, 0], []
    for step in range(1, max(STEPS) + 1):
        rows = train[torch.randint(len(train), (ROWS,), generator=draw)]
        loss = 0.5 * (values(rows) - returns[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step in STEPS:
            with torch.no_grad():
                predicted = torch.cat([values(rows) for rows in held.nonzero()[:, 0].split(256)])
            cells.append(f"{explained(predicted, returns[held]):.2f}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrain", type=Path, required=True)
    parser.add_argument("--custom_module", nargs="*", default=[])
    parser.add_argument("--episodes", type=int, default=600)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for module in args.custom_module:
        load_custom_module(module)
    policy = rlvla.Actor.from_pretrained(args.pretrain)
    samples = play(policy, args.pretrain, args.custom_module, args.episodes)
    rows = rlvla.Experience.from_samples(samples, policy.effective_columns)
    returns = torch.tensor([value for sample in samples for value in returns_of(sample)])
    held = rows.episode_index % 4 == 3
    lines = []
    for name, features in features_of(policy, rows).items():
        for kind in ("linear", "MLP"):
            for rate in RATES:
                width = features.shape[1]
                head = scalar_head(width) if kind == "linear" else ValueHead(width, policy.config)
                cells = fit(head, lambda at, f=features, h=head: h(f[at])[:, 0], returns, held, rate)
                lines.append((f"{name}, {kind}", f"{rate:g}", *cells))
    for rate in RATES:
        own = copy.deepcopy(policy).train()
        model = nn.ModuleList([own.network, scalar_head(own.spec.feature_dim)])

        def values(at: Tensor, own: rlvla.Actor = own, model: nn.ModuleList = model) -> Tensor:
            return model[1](own.features(rows.index(at))[:, 0])[:, 0]

        lines.append(("separate network", f"{rate:g}", *fit(model, values, returns, held, rate)))
    success = sum(sample.success_at_end for sample in samples) / len(samples)
    print(f"{len(samples)} episodes, {len(rows)} decisions, sampled success {100 * success:.0f} %")
    print(table(("values from", "rate", *(f"{steps} steps" for steps in STEPS)), lines))


if __name__ == "__main__":
    main()
