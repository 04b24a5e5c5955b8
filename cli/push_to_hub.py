"""Upload a policy to the Hugging Face Hub with a model card of its training and evaluation.

Example:
  python cli/push_to_hub.py runs/ppo/policy --repo_id you/lift --dry_run
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a file, not as part of the installed package
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.utils.signals import begin

begin(__name__)

from rlvla.commands.custom_modules import CustomConfig, parse_command_line
from rlvla.utils.cli.command import command, heavy_imports
from rlvla.utils.cli.flags import Parser, add_arguments, arg, from_namespace, range_problems
from rlvla.utils.cli.positional import add_positional
from rlvla.utils.errors import ConfigError
from rlvla.utils.terminal import show


@dataclass(frozen=True)
class PushConfig:
    """Policy, repository and its visibility."""

    folder: str = arg("runs/ppo/policy", "folder of the policy, or of a run, whose newest policy it is", metavar="DIR")
    repo_id: str | None = arg(None, "repository, made if it does not exist", metavar="OWNER/NAME")
    public: bool = arg(False, "everybody may see the repository")
    license: str | None = arg(
        None, "identifier of the policy's license, such as apache-2.0 (default: a placeholder)", metavar="ID"
    )
    card: str | None = arg(
        None, "model card of your own (default: written from what training and evaluation recorded)", metavar="FILE"
    )
    dry_run: bool = arg(False, "print the model card and the files that would be uploaded; nothing leaves the machine")


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(__doc__ or "")
    add_positional(
        parser,
        "folder",
        "FOLDER",
        "the folder of the policy",
        several=False,
        usage="--repo_id OWNER/NAME [--flag VALUE ...]",
    )
    add_arguments(parser, PushConfig, "push")
    add_arguments(parser, CustomConfig, "own code")
    return parser


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    config = from_namespace(PushConfig, parse_command_line(build_parser, argv))
    with heavy_imports():
        from rlvla.commands.push_to_hub import prepare, push, push_problems, replaced_folders
        from rlvla.commands.run_policies import policy_folder
    problems = [*range_problems(config), *push_problems(config.repo_id, uploads=not config.dry_run)]
    repo_id = config.repo_id or "OWNER/NAME"
    try:
        chosen = prepare(Path(policy_folder(config.folder, "folder")), repo_id, config.license, config.card)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    if config.dry_run:
        print(f"{chosen.card}\n{chosen}")
        folders = ", ".join(replaced_folders(chosen.uploads))
        show(f"weights that are in these folders of the repository already would be removed: {folders}")
        show(f"a {'public' if config.public else 'private'} repository: {repo_id}; nothing was uploaded")
        return
    print(chosen, flush=True)
    show(f"uploaded: {push(repo_id, chosen.uploads, public=config.public)}")


if __name__ == "__main__":
    main()
