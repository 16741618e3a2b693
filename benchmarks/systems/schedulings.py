"""Systems that differ in their scheduling: how each is started with `tideserve up`."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.errors import BenchError

Options = dict[str, Any]
RESERVED = "reserved"
ONLINE_ONLY = "online-only"
"""The system that gets no batch requests."""


def _slo(**more: float) -> Options:
    return {"scheduling": "slo", **more}


SCHEDULINGS: Mapping[str, tuple[str, Options]] = {
    ONLINE_ONLY: ("online requests alone, by deadline as beside batch work", _slo()),
    "eager": (
        "priority with iterations of up to 2,048 tokens, whatever is due",
        {"scheduling": "priority", "max_batch_tokens": 2048},
    ),
    "priority": ("online before batch, without a budget of time", {"scheduling": "priority"}),
    "slo-full": (
        "by deadline; batch work fills all the time that deadlines leave",
        _slo(harvest=1.0),
    ),
    "slo-quarter": (
        "by deadline; batch work fills a quarter of the time that deadlines leave",
        _slo(harvest=0.25),
    ),
    "slo-half": (
        "by deadline; batch work fills half of the time that deadlines leave",
        _slo(harvest=0.5),
    ),
    "slo": (
        "by deadline; batch work fills two fifths of the time that deadlines leave, as by default",
        _slo(),
    ),
    "fcfs": ("first come, first served, whatever the class", {"scheduling": "fcfs"}),
    "prefill-first": (
        "first come, first served; prompts run whole, and answers wait for them",
        {
            "scheduling": "prefill_first",
            "scheduler": {"overtaken_max": 0, "growth_blocks": 0.0},
            "worker": {"overtaken_max": 0},
        },
    ),
    "round-robin": (
        "iterations of online and of batch requests in turn",
        {"scheduling": "round_robin"},
    ),
    "bros": ("deadlines and batch work as BROS prints them", {"scheduling": "bros"}),
    "waiting-time": (
        "whoever has waited longest since its last token",
        {"scheduling": "waiting_time"},
    ),
    RESERVED: ("half of the groups take batch requests only", {"scheduling": "priority"}),
}
"""Description and options by name. `priority-256` has iterations of up to 256 tokens."""
SUFFIXES: Mapping[str, Options] = {
    "preempting": {"preempt": "always"},
    "packing": {"worker": {"packing": True}},
    "slots": {"worker": {"adaptive_slots": True}},
    "victims": {"worker": {"victims": "slack"}},
    "groups": {"gateway": {"classes": {"interactive": {"token_group": 1}}}},
}
"""Options of suffixes. `-preempting` lets online requests interrupt iterations of batch work alone;
`-packing`, `-slots` and `-victims` are parts of BROS that are off by default; `-groups` has a
deadline for each token instead of each group of tokens."""


def scheduling_of(name: str) -> tuple[str, Sequence[str]] | None:
    """(a key of `SCHEDULINGS`, the suffixes after it); None if the name begins with none."""
    for key in SCHEDULINGS:
        if name == key or name.startswith(f"{key}-"):
            return key, [suffix for suffix in name[len(key) :].split("-") if suffix]
    return None


def is_suffix(text: str) -> bool:
    """Whether it changes an option of a system of `SCHEDULINGS`."""
    return text in SUFFIXES or (text.isdecimal() and int(text) > 0)


def options_of(key: str, suffixes: Sequence[str], workers: int) -> Options:
    """Options of `tideserve up` of one of them. Raises BenchError."""
    _, options = SCHEDULINGS[key]
    if key == RESERVED:
        if workers < 2:
            raise BenchError(f"'{key}' keeps groups for batch requests, so it needs two workers")
        options = options | {"scheduler": {"batch_groups": workers // 2}}
    for suffix in suffixes:
        tokens = {"max_batch_tokens": int(suffix)} if suffix.isdecimal() else {}
        options = merged(options, SUFFIXES.get(suffix, tokens))
    return options


def merged(options: Mapping[str, Any], more: Mapping[str, Any]) -> Options:
    """Both; `more` wins, key by key also within the sections that are passed on to services."""
    options_ = dict(options)
    for key, value in more.items():
        own = options_.get(key)
        nested = isinstance(own, Mapping) and isinstance(value, Mapping)
        options_[key] = merged(own or {}, value) if nested else value
    return options_


def serves_batch(label: str) -> bool:
    """Whether a measured system gets batch requests beside the online ones."""
    scheduling = scheduling_of(label.partition("@")[0])
    return scheduling is None or scheduling[0] != ONLINE_ONLY
