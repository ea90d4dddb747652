"""A trust file on the command line: what no trusted key signed is refused by every verb that opens it."""

import base64
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from rag_model.store import Content, Manifest, Store
from rag_model.store.versions.signatures import SIGNING_KEY, TRUST
from tests.flows.conftest import Bookwheel


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trust file, whose key the environment has."""
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "trusted").write_text(f"library {base64.b64encode(public).decode()}\n")
    monkeypatch.setenv(SIGNING_KEY, pem)
    return tmp_path / "trusted"


def test_unsigned_is_said_and_refused_and_signed_by_a_tag(
    bookwheel: Bookwheel, trusted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, there = Store.open(str(tmp_path / "store"), create=True), ["--store", str(tmp_path / "store")]
    with monkeypatch.context() as without:
        without.delenv(SIGNING_KEY)
        store.refs.move("latest", store.snapshots.put(Manifest(Content({"kind": "wiki"}, (), {}, {}))), 0)
    assert "not signed" in bookwheel("show", "latest", *there).out
    assert "is whole, not signed" in bookwheel("verify", "latest", *there).out
    for verb in (["pull", "latest", str(tmp_path / "pulled")], ["verify"], ["search", "who?"]):
        refused = bookwheel(*verb, *there, "--trust", str(trusted))
        assert refused.code == 3, verb
        assert "is not signed by a key of" in refused.err
    assert "signature not signed" in bookwheel("show", *there, "--trust", str(trusted)).out
    assert bookwheel("tag", "latest", "latest", *there).code == 0
    assert "is whole, signed by library" in bookwheel("verify", *there, "--trust", str(trusted)).out
    monkeypatch.setenv(TRUST, str(trusted))
    assert bookwheel("pull", "latest", str(tmp_path / "pulled"), *there).code == 0
    assert bookwheel("show", *there, "--json").json["signed"] == "signed by library"
