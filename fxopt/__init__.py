"""fxopt: capture PyTorch models as torch.fx graphs with their modules, and rewrite them reversibly."""

from fxopt.capture import TracedModule, symbolic_trace, trace
from fxopt.capture.listing import Guard, guards
from fxopt.composition import DeepCopy, LintAndRecompile, compose
from fxopt.drawing import draw
from fxopt.errors import FxoptError, GuardError, PassError, TraceError, UndoError
from fxopt.history import applied, history, undo
from fxopt.passes.change_precision import ChangePrecision
from fxopt.passes.change_true_div_to_mul_by_inverse import ChangeTrueDivToMulByInverse
from fxopt.passes.fuse_batch_norm1d_in_linear import FuseBatchNorm1dInLinear
from fxopt.passes.fuse_batch_norm2d_in_conv2d import FuseBatchNorm2dInConv2d
from fxopt.passes.fuse_bias_in_linear import FuseBiasInLinear
from fxopt.passes.merge_linears import MergeLinears
from fxopt.passes.replace_activation import ReplaceActivation
from fxopt.transformation import ReversibleTransformation, Transformation

__all__ = [
    "ChangePrecision",
    "ChangeTrueDivToMulByInverse",
    "DeepCopy",
    "FuseBatchNorm1dInLinear",
    "FuseBatchNorm2dInConv2d",
    "FuseBiasInLinear",
    "FxoptError",
    "Guard",
    "GuardError",
    "LintAndRecompile",
    "MergeLinears",
    "PassError",
    "ReplaceActivation",
    "ReversibleTransformation",
    "TraceError",
    "TracedModule",
    "Transformation",
    "UndoError",
    "applied",
    "compose",
    "draw",
    "guards",
    "history",
    "symbolic_trace",
    "trace",
    "undo",
]
