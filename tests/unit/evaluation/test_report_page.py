"""The report page: contents, self-containment, and rendering at a phone's width."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from rlvla.envs import list_tasks
from rlvla.envs.config import SplitConfig
from rlvla.envs.splits import LearnedStates, describe_learned_from
from rlvla.evaluation import report_page
from rlvla.evaluation.learning_charts import (
    SMALLEST_SPAN,
    _reward_series,
    _reward_sources,
    _short_names,
    learning_charts,
)
from rlvla.evaluation.pages import new_figure, widen
from rlvla.evaluation.protocol import describe_protocol
from rlvla.evaluation.report import EvaluationReport, PolicyEvaluation, SuiteEvaluation, as_markdown
from rlvla.evaluation.report_page import shown_videos, solved, won_and_lost, write_report
from rlvla.evaluation.results import EpisodeOutcome, EvalResult, summarize
from rlvla.evaluation.statistics import interval_of_metrics, wilson_interval

TASK = list_tasks("toy_reach")[0]
TRAINED_ON = describe_learned_from([TASK], [LearnedStates("toy_reach", 0, 0, 8000)])
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def evaluation(policy: str, successes: int, videos: list[Path] | None = None, n: int = 20) -> PolicyEvaluation:
    protocol = describe_protocol([TASK], SplitConfig(), n, 0, None)
    outcomes = [EpisodeOutcome(0, s, i < successes, True, 9) for i, s in enumerate(protocol["tasks"][0]["init_states"])]
    result = summarize(outcomes, [TASK], "heldout", True, requested=n + 1)
    return PolicyEvaluation(
        policy, {"cameras": ["top"]}, {"greedy": protocol}, [result], {"greedy": videos or []}, trained_on=TRAINED_ON
    )


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "a <run> & more"
    folder.mkdir(parents=True)
    lines = [
        {"step": i, "rollout/success_at_end": i / 9, "total/episodes": 64.0 * i, "reward/success": i / 9}
        | {"actor/entropy": 1.0 / i, "actor/ppo_kl": 0.01, "actor/grad_norm": 0.5}
        for i in range(1, 9)
    ]
    lines.append({"step": 8, "eval/success_at_end": 0.75, "eval/n": 20.0, "total/episodes": 512.0})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "run_config.json").write_text('{"run": {"note": "</pre><script>alert(1)</script>"}}')
    return folder


@pytest.fixture
def report(run_folder: Path, tmp_path: Path) -> Path:
    video = tmp_path / "reach_state8003_failure.mp4"
    try:
        from rlvla.utils.video import write_mp4

        write_mp4(video, np.zeros((4, 64, 64, 3), np.uint8), 10)
    except ImportError:
        video.write_bytes(b"no video")
    own, base = evaluation(f"{run_folder}/policy", 15, [video]), evaluation("base/policy", 6)
    return write_report(tmp_path / "report", EvaluationReport.of({"toy_reach": SuiteEvaluation.of(own, [base])}))


def test_the_page_is_self_contained(report: Path) -> None:
    assert [p.name for p in report.parent.iterdir()] == ["report.html"]
    text = report.read_text()
    for word in (
        "75.0 %",
        "30.0 %",
        "+45.0 ",
        ">points<",
        "reach, initial state 8003",
        "States won and lost against base, greedy",
        'title="initial state 8019: neither"',
        "Training of",
        "McNemar",
        "protocol heldout",
        "8000..8019",
        "torch",
    ):
        assert word in text, word
    assert "1 episode could not be played, and is in no figure" in text
    assert "trained on initial states 0..7999 of reach" in text and "<summary>command</summary>" in text
    assert text.count("<svg") == 5 and "reward per episode" in text and "gradient norm" in text
    assert "data:video/mp4;base64," in text
    assert "<script" not in text and "a &lt;run&gt; &amp; more" in text, "names and files are text, not markup"
    loaded = re.findall(r'(?:src|href|srcset|poster|action|data)="([^"]*)"|url\(([^)]*)\)|@import', text)
    outside = [a or b for a, b in loaded if not (a or b).startswith(("data:", "#"))]
    assert outside == []


def test_the_page_is_called_after_the_run_and_begins_with_its_contents(report: Path) -> None:
    text = report.read_text()
    name = "a &lt;run&gt; &amp; more"
    assert f"/ {name}</h1>" in text and f"/ {name}: 75.0%" in text, "not the folder of the policy"
    contents = re.findall(r'<a href="#(s\d+)">([^<]*)</a>', text)
    assert [at for at, _ in contents] == re.findall(r'<section id="(s\d+)">\s*<h2>', text)
    assert all(len(words.removesuffix(" …").split()) <= 5 for _, words in contents), contents
    assert len(contents) > 5 and text.index("<nav") < text.index("<section")


def test_states_are_counted_as_won_and_lost(report: Path) -> None:
    cells = re.findall(r'<i class="(\w+)" title="initial state (\d+)', report.read_text())
    kinds = [kind for kind, _ in cells]
    assert [state for _, state in cells] == [str(8000 + i) for i in range(20)]
    assert kinds == ["both"] * 6 + ["won"] * 9 + ["neither"] * 5


def test_the_same_state_is_shown_before_and_after(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="videos need PyAV: the extra rlvla[video]")
    from rlvla.utils.video import write_mp4

    def filmed(folder: str, *names: str) -> list[Path]:
        paths = [tmp_path / folder / f"reach_state{name}.mp4" for name in names]
        for path in paths:
            path.parent.mkdir(exist_ok=True)
            write_mp4(path, np.zeros((3, 64, 64, 3), np.uint8), 10)
        return paths

    own = evaluation("runs/new/policy", 15, filmed("new", "8001_success", "8016_failure"))
    base = evaluation("runs/old/policy", 6, filmed("old", "8001_failure"))
    text = write_report(tmp_path, EvaluationReport.of({"toy_reach": SuiteEvaluation.of(own, [base])})).read_text()
    pair = text[text.index('<div class="pair">') :]
    pair = pair[: pair.index("</section>")]
    shown = re.findall(r'<div class="small">(\w+), <span class="\w+">(\w+)</span>', pair)
    assert shown == [("old", "failure"), ("new", "success")] and text.count("<video") == 3
    assert text.count('poster="data:image/jpeg;base64,') == 3 and "reach, initial state 8016, <span" in text


def test_lost_and_gained_states_are_shown_before_those_that_both_solve(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="videos need PyAV: the extra rlvla[video]")
    from rlvla.utils.video import write_mp4

    outcomes = {"old": ("success", "failure", "success"), "new": ("success", "success", "failure")}
    both = []
    for folder, of_states in outcomes.items():
        paths = [tmp_path / folder / f"reach_state{i}_{outcome}.mp4" for i, outcome in enumerate(of_states)]
        (tmp_path / folder).mkdir()
        for path in paths:
            write_mp4(path, np.zeros((2, 64, 64, 3), np.uint8), 10)
        both.append(evaluation(f"runs/{folder}/policy", 15, paths))
    shown = shown_videos([both[1], both[0]], {e.policy: e.policy for e in both})
    states = [re.search(r"state (\d), \w+(?:: )?(\w*)", heading).groups() for heading in shown.beside]
    assert states == [("2", "lost"), ("1", "gained"), ("0", "")]


def test_differences_and_p_stay_on_phones(report: Path) -> None:
    text = report.read_text()
    heads = re.findall(r"<th([^>]*)>([^<]*)</th>", text[: text.index("<td")])
    assert [name for kinds, name in heads if "wide" not in kinds] == ["task", "measure", "difference [95 %]", "p"]
    assert ".wide { display: none; }" in text and "240px / var(--tall" in text


def test_a_change_of_entropy_that_means_nothing_does_not_fill_its_chart() -> None:
    axes = new_figure("x")[1]
    axes.plot([0, 1], [1.0, 0.997])
    widen(axes, SMALLEST_SPAN["actor/entropy"])
    low, high = axes.get_ylim()
    assert high - low == pytest.approx(0.5) and low < 0.997 < 1.0 < high
    axes = new_figure("x")[1]
    axes.plot([0, 1], [1.0, 0.0])
    before = axes.get_ylim()
    widen(axes, SMALLEST_SPAN["actor/entropy"])
    assert axes.get_ylim() == before


def test_the_markup_is_whole(report: Path) -> None:
    class Checker(HTMLParser):
        void = {"meta", "br", "path", "use", "rect", "line", "circle", "link"}
        open: list[str] = []

        def handle_starttag(self, tag, attrs):
            if tag not in self.void:
                self.open.append(tag)

        def handle_endtag(self, tag):
            if tag not in self.void:
                assert self.open.pop() == tag

    checker = Checker()
    checker.feed(report.read_text())
    assert checker.open == []


@pytest.mark.parametrize(
    "name", ["a|b `c`", "<script>alert(1)</script>", 'x"><img src=y onerror=z>', "a\n\n# b", "$x^", "\udcff"]
)
def test_names_add_no_markup(name: str, tmp_path: Path) -> None:
    """Of suites, tasks, policies and protocols, in the page and in the Markdown next to the figures."""
    plain, nasty = (findings(text) for text in ("name", name))
    markdown = as_markdown(nasty)
    assert len(markdown.splitlines()) == len(as_markdown(plain).splitlines())
    assert "<" not in markdown.replace("&lt;", "")
    page = write_report(tmp_path, nasty).read_text(encoding="utf-8")
    tags = [len(re.findall("<[a-z/!]", text)) for text in (page, write_report(tmp_path, plain).read_text())]
    assert tags[0] == tags[1] and "<script" not in page and "<img" not in page


def findings(name: str) -> EvaluationReport:
    """An evaluation in two suites with a baseline, in which everything has this name."""
    evaluations = {}
    for suite in (name, f"{name} 2"):
        own, base = evaluation(name, 12), evaluation(f"{name} base", 8)
        for part in (own, base):
            task = replace(part.results[0].tasks[0], name=name)
            part.results[0] = replace(part.results[0], tasks=(task, replace(task, task_id=1)), protocol=name)
            part.trained_on, part.versions = name, {name: name}
        evaluations[suite] = SuiteEvaluation.of(own, [base])
    return EvaluationReport.of(evaluations)


def test_a_policy_without_a_run_has_no_curves(tmp_path: Path) -> None:
    alone = SuiteEvaluation.of(evaluation(str(tmp_path / "policy"), 20))
    text = write_report(tmp_path / "report", EvaluationReport.of({"toy_reach": alone})).read_text()
    assert "<svg" not in text and "<video" not in text and "100.0 %" in text
    assert learning_charts([]) == []


def test_counters_of_a_source_are_not_rewards() -> None:
    names = ("total", "success", "success_regressions", "rm", "rm_progress", "rm_model", "own", "own_calls")
    records = [{"step": 1, "rollout/success_at_end": 0.5} | {f"reward/{name}": 1.0 for name in names}]
    assert _reward_sources(records) == ["total", "own", "rm", "rm_model", "success"]


def test_a_source_equal_to_the_total_has_no_separate_curve() -> None:
    records = [
        {"step": i, "rollout/success_at_end": 0.5, "total/episodes": 8.0 * i}
        | {"reward/total": 0.1 * i, "reward/success": 0.1 * i, "reward/own": 0.0}
        for i in (1, 2)
    ]
    assert _reward_series(records) == {"total = success": "reward/total", "own": "reward/own"}
    for record in records:
        del record["reward/own"]
    assert learning_charts(records)[1].title == "reward per episode: total = success"
    records[1]["reward/total"] = 0.3
    assert list(_reward_series(records)) == ["total", "success"]


def test_curves_are_reproducible_and_skip_missing_scalars() -> None:
    records = [{"step": 1, "rollout/success_at_end": 0.5, "total/episodes": 8.0, "actor/entropy": 1.0}]
    first, second = learning_charts(records), learning_charts(records)
    assert [c.title for c in first] == ["success at end", "entropy of the policy"] and first == second
    only_evaluated = learning_charts([{"step": 0, "eval/success_at_end": 0.0, "eval/n": 5.0, "total/episodes": 0.0}])
    assert [c.title for c in only_evaluated] == ["success at end"] and "evaluation" in only_evaluated[0].svg


def test_tasks_by_episodes_are_a_matrix() -> None:
    played = [{"step": i, "rollout/success_at_end": 0.5, "total/episodes": 8.0 * i} for i in (1, 2, 3)]
    assert [c.title for c in learning_charts(played)] == ["success at end"]
    of_tasks = [record | {"rollout_tasks/push": 0.5} for record in played]
    of_tasks[1]["rollout_tasks/reach"] = 1.0
    (_, matrix) = learning_charts(of_tasks)
    assert "each task" in matrix.title and "push" in matrix.svg and "reach" in matrix.svg
    of_tasks[1]["rollout_tasks/reach"] = 0.0
    assert learning_charts(of_tasks)[1].svg != matrix.svg


def test_names_of_tasks_are_no_formulas() -> None:
    played = [{"step": 1, "rollout/success_at_end": 0.5, "total/episodes": 8.0, "rollout_tasks/a$x^$b": 0.5}]
    assert "a$x^$b" in learning_charts(played)[1].svg


def test_names_of_tasks_fit_and_stay_apart() -> None:
    assert _short_names(["push", "reach"]) == ["push", "reach"]
    places = ("_next_to_the_ramekin", "_in_the_top_drawer_of_the_wooden_cabinet", "_on_the_stove", "")
    names = [f"pick_up_the_black_bowl{place}_and_place_it_on_the_plate" for place in places]
    short = _short_names(names)
    assert len(set(short)) == len(names) and max(map(len, short)) <= 34
    assert len(set(_short_names(["a" * 40 + c for c in "xyz"] + ["a" * 40]))) == 4


def test_the_curve_shows_intervals_clustered_by_state() -> None:
    record = {"step": 0, "eval/success_at_end": 0.5, "eval/n": 40.0, "total/episodes": 0.0}
    clustered = record | {"eval/success_at_end_low": 0.1, "eval/success_at_end_high": 0.9}
    assert interval_of_metrics(record) == wilson_interval(20, 40)
    assert interval_of_metrics(clustered) == (0.1, 0.9)
    assert learning_charts([record])[0].svg != learning_charts([clustered])[0].svg


def test_several_episodes_per_state_are_reported_alike_everywhere(tmp_path: Path) -> None:
    single = evaluation("base", 5)
    outcomes = [EpisodeOutcome(0, s, s % 2 == 0 and k > 1, True, 9, sample=k) for s in range(6) for k in range(4)]
    result = summarize(outcomes, [TASK], "heldout", False, samples=4)
    own = replace(single, policy="own", results=[result], protocols={"sampled": single.protocols["greedy"]}, videos={})
    findings = EvaluationReport.of({"toy_reach": SuiteEvaluation.of(own)})
    page, markdown = write_report(tmp_path, findings).read_text(), as_markdown(findings)
    for text in (page, markdown, result.as_table()):
        assert f"4 episodes per initial state, pass@4 {result.pass_at_k}" in text
        assert "clustered by initial state" in text and "Wilson" not in text
    findings = EvaluationReport.of({"toy_reach": SuiteEvaluation.of(single)})
    for text in (write_report(tmp_path, findings).read_text(), as_markdown(findings)):
        assert "Wilson" in text and "pass@" not in text and "clustered" not in text


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
@pytest.mark.parametrize("width", [375, 1280])
def test_a_browser_renders_it(report: Path, tmp_path: Path, width: int) -> None:
    """Measured from a page around it: nothing sticks out sideways, curves have a size, the video can be played."""
    page = tmp_path / "around.html"
    page.write_text(
        f"""<iframe id=f src="report/report.html" width={width} height=900 style="border:0"></iframe><p id=out></p>
        <script>
        document.getElementById('f').onload = async event => {{
          const inner = event.target.contentDocument, root = inner.documentElement, video = inner.querySelector('video')
          const ready = () => video.readyState > 0 || video.error
          for (let i = 0; i < 100 && !ready(); i++) await new Promise(r => setTimeout(r, 50))
          const sizes = [...inner.querySelectorAll('svg')].map(s => s.getBoundingClientRect())
          document.getElementById('out').textContent = JSON.stringify({{
            scroll: root.scrollWidth, height: root.scrollHeight,
            smallest: Math.min(...sizes.map(s => Math.min(s.width, s.height))),
            widest: Math.max(...sizes.map(s => s.width)), video: video.videoWidth,
            below: video.clientHeight - video.clientWidth * video.videoHeight / video.videoWidth,
            loaded: event.target.contentWindow.performance.getEntriesByType('resource').length}})
        }}
        </script>"""
    )
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--disable-dev-shm-usage"]
    command = [BROWSER, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
    match = re.search(r'<p id="out">(\{.*?\})</p>', done.stdout)
    assert match, done.stdout[-500:] + done.stderr[-500:]
    measured = json.loads(match[1])
    assert measured["scroll"] <= width, "the page can be moved sideways"
    assert measured["smallest"] > 100 and measured["widest"] <= width and measured["height"] > 1000
    pytest.importorskip("av", reason="the video of this test was not made: needs PyAV, the extra rlvla[video]")
    assert measured["video"] == 64 and 60 < measured["below"] < 80, "the controls have a bar below the picture"


TOY = list_tasks("toy_reach")[0]
TASKS = [TOY, replace(TOY, task_id=1, name="other")]


def result(*successes: str, samples: int = 1) -> EvalResult:
    """Outcomes of each task, "1" for success; the samples of a state follow each other."""
    outcomes = [
        EpisodeOutcome(task, i // samples, s == "1", True, 5, sample=i % samples)
        for task, row in enumerate(successes)
        for i, s in enumerate(row)
    ]
    return summarize(outcomes, TASKS[: len(successes)], "heldout", samples == 1, samples=samples)


def test_each_state_is_won_lost_or_alike() -> None:
    grid = won_and_lost(result("1100", "1"), result("1010", "0"))
    assert grid.rows == {"reach": [(0, "both"), (1, "won"), (2, "lost"), (3, "neither")], "other": [(0, "won")]}
    assert {kind: count for kind, _, _, count in grid.legend} == {"won": 2, "lost": 1, "both": 1, "neither": 1}


def test_only_common_states_count() -> None:
    assert won_and_lost(result("111"), result("0")).rows == {"reach": [(0, "won")]}


def test_several_samples_of_a_state() -> None:
    grid = solved(result("110100", samples=2))
    assert grid.rows == {"reach": [(0, "both"), (1, "partly"), (2, "neither")]}


def test_too_many_states_are_left_out(monkeypatch) -> None:
    monkeypatch.setattr(report_page, "_MOST_CELLS", 2)
    assert solved(result("11")) is not None and solved(result("111")) is None


def test_results_from_elsewhere_show_no_other_file(tmp_path: Path) -> None:
    """A page embeds the videos that a file of results names."""
    (tmp_path / "id_rsa").write_text("private")
    (tmp_path / "other.mp4").write_text("private")
    folder = tmp_path / "downloaded"
    folder.mkdir()
    (folder / "link.mp4").symlink_to(tmp_path / "id_rsa")
    (folder / "notes.txt").write_text("private")
    videos = [
        folder / "own.mp4",
        folder / "link.mp4",
        folder / "notes.txt",
        tmp_path / "id_rsa",
        tmp_path / "other.mp4",
    ]
    videos.append(folder / ".." / "other.mp4")
    (folder / "eval.json").write_text(json.dumps(evaluation("other", 18, videos).as_dict()))
    assert PolicyEvaluation.read(folder / "eval.json").videos == {"greedy": [folder / "own.mp4"]}
