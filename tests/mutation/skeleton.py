"""Faults in what all passes stand on: the questions that they ask about a graph, and the oracle of the tests."""

from __future__ import annotations

from tests.mutation.fault import BEHIND, SITE, Fault

SKELETON = (
    Fault("graph_index: a second name of a module is not seen", "graph_index.py", "        if len(names) > 1:\n            return f\"the module has several names", "        if False:\n            return f\"the module has several names"),
    Fault("graph_index: a second call of a module is not seen", "graph_index.py", "        if len(self.call_sites(module)) > 1:", "        if False:", SITE),
    Fault("graph_index: modules are told apart by name", "graph_index.py", "found.setdefault(id(self.module(node)), []).append(node)", "found.setdefault(hash(node.target), []).append(node)", SITE),
    Fault("memory: ties are told by object, not by memory", "memory.py", "        return int(tensor.untyped_storage()._cdata)", "        return id(tensor)"),
    Fault("graph_index: hooks are not seen", "graph_index.py", "        if hooks:", "        if False:", SITE),
    Fault("graph_index: a forward of the instance is not seen", "graph_index.py", 'if "forward" in vars(module) or module._compiled_call_impl is not None:', "if False:", SITE),
    Fault("graph_index: subclasses match", "graph_index.py", "return None if own is kind else", "return None if issubclass(own, kind) else", SITE),
    Fault("graph_index: what the graph reads of a module is not seen", "graph_index.py", "        if direct:\n            return direct", "        if False:\n            return direct"),
    Fault("memory: views are no aliases", "memory.py", "                for value in self._written[node] or node.all_input_nodes:", "                for value in self._written[node] or ():", SITE),
    Fault("memory: the inputs of a graph share no memory", "memory.py", '        if node.op == "placeholder":\n            return 0', '        if node.op == "placeholder":\n            return id(node)', BEHIND),
    Fault("memory: only the first write is listed", "memory.py", "found.setdefault(number, []).append(node)\n        return found\n\n    @functools.cached_property\n    def _memory_writers", "found.setdefault(number, [node])\n        return found\n\n    @functools.cached_property\n    def _memory_writers", BEHIND),
    Fault("graph: a keyword call is taken for none", "graph.py", "    values = [*node.args, *node.kwargs.values()]\n    if (\n", "    values = [*node.args]\n    if (\n"),
    Fault("graph: any keyword is the input", "graph.py", "        or (node.kwargs and names[:1] != list(node.kwargs))\n", ""),
    Fault("submodules: copies share the registry of hooks", "submodules.py", "value.copy() if isinstance(value, dict | set) else value", "value"),
    Fault("submodules: children that were added come first", "submodules.py", "[*(n for n in recorded if n in modules), *(n for n in modules if n not in recorded)]", "[*(n for n in modules if n not in recorded), *(n for n in recorded if n in modules)]"),
    Fault("operators: method names with _ write nothing", "operators.py", '    return name.endswith("_")', "    return False", SITE),
    Fault("operators: setitem writes nothing", "operators.py", 'return bare in ("setitem", "delitem")', 'return bare == "delitem"', SITE),
    Fault("operators: operator.iadd writes nothing", "effects.py", "operators.is_write_name(dunder)", "False", SITE),
    Fault("operators: einsum gives new memory", "operators.py", '"einsum tensordot": _MIXES,', '"einsum tensordot": _NEW | _MIXES,', SITE),
    Fault("operators: a view does not depend on the layout", "operators.py", '"view view_as unsafe_view as_strided": _VIEW | Fact.LAYOUT,', '"view view_as unsafe_view as_strided": _VIEW,', BEHIND),
    Fault("operators: reshape never copies", "operators.py", '"reshape reshape_as flatten ravel contiguous": _VIEW | Fact.COPIES,', '"reshape reshape_as flatten ravel contiguous": _VIEW,', BEHIND),
    Fault("operators: batch_norm writes no statistics", "operators.py", '"batch_norm instance_norm": _NEW | _MIXES | Fact.STATISTICS,', '"batch_norm instance_norm": _NEW | _MIXES,'),
    Fault("operators: floor keeps errors small", "operators.py", "add sub subtract rsub", "floor add sub subtract rsub", BEHIND),
    Fault("operators: a comparison keeps errors small", "operators.py", '"logical_or logical_xor": Fact.NEW | Fact.ELEMENTWISE,', '"logical_or logical_xor": _NEW | _SMOOTH | Fact.ELEMENTWISE,', BEHIND),
    Fault("operators: a product of many keeps errors small", "operators.py", '"prod cumprod": _NEW,', '"prod cumprod": _NEW | _SMOOTH,', BEHIND),
    Fault("operators: a function of such a name from elsewhere is torch's", "operators.py", "getattr(home, name, None) is target for", "hasattr(home, name) for", BEHIND),
    Fault("operators: hooks of a layer do nothing", "operators.py", "    if hooks_of(module) or", "    if", BEHIND),
    Fault("operators: a subclass of a layer is that layer", "operators.py", "getattr(nn, name, None) is not kind", "False", BEHIND),
    Fault("effects: out= is not seen", "effects.py", '    torch.fx.node.map_arg(node.kwargs.get("out"), written.append)', "    pass", SITE),
    Fault("effects: a foreign function writes nothing", "effects.py", "        return None if node.is_impure() else tuple(node.all_input_nodes)", "        return ()", SITE),
    Fault("effects: inplace modules write nothing", "effects.py", 'any(getattr(part, "inplace", False) for part in parts(module))', "False", SITE),
    Fault("effects: max_norm writes nothing", "effects.py", "and part.max_norm is not None", "and False"),
    Fault("testing: NaN equals anything", "testing/differences.py", "    same = (wide == other) | (wide.isnan() & other.isnan())", "    same = (wide == other) | wide.isnan() | other.isnan()"),
    Fault("testing: a comparison of nothing passes", "testing/differences.py", "    if not tensors or not values:", "    if False:"),
    Fault("testing: values of a round trip are not compared", "testing/round_trips.py", "if other is not None and not same_bits(tensor, other):", "if False:"),
)  # fmt: skip
