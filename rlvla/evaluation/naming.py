"""Short names of policies for headings and charts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_RUNS = "runs"  # where runs are by default
_POLICY_FOLDERS = {"policy": "", "best_policy": "best", "policies": "", "exported": ""}
_PARTS = 2


def run_name(policy: str) -> str:
    """What a person calls the policy in this folder: `runs/lift/ppo/policy` is "lift / ppo".

    Of policies beside the last one of a run it says which: "lift / ppo (best)", "lift / ppo (iteration 40)".
    """
    parts = [part for part in Path(policy).parts if part not in ("/", ".", "..")]
    notes = []
    if len(parts) > 1 and (match := re.fullmatch(r"iteration_(\d+)", parts[-1])):
        notes.append(f"iteration {int(match[1])}")
        parts.pop()
    if len(parts) > 1 and parts[-1] in _POLICY_FOLDERS:
        notes += filter(None, [_POLICY_FOLDERS[parts.pop()]])
    if len(parts) > 1 and parts[0] == _RUNS:
        parts = parts[1:]
    name = " / ".join(parts[-_PARTS:]) or policy
    return f"{name} ({', '.join(notes)})" if notes else name


def labels(policies: Iterable[str]) -> dict[str, str]:
    """Policy -> its `run_name`, or the policy itself where two would be called the same."""
    names = {policy: run_name(policy) for policy in policies}
    taken = list(names.values())
    return {policy: name if taken.count(name) == 1 else policy for policy, name in names.items()}
