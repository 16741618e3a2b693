"""What a member does when its group changes, and when something is not to be had."""

import logging
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from services.common.event_log import read_config, read_entries
from services.core.audit.facts import EngineStarted, EngineSwitched, MemoryHeld
from services.core.changeover.epoch_fence import Standing
from services.core.changeover.preparation import BUSY
from services.core.changeover.state import Changeover, MemberConfig
from services.core.changeover.vocabulary import KvFailed, RequestEvent
from services.core.cost.iteration_time import IterationTime
from services.core.groups.layer_map import Stage
from services.core.planner.events import (
    IterationDropped,
    IterationFinished,
    RefuseRequest,
    RequestAborted,
    RequestArrived,
    WaitLooked,
)
from services.core.request import Limits, Request, Sampling
from services.worker.engine.pipeline import restoring
from services.worker.engine.pipeline.connections import UNREACHABLE_S
from services.worker.engine.pipeline.links import Links
from services.worker.engine.pipeline.member import Member
from services.worker.engine.pipeline.restoring import CONNECT_TIMEOUT_S, FETCH_TIMEOUT_S
from services.worker.engine.transfer import handshake
from services.worker.engine.transfer.errors import MoverFull
from services.worker.errors import (
    ArenaExhausted,
    InvalidBlocks,
    InvalidStage,
    MemberUnreachable,
    ModelError,
)
from services.worker.ipc import ApplyConfiguration, Prepare
from tests.support.engine_group import Engine, EngineGroup
from tests.support.fake_model import BLOCKS, CHUNK_BYTES, LAYERS, SHAPE, expected_tokens
from tests.unit.worker.engine.pipeline.conftest import MakeGroup
from tideserve.sim.replay import WORKER_TYPES, replay

MERGED = [[Stage("w0", 0, 1), Stage("w1", 1, LAYERS)]]
TURNED = [[Stage("w1", 0, 2), Stage("w0", 2, LAYERS)]]
APART = [[Stage("w0", 0, LAYERS)], [Stage("w1", 0, LAYERS)]]
LONG = 12
"""Output tokens of a request that lasts through a change."""


def request(number: int, prompt: int = 9, output: int = LONG) -> Request:
    ids = tuple(3 + (7 * number + i) % 50 for i in range(prompt))
    return Request(f"r{number}", ids, Sampling(0.0), Limits(output), 0.0)


def start(group: EngineGroup, *requests: Request) -> None:
    for one in requests:
        group.start(one)


def started(group: EngineGroup, count: int = 4) -> None:
    """Requests that have begun to run, and are far from their end."""
    start(group, *(request(number) for number in range(count)))
    group.run_until(lambda: all(len(stream.tokens) > 1 for stream in group.streams.values()))


def check_tokens(group: EngineGroup) -> None:
    """Everything ends, as undisturbed as if nothing had changed."""
    group.finish()
    group.check_at_rest()
    for stream in group.streams.values():
        assert not stream.refused
        wanted = expected_tokens(stream.request.prompt_ids, stream.request.limits.max_tokens)
        assert stream.tokens == (wanted[: len(stream.tokens)] if stream.aborted else wanted)


def member(group: EngineGroup, name: str) -> Member:
    return group.engines[name].member


def memory(group: EngineGroup, name: str) -> Any:
    return group.engines[name].runner.stage_memory


def refusals(group: EngineGroup, attempt: str) -> list[str]:
    return [answer.error for answer in group.answers(attempt) if answer.error]


def failing(error: Exception) -> Any:
    def fail(*_args: object, **_named: object) -> None:
        raise error

    return fail


def merged(make_group: MakeGroup, **options: Any) -> EngineGroup:
    group = make_group(**options)
    group.reconfigure(MERGED)
    group.settle()
    return group


# --- changes


