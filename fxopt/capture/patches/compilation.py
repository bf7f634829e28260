"""`torch.compile` inside of a forward: the function that is compiled runs as it is written, so that its calls are recorded."""

from __future__ import annotations

import sys
from typing import Any

import torch

from fxopt.capture.patches.replaced import Patches

# They call Dynamo unless it is running already; then they call their operator, which reports to a mode.
_CALL_DYNAMO = ("torch._higher_order_ops", "torch.nn.attention.flex_attention")


def patch_compilation(patch: Patches) -> None:
    """Keep Dynamo, which would capture by itself, from running."""
    if (eval_frame := sys.modules.get("torch._dynamo.eval_frame")) is not None:
        patch.set(eval_frame, "_stance", eval_frame.DynamoStance("force_eager"))

    @patch(torch, "compile")
    def leave_as_it_is(original: Any, model: Any = None, **options: Any) -> Any:
        return model if model is not None else lambda function: function

    @patch(torch.compiler, "is_dynamo_compiling")
    def is_dynamo_compiling(original: Any) -> bool:
        caller = sys._getframe(2).f_globals.get("__name__", "")
        return bool(original()) or caller.startswith(_CALL_DYNAMO)
