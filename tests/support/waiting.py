"""Waiting on conditions, never on timing."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

DEADLINE_S = 180.0

T = TypeVar("T")


async def settle(turns: int = 10) -> None:
    """Run all tasks until they are blocked."""
    for _ in range(turns):
        await asyncio.sleep(0)


@overload
async def eventually(
    check: Callable[[], Awaitable[T]], *, deadline_s: float = ..., interval_s: float = ...
) -> T: ...


@overload
async def eventually(
    check: Callable[[], T], *, deadline_s: float = ..., interval_s: float = ...
) -> T: ...


async def eventually(
    check: Callable[[], T | Awaitable[T]],
    *,
    deadline_s: float = DEADLINE_S,
    interval_s: float = 0.05,
) -> T:
    """Call `check` until it returns, or awaits to, a true value; return that.

    Raises:
        AssertionError: if it is still false after `deadline_s`; shows its last value.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + deadline_s
    while True:
        value = check()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        if loop.time() > end_s:
            raise AssertionError(f"still {value!r} after {deadline_s} s: {check}")
        await asyncio.sleep(interval_s)
