"""Engines that compute the tensors of a captured graph instead of torch's operators: torch.compile, OpenVINO, ONNX Runtime.

A graph is cut in three parts: nodes that check and read the inputs, the *body*, which computes tensors only from tensors, and
nodes that build the outputs. An engine computes the body. Guards, caches and classes of outputs stay in the graph.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import operator
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fxopt import effects, graph, objects
from fxopt.capture import TracedModule
from fxopt.capture.runtime import modes
from fxopt.compare import norm_error, unlike
from fxopt.errors import FallbackWarning, raise_of_signal, warn
from fxopt.graph_index import GraphIndex
from fxopt.operators import Fact, facts_of
from fxopt.rewriting.random_inputs import number_with
from fxopt.submodules import sharing_copy, weights_of
from fxopt.torch_internals import clear_workspaces, frozen, holding_inductor

Function = Callable[..., Any]

TORCH, AUTO = "torch", "auto"
"""The names for torch's own operators, and for the fastest engine."""

_NAME = "fxopt_engine"
_MOST_NUMBER = 2**31 - 1
_MOST_ERROR = 0.02  # relative to an output, enough for bfloat16; `optimize` judges the accuracy


class Unfit(Exception):
    """A graph cannot be used, for example by an engine; the message says why."""


class Engine(nn.Module):
    """The body of a graph, computed by an engine that is prepared for the inputs of the first call.

    In a thread or process that cannot use the prepared engine, torch computes the body.

    Args:
        name: one of `ENGINES`.
        body: graph module that accepts tensors, and returns a tuple of tensors.
    """

    def __init__(self, name: str, body: GraphModule) -> None:
        super().__init__()
        self.name, self.body, self.in_use = name, body, False
        self._make, moves = ENGINES[name]
        self._moves = moves and not any(tensor.is_cuda for tensor in body.parameters())
        self._run: Function | None = None
        self._owner = _owner(self._moves)

    def forward(self, *inputs: Tensor) -> Any:
        """Compute the body."""
        if _owner(self._moves) != self._owner:
            return self.body(*inputs)
        known = sys.exception()
        try:
            if self._run is None:
                self._run = self._make(self.body, inputs)
            return self._run(*inputs)
        except Exception as error:
            if not self.in_use:
                raise
            raise_of_signal(error, known)
            value = self.body(*inputs)  # the body raises, too, if the inputs are at fault
            if not isinstance(error, Unfit):  # the engine would fail again
                self._run = self.body
            warn(f"torch computes a call in the place of {self.name}: {reason_of(error)}", FallbackWarning)
            return value


def reason_of(error: Exception) -> str:
    """Return the message of an `Unfit`; for other errors the class, and the beginning of the message."""
    if isinstance(error, Unfit):
        return str(error)
    plain = re.sub(r"\x1b\[[\d;]*m", "", str(error))  # the exporter of ONNX prints in colours
    return f"{type(error).__name__}: {' '.join(plain.split())[:300]}"


def _owner(moves: bool) -> tuple[int, int]:
    return os.getpid(), 0 if moves else threading.get_ident()


def engines_for(device: str) -> Mapping[str, str]:
    """Return the engines for a type of device, each with the reason why it cannot be used here; empty if it can."""
    named = {"cpu": ("inductor", *_PACKAGES), "cuda": ("inductor", "cudagraphs")}.get(device, ())
    return {name: _missing(_PACKAGES.get(name, ())) for name in named}


_PACKAGES = {"openvino": ("openvino",), "onnxruntime": ("onnxruntime", "onnxscript")}
"""The packages that an engine needs."""


def _missing(packages: Collection[str]) -> str:
    found = all(map(importlib.util.find_spec, packages))
    return "" if found else f"it is not installed: pip install {' '.join(packages)}"


