"""fxopt: capture PyTorch models as torch.fx graphs with their modules, and rewrite them reversibly."""

from fxopt.capture import TracedModule, symbolic_trace, trace
from fxopt.capture.runtime.guard_listing import Guard, guards
from fxopt.drawing import draw
from fxopt.errors import (
    FallbackWarning,
    FxoptError,
    GuardError,
    LoadError,
    PassError,
    SaveError,
    TraceError,
    UndoError,
    UnverifiedWarning,
    VerificationWarning,
)
from fxopt.graph_index import GraphIndex
from fxopt.optimizing.optimize import optimize
from fxopt.passes.change_precision import ChangePrecision
from fxopt.passes.change_true_div_to_mul_by_inverse import ChangeTrueDivToMulByInverse
from fxopt.passes.eliminate_common_subexpressions import EliminateCommonSubexpressions
from fxopt.passes.eliminate_dead_code import EliminateDeadCode
from fxopt.passes.fold_batch_norms import FoldBatchNorms
from fxopt.passes.fold_constants import FoldConstants
from fxopt.passes.fold_norm_weights import FoldNormWeights
from fxopt.passes.fold_padding import FoldPadding
from fxopt.passes.fold_scale_and_shift import FoldScaleAndShift
from fxopt.passes.fuse_activations import FuseActivations
from fxopt.passes.fuse_attention import FuseAttention
from fxopt.passes.fuse_batch_norm1d_in_linear import FuseBatchNorm1dInLinear
from fxopt.passes.fuse_batch_norm2d_in_conv2d import FuseBatchNorm2dInConv2d
from fxopt.passes.fuse_bias_in_linear import FuseBiasInLinear
from fxopt.passes.fuse_epilogues import FuseEpilogues
from fxopt.passes.fuse_multiply_add import FuseMultiplyAdd
from fxopt.passes.make_layers import MakeLayers
from fxopt.passes.merge_convs import MergeConvs
from fxopt.passes.merge_linears import MergeLinears
from fxopt.passes.pack_convs import PackConvs
from fxopt.passes.pack_linears import PackLinears
from fxopt.passes.quantize_linears import QuantizeLinears
from fxopt.passes.remove_copies import RemoveCopies
from fxopt.passes.remove_identity import RemoveIdentity
from fxopt.passes.remove_repeated_heads import RemoveRepeatedHeads
from fxopt.passes.replace_activation import ReplaceActivation
from fxopt.rewriting.composition import DeepCopy, LintAndRecompile, compose
from fxopt.rewriting.explanation import Refusal
from fxopt.rewriting.history import applied, history, undo
from fxopt.rewriting.pattern import Pattern
from fxopt.rewriting.rewrite import ReversibleRewrite, Rewrite
from fxopt.rewriting.rewriter import Rewriter
from fxopt.rewriting.transformation import ReversibleTransformation, Transformation
from fxopt.saving import load, save
from fxopt.version import __version__ as __version__

__all__ = [
    "ChangePrecision",
    "ChangeTrueDivToMulByInverse",
    "DeepCopy",
    "EliminateCommonSubexpressions",
    "EliminateDeadCode",
    "FallbackWarning",
    "FoldBatchNorms",
    "FoldConstants",
    "FoldNormWeights",
    "FoldPadding",
    "FoldScaleAndShift",
    "FuseActivations",
    "FuseAttention",
    "FuseBatchNorm1dInLinear",
    "FuseBatchNorm2dInConv2d",
    "FuseBiasInLinear",
    "FuseEpilogues",
    "FuseMultiplyAdd",
    "FxoptError",
    "GraphIndex",
    "Guard",
    "GuardError",
    "LintAndRecompile",
    "LoadError",
    "MakeLayers",
    "MergeConvs",
    "MergeLinears",
    "PackConvs",
    "PackLinears",
    "PassError",
    "Pattern",
    "QuantizeLinears",
    "Refusal",
    "RemoveCopies",
    "RemoveIdentity",
    "RemoveRepeatedHeads",
    "ReplaceActivation",
    "ReversibleRewrite",
    "ReversibleTransformation",
    "Rewrite",
    "Rewriter",
    "SaveError",
    "TraceError",
    "TracedModule",
    "Transformation",
    "UndoError",
    "UnverifiedWarning",
    "VerificationWarning",
    "applied",
    "compose",
    "draw",
    "guards",
    "history",
    "load",
    "optimize",
    "save",
    "symbolic_trace",
    "trace",
    "undo",
]
