"""A leader whose group was divided by a loss returns requests for its former members."""

import pytest

from services.core.changeover import vocabulary
from services.core.changeover.configuration import GroupStages
from services.core.changeover.frames import EpochAbandoned
from services.core.groups.layer_map import Stage
from services.core.planner.events import RefuseRequest, RequestAborted
from tests.support.changeover_script import Groups, Script, groups


def single_group(epoch: int, name: str, first: int, end: int) -> Groups:
    """A survivor has the layers that it holds."""
    return (GroupStages(f"g-{name}", epoch, (Stage(name, first, end),)),)


def merged(workers: str, requests: int, *, resumable: bool = True) -> Script:
    """A group that has run requests for some tokens."""
    script = Script(workers, blocks=64)
    script.hear(groups(1, *workers))
    script.change(groups(2, workers))
    for number in range(requests):
        script.ask(workers[0], f"r{number}", 8, 40, resumable=resumable)
    script.run(workers[0], 6)
    return script


def divided(script: Script, leader: str, end: int, epoch: int = 3) -> list[str]:
    """The requests that a leader returns when it is alone with its layers."""
    script.do(
        leader, vocabulary.ConfigurationCommitted(script.now_s, single_group(epoch, leader, 0, end))
    )
    commands = script.turn(leader)
    refusals = [command for command in commands if isinstance(command, RefuseRequest)]
    assert all(refusal.returned for refusal in refusals)
    return [refusal.request_id for refusal in refusals]


@pytest.mark.parametrize(
    ("workers", "end", "back"),
    [("abcd", 1, ["r2", "r3"]), ("abc", 1, ["r2", "r3"]), ("ab", 2, [])],
)
def test_a_leader_keeps_its_share_among_living_members(
    workers: str, end: int, back: list[str]
) -> None:
    script = merged(workers, 4)
    script.lose(workers[-1])
    assert divided(script, "a", end) == back
    assert set(script.names_at("a")) == {"r0", "r1", "r2", "r3"} - set(back)
    assert divided(script, "a", end, epoch=4) == [], "there is no member left to share with"
    script.change(single_group(5, "a", 0, 4))
    script.run("a")
    assert script.names_at("a") == [], "the others have ended here"
    assert script.taken_at("a") == 0


def test_members_count_as_living_until_their_loss_is_known() -> None:
    script = merged("abcd", 4)
    assert divided(script, "a", 1) == ["r1", "r2", "r3"]


def test_non_resumable_requests_stay_at_the_leader() -> None:
    script = merged("abcd", 4, resumable=False)
    script.lose("d")
    assert divided(script, "a", 1) == []
    assert len(script.names_at("a")) == 4


def test_an_aborted_request_is_not_returned() -> None:
    script = merged("abcd", 4)
    script.lose("d")
    script.do("a", RequestAborted(script.now_s, "r3"))
    assert divided(script, "a", 1) == ["r1", "r2"]


def test_a_change_without_a_loss_returns_no_request() -> None:
    script = merged("abcd", 4)
    script.change(groups(3, "ab", "cd"))
    assert sorted(script.names_at("a") + script.names_at("c")) == ["r0", "r1", "r2", "r3"]


def cut_off(resumable: bool = True) -> tuple[Script, list[str]]:
    """A group of four splits; its leader cannot be answered, and then the ways to it are lost.

    Also returns the requests that the leader returns.
    """
    script = merged("abcd", 8, resumable=resumable)
    script.stopped = {(peer, "a") for peer in "bcd"}
    script.change(groups(3, *"abcd"))
    assert len(script.names_at("a")) == 8, "no member is known to have taken any"
    commands = script.do("a", vocabulary.PeersLost(script.now_s, frozenset("bcd")))
    refused = [effect for effect in commands if isinstance(effect, RefuseRequest)]
    assert all(command.returned for command in refused)
    return script, [command.request_id for command in refused]


def test_an_isolated_split_leader_keeps_its_share_of_returned_requests() -> None:
    script, back = cut_off()
    kept = [name for name in script.names_at("a") if name not in back]
    assert (len(kept), len(back)) == (4, 4), "two that were its own, and two of six"
    script.reconnect()
    script.run("a")
    assert script.names_at("a") == [] and script.taken_at("a") == 0
    assert script.members["a"].settled


def test_non_resumable_returned_requests_stay() -> None:
    script, back = cut_off(resumable=False)
    assert back == [] and len(script.names_at("a")) == 8


def test_a_former_leader_forwards_returned_requests() -> None:
    script = merged("abcd", 8)
    script.stopped = {(peer, "a") for peer in "bcd"}
    script.hear(groups(3, "ba", "cd"))
    commands = script.do("a", vocabulary.PeersLost(script.now_s, frozenset("cd")))
    assert not any(isinstance(command, RefuseRequest) for command in commands)


@pytest.mark.parametrize(
    ("workers", "lost", "back"),
    [("ab", "b", 0), ("abcd", "b", 1), ("abc", "bc", 3)],
)
def test_a_lost_leader_counts_as_lost_unless_all_are(workers: str, lost: str, back: int) -> None:
    script = merged(workers, 8)
    script.stopped = {(peer, "a") for peer in workers[1:]}
    script.change(groups(3, *workers))
    commands = script.do("a", vocabulary.PeersLost(script.now_s, frozenset(lost)))
    assert sum(isinstance(command, RefuseRequest) for command in commands) == back


def test_returned_requests_are_shared_with_living_leaders() -> None:
    script = merged("abcd", 8)
    script.stopped = {(peer, "a") for peer in "bcd"}
    script.change(groups(3, *"abcd"))
    commands = [
        command for peer in "bcd" for command in script.receive(peer, "a", EpochAbandoned())
    ]
    assert sum(isinstance(effect, RefuseRequest) for effect in commands) == 3
