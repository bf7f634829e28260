"""Faults in the passes: what a hurried author would get wrong."""

from __future__ import annotations

from tests.mutation.fault import Fault

_MERGE = "passes/merge_linears.py"
_BIAS = "passes/fuse_bias_in_linear.py"
_DIVISION = "passes/change_true_div_to_mul_by_inverse.py"
_CONV = "passes/fuse_batch_norm2d_in_conv2d.py"
_LINEAR = "passes/fuse_batch_norm1d_in_linear.py"
_ACTIVATION = "passes/replace_activation.py"
_PRECISION = "passes/change_precision.py"

PASSES = (
    # --- merging linear layers
    Fault(
        "merge: every slice starts at the first row",
        _MERGE,
        "            start += layer.out_features\n        nodes =",
        "        nodes =",
    ),
    Fault(
        "merge: two weights swapped",
        _MERGE,
        "torch.cat([p.detach() for p in present])",
        "torch.cat([p.detach() for p in reversed(present)])",
    ),
    Fault("merge: the bias is forgotten", _MERGE, "merged._parameters[name] = joined", 'merged._parameters[name] = joined if name == "weight" else None'),
    Fault("merge: requires_grad is lost", _MERGE, "present[0].requires_grad)", "True)"),
    Fault("merge: the training flag is lost", _MERGE, "return merged.train(first.training)", "return merged"),
    Fault("merge: dtypes are not compared", _MERGE, "(p.dtype, p.device, p.requires_grad)", "(p.device, p.requires_grad)"),
    Fault("merge: gradients are not compared", _MERGE, "(p.dtype, p.device, p.requires_grad)", "(p.dtype, p.device)"),
    Fault(
        "merge: an in-place write between the layers is not seen",
        _MERGE,
        "index.memory.write_between(first, call, value) if first else None",
        "None",
    ),
    Fault("merge: writes into an output are not seen", _MERGE, "    if writer is not None:\n        return f\"{writer.name} may write", "    if False:\n        return f\"{writer.name} may write"),
    Fault("merge: ties are lost in undo", _MERGE, "            if name in part.ties:", "            if False:"),
    Fault("merge: undo shares memory among the layers", _MERGE, "parameter.detach()[rows].clone()", "parameter.detach()[rows]"),
    Fault("merge: undo forgets the keyword", _MERGE, "{part.keyword: value} if part.keyword else {}", "{}"),
    Fault("merge: undo does not look whether the slices changed", _MERGE, "not _as_left(node, merged, calls, parts)", "False"),
    Fault("merge: the width in the metadata is that of one layer", _MERGE, "site.calls[0], site.calls[0], merged.out_features)", "site.calls[0], site.calls[0], layers[0].out_features)"),
    Fault("merge: contiguity is not asked for", _MERGE, "            if depends and", "            if False and"),
    Fault("merge: the name may be taken", _MERGE, 'path = submodules.free_path(graph_module, parent, "fxopt_merged_" + "_".join(names))', 'path = (parent + "." if parent else "") + "fxopt_merged_" + "_".join(names)'),
    Fault("merge: a tie with a layer of another group is ignored", _MERGE, "if not index.obstacle(call, own=_paths(run))]", "]"),
    # --- the bias of a linear layer
    Fault("fuse bias: the pad is zeros", _BIAS, '"value": 1.0}', '"value": 0.0}'),
    Fault("fuse bias: the pad is in front", _BIAS, "(site.value, (0, 1))", "(site.value, (1, 0))"),
    Fault("fuse bias: the bias is the first column", _BIAS, "[layer.weight.detach(), layer.bias.detach().unsqueeze(1)]", "[layer.bias.detach().unsqueeze(1), layer.weight.detach()]"),
    Fault("fuse bias: requires_grad is lost", _BIAS, "nn.Parameter(weight, layer.weight.requires_grad)", "nn.Parameter(weight)"),
    Fault('fuse bias: undo takes the first column', _BIAS, '("bias", weight[:, -1])', '("bias", weight[:, 0])'),
    Fault("fuse bias: undo leaves the pad", _BIAS, "        graph_module.graph.erase_node(pad)", "        pass"),
    Fault("fuse bias: undo is blind to other users of the pad", _BIAS, "            and set(pad.users) == {node}\n", ""),
    Fault("fuse bias: the metadata has the old width", _BIAS, "site.value, layer.in_features + 1)", "site.value, layer.in_features)"),
    Fault("fuse bias: ties are ignored", _BIAS, "index.inexact(node, nn.Linear) or index.obstacle(node) or", "index.inexact(node, nn.Linear) or"),
    # --- division
    Fault("division: the inverse is the denominator", _DIVISION, "inverse = 1 / site.denominator", "inverse = site.denominator"),
    Fault("division: 3 / x is taken for x / 3", _DIVISION, "            if not isinstance(numerator, Node):\n                continue", "            if not isinstance(numerator, Node):\n                numerator, denominator = denominator, numerator"),
    Fault("division: undo divides by the inverse of the inverse", _DIVISION, '[node.args[0], data["denominator"]]', '[node.args[0], 1 / data["inverse"]]'),
    Fault("division: undo forgets how the call was spelled", _DIVISION, 'node.op, node.target = data["op"], data["target"]', "node.op, node.target = \"call_function\", operator.truediv"),
    Fault("division: rounding afterwards is ignored", _DIVISION, "    return _obstacle_behind(index, node, denominator, floating)", "    return None"),
    Fault("division: integers are taken for floats", _DIVISION, "    if not floating[numerator]:", "    if False:"),
    Fault("division: every denominator counts as a power of two", _DIVISION, "== 0.5:", "<= 1:"),
    Fault("division: every operator keeps errors small", _DIVISION, "return Fact.SMOOTH in facts and tree_all", "return tree_all"),
    Fault("division: integers keep errors small", _DIVISION, " and tree_all(_is_inexact, (made, rest))", ""),
    Fault("division: a value is as good as a divisor", _DIVISION, "        alone = _is_first_alone(user, value) and", "        alone ="),
    Fault("division: any power keeps errors small", _DIVISION, " or _is_positive_integer(rest[0])", " or True"),
    Fault("division: what was written into is not followed", _DIVISION, "                    reached.extend(index.memory.aliases(target))", "                    pass"),
    Fault("division: rounding_mode is ignored", _DIVISION, 'len(node.args) + len(node.kwargs) == 2 and set(node.kwargs) <= {"other"}', "len(node.args) == 2"),
    # --- batch normalisation
    Fault("fold: epsilon is forgotten", "batch_norm.py", "norm.running_var.to(dtype) + norm.eps", "norm.running_var.to(dtype)"),
    Fault("fold: the affine scale is forgotten", "batch_norm.py", "scale = scale * norm.weight.detach().to(dtype)", "pass"),
    Fault("fold: the mean is added", "batch_norm.py", "shift = -norm.running_mean.to(dtype) * scale", "shift = norm.running_mean.to(dtype) * scale"),
    Fault("fold: the affine shift is scaled", "batch_norm.py", "shift = shift + norm.bias.detach().to(dtype)", "shift = shift + norm.bias.detach().to(dtype) * scale"),
    Fault("fold: weights are rounded twice", "batch_norm.py", 'torch.float32 if tensor.device.type == "mps" else torch.float64', "torch.float16"),
    Fault("fold: training mode is ignored", "batch_norm.py", "    if norm.training:", "    if False:"),
    Fault("fold: the number of features is not compared", "batch_norm.py", "    if norm.num_features != channels:", "    if False:"),
    Fault("fold: infinite weights pass", "batch_norm.py", "    if not weight.is_meta and not (", "    if False and not ("),
    Fault("fold: a frozen layer trains", "batch_norm.py", "nn.Parameter(new_weight, old_weight.requires_grad)", "nn.Parameter(new_weight)"),
    Fault("fold conv: the bias is not scaled", _CONV, "batch_norm.bias_of(conv, scale.dtype) * scale + shift", "batch_norm.bias_of(conv, scale.dtype) + shift"),
    Fault('fold conv: the input channels are scaled', _CONV, 'batch_norm.scaled(conv.weight, scale, 0)', 'batch_norm.scaled(conv.weight, scale, 1)'),
    Fault("fold conv: a second user is ignored", _CONV, "        or batch_norm.other_users(conv, node)\n", ""),
    Fault("fold conv: a shared convolution is folded into", _CONV, "        index.obstacle(conv)\n        or ", "        "),
    Fault('fold linear before: the columns are scaled', _LINEAR, 'scale, 1 if before else 0)', 'scale, 1)'),
    Fault('fold linear after: the shift is not multiplied by the weight', _LINEAR, 'bias + torch.mv(weight, shift) if before', 'bias + torch.mv(torch.ones_like(weight), shift) if before'),
    Fault('fold linear after: the scale comes before the shift', _LINEAR, 'torch.mv(weight, shift)', 'torch.mv(weight * scale, shift)'),
    Fault("fold linear: three dimensions are taken for two", _LINEAR, "    if rank != 2:", "    if rank not in (2, 3):"),
    Fault("fold linear: off by one dimension", _LINEAR, "channels = layer.out_features if linear is value else layer.in_features", "channels = layer.in_features if linear is value else layer.out_features"),
    # --- activations
    Fault("activation: the options of a call are ignored", _ACTIVATION, "    return options == activation.options", "    return True"),
    Fault("activation: an in-place one is replaced", _ACTIVATION, 'reason = "it writes into its input" if writes else', "reason ="),
    Fault("activation: only the first call changes back", _ACTIVATION, "            submodules.set_module(graph_module, name, old)", "            submodules.set_module(graph_module, name, old)\n            break"),
    Fault('activation: undo forgets the training flag', _ACTIVATION, 'submodules.without_tensors(data.shell).train(modules[0].training)', 'submodules.without_tensors(data.shell)'),
    # --- precision
    Fault("precision: too large numbers become infinite", _PRECISION, "torch.where(value.isinf(), value, value.clamp(-largest, largest)).to(dtype)", "value.to(dtype)"),
    Fault("precision: infinity becomes finite", _PRECISION, "torch.where(value.isinf(), value, value.clamp(-largest, largest)).to(dtype)", "value.clamp(-largest, largest).to(dtype)"),
    Fault("precision: undo casts the weights back", _PRECISION, "unchanged = now.is_meta or any(torch.equal(values, now) for values in as_left)", "unchanged = now.is_meta"),
    Fault("precision: undo drops training", _PRECISION, "moved if unchanged else now.detach().to(torch.float32)", "moved"),
    Fault("precision: keep_float32 is ignored", _PRECISION, "            if matching or isinstance(module, types):", "            if False:"),
    Fault("precision: a write into a copy is lost", "precision_plan.py", "            if self._write_is_lost(user, value):", "            if False:"),
    Fault("precision: complex numbers are cast", "precision_plan.py", "        if any(_holds(value, lambda t: t.is_complex()) for value in (node, *node.all_input_nodes)):", "        if False:"),
    Fault("precision: an explicit float32 is ignored", "precision_plan.py", "and not _asks_for_float32(node):", "and True:"),
)  # fmt: skip
