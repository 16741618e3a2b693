"""A member prepares for other groups, or refuses with a reason and is unchanged."""

import pytest

from services.core.changeover import slab_sources, vocabulary
from services.core.changeover.configuration import GroupStages
from services.core.changeover.frames import Capacity
from services.core.changeover.lost_peers import UNFINISHED_WAIT_S
from services.core.changeover.preparation import BUSY, NO_ROOM, UNFINISHED
from services.core.groups.layer_map import Stage
from tests.support.changeover_scenes import restoring
from tests.support.changeover_script import LAYERS, Script, groups

NEXT = groups(3, "a", "b")


def refusals(commands: list[vocabulary.Command]) -> list[str | None]:
    return [
        command.refusal for command in commands if isinstance(command, vocabulary.EndPreparation)
    ]


def capacities(script: Script) -> list[int]:
    """The reports of blocks that "b" has yet to send to "a"."""
    frames = [frame for _, frame in script.ways["b", "a"]]
    return [frame.blocks for frame in frames if isinstance(frame, Capacity)]


def fetching(script: Script) -> vocabulary.RestoreSlab:
    """Make "b" free memory for its first slab."""
    while not isinstance(script.steps["b"], vocabulary.RestoreSlab):
        script.go_on("b")
        script.settle()
    step = script.steps["b"]
    assert isinstance(step, vocabulary.RestoreSlab)
    return step


def fetch_all(script: Script, name: str) -> list[vocabulary.Command]:
    commands: list[vocabulary.Command] = []
    while name in script.steps:
        commands += script.go_on(name)
        script.settle()
    return commands


@pytest.mark.parametrize("begun", [True, False])
def test_attempts_are_exclusive(begun: bool) -> None:
    script = Script("ab")
    script.hear(groups(1, "a", "b"))
    if begun:
        script.settle()
    for attempt, expected in (("t", []), ("u", [BUSY])):
        asked = vocabulary.PreparationAsked(attempt, groups(2, "ab"))
        assert refusals(script.do("a", asked)) == expected
    script.settle()
    assert refusals(script.go_on("a")) == [None]
    assert refusals(script.do("a", vocabulary.PreparationAsked("u", groups(2, "ab")))) == [BUSY]
    assert not script.members["a"].busy, "a member that is ready needs no turns"