def with_engine(traced: TracedModule, name: str) -> tuple[TracedModule, Engine]:
    """Make a copy of a graph in which an engine computes the body; it shares the parameters.

    Args:
        traced: a graph with metadata.
        name: one of `ENGINES`.

    Raises:
        Unfit: an engine cannot compute the graph. For example, the graph writes into memory that is visible outside of the
            body, switches modes, or checks values in the body.
    """
    made: Any = sharing_copy(traced)
    for node in reversed(modes.idle(made.graph.nodes)):
        made.graph.erase_node(node)
    index = GraphIndex(made)
    body, late = _cut(index)
    outputs, seen = _outputs(body, late)
    inputs = [*dict.fromkeys(v for n in body for v in n.all_input_nodes if v not in body)]
    if not inputs or not outputs:
        raise Unfit("the graph computes no tensor of its inputs alone")
    _check_effects(index, body.keys() - seen)
    engine = Engine(name, _body(traced, body, inputs, outputs))
    _check_body(engine.body)
    made.add_module(_NAME, engine)
    made.graph = _around(made.graph, body, late, inputs, outputs)
    made.recompile()
    return made, engine


def _cut(index: GraphIndex) -> tuple[dict[Node, None], dict[Node, None]]:
    """Return the nodes of the body, and the later nodes that depend on the body."""
    body: dict[Node, None] = {}
    late: dict[Node, None] = {}
    for node in index.nodes:
        given, value = node.all_input_nodes, graph.value_of(node)
        if node.op == "placeholder" or node is index.guard:
            continue
        takes = all(n in body or isinstance(graph.value_of(n), Tensor) for n in given)
        writes = value is None and bool(index.memory.written_by(node))
        makes = (_is_plain(value) or writes) and node.op != "output" and not _is_on_objects(node)
        behind = any(n in late for n in given)
        if takes and makes and not behind:
            body[node] = None
        elif behind or any(n in body for n in given) or node.op == "output":
            late[node] = None
    return body, late


def _outputs(body: Collection[Node], late: Collection[Node]) -> tuple[list[Node], set[Node]]:
    """Return the tensors that the engine outputs, and all nodes of the body whose values are used after the body.

    Attributes, numbers, views and constants are computed again after the body: an engine would return a constant in its own
    memory.
    """
    varying: set[Node] = set()
    for node in body:
        if any(n in varying or n not in body for n in node.all_input_nodes):
            varying.add(node)

    def made_again(node: Node) -> bool:
        is_view = Fact.VIEW in facts_of(_of_several(node))
        return is_view or node not in varying or not isinstance(graph.value_of(node), Tensor)

    def inside(node: Node) -> list[Node]:
        return [n for n in node.all_input_nodes if n in body]

    needed = (n for node in late for n in inside(node))
    seen = {*graph.reached(needed, lambda node: inside(node) if made_again(node) else ())}
    return [node for node in body if node in seen and not made_again(node)], seen


def _check_effects(index: GraphIndex, inside: Collection[Node]) -> None:
    """Raise Unfit if the order of the parts matters: written memory is visible outside of the body, or modes are switched."""
    for node in index.nodes:
        written = () if _is_on_objects(node) or effects.only_checks(node) else index.memory.written_by(node)
        if written is None and node is not index.guard:
            raise Unfit(f"{node.name} switches a mode or has another effect, at {graph.place(node)}")
        for value in written or ():
            aliases = index.memory.aliases(value)
            outside = next((n for n in aliases if n not in inside or n.op == "get_attr"), None)
            if outside:
                raise Unfit(f"{node.name} may write into {outside.name}, at {graph.place(node)}")


def _is_on_objects(node: Node) -> bool:
    return getattr(node.target, "__module__", "") == objects.__name__


def _of_several(node: Node) -> Node:
    """The node whose value is a tuple or list that this node indexes; otherwise the node itself."""
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, Node) and isinstance(graph.value_of(source), tuple | list):
        return _of_several(source)
    return node


