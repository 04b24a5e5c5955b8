"""Words of a command line without a flag."""

from __future__ import annotations

import argparse

from rlvla.utils.cli.flags import Parser


class _Words(argparse.Action):
    """Words without a flag replace the values of the flag; they may stand before and behind other flags."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option_string: object = None):
        if isinstance(values, list) and values:
            before = f"_{self.dest}_so_far"
            words = [*getattr(namespace, before, []), *values]
            setattr(namespace, before, words)
            setattr(namespace, self.dest, words)


def add_words(parser: Parser, flag: str, metavar: str, what: str) -> None:
    """Let words without a flag be values of `--flag`; to be called before that flag is added.

    Args:
        parser: the command line; its usage begins with the words.
        flag: name of a flag that takes several values.
        metavar: what a word is called in the usage.
        what: what the words are, for the help.
    """
    parser.usage = f"%(prog)s {metavar} [{metavar} ...] [--flag VALUE ...]"
    parser.add_argument(
        flag,
        metavar=metavar,
        nargs="*",
        action=_Words,
        default=argparse.SUPPRESS,  # that of the flag applies
        help=f"{what}; the same as --{flag}",
    )
