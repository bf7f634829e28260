"""A fault: a piece of the code, and what stands there instead."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

GUARDED = (
    *(f"obstacles/{name}.py" for name in ("batch_norm", "foldable", "parameter_constants", "precision_plan")),
    *(f"obstacles/{name}.py" for name in ("rounding", "scaling", "slicing")),
    *("passes/*.py", "graph_index.py", "memory.py"),
)
"""Where every guard must be needed by a test."""

SITE, BEHIND = "site", "behind"
"""Where a wrong rewrite goes wrong: in what stands at the site, or only in what follows a site that is right."""


class FaultError(Exception):
    """A fault does not fit the code any more."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One wrong change of the code.

    Attributes:
        name: what goes wrong, in a few words.
        file: relative to the package.
        old: a piece of the source, which must occur exactly once.
        new: what takes its place.
        rewrites: for a fault by which a pass changes the outputs of a forward, where it does so: `SITE`, or
            `BEHIND` where the site computes the same but for its rounding or its memory, and what follows makes
            more of that. Empty for all others: about undo, names, metadata, gradients, refusing too much.
        package: `fxopt`, or `validation`.
        seen_by: a test in tests/validation that sees a fault in that package.
    """

    name: str
    file: str
    old: str
    new: str
    rewrites: str = ""
    package: str = "fxopt"
    seen_by: str = ""

    @property
    def path(self) -> str:
        """The file relative to the repository."""
        return f"{self.package}/{self.file}"

    def applied(self, source: str) -> str:
        """`source` with the fault in it."""
        count = source.count(self.old)
        if count != 1:
            raise FaultError(f"{self.name}: {self.old!r} occurs {count} times in {self.path}, not once")
        return source.replace(self.old, self.new)


def guards(root: Path = ROOT) -> Iterator[Fault]:
    """A fault for each guard of the passes: an `if` whose whole body returns or yields a reason in words.

    Reasons may also be joined by `or`; a guard inside such a chain is one with a function of its own.
    """
    package = root / "fxopt"
    for file in sorted(path for pattern in GUARDED for path in package.glob(pattern)):
        source = file.read_text(encoding="utf-8")
        name = file.relative_to(package).as_posix()
        found = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If))
        for node in sorted(found, key=lambda guard: guard.lineno):
            if _gives_reason(node.body):
                yield _without(source, name, node)


def _gives_reason(body: list[ast.stmt]) -> bool:
    last = body[-1]
    if isinstance(last, ast.Return):
        value: ast.expr | None = last.value
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Refusal":
            return True
        text = isinstance(value, ast.JoinedStr) or (
            isinstance(value, ast.Constant) and isinstance(value.value, str) and " " in value.value
        )
        return text or (isinstance(value, ast.BinOp) and isinstance(value.left, ast.JoinedStr))
    return False


def _without(source: str, file: str, guard: ast.If) -> Fault:
    """The guard with a condition that never holds."""
    lines = source.splitlines(keepends=True)
    condition = ast.get_source_segment(source, guard.test)
    assert condition is not None
    start = sum(map(len, lines[: guard.test.lineno - 1])) + guard.test.col_offset
    end = start + len(condition)
    # What is replaced reaches back until it is the only piece of its kind.
    first = guard.lineno - 1
    while source.count(source[sum(map(len, lines[:first])) : end]) != 1:
        first -= 1
    before = source[sum(map(len, lines[:first])) : start]
    name = f"{file}:{guard.lineno}: {' '.join(condition.split())}"
    return Fault(name, file, before + condition, f"{before}False and ({condition})")
