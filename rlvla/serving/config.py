"""Flags of `cli/serve_vla.py`, and of remote policies in `cli/eval_vla.py`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rlvla.options import arg, given
from rlvla.utils.cli.flags import MAX_SEED
from rlvla.utils.errors import ConfigError

API_KEY_VARIABLE = "RLVLA_API_KEY"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_KEY_LENGTH = 16
_KEY_HELP = "python -c 'import secrets; print(secrets.token_urlsafe(32))' makes one"


@dataclass(frozen=True)
class ServeConfig:
    """Address, decisions and limits of a policy server."""

    host: str = arg(
        "127.0.0.1",
        f"address to listen on; any but this machine's own needs a key (--api_key_file, or {API_KEY_VARIABLE})",
        metavar="ADDRESS",
        essential=True,
    )
    port: int = arg(8000, "port; 0: any free one", minimum=0, maximum=65_535, essential=True)
    api_key_file: str | None = arg(
        None,
        f"file with the key that clients send as `Authorization: Api-Key KEY` (default: the environment variable "
        f"{API_KEY_VARIABLE}, else no key)",
        metavar="FILE",
        essential=True,
    )
    serve_map: tuple[str, ...] = arg(
        (),
        "keys of requests: CAMERA=KEY, state=KEY, prompt=KEY (default: observation/image, observation/wrist_image, "
        "observation/CAMERA_image for further cameras, observation/state, prompt)",
        nargs="+",
        metavar="NAME=KEY",
        essential=True,
    )
    num_actions: int | None = arg(None, "actions per answer (default: all of the chunk)", minimum=1, essential=True)
    temperature: float | None = arg(
        None, "sample actions at this temperature (default: the most likely actions)", above=0, essential=True
    )
    seed: int = arg(0, "seed of the noise of decisions, for episodes without a seed", minimum=0, maximum=MAX_SEED)
    bf16: bool = arg(False, "weights in bfloat16 instead of float32", essential=True)
    max_batch: int = arg(16, "requests that are decided together", minimum=1, maximum=10_000)
    max_connections: int = arg(64, "connections at a time", minimum=1, maximum=10_000)
    max_message_mb: float = arg(32.0, "largest request, in MB", above=0, maximum=1024)
    idle_seconds: float = arg(600.0, "seconds without a complete request after which a connection is closed", above=0)
    send_seconds: float = arg(30.0, "seconds in which a client has to read an answer", above=0)

    def needs_key(self) -> bool:
        """Whether other machines can reach the server."""
        return self.host not in LOOPBACK


def read_api_key(file: str | None, flag: str) -> str | None:
    """The key in a file, or in the environment variable `API_KEY_VARIABLE`; None without both.

    Raises:
        ConfigError: the file cannot be read, or the key is too short or has characters that no header can carry.
    """
    source = f"the environment variable {API_KEY_VARIABLE}" if file is None else f"--{flag} {file}"
    try:
        key = os.environ.get(API_KEY_VARIABLE) if file is None else Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError.of(flag, "missing_file", f"{source} cannot be read ({error}); {_KEY_HELP}") from None
    if key is None or (file is None and not key):
        return None
    if len(key) < _KEY_LENGTH or not all("!" <= character <= "~" for character in key):
        text = f"{source}: a key has at least {_KEY_LENGTH} letters, digits and signs without spaces; {_KEY_HELP}"
        raise ConfigError.of(flag, "invalid_file", text)
    return key


@dataclass(frozen=True)
class RemoteConfig:
    """A remote policy that speaks openpi's protocol."""

    remote: str | None = arg(
        None,
        "evaluate the policy behind this address instead of a folder; the server needs openpi's protocol, as that of "
        "serve_vla.py",
        metavar="ws://HOST:PORT",
        essential=True,
    )
    remote_map: tuple[str, ...] = arg(
        (),
        "keys of requests: CAMERA=KEY, state=KEY, prompt=KEY (default: those that the server names, else "
        "observation/image, observation/wrist_image, observation/CAMERA_image, observation/state, prompt)",
        nargs="+",
        metavar="NAME=KEY",
        read_if=given("remote"),
    )
    remote_key_file: str | None = arg(
        None,
        f"file with the server's key (default: the environment variable {API_KEY_VARIABLE}, else no key)",
        metavar="FILE",
        read_if=given("remote"),
    )
    remote_seconds: float = arg(
        30.0, "seconds in which the server has to answer", above=0, maximum=3600, read_if=given("remote")
    )
    remote_retries: int = arg(
        3,
        "retries after a time-out or a lost connection; then the episode counts as failed",
        minimum=0,
        maximum=20,
        read_if=given("remote"),
    )
