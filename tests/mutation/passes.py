"""Faults in the passes: what a hurried author would get wrong."""

from __future__ import annotations

from tests.mutation.fault import BEHIND, SITE, Fault

_MERGE = "passes/merging.py"
_BIAS = "passes/fuse_bias_in_linear.py"
_DIVISION = "passes/change_true_div_to_mul_by_inverse.py"
_FOLD = "passes/folding.py"
_FOLDABLE = "obstacles/foldable.py"
_BATCH_NORMS = "passes/fold_batch_norms.py"
_NORM = "obstacles/batch_norm.py"
_SCALING = "obstacles/scaling.py"
_NORM_WEIGHTS = "passes/fold_norm_weights.py"
_SCALE = "passes/fold_scale_and_shift.py"
_PARAMETER_CONSTANTS = "obstacles/parameter_constants.py"
_SLICING = "obstacles/slicing.py"
_ROUNDING = "obstacles/rounding.py"
_ACTIVATION = "passes/replace_activation.py"
_ACTIVATIONS = "activations.py"
_PRECISION = "passes/change_precision.py"

PASSES = (
    # --- merging linear layers
    Fault("merge: every slice starts at the first row", _MERGE, "            start += _width(layer)\n", "", SITE),
    Fault("merge: two weights swapped", _MERGE, "torch.cat(parts), *gradients", "torch.cat(parts[::-1]), *gradients", SITE),
    Fault("merge: the bias is forgotten", _MERGE, "    for name in merged._parameters:", "    for name in (\"weight\",):", SITE),
    Fault("merge: a missing bias is ones", _MERGE, 'weight_of(layers[0]).detach().new_zeros', 'get_parameter("weight").detach().new_ones', SITE),
    Fault("merge: the merged call stands before the last one", _MERGE, "before=site.node, val=val)", "before=site.calls[-1], val=val)", SITE),
    Fault("merge: requires_grad is lost", _MERGE, "nn.Parameter(torch.cat(parts), *gradients)", "nn.Parameter(torch.cat(parts))"),
    Fault("merge: dtypes are not compared", _MERGE, "(p.dtype, p.device, p.requires_grad)", "(p.device, p.requires_grad)"),
    Fault("merge: gradients are not compared", _MERGE, "(p.dtype, p.device, p.requires_grad)", "(p.dtype, p.device)"),
    Fault("merge: training flags are not compared", _MERGE, "return weight.shape[1:], layer.training, *facts", "return weight.shape[1:], *facts"),
    Fault("merge: a layer in training is given a bias", _MERGE, "trains = layer.training and weight.requires_grad", "trains = False"),
    Fault("merge: an in-place write between the layers is not seen", "memory.py", "            if not found or self.write_between(found[-1][0], node, value):", "            if not found:", SITE),
    Fault("merge: writes into an output are not seen", _MERGE, "write_obstacle(index, call, {*run} - {call}) for call in run", "None for call in run", BEHIND),
    Fault("merge: the order of a write and of other uses is ignored", _SLICING, "        if index.position[writer] >= first:", "        if False:"),
    Fault("merge: a copy of a slice is taken for a view", _SLICING, "        if copies:", "        if False:", BEHIND),
    Fault("merge: contiguity is not asked for", _SLICING, "            if Fact.LAYOUT in facts_of(user) and", "            if False and", BEHIND),
    Fault("merge: any view keeps the last dimension apart", _SLICING, "part is value and _splits_last(user, width)", "part is value", BEHIND),
    Fault("merge: ties, hooks and further calls are ignored", _MERGE, "index.obstacle(call, kind) or", "index.inexact(call, kind) or", SITE),
    Fault("merge: the width in the metadata is that of one layer", _MERGE, "graph.with_size(site.node, dimension, _width(merged))", "graph.with_size(site.node, dimension, _width(layers[paths[0]]))"),
    Fault("merge: the name may be taken", _MERGE, "path = submodules.free_path(rewriter.graph_module, parent, name)", 'path = f"{parent}.{name}" if parent else name'),
    Fault("merge: undo takes the same rows for all", _MERGE, "parameter.detach().split(sizes), strict=True", "[parameter.detach()[:n] for n in sizes], strict=True"),
    Fault("merge: undo shares memory among the layers", _MERGE, "submodules.laid_out(part, layouts[path][name])", "part"),
    Fault("merge: undo gives every layer a bias", _MERGE, "            if name in layouts[path]:\n                copied = submodules.laid_out(part, layouts[path][name])", "            if True:\n                copied = part.clone()"),
    Fault("merge: undo drops a bias that was trained", _MERGE, "            elif not part.is_meta and part.any():", "            elif False:"),
    Fault("merge: undo drops requires_grad", _MERGE, "nn.Parameter(copied, parameter.requires_grad)", "nn.Parameter(copied)"),
    Fault("merge convs: options are not compared", _MERGE, '("stride", "padding", "dilation", "padding_mode")', "()", SITE),
    Fault("merge convs: groups are not seen", _MERGE, '    if getattr(layer, "groups", 1) != 1:', "    if False:"),
    Fault("merge convs: positions are sliced", _MERGE, "slice(start, start + _width(layer)), *rest))", "slice(start, start + _width(layer))))"),
    Fault("merge convs: memory formats are mixed", _MERGE, "strides = weight.stride() if weight.ndim > 2 else None", "strides = None"),
    # --- the bias of a linear layer
    Fault("fuse bias: the pad is zeros", _BIAS, '"value": 1.0}', '"value": 0.0}', SITE),
    Fault("fuse bias: the pad is in front", _BIAS, "(value, (0, 1))", "(value, (1, 0))", SITE),
    Fault("fuse bias: the bias is the first column", _BIAS, "[layer.weight.detach(), layer.bias.detach().unsqueeze(1)]", "[layer.bias.detach().unsqueeze(1), layer.weight.detach()]", SITE),
    Fault("fuse bias: every user of the input gets the pad", _BIAS, "rewriter.replace_input(site, value, pad)", "rewriter.replace_uses(value, pad)", SITE),
    Fault("fuse bias: ties, hooks and further calls are ignored", _BIAS, "index.obstacle(node, nn.Linear) or", "index.inexact(node, nn.Linear) or", SITE),
    Fault("fuse bias: requires_grad is lost", _BIAS, "nn.Parameter(weight, layer.weight.requires_grad)", "nn.Parameter(weight)"),
    Fault("fuse bias: the metadata has the old width", _BIAS, "graph.with_size(value, -1, layer.in_features + 1)", "graph.with_size(value, -1, layer.in_features)"),
    Fault("fuse bias: undo takes the first column", _BIAS, '("bias", fused.detach()[:, -1])', '("bias", fused.detach()[:, 0])'),
    Fault("fuse bias: undo keeps the strides of the larger weight", _BIAS, "submodules.laid_out(part, layout[name])", "part.clone()"),
    Fault("merge: undo gives other strides", _MERGE, "submodules.laid_out(part, layouts[path][name])", "part.clone()"),
    Fault("fuse bias: undo drops requires_grad", _BIAS, "nn.Parameter(copied, fused.requires_grad)", "nn.Parameter(copied)"),
    # --- division
    Fault("division: the inverse is the denominator", _DIVISION, "args = (numerator, 1 / denominator)", "args = (numerator, denominator)", SITE),
    Fault("division: 3 / x is taken for x / 3", _DIVISION, "    return numerator, denominator\n", "    return (numerator, denominator) if isinstance(numerator, Node) else (denominator, numerator)\n", SITE),
    Fault("division: rounding_mode is ignored", _DIVISION, 'len(node.args) + len(node.kwargs) == 2 and set(node.kwargs) <= {"other"}', "len(node.args) == 2"),
    Fault("division: integers are taken for floats", _DIVISION, "    if rounding.is_floating(numerator):", "    if True:", BEHIND),
    Fault("division: every denominator counts as a power of two", _DIVISION, "== 0.5:", "<= 1:", BEHIND),
    Fault("division: rounding afterwards is ignored", _DIVISION, "        reason = rounding.obstacle_behind(node)", "        reason = None", BEHIND),
    Fault("division: every operator keeps errors small", _ROUNDING, "return Fact.SMOOTH in facts and tree_all", "return tree_all", BEHIND),
    Fault("division: integers keep errors small", _ROUNDING, " and tree_all(_is_inexact, (made, rest))", "", BEHIND),
    Fault("division: a value is as good as a divisor", _ROUNDING, "        alone = _is_first_alone(user, value) and", "        alone =", BEHIND),
    Fault("division: any power keeps errors small", _ROUNDING, " or _is_positive_integer(rest[0])", " or True", BEHIND),
    Fault("division: what was written into is not followed", _ROUNDING, "                        reached.extend(memory.aliases(target))", "                        pass", BEHIND),
    # --- batch normalisation
    Fault("fold: epsilon is forgotten", _NORM, "variance.to(wide) + norm.eps", "norm.running_var.to(wide)", SITE),
    Fault("fold: the affine scale is forgotten", _NORM, "scale = scale * weight.detach().to(wide)", "pass", SITE),
    Fault("fold: the mean is added", _NORM, "shift = -mean.to(wide) * scale", "shift = norm.running_mean.to(wide) * scale", SITE),
    Fault("fold: the affine shift is scaled", _NORM, "shift + bias.detach().to(wide)", "shift + bias.detach().to(wide) * scale", SITE),
    Fault("fold: training mode is ignored", _NORM, "    if norm.training:", "    if False:"),
    Fault("fold: the number of features is not compared", _NORM, "    if norm.num_features != channels(layer, behind):", "    if False:"),
    Fault("fold linear: three dimensions are taken for two", _BATCH_NORMS, "    if rank != needed:", "    if rank not in (2, 3):", SITE),
    Fault("fold conv1d: positions are taken for channels", _BATCH_NORMS, "2 if isinstance(layer, nn.Linear) else 3", "2 if isinstance(layer, nn.Linear) or graph.rank_of(norm) == 2 else 3", SITE),
    Fault("fold: a normalization that is called elsewhere goes", _FOLD, "        if site.removable and calls == [site.node]:", "        if site.removable:", SITE),
    Fault("fold: only one of two normalizations goes", _BATCH_NORMS, "        return any(isinstance(module_at(graph_module, str(call.target)), _BatchNorm) for call in calls)", "        return False and bool(calls)"),
    Fault("fold: another user of what is viewed is ignored", _BATCH_NORMS, "(use_obstacle(one, [other]) for one, other in itertools.pairwise(path))", "(use_obstacle(one, [other]) for one, other in [(path[-2], path[-1])])", SITE),
    # --- scales and shifts in layers
    Fault("scale: weights are rounded twice", _SCALING, 'if tensor.device.type == "mps" else torch.float64', 'if tensor.device.type == "mps" else torch.float16', SITE),
    Fault("scale: the bias is not scaled", _SCALING, "        constant = constant * scale\n", "        constant = constant * 1\n", SITE),
    Fault("scale: rows and columns are swapped", _SCALING, "    return behind != getattr(", "    return behind == getattr("),
    Fault("scale: transposed convolutions are taken for others", _SCALING, 'return behind != getattr(layer, "transposed", False)', "return behind"),
    Fault("scale: groups are ignored", _SCALING, '    return int(getattr(layer, "groups", 1))', "    return 1"),
    Fault("scale: the channels of groups are mixed", _SCALING, "repeat_interleave(len(weight) // groups, dim=0)", "repeat(len(weight) // groups, 1)", SITE),
    Fault("scale before: the shift is not multiplied by the weight", _SCALING, "(values * _factor(layer, shift, behind)).flatten", "(torch.ones_like(values) * _factor(layer, shift, behind)).flatten", SITE),
    Fault("scale before: the shift is scaled as well", _SCALING, "(values * _factor(layer, shift, behind)).flatten", "(values * _factor(layer, shift * scale, behind)).flatten", SITE),
    Fault("scale before: zeros at the border are not seen", _SCALING, "    if shift is not None and not behind and _takes_zeros(layer):", "    if False:", SITE),
    Fault("scale before: padding by name is none", _SCALING, 'pads = padding != "valid" if isinstance(padding, str) else any(padding)', "pads = not isinstance(padding, str) and any(padding)", SITE),
    Fault("scale: infinite weights pass", _SCALING, "    if not (most <= limits.max and added <= limits.max):", "    if False:", SITE),
    Fault("scale: weights vanish", _SCALING, "    if least < limits.tiny and ((sizes > 0) & (sizes < limits.tiny)).any():", "    if False:", SITE),
    Fault("scale: a frozen layer trains", _SCALING, "nn.Parameter(values.to(weight.dtype), weight.requires_grad)", "nn.Parameter(values.to(weight.dtype))"),
    Fault("scale: a frozen bias trains", _SCALING, "nn.Parameter(constant.to(weight.dtype, copy=True), gradients)", "nn.Parameter(constant.to(weight.dtype, copy=True))"),
    Fault("fold: a second user is ignored", _FOLDABLE, "    others = [user.name for user in node.users if user not in layers and", "    others = [user.name for user in node.users if False and", SITE),
    Fault("fold: who reads strides reads a shape", _FOLDABLE, "facts & (Fact.LAYOUT | Fact.NEW)", "facts & Fact.NEW"),
    Fault("fold: a shared layer is folded into", _FOLDABLE, "    return index.obstacle(layer, kind)", "    return index.inexact(layer, kind)", SITE),
    Fault("fold: a write between is not seen", _FOLDABLE, "    reason = reason or index.memory.write_between(path[0], path[-1], value)\n", "", SITE),
    Fault("fold: another last dimension is taken for the same", _FOLDABLE, "known and now.shape[-1] == then.shape[-1] and", "known and", SITE),
    Fault("operators: transposing keeps the order", "operators.py", 'unsqueeze": _VIEW | Fact.RESHAPES,\n    "transpose t ', 'unsqueeze transpose": _VIEW | Fact.RESHAPES,\n    "t '),
    Fault("fold: dtypes are not compared", _FOLDABLE, "    if reason is None and None not in (first, last) and first != last:", "    if False:"),
    Fault("fold: the record follows the model of the user", _FOLD, "_unfolded, copied(before), biases", "_unfolded, before, biases"),
    Fault("fold: undo does not look whether the weights changed", _FOLD, '        if not _same(made.get_parameter("weight"), now[path].weight) or', "        if False and"),
    Fault("fold: undo does not look whether the bias changed", _FOLD, " or not _same(bias, now[path].bias):", ":"),
    Fault("fold: undo does not look whether the normalization changed", _FOLD, "        if not _same_values(now[path], kept[path]):", "        if False:"),
    Fault("fold: undo does not follow dtype and gradients", _FOLD, "left[like].follow(value, now[like])", "value"),
    # --- constants beside layers
    Fault("fold scale: a quotient is a product", _SCALE, "lambda c, first: (1 / c, None)", "lambda c, first: (c, None)", SITE),
    Fault("fold scale: what is subtracted is added", _SCALE, "else (one, -constant)", "else (one, constant)", SITE),
    Fault("fold scale: 2 - x is taken for x - 2", _SCALE, "return (-one, constant) if first else", "return (one, -constant) if first else", SITE),
    Fault("fold scale: rsub is sub", _SCALE, '"rsub": lambda c, first: _difference(c, not first)', '"rsub": lambda c, first: _difference(c, first)', SITE),
    Fault("fold scale: 3 / x is taken for x / 3", _SCALE, "return None if divides else", "return", SITE),
    Fault("fold scale: alpha and rounding_mode are ignored", _SCALE, 'len(operands) != 2 or not set(node.kwargs) <= {"other"}', "len(operands) < 2"),
    Fault("fold scale: an operator writes", _SCALE, "layer_obstacle(index, layer) or _write_obstacle(index, node)", "layer_obstacle(index, layer)"),
    Fault("fold scale: a constant that is written into is folded", _PARAMETER_CONSTANTS, "        if writer:\n            return f\"{writer.name} may write into the constant", "        if False:\n            return f\"{writer.name} may write into the constant", SITE),
    Fault("fold scale: positions are taken for channels", _SCALE, "constant.numel() != number or constant.shape[dimension] != number:", "constant.numel() != number:", SITE),
    Fault("fold scale: one channel becomes several", _SCALE, "    if not behind and not (checked and graph.value_of(value).shape[dimension] == number):", "    if False:"),
    Fault("fold scale: channels that nobody checks are believed", _SCALE, "(checked and graph.value_of", "(graph.value_of"),
    Fault("fold scale: dimensions that nobody checks are believed", _SCALE, "graph.rank_of(value) if checked else None", "graph.rank_of(value)"),
    Fault("fold scale: what gradients need may be written", "obstacles/foldable.py", "        reason = index.keeping_obstacle(layer, value)\n", "        pass\n"),
    Fault("fold: dimensions that nobody checks are believed", "passes/fold_batch_norms.py", "rank is None or index.guard is None", "rank is None"),
    Fault("a weight of another shape than the layer says is plain", "submodules.py", "weight.shape == shape and", "True and"),
    Fault("an operator that others registered takes any strides", "operators.py", "(namespace is None or namespace[1] in _NAMESPACES)", "True"),
    Fault("a forward on an instance does what the type does", "operators.py", ' and "forward" not in vars(part) for part', " for part"),
    Fault("a constant may be no parameter and no buffer", _PARAMETER_CONSTANTS, "tensor = submodules.find(", "tensor = submodules.attribute("),
    Fault("precision: integers stay beyond the range", _PRECISION, "numbers = float | int if", "numbers = float if"),
    Fault("precision: sizes saturate", _PRECISION, "or name_of(node) in _FILLING else float", "or name_of(node) in _FILLING else float | int"),
    Fault("fold scale: a constant brings dimensions", _SCALE, "    if constant.ndim > (-dimension if rank is None else rank):", "    if False:"),
    Fault("fold scale: integers are taken for floats", _SCALE, "    if not behind and graph.dtype_of(value) != weight.dtype:", "    if False:", SITE),
    Fault("fold scale: another dtype is folded", _SCALE, "(found.dtype, found.device) != (weight.dtype, weight.device):", "found.device != weight.device:"),
    Fault("fold scale: another user is ignored", _SCALE, "reason = use_obstacle(node, behind) or next", "reason = next", SITE),
    Fault("fold scale: another user of the layer is ignored", _SCALE, "uses = (use_obstacle(one, [other]) for one", "uses = (None for one", SITE),
    Fault("fold scale: a chain is folded in part", _SCALE, "        return bool(sites)", "        return False"),
    # --- weights of normalizations
    Fault("fold norm: the weight stays", _NORM_WEIGHTS, "    bare: Any = submodules.without_tensors(norm)\n    bare.elementwise_affine = False\n", "    bare = norm\n", SITE),
    Fault("fold norm: the bias is forgotten", _NORM_WEIGHTS, "None if bias is None else bias.detach().to(wide)", "None", SITE),
    Fault("fold norm: other users are ignored", _NORM_WEIGHTS, "use_obstacle(node, layers) or index", "index", SITE),
    Fault("fold norm: hooks and ties are ignored", _NORM_WEIGHTS, " or index.replacing_obstacle(node, kind)\n", "\n"),
    Fault("fold norm: the option says that there is a weight", _NORM_WEIGHTS, "    bare.elementwise_affine = False\n    sources", "    sources"),
    # --- activations
    Fault("activation: the options of a call are ignored", _ACTIVATIONS, "activation.module(*node.args[1:], **options)", "activation.make()"),
    Fault("activation: the options of a module are ignored", _ACTIVATIONS, "    return all(vars(one).get(name) == vars(other)[name] for name in options)", "    return bool(options) or True"),
    Fault("activation: an in-place one is replaced", "graph_index.py", '        if getattr(module, "inplace", False):', "        if False:"),
    Fault("activation: only the first name gets the new module", _ACTIVATION, "rewriter.swap(dict.fromkeys(site.paths, new))", "rewriter.swap({site.paths[0]: new})"),
    Fault("activation: only the first call loses its keyword", _ACTIVATION, "for call in site.calls:  #", "for call in site.calls[:1]:  #"),
    Fault("activation: the new module is always in training mode", _ACTIVATION, ".train(old.training)", ""),
    Fault("activation: a module in the place of a function is always in training mode", _ACTIVATION, ".train(graph_module.training)", ""),
    Fault("activation: the new module stays in float32", "graph.py", "    return module.to(first.device, dtype if dtype.is_floating_point else None)", "    return module"),
    Fault("activation: what the pass made is a site", _ACTIVATION, "made = signature in provenance(module)", "made = False"),
    # --- precision
    Fault("precision: too large numbers become infinite", _PRECISION, "torch.where(value.isinf(), value, value.clamp(-largest, largest)).to(dtype)", "value.to(dtype)"),
    Fault("precision: infinity becomes finite", _PRECISION, "torch.where(value.isinf(), value, value.clamp(-largest, largest)).to(dtype)", "value.clamp(-largest, largest).to(dtype)"),
    Fault("precision: undo casts the weights back", _PRECISION, "unchanged = now.is_meta or torch.equal(saturate(moved, dtype).to(now.dtype), now)", "unchanged = now.is_meta"),
    Fault("precision: undo drops training", _PRECISION, "moved if unchanged else now.detach().to(torch.float32)", "moved"),
    Fault("precision: undo drops requires_grad", _PRECISION, " and before.requires_grad == now.requires_grad", ""),
    Fault("precision: the record follows the model of the user", _PRECISION, "_raised, copied(replaced), self.dtype", "_raised, replaced, self.dtype"),
    Fault("precision: the metadata keeps the old dtype", _PRECISION, "            val = graph.recast(graph.value_of(node), torch.float32, self.dtype)", "            val = None"),
    Fault("precision: keep_float32 is ignored", _PRECISION, "            if matching or isinstance(module, types):", "            if False:"),
    Fault("precision: a write into a copy is lost", "obstacles/precision_plan.py", "            if self._write_is_lost(user, value):", "            if False:"),
    Fault("precision: complex numbers are cast", "obstacles/precision_plan.py", "        if any(graph.holds(value, lambda t: t.is_complex()) for value in values):", "        if False:"),
    Fault("precision: an explicit float32 is ignored", "obstacles/precision_plan.py", "and not _asks_for_float32(node):", "and True:"),
)  # fmt: skip
