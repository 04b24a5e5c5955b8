"""Training runs one after the other in one launch: `runs_in_sequence.py [--local_rank=N] FILE`.

FILE holds a JSON list of argument lists, each after the name of its command (sft or ppo). Starting two processes costs
more than a tiny run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cli.train_ppo_vla import main as ppo
from cli.train_sft_vla import main as sft

COMMANDS = {"ppo": ppo, "sft": sft}

if __name__ == "__main__":
    for command, *argv in json.loads(Path(sys.argv[-1]).read_text(encoding="utf-8")):
        COMMANDS[command](argv)
