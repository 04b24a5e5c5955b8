"""`install_vllm.sh` and `serve_vlm_vllm.sh` with stand-ins for Python and pip."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "examples" / "scripts"
# `python -m venv FOLDER` makes an environment whose programs note how they are called.
PYTHON = """#!/bin/sh
mkdir -p "$3/bin"
for name in python pip vllm; do
  printf '#!/bin/sh\\necho "$0 $*" >> "%s"\\n' "$CALLS" > "$3/bin/$name"
  chmod +x "$3/bin/$name"
done
"""


@pytest.mark.parametrize("folder", ["elsewhere", "relative"])
def test_a_server_is_started_from_the_environment_that_is_made_for_it(tmp_path: Path, folder: str) -> None:
    stand_in, calls = tmp_path / "python", tmp_path / "calls"
    stand_in.write_text(PYTHON)
    stand_in.chmod(0o755)
    venv = str(tmp_path / folder) if folder == "elsewhere" else folder
    environment = {**os.environ, "VENV": venv, "PYTHON": str(stand_in), "CALLS": str(calls), "MODEL": "some/model"}
    command = ["bash", str(SCRIPTS / "serve_vlm_vllm.sh"), "--seed", "3"]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert f"--rollout_python {tmp_path / folder}/bin/python" in ended.stdout
    lines = calls.read_text().splitlines()
    assert any("bin/pip install" in line for line in lines)
    assert f"{folder}/bin/" in lines[-1] and "some/model" in lines[-1] and lines[-1].endswith("--seed 3")
