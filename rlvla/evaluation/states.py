"""Which initial states were solved, and which a policy has won and lost against a baseline, as grids of cells."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlvla.evaluation.results import EvalResult

_MOST_CELLS = 5000  # of a grid; beyond that nobody looks at single states
# Kind -> (sign in the cell, words of the legend).
WON_AND_LOST = {
    "won": ("+", "only the policy"),
    "lost": ("−", "only the baseline"),
    "both": ("", "both"),
    "neither": ("", "neither"),
}
SOLVED = {"both": ("", "solved"), "partly": ("", "in some of the samples"), "neither": ("", "not solved")}


@dataclass(frozen=True)
class StateGrid:
    """A cell for each initial state.

    Attributes:
        kinds: kind -> (sign, words), as in `WON_AND_LOST`.
        rows: task name -> (initial state, kind) of each of its states.
    """

    kinds: Mapping[str, tuple[str, str]]
    rows: Mapping[str, Sequence[tuple[int, str]]]

    @property
    def legend(self) -> list[tuple[str, str, str, int]]:
        """(kind, sign, words, number of states) of the kinds that occur."""
        counts = Counter(kind for cells in self.rows.values() for _, kind in cells)
        return [(kind, *words, counts[kind]) for kind, words in self.kinds.items() if counts[kind]]


def won_and_lost(own: EvalResult, base: EvalResult) -> StateGrid | None:
    """The states that both have played; None if there are none, or too many to look at."""
    mine, theirs = _successes(own), _successes(base)
    kinds = {(True, True): "both", (True, False): "won", (False, True): "lost", (False, False): "neither"}
    cells = {key: kinds[all(mine[key]), all(theirs[key])] for key in mine if key in theirs}
    return _grid(own, cells, WON_AND_LOST)


def solved(result: EvalResult) -> StateGrid | None:
    """The states of one policy; None if they are too many to look at."""
    cells = {
        key: "both" if all(outcomes) else "partly" if any(outcomes) else "neither"
        for key, outcomes in _successes(result).items()
    }
    return _grid(result, cells, SOLVED)


def _successes(result: EvalResult) -> dict[tuple[int, int], list[bool]]:
    """(Task id, initial state) -> success at end of its episodes."""
    found: defaultdict[tuple[int, int], list[bool]] = defaultdict(list)
    for episode in result.episodes:
        found[episode.task_id, episode.init_state_id].append(episode.success_at_end)
    return found


def _grid(
    result: EvalResult, cells: Mapping[tuple[int, int], str], kinds: Mapping[str, tuple[str, str]]
) -> StateGrid | None:
    if not 0 < len(cells) <= _MOST_CELLS:
        return None
    rows: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    names = {task.task_id: task.name for task in result.tasks}
    for (task_id, state), kind in sorted(cells.items()):
        rows[names[task_id]].append((state, kind))
    return StateGrid(kinds, dict(rows))
