"""Reads certificate files, validates them, and reloads them when they change."""

import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import ConfigError

log = logging.getLogger(__name__)

READ_ATTEMPTS = 3

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Paths of PEM files: CAs that verify peers, this service's certificate, its private key.

    `owner` is the prefix of their configuration keys: "tls" for `tls_ca_file`.
    """

    owner: str
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @property
    def given(self) -> bool:
        """Whether any file is configured."""
        return any((self.ca, self.cert, self.key))


@dataclass(frozen=True, slots=True)
class Certificates:
    """Contents of the files, in PEM."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None


class CertificateSource:
    """The current certificates in `files`."""

    def __init__(self, files: CertificateFiles) -> None:
        """Read the files.

        Raises:
            ConfigError: if a file is unreadable or no certificate, or the key does not match.
        """
        self._files = files
        self._stamp = _stamp(files)
        self._certificates = read_certificates(files)
        self._refused: Stamp | None = None
        self._lock = threading.Lock()

    def current(self) -> Certificates:
        """The certificates; the same object until the files change. Thread-safe.

        While new files are invalid, such as partially written, the old certificates are returned.
        """
        with self._lock:
            return self._current()

    def _current(self) -> Certificates:
        stamp: Stamp | None = None
        try:
            stamp = _stamp(self._files)
            if stamp in (self._stamp, self._refused):
                return self._certificates
            certificates = read_certificates(self._files)
        except ConfigError as error:
            log.warning("keeping the previous certificates: %s", error)
            # Do not retry before the next change. Files that changed during the read, or that
            # cannot be examined, are retried at the next call.
            self._refused = stamp if _stamp_or_none(self._files) == stamp else None
            return self._certificates
        self._stamp, self._certificates = stamp, certificates
        log.info("reloaded the certificates of '%s_cert_file'", self._files.owner)
        return certificates


class ServerTls:
    """TLS with certificate rotation: new connections use the newest valid certificate."""

    def __init__(self, files: CertificateFiles, alpn: str) -> None:
        """Load the files; clients must have a certificate of `files.ca`, if that is given.

        `alpn`: the protocol that the server speaks.

        Raises:
            ConfigError: if the files are not a certificate and its key.
        """
        self._files, self._alpn = files, alpn
        self._source = CertificateSource(files)
        self._loaded: Certificates = self._source.current()
        # TLS handshakes start with `context`; its SNI callback switches to the newest context.
        self.context = self._newest = self._load()
        self.context.sni_callback = self._choose

    def _choose(
        self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        certificates = self._source.current()
        if certificates is not self._loaded:
            try:
                self._newest = self._load()
                self._loaded = certificates
            except (ssl.SSLError, OSError) as error:
                # The files changed again during the load; the next connection retries.
                log.warning(
                    "cannot load the new '%s_cert_file', the previous stays: %s",
                    self._files.owner,
                    error,
                )
        connection.context = self._newest

    def _load(self) -> ssl.SSLContext:
        files = self._files
        assert files.cert is not None, "a server has a certificate"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([self._alpn])
        context.load_cert_chain(files.cert, files.key)
        if files.ca is not None:
            context.load_verify_locations(cafile=files.ca)
            context.verify_mode = ssl.CERT_REQUIRED
            # A resumed session would outlast a change of the CA.
            context.num_tickets = 0
            context.options |= ssl.OP_NO_TICKET
        return context


def read_certificates(files: CertificateFiles) -> Certificates:
    """Contents of the files, read while none of them changes.

    Raises:
        ConfigError: if a file is unreadable or no certificate, or the key does not match.
    """
    # Certificate and key are replaced one after the other: retry until neither changes.
    for _ in range(READ_ATTEMPTS):
        before = _stamp(files)
        check_certificates(files)
        read = Certificates(*(_read(files, part) for part in ("ca", "cert", "key")))
        if _stamp(files) == before:
            return read
    raise ConfigError(
        f"the files of '{files.owner}_cert_file' keep changing while they are read; restart when"
        " they are complete"
    )


def check_certificates(files: CertificateFiles) -> None:
    """Raise ConfigError unless the files are certificates and the key matches its certificate."""
    for part in ("ca", "cert", "key"):
        _read(files, part)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if files.ca is not None:
        try:
            context.load_verify_locations(cafile=files.ca)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"'{files.owner}_ca_file' ({files.ca}) contains no PEM certificate; give the CA's"
            ) from error
    if files.cert is not None and files.key is not None:
        try:
            # Without a password, OpenSSL would prompt for that of an encrypted key.
            context.load_cert_chain(files.cert, files.key, password=b"")
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"'{files.owner}_cert_file' ({files.cert}) and '{files.owner}_key_file'"
                f" ({files.key}) are not a PEM certificate and its unencrypted private key; give"
                " a matching pair"
            ) from error


def _read(files: CertificateFiles, part: str) -> bytes | None:
    path: Path | None = getattr(files, part)
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(files, part, path, error) from error


def _stamp(files: CertificateFiles) -> Stamp:
    """Modification times, sizes and inodes, which change when a file is written or replaced."""
    stamps = []
    for part in ("ca", "cert", "key"):
        path: Path | None = getattr(files, part)
        if path is not None:
            try:
                status = path.stat()
            except OSError as error:
                raise _unreadable(files, part, path, error) from error
            stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(stamps)


def _stamp_or_none(files: CertificateFiles) -> Stamp | None:
    try:
        return _stamp(files)
    except ConfigError:
        return None


def _unreadable(files: CertificateFiles, part: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot read '{files.owner}_{part}_file' ({path}: {error.strerror}); correct the path"
        " or the permissions"
    )
