"""Supervises the processes of a cluster: starts, restarts and stops them. Main thread only."""

import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.common.clock import monotonic_s
from tideserve.cli.errors import EXIT_FAILED, EXIT_UNUSABLE, CommandError
from tideserve.cli.process import Program, ServiceProcess
from tideserve.cli.report import Report
from tideserve.cli.stop_signals import StopSignals

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 15.0
STEADY_S = 60.0
DEATHS_BEFORE_READY_MAX = 5


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart the process at `at_s`."""

    name: str
    at_s: float
    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Stop the cluster and end with `exit_code`."""

    name: str
    exit_code: int


@dataclass(slots=True)
class Supervision:
    """Decides between restart and giving up when a process dies.

    Until the cluster was ready once, a process that reports an unusable configuration, or that dies
    repeatedly, ends the cluster: restarts would only hide the reason. Afterwards every death leads
    to a restart, because the same configuration has worked before.
    """

    ready: bool = False
    _started_s: dict[str, float] = field(default_factory=dict)
    _deaths: dict[str, int] = field(default_factory=dict)
    _due_s: dict[str, float] = field(default_factory=dict)

    def started(self, name: str, now_s: float) -> None:
        """Record the start of `name` at `now_s`."""
        self._started_s[name] = now_s
        self._due_s.pop(name, None)

    def died(self, name: str, return_code: int, now_s: float) -> Restart | GiveUp:
        """Decide after the death of `name`; `return_code` is negative for a signal."""
        if now_s - self._started_s[name] >= STEADY_S:
            self._deaths[name] = 0
        deaths = self._deaths[name] = self._deaths.get(name, 0) + 1
        if not self.ready:
            if return_code == EXIT_UNUSABLE:
                return GiveUp(name, EXIT_UNUSABLE)
            if deaths >= DEATHS_BEFORE_READY_MAX:
                return GiveUp(name, EXIT_FAILED)
        # Bound the exponent, so that days of restarts cannot overflow the float.
        delay_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(deaths - 1, 16))
        self._due_s[name] = now_s + delay_s
        return Restart(name, now_s + delay_s, delay_s)

    def due(self, now_s: float) -> list[str]:
        """Names of the dead processes that are due for a restart."""
        return [name for name, due_s in self._due_s.items() if due_s <= now_s]


def describe_exit(return_code: int) -> str:
    """The exit code or signal of a process, as text."""
    if return_code >= 0:
        return f"exit code {return_code}"
    try:
        return f"signal {signal.Signals(-return_code).name}"
    except ValueError:
        return f"signal {-return_code}"


TICK_S = 0.1
SENTENCE_PREFIX = "tideserve-"
SENTENCE_LINES = 50


