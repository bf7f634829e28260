"""Classifies errors of the forward: the one to raise for that which it met, or caught."""

from __future__ import annotations

import traceback
from typing import Any

from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxopt.capture.fakes.shape_env import CaptureShapeEnv
from fxopt.capture.nodes.graph_writer import GraphWriter
from fxopt.capture.nodes.source_location import RUN_FORWARD, describe_location, is_model_code, is_own_code
from fxopt.capture.recording.recorder import Recorder
from fxopt.errors import TraceError

# A stack with more functions of the model than this is one that does not end.
_MOST_NESTED = 100
_DATA_DEPENDENT = (GuardOnDataDependentSymNode, DataDependentOutputException)


def classify_error(error: Exception, recorder: Recorder) -> Exception:
    """Give the error to raise for an exception of the forward: an open branch, or a TraceError with the model's line."""
    decisions = recorder.decisions
    if decisions.open:
        return decisions.open
    if isinstance(error, TraceError):
        return error
    if decisions.text_question and isinstance(error, (KeyError, AttributeError)):
        return decisions.text_question
    return error if _is_own(error) else _with_line(error, recorder.writer)


def raise_caught(recorder: Recorder, shape_env: CaptureShapeEnv) -> None:
    """Raise an error that the forward has caught: it may have gone another way than it would with real tensors.

    So it may have where it made a text of a value.
    """
    if recorder.decisions.open or recorder.decisions.text_question:
        raise recorder.decisions.open or recorder.decisions.text_question  # type: ignore[misc]
    if recorder.failure or shape_env.failure:
        raise recorder.failure or _with_line(shape_env.failure, recorder.writer)


def _is_own(error: Exception) -> bool:
    """Tell whether an exception was raised by the capture's own code: a bug here, not something about the model."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, RecursionError) and RUN_FORWARD in (code.co_name for code in codes):
        called = [code for code in codes if is_model_code(code.co_filename)]
        return len(called) < _MOST_NESTED  # else the model calls itself
    return is_own_code(codes[-1])


def _with_line(error: Any, writer: GraphWriter) -> TraceError:
    """An exception of the forward as a TraceError that names the model's line."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    after = next((i for i, f in enumerate(frames) if f.f_code.co_name == RUN_FORWARD), 0)
    own = [frame for frame in frames[after:] if is_model_code(frame.f_code.co_filename)]
    where = describe_location(own[-1], None) if own else writer.where()
    if isinstance(error, _DATA_DEPENDENT):
        return TraceError(
            f"the forward decides on the value of a tensor, which a graph cannot. {where} Compute with "
            "`torch.where`, pass the decision as an argument, or make the module a leaf (leaf_modules=...)."
        )
    return TraceError(f"the forward failed under capture. {where} {type(error).__name__}: {error}")
