"""The entries of a zoo, from `model_zoo.yaml` or a sweep. The file becomes validated data; each mistake in it is one message
with entry and field. A sweep has every model of a source, such as the model types of transformers.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import Field
from torch import nn

import fxopt.passes
from fxopt.errors import PassError
from fxopt.rewriting.transformation import Transformation

from . import yaml_file
from .entry import Entry, Input, ZooFile, factory
from .yaml_file import ZooError

Mistake = tuple[tuple[Any, ...], str]
"""A place in a zoo file, and the mistake there."""

_IN_YAML = {
    "missing": "is missing",
    "extra_forbidden": "there is no such key",
    "tuple_type": "give a list",
    **dict.fromkeys(("dict_type", "model_type"), "give keys with values"),
    "too_short": "is empty",
}
"""Messages in terms of the file, by pydantic's error types, whose own texts use Python's types."""


def load_zoo(path: Path, paths: Iterable[str] = ()) -> tuple[list[Entry], dict[str, Transformation]]:
    """The entries of the zoo file at `path`, checked against its schema and the code, and all passes that it may name.

    The passes, by name, are the installed ones, those at `paths`, and those of the file.

    Raises:
        ZooError: if the file, or the file of the recorded sites, cannot be read or has mistakes.
        PassError: if one of `paths` is not a pass.
    """
    passes, data = fxopt.passes.ready(paths), yaml_file.read(path)
    try:
        file = ZooFile.model_validate(data)
    except pydantic.ValidationError as error:
        raise yaml_file.mistakes(path, data, _found(error)) from error
    own, wrong = _own_passes(file, passes, paths)
    if wrong := [*wrong, *_mistakes_in(file, own)]:
        raise yaml_file.mistakes(path, data, wrong)
    order, recorded = dict.fromkeys([*file.order, *own]), recorded_sites(path)
    named = {name: tuple(map(name_of, said)) for name, said in file.pipelines.items()}
    sites = {e.name: {name: recorded.get(e.name, {}).get(name) for name in order} for e in file.models}
    entries = [e.model_copy(update={"sites": sites[e.name], "pipelines": named}) for e in file.models]
    return entries, own


def _found(error: pydantic.ValidationError) -> list[Mistake]:
    # For pydantic, a list with wrong items is also too short.
    own = [each for each in error.errors() if each["type"] != "too_short" or not each["input"]]
    return [(e["loc"], _IN_YAML.get(e["type"], e["msg"].removeprefix("Value error, "))) for e in own]


def _own_passes(
    file: ZooFile, passes: dict[str, Transformation], paths: Iterable[str]
) -> tuple[dict[str, Transformation], list[Mistake]]:
    """Add the passes that a file names by their paths; return all passes, and the mistakes in these names."""
    lists: dict[tuple[str, ...], tuple[str, ...]] = {("passes",): file.passes}
    lists |= {("pipelines", name): said for name, said in file.pipelines.items()}
    paths, wrong = [*paths], list[Mistake]()
    for where, names in lists.items():
        for index, said in enumerate(names):
            try:
                if "." in said:
                    passes = fxopt.passes.ready([*paths, said])
                    paths.append(said)
                elif said not in passes:
                    known = f"there are {', '.join(passes)}, and yours by its path, mypackage.passes.MyPass"
                    raise PassError(f"no such pass: {said!r}; {known}")
            except PassError as error:
                wrong.append(((*where, index), str(error)))
    return passes, wrong


def name_of(said: str) -> str:
    """The name of a pass from its name or path in a zoo file."""
    return said.rpartition(".")[2]


def sites_file(zoo: Path) -> Path:
    """The file next to a zoo file that records how many sites each single pass rewrites in each model."""
    return zoo.with_suffix(".sites.yaml")


def recorded_sites(zoo: Path) -> dict[str, dict[str, int]]:
    """The recorded sites of a zoo file, by model and pass; empty if there is no such file."""
    form = pydantic.TypeAdapter(dict[str, dict[str, Annotated[int, Field(ge=0, strict=True)]]])
    data = yaml_file.read(file) if (file := sites_file(zoo)).exists() else {}
    try:
        return form.validate_python(data)
    except pydantic.ValidationError as error:
        told = yaml_file.mistakes(file, data, _found(error))
        raise ZooError(f"{told}. Delete this file: `fxopt zoo sites` records the sites anew") from error


def _mistakes_in(file: ZooFile, passes: Collection[str]) -> Iterator[Mistake]:
    """Find mistakes that the schema cannot detect: names that mean nothing, or two things."""
    for name in {*passes, "all", "exact"} & {*file.pipelines}:
        yield ("pipelines", name), "a pass, or a pipeline that is always there, has this name"
    for index, name in enumerate(file.order):
        if name not in passes:
            yield ("order", index), f"no such pass: {name!r}; there are {', '.join(passes)}"
    names = [entry.name for entry in file.models]
    for index, entry in enumerate(file.models):
        if entry.name in names[:index]:
            yield ("models", index, "name"), "another entry has the same name"
        for field in {"sites", "pipelines"} & entry.model_fields_set:
            yield ("models", index, field), "not written by hand, and not for one model alone"
        if entry.requires:
            continue  # importing this entry's package takes seconds: mistakes show when the entry runs
        try:
            function = factory(entry)
        except ValueError as error:
            yield ("models", index, "model"), str(error)
            continue
        for where, what in _mismatches(entry, function):
            yield ("models", index, *where), what


def _mismatches(entry: Entry, function: Callable[..., Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Config overrides and inputs that the model does not have; transformers would ignore a wrong override."""
    config_class = getattr(function, "config_class", None)
    if config_class is not None:
        yield from _unknown_options(entry.config, _defaults(config_class), ("config",))
    else:
        try:
            inspect.signature(function).bind(**entry.config)
        except (TypeError, ValueError) as error:
            yield ("config",), f"{entry.model} does not take these arguments: {error}"
        if entry.weights.pretrained:
            yield ("weights",), "only classes of transformers have pretrained weights"
        if entry.sizes == "dynamic" and not entry.dynamic_shapes:
            text = "only classes of transformers are captured for all sizes: say `sizes: fixed`, or give `dynamic_shapes`"
            yield ("sizes",), text
    if isinstance(function, type) and issubclass(function, nn.Module):
        parameters = _parameters(function.forward)
        # The forwards of transformers take any keyword, but name those that are tensors.
        if config_class or not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            known = [name for name in parameters if name != "self"]
            for name in entry.inputs:
                if name not in known:
                    yield ("inputs", name), f"the forward takes no such input; it takes {', '.join(known)}"


