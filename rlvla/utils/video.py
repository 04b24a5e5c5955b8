"""Videos and contact sheets of episodes; mp4 files that browsers play (H.264, 4:2:0, even sides, index in front)."""

from __future__ import annotations

import io
import math
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rlvla.utils.errors import MissingExtraError, require
from rlvla.utils.files import write_atomic

_SMALLEST_SIDE = 288  # smaller camera images are enlarged to at least this width, so that the caption is legible
_CAPTION_LINES, _LINE_HEIGHT, _MARGIN = 3, 15, 6
_BAND = (24, 26, 30)
_TEXT, _SUCCESS, _FAILURE = (235, 235, 235), (112, 214, 122), (240, 128, 110)
_PRIMITIVE = (130, 186, 240)
# Of contact sheets, in pixels: side of a picture, space between two, a caption of two lines, one of its lines.
_TILE, _GAP, _CAPTION, _TITLE = 224, 12, 38, 16
_MAX_COLUMNS = 8
_CONTAINER = "mp4"  # named, because a playlist under any name could send FFmpeg to other files
_PAGE, _EMPTY = (24, 26, 30), (60, 34, 34)


def upright(images: np.ndarray, flipped_vertically: bool) -> np.ndarray:
    """Images [..., H, W, 3] with the top of the scene first, as viewers and reward models expect them."""
    return np.ascontiguousarray(images[..., ::-1, :, :]) if flipped_vertically else images


def beside_each_other(views: Mapping[str, np.ndarray]) -> np.ndarray:
    """Several views of an episode side by side, each with its name in a corner.

    Args:
        views: name -> frames [F, H, W, 3] uint8; the number of frames may differ by some at the end, where the last
            one stays.

    Returns:
        [F, H, W', 3] uint8; smaller pictures are enlarged to the height of the tallest.
    """
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=12)
    height = max(_SMALLEST_SIDE, *(frames.shape[1] for frames in views.values()))
    columns = []
    for name, frames in views.items():
        width = round(frames.shape[2] * height / frames.shape[1])
        how = Image.Resampling.NEAREST if 2 * frames.shape[1] <= height else Image.Resampling.BILINEAR
        pictures = []
        for frame in frames:
            picture = Image.fromarray(np.ascontiguousarray(frame)).resize((width, height), how)
            draw = ImageDraw.Draw(picture)
            draw.text((_MARGIN, height - _LINE_HEIGHT - _MARGIN), name, _TEXT, font, stroke_width=2, stroke_fill=_BAND)
            pictures.append(np.asarray(picture))
        columns.append(pictures)
    gap = np.full((height, _GAP, 3), _BAND, np.uint8)
    rows = []
    for index in range(max(map(len, columns))):
        tiles = [tile for pictures in columns for tile in (gap, pictures[min(index, len(pictures) - 1)])]
        rows.append(np.concatenate(tiles[1:], axis=1))
    return np.stack(rows)


