"""Wraps the part of UCX that lanes use: tagged messages of any size (core API of `ucxx`).

A lane carries one kind of traffic, activations or bulk data, between two engines.

Endpoints connect to UCX worker addresses. The lanes exchange the addresses in their handshake, so
UCX needs no listener of its own, which would accept on all interfaces. A lane first probes for a
message, which returns its size, and then fetches it: a large message stays in its sender's memory
until it is fetched.

Not thread-safe: at most one thread at a time may call. No other module loads `ucxx`.
"""

import ctypes
import logging
import os
from dataclasses import dataclass
from typing import Any

from services.worker.engine.transfer.errors import UcxUnavailable
from services.worker.engine.transfer.frame import Bytes
from services.worker.engine.transfer.ucx_config import UcxConfig

log = logging.getLogger(__name__)

_TRANSPORTS = 1 << 3  # UCP_EP_ATTR_FIELD_TRANSPORTS
_NAME_BYTES = 32  # UCP_ENTITY_NAME_MAX
_ADDRESS_BYTES = 128  # sizeof(struct sockaddr_storage)
_ROUTES_MAX = 16


class _Route(ctypes.Structure):
    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _Routes(ctypes.Structure):
    _fields_ = (
        ("entries", ctypes.POINTER(_Route)),
        ("count", ctypes.c_uint),
        ("entry_bytes", ctypes.c_size_t),
    )


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("fields", ctypes.c_uint64),
        ("name", ctypes.c_char * _NAME_BYTES),
        ("local_address", ctypes.c_byte * _ADDRESS_BYTES),
        ("remote_address", ctypes.c_byte * _ADDRESS_BYTES),
        ("routes", _Routes),
        ("user_data", ctypes.c_void_p),
    )


def routes_of(handle: int) -> list[str]:
    """Return the endpoint's transports and devices, such as "tcp/eth0" or "sysv/memory".

    `handle` is the UCP endpoint; call this on the thread that uses it. Empty if UCX reports none.
    """
    # ucxx has no binding for `ucp_ep_query`: the structures above are those of UCX's header.
    try:
        query = ctypes.CDLL("libucp.so.0").ucp_ep_query
    except (OSError, AttributeError):
        return []
    routes = (_Route * _ROUTES_MAX)()
    attributes = _Attributes(fields=_TRANSPORTS)
    attributes.routes = _Routes(
        ctypes.cast(routes, ctypes.POINTER(_Route)), _ROUTES_MAX, ctypes.sizeof(_Route)
    )
    query.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Attributes))
    if query(handle, ctypes.byref(attributes)) != 0:
        return []
    reported = routes[: attributes.routes.count]
    return [f"{route.transport.decode()}/{route.device.decode()}" for route in reported]


TAG_MAX = 2**63 - 1
# Defaults that must be set before the library is loaded; environment variables override them.
_ENVIRONMENT = {
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_HANDLE_ERRORS": "none",  # else a crash prints a backtrace and may not end the process
    "UCX_LOG_FILE": "stderr",
    "UCXX_LOG_LEVEL": "fatal",  # ucxx logs lost peers as errors; the lane reports them already
}


def load_ucxx() -> Any:
    """Import ucxx's core API. Raises UcxUnavailable with cause and remedy."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        # ucxx loads libucx itself only if an allocator for CUDA memory is installed.
        import libucx

        libucx.load_library()
        import ucxx._lib.libucxx as ucxx
    except (ImportError, OSError) as error:
        raise UcxUnavailable(
            f"UCX cannot be loaded ({error}), so this worker serves alone and cannot merge with "
            "others; install the packages libucx-cu13, libucxx-cu13 and ucxx-cu13"
        ) from error
    return ucxx


@dataclass(frozen=True, slots=True)
class IncomingMessage:
    """A message that has started to arrive, with a handle to fetch it."""

    tag: int
    size_bytes: int
    handle: Any


class UcxRequest:
    """A send or receive in progress; keeps its memory alive while UCX uses it."""

    def __init__(self, ucxx: Any, request: Any, memory: Any) -> None:
        self._ucxx = ucxx
        self._request = request
        self._memory = memory

    @property
    def completed(self) -> bool:
        """Whether UCX no longer uses the memory."""
        return bool(self._request.completed)

    def error(self) -> str | None:
        """The error of a completed request; None on success."""
        try:
            self._request.check_error()
        except self._ucxx.UCXError as error:
            return str(error) or type(error).__name__
        return None


class Endpoint:
    """UCX's connection to one peer."""

    def __init__(self, ucxx: Any, endpoint: Any, array: Any) -> None:
        self._ucxx = ucxx
        self._endpoint = endpoint
        self._array = array

    @property
    def alive(self) -> bool:
        """False once UCX has detected the loss of the peer; over shared memory it never does."""
        return bool(self._endpoint.alive)

    @property
    def routes(self) -> list[str]:
        """The endpoint's transports and devices, such as "tcp/eth0"; see `routes_of`."""
        return routes_of(int(self._endpoint.handle))

    def send(self, message: Bytes, tag: int) -> UcxRequest:
        """Start to send a message. Raises ConnectionError."""
        array = self._array(message)
        try:
            request = self._endpoint.tag_send(array, tag=self._ucxx.UCXXTag(tag))
        except self._ucxx.UCXError as error:
            raise ConnectionError(str(error)) from error
        return UcxRequest(self._ucxx, request, array)

    def abort(self) -> None:
        """Abort all requests of the endpoint, without the peer's cooperation."""
        try:
            self._endpoint.close_blocking()
        except self._ucxx.UCXError as error:
            log.warning("cannot close a UCX endpoint: %s", error)


