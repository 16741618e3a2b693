"""A kernel that runs a range of consecutive layers in a single call, attention included.

Weights are in panels (a packed layout). The call returns before a layer if a descriptor is
readable, so that the caller can check for an interrupt and continue from that layer.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from services.worker.engine.memory.panels import PANEL, WORD_BYTES
from services.worker.engine.model.cpu_kernels.compiler import (
    compiled,
    stored_array,
)
from services.worker.engine.model.cpu_kernels.decode_attention import unpacked
from services.worker.engine.model.cpu_kernels.layer_kernel import LayerWeights
from services.worker.engine.model.cpu_kernels.paged_attention import AttentionScratch, attend
from services.worker.engine.model.cpu_kernels.panel_gemm import panel_calls
from services.worker.engine.model.cpu_kernels.panel_layer import after_attention, before_attention
from services.worker.engine.model.cpu_kernels.small_product import STEP_ROWS

_ROWS, _NARROWED = "float32[:, ::1]", "STORED[:, ::1]"
_PARTS = (
    *("input_norm", "query", "query_bias", "key", "key_bias", "value", "value_bias"),
    *("query_norm", "key_norm", "output", "post_attention_norm", "gate", "up", "down"),
)
_LONG, _WORD = ir.IntType(64), ir.IntType(32)
_READABLE = 1 << 32
"""POLLIN as events of a `struct pollfd`, whose 64 bits start with the descriptor."""


@intrinsic
def _values_at(typing_context: Any, address: Any, like: Any) -> tuple[Any, Callable[..., Any]]:
    """Return an address as a pointer to elements with the dtype of the array `like`."""
    pointer = types.CPointer(like.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(types.int64, like), generate


@intrinsic
def _is_readable(typing_context: Any, poll: Any, descriptor: Any) -> tuple[Any, Callable[..., Any]]:
    """Whether a descriptor is readable now; `poll` is the address of libc's function."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        poll, descriptor = arguments
        pollfd = cgutils.alloca_once_value(builder, builder.or_(descriptor, _LONG(_READABLE)))
        function = ir.FunctionType(_WORD, [_LONG.as_pointer(), _LONG, _WORD]).as_pointer()
        # Call poll(&pollfd, 1, 0), which returns the number of ready descriptors without waiting.
        ready = builder.call(builder.inttoptr(poll, function), [pollfd, _LONG(1), _WORD(0)])
        return builder.icmp_signed(">", ready, _WORD(0))

    return types.boolean(types.int64, types.int64), generate


@register_jitable
def _vector(address, size, like):  # type: ignore[no-untyped-def]
    """Return a view of a bias or norm at an address; empty for address 0."""
    return carray(_values_at(address, like), (size if address else 0,))


