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

    The folder contains everything that the graph needs to run: layers, parameters, buffers (including non-persistent ones),
    ties, training flags and guards. It also contains the source location of nodes, `.config` of a transformers model, and the
    record of passes, so that `fxopt.undo` works after `load`. Not saved are gradients, `gm.meta`, and a `.config` that cannot
    be rebuilt from its `to_dict()`. The fake tensors in `node.meta["val"]` are not saved either. Without them, passes may
    refuse more sites, so apply passes before you save. A pass whose changes are not data stays in `fxopt.history`, but cannot
    be undone.

    For a module that `fxopt.optimize` made, `save` writes its current graphs, without the record of passes.

    Args:
        module: a captured module, any `torch.fx.GraphModule`, or a module that `fxopt.optimize` made.
        folder: the folder to write. Files of an earlier `save` are replaced; other files stay.
        trusted: your own classes and functions that the graph calls or has as layers; `load` needs the same.

    Raises:
        SaveError: the module contains objects that are not data, or calls functions that `load` would refuse; or the folder
            cannot be written. The content of the folder is then unchanged.

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
    """Load a module that `save` wrote, with the same graph, code, names, weights, guards and outputs.

    Nothing is unpickled, and no code from the folder runs: operators and classes are looked up by name among those that a
    graph may use, and all others are refused. So you can load a folder from an unknown source, but its graph may compute
    anything. The digests in the folder detect damage; they do not prove who wrote it. `.config` is the dict of the
    configuration's `to_dict()`, unless its class is in `trusted`: the `from_dict` of some classes accesses the hub.

    Args:
        folder: the folder that `save` wrote.
        device: the device of the tensors; by default the device that each had.
        trusted: the same classes and functions as for `save`, and the class of `.config` to restore the configuration.

    Returns:
        A `TracedModule`, or a `torch.fx.GraphModule` if one was saved. For a module that `fxopt.optimize` made, a module that
        computes the same by its graphs; its packed layers get the fastest kernels on this machine. It is not of the model's
        class, has no `generate()`, and raises a `GuardError` for inputs that no graph accepts.

    Raises:
        LoadError: a file is missing, cut off, changed, or of another format; the graph names objects that are refused or not
            installed here; or a device of a tensor is not available.

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
    """Raise any error in the block as `kind`: a file, and classes of users, may raise anything."""
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
            "this module of fxopt.optimize has no graph to save: call it first, under torch.no_grad(), with each kind of "
            "inputs that it must accept. If you did call it, print(module.report) says why there is no graph."
        )
    return GraphSet(made, bool(graphs.options.tune))


def _compare(root: nn.Module, made: nn.Module) -> None:
    """Raise Refused if the module that `load` would return has other code, ignoring types of nodes, some of which are lost."""
    graphs = ([m.graph for m in each.modules() if isinstance(m, GraphModule)] for each in (root, made))
    for graph, other in zip(*graphs, strict=True):
        for node, copied in zip(graph.nodes, other.nodes, strict=True):
            copied.type = node.type
        if graph.python_code("self").src != other.python_code("self").src:
            raise Refused("what would be loaded has other code, as where torch.export wrote the graph")