@functools.cache
def _defaults(config_class: Callable[[], Any]) -> Any:
    return config_class()


@functools.cache
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _unknown_options(
    overrides: Mapping[str, Any], config: Any, where: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    for name, value in overrides.items():
        if not hasattr(config, name) and not hasattr(config, f"_{name}"):
            yield (*where, name), f"{type(config).__name__} has no option {name!r}"
        elif isinstance(value, dict) and hasattr(getattr(config, name), "to_dict"):
            yield from _unknown_options(value, getattr(config, name), (*where, name))


SOURCES = {"transformers": f"{__package__}.architectures"}
"""The built-in zoos: the name for `--fx-zoo`, and the module that makes the models."""

SOURCE = "source"
"""The fact with the source of the model, in each record of a sweep."""


class Architecture(Entry):
    """One model of a sweep: an entry whose model and inputs a source makes.

    It is not known whether the model runs, or how to capture it. If it does not run, it is skipped. It is captured in the
    first of several ways that works, and refused if none does. If it mixes dtypes, it is judged in its own dtype.
    """

    given: ClassVar[bool] = False
    name: str
    inputs: dict[str, Input] = Field(default={})
    source: str  # the name of the module that makes it, so that workers get it
    peer: bool = False  # run torch.export for comparison

    def make(self) -> Any:
        """The module that makes the model, with `model_types`, `build` and `example_inputs`."""
        return importlib.import_module(self.source)


def architectures(zoo: str, peer: bool = False) -> list[Architecture]:
    """Every model of a built-in zoo, sorted by name. Raises `ZooError` if a package that it requires is missing."""
    try:
        source: Any = importlib.import_module(SOURCES[zoo])
    except ImportError as error:
        raise ZooError(f"{zoo} cannot be swept: {error}") from error
    made = functools.partial(Architecture, source=source.__name__, peer=peer, tags=())
    return [made(name=name, model=name) for name in source.model_types()]
