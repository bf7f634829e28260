"""Faults in what all passes stand on: questions about a graph, the record, undo, compositions."""

from __future__ import annotations

from tests.mutation.fault import Fault

SKELETON = (
    Fault("graph_index: a second name of a module is not seen", "graph_index.py", "        if len(names) > 1:\n            return f\"the module has several names", "        if False:\n            return f\"the module has several names"),
    Fault("graph_index: a second call of a module is not seen", "graph_index.py", "        if len(self.call_sites(module)) > 1:", "        if False:"),
    Fault("graph_index: modules are told apart by name", "graph_index.py", "self._calls.setdefault(id(self.module(node)), []).append(node)", "self._calls.setdefault(node.target, []).append(node)"),
    Fault("memory: ties are told by object, not by memory", "memory.py", "        return int(tensor.untyped_storage()._cdata)", "        return id(tensor)"),
    Fault("graph_index: hooks are not seen", "graph_index.py", "        if hooks:", "        if False:"),
    Fault("memory: views are no aliases", "memory.py", "                for value in effects.written_by(node, self._called(node)) or node.all_input_nodes:", "                for value in effects.written_by(node, self._called(node)) or ():"),
    Fault("memory: the inputs of a graph share no memory", "memory.py", '        if node.op == "placeholder":\n            return 0', '        if node.op == "placeholder":\n            return id(node)'),
    Fault("graph: a keyword call is taken for none", "graph.py", "    values = [*node.args, *node.kwargs.values()]\n    if (\n", "    values = [*node.args]\n    if (\n"),
    Fault("graph_index: subclasses match", "graph_index.py", "return None if own is kind else", "return None if issubclass(own, kind) else"),
    Fault("submodules: copies share the registry of hooks", "submodules.py", "value.copy() if isinstance(value, dict | set) else value", "value"),
    Fault("effects: method names with _ write nothing", "effects.py", '    return name.endswith("_")', "    return False"),
    Fault("effects: out= is not seen", "effects.py", '    torch.fx.node.map_arg(node.kwargs.get("out"), written.append)', "    pass"),
    Fault("effects: setitem writes nothing", "effects.py", "operator.setitem, operator.delitem}", "operator.delitem}"),
    Fault("effects: a foreign function writes nothing", "effects.py", "        return None if node.is_impure() else tuple(node.all_input_nodes)", "        return ()"),
    Fault("effects: inplace modules write nothing", "effects.py", 'any(getattr(part, "inplace", False) for part in parts)', "False"),
    Fault("effects: max_norm writes nothing", "effects.py", "and part.max_norm is not None", "and False"),
    Fault("rewrite: undo forgets the order of children", "rewrite.py", "            submodules.order_children(graph_module, path, record.orders[path])", "            pass"),
    Fault("rewrite: undo goes in the order of applying", "rewrite.py", "for entry in reversed(own):", "for entry in list(own):"),
    Fault('rewrite: the order of undoing is not checked', "rewrite.py", '        if names:\n            raise UndoError(', '        if False:\n            raise UndoError('),
    Fault("rewrite: a lost record is no error", "rewrite.py", "            self._check_no_trace(graph_module)", "            pass"),
    Fault("rewrite: missing nodes are no error", "rewrite.py", "        if missing:", "        if False:"),
    Fault('rewrite: undone entries stay', "rewrite.py", '            del standing[entry.site]\n', ''),
    Fault("rewrite: only one round", "rewrite.py", "            rounds += 1", "            rounds += 1\n            if rounds > 1:\n                break"),
    Fault("record: marks are lost in a pickle", "record.py", "        node.meta.update(fact.meta)", "        pass"),
    Fault("record: positions are trusted after an edit", "record.py", "    if [fact.kind for fact in record.facts] != [_kind(node) for node in nodes]:", "    if len(record.facts) != len(nodes):"),
    Fault("record: an address in the signature", "record.py", 're.sub(r" at 0x[0-9a-f]+", "", repr(value))', "repr(value)"),
    Fault("record: a set in the order of its hash", "record.py", '", ".join(sorted(stable_text(item) for item in value)) + "}"', '", ".join(stable_text(item) for item in value) + "}"'),
    Fault("transformation: nothing comes back after an error", "transformation.py", "        before.restore()\n", ""),
    Fault("transformation: the graph is not linted", "transformation.py", "        graph_module.graph.lint()", "        pass"),
    Fault("transformation: the code is not generated again", "transformation.py", "left an invalid graph: {error}\") from error\n    graph_module.recompile()", "left an invalid graph: {error}\") from error"),
    Fault("compose: undone in the order of applying", "composition.py", "for part in reversed(self.parts):", "for part in self.parts:"),
    Fault("compose: preserves the computation if any part does", "composition.py", "preserves = all(", "preserves = any("),
    Fault("compose: inplace=False works on the given module", "composition.py", "        if not self.inplace:\n            graph_module = copy.deepcopy(graph_module)\n        for number", "        for number"),
    Fault("testing: NaN equals anything", "testing.py", "    same = (wide == other) | (wide.isnan() & other.isnan())", "    same = (wide == other) | wide.isnan() | other.isnan()"),
    Fault("testing: a comparison of nothing passes", "testing.py", "    if not tensors or not values:", "    if False:"),
    Fault("testing: values of a round trip are not compared", "testing.py", "if other is not None and not _same_bits(tensor, other):", "if False:"),
)  # fmt: skip