class ClusterProcesses:
    """Owns the processes of a cluster. `on_change` runs after every start and death."""

    def __init__(self, signals: StopSignals, report: Report, on_change: Callable[[], None]) -> None:
        self._signals = signals
        self._report = report
        self._on_change = on_change
        self._supervision = Supervision()
        self._children: dict[str, ServiceProcess] = {}

    @property
    def pids(self) -> dict[str, int]:
        """Ids of the running processes by name."""
        return {name: child.pid for name, child in self._children.items() if child.pid is not None}

    @property
    def programs(self) -> list[str]:
        """Names of all supervised processes, running or not."""
        return list(self._children)

    def start(self, program: Program) -> None:
        """Start a program and supervise it from now on, in place of a dead one of that name.

        Raises:
            OSError: if its log cannot be opened.
        """
        child = ServiceProcess(program)
        if program.name in self._children:
            self._children[program.name].close()
        self._children[program.name] = child
        self._start(program.name)

    def mark_ready(self) -> None:
        """From now on, restart every process that dies."""
        self._supervision.ready = True

    def tick(self) -> None:
        """Check all processes once, and restart those that died.

        Raises:
            CommandError: if the supervision ends the cluster.
        """
        for child in self._children.values():
            return_code = child.poll()
            if return_code is not None:
                self._handle_death(child, return_code)
                self._on_change()
        for name in self._supervision.due(monotonic_s()):
            self._start(name)
            pid = self._children[name].pid
            if pid is not None:
                self._report.line(f"{name} was restarted as process {pid}")

    def run_until_stop(self, chore: Callable[[], None], interval_s: float) -> None:
        """Supervise the processes until a stop request; call `chore` every `interval_s`."""
        due_s = monotonic_s()
        while not self._signals.stopping:
            self.tick()
            if monotonic_s() >= due_s:
                chore()
                due_s = monotonic_s() + interval_s
            time.sleep(TICK_S)

    def stop(self, stages: Sequence[Sequence[str]]) -> None:
        """Stop the processes stage by stage with their grace; a second stop request kills them."""
        for stage in stages:
            children = [self._children[name] for name in stage if name in self._children]
            for child in children:
                child.poll()
                child.ask_to_stop()
            while any(child.pid is not None for child in children):
                for child in children:
                    if child.enforce(self._signals.hurry) and not self._signals.hurry:
                        self._warn(child, f"{child.name} did not stop in time and was killed")
                    child.poll()
                time.sleep(TICK_S / 5)
            if children:
                self._on_change()
        for child in self._children.values():
            child.close()

    def _start(self, name: str) -> None:
        now_s = monotonic_s()
        self._supervision.started(name, now_s)
        child = self._children[name]
        try:
            child.start()
        except OSError as error:
            self._decide(child, EXIT_FAILED, now_s, f"{name} cannot be started: {error}")
        self._on_change()

    def _handle_death(self, child: ServiceProcess, return_code: int) -> None:
        last_line = exit_message(return_code, child.last_lines(1))
        quote = f"; its last line: {last_line}" if last_line else ""
        # A worker that was drained ends by itself.
        ending = "died" if return_code else "stopped"
        event = f"{child.name} {ending} ({describe_exit(return_code)}){quote}"
        self._decide(child, return_code, monotonic_s(), event)

    def _decide(self, child: ServiceProcess, return_code: int, now_s: float, event: str) -> None:
        decision = self._supervision.died(child.name, return_code, now_s)
        if isinstance(decision, GiveUp):
            sentence = self._last_sentence(child, return_code, decision)
            child.note(f"{event}; the cluster stops")
            raise CommandError(sentence, decision.exit_code)
        self._warn(child, event)
        restart = f"{child.name} will be restarted in {decision.delay_s:.1f} s"
        child.note(restart)
        self._report.line(restart)

    def _warn(self, child: ServiceProcess, event: str) -> None:
        """Write a warning here and in the log of the process."""
        self._report.warn(event)
        child.note(event)

    def _last_sentence(self, child: ServiceProcess, return_code: int, decision: GiveUp) -> str:
        """The reason why the cluster stops, from the last lines of the process."""
        lines = child.last_lines(SENTENCE_LINES)
        sentences = [line for line in lines if line.startswith(SENTENCE_PREFIX)]
        if decision.exit_code == EXIT_UNUSABLE and sentences:
            return "\n".join(sentences)
        reason = exit_message(return_code, sentences or lines) or describe_exit(return_code)
        return f"{child.name} keeps dying: {reason}; see {child.program.log_path}"


def exit_message(return_code: int, lines: Sequence[str]) -> str:
    """The last log line of a dead process as text, "" without lines.

    Also "" after SIGKILL, because the last line is then unrelated to the end.
    """
    if return_code == -signal.SIGKILL or not lines:
        return ""
    return readable(lines[-1])


def readable(line: str) -> str:
    """The message of a log line, without its JSON."""
    try:
        row = json.loads(line)
    except ValueError:
        return line.strip()
    return str(row.get("message", line)) if isinstance(row, dict) else line.strip()
