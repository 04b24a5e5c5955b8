"""Results of `benchmarks/gpu.py` as Markdown tables, and as rates for `--dry_run --hours`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlvla.commands.hours import PHASES

Results = dict[str, dict[str, Any]]  # part -> its JSON


def rates_of(results: Results) -> dict[str, Any]:
    """Decisions per second, for `--dry_run --hours --measured FILE`.

    Where acting and scoring were left out, the rates are those of the same network trained otherwise, the last that was
    measured; adapters cost some kernels, so these are lower bounds.
    """
    policies = [result for result in results.values() if "policy" in result["figures"]]
    complete = {result["figures"]["policy"]["family"]: result["figures"] for result in policies if acts(result)}
    entries = []
    for result in policies:
        figures = result["figures"]
        acting = figures if acts(result) else complete.get(figures["policy"]["family"], figures)
        rates = {"device": result["device"], **figures["policy"]}
        rates |= {"parameters": figures["parameters"], "tokens": figures["tokens_per_decision"]}
        for phase in PHASES:
            rows = (figures if phase == "update" else acting).get(phase, [])
            rates[phase] = {
                str(row.get("batch", row.get("micro"))): round(row["per_s"], 2) for row in rows if "per_s" in row
            }
        entries.append(rates)
    return {"policies": entries}


def acts(result: dict[str, Any]) -> bool:
    """Whether decisions of rollouts were measured, too."""
    return bool(result["figures"].get("acting"))


def markdown(results: Results, parts: Iterable[str]) -> str:
    """The tables of docs/gpu.md; `parts` are the names of all parts."""
    blocks = [ceilings_table(results), acting_table(results), update_table(results), agreement_table(results)]
    blocks += [kernels_table(results), attention_table(results), async_table(results)]
    absent = [f"`{name}`" for name in parts if name not in results]
    blocks.append(f"Not yet measured: {', '.join(absent) or 'nothing'}.")
    return "\n\n".join(block for block in blocks if block) + "\n"


def markdown_table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table, or nothing without rows."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""


def share(value: float) -> str:
    """A share of a ceiling; "-" without the part `device`."""
    return f"{100 * value:.0f} %" if value else "-"


def measured_policies(results: Results) -> list[tuple[str, dict[str, Any]]]:
    """Title and figures of the policies that were measured."""
    measured = (result["figures"] for result in results.values() if "policy" in result["figures"])
    return [(figures["policy"]["title"], figures) for figures in measured]


def ceilings_table(results: Results) -> str:
    """The device and its measured rates."""
    if "device" not in results:
        return ""
    result, figures = results["device"], results["device"]["figures"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    rows = [
        ("device", f"{result['device']}, {result.get('memory_gib', 0):.0f} GiB, driver {result.get('driver', '-')}"),
        ("versions", versions),
        ("matrix product, bfloat16", f"{figures['matmul_bf16_tflops']:.0f} TFLOP/s"),
        ("matrix product, float32", f"{figures['matmul_float32_tflops']:.0f} TFLOP/s"),
        ("copy on the device, read and written", f"{figures['device_copy_gb_per_s']:.0f} GB/s"),
        ("copy from pinned host memory", f"{figures['host_copy_gb_per_s']:.0f} GB/s"),
        (
            "error of a convolution with TF32, without",
            "{convolution_error_tf32:.0e}, {convolution_error:.0e}".format(**figures),
        ),
    ]
    return markdown_table(("", ""), rows)


def acting_table(results: Results) -> str:
    """Decisions per second of rollouts and of scoring."""
    rows = []
    for title, figures in measured_policies(results):
        graphs = {row["batch"]: row for row in figures.get("acting_with_graphs", [])}
        for row, scored in zip(figures.get("acting", []), figures.get("scoring", [])):
            replayed = graphs.get(row["batch"])
            rows.append(
                (
                    title,
                    str(row["batch"]),
                    f"{row['per_s']:.0f}",
                    f"{replayed['per_s']:.0f}" if replayed else "not yet",
                    share(max(row.get("of_bound", 0), (replayed or {}).get("of_bound", 0))),
                    f"{scored['per_s']:.0f}",
                )
            )
    return markdown_table(("policy", "batch", "acting/s", "with `--cuda_graphs`", "of the bound", "scoring/s"), rows)


def update_table(results: Results) -> str:
    """Decisions per second of optimizer steps, and memory."""
    rows = []
    for title, figures in measured_policies(results):
        for row in figures.get("update", []):
            if "error" in row:
                rows.append((title, str(row["micro"]), row["error"], "", "", ""))
                continue
            shares = share(row.get("of_peak", 0)), share(row.get("mfu", 0))
            memory = f"{row['allocated_gib']:.1f} ({row['reserved_gib']:.1f})"
            rows.append((title, str(row["micro"]), f"{row['per_s']:.0f}", *shares, memory))
    heads = ("policy", "micro-batch", "trained/s", "of peak", "MFU", "GiB allocated (reserved)")
    return markdown_table(heads, rows)


def agreement_table(results: Results) -> str:
    """Ratio of scored to sampled probabilities at unchanged weights."""
    rows = []
    for title, figures in measured_policies(results):
        for name, ratio in figures.get("agreement", {}).items():
            if name.startswith("ratio"):
                quantiles = (f"{ratio[q]:.1e}" for q in ("median", "p90", "p99", "max"))
                rows.append((title, name.rpartition("_")[2], *quantiles))
    return markdown_table(("policy", "scored in batches of", "median", "90 %", "99 %", "largest"), rows)


def kernels_table(results: Results) -> str:
    """Where the time of the GPU goes."""
    profiles = [
        (title, f"{phase}, {batch}", recorded)
        for title, figures in measured_policies(results)
        for phase in ("acting", "update")
        for batch, recorded in figures.get(f"{phase}_profile", {}).items()
    ]
    kinds = sorted(
        {kind for _, _, recorded in profiles for kind in recorded["by_kind"]},
        key=lambda kind: -sum(recorded["by_kind"].get(kind, 0.0) for _, _, recorded in profiles),
    )
    rows = []
    for title, what, recorded in profiles:
        busy = recorded["kernel_seconds"]
        shares = (f"{100 * recorded['by_kind'].get(kind, 0) / busy:.0f} %" for kind in kinds)
        idle = f"{100 * max(0.0, 1 - busy / recorded['seconds']):.0f} %"
        rows.append((title, what, f"{1e3 * busy:.0f}", *shares, idle, f"{recorded['kernel_launches']:,}"))
    return markdown_table(("policy", "phase, batch", "ms of kernels", *kinds, "idle", "launches"), rows)


def attention_table(results: Results) -> str:
    """Milliseconds of attention kernels."""
    if "attention" not in results:
        return ""
    figures = results["attention"]["figures"]

    def milliseconds(name: str) -> str:
        seconds = figures[name]
        return "refused" if isinstance(seconds, str) else f"{1e3 * seconds:.1f}"

    kernels = [name for name in figures if not name.endswith(", padded")]
    rows = [(f"`{name}`", milliseconds(name), milliseconds(f"{name}, padded")) for name in kernels]
    return markdown_table(("attention, 32 x 352 tokens, forward and backward", "ms", "ms, padded"), rows)


def async_table(results: Results) -> str:
    """Seconds per iteration, synchronous and asynchronous."""
    if "async_rollout" not in results:
        return ""
    figures = results["async_rollout"]["figures"].items()
    heads = ("rollouts, seconds asleep per decision", "iteration, s", "rollout, s", "update, s")
    names = ("iteration", "rollout", "update")
    rows = [(title, *(f"{seconds[name]:.1f}" for name in names)) for title, seconds in figures]
    return markdown_table(heads, rows)
