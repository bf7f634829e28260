"""The inputs of one capture: a placeholder and fakes for each example value, and the requirements on later values."""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any

import sympy
import torch
from torch.export import Dim

from fxopt.capture.capture_internals import ConstantSource, DimDynamic
from fxopt.capture.fakes.dynamic_shapes import (
    dynamic_dimensions,
    expression_of_size,
    is_for_all,
    parts_of,
    symbolic_context,
)
from fxopt.capture.fakes.fake_mode import CaptureFakeMode
from fxopt.capture.fakes.size_constraints import DynamicDimension, DynamicDimensions
from fxopt.capture.nodes.container_values import check_keys
from fxopt.capture.nodes.graph_writer import GraphWriter
from fxopt.capture.nodes.source_location import compares_identity
from fxopt.capture.recording.input_objects import (
    filled,
    has_parts,
    hides_tensors,
    identities,
    is_taken_apart,
    snapshot,
    takes_any_dtype,
)
from fxopt.capture.recording.property_reads import PropertyReads
from fxopt.capture.recording.request import Request
from fxopt.capture.runtime.input_specs import (
    ConstantSpec,
    InputSpec,
    NumberSpec,
    Path,
    StructureSpec,
    TensorSpec,
    describe,
    describe_path,
    layout,
    same_value,
    structure_keys,
)
from fxopt.capture.runtime.size_guards import python_expression
from fxopt.errors import TraceError
from fxopt.objects import entries, is_mutable, key_kind, rebuilt


class ChangedInputError(TraceError):
    """The forward changes an input that was not expected to change."""


