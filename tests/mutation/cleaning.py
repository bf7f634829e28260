"""Faults in the passes that clean a graph up, and in what they ask of nodes."""

from __future__ import annotations

from tests.mutation.fault import SITE, Fault

_IDENTITY = "passes/remove_identity.py"
_COMMON = "passes/eliminate_common_subexpressions.py"
_FOLD = "passes/fold_constants.py"
_DEAD = "passes/eliminate_dead_code.py"
_CONSTANTS = "constants.py"
_EFFECTS = "effects.py"

CLEANING = (
    # --- identities
    Fault("identity: active dropout goes", _IDENTITY, "            if Fact.RANDOM in facts and not index.memory.is_pure(node):\n                yield Refusal(node, \"it is active: the model is in training mode, or it works in place\")\n            elif _gives_back(node, module, facts) and index.memory.is_pure(node):", "            if _gives_back(node, module, facts):"),
    Fault("identity: a detached value has gradients", _IDENTITY, 'if name in ("detach", "getattr", "as_strided") or', 'if name == "as_strided" or'),
    Fault("identity: as_strided is like a view", _IDENTITY, ', "as_strided") or', ") or"),
    Fault("identity: strides are those of the trace", _IDENTITY, ' or (\n        name == "contiguous" and not _is_always_contiguous(source)\n    ):', ":"),
    Fault("identity: a move to another device goes", _IDENTITY, "return known and not _moves(node) and", "return known and"),
    Fault("identity: dtypes may differ", _IDENTITY, "return storage_of(value), value.dtype, f", "return storage_of(value), f", SITE),
    Fault("identity: shapes and strides may differ", _IDENTITY, 'f"{value.shape} {value.stride()} {value.storage_offset()}"', '""', SITE),
    Fault("identity: a copy goes", _IDENTITY, "return storage_of(value), value.dtype,", "return value.dtype,"),
    Fault("identity: a view may be written into", _IDENTITY, '        return f"{writer.name} may write into it"', "        pass"),
    Fault("identity: a view without gradients goes", _IDENTITY, "    return index.memory.write_between(node.all_input_nodes[0], node)", "    return None"),
    Fault("identity: hooks and other uses of a module are ignored", _IDENTITY, "        return index.reading_obstacle(node)", "        return None"),
    # --- common subexpressions
    Fault("common: 1 is 1.0", _COMMON, "repr(args), repr(kwargs)), node)", "str(args).replace('.0', ''), repr(kwargs)), node)"),
    Fault("common: options are ignored", _COMMON, "repr(args), repr(kwargs)), node)", "repr(args)), node)"),
    Fault("common: all modules are one", _COMMON, 'called = id(index.module(node)) if node.op == "call_module" else node.target', 'called = 0 if node.op == "call_module" else node.target', SITE),
    Fault("common: modules go by their names", _COMMON, 'called = id(index.module(node)) if node.op == "call_module" else node.target', "called = node.target"),
    Fault("common: duplicates of duplicates are not seen", _COMMON, "                    stands_for[node] = earlier\n", ""),
    Fault("common: writes are ignored", _COMMON, '            return f"{writer.name} may write into {value.name}"', "            pass"),
    Fault("common: both may be returned", _COMMON, "    if memory.is_returned(node) and memory.is_returned(earlier):", "    if False:"),
    Fault("common: modes are ignored", _COMMON, "    return memory.write_between(earlier, node)", "    return None"),
    Fault("common: what draws or writes is one", _COMMON, ' or not index.memory.is_pure(node):', ":"),
    # --- constants
    Fault("constants: what the state_dict holds is constant", _CONSTANTS, "        return name in owner._non_persistent_buffers_set and", "        return name in owner._buffers and"),
    Fault("constants: parameters are constant", _CONSTANTS, "        return name in owner._non_persistent_buffers_set and", "        return"),
    Fault("constants: buffers that are written are constant", _CONSTANTS, "_non_persistent_buffers_set and index.memory.written(node) is None", "_non_persistent_buffers_set"),
    Fault("constants: free sizes are constant", _CONSTANTS, "    return not free or (", "    return True or ("),
    Fault("constants: what is described is constant", _CONSTANTS, "        return changing in ([], node.all_input_nodes[:1]) and _is_described(node)\n", "        return True\n"),
    Fault("constants: random numbers are constant", _CONSTANTS, " or not index.memory.is_pure(node):", ":"),
    Fault("constants: a buffer is shared with what is computed", _CONSTANTS, "attribute(graph_module, str(node.target)).clone()", "attribute(graph_module, str(node.target))"),
    Fault("fold constants: what is written is folded", _FOLD, '            return f"{writer.name} may write into it"', "            pass"),
    Fault("fold constants: what is returned is folded", _FOLD, "        if index.memory.is_returned(node):", "        if False:"),
    Fault("fold constants: any size is folded", _FOLD, "if size > self.max_bytes else None", "if False else None"),
    Fault("fold constants: the buffer is in the state_dict", _FOLD, ", persistent=False)", ")"),
    Fault("fold constants: what it was made of stays", _FOLD, "            if not node.users:\n                rewriter.erase(node)", "            pass"),
    # --- dead code
    Fault("dead code: what writes, draws or checks goes", _DEAD, "index.memory.is_pure(node) and dead", 'node.op not in ("placeholder", "output") and dead'),
    Fault("dead code: users may be alive", _DEAD, " and dead.issuperset(node.users):", " and len(node.users) < 2:"),
    Fault("dead code: only the last value of a chain goes", _DEAD, "                dead.add(node)\n", ""),
    # --- what a node does
    Fault("pure: unknown functions are pure", _EFFECTS, "        bool(facts)\n        and written_by", "        written_by"),
    Fault("pure: what draws random numbers is pure", _EFFECTS, "(Fact.RANDOM not in facts or _is_inactive(node, module))", "True"),
    Fault("pure: statistics are not written", _EFFECTS, "    return known and (module is None or not any(True for _ in written_parameters(module)))", "    return known"),
    Fault("pure: functional dropout is always active", _EFFECTS, 'graph.argument(node, "training") is False or', "False or"),
    Fault("pure: layers in training are inactive", _EFFECTS, "        return not any(part.training for part in parts(module))", "        return True"),
)  # fmt: skip
