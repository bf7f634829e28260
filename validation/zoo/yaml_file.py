"""YAML as data with lines: what is read, and a message for a place in it. What would take for ever to read is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, where it is: ten times as fast
DEEPEST = 32


class YamlError(ValueError):
    """A file cannot be read, or is no YAML: the message names file and line."""


def read(path: Path) -> tuple[yaml.Node | None, Any]:
    """The file as nodes, which know their lines, and as data. Raises `YamlError`."""
    try:
        text = path.read_text(encoding="utf-8")
        _measure(path, text)
        loader = LOADER(text)
        root = loader.get_single_node()
        return root, None if root is None else loader.construct_document(root)
    except FileNotFoundError as error:
        raise YamlError(f"{path}: no such file; name one, or write model_zoo.yaml") from error
    except (OSError, UnicodeDecodeError) as error:
        raise YamlError(f"{path}: cannot be read: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise YamlError(f"{path}{line}: not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise YamlError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error


def _measure(path: Path, text: str) -> None:
    """Refuse what a few bytes make large or endless: lists and mappings by alias, which may hold themselves, and depth."""
    depth = 0
    for event in yaml.parse(text, Loader=LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            line = event.start_mark.line + 1  # type: ignore[union-attr]
            if event.anchor:
                what = (
                    f"&{event.anchor} names a list or a mapping: only single values may be repeated by name"
                )
                raise YamlError(f"{path}:{line}: {what}")
            if depth > DEEPEST:
                raise YamlError(f"{path}:{line}: nested deeper than {DEEPEST} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def repeated_keys(node: yaml.Node | None, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, str]]:
    """Keys given twice in one mapping: YAML keeps the last and says nothing."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                yield (*where, key.value), "given twice"
            seen.add(key.value)
            yield from repeated_keys(value, (*where, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from repeated_keys(value, (*where, index))


def message(path: Path, root: yaml.Node | None, where: Sequence[Any], what: str) -> str:
    """`model_zoo.yaml:7: bert-base: inputs.input_ids.shape: ...`: file, line, entry, field, what is wrong."""
    node, key_line, field = root, 0 if root is None else root.start_mark.line, []
    entry = ""
    for position, part in enumerate(where):
        if isinstance(node, yaml.MappingNode):
            # of a key given twice the last one counts
            child = next((pair for pair in reversed(node.value) if pair[0].value == str(part)), None)
            if child is None and position < len(where) - 1:
                continue  # the tag that pydantic adds for a union is not in the file
            field.append(str(part))
            if child is None:
                break
            key_line, node = child[0].start_mark.line, child[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            key_line = node.start_mark.line
            if field == ["models"]:
                names = [v.value for k, v in getattr(node, "value", ()) if k.value == "name"]
                entry, field = f"{names[0] if names else f'entry {part + 1}'}: ", []
            else:
                field.append(str(part))
    return f"{path}:{key_line + 1}: {entry}{'.'.join(field) + ': ' if field else ''}{what}"
