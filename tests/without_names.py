"""Runs fxopt without private names of torch: `python tests/without_names.py NAME...` forks a process for each.

Each process imports fxopt anew, tries the capabilities below, and prints a line of JSON: the name, and for each capability
`right` or the error.
"""

import json
import math
import os
import sys
import tempfile
import warnings

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


class Net(nn.Module):
    """Layers that passes merge and fold, and the function of `forward` between them."""

    def __init__(self, function=torch.relu):
        super().__init__()
        self.left, self.right, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.function = function

    def forward(self, x):
        return self.norm(self.left(x) + self.right(x)) + self.function(x)


def call_compiled(x):
    return torch.compile(torch.sin, backend="eager")(x)


def without_gradients(x):
    with torch.no_grad():
        y = x.sin()
    return y + x.cos()


def in_autocast(x):
    with torch.autocast("cpu"):
        return (x @ x.T).float()[:, :1]


def in_inference_mode(x):
    with torch.inference_mode():
        return x.sin()


def attend(x):
    with sdpa_kernel(SDPBackend.MATH):
        return nn.functional.scaled_dot_product_attention(x, x, x)


def with_hooks(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return x.sin()


FUNCTIONS = {
    "relu": torch.relu,
    "autograd.Function": Function.apply,
    "no_grad": without_gradients,
    "autocast": in_autocast,
    "inference_mode": in_inference_mode,
    "sdpa_kernel": attend,
    "saved_tensors_hooks": with_hooks,
    "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False),
    "vmap": torch.vmap(lambda row: row.cumsum(0)),
    "chunked vmap": torch.vmap(lambda row: row.cumsum(0), chunk_size=2),
    "torch.func.grad": torch.func.grad(lambda x: x.sin().sum()),
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1],
    "vjp": lambda x: torch.func.vjp(torch.sin, x)[1](x)[0],
    "cond": lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)),
    "if": lambda x: x.sin() if x.sum() > 0 else x.cos(),
    "compiled": call_compiled,
    "assert": lambda x: (torch._assert(x.shape[0] > 0, "empty"), x)[1],
    "deepcopy": lambda x: x.clone().contiguous(),
    "item": lambda x: x * x[0, 0].item(),
    "tensor": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
}
# Of a free first size.
OF_FREE_SIZES = {
    "sizes": lambda x: x * (x.shape[0] // 2) + x.new_ones(x.shape[0], 1) * min(x.shape[0], 7),
    "log": lambda x: x * math.log(x.shape[0] + 1),
    "float": lambda x: x * (x.shape[0] * 0.29) * 100,
    "kron": lambda x: torch.kron(x, x[:1, :1]),
    "cdist": lambda x: torch.cdist(x, x)[:, :1],
    "take_along_dim": lambda x: x.take_along_dim(x.argsort(0), 0),
    "istft": lambda x: torch.istft(
        torch.stft(x.flatten().repeat(8), 8, return_complex=True, window=torch.ones(8)), 8, window=torch.ones(8),
        length=x.shape[0],
    )[:, None],
}  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        return self.layer(x[None])[0]


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1)

    def forward(self, x):
        return self.layer(x[None], mask=torch.triu(torch.full((x.shape[0],) * 2, -torch.inf), 1))


class Converting(Net):
    def forward(self, x):
        return self.left.to(torch.float32)(x)


def parametrized():
    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    net = Net().eval()
    parametrize.register_parametrization(net.left, "weight", Twice())
    return net


def captured(model, **options):
    import fxopt

    model = model.eval()
    traced = fxopt.trace(model, (X.clone(),), **options)
    for x in [X, X.flip(0)] if not options else [X, X[:2], torch.cat([X, X])]:
        torch.testing.assert_close(traced(x.clone()), model(x.clone()))
    return traced


def free(function):
    return captured(Net(function), dynamic_shapes=({0: torch.export.Dim("n", min=2)},))


def rewritten(verify):
    import fxopt

    warnings.simplefilter("error", fxopt.UnverifiedWarning)
    graph = torch.fx.symbolic_trace(Net().eval())
    code, before = graph.code, graph(X)
    passes = fxopt.compose(
        fxopt.MergeLinears(), fxopt.FuseBatchNorm1dInLinear(), fxopt.PackLinears(tune=False)
    )
    for each in [fxopt.MergeLinears(), passes]:
        after = each(graph, verify=(X,) if verify else False)
        with torch.no_grad():
            torch.testing.assert_close(after(X), before)
        graph = fxopt.undo(after) if each is not passes else each(after, reverse=True)
        assert graph.code == code, graph.code


def saved():
    import fxopt

    graph = torch.fx.symbolic_trace(
        Net(lambda x: torch.nn.functional.gelu(torch.ops.aten.relu.default(x))).eval()
    )
    with tempfile.TemporaryDirectory() as folder:
        fxopt.save(graph, f"{folder}/saved")
        torch.testing.assert_close(fxopt.load(f"{folder}/saved")(X), graph(X))


def optimized():
    import fxopt

    model = Net().eval()
    fast = fxopt.optimize(model, (X,), tune=False)
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))
    if any(each.reason for each in fast.report):
        raise fxopt.FxoptError(str(fast.report))


def judged():
    from fxopt.testing import assert_equivalent

    graph = torch.fx.symbolic_trace(Net().eval())
    assert_equivalent(graph, torch.fx.symbolic_trace(graph), (X,))


CAPABILITIES = {
    **{name: lambda f=function: captured(Net(f)) for name, function in FUNCTIONS.items()},
    **{f"free {name}": lambda f=function: free(f) for name, function in OF_FREE_SIZES.items()},
    "Module.to": lambda: captured(Converting()),
    "training": lambda: captured(Net().train()),
    "parametrized": lambda: captured(parametrized()),
    "LSTM": lambda: captured(Recurrent(), dynamic_shapes=({0: torch.export.Dim("n", min=2)},)),
    "masked": lambda: captured(Masked(), dynamic_shapes=({0: torch.export.Dim("n", min=2)},)),
    "passes": lambda: rewritten(False),
    "verify": lambda: rewritten(True),
    "save": saved,
    "optimize": optimized,
    "testing": judged,
}


def outcomes():
    """By capability `right`, or the error."""
    found = {}
    for name, capability in CAPABILITIES.items():
        torch.manual_seed(0)
        try:
            capability()
            found[name] = "right"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def main(names):
    warnings.simplefilter("ignore")
    import torch._dynamo.eval_frame
    import torch._higher_order_ops.flex_attention
    import torch._refs
    import torch.export
    import torch.fx.experimental.proxy_tensor

    torch.set_num_threads(1)
    with torch.compiler.set_stance("force_eager"):
        for model in [*map(Net, [*FUNCTIONS.values(), *OF_FREE_SIZES.values()]), Recurrent(), Masked()]:
            model(X.clone())  # what torch imports and prepares at a first call, it does once
    for name in names:
        if os.fork() == 0:
            os.environ["FXOPT_WITHOUT"] = name
            print(json.dumps([name, outcomes()]), flush=True)
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
