"""A sequential pipeline: the model runs layer by layer over all samples, and each layer is compressed before the next one
sees its outputs.

llm-compressor works like this, on a copy of the tracer that transformers removed, which needs models to be rewritten where
their Python looks at values. `fxopt.trace` takes the models as they are. The compression here is GPTQ
(Frantar et al., 2022, https://arxiv.org/abs/2210.17323), with 4 bits and one scale for each output channel.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from transformers import LlamaConfig, LlamaForCausalLM

import fxopt
from fxopt.testing import randomise

Sample = Mapping[str, Any]
Compress = Callable[[nn.Module, Callable[[], None]], None]


def capture(model: nn.Module, sample: Sample, targets: str, specialize: bool = False) -> GraphModule:
    """The graph of a model in which the modules whose class names fit `targets` are single nodes."""

    def is_target(name: str, module: nn.Module) -> bool:
        return re.fullmatch(targets, type(module).__name__) is not None

    return fxopt.trace(model, (), dict(sample), leaf_modules=is_target, specialize=specialize)


def run_sequentially(
    gm: GraphModule, samples: Sequence[Sample], targets: str, compress: Compress
) -> list[Any]:
    """Run the samples up to each target, compress it, and go on with the outputs of the compressed one.

    Args:
        gm: the captured model.
        samples: the inputs by name, with `use_cache=False`: a target runs twice, and must not write twice into a cache.
        targets: the class names of the modules to compress, as a regular expression.
        compress: takes a target, and a function that runs all samples through it.

    Returns:
        The outputs of the compressed model, one for each sample.
    """
    runs = [_Run(gm, sample) for sample in samples]
    for node in gm.graph.nodes:
        target = gm.get_submodule(str(node.target)) if node.op == "call_module" else None
        if target is not None and re.fullmatch(targets, type(target).__name__):
            compress(target, functools.partial(_call_all, runs, node))
        for run in runs:
            run.step(node)
    return [run.result for run in runs]


def _call_all(runs: Iterable[_Run], node: Node) -> None:
    for run in runs:
        run.call(node)


class _Run(Interpreter):
    """One sample on its way through the graph; it keeps the values that later nodes need, and no others."""

    def __init__(self, gm: GraphModule, sample: Sample) -> None:
        super().__init__(gm)
        self._sample, self.result = sample, None
        self._left = {node: len(node.users) for node in gm.graph.nodes}

    @torch.no_grad()
    def call(self, node: Node) -> Any:
        """The value of a node, from the values of those before it."""
        if node.op == "placeholder":
            return self._sample[str(node.target)]
        return self.run_node(node)

    def step(self, node: Node) -> None:
        """Compute a node, and let go of what nobody needs any more."""
        self.env[node] = value = self.call(node)
        if node.op == "output":
            self.result = value
        for used in node.all_input_nodes:
            self._left[used] -= 1
            if not self._left[used]:
                del self.env[used]


def gptq(target: nn.Module, run_samples: Callable[[], None], levels: int = 16) -> None:
    """Round the linear layers of a module, in place: each column's error goes into the columns behind it."""
    layers = [module for module in target.modules() if type(module) is nn.Linear]
    products = {layer: torch.zeros(layer.in_features, layer.in_features) for layer in layers}

    def add(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].flatten(0, -2).to(products[layer])
        products[layer] += rows.T @ rows

    hooks = [layer.register_forward_pre_hook(add) for layer in layers]
    try:
        run_samples()
    finally:
        for hook in hooks:
            hook.remove()
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(_rounded(layer.weight, products[layer], levels))


def _rounded(weight: Tensor, products: Tensor, levels: int) -> Tensor:
    """A weight (out, in) on a grid of `levels` values for each row, for inputs X with X^T X = `products`."""
    left, rounded = weight.double(), torch.empty_like(weight, dtype=torch.float64)
    step = left.abs().amax(1, keepdim=True).clamp_min(1e-12) * 2 / (levels - 1)
    damping = 0.01 * products.diagonal().mean() * torch.eye(len(products))
    inverse = torch.linalg.inv((products + damping).double())
    inverse = torch.linalg.cholesky(inverse, upper=True)
    for column in range(weight.shape[1]):
        values = left[:, column : column + 1]
        at = slice(column, column + 1)
        rounded[:, at] = ((values / step).round().clamp(-levels / 2, levels / 2 - 1)) * step
        error = (values - rounded[:, at]) / inverse[column, column]
        left[:, column + 1 :] -= error * inverse[column, column + 1 :]
    return rounded.to(weight.dtype)


def round_to_nearest(target: nn.Module, run_samples: Callable[[], None], levels: int = 16) -> None:
    """The same grid without the samples, to compare GPTQ with."""
    for layer in target.modules():
        if type(layer) is nn.Linear:
            with torch.no_grad():
                layer.weight.copy_(_rounded(layer.weight, torch.eye(layer.in_features), levels))


def llama() -> LlamaForCausalLM:
    """A small Llama with random weights, the same at each call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return randomise(LlamaForCausalLM(config)).eval()


def text(count: int) -> list[Sample]:
    """Samples of eight tokens each."""
    drawn = torch.randint(3, 90, (count, 1, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False} for ids in drawn]


def error(compress: Compress, samples: Sequence[Sample]) -> float:
    """How far the logits of a Llama move, in relation to their size."""
    model = llama()
    with torch.no_grad():
        exact = torch.cat([model(**sample).logits for sample in samples])
    outputs = run_sequentially(
        capture(model, samples[0], "LlamaDecoderLayer"), samples, "LlamaDecoderLayer", compress
    )
    logits = torch.cat([output.logits for output in outputs])
    return float((logits - exact).norm() / exact.norm())


def main() -> None:
    """Compress a Llama to 4 bits, and say what it costs."""
    gm = capture(llama(), text(1)[0], "LlamaDecoderLayer")
    layers = [node for node in gm.graph.nodes if re.fullmatch(r"model\.layers\.\d+", str(node.target))]
    print(f"{len(layers)} decoder layers, each one of {len(gm.graph.nodes)} nodes")
    print(f"error of the logits, rounded to nearest: {error(round_to_nearest, text(32)):.3f}")
    print(f"error of the logits, GPTQ:               {error(gptq, text(32)):.3f}")


if __name__ == "__main__":
    main()
