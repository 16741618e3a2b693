"""Preparation of a member, and missing resources."""

import logging
from dataclasses import replace

import pytest

from services.core.changeover.preparation import BUSY
from services.core.planner.batch import Microbatch
from services.core.queue_order import Scheduling
from services.core.service import Service, ServiceClass
from services.worker.engine.pipeline import restoring
from services.worker.engine.pipeline.connections import ANSWER_SHARE
from services.worker.engine.pipeline.restoring import CONNECT_TIMEOUT_S
from services.worker.engine.transfer import handshake
from services.worker.engine.transfer.errors import MoverFull
from services.worker.errors import (
    ArenaExhausted,
    InvalidBlocks,
    InvalidStage,
    ModelError,
)
from services.worker.ipc import PREPARE_TIMEOUT_S, Prepare
from tests.support.engines import Engine
from tests.support.fake_model import BLOCKS, CHUNK_BYTES, LAYERS, SLABS
from tests.support.integer_group import (
    APART,
    MERGED,
    TURNED,
    check_tokens,
    failing,
    member,
    memory,
    merged,
    merged_and_started,
    refusals,
    request,
    start,
    started,
)
from tests.unit.worker.engine.pipeline.conftest import MakeGroup


def test_a_repeated_prepare_is_answered_once(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group()
    answers: list[str] = []

    def hear(engine: Engine) -> None:
        prepared = engine.member.take_outbox().prepared
        answers.extend(engine.identity.worker_id + answer.error for answer in prepared)

    with monkeypatch.context() as listening:
        listening.setattr(group, "_hear", hear)
        again = Prepare(group.prepare(MERGED), group._plans(MERGED, group.epoch + 1))
        while len({answer[:2] for answer in answers}) < len(group.engines):
            for name in {"w0", "w1"}.difference(answers):
                member(group, name).prepare(again)
            group.turn()
    assert sorted(answers) == ["w0", "w1"]
    group.commit(MERGED)
    started(group)
    check_tokens(group)


def test_batch_work_alone_waits_for_a_merge(make_group: MakeGroup) -> None:
    """Each of its iterations would keep frames and turns of the change waiting."""
    launched: list[Microbatch] = []

    def interrupts(microbatch: Microbatch) -> None:
        launched.append(microbatch)

    group = make_group(planner={"scheduling": Scheduling.SLO}, interrupts=interrupts)
    batch_work = Service(ServiceClass.BATCH)
    start(group, *(replace(request(number, output=40), service=batch_work) for number in range(4)))
    group.run_until(lambda: all(stream.tokens for stream in group.streams.values()))
    assert launched and not any(stream.over for stream in group.streams.values())
    attempt = group.prepare(MERGED)
    launched.clear()
    assert group.await_answers(attempt, MERGED)
    group.commit(MERGED)
    group.settle()
    assert not launched
    check_tokens(group)


def test_while_one_attempt_is_prepared_another_is_refused(make_group: MakeGroup) -> None:
    group = make_group()
    first, second = group.prepare(MERGED), group.prepare(TURNED)
    assert group.await_answers(first, MERGED)
    assert refusals(group, second) == [BUSY, BUSY]
    group.commit(MERGED)
    started(group)
    check_tokens(group)


def test_an_aborted_attempt_leaks_nothing_and_can_be_retried(
    make_group: MakeGroup,
) -> None:
    group = make_group()
    for turns in range(30):
        attempt = group.prepare(MERGED)
        for _ in range(turns):
            group.turn()
        group.abort_attempt(attempt, MERGED)
        for engine in group.engines.values():
            assert not engine.member.busy_changing
    again = Prepare(attempt, group._plans(MERGED, group.epoch + 1))
    group.prepared.clear()
    for engine in group.engines.values():
        engine.member.prepare(again)
    assert group.await_answers(attempt, MERGED)


def test_a_change_ends_the_preparation_of_another_one(make_group: MakeGroup) -> None:
    """No answer follows; the attempt may be repeated afterwards."""
    group = merged(make_group())
    attempt = group.prepare(TURNED)
    group.commit(MERGED)
    group.settle()
    for engine in group.engines.values():
        assert not engine.member.busy_changing
    plans = group._plans(TURNED, group.epoch + 1)
    for engine in group.engines.values():
        engine.member.prepare(Prepare(attempt, plans))
    assert group.await_answers(attempt, TURNED)


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("blocks_after_adding", InvalidStage("there is no such stage")),
        ("shrink_kv", InvalidBlocks("a block below is owned")),
        ("map_layer_parameters", ArenaExhausted(requested_chunks=2, free_chunks=1)),
        ("load_layer", ModelError("the folder lacks a file")),
        ("finish_layer", InvalidStage("it is not being filled")),
        ("map_kv_of", ArenaExhausted(requested_chunks=7, free_chunks=1)),
    ],
)
def test_memory_errors_end_the_attempt_and_not_the_engine(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    group = merged_and_started(make_group())
    with monkeypatch.context() as broken:
        for name in group.engines:
            broken.setattr(memory(group, name), method, failing(error))
            broken.setattr(memory(group, name), "pack_slab", failing(InvalidStage("not now")))
        attempt = group.prepare(APART)
        assert not group.await_answers(attempt, APART)
        assert str(error) in refusals(group, attempt)[0]
        group.abort_attempt(attempt, APART)
    group.check_invariants()
    for name in group.engines:
        assert memory(group, name).layers == range(*{"w0": (0, 1), "w1": (1, LAYERS)}[name])
    group.reconfigure(APART)
    check_tokens(group)


def test_immovable_blocks_end_the_engine_with_an_error(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table names the new blocks already: requests would read KV of others."""
    group = merged(make_group())
    start(group, *(request(number, 30, 30) for number in range(4)))
    group.run_until(lambda: member(group, "w0").state.table.pool.taken_count > BLOCKS // 2)
    group.abort("r0")
    wrong = failing(InvalidBlocks("blocks move to lower ids"))
    for name in group.engines:
        monkeypatch.setattr(memory(group, name), "relocate", wrong)
    with pytest.raises(InvalidBlocks, match="as the block table requires: blocks move to low"):
        group.await_answers(group.prepare(APART), APART)


@pytest.mark.parametrize("lane", ["activations", "bulk"])
def test_an_unreachable_member_is_named_in_the_refusal(make_group: MakeGroup, lane: str) -> None:
    group = make_group()
    attempt = group.prepare(MERGED)
    address = {"activations": member(group, "w0").links.lane, "bulk": group.engines["w0"].bulk}
    address[lane].connect = lambda *_: None  # type: ignore[method-assign]
    for _ in range(200):
        group.turn()
    assert not group.answers(attempt)
    group.network.skip(CONNECT_TIMEOUT_S)  # type: ignore[attr-defined]
    assert not group.await_answers(attempt, MERGED)
    assert sorted(refusals(group, attempt)) == [
        "w0 cannot be reached for transfers",
        "w1 cannot be reached for transfers",
    ]
    assert not any(engine.member.busy_changing for engine in group.engines.values())


def test_a_lane_that_expects_too_many_peers_already_ends_the_attempt(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group()
    with monkeypatch.context() as full:
        full.setattr(handshake, "EXPECTED_MAX", 0)
        attempt = group.prepare(MERGED)
        group.run_until(lambda: refusals(group, attempt))
        assert group.prepared[attempt, "w1"].error == "0 peers are expected already"
    group.abort_attempt(attempt, MERGED)
    group.reconfigure(MERGED)
    started(group)
    check_tokens(group)


# --- parameters


def test_parameters_missing_at_the_holder_come_from_the_folder(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has other weights, no place for a transfer, or sends incomplete slabs."""
    caplog.set_level(logging.INFO)
    group = merged_and_started(make_group())
    # w0 asks w1 for the slabs of layers 1 and 2 and of the head, w1 asks w0 for the other two.
    slabs = memory(group, "w1").slabs
    names = [name for name, slab in slabs.items() if slab.resident]
    monkeypatch.setattr(slabs[names[0]], "_digest", b"of other parameters")
    monkeypatch.setattr(member(group, "w0").mover, "send", failing(MoverFull("try again later")))
    packed = memory(group, "w1").pack_slab
    monkeypatch.setattr(
        memory(group, "w1"), "pack_slab", lambda *at: packed(*at).mul_(at[0] != names[1])
    )
    with caplog.at_level(logging.INFO):
        attempt = group.prepare(APART)
        assert group.await_answers(attempt, APART)
    messages = [record.getMessage() for record in caplog.records]
    loaded = [text for text in messages if "comes from the model folder" in text]
    assert len(loaded) == 4, messages
    assert len([text for text in messages if text.endswith(": it did not arrive")]) == 3
    assert len([text for text in messages if "do not match their digest" in text]) == 1
    monkeypatch.undo()
    group.commit(APART)
    check_tokens(group)


def test_late_parameters_are_not_waited_for(
    make_group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    group = merged(make_group())
    attempt = group.prepare(APART)
    group.network._bulk.hold("w1", "w0")  # type: ignore[attr-defined]
    for _ in range(100):
        group.turn()
    assert (attempt, "w0") not in group.prepared
    group.network.skip(ANSWER_SHARE * PREPARE_TIMEOUT_S + 0.1)  # type: ignore[attr-defined]
    for _ in range(300):
        group.turn()
    assert (attempt, "w0") in group.prepared, "the folder has the rest: w1 is not asked again"
    assert caplog.text.count("was not restored from w1: it did not arrive") == 1
    assert caplog.text.count("was not restored from w1: the worker does not answer") == 2
    group.network._bulk.release("w1", "w0")  # type: ignore[attr-defined]
    group.commit(APART)
    group.settle()
    check_tokens(group)


def test_requests_go_on_while_parameters_are_verified(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slab from the folder; slabs of members are verified piece by piece."""
    monkeypatch.setattr(restoring, "CHECKED_BYTES_PER_TURN", 100)
    group = merged_and_started(make_group())
    monkeypatch.setattr(memory(group, "w1"), "pack_slab", failing(InvalidStage("not now")))
    attempt = group.prepare(APART)
    finishing: list[int] = []
    finish = memory(group, "w0").finish_layer

    def counted(slab: str, max_bytes: int) -> bool:
        done: bool = finish(slab, max_bytes)
        finishing.append(sum(len(stream.tokens) for stream in group.streams.values()))
        return done

    monkeypatch.setattr(memory(group, "w0"), "finish_layer", counted)
    assert group.await_answers(attempt, APART)
    assert len(finishing) > 3 * CHUNK_BYTES / 100 and finishing[-1] > finishing[0]
    group.commit(APART)
    check_tokens(group)


def test_an_attempt_that_ends_during_the_transfer_keeps_no_parameters(
    make_group: MakeGroup,
) -> None:
    group = merged_and_started(make_group())
    before = memory(group, "w0").arena.free_chunks
    attempt = group.prepare(APART)
    group.run_until(lambda: member(group, "w0")._restoring._fetches)
    group.abort_attempt(attempt, APART)
    assert not member(group, "w0").changeover.busy
    assert memory(group, "w0").arena.free_chunks == before
    group.check_invariants()
    group.reconfigure(APART)
    check_tokens(group)


def test_parameters_come_from_their_copies_in_host_memory(make_group: MakeGroup) -> None:
    group = merged_and_started(make_group(host_weights_bytes=len(SLABS) * CHUNK_BYTES))
    group.reconfigure(APART)
    check_tokens(group)
    assert [member(group, name).restored_slabs for name in ("w0", "w1")] == [
        *({"host": 3}, {"host": 2})
    ]


def test_copies_stay_within_their_budget(
    make_group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    """The other slabs come from the member that has them."""
    caplog.set_level(logging.INFO)
    group = merged_and_started(make_group(host_weights_bytes=3 * CHUNK_BYTES))
    assert caplog.text.count("copies of layers use") == 2
    group.reconfigure(APART)
    check_tokens(group)
    assert member(group, "w0").restored_slabs == {"host": 1, "peer": 2}
    assert member(group, "w1").restored_slabs == {"host": 2}


def test_a_damaged_copy_is_not_used(make_group: MakeGroup) -> None:
    group = merged_and_started(make_group(host_weights_bytes=len(SLABS) * CHUNK_BYTES))
    copy = memory(group, "w0").host_copies.get("model.layers.1")
    copy[7] ^= 1
    group.reconfigure(APART)
    check_tokens(group)
    assert member(group, "w0").restored_slabs == {"host": 2, "peer": 1}
    assert memory(group, "w0").host_copies.get("model.layers.1") is None
