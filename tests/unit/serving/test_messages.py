"""Messages of policy servers: arrays and scalars go through, everything else that could harm does not."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rlvla.serving.messages import MessageError, described_map, pack, unpack

msgpack = pytest.importorskip("msgpack")


@pytest.mark.parametrize(
    "value",
    [
        np.arange(12, dtype=np.uint8).reshape(2, 2, 3),
        np.zeros((0, 3), np.float32),
        np.array(1.5),
        np.float32(0.25),
        np.bool_(True),
    ],
    ids=str,
)
def test_arrays_and_scalars_go_through(value: Any) -> None:
    back = unpack(pack({"a": value}))["a"]
    assert back.dtype == value.dtype and back.shape == value.shape and np.array_equal(back, value)


def test_the_coding_is_openpis() -> None:
    raw = msgpack.unpackb(pack(np.ones((1, 2), np.float32)))
    assert raw == {b"__ndarray__": True, b"data": b"\0\0\x80?" * 2, b"dtype": "<f4", b"shape": [1, 2]}
    assert msgpack.unpackb(pack(np.int64(3))) == {b"__npgeneric__": True, b"data": 3, b"dtype": "<i8"}


def test_the_keys_may_be_text() -> None:
    content = {"__ndarray__": True, "data": b"\1\2", "dtype": "|u1", "shape": [2]}
    assert unpack(msgpack.packb(content)).tolist() == [1, 2]


def array(**changes: Any) -> bytes:
    content = {b"__ndarray__": True, b"data": b"\0" * 8, b"dtype": "<f4", b"shape": [2]}
    return msgpack.packb(content | {key.encode(): value for key, value in changes.items()})


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (b"\xc1", "not a msgpack message"),
        (b"", "not a msgpack message"),
        (pack(1) + b"\0", "ExtraData"),
        (b"\x91" * 2000 + b"\0", "not a msgpack message"),
        (array(dtype="|O"), "booleans, integers or floats"),
        (array(dtype="<f4,<f4"), "booleans, integers or floats"),
        (array(dtype=["a"]), "booleans, integers or floats"),
        (array(shape=[3]), "comes with 8 bytes"),
        (array(shape=[-2]), "needs data"),
        (array(shape=[2**62, 4]), "comes with 8 bytes"),
        (array(data=None), "needs data"),
        (msgpack.packb({b"__npgeneric__": True, b"data": "x", b"dtype": "<f4"}), "needs a number"),
        (msgpack.packb({b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}), "needs a number"),
        (msgpack.packb([[]] * 2000), "more than 1000 lists"),
        (msgpack.packb(list(range(20_000))), "not a msgpack message"),
    ],
)
def test_what_is_refused(message: bytes, says: str) -> None:
    with pytest.raises(MessageError, match=says):
        unpack(message)


def test_objects_are_not_packed() -> None:
    with pytest.raises(TypeError, match="cannot hold"):
        pack({"a": np.array([None])})


def test_images_of_vla_eval() -> None:
    pixels, file = np.random.default_rng(0).integers(0, 255, (4, 5, 3), np.uint8), io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    content = {"__image__": True, "format": "png", "data": file.getvalue(), "shape": [4, 5, 3]}
    assert np.array_equal(unpack(msgpack.packb(content), images=True), pixels)
    assert unpack(msgpack.packb(content)) == content, "openpi has no such images"
    raw = {"__image__": True, "format": "raw", "data": pixels.tobytes(), "dtype": "|u1", "shape": [4, 5, 3]}
    assert np.array_equal(unpack(msgpack.packb(raw), images=True), pixels)
    for data in (b"GIF89a", file.getvalue()[:40], None):
        with pytest.raises(MessageError, match="image"):
            unpack(msgpack.packb(content | {"data": data}), images=True)


def test_descriptions() -> None:
    assert described_map({"a": np.zeros((2, 3), np.uint8), b"b": "x"}) == "a (uint8 [2, 3]), b'b' (str)"
    assert described_map({}) == "nothing"
    assert described_map(dict.fromkeys(range(30))).endswith("and 10 more")
