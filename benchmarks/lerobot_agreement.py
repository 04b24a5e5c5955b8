"""Does LeRobot read, compute and preprocess the same as this program? Policies of a few sizes, both ways.

    python benchmarks/lerobot_agreement.py --lerobot_python ../lerobot-env/bin/python [--family pi0] [--record]

With pi0, names and shapes of all tensors in their full sizes are compared, too.

The environment needs `pip install "lerobot[smolvla]==0.4.4"` (or 0.6.1, on Python 3.12) and nothing of rlvla.
For each case (tests/support/smolvla_cases.py, pi0_cases.py) LeRobot saves a policy, and both compute the prefix (keys
and values of every layer of the expert), velocities, sampled actions, and what the processors make of images of odd
sizes, states, prompts and actions. Then the policy is loaded here, its weights changed, saved, and compared again.
The table shows the largest difference; above 1e-4 the command fails. `--record` keeps LeRobot's files and results as
test vectors in tests/data.

SmolVLA: LeRobot's transformers may shift the positions of image patches (rlvla.models.smolvla.network), which is then
done here too.

pi0 and pi0.5 (`--family pi0`): LeRobot 0.6.1 has its own classes (transformers 5.5.0). Those of 0.4.4 run only on a
transformers with changes: give an environment of its own that has `transformers==4.53.2` with the files of openpi's
src/openpi/models_pytorch/transformers_replace copied over it, as openpi's README says. LeRobot knows the full sizes
alone; its half of the script makes it build smaller ones, and changes nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvla.models.lerobot.settings import SETTINGS_FILE
from rlvla.utils.terminal import table
from tests.support import pi0_cases, smolvla_cases
from tests.support.lerobot_cases import Case, differences, observations

SIDE = Path(__file__).resolve().parent / "lerobot_side.py"
TOLERANCE = 1e-4
FAMILIES = {"smolvla": smolvla_cases, "pi0": pi0_cases}


def lerobot(python: str, *arguments: str | Path, side: Path = SIDE, folder: str | Path | None = None) -> None:
    """Run LeRobot's half, or another `side`, in a working directory."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([python, side, *arguments], env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"LeRobot ended with {done.returncode}:\n{done.stderr[-4000:]}")


def their_results(python: str, family: ModuleType, folders: Mapping[Path, Case]) -> list[dict[str, np.ndarray]]:
    """What LeRobot computes with the policies in some folders."""
    with tempfile.TemporaryDirectory() as scratch:
        files = []
        for number, (folder, case) in enumerate(folders.items()):
            inputs, outputs = Path(scratch) / f"inputs_{number}.npz", Path(scratch) / f"outputs_{number}.npz"
            np.savez(inputs, **observations(case))
            files += [folder, inputs, outputs]
        lerobot(python, "evaluate", *files)
        return [dict(np.load(outputs)) for outputs in files[2::3]]


def written_here(family: ModuleType, source: Path, target: Path) -> None:
    """Load a folder, change every weight, and save it."""
    checkpoint = family.check(source)
    state = checkpoint.load_network().state_dict()
    generator = torch.Generator().manual_seed(0)
    changed = {n: v + 0.02 * torch.randn(v.shape, generator=generator) for n, v in state.items()}
    checkpoint.save(target, changed)


def record(target: Path, folder: Path, theirs: dict[str, np.ndarray]) -> None:
    """Keep LeRobot's files, but the weights, and its results as test vectors."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.name.startswith(("config.json", "policy_")):
            shutil.copy(file, target)
    kept = {key: value for key, value in theirs.items() if key != "images"}
    # Every third pixel of each row and column shows how images are resized and padded.
    kept["images"] = theirs["images"][:1, ..., ::3, ::3]
    np.savez_compressed(target / "outputs.npz", **kept)


def compare_full_sizes(python: str) -> None:
    """Names and shapes of the tensors of pi0 and pi0.5, without their weights; ends the program if they differ."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "full.json"
        lerobot(python, "full", output)
        for family, theirs in json.loads(output.read_text(encoding="utf-8")).items():
            ours = {name: list(shape) for name, shape in pi0_cases.full_shapes(family).items()}
            if ours != theirs["shapes"]:
                raise SystemExit(f"{family}: other tensors than LeRobot's")
            print(f"{family}: {len(ours)} tensors, {theirs['parameters']:,} parameters, named and shaped as LeRobot's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lerobot_python", required=True, help="interpreter of the environment that has lerobot")
    parser.add_argument("--family", choices=FAMILIES, default="smolvla", help="pi0: pi0 and pi0.5")
    parser.add_argument("--record", action="store_true", help="keep LeRobot's results as test vectors")
    options = parser.parse_args()
    python, family = str(Path(options.lerobot_python).absolute()), FAMILIES[options.family]
    rows, worst = [], 0.0
    with tempfile.TemporaryDirectory() as scratch:
        built = {Path(scratch) / "lerobot" / name: case for name, case in family.CASES.items()}
        for folder, case in built.items():
            family.prepare(case, folder)
            (folder / "request.json").write_text(json.dumps(case.request()), encoding="utf-8")
        lerobot(python, "build", *built)
        if options.family == "pi0":
            for folder in built:
                pi0_cases.mark_inputs(folder)
        here = {Path(scratch) / "here" / folder.name: case for folder, case in built.items()}
        for source, target in zip(built, here):
            written_here(family, source, target)
        folders = {**built, **here}
        results = their_results(python, family, folders)
        gaps = [
            differences(family.computed_like(family.check(folder), case, theirs), theirs)
            for (folder, case), theirs in zip(folders.items(), results)
        ]
        if options.record:
            for folder, theirs in zip(built, results):
                old = options.family == "smolvla" or (folder / SETTINGS_FILE).exists()
                record((family.VECTORS if old else pi0_cases.VECTORS_06) / folder.name, folder, theirs)
    for name, saved_there, saved_here in zip(family.CASES, gaps, gaps[len(built) :]):
        for part in dict.fromkeys(key.partition("/")[0] for key in saved_there):
            first, second = (
                max(value for key, value in side.items() if key.partition("/")[0] == part)
                for side in (saved_there, saved_here)
            )
            rows.append([name, part, f"{first:.1e}", f"{second:.1e}"])
            worst = max(worst, first, second)
    print(table(["case", "output", "saved by LeRobot", "saved here"], rows))
    if options.family == "pi0":
        compare_full_sizes(python)
    if worst > TOLERANCE:
        raise SystemExit(f"the largest difference is {worst:.1e}; at most {TOLERANCE:.0e} is allowed")


if __name__ == "__main__":
    main()
