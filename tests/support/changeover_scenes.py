"""Where scenarios of a change-over begin: "a" and "b" are a pipeline most of the time, and part."""

from services.core.changeover import vocabulary
from services.core.changeover.state import MemberPhase
from tests.support.changeover_script import LAYERS, Script, groups, kinds

APART = groups(2, "a", "b")


def pipeline(*running: str, waiting: tuple[str, ...] = (), tokens: int = 8) -> Script:
    """ "a" leads "b", "c" is alone. The `running` ones have a token each and 3 blocks."""
    script = Script("abc").change(groups(1, "ab", "c"))
    for name in running:
        script.ask("a", name, tokens)
    if running:
        script.advance("a")
    for name in waiting:
        script.ask("a", name, tokens)
    return script


def part(script: Script) -> None:
    """ "a" and "b" enter groups of their own; what "a" hands to "b" has not yet arrived."""
    script.hear(APART)
    script.turn("a")
    while script.members["b"].phase is MemberPhase.DRAINING:
        script.deliver("a", "b")
        script.turn("b")


def go_on_when_ready(script: Script) -> None:
    """The change after it comes as soon as "b" gets ready for it."""
    after = groups(3, "bc")
    script.turn("b")  # it says that it has what it is to have, if it thinks so
    script.do("b", vocabulary.PreparationAsked("t", after))
    if vocabulary.ConnectMembers in kinds(script.turn("b")):
        script.hear(after)
        script.turn("b")


def leaving(*names: str) -> Script:
    """ "b" has led sequences of a block each, whose KV "a" is to get: half of their layers."""
    script = Script("ab", remembering="b").change(groups(1, "a", "b"))
    for name in names:
        script.ask("b", name, 4)
        script.launch("b")
        for layer in range(LAYERS):
            block_ids = script.members["b"].planner.table.block_ids(name)
            script.memories["b"].write(layer, block_ids, name, 0, (5,) * 2)
    script.transfers_run = False
    script.change(groups(2, "ab"))
    assert {one.seq_id for one in script.sending.values()} == set(names)
    return script


def read_what_is_sent(script: Script) -> None:
    for one in script.sending.values():
        (block,) = script.members["b"].planner.table.block_ids(one.seq_id)
        script.memories["b"].pack(one.transfer.first_layer, block)


def restoring(*workers: str, blocks: int = 16) -> Script:
    """ "a" leads "b", and those named get ready to serve alone, connecting first."""
    script = Script("ab", blocks, remembering="ab").change(groups(1, "a", "b"))
    script.change(groups(2, "ab"))
    for name in workers:
        script.do(name, vocabulary.PreparationAsked("t", groups(3, "a", "b")))
    script.settle()
    return script
