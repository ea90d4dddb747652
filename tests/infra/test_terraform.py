"""infra/terraform parses, declares what it references, and configures the bucket as the store needs it."""

import re
from typing import Any

from tests.fixtures.infra_files import KUBERNETES, ROOT, read_hcl, read_yaml_documents

FOLDER = ROOT / "infra/terraform"
FILES = sorted(FOLDER.glob("*.tf"))
BLOCKS = read_hcl(*FILES)


def _get_resource(kind: str, name: str = "library") -> dict[str, Any]:
    (resource,) = [block[kind][name] for block in BLOCKS["resource"] if name in block.get(kind, {})]
    body: dict[str, Any] = resource
    return body


def _get_statements(name: str) -> dict[str, dict[str, Any]]:
    (document,) = [
        block["aws_iam_policy_document"][name]
        for block in BLOCKS["data"]
        if name in block.get("aws_iam_policy_document", {})
    ]
    return {statement.get("sid", ""): statement for statement in document["statement"]}


def test_every_reference_is_declared_and_every_declaration_used() -> None:
    text = re.sub(r"#.*", "", "".join(file.read_text() for file in FILES))
    variables = {name for block in BLOCKS["variable"] for name in block}
    assert set(re.findall(r"\bvar\.(\w+)", text)) == variables
    assert set(re.findall(r"\blocal\.(\w+)", text)) == {name for block in BLOCKS["locals"] for name in block}
    declared = {f"{kind}.{name}" for block in BLOCKS["resource"] for kind, names in block.items() for name in names}
    declared |= {f"data.{kind}.{name}" for block in BLOCKS["data"] for kind, names in block.items() for name in names}
    code = re.sub(r'"([^"\n]*)"', lambda match: " ".join(re.findall(r"\$\{([^}]*)\}", match[1])), text)
    references = set(re.findall(r"(?:data\.)?\baws_\w+\.\w+", code))
    assert len(references) > 10
    assert references <= declared


def test_variables_and_outputs_have_descriptions() -> None:
    for block in (*BLOCKS["variable"], *BLOCKS["output"]):
        for name, body in block.items():
            assert body["description"], name
    assert all("type" in body for block in BLOCKS["variable"] for body in block.values())


def test_providers_are_bounded() -> None:
    (settings,) = BLOCKS["terraform"]
    assert settings["required_version"].startswith(">=")
    providers = [provider for block in settings["required_providers"] for provider in block.values()]
    assert all(provider["version"].startswith("~>") for provider in providers)


def test_only_incomplete_uploads_and_old_versions_expire() -> None:
    rules = {rule["id"]: rule for rule in _get_resource("aws_s3_bucket_lifecycle_configuration")["rule"]}
    assert all(rule["status"] == "Enabled" for rule in rules.values())
    (abort,) = rules["abort-incomplete-uploads"]["abort_incomplete_multipart_upload"]
    assert abort["days_after_initiation"] == 7
    (old,) = rules["expire-deleted"]["noncurrent_version_expiration"]
    assert old["noncurrent_days"] == "${var.undelete_days}"
    ages = {key for rule in rules.values() for block in rule.get("expiration", ()) for key in block}
    assert ages == {"expired_object_delete_marker"}, "an old blob may still be part of a snapshot"
    assert _get_resource("aws_s3_bucket_versioning")["versioning_configuration"] == [{"status": "Enabled"}]


def test_the_bucket_is_closed_and_encrypted() -> None:
    block = _get_resource("aws_s3_bucket_public_access_block")
    settings = ("block_public_acls", "block_public_policy", "ignore_public_acls", "restrict_public_buckets")
    assert {setting: block[setting] for setting in settings} == dict.fromkeys(settings, True)
    (rule,) = _get_resource("aws_s3_bucket_server_side_encryption_configuration")["rule"]
    assert rule["apply_server_side_encryption_by_default"][0]["sse_algorithm"] in {"AES256", "aws:kms"}
    assert _get_resource("aws_s3_bucket")["lifecycle"] == [{"prevent_destroy": True}]
    https_only = _get_statements("bucket")["OnlyEncryptedOnTheWay"]
    assert (https_only["effect"], https_only["condition"][0]["variable"]) == ("Deny", "aws:SecureTransport")


def test_refs_can_only_grow() -> None:
    refs = _get_statements("bucket")["RefsOnlyGrow"]
    assert (refs["effect"], refs["actions"]) == ("Deny", ["s3:PutObject"])
    assert refs["resources"] == ["${aws_s3_bucket.library.arn}/${var.prefix}/refs/*"]
    assert refs["condition"] == [{"test": "Null", "variable": "s3:if-none-match", "values": ["true"]}]


def test_readers_read_and_publishers_write_below_the_prefix() -> None:
    reading, writing = _get_statements("reader"), _get_statements("publisher")
    actions = {action for statement in reading.values() for action in statement["actions"]}
    assert actions == {"s3:ListBucket", "s3:GetObject"}
    assert set(writing["Write"]["actions"]) >= {"s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"}
    assert "s3:DeleteObjectVersion" not in str(writing), "a deletion must remain reversible"
    for statement in (reading["Read"], writing["Write"]):
        assert statement["resources"] == ["${aws_s3_bucket.library.arn}/${var.prefix}/*"]


def test_roles_belong_to_the_accounts_that_the_manifests_annotate() -> None:
    (local_values,) = BLOCKS["locals"]
    granted = {account: role for role, account in local_values["accounts"].items()}
    annotated = {
        account["metadata"]["name"]: account["metadata"]["annotations"]["eks.amazonaws.com/role-arn"].rpartition("-")[2]
        for account in read_yaml_documents(KUBERNETES / "base/accounts.yaml")
        if "annotations" in account["metadata"]
    }
    assert granted == annotated