class UcxTransport:
    """A UCX context and worker. Raises UcxUnavailable if UCX or all of its transports fail."""

    def __init__(self, config: UcxConfig) -> None:
        self._ucxx = load_ucxx()
        from ucxx._lib.arr import Array

        self._array = Array  # ucxx's type for memory
        features = (self._ucxx.Feature.TAG, self._ucxx.Feature.WAKEUP)
        self._worker: Any = None
        try:
            self._context = self._ucxx.UCXContext(config.options(), feature_flags=features)
            self._open_worker()
        except self._ucxx.UCXError as error:
            raise UcxUnavailable(
                f"UCX cannot use {config.transports} on {config.devices or 'any device'} ({error}),"
                " so this worker cannot merge with others; choose other transports or devices"
            ) from error
        self._any_tag = self._ucxx.UCXXTag(0)
        self._no_mask = self._ucxx.UCXXTagMask(0)

    @property
    def address(self) -> bytes:
        """The UCX worker address, to which peers open endpoints. Any thread may read it."""
        return self._address

    def fileno(self) -> int:
        """A descriptor that is readable when `progress` has work, after `arm` returned True."""
        return int(self._worker.epoll_file_descriptor)

    def renew(self) -> None:
        """Replace the UCX worker; address and descriptor change, and all requests are lost.

        The old worker is released first, unless a request keeps it. Raises UcxUnavailable, after
        which the transport is unusable.
        """
        self._worker = None
        try:
            self._open_worker()
        except self._ucxx.UCXError as error:
            raise UcxUnavailable(f"UCX cannot create another worker: {error}") from error

    def _open_worker(self) -> None:
        self._worker = self._ucxx.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        self._address = bytes(self._worker.address)

    def progress(self) -> None:
        """Let UCX make progress on its requests."""
        if self._worker is not None:
            self._worker.progress()

    def arm(self) -> bool:
        """Request a wake-up through `fileno`; returns False if `progress` has work already."""
        return bool(self._worker.arm())

    def open(self, address: bytes) -> Endpoint:
        """Open an endpoint to the peer with that address. Raises ConnectionError."""
        ucxx = self._ucxx
        try:
            target = ucxx.UCXAddress.create_from_buffer(address)
            endpoint = ucxx.UCXEndpoint.create_from_worker_address(
                self._worker, target, endpoint_error_handling=True
            )
        except ucxx.UCXError as error:
            raise ConnectionError(str(error)) from error
        return Endpoint(ucxx, endpoint, self._array)

    def probe(self) -> IncomingMessage | None:
        """Return the oldest message that has begun to arrive, if any; the caller must fetch it."""
        probed = self._worker.tag_probe(self._any_tag, self._no_mask, remove=True)
        return IncomingMessage(probed.sender_tag, probed.length, probed) if probed.matched else None

    def fetch(self, arrival: IncomingMessage, memory: Bytes) -> UcxRequest:
        """Start to receive into `memory`, which has the message's size. Raises ConnectionError."""
        array = self._array(memory)
        try:
            request = self._worker.tag_recv_with_handle(array, arrival.handle)
        except self._ucxx.UCXError as error:
            raise ConnectionError(str(error)) from error
        return UcxRequest(self._ucxx, request, array)
