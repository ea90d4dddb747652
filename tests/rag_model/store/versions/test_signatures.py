"""Who published a snapshot: what a trusted key signed is opened, and nothing else where a trust file is given."""

import base64
import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from rag_model.errors import RefConflictError, RefusedError, UsageError
from rag_model.snapshots.parent import Parent
from rag_model.snapshots.publish import publish_replacement, replace_snapshot
from rag_model.snapshots.takedown import list_unsigned
from rag_model.store.objects.files import encode_json
from rag_model.store.pulling.pull import pull
from rag_model.store.store import Store
from rag_model.store.upkeep.expire import ExpirePolicy, expire_store
from rag_model.store.upkeep.gc import collect_garbage
from rag_model.store.upkeep.verify import verify_version
from rag_model.store.versions.manifest import Manifest
from rag_model.store.versions.models import ModelMetadata, export_model, put_model
from rag_model.store.versions.moves import rollback, tag
from rag_model.store.versions.signatures import SIGNING_KEY_VARIABLE, TRUST_VARIABLE, TrustedKeys
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures.machine_requirements import missing

Publish = Callable[..., str]


class Person:
    """One who has a key."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.key, self.file = name, Ed25519PrivateKey.generate(), folder / f"{name}.pem"
        self.pem = self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        self.file.write_text(self.pem)
        public = self.key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        self.line = f"{name} {base64.b64encode(public).decode()}"


@pytest.fixture
def publish(publish: Publish) -> Publish:
    """Publish a snapshot, and move `latest` to it."""

    def published(store: Store, **recipe: int) -> str:
        snapshot, now = publish(store, **recipe), store.refs.find_current("latest")
        store.refs.move("latest", snapshot, now.number if now else 0)
        return snapshot

    return published


@pytest.fixture
def alice(tmp_path: Path) -> Person:
    return Person("alice", tmp_path)


@pytest.fixture
def mallory(tmp_path: Path) -> Person:
    return Person("mallory", tmp_path)


@pytest.fixture
def signs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Person | None], None]:
    """Return a function that says whose key the environment has."""

    def signs(person: Person | None) -> None:
        monkeypatch.delenv(SIGNING_KEY_VARIABLE, raising=False)
        if person is not None:
            monkeypatch.setenv(SIGNING_KEY_VARIABLE, str(person.file))

    return signs


@pytest.fixture
def trusts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    def trusts(*people: Person | None) -> Path:
        file = tmp_path / "trusted"
        if people == (None,):
            monkeypatch.delenv(TRUST_VARIABLE)
            return file
        file.write_text("\n".join(["# who may publish", "", *(person.line for person in people if person)]) + "\n")
        monkeypatch.setenv(TRUST_VARIABLE, str(file))
        return file

    return trusts


def swapped(store: Store, path: str, **changes: object) -> None:
    """Change fields of a JSON file of a store, as one who may write there can."""
    store.files.write(path, encode_json((store.files.read_json(path) or {}) | changes))


def moves(store: Store, ref: str = "latest") -> list[str]:
    return [name for name in store.files.list_names(f"refs/{ref}") if name.endswith(".sig")]


def test_what_a_trusted_key_signed_is_opened_from_store_and_folder(
    local_store: Store, publish: Publish, signs, trusts, alice: Person, tmp_path: Path
) -> None:
    signs(alice)
    snapshot = publish(local_store)
    trusts(alice)
    for name in ("latest", "latest@1", snapshot, snapshot[:12]):
        assert Snapshot.from_store(local_store, name).id == snapshot
    pull(local_store, "latest", tmp_path / "pulled")
    assert Snapshot.from_folder(tmp_path / "pulled").id == snapshot
    assert local_store.snapshots.describe_signature(snapshot) == "signed by alice"
    assert Parent.from_ref(local_store, "latest").manifest is not None
    assert verify_version(local_store, snapshot) == []


def test_without_a_key_nothing_is_signed_and_without_trust_all_is_opened(
    local_store: Store, publish: Publish, signs, trusts, alice: Person, tmp_path: Path
) -> None:
    signs(None)
    snapshot = publish(local_store)
    assert not list((tmp_path / "store").rglob("*.sig"))
    assert local_store.snapshots.describe_signature(snapshot) == "not signed"
    pull(local_store, "latest", tmp_path / "pulled")
    trusts(alice)
    assert local_store.snapshots.describe_signature(snapshot) == "not signed"
    for name in ("latest", "latest@1", snapshot, snapshot[:12]):
        with pytest.raises(RefusedError, match=r"is not signed by a key of .*trusted, or was changed since: ask"):
            Snapshot.from_store(local_store, name)
        with pytest.raises(RefusedError, match="is not signed"):
            pull(local_store, name, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(RefusedError, match="is not signed"):
        Snapshot.from_folder(tmp_path / "pulled")
    with pytest.raises(RefusedError, match=r"`tag latest@NUMBER latest` moves the ref back to a signed snapshot"):
        Parent.from_ref(local_store, "latest")


def test_a_stranger_is_refused_and_does_not_hide_the_publisher(
    local_store: Store, publish: Publish, signs, trusts, alice: Person, mallory: Person
) -> None:
    signs(mallory)
    snapshot = publish(local_store)
    assert local_store.snapshots.describe_signature(snapshot) == "signed, unchecked: no trust file is given"
    trusts(alice)
    assert local_store.snapshots.describe_signature(snapshot) == "signed, but by no key of the trust file"
    with pytest.raises(RefusedError, match="is not signed by a key"):
        Snapshot.from_store(local_store)
    signs(alice)  # a tag without a trust file signs the snapshot that exists, and moves the ref by a move of its own
    with pytest.raises(RefusedError, match="is not signed by a key"):
        tag(local_store, snapshot, "latest")
    trusts(None)
    assert [tag(local_store, snapshot, "latest").number for _ in range(2)] == [2, 2]
    trusts(alice)
    signers = [local_store.refs.find_signer(TrustedKeys.from_environment(), "latest", number) for number in (1, 2)]
    assert signers == [None, "alice"], "the stranger's move stays a stranger's"
    assert Snapshot.from_store(local_store).id == snapshot
    trusts(mallory, alice)
    assert local_store.snapshots.describe_signature(snapshot) == "signed by mallory"


@pytest.mark.parametrize("change", ["number", "ref", "snapshot", "created_at", "note", "previous", "nonce", "format"])
def test_a_signed_move_holds_for_nothing_else(
    local_store: Store, publish: Publish, signs, trusts, alice: Person, change: str
) -> None:
    signs(alice)
    first = publish(local_store)
    second = publish(local_store, seed=2)
    trusts(alice)
    signs(None)
    folder, path = local_store.files.local_path("refs"), "refs/latest/00000002.json"
    assert Snapshot.from_store(local_store).id == second
    if change == "number":  # the older move again, with its signature, as the newest
        for file in (folder / "latest").glob("00000001*"):
            shutil.copy(file, folder / "latest" / file.name.replace("00000001", "00000003"))
        swapped(local_store, "refs/latest/00000003.json", number=3)
    elif change == "ref":
        shutil.copytree(folder / "latest", folder / "other")
    else:
        values = {"snapshot": first, "nonce": "0" * 32, "previous": None, "format": 2}
        swapped(local_store, path, **{change: values.get(change, "2027-01-01T00:00:00+00:00")})
    with pytest.raises(RefusedError, match=r"the move .*@[23] in .* is not signed"):
        Snapshot.from_store(local_store, "other" if change == "ref" else "latest")


@pytest.mark.parametrize("field", ["metrics", "provenance"])
def test_a_changed_manifest_is_refused_though_its_id_is_right(
    local_store: Store, publish: Publish, signs, trusts, alice: Person, field: str
) -> None:
    signs(alice)
    snapshot = publish(local_store)
    trusts(alice)
    path = local_store.snapshots.manifest_path(snapshot)
    swapped(local_store, path, **{field: {"made": "up"}})
    with pytest.raises(RefusedError, match=f"snapshot {snapshot[:12]} in .* was changed since"):
        Snapshot.from_store(local_store)
    signature = next(local_store.files.local_path("snapshots").glob("*.sig"))
    for damaged in (b"", b"[]", b'{"signature": 1}', b'{"signature": "!"}', b"\xff", b'{"signature": "AAAA"}'):
        signature.write_bytes(damaged)
        with pytest.raises(RefusedError, match="is not signed"):
            Snapshot.from_store(local_store)


def test_a_second_writer_of_a_snapshot_signs_what_is_there(
    local_store: Store, publish: Publish, signs, trusts, alice: Person
) -> None:
    signs(None)
    snapshot = publish(local_store)
    told = local_store.files.read(local_store.snapshots.manifest_path(snapshot))
    signs(alice)
    local_store.snapshots.publish(local_store.snapshots.get(snapshot))
    assert local_store.files.read(local_store.snapshots.manifest_path(snapshot)) == told
    trusts(alice)
    assert local_store.snapshots.resolve_trusted(snapshot) == snapshot


@pytest.mark.parametrize("trusting", [True, False])
def test_what_replaces_a_snapshot_is_signed_only_if_that_was(
    local_store: Store, publish: Publish, signs, trusts, alice: Person, trusting: bool
) -> None:
    signs(alice)
    good = publish(local_store)
    signs(None)
    evil = publish(local_store, seed=2)
    local_store.refs.move("alias", good, 0)  # an unsigned move to a signed snapshot
    signs(alice)
    local_store.refs.move("main", good, 0)
    if trusting:
        trusts(alice)
    contents = [local_store.snapshots.get(one).content for one in (good, evil)]
    places = [Manifest(replace(content, recipe={"without": "a page"} | content.recipe)) for content in contents]
    for old, place in zip((good, evil), places, strict=True):
        publish_replacement(local_store, old, place)
    ours, theirs = (place.id for place in places)
    trusts(alice)
    assert local_store.snapshots.resolve_trusted("main") == ours
    assert local_store.refs.get_move("latest", 3).snapshot == theirs
    assert [local_store.snapshots.has_trusted_signature(place) for place in (ours, theirs)] == [True, False]
    for name in ("alias", "latest", theirs):
        with pytest.raises(RefusedError, match="is not signed"):
            local_store.snapshots.resolve_trusted(name)
    assert list_unsigned(local_store, [ours, theirs, ""]) == (theirs, "alias@2", "latest@3")


def test_a_forged_takedown_does_not_get_a_ref_signed(
    local_store: Store, publish: Publish, signs, trusts, alice: Person
) -> None:
    signs(None)
    evil = publish(local_store)
    signs(alice)
    good = publish(local_store, seed=2)
    local_store.takedowns.record_replacement(good, evil)
    (move,) = replace_snapshot(local_store, good, "")
    assert (move.snapshot, local_store.refs.has_trusted_signature("latest", move.number)) == (evil, False)


def test_rollback_and_tag_take_nothing_that_is_not_signed(
    local_store: Store, publish: Publish, signs, trusts, alice: Person
) -> None:
    signs(alice)
    first, second = publish(local_store), publish(local_store, seed=2)
    signs(None)
    evil = publish(local_store, seed=3)
    local_store.refs.move("latest", publish(local_store, seed=4), 4, "rollback to @1")  # a note that misleads
    signs(alice)
    trusts(alice)
    for refused in (
        lambda: rollback(local_store, "latest", 3),
        lambda: tag(local_store, evil, "v1"),
        lambda: tag(local_store, "latest", "latest"),
    ):
        with pytest.raises(RefusedError, match="is not signed"):
            refused()
    assert local_store.refs.list_numbers("v1") == []
    assert not local_store.snapshots.has_trusted_signature(evil)
    assert [rollback(local_store, "latest").snapshot for _ in range(2)] == [second, first]
    with pytest.raises(UsageError, match=r"named no other snapshot before .* by a move that a key of .*trusted signed"):
        rollback(local_store, "latest")
    signs(None)
    local_store.refs.move("latest", evil, 7)
    signs(alice)
    assert tag(local_store, "latest@2", "latest").snapshot == second  # how an owner recovers
    assert local_store.snapshots.resolve_trusted("latest") == second


def test_rollback_and_expiry_keep_signatures_right(
    local_store: Store, publish: Publish, signs, trusts, alice: Person, later
) -> None:
    signs(alice)
    first, second = publish(local_store), publish(local_store, seed=2)
    third = publish(local_store, seed=3)
    rollback(local_store, "latest", 2)
    trusts(alice)
    assert Snapshot.from_store(local_store).id == second
    with pytest.raises(RefConflictError):
        local_store.refs.move("latest", first, 1)
    assert len(moves(local_store)) == 4
    later(local_store, 1000)
    expire_store(local_store, ExpirePolicy(keep=1, older_than=10))
    assert local_store.snapshots.list_ids() == [second]
    assert collect_garbage(local_store, 10, dry_run=True)["leftovers"].files >= 5
    collect_garbage(local_store, 10)
    assert len(moves(local_store)) == 1
    assert len(list(local_store.files.local_path("snapshots").glob("*.sig"))) == 1
    assert Snapshot.from_store(local_store).id == second
    assert third not in local_store.snapshots.list_ids()


def test_a_takedown_that_is_resumed_stays_signed(
    local_store: Store, publish: Publish, signs, trusts, alice: Person
) -> None:
    signs(alice)
    first, second = publish(local_store), publish(local_store, seed=2)
    trusts(alice)
    for _ in range(2):
        store = Store.open(local_store.url)
        store.takedowns.record_replacement(first, second)
        assert store.takedowns.list_replaced() == {first}


def test_a_ref_that_a_forged_takedown_redirects_is_refused(
    local_store: Store, publish: Publish, signs, trusts, alice: Person
) -> None:
    signs(alice)
    first, second = publish(local_store), publish(local_store, seed=2)
    trusts(alice)
    local_store.takedowns.record_replacement(second, first)
    with pytest.raises(RefusedError, match=f"was signed for snapshot {second[:12]}, and another has replaced it"):
        Snapshot.from_store(local_store)
    local_store.refs.move("latest", first, 2)  # what the publisher's takedown does at its end
    assert Snapshot.from_store(local_store).id == first


def test_a_takedown_that_no_trusted_key_signed_deletes_no_pulled_snapshot(
    local_store: Store, publish: Publish, signs, trusts, alice: Person, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    signs(alice)
    first, second = publish(local_store), publish(local_store, seed=2)
    signs(None)
    local_store.takedowns.record_replacement(first, "")  # forged by someone who may write the store
    trusts(alice)
    store, dest = Store.open(local_store.url), tmp_path / "dest"
    pull(store, first, dest)
    report = pull(store, "latest", dest, keep=2)
    assert (report.taken_down, report.pruned) == ((), ())
    assert sorted(path.name for path in dest.iterdir() if len(path.name) == 64) == sorted([first, second])
    assert caplog.text.count("is ignored, because no key of") == 1
    signs(alice)
    with pytest.raises(RefusedError, match="no key of the trust file signed it: inspect this file, delete it"):
        store.takedowns.record_replacement(first, "")


def test_a_takedown_counts_for_trusting_readers_once_a_trusted_key_signs_it(
    local_store: Store, publish: Publish, signs, trusts, alice: Person, mallory: Person, tmp_path: Path
) -> None:
    signs(alice)
    first, second = publish(local_store), publish(local_store, seed=2)
    trusts(alice)
    pull(local_store, first, tmp_path / "dest")
    for stranger in (None, mallory):
        signs(stranger)
        for write in (
            lambda: local_store.takedowns.record_replacement(first, second),
            lambda: local_store.takedowns.add("", ["5"], "asked to", "mallory"),
        ):
            with pytest.raises(RefusedError, match="only if a key of the file signed it"):
                write()
    assert local_store.files.list_names("takedowns") == []
    signs(alice)
    local_store.takedowns.record_replacement(first, second)
    local_store.takedowns.add("", ["5"], "asked to", "alice")
    signs(None)
    store = Store.open(local_store.url)
    assert store.takedowns.find_replacement(first) == second
    assert store.takedowns.list_pages("", trusted_only=True) == {"5"}
    pull(store, "latest", tmp_path / "dest", keep=2)
    assert not (tmp_path / "dest" / first).exists()


def test_models_are_signed_too(
    local_store: Store, signs, trusts, alice: Person, mallory: Person, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    signs(alice)
    put = put_model(local_store, tmp_path / "model", ModelMetadata("dpr", None, {}), "reader")
    trusts(alice)
    assert local_store.get_model_folder("reader").is_dir()
    pull(local_store, "model:reader", tmp_path / "pulled")
    trusts(mallory)
    for open_it in (
        lambda: local_store.get_model_folder("reader"),
        lambda: export_model(local_store, put.model, tmp_path / "out"),
        lambda: pull(local_store, "model:reader", tmp_path / "again"),
    ):
        with pytest.raises(RefusedError, match="is not signed"):
            open_it()


def test_keys_that_openssl_makes_are_read(
    local_store: Store, publish: Publish, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if shutil.which("openssl") is None:
        missing("openssl", "openssl is not installed: it makes the keys")
    make = f"openssl genpkey -algorithm ed25519 -out {tmp_path}/key.pem"
    tell = f'echo "ci $(openssl pkey -in {tmp_path}/key.pem -pubout | sed -n 2p)" > {tmp_path}/trusted'
    subprocess.run(["sh", "-ec", f"{make}\n{tell}"], check=True, capture_output=True)
    monkeypatch.setenv(SIGNING_KEY_VARIABLE, (tmp_path / "key.pem").read_text())  # the key itself, as secrets are given
    monkeypatch.setenv(TRUST_VARIABLE, str(tmp_path / "trusted"))
    assert local_store.snapshots.describe_signature(publish(local_store)) == "signed by ci"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "names no key"),
        ("# nothing\n", "names no key"),
        ("alice\n", "line 1 must have a new name and a public key"),
        ("alice AAAA\n", "line 1 has no public key"),
        ("alice !\n", "line 1 has no public key"),
    ],
)
def test_a_wrong_trust_file_is_one_sentence(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "trusted").write_text(text)
    with pytest.raises(UsageError, match=match):
        TrustedKeys.from_file(tmp_path / "trusted")


def test_odd_keys_and_files_are_one_sentence(
    tmp_path: Path, alice: Person, monkeypatch: pytest.MonkeyPatch, local_store: Store
) -> None:
    (tmp_path / "trusted").write_text(f"{alice.line}\n{alice.line}\n")
    with pytest.raises(UsageError, match="line 2 must have a new name"):
        TrustedKeys.from_file(tmp_path / "trusted")
    with pytest.raises(
        UsageError, match=rf"cannot be read \(No such file or directory\): check --trust or {TRUST_VARIABLE}"
    ):
        TrustedKeys.from_file(tmp_path / "gone")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"cannot be read \(it is not UTF-8 text\)"):
        TrustedKeys.from_file(tmp_path / "bytes")
    monkeypatch.setenv(TRUST_VARIABLE, " ")
    with pytest.raises(UsageError, match=f"--trust or {TRUST_VARIABLE} is empty"):
        TrustedKeys.from_environment()
    monkeypatch.delenv(TRUST_VARIABLE)
    other = X25519PrivateKey.generate()
    public = base64.b64encode(other.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
    (tmp_path / "trusted").write_text(f"x {public.decode()}\n")
    with pytest.raises(UsageError, match="a key of another kind"):
        TrustedKeys.from_file(tmp_path / "trusted")
    pem = other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    for given in (pem, "/nowhere/key.pem", "-----BEGIN nonsense", alice.pem[:60], json.dumps({})):
        monkeypatch.setenv(SIGNING_KEY_VARIABLE, given)
        with pytest.raises(UsageError, match=SIGNING_KEY_VARIABLE) as refused:
            local_store.refs.move("latest", "0" * 64, 0)
        assert alice.pem[30:60] not in str(refused.value)
    assert local_store.refs.list_numbers("latest") == []
