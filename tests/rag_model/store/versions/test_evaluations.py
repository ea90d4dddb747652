"""Evaluations are recorded once, kept as long as their subject, and deleted by a takedown."""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_model.digest import digest_bytes
from rag_model.errors import NotFoundError, RefusedError, StoreError, UsageError
from rag_model.store import BlobRef, Store
from rag_model.store.pulling.pull import pull
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.retire import retire_replaced
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.evaluation_manifest import (
    EvaluationContent,
    EvaluationManifest,
    EvaluationSubject,
    MetricValue,
)
from rag_model.store.versions.evaluations import (
    PROVISIONAL_KEY,
    RecordedEvaluation,
    export_evaluation,
    find_evaluation,
    list_evaluations,
    record_evaluation,
)
from rag_model.store.versions.moves import rollback, tag, untag
from rag_model.store.versions.signatures import SIGNING_KEY_VARIABLE, TRUST_VARIABLE
from tests.fixtures.publisher import Publisher
from tests.fixtures.store_files import publish_empty, publish_latest, put_weights, replace_value

IMMEDIATELY = ExpirePolicy(keep=1, older_than=0)
QUESTIONS = f"sha256:{'0' * 64}"
ROWS = '{"id": "1"}\n'
METRICS = {"hnsw": {"Success@20": MetricValue(0.5, 0.4, 0.6), "recall@5": MetricValue(1.0)}}


