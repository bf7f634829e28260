"""A failing case as a script of its own, which needs torch, fxopt and the package of the model alone."""

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

TEMPLATE = '''\
r"""{{ case }}

{{ reason }}

It needs torch, fxopt and {{ package }} alone, and ends with 1 as long as this is so.{{ note }}
"""

import copy
import sys
{%- if verify %}
import warnings
{%- endif %}

import torch

import fxopt
{% if local %}
sys.path.insert(0, ".")  # the zoo finds its models and passes from here
{%- endif %}
{%- for line in imports %}
{{ line }}
{%- endfor %}

PASSES = [{{ passes }}]
{%- if verify %}
warnings.simplefilter("error", fxopt.VerificationWarning)
{%- endif %}

{{ model }}

generator = torch.Generator().manual_seed(0)
inputs = {
{%- for name, value in inputs.items() %}
    {{ "%r: %s" % (name, value) }},
{%- endfor %}
}

{%- if dims %}
dims = {
{%- for name, value in dims.items() %}
    {{ "%r: %s" % (name, value) }},
{%- endfor %}
}
names = {{ shapes }}
shapes = {name: {dim: dims[each] for dim, each in free.items()} for name, free in names.items()}
{%- endif %}


def prepared(dtype):
    """The model in a dtype, its inputs, its graph, and the graph after the passes."""
    own = copy.deepcopy(model).to({{ device }}, dtype)
    given = {n: v.to({{ device }}, dtype if v.is_floating_point() else None) for n, v in inputs.items()}
    with torch.no_grad():
{%- if dynamic %}
        graph = fxopt.symbolic_trace(own, list(given))
{%- else %}
        graph = fxopt.trace(own, kwargs=given{{ ", dynamic_shapes=shapes" if dims }})
{%- endif %}
    changed = copy.deepcopy(graph)
    for each in PASSES:
        changed = each(changed{{ ", verify=True" if verify }})
    return own, given, graph, changed


own, given, graph, changed = prepared({{ dtype }})
{{ ending }}
'''

JUDGED = """\
wide, _, wide_graph, wide_changed = prepared(torch.float64)
oracle = Oracle(own, kwargs=given, float64=wide, captured=graph, floor={floor})
verdict = oracle.judge(changed, wide_changed)
print(verdict)
if not verdict.grade.passes:
    print(oracle.first_divergence(graph, changed, (wide_graph, wide_changed)) or oracle.parting_place(own, graph))
    wide_inputs = {{n: v.double() if v.is_floating_point() else v for n, v in given.items()}}
    if small := minified(wide_graph, PASSES, kwargs=wide_inputs):
        print("The smallest part of the graph on which it is wrong:", small[0].code)
sys.exit(not verdict.grade.passes)"""

FORM = """\
oracle = Oracle(own, kwargs=given, captured=graph)
fault = oracle.fault(oracle.observe(changed))
for expected, actual in zip(oracle.expected, oracle.observe(changed)):
    for (path, one), (_, other) in zip(leaves(expected.output), leaves(actual.output)):
        if isinstance(one, torch.Tensor) and one.is_floating_point() and one.shape == other.shape:
            cosine = torch.cosine_similarity(one.double().flatten(), other.double().flatten(), 0).item()
            if not cosine >= 0.99:
                fault = fault or f"the cosine of {path} with the original is {cosine:.4f}"
print(fault or "right")
sys.exit(bool(fault))"""

UNDONE = """\
print(assert_round_trip(graph, fxopt.undo(changed, len(fxopt.history(changed)))), "values are as they were")"""

ENDINGS = {
    Check.PARITY: JUDGED.format(floor=FLOOR),
    Check.EQUIVALENCE: JUDGED.format(floor=FLOOR),
    Check.ACCURACY: FORM,
    Check.ROUND_TRIP: UNDONE,
}
"""The condition that has to hold, by check; others are about more than one model and its graph, and have no script."""

NEEDED = {
    Check.PARITY: ["Oracle", "minified"],
    Check.EQUIVALENCE: ["Oracle", "minified"],
    Check.ACCURACY: ["Oracle", "leaves"],
    Check.ROUND_TRIP: ["assert_round_trip"],
}


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
    return environment.from_string(TEMPLATE).render(
        case=case.id,
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
        ending=ENDINGS[case.check],
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
