"""Engines that compute the tensors of a captured graph in the place of torch's operators: torch.compile's and OpenVINO.

A graph is cut in three. What checks and reads the inputs comes first, then the *body*, which makes tensors of tensors alone, and
what makes the outputs comes last. An engine computes the body. Guards, caches and classes of outputs stay in the graph.
"""

from __future__ import annotations

import importlib.util
import operator
import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fxopt import effects, graph, objects
from fxopt.capture import TracedModule
from fxopt.errors import FallbackWarning
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact, facts_of, is_write_name
from fxopt.submodules import sharing_copy

Function = Callable[..., Any]

TORCH, AUTO = "torch", "auto"
"""The names for torch's own operators, and for the fastest of all engines."""

_NAME = "fxopt_engine"


class Unfit(Exception):
    """An engine does not take a graph; the message says why."""


class Engine(nn.Module):
    """The body of a graph, computed by an engine that is made for the inputs of the first call.

    Another thread or process than the one that made it may not be able to use an engine: there torch computes the body.

    Args:
        name: one of `ENGINES`.
        body: takes tensors, and returns a tuple of tensors.
    """

    def __init__(self, name: str, body: GraphModule) -> None:
        super().__init__()
        self.name, self.body, self.in_use = name, body, False
        self._make, self._moves = ENGINES[name]
        self._run: Function | None = None
        self._owner = _owner(self._moves)

    def forward(self, *inputs: Tensor) -> Any:
        """Compute the body."""
        if _owner(self._moves) != self._owner:
            return self.body(*inputs)
        try:
            if self._run is None:
                self._run = self._make(self.body, inputs)
            return self._run(*inputs)
        except Exception as error:
            if not self.in_use:
                raise
            text = f"{self.name} failed, and torch computes the call: {in_one_line(error)}"
            warnings.warn(text, FallbackWarning, 2)
            return self.body(*inputs)


def in_one_line(error: Exception) -> str:
    """The kind of an error, and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _owner(moves: bool) -> tuple[int, int]:
    return os.getpid(), 0 if moves else threading.get_ident()


def engines_for(device: str) -> Mapping[str, str]:
    """The engines for a type of device, each with the reason why it cannot be used here; empty where it can."""
    named = {"cpu": ("inductor", "openvino"), "cuda": ("inductor", "cudagraphs")}.get(device, ())
    missing = "" if importlib.util.find_spec("openvino") else "it is not installed: pip install openvino"
    return {name: missing if name == "openvino" else "" for name in named}


def with_engine(traced: TracedModule, name: str) -> tuple[TracedModule, Engine]:
    """Make a copy of a graph in which an engine computes the body; it shares the parameters.

    Args:
        traced: a graph with metadata.
        name: one of `ENGINES`.

    Raises:
        Unfit: the body writes into memory that others see, or checks values.
    """
    index = GraphIndex(traced)
    body, late = _cut(index)
    outputs = _outputs(index, body, late)
    inputs = [*dict.fromkeys(v for n in body for v in n.all_input_nodes if v not in body)]
    engine = Engine(name, _body(traced, body, inputs, outputs))
    _check(engine.body)
    made: Any = sharing_copy(traced)
    made.add_module(_NAME, engine)
    made.graph = _around(traced.graph, body, late, inputs, outputs)
    made.recompile()
    return made, engine


def _cut(index: GraphIndex) -> tuple[Collection[Node], Collection[Node]]:
    """The nodes of the body, and those that need it and do not belong to it."""
    body: dict[Node, None] = {}
    late: dict[Node, None] = {}
    for node in index.nodes:
        given = node.all_input_nodes
        if node.op == "placeholder" or node is index.guard:
            continue
        takes = all(n in body or isinstance(graph.value_of(n), Tensor) for n in given)
        on_objects = getattr(node.target, "__module__", "") == objects.__name__
        makes = _is_plain(_value(node)) and node.op != "output" and not on_objects
        if takes and makes and not any(n in late for n in given):
            body[node] = None
        elif any(n in body or n in late for n in given) or node.op == "output":
            late[node] = None
    return body, late


def _outputs(index: GraphIndex, body: Collection[Node], late: Collection[Node]) -> list[Node]:
    """The tensors that pass the border; attributes, numbers and views are made again behind it."""
    needed = [n for node in late for n in node.all_input_nodes]
    found: dict[Node, None] = {}
    for node in needed:
        if node in body and node not in found:
            made_by = _of_several(node)
            is_view = Fact.VIEW in facts_of(made_by) and not index.memory.written(node)
            if _is_in_place(node):
                needed.append(node.all_input_nodes[0])
            elif is_view or node.op == "get_attr" or not isinstance(graph.value_of(node), Tensor):
                needed += node.all_input_nodes
            else:
                found[node] = None
    return [node for node in body if node in found]


def _is_in_place(node: Node) -> bool:
    """Tell whether a node writes into its first input and returns that."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    called = node.op in ("call_method", "call_function")
    return called and is_write_name(name) and isinstance(graph.value_of(node), Tensor)


