"""Ed25519 signatures, which prove who published a manifest or a move (an entry of a ref's log).

```
snapshots/<id>.<key>.sig                       signature of a manifest; models/ likewise
refs/<name>/00000007.<nonce>.<key>.sig         signature of a move with this nonce
```
`<key>` is the first 16 hex digits of the public key's SHA-256. The signed message is the path of
the file and its whole JSON value. For a move, these contain the ref's name, the move's number and
time, and the id of the snapshot, so the signature is valid only for this move. Signatures change no
file format and no id, and versions of bookwheel without signatures ignore them. A signature is
written before the file that it signs, so a reader of a signed file sees the signature.
"""

import base64
import binascii
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rag_model.digest import canonical_json
from rag_model.errors import RefusedError, StoreError, UsageError
from rag_model.extras import require
from rag_model.store.objects.files import Files, encode_json

SIGNING_KEY_VARIABLE = "BOOKWHEEL_SIGNING_KEY"  # a private key as PEM, or the path of a PEM file
TRUST_VARIABLE = "BOOKWHEEL_TRUST"  # the path of a trust file
# Group 1 is the path of the signed file without `.json`.
SIGNATURE_PATH = re.compile(r"(.+/(?:[0-9a-f]{64}|[0-9]{8}))(?:\.[0-9a-f]{32})?\.[0-9a-f]{16}\.sig")
_FORMAT = 1
# prefix of signed messages, because the key may also sign other messages
_PURPOSE = b"bookwheel signature 1\n"


class UnsignedError(RefusedError):
    """No trusted key signed a file."""


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """The public keys whose signatures are trusted."""

    keys: Mapping[str, Any]  # by name
    source: str  # path of the trust file, or name of the variable with the key

    @classmethod
    def from_environment(cls) -> Self | None:
        """Read the trust file that `BOOKWHEEL_TRUST` names; None (no signature is required) if it
        is not set.

        Raises:
            UsageError: the variable is set but empty, or for the same reasons as `from_file`.
        """
        path = os.environ.get(TRUST_VARIABLE)
        if path is not None and not path.strip():
            raise UsageError(f"--trust or {TRUST_VARIABLE} is empty: give the path of a trust file, or leave it out")
        return None if path is None else cls.from_file(Path(path))

    @classmethod
    def for_publisher(cls) -> Self | None:
        """Return the keys that a publisher trusts: those of the trust file or, without a file, its
        own key; None if it has neither.
        """
        trusted_keys = cls.from_environment()
        if trusted_keys is None and (key := _load_private_key()):
            return cls({"own": key.public_key()}, SIGNING_KEY_VARIABLE)
        return trusted_keys

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a trust file: each line has a name and a public key (base64 of DER).

        Raises:
            UsageError: the file cannot be read, contains no key, or a line is not a name and a key.
            MissingExtraError: `cryptography` is not installed.
        """
        try:
            lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UsageError(
                f"the trust file {path} cannot be read ({cause}): check --trust or {TRUST_VARIABLE}"
            ) from error
        key_by_name: dict[str, Any] = {}
        for line_number, words in enumerate(lines, start=1):
            if words and not words[0].startswith("#"):
                if len(words) != 2 or words[0] in key_by_name:
                    raise UsageError(f"{path}, line {line_number} must have a new name and a public key: correct it")
                key_by_name[words[0]] = _parse_public_key(words[1], f"{path}, line {line_number}")
        if not key_by_name:
            raise UsageError(f"the trust file {path} names no key: add lines of a name and a public key")
        return cls(key_by_name, str(path))

    def require_signing_key(self, record_noun: str) -> None:
        """Check that the environment has the private key for one of these public keys.

        `record_noun` names the record that will be signed, such as `takedown`, in the message.

        Raises:
            RefusedError: the environment has no such key, so readers with this trust file would
                ignore the record.
            UsageError: the key cannot be read, or is not an Ed25519 key.
        """
        key = _load_private_key()
        if key is None or _compute_fingerprint(key.public_key()) not in map(_compute_fingerprint, self.keys.values()):
            raise RefusedError(
                f"readers with the trust file {self.source} accept a {record_noun} only if a key "
                f"of the file signed it: set {SIGNING_KEY_VARIABLE} to the private key of one of "
                "them"
            )

    def find_signer(self, signatures: "Signatures | PulledSignatures", path: str, value: Any) -> str | None:
        """Return the name of a trusted key that signed a file's JSON value; None if no key did."""
        message = _build_signed_message(path, value)
        return next(
            (name for name, key in self.keys.items() if _is_valid(signatures.read(path, value, key), message, key)),
            None,
        )

    def check(self, signatures: "Signatures | PulledSignatures", path: str, value: Any, description: str) -> str:
        """Return the name of the trusted key that signed a file.

        Raises:
            UnsignedError: no trusted key signed the file; the message begins with `description`.
        """
        name = self.find_signer(signatures, path, value)
        if name is None:
            raise UnsignedError(
                f"{description} is not signed by a key of {self.source}, or was changed since: ask "
                "its publisher to sign it, or add their public key to that file"
            )
        return name


