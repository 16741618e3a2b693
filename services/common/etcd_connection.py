"""The connection to etcd, with fail-over between its members, TLS and authentication.

A member is used until it fails, then the next. Each has its own channel, because in a common
channel gRPC would verify the certificates of all members against the same name. An authentication
token becomes invalid after its lifetime, a restart of etcd, or a change of users. A call refused
for an invalid token was not applied, and is retried once with a new token.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import grpc.aio
from etcd3aio._protobuf import WatchStub
from etcd3aio.auth import AuthService
from etcd3aio.errors import EtcdConnectionError, EtcdError, EtcdTransientError
from etcd3aio.kv import KVService
from etcd3aio.lease import LeaseService
from etcd3aio.maintenance import MaintenanceService

from services.common.clock import monotonic_s
from services.common.errors import ConfigError, StoreError, StoreRefused, StoreTimeout
from services.common.etcd_calls import EtcdCalls
from services.common.etcd_url import parse_urls
from services.common.grpc_client import CHANNEL_OPTIONS
from services.common.tls import CertificateFiles, Certificates, CertificateSource

# etcd treats a ping on a connection without calls as an attack, and closes the connection.
ETCD_OPTIONS = {
    **dict(CHANNEL_OPTIONS),
    "grpc.keepalive_permit_without_calls": 0,
    # A name may resolve to several members.
    "grpc.lb_policy_name": "round_robin",
}
CALL_TIMEOUT_S = 3.0
LOG_INTERVAL_S = 30.0
REPLACED_CHANNEL_S = 15.0
"""How long a replaced channel stays open for its running calls; longer than any call."""

# etcd reports these conditions by message only.
TOKEN_REFUSALS = ("user name is empty", "revision of auth store is old", "invalid auth token")
REFUSALS = {
    "user name is empty": "set 'etcd_user' and 'etcd_password'",
    "invalid user ID or password": "correct 'etcd_user' or 'etcd_password'",
    "authentication is not enabled": "enable it (`etcdctl auth enable`) or remove 'etcd_user'",
    "permission denied": "grant its role to read and write all keys below 'etcd_prefix'",
}

log = logging.getLogger(__name__)
T = TypeVar("T")
FAILURES = (TimeoutError, EtcdError, grpc.RpcError)
UNREACHABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@dataclass(frozen=True, slots=True)
class EtcdLogin:
    """Credentials and TLS files for etcd."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    files: CertificateFiles = field(default_factory=lambda: CertificateFiles("etcd"))


class EtcdMember:
    """A channel to an etcd member, with its service clients."""

    def __init__(self, address: str, tls: bool, certificates: Certificates | None) -> None:
        options = tuple(ETCD_OPTIONS.items())
        if tls:
            # Without a configured CA, public CAs are trusted.
            certificates = certificates or Certificates(None, None, None)
            credentials = grpc.ssl_channel_credentials(
                certificates.ca, certificates.key, certificates.cert
            )
            self._channel = grpc.aio.secure_channel(address, credentials, options=options)
        else:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        self.kv = KVService(self._channel, max_attempts=1)
        self.lease = LeaseService(self._channel, max_attempts=1)
        self.auth = AuthService(self._channel, max_attempts=1)
        self.maintenance = MaintenanceService(self._channel, max_attempts=1)
        self._watch = WatchStub(self._channel).Watch
        self._token = ""

    @property
    def token(self) -> str:
        """The authentication token of calls; empty without authentication."""
        return self._token

    @token.setter
    def token(self, token: str) -> None:
        self._token = token
        for service in (self.kv, self.lease, self.maintenance):
            service.set_token(token or None)

    def open_watch(self) -> Any:
        """A new watch stream: a raw gRPC call with untyped messages."""
        return self._watch(metadata=(("token", self._token),) if self._token else None)

    async def close(self) -> None:
        """Close the channel, cancelling its calls."""
        await self._channel.close(None)


Operation = Callable[[EtcdMember], Awaitable[T]]


