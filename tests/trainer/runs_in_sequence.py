"""Runs of cli/train_ppo_vla.py one after the other in one launch: `runs_in_sequence.py [--local_rank=N] FILE`.

FILE holds a JSON list of argument lists. Starting two processes costs more than a tiny run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cli.train_ppo_vla import main

if __name__ == "__main__":
    for argv in json.loads(Path(sys.argv[-1]).read_text(encoding="utf-8")):
        main(argv)
