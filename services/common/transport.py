"""gRPC channels and ports between services, over mutual TLS or in plain text.

A channel uses the certificates at the time of its creation, a server those at the time of each new
connection. Open connections do not change. Channels between services live as long as their single
stream, so a service that reconnects uses new certificates.
"""

from collections.abc import Sequence

import grpc
import grpc.aio

from services.common.authorization import Authorization
from services.common.grpc_client import CHANNEL_OPTIONS, open_channel
from services.common.role import name_of
from services.common.service_config import ServiceConfig
from services.common.tls import CertificateFiles, Certificates, CertificateSource


class Transport:
    """Opens channels to other services, and ports for their channels."""

    def __init__(self, source: CertificateSource | None = None) -> None:
        """`source`: CA, certificate and key of this service; None: plain text."""
        self._source = source
        self._opened_with: Certificates | None = None
        self._credentials: grpc.ChannelCredentials | None = None

    def dial(self, address: str, role: str) -> grpc.aio.Channel:
        """A channel to `address`; with TLS, the peer's certificate must have `role`."""
        if self._source is None:
            return open_channel(address)
        certificates = self._source.current()
        if self._credentials is None or certificates is not self._opened_with:
            self._opened_with = certificates
            self._credentials = grpc.ssl_channel_credentials(
                certificates.ca, certificates.key, certificates.cert
            )
        # Pods change addresses, so the role replaces the host name in the certificate.
        options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", name_of(role)))
        return grpc.aio.secure_channel(address, self._credentials, options=options)

    @property
    def interceptors(self) -> Sequence[grpc.aio.ServerInterceptor]:
        """Interceptors that a server must have."""
        return () if self._source is None else (Authorization(),)

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Make `server` listen at `address`; returns the bound port. Raises RuntimeError."""
        if self._source is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, server_credentials(self._source))


def transport_of(config: ServiceConfig) -> Transport:
    """The transport of a service's configuration.

    Raises:
        ConfigError: if a certificate file is unusable.
    """
    if config.tls_ca_file is None:
        return Transport()
    files = CertificateFiles("tls", config.tls_ca_file, config.tls_cert_file, config.tls_key_file)
    return Transport(CertificateSource(files))


def server_credentials(source: CertificateSource) -> grpc.ServerCredentials:
    """TLS credentials that use the current certificates for each new connection.

    If the source has a CA, clients must present a certificate that it has signed.
    """
    served = source.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """Return new certificates, if any; gRPC calls this per connection, in its own thread."""
        nonlocal served
        certificates = source.current()
        if certificates is served:
            return None
        served = certificates
        return _configuration(certificates)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(served),
        changed,  # type: ignore[arg-type]  # None means that nothing has changed
        require_client_authentication=served.ca is not None,
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    pair = (certificates.key or b"", certificates.cert or b"")
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=certificates.ca)
