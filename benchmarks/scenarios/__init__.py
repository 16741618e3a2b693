"""The scenarios. One joins by adding a module of its name here, with a `SCENARIO` or a `TRIAL`."""

import pkgutil
import re
from pathlib import Path

DROP = ("drop", "the pause of a drop of layers, and activations beside bulk data")
"""It is measured without a scenario: its name, and what it measures."""
_SUMMARY = re.compile(r'^    summary="([^"\n]+)",$', re.MULTILINE)


def scenario_names() -> list[str]:
    """The names of all of them, without loading any."""
    modules = {module.name for module in pkgutil.iter_modules(__path__)}
    return sorted(modules - {"scenario"} | {DROP[0]})


def scenario_summaries() -> dict[str, str]:
    """One line about each, by name, read from the source, since to load them takes a second."""
    found = dict([DROP])
    for name in scenario_names():
        if name not in found:
            source = Path(__path__[0], f"{name}.py").read_text(encoding="utf-8")
            match = _SUMMARY.search(source)
            found[name] = match[1] if match else ""
    return dict(sorted(found.items()))
