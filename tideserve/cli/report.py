"""Output of commands: a spinner and colours on a terminal, plain lines elsewhere.

Writing never fails: a cluster must drain even if the terminal or the reader of a pipe is gone.
"""

import contextlib
import errno
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
    """A text stream that drops text it cannot write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        """Write or drop `text`."""
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush or drop the buffer."""
        with self._dropping():
            self._stream.flush()

    def close(self) -> None:
        """Flush for the last time; text that cannot be written is dropped."""
        try:
            self._stream.flush()
        except OSError:
            self.mute()

    def isatty(self) -> bool:
        """Whether this is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The file descriptor of the wrapped stream."""
        return self._stream.fileno()

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # A full disk may have room again later.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                self.mute()

    def mute(self) -> None:
        """Redirect to null; otherwise the interpreter flushes at exit and reports an error."""
        with contextlib.suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


class Report:
    """Progress of a command, on standard output."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = DeafStream(stream or sys.stdout)
        self.console = Console(file=self._stream, highlight=False)  # type: ignore[arg-type]
        self._status: Status | None = None
        self._last_line = ""
        self._last_line_s = 0.0

    @property
    def fancy(self) -> bool:
        """Whether the output is a terminal."""
        return self.console.is_terminal

    def close(self) -> None:
        """Drop text that still cannot be written, so that it does not change the exit code."""
        self._stream.close()

    def line(self, text: str, style: str = "") -> None:
        """Print a line without wrapping, so that it can be copied and searched."""
        self.console.print(escape(text), style=style, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.line(f"! {text}" if self.fancy else f"warning: {text}", style="yellow")

    def doing(self, text: str, progress: str = "") -> None:
        """Show what the current step waits for; off a terminal, at most every REPEAT_S.

        A change of `progress` alone does not print the line again.
        """
        shown = f"{text} ({progress})" if progress else text
        if self._status is not None:
            self._status.update(escape(shown))
        elif text != self._last_line or monotonic_s() - self._last_line_s > REPEAT_S:
            self._last_line, self._last_line_s = text, monotonic_s()
            self.line(f"  {shown}")

    @contextlib.contextmanager
    def step(self, title: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Show a running step, and its duration if it was slow.

        `stopped` is called at the end and returns whether the step was cut short.
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
        """Print the rows between two rules, without side bars, so that commands can be copied.

        Written at once: a reader of the log that waits for the title sees the rows, too.
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
