"""An entry of the zoo, as checked data: a model, its weights and inputs, and what is expected of it."""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import functools
import importlib
import importlib.util
from collections.abc import Callable, Collection
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from fxopt.importing import imported

from ..records import FAILING, Case, Check, Outcome, Record

Symbol = Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")]
Dtype = Literal["float32", "bfloat16", "float16"]
Reason = Annotated[str, Field(min_length=1)]


class Strict(pydantic.BaseModel):
    """Data with the fields that are named, and no others."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class RandomWeights(Strict):
    """Weights as the model initialises them under a seed."""

    source: Literal["random"]
    seed: int = 0


class PretrainedWeights(Strict):
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


class TrainedWeights(Strict):
    """Weights trained in the run, on real data that comes with a package."""

    source: Literal["trained"]
    task: Literal["digits"]
    seed: int = 0


class Input(Strict):
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


class Limits(Strict):
    """The smallest and the largest size of a free dimension, as of `torch.export.Dim`."""

    min: PositiveInt | None = None
    max: PositiveInt | None = None

    @pydantic.model_validator(mode="after")
    def _free(self) -> Limits:
        if self.min and self.max and self.min >= self.max:
            raise ValueError(f"`max` is to be larger than `min`, and {self.min}..{self.max} is no free size")
        return self


class KnownFailure(Strict):
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


class Tolerance(Strict):
    """An error that a pipeline may make in a model: one that is too large for a right rewrite, or than its passes state.

    `relative_error` is relative to the largest value of a tensor, and of a pipeline that does not preserve the computation
    to the norm of an output; `pipeline` is written as in `KnownFailure`. From `expires` on, it counts again.
    """

    pipeline: str
    relative_error: PositiveFloat
    reason: Reason
    expires: datetime.date | None = None


class Entry(Strict):
    """One model of the zoo.

    `model` is a class of transformers, or the dotted path of anything that returns an `nn.Module`; `config`
    overrides the defaults of its config class, or is the keyword arguments of the callable. `sizes` says
    whether the graph is captured for all sizes (`fxopt.symbolic_trace`, which makes its own example inputs)
    or for those of the inputs (`fxopt.trace`). In its place, `dynamic_shapes` names the dimensions of inputs that are
    free, `{input_ids: {0: batch, 1: length}}`: what has one name has one size, and `dims` may limit it. `dtypes` are those it is validated in, the first also timed.
    `engines` are timed in the same rounds where they are installed: to export a model for onnxruntime takes five to ten
    seconds, and to compile it by torch.compile up to a minute.
    With a `large` model neither pairs of passes are tried nor what people do with a graph after each single pass: both are seen on
    a small model of the same kind.
    `requires` is a package that is installed only for this model: where it is not there, the model is left out, and where it
    cannot be imported, its cases are skipped, with the reason. `sites` comes from the file of the recorded sites: every pass, in the order of the
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
    dynamic_shapes: dict[str, Annotated[dict[NonNegativeInt, Symbol], Field(min_length=1)]] = {}
    dims: dict[str, Limits] = {}
    dtypes: Annotated[tuple[Dtype, ...], Field(min_length=1)] = ("float32",)
    engines: tuple[Literal["onnxruntime", "torch.compile"], ...] = ("onnxruntime",)  # on the CPU
    tags: tuple[str, ...] = ()
    large: bool = False
    timeout: PositiveFloat = 300.0  # seconds a case may take
    memory: PositiveFloat | None = None  # GB that a case may need; else reckoned from the weights
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
            (
                t.relative_error
                for t in self.tolerances
                if t.pipeline == name and (t.expires is None or today < t.expires)
            ),
            default=0.0,
        )


class ZooFile(Strict):
    """A zoo file: passes, pipelines and models."""

    passes: tuple[Any, ...] = ()  # beside those that are installed; `passes_of` reads them
    pipelines: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")], Annotated[tuple[Any, ...], Field(min_length=1)]
    ] = {}
    order: tuple[str, ...] = ()  # of the full pipelines; passes that are not named come last, sorted
    models: Annotated[tuple[Entry, ...], Field(min_length=1)]


def factory(entry: Entry) -> Callable[..., Any]:
    """Import what `entry.model` names. Raises `ValueError` when there is no such thing."""
    return _imported(entry.model)


@functools.cache
def _imported(path: str) -> Callable[..., Any]:
    module_name, _, name = path.rpartition(".")
    module_name = module_name or "transformers"
    found = getattr(imported(module_name, ValueError), name, None)
    if not callable(found):
        raise ValueError(f"{module_name} has no class or function {name!r}")
    return found  # type: ignore[no-any-return]


def is_installed(package: str) -> bool:
    """Tell whether a package is there, without importing it."""
    return importlib.util.find_spec(package.partition(".")[0]) is not None


@functools.cache  # of a package that failed, parts stay loaded: a second import fails in another way
def why_missing(package: str) -> str:
    """Why an optional package cannot be imported; empty where it can."""
    try:
        importlib.import_module(package)
    except Exception as error:  # not only ImportError: a torchvision for another torch raises a RuntimeError
        return f"{package} cannot be imported: {type(error).__name__}: {error}"
    return ""


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
