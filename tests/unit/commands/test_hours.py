"""`--dry_run --hours`: measured rates, and the table made of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_report import markdown, rates_of
from cli.train_ppo_vla import main as train
from rlvla.commands.hours import SHIPPED, rate_at, read_rates
from rlvla.models.actor import Actor
from rlvla.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks/results/gpu"
ENTRY = {
    **{"device": "test", "title": "tiny", "family": "openvla", "trained": "all", "parameters": 90_000, "tokens": 100},
    **{"acting": {"4": 0.1}, "acting_with_graphs": {}, "scoring": {"4": 0.05}, "update": {"4": 0.025}},
}


def test_rates_between_and_beyond_the_measured_batches() -> None:
    rates = {4: 40.0, 8: 60.0}
    assert [rate_at(rates, batch) for batch in (1, 4, 6, 8, 100)] == [10.0, 40.0, 50.0, 60.0, 60.0]


def test_the_shipped_rates_are_those_measured() -> None:
    assert json.loads(SHIPPED.read_text()) == rates_of(gpu.results_in(RESULTS))
    assert {rates.family for rates in read_rates(SHIPPED)} == {"openvla", "smolvla", "pi0"}


def test_the_page_shows_the_results() -> None:
    page = (ROOT / "docs/gpu.md").read_text()
    shown = re.search(r"--table -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert shown is not None and shown[1].strip() == markdown(gpu.results_in(RESULTS), gpu.PARTS).strip()


def test_times_of_published_settings_on_the_page() -> None:
    """Decisions over the rates in batches of 32 and micro-batches of 64, times the epochs of the update."""
    page, measured = (ROOT / "docs/gpu.md").read_text(), {rates.title: rates for rates in read_rates(SHIPPED)}
    rows = re.findall(r"^\| (.*?) \| ([\d,]+) \| ([\d.]+), ([\d.]+), ([\d.]+) \|", page, re.MULTILINE)
    assert len(rows) == 6
    for setting, decisions, *minutes in rows:
        rates = measured["pi0, expert" if "pi0" in setting else "OpenVLA-OFT 7B, LoRA 32, 1 image"]
        epochs = 4 if "four epochs" in setting else 1
        per_second = rate_at(rates.acting, 32), rate_at(rates.scoring, 32), rate_at(rates.update, 64) / epochs
        for shown, rate in zip(minutes, per_second, strict=True):
            assert float(shown) == pytest.approx(int(decisions.replace(",", "")) / rate / 60, rel=0.1)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no such file"),
        ("{}", "is not a rates.json"),
        ('{"policies": [{}]}', "is not a rates.json"),
        (json.dumps({"policies": [{**ENTRY, "scoring": {"0": 1.0}}]}), "positive decisions per second"),
        (json.dumps({"policies": [{**ENTRY, "tokens": "many"}]}), "positive integers"),
    ],
)
def test_files_that_are_no_rates(content: str | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=reason) as error:
        read_rates(path)
    assert error.value.problems[0].flag == "measured"


def test_policies_that_did_not_fit_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"policies": [ENTRY, {**ENTRY, "update": {}}]}))
    assert len(read_rates(path)) == 1


def planned(policy_folder: Path, tmp_path: Path, *flags: str) -> list[str]:
    run = ["--pretrain", str(policy_folder), "--save_path", str(tmp_path / "run"), "--dry_run", "--bf16", *flags]
    amounts = ["--num_episodes", "64", "--rollout_batch_size", "8", "--num_envs", "4"]
    sizes = ["--train_batch_size", "8", "--micro_rollout_batch_size", "4", "--micro_train_batch_size", "4"]
    return [*run, *amounts, *sizes, "--max_steps", "16", "--advantage_estimator", "grpo", "--n_samples_per_prompt", "2"]


def test_hours_from_ones_own_rates(policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seconds are decisions, at the run's number of tokens each, over the rates for 100 tokens."""
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"policies": [ENTRY, {**ENTRY, "tokens": 1, "title": "farther"}]}))
    train(planned(policy_folder, tmp_path, "--hours", "--measured", str(path)))
    printed = capsys.readouterr().out
    rows = dict(re.findall(r"^(acting|scoring|update|an iteration).*? {2,}([\d.]+)$", printed, re.MULTILINE))
    (decisions,) = map(int, re.findall(r"decisions per iteration, at most +(\d+)", printed))
    policy = Actor.from_pretrained(policy_folder)
    tokens = policy.row_tokens(["reach the yellow disc"], 1)[0]
    acting = decisions * tokens / 100 / 0.1
    assert "on test, from the rates of tiny" in printed and "farther" not in printed
    assert [float(rows[name]) for name in ("acting", "scoring", "update")] == [
        pytest.approx(factor * acting, rel=0.02) for factor in (1, 2, 4)
    ]
    assert float(rows["an iteration"]) == pytest.approx(7 * acting / 60, rel=0.02)


def test_a_policy_that_was_not_measured(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(planned(policy_folder, tmp_path, "--hours"))
    assert "no rates were measured for openvla with 0 M parameters, training all" in capsys.readouterr().out


def test_hours_need_a_dry_run(policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [flag for flag in planned(policy_folder, tmp_path, "--hours") if flag != "--dry_run"]
    with pytest.raises(SystemExit):
        train(flags)
    assert "--hours" in capsys.readouterr().err