@dataclass(frozen=True, slots=True)
class Signatures:
    """The signatures in a store."""

    files: Files

    def sign(self, path: str, value: Any) -> None:
        """Sign the file `path`, whose JSON value is `value`, if the environment has a key.

        Raises:
            UsageError: the key cannot be read, or is not an Ed25519 key.
            StoreError: the store cannot be written.
        """
        if key := _load_private_key():
            signature = base64.b64encode(key.sign(_build_signed_message(path, value))).decode()
            self.files.write(
                _get_signature_path(path, value, key.public_key()),
                encode_json({"format": _FORMAT, "signature": signature}),
            )

    def create_signed(self, path: str, value: Any) -> bool:
        """Create a file exclusively, signed if the environment has a key; return False if the file
        exists.
        """
        # The signature is written before the file, so that every reader sees it.
        self.sign(path, value)
        if self.files.create(path, encode_json(value)):
            return True
        if key := _load_private_key():
            self.files.remove(_get_signature_path(path, value, key.public_key()))
        return False

    def read(self, path: str, value: Any, key: Any) -> Any:
        """Return the signature of file `path` that `key` made, as JSON; None if it cannot be read."""
        signature_path = _get_signature_path(path, value, key)
        # Earlier versions wrote signatures of takedowns to a path without a nonce.
        if "takedowns/" in path and self.files.find(signature_path) is None:
            signature_path = _get_signature_path(path, None, key)
        try:
            return self.files.read_json(signature_path)
        except StoreError:
            if self.files.get_size(signature_path) is None:
                raise
            return None

    def has_trusted_signature(self, path: str) -> bool:
        """Return whether a key of the trust file or, without a file, the writer's own key signed a
        file.
        """
        trusted_keys = TrustedKeys.for_publisher()
        return trusted_keys is not None and trusted_keys.find_signer(self, path, self.files.read_json(path)) is not None

    def describe(self, path: str) -> str:
        """Describe who signed a file: `signed by NAME`, `not signed`, or an untrusted signature.

        Names come from the trust file; without a trust file no signature is checked.
        """
        trusted_keys = TrustedKeys.from_environment()
        if trusted_keys and (name := trusted_keys.find_signer(self, path, self.files.read_json(path))):
            return f"signed by {name}"
        if not self.has_signature(path):
            return "not signed"
        return (
            "signed, but by no key of the trust file" if trusted_keys else "signed, unchecked: no trust file is given"
        )

    def has_signature(self, path: str) -> bool:
        """Return whether a file has a signature of any key; this lists the file's folder."""
        folder, _, name = path.removesuffix(".json").rpartition("/")
        return any(
            file_name.startswith(f"{name}.") and file_name.endswith(".sig")
            for file_name in self.files.list_names(folder)
        )


