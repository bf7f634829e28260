"""Plants a mutant into this process."""

from __future__ import annotations

import collections
import gc
import types
from collections.abc import Iterable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

from tests.mutation.operators import Mutant, mutants, mutated

ROOT = Path(__file__).resolve().parents[2]


def plant(mutant: Mutant, functions: Iterable[types.FunctionType] = ()) -> None:
    """Let the module be imported with the mutant in it, here and in processes that are started, and exchange functions."""
    path = ROOT / mutant.file
    code = compile(mutated(mutant, path.read_text(encoding="utf-8")), str(path), "exec")
    get_code = SourceFileLoader.get_code
    SourceFileLoader.get_code = lambda self, name: code if self.path == str(path) else get_code(self, name)
    changed = {(each.co_qualname, each.co_firstlineno): each for each in _codes(code)}
    for function in functions:
        new = changed.get((function.__code__.co_qualname, function.__code__.co_firstlineno))
        if new and new != function.__code__:
            function.__code__ = new


def plant_numbered(file: str, number: str) -> None:
    """Plant a mutant of a file."""
    plant(mutants(file, (ROOT / file).read_text(encoding="utf-8"))[int(number)])


def functions_by_file() -> dict[str, list[types.FunctionType]]:
    """All functions that there are now, whatever holds them."""
    gc.unfreeze()
    found = collections.defaultdict(list)
    for each in gc.get_objects():
        if type(each) is types.FunctionType and each.__code__.co_filename.startswith(f"{ROOT}/"):
            found[each.__code__.co_filename[len(f"{ROOT}/") :]].append(each)
    gc.freeze()
    return found


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)
