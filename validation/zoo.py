"""The zoo: `model_zoo.yaml` as checked data. A mistake in the file is one message with entry, field and line."""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pydantic
import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from . import yaml_file
from .passes import ZooError, name_of
from .records import FAILING, Case, Check, Outcome, Record

Dtype = Literal["float32", "bfloat16", "float16"]
Reason = Annotated[str, Field(min_length=1)]


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class RandomWeights(_Strict):
    """Weights as the model initialises them under a seed."""

    source: Literal["random"]
    seed: int = 0


class PretrainedWeights(_Strict):
    """Weights from a local folder, or from the hub at a fixed revision."""

    source: Literal["pretrained"]
    folder: str | None = None
    hub: str | None = None
    revision: str | None = None

    @pydantic.model_validator(mode="after")
    def _one_place(self) -> PretrainedWeights:
        if (self.folder is None) == (self.hub is None):
            raise ValueError("give either `folder` or `hub`")
        if (self.hub is None) != (self.revision is None):
            raise ValueError("`hub` and `revision` belong together: a hub id alone changes under your feet")
        return self


class TrainedWeights(_Strict):
    """Weights trained in the run, on real data that comes with a package."""

    source: Literal["trained"]
    task: Literal["digits"]
    seed: int = 0


class Input(_Strict):
    """One tensor that the forward takes, batch first: normal noise unless the entry says otherwise.

    `integers` is a half-open range `[low, high)` of token or class numbers; `padding` makes a mask of ones
    in which every row but the first ends with zeros.
    """

    shape: tuple[Annotated[int, Field(gt=0, strict=True)], ...]
    integers: tuple[int, int] | None = None
    padding: bool = False

    @pydantic.model_validator(mode="after")
    def _one_kind(self) -> Input:
        if self.integers and self.padding:
            raise ValueError("give `integers` or `padding`, not both")
        if self.integers and self.integers[0] >= self.integers[1]:
            raise ValueError(f"`integers` is the range [low, high), which {list(self.integers)} leaves empty")
        if self.padding and len(self.shape) != 2:
            raise ValueError(f"a padding mask has the shape [batch, length], not {list(self.shape)}")
        if self.padding and 1 in self.shape:
            raise ValueError(
                f"a padding mask of {list(self.shape)} hides nothing: give two rows and two columns"
            )
        return self


class Limits(_Strict):
    """The smallest and the largest size of a free dimension, as of `torch.export.Dim`."""

    min: PositiveInt | None = None
    max: PositiveInt | None = None


class KnownFailure(_Strict):
    """Cases that fail, and why that is accepted. Passing them is a failure too: the entry is out of date.

    `pipeline` is the names of passes joined by "+", or a named pipeline, or a pattern of these such as `*Fuse*`; it is
    empty before any pass. `outcome` is the failure that is accepted: `fail` or `error` where it is not given, which
    excuses no hang and no crash. `stage` is where it fails, and `message` a part of what it says. From `expires`
    on, the failure is one again.
    """

    check: Check
    pipeline: str = ""
    device: str | None = None
    outcome: Outcome | None = None
    stage: str | None = None
    message: str | None = None
    expires: datetime.date | None = None
    reason: Reason

    def covers(self, case: Case) -> bool:
        """True if `case` is one of those that fail."""
        same = self.check == case.check and self.device in (None, case.device)
        return same and fnmatch.fnmatchcase("+".join(case.pipeline), self.pipeline)

    def objection(self, outcome: Outcome, stage: str, message: str) -> str:
        """Why this does not accept how a case ended; empty where it does."""
        accepted = [self.outcome] if self.outcome else [Outcome.FAIL, Outcome.ERROR]
        if self.expires and datetime.date.today() >= self.expires:
            return f"expired on {self.expires}"
        if outcome not in accepted:
            return f"not for {outcome}"
        if self.stage not in (None, stage):
            return f"for stage {self.stage}"
        return "" if self.message is None or self.message in message else f"for {self.message!r}"


