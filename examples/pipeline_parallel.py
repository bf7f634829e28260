"""A captured Llama, cut in two by `torch.fx.passes.split_module`, in two processes that talk over gloo.

Each process keeps the layers of its own part alone. What the second needs of the first (hidden states, rotary embeddings,
the mask, sizes) follows from the graph: nobody has to know the model.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.passes.split_module import split_module
from transformers import LlamaConfig, LlamaForCausalLM

import fxopt
from fxopt.testing import randomise

PARTS = 2


def split(gm: GraphModule, parts: int) -> GraphModule:
    """A graph of `submod_0`, `submod_1`, ..., each with as many decoder layers as the others, in the order of the model."""
    numbers = [layer_of(node) for node in gm.graph.nodes]
    layers = max(number for number in numbers if number is not None) + 1
    part_of, part = dict[Node, int](), 0
    for node, number in zip(gm.graph.nodes, numbers, strict=True):
        part = max(part, (number or 0) * parts // layers)
        part_of[node] = part
    return split_module(gm, gm, part_of.__getitem__, keep_original_order=True)


def layer_of(node: Node) -> int | None:
    """The number of the decoder layer that a node is a part of: capture writes down the modules around each node."""
    for path, _ in node.meta.get("nn_module_stack", {}).values():
        if found := re.search(r"layers\.(\d+)", path):
            return int(found[1])
    return None


class Part(Interpreter):
    """Runs the graph of the parts in one of several processes: computes its own part, and receives the others'."""

    def __init__(self, parts: GraphModule, rank: int) -> None:
        super().__init__(parts)
        self.own = f"submod_{rank}"
        for name, _ in list(parts.named_children()):
            if name.startswith("submod_") and name != self.own:
                parts.set_submodule(name, nn.Module())

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the part and tell the others what came out: tensors, and the sizes that they share."""
        value = [super().call_module(target, args, kwargs) if target == self.own else None]
        dist.broadcast_object_list(value, src=int(target.removeprefix("submod_")))
        return value[0]


def llama() -> LlamaForCausalLM:
    """A small Llama, with the same random weights in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    return randomise(LlamaForCausalLM(config)).eval()


def run(rank: int, address: str, inputs: list[Tensor], out: Path) -> None:
    """Do the work of one process: capture, split, keep one part, compute; the last one writes the logits down."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=PARTS)
    traced = fxopt.symbolic_trace(llama(), input_names=["input_ids", "attention_mask"])
    part = Part(split(traced, PARTS), rank)
    held = sum(parameter.numel() for parameter in part.module.parameters())
    print(f"process {rank} holds {held} of {sum(p.numel() for p in traced.parameters())} weights", flush=True)
    with torch.no_grad():
        output = part.run(*inputs)
    if rank == PARTS - 1:
        torch.save(output.logits, out)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Compare two processes with the model in one."""
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :2] = 0  # padding
    inputs = [torch.arange(14).reshape(2, 7) + 3, mask]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "logits.pt")
        address = f"file://{folder}/rendezvous"
        # Forked, while nothing has been computed yet, they need not import everything anew.
        processes = {"nprocs": PARTS, "start_method": "fork"}
        torch.multiprocessing.start_processes(run, (address, inputs, out), **processes)
        logits = torch.load(out)
    with torch.no_grad():
        expected = llama()(*inputs).logits
    print("equal:", torch.equal(logits, expected))


if __name__ == "__main__":
    main()
