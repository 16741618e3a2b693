"""Request traces from Azure CSV, BurstGPT CSV and Mooncake JSONL; slicing and scaling.

Malformed rows are skipped and their line numbers kept. Arrivals are seconds from the first usable
row. Scaling the rate stretches time evenly, so bursts keep their shape.
"""

import csv
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

LINES_NAMED_MAX = 20
AZURE_CONVERSATIONS, AZURE_CODE = (
    Path(__file__).with_name("data") / f"azure_{kind}_2023_slice.csv" for kind in ("conv", "code")
)
"""Slices of public traces."""


class TraceError(Exception):
    """The trace cannot be used; the message states cause and remedy."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A request. Rows with equal leading `prefix_ids` share a prompt prefix."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows in order of arrival, the first at 0 s, and the numbers of skipped lines."""

    name: str
    rows: tuple[TraceRow, ...]
    skipped_lines: tuple[int, ...] = ()

    @property
    def span_s(self) -> float:
        """Time from the first to the last arrival."""
        return self.rows[-1].arrival_s if self.rows else 0.0

    @property
    def skipped(self) -> str:
        """Text about the skipped rows; empty if there are none."""
        if not self.skipped_lines:
            return ""
        named = ", ".join(str(line) for line in self.skipped_lines[:LINES_NAMED_MAX])
        more = ", …" if len(self.skipped_lines) > LINES_NAMED_MAX else ""
        return f"{self.name}: {len(self.skipped_lines)} malformed rows skipped (line {named}{more})"

    def slice(self, start_s: float, duration_s: float) -> "Trace":
        """Return the rows that arrive within `duration_s` from `start_s`, which becomes 0 s."""
        end_s = start_s + duration_s
        kept = [row for row in self.rows if start_s <= row.arrival_s < end_s]
        if not kept:
            raise TraceError(
                f"{self.name} has no request between {start_s:g} s and {end_s:g} s;"
                f" it spans {self.span_s:g} s"
            )
        return replace(self, rows=_from_zero(kept, start_s))

    def scale_time(self, factor: float) -> "Trace":
        """Multiply the time between arrivals by `factor`."""
        if not (factor > 0 and math.isfinite(factor)):
            raise TraceError(f"the time scale {factor} must be above 0")
        return self._mapped(lambda row: replace(row, arrival_s=row.arrival_s * factor))

    def scale_rate(self, rate_per_s: float) -> "Trace":
        """Scale time such that the mean rate is `rate_per_s`."""
        if not (rate_per_s > 0 and math.isfinite(rate_per_s)):
            raise TraceError(f"the rate {rate_per_s} must be above 0")
        if self.span_s == 0:
            return self
        return self.scale_time((len(self.rows) - 1) / rate_per_s / self.span_s)

    def with_poisson_arrivals(self, rate_per_s: float, seed: int) -> "Trace":
        """Replace the arrival times by a Poisson process; the order of requests is the same."""
        draw = random.Random(seed).expovariate
        times_s = accumulate(draw(rate_per_s) for _ in self.rows)
        rows = zip(self.rows, times_s, strict=True)
        return replace(self, rows=tuple(replace(row, arrival_s=time_s) for row, time_s in rows))

    def repeat(self, times: int, period_s: float) -> "Trace":
        """Repeat the rows `times` times, each time `period_s` later."""
        rows = (
            replace(row, arrival_s=row.arrival_s + turn * period_s)
            for turn in range(times)
            for row in self.rows
        )
        return replace(self, rows=tuple(sorted(rows, key=lambda row: row.arrival_s)))

    def _mapped(self, change: Callable[[TraceRow], TraceRow]) -> "Trace":
        return replace(self, rows=tuple(change(row) for row in self.rows))


def load_trace(path: Path) -> Trace:
    """Read a trace; the first line determines the format.

    Raises:
        TraceError: if it cannot be read, has an unknown format or no usable row.
    """
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            return parse_trace(file, path.name)
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from error


