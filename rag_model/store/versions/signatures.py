"""Signatures of manifests and of refs' moves: who published them. Ed25519, each signature in a file of its own.

```
snapshots/<id>.<key>.sig                       of a manifest; models/ likewise
refs/<name>/00000007.<nonce>.<key>.sig         of a move, whose nonce is in the name
```
`<key>` is the beginning of the public key's SHA-256. What is signed is the path of the file and its whole JSON value:
of a move these contain the ref's name, the number, the id that it names and the time, so a signature holds nowhere
else. Formats and ids do not change: other versions ignore these files. A signature is written before the file that it
is for, so a reader that sees a signed file finds its signature.
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
from rag_model.store.objects.files import Files, json_bytes

SIGNING_KEY = "BOOKWHEEL_SIGNING_KEY"  # a private key as PEM, or the path of its file
TRUST = "BOOKWHEEL_TRUST"  # the path of a trust file
SIGNED = re.compile(r"(.+/(?:[0-9a-f]{64}|[0-9]{8}))(?:\.[0-9a-f]{32})?\.[0-9a-f]{16}\.sig")  # of `<group 1>.json`
_FORMAT = 1
_PURPOSE = b"bookwheel signature 1\n"  # the same key may sign other things elsewhere


class UnsignedError(RefusedError):
    """No trusted key signed a file."""


@dataclass(frozen=True, slots=True)
class Trust:
    """The public keys whose signatures count, by the names of their owners."""

    keys: Mapping[str, Any]
    source: str  # path of the file

    @classmethod
    def given(cls) -> Self | None:
        """Return the trust that `BOOKWHEEL_TRUST` names; None if it is not set: signatures are not asked for.

        Raises:
            UsageError: it is set but empty, or as `read`.
        """
        named = os.environ.get(TRUST)
        if named is not None and not named.strip():
            raise UsageError(f"--trust or {TRUST} is empty: give the path of a trust file, or leave it out")
        return None if named is None else cls.read(Path(named))

    @classmethod
    def of_publisher(cls) -> Self | None:
        """Return the trust that says what may be signed again unseen: the trust file, else the own key, else None."""
        given = cls.given()
        if given is None and (key := _private()):
            return cls({"own": key.public_key()}, SIGNING_KEY)
        return given

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a trust file: lines of a name and a public key (base64 of its DER form, as `openssl` writes it).

        Raises:
            UsageError: the file cannot be read, a line is no name and key, or there are none.
            MissingExtraError: `cryptography` is not installed.
        """
        try:
            lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as broken:
            why = broken.strerror if isinstance(broken, OSError) else "it is no text"
            raise UsageError(f"the trust file {path} cannot be read ({why}): check --trust or {TRUST}") from broken
        keys: dict[str, Any] = {}
        for number, words in enumerate(lines, start=1):
            if words and not words[0].startswith("#"):
                if len(words) != 2 or words[0] in keys:
                    raise UsageError(f"{path}, line {number} must be a new name and a public key: correct it")
                keys[words[0]] = _public(words[1], f"{path}, line {number}")
        if not keys:
            raise UsageError(f"the trust file {path} names no key: add lines of a name and a public key")
        return cls(keys, str(path))

    def signer(self, signatures: "Signatures | Carried", path: str, value: Any) -> str | None:
        """Return the name of a trusted key that signed the JSON value of a file; None if there is none."""
        message = _message(path, value)
        return next(
            (name for name, key in self.keys.items() if _signed(signatures.read(path, value, key), message, key)), None
        )

    def check(self, signatures: "Signatures | Carried", path: str, value: Any, what: str) -> str:
        """Return the name of the trusted key that signed a file.

        Raises:
            UnsignedError: none did; the message names `what`.
        """
        name = self.signer(signatures, path, value)
        if name is None:
            raise UnsignedError(
                f"{what} is not signed by a key of {self.source}, or was changed since: ask its publisher to sign it, "
                "or add their public key to that file"
            )
        return name


