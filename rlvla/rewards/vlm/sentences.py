"""Sentences of propositions, about which a vision-language model is asked yes or no."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlvla.utils.errors import ConfigError, Problem

_OBJECT = "the object that the task is about"
_SENTENCES = {
    "near": "The gripper or marker of the robot is close to its target.",
    "reached": "The gripper or marker of the robot is at its target.",
    "grasped": f"The gripper holds {_OBJECT}.",
    "lifted": f"The robot has lifted {_OBJECT} clearly off the surface.",
    "above_bin": f"The robot holds {_OBJECT} above the bin where it belongs.",
    "in_bin": "The object lies in the bin.",
    "pushed": "The other object has been pushed to its place.",
    "placed": f"{_OBJECT.capitalize()} is where it belongs, and the gripper has let go of it.",
    "aligned": f"{_OBJECT.capitalize()} is straight above the place where it belongs.",
    "inserted": "The peg is in the hole.",
    "cubeA_grasped": "The gripper holds the red cube.",
    "cubeA_lifted": "The robot has lifted the red cube clearly off the table.",
    "cubes_aligned": "The red cube is lifted and straight above the green cube.",
    "stacked": "The red cube lies on the green cube, and the gripper has let go of it.",
    "unlatched": "The handle of the door is turned.",
    "opened": "The door is open.",
    "contact": "The tool touches the dirt on the table.",
    "w25": "At least a quarter of the dirt is wiped away.",
    "w50": "At least half of the dirt is wiped away.",
    "w100": "All of the dirt is wiped away.",
    "collision": "The robot's arm hits the table.",
    "behind": f"The robot is right behind {_OBJECT}, on the side away from where it belongs.",
    "touching": f"The robot touches {_OBJECT}.",
    "near_zone": f"{_OBJECT.capitalize()} is close to the zone where it belongs.",
    "in_zone": f"{_OBJECT.capitalize()} lies in the zone where it belongs.",
    "touched": "The gripper touches what the task wants to be opened, closed or switched.",
}
# Propositions that begin with a predicate of LIBERO's goals, e.g. on_bowl_1_plate_1.
_PREDICATES = {
    "on": "is on",
    "in": "is in",
    "up": "stands upright",
    "open": "is open",
    "close": "is closed",
    "turnon": "is switched on",
    "turnoff": "is switched off",
}
# Stages of LIBERO's goals: of any object, or of the one that follows, e.g. grasped_bowl_1.
_STAGES = {
    "near": "The gripper of the robot is close to the {}.",
    "grasped": "The gripper holds the {}.",
    "lifted": "The robot has lifted the {} clearly off the surface.",
    "touched": "The gripper touches the {}.",
}
_TWO_THINGS = re.compile(r"(.+?_\d+)_(.+)")  # objects are numbered: bowl_1_plate_1


def sentence_of(proposition: str) -> str:
    """The sentence of a proposition; one that is not known is spelled out from its name."""
    if proposition in _SENTENCES:
        return _SENTENCES[proposition]
    predicate, _, things = proposition.partition("_")
    if predicate in _STAGES and things:
        return _STAGES[predicate].format(_words(things))
    if predicate in _PREDICATES and things:
        two = _TWO_THINGS.match(things) if predicate in ("on", "in") else None
        first, second = two.groups() if two else (things, "")
        place = f" the {_words(second)}" if second else ""
        return f"The {_words(first)} {_PREDICATES[predicate]}{place}."
    return f"This is the case: {proposition.replace('_', ' ')}."


def _words(name: str) -> str:
    """`black_bowl_1` -> `black bowl`."""
    return " ".join(word for word in name.split("_") if not word.isdigit())


def parse_sentences(given: Sequence[str]) -> dict[str, str]:
    """`["near=The marker is close."]` -> `{"near": "The marker is close."}`.

    Raises:
        ConfigError: malformed entries and duplicates (all reported at once).
    """
    sentences: dict[str, str] = {}
    problems = []
    for entry in given:
        name, _, sentence = entry.partition("=")
        name, sentence = name.strip(), sentence.strip()
        if not name.isidentifier() or not sentence:
            text = f"--rm_sentences {entry!r}: write NAME=SENTENCE, e.g. 'grasped=The gripper holds the cube.'"
            problems.append(Problem("rm_sentences", "out_of_range", text))
        elif name in sentences:
            problems.append(Problem("rm_sentences", "duplicate", f"--rm_sentences: '{name}' is given twice"))
        sentences[name] = sentence
    if problems:
        raise ConfigError(problems)
    return sentences
