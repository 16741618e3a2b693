"""Certificate files: checked when they are read, and read again when they change."""

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
    """PEM files: the CAs that peers are checked against, our certificate and its private key.

    `owner` begins the names of their configuration keys, such as "tls" of `tls_ca_file`.
    """

    owner: str
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @property
    def given(self) -> bool:
        """Whether any file is named."""
        return any((self.ca, self.cert, self.key))


@dataclass(frozen=True, slots=True)
class Certificates:
    """What was in the files, PEM."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None


class CertificateSource:
    """The certificates in `files` as they are now."""

    def __init__(self, files: CertificateFiles) -> None:
        """Read the files.

        Raises:
            ConfigError: if one cannot be read or is no certificate, or the key is another's.
        """
        self._files = files
        self._stamp = _stamp(files)
        self._certificates = read_certificates(files)
        self._refused: Stamp | None = None
        self._reading = threading.Lock()

    def current(self) -> Certificates:
        """The same object until the files change; from any thread.

        While new files are not usable (written only in part, say) the former ones stay in force.
        """
        with self._reading:
            return self._current()

    def _current(self) -> Certificates:
        stamp: Stamp | None = None
        try:
            stamp = _stamp(self._files)
            if stamp in (self._stamp, self._refused):
                return self._certificates
            certificates = read_certificates(self._files)
        except ConfigError as error:
            log.warning("certificates stay as they were: %s", error)
            # Not again before something changes. Files that changed while they were read, or
            # cannot be looked at, were not judged: they are tried the next time.
            self._refused = stamp if _stamp_or_none(self._files) == stamp else None
            return self._certificates
        self._stamp, self._certificates = stamp, certificates
        log.info("certificates of '%s_cert_file' were read again", self._files.owner)
        return certificates


def read_certificates(files: CertificateFiles) -> Certificates:
    """What is in the files, all of one moment.

    Raises:
        ConfigError: if one cannot be read or is no certificate, or the key is another's.
    """
    for _ in range(READ_ATTEMPTS):
        before = _stamp(files)
        check_certificates(files)
        read = Certificates(*(_read(files, part) for part in ("ca", "cert", "key")))
        if _stamp(files) == before:
            return read
    raise ConfigError(
        f"the files of '{files.owner}_cert_file' change while they are read; start again when they"
        " are whole"
    )


def check_certificates(files: CertificateFiles) -> None:
    """Raise ConfigError unless the files are certificates, and the key is the certificate's."""
    for part in ("ca", "cert", "key"):
        _read(files, part)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if files.ca is not None:
        try:
            context.load_verify_locations(cafile=files.ca)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"'{files.owner}_ca_file' ({files.ca}) holds no PEM certificate; give the CA's"
            ) from error
    if files.cert is not None and files.key is not None:
        try:
            # An encrypted key would be asked for at the terminal.
            context.load_cert_chain(files.cert, files.key, password=b"")
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"'{files.owner}_cert_file' ({files.cert}) and '{files.owner}_key_file'"
                f" ({files.key}) are not a PEM certificate and its unencrypted private key; give"
                " the two that belong together"
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
    """What differs after a file was written or replaced."""
    stamps = []
    for part in ("ca", "cert", "key"):
        path: Path | None = getattr(files, part)
        if path is not None:
            try:
                seen = path.stat()
            except OSError as error:
                raise _unreadable(files, part, path, error) from error
            stamps.append((seen.st_mtime_ns, seen.st_size, seen.st_ino))
    return tuple(stamps)


def _stamp_or_none(files: CertificateFiles) -> Stamp | None:
    try:
        return _stamp(files)
    except ConfigError:
        return None


def _unreadable(files: CertificateFiles, part: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"'{files.owner}_{part}_file' cannot be read ({path}: {error.strerror}); correct the path"
        " or the permissions"
    )
