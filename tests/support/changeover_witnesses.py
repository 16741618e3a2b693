"""For rules of a change-over a short scenario each, that goes wrong without that rule.

A scenario returns if all is well, and raises if not. "a" and "b" are a pipeline most of the time,
"a" leads it, and they part.
"""

from collections.abc import Callable

from services.core.changeover import vocabulary
from services.core.changeover.configuration import GroupStages
from services.core.changeover.frames import Activations, Adopt, Reserve, StageChunk
from services.core.changeover.state import DRAIN_TIMEOUT_S, MemberPhase
from services.core.groups.layer_map import Stage
from services.core.planner.events import RequestAborted
from tests.support.changeover_scenes import (
    APART,
    go_on_when_ready,
    leaving,
    part,
    pipeline,
    read_what_is_sent,
    restoring,
)
from tests.support.changeover_script import LAYERS, Script, groups, kinds

Witness = Callable[[], None]
WITNESSES: dict[str, Witness] = {}
"""By rule."""


def _witness(rule: str) -> Callable[[Witness], Witness]:
    def note(witness: Witness) -> Witness:
        WITNESSES[rule] = witness
        return witness

    return note


@_witness("frames of other epochs have no effect")
def what_an_old_leader_says_has_no_effect() -> None:
    script = pipeline("r")
    script.launch("a")
    script.hear((GroupStages("g-b", 2, (Stage("b", 2, LAYERS),)),))
    script.turn("b")
    assert script.taken_at("b") == 0
    script.settle()
    assert script.taken_at("b") == 0


@_witness("frames wait until all stages have joined")
def sequences_come_to_a_leader_that_knows_its_stages() -> None:
    script = Script("abc").change(groups(1, "a", "b", "c"))
    script.ask("c", "r", 8)
    script.run("c", 1)
    script.stopped = {("b", "a")}
    script.change(groups(2, "abc"))
    assert script.members["a"].phase is MemberPhase.JOINING
    script.reconnect()
    assert script.names_at("a") == ["r"] and script.members["a"].settled


@_witness("an abort waits while stages join")
def kv_of_what_is_aborted_while_stages_join_is_freed() -> None:
    script = pipeline("r")
    script.stopped = {("c", "a")}
    script.change(groups(2, "ac", "b"))
    assert script.members["a"].phase is MemberPhase.JOINING
    script.do("a", RequestAborted(0.0, "r"))
    script.reconnect()
    assert script.taken_at("b") == 0


@_witness("a stage leaves after its leader")
@_witness("a configuration is left when it is drained")
def all_stages_have_the_blocks_of_what_was_in_flight() -> None:
    script = pipeline("r", "s")
    while script.launch("a"):
        pass
    script.hear(APART)
    script.turn("b")
    script.turn("a")
    script.settle()
    assert script.names_at("a") == ["r"] and script.names_at("b") == ["s"]
    assert script.taken_at("a") == script.taken_at("b") == 3, "their KV is kept"


@_witness("a sequence is held until its KV is whole")
def what_lacks_kv_does_not_run() -> None:
    script = pipeline("r")
    script.transfers_run = False
    script.change(APART)
    assert not script.launch("a"), "KV of the layers of b is not there"
    script.transfers_run = True
    script.settle()
    assert script.launch("a")


@_witness("unclaimed KV keeps a member unsettled")
def kv_is_not_left_before_it_is_fetched() -> None:
    script = pipeline("r")
    script.transfers_run = False
    script.change(APART)
    go_on_when_ready(script)
    script.transfers_run = True
    script.settle()
    assert script.members["a"].settled


@_witness("a superseded sequence is not adopted")
def a_request_that_was_asked_for_again_has_one_sequence() -> None:
    script = pipeline(waiting=("r#g.1", "s#g.1"))
    part(script)
    script.ask("b", "s#g.2", 8)
    script.settle()
    assert script.names_at("b") == ["s#g.2"]
    assert script.names_at("a") == ["r#g.1"]


@_witness("transfers to released requests are refused")
def nothing_is_stored_in_blocks_that_a_sequence_was_given_anew() -> None:
    script = pipeline()
    stage = script.members["b"]
    script.receive("a", "b", Reserve("b", "r", 2, ("t",)))
    assert stage.kv_blocks_for("t", "r") == (0, 1)
    script.receive("a", "b", Activations(1, ("r",), (StageChunk("r", 0, 8, 2, None),)))
    assert stage.kv_blocks_for("t", "r") == ()


@_witness("a new leader counts what is in use")
@_witness("freed blocks of other leaders are credited")
def a_leader_counts_what_its_stage_uses() -> None:
    script = pipeline("r")
    script.change(groups(2, "a", "cb"))
    assert script.names_at("a") == ["r"]
    ledger = script.members["c"].planner.sequence_table.ledger
    assert ledger.used == [script.taken_at("b")] == [0]