def _of_several(node: Node) -> Node:
    """The node that returns several tensors of which this is one; or itself."""
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, Node) and isinstance(_value(source), tuple | list):
        return _of_several(source)
    return node


def _value(node: Node) -> Any:
    """What a node returns; a capture describes no tuple inside of a tuple."""
    value = graph.value_of(node)
    if value is None and node.target is operator.getitem and isinstance(node.args[0], Node):
        source, place = _value(node.args[0]), cast(int, node.args[1])
        return source[place] if isinstance(source, tuple | list) else None
    return value


def _is_plain(value: object) -> bool:
    """Tell whether a value is a tensor or a number, or a tuple or list of such."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    plain = (Tensor, int, float, torch.SymInt, torch.SymFloat, torch.SymBool, torch.device, torch.dtype)
    return isinstance(value, plain)


def _check(body: GraphModule) -> None:
    index = GraphIndex(body)
    memory, inputs = index.memory, body.graph.find_nodes(op="placeholder")
    outputs: Any = body.graph.output_node().args[0]
    if not outputs:
        raise Unfit("the graph computes no tensor from tensors alone")
    for node in index.nodes:
        if effects.only_checks(node) or memory.written_by(node) is None:
            raise Unfit(f"{node.name} checks a value, or has another effect, at {graph.place(node)}")
        if node.op in ("placeholder", "get_attr", "call_module"):
            module = index.module(node) if node.op == "call_module" else None
            writer = memory.writer_of(module) if module else memory.written(node)
            if writer:
                raise Unfit(f"{writer.name} may write into {node.target}, at {graph.place(writer)}")
    for (
        node
    ) in outputs:  # two results of one operator have memory of their own: views are made behind the border
        others = (n for n in (*inputs, *outputs) if n is not node and _of_several(n) is not _of_several(node))
        shared = next((n for n in others if memory.may_alias(n, node)), None)
        if shared:
            raise Unfit(f"the outputs {node.name} and {shared.name} may share memory")


def _body(
    traced: TracedModule, body: Collection[Node], inputs: Collection[Node], outputs: Collection[Node]
) -> GraphModule:
    made, known = Graph(), dict[Node, Any]()
    for node in inputs:
        known[node] = made.placeholder(node.name)
        known[node].meta["val"] = graph.value_of(node)
    for node in body:
        value = graph.value_of(node)
        if isinstance(value, torch.device | torch.dtype):
            known[node] = value
            continue
        known[node] = made.node_copy(node, lambda n: n)
        for place in ("args", "kwargs"):
            setattr(known[node], place, torch.fx.node.map_arg(getattr(node, place), known.__getitem__))
        if node.target is torch.cat:
            _without_empty(node, known)
    made.output(tuple(known[node] for node in outputs))
    return GraphModule(traced, made, "Body")


def _without_empty(node: Node, known: Mapping[Node, Any]) -> None:
    """Leave out what `torch.cat` leaves out, an empty vector, with which caches begin: OpenVINO does not know this rule."""
    value, parts = graph.value_of(node), cast(Any, node.args[0])
    empty = [graph.value_of(n).shape == (0,) and graph.value_of(n).dtype is value.dtype for n in parts]
    if value.dim() > 1 and not all(empty):
        kept = [known[each] for each, drop in zip(parts, empty, strict=True) if not drop]
        known[node].args = (kept, *known[node].args[1:])


def _around(
    old: Graph,
    body: Collection[Node],
    late: Collection[Node],
    inputs: Collection[Node],
    outputs: Collection[Node],
) -> Graph:
    made, known = Graph(), dict[Node, Node]()

    def of(node: Node) -> Node:
        if node not in known:  # an attribute, a number or a view of the body
            known[node] = of(node.all_input_nodes[0]) if _is_in_place(node) else made.node_copy(node, of)
        return known[node]

    for node in old.nodes:
        if node not in body and node not in late:
            known[node] = made.node_copy(node, of)
    call = made.call_module(_NAME, tuple(map(of, inputs)))
    for number, node in enumerate(outputs):
        known[node] = made.call_function(_item, (call, number))
        known[node].meta = {**node.meta}
    for node in late:
        known[node] = made.node_copy(node, of)
    return made


def _item(values: tuple[Tensor, ...], number: int) -> Tensor:
    return values[number]


def _inductor(body: GraphModule, inputs: tuple[Tensor, ...]) -> Function:
    """torch.compile with frozen weights: the graph has checked the inputs, and `optimize` watches the weights."""
    import torch._inductor.config  # takes a tenth of a second

    free, compiler, config = (
        _has_free_sizes(body),
        cast(Any, torch.compiler),
        cast(Any, torch._inductor.config),
    )
    recorded = inputs[0].is_cuda and not free
    modules, all_else = compiler.skip_guard_on_all_nn_modules_unsafe, compiler.keep_tensor_guards_unsafe
    options = {"guard_filter_fn": modules if free else all_else, "triton.cudagraphs": recorded}
    made = torch.compile(body, fullgraph=True, dynamic=free, options=options)
    with config.patch(freezing=True):  # which torch.compile does not read from its options
        made(*inputs)
    return _copied(made) if recorded else made


def _cudagraphs(body: GraphModule, inputs: tuple[Tensor, ...]) -> Function:
    """A recording of torch's own kernels, which one launch starts again."""
    if _has_free_sizes(body):
        raise Unfit("it takes fixed sizes alone")
    return _copied(torch.compile(body, fullgraph=True, dynamic=False, backend="cudagraphs"))