@dataclass(frozen=True, slots=True)
class Signatures:
    """The signatures in a store."""

    files: Files

    def sign(self, path: str, value: Any) -> None:
        """Write the signature of the JSON value of file `path`, if the environment has a key; else do nothing.

        Raises:
            UsageError: the key cannot be read, or is not an Ed25519 key.
            StoreError: the store cannot be written.
        """
        if key := _private():
            told = base64.b64encode(key.sign(_message(path, value))).decode()
            self.files.put(_place(path, value, key.public_key()), json_bytes({"format": _FORMAT, "signature": told}))

    def withdraw(self, path: str, value: Any) -> None:
        """Delete the signature of a move that was not made, since another writer was first."""
        if key := _private():
            self.files.remove(_place(path, value, key.public_key()))

    def read(self, path: str, value: Any, key: Any) -> Any:
        """Return the JSON value of a key's signature of file `path`; None if there is none, or it is no JSON."""
        try:
            return self.files.read_json(_place(path, value, key))
        except StoreError:
            if self.files.size(_place(path, value, key)) is None:
                raise
            return None

    def vouched(self, path: str) -> bool:
        """Return whether a key of the trust file signed file `path`; without a trust file, the own key."""
        trust = Trust.of_publisher()
        return trust is not None and trust.signer(self, path, self.files.read_json(path)) is not None

    def said(self, path: str) -> str:
        """Say who signed file `path`: `signed by NAME`, `not signed`, or what is between these.

        Names are those of the trust file, if one is given; without one no signature is checked.
        """
        trust = Trust.given()
        if trust and (name := trust.signer(self, path, self.files.read_json(path))):
            return f"signed by {name}"
        if not self.exist(path):
            return "not signed"
        return "signed, but by no key of the trust file" if trust else "signed, unchecked: no trust file is given"

    def exist(self, path: str) -> bool:
        """Return whether a file has a signature of any key, trusted or not; lists its folder."""
        folder, _, name = path.removesuffix(".json").rpartition("/")
        return any(one.startswith(f"{name}.") and one.endswith(".sig") for one in self.files.names(folder))


@dataclass(frozen=True, slots=True)
class Carried:
    """The signatures of a manifest in the folder that it was pulled to: `manifest.<key>.sig`."""

    folder: Path

    def read(self, path: str, value: Any, key: Any) -> Any:
        """Return the JSON value of a key's signature; None if there is none, or it is no JSON."""
        try:
            return json.loads((self.folder / f"manifest.{_mark(key)}.sig").read_bytes())
        except (OSError, ValueError, RecursionError):
            return None

    def keep(self, signatures: Signatures, trust: Trust, path: str) -> None:
        """Copy the signatures of trusted keys for file `path` of a store.

        Raises:
            StoreError: the store cannot be read.
            OSError: the folder cannot be written.
        """
        value = signatures.files.read_json(path)
        for key in trust.keys.values():
            if (told := signatures.read(path, value, key)) is not None:
                (self.folder / f"manifest.{_mark(key)}.sig").write_bytes(json_bytes(told))


def signs() -> bool:
    """Return whether the environment has a key to sign with.

    Raises:
        UsageError: the key cannot be read, or is not an Ed25519 key.
    """
    return _private() is not None


def _message(path: str, value: Any) -> bytes:
    try:
        return _PURPOSE + canonical_json({"path": path, "value": value})
    except (ValueError, RecursionError) as broken:
        raise StoreError(f"{path} holds what cannot be signed ({broken}): restore it from a copy") from broken


def _place(path: str, value: Any, key: Any) -> str:
    """Return the path of a key's signature; a move's nonce keeps it apart from that of a writer who lost the race."""
    nonce = value.get("nonce") if isinstance(value, dict) and "refs/" in path else None
    middle = f".{nonce}" if isinstance(nonce, str) and re.fullmatch("[0-9a-f]{32}", nonce) else ""
    return f"{path.removesuffix('.json')}{middle}.{_mark(key)}.sig"


def _mark(key: Any) -> str:
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


def _signed(told: Any, message: bytes, key: Any) -> bool:
    invalid = require("cryptography.exceptions", "sign").InvalidSignature
    try:
        key.verify(base64.b64decode(told["signature"], validate=True), message)
    except (invalid, KeyError, TypeError, ValueError):
        return False
    return True


def _public(text: str, where: str) -> Any:
    serialization = require("cryptography.hazmat.primitives.serialization", "sign")
    ed25519 = require("cryptography.hazmat.primitives.asymmetric.ed25519", "sign")
    try:
        key = serialization.load_der_public_key(base64.b64decode(text, validate=True))
    except (ValueError, binascii.Error, TypeError) as broken:
        raise UsageError(f"{where} has no public key ({broken}): give the base64 of its DER form") from broken
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise UsageError(f"{where} has a key of another kind: make one with `openssl genpkey -algorithm ed25519`")
    return key


def _private() -> Any:
    """Return the private key that the environment names; None if there is none."""
    named = os.environ.get(SIGNING_KEY, "").strip()
    if not named:
        return None
    serialization = require("cryptography.hazmat.primitives.serialization", "sign")
    ed25519 = require("cryptography.hazmat.primitives.asymmetric.ed25519", "sign")
    try:
        data = named.encode() if named.startswith("-----BEGIN") else Path(named).read_bytes()
        key = serialization.load_pem_private_key(data, password=None)
    except (OSError, ValueError, TypeError) as broken:  # the error may repeat what was given, so it is not told
        raise UsageError(
            f"{SIGNING_KEY} is no readable private key ({type(broken).__name__}): give one as PEM, without a "
            "passphrase, or the path of its file"
        ) from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise UsageError(f"{SIGNING_KEY} is a key of another kind: make one with `openssl genpkey -algorithm ed25519`")
    return key


def as_stored(value: Any) -> Any:
    """Return JSON values as they are read back from a file."""
    return json.loads(json_bytes(value))
