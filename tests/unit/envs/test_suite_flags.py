"""Options of a suite as flags: in the help, on the way to the environment, in records; refused for other suites."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from cli import check_env, collect_demos, train_ppo_vla
from rlvla.commands import custom_modules
from rlvla.commands.custom_modules import parse_command_line
from rlvla.envs import registry
from rlvla.envs.base import TaskSpec
from rlvla.envs.config import INSTRUCTION_FLAGS, EnvConfig
from rlvla.envs.options import SuiteOptions
from rlvla.envs.registry import Suite, list_tasks, register_suite
from rlvla.envs.suite_flags import suite_flags
from rlvla.utils.cli.config_file import resolved_flags
from rlvla.utils.cli.flags import arg, from_namespace
from rlvla.utils.errors import ConfigError

SUITE = "test_kitchen"


@dataclass(frozen=True)
class KitchenOptions(SuiteOptions):
    known_cameras: ClassVar[tuple[str, ...]] = ("ceiling",)

    cameras: tuple[str, ...] = ("ceiling",)
    burners: int = arg(4, "burners of the stove", minimum=1)
    dishes: tuple[str, ...] = arg((), "names of the dishes (default: the checkpoint's, else none)")
    lit: bool = arg(False, "the light is on")
    stove: str = arg("gas", "kind of the stove", choices=("gas", "electric"))
    kitchen_root: str | None = arg(None, "folder of the kitchen (default: $KITCHEN)", recorded=False)
    hidden: int = 1


def kitchen_tasks(**kw) -> list[TaskSpec]:
    options = KitchenOptions(**kw)
    return [TaskSpec(SUITE, 0, "cook", f"light {options.burners} burners", 9, 10, 2, 0, float(options.burners))]


@pytest.fixture(autouse=True)
def kitchen(monkeypatch: pytest.MonkeyPatch) -> None:
    suite_flags()  # suites register when they are first imported: not into the copy that goes with the test
    monkeypatch.setattr(registry, "_SUITES", dict(registry._SUITES))
    monkeypatch.setattr(custom_modules, "_with_suites", {})
    register_suite(SUITE, Suite(kitchen_tasks, lambda task_id, **kw: None, ("ceiling",), options=KitchenOptions))


def env_of(*argv: str, command: object = collect_demos) -> EnvConfig:
    parsed = command.build_parser().parse_args(list(argv))
    return from_namespace(EnvConfig, parsed).with_suite_flags(parsed)


def test_flags_reach_the_suite_and_those_not_given_do_not() -> None:
    argv = ["--task_suite_name", SUITE, "--burners", "6", "--dishes", "pan", "pot", "--lit", "--stove", "electric"]
    env = env_of(*argv)
    assert env.options == {"burners": 6, "dishes": ("pan", "pot"), "lit": True, "stove": "electric"}
    assert env.tasks()[0].instruction == "light 6 burners"
    assert env_of("--task_suite_name", SUITE).options == {}


@pytest.mark.parametrize(("command", "first"), [(collect_demos, ""), (train_ppo_vla, "the checkpoint's, else ")])
def test_help_stands_under_the_name_with_defaults(
    command: object, first: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit):
        command.build_parser().parse_args(["--help"])
    group = capsys.readouterr().out.partition(f"\nsuite {SUITE}:\n")[2].partition("\n\n")[0]
    text = " ".join(group.split())
    assert text.startswith(f"--burners INT burners of the stove (default: {first}4)")
    assert f"--dishes [STR ...] names of the dishes (default: {first}none)" in text
    assert f"--lit, --no-lit the light is on (default: {first}off)" in text
    assert f"--stove {{gas,electric}} kind of the stove (default: {first}gas)" in text
    assert "--kitchen_root STR folder of the kitchen (default: $KITCHEN)" in text
    assert "hidden" not in group


def test_a_record_keeps_options_and_gives_them_back() -> None:
    env = EnvConfig(SUITE, options={"burners": 2, "dishes": ("pan",), "kitchen_root": "/here"})
    recorded = env.as_dict()
    assert {name: recorded[name] for name in ("burners", "dishes", "lit")} == {
        "burners": 2,
        "dishes": ("pan",),
        "lit": None,
    }
    assert "kitchen_root" not in recorded and "control_freq" not in recorded and "options" not in recorded
    read = {**recorded, "dishes": ["pan"], "learned_from": [], "control_freq": 5.0}  # as JSON gives it
    assert EnvConfig().completed(read).options == {"burners": 2, "dishes": ("pan",)}
    changed = EnvConfig(options={"burners": 3}).completed(read)
    assert changed.options == {"burners": 3, "dishes": ("pan",)}
    assert EnvConfig("toy_reach").completed(read).options == {}, "another suite has options of its own"


def test_a_record_of_an_unknown_suite_is_passed_on() -> None:
    """SFT needs no simulator, but must record the environment of the demonstrations for PPO."""
    recorded = EnvConfig(SUITE, options={"burners": 2}).as_dict()
    del registry._SUITES[SUITE]
    passed_on = EnvConfig().completed(recorded).as_dict()
    register_suite(SUITE, Suite(kitchen_tasks, lambda task_id, **kw: None, ("ceiling",), options=KitchenOptions))
    assert EnvConfig().completed(passed_on).options == {"burners": 2}


def test_the_saved_flags_repeat_the_run() -> None:
    env = env_of("--task_suite_name", SUITE, "--burners", "6", "--kitchen_root", "/here")
    flags = resolved_flags([env])
    assert flags == {"task_suite_name": SUITE, "burners": 6, "kitchen_root": "/here"}


def test_a_flag_of_another_suite_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        env_of("--task_suite_name", "toy_reach", "--burners", "6", "--max_steps", "5", "--task_ids", "7").tasks()
    first, second = error.value.problems
    assert (first.flag, first.reason) == ("burners", "no_effect")
    assert str(first) == f"--burners: toy_reach has no option burners, it belongs to {SUITE}; leave it out"
    assert "toy_reach has no task 7" in second
    with pytest.raises(ConfigError, match="--control_freq: .*it belongs to robosuite"):
        env_of("--task_suite_name", SUITE, "--control_freq", "6").tasks()


def test_all_wrong_values_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        list_tasks(SUITE, burners=0, stove="coal", cameras="door", max_steps=0)
    assert [(problem.flag, problem.reason) for problem in error.value.problems] == [
        ("cameras", "unknown_name"),
        ("max_steps", "out_of_range"),
        ("stove", "unknown_name"),
        ("burners", "out_of_range"),
    ]
    assert str(error.value).splitlines()[2] == "--stove coal: must be one of gas, electric"


def test_an_option_with_the_name_of_another_flag_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclass(frozen=True)
    class Taken(SuiteOptions):
        seed: int = arg(0, "a seed")

    register_suite(SUITE, replace(registry.get_suite(SUITE), options=Taken))
    with pytest.raises(ConfigError, match=f"suite {SUITE}: the option seed has the name of another flag"):
        parse_command_line(collect_demos.build_parser, ["--task_suite_name", SUITE])
    assert check_env.build_parser() is not None, "a command without that flag can be used"


def test_suites_may_share_a_flag_of_one_type_only() -> None:
    @dataclass(frozen=True)
    class Slow(SuiteOptions):
        control_freq: float = arg(5.0, "control steps per simulated second")

    @dataclass(frozen=True)
    class Worded(SuiteOptions):
        control_freq: str = arg("slow", "how fast")

    suite = registry.get_suite(SUITE)
    register_suite(SUITE, replace(suite, options=Slow))
    text = suite_flags()["control_freq"].help()
    assert text.endswith(f"(default: the checkpoint's, else 20 (robosuite), 5 ({SUITE}))")
    register_suite(SUITE, replace(suite, options=Worded))
    with pytest.raises(ConfigError, match=f"suite {SUITE} has an option control_freq with another type .* robosuite"):
        suite_flags()


def test_flags_of_a_custom_module_are_there_as_soon_as_it_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    module = tmp_path / "cellar.py"
    module.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from rlvla.envs.base import TaskSpec\n"
        "from rlvla.envs.options import SuiteOptions\n"
        "from rlvla.envs.registry import Suite, register_suite\n"
        "from rlvla.utils.cli.flags import arg\n\n"
        "@dataclass(frozen=True)\n"
        "class Options(SuiteOptions):\n"
        "    cameras: tuple[str, ...] = ()\n"
        "    bottles: int | None = arg(None, 'bottles on the shelf (default: all)', minimum=0)\n\n"
        "def tasks(**kw):\n"
        "    bottles = Options(**kw).bottles\n"
        "    return [TaskSpec('test_cellar', 0, 'fetch', f'{bottles} bottles', 9, 10, 2, 0, 5.0)]\n\n"
        "register_suite('test_cellar', Suite(tasks, lambda task_id, **kw: None, (), options=Options))\n"
    )
    with pytest.raises(SystemExit) as stop:
        parse_command_line(check_env.build_parser, ["--custom_module", str(module), "--help"])
    assert stop.value.code == 0 and "\nsuite test_cellar:\n  --bottles INT" in capsys.readouterr().out
    argv = ["test_cellar", "--custom_module", str(module), "--bottles", "7"]
    namespace = parse_command_line(check_env.build_parser, argv)
    env = from_namespace(EnvConfig, namespace, INSTRUCTION_FLAGS).with_suite_flags(namespace)
    assert env.tasks()[0].instruction == "7 bottles" and "bottles" in namespace.given
    namespace = parse_command_line(check_env.build_parser, [*argv, "--bottles", "none"])
    assert from_namespace(EnvConfig, namespace, INSTRUCTION_FLAGS).with_suite_flags(namespace).options == {}