def _is_plain(value: object) -> bool:
    """Tell whether a value is a tensor or a number, or a tuple or list of these."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, (Tensor, *graph.NUMBERS))


def _check_body(body: GraphModule) -> None:
    """Raise Unfit if the body checks values, writes into its layers, or returns outputs that share memory."""
    index = GraphIndex(body)
    memory, inputs = index.memory, body.graph.find_nodes(op="placeholder")
    outputs: Any = body.graph.output_node().args[0]
    if any(tensor.is_inference() for tensor in weights_of(body)):
        raise Unfit("a weight was made under inference_mode: nobody notices what is written into it")
    for node in index.nodes:
        if effects.only_checks(node):
            raise Unfit(f"{node.name} checks a value, at {graph.place(node)}")
        if node.op == "call_module" and memory.writer_of(index.module(node)):
            raise Unfit(f"{node.name} may write into its layer, at {graph.place(node)}")
    for node in outputs:
        # Two results of one operator do not share memory; views are not outputs of the body.
        others = (n for n in (*inputs, *outputs) if n is not node and _of_several(n) is not _of_several(node))
        shared = next((n for n in others if memory.may_alias(n, node)), None)
        if shared:
            raise Unfit(f"the values {node.name} and {shared.name} may share memory, at {graph.place(node)}")


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
        known[node] = made.node_copy(node, known.__getitem__)
        if node.target is torch.cat:
            _without_empty(node, known)
    made.output(tuple(known[node] for node in outputs))
    return GraphModule(traced, made, "Body")


def _without_empty(node: Node, known: Mapping[Node, Any]) -> None:
    """Drop the empty vectors that `torch.cat` ignores, with which caches begin: OpenVINO does not ignore them."""
    value, parts = graph.value_of(node), cast(Any, node.args[0] if node.args else ())
    if isinstance(parts, tuple | list) and value.dim() > 1:  # so a part with one dimension is empty
        values = {n: graph.value_of(n) for n in parts}
        kept = [known[n] for n in parts if values[n].dim() > 1 or values[n].dtype is not value.dtype]
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
        if node not in known:  # an attribute, a number, a view or a constant of the body
            known[node] = made.node_copy(node, of)
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
    free, compiler = _has_free_sizes(body), cast(Any, torch.compiler)
    # `empty_like` gives other strides to an expanded input, whose elements share memory and cannot be copied into.
    strides = [torch.empty_like(tensor).stride() for tensor in inputs]
    needless = compiler.skip_guard_on_all_nn_modules_unsafe if free else compiler.skip_all_guards_unsafe
    recorded, held = not free and all(tensor.is_cuda for tensor in inputs), list[Any]()
    options = {"guard_filter_fn": needless}
    backend = holding_inductor(held) if recorded else "inductor"
    made = torch.compile(body, fullgraph=True, dynamic=free, options=options, backend=backend)
    # torch.compile does not read freezing from its options, and compiles again after `torch._dynamo.reset()`, or for a free
    # size of 0 or 1: freezing must be on at each call.
    freezing = frozen()

    def run(*inputs: Tensor) -> Any:
        with freezing:
            if free:
                return made(*(tensor.contiguous() for tensor in inputs))
            return made(*map(_with_strides, inputs, strides))

    run(*inputs)
    return _Recording(run, inputs, held) if recorded else run


def _with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _cudagraphs(body: GraphModule, inputs: tuple[Tensor, ...]) -> Function:
    """Record torch's own kernels as a CUDA graph."""
    if _has_free_sizes(body):
        raise Unfit("it takes fixed sizes alone")
    return _Recording(body.forward, inputs, body)


class _Recording:
    """CUDA graph of a function: one launch replays all its kernels.

    A call copies the inputs into tensors of the recording, and returns copies of the outputs: the next run writes into the
    same memory.

    Args:
        function: the function.
        inputs: example inputs.
        held: object that keeps alive the kernels and constants of the function, because a CUDA graph does not.

    Raises:
        Unfit: an input is not on the GPU: the recording would contain its value as a constant.
        RuntimeError: the function waits for the GPU, for example to read a value.
    """

    def __init__(self, function: Function, inputs: tuple[Tensor, ...], held: object) -> None:
        if not all(tensor.is_cuda for tensor in inputs):
            raise Unfit("an input is on the CPU")
        self._held, self._device = held, inputs[0].device
        self._recorded: Any = torch.cuda.CUDAGraph()
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(self._device):
            self._places = [tensor.detach().clone() for tensor in inputs]
            self._stream, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(self._stream)
            with torch.cuda.stream(side):
                for _ in range(2):  # the first runs choose and load kernels
                    function(*self._places)
            # Otherwise the recording would use a workspace of cuBLAS that other code may free.
            clear_workspaces()
            with torch.cuda.graph(self._recorded, stream=side, capture_error_mode="thread_local"):
                self._outputs = function(*self._places)
            clear_workspaces()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        stream = torch.cuda.current_stream(self._device)
        if stream != self._stream:  # the previous run may still read its inputs
            stream.wait_stream(self._stream)
            self._stream = stream
        for place, tensor in zip(self._places, inputs, strict=True):
            place.copy_(tensor)
        self._recorded.replay()
        return tuple(output.clone() for output in self._outputs)


