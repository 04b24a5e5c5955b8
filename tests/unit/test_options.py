"""Options declared beside the code that reads them, and registries of code selected by name."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlvla.options import (
    Condition,
    Options,
    Registry,
    arg,
    equals,
    every,
    fill_selected,
    flag_values,
    from_values,
    given,
    keyword_arguments,
    options_of,
    selected,
    switched_on,
    unmet_condition,
)
from rlvla.utils.cli.flags import Parser, add_arguments, from_namespace, no_effect_problems, unselected_options
from rlvla.utils.errors import ConfigError

CLIPPED = """
from dataclasses import dataclass
from rlvla.options import Options, arg

@dataclass(frozen=True)
class Clip(Options):
    width: float = arg(0.2, "clip width", argument="clip")

@dataclass(frozen=True)
class SoftClip(Clip):
    softness: float = arg(1.0, "softness of the clip")

from loss_package import LOSSES

@LOSSES.register("clipped", options=Clip, exact=True)
def clipped(x, *, clip=0.2): ...

@LOSSES.register("soft", options=SoftClip)
def soft(x, *, clip=0.2, softness=1.0): ...
"""
PLAIN = "from loss_package import LOSSES\n\n@LOSSES.register('plain')\ndef plain(x): ...\n"


@pytest.fixture
def losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """A registry whose package has two modules."""
    package = tmp_path / "loss_package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from rlvla.options import Registry\n"
        "LOSSES = Registry('loss', flag='loss', package='loss_package', defaults={'exact': False})\n"
    )
    (package / "clipped.py").write_text(CLIPPED)
    (package / "plain.py").write_text(PLAIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    import loss_package  # type: ignore[import-not-found]

    yield loss_package.LOSSES
    for name in [name for name in sys.modules if name.partition(".")[0] == "loss_package"]:
        del sys.modules[name]


def test_conditions() -> None:
    flags = {"fast": True, "path": "", "mode": "slow", "steps": 0}
    assert switched_on("fast").holds(flags) and not switched_on("quiet").holds(flags)
    assert not given("path").holds(flags) and not given("steps").holds(flags) and given("mode").holds(flags)
    assert equals("mode", "fast", "slow").holds(flags) and not equals("mode", "fast").holds(flags)


def test_the_first_unmet_condition_is_the_reason() -> None:
    @dataclass(frozen=True)
    class Speed:
        free: int = arg(1, "no condition")
        rate: int = arg(1, "one condition", read_if=equals("mode", "fast"))
        gain: int = arg(1, "two conditions", read_if=(switched_on("fast"), Condition(lambda flags: False, "never")))

    free, rate, gain = dataclasses.fields(Speed)
    assert unmet_condition(free, {}) is None
    assert (
        unmet_condition(rate, {"mode": "slow"}) == "--mode is slow" and unmet_condition(rate, {"mode": "fast"}) is None
    )
    assert "--fast" in str(unmet_condition(gain, {"fast": False})) and unmet_condition(gain, {"fast": True}) == "never"


def test_modules_of_the_package_are_imported_when_names_are_listed(losses: Registry) -> None:
    assert "loss_package.plain" not in sys.modules
    assert losses.names() == ["clipped", "plain", "soft"] and "loss_package.plain" in sys.modules
    assert losses.get("soft").__name__ == "soft" and losses.parameters("soft") == {"clip", "softness"}
    assert losses.options("plain") is None


def test_attributes_default_to_those_of_the_registry(losses: Registry) -> None:
    assert losses.attribute("clipped", "exact") is True and losses.attribute("plain", "exact") is False
    with pytest.raises(ValueError, match="exactness"):
        losses.register("other", exactness=True)


def test_names_are_registered_once(losses: Registry) -> None:
    with pytest.raises(ValueError, match=r"'plain' already belongs to loss_package\.plain\.plain"):
        losses.register("plain")(lambda x: None)
    with pytest.raises(ValueError, match="non-empty"):
        losses.register("")
    with pytest.raises(ValueError, match=r"unknown loss 'plane'; known: clipped, plain, soft"):
        losses.get("plane")


def test_the_same_source_file_may_be_loaded_again(losses: Registry) -> None:
    again: dict[str, Any] = {"__name__": "loss_package.plain"}
    losses.names()
    exec(PLAIN, again)
    assert losses.get("plain") is again["plain"]


def test_modules_and_declared_options_are_imported_for_an_entry_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(frozen=True)
    class Declared:
        depth: int = arg(3, "depth")

    (tmp_path / "deep_module.py").write_text("from deep_registry import DEEP\nDEEP.register('deep')(print)\n")
    (tmp_path / "deep_registry.py").write_text(
        "from rlvla.options import Registry\nDEEP = Registry('learner', modules={'deep_module': ('deep',)})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import deep_registry  # type: ignore[import-not-found]

    deep = deep_registry.DEEP
    monkeypatch.setattr(deep, "_declared", {"deep": Declared})
    assert deep.names() == ["deep"] and deep.options("deep") is Declared and "deep_module" not in sys.modules
    assert deep.get("deep") is print and deep.options("deep") is Declared


def test_a_function_without_options_has_those_of_the_closest_built_in(losses: Registry) -> None:
    @dataclass(frozen=True)
    class Foreign:  # does not derive from Options
        clip: float = arg(0.1, "clip width")

    def mine(x: float, *, clip: float = 0.2, softness: float = 1.0) -> None: ...

    losses.register("foreign", options=Foreign)(lambda x, *, clip: None)
    losses.register("mine")(mine)
    losses.register("narrow")(lambda x, *, clip=0.2: None)
    losses.register("none")(lambda x: None)
    assert losses.options("mine") is losses.options("soft") and losses.options("narrow") is losses.options("clipped")
    assert losses.options("none") is None


def test_keyword_arguments_are_those_that_the_function_has(losses: Registry) -> None:
    soft = losses.options("soft")
    assert soft is not None
    assert keyword_arguments(soft(width=0.5), {"clip", "softness"}) == {"clip": 0.5, "softness": 1.0}
    assert keyword_arguments(soft(width=0.5), {"clip", "x"}) == {"clip": 0.5}
    assert keyword_arguments(None, {"clip"}) == {}


def config_of(losses: Registry) -> type:
    @dataclass(frozen=True)
    class Config:
        loss: str = arg("plain", "loss", choices=losses.names)
        options: Any = selected(losses)

        def __post_init__(self) -> None:
            fill_selected(self)

    return Config


def test_the_selected_options_follow_the_flag(losses: Registry) -> None:
    config, soft = config_of(losses), losses.options("soft")
    assert soft is not None
    assert config().options is None
    made = from_values(config, {"loss": "soft", "width": 0.3, "unknown": 1})
    assert made.options == soft(width=0.3, softness=1.0)
    assert {field.name: value for field, value in flag_values(made)} == {"loss": "soft", "width": 0.3, "softness": 1.0}
    assert dataclasses.replace(made, loss="soft").options == made.options
    assert dataclasses.replace(made, loss="clipped").options == losses.options("clipped")()  # type: ignore[misc]
    assert dataclasses.replace(made, loss="plain").options is None


def test_every_entry_has_options(losses: Registry) -> None:
    @dataclass(frozen=True)
    class Config:
        use: tuple[str, ...] = arg(("soft",), "losses")
        options: Any = every(losses)

        def __post_init__(self) -> None:
            fill_selected(self)

    clipped, soft = losses.options("clipped"), losses.options("soft")
    assert clipped is not None and soft is not None
    assert Config().options == (clipped(), soft())
    assert Config(options=(soft(softness=2.0),)).options == (clipped(), soft(softness=2.0))
    made = from_values(Config, {"use": ("clipped",), "softness": 3.0, "width": 0.4})
    assert made.use == ("clipped",) and made.options == (clipped(width=0.4), soft(width=0.4, softness=3.0))
    assert options_of(made, losses, "soft") is made.options[1] and options_of(made, losses, "plain") is None
    assert [field.name for field, _ in flag_values(made)] == ["use", "width", "width", "softness"]


def parsed(config: type, *argv: str) -> tuple[Any, Any]:
    parser = Parser("a command")
    add_arguments(parser, config, "settings")
    namespace = parser.parse_args(argv)
    return from_namespace(config, namespace), namespace


def test_options_are_flags_and_unused_ones_are_reported(losses: Registry) -> None:
    config = config_of(losses)
    made, namespace = parsed(config, "--loss", "soft", "--softness", "2", "--width", "0.3")
    assert made == from_values(config, {"loss": "soft", "softness": 2.0, "width": 0.3})
    assert no_effect_problems([made], unselected_options(made, namespace), ()) == []
    made, namespace = parsed(config, "--loss", "clipped", "--softness", "2", "--width", "0.3")
    unselected = unselected_options(made, namespace)
    assert unselected == {"softness": 2.0}
    (problem,) = no_effect_problems([made], unselected, ())
    assert (problem.flag, problem.reason) == ("softness", "no_effect") and "--loss clipped" in problem
    made, namespace = parsed(config, "--softness", "1.0")
    assert no_effect_problems([made], unselected_options(made, namespace), ()) == []
    (problem,) = no_effect_problems([made], unselected_options(made, namespace), {"softness"})
    assert problem.flag == "softness", "given at its default value"


@pytest.mark.parametrize("plug_in_first", [True, False])
def test_an_option_with_the_name_of_another_flag(losses: Registry, plug_in_first: bool) -> None:
    @dataclass(frozen=True)
    class Taken(Options):
        gamma: float = arg(1.0, "an option of a plug-in")

    @dataclass(frozen=True)
    class Discount:
        gamma: float = arg(0.9, "discount")

    losses.register("mine", options=Taken)(lambda x, *, gamma: None)
    parser = Parser("a command")
    first, second = (config_of(losses), Discount) if plug_in_first else (Discount, config_of(losses))
    add_arguments(parser, first, "settings")
    with pytest.raises(ConfigError, match="loss mine: the option gamma has the name of another flag"):
        add_arguments(parser, second, "settings")


@pytest.mark.parametrize("plug_in_first", [True, False])
def test_an_option_takes_the_name_of_an_alias(losses: Registry, plug_in_first: bool) -> None:
    @dataclass(frozen=True)
    class Short(Options):
        lam: float = arg(1.0, "an option of a plug-in")

    @dataclass(frozen=True)
    class Discount:
        gae_lambda: float = arg(0.9, "discount", aliases=("lam", "lambd"))

    losses.register("mine", options=Short)(lambda x, *, lam: None)
    parser = Parser("a command")
    for config in (config_of(losses), Discount) if plug_in_first else (Discount, config_of(losses)):
        add_arguments(parser, config, "settings")
    namespace = parser.parse_args(["--loss", "mine", "--lam", "0.5", "--lambd", "0.7"])
    assert namespace.lam == 0.5 and namespace.gae_lambda == 0.7


def test_entries_that_share_an_option_have_the_same_default(losses: Registry) -> None:
    @dataclass(frozen=True)
    class Other(Options):
        width: float = arg(0.3, "clip width", argument="clip")

    losses.register("mine", options=Other)(lambda x, *, clip: None)
    with pytest.raises(ConfigError, match="loss mine: the option width has another type or default than .* clipped"):
        add_arguments(Parser("a command"), config_of(losses), "settings")
