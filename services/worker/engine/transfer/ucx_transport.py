"""The part of UCX that a lane uses, through the core API of `ucxx`: tagged messages of any size.

Peers reach each other by worker address. The lanes exchange these addresses in their handshake, so
UCX opens no listener of its own on every interface. A lane first probes for a message, which gives
its length, and then fetches it: a large message stays at its sender until it is fetched.

For one thread at a time. No other module loads `ucxx`.
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
    """The endpoint's transports with their devices, such as "tcp/eth0" or "sysv/memory".

    `handle` is that of UCP; call this in the thread that uses the endpoint. Empty if UCX does not
    name any. ucxx has no call for it: the structures are those of UCX's header (`ucp_ep_query`).
    """
    try:
        query = ctypes.CDLL("libucp.so.0").ucp_ep_query
    except (OSError, AttributeError):
        return []
    routes = (_Route * _ROUTES_MAX)()
    asked = _Attributes(fields=_TRANSPORTS)
    asked.routes = _Routes(
        ctypes.cast(routes, ctypes.POINTER(_Route)), _ROUTES_MAX, ctypes.sizeof(_Route)
    )
    query.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Attributes))
    if query(handle, ctypes.byref(asked)) != 0:
        return []
    told = routes[: asked.routes.count]
    return [f"{route.transport.decode()}/{route.device.decode()}" for route in told]


TAG_MAX = 2**63 - 1
# Defaults that must be set before the library is loaded; the process's environment overrides them.
_ENVIRONMENT = {
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_HANDLE_ERRORS": "none",  # or a crash prints a backtrace and may not end the process
    "UCX_LOG_FILE": "stderr",
    "UCXX_LOG_LEVEL": "fatal",  # ucxx logs lost peers as errors; the lane reports them already
}


def load_ucxx() -> Any:
    """The module of ucxx's core API. Raises UcxUnavailable with cause and remedy."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        # ucxx loads libucx by itself only where an allocator for CUDA memory is installed.
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
    """A message that has begun to arrive: its tag, its size, and a handle to fetch it."""

    tag: int
    size_bytes: int
    handle: Any


class UcxRequest:
    """A send or a fetch; keeps its memory alive while UCX uses it."""

    def __init__(self, ucxx: Any, request: Any, memory: Any) -> None:
        self._ucxx = ucxx
        self._request = request
        self._memory = memory

    @property
    def completed(self) -> bool:
        """Whether UCX does not use the memory any more."""
        return bool(self._request.completed)

    def error(self) -> str | None:
        """Why a completed request has failed; None if it has not."""
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
        """False once UCX has noticed that the peer is gone; over shared memory it never does."""
        return bool(self._endpoint.alive)

    @property
    def routes(self) -> list[str]:
        """The transports and devices that it uses, such as "tcp/eth0"; see `routes_of`."""
        return routes_of(int(self._endpoint.handle))

    def send(self, message: Bytes, tag: int) -> UcxRequest:
        """Begin to send. Raises ConnectionError."""
        array = self._array(message)
        try:
            request = self._endpoint.tag_send(array, tag=self._ucxx.UCXXTag(tag))
        except self._ucxx.UCXError as error:
            raise ConnectionError(str(error)) from error
        return UcxRequest(self._ucxx, request, array)

    def abort(self) -> None:
        """Abort all requests of the endpoint; the peer does not take part."""
        try:
            self._endpoint.close_blocking()
        except self._ucxx.UCXError as error:
            log.warning("an endpoint of UCX was not closed: %s", error)


class UcxTransport:
    """One UCX context and worker. Raises UcxUnavailable if none of the transports works."""

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
                " so this worker cannot merge with others; choose others"
            ) from error
        self._any_tag = self._ucxx.UCXXTag(0)
        self._no_mask = self._ucxx.UCXXTagMask(0)

    @property
    def address(self) -> bytes:
        """The worker address, to which a peer opens an endpoint; any thread may ask."""
        return self._address

    def fileno(self) -> int:
        """A descriptor that is readable when `progress` has work, after `arm` returned True."""
        return int(self._worker.epoll_file_descriptor)

    def renew(self) -> None:
        """Go on with a new UCX worker, of another address; what was under way is lost.

        The descriptor is another one, too. The old worker goes before, unless a request keeps it.
        Raises UcxUnavailable, after which the transport is of no use.
        """
        self._worker = None
        try:
            self._open_worker()
        except self._ucxx.UCXError as error:
            raise UcxUnavailable(f"UCX makes no other worker: {error}") from error

    def _open_worker(self) -> None:
        self._worker = self._ucxx.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        self._address = bytes(self._worker.address)

    def progress(self) -> None:
        """Let UCX do its work."""
        if self._worker is not None:
            self._worker.progress()

    def arm(self) -> bool:
        """Ask for a wake-up through `fileno`; returns False if there is work already."""
        return bool(self._worker.arm())

    def open(self, address: bytes) -> Endpoint:
        """An endpoint to the peer with that address. Raises ConnectionError."""
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
        """Take the oldest message that has begun to arrive; it must be fetched."""
        found = self._worker.tag_probe(self._any_tag, self._no_mask, remove=True)
        return IncomingMessage(found.sender_tag, found.length, found) if found.matched else None

    def fetch(self, arrival: IncomingMessage, memory: Bytes) -> UcxRequest:
        """Begin to receive into `memory`, as large as the message. Raises ConnectionError."""
        array = self._array(memory)
        try:
            request = self._worker.tag_recv_with_handle(array, arrival.handle)
        except self._ucxx.UCXError as error:
            raise ConnectionError(str(error)) from error
        return UcxRequest(self._ucxx, request, array)
