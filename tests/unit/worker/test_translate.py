"""Log probabilities in the events of the worker's contract."""

from dataclasses import replace

import pytest

from services.core.logprobs import LogprobRows
from services.core.planner.events import EmitToken, RefuseRequest
from services.core.planner.refusal import (
    duplicate_id,
    queue_full,
    returned,
    returned_after_loss,
    returned_by_drain,
)
from services.core.report import EngineReport, Load
from services.core.request import FinishReason
from services.worker.handovers import Handovers
from services.worker.ipc import (
    AdoptedRequest,
    MovedRequest,
    Progress,
    encode,
    from_engine_decoder,
)
from services.worker.translate import to_event, to_refusal, to_replay
from tests.support.spec_sampler import row_of, rows_of
from tideserve.worker.v1 import worker_pb2 as pb

PROMPT = rows_of((6, 7), 1, 1)


def token(index: int, logprobs: bool = True) -> EmitToken:
    rows = row_of(50 + index, index, 2) if logprobs else None
    return EmitToken("a", index, 50 + index, None, rows, PROMPT if index == 0 else None)


def numbers(rows: list[pb.TokenLogprobs]) -> list[tuple[float, int, list[int]]]:
    return [(row.logprob, row.rank, list(row.top_ids)) for row in rows]


def expected(*indices: int) -> list[tuple[float, int, list[int]]]:
    return [(-50.0 - index, index, [0, 1]) for index in indices]


def test_an_event_has_the_requested_fields() -> None:
    event = to_event(token(0))
    assert numbers(event.logprobs) == expected(0)
    assert list(event.logprobs[0].top_logprobs) == [-1.0, -1.0]
    assert numbers(event.prompt_logprobs) == [(-6.0, 1, [0]), (-7.0, 2, [0])]
    event = to_event(EmitToken("a", 0, 5, FinishReason.STOP))
    assert not event.logprobs and not event.prompt_logprobs


@pytest.mark.parametrize(
    ("refusal", "reason", "flags"),
    [
        (queue_full("a"), pb.FINISH_REASON_OVERLOADED, (False, False)),
        (duplicate_id("a"), pb.FINISH_REASON_INVALID, (False, False)),
        (returned("a"), pb.FINISH_REASON_RETURNED, (False, False)),
        (returned_after_loss("a"), pb.FINISH_REASON_RETURNED, (True, False)),
        (returned_by_drain("a"), pb.FINISH_REASON_RETURNED, (False, True)),
    ],
)
def test_a_refusal_has_its_reason(
    refusal: RefuseRequest, reason: "pb.FinishReason.ValueType", flags: tuple[bool, bool]
) -> None:
    event = to_refusal(refusal)
    assert (event.request_id, event.finish_reason) == ("a", reason) and event.message
    assert (event.kv_lost, event.leaving) == flags
    assert to_refusal(replace(refusal, server_losses=2)).server_losses == 2


def handovers(known: LogprobRows | None, emitted: int) -> Handovers[None]:
    """A request with this number of tokens, rows of its last tokens and of its prompt."""
    made: Handovers[None] = Handovers()
    ids = [50 + index for index in range(emitted)]
    prompt = PROMPT if emitted else None
    assert made.adopt(AdoptedRequest("a", "g", 8, ids, known, prompt), 0.0)
    return made


def rows(first: int, end: int) -> LogprobRows:
    return LogprobRows(2) if first == end else rows_of(range(50 + first, 50 + end), first, 2)


@pytest.mark.parametrize("emitted", [0, 1, 4])
@pytest.mark.parametrize("from_index", [0, 1, 4, 6])
def test_an_attached_reader_gets_every_row_once(emitted: int, from_index: int) -> None:
    kept = handovers(rows(0, emitted) if emitted else None, emitted)
    for index in range(emitted, 6):
        kept.add_token(token(index))
    arrival = kept.forget("a")
    assert arrival is not None
    (event,) = to_replay("a", arrival, from_index)
    assert list(event.token_ids) == [50 + index for index in range(from_index, 6)]
    assert numbers(event.logprobs) == expected(*range(from_index, 6))
    assert len(event.prompt_logprobs) == (2 if from_index == 0 else 0)


def test_tokens_with_many_rows_have_an_event_of_their_own() -> None:
    kept = handovers(rows(2, 4), 4)
    kept.add_token(token(4))
    kept.end(MovedRequest("a", "w1", "w1:1", "h", 9, 5))
    arrival = kept.forget("a")
    assert arrival is not None
    old, new, moved = to_replay("a", arrival, 1)
    assert (old.first_index, list(old.token_ids), len(old.logprobs)) == (1, [51], 0)
    assert (new.first_index, list(new.token_ids)) == (2, [52, 53, 54])
    assert numbers(new.logprobs) == expected(2, 3, 4)
    assert moved.HasField("moved")
    only, moved = to_replay("a", arrival, 3)
    assert numbers(only.logprobs) == expected(3, 4)


def test_a_prompts_rows_come_with_its_first_token_after_a_move() -> None:
    kept = handovers(None, 0)
    kept.add_token(token(0))
    arrival = kept.forget("a")
    assert arrival is not None
    (event,) = to_replay("a", arrival, 0)
    assert len(event.prompt_logprobs) == 2 and len(event.token_ids) == 1


def test_log_probabilities_are_sent_only_on_request() -> None:
    kept: Handovers[None] = Handovers()
    kept.adopt(AdoptedRequest("a", "g", 8, [50]), 0.0)
    kept.add_token(EmitToken("a", 1, 51, FinishReason.STOP))
    arrival = kept.forget("a")
    assert arrival is not None
    (event,) = to_replay("a", arrival, 0)
    assert list(event.token_ids) == [50, 51] and event.finish_reason == pb.FINISH_REASON_STOP
    assert not event.logprobs and not event.prompt_logprobs


def test_rows_of_the_engine_are_translated() -> None:
    adopted = AdoptedRequest("a", "g", 8, [50], rows(0, 1), PROMPT)
    frame = Progress(
        [], [token(0), token(1, logprobs=False)], [], EngineReport(Load(0, 0, 1, 0)), [adopted]
    )
    assert from_engine_decoder.decode(encode(frame)) == frame
