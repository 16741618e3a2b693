"""Duplicate class names, long functions and copies in the simulator are reported."""

import ast

import pytest
from check_structure import findings

FUNCTION = """
def name_of(thing: Thing) -> str:
    '''Says who.'''
    for part in thing.parts(1):
        if part is None:
            continue
        part.use("a", key=2)
        total = part + 1
    return total
"""
COPY = """
class Other:
    @cached
    async def what(this, that):
        for x in this.of(70000):
            if x is None:
                continue
            x.try_(9, other=None)
            y = x + 'b'
        return y
"""
DRIVES = "from services.core.changeover.state import Changeover\n"
CLEAN = {
    "services.worker.engine.a": DRIVES + FUNCTION,
    "tideserve.sim.b": DRIVES + "class Same:\n    def short(self): return 1",
}
SAME = "tideserve.sim.c.what and services.worker.engine.a.name_of are the same"


@pytest.mark.parametrize(
    ("changed", "lines"),
    [
        ({}, []),
        ({"tideserve.sim.c": COPY}, [SAME]),
        *(
            ({"tideserve.sim.c": COPY.replace(old, new)}, [])
            for old, new in [
                ("is None", "is not None"),
                (", other=None", ""),
                ("+", "-"),
                ("continue", "break"),
            ]
        ),
        ({"tideserve.cli.c": COPY}, []),
        ({"services.a": "class Same: ..."}, ["class Same is in services.a, tideserve.sim.b"]),
        ({"a": "def long():\n" + "    a = 1\n" * 50}, ["a.long is over 50 lines"]),
        ({"a": "@decorated\ndef fits():\n" + "    a = 1\n" * 49}, []),
        (
            {"tideserve.sim.b": "from services.core.changeover import route"},
            ["tideserve.sim does not import services.core.changeover.state"],
        ),
    ],
)
def test_each_violation_is_a_single_line(changed: dict[str, str], lines: list[str]) -> None:
    modules = {name: ast.parse(text) for name, text in (CLEAN | changed).items()}
    assert list(findings(modules)) == lines
