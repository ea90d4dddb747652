"""A trust file on the command line: what no trusted key signed is refused by every verb that opens it."""

from pathlib import Path

import pytest

from rag_model.store import Content, Manifest, Store
from rag_model.store.versions.signatures import SIGNING_KEY_VARIABLE, TRUST_VARIABLE
from tests.flows.conftest import Bookwheel


def test_unsigned_is_said_and_refused_and_signed_by_a_tag(
    bookwheel: Bookwheel, trusted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, there = Store.open(str(tmp_path / "store"), create=True), ["--store", str(tmp_path / "store")]
    with monkeypatch.context() as without:
        without.delenv(SIGNING_KEY_VARIABLE)
        store.refs.move("latest", store.snapshots.publish(Manifest(Content({"kind": "wiki"}, (), {}, {}))), 0)
    assert "not signed" in bookwheel("show", "latest", *there).out
    assert "is whole, not signed" in bookwheel("verify", "latest", *there).out
    for verb in (["pull", "latest", str(tmp_path / "pulled")], ["verify"], ["search", "who?"]):
        refused = bookwheel(*verb, *there, "--trust", str(trusted))
        assert refused.code == 3, verb
        assert "is not signed by a key of" in refused.err
    assert "signature not signed" in bookwheel("show", *there, "--trust", str(trusted)).out
    assert bookwheel("tag", "latest", "latest", *there, "--trust", str(trusted)).code == 3
    assert bookwheel("tag", "latest", "latest", *there).code == 0
    assert "is whole, signed by library" in bookwheel("verify", *there, "--trust", str(trusted)).out
    monkeypatch.setenv(TRUST_VARIABLE, str(trusted))
    assert bookwheel("pull", "latest", str(tmp_path / "pulled"), *there).code == 0
    assert bookwheel("show", *there, "--json").json["signed"] == "signed by library"


def test_show_log_and_verify_tell_that_a_move_is_not_signed(
    bookwheel: Bookwheel, trusted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, there = Store.open(str(tmp_path / "store"), create=True), ["--store", str(tmp_path / "store")]
    snapshot = store.snapshots.publish(Manifest(Content({"kind": "wiki"}, (), {}, {})))
    store.refs.move("latest", snapshot, 0)
    monkeypatch.delenv(SIGNING_KEY_VARIABLE)
    store.refs.move("latest", snapshot, 1)
    trusting = [*there, "--trust", str(trusted)]
    said = "signed by library; move latest@2 not signed"
    assert f"signature {said}\n" in bookwheel("show", *trusting).out
    assert bookwheel("show", "latest@1", *trusting, "--json").json["signed"] == "signed by library"
    verified = bookwheel("verify", *trusting, "--json")
    assert (verified.code, verified.json["ok"], verified.json["signed"]) == (3, False, said)
    assert f"is whole, {said}" in bookwheel("verify", *trusting).out
    newest, first = bookwheel("log", *trusting).out.splitlines()
    assert newest.endswith("  not signed by a trusted key")
    assert first.endswith("  signed by library")
    moves = bookwheel("log", *trusting, "--json").json
    assert [move["signed"] for move in moves] == ["not signed by a trusted key", "signed by library"]
    assert "signed" not in bookwheel("log", *there).out


@pytest.mark.parametrize(
    ("given", "complaint"), [("gone", "cannot be read (No such file or directory): check --trust"), ("", "is empty")]
)
def test_a_wrong_trust_file_is_refused_before_anything_begins(
    bookwheel: Bookwheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, complaint: str
) -> None:
    Store.open(str(tmp_path / "store"), create=True)
    monkeypatch.chdir(tmp_path)
    for verb in (["log"], ["serve", "--port", "0"]):
        refused = bookwheel(*verb, "--store", str(tmp_path / "store"), "--trust", given)
        assert (refused.code, complaint in refused.complaint) == (2, True), refused
    monkeypatch.setenv(TRUST_VARIABLE, given)
    assert complaint in bookwheel("log", "--store", str(tmp_path / "store")).complaint
