"""Check how the product is built: what imports what, and what is written twice.

Packages   The graph of packages has no cycle. A module belongs to the package that it lies in; a
           package's own `__init__` and the modules beside it are that package.
One machine  The simulator and the engine drive the same change-over: both import it, no class name
           stands in both, and no function's shape does.
Names      Few class names stand in two files.
Functions  Few functions are longer than a screen.

ALLOWED names the places that are not clean yet. An entry that is no longer needed is an error.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("services", "tideserve")
GENERATED = ("_pb2.py", "_pb2_grpc.py")
CHANGEOVER = "services.core.changeover.state"
"""The machine that both drive."""
SIMULATOR, ENGINE, WORKER = "tideserve.sim", "services.worker.engine", "services.worker"
STATEMENTS_MIN = 6
"""Functions with fewer statements are too short for their shape to say anything."""
LINES_MAX = 50
LONG_FUNCTIONS_MAX = 2
SHARED_NAMES_MAX = 4
ALLOWED: frozenset[str] = frozenset()

Modules = Mapping[str, ast.Module]
"""Modules by dotted name."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules(root: Path = ROOT) -> dict[str, ast.Module]:
    """The modules of the product, generated ones aside."""
    found = {}
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        if not path.name.endswith(GENERATED):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


def imports(tree: ast.Module, known: Collection[str]) -> set[str]:
    """Which of the modules `known` a module imports, anywhere in it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            # `from a import b` imports the module a.b if there is one, else `a` itself.
            names |= {name if name in known else node.module for name in inner}
    return {name for name in names if name in known}


def knots(read: Modules) -> dict[str, str]:
    """The packages in a cycle of imports: a sentence each, by its name in ALLOWED."""
    packages = {name.rpartition(".")[0] for name in read}
    package = {name: name if name in packages else name.rpartition(".")[0] for name in read}
    edges: dict[str, dict[str, str]] = defaultdict(dict)
    for name, tree in read.items():
        for other in imports(tree, read):
            if package[name] != package[other]:
                edges[package[name]].setdefault(package[other], f"{name} imports {other}")
    reached = {one: _reached(one, edges) for one in edges}
    found = {}
    for one, others in sorted(edges.items()):
        back = [why for other, why in others.items() if one in reached.get(other, ())]
        if back:
            found[f"cycle {one}"] = f"{one} is in a cycle of packages: {'; '.join(sorted(back))}"
    return found


def _reached(start: str, edges: Mapping[str, Iterable[str]]) -> set[str]:
    """The packages that `start` imports, directly or through others."""
    found: set[str] = set()
    open_ = [start]
    while open_:
        for other in edges.get(open_.pop(), ()):
            if other not in found:
                found.add(other)
                open_.append(other)
    return found


def classes(read: Modules) -> dict[str, list[str]]:
    """Modules in which a class of that name stands."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, tree in read.items():
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        for name in sorted(names):
            found[name].append(module)
    return found


def functions(tree: ast.Module) -> Iterator[Function]:
    """Every function of a module, methods and inner ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def shape(function: Function) -> str:
    """What is left of a function without names, values, annotations, decorators, docstrings."""
    return repr([_shape(statement) for statement in _body(function)])


def _body(node: Function | ast.ClassDef) -> list[ast.stmt]:
    return node.body[ast.get_docstring(node) is not None :]


def _shape(node: object) -> object:
    if isinstance(node, list):
        return [_shape(one) for one in node]
    if not isinstance(node, ast.AST) or isinstance(node, ast.Constant):
        return ""
    fields = dict(ast.iter_fields(node))
    if isinstance(node, Function | ast.ClassDef):
        fields["body"] = _body(node)
    left_out = {"annotation", "returns", "decorator_list", "ctx", "type_params"}
    inner = [_shape(value) for key, value in fields.items() if key not in left_out]
    return [type(node).__name__, *inner]


def statements(function: Function) -> int:
    """How many statements a function has, inner ones too, docstrings aside."""
    inner = [one for statement in _body(function) for one in ast.walk(statement)]
    return sum(isinstance(one, ast.stmt) for one in inner)


def one_machine(read: Modules) -> dict[str, str]:
    """What simulator and worker do not share: a sentence each, by its name in ALLOWED."""
    found = {}
    for side in (SIMULATOR, ENGINE):
        used = {other for name in _below(side, read) for other in imports(read[name], read)}
        if not _below(CHANGEOVER, used):
            found[f"import {side}"] = f"{side} does not import {CHANGEOVER}; let it drive that"
    sides = [{name: read[name] for name in _below(side, read)} for side in (SIMULATOR, WORKER)]
    simulated, real = (classes(side) for side in sides)
    for name in sorted(simulated.keys() & real.keys()):
        where = ", ".join([*simulated[name], *real[name]])
        found[f"class {name}"] = f"class {name} is in simulator and worker: {where}; share it"
    here, there = ({shape(one): f"{name}.{one.name}" for name, one in _long(s)} for s in sides)
    for both in sorted(here.keys() & there.keys()):
        found[f"shape {here[both]}"] = f"{here[both]} and {there[both]} are the same; share one"
    return found


def _long(read: Modules) -> Iterator[tuple[str, Function]]:
    for name, tree in read.items():
        for one in functions(tree):
            if statements(one) >= STATEMENTS_MIN:
                yield name, one


def _below(package: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name == package or name.startswith(f"{package}.")]


def shared_names(read: Modules) -> dict[str, list[str]]:
    """Class names that stand in several files, with these."""
    return {name: where for name, where in sorted(classes(read).items()) if len(where) > 1}


def long_functions(read: Modules) -> list[str]:
    """Functions over LINES_MAX lines, decorators aside: where, and how long they are."""
    return [
        f"{name}.{one.name} has {lines} lines"
        for name, tree in read.items()
        for one in functions(tree)
        if (lines := (one.end_lineno or one.lineno) - one.lineno + 1) > LINES_MAX
    ]


def findings(read: Modules, allowed: frozenset[str] = ALLOWED) -> list[str]:
    """All that is wrong in these modules, a line for each."""
    found = knots(read) | one_machine(read)
    lines = [sentence for name, sentence in found.items() if name not in allowed]
    for name in sorted(allowed - found.keys()):
        lines.append(f"'{name}' is clean now: take it out of ALLOWED in scripts/check_structure.py")
    shared = [f"class {name}: {', '.join(where)}" for name, where in shared_names(read).items()]
    for kind, listed, limit in (
        ("class names that stand in several files", shared, SHARED_NAMES_MAX),
        (f"functions over {LINES_MAX} lines", long_functions(read), LONG_FUNCTIONS_MAX),
    ):
        if len(listed) > limit:
            lines += [*listed, f"{len(listed)} {kind}; at most {limit} are allowed"]
    return lines


def main() -> int:
    """1 when something is wrong; `--list` shows what is counted."""
    read = modules()
    found = findings(read)
    for line in found:
        print(line)
    if "--list" in sys.argv[1:]:
        for name, where in shared_names(read).items():
            print(f"class {name}: {', '.join(where)}")
        print("\n".join(sorted({**knots(read), **one_machine(read)}) + long_functions(read)))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