@_witness("a transfer of freed KV is cancelled")
def what_is_being_sent_is_there() -> None:
    script = leaving("r")
    read_what_is_sent(script)
    script.do("a", RequestAborted(0.0, "r"))
    script.settle()
    read_what_is_sent(script)


@_witness("departed KV stays until it is freed")
def what_is_still_to_be_sent_is_there() -> None:
    script = leaving("r", "s")
    script.do("a", RequestAborted(0.0, "r"))
    script.settle()
    assert {one.seq_id for one in script.sending.values()} == {"s"}
    read_what_is_sent(script)


@_witness("a preparation begins when all is settled")
def layers_return_when_their_old_kv_has_gone() -> None:
    script = leaving("r")
    script.do("b", vocabulary.PreparationAsked("t", groups(3, "a", "b")))
    for _ in range(2):
        script.settle()
        while "b" in script.steps:
            script.go_on("b")
            script.settle()
        script.transfers_run = True
    assert not script.members["b"].busy, "it is ready"
    assert all(script.memories["b"].blocks.values())


@_witness("a preparation for another change is aborted")
def a_stage_that_keeps_its_layers_has_no_half_restored_one() -> None:
    script = restoring("b")
    while not isinstance(script.steps.get("b"), vocabulary.RestoreSlab):
        script.go_on("b")
        script.settle()
    script.hear((GroupStages("g-b", 4, (Stage("b", 2, LAYERS),)),))
    script.turn("b")
    assert script.members["b"].configuration is not None
    assert script.members["b"].configuration.epoch == 4


@_witness("blocks move below the limit first")
def a_stage_keeps_the_blocks_that_it_needs() -> None:
    script = restoring("b", blocks=8)
    for name in "rst":
        script.ask("a", name, 16)
    script.advance("a")
    assert script.members["b"].planner.table.block_ids("t") == (8, 9, 10, 11)
    for name in "rs":
        script.do("a", RequestAborted(0.0, name))
    script.go_on("b")  # its limit is 8
    script.settle()
    assert isinstance(script.steps["b"], vocabulary.ShrinkKv)
    assert max(script.members["b"].planner.table.block_ids("t")) < 8


@_witness("names of released requests go before blocks")
def a_stage_frees_what_its_leader_counts_on() -> None:
    script = restoring("b")
    script.ask("a", "r", 56)
    script.advance("a")
    script.do("a", RequestAborted(0.0, "r"))
    assert (script.taken_at("a"), script.taken_at("b")) == (0, 14)
    script.go_on("b")  # its limit is 16
    script.settle()
    script.ask("a", "s", 40)
    script.advance("a")
    assert script.taken_at("b") == 10


@_witness("a stage shrinks when few enough are used")
def a_stage_has_the_blocks_that_its_leader_has_given_out() -> None:
    """ "s" has its blocks in the leader's books before a microbatch tells the stage of them."""
    script = restoring("b")
    script.ask("a", "r", 60)
    script.ask("a", "s", 40)
    script.advance("a")
    assert (script.taken_at("a"), script.taken_at("b")) == (25, 15)
    script.go_on("b")  # its limit is 16
    script.settle()
    script.run("a")
    assert isinstance(script.steps["b"], vocabulary.ShrinkKv), "both have ended"


@_witness("a stage shrinks when its leader says so")
def a_stage_has_the_blocks_that_its_leader_has_planned_with() -> None:
    script = restoring("b", blocks=8)
    script.stopped = {("b", "a"), ("a", "b")}
    for name in "rst":
        script.ask("a", name, 20)
    script.launch("a")
    assert script.taken_at("a") == 15
    script.go_on("b")  # its limit is 8
    script.reconnect()
    script.run("a")
    assert isinstance(script.steps["b"], vocabulary.ShrinkKv), "all have ended"
    assert script.taken_at("b") == 0


@_witness("a move starts when there is room")
def no_stage_takes_in_more_than_it_has() -> None:
    script = Script("ab").change(groups(1, "a", "b"))
    for name, request in (("a", "r"), ("b", "s")):
        script.ask(name, request, 40)
        script.launch(name)
        assert script.taken_at(name) == 10
    script.change(groups(2, "ab"))
    assert script.members["a"].settled
    assert [one.blocks for one in script.members["a"].planner.sequences.values()].count(0) == 1


@_witness("what a lost leader was dealt is freed")
def sequences_come_back_from_a_lost_leader() -> None:
    script = pipeline("r", "s")
    part(script)
    script.stopped = {("b", "a")}
    script.settle()
    assert script.members["a"].phase is MemberPhase.ADOPTING, "it has not heard of s"
    script.lose("b")
    script.settle()
    assert script.members["a"].settled
    assert script.names_at("a") == ["r", "s"]
    assert script.members["a"].planner.table.seq_ids == ("r",)


@_witness("KV of a lost source is given up")
def kv_that_does_not_come_is_computed_again() -> None:
    script = pipeline("r")
    script.transfers_run = False
    script.change(APART)
    assert script.members["a"].phase is MemberPhase.MIGRATING
    script.lose("b")
    script.settle()
    assert script.members["a"].settled
    assert [one.seq_id for one in script.members["a"].planner.waiting] == ["r"]


