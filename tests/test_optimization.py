"""The names of optimum.fx.optimization, and what the package offers beside them."""

import subprocess
import sys

import pytest

import fxopt
import fxopt.optimization
from fxopt import ReversibleTransformation, Transformation
from fxopt.passes import available

# As in the reference of optimum.fx.optimization.
NAMES = [
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


def test_the_names_are_those_of_the_ancestor():
    assert sorted(fxopt.optimization.__all__) == NAMES
    assert all(getattr(fxopt.optimization, name) is getattr(fxopt, name) for name in NAMES)


def test_every_pass_is_available_and_exported():
    passes = available()
    assert list(passes) == sorted(passes)
    assert {"ChangePrecision", "MergeLinears", "ReplaceActivation"} <= set(passes)
    for name, cls in passes.items():
        assert issubclass(cls, Transformation)
        assert getattr(fxopt, name) is cls
        assert name in fxopt.__all__
        assert repr(cls()).startswith(f"{name}(")


def test_a_pass_in_a_file_of_its_own_is_found(tmp_path, monkeypatch):
    source = (
        "from fxopt.rewriting.transformation import Transformation\n"
        "class Nothing(Transformation):\n"
        "    def transform(self, graph_module):\n"
        "        return graph_module\n"
        "class NeedsOption(Nothing):\n"
        "    def __init__(self, option): ...\n"
        "class _Private(Nothing): ...\n"
    )
    (tmp_path / "new_pass.py").write_text(source)
    monkeypatch.setattr("fxopt.passes.__path__", [str(tmp_path)])
    monkeypatch.syspath_prepend(tmp_path)
    assert list(available()) == ["Nothing"]


@pytest.mark.parametrize(
    ("name", "preserves", "reversible"),
    [
        ("MergeLinears", True, True),
        ("FuseBiasInLinear", True, True),
        ("ChangeTrueDivToMulByInverse", True, True),
        ("FuseBatchNorm2dInConv2d", True, True),
        ("FuseBatchNorm1dInLinear", True, True),
        ("ReplaceActivation", False, True),
        ("ChangePrecision", False, True),
    ],
)
def test_what_passes_promise(name, preserves, reversible):
    assert available()[name].preserves_computation is preserves
    assert issubclass(available()[name], ReversibleTransformation) is reversible


def test_the_library_needs_torch_alone():
    code = (
        "import sys, fxopt, fxopt.testing, fxopt.passes; fxopt.passes.available();"
        "sys.exit(any(m in sys.modules for m in ('transformers', 'pytest', 'pandas', 'validation')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
