"""Checks that the installed vLLM has the parts that tideserve uses. Pure: does not import vLLM.

`AsyncLLM`, `AsyncEngineArgs` and `SamplingParams` are public, the statistics of a step are not. All
of them may change with any version, so a worker checks them before it loads a model.
"""

import contextlib
import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

OLDEST = (0, 32)
"""The oldest version that has been tried."""
_NUMBERS = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class UsedPart:
    """A class or function of vLLM, and the attributes, fields or parameters that are used."""

    name: str
    part: Any
    members: Collection[str]


def version_of(text: str) -> tuple[int, int] | None:
    """The major and minor version; None if the text has none, as that of a development build."""
    match = _NUMBERS.match(text)
    return None if match is None else (int(match[1]), int(match[2]))


def fault(version: str, parts: Collection[UsedPart]) -> str | None:
    """Why vLLM cannot be used, or None."""
    numbers = version_of(version)
    oldest = ".".join(map(str, OLDEST))
    if numbers is not None and numbers < OLDEST:
        return (
            f"vLLM {version} is installed, but {oldest} or newer is required; run `tideserve engine"
            " install vllm`"
        )
    if missing := [f"{part.name}.{name}" for part in parts for name in _missing(part)]:
        return (
            f"vLLM {version} lacks {', '.join(missing)}, which tideserve uses; install {oldest}"
            " with `tideserve engine install vllm`"
        )
    return None


def _missing(part: UsedPart) -> Iterator[str]:
    known = _members(part.part)
    return (name for name in part.members if name not in known)


def _members(part: Any) -> Collection[str]:
    """Attributes, annotated fields and parameters of a class, function or instance."""
    names = set(dir(part))
    for kind in inspect.getmro(part) if inspect.isclass(part) else ():
        names |= set(_annotations(kind))
    if callable(part):
        # Classes of extension modules have no signature.
        with contextlib.suppress(TypeError, ValueError):
            names |= set(inspect.signature(part).parameters)
    return names


def _annotations(kind: type) -> Mapping[str, Any]:
    annotations: Mapping[str, Any] = vars(kind).get("__annotations__", {})
    return annotations