def judged(failures: Collection[KnownFailure], record: Record) -> Record:
    """A record in the light of the failures that are known of its model."""
    known = [failure for failure in failures if failure.covers(record.case)]
    if not known or record.outcome is Outcome.SKIP:
        return record
    if record.outcome not in FAILING:
        text = f"model_zoo.yaml expects a failure ({known[0].reason}), but there was none: take it out of known_failures"
        return dataclasses.replace(record, outcome=Outcome.FAIL, reason=text)
    objections = [failure.objection(record.outcome, record.stage, record.reason) for failure in known]
    if "" in objections:
        text = f"{known[objections.index('')].reason} ({record.outcome}: {record.reason})"
        return dataclasses.replace(record, outcome=Outcome.EXPECTED, reason=text)
    text = f"{record.reason} (the known failure of model_zoo.yaml is {'; '.join(objections)})"
    return dataclasses.replace(record, reason=text)


class Tolerance(_Strict):
    """An error that a pipeline may make in a model although it is too large for a right rewrite: how large, why, and
    on which day it expires; from then on it counts again.

    `relative_error` is relative to the largest value of a tensor; `pipeline` is written as in `KnownFailure`.
    """

    pipeline: str
    relative_error: PositiveFloat
    reason: Reason
    expires: datetime.date


