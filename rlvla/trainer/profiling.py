"""Where the time of an iteration goes: seconds of its phases always, a trace of every operation on request."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile, record_function, supported_activities

from rlvla.utils.logging import log
from rlvla.utils.strategy import DeepspeedStrategy

TRACE_FOLDER = "profile"


class Stopwatch:
    """Seconds of the phases of an iteration; each is a named range of a trace, too.

    Args:
        *phases: those that shall be reported as 0 if they do not happen.
    """

    def __init__(self, *phases: str):
        self.seconds = dict.fromkeys(phases, 0.0)
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to the phase."""
        start = time.perf_counter()
        with record_function(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._start


class IterationProfiler:
    """Records chosen iterations with the profiler of torch: a Chrome trace per iteration and rank.

    Args:
        iterations: which ones, counted from 1.
        folder: of the run; traces go to `profile/` below it.
        strategy: tells the rank.
    """

    def __init__(self, iterations: Sequence[int], folder: Path, strategy: DeepspeedStrategy):
        self._iterations, self._folder, self._strategy = frozenset(iterations), folder / TRACE_FOLDER, strategy

    @contextmanager
    def recorded(self, iteration: int) -> Iterator[None]:
        """Record the block if the iteration, counted from 1, is one of the chosen; its trace is written at the end."""
        if iteration not in self._iterations:
            yield
            return
        with profile(activities=supported_activities()) as recording:
            yield
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"iteration_{iteration:06d}_rank{self._strategy.rank}.json.gz"
        recording.export_chrome_trace(str(path))
        if self._strategy.is_main:
            log.info(f"iteration {iteration}: trace in {path}; open it at https://ui.perfetto.dev or chrome://tracing")
