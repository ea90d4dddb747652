"""Evaluations in the store: recorded once, kept as long as their subject, and never of what was taken down."""

import copy
import json
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from rag_model.digest import digest_file
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
    RecordedEvaluation,
    export_evaluation,
    find_evaluation,
    list_evaluations,
    record_evaluation,
)
from rag_model.store.versions.models import ModelMetadata, put_model
from rag_model.store.versions.moves import rollback, tag, untag
from rag_model.store.versions.signatures import SIGNING_KEY_VARIABLE

AT_ONCE = ExpirePolicy(keep=1, older_than=0)
QUESTIONS = f"sha256:{'0' * 64}"
FIGURES = {"hnsw": {"Success@20": MetricValue(0.5, 0.4, 0.6), "recall@5": MetricValue(1.0)}}
Record = Callable[..., RecordedEvaluation]


@pytest.fixture
def store(local_store: Store) -> Store:
    return local_store


@pytest.fixture(params=["local", "memory", "s3"])
def any_store(request: pytest.FixtureRequest) -> Store:
    if request.param == "s3":
        return Store.open(request.getfixturevalue("s3_store_url"), create=True)
    found: Store = request.getfixturevalue(f"{request.param}_store")
    return found


@pytest.fixture
def latest(store: Store, publish: Callable[..., str]) -> Callable[[int], str]:
    """Publish a snapshot, one for each number, and move `latest` to it."""

    def latest(number: int) -> str:
        snapshot = publish(store, number=number)
        tag(store, snapshot, "latest")
        return snapshot

    return latest


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "1"}\n')
    return path


@pytest.fixture
def put(rows: Path) -> Record:
    """Record an evaluation of a snapshot, with settings."""

    def put(store: Store, snapshot: str, model: str = "", **settings: Any) -> RecordedEvaluation:
        subject = EvaluationSubject(snapshot, model, QUESTIONS, settings)
        return record_evaluation(store, subject, FIGURES, {"rows.jsonl": rows}, {"created_at": "2026-01-01"})

    return put


