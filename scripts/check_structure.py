"""Check that class names are unique, functions are short, and simulator and worker share no copies.

A copy is a function with the same syntax, except for names and values. Import contracts in
pyproject.toml cover cycles of packages.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHANGEOVER = "services.core.changeover.state"
SIMULATOR, ENGINE, WORKER = "tideserve.sim", "services.worker.engine", "services.worker"
STATEMENTS_MIN, LINES_MAX = 6, 50
"""Functions of fewer statements may look alike by chance."""
NO_SYNTAX = {"annotation", "returns", "decorator_list", "ctx", "type_params"}
ALLOWED = {
    "class Assignment is in services.core.ask, services.core.groups.vocabulary",
    "class Lane is in services.worker.engine.transfer.lane, services.worker.ipc",
    "class Member is in services.core.groups.vocabulary, services.worker.engine.pipeline.member",
    "services.worker.engine.model.gpu_kernels.attention.attend is over 50 lines",
    "services.worker.engine.pipeline.member.__init__ is over 50 lines",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def shape(node: object) -> object:
    """The syntax of a node without names, values, annotations, decorators and docstrings."""
    if isinstance(node, list):
        return [shape(part) for part in node if not _is_text(part)]
    if not isinstance(node, ast.AST) or isinstance(node, ast.Constant):
        return ""
    parts = [shape(value) for key, value in ast.iter_fields(node) if key not in NO_SYNTAX]
    return [type(node).__name__, *parts]


def _is_text(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def findings(modules: Mapping[str, ast.Module]) -> Iterator[str]:
    """A line per problem in `modules`, which are by dotted name."""
    nodes = [(module, node) for module, tree in modules.items() for node in ast.walk(tree)]
    classes = defaultdict(set)
    for module, node in nodes:
        if isinstance(node, ast.ClassDef):
            classes[node.name].add(module)
    for name, places in classes.items():
        if len(places) > 1:
            yield f"class {name} is in {', '.join(sorted(places))}"
    yield from _functions([(m, n) for m, n in nodes if isinstance(n, Function)])
    drivers = [m for m, n in nodes if isinstance(n, ast.ImportFrom) and n.module == CHANGEOVER]
    for side in (SIMULATOR, ENGINE):
        if not any(f"{module}.".startswith(f"{side}.") for module in drivers):
            yield f"{side} does not import {CHANGEOVER}"


def _functions(functions: Iterable[tuple[str, Function]]) -> Iterator[str]:
    shapes = defaultdict[str, dict[str, str]](dict)
    for module, node in functions:
        name, inner = f"{module}.{node.name}", [*ast.walk(node)][1:]
        if sum(isinstance(n, ast.stmt) and not _is_text(n) for n in inner) >= STATEMENTS_MIN:
            for side in (SIMULATOR, WORKER):
                if module.startswith(f"{side}."):
                    shapes[repr(shape(node.body))][side] = name
        if (node.end_lineno or 0) - node.lineno >= LINES_MAX:
            yield f"{name} is over {LINES_MAX} lines"
    for same in shapes.values():
        if len(same) > 1:
            yield f"{same[SIMULATOR]} and {same[WORKER]} are the same"


def main() -> int:
    """Returns 1 if there are problems."""
    paths = (path for name in ("services", "tideserve") for path in (ROOT / name).rglob("*.py"))
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text("utf-8"))
        for path in sorted(paths)
        if not path.stem.endswith(("_pb2", "_pb2_grpc"))
    }
    lines = set(findings(modules))
    for line in sorted(lines - ALLOWED):
        print(line)
    for line in sorted(ALLOWED - lines):
        print(f"No longer true; remove it from ALLOWED: {line}")
    return lines != ALLOWED


if __name__ == "__main__":
    sys.exit(main())
