"""Launches a Triton kernel without inspecting its arguments each time.

Triton inspects every argument of every launch: its type, whether an address is a multiple of 16,
whether a number is 1. This takes the host longer than a small kernel runs. `Launcher` lets Triton
inspect only the first launch for each dtype of the first argument and set of constants. All further
launches with these must have equivalent arguments: tensors of the same dtypes aligned to 16 bytes,
and numbers that are always equal or marked `do_not_specialize`.
"""

from typing import Any

from triton.runtime.jit import KernelInterface


class Launcher:
    """Launches `kernel`, whose last parameters are `tl.constexpr`; `options` go to Triton."""

    def __init__(self, kernel: KernelInterface[Any], **options: int) -> None:
        self._kernel = kernel
        self._options = options
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, grid: tuple[int, ...], arguments: tuple[Any, ...], *constants: Any, **options: int
    ) -> None:
        """Launch on `grid`; the first launch with these `constants` compiles the kernel."""
        key = (arguments[0].dtype, *constants)
        compiled = self._compiled.get(key)
        if compiled is None:
            # Triton's interpreter returns None, so it takes this path every time.
            self._compiled[key] = self._kernel[grid](
                *arguments, *constants, **self._options, **options
            )
        else:
            compiled[(*grid, 1, 1)[:3]](*arguments, *constants)
