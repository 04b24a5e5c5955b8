"""Checks of a remote policy (`--remote` of `cli/eval_vla.py`) against a suite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from rlvla.checkpoints.policy_folder import MACHINE_STATE, learned_states
from rlvla.commands.setup import CheckedRun, instructions_of, success_problems
from rlvla.envs.base import TaskSpec
from rlvla.envs.config import EnvConfig, SplitConfig, resolve_env
from rlvla.envs.records import checked_record
from rlvla.envs.registry import get_suite
from rlvla.envs.splits import LearnedStates, describe_learned_from
from rlvla.models.config import PolicyConfig
from rlvla.models.policy import PolicySpec
from rlvla.rewards import SuccessConfig
from rlvla.serving.client import Channel, NoAnswer, Refused, RemoteCheckpoint, RemotePolicy, probe
from rlvla.serving.config import RemoteConfig
from rlvla.serving.messages import MessageError, described, described_map
from rlvla.serving.observations import request_keys
from rlvla.utils.errors import ConfigError, Problem

_GRAY = 128
_MAX_NOISE = 1_000_000  # numbers of a decision


def check_remote(
    remote: RemoteConfig,
    policy: PolicyConfig,
    env: EnvConfig,
    split: SplitConfig,
    eval_episodes: int,
    success: SuccessConfig,
) -> tuple[CheckedRun | None, list[Problem]]:
    """As `check_run`: the server is asked for its metadata, and for the actions of a gray observation.

    Raises:
        ConfigError: the server does not answer, or refuses observations of this suite.
    """
    with closing(Channel(remote)) as channel:
        try:
            metadata = channel.open()
        except (NoAnswer, Refused, MessageError) as error:
            text = f"--remote {remote.remote}: {error}; python cli/serve_vla.py --pretrain DIR serves a policy"
            raise ConfigError.of("remote", "unavailable", text) from None
        record = environment_of(metadata, remote)
        given, env = env, env.completed(record)
        if env.use_proprio is None:
            env = replace(env, use_proprio=True)
        problems = success_problems(given, env, success.success_source)
        learned_from = learned_states(record) or ()
        of = f"the policy {remote.remote}"
        resolved, more = resolve_env(env, split, eval_episodes, learned_from=learned_from, of=of)
        problems += more
        if MACHINE_STATE in record:
            text = f"--remote {remote.remote}: its observations have the state of a reward machine; evaluate its folder"
            problems.append(Problem("remote", "mismatch", text))
        if metadata.get("temperature") is not None:
            text = f"--remote {remote.remote}: the server samples its actions; start it without --temperature"
            problems.append(Problem("remote", "mismatch", text))
        instructions, more = instructions_of(resolved.config, resolved.tasks)
        problems += more
        if problems or resolved is None:
            return None, problems
        env, tasks = resolved.config, resolved.tasks
        cameras = tuple(env.camera_names)
        keys = _keys(remote, metadata, cameras)
        spec = PolicySpec(1, tasks[0].action_dim, 1, **_noise(metadata, remote), cameras=len(cameras))
        size = env.image_size or get_suite(env.suite).default_image_size
        images = np.full((len(cameras), size, size, 3), _GRAY, np.uint8)
        proprio = np.zeros(tasks[0].proprio_dim, np.float32) if tasks[0].proprio_dim else None
        asking = RemotePolicy(remote, spec, cameras, keys)
        answer = probe(asking, channel, images, proprio, tasks[0].instruction)
    length = _action_horizon(answer, tasks, remote)
    if (policy.action_chunk_len or 1) > length:
        text = f"--action_chunk_len {policy.action_chunk_len}: the server predicts {length}"
        return None, [Problem("action_chunk_len", "mismatch", text)]
    length = policy.action_chunk_len or length
    spec = replace(spec, action_chunk_len=length, columns=length, proprio_limit=float("inf"))
    checkpoint = RemoteCheckpoint(spec, remote, cameras, keys, metadata)
    return CheckedRun(resolved, checkpoint, {}, None, success.success_source, instructions), []


def environment_of(metadata: Mapping[Any, Any], remote: RemoteConfig) -> dict[str, Any]:
    """The record of the training environment in a server's metadata, {} if it sends none; see `checked_record`."""
    record = metadata.get("environment")
    if not isinstance(record, dict) or not all(isinstance(name, str) for name in record):
        return {}
    return checked_record(record, remote.remote)


def learned_from_of(metadata: Mapping[Any, Any], remote: RemoteConfig) -> list[LearnedStates] | None:
    """The initial states that the policy of a server was trained on; None if it does not say."""
    return learned_states(environment_of(metadata, remote))


def describe_remote(tasks: Sequence[TaskSpec], learned_from: Sequence[LearnedStates] | None) -> str:
    """Training states of a remote policy, as far as its server reports them."""
    if learned_from is None:
        return (
            "a policy behind a socket: its weights, training states and choice of actions are unknown, so these "
            "states may have been trained on"
        )
    return f"a policy behind a socket, by its own account {describe_learned_from(tasks, learned_from)}"


def _keys(remote: RemoteConfig, metadata: Mapping[Any, Any], cameras: Sequence[str]) -> dict[str, str]:
    """Keys of requests: those of --remote_map, else those that the server names, else openpi's."""
    named, theirs = metadata.get("keys"), metadata.get("cameras")
    entries: list[str] = []
    if isinstance(named, dict) and isinstance(theirs, list):
        ours = dict(zip(map(str, theirs), cameras)) | {"state": "state", "prompt": "prompt"}
        entries = [f"{ours[name]}={key}" for name, key in named.items() if name in ours and isinstance(key, str)]
    return request_keys(cameras, [*entries, *remote.remote_map], "remote_map")


def _noise(metadata: Mapping[Any, Any], remote: RemoteConfig) -> dict[str, Any]:
    """The random numbers of a decision that the server takes from its clients, as fields of `PolicySpec`."""
    noise = metadata.get("noise")
    if not isinstance(noise, dict):
        return {"noise_shape": (1,)}
    shape, kind = noise.get("shape"), noise.get("kind")
    sizes = shape if isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape) else None
    if sizes is None or kind not in ("uniform", "normal") or math.prod(sizes) > _MAX_NOISE:
        text = f"--remote {remote.remote}: its metadata names no usable noise ({described_map(noise)})"
        raise ConfigError.of("remote", "mismatch", text)
    return {"noise_shape": tuple(sizes), "noise": kind, "greedy_noise": True}


def _action_horizon(answer: Any, tasks: Sequence[TaskSpec], remote: RemoteConfig) -> int:
    """Actions per answer; ConfigError if they do not fit the tasks."""
    actions = answer.get("actions") if isinstance(answer, Mapping) else None
    dims = sorted({task.action_dim for task in tasks})
    shape = np.shape(actions) if isinstance(actions, (np.ndarray, list)) else ()
    if len(shape) != 2 or not shape[0] or dims != [shape[1]]:
        received = described_map(answer) if isinstance(answer, Mapping) else described(answer)
        text = f"--remote {remote.remote}: this suite needs actions [H, {dims[0]}]; the server answered {received}"
        raise ConfigError.of("remote", "mismatch", text)
    return shape[0]