def caption_frames(
    frames: np.ndarray,
    instruction: str,
    *,
    success: Sequence[bool] | None = None,
    states: Sequence[str] | None = None,
    primitives: Sequence[str] | None = None,
    result: bool | None = None,
) -> np.ndarray:
    """Add a caption with instruction, step, primitive, success and reward-machine state above each frame.

    Above, because browsers draw the video controls over the lower edge.

    Args:
        frames: [F, H, W, 3] uint8; the first one is the initial state (step 0).
        instruction: the language instruction of the episode.
        success: [F] whether the success predicate holds.
        states: [F] state of the reward machine.
        primitives: [F] name of the action primitive that led to the frame; "" for none.
        result: success at end; shown on the last frame.

    Returns:
        [F, H', W', 3] uint8 with even sides; small images are enlarged by an integer factor.
    """
    from PIL import Image, ImageDraw, ImageFont

    count, height, width, _ = frames.shape
    scale = max(1, -(-_SMALLEST_SIDE // width))
    width, height = width * scale, height * scale
    width, height = width + width % 2, height + height % 2
    band = _CAPTION_LINES * _LINE_HEIGHT + 2 * _MARGIN
    band += band % 2
    font = ImageFont.load_default(size=12)
    first, second = two_lines(instruction, width - 2 * _MARGIN, font)
    captioned = np.empty((count, height + band, width, 3), dtype=np.uint8)
    for index, frame in enumerate(frames):
        page = Image.new("RGB", (width, height + band), _BAND)
        page.paste(Image.fromarray(frame).resize((width, height), Image.Resampling.NEAREST), (0, band))
        draw = ImageDraw.Draw(page)
        labels: list[tuple[str, tuple[int, int, int]]] = [(f"step {index}/{count - 1}", _TEXT)]
        if primitives is not None and primitives[index]:
            labels.append((primitives[index], _PRIMITIVE))
        if success is not None and success[index]:
            labels.append(("success holds", _SUCCESS))
        if states is not None and states[index]:
            labels.append((f"state {states[index]}", _TEXT))
        if result is not None and index == count - 1:
            labels.append(("SUCCESS", _SUCCESS) if result else ("FAILURE", _FAILURE))
        top = _MARGIN
        draw.text((_MARGIN, top), first, _TEXT, font=font)
        draw.text((_MARGIN, top + _LINE_HEIGHT), second, _TEXT, font=font)
        left = float(_MARGIN)
        for text, color in labels:
            draw.text((left, top + 2 * _LINE_HEIGHT), text, color, font=font)
            left += draw.textlength(text + "    ", font=font)
        captioned[index] = np.asarray(page)
    return captioned


def two_lines(text: str, width: int, font: Any) -> tuple[str, str]:
    """Wrap a text into two lines of at most `width` pixels; the rest is replaced by an ellipsis."""
    lines = ["", ""]
    row = 0
    for word in text.split():
        longer = f"{lines[row]} {word}".strip()
        if font.getlength(longer) <= width:
            lines[row] = longer
        elif row == 0:
            row, lines[1] = 1, word
        else:
            lines[1] += " ..."
            break
    return lines[0], lines[1]


def encode_mp4(frames: np.ndarray, fps: float, *, crf: int = 20) -> bytes:
    """Encode frames as H.264 in an mp4 file.

    Args:
        frames: [F, H, W, 3] uint8, F >= 1; an odd side is padded with a copy of its last row or column.
        fps: frames per second.
        crf: constant rate factor, 0 (lossless) to 51; 20 looks good, 8 is used for training data.

    Raises:
        MissingExtraError: PyAV is not installed.
        ValueError: there are no frames, or they have another shape or dtype.
    """
    if frames.ndim != 4 or frames.shape[0] == 0 or frames.shape[3] != 3 or frames.dtype != np.uint8:
        raise ValueError(f"frames must be [F, H, W, 3] uint8 with F >= 1, got {list(frames.shape)} {frames.dtype}")
    if not fps > 0:
        raise ValueError(f"fps must be positive, not {fps}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        encode_frames(path, frames, fps, crf=crf)
        return path.read_bytes()


def encode_frames(path: Path, frames: Iterable[np.ndarray], fps: float, *, crf: int = 20) -> None:
    """Like `encode_mp4`, but streaming into a file, so that a long video is never in memory as a whole.

    Args:
        path: the file to write; an error leaves it incomplete.
        frames: one or more frames [H, W, 3] uint8 of the same size.
        fps: frames per second.
        crf: see `encode_mp4`.

    Raises:
        MissingExtraError: PyAV is not installed.
    """
    av = require("av", extra="video")
    from fractions import Fraction

    # The index can only be moved to the front of a real file: the muxer opens it a second time.
    with av.open(str(path), "w", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        stream.pix_fmt, stream.options = "yuv420p", {"crf": str(crf), "preset": "veryfast", "threads": "1"}
        for index, frame in enumerate(frames):
            height, width = frame.shape[:2]
            if height % 2 or width % 2:
                frame = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
            if index == 0:
                stream.height, stream.width = frame.shape[:2]
            for packet in stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def write_mp4(path: Path, frames: np.ndarray, fps: float) -> None:
    """Write the result of `encode_mp4` atomically."""
    write_atomic(path, encode_mp4(frames, fps))


@contextmanager
def _video_stream(path: Path) -> Iterator[tuple[Any, Any]]:
    """Container and video stream of a file; ValueError if it is not a video."""
    av = require("av", extra="video")
    try:
        with av.open(str(path), format=_CONTAINER) as container:
            yield container, container.streams.video[0]
    except (av.FFmpegError, IndexError) as error:
        raise ValueError(f"{path} is not a readable video ({error})") from error


def video_size(path: Path) -> tuple[int, int] | None:
    """Width and height in pixels; None if the file is not a video or PyAV is not installed."""
    with suppress(ValueError, MissingExtraError), _video_stream(path) as (_, stream):
        return stream.width, stream.height
    return None


def video_poster(path: Path) -> bytes | None:
    """The last frame as JPEG; None if the file is not a video or PyAV is not installed."""
    from PIL import Image

    last = None
    with suppress(ValueError, MissingExtraError), _video_stream(path) as (container, stream):
        if stream.duration:
            container.seek(stream.duration, stream=stream, backward=True)  # the last frame that is whole
        last = next(iter(deque(container.decode(stream), maxlen=1)), None)
    if last is None:
        return None
    buffer = io.BytesIO()
    Image.fromarray(last.to_ndarray(format="rgb24")).save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


@dataclass(frozen=True)
class VideoFacts:
    """The recorded properties of a video that has not been decoded.

    Attributes:
        frames: their number; None if the file does not record it.
        seconds: duration; None if the file does not record it.
        height, width: in pixels.
    """

    frames: int | None
    seconds: float | None
    height: int
    width: int


def video_facts(path: Path) -> VideoFacts:
    """Read `VideoFacts` from the header of a video.

    Raises:
        MissingExtraError: PyAV is not installed.
        ValueError: the file is not a video.
    """
    with _video_stream(path) as (_, stream):
        seconds = None if stream.duration is None else float(stream.duration * stream.time_base)
        return VideoFacts(stream.frames or None, seconds, stream.height, stream.width)


def read_video(path: Path, *, most: int | None = None) -> np.ndarray:
    """Decode the frames [F, H, W, 3] uint8 of an mp4 file, in any codec that PyAV supports.

    Args:
        path: the video file.
        most: number of frames after which decoding stops; None: no limit.

    Raises:
        ValueError: the file is not a video, or has no frame.
    """
    with _video_stream(path) as (container, stream):
        frames = [frame.to_ndarray(format="rgb24") for frame in islice(container.decode(stream), most)]
    if not frames:
        raise ValueError(f"{path} has no frame")
    return np.stack(frames)


def read_frames(path: Path, times: np.ndarray, tolerance: float) -> np.ndarray:
    """Decode the frame nearest to each time, as [F, H, W, 3] uint8.

    Args:
        path: the video file.
        times: [F] increasing times in seconds.
        tolerance: largest distance of a frame from its time, in seconds.

    Raises:
        ValueError: the file is not a video, no frame lies within the tolerance, or two times share their nearest frame.
    """
    frames: list[np.ndarray] = []
    shown: list[float] = []
    last = None

    def settle(until: float) -> None:
        """Take the last frame for the times up to `until`."""
        if last is not None:
            for _ in times[len(frames) : np.searchsorted(times, until, side="right")]:
                frames.append(last.to_ndarray(format="rgb24"))
                shown.append(last.time)

    with _video_stream(path) as (container, stream):
        earliest, latest = times[0] - tolerance, times[-1] + tolerance
        if earliest > 0:
            container.seek(int(earliest / stream.time_base), stream=stream, backward=True)
        for frame in container.decode(stream):
            if frame.time > latest:
                break
            if frame.time >= earliest:
                settle(frame.time if last is None else (last.time + frame.time) / 2)
                last = frame
        settle(latest)
    if last is None:
        raise ValueError(f"{path} has no frame between {times[0]:g} and {times[-1]:g} s")
    far = np.flatnonzero(~(np.abs(shown - times) <= tolerance))
    if len(far):
        row = far[0]
        raise ValueError(
            f"the frame nearest to row {row} ({times[row]:g} s) is at {shown[row]:g} s, farther than {tolerance:g} s"
        )
    shared = np.flatnonzero(np.diff(shown) == 0)
    if len(shared):
        raise ValueError(f"rows {shared[0]} and {shared[0] + 1} have the same frame, at {shown[shared[0]]:g} s")
    return np.stack(frames)


def encode_gif(frames: np.ndarray, fps: float) -> bytes:
    """A looping GIF of frames [F, H, W, 3] uint8, for viewers without video (TensorBoard)."""
    from PIL import Image

    images = [Image.fromarray(frame).quantize(64) for frame in frames]
    buffer = io.BytesIO()
    images[0].save(
        buffer, "GIF", save_all=True, append_images=images[1:], duration=round(1000 / fps), loop=0, optimize=False
    )
    return buffer.getvalue()


def contact_sheet(pictures: Sequence[tuple[str, np.ndarray | None]]) -> bytes:
    """Draw captioned pictures on one page, as PNG.

    Args:
        pictures: pairs of caption and picture [H, W, 3] uint8; None leaves an empty tile. Pictures are scaled to tiles
            of equal size, keeping their aspect ratio.

    Returns:
        The bytes of the PNG file.
    """
    from PIL import Image, ImageDraw, ImageFont

    columns = max(1, min(_MAX_COLUMNS, math.ceil(math.sqrt(len(pictures)))))
    rows = max(1, math.ceil(len(pictures) / columns))
    width, height = _TILE + _GAP, _TILE + _CAPTION + _GAP
    page = Image.new("RGB", (columns * width + _GAP, rows * height + _GAP), _PAGE)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(size=13)
    for index, (caption, pixels) in enumerate(pictures):
        left, top = _GAP + index % columns * width, _GAP + index // columns * height
        for line, text in enumerate(two_lines(caption, _TILE, font)):
            draw.text((left, top + _TITLE * line), text, fill=_TEXT, font=font)
        top += _CAPTION
        if pixels is None:
            draw.rectangle((left, top, left + _TILE - 1, top + _TILE - 1), fill=_EMPTY)
            continue
        picture = Image.fromarray(pixels)
        scale = _TILE / max(picture.size)
        size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
        enlarge = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
        page.paste(picture.resize(size, enlarge), (left, top))
    buffer = io.BytesIO()
    page.save(buffer, format="PNG")
    return buffer.getvalue()
