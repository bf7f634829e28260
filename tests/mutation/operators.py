"""The faults that can be planted: each puts another expression or statement in place of one in a syntax tree."""

from __future__ import annotations

import ast
import collections
import copy
import dataclasses
import functools
import hashlib
import itertools
import re
from collections.abc import Iterator
from typing import Any

# What is done: the code -> what takes its place. Capital letters stand for any expression.
RULES = """
negate: not A -> A
negate: A == B -> A != B
negate: A != B -> A == B
negate: A is B -> A is not B
negate: A is not B -> A is B
negate: A in B -> A not in B
negate: A not in B -> A in B
off by one: A < B -> A <= B
off by one: A <= B -> A < B
off by one: A > B -> A >= B
off by one: A >= B -> A > B
off by one: A[B:C] -> A[:C]
off by one: A[B:C] -> A[B:]
off by one: A[B:] -> A
off by one: A[:B] -> A
swap operands: A < B -> B < A
swap operands: A > B -> B > A
swap operands: A - B -> B - A
swap operands: A / B -> B / A
swap operands: A // B -> B // A
swap operands: A % B -> B % A
swap operands: A ** B -> B ** A
swap operands: A @ B -> B @ A
swap operands: (A, B) -> (B, A)
swap operands: A(B, C) -> A(C, B)
swap operands: A(B, C, D) -> A(C, B, D)
swap branches: A if B else C -> C if B else A
another operation: A + B -> A - B
another operation: A - B -> A + B
another operation: A * B -> A // B
another operation: A / B -> A * B
another operation: A // B -> A * B
another operation: A & B -> A | B
another operation: A | B -> A & B
another operation: -A -> A
another operation: ~A -> A
another operation: any -> all
another operation: all -> any
another operation: min -> max
another operation: max -> min
forget a call: A.clone() -> A
forget a call: A.contiguous() -> A
forget a call: A.detach() -> A
forget a call: A.copy() -> A
forget a call: A.values() -> A
forget a call: copy.copy(A) -> A
forget a call: copy.deepcopy(A) -> A
forget a call: copied(A) -> A
forget a call: abs(A) -> A
forget a call: dict(A) -> A
forget a call: frozenset(A) -> A
forget a call: list(A) -> A
forget a call: reversed(A) -> A
forget a call: set(A) -> A
forget a call: sorted(A) -> A
forget a call: tuple(A) -> A
forget a guard: raise A -> pass
forget a guard: raise A from B -> pass
another exception: raise A -> raise ArithmeticError
another exception: raise A from B -> raise ArithmeticError
forget a refusal: yield Refusal(A, B) -> pass
forget a refusal: reason = A -> reason = None
forget a refusal: obstacle = A -> obstacle = None
another constant: "lower" -> "higher"
another constant: "higher" -> "lower"
another constant: Outcome.FAIL -> Outcome.PASS
drop a statement: A -> pass
drop a statement: A.x = B -> pass
drop a statement: A[B] = C -> pass
drop a statement: A += B -> pass
drop a statement: A |= B -> pass
drop a statement: del A[B] -> pass
drop a statement: continue -> pass
drop a statement: break -> pass
"""

LISTS = {"keywords": "drop an argument", "keys": "drop an element", "elts": "drop an element"}
"""Lists of which one is left out."""

UNDOES = re.compile("undo|undone|restore|_back$|reset")
HARMLESS = {None, "encoding", "frozen", "slots", "stacklevel", "strict"}
"""Keywords without which code that is right does the same; None is `**options`."""

