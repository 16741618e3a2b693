"""The scenarios. One joins by adding a module of its name here, with a `SCENARIO` or a `TRIAL`."""

import pkgutil


def scenario_names() -> list[str]:
    """The names of all of them, without loading any; `drop` is measured without a scenario."""
    modules = {module.name for module in pkgutil.iter_modules(__path__)}
    return sorted(modules - {"scenario"} | {"drop"})
