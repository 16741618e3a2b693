"""TLS at the gateway's own port, with a certificate that may change while it runs."""

import logging
import ssl
from pathlib import Path

from services.common.errors import ConfigError
from services.common.tls import CertificateFiles, Certificates, CertificateSource

log = logging.getLogger(__name__)


class ServerTls:
    """Contexts for new connections; those that stand keep the certificate that they began with."""

    def __init__(self, cert: Path, key: Path) -> None:
        """Read the files.

        Raises:
            ConfigError: if they are not a certificate and its key.
        """
        self._cert, self._key = cert, key
        self._source = CertificateSource(CertificateFiles("http_tls", cert=cert, key=key))
        self._loaded: Certificates = self._source.current()
        # A handshake begins in this one, and goes on in the newest.
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
                # They changed again just now; the next connection tries again.
                log.warning("the certificate at the front stays as it was: %s", error)
        connection.context = self._newest

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._cert, self._key)
        return context


def server_tls(cert: Path | None, key: Path | None) -> ServerTls | None:
    """TLS with these files; None without any: plain HTTP. Raises ConfigError."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ConfigError(
            "'http_tls_cert_file' and 'http_tls_key_file' go together; give both or none"
        )
    return ServerTls(cert, key)
