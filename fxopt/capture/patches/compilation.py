"""`torch.compile` inside of a forward: the function that is compiled runs as it is written, so that its calls are recorded."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch

from fxopt.capture.patches.replaced import replaced

# They call Dynamo unless it is running already; then they call their operator, which reports to a mode.
_CALL_DYNAMO = ("torch._higher_order_ops", "torch.nn.attention.flex_attention")


def patch_compilation(stack: contextlib.ExitStack, active: Any) -> None:
    """Keep Dynamo, which would capture by itself, from running."""
    if (eval_frame := sys.modules.get("torch._dynamo.eval_frame")) is not None:
        stack.enter_context(replaced(eval_frame, "_stance", eval_frame.DynamoStance("force_eager")))
    compile_: Any = torch.compile

    def leave_as_it_is(model: Any = None, **options: Any) -> Any:
        if not active():
            return compile_(model, **options)
        return model if model is not None else lambda function: function

    stack.enter_context(replaced(torch, "compile", leave_as_it_is))
    is_compiling: Any = torch.compiler.is_dynamo_compiling

    def is_dynamo_compiling() -> bool:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return bool(is_compiling()) or (active() and caller.startswith(_CALL_DYNAMO))

    stack.enter_context(replaced(torch.compiler, "is_dynamo_compiling", is_dynamo_compiling))