class Entry(_Strict):
    """One model of the zoo.

    `model` is a class of transformers, or the dotted path of anything that returns an `nn.Module`; `config`
    overrides the defaults of its config class, or is the keyword arguments of the callable. `sizes` says
    whether the graph is captured for all sizes (`fxopt.symbolic_trace`, which makes its own example inputs)
    or for those of the inputs (`fxopt.trace`). In its place, `dynamic_shapes` names the dimensions of inputs that are
    free, `{input_ids: {0: batch, 1: length}}`: what has one name has one size, and `dims` may limit it. `dtypes` are those it is validated in, the first also timed.
    `engines` are timed in the same rounds where they are installed: to export a model for onnxruntime takes five to ten
    seconds, and to compile it by torch.compile up to a minute.
    `requires` is a package that is installed only for this model: where it cannot be imported, the cases are
    skipped, with the reason. `sites` comes from the file of the recorded sites: every pass, in the order of the
    full pipelines, with its number, or `None`. `pipelines` are those that the file names for all models. `given` tells those that a person wrote from those of a sweep.
    """

    given: ClassVar[bool] = True
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._]*(-[a-z0-9._]+)*$")]
    model: str
    requires: Annotated[str, Field(min_length=1)] | None = None
    config: dict[str, Any] = {}
    weights: Annotated[RandomWeights | PretrainedWeights | TrainedWeights, Field(discriminator="source")] = (
        RandomWeights(source="random")
    )
    inputs: Annotated[dict[str, Input], Field(min_length=1)]
    sizes: Literal["dynamic", "fixed"] = "dynamic"
    dynamic_shapes: dict[str, dict[NonNegativeInt, Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")]]] = {}
    dims: dict[str, Limits] = {}
    dtypes: Annotated[tuple[Dtype, ...], Field(min_length=1)] = ("float32",)
    engines: tuple[Literal["onnxruntime", "torch.compile"], ...] = (
        "onnxruntime",
    )  # timed beside, on the CPU
    tags: tuple[str, ...] = ()
    timeout: PositiveFloat = 300.0  # seconds a case may take
    sites: dict[str, int | None] = {}
    pipelines: dict[str, tuple[str, ...]] = {}
    known_failures: tuple[KnownFailure, ...] = ()
    tolerances: tuple[Tolerance, ...] = ()

    @property
    def sizes_are_free(self) -> bool:
        """True where the graph has to take other sizes than those of the inputs."""
        return bool(self.dynamic_shapes) or self.sizes == "dynamic"

    def tolerance(self, pipeline: tuple[str, ...]) -> float:
        """The error that is accepted of a pipeline today; 0 for most."""
        today, name = datetime.date.today(), "+".join(pipeline)
        return max(
            (t.relative_error for t in self.tolerances if t.pipeline == name and today < t.expires),
            default=0.0,
        )


class _File(_Strict):
    passes: tuple[Any, ...] = ()  # beside those that are installed; `passes_of` reads them
    pipelines: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")], Annotated[tuple[Any, ...], Field(min_length=1)]
    ] = {}
    order: tuple[str, ...] = ()  # of the full pipelines; passes that are not named come last, sorted
    models: Annotated[tuple[Entry, ...], Field(min_length=1)]


def load_zoo(path: Path, passes: Collection[str]) -> list[Entry]:
    """The entries of the zoo file at `path`, checked against its schema, the code, and the names of passes.

    Raises `ZooError` when the file, or that of the recorded sites, cannot be read or says something wrong.
    """
    try:
        root, data = yaml_file.read(path)
    except yaml_file.YamlError as error:
        raise ZooError(str(error)) from error
    mistakes = list(yaml_file.repeated_keys(root))
    if not mistakes:
        try:
            file = _File.model_validate(data)
        except pydantic.ValidationError as error:
            places = [e["loc"] for e in error.errors()]
            mistakes = [
                (e["loc"], e["msg"].removeprefix("Value error, "))
                for e in error.errors()
                # a list whose items are wrong is also too short for pydantic
                if not any(place != e["loc"] and place[: len(e["loc"])] == e["loc"] for place in places)
            ]
        else:
            mistakes = [*_contradictions(file, passes)]
    if mistakes:
        raise ZooError("\n".join(yaml_file.message(path, root, where, what) for where, what in mistakes))
    order, recorded = dict.fromkeys([*file.order, *sorted(passes)]), recorded_sites(path)
    named = {name: tuple(map(name_of, said)) for name, said in file.pipelines.items()}
    return [
        entry.model_copy(
            update={
                "sites": {name: recorded.get(entry.name, {}).get(name) for name in order},
                "pipelines": named,
            }
        )
        for entry in file.models
    ]


def sites_file(zoo: Path) -> Path:
    """The file beside a zoo file that records how many sites each pass rewrites alone in each model."""
    return zoo.with_suffix(".sites.yaml")


def recorded_sites(zoo: Path) -> dict[str, dict[str, int]]:
    """The sites that are recorded for a zoo file, by model and pass; none where there is no such file."""
    form = pydantic.TypeAdapter(dict[str, dict[str, Annotated[int, Field(ge=0, strict=True)]]])
    try:
        return form.validate_python(yaml_file.read(file)[1]) if (file := sites_file(zoo)).exists() else {}
    except ValueError as error:
        text = f"not what `fxopt zoo sites` writes: delete it, and record anew ({error})"
        raise ZooError(f"{file}: {' '.join(text.split())}") from error


def factory(entry: Entry) -> Callable[..., Any]:
    """Import what `entry.model` names. Raises `ValueError` when there is no such thing."""
    return _imported(entry.model)


@functools.cache
def _imported(path: str) -> Callable[..., Any]:
    module_name, _, name = path.rpartition(".")
    module_name = module_name or "transformers"
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{module_name} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"{module_name} has no class or function {name!r}")
    return found  # type: ignore[no-any-return]


@functools.cache  # of a package that failed, parts stay loaded: a second import fails in another way
def why_missing(package: str) -> str:
    """Why an optional package cannot be imported; empty where it can."""
    try:
        importlib.import_module(package)
    except Exception as error:  # not only ImportError: a torchvision for another torch raises a RuntimeError
        return f"{package} cannot be imported: {type(error).__name__}: {error}"
    return ""


