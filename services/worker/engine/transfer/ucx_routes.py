"""The routes of a UCX endpoint, from UCX itself, because ucxx has no call for them.

The structures are those of UCX's public header (`ucp_ep_query`).
"""

import ctypes

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
    name any.
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
