"""Reads YAML as data, and makes messages for places in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fxopt.errors import FxoptError


class ZooError(FxoptError):
    """The zoo file has mistakes; the message names file, entry and field, one line a mistake."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # libyaml, where it is: ten times as fast
    """Refuses a key that is given twice: YAML would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)  # type: ignore[no-any-return]


def read(path: Path) -> Any:
    """The data of a file. Raises `ZooError`."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError as error:
        raise ZooError(f"{path}: no such file; name one, or write model_zoo.yaml") from error
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ZooError(f"{path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or error
        raise ZooError(f"{path}{line}: not valid YAML: {' '.join(str(what).split())}") from error


def mistakes(path: Path, data: Any, found: Sequence[tuple[Sequence[Any], str]]) -> ZooError:
    """Make an error with a line for each mistake: `model_zoo.yaml: bert-base: inputs.input_ids.shape: ...`."""
    return ZooError("\n".join(_line(path, data, *each) for each in found))


def _line(path: Path, data: Any, where: Sequence[Any], what: str) -> str:
    entry = ""
    if where[:1] == ("models",) and len(where) > 1:
        said = data["models"][where[1]]
        name = said.get("name") if isinstance(said, dict) else None
        entry, where = f"{name or f'entry {where[1] + 1}'}: ", where[2:]
    return f"{path}: {entry}{'.'.join(map(str, where))}{': ' if where else ''}{what}"