def record_metrics(
    store: Store,
    snapshot: str,
    model: str = "",
    *,
    metrics: Mapping[str, Mapping[str, MetricValue]] = METRICS,
    rows: str = ROWS,
    n_provisional_answers: int = 0,
    **settings: Any,
) -> RecordedEvaluation:
    """Record an evaluation of a snapshot with the given settings."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text(rows)
        subject = EvaluationSubject(snapshot, model, QUESTIONS, settings)
        provenance = {"created_at": "2026-01-01", PROVISIONAL_KEY: n_provisional_answers}
        return record_evaluation(store, subject, metrics, {"rows.jsonl": path}, provenance)


def test_evaluation_is_recorded_once(any_store: Store) -> None:
    snapshot = publish_empty(any_store)
    first = record_metrics(any_store, snapshot, k=20)
    assert first.is_new
    assert record_metrics(any_store, snapshot, k=20) == RecordedEvaluation(first.evaluation, False)
    ids = sorted([first.evaluation, record_metrics(any_store, snapshot, k=5).evaluation])
    assert any_store.evaluations.list_ids() == ids
    manifest = find_evaluation(any_store, EvaluationSubject(snapshot, "", QUESTIONS, {"k": 20}))
    assert manifest is not None
    assert manifest.content.metrics == METRICS
    assert any_store.evaluations.resolve(first.evaluation[:8]) == first.evaluation
    assert verify_version(any_store, first.evaluation, any_store.evaluations) == []
    assert sorted(evaluation.id for evaluation in list_evaluations(any_store, snapshot)) == ids
    assert list_evaluations(any_store, "0" * 64) == []
    assert sum(tally.files for tally in collect_garbage(any_store, 0.0).values()) == 0


def test_evaluation_with_missing_files_is_recorded_again(store: Store) -> None:
    snapshot = publish_empty(store)
    recorded = record_metrics(store, snapshot, k=1)
    manifest = store.evaluations.get(recorded.evaluation)
    store.files.remove(manifest.content.files["rows.jsonl"].path)
    assert find_evaluation(store, manifest.content.subject) is None
    again = record_metrics(store, snapshot, k=1)
    assert again == RecordedEvaluation(recorded.evaluation, False), "the files have the same bytes"
    assert find_evaluation(store, manifest.content.subject) == manifest
    store.files.remove(manifest.content.files["rows.jsonl"].path)
    again = record_metrics(store, snapshot, rows="other rows\n", k=1)
    assert again == RecordedEvaluation(recorded.evaluation, True)
    second_manifest = find_evaluation(store, manifest.content.subject)
    assert second_manifest is not None
    assert second_manifest.content.files != manifest.content.files


@pytest.mark.parametrize("is_signed", [False, True])
def test_evaluation_with_provisional_answers_is_replaced(
    store: Store, monkeypatch: pytest.MonkeyPatch, is_signed: bool
) -> None:
    if is_signed:
        monkeypatch.setenv(SIGNING_KEY_VARIABLE, Publisher("library").pem)
    snapshot = publish_empty(store)
    provisional = record_metrics(store, snapshot, metrics={}, rows="", n_provisional_answers=2, k=1)
    assert find_evaluation(store, EvaluationSubject(snapshot, "", QUESTIONS, {"k": 1})) is None
    assert record_metrics(store, snapshot, k=1) == RecordedEvaluation(provisional.evaluation, True)
    assert store.evaluations.get(provisional.evaluation).content.metrics == METRICS
    assert store.evaluations.has_trusted_signature(provisional.evaluation) == is_signed
    assert not record_metrics(store, snapshot, n_provisional_answers=2, k=1).is_new


def test_first_of_two_writers_is_kept(store: Store) -> None:
    snapshot = publish_empty(store)
    recorded = record_metrics(store, snapshot, k=1)
    assert not record_metrics(store, snapshot, metrics={}, rows="other rows\n", k=1).is_new
    assert not store.blobs.exists(BlobRef(digest_bytes(b"other rows\n"), 11)), "the second writer stores no files"
    assert store.evaluations.get(recorded.evaluation).content.metrics == METRICS


def test_evaluation_expires_with_its_snapshot_or_model(store: Store) -> None:
    old, kept_snapshot, model = publish_latest(store, "1"), publish_latest(store, "2"), put_weights(store).model
    expired = {record_metrics(store, old, k=1).evaluation, record_metrics(store, old, model, k=1).evaluation}
    remaining = record_metrics(store, kept_snapshot, k=1).evaluation
    with_model = record_metrics(store, kept_snapshot, model, k=1).evaluation
    untag(store, "model:reader")
    report = expire_store(store, IMMEDIATELY, dry_run=True)
    assert set(report.evaluations) == {*expired, with_model}
    assert len(store.evaluations.list_ids()) == 4
    assert expire_store(store, IMMEDIATELY) == report
    assert store.evaluations.list_ids() == [remaining]
    assert expire_store(store, IMMEDIATELY).evaluations == ()
    assert verify_version(store, remaining, store.evaluations) == []
    tag(store, kept_snapshot, "paper")
    collect_garbage(store, 0.0)
    assert verify_version(store, remaining, store.evaluations) == []


def test_gc_deletes_files_and_signature_of_expired_evaluation(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIGNING_KEY_VARIABLE, Publisher("library").pem)
    recorded = record_metrics(store, publish_latest(store, "1"), k=1)
    publish_latest(store, "2")
    rows = store.evaluations.get(recorded.evaluation).content.files["rows.jsonl"]
    assert store.evaluations.has_trusted_signature(recorded.evaluation)
    expire_store(store, IMMEDIATELY)
    collect_garbage(store, 0.0)
    assert not store.blobs.exists(rows)
    assert list(store.files.iter_tree("evaluations")) == []


def test_takedown_deletes_evaluations_and_refuses_new_ones(store: Store) -> None:
    old, replacement = publish_latest(store, "1"), publish_latest(store, "2")
    evaluation, other_evaluation = record_metrics(store, old, k=1), record_metrics(store, replacement, k=1)
    store.takedowns.record_replacement(old, replacement)
    assert retire_replaced(store).evaluations == (evaluation.evaluation,)
    assert store.evaluations.list_ids() == [other_evaluation.evaluation]
    with pytest.raises(NotFoundError, match="was taken down: use snapshot"):
        record_metrics(store, old, k=1)
    assert store.evaluations.list_ids() == [other_evaluation.evaluation]


def test_takedown_during_recording_wins(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The takedown has already listed the evaluations when this one is written."""
    old, replacement = publish_latest(store, "1"), publish_latest(store, "2")
    create_file = store.files.create

    def create_after_takedown(path: str, data: bytes) -> bool:
        is_new = create_file(path, data)
        if path.startswith("evaluations/"):
            store.takedowns.record_replacement(old, replacement)
        return is_new

    monkeypatch.setattr(store.files, "create", create_after_takedown)
    with pytest.raises(NotFoundError, match="was taken down"):
        record_metrics(store, old, k=1)
    assert store.evaluations.list_ids() == []


def test_unsigned_evaluation_is_replaced_and_not_signed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = publish_empty(store)
    unsigned = record_metrics(store, snapshot, metrics={"hnsw": {"Success@20": MetricValue(1.0)}}, k=1)
    monkeypatch.setenv(SIGNING_KEY_VARIABLE, Publisher("library").pem)
    assert record_metrics(store, snapshot, k=1) == RecordedEvaluation(unsigned.evaluation, True)
    assert store.evaluations.get(unsigned.evaluation).content.metrics == METRICS
    assert store.evaluations.has_trusted_signature(unsigned.evaluation)
    assert record_metrics(store, snapshot, k=1) == RecordedEvaluation(unsigned.evaluation, False)


