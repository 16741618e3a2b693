"""A kernel: compiled, or loaded from the cache, once it is needed and for the dtypes needed."""

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
"""Stands in a signature for the type of what is stored: weights, or a KV cache."""
_OPTIONS = {
    "nopython": True,
    "boundscheck": None,
    "fastmath": {"reassoc", "contract", "nsz"},
    "error_model": "numpy",
    "nogil": True,
}
_log = logging.getLogger(__name__)


class _KernelCache(FunctionCache):
    """Numba's cache, without the half second in which numba gets ready to compile.

    What machine code calls is there all the same; to compile gets numba ready, too.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)


class Kernel(CPUDispatcher):
    """A function with its signatures, one for each dtype if `STORED` stands in the signature.

    A signature has machine code once it was loaded: by `load`, by a first call from Python, or
    while another kernel is compiled that calls it. One from the cache contains what it calls.
    """

    _can_compile: bool  # numba's

    def __init__(self, function: Callable[..., Any], signature: str) -> None:
        super().__init__(py_func=function, locals={}, targetoptions=_OPTIONS)
        self._waiting = {
            dtype: signature.replace(STORED, name) for dtype, name in STORED_TYPES.items()
        }
        if STORED not in signature:
            del self._waiting[torch.bfloat16]
        self._has_dtypes = STORED in signature
        try:
            self._cache = _KernelCache(function)
        except (RuntimeError, OSError) as error:
            self._do_without_cache(error)

    def load(self, *dtypes: torch.dtype) -> None:
        """Make ready for what is stored in `dtypes`, in seconds unless it is in the cache."""
        self._make(dtypes if self._has_dtypes else tuple(self._waiting))

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Numba's, for a kernel that calls this one: with declared signatures only."""
        self._make([dtype for dtype in self._waiting if self._takes(self._waiting[dtype], args)])
        may_compile = self._can_compile
        self._can_compile = False
        try:
            return super().get_call_template(args, kws)
        finally:
            self._can_compile = may_compile

    def _compile_for_args(self, *args: Any, **kws: Any) -> Any:
        """Numba calls it when it has no machine code for a call, and then calls what it returns."""
        self._make(tuple(self._waiting))
        return self

    def _takes(self, signature: str, args: Iterable[Any]) -> bool:
        wanted, _ = normalize_signature(signature)
        pairs = zip(args, wanted, strict=True)
        return all(self.typingctx.can_convert(one, other) is not None for one, other in pairs)

    def _make(self, dtypes: Iterable[torch.dtype]) -> None:
        for dtype in dtypes:
            if dtype in self._waiting:
                self._can_compile = True  # else numba refuses
                self._compile(self._waiting[dtype])
                del self._waiting[dtype]
        # A call that no signature fits is an error then; until then it asks for the others.
        self._can_compile = bool(self._waiting)

    def _compile(self, signature: str) -> None:
        try:
            self.compile(signature)
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
            # The folder may not be written, the disk is full, or a file is broken.
            self._do_without_cache(error)
            self.compile(signature)

    def _do_without_cache(self, error: Exception) -> None:
        _log.info("kernels are compiled anew at each start: their cache fails: %s", error)
        self._cache = NullCache()