class EtcdConnection:
    """Calls the current etcd member, and switches to the next if it is unreachable."""

    def __init__(self, url: str, login: EtcdLogin) -> None:
        """`url`: in the format of `parse_urls`.

        Raises:
            ConfigError: if the URL is invalid or a certificate file is unusable.
        """
        self.calls = EtcdCalls()
        self._url = url
        self._endpoints = parse_urls(url)
        self._login = login
        if login.files.given and not self._endpoints.tls:
            raise ConfigError(
                f"certificates for etcd are set, but {url} is not encrypted; write https://, or"
                " remove 'etcd_ca_file', 'etcd_cert_file' and 'etcd_key_file'"
            )
        self._source = CertificateSource(login.files) if self._endpoints.tls else None
        self._certificates: Certificates | None = None
        self._index = 0
        self._logged_s = -LOG_INTERVAL_S
        self._members: dict[str, EtcdMember] = {}
        # Members with former certificates, and when they were replaced; their calls may finish.
        self._replaced: list[tuple[float, EtcdMember]] = []
        self._logging_in = asyncio.Lock()

    async def call(self, operation: Operation[T]) -> T:
        """The result of `operation` on the current member.

        Raises:
            StoreTimeout: without an answer in time; a write may have been applied.
            StoreRefused: if etcd rejects this user, or denies it the operation.
            StoreError: if the call failed otherwise.
        """
        try:
            return await self._attempt(operation)
        except FAILURES as error:
            raise self._translated(error) from error

    async def call_any(self, operation: Operation[T]) -> T:
        """As `call`, but tries the members until one answers; for idempotent operations."""
        # Each failed attempt switches members; the last attempt raises.
        for _ in self._endpoints.addresses[1:]:
            try:
                return await self._attempt(operation)
            except FAILURES as error:
                if not _is_unreachable(error):
                    raise self._translated(error) from error
        return await self.call(operation)

    async def member(self) -> EtcdMember:
        """The current member, with a channel that uses the current certificates."""
        await self._close_replaced()
        certificates = self._source.current() if self._source is not None else None
        if certificates is not self._certificates:
            self._replaced += [(monotonic_s(), member) for member in self._members.values()]
            self._members, self._certificates = {}, certificates
        address = self._address()
        if address not in self._members:
            self._members[address] = EtcdMember(address, self._endpoints.tls, certificates)
        return self._members[address]

    async def close(self) -> None:
        """Close all channels, if any."""
        members = [*self._members.values(), *(member for _, member in self._replaced)]
        self._members, self._replaced = {}, []
        for member in members:
            await member.close()

    async def _attempt(self, operation: Operation[T]) -> T:
        """Call the current member; switch to the next if it is unreachable."""
        index = self._index
        try:
            with self.calls.timed(FAILURES):
                return await self._with_token(await self.member(), operation)
        except FAILURES as error:
            if _is_unreachable(error):
                self._switch_from(index)
            raise

    async def _with_token(self, member: EtcdMember, operation: Operation[T]) -> T:
        if self._login.user is None:
            return await operation(member)
        if not member.token:
            await self._log_in(member, "")
        token = member.token
        try:
            return await operation(member)
        except (EtcdError, grpc.RpcError) as error:
            if not _is_token_refused(error):
                raise
        # A call with an invalid token was not applied, so repeating it is safe.
        await self._log_in(member, token)
        return await operation(member)

    async def _log_in(self, member: EtcdMember, refused: str) -> None:
        """Get a token other than `refused`; concurrent calls share a single login."""
        user, password = self._login.user or "", self._login.password or ""
        async with self._logging_in:
            if member.token == refused:
                answer = await member.auth.authenticate(user, password, timeout=CALL_TIMEOUT_S)
                member.token = answer.token

    def _switch_from(self, index: int) -> None:
        """Switch to the next member, unless another call has already done so."""
        addresses = self._endpoints.addresses
        if index == self._index and len(addresses) > 1:
            self._index = (index + 1) % len(addresses)
            # While no member answers, every call switches: limit the log lines.
            if monotonic_s() - self._logged_s > LOG_INTERVAL_S:
                self._logged_s = monotonic_s()
                log.warning(
                    "etcd at %s does not answer; switching to %s", addresses[index], self._address()
                )

    def _address(self) -> str:
        return self._endpoints.addresses[self._index]

    async def _close_replaced(self) -> None:
        while self._replaced and monotonic_s() - self._replaced[0][0] > REPLACED_CHANNEL_S:
            await self._replaced.pop(0)[1].close()

    def _translated(self, error: Exception) -> StoreError:
        """The StoreError for an error of the client library."""
        if isinstance(error, TimeoutError | EtcdTransientError):
            return StoreTimeout("etcd did not answer in time")
        details = str(error)
        if isinstance(error, grpc.aio.AioRpcError):
            details = error.details() or error.code().name
        for text, remedy in REFUSALS.items():
            if text in details:
                user = f"user '{self._login.user}'" if self._login.user else "a call without user"
                return StoreRefused(f"etcd at {self._url} refuses {user} ({text}); {remedy}")
        return StoreError(f"etcd call failed: {details}")


def _is_unreachable(error: Exception) -> bool:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() in UNREACHABLE
    return isinstance(error, TimeoutError | EtcdTransientError | EtcdConnectionError)


def _is_token_refused(error: Exception) -> bool:
    details = (error.details() or "") if isinstance(error, grpc.aio.AioRpcError) else str(error)
    return any(text in details for text in TOKEN_REFUSALS)
