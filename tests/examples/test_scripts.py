"""The other scripts of `examples`, and what they claim."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from examples import prepare_fx
from examples.equalize_layers import EqualizeLayers
from tests.before_after import refused, rewritten

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("pipeline_parallel", "equal: True"),
        ("equalize_layers", "outputs: bit-exact"),
    ],
)
def test_script(script, said):
    """A user starts it by its path; two processes import it anew."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / f"{script}.py")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert said in ran.stdout


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_a_quantized_bert_follows_the_model():
    torch.manual_seed(0)
    model = prepare_fx.bert()
    traced = prepare_fx.captured(model)
    quantized = prepare_fx.quantize(traced, [prepare_fx.sample(2, 8) for _ in range(4)])
    layers = {name for name, module in quantized.named_modules() if type(module).__name__ == "Linear"}
    assert layers == {name for name, module in model.named_modules() if type(module) is nn.Linear}
    inputs = prepare_fx.sample(5, 12)
    with torch.no_grad():
        expected, actual = model(*inputs).logits, quantized(*inputs).logits
    assert not torch.equal(actual, expected)
    assert (actual - expected).norm() < 0.03 * expected.norm()


class Pair(nn.Sequential):
    """A pair whose channels have ranges that differ by up to a hundred."""

    def __init__(self, between=None):
        super().__init__(nn.Linear(6, 8), between or nn.ReLU(), nn.Linear(8, 4))
        with torch.no_grad():
            self[0].weight *= torch.logspace(-1, 1, 8)[:, None]


def test_a_pair_is_equalised():
    after = rewritten(EqualizeLayers(), Pair(), torch.randn(3, 6), sites=1)
    ratio = after.get_submodule("0").weight.abs().amax(1) / after.get_submodule("2").weight.abs().amax(0)
    assert ratio.max() < 4.01
    assert ratio.min() > 0.24


def test_a_channel_of_zeros_stays():
    pair = Pair()
    with torch.no_grad():
        pair[0].weight[3] = 0
        pair[2].weight[:, 4] = 0
    rewritten(EqualizeLayers(), pair, torch.randn(3, 6), sites=1)


class UsedTwice(Pair):
    def forward(self, x):
        y = self[1](self[0](x))
        return self[2](y) + y.sum()


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair = Pair()
        self.other = nn.Linear(6, 8)
        self.other.weight = self.pair[0].weight

    def forward(self, x):
        return self.pair(x).sum() + self.other(x).sum()


def hooked():
    model = Pair()
    model[1].register_forward_hook(lambda module, inputs, output: output + 1)
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [(UsedTwice(), "also used by"), (Shared(), "shares memory"), (hooked(), "hooks")],
    ids=["used twice", "shared", "hooked"],
)
def test_a_pair_that_others_see_is_refused(model, reason):
    refused(EqualizeLayers(), copy.deepcopy(model).eval(), torch.randn(3, 6), reason=reason)


class Unused(Pair):
    def forward(self, x):
        self[1](self[0](x))
        return self[0](x)


def test_an_activation_that_nothing_uses_is_no_site():
    rewritten(EqualizeLayers(), Unused(), torch.randn(3, 6), sites=0)


def test_another_activation_is_no_site():
    rewritten(EqualizeLayers(), Pair(nn.GELU()), torch.randn(3, 6), sites=0)
