"""Files of tensors are read without running what they name."""

from __future__ import annotations

import enum
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from rlvla.experience import Sample
from rlvla.utils.deepspeed.engine import classes_of_deepspeed
from rlvla.utils.torch_files import RefusedFileError, read_torch_file, refusal, restricted_loading
from tests.support.malice import payloads

FORMS = sorted(payloads(Path("/")))


@pytest.mark.parametrize("form", FORMS)
def test_nothing_in_a_file_is_run_and_the_file_is_named(tmp_path: Path, form: str) -> None:
    """With the largest list of classes that any reader allows."""
    mark, file = tmp_path / "mark", tmp_path / "weights.pt"
    payloads(mark)[form](file)
    with pytest.raises(RefusedFileError) as refused:
        read_torch_file(file, classes=[Sample, *classes_of_deepspeed()])
    (problem,) = refused.value.problems
    assert problem.reason == "invalid_file" and str(file) in problem and "\n" not in problem.text
    assert "weights_only" not in problem, "torch's advice is to read it nevertheless"
    assert refusal(file) is not None
    assert not mark.exists()


def test_the_payloads_would_create_the_file(tmp_path: Path) -> None:
    """Otherwise the test above shows nothing."""
    for form in ("os.system", "eval", "the old format", "beside tensors", "in a sample", "a zipped pickle 2"):
        mark = tmp_path / form
        payloads(mark := tmp_path / form.replace(" ", "_"))[form](tmp_path / "weights.pt")
        torch.load(tmp_path / "weights.pt", weights_only=False)
        assert mark.exists(), form


def test_what_checkpoints_hold_is_read(tmp_path: Path) -> None:
    rng = random.Random(3)
    content = {
        "python": rng.getstate(),
        "numpy": np.random.RandomState(3).get_state(),
        "arrays": [np.arange(3.0), np.zeros((0, 2), np.uint8), np.array([True]), np.float32(0.5), np.int64(2**40)],
        "tensors": (torch.arange(3), torch.ones(2, dtype=torch.bfloat16), torch.nn.Parameter(torch.zeros(1))),
        "plain": {1: None, "a": (1.5, True, b"bytes", 2**70, -(2**40)), "events": [frozenset({"near"}), {"x"}]},
    }
    torch.save(content, tmp_path / "state.pt")
    read = read_torch_file(tmp_path / "state.pt")
    assert read["python"] == content["python"] and read["plain"] == content["plain"]
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(read["arrays"], content["arrays"]))
    assert all(torch.equal(a, b) for a, b in zip(read["tensors"], content["tensors"]))
    assert np.array_equal(read["numpy"][1], content["numpy"][1])


@pytest.mark.parametrize("array", [np.array([{}], dtype=object), np.zeros(1, dtype=[("x", "i4")]), np.array(["text"])])
def test_arrays_of_anything_but_numbers_are_refused(tmp_path: Path, array: np.ndarray) -> None:
    torch.save(array, tmp_path / "array.pt")
    with pytest.raises(RefusedFileError, match="not one of numbers"):
        read_torch_file(tmp_path / "array.pt")


class OfAUser:
    """Stands for a class of a custom module."""


class Attribute:
    """Pickled as `getattr(owner, name)`, like members of enumerations by Python 3.11 before 3.11.4."""

    def __init__(self, owner: object, name: str):
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple:
        return getattr, (self.owner, self.name)


def test_of_attributes_only_members_of_listed_enumerations_are_read(tmp_path: Path) -> None:
    path, classes = tmp_path / "file.pt", classes_of_deepspeed()
    stage = next(kind for kind in classes if issubclass(kind, enum.Enum))
    torch.save({"stage": Attribute(stage, next(iter(stage.__members__)))}, path)
    assert read_torch_file(path, classes=classes)["stage"] is next(iter(stage))
    for owner, name in ((stage, "__init__"), (stage, "mro"), (np.dtype, "names"), (dict, "get")):
        torch.save({"stage": Attribute(owner, name)}, path)
        with pytest.raises(RefusedFileError):
            read_torch_file(path, classes=classes)


def test_classes_of_a_custom_module_are_read_once_it_adds_them(tmp_path: Path) -> None:
    torch.save(OfAUser(), tmp_path / "state.pt")
    with pytest.raises(RefusedFileError, match="OfAUser"):
        read_torch_file(tmp_path / "state.pt")
    with torch.serialization.safe_globals([OfAUser]):
        assert isinstance(read_torch_file(tmp_path / "state.pt"), OfAUser)
        assert OfAUser in torch.serialization.get_safe_globals(), "what was added before stays"


def test_the_restriction_covers_other_libraries_and_ends_with_the_block(tmp_path: Path) -> None:
    torch.save(OfAUser(), tmp_path / "state.pt")
    with restricted_loading(), restricted_loading([OfAUser]):
        torch.load(tmp_path / "state.pt", weights_only=False)
    with restricted_loading():
        with restricted_loading([OfAUser]):
            pass
        with pytest.raises(Exception, match="OfAUser"):
            torch.load(tmp_path / "state.pt", weights_only=False)
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    assert isinstance(torch.load(tmp_path / "state.pt", weights_only=False), OfAUser)


def test_a_file_that_is_not_there_is_no_refused_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_torch_file(tmp_path / "none.pt")
