"""The settings of a recipe's run. Each field is a flag of `cli/run_recipe.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlvla.recipes.recipe import Recipe
from rlvla.utils.cli.flags import arg
from rlvla.utils.errors import ConfigError


@dataclass(frozen=True)
class RecipeConfig:
    """What is run, and where to."""

    recipe: str | None = arg(
        None, "YAML file with the stages and their flags; rlvla's are in recipes/ of its source", metavar="FILE"
    )
    output: str | None = arg(None, "folder of all stages (default: that of the recipe)", metavar="DIR", writes="folder")
    assignments: tuple[str, ...] = arg(
        (),
        "settings that take precedence over the recipe's, e.g. sft.max_epochs=5 rl.eps_clip_low_high=[0.2,0.3] "
        "all.seed=1; may be repeated",
        flag="set",
        action="extend",
        metavar="STAGE.FLAG=VALUE",
    )
    variant: tuple[str, ...] = arg((), "variants of the recipe to use, by their names in it", metavar="NAME")
    task_suite_name: str | None = arg(None, "the suite of all stages (default: the recipe's)", metavar="SUITE")
    demos: tuple[str, ...] = arg(
        (), "demonstrations to learn from, instead of recording some: files or folders", metavar="DIR_OR_FILE"
    )
    first: str | None = arg(
        None,
        "repeat this stage and all later ones (default: only what is not done runs); what they left is kept as "
        "superseded_NAME",
        flag="from",
        metavar="STAGE",
    )
    dry_run: bool = arg(False, "check the whole recipe, print the commands, and start nothing")

    @property
    def path(self) -> Path:
        """The recipe; ConfigError if none is given."""
        if self.recipe is None:
            raise ConfigError.of(
                "recipe", "needs_flag", "no recipe is given; name one, e.g. recipes/toy_reach.yaml of the source"
            )
        return Path(self.recipe)

    def folder(self, recipe: Recipe) -> Path:
        """The folder of all stages."""
        return Path(self.output or recipe.output or Path("runs") / recipe.path.stem)