def parse_trace(lines: Iterable[str], name: str) -> Trace:
    """Parse the lines of a trace called `name`; see `load_trace`."""
    stream = iter(lines)
    # Skip blank lines, but count them: line numbers must be those of the file.
    head = [next(stream, "")]
    while head[-1] and not head[-1].strip():
        head.append(next(stream, ""))
    if head[-1].lstrip().startswith("{") or name.endswith(".jsonl"):
        parsed = _json_rows(chain(head, stream))
    else:
        parsed = _csv_rows(head, stream, name)
    rows: list[TraceRow] = []
    skipped: list[int] = []
    for line, row in parsed:
        if row is None:
            skipped.append(line)
        else:
            rows.append(row)
    if not rows:
        raise TraceError(
            f"the trace {name} has no usable row ({len(skipped)} malformed); expected Azure or"
            " BurstGPT CSV or Mooncake JSONL"
        )
    rows.sort(key=lambda row: row.arrival_s)
    return Trace(name, _from_zero(rows, rows[0].arrival_s), tuple(skipped))


Parsed = Iterator[tuple[int, TraceRow | None]]
Fields = Mapping[str, str]


def _csv_rows(head: Sequence[str], lines: Iterator[str], name: str) -> Parsed:
    """Yield line numbers and rows; `head` is the header line and the blank lines before it."""
    columns = [column.strip() for column in next(csv.reader([head[-1]]), [])]
    parse = next((read for need, read in _CSV_FORMATS if need <= set(columns)), None)
    if parse is None:
        raise TraceError(
            f"the trace {name} has no usable row: its first line is neither the header of an Azure"
            " or BurstGPT CSV nor a Mooncake JSON object"
        )
    # Parse line by line: a stray quote must not affect other rows.
    for number, line in enumerate(lines, start=len(head) + 1):
        if not line.strip():
            continue
        try:
            values = next(csv.reader([line]))
            row = parse(dict(zip(columns, values, strict=True)))
        except (csv.Error, ValueError, KeyError, OverflowError):
            row = None
        yield number, row


# Azure's times have seven fraction digits, of which datetime accepts six.
_AZURE_TIME = re.compile(
    r"(?P<stamp>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?P<fraction>\.\d+)?(?P<zone>Z|[+-]\d\d:\d\d)?"
)


def _azure(fields: Fields) -> TraceRow:
    match = _AZURE_TIME.fullmatch(fields["TIMESTAMP"].strip())
    if match is None:
        raise ValueError("invalid time")
    moment = datetime.fromisoformat(match["stamp"] + (match["zone"] or "+00:00"))
    seconds = moment.timestamp() + float(match["fraction"] or 0)
    return _checked(seconds, fields["ContextTokens"], fields["GeneratedTokens"])


def _burstgpt(fields: Fields) -> TraceRow:
    return _checked(float(fields["Timestamp"]), fields["Request tokens"], fields["Response tokens"])


_CSV_FORMATS: tuple[tuple[set[str], Callable[[Fields], TraceRow]], ...] = (
    ({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}, _azure),
    ({"Timestamp", "Request tokens", "Response tokens"}, _burstgpt),
)


def _json_rows(lines: Iterable[str]) -> Parsed:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _mooncake(json.loads(line))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            row = None
        yield number, row


def _mooncake(fields: Any) -> TraceRow:
    row = _checked(
        float(fields["timestamp"]) / 1000, fields["input_length"], fields["output_length"]
    )
    return replace(row, prefix_ids=tuple(int(block) for block in fields.get("hash_ids", ())))


def _checked(arrival_s: float, prompt: str | int, output: str | int) -> TraceRow:
    """Make a row. Raises ValueError if the row cannot be replayed."""
    row = TraceRow(arrival_s, int(prompt), int(output))
    # A row without output is a failed request.
    if not math.isfinite(arrival_s) or row.prompt_tokens < 1 or row.output_tokens < 1:
        raise ValueError
    return row


def _from_zero(rows: Iterable[TraceRow], origin_s: float) -> tuple[TraceRow, ...]:
    return tuple(replace(row, arrival_s=row.arrival_s - origin_s) for row in rows)