@_witness("a leader waits for all that may hand over")
def who_gets_sequences_prepares_no_change_before_it_has_them() -> None:
    script = pipeline(waiting=("r", "s"))
    part(script)
    go_on_when_ready(script)
    script.settle()
    assert script.members["a"].settled
    assert script.names_at("b") == ["s"]
    assert isinstance(script.steps["b"], vocabulary.ConnectMembers)


@_witness("a member that passes over a change says so")
def what_was_handed_to_a_member_that_passes_comes_back() -> None:
    script = pipeline(waiting=("r", "s"))
    script.hear(groups(2, "a", "bc"), "a", "b")
    script.lose("c")
    script.change((GroupStages("g-b", 3, (Stage("b", 0, 2),)),))
    assert script.members["a"].settled
    assert script.names_at("a") == ["r", "s"]


@_witness("a member that may have missed a change says so")
def nobody_waits_for_a_member_that_never_heard_of_the_change() -> None:
    """It was ready, and reads only that a member was lost since."""
    script = pipeline(waiting=("r", "s"))
    apart = groups(2, "a", "bc")
    for name in "abc":
        script.do(name, vocabulary.PreparationAsked("t", apart))
    script.settle()
    for name in "abc":
        script.go_on(name)
    script.hear(apart, "a")
    script.lose("c")
    script.change((GroupStages("g-b", 3, (Stage("b", 0, 2),)),))
    assert script.members["a"].settled
    assert script.names_at("a") == ["r", "s"]


@_witness("a sequence is adopted once")
def a_reader_is_told_of_a_sequence_once() -> None:
    script = pipeline(waiting=("r", "s"))
    part(script)
    (adopt,) = [frame for _, frame in script.ways["a", "b"] if isinstance(frame, Adopt)]
    script.settle()
    script.launch("b")
    again = script.receive("a", "b", adopt)
    assert vocabulary.NoteAdopted not in kinds(again), "it would read from the first token on"
    script.settle()
    assert script.members["b"].settled
    assert script.names_at("b") == ["s"]


@_witness("an abort follows a sequence that has moved")
def who_hangs_up_where_a_sequence_was_ends_it() -> None:
    script = pipeline(waiting=("r", "s"))
    part(script)
    script.settle()
    assert script.names_at("b") == ["s"]
    script.do("a", RequestAborted(0.0, "s"))
    script.settle()
    assert script.names_at("b") == []


@_witness("lost peers are kept in mind while stages join")
def a_member_lost_while_stages_join_is_not_waited_for() -> None:
    script = pipeline(waiting=("r", "s"))
    script.stopped = {("c", "a"), ("a", "b")}
    script.change(groups(2, "ac", "b"), "a", "c")
    assert script.members["a"].phase is MemberPhase.JOINING
    script.hear(groups(3, "a", "c"), "a")
    script.lose("b")
    assert script.members["a"].phase is MemberPhase.DRAINING
    script.now_s = DRAIN_TIMEOUT_S / 2
    script.reconnect()
    configuration = script.members["a"].configuration
    assert configuration is not None and configuration.epoch == 3
    assert script.names_at("a") == ["r", "s"]


@_witness("KV that no leader has is released")
def nobody_keeps_kv_for_an_old_leader_that_died() -> None:
    for new in (("a", "b", "c"), ("a", "bc")):
        script = Script("abc").change(groups(1, "abc"))
        script.ask("a", "r", 8)
        script.advance("a")
        script.transfers_run = False
        script.change(groups(2, *new))
        assert script.names_at("a") == ["r"]
        assert script.members["a"].phase is MemberPhase.MIGRATING
        script.lose("a")
        script.settle()
        assert all(member.settled for member in script.members.values())
        assert script.taken_at("b") == script.taken_at("c") == 0
        assert script.members["b"].planner.load().kv_blocks_free > 0


@_witness("the later of two that one member hands on is taken")
def a_request_that_was_given_up_and_asked_for_again_runs() -> None:
    """ "b" does not lead when it comes, so it hands both on."""
    script = pipeline()
    script.ask("b", "r#1", 8)
    script.do("b", RequestAborted(0.0, "r"))
    script.ask("b", "r#2", 8)
    script.settle()
    assert script.names_at("a") == ["r#2"] and script.names_at("b") == []


@_witness("a stage waits for word of its requests")
def a_sequence_has_one_leader() -> None:
    """ "c" hands a request that came late to "a", which leaves, and says both to "c"."""
    script = Script("abc").change(groups(1, "abc"))
    script.ask("a", "q", 8)
    script.ask("c", "r", 8)
    script.stopped = {("a", "c")}
    script.settle()
    assert script.names_at("a") == ["q", "r"]
    script.change(groups(2, "a", "b", "c"))
    script.reconnect()
    assert all(member.settled for member in script.members.values())
    assert [name for name in "abc" if "r" in script.names_at(name)] == ["b"]
