"""Static int8 quantisation of a captured transformers model by `torch.ao.quantization`.

`prepare_fx` traces what it gets once more. It cannot trace a BERT, and it can trace the captured one: the graph module has
no Python left in its forward. The guard, which checks the inputs, stays one step: name it as not traceable.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
from torch.fx import GraphModule
from transformers import BertConfig, BertForSequenceClassification

import fxopt
from fxopt.testing import randomise


def captured(model: nn.Module) -> GraphModule:
    """The graph of a text model, for every batch size and length."""
    return fxopt.symbolic_trace(model, input_names=["input_ids", "attention_mask"])


def quantize(gm: GraphModule, samples: Iterable[tuple[Tensor, ...]]) -> GraphModule:
    """A copy of a captured model with layers in int8, whose ranges come from the samples."""
    samples = list(samples)
    leave = PrepareCustomConfig().set_non_traceable_module_names(["input_guard"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deprecated")
        mapping = get_default_qconfig_mapping("onednn")
        prepared = prepare_fx(gm, mapping, samples[0], prepare_custom_config=leave)
        with torch.no_grad():
            for sample in samples:
                prepared(*sample)
        return convert_fx(prepared)


def bert() -> BertForSequenceClassification:
    """A small BERT with random weights."""
    config = BertConfig(
        vocab_size=90,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=24,
    )
    return randomise(BertForSequenceClassification(config)).eval()


def sample(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Token ids and a mask."""
    return torch.randint(3, 90, (batch, length)), torch.ones(batch, length, dtype=torch.long)


def main() -> None:
    """Quantise a captured BERT, and call it with another batch and length than those it has seen."""
    torch.manual_seed(0)
    model = bert()
    quantized = quantize(captured(model), [sample(2, 8) for _ in range(8)])
    inputs = sample(5, 12)
    with torch.no_grad():
        expected, actual = model(*inputs).logits, quantized(*inputs).logits
    layers = [m for m in quantized.modules() if type(m).__module__.startswith("torch.ao.nn.quantized")]
    print(f"{len(layers)} quantised layers, among them", {type(layer).__name__ for layer in layers})
    print(f"logits move by {float((actual - expected).norm() / expected.norm()):.3f} of their size")


if __name__ == "__main__":
    main()
