"""How a service speaks gRPC with the others: over mutual TLS and as itself, or in clear.

A channel shows the certificate of the moment at which it is opened, a server that of the moment at
which a connection is made; connections that stand are left alone. Channels between services live
as long as their one stream, so a service that reconnects shows the new certificate.
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
    """Channels to other services and what a server of ours needs for theirs."""

    def __init__(self, source: CertificateSource | None = None) -> None:
        """`source`: CA, certificate and key of this service; None: in clear."""
        self._source = source
        self._opened_with: Certificates | None = None
        self._credentials: grpc.ChannelCredentials | None = None

    def dial(self, address: str, role: str) -> grpc.aio.Channel:
        """A channel to `address`; over TLS only to a peer with a certificate of `role`."""
        if self._source is None:
            return open_channel(address)
        certificates = self._source.current()
        if self._credentials is None or certificates is not self._opened_with:
            self._opened_with = certificates
            self._credentials = grpc.ssl_channel_credentials(
                certificates.ca, certificates.key, certificates.cert
            )
        # Pods change addresses. Whatever the address: the service there has to be of that role.
        options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", name_of(role)))
        return grpc.aio.secure_channel(address, self._credentials, options=options)

    @property
    def interceptors(self) -> Sequence[grpc.aio.ServerInterceptor]:
        """What looks at calls to a server before its servicers do."""
        return () if self._source is None else (Authorization(),)

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Have `server` listen at `address`; the bound port. Raises RuntimeError."""
        if self._source is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, server_credentials(self._source))


def transport_of(config: ServiceConfig) -> Transport:
    """The transport that a service is configured with.

    Raises:
        ConfigError: if a file is not usable.
    """
    if config.tls_ca_file is None:
        return Transport()
    files = CertificateFiles("tls", config.tls_ca_file, config.tls_cert_file, config.tls_key_file)
    return Transport(CertificateSource(files))


def server_credentials(source: CertificateSource) -> grpc.ServerCredentials:
    """TLS with the certificate of the moment at which a connection is made.

    Clients must have a certificate of the source's CA, if it has one.
    """
    served = source.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """Asked by gRPC for every new connection, in a thread of its own."""
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
