"""With a trust file, only snapshots, moves, models and takedowns signed by a trusted key are accepted."""

import base64
import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from rag_model.errors import RefConflictError, RefusedError, UsageError
from rag_model.snapshots.parent import Parent
from rag_model.snapshots.publish import publish_replacement, replace_snapshot
from rag_model.snapshots.takedown import list_unsigned_replacements
from rag_model.store.objects.files import encode_json
from rag_model.store.pulling.pull import pull
from rag_model.store.store import Store
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.manifest import Manifest
from rag_model.store.versions.models import export_model
from rag_model.store.versions.moves import rollback, tag
from rag_model.store.versions.signatures import SIGNING_KEY_VARIABLE, TRUST_VARIABLE, TrustedKeys
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.machine_requirements import skip_or_fail
from tests.fixtures.publisher import Publisher
from tests.fixtures.store_files import age_files, publish_latest, put_weights

ALICE, MALLORY = Publisher("alice"), Publisher("mallory")


@pytest.fixture
def sign_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[Publisher | None], None]:
    """Return a function that sets the signing key in the environment."""

    def sign_as(person: Publisher | None) -> None:
        monkeypatch.delenv(SIGNING_KEY_VARIABLE, raising=False)
        if person is not None:
            monkeypatch.setenv(SIGNING_KEY_VARIABLE, person.pem)

    return sign_as