def _openvino(body: GraphModule, inputs: tuple[Tensor, ...]) -> Function:
    """Compile the body for OpenVINO by way of torch.export; each thread has its own inference request."""
    if any(graph.holds(node, lambda tensor: tensor.dtype == torch.float64) for node in body.graph.nodes):
        raise Unfit("it computes float64 in float32")
    import openvino

    model = _exported(body, inputs, openvino.convert_model)
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "ENABLE_CPU_PINNING": False,
    }
    compiled, own = openvino.Core().compile_model(model, "CPU", options), threading.local()

    def run(given: list[Any]) -> Any:
        if not hasattr(own, "request"):
            own.request = compiled.create_infer_request()
        for array in given:
            wide = array.dtype == "int64" and array.size
            if wide and not -_MOST_NUMBER <= array.min() <= array.max() <= _MOST_NUMBER:
                raise Unfit("it computes integers in 32 bits, and an input is larger")
        return own.request.infer(given, share_inputs=True, share_outputs=False).to_tuple()

    return _of_arrays(body, inputs, run)


def _onnxruntime(body: GraphModule, inputs: tuple[Tensor, ...]) -> Function:
    """Compile the body for ONNX Runtime by way of torch.export; its threads spin only during a run."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3  # errors
    proto = _exported(body, inputs, _onnx)
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [each.name for each in session.get_inputs()]

    return _of_arrays(body, inputs, lambda given: session.run(None, dict(zip(names, given, strict=True))))


def _of_arrays(
    body: GraphModule, inputs: tuple[Tensor, ...], compute: Callable[[list[Any]], Any]
) -> Function:
    """Turn a function of arrays into one of tensors; raise Unfit if its results differ from those of the body for any size."""

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        given = [tensor.detach().contiguous().numpy() for tensor in inputs]
        return tuple(map(torch.from_numpy, compute(given)))

    _probe(body, inputs, run)
    return run


def _onnx(exported: Any) -> Any:
    """Convert an exported graph to an ONNX model, without torch's log messages about missing packages."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return cast(Any, torch.onnx.export(exported, verbose=False)).model_proto
    finally:
        logger.setLevel(level)


def _exported(body: GraphModule, inputs: tuple[Tensor, ...], convert: Callable[[Any], Any]) -> Any:
    """Export the body by torch.export, and convert the result; raise Unfit if torch.export fixes a free size."""
    free = [[dim for dim, size in enumerate(shape) if not isinstance(size, int)] for shape in _shapes(body)]
    known = _known_sizes(body, inputs)
    # torch.export would fix a size of 1.
    others = {symbol: 2 if value == 1 else value for symbol, value in known.items()}
    if all(tensor.numel() for tensor in inputs):
        inputs = _of_sizes(body, inputs, others)
    if any(tensor.shape[dim] < 2 for tensor, dims in zip(inputs, free, strict=True) for dim in dims):
        raise Unfit("torch.export fixes a free size that is 0 or 1")
    specs = tuple(dict.fromkeys(dims, torch.export.Dim.AUTO) for dims in free)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(_masking_safely(body), inputs, dynamic_shapes=specs, strict=False)
        made = exported.graph.find_nodes(op="placeholder")[-len(inputs) :]
        sizes = (n.meta["val"].shape[dim] for n, dims in zip(made, free, strict=True) for dim in dims)
        if any(isinstance(size, int) for size in sizes):
            raise Unfit("torch.export fixes a size that is free")
        return convert(exported)


def _masking_safely(body: GraphModule) -> GraphModule:
    """Copy a body with calls of `_attention`; raise Unfit for a layer with attention of its own that is called with a mask."""
    made = Graph()
    made.output(made.graph_copy(body.graph, {}))
    for node in made.nodes:
        if node.target in _ATTENTIONS:
            node.target = _attention
        elif node.op == "call_module" and _attends(layer := body.get_submodule(str(node.target))):
            given = inspect.signature(layer.forward).bind(*node.args, **node.kwargs).arguments
            mask = next((n for n, value in given.items() if n.endswith("mask") and value is not None), None)
            if mask:
                raise Unfit(f"it may give NaN if {mask} hides all keys of a query, at {graph.place(node)}")
    return GraphModule(body, made, "Body")