def _copied(function: Function) -> Function:
    """The same with outputs of their own: the next run writes into those of a recording."""

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        torch.compiler.cudagraph_mark_step_begin()
        return tuple(output.clone() for output in function(*inputs))

    return run


def _openvino(body: GraphModule, inputs: tuple[Tensor, ...]) -> Function:
    """OpenVINO, from a graph of torch.export; of its requests each thread has one."""
    import openvino

    free = [[dim for dim, size in enumerate(shape) if not isinstance(size, int)] for shape in _shapes(body)]
    if any(tensor.shape[dim] < 2 for tensor, dims in zip(inputs, free, strict=True) for dim in dims):
        raise Unfit("it fixes a free size that is 0 or 1 in the example inputs")
    specs = tuple(dict.fromkeys(dims, torch.export.Dim.AUTO) for dims in free)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(body, inputs, dynamic_shapes=specs, strict=False)
        model = openvino.convert_model(exported)
    made = exported.graph.find_nodes(op="placeholder")[-len(inputs) :]
    if any(
        isinstance(n.meta["val"].shape[dim], int) for n, dims in zip(made, free, strict=True) for dim in dims
    ):
        raise Unfit("torch.export fixes a size that is free")
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "ENABLE_CPU_PINNING": False,
    }
    compiled, own = openvino.Core().compile_model(model, "CPU", options), threading.local()

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        if not hasattr(own, "request"):
            own.request = compiled.create_infer_request()
        given = [tensor.detach().contiguous().numpy() for tensor in inputs]
        found = own.request.infer(given, share_inputs=True, share_outputs=False)
        return tuple(torch.from_numpy(found[number]) for number in range(len(compiled.outputs)))

    return run


ENGINES: Mapping[str, tuple[Callable[[GraphModule, tuple[Tensor, ...]], Function], bool]] = {
    "inductor": (_inductor, True),
    "cudagraphs": (_cudagraphs, False),
    "openvino": (_openvino, True),
}
"""How each engine is made of a body and its inputs, and whether other threads than that which made it can use it."""


def _shapes(body: GraphModule) -> Iterator[torch.Size]:
    return (graph.value_of(node).shape for node in body.graph.find_nodes(op="placeholder"))


def _has_free_sizes(body: GraphModule) -> bool:
    return any(not isinstance(size, int) for shape in _shapes(body) for size in shape)
