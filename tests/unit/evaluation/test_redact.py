"""Paths and addresses are left out of texts, command lines and JSON files."""

from __future__ import annotations

import pytest

from rlvla.evaluation.redact import redact_command, redact_json, redact_paths


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/home/me/runs/ppo", "ppo"),
        ("--demos=/data/a/demos.hdf5 --seed 0", "--demos=demos.hdf5 --seed 0"),
        ("~/runs/ppo and (/srv/x)", "ppo and (x)"),
        ("tar:/srv/data/x", "tar:x"),
        ("/home/me/", "..."),
        ("~bob/x, ~/y and ~bob/runs/z", "x, y and z"),
        ("see file:///home/me/x", "see x"),
        ("https://host/a/b and/or runs/ppo ../a/b 1/2/3 /", "https://host/a/b and/or runs/ppo ../a/b 1/2/3 /"),
    ],
)
def test_absolute_paths_are_shortened(text: str, left: str) -> None:
    assert redact_paths(text) == left


@pytest.mark.parametrize(
    ("command", "left"),
    [
        ("'--save_path=/home/Jane Doe/runs/ppo' --seed 0", "--save_path=ppo --seed 0"),
        ("--demos '/data/Jane Doe/a.hdf5' '~bob/my demos' runs/b", "--demos a.hdf5 'my demos' runs/b"),
        ("--set 'rl.demos=/home/Doe, Jane/x' all.ray_address=host:1", "--set rl.demos=x all.ray_address=ADDRESS"),
        ("'--reward=vlm:/home/Jane Doe/r.py'", "--reward=vlm:r.py"),
        ("--ray_address host:6379 --vlm_url gpu7:80/v1", "--ray_address ADDRESS --vlm_url URL"),
        ("--ray_address=host:6379 --env_python=venvs/x/python", "--ray_address=ADDRESS --env_python=PYTHON"),
        ("--remote_rm_url a:1 b:2 --seed 3", "--remote_rm_url URL URL --seed 3"),
        ("--x 'http://user:key@host/a b' --demos 'file:///home/Jane Doe/x'", "--x URL --demos x"),
        ("--x=s3://bucket/a --seed 0", "--x=URL --seed 0"),
        ("--instruction 'put it and/or leave it' --lr 1e-4", "--instruction 'put it and/or leave it' --lr 1e-4"),
        ("--name 'broken", ""),
    ],
)
def test_commands(command: str, left: str) -> None:
    assert redact_command(f"python /opt/x/train.py {command}") == (left and f"python train.py {left}")


def test_redact_json() -> None:
    content = {
        "/a/x": 1,
        "x": 2,
        "/b/x": [3, "file:///home/Jane Doe/x", "at http://10.0.0.7:8000/v1"],
        "~bob/y": "~bob/z z",
        "vlm_url": "host:80",
        "ray_address": None,
        "remote_rm_url": ["host:80", {"path": "/home/me/a b"}],
        "python": "3.11.2",
        "chat_template": "{% if '/a' %}\n</s> and/or",
    }
    assert redact_json(content) == {
        "x (2)": 1,
        "x": 2,
        "x (3)": [3, "x", "at URL"],
        "y": "z z",
        "vlm_url": "URL",
        "ray_address": None,
        "remote_rm_url": ["URL", {"path": "a b"}],
        "python": "3.11.2",
        "chat_template": "{% if '/a' %}\n</s> and/or",
    }