def _attends(layer: nn.Module) -> bool:
    return any(isinstance(each, nn.MultiheadAttention) for each in layer.modules())


_ATTENTIONS = (
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """`scaled_dot_product_attention`, with 0 for a query whose keys are all masked, as torch computes; other engines give NaN."""
    if attn_mask is None:
        return F.scaled_dot_product_attention(query, key, value, None, *args, **kwargs)
    is_bool = attn_mask.dtype is torch.bool
    sees = (attn_mask if is_bool else attn_mask != -torch.inf).any(-1, keepdim=True)
    mask = attn_mask | ~sees if is_bool else torch.where(sees, attn_mask, 0.0)
    return torch.where(sees, F.scaled_dot_product_attention(query, key, value, mask, *args, **kwargs), 0.0)


def _probe(body: GraphModule, inputs: tuple[Tensor, ...], run: Function) -> None:
    """Raise Unfit if a function and the body differ for other free sizes: an exporter may have fixed a size of the example."""
    known = _known_sizes(body, inputs)
    alike = [[other for other in known if known[other] == value] for value in dict.fromkeys(known.values())]
    tried: set[Any] = set()
    for changed in (*([symbol] for symbol in known), *alike):
        value = known[changed[0]]
        for other in (2 * value, value + 1 if value > 1 else 3):
            given = _of_sizes(body, inputs, known | dict.fromkeys(changed, other))
            try:
                wanted = body.forward(*given)  # a call of the module would make torch.fx print errors
            except Exception:  # the model does not accept this combination of sizes
                continue
            found = run(*given)
            if unlike(wanted, found) or not norm_error(wanted, found) < _MOST_ERROR:
                raise Unfit(
                    f"it gives another result where a free size is {other}, which is {value} in the example"
                )
            tried.update(changed)
    if untried := sorted(known.keys() - tried, key=str):
        raise Unfit(
            f"a free size is {known[untried[0]]} in the example, and the model takes no other number to try it with"
        )


def _known_sizes(body: GraphModule, inputs: tuple[Tensor, ...]) -> dict[Any, int]:
    """Return the values of the free sizes; raise Unfit if one of them is not itself a size of an input."""
    sizes = [
        (cast(Any, size).node.expr, value)
        for shape, tensor in zip(_shapes(body), inputs, strict=True)
        for size, value in zip(shape, tensor.shape, strict=True)
        if isinstance(size, torch.SymInt)
    ]
    known = {symbol: value for symbol, value in sizes if symbol.is_Symbol}
    if any(symbol not in known for expression, _ in sizes for symbol in expression.free_symbols):
        raise Unfit("a free size is computed of another that is none of an input")
    return known


def _of_sizes(body: GraphModule, inputs: tuple[Tensor, ...], sizes: Mapping[Any, int]) -> tuple[Tensor, ...]:
    return tuple(
        _resized(tensor, [number_with(sizes, size) for size in shape])
        for tensor, shape in zip(inputs, _shapes(body), strict=True)
    )


def _resized(tensor: Tensor, sizes: list[int]) -> Tensor:
    """Resize a tensor in each dimension: repeat its entries, or drop the last ones."""
    for dim, size in enumerate(sizes):
        if size != tensor.shape[dim]:
            tensor = tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])
    return tensor


ENGINES: Mapping[str, tuple[Callable[[GraphModule, tuple[Tensor, ...]], Function], bool]] = {
    "inductor": (_inductor, True),
    "cudagraphs": (_cudagraphs, False),
    "openvino": (_openvino, True),
    "onnxruntime": (_onnxruntime, True),
}
"""For each engine, the function that prepares it for a body and its inputs, and whether other threads can use the result."""


def _shapes(body: GraphModule) -> Iterator[torch.Size]:
    return (graph.value_of(node).shape for node in body.graph.find_nodes(op="placeholder"))


def _has_free_sizes(body: GraphModule) -> bool:
    return any(not isinstance(size, int) for shape in _shapes(body) for size in shape)
