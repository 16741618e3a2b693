"""A short scenario for each rule of a change-over that fails without the rule.

A scenario raises on failure. Mostly "a" leads a pipeline with "b", and the two separate.
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
"""Scenarios by rule."""


def _witness(rule: str) -> Callable[[Witness], Witness]:
    def note(witness: Witness) -> Witness:
        WITNESSES[rule] = witness
        return witness

    return note


@_witness("frames of other epochs have no effect")
def frames_of_a_former_leader_are_ignored() -> None:
    script = pipeline("r")
    script.launch("a")
    script.hear((GroupStages("g-b", 2, (Stage("b", 2, LAYERS),)),))
    script.turn("b")
    assert script.taken_at("b") == 0
    script.settle()
    assert script.taken_at("b") == 0


@_witness("frames wait until all stages have joined")
def sequences_wait_until_the_leader_knows_its_stages() -> None:
    script = Script("abc").change(groups(1, "a", "b", "c"))
    script.ask("c", "r", 8)
    script.run("c", 1)
    script.stopped = {("b", "a")}
    script.change(groups(2, "abc"))
    assert script.members["a"].phase is MemberPhase.JOINING
    script.reconnect()
    assert script.names_at("a") == ["r"] and script.members["a"].settled


@_witness("an abort waits while stages join")
def kv_of_a_request_aborted_while_stages_join_is_freed() -> None:
    script = pipeline("r")
    script.stopped = {("c", "a")}
    script.change(groups(2, "ac", "b"))
    assert script.members["a"].phase is MemberPhase.JOINING
    script.do("a", RequestAborted(0.0, "r"))
    script.reconnect()
    assert script.taken_at("b") == 0


@_witness("a stage leaves after its leader")
@_witness("a configuration is left when it is drained")
def stages_keep_the_blocks_of_microbatches_in_flight() -> None:
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
def a_sequence_without_its_kv_does_not_run() -> None:
    script = pipeline("r")
    script.transfers_run = False
    script.change(APART)
    assert not script.launch("a"), "KV of the layers of b is not there"
    script.transfers_run = True
    script.settle()
    assert script.launch("a")


@_witness("unclaimed KV keeps a member unsettled")
def kv_is_kept_until_it_is_fetched() -> None:
    script = pipeline("r")
    script.transfers_run = False
    script.change(APART)
    go_on_when_ready(script)
    script.transfers_run = True
    script.settle()
    assert script.members["a"].settled


@_witness("a superseded sequence is not adopted")
def a_retried_request_has_a_single_sequence() -> None:
    script = pipeline(waiting=("r#g.1", "s#g.1"))
    part(script)
    script.ask("b", "s#g.2", 8)
    script.settle()
    assert script.names_at("b") == ["s#g.2"]
    assert script.names_at("a") == ["r#g.1"]


@_witness("transfers to released requests are refused")
def late_kv_is_not_stored_in_reassigned_blocks() -> None:
    script = pipeline()
    stage = script.members["b"]
    script.receive("a", "b", Reserve("b", "r", 2, ("t",)))
    assert stage.kv_blocks_for("t", "r") == (0, 1)
    script.receive("a", "b", Activations(1, ("r",), (StageChunk("r", 0, 8, 2, None),)))
    assert stage.kv_blocks_for("t", "r") == ()


@_witness("a new leader counts used blocks")
@_witness("freed blocks of other leaders are credited")
def a_leader_counts_the_used_blocks_of_its_stages() -> None:
    script = pipeline("r")
    script.change(groups(2, "a", "cb"))
    assert script.names_at("a") == ["r"]
    ledger = script.members["c"].planner.sequence_table.ledger
    assert ledger.used == [script.taken_at("b")] == [0]


@_witness("a transfer of freed KV is cancelled")
def kv_being_sent_stays_in_memory() -> None:
    script = leaving("r")
    read_what_is_sent(script)
    script.do("a", RequestAborted(0.0, "r"))
    script.settle()
    read_what_is_sent(script)


@_witness("departed KV stays until it is freed")
def kv_queued_to_be_sent_stays_in_memory() -> None:
    script = leaving("r", "s")
    script.do("a", RequestAborted(0.0, "r"))
    script.settle()
    assert {sending.seq_id for sending in script.sending.values()} == {"s"}
    read_what_is_sent(script)


@_witness("a preparation begins when all is settled")
def layers_are_restored_after_their_old_kv_is_released() -> None:
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
def a_cancelled_restore_leaves_no_partial_layer() -> None:
    script = restoring("b")
    while not isinstance(script.steps.get("b"), vocabulary.RestoreSlab):
        script.go_on("b")
        script.settle()
    script.hear((GroupStages("g-b", 4, (Stage("b", 2, LAYERS),)),))
    script.turn("b")
    assert script.members["b"].configuration is not None
    assert script.members["b"].configuration.epoch == 4


@_witness("blocks move below the limit first")
def a_stage_keeps_its_used_blocks() -> None:
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
def a_shrinking_stage_frees_blocks_of_aborted_requests() -> None:
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
def a_stage_keeps_blocks_that_its_leader_has_assigned() -> None:
    """The leader assigns blocks to "s" before a microbatch announces them to the stage."""
    script = restoring("b")
    script.ask("a", "r", 60)
    script.ask("a", "s", 40)
    script.advance("a")
    assert (script.taken_at("a"), script.taken_at("b")) == (25, 15)
    script.go_on("b")  # its limit is 16
    script.settle()
    script.run("a")
    assert isinstance(script.steps["b"], vocabulary.ShrinkKv), "both have ended"


@_witness("a stage shrinks when its leader agrees")
def a_stage_keeps_blocks_that_its_leader_has_planned() -> None:
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
def no_stage_adopts_more_kv_than_fits() -> None:
    script = Script("ab").change(groups(1, "a", "b"))
    for name, request in (("a", "r"), ("b", "s")):
        script.ask(name, request, 40)
        script.launch(name)
        assert script.taken_at(name) == 10
    script.change(groups(2, "ab"))
    assert script.members["a"].settled
    assert [sequence.blocks for sequence in script.members["a"].planner.sequences.values()].count(
        0
    ) == 1


@_witness("sequences dealt to a lost leader are freed")
def sequences_of_a_lost_leader_are_returned() -> None:
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


@_witness("KV of a lost source is abandoned")
def lost_kv_is_recomputed() -> None:
    script = pipeline("r")
    script.transfers_run = False
    script.change(APART)
    assert script.members["a"].phase is MemberPhase.MIGRATING
    script.lose("b")
    script.settle()
    assert script.members["a"].settled
    assert [request.seq_id for request in script.members["a"].planner.waiting] == ["r"]


@_witness("a leader waits for all that may hand over")
def a_receiver_of_sequences_defers_preparations() -> None:
    script = pipeline(waiting=("r", "s"))
    part(script)
    go_on_when_ready(script)
    script.settle()
    assert script.members["a"].settled
    assert script.names_at("b") == ["s"]
    assert isinstance(script.steps["b"], vocabulary.ConnectMembers)


@_witness("a member that skips a change announces it")
def sequences_handed_to_a_member_that_skips_the_epoch_return() -> None:
    script = pipeline(waiting=("r", "s"))
    script.hear(groups(2, "a", "bc"), "a", "b")
    script.lose("c")
    script.change((GroupStages("g-b", 3, (Stage("b", 0, 2),)),))
    assert script.members["a"].settled
    assert script.names_at("a") == ["r", "s"]


@_witness("a member that may have missed a change announces it")
def members_that_missed_a_change_are_not_awaited() -> None:
    """The member was ready; its next record already excludes the lost member."""
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
def a_reader_is_redirected_once() -> None:
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
def an_abort_at_the_former_leader_ends_the_sequence() -> None:
    script = pipeline(waiting=("r", "s"))
    part(script)
    script.settle()
    assert script.names_at("b") == ["s"]
    script.do("a", RequestAborted(0.0, "s"))
    script.settle()
    assert script.names_at("b") == []


@_witness("lost peers are remembered while stages join")
def a_member_lost_while_stages_join_is_not_awaited() -> None:
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
def kv_held_for_a_dead_former_leader_is_freed() -> None:
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


@_witness("the later of two copies from a member is adopted")
def a_request_retried_after_an_abort_runs() -> None:
    """ "b" no longer leads when the request arrives, so it forwards both copies."""
    script = pipeline()
    script.ask("b", "r#1", 8)
    script.do("b", RequestAborted(0.0, "r"))
    script.ask("b", "r#2", 8)
    script.settle()
    assert script.names_at("a") == ["r#2"] and script.names_at("b") == []


@_witness("a stage waits for the outcome of its requests")
def a_sequence_has_one_leader() -> None:
    """ "c" forwards a late request to "a", which leaves and returns both copies to "c"."""
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