@pytest.mark.parametrize(("members", "epoch"), [("ab", 3), ("abc", 10)])
def test_an_attempt_outdated_by_a_commit_blocks_nothing(members: str, epoch: int) -> None:
    """For example, a member dies while its group is rebuilt or is to merge with a group of high
    epochs. The survivors are asked for their layers once they have groups of their own.
    """
    script = Script("abc").change(groups(1, "a", "b"))
    script.hear(groups(2, "ab"))
    script.do("b", vocabulary.PreparationAsked("outdated", groups(epoch, members)))
    alone = (GroupStages("g-b", 3, (Stage("b", LAYERS // 2, LAYERS),)),)
    script.hear(alone, "b")
    assert not refusals(script.do("b", vocabulary.PreparationAsked("restored", groups(4, "b"))))
    script.settle()
    assert script.steps["b"] == vocabulary.ConnectMembers("restored")


def cut_amid_a_merge() -> Script:
    """ "b" and "c" have lost "a" before they got the KV of its requests."""
    script = Script("abc").change(groups(1, "a", "b", "c"))
    for leader in "abc":
        script.ask(leader, f"of {leader}", 6)
        script.launch(leader)
    script.stopped |= {("a", "b"), ("a", "c")}
    script.change(groups(2, "abc"))
    assert not script.members["b"].settled
    script.lose("a")
    return script


def test_a_change_stalled_by_a_loss_does_not_delay_an_attempt() -> None:
    script = cut_amid_a_merge()
    script.do("b", vocabulary.PreparationAsked("again", groups(3, "abc")))
    assert refusals(script.turn("b")) == [], "what the others owe may still come"
    script.now_s += UNFINISHED_WAIT_S + 0.01
    assert refusals(script.turn("b")) == [UNFINISHED]
    script.do("b", vocabulary.PreparationAsked("and again", groups(3, "abc")))
    assert refusals(script.turn("b")) == [UNFINISHED]


def test_an_attempt_waits_for_fetches_of_the_other_split_group() -> None:
    """The lost connection is not needed, so both members wait until the fetches end."""
    script = Script("abcd", blocks=64).change(groups(1, "abcd"))
    for number in range(4):
        script.ask("a", f"r{number}", 6)
    script.advance("a")
    script.transfers_run = False
    script.change(groups(2, "ab", "cd"))
    while arriving := [
        t for t, sending in script.sending.items() if sending.transfer.destination in "ab"
    ]:
        for transfer in arriving:
            script.end_transfer(transfer)
        script.settle()
    script.stopped |= {("a", "b"), ("b", "a")}
    for name, lost in ("ab", "ba"):
        script.do(name, vocabulary.PeersLost(script.now_s, frozenset(lost)))
        script.do(name, vocabulary.PreparationAsked("again", groups(3, "ab")))
    script.now_s += UNFINISHED_WAIT_S + 0.01
    assert not [refusal for name in "ab" for refusal in refusals(script.turn(name))]
    assert not script.members["a"].settled, "c has yet to fetch KV from a"
    script.transfers_run = True
    script.settle()
    assert [script.steps[name] for name in "ab"] == [vocabulary.ConnectMembers("again")] * 2


def test_an_attempt_waits_for_a_configuration_that_follows_the_loss() -> None:
    script = cut_amid_a_merge()
    alone = (GroupStages("g-b", 3, (Stage("b", 1, 2),)),)
    script.now_s += UNFINISHED_WAIT_S + 0.01
    script.hear(alone, "b")
    commands = script.do("b", vocabulary.PreparationAsked("restored", groups(4, "b")))
    script.settle()
    assert not refusals(commands)
    assert script.steps["b"] == vocabulary.ConnectMembers("restored")


def test_an_unreachable_member_is_named() -> None:
    script = restoring("b")
    commands = script.go_on("b", unreachable="a")
    assert refusals(commands) == ["a cannot be reached for transfers"]
    assert vocabulary.NoteAborted("t") in commands
    assert vocabulary.UndoRestore("t") not in commands, "nothing has been done to the memory"


def test_restored_layers_and_used_blocks_must_both_fit() -> None:
    script = restoring("b")
    machine = script.members["b"]
    machine.handle(vocabulary.MembersConnected("t"))
    commands = machine.handle(vocabulary.RestoreMeasured(0, ("model.layers.0",), (0, 1)))
    assert refusals(commands) == [NO_ROOM]


def test_a_failed_restore_is_rolled_back() -> None:
    script = restoring("b")
    before = script.memories["b"].num_blocks
    step = fetching(script)
    assert script.members["b"].planner.pool.num_blocks < before
    commands = script.do("b", vocabulary.RestoreFailed("the folder has other parameters"))
    assert refusals(commands) == ["the folder has other parameters"]
    assert not script.memories["b"].filling, f"{step.slab} was begun"
    assert script.members["b"].planner.pool.usable == before
    assert capacities(script) == [before]
    script.settle()
    ledger = script.members["a"].planner.sequence_table.ledger
    assert ledger.capacity == [before]


@pytest.mark.parametrize("attempt", ["t", "another"])
def test_an_abort_ends_the_named_attempt(attempt: str) -> None:
    script = restoring("b")
    fetching(script)
    commands = script.do("b", vocabulary.PreparationAborted(attempt))
    assert (vocabulary.UndoRestore("t") in commands) is (attempt == "t")
    assert script.members["b"].busy is (attempt != "t")
    assert not refusals(commands), "the change that aborted it needs no refusal"


def test_an_attempt_that_waits_for_the_last_change_is_aborted_silently() -> None:
    script = Script("ab")
    script.hear(groups(1, "a", "b"), "b")
    script.do("b", vocabulary.PreparationAsked("t", groups(2, "ab")))
    assert script.do("b", vocabulary.PreparationAborted("t")) == []
    script.change(groups(1, "a", "b"), "a")
    assert not script.steps and script.members["b"].settled


def test_incomplete_slabs_of_a_member_come_from_the_folder() -> None:
    script = restoring("b")
    first = fetching(script)
    assert first.holder == "a"
    assert script.go_on("b", intact=False) == [vocabulary.RestoreSlab("t", first.slab, "")]
    (second,) = script.go_on("b")
    assert isinstance(second, vocabulary.RestoreSlab)
    assert second.slab != first.slab and second.holder == "a"


def test_parameters_of_a_member_that_leaves_come_from_the_folder() -> None:
    script = restoring()
    script.do("b", vocabulary.PreparationAsked("t", groups(3, "b")))
    script.settle()
    assert fetching(script).holder == ""


def test_late_answers_have_no_effect() -> None:
    script = restoring("b")
    step = fetching(script)
    late: list[vocabulary.Event] = [
        vocabulary.MembersConnected("t"),
        vocabulary.MembersConnected("earlier", "a"),
        vocabulary.RestoreMeasured(1, (), ()),
        vocabulary.KvShrunk("t"),
        vocabulary.SlabVerified("t", "model.layers.3", intact=True),
        vocabulary.SlabVerified("earlier", step.slab, intact=True),
        vocabulary.KvMapped(),
    ]
    assert [script.do("b", event) for event in late] == [[]] * len(late)
    assert script.steps["b"] == step
    assert refusals(fetch_all(script, "b")) == [None]
    assert script.do("b", vocabulary.RestoreFailed("too late")) == []


def test_prepared_layers_are_used() -> None:
    """Both get their layers back; KV of running requests moves below the limit first."""
    script = restoring("a", "b", blocks=8)
    for name in "rst":
        script.ask("a", name, 16)
    script.advance("a")
    taken = script.members["b"].planner.pool.users
    assert max(taken) >= 8, "more than a member alone has"
    for name in "ab":
        script.go_on(name)
    script.settle()
    script.run("a")
    for name in "ab":
        assert refusals(fetch_all(script, name)) == [None]
    script.change(NEXT)
    for name in "ab":
        assert script.members[name].settled
        assert script.memories[name].layers == range(LAYERS)
        assert script.members[name].planner.pool.usable == 8


@pytest.mark.parametrize("later", [False, True])
def test_an_attempt_for_a_later_change_waits_on(later: bool) -> None:
    """It was asked for after the commit of the change that this member has yet to enter."""
    script = Script("ab")
    script.hear(groups(1, "a", "b"), "a")
    asked, commit = vocabulary.PreparationAsked("t", groups(3, "ab")), groups(2, "a")
    if not later:
        script.do("a", asked)
    script.hear(commit, "a")
    if later:
        script.do("a", asked)
    script.settle()
    assert ("a" in script.steps) is later


def test_a_stage_with_enough_memory_gives_up_no_block() -> None:
    script = restoring("b")
    machine = script.members["b"]
    blocks = machine.planner.pool.usable
    machine.handle(vocabulary.MembersConnected("t"))
    commands = machine.handle(vocabulary.RestoreMeasured(blocks, ("model.layers.0",), (0, 1)))
    assert commands == [vocabulary.ShrinkKv("t", blocks, 0)]
    assert machine.planner.pool.usable == blocks
    assert not capacities(script)


def test_a_repeatedly_failing_member_is_excluded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slab_sources, "FAILURES_MAX", 1)
    script = restoring("b")
    first = fetching(script)
    assert first.holder == "a"
    script.go_on("b", intact=False)
    (second,) = script.go_on("b")
    assert isinstance(second, vocabulary.RestoreSlab)
    assert second.slab != first.slab and second.holder == ""


def test_a_survivor_keeps_verified_slabs_for_the_next_attempt() -> None:
    script = restoring()
    survivor = (GroupStages("g-b", 3, (Stage("b", LAYERS // 2, LAYERS),)),)
    script.do("b", vocabulary.ConfigurationCommitted(script.now_s, survivor))
    script.settle()
    script.do("b", vocabulary.PreparationAsked("t", groups(4, "b")))
    script.settle()
    fetching(script)
    script.go_on("b")
    commands = script.do("b", vocabulary.PreparationAborted("t"))
    assert vocabulary.UndoRestore("t", keep_verified=True) in commands
