"""The names of `optimum.fx.optimization`, so that migrating to fxopt is one import.

Example:
    >>> from fxopt.optimization import MergeLinears, compose
    >>> compose(MergeLinears()).preserves_computation
    True
"""

from fxopt.passes.change_true_div_to_mul_by_inverse import ChangeTrueDivToMulByInverse
from fxopt.passes.fuse_batch_norm1d_in_linear import FuseBatchNorm1dInLinear
from fxopt.passes.fuse_batch_norm2d_in_conv2d import FuseBatchNorm2dInConv2d
from fxopt.passes.fuse_bias_in_linear import FuseBiasInLinear
from fxopt.passes.merge_linears import MergeLinears
from fxopt.rewriting.composition import DeepCopy, LintAndRecompile, compose
from fxopt.rewriting.transformation import ReversibleTransformation, Transformation

__all__ = [
    "ChangeTrueDivToMulByInverse",
    "DeepCopy",
    "FuseBatchNorm1dInLinear",
    "FuseBatchNorm2dInConv2d",
    "FuseBiasInLinear",
    "LintAndRecompile",
    "MergeLinears",
    "ReversibleTransformation",
    "Transformation",
    "compose",
]
