"""The running processes of a cluster: started, kept alive, stopped in order. Main thread only."""

import json
import signal
import time
from collections.abc import Callable, Sequence

from services.common.clock import monotonic_s
from tideserve.cli.errors import EXIT_FAILED, EXIT_UNUSABLE, CommandError
from tideserve.cli.process import Program, ServiceProcess
from tideserve.cli.report import Report
from tideserve.cli.stop_signals import StopSignals
from tideserve.cli.supervision import GiveUp, Supervision, describe_exit

TICK_S = 0.1
SENTENCE_PREFIX = "tideserve-"
SENTENCE_LINES = 50


class ClusterProcesses:
    """Owns the processes. `on_change` runs after every start and death."""

    def __init__(self, signals: StopSignals, report: Report, on_change: Callable[[], None]) -> None:
        self._signals = signals
        self._report = report
        self._on_change = on_change
        self._supervision = Supervision()
        self._children: dict[str, ServiceProcess] = {}

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name, of those that run."""
        return {name: child.pid for name, child in self._children.items() if child.pid is not None}

    @property
    def programs(self) -> list[str]:
        """Names of all that are kept alive, whether they run or not."""
        return list(self._children)

    def start(self, program: Program) -> None:
        """Start a program for the first time and keep it alive from now on."""
        self._children[program.name] = ServiceProcess(program)
        self._start(program.name)

    def mark_ready(self) -> None:
        """Restart every process that dies from now on."""
        self._supervision.ready = True

    def tick(self) -> None:
        """Check all processes once, and restart those that died.

        Raises:
            CommandError: if the cluster is to be given up.
        """
        for child in self._children.values():
            return_code = child.poll()
            if return_code is not None:
                self._mourn(child, return_code)
                self._on_change()
        for name in self._supervision.due(monotonic_s()):
            self._start(name)
            pid = self._children[name].pid
            if pid is not None:
                self._report.line(f"{name} was started again as process {pid}")

    def run_until_stop(self, chore: Callable[[], None], interval_s: float) -> None:
        """Look after the processes until somebody asks to stop, and do `chore` now and then."""
        due_s = monotonic_s()
        while not self._signals.stopping:
            self.tick()
            if monotonic_s() >= due_s:
                chore()
                due_s = monotonic_s() + interval_s
            time.sleep(TICK_S)

    def stop(self, stages: Sequence[Sequence[str]]) -> None:
        """Stop the processes stage by stage, each with its grace; a second request kills them."""
        for stage in stages:
            children = [self._children[name] for name in stage if name in self._children]
            for child in children:
                child.poll()
                child.ask_to_stop()
            while any(child.pid is not None for child in children):
                for child in children:
                    if child.press(self._signals.hurry) and not self._signals.hurry:
                        self._tell(child, f"{child.name} did not end in time and was killed")
                    child.poll()
                time.sleep(TICK_S / 5)
            if children:
                self._on_change()

    def _start(self, name: str) -> None:
        now_s = monotonic_s()
        self._supervision.started(name, now_s)
        child = self._children[name]
        try:
            child.start()
        except OSError as error:
            self._decide(child, EXIT_FAILED, now_s, f"{name} cannot be started: {error}")
        self._on_change()

    def _mourn(self, child: ServiceProcess, return_code: int) -> None:
        words = last_words(return_code, child.last_lines(1))
        said = f"; its last line: {words}" if words else ""
        what = f"{child.name} died ({describe_exit(return_code)}){said}"
        self._decide(child, return_code, monotonic_s(), what)

    def _decide(self, child: ServiceProcess, return_code: int, now_s: float, what: str) -> None:
        decision = self._supervision.died(child.name, return_code, now_s)
        if isinstance(decision, GiveUp):
            sentence = self._last_sentence(child, return_code, decision)
            child.note(f"{what}; the cluster is given up")
            raise CommandError(sentence, decision.exit_code)
        self._tell(child, what)
        again = f"{child.name} will be started again in {decision.delay_s:.1f} s"
        child.note(again)
        self._report.line(again)

    def _tell(self, child: ServiceProcess, what: str) -> None:
        """Warn here and in the log of the process."""
        self._report.warn(what)
        child.note(what)

    def _last_sentence(self, child: ServiceProcess, return_code: int, decision: GiveUp) -> str:
        """The last sentence of the process about its end."""
        lines = child.last_lines(SENTENCE_LINES)
        sentences = [line for line in lines if line.startswith(SENTENCE_PREFIX)]
        if decision.exit_code == EXIT_UNUSABLE and sentences:
            return "\n".join(sentences)
        said = last_words(return_code, sentences or lines) or describe_exit(return_code)
        return f"{child.name} keeps dying: {said}; the whole story is in {child.program.log_path}"


def last_words(return_code: int, lines: Sequence[str]) -> str:
    """What a dead process said of its end: the last of its `lines`, readable; "" if nothing.

    A process that gets SIGKILL does not learn of it: its last line is about something else.
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
