"""`optimize`: a module that stands for a model, and computes its forward by graphs with faster kernels."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from fxopt.capture.trace import check_model
from fxopt.engines import AUTO, ENGINES, TORCH
from fxopt.errors import FxoptError, GuardError, PassError
from fxopt.objects import why_no_inputs
from fxopt.optimizing.dispatch import Graphs
from fxopt.optimizing.inputs import Inputs, has_own_kernels
from fxopt.optimizing.lowering import Lowered
from fxopt.optimizing.prepare import PRECISIONS, Options
from fxopt.optimizing.report import Report
from fxopt.submodules import GRAPHS, OWN_COMPILED, OWN_FORWARD, STANDS_FOR, original
from fxopt.torch_internals import COMPILED, has_any_global_hook, is_transforming

M = TypeVar("M", bound=nn.Module)


def optimize(
    model: M,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    precision: str = "float32",
    tune: bool = True,
    keep_model: bool = True,
    dynamic_shapes: Any = None,
    max_graphs: int = 8,
    wait: bool = True,
    methods: Sequence[str] = (),
    engine: str = TORCH,
    progress: bool = True,
) -> M:
    """Make a model faster for inference.

    The result is a module of the model's class with its weights, attributes and `state_dict`, so that `generate()` and
    pipelines work as before. Graphs compute its forward: folded, with the fastest kernels on this machine. A graph is
    used only if it is as exact as the model (against float64) and not slower; else the model's own forward runs, with one
    warning that says why.

    Args:
        model: a module; calls in training mode fall back to eager.
        args: positional example inputs, to make the first graph at once. Without example inputs, the first call for each structure
            of inputs makes a graph. If a later call has other sizes, the next graph leaves these sizes free.
        kwargs: example inputs by keyword.
        precision: `float32` differs from the model by rounding alone; `bfloat16` runs layers in that; `int8` gives linear
            layers weights and inputs in int8 where that is faster.
        tune: measure the kernels and the speed. With False, a kernel is used unless an earlier measurement found it slower.
        keep_model: keep the model beside its graphs. With False, the result holds the graph for the example inputs alone, raises
            GuardError for other inputs, and keeps no weight that it has packed. The model's memory is free once nothing else holds
            the model.
        dynamic_shapes: which sizes are free, as `fxopt.trace` takes it.
        max_graphs: the largest number of graphs; the least recently used one is dropped first.
        wait: whether a call waits while another thread makes a graph. With False, the model itself runs meanwhile.
        methods: other methods to compute by graphs, such as `encode` and `decode`; their first calls make the graphs.
        engine: what computes the graphs: `torch`, `inductor` (torch.compile), `openvino`, `onnxruntime` or, on a GPU, `cudagraphs`; `auto`
            takes the fastest. An engine is checked as torch's kernels are. If it cannot compute a graph, torch does, with a warning.
        progress: show the current stage on a terminal, if making a graph takes longer than two seconds.

    Returns:
        The module, for calls under `torch.no_grad()` or `torch.inference_mode()`, also from several threads. Its
        attributes are those of the model, and one that is set on either is set on both. `print(fast.report)` says what was
        done, and `fxopt.undo(fast)` gives the model back. `.to()`, `load_state_dict`, writes in place, swapped layers and
        adapters, train and eval, and numbers, strings, flags and tensors on modules, also in tuples, dicts, lists and sets of at
        most 1000 elements, are noticed; after anything else call `fast.refresh()`.

    Raises:
        TraceError: the model is one of torch.jit, has lazy parameters, or is wrapped, as by torch.compile.
        PassError: the model is a graph module, is optimized already, or overrides `__call__`; example inputs are given and it is in training mode, or
            weights are on the meta device; or `keep_model=False` and there is no graph.
        ValueError: an unknown precision or engine, an engine or methods with `keep_model=False`, `auto` with `tune=False`, a name in `methods`
            that is not a method or is `forward`, or `max_graphs` is less than 1.
        TypeError: `model` is no module; the example inputs do not fit the model's forward, or `dynamic_shapes` names others; or `keep_model=False`
            and there are none.
        Exception: what the model raises for the example inputs, if these can be captured; otherwise the first call raises.

    Example:
        >>> import torch, fxopt
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).eval(), torch.randn(8, 64)
        >>> with torch.no_grad():
        ...     torch.allclose(fxopt.optimize(model, (x,))(x), model(x), atol=1e-5)
        True
    """
    names = (methods,) if isinstance(methods, str) else tuple(methods)
    options = Options(precision, tune, keep_model, max_graphs, wait, names, engine, progress, dynamic_shapes)
    _check(model, options)
    inputs = _example_inputs(model, args, kwargs, options)
    fast = _standing_for(model, options)
    graphs: Graphs = getattr(fast, GRAPHS)
    made = graphs.make(inputs) if inputs else None
    return fast if keep_model else _Alone(made, graphs.report)  # type: ignore[return-value]


def _check(model: Any, options: Options) -> None:
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize takes a torch.nn.Module, not {name}")
    if isinstance(model, torch.fx.GraphModule):
        raise PassError(
            "this is a graph module already: apply fxopt.compose(fxopt.PackConvs(), fxopt.PackLinears(), "
            "fxopt.FuseEpilogues()) to it, or give optimize the model that it was captured from"
        )
    check_model(model)
    if type(model).__call__ is not nn.Module.__call__:
        raise PassError(
            f"{name} has a __call__ of its own, which no graph contains: move what it does into forward"
        )
    if original(model) is not model:
        raise PassError("this module is optimized already: give optimize the model, which fxopt.undo returns")
    for option, known in {"precision": PRECISIONS, "engine": (TORCH, AUTO, *ENGINES)}.items():
        if (value := getattr(options, option)) not in known:
            raise ValueError(f"{option} is {value!r}; give one of {', '.join(map(repr, known))}")
    for method in options.methods:
        if method == "forward" or not callable(getattr(type(model), method, None)):
            raise ValueError(f"methods: give methods of {name} other than forward, not {method!r}")
    if options.methods and not options.keep_model:
        raise ValueError("keep_model=False keeps one graph, of the forward: leave methods empty")
    if options.engine != TORCH and not options.keep_model:
        raise ValueError(f"keep_model=False keeps a graph for torch, not for engine={options.engine!r}")
    if options.engine == AUTO and not options.tune:
        raise ValueError(
            "engine='auto' takes what is measured as the fastest: leave tune=True, or name an engine"
        )
    if type(options.max_graphs) is not int or options.max_graphs < 1:
        raise ValueError(f"max_graphs is {options.max_graphs!r}; give a number of graphs, 1 or more")


def _example_inputs(model: nn.Module, args: Any, kwargs: Any, options: Options) -> Inputs | None:
    """The example inputs; None if there are none."""
    fault = why_no_inputs(args, kwargs)
    if not (fault or args or kwargs):
        if options.keep_model:
            return None
        fault = "keep_model=False keeps the graph for example inputs: give optimize some"
    if fault:
        raise TypeError(fault)
    if model.training:
        raise PassError("the model is in training mode: call model.eval() before you give example inputs")
    inputs = Inputs(tuple(args), dict(kwargs or {}))
    try:
        given = inputs.named(model.forward)
    except TypeError as error:
        name = type(model).__name__
        raise TypeError(f"the example inputs do not fit the forward of {name}: {error}") from None
    named = options.dynamic_shapes if isinstance(options.dynamic_shapes, Mapping) else ()
    unknown = {*named} - {*given}
    if unknown:
        raise TypeError(f"dynamic_shapes names {sorted(unknown, key=str)}; the inputs are {[*given]}")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise PassError("the model has weights on the meta device, which cannot be measured: load them first")
    return inputs


def _standing_for(model: M, options: Options) -> M:
    """A module that shares the `__dict__` of the model, and computes its forward by graphs; its class is a subclass of the model's."""
    own = tuple(name for name in ("report", "refresh") if not hasattr(model, name))
    kind: Any = type(model)
    fast: Any = object.__new__(_optimized_class(kind, own, options.methods))
    object.__setattr__(fast, "__dict__", vars(model))
    object.__setattr__(fast, STANDS_FOR, model)
    object.__setattr__(fast, GRAPHS, Graphs(model, options))
    return fast  # type: ignore[no-any-return]


