"""Systems that differ in scheduling, and their options of `tideserve up`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.errors import BenchError

Options = dict[str, Any]
RESERVED = "reserved"
ONLINE_ONLY = "online-only"
"""The system without batch requests."""
HOST_MEMORY = 2**28
"""Host memory of a worker with `-host`, more than the KV cache of a paced one."""
API = "api"
"""Suffix of systems whose batch requests are lines of files at /v1/batches."""


def _slo(**more: float) -> Options:
    return {"scheduling": "slo", **more}


SCHEDULINGS: Mapping[str, tuple[str, Options]] = {
    ONLINE_ONLY: ("online requests only, by deadline as in co-serving", _slo()),
    "eager": (
        "priority with iterations of up to 2,048 tokens, regardless of deadlines",
        {"scheduling": "priority", "max_batch_tokens": 2048},
    ),
    "priority": ("online before batch, without a time budget", {"scheduling": "priority"}),
    "slo-full": (
        "by deadline; batch work fills all slack",
        _slo(harvest=1.0),
    ),
    "slo-quarter": (
        "by deadline; batch work fills a quarter of the slack",
        _slo(harvest=0.25),
    ),
    "slo-half": (
        "by deadline; batch work fills half of the slack",
        _slo(harvest=0.5),
    ),
    "slo": (
        "by deadline; batch work fills two fifths of the slack, the default",
        _slo(),
    ),
    "fcfs": ("first come, first served, regardless of class", {"scheduling": "fcfs"}),
    "prefill-first": (
        "first come, first served; unchunked prompts, which block decode",
        {
            "scheduling": "prefill_first",
            "scheduler": {"overtaken_max": 0, "growth_blocks": 0.0},
            "worker": {"overtaken_max": 0},
        },
    ),
    "round-robin": (
        "alternating iterations of online and of batch requests",
        {"scheduling": "round_robin"},
    ),
    "conserve": (
        "ConServe's queue order and iteration budget, as its paper describes them",
        {"scheduling": "conserve"},
    ),
    "bros": ("BROS's order and packing, without its memory management", {"scheduling": "bros"}),
    "waiting-time": (
        "the request with the longest time since its last token",
        {"scheduling": "waiting_time"},
    ),
    RESERVED: ("half of the groups serve only batch requests", {"scheduling": "priority"}),
}
"""Description and options by name. `priority-256` has iterations of up to 256 tokens."""
SUFFIXES: Mapping[str, Options] = {
    "preempting": {"preempt": "always"},
    "patient": {"preempt": "off"},
    "idle": {"harvest": 0.0},
    "host": {"host_memory": HOST_MEMORY},
    "save": {"host_memory": HOST_MEMORY, "worker": {"prefetch": False}},
    "all": {"worker": {"save": "all"}},
    "packing": {"worker": {"packing": True}},
    "slots": {"worker": {"adaptive_slots": True}},
    "victims": {"worker": {"victims": "slack"}},
    "sharing": {"worker": {"block_sharing": True}},
    "block64": {"block_size": 64},
    "groups": {"gateway": {"classes": {"interactive": {"token_group": 1}}}},
    API: {},
}
"""Options of suffixes. `-preempting` lets online requests interrupt iterations with only batch
work, `-patient` does not; with `-idle`, batch work runs only while no online request does; `-host`
copies KV to host memory and back, with `-all` also that of running online requests, `-save` lets
nothing else run while it is copied back;
`-packing`, `-slots`, `-victims` and `-sharing` enable parts of BROS that are off by default;
`-block64` sets KV blocks of 64 tokens; `-groups` sets a deadline per token instead of per group of
tokens; `-api` gets batch requests as files."""


def scheduling_of(name: str) -> tuple[str, Sequence[str]] | None:
    """(key of `SCHEDULINGS`, suffixes); None if the name starts with no key."""
    return prefixed(name, SCHEDULINGS)


def prefixed(name: str, keys: Iterable[str]) -> tuple[str, Sequence[str]] | None:
    """(key that starts the name, suffixes after it); None if the name starts with no key."""
    for key in keys:
        if name == key or name.startswith(f"{key}-"):
            return key, [suffix for suffix in name[len(key) :].split("-") if suffix]
    return None


def is_suffix(text: str) -> bool:
    """Whether `text` is a suffix that changes an option of a system of `SCHEDULINGS`."""
    return text in SUFFIXES or (text.isdecimal() and int(text) > 0)


def options_of(key: str, suffixes: Sequence[str], workers: int) -> Options:
    """Options of `tideserve up` of a scheduling system. Raises BenchError."""
    _, options = SCHEDULINGS[key]
    if key == RESERVED:
        if workers < 2:
            raise BenchError(f"'{key}' reserves groups for batch requests, so it needs two workers")
        options = options | {"scheduler": {"batch_groups": workers // 2}}
    for suffix in suffixes:
        tokens = {"max_batch_tokens": int(suffix)} if suffix.isdecimal() else {}
        options = merged(options, SUFFIXES.get(suffix, tokens))
    return options


def merged(options: Mapping[str, Any], more: Mapping[str, Any]) -> Options:
    """Both options merged; `more` overrides, also key by key within the sections of services."""
    merged_options = dict(options)
    for key, value in more.items():
        own = merged_options.get(key)
        nested = isinstance(own, Mapping) and isinstance(value, Mapping)
        merged_options[key] = merged(own or {}, value) if nested else value
    return merged_options


def serves_batch(label: str) -> bool:
    """Whether a measured system gets batch requests in addition to online requests."""
    scheduling = scheduling_of(label.partition("@")[0])
    return scheduling is None or scheduling[0] != ONLINE_ONLY


def gets_files(label: str) -> bool:
    """Whether a measured system gets its batch requests as files."""
    scheduling = scheduling_of(label.partition("@")[0])
    return scheduling is not None and API in scheduling[1]
