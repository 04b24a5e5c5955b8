"""Rewards from an HTTP server.

Requests `POST` a JSON object `{"episodes": [...]}`. Each episode has `suite`, `task_id`,
`init_state_id`, `seed`, `uid`, `instruction`, `finish_step`, `success_once`, `success_at_end`, `terminated`,
`truncated`, and with `--remote_rm_images` `images`: the frames of the first camera at each decision, as base64 PNG. The
response is `{"rewards": [...]}` with one entry per episode: a number (given at the last step) or one per executed step,
or either of them with named numbers to be logged: `[reward, {"name": number}]`.
"""

from __future__ import annotations

import base64
import io
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from rlvla.options import arg
from rlvla.rewards.background import BackgroundJudge, BatchOptions, SampleReward, steps_checked
from rlvla.rewards.base import register_reward
from rlvla.utils.errors import ConfigError, Problem, RunEnded
from rlvla.utils.http.client import JsonClient, RequestLimits
from rlvla.utils.http.exchange import MalformedAnswer, RequestError
from rlvla.utils.video import upright

if TYPE_CHECKING:
    from rlvla.experience import Sample

_FIELDS = (
    "suite",
    "task_id",
    "init_state_id",
    "seed",
    "uid",
    "instruction",
    "finish_step",
    "success_once",
    "success_at_end",
    "terminated",
    "truncated",
)


class RemoteRewardError(RunEnded):
    """The server gave no valid response after all retries."""


def encode_png(image: np.ndarray) -> str:
    """An image [H, W, 3] uint8 as base64 PNG."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def describe_episode(sample: Sample, *, images: bool) -> dict[str, Any]:
    """The JSON description of an episode."""
    content = {name: getattr(sample, name) for name in _FIELDS}
    if images:
        frames = upright(sample.env_images[:-1, 0].numpy(), sample.images_flipped_vertically)
        content["images"] = [encode_png(frame) for frame in frames]
    return content


def url_problem(url: str, flag: str) -> Problem | None:
    """Why the URL in `--flag` is unusable (malformed, or nothing listens there), or None."""
    try:
        address = urlsplit(url)
        port = address.port or (443 if address.scheme == "https" else 80)
        valid = address.scheme in ("http", "https") and bool(address.hostname) and url.isprintable() and " " not in url
    except ValueError:
        valid = False
    if not valid or address.username or address.fragment:
        return Problem(flag, "out_of_range", f"--{flag} {url!r} is not a URL such as http://127.0.0.1:8000")
    try:
        socket.create_connection((address.hostname, port), timeout=5).close()
    except (OSError, ValueError) as error:  # ValueError: a name that no host can have
        text = f"--{flag} {url} does not answer ({error}); start the server first"
        return Problem(flag, "unavailable", text)
    return None


@dataclass(frozen=True)
class RemoteOptions(BatchOptions):
    """The server and its limits."""

    remote_rm_url: str | None = arg(
        None, "HTTP server that is sent finished episodes as JSON (default: none)", metavar="URL"
    )
    remote_rm_timeout: float = arg(30.0, "deadline of a request in seconds", minimum=0.1, maximum=3600)
    remote_rm_retries: int = arg(3, "further attempts after a failed one", minimum=0, maximum=100)
    remote_rm_images: bool = arg(False, "also send the frames of the first camera, as PNG")


@register_reward("remote", options=RemoteOptions)
class RemoteSource:
    """Reward source `remote`: sends finished episodes to `--remote_rm_url` on background threads."""

    def __init__(self, options: RemoteOptions):
        if options.remote_rm_url is None:
            raise ConfigError.of("remote_rm_url", "needs_flag", "--reward remote needs --remote_rm_url")
        self._url, self.needs_images = options.remote_rm_url, options.remote_rm_images
        problem = url_problem(self._url, "remote_rm_url")
        if problem:
            raise ConfigError(problem)
        self._limits = RequestLimits(options.remote_rm_timeout, options.remote_rm_retries, options.reward_fn_workers)
        self._client: JsonClient | None = None
        self._names: set[str] = set()  # of numbers that the server added
        self._judge = BackgroundJudge(self._ask, options.reward_fn_batch_size, options.reward_fn_workers)

    @property
    def client(self) -> JsonClient:
        """The client, created on first use."""
        if self._client is None:
            self._client = JsonClient(self._limits)
        return self._client

    def submit(self, sample: Sample) -> None:
        """Queue a finished episode."""
        _ = self.client  # created here, on one thread
        self._judge.submit(sample)

    def collect(self) -> list[SampleReward]:
        """Rewards of the queued episodes; RemoteRewardError if the server gave none."""
        return self._judge.collect()

    def metrics(self) -> dict[str, float]:
        """Retries, timeouts and seconds of all requests since the last call."""
        return {f"reward/remote_{name}": value for name, value in self.client.take_counts().items()}

    def close(self) -> None:
        """Abort all requests and shut down the threads."""
        self._judge.close()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _ask(self, samples: list[Sample]) -> list[SampleReward]:
        def read(answer: Any) -> list[SampleReward]:
            if not isinstance(answer, dict) or "rewards" not in answer:
                raise MalformedAnswer('the answer must be a JSON object with an entry "rewards"')
            return steps_checked(answer["rewards"], samples, "the server", self._names)

        def content() -> dict[str, Any]:
            return {"episodes": [describe_episode(s, images=self.needs_images) for s in samples]}

        try:
            return self.client.ask(self._url, content, read).result()
        except RequestError as error:
            raise RemoteRewardError(
                f"--remote_rm_url {self._url} gave no rewards, asked {self._limits.retries + 1} time(s) at most: "
                f"{type(error).__name__}: {error}; see rlvla.rewards.remote for what it must answer"
            ) from None
