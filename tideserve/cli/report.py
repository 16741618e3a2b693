"""What a command tells a person: a spinner and colours on a terminal, plain lines elsewhere.

Writing never fails: a cluster must drain although the terminal, or the reader of a pipe, is gone.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from services.common.clock import monotonic_s

SLOW_STEP_S = 2.0
REPEAT_S = 10.0


class DeafStream:
    """A text stream that drops what it cannot write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        """Write or drop `text`."""
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush or drop what is buffered."""
        with self._dropping():
            self._stream.flush()

    def isatty(self) -> bool:
        """Whether this is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The descriptor below."""
        return self._stream.fileno()

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # Else the interpreter tries once more at its exit, and calls that a failure.
            with contextlib.suppress(OSError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)


class Report:
    """Progress of a command, on standard output."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.console = Console(file=DeafStream(stream or sys.stdout), highlight=False)  # type: ignore[arg-type]
        self._status: Status | None = None
        self._said = ""
        self._said_s = 0.0

    @property
    def fancy(self) -> bool:
        """Whether a person watches on a terminal."""
        return self.console.is_terminal

    def line(self, text: str, style: str = "") -> None:
        """Print a line; it is never wrapped, so that it can be copied and searched."""
        self.console.print(escape(text), style=style, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a line that asks for attention."""
        self.line(f"! {text}" if self.fancy else f"warning: {text}", style="yellow")

    def doing(self, text: str, progress: str = "") -> None:
        """Say what the present step waits for; elsewhere than on a terminal not too often.

        `progress` is told with it, but is by itself no reason to say it again.
        """
        shown = f"{text} ({progress})" if progress else text
        if self._status is not None:
            self._status.update(escape(shown))
        elif text != self._said or monotonic_s() - self._said_s > REPEAT_S:
            self._said, self._said_s = text, monotonic_s()
            self.line(f"  {shown}")

    @contextlib.contextmanager
    def step(self, title: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Show that a step runs, and how long it took if it was long.

        `stopped` says at its end whether somebody has cut it short.
        """
        started_s = monotonic_s()
        if self.fancy:
            with self.console.status(escape(title)) as status:
                self._status = status
                try:
                    yield
                finally:
                    self._status = None
        else:
            self.line(title)
            yield
        took_s = monotonic_s() - started_s
        took = f" ({took_s:.1f} s)" if took_s >= SLOW_STEP_S else ""
        if stopped():
            self.line(f"  stopped after {took_s:.1f} s")
        elif self.fancy:
            self.console.print(f"[green]✓[/] {escape(title)}[dim]{took}[/]", soft_wrap=True)
        elif took:
            self.line(f"  done{took}")

    def box(self, title: str, rows: list[tuple[str, str]]) -> None:
        """Print the rows between two rules; without bars at the sides, commands can be copied.

        All in one write: whoever waits for the title in a log finds the rows there, too.
        """
        width = max(len(name) for name, _ in rows)
        with self.console:
            if self.fancy:
                self.console.rule(f"[bold green]{escape(title)}", style="green", align="left")
            else:
                self.line(f"--- {title}")
            for name, text in rows:
                self.console.print(
                    f"[bold]{escape(name.ljust(width))}[/]  {escape(text)}", soft_wrap=True
                )
            if self.fancy:
                self.console.rule(style="green")
            else:
                self.line("---")