@dataclasses.dataclass(eq=False)
class Placeholders:
    """Makes placeholders and fakes; `expected` has the requirements on values, `examples` the real value of each fake."""

    writer: GraphWriter
    fake_mode: CaptureFakeMode
    free: DynamicDimensions
    request: Request
    examples: dict[int, Any]

    def __post_init__(self) -> None:
        self.expected: list[InputSpec] = []
        # Containers that must not change, with the identities of their contents.
        self._fixed: list[tuple[str, Any, list[tuple[Any, int]]]] = []
        self._constants: list[tuple[str, Any, Any]] = []
        # Numbers in objects that may become dynamic if the forward changes them: location, object, key and number.
        self._numbers: list[tuple[str, Any, Any, int]] = []
        self._places: dict[int, str] = {}
        # The fake of each input tensor, and the spec of its first occurrence.
        self._given: dict[int, tuple[torch.Tensor, TensorSpec]] = {}
        # The first size with each name, and its value in the example.
        self._named: dict[str, tuple[Any, int]] = {}

    def add(self, name: str, value: Any, spec: Any, **options: Any) -> Any:
        """Write the placeholder `name`, with these options of `Graph.placeholder`, and return the fake of its value."""
        node = self.writer.graph.placeholder(name, **options)
        fake = self._fake(node, name.lstrip("*"), (), value, spec, False)
        node.meta["val"] = snapshot(fake)
        return fake

    def check_unchanged(self) -> None:
        """Raise TraceError if the forward has changed an input that the graph would not change."""
        changed = [where for where, container, before in self._fixed if identities(container) != before]
        changed += [where for where, given, before in self._constants if not same_value(given, before)]
        if changed:
            why = f"the forward changes its {changed[0]}; a graph would not. Return the change instead."
            raise ChangedInputError(why)

    def moved(self) -> set[str]:
        """The numbers in objects that the forward has changed and that are not dynamic yet."""
        return {
            where
            for where, container, key, number in self._numbers
            if where not in self.request.moving and not same_value(entries(container).get(key), number)
        }

    def final(self, queries: PropertyReads) -> list[InputSpec]:
        """Return the specs of the inputs, with the sizes that are still dynamic after the whole forward."""
        return [self._final(expected, queries) for expected in self.expected]

    def identity_matters(self, queries: PropertyReads) -> bool:
        """Tell whether the forward has tested which inputs are the same tensor."""
        return "memory" in queries.read_at or any(map(compares_identity, self.request.running.functions))

    # --- fakes

    def _fake(self, node: torch.fx.Node, name: str, path: Path, value: Any, spec: Any, inside: bool) -> Any:
        """The fake of one value; if it is `inside` an open object, the forward may change it, and the change is written back."""
        if isinstance(value, torch.Tensor):
            return self._fake_tensor(node, name, path, value, spec, inside)
        changes = is_mutable(value) and (inside or self.request.changes_inputs)
        opened = is_taken_apart(value, inside)
        if not opened and not has_parts(value) and not changes:
            return self._constant(name, path, value)
        if isinstance(value, dict):
            check_keys(value, _where(name, path))
        keys = structure_keys(value)
        self.expected.append(StructureSpec(name, path, type(value), keys))
        if isinstance(value, collections.defaultdict):
            factory = ConstantSpec(name, (*path, ("attr", "default_factory")), value.default_factory)
            self.expected.append(factory)
        if opened or changes:
            return self._fake_object(node, name, path, value, spec, inside)
        items = {}
        specs = [spec] * len(keys) if inside else parts_of(spec, keys, _where(name, path))
        for key, part in zip(keys, specs, strict=True):
            item = value[key] if isinstance(value, (tuple, list, dict)) else getattr(value, key)
            items[key] = self._fake(node, name, (*path, (key_kind(value), key)), item, part, inside)
        container = filled(value, items)
        self._fixed.append((_where(name, path), container, identities(container)))
        return container

    def _fake_object(
        self, node: torch.fx.Node, name: str, path: Path, value: Any, spec: Any, inside: bool
    ) -> Any:
        """Make the fake of an open object, or of a list or dict inside one."""
        where = _where(name, path)
        other = self._places.setdefault(id(value), where)
        if other != where:
            raise TraceError(
                f"one {type(value).__name__} is given twice, as {other} and as {where}; give two."
            )
        items, held = {}, entries(value)
        specs = [spec] * len(held) if is_for_all(spec) else parts_of(spec, held.keys(), where)
        for (key, item), part in zip(held.items(), specs, strict=True):
            items[key] = self._fake(node, name, (*path, (key_kind(value), key)), item, part, True)
        made = rebuilt(value, items)
        for key, item in items.items():
            if type(item) is int and spec is not None:
                self._numbers.append((_where(name, (*path, (key_kind(value), key))), made, key, item))
        if not inside:
            self.writer.add_object(made, node, path)
        return made

    def _fake_tensor(
        self, node: torch.fx.Node, name: str, path: Path, value: torch.Tensor, spec: Any, inside: bool
    ) -> torch.Tensor:
        where = _where(name, path)
        if inside and is_for_all(spec):
            spec = {dim: choice for dim, choice in spec.items() if -value.dim() <= dim < value.dim()}
        choices = dynamic_dimensions(spec, value, where)
        example = self._example(value, where, choices)
        if self.request.shared_inputs and id(value) in self._given:
            known, first = self._given[id(value)]
            self.expected.append(dataclasses.replace(first, name=name, path=path))
            if not inside:
                self.writer.add_input(known, node, path)
            return known
        fake: torch.Tensor = self.fake_mode.from_tensor(
            example, symbolic_context=symbolic_context(example, choices), source=ConstantSource(where)
        )
        sizes: Any = fake.shape
        for dim, choice in choices.items():
            if isinstance(sizes[dim], int):
                layout_of = str(value.layout).removeprefix("torch.")
                raise TraceError(
                    f"{where} has the layout {layout_of}, whose sizes cannot be free: leave it out of dynamic_shapes."
                )
            self.free.dimensions.append(
                DynamicDimension(where, dim, choice, sizes[dim].node.expr, example.shape[dim])
            )
            self._equate(sizes[dim], choice, example.shape[dim])
        self.examples[id(fake)] = example
        shape = tuple(map(expression_of_size, sizes))
        made = TensorSpec(
            name, path, value.dtype, shape, layout=layout(example), requires_grad=example.requires_grad
        )
        made = dataclasses.replace(made, same_as=describe(made))
        self.expected.append(made)
        self._given[id(value)] = fake, made
        if not inside:
            self.writer.add_input(fake, node, path)
        return fake

    @torch.no_grad()
    def _example(self, value: torch.Tensor, where: str, choices: dict[int, Any]) -> torch.Tensor:
        """Copy an example with the sizes of this run, so that a tensor given twice is two inputs."""
        example = value.detach().requires_grad_(value.requires_grad)
        for dim in list(choices):
            if (where, dim) in self.request.at_one:
                if example.shape[dim] != 1:  # otherwise its strides stay
                    example = example.narrow(dim, 0, 1).clone(memory_format=torch.contiguous_format)
                del choices[dim]
            elif (where, dim) in self.request.sizes:
                size = self.request.sizes[where, dim]
                # Repeat the example if the size is larger.
                places = torch.arange(size, device=example.device) % example.shape[dim]
                example = example.index_select(dim, places).requires_grad_(example.requires_grad)
        return example

    def _equate(self, size: Any, choice: Any, hint: int) -> None:
        """Make dimensions with the same `torch.export.Dim` one size."""
        if isinstance(choice, Dim):
            first, value = self._named.setdefault(choice.__name__, (size, hint))
            if value == hint:
                bool(first == size)  # adds the guard

    def _constant(self, name: str, path: Path, value: Any) -> Any:
        where = _where(name, path)
        if where in self.request.moving:
            return self._number(name, path, value)
        if hasattr(value, "__array__") and hides_tensors(value):
            raise TraceError(
                f"{where} is an array ({type(value).__name__}): give it as torch.as_tensor(array)."
            )
        if isinstance(value, torch.nn.Module) or hides_tensors(value):
            raise TraceError(
                f"{where} is a {type(value).__name__}, which holds tensors that the capture cannot reach. Give "
                "tensors, or tuples, lists, dicts, dataclasses and plain objects of tensors."
            )
        given = copy.deepcopy(value)
        if not same_value(given, value):
            raise TraceError(
                f"{where} is a {type(value).__name__}, which is not equal to its copy, so a graph cannot check it in later calls. "
                "Give tensors, numbers, or tuples, lists, dicts, dataclasses and plain objects of them."
            )
        if path and value == self.writer.device:
            return given  # the device of an object; another device is not an error in itself
        self._constants.append((where, given, value))
        self.expected.append(ConstantSpec(name, path, copy.deepcopy(value)))
        return given

    def _number(self, name: str, path: Path, value: int) -> Any:
        source = ConstantSource(_where(name, path))
        if (source.name, None) in self.request.at_one:
            self.expected.append(NumberSpec(name, path, 1))
            return 1
        value = self.request.sizes.get((source.name, None), value)
        symbol = self.fake_mode.shape_env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
        self.free.dimensions.append(DynamicDimension(source.name, None, Dim.AUTO, symbol, value))
        self.expected.append(NumberSpec(name, path, symbol))
        number = self.fake_mode.shape_env.create_symintnode(symbol, hint=value, source=source)
        self.examples[id(number)] = value
        return number

    def _final(self, expected: InputSpec, queries: PropertyReads) -> InputSpec:
        if isinstance(expected, NumberSpec):
            return dataclasses.replace(expected, value=self._resolved(expected.value))
        if not isinstance(expected, TensorSpec):
            return expected
        shape = tuple(self._resolved(size) for size in expected.shape)
        fixed = tuple(
            (dim, self.free.origin(size))
            for dim, size in enumerate(expected.shape)
            if isinstance(size, sympy.Symbol) and isinstance(shape[dim], int)
        )
        return dataclasses.replace(
            expected,
            shape=shape,
            fixed_by=fixed,
            strict_dtype=expected.dtype in queries.dtypes_read_at,
            any_dtype=self._takes_any_dtype(expected, queries),
            layout=expected.layout if "layout" in queries.read_at else None,
            requires_grad=expected.requires_grad if "gradients" in queries.read_at else None,
            same_as=expected.same_as if self.identity_matters(queries) else None,
        )

    def _takes_any_dtype(self, expected: TensorSpec, queries: PropertyReads) -> bool:
        if expected.path or expected.dtype in queries.dtypes_asked:
            return False
        placeholders = self.writer.graph.find_nodes(op="placeholder")
        return any(str(n.target) == expected.name and takes_any_dtype(n) for n in placeholders)

    def _resolved(self, size: Any) -> int | str:
        expression = self.fake_mode.shape_env.replace(sympy.sympify(size))
        return int(expression) if expression.is_number else python_expression(expression)


def _where(name: str, path: Path) -> str:
    return f"input {describe_path(name, path)}"
