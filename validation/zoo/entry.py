"""An entry of the zoo as validated data: a model, its weights and inputs, and its expected results."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import importlib.util
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field, NonNegativeInt, PositiveFloat

from fxopt.importing import imported

from ..records import FAILING, Case, Check, Outcome, Record

Symbol = Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")]
Reason = Annotated[str, Field(min_length=1)]


class Strict(pydantic.BaseModel):
    """Data that accepts only the declared fields."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Weights(Strict):
    """The weights of a model: random under a seed, or pretrained."""

    seed: int = 0
    """The seed of random weights."""
    pretrained: str | None = None
    """A local folder, or a model of the hub."""
    revision: str | None = None
    """The revision of a model of the hub."""

    @pydantic.model_validator(mode="after")
    def _fixed(self) -> Weights:
        if self.pretrained and not self.revision and not Path(self.pretrained).is_dir():
            raise ValueError(
                f"{self.pretrained} is no folder, and a model of the hub needs a `revision`: it may change"
            )
        return self


class Input(Strict):
    """One tensor that the forward takes: normal noise unless the entry says otherwise."""

    shape: tuple[Annotated[int, Field(gt=0, strict=True)], ...]
    """The sizes, batch first."""
    integers: tuple[int, int] | None = None
    """The half-open range `[low, high)` of token or class numbers."""
    padding: bool = False
    """A mask of ones, in which every row but the first ends with zeros."""

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


class KnownFailure(Strict):
    """Cases that fail, and why that is accepted. If they pass, that is a failure too: the entry is outdated."""

    check: Check
    """The check that fails."""
    pipeline: str = ""
    """Names of passes joined by `+`, a named pipeline, or a pattern such as `*Fuse*`; empty before any pass."""
    device: str | None = None
    """The device; every one if it is not given."""
    reason: Reason
    """The reason to accept the failure."""

    def covers(self, case: Case) -> bool:
        """True if `case` is one of those that fail."""
        same = self.check == case.check and self.device in (None, case.device)
        return same and fnmatch.fnmatchcase("+".join(case.pipeline), self.pipeline)


class Tolerance(Strict):
    """An accepted error of a pipeline in a model, larger than the limit for exact passes, or than its passes state."""

    pipeline: str
    """The pipeline, as in `known_failures`."""
    relative_error: PositiveFloat
    """The error, relative to the largest value of a tensor; of passes that change the outputs, to the norm of an output."""
    reason: Reason
    """The reason to accept the error."""


