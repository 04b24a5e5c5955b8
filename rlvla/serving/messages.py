"""Messages of policy servers: msgpack with numpy arrays, as in openpi and vla-eval. Never pickle.

openpi codes an array as {b"__ndarray__": True, b"data", b"dtype", b"shape"} and a scalar as {b"__npgeneric__": True,
b"data", b"dtype"}; vla-eval has the same keys as text, and images as {"__image__": True, "format", "data", "shape"}
with format "raw", "png" or "jpeg". Messages are untrusted: only booleans, integers and floats are read, and the number
of containers and pixels is limited.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlvla.utils.errors import require
from rlvla.utils.terminal import printable

_KINDS = "biuf"  # of dtypes: no objects, no structures
_MAX_DIMS = 8
_ARRAY_FIELDS = "an array needs data (bytes), dtype and shape (up to 8 sizes)"
_MAX_LENGTH = 10_000  # entries of a list or map
_MAX_CONTAINERS = 1_000  # lists and maps of a message
MAX_PIXELS = 4096 * 4096  # of a compressed image
_SHOWN = 20  # keys in a message


class MessageError(ValueError):
    """A message that cannot be read, or does not hold what it should."""


def pack(value: Any) -> bytes:
    """A message, with openpi's coding of arrays; TypeError for values that it cannot hold."""
    return require("msgpack", extra="serve").packb(value, default=_encode)


def unpack(data: bytes, *, images: bool = False) -> Any:
    """The content of a message.

    Args:
        data: the message; arrays of the result are read-only views of it.
        images: read vla-eval's images, too.

    Raises:
        MessageError: it is not msgpack, or holds arrays that are not allowed.
    """
    hooks = _Hooks(images)
    try:
        return require("msgpack", extra="serve").unpackb(
            data,
            object_hook=hooks.on_map,
            list_hook=hooks.on_list,
            strict_map_key=False,
            max_array_len=_MAX_LENGTH,
            max_map_len=_MAX_LENGTH,
        )
    except MessageError:
        raise
    except Exception as error:  # msgpack has a class for every mistake, some without a common base
        raise MessageError(f"not a msgpack message ({type(error).__name__}: {printable(str(error), 100)})") from None


def described(value: Any) -> str:
    """Type and shape of a value, for messages."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__


def described_map(content: Mapping[Any, Any]) -> str:
    """Keys of a map with the types of their values, for messages."""
    entries = [f"{printable(str(key), 60)} ({described(value)})" for key, value in list(content.items())[:_SHOWN]]
    more = [f"and {len(content) - _SHOWN} more"] if len(content) > _SHOWN else []
    return ", ".join([*entries, *more]) or "nothing"


def _encode(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in _KINDS:
        if isinstance(value, np.generic):
            return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    raise TypeError(f"a message cannot hold {described(value)}")


class _Hooks:
    """Hooks of the unpacker for one message."""

    def __init__(self, images: bool):
        self._images, self._containers = images, 0

    def _count(self) -> None:
        self._containers += 1
        if self._containers > _MAX_CONTAINERS:
            raise MessageError(f"the message holds more than {_MAX_CONTAINERS} lists and maps")

    def on_list(self, items: list[Any]) -> list[Any]:
        self._count()
        return items

    def on_map(self, content: dict[Any, Any]) -> Any:
        self._count()
        for name, read in (("__ndarray__", _array), ("__npgeneric__", _scalar)):
            if name in content or name.encode() in content:
                return read({key.decode() if isinstance(key, bytes) else key: v for key, v in content.items()})
        return _image(content) if self._images and "__image__" in content else content


def _dtype(name: Any) -> np.dtype:
    try:
        dtype = np.dtype(name) if isinstance(name, str) and len(name) < 10 else None
    except TypeError:
        dtype = None
    if dtype is None or dtype.kind not in _KINDS:
        allowed = "arrays hold booleans, integers or floats"
        raise MessageError(f"an array of dtype {printable(str(name), 40)!r}: {allowed}")
    return dtype


def _array(content: Mapping[str, Any]) -> np.ndarray:
    dtype, shape, data = _dtype(content.get("dtype")), content.get("shape"), content.get("data")
    if not isinstance(shape, (list, tuple)) or not isinstance(data, bytes):
        raise MessageError(_ARRAY_FIELDS)
    if len(shape) > _MAX_DIMS or not all(type(n) is int and n >= 0 for n in shape):
        raise MessageError(_ARRAY_FIELDS)
    if math.prod(shape) * dtype.itemsize != len(data):
        raise MessageError(f"an array {dtype} {list(shape)} comes with {len(data)} bytes")
    return np.ndarray(tuple(shape), dtype, data)


def _scalar(content: Mapping[str, Any]) -> np.generic:
    dtype, data = _dtype(content.get("dtype")), content.get("data")
    try:
        if isinstance(data, (bool, int, float)):
            return dtype.type(data)
    except (OverflowError, ValueError):
        pass
    raise MessageError(f"a scalar of dtype {dtype} needs a number that fits")


def _image(content: Mapping[str, Any]) -> np.ndarray:
    if content.get("format") == "raw":
        return _array(content)
    from PIL import Image, UnidentifiedImageError

    data = content.get("data")
    try:
        with Image.open(io.BytesIO(data if isinstance(data, bytes) else b""), formats=("PNG", "JPEG")) as image:
            if image.width * image.height > MAX_PIXELS:
                raise MessageError(f"an image of {image.width} x {image.height} pixels; at most {MAX_PIXELS} are read")
            return np.asarray(image)
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, MessageError):
            raise
        raise MessageError("an image that is neither PNG nor JPEG, or is damaged") from None
