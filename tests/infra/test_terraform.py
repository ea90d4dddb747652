"""infra/terraform: it parses, what it refers to is declared, and it says what the store needs of a bucket."""

import re
from typing import Any

from tests.fixtures.infra_files import KUBERNETES, ROOT, documents, terraform

FOLDER = ROOT / "infra/terraform"
FILES = sorted(FOLDER.glob("*.tf"))
BLOCKS = terraform(*FILES)


def _resource(kind: str, name: str = "library") -> dict[str, Any]:
    (found,) = [one[kind][name] for one in BLOCKS["resource"] if name in one.get(kind, {})]
    body: dict[str, Any] = found
    return body


def _statements(name: str) -> dict[str, dict[str, Any]]:
    (found,) = [
        one["aws_iam_policy_document"][name] for one in BLOCKS["data"] if name in one.get("aws_iam_policy_document", {})
    ]
    return {each.get("sid", ""): each for each in found["statement"]}


def test_everything_that_is_referred_to_is_declared_and_used() -> None:
    text = re.sub(r"#.*", "", "".join(file.read_text() for file in FILES))
    variables = {name for one in BLOCKS["variable"] for name in one}
    assert set(re.findall(r"\bvar\.(\w+)", text)) == variables
    assert set(re.findall(r"\blocal\.(\w+)", text)) == {name for one in BLOCKS["locals"] for name in one}
    declared = {f"{kind}.{name}" for one in BLOCKS["resource"] for kind, names in one.items() for name in names}
    declared |= {f"data.{kind}.{name}" for one in BLOCKS["data"] for kind, names in one.items() for name in names}
    code = re.sub(r'"([^"\n]*)"', lambda quoted: " ".join(re.findall(r"\$\{([^}]*)\}", quoted[1])), text)
    named = set(re.findall(r"(?:data\.)?\baws_\w+\.\w+", code))
    assert len(named) > 10
    assert named <= declared


def test_variables_and_outputs_say_what_they_are() -> None:
    for one in (*BLOCKS["variable"], *BLOCKS["output"]):
        for name, body in one.items():
            assert body["description"], name
    assert all("type" in body for one in BLOCKS["variable"] for body in one.values())


def test_providers_are_bounded() -> None:
    (told,) = BLOCKS["terraform"]
    assert told["required_version"].startswith(">=")
    assert all(one["version"].startswith("~>") for block in told["required_providers"] for one in block.values())


def test_half_uploads_and_old_versions_go_and_nothing_current_does() -> None:
    rules = {rule["id"]: rule for rule in _resource("aws_s3_bucket_lifecycle_configuration")["rule"]}
    assert all(rule["status"] == "Enabled" for rule in rules.values())
    (abort,) = rules["abort-incomplete-uploads"]["abort_incomplete_multipart_upload"]
    assert abort["days_after_initiation"] == 7
    (old,) = rules["expire-deleted"]["noncurrent_version_expiration"]
    assert old["noncurrent_days"] == "${var.undelete_days}"
    ages = {key for rule in rules.values() for block in rule.get("expiration", ()) for key in block}
    assert ages == {"expired_object_delete_marker"}, "age says nothing of whether a snapshot needs a blob"
    assert _resource("aws_s3_bucket_versioning")["versioning_configuration"] == [{"status": "Enabled"}]


def test_the_bucket_is_closed_and_encrypted() -> None:
    block = _resource("aws_s3_bucket_public_access_block")
    doors = ("block_public_acls", "block_public_policy", "ignore_public_acls", "restrict_public_buckets")
    assert {door: block[door] for door in doors} == dict.fromkeys(doors, True)
    (rule,) = _resource("aws_s3_bucket_server_side_encryption_configuration")["rule"]
    assert rule["apply_server_side_encryption_by_default"][0]["sse_algorithm"] in {"AES256", "aws:kms"}
    assert _resource("aws_s3_bucket")["lifecycle"] == [{"prevent_destroy": True}]
    secure = _statements("bucket")["OnlyEncryptedOnTheWay"]
    assert (secure["effect"], secure["condition"][0]["variable"]) == ("Deny", "aws:SecureTransport")


def test_refs_can_only_grow() -> None:
    refs = _statements("bucket")["RefsOnlyGrow"]
    assert (refs["effect"], refs["actions"]) == ("Deny", ["s3:PutObject"])
    assert refs["resources"] == ["${aws_s3_bucket.library.arn}/${var.prefix}/refs/*"]
    assert refs["condition"] == [{"test": "Null", "variable": "s3:if-none-match", "values": ["true"]}]


def test_readers_read_and_publishers_write_below_the_prefix() -> None:
    reading, writing = _statements("reader"), _statements("publisher")
    assert {action for one in reading.values() for action in one["actions"]} == {"s3:ListBucket", "s3:GetObject"}
    assert set(writing["Write"]["actions"]) >= {"s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"}
    assert "s3:DeleteObjectVersion" not in str(writing), "then versions would undo no deletion"
    for statement in (reading["Read"], writing["Write"]):
        assert statement["resources"] == ["${aws_s3_bucket.library.arn}/${var.prefix}/*"]


def test_roles_are_for_the_accounts_that_the_manifests_give_them_to() -> None:
    (told,) = BLOCKS["locals"]
    granted = {account: role for role, account in told["accounts"].items()}
    annotated = {
        one["metadata"]["name"]: one["metadata"]["annotations"]["eks.amazonaws.com/role-arn"].rpartition("-")[2]
        for one in documents(KUBERNETES / "base/accounts.yaml")
        if "annotations" in one["metadata"]
    }
    assert granted == annotated
