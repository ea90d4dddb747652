"""TLS: a certificate and its key in files, which can be renewed while the service runs."""

import socket
import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rag_model.errors import UsageError
from rag_model.serving.http.server import CertificateFiles, ReloadingCertificate
from tests.fixtures.serving import TIMEOUT, HttpService, Library, run_service, wait_until


def write_certificate(folder: Path, number: int) -> CertificateFiles:
    """Write a self-signed certificate for this machine, and replace an earlier one."""
    key = ec.generate_private_key(ec.SECP256R1())
    localhost = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    present = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(localhost)
        .issuer_name(localhost)
        .public_key(key.public_key())
        .serial_number(number)
        .not_valid_before(present - timedelta(days=1))
        .not_valid_after(present + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    texts = {
        "tls.key": key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain),
        "tls.crt": certificate.public_bytes(serialization.Encoding.PEM),
    }
    for file, text in texts.items():
        (folder / f"{file}.new").write_bytes(text)
        (folder / f"{file}.new").replace(folder / file)
    return CertificateFiles(folder / "tls.crt", folder / "tls.key")


def get_served_serial(service: HttpService) -> int:
    host, port = service.url.removeprefix("https://").split(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((host, int(port)), timeout=TIMEOUT) as plain,
        context.wrap_socket(plain) as tls,
    ):
        return x509.load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"").serial_number


def test_certificate_is_served_and_renewed(shared_library: Library, dest: Path, tmp_path: Path) -> None:
    certificate = ReloadingCertificate(write_certificate(tmp_path, 1))
    with run_service(shared_library.url, dest, certificate=certificate) as service:
        service.search("who?")  # The client trusts only this certificate.
        assert get_served_serial(service) == 1
        write_certificate(tmp_path, 2)
        wait_until(lambda: get_served_serial(service) == 2)


def test_certificate_with_another_key_is_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = write_certificate(tmp_path, 1)
    certificate, context = ReloadingCertificate(files), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files.load(context)
    (tmp_path / "other").mkdir()
    write_certificate(tmp_path / "other", 2).certificate.replace(files.certificate)
    certificate.reload_if_changed(context)
    assert "is still used" in caplog.text
    files.certificate.unlink()
    certificate.reload_if_changed(context)


def test_invalid_certificate_is_explained_in_one_sentence(tmp_path: Path) -> None:
    files = write_certificate(tmp_path, 1)
    with pytest.raises(UsageError, match="cannot be read"):
        ReloadingCertificate(CertificateFiles(tmp_path / "none", files.key))
    with pytest.raises(UsageError, match="are not a certificate and its key"):
        ReloadingCertificate(CertificateFiles(files.key, files.certificate))
