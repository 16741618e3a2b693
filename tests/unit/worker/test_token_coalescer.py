"""Coalesced output equals the output of each step, in fewer events."""

from itertools import pairwise
from random import Random

import pytest

from services.worker.token_coalescer import AGE_MAX_S, TOKENS_MAX, TokenCoalescer
from tideserve.worker.v1 import worker_pb2 as pb


def token(index: int, request_id: str = "a", **more) -> pb.RequestEvent:
    logprobs = [pb.TokenLogprobs(logprob=-index)]
    return pb.RequestEvent(
        request_id=request_id, first_index=index, token_ids=[index], logprobs=logprobs, **more
    )


@pytest.mark.parametrize("seed", range(20))
def test_events_are_neither_lost_nor_repeated(seed: int) -> None:
    random, coalescer, now_s = Random(seed), TokenCoalescer(), 0.0
    coalescer.begin("a")
    count = random.randrange(1, 3 * TOKENS_MAX)
    sent: list[pb.RequestEvent] = []
    for index in range(count):
        reason = pb.FINISH_REASON_STOP if index == count - 1 else pb.FINISH_REASON_UNSPECIFIED
        sent += coalescer.add(token(index, finish_reason=reason), now_s)
        now_s += random.choice((0.0, 0.01, AGE_MAX_S / 3))
        sent += coalescer.due(now_s)
        if random.random() < 0.02:
            sent += coalescer.take("a")
    assert [token_id for event in sent for token_id in event.token_ids] == list(range(count))
    assert [logprob.logprob for event in sent for logprob in event.logprobs] == [
        -i for i in range(count)
    ]
    for event, later in pairwise(sent):
        assert later.first_index == event.first_index + len(event.token_ids)
    assert [event.finish_reason for event in sent[:-1]] == [0] * (len(sent) - 1)
    assert sent[-1].finish_reason == pb.FINISH_REASON_STOP
    assert max(len(event.token_ids) for event in sent) <= TOKENS_MAX


def test_merged_events_keep_first_fields_and_final_times() -> None:
    coalescer = TokenCoalescer()
    coalescer.begin("a")
    first = token(0, cached_tokens=3, prompt_logprobs=[pb.TokenLogprobs(logprob=-7)])
    assert coalescer.add(first, 0.0) == []
    last = token(1, finish_reason=pb.FINISH_REASON_STOP, times=pb.RequestTimes(wait_s=2))
    (event,) = coalescer.add(last, 0.0)
    assert (event.cached_tokens, event.times.wait_s, len(event.prompt_logprobs)) == (3, 2, 1)


def test_cached_tokens_may_come_with_the_last_token() -> None:
    coalescer = TokenCoalescer()
    coalescer.begin("a")
    assert coalescer.add(token(0), 0.0) == []
    last = token(1, finish_reason=pb.FINISH_REASON_STOP, cached_tokens=3)
    (event,) = coalescer.add(last, 0.0)
    assert (event.cached_tokens, len(event.token_ids)) == (3, 2)


def test_other_events_are_sent_at_once_and_tokens_by_age() -> None:
    coalescer = TokenCoalescer()
    coalescer.begin("a")
    coalescer.begin("b")
    assert coalescer.add(token(0, "c"), 0.0) == [token(0, "c")]
    assert coalescer.add(token(0, "a"), 0.0) == []
    assert coalescer.add(token(0, "b"), 0.5) == []
    assert coalescer.due(AGE_MAX_S - 0.1) == []
    assert [event.request_id for event in coalescer.due(AGE_MAX_S)] == ["a"]
    coalescer.forget("b")
    assert coalescer.due(9.0) == [] == coalescer.take("b")
    assert coalescer.add(token(1, "b"), 9.0) == [token(1, "b")]
