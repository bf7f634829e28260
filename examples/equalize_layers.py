"""Cross-layer equalisation (Nagel et al., 2019, https://arxiv.org/abs/1906.04721) as a pass of your own.

Between two linear layers with a ReLU between them, each channel has a free scale: the first layer makes it s times
smaller, the second takes it s times larger. Scales that bring the ranges of both layers together lose less in int8.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from transformers import OPTConfig, OPTForCausalLM

import fxopt
from fxopt import GraphIndex, Refusal, ReversibleRewrite, Rewriter
from fxopt.testing import assert_equivalent, assert_round_trip, randomise


@dataclasses.dataclass(frozen=True)
class Pair:
    """A linear layer, a ReLU behind it, and a linear layer behind that."""

    node: Node
    relu: Node
    second: Node


class EqualizeLayers(ReversibleRewrite[Pair]):
    """Scales the channels between two linear layers by powers of two, by which floats multiply exactly."""

    preserves_computation = True

    def match(self, graph_module: GraphModule) -> Iterator[Pair | Refusal]:
        """Yield the pairs whose ranges differ by a factor of two or more, each layer at most once."""
        index, taken = GraphIndex(graph_module), set[Node]()
        layers = index.calls_like(nn.Linear)
        for relu in index.calls_like(nn.ReLU):
            first, second = relu.all_input_nodes[0], next(iter(relu.users), None)
            if first not in layers or second not in layers or taken & {first, second}:
                continue
            reason = (
                index.obstacle(first, nn.Linear)
                or index.obstacle(second, nn.Linear)
                or index.inexact(relu, nn.ReLU)
                or index.removing_obstacle(relu)
                or index.joining_obstacle(first, relu)
                or index.joining_obstacle(relu, second)
            )
            if reason:
                yield Refusal(first, reason)
            elif (scales(index.module(first), index.module(second)) != 1).any():
                taken |= {first, second}
                yield Pair(first, relu, second)

    def apply(self, rewriter: Rewriter, site: Pair) -> Node:
        """Put scaled copies in the place of both layers; those of the model stay as they are."""
        calls = (site.node, site.second)
        first, second = (copy.deepcopy(rewriter.graph_module.get_submodule(str(n.target))) for n in calls)
        with torch.no_grad():
            scale = scales(first, second)
            for parameter in first.parameters():  # (channels, inputs) and (channels,)
                parameter /= scale.reshape(-1, *[1] * (parameter.ndim - 1))
            second.weight *= scale
        for node, module in zip(calls, (first, second), strict=True):
            rewriter.replace_module(str(node.target), module)
        # The ReLU between is a part of the site: written anew, it is one piece with them, which `verify` compares.
        relu = rewriter.create("call_module", site.relu.target, site.relu.args, before=site.relu)
        rewriter.replace_uses(site.relu, relu)
        rewriter.erase(site.relu)
        return relu


def scales(first: nn.Module, second: nn.Module) -> Tensor:
    """The power of two for each channel that brings the greatest weights of both layers together."""
    exponents = (first.weight.abs().amax(1) / second.weight.abs().amax(0)).log2() / 2
    return torch.where(exponents.isfinite(), exponents, 0).round().exp2().detach()


def error_of_int8(gm: GraphModule, inputs: tuple[Tensor, ...]) -> float:
    """How far the logits move, in relation to their size, when each weight is rounded to int8 with one scale."""
    rounded = copy.deepcopy(gm)
    with torch.no_grad():
        for module in rounded.modules():
            if type(module) is nn.Linear:
                step = module.weight.abs().max() / 127
                module.weight.copy_((module.weight / step).round() * step)
        exact, logits = gm(*inputs).logits, rounded(*inputs).logits
    return float((logits - exact).norm() / exact.norm())


def opt() -> OPTForCausalLM:
    """A small OPT whose channels between `fc1` and `fc2` have unlike ranges, as those of trained models."""
    config = OPTConfig(
        vocab_size=90,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        use_cache=False,
    )
    model = randomise(OPTForCausalLM(config)).double().eval()
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            layer.fc1.weight *= torch.logspace(-1, 1, 64)[:, None]
            layer.fc2.weight *= torch.logspace(1, -1, 64)
    return model


def main() -> None:
    """Equalise a captured OPT, verify it, and undo it."""
    torch.manual_seed(0)
    inputs = (torch.randint(3, 90, (2, 8)), torch.ones(2, 8, dtype=torch.long))
    traced = fxopt.symbolic_trace(opt(), input_names=["input_ids", "attention_mask"])
    before = copy.deepcopy(traced)

    print(EqualizeLayers().explain(traced))
    equal = EqualizeLayers()(traced, verify=True)
    print("outputs:", assert_equivalent(before, equal, inputs))
    print(f"error of int8 weights: {error_of_int8(before, inputs):.4f} -> {error_of_int8(equal, inputs):.4f}")
    assert_round_trip(before, fxopt.undo(equal))
    print("undone")


if __name__ == "__main__":
    main()