@pytest.fixture
def model(store: Store, tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return put_model(store, folder, ModelMetadata("rag-sequence", None, {}), "reader").model


def test_it_is_recorded_once(any_store: Store, publish: Callable[..., str], put: Record) -> None:
    snapshot = publish(any_store)
    first = put(any_store, snapshot, k=20)
    assert (first.is_new, put(any_store, snapshot, k=20)) == (True, RecordedEvaluation(first.evaluation, False))
    other = put(any_store, snapshot, k=5)
    assert any_store.evaluations.list_ids() == sorted([first.evaluation, other.evaluation])
    found = find_evaluation(any_store, EvaluationSubject(snapshot, "", QUESTIONS, {"k": 20}))
    assert found is not None
    assert found.content.metrics == FIGURES
    assert any_store.evaluations.resolve(first.evaluation[:8]) == first.evaluation
    assert verify_version(any_store, first.evaluation, any_store.evaluations) == []
    assert {evaluation.id for evaluation in list_evaluations(any_store, snapshot)} == {
        first.evaluation,
        other.evaluation,
    }
    assert list_evaluations(any_store, "0" * 64) == []
    assert sum(tally.files for tally in collect_garbage(any_store, 0.0).values()) == 0


def test_one_whose_files_are_lost_is_not_known_and_made_again(
    store: Store, publish: Callable[..., str], put: Record, rows: Path
) -> None:
    made = put(store, publish(store), k=1)
    manifest = store.evaluations.get(made.evaluation)
    store.files.remove(manifest.content.files["rows.jsonl"].path)
    assert find_evaluation(store, manifest.content.subject) is None
    assert put(store, manifest.content.subject.snapshot, k=1) == RecordedEvaluation(
        made.evaluation, False
    )  # the same bytes
    assert find_evaluation(store, manifest.content.subject) == manifest
    store.files.remove(manifest.content.files["rows.jsonl"].path)
    rows.write_text("other rows\n")
    assert put(store, manifest.content.subject.snapshot, k=1) == RecordedEvaluation(made.evaluation, True)
    again = find_evaluation(store, manifest.content.subject)
    assert again is not None
    assert again.content.files != manifest.content.files


def test_of_two_writers_one_is_kept(store: Store, publish: Callable[..., str], put: Record, rows: Path) -> None:
    made = put(store, publish(store), k=1)
    rows.write_text("other rows\n")
    subject = store.evaluations.get(made.evaluation).content.subject
    assert not record_evaluation(store, subject, {}, {"rows.jsonl": rows}, {}).is_new
    assert not store.blobs.exists(BlobRef(digest_file(rows), rows.stat().st_size)), "nothing is written"
    assert store.evaluations.get(made.evaluation).content.metrics == FIGURES


def test_it_goes_with_its_snapshot_or_its_model(
    store: Store, latest: Callable[[int], str], put: Record, model: str
) -> None:
    old = latest(1)
    kept = latest(2)
    doomed = {put(store, old, k=1).evaluation, put(store, old, model, k=1).evaluation}
    stays = put(store, kept, k=1).evaluation
    with_model = put(store, kept, model, k=1).evaluation
    untag(store, "model:reader")
    told = expire_store(store, AT_ONCE, dry_run=True)
    assert set(told.evaluations) == {*doomed, with_model}
    assert len(store.evaluations.list_ids()) == 4
    assert expire_store(store, AT_ONCE) == told
    assert store.evaluations.list_ids() == [stays]
    assert expire_store(store, AT_ONCE).evaluations == ()
    assert verify_version(store, stays, store.evaluations) == []
    tag(store, kept, "paper")
    collect_garbage(store, 0.0)
    assert verify_version(store, stays, store.evaluations) == []


def test_gc_deletes_the_files_and_the_signature_of_what_expired(
    store: Store, latest: Callable[[int], str], put: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    _sign(monkeypatch)
    old = latest(1)
    latest(2)
    made = put(store, old, k=1)
    rows = store.evaluations.get(made.evaluation).content.files["rows.jsonl"]
    assert store.evaluations.has_trusted_signature(made.evaluation)
    expire_store(store, AT_ONCE)
    collect_garbage(store, 0.0)
    assert not store.blobs.exists(rows)
    assert list(store.files.iter_tree("evaluations")) == []


def test_nothing_is_left_or_recorded_of_what_was_taken_down(
    store: Store, latest: Callable[[int], str], put: Record
) -> None:
    old = latest(1)
    place = latest(2)
    made, other = put(store, old, k=1), put(store, place, k=1)
    store.takedowns.record_replacement(old, place)
    assert retire_replaced(store).evaluations == (made.evaluation,)
    assert store.evaluations.list_ids() == [other.evaluation]
    with pytest.raises(NotFoundError, match="was taken down: use snapshot"):
        put(store, old, k=1)
    assert store.evaluations.list_ids() == [other.evaluation]


def test_a_takedown_that_came_between_wins(
    store: Store, latest: Callable[[int], str], put: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The takedown looked for evaluations before this one was written."""
    old = latest(1)
    place = latest(2)
    created = store.files.create

    def create(path: str, data: bytes) -> bool:
        done = created(path, data)
        if path.startswith("evaluations/"):
            store.takedowns.record_replacement(old, place)
        return done

    monkeypatch.setattr(store.files, "create", create)
    with pytest.raises(NotFoundError, match="was taken down"):
        put(store, old, k=1)
    assert store.evaluations.list_ids() == []


def test_a_strangers_figures_are_not_signed_but_replaced(
    store: Store, publish: Callable[..., str], put: Record, monkeypatch: pytest.MonkeyPatch, rows: Path
) -> None:
    snapshot = publish(store)
    subject = EvaluationSubject(snapshot, "", QUESTIONS, {"k": 1})
    stranger = record_evaluation(store, subject, {"hnsw": {"Success@20": MetricValue(1.0)}}, {"rows.jsonl": rows}, {})
    _sign(monkeypatch)
    assert put(store, snapshot, k=1) == RecordedEvaluation(stranger.evaluation, True)
    assert store.evaluations.get(stranger.evaluation).content.metrics == FIGURES
    assert store.evaluations.has_trusted_signature(stranger.evaluation)
    assert put(store, snapshot, k=1) == RecordedEvaluation(stranger.evaluation, False)


def test_it_has_no_refs_and_is_not_pulled(
    store: Store, publish: Callable[..., str], put: Record, tmp_path: Path
) -> None:
    made = f"evaluation:{put(store, publish(store), k=1).evaluation}"
    with pytest.raises(UsageError, match="evaluations have no refs"):
        tag(store, made, "best")
    with pytest.raises(StoreError, match="has no history"):
        rollback(store, made)
    with pytest.raises(UsageError, match="cannot be pulled: export it"):
        pull(store, made, tmp_path / "here")
    with pytest.raises(UsageError, match="show, verify, diff and export accept evaluations"):
        store.snapshots.resolve(made)
    report = export_evaluation(store, made.partition(":")[2], tmp_path / "out")
    assert (tmp_path / "out" / "rows.jsonl").read_text() == '{"id": "1"}\n'
    assert report.bytes == 12


@pytest.mark.parametrize("data", [b"{}", b"{", b""])
def test_a_damaged_one_stops_expire_until_its_file_is_deleted(
    store: Store, publish: Callable[..., str], put: Record, data: bytes
) -> None:
    snapshot = publish(store)
    path = store.evaluations.manifest_path(put(store, snapshot, k=1).evaluation)
    store.files.write(path, data)
    told = rf"{path} cannot be used: [^;]+; delete this file, and evaluate again$"
    with pytest.raises(StoreError, match=told):
        expire_store(store, AT_ONCE)
    with pytest.raises(StoreError, match=told):
        collect_garbage(store, 0.0)
    store.files.remove(path)
    assert put(store, snapshot, k=1).is_new
    collect_garbage(store, 0.0)


def test_one_of_a_newer_format_is_not_to_be_deleted(store: Store, publish: Callable[..., str], put: Record) -> None:
    path = store.evaluations.manifest_path(put(store, publish(store), k=1).evaluation)
    store.files.write(path, json.dumps({**(store.files.read_json(path) or {}), "format": 99}).encode())
    with pytest.raises(StoreError, match=r"upgrade bookwheel$"):
        collect_garbage(store, 0.0)


@pytest.mark.parametrize(
    ("path", "value", "why"),
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
def test_what_bookwheel_did_not_write_is_refused(path: tuple[str, ...], value: Any, why: str) -> None:
    sound = EvaluationManifest(
        EvaluationContent(EvaluationSubject("a" * 64, "", QUESTIONS, {"k": 1}), FIGURES, {})
    ).to_json()
    assert EvaluationManifest.from_json(json.loads(json.dumps(sound))).id == sound["id"]
    broken: Any = copy.deepcopy(sound)
    place = broken
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(StoreError, match=why):
        EvaluationManifest.from_bytes(json.dumps(broken).encode())


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner)))
def test_anything_else_is_one_error(value: Any) -> None:
    with pytest.raises(StoreError):
        EvaluationManifest.from_bytes(json.dumps(value).encode())


def test_with_a_trust_file_an_unsigned_one_is_not_known(
    store: Store, publish: Callable[..., str], put: Record, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = put(store, publish(store), k=1)
    subject = store.evaluations.get(made.evaluation).content.subject
    public = Ed25519PrivateKey.generate().public_key()
    der = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "trusted").write_text(f"library {b64encode(der).decode()}\n")
    monkeypatch.setenv("BOOKWHEEL_TRUST", str(tmp_path / "trusted"))
    assert find_evaluation(store, subject) is None
    with pytest.raises(RefusedError, match="is not signed by a key"):
        export_evaluation(store, made.evaluation, tmp_path / "out")


def _sign(monkeypatch: pytest.MonkeyPatch) -> None:
    pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    monkeypatch.setenv(SIGNING_KEY_VARIABLE, pem.decode())
