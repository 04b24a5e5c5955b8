"""A policy family of the user's own, as a file for `--custom_module`: a Gaussian around a small MLP."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rlvla.models.families import Checkpoint, PolicyFamily, register_policy_family
from rlvla.models.policy import PolicySpec, on_host, select
from rlvla.utils.errors import ConfigError

TYPE = "test_mlp"
WEIGHTS = "model.safetensors"


class Normal:
    """Independent normal distributions of the numbers of a chunk [B, A, D]."""

    def __init__(self, mean, log_std):
        self.normal = torch.distributions.Normal(mean.float(), log_std.float().exp().expand_as(mean))

    def sample(self, noise):
        from rlvla.models.distributions import PolicyOutput

        mean, std = self.normal.loc, self.normal.scale
        trace = {"actions": mean if noise is None else mean + std * noise.to(mean)}
        return PolicyOutput(trace["actions"], self.log_prob(trace), trace)

    def log_prob(self, trace):
        return self.normal.log_prob(trace["actions"]).flatten(1)

    def entropy(self):
        return self.normal.entropy().flatten(1)

    def kl(self, other):
        reference = torch.distributions.Normal(other["mean"], other["std"])
        return torch.distributions.kl_divergence(self.normal, reference).flatten(1)

    def rsample(self, noise):
        return self.normal.loc + self.normal.scale * noise.to(self.normal.loc)

    def parameters(self):
        return {"mean": self.normal.loc, "std": self.normal.scale}


class MLPPolicy(nn.Module):
    """Reads proprio, the mean colour of the images in a 4 x 4 grid, and the length of the instruction."""

    def __init__(self, config):
        super().__init__()
        self.config, chunk, dims = config, config["action_chunk_len"], config["action_dim"]
        self.spec = PolicySpec(
            action_chunk_len=chunk,
            action_dim=dims,
            columns=chunk * dims,
            noise="normal",
            noise_shape=(chunk, dims),
            cameras=1,
            proprio_dim=config["proprio_dim"],
            missing={"sum_pi_squared": "its actions are continuous", "critic": "test_mlp policies have no critic"},
        )
        self.body = nn.Sequential(nn.Linear(49 + config["proprio_dim"], 32), nn.Tanh())
        self.mean = nn.Linear(32, chunk * dims)
        self.log_std = nn.Parameter(torch.full((chunk, dims), -1.0))

    def forward(self, pixels, proprio, lengths, trace, temperature=1.0, wants=("log_probs",), reference=None, **_):
        distribution = self._distribution(pixels, proprio, lengths, temperature)
        found = select(distribution, wants, trace)
        if "kl" in wants:
            found["kl"] = distribution.kl(reference)
        if "loss" in wants:
            error = (distribution.normal.loc - trace["actions"]).abs().flatten(1)
            found |= {"loss": error, "error": error.detach(), "correct": (error.detach() < 0.1).float()}
        return found

    def _distribution(self, pixels, proprio, lengths, temperature):
        mean = self.mean(self.body(torch.cat([pixels, lengths, proprio], 1))).tanh()
        log_std = self.log_std + float(np.log(temperature))
        return Normal(mean.view(-1, *self.spec.noise_shape), log_std)

    def _inputs(self, images, proprio, instructions):
        device = self.log_std.device
        grid = nn.functional.adaptive_avg_pool2d(images[:, 0].movedim(-1, 1).float().to(device) / 255, 4).flatten(1)
        lengths = torch.tensor([[len(text) / 100] for text in instructions], device=device)
        return {"pixels": grid, "proprio": proprio.to(device), "lengths": lengths}

    def score(self, batch, temperature):
        inputs = self._inputs(batch.images, batch.proprio, batch.instructions)
        trace = {name: value.to(self.log_std.device) for name, value in (batch.trace or {}).items()}
        return inputs | {"trace": trace, "temperature": temperature}

    def distribution(self, batch, temperature=1.0):
        return self._distribution(
            **self._inputs(batch.images, batch.proprio, batch.instructions), temperature=temperature
        )

    def prepare(self, images, proprio):
        return images, proprio

    @torch.inference_mode()
    def act(self, images, proprio, instructions, *, noise, temperature=1.0):
        inputs = self._inputs(torch.from_numpy(images), torch.from_numpy(proprio), instructions)
        distribution = self._distribution(**inputs, temperature=temperature)
        output = distribution.sample(None if noise is None else torch.from_numpy(noise))
        return on_host(output, output.actions.cpu().numpy())

    def encode_actions(self, actions):
        return {"actions": np.asarray(actions, np.float32)}

    @property
    def effective_columns(self):
        return torch.ones(self.spec.columns, dtype=torch.bool)

    @property
    def normalized_dims(self):
        return [True] * self.spec.action_dim

    def row_tokens(self, instructions, num_images):
        return [1] * len(instructions)

    def training_flops(self, model, tokens, num_images):
        return 6.0 * sum(p.numel() for p in self.parameters())

    def save_pretrained(self, folder, state_dict=None):
        Path(folder).mkdir(parents=True, exist_ok=True)
        state = self.state_dict() if state_dict is None else state_dict
        save_file({name: value.contiguous().cpu() for name, value in state.items()}, str(Path(folder) / WEIGHTS))
        (Path(folder) / "config.json").write_text(json.dumps(self.config))


class MLPCheckpoint(Checkpoint):
    def __init__(self, folder, config):
        self.folder, self.unnorm_key, self._config = folder, "", config
        with torch.device("meta"):
            self.spec = MLPPolicy(config).spec

    def load_policy(self, config=None, *, value_head=False):
        policy = MLPPolicy(self._config)
        policy.load_state_dict(load_file(str(self.folder / WEIGHTS)))
        return policy


class MLPFamily(PolicyFamily):
    def check(self, folder, *, unnorm_key, suite, overrides):
        if not (folder / WEIGHTS).is_file():
            raise ConfigError(f"{folder / WEIGHTS} is missing")
        return MLPCheckpoint(folder, json.loads((folder / "config.json").read_text()))


def write_new(folder, *, action_dim=2, proprio_dim=2, action_chunk_len=4, seed=0):
    """A folder with random weights."""
    sizes = {"action_dim": action_dim, "proprio_dim": proprio_dim, "action_chunk_len": action_chunk_len}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        MLPPolicy({"model_type": TYPE, **sizes}).save_pretrained(folder)
    return Path(folder)


register_policy_family(TYPE, MLPFamily())
