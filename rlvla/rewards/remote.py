"""Rewards from an HTTP server.

Requests `POST` a JSON object `{"episodes": [...]}`. Each episode has `suite`, `task_id`,
`init_state_id`, `seed`, `uid`, `instruction`, `finish_step`, `success_once`, `success_at_end`, `terminated`,
`truncated`, and with `--remote_rm_images` `images`: the frames of the first camera at each decision, as base64 PNG. The
response is `{"rewards": [...]}` with one entry per episode: a number (given at the last step) or one per executed step.
"""

from __future__ import annotations

import base64
import io
import json
import socket
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from rlvla.rewards.background import BackgroundJudge, SampleReward, steps_checked
from rlvla.rewards.base import register_reward
from rlvla.utils.errors import ConfigError, RunEnded
from rlvla.utils.video import upright

if TYPE_CHECKING:
    from rlvla.experience import Sample
    from rlvla.rewards.config import RewardConfig

_FIRST_PAUSE = 0.5  # seconds before the first retry; doubled each time
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


def url_problem(url: str, flag: str) -> str | None:
    """Why a URL is unusable (malformed, or nothing listens there), or None."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not port:
        return f"{flag} {url} is not a URL such as http://127.0.0.1:8000"
    try:
        socket.create_connection((parts.hostname, port), timeout=5).close()
    except OSError as error:
        return f"{flag} {url} does not answer ({error}); start the server first"
    return None


@register_reward("remote")
class RemoteSource:
    """Sends finished episodes to `--remote_rm_url`, in background threads."""

    def __init__(self, config: RewardConfig):
        if config.remote_rm_url is None:
            raise ConfigError("--reward remote needs --remote_rm_url")
        self._url, self._timeout = config.remote_rm_url, config.remote_rm_timeout
        self._retries, self.needs_images = config.remote_rm_retries, config.remote_rm_images
        problem = url_problem(self._url, "--remote_rm_url")
        if problem:
            raise ConfigError(problem)
        self._judge = BackgroundJudge(self._ask, config.reward_fn_batch_size, config.reward_fn_workers)

    def submit(self, sample: Sample) -> None:
        """Queue a finished episode."""
        self._judge.submit(sample)

    def collect(self) -> list[SampleReward]:
        """Rewards of the queued episodes; RemoteRewardError if the server gave none."""
        return self._judge.collect()

    def close(self) -> None:
        """Shut down the threads."""
        self._judge.close()

    def _ask(self, samples: list[Sample]) -> list[SampleReward]:
        body = json.dumps({"episodes": [describe_episode(s, images=self.needs_images) for s in samples]}).encode()
        problem = ""
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(_FIRST_PAUSE * 2 ** (attempt - 1))
            try:
                return self._once(body, samples)
            except urllib.error.HTTPError as error:
                problem = f"HTTP status {error.code}"
                if error.code < 500 and error.code != 429:
                    break  # a retry would not help
            except (OSError, ValueError, KeyError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
        raise RemoteRewardError(
            f"--remote_rm_url {self._url} gave no rewards in {attempt + 1} attempt(s): {problem}; see "
            "rlvla.rewards.remote for what it must answer"
        )

    def _once(self, body: bytes, samples: list[Sample]) -> list[SampleReward]:
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=self._timeout) as response:
            answer = json.loads(response.read())
        if not isinstance(answer, dict) or "rewards" not in answer:
            raise ValueError('the answer must be a JSON object with an entry "rewards"')
        return steps_checked(answer["rewards"], samples, "the server")
