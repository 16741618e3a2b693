"""Triton kernels that choose a token from each row of scores: greedily, or by a random draw.

The choice is that of `cpu_kernels.token_choice`. The terms are those of `token_places`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from services.worker.engine.model.gpu_kernels.token_places import (
    ALL,
    INFINITY,
    LOG_MIN_P,
    LOWEST,
    NUMBER,
    SLOT,
    SOURCE,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WANTED,
    integer,
    mass_of,
    mass_up_to,
    number,
    place_reaching,
    places_of,
    scaled_by,
)

_INFINITY_BITS, _NO_DISTANCE = tl.constexpr(0x7F800000), tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["rows", "vocab", "lanes", "spans"])
def peaks(
    scores, columns, lane_peaks, span_peaks, span_best, rows, vocab, lanes, spans,
    SPAN: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Find the maximum of each lane and span, and the lowest id that has it. Grid: [row, span].

    NaN counts as minus infinity. A span without a finite maximum that has NaN gets the peak NaN.
    """
    row = tl.program_id(0)
    span = tl.program_id(1)
    source = integer(columns, SOURCE, row, rows)
    lane = tl.arange(0, SPAN // LANE)
    ids = span * SPAN + lane[:, None] * LANE + tl.arange(0, LANE)[None, :]
    value = tl.load(scores + source * vocab + ids, ids < vocab, -INFINITY).to(tl.float32)
    numbers = tl.where(value == value, value, -INFINITY)
    best = tl.max(numbers, 1)
    tl.store(lane_peaks + row * lanes + span * (SPAN // LANE) + lane, best)
    peak = tl.max(best, 0)
    nans = tl.sum(tl.sum((value != value).to(tl.int32), 1), 0)
    at = row * spans + span
    lowest = tl.min(tl.min(tl.where(value == peak, ids, vocab), 1), 0)
    tl.store(span_best + at, lowest)
    tl.store(span_peaks + at, tl.where((peak == -INFINITY) & (nans > 0), float("nan"), peak))


@triton.jit(do_not_specialize=["rows", "lanes", "spans"])
def threshold(
    columns, lane_peaks, span_peaks, row_peaks, thresholds, sizes, window_masses, wide_sizes,
    rows, lanes, spans,
    SPANS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Find the row's peak, and a scaled score that WANTED tokens or a few more reach. Grid: [row].

    This is the WANTED-th best maximum of a lane; minus infinity if there are fewer.
    """
    row = tl.program_id(0)
    span = tl.arange(0, SPANS)
    peak = tl.load(span_peaks + row * spans + span, span < spans, -INFINITY)
    peak = tl.max(tl.where(peak == peak, peak, -INFINITY), 0)
    tl.store(row_peaks + row, peak)
    tl.store(sizes + row, 0)
    tl.store(window_masses + row, 0)
    tl.store(wide_sizes + row, 0)
    wanted = integer(columns, WANTED, row, rows)
    if wanted > 0:
        lane = tl.arange(0, LANES)
        value = tl.load(lane_peaks + row * lanes + lane, lane < lanes, -INFINITY)
        # Distances are not negative, so that their bits have the order of the distances.
        bits = tl.where(
            value >= LOWEST, tl.abs(value - peak).to(tl.int32, bitcast=True), _NO_DISTANCE
        )
        prefix = tl.full((), 0, tl.int32)
        digit = tl.full((), 1 << 30, tl.int32)
        for _ in range(31):
            count = tl.sum((bits < (prefix | digit)).to(tl.int32), 0)
            prefix = tl.where(count < wanted, prefix | digit, prefix)
            digit = digit >> 1
        distance = tl.minimum(prefix, _INFINITY_BITS).to(tl.float32, bitcast=True)
        temperature = number(columns, TEMPERATURE, row, rows).to(tl.float32)
        tl.store(thresholds + row, tl.div_rn(-distance, temperature))


@triton.jit(do_not_specialize=["rows", "vocab", "spans", "room"])
def weigh(
    scores, columns, row_peaks, thresholds, sizes, span_masses, window_masses, window,
    rows, vocab, spans, room,
    SPAN: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """Compute the mass of each span, and add the tokens up to the threshold to the window.

    Grid: [row, span]. `sizes` counts the tokens of each window, which has `room` for so many;
    `window_masses` is their mass.
    Tokens with a score below LOWEST are masked.
    """
    row = tl.program_id(0)
    span = tl.program_id(1)
    temperature = number(columns, TEMPERATURE, row, rows).to(tl.float32)
    if temperature > 0:
        source = integer(columns, SOURCE, row, rows)
        wanted = integer(columns, WANTED, row, rows)
        least = number(columns, LOG_MIN_P, row, rows).to(tl.float32)
        peak = tl.load(row_peaks + row)
        ids = span * SPAN + tl.arange(0, SPAN)
        value = tl.load(scores + source * vocab + ids, ids < vocab, float("nan")).to(tl.float32)
        scaled = scaled_by(value, peak, temperature)
        # Top-p counts the tokens that min-p will remove.
        mass = tl.where((wanted > 0) | (scaled >= least), mass_of(scaled), 0)
        tl.store(span_masses + row * spans + span, tl.sum(mass, 0))
        if wanted > 0:
            chosen = (scaled >= tl.load(thresholds + row)) & (value >= LOWEST)
            count = chosen.to(tl.int32)
            # The order of the spans in the window differs between runs, and affects no sum.
            begin = tl.atomic_add(sizes + row, tl.sum(count, 0))
            at = begin + tl.cumsum(count, 0) - count
            tl.store(window + row * room + at, ids, chosen & (at < room))
            tl.atomic_add(window_masses + row, tl.sum(tl.where(chosen, mass, 0), 0))


@triton.jit
def _suffices(size, room, mass, total, bound, top_k, top_p, least):
    """Whether a window has all tokens that the filters keep.

    It has `size` tokens with this `mass`, of the row's `total`; `bound` is its threshold.
    """
    if top_k > 0:
        # Top-p removes a share of the mass of all tokens that top-k keeps.
        enough = (size >= top_k) | ((bound <= least) & (top_p >= 1))
    else:
        enough = (mass.to(tl.float64) >= top_p * total.to(tl.float64)) | (bound <= least)
    # Or all tokens are there.
    enough |= bound == -INFINITY
    return enough & (size <= room)


@triton.jit(do_not_specialize=["rows", "vocab", "spans", "room", "wide_room"])
def widen(
    scores, columns, row_peaks, thresholds, sizes, span_masses, window_masses, wide, wide_sizes,
    rows, vocab, spans, room, wide_room,
    SPAN: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """List the tokens of a wide window if the window does not suffice for top-p. Grid: [row, span].

    All other tokens together have less than half of the mass that top-p removes.
    """
    row = tl.program_id(0)
    temperature = number(columns, TEMPERATURE, row, rows).to(tl.float32)
    wanted = integer(columns, WANTED, row, rows)
    if (temperature > 0) & (wanted > 0) & (integer(columns, TOP_K, row, rows) == 0):
        at = tl.arange(0, SPANS)
        total = tl.sum(tl.load(span_masses + row * spans + at, at < spans, 0), 0)
        top_p = number(columns, TOP_P, row, rows)
        least = number(columns, LOG_MIN_P, row, rows).to(tl.float32)
        enough = _suffices(
            tl.load(sizes + row), room, tl.load(window_masses + row), total,
            tl.load(thresholds + row), 0, top_p, least,
        )  # fmt: skip
        if enough == 0:
            source = integer(columns, SOURCE, row, rows)
            ids = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
            value = tl.load(scores + source * vocab + ids, ids < vocab, float("nan"))
            scaled = scaled_by(value.to(tl.float32), tl.load(row_peaks + row), temperature)
            share = (1 - top_p) * total.to(tl.float64) / (2 * vocab)
            # Weights below a unit are 0, so that all tokens with a mass are there.
            chosen = mass_of(scaled).to(tl.float64) >= tl.maximum(share, 1.0)
            count = chosen.to(tl.int32)
            begin = tl.atomic_add(wide_sizes + row, tl.sum(count, 0))
            place = begin + tl.cumsum(count, 0) - count
            tl.store(wide + row * wide_room + place, ids, chosen & (place < wide_room))


@triton.jit
def _draw_by_id(
    scores, span_masses, peak, temperature, least, draw, vocab, spans,
    SPAN: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Return the first token in order of ids up to which the mass exceeds `draw` × total."""
    at = tl.arange(0, SPANS)
    mass = tl.load(span_masses + at, at < spans, 0)
    total = tl.sum(mass, 0)
    target = tl.minimum((draw * total.to(tl.float64)).to(tl.int64), total - 1)
    span = tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0)
    before = tl.sum(tl.where(at < span, mass, 0), 0)
    ids = span * SPAN + tl.arange(0, SPAN)
    value = tl.load(scores + ids, ids < vocab, float("nan")).to(tl.float32)
    scaled = scaled_by(value, peak, temperature)
    sums = before + tl.cumsum(tl.where(scaled >= least, mass_of(scaled), 0), 0)
    return span * SPAN + tl.sum((sums <= target).to(tl.int32), 0)


@triton.jit
def _draw_by_rank(
    scores, listed, size, peak, temperature, total, top_k, top_p, least, draw,
    LISTED: tl.constexpr, ID_BITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the first token, best first, up to which the kept tokens exceed `draw` × their mass.

    `total` is the mass of the row.
    """
    limit = tl.full((), ALL, tl.int64)
    if top_k > 0:
        limit = place_reaching(
            scores, listed, size, peak, temperature, limit, top_k, True, LISTED, ID_BITS, CHUNK
        )
        total = mass_up_to(scores, listed, size, peak, temperature, limit, LISTED, ID_BITS, CHUNK)
    if top_p < 1:
        target = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
        last = place_reaching(
            scores, listed, size, peak, temperature, limit, target, False, LISTED, ID_BITS, CHUNK
        )
        limit = tl.minimum(limit, last)
    # Min-p is a place, too: the last of the tokens with its distance from the peak.
    limit = tl.minimum(limit, places_of(least, (1 << ID_BITS) - 1, ID_BITS))
    total = mass_up_to(scores, listed, size, peak, temperature, limit, LISTED, ID_BITS, CHUNK)
    target = tl.minimum((draw * total.to(tl.float64)).to(tl.int64), total - 1) + 1
    place = place_reaching(
        scores, listed, size, peak, temperature, limit, target, False, LISTED, ID_BITS, CHUNK
    )
    return (place & ((1 << ID_BITS) - 1)).to(tl.int32)


@triton.jit
def _best_token(span_peaks, span_best, peak, vocab, spans, SPANS: tl.constexpr):
    """Return the lowest id with the score `peak`; −1 if all are masked, 0 if all are NaN."""
    at = tl.arange(0, SPANS)
    best = tl.load(span_peaks + at, at < spans, -INFINITY)
    ids = tl.load(span_best + at, at < spans, vocab)
    nans = tl.sum((best != best).to(tl.int32), 0)
    best = tl.where(best == best, best, -INFINITY)
    token = tl.min(tl.where(best == peak, ids, vocab), 0)
    token = tl.where(token < vocab, token, 0)
    return tl.where((peak == -INFINITY) & (nans == 0), -1, token)


@triton.jit(do_not_specialize=["rows", "vocab", "spans", "room", "wide_room"])
def choose(
    scores, columns, row_peaks, thresholds, sizes, span_masses, window_masses, window, wide,
    wide_sizes, span_peaks, span_best, counts, tokens, rows, vocab, spans, room, wide_room,
    SPAN: tl.constexpr, SPANS: tl.constexpr, ID_BITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Choose a token from each row, and count it in the row's slot. Grid: [row].

    In a row without a usable maximum the choice is greedy; −1 if all tokens are masked.
    """
    row = tl.program_id(0)
    peak = tl.load(row_peaks + row)
    temperature = number(columns, TEMPERATURE, row, rows).to(tl.float32)
    if (temperature > 0) & (peak < INFINITY) & (peak > LOWEST):
        least = number(columns, LOG_MIN_P, row, rows).to(tl.float32)
        draw = number(columns, NUMBER, row, rows)
        row_scores = scores + integer(columns, SOURCE, row, rows) * vocab
        if integer(columns, WANTED, row, rows) > 0:
            token = _draw_from_list_or_row(
                row_scores, span_masses + row * spans, tl.load(sizes + row),
                tl.load(window_masses + row), window + row * room, tl.load(wide_sizes + row),
                wide + row * wide_room, tl.load(thresholds + row), peak, temperature,
                integer(columns, TOP_K, row, rows), number(columns, TOP_P, row, rows),
                least, draw, vocab, spans, room, wide_room, SPANS, ID_BITS, CHUNK,
            )  # fmt: skip
        else:
            token = _draw_by_id(
                row_scores, span_masses + row * spans, peak, temperature, least, draw, vocab, spans,
                SPAN, SPANS,
            )  # fmt: skip
    else:
        token = _best_token(
            span_peaks + row * spans, span_best + row * spans, peak, vocab, spans, SPANS
        )
    tl.store(tokens + row, token.to(tl.int64))
    slot = integer(columns, SLOT, row, rows)
    if (slot >= 0) & (token >= 0):
        count = counts + slot * vocab + token
        tl.store(count, tl.maximum(tl.load(count), 0) + 1)


@triton.jit
def _draw_from_list_or_row(
    scores, span_masses, size, mass, window, wide_size, wide, bound, peak, temperature, top_k,
    top_p, least, draw, vocab, spans, room, wide_room,
    SPANS: tl.constexpr, ID_BITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """As `_draw_by_rank`, from the shortest list that suffices, and else from the whole row."""
    at = tl.arange(0, SPANS)
    total = tl.sum(tl.load(span_masses + at, at < spans, 0), 0)
    listed = window
    if _suffices(size, room, mass, total, bound, top_k, top_p, least) == 0:
        listed = wide
        size = wide_size
        # `widen` lists nothing for top-k.
        if (wide_size == 0) | (wide_size > wide_room):
            size = 0
    if size > 0:
        token = _draw_by_rank(
            scores, listed, size, peak, temperature, total, top_k, top_p, least, draw,
            True, ID_BITS, CHUNK,
        )  # fmt: skip
    else:
        token = _draw_by_rank(
            scores, listed, vocab, peak, temperature, total, top_k, top_p, least, draw,
            False, ID_BITS, CHUNK,
        )  # fmt: skip
    return token
