"""Traces: three formats, malformed rows, slicing, scaling that keeps the pattern."""

from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from tideserve.load.traces import (
    AZURE_CONVERSATIONS,
    Trace,
    TraceError,
    TraceRow,
    load_trace,
    parse_trace,
)

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def parse(text: str) -> Trace:
    return parse_trace(text.splitlines(keepends=True), "t")


def gaps(trace: Trace) -> list[float]:
    return [b.arrival_s - a.arrival_s for a, b in pairwise(trace.rows)]


def test_azure_traces_are_read() -> None:
    trace = parse(
        AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    assert [row.prompt_tokens for row in trace.rows] == [374, 396]
    assert [row.output_tokens for row in trace.rows] == [44, 109]
    assert trace.rows[0].arrival_s == 0
    assert trace.rows[1].arrival_s == pytest.approx(4.314579, abs=1e-6)
    assert trace.skipped == ""


def test_azure_times_may_name_a_zone() -> None:
    zones = ("2024-05-10 00:00:01.5+00:00,3,4\n", "2024-05-10T02:00:03.25+02:00,3,4\n")
    trace = parse(AZURE + "".join(zones) + "2024-05-10 00:00:04.x,3,4\n")
    assert [row.arrival_s for row in trace.rows] == [0, 1.75]
    assert trace.skipped_lines == (4,)


def test_burstgpt_leaves_failures_out() -> None:
    trace = parse(BURSTGPT + "5,ChatGPT,472,18,490,Log\n45,ChatGPT,1087,0,1087,Log\n")
    assert trace.rows == (TraceRow(0.0, 472, 18),)
    assert trace.skipped_lines == (3,)


def test_mooncake_has_shared_prefixes() -> None:
    line = '{"timestamp": %d, "input_length": 1500, "output_length": 5, "hash_ids": [7, 8, %d]}\n'
    trace = parse(line % (1000, 1) + line % (3500, 2))
    assert [row.arrival_s for row in trace.rows] == [0, 2.5]
    assert [row.prefix_ids for row in trace.rows] == [(7, 8, 1), (7, 8, 2)]


def test_malformed_rows_are_counted_with_their_lines() -> None:
    good = "2023-11-16 18:15:46.68,3,4\n"
    bad = ["not a time,3,4\n", "2023-11-16 18:15:46,x,4\n", "1,2\n", '"\n', good[:-2] + "-1\n"]
    trace = parse(AZURE + good + "".join(bad) + "\n" + good)
    assert len(trace.rows) == 2
    assert trace.skipped_lines == (3, 4, 5, 6, 7)
    assert trace.skipped == "t: 5 malformed rows skipped (line 3, 4, 5, 6, 7)"


def test_lines_before_the_first_row_do_not_matter() -> None:
    assert parse("\n \n" + AZURE + "x,y,z\n2023-11-16 18:15:46.68,3,4\n").skipped_lines == (4,)
    row = '{"timestamp": 1, "input_length": 5, "output_length": 5}\n'
    assert parse("\n" + row).rows == (TraceRow(0, 5, 5),)
    cut_off = parse_trace(["hello\n", row], "t.jsonl")
    assert cut_off.rows == (TraceRow(0, 5, 5),)
    assert cut_off.skipped_lines == (1,)


@pytest.mark.parametrize(
    "text", ["", "hello\n", AZURE, AZURE + "x,y,z\n", "{}\n", '{"timestamp": NaN}\n', "{\n"]
)
def test_a_trace_without_usable_rows_is_a_short_error(text: str) -> None:
    with pytest.raises(TraceError, match="the trace t has no usable row") as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_a_short_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read the trace"):
        load_trace(tmp_path / "none.csv")


def test_rows_are_put_in_order() -> None:
    trace = parse(BURSTGPT + "9,m,2,2,4,l\n4,m,1,1,2,l\n")
    assert [(row.arrival_s, row.prompt_tokens) for row in trace.rows] == [(0, 1), (5, 2)]


def test_slice_counts_from_its_start() -> None:
    trace = Trace("t", tuple(TraceRow(float(s), 1, 1) for s in range(10)))
    assert [row.arrival_s for row in trace.slice(3, 3).rows] == [0, 1, 2]
    with pytest.raises(TraceError, match="no request between 20 s and 30 s"):
        trace.slice(20, 10)


def test_scaling_the_rate_keeps_the_pattern() -> None:
    trace = load_trace(AZURE_CONVERSATIONS).slice(0, 100)
    scaled = trace.scale_rate(2.0)
    assert (len(scaled.rows) - 1) / scaled.span_s == pytest.approx(2.0)
    factor = scaled.span_s / trace.span_s
    assert gaps(scaled) == pytest.approx([gap * factor for gap in gaps(trace)])


def test_arrivals_at_random_keep_the_requests_and_their_order() -> None:
    trace = load_trace(AZURE_CONVERSATIONS)
    drawn = trace.with_poisson_arrivals(4.0, seed=1)
    assert [row.prompt_tokens for row in drawn.rows] == [row.prompt_tokens for row in trace.rows]
    assert (
        drawn
        == trace.with_poisson_arrivals(4.0, seed=1)
        != trace.with_poisson_arrivals(4.0, seed=2)
    )
    mean_s, deviation_s = fmean(gaps(drawn)), pstdev(gaps(drawn))
    assert mean_s == pytest.approx(0.25, rel=0.1)
    assert deviation_s == pytest.approx(mean_s, rel=0.15)


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_an_invalid_scale_is_refused(value: float) -> None:
    with pytest.raises(TraceError):
        Trace("t", (TraceRow(0, 1, 1), TraceRow(1, 1, 1))).scale_rate(value)


def test_shipped_slices_are_whole_and_small() -> None:
    folder = AZURE_CONVERSATIONS.parent
    paths = list(folder.glob("*.csv"))
    assert sum(path.stat().st_size for path in paths) <= 200_000
    assert all(not load_trace(path).skipped for path in paths)
    notice = (folder / "README.md").read_text()
    assert "CC-BY 4.0" in notice and "Splitwise" in notice


def test_a_slice_may_be_repeated() -> None:
    trace = Trace("t", (TraceRow(0, 1, 1), TraceRow(1, 2, 2))).repeat(3, 10)
    assert [row.arrival_s for row in trace.rows] == [0, 1, 10, 11, 20, 21]
