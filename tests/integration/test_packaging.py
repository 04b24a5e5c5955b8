"""What `pip install .` brings: the commands, and the files beside the code that they read."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES_OF_THE_BUILD = ("setup.py", "README.md", "LICENSE", "pyproject.toml")


@pytest.mark.slow
def test_the_wheel_holds_commands_and_data(tmp_path: Path) -> None:
    source = tmp_path / "source"  # building leaves folders behind
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    for name in tracked.stdout.splitlines():
        if name.startswith(("rlvla/", "cli/")) or name in FILES_OF_THE_BUILD:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("rlvla-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        read = {Path(name).name: archive.read(name).decode() for name in names if ".dist-info/" in name}
    listing, metadata = read["entry_points.txt"], read["METADATA"]
    assert read["LICENSE"] == (ROOT / "LICENSE").read_text() and "Apache License" in read["LICENSE"]
    assert {"rlvla/py.typed", "rlvla/evaluation/templates/report.html.jinja"} <= names, "data beside the code"
    for line in ("Author: rlvla contributors", "License: Apache-2.0", "Classifier: Typing :: Typed"):
        assert f"\n{line}\n" in metadata
    assert (ROOT / "README.md").read_text().splitlines()[0] in metadata, "the page on PyPI"
    expected = {p for p in tracked.stdout.splitlines() if p.startswith("rlvla/") and not p.endswith(".pyc")}
    assert expected <= names
    assert "rlvla/cli/__init__.py" in names, "an editable installation would not find the commands"
    for path in (ROOT / "cli").glob("[a-z]*.py"):
        assert f"rlvla/cli/{path.name}" in names
        assert f"rlvla-{path.stem.replace('_', '-')} = rlvla.cli.{path.stem}:main" in listing
    assert not [name for name in names if name.startswith(("tests/", "cli/", "examples/"))]
    assert "rlvla---init--" not in listing


@pytest.mark.slow
def test_commands_are_found_in_an_editable_installation(tmp_path: Path) -> None:
    """Which is what examples/scripts/setup.sh makes."""
    source = tmp_path / "source"
    for name in ("rlvla/__init__.py", "rlvla/version.py", "cli", "setup.py", "README.md", "pyproject.toml"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("rlvla-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (finder,) = (tmp_path / "site").glob("__editable__*.py")
    # -S: without site-packages, and with them another installation of this package.
    code = f"import {finder.stem} as f; f.install(); import rlvla.cli; print(rlvla.cli.__file__)"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path / "site", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(source / "cli/__init__.py")


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_images_install_what_the_scripts_install(name: str) -> None:
    extras = re.search(r'-e "\.\[([\w,]+)\]"', (ROOT / "examples" / "scripts" / "setup.sh").read_text())
    stamp = re.search(r"cat (setup\.py .*?) \| sha256sum", (ROOT / "examples" / "scripts" / "setup.sh").read_text())
    assert extras and stamp
    text = (ROOT / name).read_text()
    assert extras[0] in text, "another set of extras than setup.sh"
    assert stamp[1] in text, "setup.sh would install everything again"


def test_the_workflow_runs_what_ci_runs() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands == [".ci/run"] and (ROOT / ".ci" / "run").stat().st_mode & 0o111
