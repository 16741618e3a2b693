"""Initial states of change-over scenarios: mostly "a" and "b" form a pipeline and then separate."""

from services.core.changeover import vocabulary
from services.core.changeover.state import MemberPhase
from tests.support.changeover_script import LAYERS, Script, groups, kinds

APART = groups(2, "a", "b")


def pipeline(*running: str, waiting: tuple[str, ...] = (), tokens: int = 8) -> Script:
    """Make "a" lead "b" and leave "c" alone. Each running request has a token and 3 blocks."""
    script = Script("abc").change(groups(1, "ab", "c"))
    for name in running:
        script.ask("a", name, tokens)
    if running:
        script.advance("a")
    for name in waiting:
        script.ask("a", name, tokens)
    return script


def part(script: Script) -> None:
    """Split "a" and "b" into single-worker groups; requests handed to "b" are in flight."""
    script.hear(APART)
    script.turn("a")
    while script.members["b"].phase is MemberPhase.DRAINING:
        script.deliver("a", "b")
        script.turn("b")


def go_on_when_ready(script: Script) -> None:
    """Commit the next change as soon as "b" is ready for it."""
    after = groups(3, "bc")
    script.turn("b")  # it reports the handover complete, if it believes so
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
    assert {sending.seq_id for sending in script.sending.values()} == set(names)
    return script


def read_what_is_sent(script: Script) -> None:
    for sending in script.sending.values():
        (block,) = script.members["b"].planner.table.block_ids(sending.seq_id)
        script.memories["b"].pack(sending.transfer.first_layer, block)


def restoring(*workers: str, blocks: int = 16) -> Script:
    """ "a" leads "b", and those named get ready to serve alone, connecting first."""
    script = Script("ab", blocks, remembering="ab").change(groups(1, "a", "b"))
    script.change(groups(2, "ab"))
    for name in workers:
        script.do(name, vocabulary.PreparationAsked("t", groups(3, "a", "b")))
    script.settle()
    return script
