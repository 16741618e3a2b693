"""Systems that differ in which requests go first: how each is started with `tideserve up`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.errors import BenchError

Options = dict[str, Any]


def _divided(workers: int) -> Options:
    if workers < 2:
        raise BenchError("'reserved' keeps some groups for batch requests, so it needs two workers")
    return {"scheduling": "priority", "scheduler": {"batch_groups": workers // 2}}


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One such system. `options` are those of `tideserve up`, for so many workers.

    With `online_only` it gets no batch requests.
    """

    about: str
    options: Callable[[int], Options]
    online_only: bool = False


SCHEDULINGS: Mapping[str, Scheduled] = {
    "online-only": Scheduled(
        "online requests alone, by deadline as beside batch work",
        lambda workers: {"scheduling": "slo"},
        online_only=True,
    ),
    "eager": Scheduled(
        "priority with iterations of up to 2,048 tokens, whatever is due",
        lambda workers: {"scheduling": "priority", "max_batch_tokens": 2048},
    ),
    "priority": Scheduled(
        "online before batch, without a budget of time", lambda workers: {"scheduling": "priority"}
    ),
    "slo-full": Scheduled(
        "by deadline; batch work fills all the time that deadlines leave",
        lambda workers: {"scheduling": "slo", "harvest": 1.0},
    ),
    "slo-quarter": Scheduled(
        "by deadline; batch work fills a quarter of the time that deadlines leave",
        lambda workers: {"scheduling": "slo", "harvest": 0.25},
    ),
    "slo-half": Scheduled(
        "by deadline; batch work fills half of the time that deadlines leave",
        lambda workers: {"scheduling": "slo", "harvest": 0.5},
    ),
    "slo": Scheduled(
        "by deadline; batch work fills two fifths of the time that deadlines leave, as by default",
        lambda workers: {"scheduling": "slo"},
    ),
    "fcfs": Scheduled(
        "first come, first served, whatever the class", lambda workers: {"scheduling": "fcfs"}
    ),
    "prefill-first": Scheduled(
        "first come, first served; prompts run whole, and answers wait for them",
        lambda workers: {
            "scheduling": "prefill_first",
            "scheduler": {"overtaken_max": 0, "growth_blocks": 0.0},
            "worker": {"overtaken_max": 0},
        },
    ),
    "round-robin": Scheduled(
        "iterations of online and of batch requests in turn",
        lambda workers: {"scheduling": "round_robin"},
    ),
    "bros": Scheduled(
        "deadlines and batch work as BROS prints them", lambda workers: {"scheduling": "bros"}
    ),
    "waiting-time": Scheduled(
        "whoever has waited longest since its last token",
        lambda workers: {"scheduling": "waiting_time"},
    ),
    "reserved": Scheduled("half of the groups take batch requests only", _divided),
}
"""By name. `priority-256` is a system with iterations of up to 256 tokens."""
SUFFIXES: Mapping[str, Options] = {
    "preempting": {"preempt": "always"},
    "packing": {"worker": {"packing": True}},
    "slots": {"worker": {"adaptive_slots": True}},
    "victims": {"worker": {"victims": "slack"}},
    "groups": {"gateway": {"classes": {"interactive": {"token_group": 1}}}},
}
"""Options that a suffix changes. `-preempting` lets online requests interrupt iterations of batch
work alone; `-packing`, `-slots` and `-victims` are parts of BROS that are off by default; `-groups`
has a deadline for each token instead of each group of tokens."""


def scheduling_of(name: str) -> tuple[str, Sequence[str]] | None:
    """(a key of `SCHEDULINGS`, the suffixes after it); None if the name begins with none."""
    for key in SCHEDULINGS:
        if name == key or name.startswith(f"{key}-"):
            return key, [one for one in name[len(key) :].split("-") if one]
    return None


def is_suffix(text: str) -> bool:
    """Whether it changes an option of a system of `SCHEDULINGS`."""
    return text in SUFFIXES or (text.isdecimal() and int(text) > 0)


def options_of(key: str, suffixes: Sequence[str], workers: int) -> Options:
    """Options of `tideserve up` of one of them. Raises BenchError."""
    options = SCHEDULINGS[key].options(workers)
    for suffix in suffixes:
        if suffix.isdecimal():
            options["max_batch_tokens"] = int(suffix)
        options = merged(options, SUFFIXES.get(suffix, {}))
    return options


def merged(options: Mapping[str, Any], more: Mapping[str, Any]) -> Options:
    """Both; `more` wins, key by key also within the sections that are passed on to services."""
    found = dict(options)
    for key, value in more.items():
        own = found.get(key)
        nested = isinstance(own, Mapping) and isinstance(value, Mapping)
        found[key] = merged(own or {}, value) if nested else value
    return found


def serves_batch(label: str) -> bool:
    """Whether a measured system gets batch requests beside the online ones."""
    found = scheduling_of(label.partition("@")[0])
    return found is None or not SCHEDULINGS[found[0]].online_only
