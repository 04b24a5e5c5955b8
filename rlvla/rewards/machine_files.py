"""Reward machines declared in a file: states and guarded edges, or a formula, with validators and potentials.

A file names either `states` (each with its outgoing edges, in order of priority; the first state is the initial one)
and `success`, or a `formula`, whose states `cli/draw_reward_machine.py` shows:

    states:
      start:
        - {when: grasped, to: held}
      held:
        - {when: lifted & !collision, to: done, progress: 1.0}
        - {when: collision, to: dropped}
    success: done
    failure: dropped
    validators:
      held: {needs: grasped, penalty: 0.1, to: start}
    potentials: {start: -1.0, held: -0.4}
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlvla.rewards.ltlf import compile_ltlf
from rlvla.rewards.reward_machine import Guard, MachineGraph, Validator, compiled_graph, guarded_graph
from rlvla.utils.data_files import parse_json, read_json, read_yaml
from rlvla.utils.errors import ConfigError
from rlvla.utils.terminal import printable

SUFFIXES = (".yaml", ".yml", ".json")
_KEYS = ("formula", "states", "success", "failure", "validators", "potentials")


def is_declaration(name: str) -> bool:
    """Whether a value of `--rm_machine` is a file name or a declaration in JSON."""
    return name.startswith("{") or name.endswith(SUFFIXES)


def declaration_of(name: str) -> str:
    """The declaration as JSON on one line, for records that must not depend on the file.

    Raises:
        ConfigError: the file cannot be read or does not hold a mapping.
    """
    if name.startswith("{"):
        content: Any = parse_json(name, "the declaration of the machine")
    else:
        path = Path(name)
        content = read_json(path) if path.suffix == ".json" else read_yaml(path)
    if not isinstance(content, dict):
        raise ConfigError.of(
            None, "invalid_file", f"{name} holds a {type(content).__name__}; a machine needs states or a formula"
        )
    try:
        return json.dumps(content)
    except (TypeError, ValueError) as error:
        text = f"{name} holds more than text, numbers, lists and mappings ({error})"
        raise ConfigError.of(None, "invalid_file", text) from None


def declared_graph(name: str) -> MachineGraph:
    """The machine of a file, or of a declaration in JSON.

    Raises:
        ConfigError: all mistakes of the declaration.
    """
    where = "the declaration of the machine" if name.startswith("{") else name
    content = json.loads(declaration_of(name))
    reader = _Reader()
    graph = reader.graph(content)
    if graph is None or reader.problems:
        raise ConfigError(f"{where}: {text}" for text in reader.problems)
    return graph


class _Reader:
    """Builds the graph of a declaration and collects its mistakes.

    Attributes:
        problems: one sentence per mistake.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []

    def graph(self, content: Mapping[str, Any]) -> MachineGraph | None:
        """The machine; None if its states cannot be read."""
        unknown = [str(key) for key in content if key not in _KEYS]
        if unknown:
            self.problems.append(f"unknown entries {', '.join(unknown)}; known are {', '.join(_KEYS)}")
        if ("formula" in content) == ("states" in content):
            self.problems.append("give either states or a formula")
            return None
        if "formula" in content:
            ignored = [key for key in ("success", "failure") if key in content]
            if ignored:
                self.problems.append(f"{' and '.join(ignored)} follow from the formula; leave them out")
            graph = self._attempt("formula", lambda: compiled_graph(compile_ltlf(self._text(content["formula"]))))
        else:
            graph = self._explicit(content)
        if graph is None:
            return None
        validators = self._validators(graph, self._mapping(content, "validators"))
        potentials = self._potentials(graph, self._mapping(content, "potentials"))
        needed = [name for validator in validators.values() for name in validator.needs.propositions]
        propositions = tuple(dict.fromkeys([*graph.propositions, *needed]))
        return replace(graph, validators=validators, potentials=potentials, propositions=propositions)

    def _attempt(self, place: str, build: Callable[[], Any]) -> Any:
        try:
            return build()
        except ConfigError as error:
            self.problems += [f"{place}: {problem.text}" for problem in error.problems]
            return None

    def _guard(self, place: str, value: object) -> Guard | None:
        return self._attempt(place, lambda: Guard(self._text(value)))

    def _text(self, value: object) -> str:
        if not isinstance(value, str):
            raise ConfigError(f"{value!r} is not a formula; put it in quotes")
        return value

    def _mapping(self, content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        value = content.get(key) or {}
        if isinstance(value, dict):
            return value
        self.problems.append(f"{key} must map states to their entries, not be a {type(value).__name__}")
        return {}

    def _names(self, content: Mapping[str, Any], key: str) -> list[str]:
        value = content.get(key)
        names = [] if value is None else value if isinstance(value, list) else [value]
        self.problems += [f"{key}: {name!r} is not the name of a state" for name in names if not isinstance(name, str)]
        return [name for name in names if isinstance(name, str)]

    def _explicit(self, content: Mapping[str, Any]) -> MachineGraph | None:
        states = self._mapping(content, "states")
        success, failure = self._names(content, "success"), self._names(content, "failure")
        if not states:
            self.problems.append("states is empty")
        if not success:
            self.problems.append("success names no state: the machine needs a goal")
        both = sorted(set(success) & set(failure))
        if both:
            self.problems.append(f"{', '.join(both)} cannot be both success and failure")
        names = {*states, *success, *failure}
        edges = {state: self._edges(state, outgoing, names) for state, outgoing in states.items()}
        leaving = [state for state in (*success, *failure) if edges.get(state)]
        if leaving:
            self.problems.append(f"{', '.join(leaving)} is terminal; it cannot have edges")
        if self.problems:
            return None
        return self._attempt("states", lambda: guarded_graph(edges, success, failure))

    def _edges(self, state: str, outgoing: object, states: set[str]) -> list[tuple[str, str, float]]:
        edges = []
        if not isinstance(outgoing, (list, type(None))):
            self.problems.append(f"state {state}: its edges must be a list of {{when: ..., to: ...}}")
            return []
        for number, edge in enumerate(outgoing or [], 1):
            place = f"state {state}, edge {number}"
            if not isinstance(edge, dict) or not {"when", "to"} <= set(edge) <= {"when", "to", "progress"}:
                self.problems.append(f"{place}: give when and to, and progress if it is not 1")
                continue
            guard = self._guard(place, edge["when"])
            if not isinstance(edge["to"], str) or edge["to"] not in states:
                self.problems.append(f"{place}: there is no state {edge['to']!r}")
            progress = self._number(f"{place}: progress", edge.get("progress", 1.0))
            if guard is not None and progress is not None:
                edges.append((guard.text, edge["to"], progress))
        return edges

    def _number(self, place: str, value: object, low: float = -math.inf, high: float = math.inf) -> float | None:
        try:
            number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and low <= number <= high:
            return number
        limits = "" if low == -math.inf else " of at least 0" if high == math.inf else f" in [{low:g}, {high:g}]"
        self.problems.append(f"{place} must be a finite number{limits}, not {printable(repr(value), 80)}")
        return None

    def _validators(self, graph: MachineGraph, entries: Mapping[str, Any]) -> dict[str, Validator]:
        validators = {}
        terminal = graph.success | graph.failure
        for state, entry in entries.items():
            place = f"validator of {state}"
            if state not in graph.states or state in terminal:
                self.problems.append(f"{place}: there is no such state that is not terminal")
            elif not isinstance(entry, dict) or "needs" not in entry or set(entry) - {"needs", "penalty", "to"}:
                self.problems.append(f"{place}: give needs, and penalty and to if they are not 0 and {graph.states[0]}")
            else:
                needs = self._guard(place, entry["needs"])
                penalty = self._number(f"{place}: penalty", entry.get("penalty", 0.0), low=0.0)
                target = entry.get("to", graph.states[0])
                if target not in graph.states or target in graph.success:
                    self.problems.append(f"{place}: it cannot fall back to {target!r}")
                elif needs is not None and penalty is not None:
                    validators[state] = Validator(needs, penalty, target)
        return validators

    def _potentials(self, graph: MachineGraph, entries: Mapping[str, Any]) -> dict[str, float] | None:
        if not entries:
            return None
        free = [state for state in graph.states if state not in graph.success | graph.failure]
        wrong = [str(state) for state in entries if state not in free]
        missing = [state for state in free if state not in entries]
        if wrong:
            self.problems.append(
                f"potentials: {', '.join(wrong)} has none to give: it is 0 at the goal, -1 in failure states"
            )
        if missing:
            self.problems.append(f"potentials: {', '.join(missing)} has none; give all states or leave potentials out")
        values = {state: self._number(f"potential of {state}", entries.get(state, 0.0), -1.0, 0.0) for state in free}
        fixed = dict.fromkeys(graph.failure, -1.0) | dict.fromkeys(graph.success, 0.0)
        return {state: value for state, value in values.items() if value is not None} | fixed
