"""The first steps of a new user, in an environment with fxopt and torch alone: optimise, look, undo, save and load, own pass."""

import importlib.util
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import fxopt

if importlib.util.find_spec("transformers"):
    sys.exit("transformers is installed: this environment does not tell what fxopt needs")


class RemoveIdentity(fxopt.ReversibleRewrite):
    """The pass of the guide."""

    preserves_computation = True

    def match(self, graph_module):
        index = fxopt.GraphIndex(graph_module)
        for calls in index.calls_by_input(nn.Identity).values():
            for node in calls:
                reason = index.inexact(node, nn.Identity) or index.removing_obstacle(node)
                yield fxopt.Refusal(node, reason) if reason else node

    def apply(self, rewriter, node):
        rewriter.replace_uses(node, node.all_input_nodes[0])
        rewriter.erase(node)


model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Identity()).eval()
x = torch.randn(1, 3, 16, 16)

fast = fxopt.optimize(model, (x,), tune=False)
with torch.no_grad():
    torch.testing.assert_close(fast(x), model(x))
assert "FoldBatchNorms" in str(fast.report), fast.report

traced = fxopt.trace(model, (x,))
code = traced.code
passes = fxopt.compose(RemoveIdentity(), fxopt.FoldBatchNorms())
rewritten = passes(traced, verify=True)
assert len(fxopt.history(rewritten)) == 2, fxopt.history(rewritten)
with tempfile.TemporaryDirectory() as folder:
    fxopt.save(rewritten, Path(folder, "saved"), trusted=[RemoveIdentity])
    loaded = fxopt.load(Path(folder, "saved"), trusted=[RemoveIdentity])
    with torch.no_grad():
        assert torch.equal(loaded(x), rewritten(x))
assert passes(rewritten, reverse=True).code == code
assert fxopt.undo(fast) is model
print("fxopt", fxopt.__version__, "works with torch", torch.__version__, "alone")