@register_jitable
def _panels(address, outputs, inputs, like):  # type: ignore[no-untyped-def]
    """Return a view of a weight [outputs, inputs] in panels at an address."""
    per_word = WORD_BYTES // like.itemsize
    return carray(
        _values_at(address, like), (outputs // PANEL, inputs // per_word, PANEL, per_word)
    )


@compiled(
    "int64(int64[::1], int64[:, ::1], int64[::1], int64[::1], int64[::1], float32, float32,"
    f" {_ROWS}, {_ROWS}, {_ROWS}, int64[:, ::1], int64[::1],"
    f" {_NARROWED}, {_ROWS}, {_ROWS}, {_ROWS}, {_ROWS}, {_NARROWED}, {_ROWS}, {_ROWS},"
    f" {_NARROWED}, STORED[:, :, ::1], float32[:, :, ::1], uint32[:, ::1], uint32[:, :, ::1],"
    f" {_ROWS}, {_NARROWED}, int64, int64, int64)"
)
def _run(  # type: ignore[no-untyped-def]
    calls, parts, caches, windows, cache_shape, epsilon, scaling,
    hidden, cosine, sine, spans, tables,
    normed, query, key, value, attended, narrowed, gate, up, gated,
    inputs, states, keys, values, scores, weights, first, last, descriptor,
):  # fmt: skip
    """Run layers `first` to `last` (exclusive) over `hidden`, in place; returns the next layer.

    `parts` [layer, part] are addresses of parameters, 0 for a missing parameter; `caches` [layer]
    are addresses of KV caches. `calls`: the addresses of `panel_calls`, and of `poll`. A negative
    `descriptor` is never readable.
    """
    rows, size = hidden.shape
    blocks, slots, kv_heads, head_dim = unpacked(cache_shape)
    width, kv_width, gated_width = query.shape[1], key.shape[1], gated.shape[1]
    heads = width // head_dim
    for layer in range(first, last):
        # Do not check before the first layer, so that every call runs at least a layer.
        if layer > first and descriptor >= 0 and _is_readable(calls[2], descriptor):
            return layer
        # Parameters are passed by address, so that a call takes any number of layers.
        part = parts[layer]
        before_attention(
            calls, hidden, cosine, sine, _vector(part[0], size, normed), epsilon,
            _panels(part[1], width, size, normed), _vector(part[2], width, normed),
            _panels(part[3], kv_width, size, normed), _vector(part[4], kv_width, normed),
            _panels(part[5], kv_width, size, normed), _vector(part[6], kv_width, normed),
            _vector(part[7], head_dim, normed), _vector(part[8], head_dim, normed),
            normed, query, key, value,
        )  # fmt: skip
        cache = carray(_values_at(caches[layer], normed), (blocks, 2, slots, kv_heads, head_dim))
        attend(
            calls, query.reshape((rows, heads, head_dim)), key.reshape((rows, kv_heads, head_dim)),
            value.reshape((rows, kv_heads, head_dim)), cache, spans, tables, windows[layer],
            scaling, attended.reshape((rows, heads, head_dim)), inputs, states, keys, values,
            scores, weights,
        )  # fmt: skip
        after_attention(
            calls, attended, _panels(part[9], size, width, normed),
            _vector(part[10], size, normed), epsilon, _panels(part[11], gated_width, size, normed),
            _panels(part[12], gated_width, size, normed),
            _panels(part[13], size, gated_width, normed),
            narrowed, normed, gate, up, gated, hidden,
        )  # fmt: skip
    return last


@dataclass(frozen=True, slots=True)
class LayerRangeSizes:
    """Sizes that all layers share; `epsilon` belongs to the norms."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    gated: int
    epsilon: float


class LayerRange:
    """All layers of a model, with weights in panels and caches that `paged_attention.fits`."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        cache_addresses: Sequence[int],
        windows: Sequence[int | None],
        sizes: LayerRangeSizes,
    ) -> None:
        self._dtype = layers[0].query.dtype
        _run.load(self._dtype)
        panels = panel_calls(self._dtype)
        assert panels is not None, "weights are packed in panels only if a product supports them"
        poll = ctypes.cast(ctypes.CDLL(None).poll, ctypes.c_void_p).value
        self._calls = np.array([*panels, poll], np.int64)
        self._layers = layers  # keeps the tensors alive whose addresses follow
        self._parts = np.array(
            [[_address(getattr(layer, part)) for part in _PARTS] for layer in layers], np.int64
        )
        self._caches = np.array(cache_addresses, np.int64)
        self._windows = np.array([window or 0 for window in windows], np.int64)
        self._sizes = sizes
        self._scratch = AttentionScratch(sizes.head_dim, self._dtype)

    def bind(
        self,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        block_shape: tuple[int, int],
        spans: np.ndarray,
        tables: np.ndarray,
    ) -> Callable[[int, int, int], int]:
        """Return a function that runs layers over `hidden` [rows, hidden], float32, in place.

        `rotation`: cosine and sine [rows, head_dim]. `block_shape`: blocks per cache, slots per
        block. `spans` and `tables`: see `paged.AttentionMetadata`.

        The function takes the first layer, the end layer (exclusive), and a descriptor or -1. It
        returns the layer to continue from, which is before the end if the descriptor became
        readable. Raises ValueError if the shapes do not match.
        """
        sizes, rows = self._sizes, len(hidden)
        width, kv_width = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        shapes = [tuple(angles.shape) for angles in rotation]
        # The kernel does not check bounds.
        if hidden.shape[1] != sizes.hidden or shapes != 2 * [(rows, sizes.head_dim)]:
            raise ValueError(f"hidden states {tuple(hidden.shape)} do not match these layers")
        arguments = (
            *(self._calls, self._parts, self._caches, self._windows),
            np.array([*block_shape, sizes.kv_heads, sizes.head_dim]),
            *(np.float32(sizes.epsilon), np.float32(sizes.head_dim**-0.5)),
            *(hidden.numpy(), *(angles.numpy() for angles in rotation), spans, tables),
            # Scratch for activations, in the order of `_run`'s arguments.
            self._narrowed(rows, sizes.hidden),
            *(torch.empty(rows, each).numpy() for each in (width, kv_width, kv_width, width)),
            self._narrowed(rows, width),
            *torch.empty(2, STEP_ROWS, PANEL).numpy(),
            self._narrowed(rows, sizes.gated),
            *self._scratch.arrays(spans, sizes.heads),
        )

        def run(first: int, last: int, descriptor: int) -> int:
            reached: int = _run(*arguments, first, last, descriptor)
            return reached

        return run

    def _narrowed(self, rows: int, columns: int) -> np.ndarray:
        # torch aligns memory for vectors, numpy does not.
        return stored_array(torch.empty(rows, columns, dtype=self._dtype))


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
