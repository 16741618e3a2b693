"""Create systems from the names on the command line."""

from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from benchmarks.errors import BenchError
from benchmarks.systems.schedulings import (
    SCHEDULINGS,
    is_suffix,
    merged,
    options_of,
    prefixed,
    scheduling_of,
)
from benchmarks.systems.system import AMPLE, Deployment, System
from benchmarks.systems.tideserve import MECHANISMS, POLICIES, Tideserve
from benchmarks.systems.url import Url
from benchmarks.systems.vllm import PRIORITY, Vllm
from tideserve.load.event_stream import ClassFields

PACED_MARK = "@"
VLLM = "vllm"
VLLM_SUFFIXES = (AMPLE, PRIORITY)
DTYPES = ("bfloat16", "float32")
"""Suffixes that set the dtype of a system."""


def check_names(names: Sequence[str]) -> None:
    """Check the names. Raises BenchError for the first invalid name."""
    if not names:
        raise BenchError("no system is given; --systems takes comma-separated names")
    labels = [name.partition("=")[0] for name in names]
    for name, label in zip(names, labels, strict=True):
        if "=" in name:
            _check_url(name)
        else:
            _split(name)
            if sum(part in DTYPES for part in name.split("-")) > 1:
                raise BenchError(f"'{name}' has two dtypes; remove one of them")
        if labels.count(label) > 1:
            raise BenchError(f"the system '{label}' is given twice")


def make_system(name: str, deployment: Deployment, api_key: str | None = None) -> System:
    """Create the system `name`. Raises BenchError."""
    if "=" in name:
        label, url = _check_url(name)
        return Url(label, url, api_key)
    base, off = _split(name)
    deployment = replace(deployment, dtype=dtype_of(name) or deployment.dtype)
    if base == VLLM:
        return Vllm(name, off, replace(deployment, paced=None))
    if base in SCHEDULINGS:
        own = options_of(base, off, deployment.workers)
        off = tuple(suffix for suffix in off if not is_suffix(suffix))
        deployment = replace(deployment, options=merged(deployment.options, own))
    label = f"{name}{PACED_MARK}{deployment.paced}" if deployment.paced else name
    return Tideserve(label, off, deployment)


def is_tideserve(name: str) -> bool:
    """Whether `name` is a tideserve system, which can be paced."""
    return "=" not in name and not is_vllm(name)


def is_vllm(name: str) -> bool:
    """Whether `name` is a vLLM system."""
    return "=" not in name and name.split("-")[0] == VLLM


def class_fields_of(name: str) -> ClassFields:
    """How requests to this system state their service class."""
    if not is_vllm(name):
        return ClassFields.CLASSES
    return ClassFields.PRIORITY if PRIORITY in name.split("-") else ClassFields.NONE


def dtype_of(name: str) -> str | None:
    """The dtype in a name; None for the dtype of the run."""
    parts = () if "=" in name else name.partition(PACED_MARK)[0].split("-")[1:]
    return next((part for part in parts if part in DTYPES), None)


def without_dtype(name: str) -> str:
    """The name without its dtype suffix."""
    dtype = dtype_of(name)
    return name if dtype is None else name.replace(f"-{dtype}", "")


def device_of(name: str) -> str:
    """The device whose pace a measured system kept; empty if unpaced."""
    return "" if "=" in name else name.partition(PACED_MARK)[2]


def is_reference(name: str) -> bool:
    """Whether a system is only a reference for comparison."""
    return "=" not in name and AMPLE in name.partition(PACED_MARK)[0].split("-")


def _check_url(name: str) -> tuple[str, str]:
    label, _, url = name.partition("=")
    parts = urlsplit(url)
    if not label or parts.scheme not in ("http", "https") or not parts.hostname:
        raise BenchError(f"'{name}' is not of the form name=http://host:port")
    if is_reference(label) or PACED_MARK in label:
        raise BenchError(f"'{label}' is the name of a built-in system; give the URL another name")
    return label, url


def _split(name: str) -> tuple[str, tuple[str, ...]]:
    scheduled = scheduling_of(name)
    base, suffixes = (
        scheduled or prefixed(name, POLICIES) or (name.split("-")[0], name.split("-")[1:])
    )
    off = [suffix for suffix in suffixes if suffix not in DTYPES]
    known = VLLM_SUFFIXES if base == VLLM else tuple(MECHANISMS)
    if base != VLLM and base not in {*POLICIES, *SCHEDULINGS}:
        dashed = name.replace("_", "-")
        if scheduling_of(dashed):
            raise BenchError(f"unknown system '{name}'; did you mean '{dashed}'?")
        systems = ", ".join((*POLICIES, *sorted(SCHEDULINGS)))
        raise BenchError(
            f"unknown system '{name}'; systems are {systems}, vllm, vllm-priority and name=URL,"
            " with the suffixes that `tideserve bench --help` lists"
        )
    for mechanism in off:
        if mechanism not in known and not (scheduled and is_suffix(mechanism)):
            raise BenchError(
                f"'{name}': there is no mechanism '{mechanism}' to disable; mechanisms are"
                f" {', '.join(known)}"
            )
    return base, tuple(off)
