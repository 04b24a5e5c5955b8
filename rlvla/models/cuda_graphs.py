"""CUDA graphs of policy inference.

At small batches a GPU waits for the host, which launches thousands of kernels per decision. A graph launches them
together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlvla.models.distributions import PolicyOutput
from rlvla.utils.terminal import log

Inputs = Mapping[str, Tensor | None]
_MAX_GRAPHS = 32  # each keeps the activations of its forward pass


@dataclass
class _CapturedGraph:
    """A graph with the tensors that it reads and writes."""

    graph: Any
    inputs: dict[str, Tensor]
    output: PolicyOutput


class DecisionGraphs:
    """Captures and replays the forward pass of a policy on a GPU, one graph per shape of the inputs.

    Batches are padded to a power of two by repeating the last row. All graphs are recaptured when a weight has moved
    in memory. If the pass cannot be captured, it runs without graphs from then on.

    Args:
        policy: whose weights the graphs read.
    """

    def __init__(self, policy: nn.Module):
        self._policy, self._usable = policy, True
        self._graphs: dict[Hashable, _CapturedGraph] = {}  # oldest first
        self._pool: Any = None  # memory that all graphs share
        self._parameters: list[nn.Parameter] = []
        self._addresses = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> DecisionGraphs:
        """The graphs of a copied policy, none captured yet."""
        return DecisionGraphs(copy.deepcopy(self._policy, memo))

    def __call__(self, decide: Callable[[Inputs], PolicyOutput], inputs: Inputs, settings: Hashable) -> PolicyOutput:
        """`decide(inputs)`, whose tensors are valid until the next call.

        Args:
            decide: a forward pass that does not wait for the GPU, and depends on nothing else that changes, such as
                adapters that are switched off.
            inputs: tensors [B, ...] on the GPU, or None.
            settings: what else the pass depends on.
        """
        if self._usable and not all(value is None or isinstance(value, Tensor) for value in inputs.values()):
            self._give_up("its observations are not tensors alone")
        if not self._usable:
            return decide(inputs)
        count = next(len(value) for value in inputs.values() if value is not None)
        padded = padded_batch(inputs, 1 << (count - 1).bit_length())
        self._forget_moved_weights()
        key = (tuple((name, value.shape, value.dtype) for name, value in padded.items() if value is not None), settings)
        if key not in self._graphs:
            if len(self._graphs) >= _MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            try:
                self._graphs[key] = self._capture(decide, padded)
            except RuntimeError as error:
                self._give_up(str(error))
                return decide(inputs)
        captured = self._graphs[key]
        for name, value in captured.inputs.items():
            source = padded[name]
            assert source is not None
            value.copy_(source)
        captured.graph.replay()
        return first_rows(captured.output, count)

    def _forget_moved_weights(self) -> None:
        self._parameters = self._parameters or list(self._policy.parameters())
        addresses = hash(tuple(parameter.data_ptr() for parameter in self._parameters))
        if addresses != self._addresses:
            self._forget()
            self._addresses = addresses

    def _forget(self) -> None:
        self._graphs.clear()
        self._pool = None  # torch releases a pool with its last graph

    def _give_up(self, reason: str) -> None:
        self._usable = False
        self._forget()
        log.warning(f"--cuda_graphs: this policy decides without graphs: {reason}")

    def _capture(self, decide: Callable[[Inputs], PolicyOutput], inputs: Inputs) -> _CapturedGraph:
        static_inputs = {name: value.clone() for name, value in inputs.items() if value is not None}
        arguments = {**inputs, **static_inputs}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries allocate their workspaces at the first call
            decide(arguments)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, e.g. an asynchronous update, may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = decide(arguments)
        self._pool = self._pool or graph.pool()
        return _CapturedGraph(graph, static_inputs, output)


def padded_batch(inputs: Inputs, size: int) -> dict[str, Tensor | None]:
    """The tensors [B, ...] with their last row repeated up to `size` rows."""
    padded: dict[str, Tensor | None] = {}
    for name, value in inputs.items():
        if value is None or len(value) == size:
            padded[name] = value
        else:
            padded[name] = torch.cat([value, value[-1:].expand(size - len(value), *value.shape[1:])])
    return padded


def first_rows(output: PolicyOutput, count: int) -> PolicyOutput:
    """The first `count` decisions."""
    actions = None if output.actions is None else output.actions[:count]
    trace = {name: value[:count] for name, value in output.trace.items()}
    return PolicyOutput(actions, output.log_probs[:count], trace)
