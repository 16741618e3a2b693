"""A worker that shuts down returns requests only while it serves alone, outside of a change."""

from services.core.changeover.state import MemberPhase
from services.core.planner.events import DrainContinued, RefuseRequest
from services.core.report import OtherRoom
from tests.support.changeover_script import Script, groups

APART, MERGED, SPLIT = groups(1, "a", "b"), groups(2, "ab"), groups(3, "a", "b")
ROOM = OtherRoom(100, (100,))


def begun() -> Script:
    """ "a" runs "r" alone."""
    script = Script("ab").change(APART)
    script.ask("a", "r", 8, most=20, resumable=True)
    script.advance("a")
    return script


def returned(script: Script) -> list[str]:
    commands = script.do("a", DrainContinued(10.0, ROOM))
    return [command.request_id for command in commands if isinstance(command, RefuseRequest)]


def test_a_single_worker_returns_its_requests() -> None:
    script = begun()
    assert returned(script) == ["r"]
    assert script.names_at("a") == []


def test_a_worker_in_a_change_or_in_a_merged_group_returns_none() -> None:
    script = begun()
    script.hear(MERGED)
    assert script.members["a"].phase is MemberPhase.DRAINING and returned(script) == []
    script.turn("a")
    assert script.members["a"].phase is MemberPhase.JOINING and returned(script) == []
    script.settle()
    assert script.members["a"].settled and returned(script) == []
    script.change(SPLIT)
    leader = "a" if script.names_at("a") else "b"
    commands = script.do(leader, DrainContinued(10.0, ROOM))
    assert [type(command) for command in commands] == [RefuseRequest]
