"""While a single-worker group changes, batch work that would delay it starts no iteration."""

import pytest

from services.core.changeover import vocabulary
from services.core.changeover.state import HOLD_MAX_S
from services.core.queue_order import Scheduling
from services.core.service import Service, ServiceClass
from tests.support.changeover_script import Script, groups

BATCH = Service(ServiceClass.BATCH)
APART, MERGED, SPLIT = groups(1, "a", "b"), groups(2, "ab"), groups(3, "a", "b")
ASKED = vocabulary.PreparationAsked("t", MERGED)


def serving(scheduling: Scheduling = Scheduling.SLO) -> Script:
    """ "a" has batch work."""
    script = Script("ab", scheduling=scheduling).change(APART)
    script.ask("a", "m", 8, most=20, service=BATCH)
    assert script.launch("a")
    return script


def held(script: Script, name: str = "a") -> bool:
    return script.members[name].holds_batch_work(script.now_s)


def prepare(script: Script) -> None:
    """Make "a" prepare."""
    script.do("a", ASKED)
    script.turn("a")
    assert held(script)
    script.go_on("a")


def test_batch_work_is_held_from_order_to_commit() -> None:
    script = serving()
    assert not held(script)
    prepare(script)
    member = script.members["a"]
    assert not member.busy and held(script), "it is ready, and a commit is expected"
    script.change(MERGED)
    assert not held(script) and member.planner.stages == 2, "it joins microbatches there"


def test_batch_work_is_held_until_moved_kv_arrives() -> None:
    script = serving()
    script.ask("a", "o", 12, most=20)
    script.change(MERGED)
    script.run("a", 4)
    script.transfers_run = False
    script.ask("b", "n", 4, service=BATCH)
    script.change(SPLIT)
    moving = [name for name in "ab" if not script.members[name].settled]
    assert moving and all(held(script, name) == (name in moving) for name in "ab")
    script.transfers_run = True
    script.settle()
    assert not held(script) and not held(script, "b")


def test_batch_work_resumes_when_the_attempt_ends() -> None:
    script = serving()
    prepare(script)
    script.do("a", vocabulary.PreparationAborted("t"))
    assert not held(script)


def test_online_work_continues() -> None:
    script = serving()
    prepare(script)
    script.ask("a", "o", 8)
    assert not held(script)
    script.launch("a")
    assert not held(script), "it runs"


@pytest.mark.parametrize("ready", [True, False])
def test_batch_work_is_held_for_a_bounded_time(ready: bool) -> None:
    """Another member or the memory manager may be slow or lost."""
    script = serving()
    script.now_s = 7.0
    script.do("a", ASKED)
    script.turn("a")
    if ready:
        script.go_on("a")
    for passed_s, answer in ((0.9 * HOLD_MAX_S, True), (HOLD_MAX_S, False), (60.0, False)):
        script.now_s = 7.0 + passed_s
        script.turn("a")
        assert held(script) is answer


def test_hold_time_starts_with_the_first_turn_after_the_order() -> None:
    """The order has no time, and the last event with a time may be long past."""
    script = serving()
    script.now_s = 100.0
    script.do("a", ASKED)
    script.turn("a")
    script.now_s += 0.9 * HOLD_MAX_S
    assert held(script)


def test_fcfs_holds_no_batch_work() -> None:
    script = serving(Scheduling.FCFS)
    script.do("a", ASKED)
    script.turn("a")
    assert not held(script)
