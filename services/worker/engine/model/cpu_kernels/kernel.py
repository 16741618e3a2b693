"""The class of numba kernels, compiled or loaded from the cache on demand, per storage dtype.

The storage dtype is that of the model's weights and KV cache: float32, or bfloat16 as uint16.
"""

import logging
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch
from numba.core.caching import FunctionCache, NullCache
from numba.core.registry import CPUDispatcher
from numba.core.runtime import rtsys
from numba.core.sigutils import normalize_signature

from services.worker.engine.model.cpu_kernels import STORED_TYPES

STORED = "STORED"
"""Placeholder in a signature for the storage type of weights or of the KV cache."""
_OPTIONS = {
    "nopython": True,
    "boundscheck": None,
    "fastmath": {"reassoc", "contract", "nsz"},
    "error_model": "numpy",
    "nogil": True,
}
_log = logging.getLogger(__name__)


class _KernelCache(FunctionCache):
    """numba's cache; a load skips the initialization of numba's compiler, half a second."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # Initialize only the runtime that machine code calls; compiling initializes the rest.
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)


class Kernel(CPUDispatcher):
    """A numba function with a signature per storage dtype if its signature contains `STORED`.

    A signature is compiled or loaded by `load`, at the first call from Python, or when a kernel
    that calls it is compiled. Cached machine code includes its callees.
    """

    _can_compile: bool  # an attribute of numba

    def __init__(self, function: Callable[..., Any], signature: str) -> None:
        super().__init__(py_func=function, locals={}, targetoptions=_OPTIONS)
        # Signatures that are neither compiled nor loaded yet.
        self._pending = {
            dtype: signature.replace(STORED, name) for dtype, name in STORED_TYPES.items()
        }
        if STORED not in signature:
            # Both dtypes have the same signature, so compile it once.
            del self._pending[torch.bfloat16]
        self._has_dtypes = STORED in signature
        try:
            self._cache = _KernelCache(function)
        except (RuntimeError, OSError) as error:
            self._disable_cache(error)

    def load(self, *dtypes: torch.dtype) -> None:
        """Compile for the storage `dtypes`, which takes seconds, or load from the cache."""
        self._make(dtypes if self._has_dtypes else tuple(self._pending))

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Compile for a call from another kernel (numba's hook), for declared signatures only."""
        self._make([dtype for dtype in self._pending if self._accepts(self._pending[dtype], args)])
        # Forbid compiling: numba would compile another signature for arguments that none accepts.
        may_compile = self._can_compile
        self._can_compile = False
        try:
            return super().get_call_template(args, kws)
        finally:
            self._can_compile = may_compile

    def _compile_for_args(self, *args: Any, **kws: Any) -> Any:
        """Compile for a call from Python (numba's hook); numba then calls the returned function."""
        self._make(tuple(self._pending))
        return self

    def _accepts(self, signature: str, args: Iterable[Any]) -> bool:
        declared, _ = normalize_signature(signature)
        pairs = zip(args, declared, strict=True)
        return all(self.typingctx.can_convert(given, kind) is not None for given, kind in pairs)

    def _make(self, dtypes: Iterable[torch.dtype]) -> None:
        for dtype in dtypes:
            if dtype in self._pending:
                self._can_compile = True  # numba refuses to compile otherwise
                self._compile(self._pending[dtype])
                del self._pending[dtype]
        # While signatures are pending, a call that matches none of the compiled ones compiles them
        # (`_compile_for_args`). Afterwards such a call is an error.
        self._can_compile = bool(self._pending)

    def _compile(self, signature: str) -> None:
        try:
            self.compile(signature)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
            # The folder is not writable, the disk is full, or a file is corrupt.
            self._disable_cache(error)
            self.compile(signature)

    def _disable_cache(self, error: Exception) -> None:
        _log.info("the cache of kernels fails, so each start compiles them again: %s", error)
        self._cache = NullCache()
