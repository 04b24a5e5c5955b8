"""HDF5 files that do not fit together are refused, naming episode and array, before images are read."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from rlvla.data.demonstrations import STATISTICS_FILE
from rlvla.data.hdf5 import opened
from rlvla.data.image_storage import mapping_of
from rlvla.data.reading import read_demonstrations
from rlvla.data.validation import StoredArray, StoredEpisode, check_episodes
from rlvla.utils.errors import ConfigError
from tests.support.damaged_data import ENV, MAKERS, STEPS, Change, Originals, copied, problems

NAN = float("nan")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Originals:
    return Originals(tmp_path_factory.mktemp("originals"))


@pytest.mark.parametrize("kind", MAKERS)
def test_undamaged_data_is_read(kind: str, originals: Originals) -> None:
    demos = read_demonstrations(originals(kind))
    assert len(demos.actions) == len(demos.images) == (2 if kind in ("pictures", "libero") else 3)


def put(name: str, change: Callable[[np.ndarray], Any], demo: str = "demo_1") -> Change:
    """Replace an array by `change` of it."""

    def apply(file: h5py.File) -> None:
        group = file[f"data/{demo}"]
        values = change(group[name][()])
        del group[name]
        group[name] = values

    return apply


def drop(name: str, demo: str = "demo_1") -> Change:
    def apply(file: h5py.File) -> None:
        del file[f"data/{demo}/{name}"]

    return apply


def note(name: str, value: Any, demo: str = "demo_1") -> Change:
    """Set an attribute of an episode; None removes it."""

    def apply(file: h5py.File) -> None:
        attributes = file[f"data/{demo}"].attrs
        if value is None:
            del attributes[name]
        else:
            attributes[name] = value

    return apply


def env(**entries: Any) -> Change:
    return lambda file: file["data"].attrs.__setitem__("env_args", json.dumps(ENV | entries))


def bad(value: float) -> Callable[[np.ndarray], np.ndarray]:
    """Put `value` into the third row."""

    def change(values: np.ndarray) -> np.ndarray:
        values = values.astype(np.float64)
        values[2] = value
        return values

    return change


def grey(images: np.ndarray) -> np.ndarray:
    return images[..., 0]


def emptied(file: h5py.File) -> None:
    for name in list(file["data"]):
        del file["data"][name]
    file.pop("mask", None)


def mask(content: object) -> Change:
    def change(file: h5py.File) -> None:
        del file["mask"]
        file["mask/train"] = content

    return change


LEFT = "obs/left_image"
# The message must contain these strings: the episode and the array, or the place in the file.
HDF5: dict[str, tuple[str, Change, tuple[str, ...]]] = {
    "fewer pictures than actions": ("demos", put(LEFT, lambda v: v[:-2]), ("demo_1", LEFT)),
    "more pictures than actions": ("demos", put(LEFT, lambda v: np.concatenate([v, v])), ("demo_1", LEFT)),
    "float pictures": ("demos", put(LEFT, lambda v: v / 255), ("demo_1", LEFT, "uint8")),
    "wide integers as pictures": ("demos", put(LEFT, lambda v: v.astype(np.uint16)), ("demo_1", LEFT)),
    "grey pictures": ("demos", put(LEFT, grey), ("demo_1", LEFT)),
    "pictures of one channel": ("demos", put(LEFT, lambda v: v[..., :1]), ("demo_1", LEFT)),
    "pictures of four channels": ("demos", put(LEFT, lambda v: v[..., [0, 1, 2, 0]]), ("demo_1", LEFT)),
    "channels first": ("demos", put(LEFT, lambda v: v.transpose(0, 3, 1, 2)), ("demo_1", LEFT)),
    "wide pictures": ("demos", put(LEFT, lambda v: v[:, :8]), ("demo_1", LEFT)),
    "smaller pictures in an episode": ("demos", put(LEFT, lambda v: v[:, :8, :8]), ("demo_1", LEFT)),
    "pictures of another size than recorded": ("demos", env(image_size=32), ("demo_0", LEFT, "32")),
    "no pictures": ("demos", put(LEFT, lambda v: v[:0]), ("demo_1", LEFT)),
    "pictures of a camera missing": ("demos", drop(LEFT), ("demo_1", LEFT)),
    "pictures linked to nowhere": (
        "demos",
        lambda f: (drop(LEFT)(f), f["data/demo_1"].__setitem__(LEFT, h5py.SoftLink("/nowhere"))),
        ("demo_1", LEFT),
    ),
    "pictures in a file that is not there": (
        "demos",
        lambda f: (drop(LEFT)(f), f["data/demo_1"].__setitem__(LEFT, h5py.ExternalLink("no.hdf5", "/x"))),
        ("demo_1", LEFT),
    ),
    "NaN in actions": ("demos", put("actions", bad(NAN)), ("demo_1", "actions", "row 2")),
    "infinity in actions": ("demos", put("actions", bad(-np.inf)), ("demo_1", "actions", "row 2")),
    "actions beyond float32": ("demos", put("actions", bad(1e300)), ("demo_1", "actions", "row 2")),
    "NaN in proprio": ("demos", put("obs/proprio", bad(NAN)), ("demo_1", "obs/proprio", "row 2")),
    "NaN in rewards": ("demos", put("rewards", bad(NAN)), ("demo_1", "rewards", "row 2")),
    "text actions": ("demos", put("actions", lambda v: v.astype("S8")), ("demo_1", "actions", "text")),
    "boolean actions": ("demos", put("actions", lambda v: v > 0), ("demo_1", "actions", "bool")),
    "complex actions": ("demos", put("actions", lambda v: v * 1j), ("demo_1", "actions", "complex")),
    "actions without dimensions": ("demos", put("actions", lambda v: v[:, 0]), ("demo_1", "actions")),
    "actions in chunks": ("demos", put("actions", lambda v: v[:, None]), ("demo_1", "actions")),
    "a single number as actions": ("demos", put("actions", lambda v: 1.0), ("demo_1", "actions")),
    "actions of another width": ("demos", put("actions", lambda v: v[:, :3]), ("demo_1", "actions", "demo_0")),
    "actions of no width": ("demos", put("actions", lambda v: v[:, :0]), ("demo_1", "actions")),
    "an episode of no steps": ("demos", put("actions", lambda v: v[:0]), ("demo_1", "actions")),
    "an empty dataset": ("demos", put("actions", lambda v: h5py.Empty("f4")), ("demo_1", "actions")),
    "no actions": ("demos", drop("actions"), ("demo_1", "actions")),
    "a group as actions": (
        "demos",
        lambda f: (drop("actions")(f), f["data/demo_1"].create_group("actions")),
        ("demo_1", "actions"),
    ),
    "proprio in some episodes": ("demos", drop("obs/proprio"), ("demo_1", "obs/proprio", "demo_0")),
    "proprio missing in the first": ("demos", drop("obs/proprio", "demo_0"), ("demo_0", "obs/proprio", "demo_1")),
    "too few rows of proprio": ("demos", put("obs/proprio", lambda v: v[1:]), ("demo_1", "obs/proprio")),
    "proprio of another width": ("demos", put("obs/proprio", lambda v: v[:, :2]), ("demo_1", "obs/proprio")),
    "proprio as text": ("demos", put("obs/proprio", lambda v: v.astype("S8")), ("demo_1", "obs/proprio", "text")),
    "too few rewards": ("demos", put("rewards", lambda v: v[1:]), ("demo_1", "rewards")),
    "rewards in some episodes": ("demos", drop("rewards"), ("demo_1", "rewards")),
    "rewards missing in the first": ("demos", drop("rewards", "demo_0"), ("demo_0", "rewards")),
    "rewards of two dimensions": ("demos", put("rewards", lambda v: v[:, None]), ("demo_1", "rewards")),
    "no instruction": ("demos", note("instruction", None), ("demo_1", "instruction")),
    "a blank instruction": ("demos", note("instruction", "  "), ("demo_1", "instruction")),
    "a number as instruction": ("demos", note("instruction", 7), ("demo_1", "instruction")),
    "an instruction of two lines": ("demos", note("instruction", "do\nthis"), ("demo_1", "instruction")),
    "an instruction in another encoding": ("demos", note("instruction", np.bytes_(b"\xff")), ("demo_1", "instruction")),
    "several instructions": ("demos", note("instruction", ["a", "b"]), ("demo_1", "instruction")),
    "success in words": ("demos", note("success", "False"), ("demo_1", "success")),
    "success of 0.5": ("demos", note("success", 0.5), ("demo_1", "success")),
    "no success": ("demos", note("success", None), ("demo_1", "success")),
    "a task in words": ("demos", note("task_id", "lift"), ("demo_1", "task_id")),
    "a negative task": ("demos", note("task_id", -3), ("demo_1", "task_id")),
    "no initial state": ("demos", note("init_state_id", None), ("demo_1", "init_state_id")),
    "a seed in words": ("demos", note("seed", "lucky"), ("demo_1", "seed")),
    "a seed in some episodes": ("demos", note("seed", None), ("demo_1", "seed")),
    "another number of steps recorded": ("demos", note("num_samples", STEPS + 1), ("demo_1", "actions")),
    "a number of steps in words": ("demos", note("num_samples", "many"), ("demo_1", "num_samples")),
    "an episode without a number": ("demos", lambda f: f["data"].move("demo_1", "demo_x"), ("demo_x",)),
    "an episode with two numbers": ("demos", lambda f: f["data"].move("demo_1", "demo_1_2"), ("demo_1_2",)),
    "another group beside them": ("demos", lambda f: f["data"].create_group("notes"), ("notes",)),
    "a number used twice": ("demos", lambda f: f.copy("data/demo_1", "data/demo_01"), ("demo_01", "demo_1")),
    "an array as episode": ("demos", lambda f: f["data"].create_dataset("demo_9", data=[1]), ("demo_9",)),
    "an episode linked to nowhere": (
        "demos",
        lambda f: f["data"].__setitem__("demo_9", h5py.SoftLink("/nowhere")),
        ("demo_9",),
    ),
    "no episodes": ("demos", emptied, ("no episode",)),
    "no data": ("demos", lambda f: f.move("data", "date"), ("'data'",)),
    "a filter that points nowhere": ("demos", mask(np.array(["demo_1", "demo_77"], "S")), ("mask/train", "demo_77")),
    "a filter with a repetition": ("demos", mask(np.array(["demo_1", "demo_1"], "S")), ("mask/train",)),
    "a filter of numbers": ("demos", mask([1, 2]), ("mask/train",)),
    "no environment": ("demos", lambda f: f["data"].attrs.__delitem__("env_args"), ("env_args",)),
    "an environment that is not JSON": ("demos", lambda f: f["data"].attrs.update(env_args="{"), ("env_args",)),
    "an environment that is a list": ("demos", lambda f: f["data"].attrs.update(env_args="[]"), ("env_args",)),
    "no cameras": ("demos", env(cameras=[]), ("cameras",)),
    "cameras in one word": ("demos", env(cameras="left"), ("cameras",)),
    "numbered cameras": ("demos", env(cameras=[1, 2]), ("camera",)),
    "a camera with a slash": ("demos", env(cameras=["left", "../right"]), ("../right",)),
    "a camera with a line break": ("demos", env(cameras=["left", "a\nb"]), ("camera",)),
    "a camera twice": ("demos", env(cameras=["left", "left"]), ("left",)),
    "an unknown camera": ("demos", env(cameras=["left", "top"]), ("demo_0", "obs/top_image")),
    "no suite": ("demos", env(task_suite_name=None), ("task_suite_name",)),
    "a frequency in words": ("demos", lambda f: f["data"].attrs.update(control_freq="fast"), ("control_freq",)),
    "a frequency of NaN": ("demos", lambda f: f["data"].attrs.update(control_freq=NAN), ("control_freq",)),
    "a frequency of zero": ("demos", lambda f: f["data"].attrs.update(control_freq=0.0), ("control_freq",)),
    "decisions in some episodes": ("rollouts", drop("decision_steps"), ("demo_1", "decision_steps", "demo_0")),
    "decisions out of order": ("rollouts", put("decision_steps", lambda v: v[::-1]), ("demo_1", "decision_steps")),
    "a decision twice": ("rollouts", put("decision_steps", lambda v: v * 0), ("demo_1", "decision_steps")),
    "decisions behind the end": ("rollouts", put("decision_steps", lambda v: v * 2), ("demo_1", "decision_steps")),
    "no decision at the start": ("rollouts", put("decision_steps", lambda v: v + 1), ("demo_1", "decision_steps")),
    "fractional decisions": ("rollouts", put("decision_steps", lambda v: v / 2), ("demo_1", "decision_steps")),
    "more decisions than pictures": (
        "rollouts",
        put("decision_steps", lambda v: np.array([0, 1, 2])),
        ("demo_1", LEFT, "obs/proprio"),
    ),
    "a last picture in some episodes": (
        "rollouts",
        drop("rollout/last_obs/left_image"),
        ("demo_1", "rollout/last_obs/left_image"),
    ),
    "a last picture of another size": (
        "rollouts",
        put("rollout/last_obs/left_image", lambda v: v[:8]),
        ("demo_1", "rollout/last_obs/left_image"),
    ),
    "NaN in the last proprio": (
        "rollouts",
        put("rollout/last_obs/proprio", bad(NAN)),
        ("demo_1", "rollout/last_obs/proprio"),
    ),
    "LIBERO: fewer pictures": ("libero", put("obs/agentview_rgb", lambda v: v[1:]), ("demo_1", "obs/agentview_rgb")),
    "LIBERO: float pictures": ("libero", put("obs/agentview_rgb", lambda v: v / 255), ("demo_1", "obs/agentview_rgb")),
    "LIBERO: grey pictures": ("libero", put("obs/agentview_rgb", grey), ("demo_1", "obs/agentview_rgb")),
    "LIBERO: other sizes": (
        "libero",
        put("obs/agentview_rgb", lambda v: v[:, :8, :8]),
        ("obs/agentview_rgb", "demo_0"),
    ),
    "LIBERO: NaN in actions": ("libero", put("actions", bad(NAN)), ("demo_1", "actions", "row 2")),
    "LIBERO: NaN in proprio": ("libero", put("obs/ee_pos", bad(NAN)), ("demo_1", "obs/ee_pos", "row 2")),
    "LIBERO: infinity in states": ("libero", put("states", bad(np.inf)), ("demo_1", "states", "row 2")),
    "LIBERO: text actions": ("libero", put("actions", lambda v: v.astype("S8")), ("demo_1", "actions", "text")),
    "LIBERO: actions of another robot": ("libero", put("actions", lambda v: v[:, :6]), ("demo_1", "actions", "7")),
    "LIBERO: no steps": ("libero", put("actions", lambda v: v[:0]), ("demo_1", "actions")),
    "LIBERO: no gripper": ("libero", drop("obs/gripper_states"), ("demo_1", "obs/gripper_states")),
    "LIBERO: a gripper of one finger": (
        "libero",
        put("obs/gripper_states", lambda v: v[:, :1]),
        ("demo_1", "obs/gripper_states"),
    ),
    "LIBERO: joints of fewer rows": (
        "libero",
        put("obs/joint_states", lambda v: v[1:]),
        ("demo_1", "obs/joint_states"),
    ),
    "LIBERO: another number of steps recorded": ("libero", note("num_samples", 99), ("demo_1", "actions")),
    "LIBERO: an episode without a number": ("libero", lambda f: f["data"].move("demo_1", "demo_x"), ("demo_x",)),
    "LIBERO: no episodes": ("libero", emptied, ("no episode",)),
    "LIBERO: no data": ("libero", lambda f: f.move("data", "date"), ("'data'",)),
}


@pytest.mark.parametrize("name", HDF5)
def test_damaged_hdf5_is_refused(name: str, originals: Originals, tmp_path: Path) -> None:
    kind, change, expected = HDF5[name]
    path = copied(originals(kind), tmp_path)
    file = next(path.glob("*.hdf5")) if path.is_dir() else path
    with h5py.File(file, "r+") as opened:
        change(opened)
    text = problems(path)
    assert all(word in text for word in expected), text


STATISTICS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "NaN": (lambda entry: entry["action"]["q01"].__setitem__(1, NAN), ("toy", "action.q01", "dimension 1")),
    "infinity": (lambda entry: entry["proprio"]["max"].__setitem__(0, np.inf), ("toy", "proprio.max", "dimension 0")),
    "words": (lambda entry: entry["action"].update(mean="none"), ("toy", "action.mean")),
    "another robot": (lambda entry: entry["action"].update(q99=[1.0] * 7), ("toy", "action.q99", "7")),
    "another mask": (lambda entry: entry["action"].update(mask=[True]), ("toy", "action.mask")),
    "no actions": (lambda entry: entry.pop("action"), ("toy", "action")),
    "no proprio": (lambda entry: entry.pop("proprio"), ("toy", "proprio")),
    "no ranges": (lambda entry: [entry["action"].pop(k) for k in ("q01", "max")], ("toy", "action")),
    "a reversed range": (lambda entry: entry["action"]["q01"].__setitem__(0, 9.0), ("toy", "action.q01")),
    "true for a number": (lambda entry: entry["action"]["q01"].__setitem__(0, True), ("toy", "action.q01")),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_damaged_statistics_are_refused(name: str, originals: Originals, tmp_path: Path) -> None:
    change, expected = STATISTICS[name]
    path = copied(originals("demos"), tmp_path)
    content = json.loads((path.parent / STATISTICS_FILE).read_text())
    change(content["toy"])
    (path.parent / STATISTICS_FILE).write_text(json.dumps(content))
    text = problems(path)
    assert STATISTICS_FILE in text and all(word in text for word in expected), text


@pytest.mark.parametrize("cameras", [["left", "left"], ["left", "a/b"], ["left", ""], ["a\nb"]])
def test_damaged_camera_flags_are_refused(cameras: list[str], originals: Originals) -> None:
    with pytest.raises(ConfigError, match="cameras"):
        read_demonstrations(originals("demos"), cameras)


def test_ten_problems_are_listed_and_the_others_counted(originals: Originals, tmp_path: Path) -> None:
    path = copied(originals("demos"), tmp_path)
    with h5py.File(path, "r+") as file:
        for index in range(3, 20):
            file.copy("data/demo_1", f"data/demo_{index}")
            put("actions", bad(NAN), f"demo_{index}")(file)
    with pytest.raises(ConfigError) as refused:
        read_demonstrations(path)
    assert len(refused.value.problems) == 11 and "demo_3:" in refused.value.problems[0].text
    assert "7 more" in refused.value.problems[-1].text


def test_each_object_is_visited_once_however_many_links_lead_to_it(tmp_path: Path) -> None:
    path = tmp_path / "demos.hdf5"
    with h5py.File(path, "w") as file:
        inner: Any = file
        for _ in range(64):
            inner, outer = inner.create_group("a"), inner
            outer["b"] = inner
        inner["round"] = file["/"]
    with opened(path) as file:
        assert set(file) == {"a", "b"}


@pytest.mark.parametrize("name", ["data/demo_1/actions", "mask/train"])
def test_declared_arrays_beyond_the_memory_are_not_read(name: str, originals: Originals, tmp_path: Path) -> None:
    path = copied(originals("demos"), tmp_path)
    with h5py.File(path, "a") as file:
        text = name.startswith("mask")
        if text:
            del file["mask"]
        else:
            del file[name], file["data/demo_1"].attrs["num_samples"]
        shape, dtype = ((10**10,), "S7") if text else ((10**9, 4), "f4")
        file.create_dataset(name, shape, dtype, chunks=(1024, *shape[1:]))
    text = problems(path)
    assert name.split("/", 1)[0 if name.startswith("mask") else 1].split("/")[0] in text and "GiB" in text


@pytest.mark.parametrize(
    ("rows", "options"),
    [(2**26, {"chunks": (2**20, 4)}), (3, {"chunks": (2**24, 4), "maxshape": (None, 4)})],
    ids=["unallocated", "chunks"],
)
def test_arrays_far_larger_than_their_file_are_not_read(rows: int, options: dict, tmp_path: Path) -> None:
    """Each is below the limit of one array, and all together may be below the memory of the machine."""
    path = tmp_path / "demos.hdf5"
    with h5py.File(path, "w") as file:
        for index in range(20):
            file.create_dataset(f"data/demo_{index}/actions", (rows, 4), "f4", **options)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text = problems(path)
    assert "actions [" in text and "GiB of memory, more than 1,000 times the" in text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kilobytes"


def test_memory_that_runs_out_is_a_problem_of_the_array() -> None:
    class Array:
        shape, dtype = (2, 3), np.dtype(np.float32)

        def __getitem__(self, key: object) -> None:
            raise MemoryError("no room")

    episode = StoredEpisode("demo_0", {"actions": StoredArray("actions", Array(), ("steps", "action dimensions"))})
    with pytest.raises(ConfigError, match="demo_0: actions cannot be read"):
        check_episodes("file", [episode])


def declared_pictures(path: Path, side: int) -> None:
    """Replace the pictures of an episode by as many square ones that are declared and never written."""
    with h5py.File(path, "a") as file:
        group = file["data/demo_1"]
        for name in [name for name in group["obs"] if name.endswith("_image")]:
            shape = (len(group[f"obs/{name}"]), side, side, 3)
            del group[f"obs/{name}"]
            group.create_dataset(f"obs/{name}", shape, "u1", chunks=(1, 64, 64, 3))


def test_declared_pictures_beyond_the_memory_are_not_read(originals: Originals, tmp_path: Path) -> None:
    path = copied(originals("demos"), tmp_path)
    with h5py.File(path, "a") as file:
        for name in ("demo_0", "demo_2"):
            del file["data"][name]
        file["data"].attrs["env_args"] = json.dumps({k: v for k, v in ENV.items() if k != "image_size"})
    declared_pictures(path, 10**6)
    text = problems(path)
    assert "demo_1" in text and "_image" in text and "1000000" in text and "GiB of memory" in text


def test_numbers_and_one_array_of_pictures_need_memory(
    originals: Originals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copied(originals("demos"), tmp_path)
    with h5py.File(path) as file:
        pictures = [d for demo in file["data"].values() for n, d in demo["obs"].items() if n.endswith("_image")]
        numbers = [d for demo in file["data"].values() for d in (demo["actions"], demo["obs/proprio"])]
        numbers += [d for demo in file["data"].values() for n, d in demo.items() if n == "rewards"]
        needed = sum(d.nbytes for d in numbers) + max(d.nbytes for d in pictures)
    monkeypatch.setattr("rlvla.utils.budgets.memory_bytes", lambda: needed - 1)
    assert "numbers of all episodes" in problems(path)
    monkeypatch.setattr("rlvla.utils.budgets.memory_bytes", lambda: needed)
    images = read_demonstrations(path).images
    assert len(images) == 3 and mapping_of(images[0]) is not None, "the others stay on disk"
