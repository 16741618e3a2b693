"""Entry point of all four services: start, drain on a signal, and exit code.

The exit code is 0 after a drain, `ServiceError.exit_code` after such an error, and 1 after a crash.
SIGINT and SIGTERM start a drain, even if the parent process ignored them.
"""

import argparse
import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from services.common import failpoint
from services.common.errors import ServiceError
from services.common.logging import set_up_logging
from services.common.open_files import raise_open_files_limit
from services.common.service_config import ServiceConfig
from services.common.settings import describe, help_text, load_settings

C = TypeVar("C")

# Without this, gRPC's core logs each failed handshake to standard error in its own format. It reads
# the variable when it is loaded, so `__main__` of each service imports this module first.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

_PR_SET_PDEATHSIG = 1
EXIT_UNUSABLE = ServiceError.exit_code


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Make the kernel send `signal_number` to this process when its parent dies (Linux only).

    Call it from the child's main thread; the parent must have started it from its own main thread.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)


def main(
    name: str, config_class: type[C], serve: Callable[[C, asyncio.Event], Coroutine[Any, Any, None]]
) -> None:
    """Entry point of a service: load its configuration, then run `serve(config, stop)`.

    `stop` is set by SIGINT or SIGTERM; `serve` then drains and returns. The configuration comes
    from the environment, the file of `--config` and the defaults; see `services.common.settings`.
    """
    arguments = _parser(name, config_class).parse_args()
    if arguments.with_parent is not None:
        die_with_parent()
        # The parent may have died before the call above.
        if os.getppid() != arguments.with_parent:
            sys.exit(EXIT_UNUSABLE)
    set_up_logging()
    raise_open_files_limit()
    exit_code = 0
    try:
        settings = load_settings(config_class, arguments.config, os.environ)
        if arguments.print_config:
            print(f"# tideserve-{name}; secrets are masked", describe(settings), sep="\n", end="")
        else:
            uvloop.run(_until_signal(serve, settings.config))
    # Task groups wrap errors into groups: report each as a sentence.
    except* ServiceError as group:
        errors = _leaves(group)
        # On a full disk the exit code must still be that of the error.
        with contextlib.suppress(OSError):
            for error in errors:
                print(f"tideserve-{name}: {error}", file=sys.stderr, flush=True)
        exit_code = errors[0].exit_code
    # Exit here: an exception raised in `except*` may join a group and be shown with a traceback.
    if exit_code:
        sys.exit(exit_code)


def _parser(name: str, config_class: type[Any]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"tideserve-{name}",
        description=f"The tideserve {name}.",
        epilog=help_text(config_class),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of this service")
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the configuration and the source of each value, then exit",
    )
    parser.add_argument(
        "--with-parent", type=int, metavar="PID", help="end when this parent process ends"
    )
    return parser


def _leaves(group: BaseExceptionGroup[ServiceError]) -> list[ServiceError]:
    leaves: list[ServiceError] = []
    for error in group.exceptions:
        leaves.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return leaves


async def _until_signal(serve: Callable[[C, asyncio.Event], Awaitable[None]], config: C) -> None:
    if isinstance(config, ServiceConfig):
        set_up_logging(config.log_level, config.log_format)
        failpoint.arm(config.failpoints, config.failpoint_file)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await serve(config, stop)
