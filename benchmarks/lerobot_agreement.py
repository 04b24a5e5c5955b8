"""Does LeRobot read, compute and preprocess the same as this program? SmolVLA policies of a few sizes, both ways.

    python benchmarks/lerobot_agreement.py --lerobot_python ../lerobot-env/bin/python [--record]

The environment needs `pip install "lerobot[smolvla]==0.4.4"` and nothing of rlvla. For each case (tests/support/
smolvla_cases.py) LeRobot saves a policy, and both compute the prefix (keys and values of every layer of the expert),
velocities, sampled actions, and what the processors make of images of odd sizes, states, prompts and actions. Then the
policy is loaded here, its weights changed, saved, and compared again. The table shows the largest difference; above
1e-4 the command fails. LeRobot's transformers may shift the positions of image patches (rlvla.models.smolvla.vision),
which is then done here too. `--record` keeps LeRobot's files and results as test vectors in tests/data/smolvla.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.models.smolvla.checkpoint import check_smolvla
from rlvla.utils.terminal import table
from tests.support.smolvla_cases import CASES, VECTORS, Case, computed_like, differences, observations, write_vlm

SIDE = Path(__file__).resolve().parent / "lerobot_side.py"
TOLERANCE = 1e-4


def lerobot(python: str, *arguments: str | Path) -> None:
    """Run LeRobot's half."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([python, SIDE, *arguments], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"LeRobot ended with {done.returncode}:\n{done.stderr[-4000:]}")


def compare(python: str, case: Case, folder: Path) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Differences between the two for a folder, and LeRobot's results."""
    with tempfile.TemporaryDirectory() as scratch:
        inputs, outputs = Path(scratch) / "inputs.npz", Path(scratch) / "outputs.npz"
        np.savez(inputs, **observations(case))
        lerobot(python, "evaluate", folder, inputs, outputs)
        theirs = dict(np.load(outputs))
    return differences(computed_like(check_smolvla(folder), case, theirs), theirs), theirs


def written_here(source: Path, target: Path) -> None:
    """Load a folder, change every weight, and save it."""
    checkpoint = check_smolvla(source)
    state = checkpoint.load_network().state_dict()
    generator = torch.Generator().manual_seed(0)
    changed = {n: v + 0.02 * torch.randn(v.shape, generator=generator) for n, v in state.items()}
    checkpoint.save(target, changed)


def record(name: str, folder: Path, theirs: dict[str, np.ndarray]) -> None:
    """Keep LeRobot's files, but the weights, and its results as test vectors."""
    target = VECTORS / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.name.startswith(("config.json", "policy_")):
            shutil.copy(file, target)
    kept = {key: value for key, value in theirs.items() if key != "images"}
    # Every third pixel of each row and column shows how images are resized and padded.
    kept["images"] = theirs["images"][:1, ..., ::3, ::3]
    np.savez_compressed(target / "outputs.npz", **kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lerobot_python", required=True, help="interpreter of the environment that has lerobot")
    parser.add_argument("--record", action="store_true", help="keep LeRobot's results as test vectors")
    options = parser.parse_args()
    python = str(Path(options.lerobot_python).absolute())
    rows, worst = [], 0.0
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as scratch:
            theirs_folder, ours_folder = Path(scratch) / "lerobot", Path(scratch) / "here"
            write_vlm(case, theirs_folder)
            (theirs_folder / "request.json").write_text(json.dumps(case.request()), encoding="utf-8")
            lerobot(python, "build", theirs_folder)
            gaps, theirs = compare(python, case, theirs_folder)
            written_here(theirs_folder, ours_folder)
            back, _ = compare(python, case, ours_folder)
            if options.record:
                record(name, theirs_folder, theirs)
        groups = ("prefix_mask", "keys", "values", "velocity", "sampled", "actions", "normalized_actions")
        for part in (*groups, "positions", "tokens", "token_mask", "images", "image_mask", "state"):
            first, second = (
                max(value for key, value in side.items() if key.partition("/")[0] == part) for side in (gaps, back)
            )
            rows.append([name, part, f"{first:.1e}", f"{second:.1e}"])
            worst = max(worst, first, second)
    print(table(["case", "output", "saved by LeRobot", "saved here"], rows))
    if worst > TOLERANCE:
        raise SystemExit(f"the largest difference is {worst:.1e}; at most {TOLERANCE:.0e} is allowed")


if __name__ == "__main__":
    main()
