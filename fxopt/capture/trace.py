"""`trace`: capture the forward of any `nn.Module` as a `TracedModule`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxopt.capture.capture_internals import check, peek_interpreter_stack
from fxopt.capture.fakes.module_tree import LeafModules, leaves
from fxopt.capture.patches.interception import lock
from fxopt.capture.recording.request import Request
from fxopt.capture.runs.explore import capture_graph
from fxopt.capture.runtime.traced_module import TracedModule
from fxopt.errors import TraceError, raise_of_signal
from fxopt.objects import why_no_inputs
from fxopt.submodules import original
from fxopt.torch_internals import buffers_of, modules_of, parameters_of

# Wrapper classes of torch, and the attribute that holds the wrapped module.
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    **dict.fromkeys(("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"), "module"),
}


def trace(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    leaf_modules: LeafModules = (),
    specialize: bool = False,
    verify: bool = True,
) -> TracedModule:
    """Capture the forward of `model` as a graph in which `torch.nn` layers are `call_module` nodes.

    The forward runs on fake tensors; the model does not change. Then the graph and a copy of the model run on the
    example inputs, and their results are compared, unless the model or the inputs have no data (fake or meta tensors).

    Args:
        model: any `nn.Module`, on one device, in the training mode and dtype in which the graph will run.
        args: positional example inputs: tensors, and tuples, lists, dicts and dataclasses of tensors. Any other
            value becomes a constant: the graph raises GuardError if a call passes a different value.
        kwargs: example inputs by keyword.
        dynamic_shapes: the dynamic dimensions, in the format of `torch.export.export`: a dict by input name, or a
            sequence in the order of the inputs, of dicts from dimension to `torch.export.Dim`. None: all sizes are
            static.
        leaf_modules: modules that become one `call_module` node each, in addition to `torch.nn` layers: types,
            qualified names, `fnmatch` patterns of names (`"model.layers.*"`; `*` also matches dots), or functions that
            accept name and module and return a bool. One of these, or a sequence. The inside of a leaf is not recorded.
        specialize: if the forward decides on the value of a tensor (`if mask.all():`, a Python number, a size), keep
            the outcome for the example inputs, and check in the graph that later inputs decide alike (GuardError). The
            example inputs must be real data. From the first such decision on, they run through the recorded nodes, on
            their own device. This costs at most one forward, and memory for its intermediate results and a copy of the
            buffers. If False, the graph holds the side of a branch that does not raise, with a runtime check, or both
            sides; if neither is possible, the capture raises TraceError.
        verify: run the model and the graph twice each on copies of the example inputs, from the same random state, and
            compare outputs, buffers, written inputs and, in training, gradients. The copy of the model shares its
            parameters; the user's objects do not change. The comparison needs little more memory than one run of the
            model (in training with backward, in eval mode without saved activations). Pass False if the inputs only
            have the right shapes, or if four forwards cost too much. If no comparison is possible, a warning says why.

    Returns:
        A `TracedModule`, a `torch.fx.GraphModule` that accepts the inputs under the names of the forward's
        parameters and returns what the model returns. Layers and parameters are shared with the model.

    Raises:
        TraceError: if an entry of `leaf_modules` matches no module; if a graph cannot represent the forward (it
            branches on a tensor's value, for example), with the line of the model; if the graph and the model compute
            different results on the example inputs, with the first node that diverges.

    Example:
        >>> import torch, fxopt
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()).eval()
        >>> traced = fxopt.trace(model, (torch.zeros(2, 4),), dynamic_shapes=({0: torch.export.Dim("batch")},))
        >>> [node.target for node in traced.graph.nodes if node.op == "call_module"]
        ['input_guard', '0', '1']
        >>> traced(torch.zeros(5, 4)).shape
        torch.Size([5, 8])
    """
    return trace_method(model, "", args, kwargs, dynamic_shapes, leaf_modules, specialize, verify)


def trace_method(
    model: torch.nn.Module,
    method: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
    leaf_modules: LeafModules = (),
    specialize: bool = False,
    verify: bool = False,
) -> TracedModule:
    """Capture a method without the hooks of the module; an empty `method` is the call of the module, as in `trace`."""
    check()
    if peek_interpreter_stack() is not None:
        raise TraceError(
            "a capture inside a transform of torch.func (vmap, grad, jvp) is not possible, because the transform wraps tensors. "
            "Capture outside of it, and apply the transform to the captured module."
        )
    model = original(model)
    check_model(model)
    layers = leaves(model, leaf_modules)
    own = TracedModule(torch.nn.Module(), torch.fx.Graph())
    held = [*modules_of(model), *parameters_of(model), *buffers_of(model)]
    taken = [name for name in held if hasattr(own, name)]
    if taken:
        raise TraceError(
            f"the names {taken} of {type(model).__name__} clash with attributes of torch.fx.GraphModule; rename them."
        )
    known = sys.exception()
    inputs = _bind_inputs(model, method or "forward", args, kwargs or {})
    dimensions = _normalise_dynamic_shapes(dynamic_shapes, inputs)
    with lock:
        try:
            return capture_graph(Request(model, inputs, dimensions, layers, specialize, method), verify)
        except TraceError:
            raise
        except RecursionError as error:
            raise TraceError(
                f"an input or output of {type(model).__name__} contains itself, as a list does after `l.append(l)`, which a graph "
                "cannot describe. Remove the reference that leads back."
            ) from error
        except Exception as error:
            raise_of_signal(error, known)
            raise TraceError(
                f"fxopt itself fails on {type(model).__name__}, with {type(error).__name__}: {str(error).rstrip('.')}. Please "
                "report it. Until then, capture the parts around it, or make the module that does this a leaf "
                "(leaf_modules=...)."
            ) from error


def check_model(model: Any) -> None:
    """Raise TraceError, with advice, if `model` is not a module, is scripted or wrapped, or has lazy parameters."""
    if not isinstance(model, torch.nn.Module):
        raise TraceError(f"a capture takes a torch.nn.Module: {_instead_of(model)}")
    name = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise TraceError("the model is compiled by TorchScript; pass the module from which it was made.")
    if name in _WRAPPERS and type(model).__module__.startswith("torch."):
        raise TraceError(f"the model is wrapped in {name}; pass what it wraps, `model.{_WRAPPERS[name]}`.")
    lazy = [
        name
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if torch.nn.parameter.is_lazy(tensor)
    ]
    if lazy:
        raise TraceError(
            f"{name} has parameters without a shape yet ({', '.join(lazy)}), as lazy modules have them before their first "
            "call. Run the model once on the example inputs, then capture it."
        )


def _instead_of(model: Any) -> str:
    """Say what to pass instead of an object that is not a module."""
    if isinstance(model, type):
        return f"pass an instance, `{model.__name__}(...)`, not the class."
    if isinstance(model, torch.export.ExportedProgram):
        return "pass `program.module()` of an ExportedProgram."
    if isinstance(getattr(model, "__self__", None), torch.nn.Module):
        return "pass the module, not one of its methods."
    if callable(model):
        return "make a function the `forward` of one and pass that."
    return f"this is a {type(model).__name__}."


def _bind_inputs(
    model: torch.nn.Module, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the example values by placeholder name; variadic positional arguments are under `*name`."""
    fault = why_no_inputs(args, kwargs)
    if fault:
        raise TraceError(f"{fault}.")
    signature = inspect.signature(getattr(model, method))
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TraceError(
            f"the example inputs do not fit {type(model).__name__}.{method}{signature}: {error}."
        ) from error
    inputs: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            inputs.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            inputs[f"*{name}"] = value
        else:
            inputs[name] = value
    return inputs


def _normalise_dynamic_shapes(dynamic_shapes: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    if dynamic_shapes is None:
        return {}
    if isinstance(dynamic_shapes, Mapping):
        unknown = sorted(set(dynamic_shapes) - {name.lstrip("*") for name in inputs})
        if unknown:
            raise TraceError(f"dynamic_shapes names {unknown}; the inputs are {list(inputs)}.")
        return dict(dynamic_shapes)
    if not isinstance(dynamic_shapes, Sequence) or isinstance(dynamic_shapes, str):
        raise TraceError(
            f"dynamic_shapes is {dynamic_shapes!r}: give a dict by the names of the inputs, {list(inputs)}, or a tuple with an "
            "entry for each, as torch.export.export takes them."
        )
    if len(dynamic_shapes) != len(inputs):
        raise TraceError(
            f"dynamic_shapes has {len(dynamic_shapes)} entries for {len(inputs)} inputs: {list(inputs)}."
        )
    return {name.lstrip("*"): spec for name, spec in zip(inputs, dynamic_shapes, strict=True)}