def _contradictions(file: _File, passes: Collection[str]) -> Iterator[tuple[Any, str]]:
    """Find what the schema alone cannot tell: names that stand for nothing, or for two things."""
    taken = {*passes, "all", "exact"}
    for name in taken & {*file.pipelines}:
        yield ("pipelines", name), "a pass, or a pipeline that is always there, has this name"
    for index, name in enumerate(file.order):
        if name not in passes:
            yield ("order", index), f"no such pass: {name!r}; there are {', '.join(sorted(passes))}"
    seen: set[str] = set()
    for index, entry in enumerate(file.models):
        here: tuple[Any, ...] = ("models", index)
        if entry.name in seen:
            yield (*here, "name"), "another entry has the same name"
        seen.add(entry.name)
        if "sites" in entry.model_fields_set:
            yield (*here, "sites"), "not written by hand: `fxopt zoo sites` counts and records them"
        if "pipelines" in entry.model_fields_set:
            yield (*here, "pipelines"), "they are for all models: name them beside `models`"
        pipelines = {
            **{("known_failures", number): each.pipeline for number, each in enumerate(entry.known_failures)},
            **{("tolerances", number): each.pipeline for number, each in enumerate(entry.tolerances)},
        }
        for place, pipeline in pipelines.items():
            for name in pipeline.split("+") if pipeline else ():
                if name not in {*taken, *file.pipelines} and not set(name) & set("*?["):
                    where = (*here, *place, "pipeline")
                    yield where, f"no such pass: {name!r}; there are {', '.join(sorted(passes))}"
        for field, what in _wrong_dimensions(entry):
            yield (*here, *field), what
        if entry.requires:
            continue  # importing what only this entry needs takes seconds: its mistakes show when it is run
        try:
            function = factory(entry)
        except ValueError as error:
            yield (*here, "model"), str(error)
            continue
        for field, what in _mismatches(entry, function):
            yield (*here, *field), what


def _wrong_dimensions(entry: Entry) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Free dimensions that the inputs do not have, or not in a size that is allowed."""
    if entry.dynamic_shapes and "sizes" in entry.model_fields_set:
        yield ("sizes",), "give `sizes` or `dynamic_shapes`, not both"
    seen: dict[str, int] = {}
    for name, free in entry.dynamic_shapes.items():
        here = ("dynamic_shapes", name)
        if name not in entry.inputs:
            yield here, f"no such input; there are {', '.join(entry.inputs)}"
            continue
        shape = entry.inputs[name].shape
        for dim, symbol in free.items():
            if dim >= len(shape):
                yield (*here, dim), f"{name} has no dimension {dim}: its shape is {list(shape)}"
                continue
            size, limits = shape[dim], entry.dims.get(symbol, Limits())
            if seen.setdefault(symbol, size) != size:
                yield (*here, dim), f"{symbol} is {size} here, and {seen[symbol]} elsewhere"
            if not (limits.min or 0) <= size <= (limits.max or size):
                yield (
                    (*here, dim),
                    f"{symbol} is {size}, and dims allows {limits.min or ''}..{limits.max or ''}",
                )
    for symbol in entry.dims:
        if symbol not in seen:
            yield ("dims", symbol), "no such dimension in dynamic_shapes"


def _mismatches(entry: Entry, function: Callable[..., Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Config overrides and inputs that the model does not know; transformers would ignore a wrong override."""
    config_class = getattr(function, "config_class", None)
    if config_class is not None:
        yield from _unknown_options(entry.config, _defaults(config_class), ("config",))
    else:
        try:
            inspect.signature(function).bind(**entry.config)
        except (TypeError, ValueError) as error:
            yield ("config",), f"{entry.model} does not take these arguments: {error}"
        if entry.weights.source == "pretrained":
            yield ("weights",), "only classes of transformers have pretrained weights"
        if entry.sizes == "dynamic" and not entry.dynamic_shapes:
            text = "only classes of transformers are captured for all sizes: say `sizes: fixed`, or give `dynamic_shapes`"
            yield ("sizes",), text
    if isinstance(function, type) and issubclass(function, torch.nn.Module):
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
