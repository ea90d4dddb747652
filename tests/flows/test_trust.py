"""`--trust`: verbs refuse versions that no trusted key has signed."""

from pathlib import Path

import pytest

from rag_model.store import Content, Manifest, Store
from rag_model.store.versions.signatures import SIGNING_KEY_VARIABLE, TRUST_VARIABLE
from tests.flows.conftest import Bookwheel


def test_unsigned_snapshot_is_refused_until_tag_signs_it(
    bookwheel: Bookwheel, trust_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, store_option = Store.open(str(tmp_path / "store"), create=True), ["--store", str(tmp_path / "store")]
    with monkeypatch.context() as patch:
        patch.delenv(SIGNING_KEY_VARIABLE)
        store.refs.move("latest", store.snapshots.publish(Manifest(Content({"kind": "wiki"}, (), {}, {}))), 0)
    assert "not signed" in bookwheel("show", "latest", *store_option).out
    assert "is whole, not signed" in bookwheel("verify", "latest", *store_option).out
    for verb in (["pull", "latest", str(tmp_path / "pulled")], ["verify"], ["search", "who?"]):
        refused = bookwheel(*verb, *store_option, "--trust", str(trust_file))
        assert refused.code == 3, verb
        assert "is not signed by a key of" in refused.err
    assert "signature not signed" in bookwheel("show", *store_option, "--trust", str(trust_file)).out
    assert bookwheel("tag", "latest", "latest", *store_option, "--trust", str(trust_file)).code == 3
    assert bookwheel("tag", "latest", "latest", *store_option).code == 0
    assert "is whole, signed by library" in bookwheel("verify", *store_option, "--trust", str(trust_file)).out
    monkeypatch.setenv(TRUST_VARIABLE, str(trust_file))
    assert bookwheel("pull", "latest", str(tmp_path / "pulled"), *store_option).code == 0
    assert bookwheel("show", *store_option, "--json").json["signed"] == "signed by library"


def test_show_log_and_verify_report_unsigned_move(
    bookwheel: Bookwheel, trust_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, store_option = Store.open(str(tmp_path / "store"), create=True), ["--store", str(tmp_path / "store")]
    snapshot = store.snapshots.publish(Manifest(Content({"kind": "wiki"}, (), {}, {})))
    store.refs.move("latest", snapshot, 0)
    monkeypatch.delenv(SIGNING_KEY_VARIABLE)
    store.refs.move("latest", snapshot, 1)
    trusting = [*store_option, "--trust", str(trust_file)]
    signature = "signed by library; move latest@2 not signed"
    assert f"signature {signature}\n" in bookwheel("show", *trusting).out
    assert bookwheel("show", "latest@1", *trusting, "--json").json["signed"] == "signed by library"
    verified = bookwheel("verify", *trusting, "--json")
    assert (verified.code, verified.json["ok"], verified.json["signed"]) == (3, False, signature)
    assert f"is whole, {signature}" in bookwheel("verify", *trusting).out
    newest, first = bookwheel("log", *trusting).out.splitlines()
    assert newest.endswith("  not signed by a trusted key")
    assert first.endswith("  signed by library")
    moves = bookwheel("log", *trusting, "--json").json
    assert [move["signed"] for move in moves] == ["not signed by a trusted key", "signed by library"]
    assert "signed" not in bookwheel("log", *store_option).out


@pytest.mark.parametrize(
    ("trust_file", "message"), [("gone", "cannot be read (No such file or directory): check --trust"), ("", "is empty")]
)
def test_wrong_trust_file_is_refused(
    bookwheel: Bookwheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust_file: str, message: str
) -> None:
    Store.open(str(tmp_path / "store"), create=True)
    monkeypatch.chdir(tmp_path)
    for verb in (["log"], ["serve", "--port", "0"]):
        refused = bookwheel(*verb, "--store", str(tmp_path / "store"), "--trust", trust_file)
        assert (refused.code, message in refused.complaint) == (2, True), refused
    monkeypatch.setenv(TRUST_VARIABLE, trust_file)
    assert message in bookwheel("log", "--store", str(tmp_path / "store")).complaint