def test_evaluation_has_no_refs_and_cannot_be_pulled(store: Store, tmp_path: Path) -> None:
    name = f"evaluation:{record_metrics(store, publish_empty(store), k=1).evaluation}"
    with pytest.raises(UsageError, match="evaluations have no refs"):
        tag(store, name, "best")
    with pytest.raises(StoreError, match="has no history"):
        rollback(store, name)
    with pytest.raises(UsageError, match="cannot be pulled: export it"):
        pull(store, name, tmp_path / "pulled")
    with pytest.raises(UsageError, match="show, verify, diff and export accept evaluations"):
        store.snapshots.resolve(name)
    report = export_evaluation(store, name.partition(":")[2], tmp_path / "out")
    assert (tmp_path / "out" / "rows.jsonl").read_text() == ROWS
    assert report.bytes == 12


@pytest.mark.parametrize("data", [b"{}", b"{", b""])
def test_damaged_evaluation_stops_expire_until_its_file_is_deleted(store: Store, data: bytes) -> None:
    snapshot = publish_empty(store)
    path = store.evaluations.manifest_path(record_metrics(store, snapshot, k=1).evaluation)
    store.files.write(path, data)
    message = rf"{path} cannot be used: [^;]+; delete this file, and evaluate again$"
    with pytest.raises(StoreError, match=message):
        expire_store(store, IMMEDIATELY)
    with pytest.raises(StoreError, match=message):
        collect_garbage(store, 0.0)
    store.files.remove(path)
    assert record_metrics(store, snapshot, k=1).is_new
    collect_garbage(store, 0.0)


def test_evaluation_of_a_newer_format_stops_gc(store: Store) -> None:
    path = store.evaluations.manifest_path(record_metrics(store, publish_empty(store), k=1).evaluation)
    store.files.write(path, json.dumps({**(store.files.read_json(path) or {}), "format": 99}).encode())
    with pytest.raises(StoreError, match=r"upgrade bookwheel$"):
        collect_garbage(store, 0.0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), 2, "has format 2, but this bookwheel reads up to 1: upgrade"),
        (("content", "subject", "snapshot"), "../../x", "bad snapshot"),
        (("content", "subject", "model"), "reader", "bad model"),
        (("content", "subject", "questions"), 3, "bad questions"),
        (("content", "subject", "settings"), {"k": 2}, "its subject hashes to"),
        (("content", "subject", "settings"), [], "bad field 'settings'"),
        (("content", "figures"), {"hnsw": 1}, "bad field 'hnsw'"),
        (("content", "figures"), {"hnsw": {"EM": {"value": "x", "low": None, "high": None}}}, "bad figure"),
        (("content", "figures"), {"hnsw": {"EM": {"value": 1.0}}}, "bad figure"),
        (("content", "files"), {"../x": {"id": QUESTIONS, "size": 1}}, "bad file path"),
        (("provenance",), [], "bad field 'provenance'"),
    ],
)
def test_invalid_evaluation_is_refused(path: tuple[str, ...], value: Any, message: str) -> None:
    valid = EvaluationManifest(
        EvaluationContent(EvaluationSubject("a" * 64, "", QUESTIONS, {"k": 1}), METRICS, {})
    ).to_json()
    assert EvaluationManifest.from_json(json.loads(json.dumps(valid))).id == valid["id"]
    with pytest.raises(StoreError, match=message):
        EvaluationManifest.from_bytes(json.dumps(replace_value(valid, path, value)).encode())


@settings(max_examples=30)
@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner)))
def test_any_other_json_is_a_store_error(value: Any) -> None:
    with pytest.raises(StoreError):
        EvaluationManifest.from_bytes(json.dumps(value).encode())


def test_unsigned_evaluation_is_ignored_with_a_trust_file(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorded = record_metrics(store, publish_empty(store), k=1)
    subject = store.evaluations.get(recorded.evaluation).content.subject
    (tmp_path / "trusted").write_text(Publisher("library").trust_line)
    monkeypatch.setenv(TRUST_VARIABLE, str(tmp_path / "trusted"))
    assert find_evaluation(store, subject) is None
    with pytest.raises(RefusedError, match="is not signed by a key"):
        export_evaluation(store, recorded.evaluation, tmp_path / "out")