# Functions of arguments of different kinds: any test sees these exchanged.
TYPED = {"getattr", "hasattr", "isinstance", "issubclass", "setattr", "functools.partial"}

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        file: relative to the repository.
        line: where the changed code begins.
        operator: what is done.
        before: the code.
        after: what takes its place.
        lines: those that a test has to execute to see it, and those of the statement around.
        digest: of the syntax tree of the outermost function: a mark of an equivalent mutant falls with it.
        span: its lines.
        nth: of those in the function that do the same.
        number: of the file's mutants.
    """

    file: str
    line: int
    operator: str
    before: str
    after: str
    lines: tuple[range, range]
    digest: str
    span: range
    nth: int
    number: int

    @property
    def change(self) -> str:
        """Says what is done: a mark of an equivalent mutant has it, and the digest of the function."""
        again = f" ({self.nth})" if self.nth > 1 else ""
        return f"{self.operator}: {self.before} -> {self.after}{again}"

    @property
    def key(self) -> str:
        """Names it among all, as long as its function stays as it is and where it is."""
        return f"{self.file}:{self.line} {self.digest} {self.number} {self.operator}"


def mutants(file: str, source: str) -> list[Mutant]:
    """All mutants of the functions of a file, in the order of the source."""
    return [mutant for mutant, *_ in _planted(file, ast.parse(source))]


def mutated(mutant: Mutant, source: str) -> ast.Module:
    """The tree of the file with the mutant in it.

    What it replaces stays beside it, out of reach: so functions keep the variables that they had, and code can be exchanged
    in a function that is there.
    """
    tree = ast.parse(source)
    _, owner, field, index, old, new = next(
        itertools.islice(_planted(mutant.file, tree), mutant.number, None)
    )
    never = ast.Constant(False)
    both = ast.If(never, [old], [new]) if isinstance(old, ast.stmt) else ast.IfExp(never, old, new)
    ast.copy_location(both, old)
    if index is None:
        setattr(owner, field, both)
    else:
        getattr(owner, field)[index] = both
    return ast.fix_missing_locations(tree)


def _planted(file: str, tree: ast.Module) -> Iterator[tuple[Any, ...]]:
    """Each mutant, with where it is in the tree: owner, field, index, the old node, and the new one."""
    number, times = itertools.count(), collections.Counter()
    for owner, field, index, old, around in _places(tree, [], False):
        outermost = next(each for each in around if isinstance(each, FUNCTIONS))
        digest, span = _digest(outermost), range(outermost.lineno, outermost.end_lineno + 1)
        seen = set[str]()
        for operator, new in _faults(owner, field, old, around):
            before, after = (ast.unparse(ast.fix_missing_locations(copy.copy(node))) for node in (old, new))
            if before == after or after in seen:
                continue
            seen.add(after)
            lines = _lines(old), _lines(old if isinstance(old, ast.stmt) else around[-1])
            times[digest, operator, before, after] += 1
            nth = times[digest, operator, before, after]
            what = (file, old.lineno, operator, before, after, lines, digest, span, nth)
            yield Mutant(*what, next(number)), owner, field, index, old, new


def _places(node: ast.AST, around: list[ast.stmt], in_function: bool) -> Iterator[tuple[Any, ...]]:
    """Each statement and expression of a function that may be replaced, where it is, and the statements around it."""
    around = [*around, node] if isinstance(node, ast.stmt) else around
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "pattern", "type_params", "bases"):
            continue
        inside = in_function or (field == "body" and isinstance(node, FUNCTIONS))
        several = isinstance(value, list)
        for index, child in enumerate(value if several else [value]):
            if isinstance(child, ast.AST) and not _is_left_alone(child):
                if inside and isinstance(child, ast.stmt | ast.expr):
                    yield node, field, index if several else None, child, around
                yield from _places(child, around, inside)


def _is_left_alone(node: ast.AST) -> bool:
    """Texts, checks for the type checker, and what gets a value."""
    match node:
        case (
            ast.JoinedStr()
            | ast.Assert()
            | ast.Expr(ast.Constant())
            | ast.Assign([ast.Name("__all__" | "__slots__")])
        ):
            return True
    return isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)


def _faults(owner: ast.AST, field: str, node: Any, around: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    functions = [each for each in around if isinstance(each, ast.FunctionDef)]
    yield from _of_place(owner, field, node)
    indexes = isinstance(owner, ast.Subscript) and isinstance(node, ast.Tuple)
    for operator, pattern, new in () if indexes else _RULES[type(node)]:
        found = dict[str, ast.AST]()
        if _matches(pattern, node, found) and ast.unparse(found.get("A", node)) not in TYPED:
            if operator == "drop a statement" and any(UNDOES.search(each.name) for each in functions):
                operator = "forget an undo"
            yield operator, _Filled(found).visit(copy.deepcopy(new))
    for name in LISTS if isinstance(node, ast.expr) and not isinstance(owner, ast.Subscript) else ():
        values = getattr(node, name, ())
        for index, value in enumerate(values if len(values) > 1 or name == "keywords" else ()):
            if getattr(value, "arg", "") not in HARMLESS:
                lists = {each: [*getattr(node, each)] for each in (name, "values") if hasattr(node, each)}
                for each in lists.values():
                    del each[index]
                yield LISTS[name], _with(node, **lists)
    match node:
        case ast.Constant(bool(value)):
            yield "another constant", ast.Constant(not value)
        case ast.Constant(int(value)):
            yield "off by one", ast.Constant(value + 1)
        case ast.Constant(float(value)):
            yield "another constant", ast.Constant(1000 * value or 1.0)
        case ast.Assign([ast.Name(name)], value) if name in (
            getattr(each, "id", "") for each in ast.walk(value)
        ):
            yield "drop a statement", ast.Pass()
        case ast.With(items, body) if not any(item.optional_vars for item in items):
            yield "drop a statement", ast.If(ast.Constant(True), body, [])
        case ast.Try(body, [], _, [_, *_]):
            yield "forget an undo", ast.If(ast.Constant(True), body, [])
        case ast.If(_, body, [_, *_] as orelse):
            yield "swap branches", _with(node, body=orelse, orelse=body)
        case ast.Return(ast.Call()) if functions and "None" in ast.unparse(functions[-1].returns or node):
            yield "forget a refusal", ast.Return(ast.Constant(None))


def _of_place(owner: Any, field: str, node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """A condition that always holds, or never: what it guards is forgotten; a loop over one; what nothing raises is caught."""
    if field == "ifs" or isinstance(owner, ast.BoolOp):
        yield "drop a condition", ast.Constant(not isinstance(getattr(owner, "op", None), ast.Or))
    if field == "test":
        yield "drop a condition", ast.Constant(True)
        last = owner.body if isinstance(owner, ast.IfExp) else owner.body[-1]
        forgotten = (
            "forget a guard" if isinstance(last, ast.Raise) else "forget a refusal" if _refuses(last) else ""
        )
        yield forgotten or "never true", ast.Constant(False)
    if field == "iter":
        yield "first alone", _Filled({"A": node}).visit(ast.parse("tuple(A)[:1]", mode="eval").body)
    if field == "type" and isinstance(owner, ast.ExceptHandler):
        yield "another exception", ast.Name("ArithmeticError", ast.Load())


def _refuses(node: Any) -> bool:
    """Tell whether a refusal is given, or its reason: words."""
    while isinstance(node, ast.Return | ast.Expr | ast.Yield):
        node = node.value
    words = isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    return (
        words
        or isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Call) and ast.unparse(node.func) == "Refusal")
    )


def _parsed() -> dict[type[ast.AST], list[tuple[str, ast.AST, ast.AST]]]:
    """The rules, by the type of node that they apply to: a call of `A` that stands alone is a statement."""
    rules = collections.defaultdict(list)
    for line in RULES.strip().splitlines():
        operator, code = line.split(": ", 1)
        old, new = (ast.parse(f"async def f(): {side}").body[0].body[0] for side in code.split(" -> "))
        if isinstance(old, ast.Expr) and not isinstance(new, ast.Pass):
            old, new = old.value, new.value
        rules[type(old)].append((operator, old, new))
    return rules


def _matches(pattern: Any, node: Any, found: dict[str, Any]) -> bool:
    if isinstance(pattern, ast.Name) and len(pattern.id) == 1:
        return isinstance(found.setdefault(pattern.id, node), ast.expr)
    if isinstance(pattern, list):
        pairs = zip(pattern, node, strict=False)
        return len(pattern) == len(node) and all(_matches(one, other, found) for one, other in pairs)
    if not isinstance(pattern, ast.AST):
        return pattern in (node, "x")  # any attribute
    fields = (each for each in pattern._fields if each != "type_comment")
    return type(pattern) is type(node) and all(
        _matches(getattr(pattern, each), getattr(node, each), found) for each in fields
    )


class _Filled(ast.NodeTransformer):
    """The code of a rule with what its letters stand for."""

    def __init__(self, found: dict[str, ast.AST]) -> None:
        self._found = found

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._found.get(node.id, node)


_RULES = _parsed()


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    vars(changed).update(fields)
    return changed


def _lines(node: Any) -> range:
    """The lines of an expression or a statement; of one that has others within it those before them."""
    body = getattr(node, "body", None)
    return range(
        node.lineno, max(node.lineno, body[0].lineno - 1 if isinstance(body, list) else node.end_lineno) + 1
    )


@functools.lru_cache(maxsize=2)
def _digest(node: ast.AST) -> str:
    return hashlib.sha256(ast.dump(node).encode()).hexdigest()[:12]