@dataclass(frozen=True, slots=True)
class PulledSignatures:
    """The signatures (`manifest.<key>.sig`) of a manifest in the folder to which it was pulled."""

    folder: Path

    def read(self, path: str, value: Any, key: Any) -> Any:
        """Return the signature that `key` made, as JSON; None if it is missing or not JSON."""
        try:
            return json.loads((self.folder / f"manifest.{_compute_fingerprint(key)}.sig").read_bytes())
        except (OSError, ValueError, RecursionError):
            return None

    def copy_trusted(self, signatures: Signatures, trusted_keys: TrustedKeys, path: str) -> None:
        """Copy the trusted keys' signatures of file `path` from a store.

        Raises:
            StoreError: the store cannot be read.
            OSError: the folder cannot be written.
        """
        signed_value = signatures.files.read_json(path)
        for key in trusted_keys.keys.values():
            if (signature := signatures.read(path, signed_value, key)) is not None:
                (self.folder / f"manifest.{_compute_fingerprint(key)}.sig").write_bytes(encode_json(signature))


def has_signing_key() -> bool:
    """Return whether the environment has a key to sign with.

    Raises:
        UsageError: the key cannot be read, or is not an Ed25519 key.
    """
    return _load_private_key() is not None


def _build_signed_message(path: str, signed_value: Any) -> bytes:
    try:
        return _PURPOSE + canonical_json({"path": path, "value": signed_value})
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} cannot be signed ({error}): restore it from a copy") from error


def _get_signature_path(path: str, value: Any, key: Any) -> str:
    """Return the path of a key's signature of file `path`.

    For a move or a takedown it contains the nonce, so that writers who race for one file with the
    same key do not replace or delete each other's signatures.
    """
    nonce = value.get("nonce") if isinstance(value, dict) and re.search("refs/|takedowns/", path) else None
    nonce_part = f".{nonce}" if isinstance(nonce, str) and re.fullmatch("[0-9a-f]{32}", nonce) else ""
    return f"{path.removesuffix('.json')}{nonce_part}.{_compute_fingerprint(key)}.sig"


def _compute_fingerprint(key: Any) -> str:
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


def _is_valid(signature: Any, message: bytes, key: Any) -> bool:
    invalid_signature = require("cryptography.exceptions", "sign").InvalidSignature
    try:
        key.verify(base64.b64decode(signature["signature"], validate=True), message)
    except (invalid_signature, KeyError, TypeError, ValueError):
        return False
    return True


def _parse_public_key(text: str, where: str) -> Any:
    serialization = require("cryptography.hazmat.primitives.serialization", "sign")
    ed25519 = require("cryptography.hazmat.primitives.asymmetric.ed25519", "sign")
    try:
        key = serialization.load_der_public_key(base64.b64decode(text, validate=True))
    except (ValueError, binascii.Error, TypeError) as error:
        raise UsageError(f"{where} has no public key ({error}): give the base64 of its DER form") from error
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise UsageError(f"{where} has a key of another kind: make one with `openssl genpkey -algorithm ed25519`")
    return key


def _load_private_key() -> Any:
    """Return the private key that the environment gives; None if it gives no key."""
    setting = os.environ.get(SIGNING_KEY_VARIABLE, "").strip()
    if not setting:
        return None
    serialization = require("cryptography.hazmat.primitives.serialization", "sign")
    ed25519 = require("cryptography.hazmat.primitives.asymmetric.ed25519", "sign")
    try:
        data = setting.encode() if setting.startswith("-----BEGIN") else Path(setting).read_bytes()
        key = serialization.load_pem_private_key(data, password=None)
    except (OSError, ValueError, TypeError) as error:
        # The cause may contain the key, so it is left out.
        raise UsageError(
            f"{SIGNING_KEY_VARIABLE} is not a readable private key ({type(error).__name__}): give "
            "one as PEM, without a passphrase, or the path of its file"
        ) from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise UsageError(
            f"{SIGNING_KEY_VARIABLE} is a key of another kind: make one with `openssl genpkey -algorithm ed25519`"
        )
    return key


def normalize_json(value: Any) -> Any:
    """Return a value as it will be read from its JSON file, for example with lists instead of
    tuples.
    """
    return json.loads(encode_json(value))
