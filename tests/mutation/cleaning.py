"""Faults in the passes that clean a graph up, and in what they ask of nodes."""

from __future__ import annotations

from tests.mutation.fault import SITE, Fault

_IDENTITY = "passes/remove_identity.py"
_COMMON = "passes/eliminate_common_subexpressions.py"
_FOLD = "passes/fold_constants.py"
_DEAD = "passes/eliminate_dead_code.py"
_COPIES = "passes/remove_copies.py"
_CONSTANTS = "constants.py"
_EFFECTS = "effects.py"

CLEANING = (
    # --- identities
    Fault("identity: active dropout goes", _IDENTITY, "            if Fact.RANDOM in facts and not index.memory.is_pure(node):\n                yield Refusal(node, \"it is active: the model is in training mode, or it works in place\")\n            elif _gives_back(index, node, module, facts) and index.memory.is_pure(node):", "            if _gives_back(index, node, module, facts):"),
    Fault("identity: any operator keeps what it takes", _IDENTITY, "return same and (reshapes or (", "return same and (name or ("),
    Fault("identity: any key takes all", _IDENTITY, "(name == \"getitem\" and _takes_all(node.args[1]))", "name == \"getitem\""),
    Fault("identity: strides are those of the trace", _IDENTITY, "return _is_always_contiguous(source) and len", "return len"),
    Fault("identity: a move to another device goes", _IDENTITY, " and all(isinstance(option, torch.dtype) for option in options)", ""),
    Fault("identity: dtypes may differ", _IDENTITY, "    same = value.dtype == taken.dtype and str", "    same = str"),
    Fault("identity: casts go", _IDENTITY, "        return value.dtype == taken.dtype and all", "        return all", SITE),
    Fault("identity: shapes may differ", _IDENTITY, "str(value.shape) == str(taken.shape) and ", "", SITE),
    Fault("identity: sizes that nobody checks are believed", _IDENTITY, " and index.guard is not None", ""),
    Fault("identity: what is returned becomes one object", _IDENTITY, "    if index.graph_module.graph.output_node() in source.users.keys() & node.users.keys():", "    if False:"),
    Fault("identity: a view may be written into", _IDENTITY, '        return f"{writer.name} may write into it"', "        pass"),
    Fault("identity: a view without gradients goes", _IDENTITY, "    return index.memory.write_between(index.guard or index.nodes[0] if older else source, node)", "    return None"),
    Fault("identity: a parameter read without gradients has some", _IDENTITY, "index.guard or index.nodes[0] if older else source", "source"),
    Fault("identity: hooks and other uses of a module are ignored", _IDENTITY, "        return index.reading_obstacle(node)", "        return None"),
    # --- common subexpressions
    Fault("common: 1 is 1.0", _COMMON, "repr(node.args), repr(node.kwargs)), node)", "str(node.args).replace('.0', ''), repr(node.kwargs)), node)"),
    Fault("common: options are ignored", _COMMON, "repr(node.args), repr(node.kwargs)), node)", "repr(node.args)), node)"),
    Fault("common: all modules are one", _COMMON, 'called = id(index.module(node)) if node.op == "call_module" else node.target', 'called = 0 if node.op == "call_module" else node.target', SITE),
    Fault("common: modules go by their names", _COMMON, 'called = id(index.module(node)) if node.op == "call_module" else node.target', "called = node.target"),
    Fault("common: duplicates of duplicates stay", _COMMON, "        return True\n", "        return False\n"),
    Fault("common: weights may be written in between", _COMMON, "reason = index.reading_obstacle(node) or index.reading_obstacle(earlier)", "reason = None"),
    Fault("common: writes are ignored", _COMMON, '            return f"{writer.name} may write into {value.name}"', "            pass"),
    Fault("common: both may be returned", _COMMON, "    if memory.is_returned(node) and memory.is_returned(earlier):", "    if False:"),
    Fault("common: modes are ignored", _COMMON, "    return memory.write_between(earlier, node)", "    return None"),
    Fault("common: what draws or writes is one", _COMMON, ' or not index.memory.is_pure(node):', ":"),
    # --- constants
    Fault("constants: what the state_dict holds is constant", _CONSTANTS, "all(name in owner._non_persistent_buffers_set for", "all(name in owner._buffers for"),
    Fault("constants: ties are ignored", _CONSTANTS, "[str(node.target), *(other for _, other in index.sharing(node))]", "[str(node.target)]"),
    Fault("constants: autocast is ignored", _CONSTANTS, "    if any(\"autocast\" in graph.function_name(node) for node in index.nodes):", "    if False:"),
    Fault("constants: they follow the dtype of the model", _CONSTANTS, "        if self.value.dtype != before.dtype and not self.follows:", "        if False:"),
    Fault("constants: buffers that are written are constant", _CONSTANTS, "return own and index.memory.written(node) is None", "return own"),
    Fault("constants: free sizes are constant", _CONSTANTS, "and all(isinstance(size, int) for size in value.shape)", ""),
    Fault("constants: sizes that nobody checks are constant", _CONSTANTS, "index.guard is not None and ", ""),
    Fault("identity: a container is its first tensor", "passes/remove_identity.py", " or node.all_input_nodes[:1] != [graph.first_argument(node)]", ""),
    Fault("identity: a view of a dtype has gradients", "passes/remove_identity.py", "    if reads_bits(node):", "    if False:"),
    Fault("constants: what is described is constant", _CONSTANTS, "        return changing in ([], [graph.first_argument(node)]) and _is_described(index, node)\n", "        return True\n"),
    Fault("constants: random numbers are constant", _CONSTANTS, " or not index.memory.is_pure(node):", ":"),
    Fault("constants: a buffer is shared with what is computed", _CONSTANTS, "attribute(graph_module, str(node.target)).clone()", "attribute(graph_module, str(node.target))"),
    Fault("fold constants: what is written is folded", _FOLD, '            return f"{writer.name} may write into it"', "            pass"),
    Fault("fold constants: what is returned is folded", _FOLD, "        if index.memory.is_returned(node):", "        if False:"),
    Fault("fold constants: any size is folded", _FOLD, "if size > self.max_bytes else None", "if False else None"),
    Fault("fold constants: the buffer is in the state_dict", _CONSTANTS, ", persistent=False)", ")"),
    Fault("fold constants: any default dtype will do", _FOLD, "        if (value.dtype, value.shape) != (described.dtype, described.shape):", "        if False:"),
    Fault("fold constants: undo asks for the folded values", _FOLD, ", restore=_nothing)", ")"),
    Fault("fold constants: what it was made of stays", _FOLD, "            if not node.users:\n                rewriter.erase(node)", "            pass"),
    # --- dead code
    Fault("dead code: what writes, draws or checks goes", _DEAD, "not index.memory.is_pure(node) or not dead", 'node.op in ("placeholder", "output") or not dead'),
    Fault("dead code: users may be alive", _DEAD, " or not dead.issuperset(node.users):", " or len(node.users) > 1:"),
    Fault("dead code: only the last value of a chain goes", _DEAD, "                dead.add(node)\n", ""),
    # --- what a node does
    Fault("pure: unknown functions are pure", _EFFECTS, "        bool(facts)\n        and written_by", "        written_by"),
    Fault("pure: what draws random numbers is pure", _EFFECTS, "(Fact.RANDOM not in facts or _is_inactive(node, module))", "True"),
    Fault("pure: statistics are not written", _EFFECTS, "    return known and (module is None or not any(True for _ in written_parameters(module)))", "    return known"),
    Fault("pure: functional dropout is always active", _EFFECTS, 'graph.argument(node, "training") is False or', "False or"),
    Fault("pure: layers in training are inactive", _EFFECTS, "        return not any(part.training for part in parts(module))", "        return True"),
    # --- copies
    Fault("copies: writes are ignored", _COPIES, "    writer = index.memory.written(copy.node)", "    writer = None"),
    Fault("copies: returned memory is shared", _COPIES, "    if index.memory.is_returned(copy.node):", "    if False:"),
    Fault("copies: any operator reads any strides", _COPIES, "        if name not in (*_READING, *_TURNING):", "        if name not in (*_READING, *_TURNING, 'mul', 'as_strided', 'view'):"),
    Fault("copies: strides behind a reshape do not matter", _COPIES, "        if name in _READING and changes:", "        if False:"),
    Fault("copies: attention has one layout", _COPIES, "            layouts = _layouts(found) if node is user.args[0] else []", "            layouts = []"),
    Fault("copies: rows of attention have gaps", _COPIES, "        if name == _ATTENTION and value.stride()[-1] != 1:", "        if False:"),
    Fault("copies: sizes that are written alike are alike", _COPIES, "        if index.guard is None:", "        if False:"),
    Fault("copies: free sizes gain guards", _COPIES, "mode.shape_env.suppress_guards() if mode.shape_env else contextlib.nullcontext()", "contextlib.nullcontext()"),
    Fault("memory: numbers have memory", "memory.py", "                    if not _is_number(value):", "                    if True:"),
)  # fmt: skip
