"""Positional arguments as values of a flag."""

from __future__ import annotations

import argparse


class _Positional(argparse.Action):
    """Positional arguments replace the values of the flag; they may stand before and behind other flags."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option_string: object = None):
        if isinstance(values, list) and values:
            earlier = f"_{self.dest}_so_far"
            arguments = [*getattr(namespace, earlier, []), *values]
            setattr(namespace, earlier, arguments)
            setattr(namespace, self.dest, arguments)


def add_positional(
    parser: argparse.ArgumentParser,
    flag: str,
    metavar: str,
    description: str,
    *,
    several: bool = True,
    usage: str = "[--flag VALUE ...]",
) -> None:
    """Accept positional arguments as values of `--flag`; to be called before that flag is added.

    Args:
        parser: the command line; the arguments are put at the beginning of its usage.
        flag: name of a flag.
        metavar: name of an argument in the usage.
        description: of the arguments, for the help.
        several: the flag takes several values.
        usage: the rest of the usage.
    """
    parser.usage = f"%(prog)s {metavar}{f' [{metavar} ...]' if several else ''} {usage}"
    parser.add_argument(
        flag,
        metavar=metavar,
        nargs="*" if several else "?",
        action=_Positional if several else "store",
        default=argparse.SUPPRESS,  # that of the flag applies
        help=f"{description}; the same as --{flag}",
    )
