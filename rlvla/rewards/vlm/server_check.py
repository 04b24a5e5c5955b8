"""Checks before training that the VLM server is reachable and has the model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from rlvla.utils.errors import require

if TYPE_CHECKING:
    from rlvla.rewards.vlm.config import VLMConfig

_MOST_NAMES = 5  # of the server's models, in a message
_REFUSED = (401, 403)


def server_problem(config: VLMConfig) -> str | None:
    """Why the server at `vlm_url` cannot serve `vlm_model`, or None.

    If the list of models (`GET /models`) does not contain the model, a completion of one token is requested, because
    some servers list only part of their models, or none.

    Args:
        config: server, model and time limit.

    Raises:
        MissingExtraError: the `openai` package is not installed.
    """
    openai = require("openai", extra="vlm")
    client = openai.OpenAI(
        base_url=config.vlm_url,
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        timeout=config.vlm_timeout,
        max_retries=2,  # a server that has just come up may drop its first connections
    )
    with client:
        try:
            return _model_problem(openai, client, config)
        except openai.APITimeoutError:
            return (
                f"--vlm_url {config.vlm_url} did not answer within --vlm_timeout {config.vlm_timeout:g} seconds; wait "
                "until the model is loaded, or raise the limit"
            )
        except openai.APIConnectionError as error:
            why = error.__cause__ or error
            return f"--vlm_url {config.vlm_url} does not answer ({why}); start the server first"
        except openai.APIStatusError as error:
            if error.status_code in _REFUSED:
                return (
                    f"--vlm_url {config.vlm_url} refuses access (HTTP {error.status_code}: {_words(error)}); put the "
                    "server's key into the environment variable OPENAI_API_KEY"
                )
            return f"--vlm_url {config.vlm_url} answers with HTTP {error.status_code}: {_words(error)}"
        except (openai.OpenAIError, ValueError) as error:
            return f"--vlm_url {config.vlm_url} is no OpenAI-compatible server ({type(error).__name__}: {error})"


def _model_problem(openai: Any, client: Any, config: VLMConfig) -> str | None:
    """Problem with the model, or None; errors unrelated to the model are raised."""
    try:
        names = [model.id for model in getattr(client.models.list(), "data", None) or ()]
    except openai.APIStatusError as error:
        if error.status_code in _REFUSED:
            raise
        names = []
    except ValueError:  # not a model list
        names = []
    if config.vlm_model in names:
        return None
    try:
        answer = client.chat.completions.create(
            model=config.vlm_model, messages=[{"role": "user", "content": "Hello"}], max_tokens=1, temperature=0.0
        )
    except (openai.NotFoundError, openai.BadRequestError, openai.UnprocessableEntityError) as error:
        if names:
            more = ", ..." if len(names) > _MOST_NAMES else ""
            return (
                f"--vlm_model {config.vlm_model}: the server at --vlm_url {config.vlm_url} does not know it; it has "
                f"{', '.join(names[:_MOST_NAMES])}{more}"
            )
        return (
            f"--vlm_url {config.vlm_url} lists no models and refuses a chat completion of --vlm_model "
            f"{config.vlm_model} (HTTP {error.status_code}: {_words(error)}); the URL usually ends in /v1"
        )
    if not getattr(answer, "choices", None):
        return f"--vlm_url {config.vlm_url} is no OpenAI-compatible server: its answer is no chat completion"
    return None


def _words(error: Any) -> str:
    """The server's error message on one line."""
    return " ".join(error.response.text.split())[:200]
