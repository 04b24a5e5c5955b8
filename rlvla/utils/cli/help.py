"""Text of `--help`: the essential flags, a group of flags or all, fitted to the width of the terminal."""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

from rlvla.utils.cli.programs import as_installed
from rlvla.utils.terminal import columns, fold_command, put, style

ALL = "all"
SHORT = 40  # flags; a command with fewer shows all of them at once
_COLUMN = 24  # where explanations begin
_SHORTEST_LINE, _LONGEST_LINE = 40, 120
_SUGGESTIONS = 4
_WHOLE_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


class GroupedParser(Protocol):
    """The attributes of `rlvla.utils.cli.flags.Parser` that the help shows."""

    description: str | None
    common: Any
    kinds: dict[str, tuple[str, Sequence[str]]]
    essential: set[str]
    aliases: set[str]
    _action_groups: list[Any]

    @property
    def flags(self) -> list[argparse.Action]: ...  # noqa: D102
    def format_usage(self) -> str: ...  # noqa: D102


class ShowHelp(argparse.Action):
    """`--help`, `--help all`, `--help GROUP`: prints and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any):
        super().__init__(option_strings, dest, nargs="*", metavar="GROUP", default=argparse.SUPPRESS)
        self.help = f"the essential flags; {ALL}: every flag; the name of a group or of a flag: only that"

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:  # noqa: D102
        topic = " ".join(values)
        text = overview(parser) if not topic else everything(parser) if topic == ALL else about(parser, topic)
        if text is None:
            return parser.error(_nothing_about(parser, topic))
        put(text.rstrip("\n"))
        parser.exit()


def overview(parser: GroupedParser) -> str:
    """The essential flags and the names of all groups; all flags of a command with few."""
    if len(parser.flags) <= SHORT:
        return everything(parser)
    shown = [action for action in parser.flags if action.dest in parser.essential]
    sections = [(title, [a for a in group if a in shown or not a.option_strings]) for title, group in _groups(parser)]
    rest = f"{len(parser.flags) - len(shown)} more flags: --help {ALL}, --help FLAG, or --help GROUP, one of:"
    indented = {"initial_indent": "  ", "subsequent_indent": "  ", **_WHOLE_WORDS}
    groups = textwrap.fill("; ".join(_group_names(parser)), _width(), **indented)
    rest = textwrap.fill(rest, _width(), **_WHOLE_WORDS)
    return "\n\n".join([_head(parser), *_sections(parser, sections, briefly=True), f"{rest}\n{groups}"]) + "\n"


def everything(parser: GroupedParser) -> str:
    """All flags, by group."""
    return "\n\n".join([_head(parser), *_sections(parser, _groups(parser))]) + "\n"


def about(parser: GroupedParser, topic: str) -> str | None:
    """The groups whose titles match the topic, else the flag of that name; None if there is neither."""
    groups, tokens = _groups(parser), _tokens(topic)
    matches = [group for group in groups if _tokens(group[0]) == tokens] or [
        group for group in groups if all(any(t.startswith(token) for t in _tokens(group[0])) for token in tokens)
    ]
    if not matches:
        option = f"--{topic.lstrip('-')}"
        matches = [(title, [a for a in actions if option in a.option_strings]) for title, actions in groups]
    return "\n\n".join(_sections(parser, matches)) + "\n" if any(actions for _, actions in matches) else None


def _nothing_about(parser: GroupedParser, topic: str) -> str:
    names = {token for title, _ in _groups(parser) for token in _tokens(title)} | {flag.dest for flag in parser.flags}
    near = difflib.get_close_matches(topic.lower(), sorted(names), n=_SUGGESTIONS)
    hint = f"; did you mean {' or '.join(near)}?" if near else f"; groups: {'; '.join(_group_names(parser))}"
    return f"--help {topic}: no group of flags and no flag has this name{hint}"


def _tokens(title: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", title.lower())


def _groups(parser: GroupedParser) -> list[tuple[str, list[argparse.Action]]]:
    """Titles and visible flags, in the order of the help: flags that all commands share come last."""
    ordered = [*(group for group in parser._action_groups if group is not parser.common), parser.common]
    shown = [[a for a in group._group_actions if a.help is not argparse.SUPPRESS] for group in ordered]
    return [(group.title or "", actions) for group, actions in zip(ordered, shown) if actions]


def _group_names(parser: GroupedParser) -> Iterator[str]:
    """The titles; groups of the same kind, such as policy losses, in parentheses after its name."""
    kinds = dict.fromkeys(parser.kinds.get(title, (title, ()))[0] for title, _ in _groups(parser))
    for kind in kinds:
        members = dict.fromkeys(name for other, names in parser.kinds.values() if other == kind for name in names)
        yield f"{kind} ({', '.join(members)})" if members else kind


def _width() -> int:
    return max(_SHORTEST_LINE, min(columns(), _LONGEST_LINE))


def _head(parser: GroupedParser) -> str:
    """Usage and description; indented lines are commands and are folded as such."""
    lines = [parser.format_usage().strip(), ""]
    for line in as_installed(parser.description or "").strip().split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        lines += fold_command(line, _width()) if indent else textwrap.wrap(line, _width(), **_WHOLE_WORDS) or [""]
    return "\n".join(lines)


def _sections(
    parser: GroupedParser, groups: Sequence[tuple[str, list[argparse.Action]]], *, briefly: bool = False
) -> Iterator[str]:
    for title, actions in groups:
        if actions:
            heading = "\n".join(textwrap.wrap(f"{title}:", _width(), subsequent_indent="  ", **_WHOLE_WORDS))
            lines = [style(heading, "bold")]
            for action in actions:
                lines += _entry(action, parser.aliases, briefly)
            yield "\n".join(lines)


def _entry(action: argparse.Action, aliases: Collection[str], briefly: bool) -> list[str]:
    """The lines of a flag with its explanation."""
    names = [option for option in action.option_strings if option not in aliases]
    synonyms = [option for option in action.option_strings if option in aliases and not option.startswith("--no-")]
    text = as_installed(explanation(action))
    text += f" (also {', '.join(synonyms)})" if synonyms and not briefly else ""
    lines = textwrap.wrap(text, _width() - _COLUMN, **_WHOLE_WORDS)
    name = _broken(_with_values(action, names), _width() - 2)
    first = f"  {style(name[0], 'cyan')}"
    if len(name) == 1 and len(name[0]) <= _COLUMN - 4 and lines:
        padding = " " * (_COLUMN - 2 - len(name[0]))
        return [f"{first}{padding}{lines[0]}", *(" " * _COLUMN + line for line in lines[1:])]
    return [first, *(f"      {style(part, 'cyan')}" for part in name[1:]), *(" " * _COLUMN + line for line in lines)]


def _with_values(action: argparse.Action, options: Sequence[str]) -> str:
    """A flag as typed: `--pair LOW HIGH`, `--names [NAME ...]`, `--quiet, --no-quiet`."""
    metavar: Any = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest)
    forms: dict[Any, str] = {
        None: metavar,
        "?": f"[{metavar}]",
        "*": f"[{metavar} ...]",
        "+": f"{metavar} [{metavar} ...]",
    }
    if not options:
        return str(forms.get(action.nargs if action.nargs != "?" else None, metavar))
    count = action.nargs
    values = " ".join([str(metavar)] * count) if isinstance(count, int) else forms.get(count, "")
    positive = [option for option in options if not option.startswith("--no-")]
    switches = [option for option in options if option.startswith("--no-")]
    return ", ".join([f"{', '.join(positive)} {values}".strip(), *switches])


def _broken(text: str, width: int) -> list[str]:
    """The text in lines that end with a comma, for long lists of choices."""
    lines = [""]
    for piece in re.split(r"(?<=,)", text):
        if lines[-1] and len(lines[-1]) + len(piece) > width - 6:
            lines.append("")
        lines[-1] += piece
    return lines if len(text) > width else [text]


def explanation(action: argparse.Action) -> str:
    """The help text, followed by the default as typed unless that is None or empty."""
    text, default = (action.help or "").replace("%%", "%"), action.default
    if default in (None, (), argparse.SUPPRESS):
        return text
    if isinstance(default, bool):
        default = "on" if default else "off"
    elif isinstance(default, tuple):
        default = " ".join(map(str, default))
    return f"{text} (default: {default})"
