"""`save` and `load`: a folder with `graph.json` and `model.safetensors`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.fx import GraphModule

from fxopt.errors import FxoptError, LoadError, SaveError
from fxopt.operators import hooks_of
from fxopt.rewriting.record import find_record
from fxopt.saving import files
from fxopt.saving.allowed import NameRefused, Names, is_identifier
from fxopt.saving.graph_set import Call, GraphSet
from fxopt.saving.graphs import read_graph, write_graph
from fxopt.saving.modules import ModuleReader, ModuleWriter
from fxopt.saving.tensors import NoSuchDevice, TensorTable, restored
from fxopt.saving.values import NotData
from fxopt.submodules import GRAPHS, original
from fxopt.torch_internals import buffers_of, modules_of, parameters_of


def save(module: torch.nn.Module, folder: str | os.PathLike[str], *, trusted: Iterable[Any] = ()) -> None:
    """Save a graph module as data: its graph in `graph.json`, its tensors in `model.safetensors`.

    Everything goes to the file that the graph runs with: layers, parameters and buffers (those that are not persistent,
    too), ties, training flags, guards, the places in the model that nodes come from, `.config` of a transformers model,
    and the record of passes, so that `fxopt.undo` works on what `load` gives. Not kept are gradients, the description of
    values in `node.meta["val"]`, without which passes may refuse more (apply them first), `gm.meta`, and a `.config` that
    is not rebuilt from its `to_dict()`. A pass whose changes are no data stays in `fxopt.history` and cannot be undone.

    Of a module that `fxopt.optimize` made, the graphs are saved that it has so far, and no record of passes.

    Args:
        module: a captured module, any `torch.fx.GraphModule`, or a module that `fxopt.optimize` made.
        folder: where it goes: a new folder, an empty one, or one that `save` wrote, which is replaced as a whole.
        trusted: classes and functions of yours that the graph calls or has as layers; `load` needs the same.

    Raises:
        SaveError: it holds what is no data, or calls what `load` would refuse; or the folder cannot be written. What was
            in the folder is there as before.

    Example:
        >>> import fxopt, tempfile, torch
        >>> traced = fxopt.trace(torch.nn.Linear(2, 3), (torch.zeros(1, 2),))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fxopt.save(traced, folder)
        ...     fxopt.load(folder).code == traced.code
        True
    """
    names, found = Names(trusted), _graphs_in(module)
    tensors = TensorTable(_names_of_tensors([graph for _, graph in found]))
    written = [_written(graph, names, tensors, records=graph is module) for _, graph in found]
    document = written[0]
    if not isinstance(module, GraphModule):
        calls = [[count, list(given)] for (count, given), _ in found]
        document = {"tune": _is_tuned(module), "calls": calls, "graphs": written}
    try:
        entries, document["tensors"] = tensors.stored()
    except NotData as error:
        raise SaveError(f"the graph module holds {error}, which cannot be saved.") from None
    for (_, graph), data in zip(found, written, strict=True):
        _prove(graph, data, names, tensors.tensors)
    files.write(Path(folder), document, entries)


def load(
    folder: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    trusted: Iterable[Any] = (),
) -> Any:
    """Load what `save` wrote: the same graph, code, names, weights, guards and outputs.

    Nothing is unpickled and no code out of the folder runs: operators and classes are looked up by name among those that
    a graph may use, and anything else is refused. So a folder from anywhere can be loaded; what its graph computes, only
    whoever made it knows. The digests in the folder find damage, they do not say who wrote it. `.config` is the dict of
    the configuration's `to_dict()`, unless its class is in `trusted`: the `from_dict` of some classes asks the hub.

    Args:
        folder: of `save`.
        device: where the tensors go; by default where they were.
        trusted: the same classes and functions as for `save`, and the class that `.config` is to have again.

    Returns:
        A `TracedModule`, or a `torch.fx.GraphModule` where one was saved. Of a module that `fxopt.optimize` made, a module
        that computes the same by its graphs, with the kernels that are the fastest on this machine for the layers that had
        one. It is not of the model's class, has no `generate()`, and raises a `GuardError` for inputs that no graph takes.

    Raises:
        LoadError: a file is missing, cut off, changed, or of a newer format; the graph names what is refused, or what is
            not installed here; or a tensor goes to a device that is not there.

    Example:
        >>> import fxopt, tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fxopt.save(fxopt.trace(torch.nn.ReLU(), (torch.zeros(2),)), folder)
        ...     fxopt.load(folder)(torch.tensor([-1.0, 1.0]))
        tensor([0., 1.])
    """
    place, target = Path(folder), None if device is None else torch.device(device)
    document, entries = files.read(place)
    try:
        tensors = restored(entries, document["tensors"], target)
        if "graphs" not in document:
            return _rebuilt(document, Names(trusted), tensors)
        graphs = [_rebuilt(data, Names(trusted), tensors) for data in document["graphs"]]
        calls = [(int(count), tuple(map(str, given))) for count, given in document["calls"]]
        made = GraphSet(zip(calls, graphs, strict=True), bool(document["tune"]))
        made.choose_kernels()
        return made
    except NameRefused as error:
        raise LoadError(
            f"{place / files.GRAPH} names {error}, which fxopt does not load: neither an operator of torch nor a class that "
            "only holds values. If it is a class or function of yours, give it in `trusted`."
        ) from None
    except NoSuchDevice as error:
        raise LoadError(
            f'{place / files.GRAPH} puts {error}. Say where the tensors go, such as device="cpu".'
        ) from None
    except NotData as error:
        raise LoadError(
            f"{place / files.GRAPH} holds {error}: it was changed, or another program wrote it."
        ) from None
    except FxoptError:
        raise
    except Exception as error:  # whatever a file can be made to hold
        raise LoadError(
            f"{place / files.GRAPH} describes no graph module ({type(error).__name__}: {error}): save it again."
        ) from error


def _graphs_in(module: torch.nn.Module) -> Sequence[tuple[Call, GraphModule]]:
    """The graphs that a module computes by, each with the kind of call for which it is tried."""
    if isinstance(module, GraphModule):
        return [((0, ()), module)]
    if isinstance(module, GraphSet):
        return [(call, cast(GraphModule, g)) for call, g in zip(module.calls, module.graphs, strict=True)]
    if not isinstance(module, torch.nn.Module) or original(module) is module:
        raise SaveError(
            f"a {type(module).__name__} is no graph module: capture it first, with fxopt.symbolic_trace or fxopt.trace."
        )
    hooks = [kind for kind in hooks_of(module) if "forward" in kind]
    if hooks:
        raise SaveError(
            f"this module of fxopt.optimize has hooks ({', '.join(hooks)}), which are no part of its graphs: remove them."
        )
    made = getattr(module, GRAPHS).made()
    if not made:
        raise SaveError(
            "this module of fxopt.optimize has no graph to save: call it before, under torch.no_grad(), with each kind of "
            "inputs that it is to take. print(module.report) says why there is none where it was called."
        )
    return made  # type: ignore[no-any-return]


def _is_tuned(module: torch.nn.Module) -> bool:
    return module.tune if isinstance(module, GraphSet) else bool(getattr(module, GRAPHS).options.tune)


def _names_of_tensors(graphs: Sequence[GraphModule]) -> dict[int, str]:
    """A name for each tensor, where it is not that of another one in an earlier graph."""
    found: dict[str, torch.Tensor] = {}
    for graph in graphs:
        for name, tensor in (*graph.named_parameters(), *graph.named_buffers()):
            found.setdefault(name, tensor)
    return {id(tensor): name for name, tensor in reversed(found.items())}


def _written(graph: GraphModule, names: Names, tensors: TensorTable, records: bool) -> dict[str, Any]:
    """A graph module as data, but for its tensors; with what undo needs where its records are wanted."""
    find_record(graph)  # puts marks back that a pickle has dropped
    writer = ModuleWriter(names, tensors, records)
    document = {"class_name": graph.__class__.__name__, **write_graph(graph.graph, names)}
    writer.write_root(graph)
    return {**document, "modules": writer.written}


def _rebuilt(document: Mapping[str, Any], names: Names, tensors: Mapping[str, torch.Tensor]) -> GraphModule:
    if not is_identifier(document["class_name"]):
        raise NotData(f"the class name {document['class_name']!r}")
    reader = ModuleReader(names, document["modules"], tensors)
    reader.fill()
    made = reader.graph_module(read_graph(document, names), document["class_name"])
    for node in made.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            _check_target(made, node)
    return made


def _check_target(module: GraphModule, node: torch.fx.Node) -> None:
    """Raise NotData unless a node reads or calls what the modules hold; no attribute of a class is reached."""
    *path, last = str(node.target).split(".")
    owner: Any = module
    for name in path:
        owner = modules_of(owner).get(name)
    held = {} if owner is None else vars(owner) | parameters_of(owner) | buffers_of(owner) | modules_of(owner)
    is_module = isinstance(held.get(last), torch.nn.Module)
    if (
        last not in held
        or is_module != (node.op == "call_module")
        or (not is_module and callable(held[last]))
    ):
        raise NotData(f"the node {node.name!r} of {node.target!r}, which is not there")


def _prove(
    module: GraphModule, document: dict[str, Any], names: Names, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Rebuild the module from what would be written, so that what is saved can be loaded."""
    try:
        made = _rebuilt(files.as_read(document), names, tensors)
    except Exception as error:
        raise SaveError(
            f"what would be saved could not be loaded ({type(error).__name__}: {error})."
        ) from error
    before, after = ([n.format_node() for n in m.graph.nodes] for m in (module, made))
    if [n.name for n in module.graph.nodes] != [n.name for n in made.graph.nodes] or before != after:
        wrong = next((one for one, other in zip(before, after, strict=False) if one != other), "its end")
        raise SaveError(f"what would be saved is not the same graph: {wrong} is lost.")
