"""Videos: what a browser can play, what comes back, what is written into the band above the picture."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rlvla.utils.errors import MissingExtraError
from rlvla.utils.video import (
    caption_frames,
    encode_frames,
    encode_gif,
    encode_mp4,
    read_frames,
    read_video,
    video_size,
    write_mp4,
)

av = pytest.importorskip("av", reason="videos need PyAV: the extra rlvla[video]")


def ramp(count: int, height: int = 64, width: int = 96) -> np.ndarray:
    """Frame i is grey of brightness 20 i."""
    return np.repeat(20 * np.arange(count, dtype=np.uint8), height * width * 3).reshape(count, height, width, 3)


def test_browsers_play_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "v.mp4"
    write_mp4(path, ramp(7), fps=10)
    data = path.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat"), "the index must come first: a page plays it while it loads"
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264" and stream.codec_context.pix_fmt == "yuv420p"
        assert float(stream.average_rate) == 10 and stream.frames == 7


def test_frames_come_back(tmp_path: Path) -> None:
    path = tmp_path / "v.mp4"
    write_mp4(path, ramp(8, 31, 33), fps=5)  # odd sides are padded
    frames = read_video(path)
    assert frames.shape == (8, 32, 34, 3)
    assert np.abs(frames.mean((1, 2, 3)) - 20 * np.arange(8)).max() < 3
    assert len(read_video(path, most=3)) == 3


@pytest.mark.parametrize("shift", [0.0, 0.3, -0.3])
def test_the_frame_nearest_to_a_time_is_read(tmp_path: Path, shift: float) -> None:
    path = tmp_path / "v.mp4"
    write_mp4(path, ramp(8), fps=5)
    part = read_frames(path, (np.array([3, 4, 6]) + shift) / 5, 0.5 / 5)
    assert np.abs(part.mean((1, 2, 3)) - [60, 80, 120]).max() < 3
    assert len(read_frames(path, (np.arange(8) + shift) / 5, 0.5 / 5)) == 8


def test_frames_beyond_the_tolerance_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "v.mp4"
    write_mp4(path, ramp(8), fps=5)
    for times, problem in (
        ((np.arange(8) + 0.6) / 5, r"row 7 \(1.52 s\) is at 1.4 s"),
        (np.array([0.2, 0.32, 0.4]), r"row 1 \(0.32 s\) is at 0.4 s, farther than 0.05 s"),
        (np.array([0.19, 0.21]), "rows 0 and 1 have the same frame, at 0.2 s"),
        (np.array([9.0, 9.2]), "no frame between 9 and 9.2 s"),
    ):
        with pytest.raises(ValueError, match=problem):
            read_frames(path, times, 0.1 if len(times) == 8 else 0.05)


def test_a_video_is_written_frame_by_frame(tmp_path: Path) -> None:
    encode_frames(tmp_path / "v.mp4", (frame for frame in ramp(9)), fps=5)
    assert (tmp_path / "v.mp4").read_bytes() == encode_mp4(ramp(9), 5)
    assert video_size(tmp_path / "v.mp4") == (96, 64) and video_size(tmp_path / "none") is None


def test_what_is_no_video_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "v.mp4").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a readable video"):
        read_video(tmp_path / "v.mp4")
    write_mp4(tmp_path / "v.mp4", ramp(2), fps=5)
    for frames, fps in ((np.zeros((0, 8, 8, 3), np.uint8), 5), (np.zeros((2, 8, 8, 3)), 5), (ramp(2), 0)):
        with pytest.raises(ValueError):
            encode_mp4(frames, fps)
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(MissingExtraError, match=r"rlvla\[video\]"):
        encode_mp4(ramp(2), 5)


def test_the_band_says_what_happens() -> None:
    frames = np.full((3, 50, 70, 3), 90, np.uint8)
    plain = caption_frames(frames, "lift the cube")
    assert plain.shape[2] == 350 and plain.shape[1] > 250 and plain.shape[1] % 2 == 0
    assert (plain[:, -250:] == 90).all(), "the picture itself stays as it is"
    assert plain[0, :-250].max() > 150, "something is written"
    assert not np.array_equal(plain[0], plain[1]), "the step is part of it"

    def changed(**options) -> list[bool]:
        other = caption_frames(frames, "lift the cube", **options)
        return [not np.array_equal(a, b) for a, b in zip(plain, other)]

    assert changed(success=[False, True, False]) == [False, True, False]
    assert changed(states=["", "u1", "u1"]) == [False, True, True]
    assert changed(primitives=["", "grasp", "reach"]) == [False, True, True]
    assert changed(result=True) == changed(result=False) == [False, False, True]
    assert changed(result=None) == [False] * 3
    other = caption_frames(frames, "open the door")
    assert not np.array_equal(other[0], plain[0])


def test_long_instructions_stay_inside_the_picture() -> None:
    frames = np.zeros((1, 64, 64, 3), np.uint8)
    words = "put both the alphabet soup and the tomato sauce in the basket and then open the top drawer of the cabinet"
    assert caption_frames(frames, words).shape == caption_frames(frames, "reach").shape
    assert not np.array_equal(caption_frames(frames, words), caption_frames(frames, words.replace("tomato", "cheese")))


def test_gif() -> None:
    image = Image.open(io.BytesIO(encode_gif(ramp(4), fps=10)))
    assert image.n_frames == 4 and image.info["duration"] == 100 and image.info["loop"] == 0
