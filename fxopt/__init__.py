"""fxopt: capture PyTorch models as torch.fx graphs with their modules, and rewrite them reversibly."""

from fxopt.capture import TracedModule, symbolic_trace, trace
from fxopt.errors import FxoptError, GuardError, PassError, TraceError, UndoError

__all__ = [
    "FxoptError",
    "GuardError",
    "PassError",
    "TraceError",
    "TracedModule",
    "UndoError",
    "symbolic_trace",
    "trace",
]
