"""What a program can tell about how the product is built."""

import ast
from pathlib import Path

import check_structure
import pytest

LONG = "    a = 1\n" * check_structure.LINES_MAX
ONE = """
def name_of(thing: Thing) -> str:
    '''Says who.'''
    for part in thing.parts(1):
        if part is None:
            continue
        part.use("a", key=2)
        total = part + 1
    return total
"""
OTHER = """
class Copy:
    @cached
    async def what(this, that):
        for x in this.of(70000):
            if x is None:
                continue
            x.try_(9, other=None)
            y = x + 'b'
        return y
"""


def read(**sources: str) -> dict[str, ast.Module]:
    """Modules of these sources; two underscores in a name are a dot."""
    return {name.replace("__", "."): ast.parse(text) for name, text in sources.items()}


def function(text: str) -> check_structure.Function:
    """The first function in a source."""
    return next(check_structure.functions(ast.parse(text)))


def test_two_packages_that_import_each_other_are_a_cycle() -> None:
    found = check_structure.knots(
        read(
            a="", a__x="from a.b.y import f", a__b="", a__b__y="import a.z", a__z="", c="import a.x"
        )
    )
    assert list(found) == ["cycle a", "cycle a.b"]
    assert found["cycle a"] == "a is in a cycle of packages: a.x imports a.b.y"
    assert found["cycle a.b"] == "a.b is in a cycle of packages: a.b.y imports a.z"


def test_a_cycle_of_three_packages_leaves_out_one_that_only_imports_them() -> None:
    found = check_structure.knots(
        read(
            a="",
            a__x="from b import y",
            b="",
            b__y="def f():\n    from c import z",
            c="",
            c__z="import a.x",
            d="",
            d__w="from a import x\nimport os",
        )
    )
    assert list(found) == ["cycle a", "cycle b", "cycle c"]


def test_imports_inside_a_package_are_no_cycle() -> None:
    assert not check_structure.knots(
        read(a="", a__x="from a import y", a__y="from a.x import f", a__b="", a__b__z="import os")
    )


def test_a_shape_has_no_names_values_annotations_decorators_and_docstrings() -> None:
    one = function(ONE)
    same = function(ONE.replace("thing", "it").replace("-> str", "").replace("who", "what"))
    assert check_structure.shape(one) == check_structure.shape(same)
    assert check_structure.statements(one) == 6


@pytest.mark.parametrize(
    ("old", "new"),
    [("is None", "is not None"), (", key=2", ""), ("+ 1", "- 1"), ("continue", "break")],
)
def test_what_a_function_does_is_its_shape(old: str, new: str) -> None:
    changed = ONE.replace(old, new)
    assert changed != ONE
    assert check_structure.shape(function(ONE)) != check_structure.shape(function(changed))


def test_a_copy_in_the_simulator_is_found() -> None:
    drives = "from services.core.changeover.state import Changeover"
    found = check_structure.one_machine(
        read(
            services__core__changeover="",
            services__core__changeover__state="",
            services__worker="",
            services__worker__engine=drives,
            services__worker__engine__member=ONE + "class Member:\n    class Inner: ...",
            services__worker__other="class Apart: ...",
            tideserve__sim="",
            tideserve__sim__member=drives + OTHER + "class Inner: ...",
            tideserve__bench="class Apart: ...",
        )
    )
    assert list(found) == ["class Inner", "shape tideserve.sim.member.what"]
    assert "services.worker.engine.member.name_of" in found["shape tideserve.sim.member.what"]


def test_a_side_without_the_change_over_is_named() -> None:
    sources = read(
        services__core__changeover="",
        services__core__changeover__state="",
        services__worker__engine="from services.core.changeover import state",
        services__worker="",
        tideserve__sim="from services.core.changeover import route",
        services__core__changeover__route="",
        services__core="",
    )
    assert list(check_structure.one_machine(sources)) == ["import tideserve.sim"]


def test_short_functions_are_no_copies() -> None:
    short = "def f(a):\n    a.b()\n    return a"
    sources = read(services__worker__a=short, tideserve__sim__b=short)
    assert not [name for name in check_structure.one_machine(sources) if name[:5] == "shape"]


def test_an_entry_that_is_not_needed_any_more_is_an_error() -> None:
    sources = read(
        a="",
        a__x="import b.y",
        b="",
        b__y="import a.x",
        services__worker__engine="import services.core.changeover.state",
        tideserve__sim="import services.core.changeover.state",
        services__core__changeover__state="",
    )
    allowed = frozenset({"cycle a", "cycle b"})
    assert check_structure.findings(sources, allowed) == []
    (line,) = check_structure.findings(sources, allowed | {"class Gone"})
    assert line.startswith("'class Gone' is clean now")
    (line,) = check_structure.findings(sources, allowed - {"cycle b"})
    assert line.startswith("b is in a cycle of packages")


def test_shared_names_and_long_functions_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = read(
        a="class Same: ...\n@decorated\ndef fits():\n" + LONG.removesuffix("    a = 1\n"),
        b="class Same: ...\nclass Other: ...\ndef long():\n" + LONG,
    )
    assert check_structure.shared_names(sources) == {"Same": ["a", "b"]}
    (found,) = check_structure.long_functions(sources)
    assert found == f"b.long has {check_structure.LINES_MAX + 1} lines"
    monkeypatch.setattr(check_structure, "SHARED_NAMES_MAX", 0)
    monkeypatch.setattr(check_structure, "LONG_FUNCTIONS_MAX", 0)
    lines = check_structure.findings(sources, frozenset())
    assert [line for line in lines if "at most 0" in line] == [
        "1 class names that stand in several files; at most 0 are allowed",
        "1 functions over 50 lines; at most 0 are allowed",
    ]


def test_generated_modules_are_left_out() -> None:
    found = check_structure.modules(Path(check_structure.ROOT))
    assert "services.core.ask" in found
    assert "tideserve.gateway.v1" in found
    assert not [name for name in found if "_pb2" in name]
