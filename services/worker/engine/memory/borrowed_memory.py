"""Creates torch tensors over reserved address space, in which the arena maps and unmaps memory.

Uses DLPack, which accepts any address. `__cuda_array_interface__` would query the driver, and the
driver rejects addresses without memory.
"""

import ctypes

import torch

_KINDS = {"cpu": 1, "cuda": 2}
"""DLPack's device types."""
_UNSIGNED = 1  # DLPack's code of unsigned integers


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Managed(ctypes.Structure):
    """`DLManagedTensor`; `context` and `deleter` stay 0, because the arena owns the memory."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dimensions", ctypes.c_int32),
        ("type", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
# A tensor needs its structure until it is freed, which DLPack reports only to a deleter. Keep all
# structures instead, because they are few and small.
_kept: list[_Managed] = []


def tensor_over(address: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    """Return a uint8 tensor [size_bytes] at `address`; an access to an unmapped page crashes."""
    shape = (ctypes.c_int64 * 1)(size_bytes)
    managed = _Managed(
        data=address,
        device=_Device(_KINDS[device.type], device.index or 0),
        dimensions=1,
        type=_Type(_UNSIGNED, 8, 1),
        shape=shape,
    )
    _kept.append(managed)
    capsule = _new_capsule(ctypes.addressof(managed), b"dltensor", None)
    return torch.from_dlpack(capsule)
