"""Faults in packed layers, in the passes that make them, and in what `optimize` decides."""

from __future__ import annotations

from tests.mutation.fault import Fault

_KERNELS = "kernels.py"
_OPERATORS = "packed_operators.py"
_LOWERING = "optimizing/lowering.py"
_READY = "optimizing/attention_masks.py"
_LAYOUTS = "obstacles/layouts.py"
_PACKING = "packing.py"
_CONVS = "passes/pack_convs.py"
_EPILOGUES = "passes/fuse_epilogues.py"
_TUNING = "tuning.py"
_GRAPHS = "optimizing/dispatch.py"
_PREPARE = "optimizing/prepare.py"
_EXACT = "optimizing/exactness.py"
_WATCHING = "optimizing/watching.py"

PACKING = (
    Fault("kernels: a bias lies without gaps", _KERNELS, " and bias.is_contiguous())", ")"),
    Fault(
        "lowering: sums go where somebody reads",
        _LOWERING,
        "        and not index.memory.seen_behind(other, call)\n",
        "",
    ),
    Fault(
        "lowering: sums go into what the layer reads",
        _LOWERING,
        "        and not index.memory.may_alias(other, call.all_input_nodes[0])\n",
        "",
    ),
    Fault(
        "lowering: sums go into views",
        _LOWERING,
        "        and index.memory.gives_new_memory(other)\n",
        "",
    ),
    Fault(
        "lowering: packed weights stay in small pages",
        _LOWERING,
        "    move_to_huge_pages((each.address, each.nbytes) for each in packed.values())\n",
        "",
    ),
    Fault("lowering: masks are left out", _READY, "    if mask.all():", "    if mask.any():"),
    Fault("lowering: masks are never left out", _READY, "    if mask.all():", "    if False:"),
    Fault("lowering: masks are turned around", _READY, "masked_fill_(~mask", "masked_fill_(mask"),
    Fault(
        "lowering: masks are read once, whatever happens to them",
        _READY,
        "if first is not node and self._index.memory.write_between(first, node, mask):",
        "if False:",
    ),
    Fault(
        "lowering: masks go where they choose the kernel",
        _READY,
        "return mask if fused and ",
        "return mask if ",
    ),
    Fault("lowering: modes are not switched back", _LOWERING, " or None in effects", ""),
    Fault("lowering: hooks are left out", _LOWERING, "    if hooks_of(module):", "    if False:"),
    Fault(
        "lowering: global hooks are left out",
        _GRAPHS,
        "            or torch.nn.modules.module._has_any_global_hook()\n",
        "",
    ),
    Fault("kernels: a changed weight is not packed anew", _KERNELS, "seen = (version, ", "seen = ("),
    Fault("kernels: copies share what is packed", _KERNELS, 'if name != "_packed"}', "}"),
    Fault("kernels: autocast is ignored", _KERNELS, '        and not torch.is_autocast_enabled("cpu")\n', ""),
    Fault(
        "kernels: transforms are ignored",
        _KERNELS,
        "        and torch._C._functorch.peek_interpreter_stack() is None\n",
        "",
    ),
    Fault("kernels: tanh for erf", _OPERATORS, '"gelu": ("gelu", "none")', '"gelu": ("gelu", "tanh")'),
    Fault(
        "kernels: uneven padding is even",
        _OPERATORS,
        "        return None if any(each % 2 for each in total) else [each // 2 for each in total]",
        "        return [each // 2 for each in total]",
    ),
    Fault("kernels: any padding mode is zeros", _KERNELS, 'layer.padding_mode == "zeros" and ', ""),
    Fault(
        "kernels: gradients are lost",
        _KERNELS,
        "    if torch.is_grad_enabled() and any(",
        "    if False and any(",
    ),
    Fault(
        "kernels: another memory is not packed anew",
        _KERNELS,
        "weight.data_ptr(), weight.shape",
        "weight.shape",
    ),
    Fault(
        "kernels: a smaller weight is not packed anew",
        _KERNELS,
        "weight.data_ptr(), weight.shape, ",
        "weight.data_ptr(), ",
    ),
    Fault(
        "kernels: what is packed outlives training", _KERNELS, '    layer.__dict__.pop("_packed", None)\n', ""
    ),
    Fault(
        "kernels: what another layer has packed outlives training",
        _KERNELS,
        "packed is None or not _holds(packed, weight)",
        "packed is None",
    ),
    Fault(
        "kernels: what is packed for one shape serves all",
        _KERNELS,
        "{}) if kernel.any_shape else {}",
        "{})",
    ),
    Fault(
        "kernels: the kernel reads beyond the end",
        _KERNELS,
        "        and (input.shape[-1:] == weight.shape[1:] if isinstance(layer, nn.Linear) else input.dim() == 4)\n",
        "",
    ),
    Fault(
        "kernels: forward-mode gradients are lost",
        _KERNELS,
        "        and forward_ad._current_level < 0\n",
        "",
    ),
    Fault(
        "layouts: every operator keeps the layout",
        _LAYOUTS,
        "    return Fact.ELEMENTWISE in facts and all(isinstance(each, Tensor) for each in inputs)",
        "    return True",
    ),
    Fault(
        "layouts: joins along any dimension keep it",
        _LAYOUTS,
        '        return bool((node.kwargs.get("dim") if len(node.args) < 2 else node.args[1]) == 1)',
        "        return True",
    ),
    Fault(
        "layouts: inputs in channels_last lose it",
        _LAYOUTS,
        "        if not graph.value_of(node).is_contiguous():",
        "        if False:",
    ),
    Fault(
        "layouts: views are cut off from writes",
        _LAYOUTS,
        "        if writers and outside:",
        "        if False:",
    ),
    Fault("layouts: borders are read too early", _LAYOUTS, "        if late:", "        if False:"),
    Fault(
        "pack: hooks are ignored",
        _PACKING,
        "index.inexact(node, kind) or index.obstacle_in_place(layer)",
        "index.inexact(node, kind)",
    ),
    Fault(
        "pack: undo gives back a packed layer",
        _PACKING,
        "    layer, (packed, *_) = submodules.without_tensors(shell), now.values()",
        "    layer, (packed, *_) = next(iter(now.values())), now.values()",
    ),
    Fault("pack: any kernel is faster", _PACKING, "    if name not in kernels:", "    if False:"),
    Fault("pack: int8 is exact", _KERNELS, "(rounding or not kernel.rounds) and ", ""),
    Fault(
        "pack: scales of int8 are those of the tensor",
        _OPERATORS,
        "weight.abs().amax(dim=1)",
        "weight.abs().amax().expand(len(weight))",
    ),
    Fault(
        "pack convs: borders stay in channels_last",
        _CONVS,
        "                rewriter.replace_input(user, value, made[-1])",
        "                pass",
    ),
    Fault(
        "pack convs: the copies cost nothing",
        _CONVS,
        "    packed += sum(copying(graph.shape_of(value) or ()) for value, _ in region.borders)\n",
        "",
    ),
    Fault(
        "pack convs: a layer with two calls is packed",
        _CONVS,
        "if len(index.call_sites(layer)) > 1 or len(index.names(layer)) > 1:",
        "if False:",
    ),
    Fault(
        "pack convs: strides of size one are open",
        _CONVS,
        "    return value if value.stride() == strides else value.as_strided(value.shape, strides)",
        "    return value",
    ),
    Fault(
        "epilogues: alpha is ignored",
        _EPILOGUES,
        "or user.kwargs or len(user.args) != 2",
        "or len(user.args) != 2",
    ),
    Fault(
        "epilogues: after an addition any activation",
        _EPILOGUES,
        'not (convolves and activation == "relu")',
        "False",
    ),
    Fault(
        "epilogues: other users are ignored",
        _EPILOGUES,
        "reason = next(filter(None, reasons), None)",
        "reason = None",
    ),
    Fault(
        "epilogues: writes into the inputs are ignored",
        _EPILOGUES,
        "index.joining_obstacle(call, user, value) for",
        "index.joining_obstacle(call, user) for",
    ),
    Fault(
        "epilogues: the residual may be written",
        _EPILOGUES,
        "for value in call.all_input_nodes)",
        "for value in call.args)",
    ),
    Fault(
        "epilogues: writes into the residual are additions",
        _EPILOGUES,
        " or written not in ((), (call,))",
        "",
    ),
    Fault(
        "tuning: a little faster is enough",
        _TUNING,
        "row[name] <= MARGIN * row[PLAIN]",
        "row[name] <= row[PLAIN]",
    ),
    Fault("tuning: threads do not matter", _TUNING, ", {torch.get_num_threads()} threads", ""),
    Fault("tuning: dtypes do not matter", _TUNING, "{layer!r} {weight.dtype} ", "{layer!r} "),
    Fault(
        "optimize: gradients are lost",
        _GRAPHS,
        "        if torch.is_grad_enabled() and (",
        "        if False and (",
    ),
    Fault("optimize: as many graphs as one likes", _GRAPHS, ">= MOST_GRAPHS:", ">= 10**9:"),
    Fault(
        "optimize: sizes stay fixed",
        _GRAPHS,
        "                calls.free |= differing(shapes, others)",
        "                pass",
    ),
    Fault(
        "optimize: a failure is tried again and again",
        _GRAPHS,
        "if calls.failures >= _MOST_FAILURES:",
        "if False:",
    ),
    Fault(
        "optimize: an error of ours is the user's",
        _GRAPHS,
        "            except Exception as error:",
        "            except ZeroDivisionError as error:",
    ),
    Fault(
        "optimize: slower graphs are used",
        _PREPARE,
        '            if facts["speedup"] < LEAST_SPEEDUP:',
        "            if False:",
    ),
    Fault("optimize: counters count the checks", _PREPARE, "    if writer is not None:", "    if False:"),
    Fault(
        "optimize: float64 is float32",
        _EXACT,
        "            module = copy.deepcopy(module).double()",
        "            module = copy.deepcopy(module)",
    ),
    Fault(
        "optimize: changes are not seen",
        _GRAPHS,
        "(watched.changed() or ",
        "(False or ",
    ),
    Fault(
        "optimize: fused optimizers are not seen",
        _GRAPHS,
        " or (self._trains and watched.trained())",
        "",
    ),
    Fault(
        "optimize: weights given for a call are kept",
        _GRAPHS,
        "            if swapped(self._module):",
        "            if False:",
    ),
    Fault(
        "optimize: flags are not watched",
        _WATCHING,
        "            if type(new) is not type(old) or new != old:\n                return False",
        "            pass",
    ),
    Fault(
        "optimize: registries are not watched",
        _WATCHING,
        "            if [*map(id, old.values())] != [*map(id, new.values())] or [*old] != [*new]:\n                return False",
        "            pass",
    ),
    Fault(
        "optimize: configs are not watched",
        _WATCHING,
        "        if any(not _equal(now, before) for now, before in self._configs):",
        "        if False:",
    ),
    Fault(
        "optimize: other memory of weights is not seen",
        _WATCHING,
        " or [*map(_ADDRESS, self._placed)] != self._addresses",
        "",
    ),
    Fault(
        "optimize: copies have what the model was made with",
        "optimizing/optimize.py",
        "graphs._dynamic), _own_attributes(self, model)",
        "graphs._dynamic)",
    ),
    Fault("optimize: integers may differ", _EXACT, "not torch.equal(value, other)", "False"),
    Fault(
        "optimize: wrong graphs are used", _PREPARE, "if not mine <= MOST_ERROR", "if False and MOST_ERROR"
    ),
    Fault(
        "optimize: checks write into caches",
        "optimizing/inputs.py",
        "return Inputs(*mapped((self.args, dict(self.kwargs)), lambda tensor: tensor.detach().clone()))",
        "return self",
    ),
    # --- the backend of torch.compile, saved graphs, encoders
    Fault(
        "backend: weights are told by nothing",
        "optimizing/backend.py",
        "key = tuple(id(args[i]) for i in self._weights)",
        "key = ()",
    ),
    Fault(
        "backend: steps of fused optimizers are not seen",
        "optimizing/backend.py",
        "            graphs_of(fast).trained()",
        "            pass",
    ),
    Fault(
        "backend: any function with weights is a layer",
        "optimizing/backend.py",
        "    if name not in _PARAMETERS or not",
        "    if not",
    ),
    Fault(
        "backend: sizes are fixed",
        "optimizing/backend.py",
        "if (found := _size(node, given))",
        "if (found := None)",
    ),
    Fault("saved: int8 is given up", "saving/graph_set.py", "rounding=rounding)", "rounding=False)"),
    Fault(
        "saved: what a graph computes is called as a method",
        "saving/calls.py",
        "            if callable(getattr(torch.Tensor, name, None)) and",
        "            if False and",
    ),
    Fault(
        "saved: layers are values",
        "saving/folder.py",
        'or is_module != (node.op == "call_module")',
        'or is_module < (node.op == "call_module")',
    ),
    Fault("saved: hooks are dropped", "saving/folder.py", 'if "forward" in kind]', 'if "backward" in kind]'),
    Fault("saved: kernels stay", "saving/folder.py", "        made.choose_kernels()\n", ""),
    Fault(
        "saved: graphs of old weights",
        "optimizing/dispatch.py",
        "        if self._has_changed():\n            self.forget()\n        return {",
        "        return {",
    ),
    Fault(
        "optimize: hooks of the model run twice",
        "optimizing/optimize.py",
        "for name in hooks_of(made)}",
        "for name in ()}",
    ),
    Fault(
        "optimize: an encoder keeps its old weights",
        "optimizing/optimize.py",
        "    made.__dict__.update(vars(part))",
        "    pass",
    ),
)
