"""A policy server for `cli/serve_vla.py`."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlvla.checkpoints.policy_folder import MACHINE_STATE, recorded_environment
from rlvla.commands import sockets
from rlvla.commands.run_policies import policy_folder
from rlvla.commands.setup import cameras_of
from rlvla.envs.config import TASK, EnvConfig
from rlvla.models.config import PolicyConfig
from rlvla.models.families import Checkpoint, check_checkpoint, checkpoint_overrides
from rlvla.serving.config import API_KEY_VARIABLE, ServeConfig, read_api_key
from rlvla.serving.observations import NOISE_KEY, SEED_KEY, ObservationReader, request_keys
from rlvla.utils.cli.flags import range_problems
from rlvla.utils.deepspeed.config import StrategyConfig
from rlvla.utils.deepspeed.strategy import DeepspeedStrategy
from rlvla.utils.errors import ConfigError, Problem, collected, require
from rlvla.utils.terminal import log, passing_note, quiet_libraries, show
from rlvla.version import __version__


@dataclass(frozen=True)
class ServedPolicy:
    """A checked policy folder.

    Attributes:
        folder: its path.
        checkpoint: the checkpoint.
        record: its training environment, {} if it has none.
        cameras: names of its cameras, in its order.
        keys: result of `request_keys`.
        api_key: key of the clients, or None.
    """

    folder: Path
    checkpoint: Checkpoint
    record: dict[str, Any]
    cameras: tuple[str, ...]
    keys: dict[str, str]
    api_key: str | None

    def metadata(self, config: ServeConfig) -> dict[str, Any]:
        """The map that clients receive on connecting."""
        spec = self.checkpoint.spec
        draws = config.temperature is not None or spec.greedy_noise
        return {
            "server": f"rlvla {__version__}",
            "policy": self.folder.resolve().name,
            "action_horizon": min(config.num_actions or spec.action_chunk_len, spec.action_chunk_len),
            "action_dim": spec.action_dim,
            "observation": ObservationReader(spec, self.cameras, self.keys).expected,
            "cameras": list(self.cameras),
            "keys": self.keys,
            "temperature": config.temperature,
            "noise": {"shape": list(spec.noise_shape), "kind": spec.noise} if draws else None,
            "noise_keys": [SEED_KEY, NOISE_KEY],
            "environment": json.loads(json.dumps(self.record)),
        }


def run_serve(policy: PolicyConfig, config: ServeConfig) -> None:
    """Serve a policy until SIGINT or SIGTERM.

    Raises:
        ConfigError: the folder, the address or a flag has problems; all are raised before the policy is loaded.
        MissingExtraError: websockets or msgpack is not installed.
    """
    for module in ("websockets.asyncio.server", "msgpack"):
        require(module, extra="serve")
    from rlvla.serving.server import PolicyServer

    served = check_serve(policy, config)
    quiet_libraries()
    with closing(listen(config)) as listener:
        with passing_note(f"loading {served.folder}"):
            actor: Any = served.checkpoint.load_policy()
            device = DeepspeedStrategy(StrategyConfig(), seed=config.seed).device
            actor.eval().to(device, torch.bfloat16 if config.bf16 else torch.float32)
        reader = ObservationReader(actor.spec, served.cameras, served.keys)
        server = PolicyServer(actor, reader, config, served.metadata(config), served.api_key)

        def started() -> None:
            host, port = listener.getsockname()[:2]
            address = f"{f'[{host}]' if ':' in host else host}:{port}"
            needed = ", ".join(f"{key} ({kind})" for key, kind in reader.expected.items())
            show(f"serving {served.folder} on {device.type}: ws://{address} (Ctrl-C ends it)")
            show(f"requests: {needed}\nevaluate it: python cli/eval_vla.py --remote ws://{address}")

        sockets.serve_until_signal(server, listener, started)
    show(f"served {server.counts['requests']} requests on {server.counts['connections']} connections")


def check_serve(policy: PolicyConfig, config: ServeConfig) -> ServedPolicy:
    """Check the flags and the folder; ConfigError with all problems."""
    problems: list[Problem] = [*range_problems(policy), *range_problems(config)]
    key = collected(problems, lambda: read_api_key(config.api_key_file, "api_key_file"))
    if config.needs_key() and key is None and not problems:
        text = (
            f"--host {config.host}: other machines can reach the server, so it needs a key; give --api_key_file FILE, "
            f"or set {API_KEY_VARIABLE}"
        )
        problems.append(Problem("host", "needs_flag", text))
    folder = collected(problems, lambda: Path(policy_folder(policy.pretrain)))
    served = None
    if folder is not None:
        served = collected(problems, lambda: _checked(folder, policy, config, key))
    if problems or served is None:
        raise ConfigError(problems)
    return served


def _checked(folder: Path, policy: PolicyConfig, config: ServeConfig, key: str | None) -> ServedPolicy:
    record = recorded_environment(folder)
    env = EnvConfig().completed(record)
    names = cameras_of(env)
    overrides = checkpoint_overrides(folder, policy, names)
    checkpoint = check_checkpoint(folder, policy.unnorm_key, env.task_suite_name, overrides)
    spec = checkpoint.spec
    number = spec.cameras or policy.num_images_in_input or len(names) or 1
    if len(names) != number:
        names = ("image", "wrist_image", *(f"camera_{index}" for index in range(2, number)))[:number]
    if config.num_actions is not None and config.num_actions > spec.action_chunk_len:
        text = f"--num_actions {config.num_actions}: the policy predicts {spec.action_chunk_len}"
        raise ConfigError.of("num_actions", "mismatch", text)
    if MACHINE_STATE in record:
        log.warning(
            f"{folder} was trained with the state of a reward machine (--rm_state_input), which its clients have to add"
        )
    if (source := record.get("instruction_source") or TASK) != TASK:
        log.warning(f"{folder} was trained with --instruction_source {source}: clients have to send its instructions")
    return ServedPolicy(folder, checkpoint, record, tuple(names), request_keys(names, config.serve_map), key)


def listen(config: ServeConfig) -> socket.socket:
    """A socket on the address; ConfigError if it is not available."""
    return sockets.listen(config.host, config.port, f"--host {config.host} --port {config.port}")
