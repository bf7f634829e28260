"""The faults that can be planted: each replaces one expression or statement of a syntax tree by another one."""

from __future__ import annotations

import ast
import copy
import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterator
from typing import Any

STEPS_OF_UNDO = re.compile("undo|undone|restore|_back$|reset")
KEEPS_VALUES = {
    *("clone", "contiguous", "copied", "copy", "deepcopy", "detach", "dict", "frozenset", "list", "reversed"),
    *("set", "sorted", "tuple", "abs", "items", "values"),
}
"""Calls of one value that often give an equal one, so that the code runs on without them."""

OTHER = {
    **{ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn},
    **{ast.NotEq: ast.Eq, ast.IsNot: ast.Is, ast.NotIn: ast.In},
}
NEXT = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
INVERSE = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult}
INVERSE |= {ast.Div: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}
DUAL = {"any": "all", "all": "any", "min": "max", "max": "min"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        file: relative to the repository.
        line: where the changed code begins.
        operator: what is done to it, in a word or two.
        before: the code, as `ast.unparse` writes it.
        after: what takes its place.
        lines: those that a test has to execute to see it; the second range where there is none for the first.
        function: its qualified name, and a hash of its syntax tree: a mark of an equivalent mutant falls with it.
        in_function: whether it is in the body of a function.
        number: of the file's mutants.
    """

    file: str
    line: int
    operator: str
    before: str
    after: str
    lines: tuple[range, range]
    function: tuple[str, str]
    in_function: bool
    number: int

    @property
    def change(self) -> str:
        """What is done."""
        return f"{self.operator}: {self.before} -> {self.after}"

    @property
    def key(self) -> str:
        """Names it among all, as long as its function stays as it is."""
        return f"{self.file} {self.function[0]} {self.function[1]} {self.line} {self.number} {self.change}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {' '.join(self.change.split())}"


def mutants(file: str, source: str) -> list[Mutant]:
    """All mutants of a file, in the order of the source."""
    return [mutant for mutant, _ in _planted(file, ast.parse(source))]


def mutated(mutant: Mutant, source: str) -> ast.Module:
    """The tree of the file with the mutant in it.

    What it replaces stays there, out of reach: so functions have the variables that they had, and their code can be
    exchanged in place.
    """
    tree = ast.parse(source)
    _, place = next(itertools.islice(_planted(mutant.file, tree), mutant.number, None))
    never = ast.Constant(False)
    if isinstance(place.old, ast.stmt):
        put: ast.AST = ast.If(never, [place.old], [place.new])
    else:
        put = ast.IfExp(never, place.old, place.new)
    place.put(ast.copy_location(put, place.old))
    return ast.fix_missing_locations(tree)


@dataclasses.dataclass
class _Place:
    owner: ast.AST
    field: str
    index: int | None
    old: ast.AST
    new: ast.AST

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.owner, self.field, node)
        else:
            getattr(self.owner, self.field)[self.index] = node


def _planted(file: str, tree: ast.Module) -> Iterator[tuple[Mutant, _Place]]:
    number = itertools.count()
    for owner, field, index, old, within, in_function in _places(tree, [], False):
        for operator, new in (_of_statement if isinstance(old, ast.stmt) else _of_expression)(old, within):
            place = _Place(owner, field, index, old, new)
            before, after = _text(old), _text(new)
            if before != after:
                heads = before.partition("\n")[0], after.partition("\n")[0]
                before, after = heads if heads[0] != heads[1] else (before, after)
                lines = (_lines(old), _lines(old if isinstance(old, ast.stmt) else within[-1]))
                found = (file, old.lineno, operator, before, after, lines, _function(within), in_function)
                yield Mutant(*found, next(number)), place


_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_COLLECTS = ast.Call | ast.Compare | ast.For | ast.comprehension | ast.Starred | ast.BinOp


def _places(node: ast.AST, within: list[ast.AST], in_function: bool) -> Iterator[tuple[Any, ...]]:
    """Each statement and expression to replace, where it is, the statements around it, and whether a function runs it."""
    if isinstance(node, ast.stmt):
        within = [*within, node]
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "pattern", "ctx", "type_params", "bases"):
            continue
        inside = in_function or (field == "body" and isinstance(node, _FUNCTIONS))
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or _is_left_alone(child):
                continue
            several = isinstance(child, ast.Tuple) and not isinstance(
                node, _COLLECTS
            )  # values, each of its own kind
            if isinstance(child, ast.stmt | ast.expr) and not several:
                yield node, field, index if isinstance(value, list) else None, child, within, inside
            yield from _places(child, within, inside)


def _is_left_alone(node: ast.AST) -> bool:
    """Texts, checks for the type checker, and what is no code."""
    match node:
        case ast.JoinedStr() | ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Expr(ast.Constant()):
            return True
        case ast.If(ast.Name("TYPE_CHECKING")) | ast.Assign([ast.Name("__all__" | "__slots__")]):
            return True
    return False


def _of_statement(node: ast.stmt, within: list[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    in_undo = any(isinstance(each, ast.FunctionDef) and STEPS_OF_UNDO.search(each.name) for each in within)
    drop = "forget an undo" if in_undo else "drop a statement"
    match node:
        case ast.If(test, body, orelse):
            yield "drop a condition", _with(node, test=ast.Constant(True))
            yield _forgotten(body[-1]), _with(node, test=ast.Constant(False))
            if orelse:
                yield "swap branches", _with(node, body=orelse, orelse=body)
        case ast.While(test) if not isinstance(test, ast.Constant):
            yield "never true", _with(node, test=ast.Constant(False))
        case ast.Raise(exc) if exc is not None:
            yield "forget a guard", ast.Pass()
            yield (
                "another exception",
                _with(node, exc=ast.Call(ast.Name("BaseException", ast.Load()), [], [])),
            )
        case ast.Expr(ast.Yield(ast.Call(ast.Name("Refusal")))):
            yield "forget a refusal", ast.Pass()
        case ast.Expr() | ast.AugAssign() | ast.Delete() | ast.Continue() | ast.Break():
            yield drop, ast.Pass()
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield drop, ast.Pass()
        case ast.Assign([ast.Name(name)], value) if _reads(value, name):
            yield drop, ast.Pass()
        case ast.With(items, body):
            if all(item.optional_vars is None for item in items):
                yield drop, ast.If(ast.Constant(True), body, [])
        case ast.Try(body, handlers, orelse, finalbody):
            if finalbody:
                left = [*body, *orelse] if not handlers else [_with(node, finalbody=[])]
                yield "forget an undo", ast.If(ast.Constant(True), left, [])
            if handlers and (len(handlers) > 1 or finalbody):
                for number in range(len(handlers)):
                    yield "another exception", _with(node, handlers=_without(handlers, number))
            elif handlers:
                yield "another exception", ast.If(ast.Constant(True), [*body, *orelse], [])


def _of_expression(node: ast.expr, within: list[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.IfExp(test, body, orelse):
            yield "drop a condition", body
            yield "forget a refusal" if _refuses(body) else "never true", orelse
        case ast.BoolOp(_, values):
            for number in range(len(values)):
                left = _without(values, number)
                yield "drop a condition", left[0] if len(left) == 1 else _with(node, values=left)
        case ast.UnaryOp(ast.Not(), operand):
            yield "negate", operand
        case ast.UnaryOp(ast.USub() | ast.Invert(), operand) if not isinstance(operand, ast.Constant):
            yield "drop a sign", operand
        case ast.Compare(_, [op]) if type(op) in OTHER:
            yield "negate", _with(node, ops=[OTHER[type(op)]()])
        case ast.Compare(left, [op], [right]) if type(op) in NEXT:
            yield "off by one", _with(node, ops=[NEXT[type(op)]()])
            yield "swap operands", _with(node, left=right, comparators=[left])
        case ast.BinOp(left, op, right):
            if type(op) in INVERSE and within[1:]:  # elsewhere it may be a union of types
                yield "another operation", _with(node, op=INVERSE[type(op)]())
            if not isinstance(op, ast.Mult | ast.BitAnd | ast.BitOr | ast.BitXor):
                yield "swap operands", _with(node, left=right, right=left)
        case ast.Constant(bool(value)):
            yield "another constant", ast.Constant(not value)
        case ast.Constant(int(value)):
            yield "off by one", ast.Constant(value + 1)
        case ast.Constant(float(value)):
            yield "another constant", ast.Constant(value * 2 + 1)
        case ast.Subscript(_, ast.Slice(lower, upper), ast.Load()):
            for bound in ("lower", "upper"):
                if getattr(node.slice, bound) is not None:
                    yield "off by one", _with(node, slice=_with(node.slice, **{bound: None}))
        case ast.Call():
            yield from _of_call(node)
        case ast.Tuple(elts, ast.Load()) | ast.List(elts, ast.Load()) | ast.Set(elts):
            if len(elts) > 1:
                for number in range(len(elts)):
                    yield "drop an element", _with(node, elts=_without(elts, number))
        case ast.Dict(keys, values) if len(keys) > 1:
            for number in range(len(keys)):
                yield (
                    "drop an element",
                    _with(node, keys=_without(keys, number), values=_without(values, number)),
                )
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            for number, each in enumerate(node.generators):
                for condition in range(len(each.ifs)):
                    fewer = [*node.generators]
                    fewer[number] = _with(each, ifs=_without(each.ifs, condition))
                    yield "drop a condition", _with(node, generators=fewer)


def _of_call(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Call(ast.Name(name), args, []) if name in DUAL:
            yield "another function", _with(node, func=ast.Name(DUAL[name], ast.Load()))
        case ast.Call(ast.Name(name) | ast.Attribute(_, name), [ast.expr() as value], []) if (
            name in KEEPS_VALUES
        ):
            if not isinstance(value, ast.Starred | ast.GeneratorExp):
                yield "forget a call", value
        case ast.Call(ast.Attribute(value, name), [], []) if name in KEEPS_VALUES:
            yield "forget a call", value
    match node.args:
        case [ast.Name() | ast.Attribute() as one, ast.Name() | ast.Attribute() as two, *more]:
            yield "swap operands", _with(node, args=[two, one, *more])
    for number, keyword in enumerate(node.keywords):
        if keyword.arg not in (None, "encoding", "frozen", "slots", "stacklevel", "strict"):
            yield "drop an argument", _with(node, keywords=_without(node.keywords, number))


def _forgotten(last: ast.stmt) -> str:
    match last:
        case ast.Raise():
            return "forget a guard"
        case ast.Return(value) | ast.Expr(ast.Yield(value)) if _refuses(value):
            return "forget a refusal"
    return "never true"


def _refuses(value: ast.expr | None) -> bool:
    """Whether the value is a refusal, or its reason: words."""
    match value:
        case ast.Call(ast.Name("Refusal")) | ast.JoinedStr() | ast.BinOp(ast.JoinedStr()):
            return True
        case ast.Constant(str(text)):
            return " " in text
    return False


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _without(values: list[ast.AST], number: int) -> list[ast.AST]:
    return [*values[:number], *values[number + 1 :]]


def _reads(node: ast.AST, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))


def _text(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(copy.copy(node)))


def _lines(node: ast.AST) -> range:
    """The lines of an expression or a statement, of the one that has others within it those before them."""
    inner = getattr(node, "body", None)
    last = inner[0].lineno if isinstance(inner, list) else node.end_lineno + 1
    return range(node.lineno, max(last, node.lineno + 1))


def _function(within: list[ast.AST]) -> tuple[str, str]:
    named = [
        each for each in within if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    outer = [each for each in named if not isinstance(each, ast.ClassDef)][:1] or within[:1]
    digest = hashlib.sha256("".join(map(ast.dump, outer)).encode()).hexdigest()[:12]
    return ".".join(each.name for each in named), digest
