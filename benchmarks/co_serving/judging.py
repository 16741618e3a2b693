"""How figures of a run are judged: a bar for each. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Figures = Mapping[str, Any]
REQUESTS_MIN = 300
"""So many online requests make a percentile."""
LATE_MAX = 1.03
"""Paced iterations with chunks take no longer than that on processors that have the time."""


class Judgement(StrEnum):
    """How a figure stands to its bar."""

    HOLDS = "holds"
    FAILS = "fails"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class OnlineTargets:
    """What online requests are promised, in seconds; `tpot_s` holds over `token_group` tokens."""

    ttft_s: float
    tpot_s: float
    token_group: int = 1


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure with its bar; `wanted` is for people. A wrong `load` makes the others worthless.

    `value` and `limit` are shares, or multiples of the other system's figure.
    """

    what: str
    system: str
    wanted: str
    value: float | None
    verdict: Judgement
    load: bool = False
    remedy: str = ""


def failures(verdict: Figures | None) -> list[str]:
    """A sentence for each bar that fails, those about the load first; none without a verdict."""
    if verdict is None:
        return []
    failed = [one for one in verdict["bars"] if one["verdict"] == Judgement.FAILS]
    failed.sort(key=lambda one: not one["load"])
    return [
        f"{one['system']}: {one['what']} is {one['value']:.3g}, wanted {one['wanted']}"
        + (f"; {one['remedy']}" if one["remedy"] else "")
        for one in failed
    ]


def by_name(systems: Mapping[str, Figures]) -> dict[str, Figures]:
    """Figures by label, such as `slo@A100-14B:4`, by the names alone."""
    return {label.partition("@")[0]: found for label, found in systems.items()}


def figure_of(named: Mapping[str, Figures], name: str, *keys: str) -> float | None:
    """One figure of a system; None if it was not measured."""
    found: Any = named.get(name)
    for key in keys:
        found = None if found is None else found[key]
    return None if found is None else float(found)


def ratio_of(named: Mapping[str, Figures], name: str, *keys: str, over: str) -> float | None:
    """One figure of a system as a multiple of the same of `over`."""
    one, other = figure_of(named, name, *keys), figure_of(named, over, *keys)
    return one / other if one is not None and other else None


def at_least(what: str, system: str, value: float | None, limit: float, load: bool = False) -> Bar:
    """A bar that a figure must reach."""
    return judged(what, system, f"≥ {limit:g}", value, lambda value: value >= limit, load)


def at_most(what: str, system: str, value: float | None, limit: float, load: bool = False) -> Bar:
    """A bar that a figure must not exceed."""
    return judged(what, system, f"≤ {limit:g}", value, lambda value: value <= limit, load)


def ttft_bar(
    named: Mapping[str, Figures], name: str, most: float, budget_s: float, over: str
) -> Bar:
    """A ratio, or one budget longer if that is more: an arrival meets an iteration that runs."""
    base_s = figure_of(named, over, "ttft_s", "p99")
    limit = most if not base_s else max(most, 1 + budget_s / base_s)
    return judged(
        "P99 TTFT",
        name,
        f"≤ {limit:.2f} × ({most:g} ×, or one budget of {budget_s * 1e3:.0f} ms longer)",
        ratio_of(named, name, "ttft_s", "p99", over=over),
        lambda value: value <= limit,
    )


def judged(
    what: str,
    system: str,
    wanted: str,
    value: float | None,
    holds: Callable[[float], bool],
    load: bool = False,
    remedy: str = "",
) -> Bar:
    """The figure with its verdict."""
    if value is None:
        return Bar(what, system, wanted, None, Judgement.NOT_MEASURED, load)
    verdict = Judgement.HOLDS if holds(value) else Judgement.FAILS
    return Bar(what, system, wanted, value, verdict, load, remedy)


def too_few_requests(named: Mapping[str, Figures]) -> list[Bar]:
    """A bar that fails for each system with less than `REQUESTS_MIN` online requests."""
    sent = {name: found["classes"]["online"]["sent"] for name, found in named.items()}
    return [
        judged(
            "online requests in the windows",
            name,
            f"≥ {REQUESTS_MIN}",
            count,
            lambda value: value >= REQUESTS_MIN,
            load=True,
        )
        for name, count in sent.items()
        if count < REQUESTS_MIN
    ]


def cut_off_notes(named: Mapping[str, Figures]) -> list[str]:
    """A sentence for each system of which answers were cut off."""
    return [
        f"{name}: {cut_off} online requests were cut off at the end of a round; the normalized"
        " latency is that of the others"
        for name, found in named.items()
        if (cut_off := found["classes"]["online"]["cut_off"])
    ]


def late_notes(named: Mapping[str, Figures]) -> list[str]:
    """A sentence for each paced system whose iterations took longer than they are paced to."""
    return [
        f"{name}: iterations took {late:.2f} times what they are paced to, so something else used"
        " the processors; gaps between tokens show that first"
        for name, found in named.items()
        if (late := found["cost_scale"]["prefill"]) is not None and late > LATE_MAX
    ]
