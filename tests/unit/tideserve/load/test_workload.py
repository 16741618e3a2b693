"""Requests: from a seed, with scaled lengths and shared prefixes."""

from tideserve.load.traces import Trace, TraceRow
from tideserve.load.workload import (
    TOKEN_ID_MAX,
    TOKEN_ID_MIN,
    LengthScale,
    fixed,
    from_trace,
    with_lead_in,
)

SCALE = LengthScale(prompt=0.5, output=2.0, prompt_range=(4, 1024), output_range=(1, 30))


def test_lengths_are_scaled_clipped_and_reported() -> None:
    trace = Trace("t", (TraceRow(0, 100, 5), TraceRow(1, 2, 50)))
    workload = from_trace(trace, SCALE, 1, "as it is")
    assert [len(r.prompt_ids) for r in workload.requests] == [50, 4]
    assert [r.output_tokens for r in workload.requests] == [10, 30]
    assert "prompts × 0.5" in workload.statement and "outputs × 2" in workload.statement


def test_prompts_differ_by_request_and_seed_only() -> None:
    first, same, other = fixed(3, 20, 1, 5), fixed(3, 20, 1, 5), fixed(3, 20, 1, 6)
    assert first == same
    prompts = {r.prompt_ids for r in (*first.requests, *other.requests)}
    assert len(prompts) == 6
    assert all(TOKEN_ID_MIN <= token <= TOKEN_ID_MAX for ids in prompts for token in ids)


def test_lead_in_requests_end_in_turn_and_have_their_own_prompts() -> None:
    plain = fixed(6, 20, 16, 5)
    workload = with_lead_in(plain, 4)
    assert workload.lead_in == 4
    assert workload.requests[4:] == plain.requests
    lead_in = workload.requests[:4]
    assert [request.output_tokens for request in lead_in] == [4, 8, 12, 16]
    assert all(len(request.prompt_ids) == 20 for request in lead_in)
    assert len({request.prompt_ids for request in workload.requests}) == 10
    assert "a lead-in of 4" in workload.statement
    shortest = with_lead_in(fixed(6, 1, 2, 5), 4).requests[:4]
    assert [request.output_tokens for request in shortest] == [1, 1, 1, 2]


def test_equal_hash_ids_mean_a_shared_prefix() -> None:
    rows = (TraceRow(0, 2100, 1, (1, 2, 3, 4, 5)), TraceRow(0, 2100, 1, (1, 2, 9, 4, 5)))
    a, b = (r.prompt_ids for r in from_trace(Trace("t", rows), LengthScale(), 0, "").requests)
    assert len(a) == len(b) == 2100
    assert a[:1024] == b[:1024]
    assert a[1024:1536] != b[1024:1536]
    assert a[2048:] != b[2048:]


def test_shared_prefixes_are_scaled_with_the_prompts() -> None:
    rows = (TraceRow(0, 2100, 1, (1, 2, 3, 4, 5)), TraceRow(0, 2100, 1, (1, 2, 9, 4, 5)))
    trace, scale = Trace("t", rows), LengthScale(prompt=0.05, prompt_range=(24, 90))
    a, b = (request.prompt_ids for request in from_trace(trace, scale, 0, "").requests)
    assert len(a) == len(b) == 90
    assert a[:52] == b[:52]
    assert a[52:78] != b[52:78]
    # Another round, or a rehearsal, finds nothing of this one in a cache.
    assert from_trace(trace, scale, 1, "").requests[0].prompt_ids[:26] != a[:26]
