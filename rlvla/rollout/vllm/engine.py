"""Decoding of action tokens with vLLM: a standalone program for an interpreter with vLLM.

    python engine.py CONNECTION_FD PROMPTS_FD WEIGHTS_FD SETTINGS

It does not import rlvla, so that its environment needs vLLM only. Messages are JSON over a socket, tensors lie in two
shared files. Commands are answered in order, and the end of the connection ends the program:

- {"id": n, "do": "load", "tensors": {name: ref}}: new weights;
- {"id": n, "do": "decode", "prompts": ref, "lengths": [B], "uniforms": [B, K] or null, "temperature": t}: answered by
  "tokens" [B, K] and "log_probs" [B, K].

A ref is {"dtype": name, "shape": [...], "offset": bytes}. An answer has the id of its command; one with "error" is a
traceback.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

_ROW = "row"  # key of a request's row in the batch
_BLOCK = 128  # positions per block of the key-value cache; the largest, used on CPUs
# Fraction of the device's memory that must be free at the start; the cache size determines the actual use.
_FREE_FRACTION = 0.01


class Draws:
    """Random numbers of the requests in progress, and log-probs of the chosen tokens.

    Attributes:
        uniforms: [B, K] float64; None takes the most likely token.
        temperature: divides the logits.
        log_probs: [B, K] float32.
    """

    def __init__(self) -> None:
        self.uniforms: Tensor | None = None
        self.temperature, self.log_probs = 1.0, torch.zeros(0)

    def begin(self, rows: int, steps: int, uniforms: list[list[float]] | None, temperature: float) -> None:
        """Prepare a batch of `rows` decisions with `steps` tokens each."""
        self.uniforms = None if uniforms is None else torch.tensor(uniforms, dtype=torch.float64)
        self.temperature, self.log_probs = temperature, torch.zeros(rows, steps)

    def choose(self, logits: Tensor, rows: Tensor, steps: Tensor) -> Tensor:
        """Choose tokens [n] from logits [n, V] of the given rows and steps."""
        log_probs = torch.log_softmax(logits.float() / self.temperature, dim=-1)
        if self.uniforms is None:
            tokens = logits.argmax(-1)
        else:
            tokens = by_inverse_cdf(log_probs, self.uniforms[rows, steps].to(logits.device))
        self.log_probs[rows, steps] = log_probs.gather(-1, tokens[:, None])[:, 0].cpu()
        return tokens


def by_inverse_cdf(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens [n] whose cumulative probability first exceeds the uniforms [n]; as `sample_by_inverse_cdf` of rlvla."""
    cumulative = log_probs.double().exp().cumsum(-1)
    threshold = uniforms[:, None] * cumulative[:, -1:]
    return (cumulative <= threshold).sum(-1).clamp_max(log_probs.shape[-1] - 1)


DRAWS = Draws()


