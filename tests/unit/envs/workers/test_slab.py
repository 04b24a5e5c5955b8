import os

import numpy as np
import pytest

from rlvla.envs.workers.messages import StepChunk, dump_commands, load_commands, pack, unpack
from rlvla.envs.workers.slab import Slab, create_slab_file


@pytest.fixture
def sides():
    fd = create_slab_file()
    slabs = Slab(os.dup(fd)), Slab(fd)
    yield slabs
    for slab in slabs:
        slab.close()
        slab.close()


def test_the_file_has_no_name(sides):
    fd = create_slab_file()
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)


def test_arrays_cross_over_and_grow(sides):
    left, right = sides
    for size in (1, 1000, 10, 100_000):
        left.rewind()
        arrays = [np.arange(size, dtype=kind) for kind in (np.uint8, np.float32, np.int64)] + [np.array([True, False])]
        references = [left.append(array) for array in arrays]
        for array, reference in zip(arrays, references):
            received = right.read(reference)
            assert received.dtype == array.dtype
            np.testing.assert_array_equal(received, array)


def test_a_copy_outlives_what_comes_next(sides):
    left, right = sides
    received = right.read(left.append(np.arange(5)))
    left.rewind()
    left.append(np.zeros(5, dtype=np.int64))
    np.testing.assert_array_equal(received, np.arange(5))


def test_empty_scalar_and_strided_arrays(sides):
    left, right = sides
    arrays = (np.zeros((0, 4), np.float32), np.array(2.5), np.arange(12).reshape(3, 4)[::2, ::-1])
    for array in arrays:
        received = right.read(left.append(array))
        assert received.shape == array.shape
        np.testing.assert_array_equal(received, array)


def test_objects_are_refused(sides):
    with pytest.raises(ValueError, match="Python objects"):
        sides[0].append(np.array([object()]))


def test_commands_come_back_as_they_were(sides):
    left, right = sides
    packed = pack(StepChunk(np.full((1, 2), 0.5, np.float32)), left)
    [(slot, command)] = load_commands(dump_commands([(3, packed)]))
    received = unpack(command, right)
    assert slot == 3 and received.actions.tolist() == [[0.5, 0.5]] and received.record_frames is False


def test_a_file_that_was_cut_short_is_refused(sides):
    left, right = sides
    reference = left.append(np.zeros(2**20, np.uint8))
    os.ftruncate(left._fd, 2**19)
    with pytest.raises(ValueError, match="outside"):
        right.read(reference)
