"""Launches a kernel without looking at its arguments each time.

Triton looks at every argument of every launch: its type, whether an address is a multiple of 16,
whether a number is 1. That takes the host longer than a small kernel runs. Here it happens once for
all launches with equal constants, so their arguments must be alike: tensors of the same dtypes that
begin at multiples of 16 bytes, and numbers that are either always equal or `do_not_specialize`d.
"""

from typing import Any

from triton.runtime.jit import KernelInterface


class Launcher:
    """`kernel`, whose last parameters are the constants; `options` as Triton has them."""

    def __init__(self, kernel: KernelInterface[Any], **options: int) -> None:
        self._kernel = kernel
        self._options = options
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, grid: tuple[int, ...], arguments: tuple[Any, ...], *constants: Any, **options: int
    ) -> None:
        """Launch it; `arguments` are all but the `constants`. The first call compiles it."""
        key = (arguments[0].dtype, *constants)
        compiled = self._compiled.get(key)
        if compiled is None:
            # Triton's interpreter returns nothing, and is called anew each time.
            self._compiled[key] = self._kernel[grid](
                *arguments, *constants, **self._options, **options
            )
        else:
            compiled[(*grid, 1, 1)[:3]](*arguments, *constants)
