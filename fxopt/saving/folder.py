"""`save` and `load`: a folder with `graph.json` and a file of safetensors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from fxopt.errors import LoadError, SaveError, error_text
from fxopt.operators import hooks_of
from fxopt.saving import files
from fxopt.saving.allowed import Names, Refused
from fxopt.saving.graph_set import GraphSet
from fxopt.saving.reading import Reader
from fxopt.saving.tensors import restored
from fxopt.saving.writing import Writer
from fxopt.submodules import GRAPHS, original


def save(module: torch.nn.Module, folder: str | os.PathLike[str], *, trusted: Iterable[Any] = ()) -> None:
    """Save a graph module as data: its graph in `graph.json`, its tensors in safetensors.

    Everything goes to the file that the graph runs with: layers, parameters and buffers (those that are not persistent,
    too), ties, training flags, guards, the places in the model that nodes come from, `.config` of a transformers model,
    and the record of passes, so that `fxopt.undo` works on what `load` gives. Not kept are gradients, the description of
    values in `node.meta["val"]`, without which passes may refuse more (apply them first), `gm.meta`, and a `.config` that
    is not rebuilt from its `to_dict()`. A pass whose changes are no data stays in `fxopt.history` and cannot be undone.

    Of a module that `fxopt.optimize` made, the graphs are saved that it has so far, and no record of passes.

    Args:
        module: a captured module, any `torch.fx.GraphModule`, or a module that `fxopt.optimize` made.
        folder: where it goes. What `save` has written there before is replaced; other files stay.
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
    names, root = Names(trusted), _with_graphs(module)
    with _told(SaveError, f"a {type(module).__name__} cannot be saved"):
        writer = Writer(names, root)
        document: dict[str, Any] = writer.document()
        entries, document["tensors"] = writer.tensors.stored()
        _compare(root, Reader(names, files.as_read(document), writer.tensors.tensors).modules[0])
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
    document, entries = files.read(Path(folder))
    with _told(LoadError, f"{Path(folder) / files.GRAPH} cannot be loaded"):
        tensors = restored(entries, document["tensors"], None if device is None else torch.device(device))
        made = Reader(Names(trusted), document, tensors).modules[0]
        if not isinstance(made, GraphModule | GraphSet):
            raise Refused(f"a {type(made).__name__}, which has no graph")
        if isinstance(made, GraphSet):
            made.choose_kernels()
    return made


@contextlib.contextmanager
def _told(kind: type[Exception], what: str) -> Iterator[None]:
    """Tell of any error what it means; a file, and the classes of a user, can be made to raise whatever they like."""
    try:
        yield
    except Refused as error:
        raise kind(f"{what}: {error}.") from None
    except Exception as error:
        raise kind(f"{what}: {error_text(error)}") from error


def _with_graphs(module: nn.Module) -> GraphModule | GraphSet:
    """The module itself, or the graphs of an optimized one."""
    if isinstance(module, GraphModule | GraphSet):
        return module
    if not isinstance(module, nn.Module) or original(module) is module:
        raise SaveError(
            f"a {type(module).__name__} is no graph module: capture it first, with fxopt.symbolic_trace or fxopt.trace."
        )
    hooks = [kind for kind in hooks_of(module) if "forward" in kind]
    if hooks:
        raise SaveError(
            f"this module of fxopt.optimize has hooks ({', '.join(hooks)}), which are no part of its graphs: remove them."
        )
    graphs = getattr(module, GRAPHS)
    made = graphs.made()
    if not made:
        raise SaveError(
            "this module of fxopt.optimize has no graph to save: call it before, under torch.no_grad(), with each kind of "
            "inputs that it is to take. print(module.report) says why there is none where it was called."
        )
    return GraphSet(made, bool(graphs.options.tune))


def _compare(root: nn.Module, made: nn.Module) -> None:
    """Raise Refused where what would be loaded has other code, but for the types of nodes that are not kept."""
    graphs = ([m.graph for m in each.modules() if isinstance(m, GraphModule)] for each in (root, made))
    for graph, other in zip(*graphs, strict=True):
        for node, copied in zip(graph.nodes, other.nodes, strict=True):
            copied.type = node.type
        if graph.python_code("self").src != other.python_code("self").src:
            raise Refused("what would be loaded has other code, as where torch.export wrote the graph")