class Entry(Strict):
    """One model of the zoo. `given` is True for entries that a person wrote, False for those of a sweep."""

    given: ClassVar[bool] = True
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._]*(-[a-z0-9._]+)*$")]
    """The name of the model in cases and reports."""
    model: str
    """A class of transformers, or the dotted path of a callable that returns a `torch.nn.Module`."""
    requires: Annotated[str, Field(min_length=1)] | None = None
    """A package that only this model needs: the model is left out, with a line, where the package is not installed."""
    config: dict[str, Any] = {}
    """The differences from the defaults of the config class, or the keyword arguments of the callable."""
    weights: Weights = Weights()
    """`{seed: 0}`, or `{pretrained: FOLDER}`, or `{pretrained: ID, revision: REVISION}` of the hub."""
    inputs: Annotated[dict[str, Input], Field(min_length=1)]
    """The inputs of the forward by their names."""
    sizes: Literal["dynamic", "fixed"] = "dynamic"
    """`dynamic` frees batch and length of a model of transformers (`fxopt.symbolic_trace`); `fixed` keeps those of the inputs."""
    dynamic_shapes: dict[str, Annotated[dict[NonNegativeInt, Symbol], Field(min_length=1)]] = {}
    """The free dimensions of each input, in the place of `sizes`: `{input_ids: {0: batch, 1: length}}`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of the model."""
    tags: tuple[str, ...] = ()
    """Words by which `--tag` chooses models."""
    large: bool = False
    """Leave out pairs of passes, and what people do with the graph of a single pass: a small model of the same kind has both."""
    timeout: PositiveFloat = 300.0
    """The seconds that a case may take."""
    sites: dict[str, int | None] = {}
    """The recorded sites of each pass: `fxopt zoo sites` writes them into a file beside the zoo."""
    pipelines: dict[str, tuple[str, ...]] = {}
    """The named pipelines of the file, for all models."""
    known_failures: tuple[KnownFailure, ...] = ()
    """Failures that are accepted."""
    tolerances: tuple[Tolerance, ...] = ()
    """Errors that are accepted."""

    @property
    def sizes_are_free(self) -> bool:
        """True if the graph must accept other sizes than those of the inputs."""
        return bool(self.dynamic_shapes) or self.sizes == "dynamic"

    @property
    def lacks(self) -> str:
        """The package that the model requires and that is not installed; empty if there is none."""
        package = self.requires or ""
        return package if package and not importlib.util.find_spec(package.partition(".")[0]) else ""

    def tolerance(self, pipeline: tuple[str, ...]) -> float:
        """The accepted error of a pipeline; usually 0."""
        name = "+".join(pipeline)
        return max((each.relative_error for each in self.tolerances if each.pipeline == name), default=0.0)

    @pydantic.model_validator(mode="after")
    def _dimensions(self) -> Entry:
        """Check that dynamic dimensions exist in inputs, and that no two symbols have the same size."""
        if self.dynamic_shapes and "sizes" in self.model_fields_set:
            raise ValueError("give `sizes` or `dynamic_shapes`, not both")
        sizes: dict[str, int] = {}
        for name, free in self.dynamic_shapes.items():
            shape = self.inputs[name].shape if name in self.inputs else ()
            for dim, symbol in free.items():
                here = f"dynamic_shapes.{name}.{dim}"
                if dim >= len(shape):
                    raise ValueError(f"{here}: no input has such a dimension")
                if sizes.setdefault(symbol, shape[dim]) != shape[dim]:
                    raise ValueError(f"{here}: {symbol} is {shape[dim]} here, and {sizes[symbol]} elsewhere")
        if len(set(sizes.values())) < len(sizes):
            text = "give them different sizes, or a pass that takes one for the other is not seen"
            raise ValueError(f"dynamic_shapes: of {', '.join(sizes)}, two have one size: {text}")
        return self


class ZooFile(Strict):
    """A zoo file."""

    passes: tuple[str, ...] = ()
    """The paths of passes beside those that are installed."""
    pipelines: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")], Annotated[tuple[str, ...], Field(min_length=1)]
    ] = {}
    """Pipelines by their names, each a list of passes."""
    order: tuple[str, ...] = ()
    """The order of passes in the pipelines `all` and `exact`; others come last, sorted."""
    models: Annotated[tuple[Entry, ...], Field(min_length=1)]
    """The models."""


def factory(entry: Entry) -> Callable[..., Any]:
    """Import the callable that `entry.model` names. Raises `ValueError` if there is none."""
    return _imported(entry.model)


@functools.cache
def _imported(path: str) -> Callable[..., Any]:
    module_name, _, name = path.rpartition(".")
    module_name = module_name or "transformers"
    found = getattr(imported(module_name, ValueError), name, None)
    if not callable(found):
        raise ValueError(f"{module_name} has no class or function {name!r}")
    return found  # type: ignore[no-any-return]


def judged(failures: Collection[KnownFailure], record: Record) -> Record:
    """Adapt a record to the known failures of its model."""
    known = [failure for failure in failures if failure.covers(record.case)]
    if not known or record.outcome is Outcome.SKIP:
        return record
    if record.outcome not in FAILING:
        text = f"the zoo file expects a failure ({known[0].reason}), but there was none: take it out of known_failures"
        return dataclasses.replace(record, outcome=Outcome.FAIL, reason=text)
    if record.outcome not in (Outcome.FAIL, Outcome.ERROR):  # no hang and no crash is excused
        return record
    text = f"{known[0].reason} ({record.outcome}: {record.reason})"
    return dataclasses.replace(record, outcome=Outcome.EXPECTED, reason=text)
