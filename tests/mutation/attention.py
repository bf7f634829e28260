"""Faults in the reading of attention, and in what is made of it."""

from __future__ import annotations

from tests.mutation.fault import BEHIND, SITE, Fault

_READER = "attention/attention_reader.py"
_SCORES = "attention/scores.py"
_MASKS = "attention/masks.py"
_SHAPES = "attention/heads.py"
_STEPS = "attention/attention_steps.py"
_PASS = "passes/fuse_attention.py"
_HEADS = "passes/remove_repeated_heads.py"

ATTENTION = (
    # --- reading
    Fault("attention: other uses are ignored", _READER, "            if others:\n                raise Obstacle(f\"{node.name} is also used by", "            if False:\n                raise Obstacle(f\"{node.name} is also used by"),
    Fault("attention: a softmax over anything", _SCORES, "            if self._softmax_dimension(step) not in (-1, len(described(step).shape) - 1):", "            if False:", SITE),
    Fault("attention: active dropout goes", _SCORES, "            if not self._index.memory.is_pure(step) and graph.argument(step, \"p\") != 0:", "            if False:"),
    Fault("attention: a shape is taken for the scores", _SCORES, "            if (step.args or step.all_input_nodes)[0] is not source:", "            if False:", SITE),
    Fault("attention: masks are not scaled", _SCORES, "            if scores.masks:\n", "            if False:\n", SITE),
    Fault("attention: -inf masks", _MASKS, "        if number == -math.inf:", "        if False:"),
    Fault("attention: any number masks", _MASKS, " or not number <= _SMALLEST:", ":", SITE),
    Fault("attention: -inf is not looked for", _MASKS, "        if self._may_be_infinite(node):", "        if False:"),
    Fault("attention: what baddbmm adds is finite", _SCORES, "[self._masks.added(product.all_input_nodes[0], product)]", "[Mask(product.all_input_nodes[0], product)]"),
    Fault("attention: writes into masks are no -inf", _MASKS, "(*node.all_input_nodes, *self._index.memory.writers(node))", "node.all_input_nodes"),
    Fault("attention: rows that are masked entirely have gradients", _MASKS, '        self.ask_for_keys(\n            "in a row that is masked entirely, scores would have gradients that they do not have"\n        )\n', ""),
    Fault("attention: nobody has to say that rows have keys", _MASKS, "        if not self._each_row_has_a_key:", "        if False:"),
    Fault("attention: what gradients need may be written", _READER, "            stop(self._index.keeping_obstacle(last, tensor))\n", ""),
    Fault("attention: heads are grouped in any way", _SHAPES, "    if not all(alike(grouped[0], sizes) for sizes in grouped):", "    if False:"),
    Fault("attention: other addends are not scaled", _SCORES, " and len(nodes) == 1 and not step.kwargs:", " and len(nodes) == 1:", SITE),
    Fault("attention: where masks the other elements", _SCORES, "where=args[2] is source))", "where=args[2] is not source))", SITE),
    Fault("attention: dtypes are not compared", _SHAPES, "        if other != dtype and not (half and", "        if False and not (half and"),
    Fault("attention: float16 is as the others", _SCORES, "        if scores.masks and dtype == torch.float16:", "        if False:"),
    Fault("attention: writes are ignored", _READER, "            stop(self._index.memory.write_between(reader, last, tensor))", "            pass"),
    Fault("attention: writes into masks are ignored", _READER, ", *((mask.step, mask.node) for mask in scores.masks)]", "]"),
    Fault("attention: writes into unscaled queries are ignored", _READER, "                reads.append((query, source))\n", ""),
    Fault("attention: what steps write is ignored", _READER, "            if written and not (len(written) == 1 and written[0] in place):", "            if False:"),
    Fault("attention: the output of one is the scores of another", _READER, "        if place[0] in self._read:", "        if False:"),
    Fault("attention: values may be broadcast", _SHAPES, "    if not fits or not alike(value[:-1], (*behind, columns)):", "    if not fits:"),
    Fault("attention: sizes that nobody checks are believed", _SHAPES, "index.guard and ", ""),
    Fault("attention: views of any kind", _SHAPES, " and alike(before[-2:], after[-2:])", "", SITE),
    Fault("attention: weights on any side", _READER, "weights is not steps[-1] or value is weights or not by_columns or ", "", SITE),
    Fault("attention: moves go", _SCORES, "            if not all(isinstance(option, torch.dtype) for option in options):", "            if False:"),
    Fault("attention: hooks are ignored", _SCORES, "            stop(self._index.reading_obstacle(step))", "            pass"),
    Fault("attention: any einsum", _STEPS, "        turned = _is_turned(\"\".join(str(args[0]).split()))", "        turned = \"jd->\" not in args[0] or \"ij,\" in args[0]"),
    # --- rewriting
    Fault("attention: the scale is the default one", _PASS, ', "scale": site.scale', "", SITE),
    Fault("attention: dropout is not given", _PASS, '"dropout_p": 0.0, ', ""),
    Fault("attention: keys are turned once more", _PASS, "        if not self._attention.turned:\n            return key", "        if True:\n            return key", SITE),
    Fault("attention: permutations swap", _STEPS, "name == \"permute\" and dims == [*range(rank - 2), rank - 1, rank - 2]", "name == \"permute\"", SITE),
    Fault("attention: only the last mask counts", _PASS, "            if mask.fill is None and total is None:", "            if mask.fill is None:", SITE),
    Fault("attention: masks say what takes part", _PASS, "(mask.fill, total) if mask.where else (total, mask.fill)", "(total, mask.fill) if mask.where else (mask.fill, total)", SITE),
    Fault("attention: masks of all heads are split", _PASS, "if not split or not heads or str(*front) == \"1\":", "if not heads:", SITE),
    Fault("attention: strides do not matter", _PASS, "[\"contiguous\"] * site.contiguous", "[]", BEHIND),
    Fault("attention: its keys stay", _PASS, "        if not site.key.users:\n            rewriter.erase(site.key)  # which was only turned\n", ""),
    # --- repeated heads
    Fault("heads: any index", _HEADS, "isinstance(key, slice) for key in keys", "True for key in keys", SITE),
    Fault("heads: copies of other heads", _HEADS, "alike(grouped, (batch, count, 1, *rest)) and ", "", SITE),
    Fault("heads: elements in another order", _HEADS, "tuple(steps) if fits and alike(flat, (batch, count * copied[2], *rest)) else ()", "tuple(steps) if fits else ()"),
    Fault("heads: writes are ignored", _HEADS, "index.memory.write_between(steps[0], node, source)", "None"),
    Fault("heads: what gradients need may be written", _HEADS, " or index.keeping_obstacle(node, source)", ""),
    Fault("heads: broadcast heads", _HEADS, "        if not alike(_sizes(steps[-1])[:2], _sizes(query)[:2]):", "        if False:"),
    Fault("heads: all devices take groups", _HEADS, " or described.device.type != \"cpu\":", ":"),
    Fault("heads: sizes that nobody checks are believed", _HEADS, "    if index.guard is None:", "    if False:"),
    Fault("heads: the keys alone are repeated", _HEADS, "if not keys or not values:", "if not keys and not values:"),
    Fault("heads: copies stay", _HEADS, "            if not step.users:", "            if False:"),
)  # fmt: skip