class ChosenByDraws(LogitsProcessor):
    """Masks all logits but those of the tokens that `DRAWS` chooses, so that equal noise gives equal decisions."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self._requests: dict[int, tuple[int, list[int]]] = {}  # place in the batch -> row, tokens so far

    def is_argmax_invariant(self) -> bool:
        """False: it changes the most likely token."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the requests through vLLM's batch."""
        if batch_update is None:
            return
        held = self._requests
        for place in batch_update.removed:
            held.pop(place, None)
        for place, params, _, tokens in batch_update.added:
            held.pop(place, None)
            if params.extra_args and _ROW in params.extra_args:  # requests of vLLM's start-up have none
                held[place] = params.extra_args[_ROW], tokens
        for source, target, direction in batch_update.moved:
            moved, replaced = held.pop(source, None), held.pop(target, None)
            if moved is not None:
                held[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                held[source] = replaced

    def apply(self, logits: Tensor) -> Tensor:
        """Mask logits [n, V] to one finite entry per row."""
        places = [place for place in sorted(self._requests) if place < len(logits)]
        if not places:
            return logits
        rows = torch.tensor([self._requests[place][0] for place in places])
        steps = torch.tensor([len(self._requests[place][1]) for place in places])
        tokens = DRAWS.choose(logits[places], rows, steps)
        chosen = torch.full_like(logits, -math.inf)
        chosen[places, tokens] = 0.0
        return chosen


class Memory:
    """Tensors in a shared file.

    Args:
        fd: its descriptor.
    """

    def __init__(self, fd: int):
        self._fd = fd

    def tensor(self, ref: dict[str, Any]) -> Tensor:
        """The tensor of a ref; a view of the file, which the next command overwrites."""
        dtype, shape = getattr(torch, ref["dtype"]), ref["shape"]
        view = mmap.mmap(self._fd, os.fstat(self._fd).st_size)
        return torch.frombuffer(view, dtype=dtype, count=math.prod(shape), offset=ref["offset"]).view(shape)


class Engine:
    """A Llama with a vocabulary of action tokens, prompted by embeddings.

    Args:
        settings: "config" of the model, "dtype" of its weights, "batch" (concurrent requests), "steps" (K, tokens of
            a decision), "positions" (expected prompt length).
    """

    def __init__(self, settings: dict[str, Any]):
        config, self.steps = settings["config"], settings["steps"]
        longest = config["max_position_embeddings"]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            self._llm = LLM(
                folder,
                load_format="dummy",  # the weights come with the first command
                dtype=settings["dtype"],
                skip_tokenizer_init=True,
                enable_prompt_embeds=True,
                enforce_eager=True,
                enable_prefix_caching=False,
                async_scheduling=False,
                max_model_len=longest,
                max_num_seqs=settings["batch"],
                max_num_batched_tokens=max(longest, settings["batch"] * settings["positions"]),
                kv_cache_memory_bytes=cache_bytes(settings),
                gpu_memory_utilization=_FREE_FRACTION,
                logits_processors=[ChosenByDraws],
                disable_log_stats=True,
            )

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Replace the weights."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})

    def decode(self, prompts: Tensor, lengths: list[int]) -> list[list[int]]:
        """Tokens [B, K] after prompts [B, S, d] of these lengths, chosen by `DRAWS`."""
        inputs = [{"prompt_embeds": prompt[:length]} for prompt, length in zip(prompts, lengths)]
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=self.steps,
                ignore_eos=True,
                detokenize=False,
                skip_clone=True,
                extra_args={_ROW: row},
            )
            for row in range(len(inputs))
        ]
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def cache_bytes(settings: dict[str, Any]) -> int:
    """Bytes of a key-value cache for a whole batch, at least for one sequence of the greatest length."""
    config, batch = settings["config"], settings["batch"]
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_position = 2 * config["num_hidden_layers"] * heads * width * getattr(torch, settings["dtype"]).itemsize

    def blocks(positions: int) -> int:
        return -(-positions // _BLOCK) * _BLOCK

    longest = blocks(config["max_position_embeddings"])
    return per_position * (max(longest, batch * blocks(settings["positions"])) + _BLOCK)


def answer(engine: Engine, prompts: Memory, weights: Memory, message: dict[str, Any]) -> dict[str, Any]:
    """Execute a command and return its answer."""
    if message["do"] == "load":
        engine.load((name, weights.tensor(ref)) for name, ref in message["tensors"].items())
        return {}
    embeddings, lengths = prompts.tensor(message["prompts"]), message["lengths"]
    DRAWS.begin(len(lengths), engine.steps, message["uniforms"], message["temperature"])
    tokens = engine.decode(embeddings, lengths)
    return {"tokens": tokens, "log_probs": DRAWS.log_probs.tolist()}


def main() -> None:
    """Entry point: answer commands until the connection ends."""
    connection, prompts, weights = Connection(int(sys.argv[1])), Memory(int(sys.argv[2])), Memory(int(sys.argv[3]))

    def send(message: dict[str, Any]) -> None:
        connection.send_bytes(json.dumps(message).encode())

    try:
        engine = Engine(json.loads(sys.argv[4]))
    except Exception:
        send({"error": traceback.format_exc()})
        raise
    send({"ready": True})
    while True:
        try:
            message = json.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)  # a regular exit of vLLM would take seconds
        try:
            result = answer(engine, prompts, weights, message)
        except Exception:
            traceback.print_exc()
            result = {"error": traceback.format_exc()}
        send(result | {"id": message["id"]})


if __name__ == "__main__":
    main()
