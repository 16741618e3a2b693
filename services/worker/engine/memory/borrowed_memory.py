"""Tensors over address space that another owner maps and unmaps.

They are made by DLPack, which asks nothing of the memory: not whether it is there, and not whose.
(`__cuda_array_interface__` asks the driver, which knows nothing of an address without memory.)
"""

import ctypes

import torch

_KINDS = {"cpu": 1, "cuda": 2}
"""The kinds of device that DLPack knows them by."""
_UNSIGNED = 1


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Managed(ctypes.Structure):
    """`DLManagedTensor`; its last two fields stay 0, since nobody frees the memory."""

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
_kept: list[_Managed] = []
"""A tensor reads its own until it is gone, which nobody is told of; they are few, and small."""


def tensor_over(address: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    """Flat uint8 [size_bytes] at `address`; an access to an unmapped place crashes."""
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
