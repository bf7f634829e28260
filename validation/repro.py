"""A failing case as a script of its own, which needs torch, fxopt and the package of the model alone; `repro.jinja` is its text."""

from __future__ import annotations

import pprint
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jinja2

from fxopt.rewriting.chosen_sites import AtSites
from fxopt.rewriting.transformation import Transformation

from . import build
from .entry import Entry, PretrainedWeights, TrainedWeights, factory
from .records import Case, Check, Record
from .subject import FLOOR

FOLDER = "repro"
"""The folder of the scripts, in a report."""

NEEDED = {
    Check.PARITY: ["Oracle", "minified"],
    Check.EQUIVALENCE: ["Oracle", "minified"],
    Check.ACCURACY: ["Oracle", "leaves"],
    Check.ROUND_TRIP: ["assert_round_trip"],
}
"""The checks that a script can show, and what it needs of `fxopt.testing`; others are about more than a model and its graph."""


def script(
    case: Case, reason: str, entry: Entry, dtype: str, passes: Sequence[Transformation], verify: bool = False
) -> str:
    """The text of the script: it ends with 0 when the case is right; empty where a pass can be imported from nowhere.

    Args:
        case: the case.
        reason: why it fails.
        entry: its model.
        dtype: in which it fails.
        passes: what it takes to fail.
        verify: whether it shows when sites are compared one by one alone.
    """
    parts = [part for each in passes for part in _parts(each)]
    if any("<locals>" in type(part).__qualname__ for part in parts):
        return ""
    module, _, name = entry.model.rpartition(".")
    module = module or "transformers"
    names = {(type(part).__module__, type(part).__qualname__.split(".")[0]) for part in parts}
    names |= {(module, name)} | {("fxopt.testing", name) for name in ("randomise", *NEEDED[case.check])}
    trained = isinstance(entry.weights, TrainedWeights)
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    template = Path(__file__).with_name("repro.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        case=case.id,
        check=str(case.check),
        floor=FLOOR,
        reason=_wrapped(reason),
        package=module.partition(".")[0],
        note="\nThe weights are random here, not trained as in the case." if trained else "",
        verify=verify,
        local=any(source.partition(".")[0] not in ("fxopt", "transformers", "torch") for source, _ in names),
        imports=[
            f"from {source} import {', '.join(sorted(name for other, name in names if other == source))}"
            for source in sorted({source for source, _ in names})
        ],
        passes=", ".join(map(repr, passes)),
        model="\n".join(_model(entry, name)),
        inputs=dict(_inputs(entry)),
        device=repr(case.device),
        dynamic=entry.sizes_are_free and not entry.dynamic_shapes,
        dims=_dims(entry),
        shapes=entry.dynamic_shapes,
        dtype=f"torch.{dtype}",
    )


def _dims(entry: Entry) -> dict[str, str]:
    """The expression of each free dimension that the entry names."""
    made = {}
    for symbol in sorted({symbol for free in entry.dynamic_shapes.values() for symbol in free.values()}):
        limits = entry.dims[symbol].model_dump(exclude_none=True) if symbol in entry.dims else {}
        made[symbol] = (
            f"torch.export.Dim({', '.join([repr(symbol), *(f'{k}={v}' for k, v in limits.items())])})"
        )
    return made


def write(records: Iterable[Record], folder: Path, whole: bool) -> list[Path]:
    """Write the scripts of the cases that failed into a folder, and delete those that are out of date.

    Args:
        records: what came of the cases of a run.
        folder: where the scripts are.
        whole: whether these are all the cases that there are; else the scripts of others stay.
    """
    scripts = {f"{record.case.id}.py": record.repro for record in records}
    for file in folder.glob("*.py"):
        if whole or file.name in scripts:
            file.unlink()
    written = [folder / name for name, text in sorted(scripts.items()) if text]
    for file in written:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(scripts[file.name], encoding="utf-8")
    return written


def _wrapped(text: str) -> str:
    """A text in lines, as a docstring can have it."""
    lines = text.replace('"""', "'''").splitlines()
    return "\n".join(
        textwrap.fill(line, 110, break_long_words=False, break_on_hyphens=False) for line in lines
    )


def _parts(pass_: Transformation) -> Iterator[Transformation]:
    yield pass_
    if isinstance(pass_, AtSites):
        yield pass_.rewrite


def _model(entry: Entry, name: str) -> Iterator[str]:
    """The lines that build the model, as `validation/build.py` does."""
    weights, config = entry.weights, pprint.pformat(entry.config, width=100, sort_dicts=False)
    if isinstance(weights, PretrainedWeights):
        yield f"config = {config}"
        place = weights.folder or weights.hub
        yield f"model = {name}.from_pretrained({place!r}, revision={weights.revision!r}, dtype=torch.float32, **config).eval()"
        return
    yield f"torch.manual_seed({weights.seed})"
    yield f"config = {config}"
    yield (
        f"model = {name}({name}.config_class(**config))"
        if hasattr(factory(entry), "config_class")
        else f"model = {name}(**config)"
    )
    yield f"model = randomise(model, {weights.seed}).float().eval()"


def _inputs(entry: Entry) -> Iterator[tuple[str, str]]:
    """The expression of each input, as `validation/build.py` makes it."""
    made = build.make_inputs(entry)
    for name, spec in entry.inputs.items():
        shape = tuple(spec.shape)
        if spec.integers:
            low, high = spec.integers
            yield name, f"torch.randint({low}, {high}, {shape}, generator=generator)"
        elif spec.padding:
            yield name, f"torch.tensor({made[name].tolist()})"
        else:
            yield name, f"torch.randn({shape}, generator=generator)"
