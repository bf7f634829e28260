"""`optimize`: a module that stands for a model, and computes its forward by graphs with faster kernels."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from fxopt.errors import PassError
from fxopt.objects import why_no_inputs
from fxopt.operators import hooks_of
from fxopt.optimizing.dispatch import Graphs
from fxopt.optimizing.inputs import Inputs
from fxopt.optimizing.offloading import Offloaded
from fxopt.optimizing.prepare import MEMORIES, PRECISIONS, Options
from fxopt.optimizing.report import Report
from fxopt.rewriting.history import GRAPHS, STANDS_FOR
from fxopt.torch_internals import COMPILED, buffers_of, parameters_of

M = TypeVar("M", bound=nn.Module)


def optimize(
    model: M,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    precision: str = "float32",
    tune: bool = True,
    memory: str = "high",
    dynamic_shapes: Any = None,
) -> M:
    """Make a model faster for inference.

    The result is a module of the model's class with its weights, attributes and `state_dict`, so that `generate()` and
    pipelines work as before. Graphs compute its forward: folded, with the fastest kernels on this machine. A graph is
    used only if it is as exact as the model (against float64) and not slower; else the model's own forward runs, with one
    warning that says why.

    Args:
        model: a module in eval mode. It stays as it is, but for where its weights are with `memory="low"`.
        args: positional example inputs, to make the first graph now. Without any, graphs are made at the first call
            for each structure of inputs; sizes that differ in a later call are free in the next graph.
        kwargs: example inputs by keyword.
        precision: `float32` differs from the model by rounding alone; `bfloat16` runs layers in that; `int8` gives linear
            layers weights in int8 where that is faster, as in decoding.
        tune: measure the kernels and the speed; without it, packed kernels are taken everywhere.
        memory: `high` keeps the model's weights beside the packed ones; `low` moves them to a file in `~/.cache/fxopt`
            (or in the folder that `FXOPT_CACHE` names), from which they come back, bit for bit, where something reads them.
        dynamic_shapes: which sizes are free, as `fxopt.trace` takes it.

    Returns:
        The module, for calls under `torch.no_grad()` or `torch.inference_mode()`, also from several threads.
        `print(fast.report)` says what was done, and `fxopt.undo(fast)` gives the model back. When weights, modules,
        hooks, flags, or options in numbers and strings have changed, it makes new graphs; unnoticed are other
        attributes, writes into `.data` or through numpy, and what fused optimizers do while the module is not called.

    Raises:
        PassError: the model is in training mode, is a graph module or one of torch.jit, has lazy parameters, or overrides
            `__call__`; example inputs are given and weights are on the meta device; or the file for `memory="low"` cannot be
            written.
        ValueError: an unknown precision, or value of `memory`.
        TypeError: the example inputs do not fit the model's forward, or `dynamic_shapes` names others.

    Example:
        >>> import torch, fxopt
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).eval(), torch.randn(8, 64)
        >>> with torch.no_grad():
        ...     torch.allclose(fxopt.optimize(model, (x,))(x), model(x), atol=1e-5)
        True
    """
    options = Options(precision, tune, memory)
    _check(model, options)
    _check_inputs(model, args, kwargs, dynamic_shapes)
    fast = _standing_for(model, options, dynamic_shapes)
    if args or kwargs:
        graphs: Graphs = fast.__dict__[GRAPHS]
        graphs.make(Inputs(tuple(args), dict(kwargs or {})))
    return fast


def _check(model: Any, options: Options) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, torch.fx.GraphModule):
        raise PassError(
            "this is a graph module already: apply fxopt.compose(fxopt.PackConvs(), fxopt.PackLinears(), "
            "fxopt.FuseEpilogues()) to it, or give optimize the model that it was captured from"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise PassError(
            "this is a torch.jit module, which has no forward in Python: give optimize the model itself"
        )
    if type(model).__call__ is not nn.Module.__call__:
        raise PassError(
            f"{type(model).__name__} has a __call__ of its own, which a graph of its forward would leave out: move what "
            "it does into forward"
        )
    if STANDS_FOR in model.__dict__:
        raise PassError(
            "this module is optimized already; fxopt.undo gives the model, to optimize it in another way"
        )
    if model.training:
        raise PassError(
            "the model is in training mode, and optimize is for inference: call model.eval() first"
        )
    if any(map(torch.nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
        raise PassError("the model has parameters without a shape yet: run it once, then optimize it")
    for name, known in (("precision", PRECISIONS), ("memory", MEMORIES)):
        given = getattr(options, name)
        if given not in known:
            raise ValueError(f"{name} is {given!r}; give one of {', '.join(map(repr, known))}")


def _check_inputs(model: nn.Module, args: Any, kwargs: Any, dynamic_shapes: Any) -> None:
    fault = why_no_inputs(args, kwargs)
    if fault:
        raise TypeError(fault)
    if not (args or kwargs):
        return
    try:
        given = inspect.signature(model.forward).bind(*args, **(kwargs or {})).arguments
    except TypeError as error:
        raise TypeError(
            f"the example inputs do not fit the forward of {type(model).__name__}: {error}"
        ) from None
    unknown = set(dynamic_shapes) - {*given, *(kwargs or {})} if isinstance(dynamic_shapes, Mapping) else ()
    if unknown:
        raise TypeError(f"dynamic_shapes names {sorted(unknown, key=str)}; the inputs are {[*given]}")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise PassError("the model has weights on the meta device, which cannot be measured: load them first")


def _standing_for(model: M, options: Options, dynamic_shapes: Any, offloaded: Offloaded | None = None) -> M:
    """A module of a class like the model's, which computes its forward by graphs; `offloaded` are the weights if they are."""
    if options.memory == "low" and offloaded is None:
        offloaded = Offloaded(model.parameters(), model.buffers())
    kind: Any = type(model)
    fast = _shared(model, _optimized_class(kind, not hasattr(model, "report")))
    # What someone has put on the instance, or compiled, is the model's own forward.
    for name in ("forward", COMPILED):
        fast.__dict__.pop(name, None)
    fast.__dict__[STANDS_FOR] = model

    def twin() -> nn.Module:
        attributes = {
            n: v
            for n, v in vars(fast).items()
            if n not in (STANDS_FOR, GRAPHS, COMPILED) and "hooks" not in n
        }
        made = _shared(model, type(model))
        made.__dict__.pop(COMPILED, None)
        made.__dict__ |= {name: _copied(value) for name, value in attributes.items()}
        # Those of the module itself run around its forward, which is what the graph stands for.
        made.__dict__ |= {name: type(vars(made)[name])() for name in hooks_of(made)}
        return made

    fast.__dict__[GRAPHS] = Graphs(fast, twin, options, dynamic_shapes, offloaded)
    return fast


