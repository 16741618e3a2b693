"""A request that holds the queue blocks only the groups that could run it."""

from services.core.report import Load, LoadReport
from services.core.scheduler.state import SchedulerState
from services.core.scheduler.vocabulary import (
    Asked,
    GroupJoined,
    LoadReported,
    SendAssignment,
    ServingGroup,
)

LARGE, SMALL = 4000, 400  # blocks


class Line:
    """A full merged group, and a single-worker group that accepts every request."""

    def __init__(self) -> None:
        self.state = SchedulerState(1000, 30.0)
        self.assigned: dict[str, str] = {}
        self._number, self.free = 0, SMALL
        for name, blocks in (("merged", LARGE), ("alone", SMALL)):
            group = ServingGroup(name, 1, name, "i", name, "m", blocks, 16, 100_000)
            self._take(self.state.handle(GroupJoined(group=group, now_s=0.0)))
        self.report("merged", 30, LARGE)
        self.report("alone", self.free, SMALL)

    def report(self, name: str, free: int, total: int) -> None:
        self._number += 1
        load = Load(0, 0, free, 0, kv_blocks_total=total)
        received = tuple(self.assigned)
        report = LoadReport(name, "i", self._number, 1, load, received)
        self._take(self.state.handle(LoadReported(0.0, report)))

    def ask(self, name: str, prompt_tokens: int) -> None:
        asked = Asked(name, "m", prompt_tokens, 16, now_s=0.0, stream_id=1)
        self._take(self.state.handle(asked))
        self.report("alone", self.free, SMALL)

    def _take(self, commands: list[object]) -> None:
        for command in commands:
            if isinstance(command, SendAssignment):
                self.assigned[command.request_id] = command.group_id


def test_short_requests_pass_a_large_request_that_cannot_run_there() -> None:
    line = Line()
    line.ask("large", 20_000)
    for number in range(50):
        line.ask(f"short {number}", 32)
    at_merged = [name for name, group in line.assigned.items() if group == "merged"]
    assert len(line.assigned) == 50 and "large" not in line.assigned
    assert len(at_merged) <= line.state.overtaken_max
    line.report("merged", LARGE, LARGE)
    assert line.assigned["large"] == "merged"


def test_a_request_that_fits_every_group_holds_the_queue() -> None:
    line = Line()
    line.free = 10
    line.report("alone", line.free, SMALL)
    line.ask("held", 2_000)
    for number in range(50):
        line.ask(f"short {number}", 32)
    assert len(line.assigned) == line.state.overtaken_max
