"""A development CA that issues certificates with P-256 keys.

For laptops, tests and first clusters. Not for production: the CA's key is stored beside the
certificates.
"""

import datetime
import ipaddress
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.common.role import ROLES, name_of
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError

CA_DAYS = 3650
# Certificates are valid from a while ago, because clocks of hosts differ.
EARLIER = datetime.timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its private key, PEM."""

    cert: bytes
    key: bytes


class Authority:
    """A CA that issues certificates for servers and clients."""

    def __init__(self, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._cert = cert
        self._key = key

    @classmethod
    def create(cls, name: str, days: int = CA_DAYS) -> "Authority":
        """Create a self-signed CA."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(name)
        start = _now() - EARLIER
        cert = (
            _builder(subject, key, start, _now() + datetime.timedelta(days=days))
            .issuer_name(subject)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(cert, key)

    @classmethod
    def read(cls, cert: Path, key: Path) -> "Authority":
        """Read the CA from two PEM files.

        Raises:
            ValueError: if the files do not hold a matching pair.
            OSError: if a file cannot be read.
        """
        private = serialization.load_pem_private_key(key.read_bytes(), password=None)
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise ValueError("the key is not an elliptic-curve key")
        certificate = x509.load_pem_x509_certificate(cert.read_bytes())
        if certificate.public_key() != private.public_key():
            raise ValueError("the key does not match the certificate")
        return cls(certificate, private)

    @property
    def files(self) -> Issued:
        """The certificate and key of the CA itself."""
        return _pem(self._cert, self._key)

    def issue(
        self, name: str, hosts: Iterable[str], lifetime: datetime.timedelta, age_s: float = 0.0
    ) -> Issued:
        """Issue a certificate with common name `name` for DNS names and IP addresses `hosts`.

        The validity starts `age_s` seconds ago; an age above the lifetime yields an expired
        certificate.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        start = _now() - datetime.timedelta(seconds=age_s)
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        # `create` made the key, or `read` checked its type.
        issuer = self._key.public_key()
        cert = (
            _builder(_name(name), key, start - EARLIER, start + lifetime)
            .issuer_name(self._cert.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(both), critical=False)
            .add_extension(
                x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        return _pem(cert, key)


def write_pair(folder: Path, name: str, issued: Issued) -> None:
    """Write `<name>.pem` and `<name>-key.pem` atomically; the key is readable by its owner only."""
    _replace(folder / f"{name}-key.pem", issued.key, 0o600)
    _replace(folder / f"{name}.pem", issued.cert, 0o644)


def _replace(path: Path, content: bytes, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _builder(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    start: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Issued:
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return Issued(cert.public_bytes(serialization.Encoding.PEM), private)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


CA = "ca"
# Clients reach etcd and the gateway by host names.
HOSTED = ("etcd", "http")
DEFAULT_HOSTS = ("localhost", "127.0.0.1", "::1")


def write_certificates(folder: Path, hosts: Sequence[str], days: int) -> list[str]:
    """Write `ca.pem` and a pair for each role, etcd and HTTP; returns the names of the pairs.

    An existing CA is kept and issues the new certificates, so that running services, which reload
    changed files, continue to trust each other.

    Raises:
        CommandError: if the folder cannot be written, or its CA is invalid.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        authority = _authority(folder)
        lifetime = datetime.timedelta(days=days)
        for role in ROLES:
            write_pair(folder, role, authority.issue(role, (name_of(role),), lifetime))
        for name in HOSTED:
            every = dict.fromkeys((*DEFAULT_HOSTS, name, *hosts))
            write_pair(folder, name, authority.issue(name, every, lifetime))
    except OSError as error:
        raise CommandError(
            f"cannot write certificates into {folder}: {error.strerror}; choose another folder",
            EXIT_UNUSABLE,
        ) from error
    except ValueError as error:
        raise CommandError(
            f"the CA in {folder} or a host name cannot be used ({error}); correct the name, or"
            " delete ca.pem and ca-key.pem there",
            EXIT_UNUSABLE,
        ) from error
    return [*ROLES, *HOSTED]


def _authority(folder: Path) -> Authority:
    cert, key = folder / f"{CA}.pem", folder / f"{CA}-key.pem"
    if cert.exists() and key.exists():
        return Authority.read(cert, key)
    authority = Authority.create("tideserve development CA")
    write_pair(folder, CA, authority.files)
    return authority