def _shared(model: M, cls: Any) -> M:
    """A module of class `cls` with the attributes, weights and children of the model."""
    made: M = object.__new__(cls)
    made.__dict__.update({name: _copied(value) for name, value in vars(model).items()})
    return made


def _copied(value: Any) -> Any:
    """The registries of a module are its own; what is in them is shared."""
    return value.copy() if isinstance(value, dict) else value


@functools.lru_cache(maxsize=256)
def _optimized_class(cls: Any, reports: bool) -> Any:
    """A subclass with the name of `cls`: libraries look models up by the names of their classes.

    What is made of the class itself, and not by `optimize`, is as one of `cls`.
    """

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        graphs: Graphs | None = vars(self).get(GRAPHS)
        if graphs is None:
            return cls.forward(self, *args, **kwargs)
        model = self.__dict__[STANDS_FOR]
        eager = model.forward if "forward" in vars(model) else functools.partial(cls.forward, self)
        return graphs.run(eager, Inputs(args, kwargs), self.training)

    def for_both(method: Any) -> Any:
        """A method that gives a module other tensors, of which the model gets those that were its own as well."""

        @functools.wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if GRAPHS not in vars(self):
                return method(self, *args, **kwargs)
            model = self.__dict__[STANDS_FOR]
            pairs = [(parameters_of(model), self._parameters), (buffers_of(model), self._buffers)]
            # Children are shared, so that theirs are those of both.
            shared = [[name for name in mine if its.get(name) is mine[name]] for its, mine in pairs]
            found = method(self, *args, **kwargs)
            for (its, mine), names in zip(pairs, shared, strict=True):
                its.update({name: mine[name] for name in names})
            vars(self)[GRAPHS].forget()
            return found

        return run

    def reduce(self: Any, protocol: Any) -> Any:
        graphs: Graphs | None = vars(self).get(GRAPHS)
        if graphs is None:
            return cls.__reduce_ex__(self, protocol)
        model = self.__dict__[STANDS_FOR]
        return _standing_for, (model, graphs.options, graphs._dynamic), _own_attributes(self, model)

    def setstate(self: Any, state: Any) -> None:
        if GRAPHS not in vars(self):
            cls.__setstate__(self, state)
            return
        vars(self).update(state)
        vars(self)[GRAPHS].forget()

    def get_encoder(self: Any, *args: Any, **kwargs: Any) -> Any:
        encoder = cls.get_encoder(self, *args, **kwargs)
        graphs: Graphs | None = vars(self).get(GRAPHS)
        alone = encoder is not self and getattr(vars(self).get("config"), "is_encoder_decoder", False)
        return _optimized_part(graphs, encoder) if graphs is not None and alone else encoder

    def report(self: Any) -> Report:
        graphs: Graphs | None = vars(self).get(GRAPHS)
        return Report() if graphs is None else graphs.report

    members = {"forward": forward, "__reduce_ex__": reduce, "__setstate__": setstate}
    members |= {
        name: for_both(getattr(cls, name))
        for name in ("_apply", "_load_from_state_dict")
        if hasattr(cls, name)
    }
    members |= {"report": property(report)} if reports else {}
    members |= {"get_encoder": get_encoder} if hasattr(cls, "get_encoder") else {}
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (_Subclass, cls), members | names)


def _own_attributes(fast: nn.Module, model: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are others than those of the model it stands for: a layer or flag given since, its hooks."""
    theirs, left_out = vars(model), (STANDS_FOR, GRAPHS, COMPILED)
    return {
        name: value
        for name, value in vars(fast).items()
        if name not in left_out and not (name in theirs and _same_objects(value, theirs[name]))
    }


def _same_objects(one: Any, other: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return one is other
    return [*one] == [*other] and all(map(operator.is_, one.values(), other.values()))


def _optimized_part(graphs: Graphs, part: nn.Module) -> nn.Module:
    """A part of an optimized module that is called by itself, as `generate()` does with encoders, optimized as that is."""
    made = graphs.parts.get(id(part))
    if made is None:
        try:
            _check(part, graphs.options)
            made = _standing_for(part, graphs.options, None, graphs.offloaded)
        except PassError:  # it is in training mode, or nothing that can be optimized
            return part
        graphs.parts[id(part)] = made
    if "forward" in vars(part):
        return part
    # It has the same weights, flags and hooks, also where these are others by now.
    made.__dict__.update(vars(part))
    return made


class _Subclass:
    """Keeps `__init_subclass__` of a model's class, which may ask for more or register what it is called with, from running."""

    def __init_subclass__(cls) -> None:
        return None