@pytest.fixture
def trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that writes a trust file with the keys of publishers, and sets it in the environment."""

    def trust(*publishers: Publisher) -> None:
        lines = [publisher.trust_line for publisher in publishers]
        (tmp_path / "trusted").write_text("".join(["# who may publish\n\n", *lines]))
        monkeypatch.setenv(TRUST_VARIABLE, str(tmp_path / "trusted"))

    return trust


def replace_fields(store: Store, path: str, **changes: object) -> None:
    """Change fields of a JSON file like an attacker with write access to the store."""
    store.files.write(path, encode_json((store.files.read_json(path) or {}) | changes))


def list_signatures(store: Store, ref: str = "latest") -> list[str]:
    return [name for name in store.files.list_names(f"refs/{ref}") if name.endswith(".sig")]


def test_snapshot_signed_by_a_trusted_key_is_opened(store: Store, sign_as, trust, tmp_path: Path) -> None:
    sign_as(ALICE)
    snapshot = publish_latest(store)
    trust(ALICE)
    for name in ("latest", "latest@1", snapshot, snapshot[:12]):
        assert Snapshot.from_store(store, name).id == snapshot
    pull(store, "latest", tmp_path / "pulled")
    assert Snapshot.from_folder(tmp_path / "pulled").id == snapshot
    assert store.snapshots.describe_signature(snapshot) == "signed by alice"
    assert Parent.from_ref(store, "latest").manifest is not None
    assert verify_version(store, snapshot) == []


def test_unsigned_snapshot_is_opened_without_a_trust_file_only(store: Store, sign_as, trust, tmp_path: Path) -> None:
    sign_as(None)
    snapshot = publish_latest(store)
    assert not list((tmp_path / "store").rglob("*.sig"))
    assert store.snapshots.describe_signature(snapshot) == "not signed"
    pull(store, "latest", tmp_path / "pulled")
    trust(ALICE)
    assert store.snapshots.describe_signature(snapshot) == "not signed"
    for name in ("latest", "latest@1", snapshot, snapshot[:12]):
        with pytest.raises(RefusedError, match=r"is not signed by a key of .*trusted, or was changed since: ask"):
            Snapshot.from_store(store, name)
        with pytest.raises(RefusedError, match="is not signed"):
            pull(store, name, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(RefusedError, match="is not signed"):
        Snapshot.from_folder(tmp_path / "pulled")
    with pytest.raises(RefusedError, match=r"`tag latest@NUMBER latest` moves the ref back to a signed snapshot"):
        Parent.from_ref(store, "latest")


def test_pull_replaces_a_snapshot_that_is_not_trusted(store: Store, sign_as, trust, tmp_path: Path) -> None:
    """No open descriptor keeps the untrusted snapshot from being deleted."""
    dest = tmp_path / "pulled"
    sign_as(None)
    unsigned = publish_latest(store, "a")
    pull(store, "latest", dest)
    sign_as(ALICE)
    signed = publish_latest(store, "b")
    trust(ALICE)
    assert pull(store, "latest", dest).snapshot == Snapshot.from_folder(dest).id == signed
    n_descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(RefusedError, match="is not signed"):
            Snapshot.from_folder(dest / unsigned)
    assert len(list(Path("/proc/self/fd").iterdir())) == n_descriptors
    assert pull(store, "latest", dest, keep_snapshots=1).pruned == (unsigned,)


def test_snapshot_that_was_pulled_before_it_was_signed_is_trusted_after_another_pull(
    store: Store, sign_as, trust, tmp_path: Path
) -> None:
    sign_as(None)
    snapshot = publish_latest(store)
    pull(store, "latest", tmp_path / "pulled")
    sign_as(ALICE)
    tag(store, snapshot, "latest")
    trust(ALICE)
    pull(store, "latest", tmp_path / "pulled")
    assert Snapshot.from_folder(tmp_path / "pulled").id == snapshot


def test_untrusted_signature_is_refused_and_can_be_supplemented(
    store: Store,
    sign_as,
    trust,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sign_as(MALLORY)
    snapshot = publish_latest(store)
    assert store.snapshots.describe_signature(snapshot) == "signed, unchecked: no trust file is given"
    trust(ALICE)
    assert store.snapshots.describe_signature(snapshot) == "signed, but by no key of the trust file"
    with pytest.raises(RefusedError, match="is not signed by a key"):
        Snapshot.from_store(store)
    sign_as(ALICE)  # a tag without a trust file signs the existing snapshot, and adds a signed move
    with pytest.raises(RefusedError, match="is not signed by a key"):
        tag(store, snapshot, "latest")
    monkeypatch.delenv(TRUST_VARIABLE)
    assert [tag(store, snapshot, "latest").number for _ in range(2)] == [2, 2]
    trust(ALICE)
    signers = [store.refs.find_signer(TrustedKeys.from_environment(), "latest", number) for number in (1, 2)]
    assert signers == [None, "alice"], "the move signed by mallory stays untrusted"
    assert Snapshot.from_store(store).id == snapshot
    trust(MALLORY, ALICE)
    assert store.snapshots.describe_signature(snapshot) == "signed by mallory"


@pytest.mark.parametrize("change", ["number", "ref", "snapshot", "created_at", "note", "previous", "nonce", "format"])
def test_signature_of_a_move_is_valid_for_this_move_only(store: Store, sign_as, trust, change: str) -> None:
    sign_as(ALICE)
    first, second = publish_latest(store), publish_latest(store, "2")
    trust(ALICE)
    sign_as(None)
    folder, path = store.files.local_path("refs"), "refs/latest/00000002.json"
    assert Snapshot.from_store(store).id == second
    if change == "number":  # copies the older move and its signature as the newest
        for file in (folder / "latest").glob("00000001*"):
            shutil.copy(file, folder / "latest" / file.name.replace("00000001", "00000003"))
        replace_fields(store, "refs/latest/00000003.json", number=3)
    elif change == "ref":
        shutil.copytree(folder / "latest", folder / "other")
    else:
        values = {"snapshot": first, "nonce": "0" * 32, "previous": None, "format": 2}
        replace_fields(store, path, **{change: values.get(change, "2027-01-01T00:00:00+00:00")})
    with pytest.raises(RefusedError, match=r"the move .*@[23] in .* is not signed"):
        Snapshot.from_store(store, "other" if change == "ref" else "latest")


@pytest.mark.parametrize("field", ["metrics", "provenance"])
def test_manifest_with_changed_metrics_or_provenance_is_refused(store: Store, sign_as, trust, field: str) -> None:
    sign_as(ALICE)
    snapshot = publish_latest(store)
    trust(ALICE)
    path = store.snapshots.manifest_path(snapshot)
    replace_fields(store, path, **{field: {"made": "up"}})
    with pytest.raises(RefusedError, match=f"snapshot {snapshot[:12]} in .* was changed since"):
        Snapshot.from_store(store)
    signature = next(store.files.local_path("snapshots").glob("*.sig"))
    for damaged in (b"", b"[]", b'{"signature": 1}', b'{"signature": "!"}', b"\xff", b'{"signature": "AAAA"}'):
        signature.write_bytes(damaged)
        with pytest.raises(RefusedError, match="is not signed"):
            Snapshot.from_store(store)


def test_second_writer_signs_the_existing_manifest(store: Store, sign_as, trust) -> None:
    sign_as(None)
    snapshot = publish_latest(store)
    manifest_bytes = store.files.read(store.snapshots.manifest_path(snapshot))
    sign_as(ALICE)
    store.snapshots.publish(store.snapshots.get(snapshot))
    assert store.files.read(store.snapshots.manifest_path(snapshot)) == manifest_bytes
    trust(ALICE)
    assert store.snapshots.resolve_trusted(snapshot) == snapshot


@pytest.mark.parametrize("has_trust_file", [True, False])
def test_replacement_is_signed_only_if_the_replaced_snapshot_was(
    store: Store, sign_as, trust, has_trust_file: bool
) -> None:
    sign_as(ALICE)
    signed_id = publish_latest(store)
    sign_as(None)
    unsigned_id = publish_latest(store, "2")
    store.refs.move("alias", signed_id, 0)  # an unsigned move to a signed snapshot
    sign_as(ALICE)
    store.refs.move("main", signed_id, 0)
    if has_trust_file:
        trust(ALICE)
    contents = [store.snapshots.get(snapshot_id).content for snapshot_id in (signed_id, unsigned_id)]
    replacements = [Manifest(replace(content, recipe={"without": "a page"} | content.recipe)) for content in contents]
    for old, replacement in zip((signed_id, unsigned_id), replacements, strict=True):
        publish_replacement(store, old, replacement)
    signed_copy, unsigned_copy = (replacement.id for replacement in replacements)
    trust(ALICE)
    assert store.snapshots.resolve_trusted("main") == signed_copy
    assert store.refs.get_move("latest", 3).snapshot == unsigned_copy
    assert store.snapshots.has_trusted_signature(signed_copy)
    assert not store.snapshots.has_trusted_signature(unsigned_copy)
    for name in ("alias", "latest", unsigned_copy):
        with pytest.raises(RefusedError, match="is not signed"):
            store.snapshots.resolve_trusted(name)
    assert list_unsigned_replacements(store, [signed_copy, unsigned_copy, ""]) == (unsigned_copy, "alias@2", "latest@3")


def test_forged_takedown_does_not_get_a_ref_signed(store: Store, sign_as, trust) -> None:
    sign_as(None)
    unsigned_id = publish_latest(store)
    sign_as(ALICE)
    signed_id = publish_latest(store, "2")
    store.takedowns.record_replacement(signed_id, unsigned_id)
    (move,) = replace_snapshot(store, signed_id, "")
    assert (move.snapshot, store.refs.has_trusted_signature("latest", move.number)) == (unsigned_id, False)


def test_rollback_after_tag_that_signs_skips_snapshots_rolled_back_before(store: Store, sign_as) -> None:
    sign_as(None)
    first, _, _ = (publish_latest(store, name) for name in "123")
    rollback(store, "latest")
    sign_as(ALICE)
    assert tag(store, "latest", "latest").number == 5
    assert rollback(store, "latest").snapshot == first


def test_rollback_and_tag_refuse_unsigned_snapshots(store: Store, sign_as, trust) -> None:
    sign_as(ALICE)
    first, second = publish_latest(store), publish_latest(store, "2")
    sign_as(None)
    unsigned_id = publish_latest(store, "3")
    store.refs.move("latest", publish_latest(store, "4"), 4, "rollback to @1")  # the note is false
    sign_as(ALICE)
    trust(ALICE)
    for move_ref in (
        lambda: rollback(store, "latest", 3),
        lambda: tag(store, unsigned_id, "v1"),
        lambda: tag(store, "latest", "latest"),
    ):
        with pytest.raises(RefusedError, match="is not signed"):
            move_ref()
    assert store.refs.list_numbers("v1") == []
    assert not store.snapshots.has_trusted_signature(unsigned_id)
    assert [rollback(store, "latest").snapshot for _ in range(2)] == [second, first]
    with pytest.raises(UsageError, match=r"named no other snapshot before .* by a move that a key of .*trusted signed"):
        rollback(store, "latest")
    sign_as(None)
    store.refs.move("latest", unsigned_id, 7)
    sign_as(ALICE)
    assert tag(store, "latest@2", "latest").snapshot == second  # the owner recovers in this way
    assert store.snapshots.resolve_trusted("latest") == second


def test_signatures_stay_valid_after_rollback_and_expire(store: Store, sign_as, trust) -> None:
    sign_as(ALICE)
    first, second = publish_latest(store), publish_latest(store, "2")
    third = publish_latest(store, "3")
    rollback(store, "latest", 2)
    trust(ALICE)
    assert Snapshot.from_store(store).id == second
    with pytest.raises(RefConflictError):
        store.refs.move("latest", first, 1)
    assert len(list_signatures(store)) == 4
    age_files(store, 1000)
    expire_store(store, ExpirePolicy(keep=1, older_than=10))
    assert store.snapshots.list_ids() == [second]
    assert collect_garbage(store, 10, dry_run=True)["leftovers"].files >= 5
    collect_garbage(store, 10)
    assert len(list_signatures(store)) == 1
    assert len(list(store.files.local_path("snapshots").glob("*.sig"))) == 1
    assert Snapshot.from_store(store).id == second
    assert third not in store.snapshots.list_ids()


def test_resumed_takedown_stays_signed(store: Store, sign_as, trust) -> None:
    sign_as(ALICE)
    first, second = publish_latest(store), publish_latest(store, "2")
    trust(ALICE)
    for _ in range(2):
        reopened_store = Store.open(store.url)
        reopened_store.takedowns.record_replacement(first, second)
        assert reopened_store.takedowns.list_replaced() == {first}


def test_ref_redirected_by_a_forged_takedown_is_refused(store: Store, sign_as, trust) -> None:
    sign_as(ALICE)
    first, second = publish_latest(store), publish_latest(store, "2")
    trust(ALICE)
    store.takedowns.record_replacement(second, first)
    with pytest.raises(RefusedError, match=f"was signed for snapshot {second[:12]}, and another has replaced it"):
        Snapshot.from_store(store)
    store.refs.move("latest", first, 2)  # the last step of the publisher's takedown
    assert Snapshot.from_store(store).id == first


def test_untrusted_takedown_deletes_no_pulled_snapshot(
    store: Store,
    sign_as,
    trust,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sign_as(ALICE)
    first, second = publish_latest(store), publish_latest(store, "2")
    sign_as(None)
    store.takedowns.record_replacement(first, "")  # forged by someone who may write the store
    trust(ALICE)
    reopened_store, dest = Store.open(store.url), tmp_path / "dest"
    pull(reopened_store, first, dest)
    report = pull(reopened_store, "latest", dest, keep_snapshots=2)
    assert (report.taken_down, report.pruned) == ((), ())
    assert sorted(path.name for path in dest.iterdir() if len(path.name) == 64) == sorted([first, second])
    assert caplog.text.count("is ignored, because no key of") == 1
    sign_as(ALICE)
    with pytest.raises(RefusedError, match="no key of the trust file signed it: inspect this file, delete it"):
        reopened_store.takedowns.record_replacement(first, "")


def test_takedown_needs_a_trusted_signature_if_there_is_a_trust_file(
    store: Store, sign_as, trust, tmp_path: Path
) -> None:
    sign_as(ALICE)
    first, second = publish_latest(store), publish_latest(store, "2")
    trust(ALICE)
    pull(store, first, tmp_path / "dest")
    for stranger in (None, MALLORY):
        sign_as(stranger)
        for write in (
            lambda: store.takedowns.record_replacement(first, second),
            lambda: store.takedowns.add("", ["5"], "asked to", "mallory"),
        ):
            with pytest.raises(RefusedError, match="only if a key of the file signed it"):
                write()
    assert store.files.list_names("takedowns") == []
    sign_as(ALICE)
    store.takedowns.record_replacement(first, second)
    store.takedowns.add("", ["5"], "asked to", "alice")
    sign_as(None)
    reopened_store = Store.open(store.url)
    assert reopened_store.takedowns.find_replacement(first) == second
    assert reopened_store.takedowns.list_pages("", trusted_only=True) == {"5"}
    pull(reopened_store, "latest", tmp_path / "dest", keep_snapshots=2)
    assert not (tmp_path / "dest" / first).exists()


def test_models_are_signed(store: Store, sign_as, trust, tmp_path: Path) -> None:
    sign_as(ALICE)
    stored = put_weights(store)
    trust(ALICE)
    assert store.get_model_folder("reader").is_dir()
    pull(store, "model:reader", tmp_path / "pulled")
    trust(MALLORY)
    for read_model in (
        lambda: store.get_model_folder("reader"),
        lambda: export_model(store, stored.model, tmp_path / "out"),
        lambda: pull(store, "model:reader", tmp_path / "again"),
    ):
        with pytest.raises(RefusedError, match="is not signed"):
            read_model()


def test_signature_of_a_takedown_from_an_earlier_version_is_read(store: Store, sign_as, trust) -> None:
    """Its path has no nonce."""
    sign_as(ALICE)
    trust(ALICE)
    nonce = store.takedowns.add("wiki", ["7"], "asked to", "alice").nonce
    (path,) = (store.files.local_path("takedowns")).glob("*.sig")
    path.rename(path.with_name(path.name.replace(f".{nonce}", "")))
    assert store.takedowns.list_pages("wiki", trusted_only=True) == {"7"}


def test_keys_of_openssl_are_read(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        skip_or_fail("openssl", "openssl is not installed: it makes the keys")
    make_key = f"openssl genpkey -algorithm ed25519 -out {tmp_path}/key.pem"
    write_trust = f'echo "ci $(openssl pkey -in {tmp_path}/key.pem -pubout | sed -n 2p)" > {tmp_path}/trusted'
    subprocess.run(["sh", "-ec", f"{make_key}\n{write_trust}"], check=True, capture_output=True)
    monkeypatch.setenv(SIGNING_KEY_VARIABLE, str(tmp_path / "key.pem"))  # its path instead of the key itself
    monkeypatch.setenv(TRUST_VARIABLE, str(tmp_path / "trusted"))
    assert store.snapshots.describe_signature(publish_latest(store)) == "signed by ci"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no key"),
        ("# nothing\n", "names no key"),
        ("alice\n", "line 1 must have a new name and a public key"),
        ("ALICE AAAA\n", "line 1 has no public key"),
        ("ALICE !\n", "line 1 has no public key"),
    ],
)
def test_invalid_trust_file_is_reported(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trusted").write_text(text)
    with pytest.raises(UsageError, match=message):
        TrustedKeys.from_file(tmp_path / "trusted")


def test_invalid_keys_and_files_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    (tmp_path / "trusted").write_text(2 * ALICE.trust_line)
    with pytest.raises(UsageError, match="line 2 must have a new name"):
        TrustedKeys.from_file(tmp_path / "trusted")
    with pytest.raises(UsageError, match=rf"cannot be read \(No such file or .*\): check --trust or {TRUST_VARIABLE}"):
        TrustedKeys.from_file(tmp_path / "gone")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"cannot be read \(it is not UTF-8 text\)"):
        TrustedKeys.from_file(tmp_path / "bytes")
    monkeypatch.setenv(TRUST_VARIABLE, " ")
    with pytest.raises(UsageError, match=f"--trust or {TRUST_VARIABLE} is empty"):
        TrustedKeys.from_environment()
    monkeypatch.delenv(TRUST_VARIABLE)
    x25519_key = X25519PrivateKey.generate()
    public = base64.b64encode(x25519_key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
    (tmp_path / "trusted").write_text(f"x {public.decode()}\n")
    with pytest.raises(UsageError, match="a key of another kind"):
        TrustedKeys.from_file(tmp_path / "trusted")
    pem = x25519_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    for signing_key in (pem, "/nowhere/key.pem", "-----BEGIN nonsense", ALICE.pem[:60], json.dumps({})):
        monkeypatch.setenv(SIGNING_KEY_VARIABLE, signing_key)
        with pytest.raises(UsageError, match=SIGNING_KEY_VARIABLE) as refused:
            store.refs.move("latest", "0" * 64, 0)
        assert ALICE.pem[30:60] not in str(refused.value)
    assert store.refs.list_numbers("latest") == []