class _Alone(nn.Module):
    """A graph without its model."""

    def __init__(self, made: Lowered | None, report: Report) -> None:
        super().__init__()
        if made is None:
            raise PassError(f"there is no graph, and keep_model=False keeps nothing else. {report}")
        self.training, self.report, self._computed = False, report, made

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        autocast = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        unusual = any(map(has_own_kernels, Inputs(args, kwargs).tensors()))
        other = self.training or torch.is_grad_enabled() or autocast or unusual
        if other or is_transforming() or has_any_global_hook():
            raise GuardError(
                "the graph is for inference: call it in eval mode and under torch.no_grad(), without autocast, global hooks and "
                "torch.func, with dense tensors of torch's own classes"
            )
        return self._computed(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Alone:
        return _Alone(copy.deepcopy(self._computed, memo), self.report)

    def _has_no_model(self, *_: Any) -> Any:
        raise PassError(
            "a module of optimize(keep_model=False) holds one graph and no model, so that it cannot be saved, pickled or "
            "undone: do that with what optimize makes with keep_model=True"
        )

    __reduce_ex__ = _has_no_model
    locals()[STANDS_FOR] = property(_has_no_model)


class _Own:
    """Descriptor of an attribute that the optimized module does not share with the model: `forward`, and the compiled call."""

    def __init__(self, name: str, default: Callable[[Any], Any], of_class: Any) -> None:
        self._name, self._default, self._of_class = name, default, of_class

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return self._of_class
        try:
            return object.__getattribute__(module, self._name)
        except AttributeError:
            return self._default(module)

    def __set__(self, module: Any, value: Any) -> None:
        object.__setattr__(module, self._name, value)

    def __delete__(self, module: Any) -> None:
        object.__delattr__(module, self._name)


class _Optimized:
    """The members that an optimized class adds to the model's class. An instance that the class itself makes has no graphs."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Skip the `__init_subclass__` of the model's class, which may need arguments or register the subclass."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        graphs: Graphs | None = getattr(self, GRAPHS, None)
        if graphs is None:
            return super().__reduce_ex__(protocol)
        return _standing_for, (original(self), graphs.options)


@functools.lru_cache(maxsize=256)
def _optimized_class(cls: Any, own: tuple[str, ...], methods: tuple[str, ...]) -> Any:
    """A subclass with the name of `cls`: libraries look models up by the names of their classes."""
    public = (n for n, each in vars(cls).items() if type(each) is types.FunctionType and n[0] != "_")
    added = {
        "report": property(lambda module: getattr(getattr(module, GRAPHS, None), "report", Report())),
        "refresh": lambda module: getattr(module, GRAPHS).refresh(),
    }
    optimized = ("forward", *methods)
    # Class methods stay bound to the model's class, which can be pickled by its name.
    of_class = [
        n for n in dir(cls) if n[:2] != "__" and isinstance(inspect.getattr_static(cls, n), classmethod)
    ]
    wrapped = {name: _wrapped(cls, name, name in optimized) for name in (*public, *optimized)}
    members = {
        **{name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")},
        **wrapped,
        **{name: staticmethod(getattr(cls, name)) for name in of_class},
        **{name: added[name] for name in own},
        **({"get_encoder": _optimized_encoder(cls.get_encoder)} if hasattr(cls, "get_encoder") else {}),
        "__slots__": (STANDS_FOR, GRAPHS, OWN_FORWARD, OWN_COMPILED),
        "__jit_ignored_attributes__": ["report"],
        "forward": _Own(
            OWN_FORWARD, functools.partial(types.MethodType, wrapped["forward"]), wrapped["forward"]
        ),
        COMPILED: _Own(OWN_COMPILED, lambda module: None, None),
    }
    return type(cls.__name__, (_Optimized, cls), members)


def _wrapped(cls: Any, name: str, optimized: bool) -> Any:
    """Wrap a method: graphs compute it, or the model computes it and the report names it."""
    method = getattr(cls, name)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        graphs: Graphs | None = getattr(self, GRAPHS, None)
        if graphs is not None and optimized:
            return graphs.run(Inputs(args, kwargs, name))
        if graphs is not None:
            graphs.called[name] = None
        return method(self, *args, **kwargs)

    return call


def _optimized_encoder(method: Any) -> Any:
    """Wrap `get_encoder` to return an optimized encoder, which `generate()` calls by itself."""

    @functools.wraps(method)
    def get_encoder(self: Any, *args: Any, **kwargs: Any) -> Any:
        encoder, graphs = method(self, *args, **kwargs), getattr(self, GRAPHS, None)
        alone = getattr(vars(self).get("config"), "is_encoder_decoder", False)
        if graphs is None or not alone:
            return encoder
        # Raised for an encoder that torch.compile wraps, or that is optimized already.
        with contextlib.suppress(FxoptError):
            if id(encoder) not in graphs.parts:
                options = dataclasses.replace(graphs.options, methods=(), dynamic_shapes=None)
                _check(encoder, options)
                graphs.parts[id(encoder)] = _standing_for(encoder, options)
        return graphs.parts.get(id(encoder), encoder)

    return get_encoder
