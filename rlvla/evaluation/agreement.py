"""A judge's success against the simulator's, episode by episode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from rlvla.rewards.success_source import SIMULATOR
from rlvla.utils.terminal import markdown_table, table


@dataclass(frozen=True)
class Agreement:
    """Numbers of episodes by success at the end: as the judge says, and by the simulator's own predicate.

    Attributes:
        both, neither: they agree.
        judge_only: the judge says success, the simulator does not.
        simulator_only: the reverse.
    """

    both: int = 0
    neither: int = 0
    judge_only: int = 0
    simulator_only: int = 0

    @classmethod
    def of(cls, pairs: Iterable[tuple[bool, bool | None]]) -> Agreement | None:
        """From (judge, simulator) of each episode; None if the simulator tells success itself."""
        names = {(True, True): "both", (False, False): "neither", (True, False): "judge_only"}
        counts: dict[str, int] = {}
        for judge, simulator in pairs:
            if simulator is not None:
                name = names.get((judge, simulator), "simulator_only")
                counts[name] = counts.get(name, 0) + 1
        return cls(**counts) if counts else None

    @property
    def n(self) -> int:
        """Number of episodes."""
        return self.both + self.neither + self.judge_only + self.simulator_only

    @property
    def share(self) -> float:
        """Share of the episodes in which they agree."""
        return (self.both + self.neither) / self.n

    @property
    def simulator_rate(self) -> float:
        """Success rate by the simulator."""
        return (self.both + self.simulator_only) / self.n

    def as_dict(self) -> dict[str, int]:
        """For JSON."""
        return asdict(self)

    def headers(self, source: str) -> tuple[str, str, str]:
        """Headers of `rows`."""
        return (f"success at end, {source} against simulator", "simulator: yes", "simulator: no")

    def rows(self, source: str) -> list[tuple[str, int, int]]:
        """The table of confusions."""
        return [
            (f"{source}: yes", self.both, self.judge_only),
            (f"{source}: no", self.simulator_only, self.neither),
        ]

    def as_table(self, source: str) -> str:
        """For the terminal."""
        return table(self.headers(source), self.rows(source))

    def as_markdown(self, source: str) -> str:
        """For Markdown."""
        return markdown_table(self.headers(source), self.rows(source))


def told_by(source: str, unanswered: int = 0) -> str:
    """A phrase for reports: what told success."""
    words = "the simulator" if source == SIMULATOR else source
    missing = f" ({unanswered} question(s) without an answer)" if unanswered else ""
    return f"success told by {words}{missing}"
