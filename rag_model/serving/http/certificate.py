"""A TLS certificate and its key in files, read again when they have changed, as when they were renewed."""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from rag_model.errors import UsageError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files: the certificate with its chain, and the private key without a password."""

    certificate: Path
    key: Path

    def stamps(self) -> tuple[tuple[int, int, int], ...]:
        """Return what changes when a file changes.

        Raises:
            UsageError: a file is missing.
        """
        try:
            found = [path.stat() for path in (self.certificate, self.key)]
        except OSError as missing:
            raise UsageError(f"{missing.filename} cannot be read ({missing.strerror}): give a PEM file") from missing
        return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in found)

    def load(self, context: ssl.SSLContext) -> None:
        """Use both for connections of `context` from now on.

        Raises:
            UsageError: a file is missing or damaged, the key has a password, or it belongs to another certificate.
        """
        try:
            context.load_cert_chain(self.certificate, self.key, password=lambda: b"")
        except (OSError, ValueError) as broken:  # ssl.SSLError is an OSError
            reason = getattr(broken, "reason", None) or broken.__class__.__name__
            raise UsageError(
                f"{self.certificate} and {self.key} are no certificate with its key ({reason}): give two PEM files, "
                "and a key without a password"
            ) from broken


class Certificate:
    """The certificate that a server uses."""

    def __init__(self, files: CertificateFiles) -> None:
        """Check the files.

        Raises:
            UsageError: as `CertificateFiles.load`.
        """
        self.files = files
        self._seen = files.stamps()
        self._check()

    def renew(self, context: ssl.SSLContext) -> None:
        """Read the files again if they have changed; files that cannot be used change nothing, and are logged."""
        try:
            seen = self.files.stamps()
            if seen == self._seen:
                return
            self._seen = seen
            self._check()
            self.files.load(context)
            _LOG.info("%s was read again", self.files.certificate)
        except UsageError as broken:
            _LOG.error("%s; the certificate that was read before is still used", broken)

    def _check(self) -> None:
        """Try the files in a context of their own: a certificate without its key would break a working one."""
        self.files.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
