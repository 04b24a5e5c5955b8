"""Journals of interrupted evaluations: complete lines count, torn ones do not, other evaluations never see them."""

from __future__ import annotations

from pathlib import Path

from rlvla.evaluation.journal import EpisodeJournal, fingerprint, journal_folder, remove_journals
from rlvla.evaluation.results import EpisodeOutcome

FIRST, SECOND = EpisodeOutcome(0, 8000, True, True, 9, 1), EpisodeOutcome(1, 8001, False, True, 12)


def test_ranks_write_apart_and_read_together(tmp_path: Path) -> None:
    here, there = (EpisodeJournal(tmp_path, {"policy": "a"}, rank) for rank in (0, 1))
    assert here.read() == []
    here.append(FIRST)
    there.append(SECOND)
    there.append(FIRST)
    assert here.read() == there.read() == [FIRST, SECOND]
    assert EpisodeJournal(tmp_path, {"policy": "b"}).read() == []


def test_a_torn_line_is_lost_alone(tmp_path: Path) -> None:
    journal = EpisodeJournal(tmp_path, {})
    journal.append(FIRST)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes() + b'{"task_id": 1, "init')
    assert journal.read() == [FIRST]
    journal.append(SECOND)
    assert journal.read() == [FIRST, SECOND]


def test_journals_lie_beside_the_output_and_go(tmp_path: Path) -> None:
    output = tmp_path / "eval.json"
    EpisodeJournal(journal_folder(output), {}).append(FIRST)
    assert [p.name for p in tmp_path.iterdir()] == [".eval.json.part"]
    remove_journals(output)
    remove_journals(output)
    assert list(tmp_path.iterdir()) == []


def test_a_changed_checkpoint_has_another_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = fingerprint(tmp_path)
    (tmp_path / "eval.json").write_text("{}")
    assert fingerprint(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    assert fingerprint(tmp_path) != before
