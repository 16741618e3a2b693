"""Copies of modules that count how many characters their operations read or copy.

Every call, sum, comparison, slice and loop in their source goes through `CountedModules`. Library
calls cost the sizes of their arguments and result, as operators do.
"""

import ast
import builtins
import copy
import operator
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

OPERATIONS = {
    ast.Add: operator.add,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda part, whole: part in whole,
    ast.NotIn: lambda part, whole: part not in whole,
    ast.Subscript: operator.getitem,
    ast.For: iter,
    ast.Slice: slice,
    ast.JoinedStr: str,
}
"""Kinds of syntax nodes that are replaced by counted calls."""
FREE = frozenset({"len", "isinstance", "getattr"})
"""Functions that read no characters."""
COUNTED = "_counted"


class CountedModules:
    """The copies; `chars` counts the characters processed so far."""

    def __init__(self, prefix: str) -> None:
        """`prefix`: modules with this name prefix are copied when a copy imports them."""
        self.chars = 0
        self._prefix = prefix
        self._modules: dict[str, ModuleType] = {}

    def module(self, name: str) -> ModuleType:
        """The copy of a module."""
        if name not in self._modules:
            spec = find_spec(name)
            assert spec is not None and spec.origin is not None
            made = self._modules[name] = ModuleType(name)
            tree = ast.fix_missing_locations(_Rewritten().visit(_parsed(spec.origin)))
            made.__dict__["__builtins__"] = vars(builtins) | {"__import__": self._import}
            made.__dict__[COUNTED] = self._call
            made.__dict__.update({_name(kind): does for kind, does in OPERATIONS.items()})
            exec(compile(tree, spec.origin, "exec", dont_inherit=True), made.__dict__)
        return self._modules[name]

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        if name.startswith(self._prefix) and fromlist:
            made = self.module(name)
            for part in fromlist:
                if not hasattr(made, part) and find_spec(f"{name}.{part}") is not None:
                    setattr(made, part, self.module(f"{name}.{part}"))
            return made
        return __import__(name, globals, locals, fromlist, level)

    def _call(self, function: Any, *args: Any, **fields: Any) -> Any:
        result = function(*args, **fields)
        if getattr(function, "__module__", None) not in self._modules:
            self.chars += _cost(function, args, result)
        return result


def _parsed(path: str) -> ast.Module:
    return ast.parse(Path(path).read_bytes(), path)


def _chars(value: object) -> int:
    """Characters of a text, or of the texts in a sequence."""
    if isinstance(value, str):
        return len(value)
    return sum(map(_chars, value)) if type(value) in (list, tuple) else 0


def _cost(function: Any, args: Sequence[Any], result: object) -> int:
    """The characters that a call reads or copies."""
    name, text = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    if name in FREE:
        return 0
    if name == "getitem":
        return _chars(result)
    if not isinstance(text, str):
        return _chars(args) + _chars(result)
    if name in ("startswith", "endswith"):
        return _chars(args[0])
    if name == "find":
        start = args[1] if len(args) > 1 else 0
        return max(0, (len(text) if result == -1 else int(str(result))) - start)
    return len(text) + _chars(args) + _chars(result)


def _name(kind: type[ast.AST]) -> str:
    """The name of an operation in a copy."""
    return f"{COUNTED}_{kind.__name__}"


def _counted(
    function: ast.expr, args: Sequence[ast.expr], keywords: Sequence[ast.keyword] = ()
) -> ast.Call:
    return ast.Call(ast.Name(COUNTED, ast.Load()), [function, *args], list(keywords))


def _operation(kind: type[ast.AST], *args: ast.expr) -> ast.Call:
    return _counted(ast.Name(_name(kind), ast.Load()), args)


class _Rewritten(ast.NodeTransformer):
    """Rewrites operations on text to calls of `_counted`."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            # super() looks up its class in the caller's frame.
            return node
        return _counted(node.func, node.args, node.keywords)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        kind = type(node.op)
        return _operation(kind, node.left, node.right) if kind in OPERATIONS else node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        kind, before = type(node.op), copy.deepcopy(node.target)
        if kind not in OPERATIONS:
            return node
        before.ctx = ast.Load()
        return ast.Assign([node.target], _operation(kind, before, node.value))

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        kind = type(node.ops[0])
        if len(node.ops) > 1 or kind not in OPERATIONS:
            return node
        return _operation(kind, node.left, node.comparators[0])

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            return node
        return _operation(ast.Subscript, node.value, node.slice)

    def visit_Slice(self, node: ast.Slice) -> ast.AST:
        self.generic_visit(node)
        ends = (node.lower, node.upper, node.step)
        return _operation(ast.Slice, *(end or ast.Constant(None) for end in ends))

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        node.iter = _operation(ast.For, node.iter)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self.generic_visit(node)
        node.iter = _operation(ast.For, node.iter)
        return node

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        node.value = self.visit(node.value)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        self.generic_visit(node)
        return _operation(ast.JoinedStr, node)
