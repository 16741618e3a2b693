"""Goals of `overload` and the rows of its table. Pure."""

from collections.abc import Mapping

from benchmarks.stats import Figures, quotient

OWN = "tideserve"
FORMER = ("todays-rules", "fcfs")
"""Systems of which the better is the reference."""
IN_TIME_MIN: Mapping[str, float] = {"2": 0.8, "5": 0.7, "10": 0.6}
"""Tokens in time over the capacity, by load."""
AGAINST_FORMER_MIN = 0.97
REFUSAL_P99_MAX_S = 0.5
OBEYING_MIN, OBEYING_SHARE_MIN = 30, 0.5
RECOVERY_MAX_S = 10.0
INTERACTIVE_MIN = 0.9
BATCH_SHARE_MAX = 0.05
GROWTH_MAX = 1.25
LAG_P99_MAX_S = 0.1
PACE_MAX = 1.1
"""Beyond these the machine was too busy to measure: lateness of the load generator, and duration of
the iterations over that of the paced device."""


def worst_recovery_s(loads: Mapping[str, Figures]) -> float | None:
    """The longest recovery; None if the cluster did not recover from a load in time."""
    times_s = [figures["recovery_s"] for figures in loads.values()]
    return None if None in times_s else max(times_s, default=None)


def problems_of(
    capacity_tokens_s: float,
    systems: Mapping[str, Mapping[str, Figures]],
    mixed: Mapping[str, Figures],
) -> list[str]:
    """A sentence per missed goal."""
    loads = systems.get(OWN, {})
    problems = [
        f"{name}/{cell}: {text}"
        for name, of_system in {**systems, "mixed": mixed}.items()
        for cell, figures in of_system.items()
        for text in _invalid(figures)
    ]
    for factor, figures in loads.items():
        problems += [f"{factor} ×: {text}" for text in _missed(factor, figures, capacity_tokens_s)]
        former = {name: systems[name][factor] for name in FORMER if factor in systems.get(name, {})}
        problems += [f"{factor} ×: {text}" for text in _below_former(figures, former)]
    if loads:
        problems += _missed_overall(loads)
    for name, figures in mixed.items():
        problems += [f"mixed, {name}: {text}" for text in _missed_mixed(figures)]
    return problems


def _invalid(figures: Figures) -> list[str]:
    lag_s, pace = figures["client_lag_s"]["p99"], figures["iterations_over_paced"]
    texts = [f"{figures['failed']} requests failed"] if figures["failed"] else []
    if lag_s is not None and lag_s > LAG_P99_MAX_S:
        texts.append(f"P99 of the load generator's lag is {lag_s:.2f} s; use a less busy machine")
    if pace is not None and pace > PACE_MAX:
        texts.append(f"iterations took {pace:.2f} × their paced time; use a less busy machine")
    return texts


def _below_former(figures: Figures, former: Mapping[str, Figures]) -> list[str]:
    """Compare with the better of `former`; no problem if there is none."""
    tokens_s = {name: of_system["in_time_tokens_s"] for name, of_system in former.items()}
    best = max(tokens_s, key=tokens_s.__getitem__, default=None)
    if best is None or figures["in_time_tokens_s"] >= AGAINST_FORMER_MIN * tokens_s[best]:
        return []
    return [f"tokens in time are under {AGAINST_FORMER_MIN:g} × those of {best}"]


def _missed(factor: str, figures: Figures, capacity_tokens_s: float) -> list[str]:
    tokens_s, least = figures["in_time_tokens_s"], IN_TIME_MIN.get(factor, 0.0)
    refusal_s = figures["refusal_s"]["p99"]
    missed = []
    if tokens_s < least * capacity_tokens_s:
        missed.append(
            f"tokens in time are {tokens_s / capacity_tokens_s:.0%} of capacity, under {least:.0%}"
        )
    if refusal_s is not None and refusal_s > REFUSAL_P99_MAX_S:
        missed.append(f"P99 of refusals is {refusal_s:.2f} s, over {REFUSAL_P99_MAX_S:g} s")
    if figures["refused_with_room"]:
        missed.append(
            f"{figures['refused_with_room']} requests were refused although a group had room"
        )
    return missed


def _missed_overall(loads: Mapping[str, Figures]) -> list[str]:
    due = sum(figures["obeying_due"] for figures in loads.values())
    served = sum(figures["obeying_served"] for figures in loads.values())
    recovery_s, missed = worst_recovery_s(loads), []
    if due < OBEYING_MIN:
        missed.append(f"only {due} returns after Retry-After were due, not {OBEYING_MIN}")
    elif served < OBEYING_SHARE_MIN * due:
        missed.append(f"{served} of {due} returns after Retry-After were served in time")
    if recovery_s is None or recovery_s > RECOVERY_MAX_S:
        missed.append(
            f"the recovery took {_text(recovery_s, '{:.1f} s')}, not {RECOVERY_MAX_S:g} s"
        )
    return missed


def _missed_mixed(figures: Figures) -> list[str]:
    share, growth = figures["interactive_in_time_share"], figures["gateway_growth"]
    batch_share = _batch_share(figures)
    missed = []
    if share is None or share < INTERACTIVE_MIN:
        missed.append(
            f"{_text(share, '{:.0%}')} of interactive requests are in time,"
            f" under {INTERACTIVE_MIN:.0%}"
        )
    if batch_share is not None and batch_share > BATCH_SHARE_MAX:
        missed.append(f"{batch_share:.0%} of the tokens are batch work, over {BATCH_SHARE_MAX:.0%}")
    if growth is None or growth > GROWTH_MAX:
        missed.append(
            f"the gateway's memory grew to {_text(growth, '{:.2f} ×')}, over {GROWTH_MAX:g} ×"
        )
    return missed


def rows_of(
    capacity_tokens_s: float,
    systems: Mapping[str, Mapping[str, Figures]],
    mixed: Mapping[str, Figures],
) -> list[tuple[str, str]]:
    """Table rows: a line per system and load."""
    rows = [("capacity", f"{capacity_tokens_s:,.0f} tokens/s")]
    cells = [(f"{name}, {factor} ×", f) for name, of in systems.items() for factor, f in of.items()]
    cells += [(f"{name}, mixed", figures) for name, figures in mixed.items()]
    return rows + [(label, cell_text(figures, capacity_tokens_s)) for label, figures in cells]


def cell_text(figures: Figures, capacity_tokens_s: float) -> str:
    """The figures of a load in a line."""
    parts = [
        f"in time {figures['in_time_tokens_s'] / capacity_tokens_s:.0%} of capacity",
        f"interactive {_text(figures['interactive_in_time_share'], '{:.0%}')}",
        f"refusals {_text(figures['refusal_s']['p99'], '{:.2f} s')}",
        f"returns {figures['obeying_served']}/{figures['obeying_due']}",
        f"recovery {_text(figures['recovery_s'], '{:.1f} s')}",
    ]
    return ", ".join(parts)


def _batch_share(figures: Figures) -> float | None:
    batch = figures["classes"].get("batch")
    return None if batch is None else quotient(batch["tokens_s"], figures["tokens_s"])


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