@pytest.mark.parametrize("seed", range(6))
def test_requests_get_the_same_tokens_however_groups_change(
    make_group: MakeGroup, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    group = make_group(3, seed, event_logs=tmp_path)
    changes = [
        [[Stage("w0", 0, 1), Stage("w1", 1, 2), Stage("w2", 2, 3)]],
        [[Stage("w2", 0, 2), Stage("w0", 2, 3)], [Stage("w1", 0, 3)]],
        [[Stage("w1", 0, 1), Stage("w0", 1, 3)], [Stage("w2", 0, 3)]],
        [[Stage("w2", 0, 2), Stage("w1", 2, 3)], [Stage("w0", 0, 3)]],
        [[Stage(name, 0, 3)] for name in ("w0", "w1", "w2")],
    ]
    for round_, change in enumerate(changes):
        for number in range(8 * round_, 8 * round_ + 8):
            start(group, request(number, rng.randint(1, 30), rng.randint(1, 30)))
            for _ in range(rng.randrange(40)):
                group.turn()
            group.check_invariants()
        group.abort(rng.choice([name for name, one in group.streams.items() if not one.over]))
        if rng.random() < 0.5:
            group.stop(f"r{8 * round_}", 2)
        group.reconfigure(change)
    check_tokens(group)
    for path in tmp_path.iterdir():
        check_log(path)


def check_log(path: Path) -> None:
    """What the machine decided is decided again, and facts lie beside it."""
    entries = list(read_entries(path, WORKER_TYPES))
    again = replay(Changeover.of(read_config(path, MemberConfig)), entries)
    assert again.difference == "" and again.decisions > 50
    facts = [one.value for one in entries]
    assert [type(one) for one in facts[:2]] == [EngineStarted, MemoryHeld]
    switched = [one for one in facts if isinstance(one, EngineSwitched)]
    assert [one.epoch for one in switched] == sorted({one.epoch for one in switched})
    held = [one for one in facts if isinstance(one, MemoryHeld)]
    assert held[-1].settled and not held[-1].owners and len(held) > len(switched)
    seen = [
        (one.epoch, one.settled, one.sequences > 0, one.owners > 0, one.resident) for one in held
    ]
    assert all(one != other for one, other in pairwise(seen))


def test_a_configuration_that_is_not_newer_changes_nothing(make_group: MakeGroup) -> None:
    group = merged(make_group)
    started(group)
    before = member(group, "w0").configuration
    for plans in (group._plans(MERGED, group.epoch), group._plans(APART, group.epoch - 1)):
        member(group, "w0").apply(ApplyConfiguration(plans))
        group.turn()
        assert member(group, "w0").configuration is before
    check_tokens(group)


def test_the_table_and_the_memory_change_under_the_lock_and_a_stage_runs_without_it(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group()
    ran: list[str] = []
    changed: list[str] = []

    def watch(engine_name: str, name: str) -> None:
        method = getattr(memory(group, engine_name), name)

        def watched(*args: Any, **named: Any) -> Any:
            assert member(group, engine_name).stage.lock.locked(), name
            changed.append(name)
            return method(*args, **named)

        monkeypatch.setattr(memory(group, engine_name), name, watched)

    def run(engine_name: str) -> None:
        assert not member(group, engine_name).stage.lock.locked()
        ran.append(engine_name)

    for engine_name, engine in group.engines.items():
        engine.runner.before_run = lambda name=engine_name: run(name)  # type: ignore[attr-defined]
        for name in (
            *("set_stage", "release_departed", "shrink_kv", "map_kv_of", "relocate"),
            *("map_layer_parameters", "pack_kv", "unpack_kv", "pack_slab", "unpack_slab"),
        ):
            watch(engine_name, name)
    started(group)
    group.reconfigure(MERGED)
    group.settle()
    group.reconfigure(APART)
    check_tokens(group)
    assert set(ran) == {"w0", "w1"}
    assert {"set_stage", "release_departed", "shrink_kv", "map_kv_of"} < set(changed)
    assert {"map_layer_parameters", "pack_kv", "unpack_kv", "unpack_slab"} < set(changed)


def test_what_the_planner_is_told_does_not_look_at_the_change(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly every event is one of these, and no phase of a change depends on them."""
    changeover = member(group := merged(make_group), "w0").changeover
    phase, handle = Changeover.phase.fget, changeover.handle  # type: ignore[attr-defined]
    told: list[object] = []

    def unread(_: Changeover) -> Any:
        raise AssertionError("a phase is looked at")

    def heard(event: Any) -> Any:
        told.append(event)
        before = phase(changeover)
        with monkeypatch.context() as quick:
            if isinstance(event, IterationFinished | IterationDropped | WaitLooked):
                quick.setattr(Changeover, "phase", property(unread))
            commands = handle(event)
        assert phase(changeover) is before or not isinstance(event, RequestEvent)
        return commands

    monkeypatch.setattr(changeover, "handle", heard)
    started(group)
    group.reconfigure(APART)
    check_tokens(group)
    member(group, "w0").handle(WaitLooked(0.0))
    start(group, request(9))
    group.abort("r9")
    assert {type(one) for one in told} >= {IterationFinished, WaitLooked, RequestArrived}


# --- preparations


def test_an_attempt_that_is_asked_for_again_is_answered_once(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group()
    answers: list[str] = []

    def hear(engine: Engine) -> None:
        told = engine.member.take_news().prepared
        answers.extend(engine.identity.worker_id + answer.error for answer in told)

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


def test_while_one_attempt_is_prepared_another_is_refused(make_group: MakeGroup) -> None:
    group = make_group()
    first, second = group.prepare(MERGED), group.prepare(TURNED)
    assert group.await_answers(first, MERGED)
    assert refusals(group, second) == [BUSY, BUSY]
    group.commit(MERGED)
    started(group)
    check_tokens(group)


def test_an_aborted_attempt_leaves_nothing_and_may_be_asked_for_anew(
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
    """Its answer comes no more; the attempt may be asked for again afterwards."""
    group = merged(make_group)
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
        ("blocks_beside", InvalidStage("there is no such stage")),
        ("shrink_kv", InvalidBlocks("a block below is owned")),
        ("map_layer_parameters", ArenaExhausted(requested_chunks=2, free_chunks=1)),
        ("load_layer", ModelError("the folder lacks a file")),
        ("finish_layer", InvalidStage("it is not being filled")),
        ("map_kv_of", ArenaExhausted(requested_chunks=7, free_chunks=1)),
    ],
)
def test_what_the_memory_cannot_do_ends_the_attempt_and_not_the_engine(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    group = merged(make_group)
    started(group)
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


def test_blocks_that_cannot_move_end_the_engine_with_a_sentence(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table names the new blocks already: requests would read KV of others."""
    group = merged(make_group)
    start(group, *(request(number, 30, 30) for number in range(4)))
    group.run_until(lambda: member(group, "w0").state.table.pool.taken_count > BLOCKS // 2)
    group.abort("r0")
    wrong = failing(InvalidBlocks("blocks move to lower ids"))
    for name in group.engines:
        monkeypatch.setattr(memory(group, name), "relocate", wrong)
    with pytest.raises(InvalidBlocks, match="cannot follow the block table: blocks move to low"):
        group.await_answers(group.prepare(APART), APART)


@pytest.mark.parametrize("lane", ["activations", "bulk"])
def test_a_member_that_no_lane_leads_to_is_named_in_the_refusal(
    make_group: MakeGroup, lane: str
) -> None:
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


def test_parameters_that_their_holder_cannot_give_come_from_the_folder(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has others under that name; no place for a transfer; sends what is not whole."""
    caplog.set_level(logging.INFO)
    group = merged(make_group)
    started(group)
    # w0 asks w1 for the slabs of layers 1 and 2 and of the head, w1 asks w0 for the other two.
    slabs = memory(group, "w1").slabs
    names = [name for name, slab in slabs.items() if slab.resident]
    monkeypatch.setattr(slabs[names[0]], "_digest", b"of other parameters")
    monkeypatch.setattr(member(group, "w0").mover, "send", failing(MoverFull("try again later")))
    packed = memory(group, "w1").pack_slab
    monkeypatch.setattr(
        memory(group, "w1"), "pack_slab", lambda *at: packed(*at) * (at[0] != names[1])
    )
    with caplog.at_level(logging.INFO):
        attempt = group.prepare(APART)
        assert group.await_answers(attempt, APART)
    said = [one.getMessage() for one in caplog.records]
    loaded = [text for text in said if "comes from the model folder" in text]
    assert len(loaded) == 4, said
    assert len([text for text in said if "did not come, as" in text]) == 3
    assert len([text for text in said if "do not match their digest" in text]) == 1
    monkeypatch.undo()
    group.commit(APART)
    check_tokens(group)


def test_parameters_that_do_not_come_in_time_are_not_waited_for(
    make_group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    group = merged(make_group)
    attempt = group.prepare(APART)
    group.network._bulk.hold("w1", "w0")  # type: ignore[attr-defined]
    for _ in range(500):
        group.turn()
    assert (attempt, "w0") not in group.prepared
    for _ in range(3):
        group.network.skip(FETCH_TIMEOUT_S)  # type: ignore[attr-defined]
        for _ in range(300):
            group.turn()
    group.network._bulk.release("w1", "w0")  # type: ignore[attr-defined]
    assert group.await_answers(attempt, APART)
    assert "did not come, as w1 sent it" in caplog.text
    group.commit(APART)
    group.settle()
    check_tokens(group)


def test_requests_go_on_while_parameters_are_verified(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slab from the folder; one that a member sends is hashed piece by piece as it comes."""
    monkeypatch.setattr(restoring, "HASH_BYTES_PER_TURN", 100)
    group = merged(make_group)
    started(group)
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


def test_an_attempt_that_ends_while_parameters_come_takes_none_of_them(
    make_group: MakeGroup,
) -> None:
    group = merged(make_group)
    started(group)
    before = memory(group, "w0").arena.free_chunks
    attempt = group.prepare(APART)
    group.run_until(lambda: member(group, "w0")._restoring._fetching is not None)
    group.abort_attempt(attempt, APART)
    assert not member(group, "w0").changeover.busy
    assert memory(group, "w0").arena.free_chunks == before
    group.check_invariants()
    group.reconfigure(APART)
    check_tokens(group)


# --- KV


def test_kv_that_cannot_be_sent_is_computed_again(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = merged(make_group)
    started(group)
    attempt = group.prepare(APART)
    assert group.await_answers(attempt, APART)
    failed: list[object] = []
    for name in group.engines:
        changeover = member(group, name).changeover
        handle = changeover.handle

        def heard(event: Any, handle: Any = handle) -> Any:
            failed.extend([event] if isinstance(event, KvFailed) else [])
            return handle(event)

        monkeypatch.setattr(changeover, "handle", heard)
        monkeypatch.setattr(member(group, name).mover, "send", failing(MoverFull("later")))
    group.commit(APART)
    check_tokens(group)
    assert failed


def test_kv_on_a_connection_that_ends_is_computed_again(make_group: MakeGroup) -> None:
    group = merged(make_group)
    started(group)
    group.reconfigure(APART)
    for link in (("w0", "w1"), ("w1", "w0")):
        group.network._bulk.hold(*link)  # type: ignore[attr-defined]
    for _ in range(100):
        group.turn()
    group.network._bulk.cut("w0")  # type: ignore[attr-defined]
    check_tokens(group)


def test_a_piece_of_an_epoch_that_begins_while_it_is_looked_at_is_not_given_up(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mover's thread asks, and the engine's thread switches meanwhile."""
    standing_of = member(make_group(1), "w0")._standing_of
    assert standing_of("g", 0) is Standing.STALE and standing_of("g", 1) is Standing.CURRENT
    assert standing_of("", 0) is Standing.CURRENT, "parameters have no group"
    epochs = iter((1, 2, 2))
    monkeypatch.setattr(Links, "epoch", property(lambda _: next(epochs)))
    assert standing_of("g", 2) is Standing.FUTURE
    assert standing_of("g", 2) is Standing.CURRENT


# --- members that are lost


def test_a_member_that_lives_but_is_out_of_reach_ends_this_engine(make_group: MakeGroup) -> None:
    group = merged(make_group)
    started(group)
    group.network.cut("w1")
    for _ in range(50):
        group.turn()
    group.network.skip(UNREACHABLE_S + 1.0)  # type: ignore[attr-defined]
    with pytest.raises(MemberUnreachable, match="the connection to w"):
        for _ in range(50):
            group.turn()


def test_a_lost_worker_of_another_group_is_told_once_and_matters_while_requests_move(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = merged(make_group)
    started(group)
    group.reconfigure(APART)
    group.settle()
    told: list[object] = []
    changeover = member(group, "w0").changeover
    handle = changeover.handle
    monkeypatch.setattr(changeover, "handle", lambda event: told.append(event) or handle(event))
    group.network.cut("w1")
    for _ in range(100):
        group.turn()
    group.network.skip(UNREACHABLE_S + 1.0)  # type: ignore[attr-defined]
    lost = [one for one in told if type(one).__name__ == "PeersLost"]
    assert [one.workers for one in lost] == [frozenset({"w1"})]  # type: ignore[attr-defined]
    check_tokens(group)


# --- requests


def test_what_has_ended_is_out_of_the_clock(make_group: MakeGroup) -> None:
    """Else each iteration would be looked through for requests that wait for ever."""
    group = make_group(1)
    lone = member(group, "w0")
    clock = lone._serving._clock
    group.start(request(0, output=60))
    group.start(request(1))
    lone.handle(RequestAborted(0.0, "r1"))  # it never ran
    lone.handle(RequestAborted(0.0, "unknown"))
    lone.launch()
    lone.handle(RequestArrived(0.0, request(0)))  # it is here already: refused
    refused = lone.take_news().refusals
    assert [one.request_id for one in refused] == ["r0"]
    asked: list[int] = []
    clock.launched(lambda: asked.append(1) or [], 1.0)
    assert not asked, "somebody waits"
    assert len(clock._entries) == 1
    lone.handle(RequestAborted(0.0, "r0"))
    assert not clock._entries


def test_the_last_event_of_a_request_has_its_times(make_group: MakeGroup) -> None:
    group = make_group(1)
    lone = member(group, "w0")
    group.now_s = 5.0
    lone.handle(RequestArrived(5.0, request(0, output=2)))
    for group.now_s in (6.0, 8.0):
        assert lone.launch()
    news = lone.take_news()
    assert [one.index for one in news.tokens] == [0, 1] and bool(news)
    times = news.times["r0"]
    assert (times.wait_s, times.prefill_s, times.decode_s) == (6.0, 0.0, 2.0)
    assert not lone.take_news()
    assert not lone.launch()


def test_an_iteration_that_is_given_up_runs_again(make_group: MakeGroup) -> None:
    group = make_group(1)
    lone = member(group, "w0")
    group.start(request(0))
    asked: list[frozenset[str]] = []

    def interrupts(names: frozenset[str]) -> Any:
        asked.append(names)
        return (lambda: True) if len(asked) % 2 else None

    while not group.streams["r0"].over:
        assert lone.launch(interrupts)
        group._hear(group.engines["w0"])
    assert asked == [frozenset({"r0"})] * (2 * LONG)
    assert lone.iteration_tokens.tokens == 9 + LONG - 1
    check_tokens(group)


def test_a_request_that_the_planner_never_saw_is_refused(make_group: MakeGroup) -> None:
    lone = member(make_group(1), "w0")
    refusal = RefuseRequest("r9", "no such grammar")
    lone.refuse(refusal)
    assert lone.take_news().refusals == [refusal]


def test_a_preempted_request_goes_on_as_if_it_had_not_been(make_group: MakeGroup) -> None:
    group = make_group(1)
    tokens = BLOCKS * SHAPE.block_size
    start(group, *(request(number, 12, tokens // 3) for number in range(5)))
    check_tokens(group)
    assert member(group, "w0").state.preemptions_total


def test_times_of_stages_and_tokens_of_iterations_are_told(make_group: MakeGroup) -> None:
    group = merged(make_group)
    ran: list[int] = []

    def run() -> None:
        """It takes a second."""
        ran.append(1)
        group.network.skip(1.0)  # type: ignore[attr-defined]
        group.now_s += 1.0

    for engine in group.engines.values():
        engine.runner.before_run = run  # type: ignore[attr-defined]
    started(group)
    check_tokens(group)
    leader, last = member(group, "w0"), member(group, "w1")
    busy_s = [one.pipeline_time.pipeline_busy_s for one in (leader, last)]
    assert busy_s == pytest.approx([len(ran) / 2] * 2)
    assert leader.pipeline_time.pipeline_bubble_s > 0
    assert leader.iteration_tokens.tokens == 4 * (9 + LONG - 1)
    assert not last.iteration_tokens.tokens
    assert leader.iteration_time == IterationTime(), "there is no cost model to compare with"
    assert not leader.alone and member(make_group(1), "w0").alone
