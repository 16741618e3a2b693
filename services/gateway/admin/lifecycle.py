"""Failures of the admin port's work are logged, and never reach clients of the gateway."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from services.common.clock import monotonic_s

RETRY_S = 1.0
TELL_EVERY_S = 60.0

log = logging.getLogger(__name__)


async def kept_up(work: Callable[[], Awaitable[None]], name: str) -> None:
    """Do `work` to its end; whatever it raises, it begins again after `RETRY_S` seconds.

    The failure is logged, at most once in `TELL_EVERY_S` seconds.
    """
    told_s = -TELL_EVERY_S
    while True:
        try:
            await work()
            return
        except Exception:
            if monotonic_s() - told_s >= TELL_EVERY_S:
                told_s = monotonic_s()
                log.exception("%s has failed and begins again; clients are served on", name)
        await asyncio.sleep(RETRY_S)


async def kept_apart(work: Awaitable[None], name: str) -> None:
    """Do `work` to its end; whatever it raises is logged, and the caller goes on."""
    try:
        await work
    except Exception:
        log.exception(
            "%s has failed; clients are served on; restart this gateway to have it back", name
        )
