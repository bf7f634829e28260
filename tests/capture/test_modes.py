"""Modes that a forward switches keep their meaning, or are refused; none is dropped."""

import operator
import threading

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxopt
from fxopt.capture.runtime import modes

X = torch.randn(3, 4)


class NoGrad(torch.nn.Module):
    def forward(self, x):
        with torch.no_grad():
            y = x * 2
        return y, x * 3


class NestedGrad(torch.nn.Module):
    def forward(self, x):
        with torch.no_grad():
            with torch.enable_grad():
                inner = x * 2
            outer = x * 3
            with torch.set_grad_enabled(True):
                again = x * 4
        return inner, outer, again, x * 5


class Decorated(torch.nn.Module):
    @torch.no_grad()
    def scaled(self, x):
        return x * 2

    def forward(self, x):
        return self.scaled(x), x + 1


class Autocast(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.dense(x)
            with torch.autocast("cpu", enabled=False):
                z = self.dense(x)
        return y, z, self.dense(x)


class Inference(torch.nn.Module):
    def forward(self, x):
        with torch.inference_mode():
            y = x * 2
        return y, x + 1


class Kernel(torch.nn.Module):
    def forward(self, q):
        with sdpa_kernel([SDPBackend.MATH]):
            inside = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        return inside, torch.nn.functional.scaled_dot_product_attention(q, q, q)


class Cube(torch.autograd.Function):
    """Forward x**3, backward the wrong gradient on purpose: only this function can have made it."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        return x**3 * factor

    @staticmethod
    def backward(ctx, grad):
        return 100 * grad, None


taken_before = Cube.apply


class Exp(torch.autograd.Function):
    """Saves what it returns."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return 100 * grad * ctx.saved_tensors[0]


class ExpInTwo(torch.autograd.Function):
    """The same with a context that is set up apart."""

    backward = Exp.backward

    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)


class OwnForward(ExpInTwo):
    """Inherits how its context is set up."""

    @staticmethod
    def forward(x):
        return (2 * x).exp()


class Reversed(Exp):
    """Inherits its forward."""

    @staticmethod
    def backward(ctx, grad):
        return -grad * ctx.saved_tensors[0]


class Custom(torch.nn.Module):
    def forward(self, x):
        return Cube.apply(x, 2) + 1


class CustomByReference(torch.nn.Module):
    def forward(self, x):
        return taken_before(x, 2)


def assert_same_gradients(model, gm, x):
    for make in (torch.enable_grad, torch.no_grad):
        with make():
            a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
            expected, actual = model(a), gm(b)
            assert [t.requires_grad for t in actual] == [t.requires_grad for t in expected]
            assert all(map(torch.equal, actual, expected))
            assert [t.dtype for t in actual] == [t.dtype for t in expected]
            assert [t.is_inference() for t in actual] == [t.is_inference() for t in expected]
        assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "model", [NoGrad(), NestedGrad(), Decorated(), Inference(), Autocast()], ids=lambda m: type(m).__name__
)
def test_blocks_keep_their_meaning_in_every_mode_of_the_caller(model):
    gm = fxopt.trace(model, (X.clone().requires_grad_(),))
    assert any(getattr(node.target, "__module__", "") == modes.__name__ for node in gm.graph.nodes)
    assert_same_gradients(model, gm, X)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    assert_same_gradients(model, gm, X)


def test_sdpa_kernel_is_entered_and_left():
    gm = fxopt.trace(Kernel(), (torch.randn(1, 2, 3, 4),))
    order = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    attention = torch.nn.functional.scaled_dot_product_attention
    assert order == [modes.enter_sdpa_kernel, attention, modes.leave, attention]
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is attention:
                seen.append((torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()))
            return function(*args, **(kwargs or {}))

    with Watch():
        gm(torch.randn(1, 2, 3, 4))
    assert seen == [(False, True), (True, True)]


def test_an_error_inside_a_block_gives_the_modes_back():
    class Fails(torch.nn.Module):
        def forward(self, x, index):
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), sdpa_kernel([SDPBackend.MATH]):
                return x[index] * 2

    gm = fxopt.trace(Fails(), (X, torch.tensor([1])))
    with pytest.raises(IndexError):
        gm(X, torch.tensor([9]))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.backends.cuda.flash_sdp_enabled()


def test_a_custom_autograd_function_keeps_its_backward():
    gm = fxopt.trace(Custom(), (X,))
    x = X.clone().requires_grad_()
    y = gm(x)
    assert torch.equal(y, Custom()(X))
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(X, 100.0))


def test_an_autograd_function_called_through_an_earlier_reference():
    x = X.clone().requires_grad_()
    plain = vars(torch.autograd.Function)["apply"]
    traced = fxopt.trace(CustomByReference(), (x,))
    for model in (traced, CustomByReference()):
        (gradient,) = torch.autograd.grad(model(x).sum(), x)
        assert torch.equal(gradient, torch.full_like(X, 100.0))
    assert vars(torch.autograd.Function)["apply"] is plain


@pytest.mark.long
def test_a_capture_sees_only_its_own_thread():
    running, done = threading.Event(), threading.Event()
    seen = []

    class Waits(torch.nn.Module):
        def forward(self, x):
            running.set()
            assert done.wait(30)
            return x * 2

    def run_eagerly():
        assert running.wait(30)
        x = X.clone().requires_grad_()
        y = Custom()(x)
        y.sum().backward()
        seen.append(torch.equal(x.grad, torch.full_like(X, 100.0)))
        seen.append(Inference()(X)[0].is_inference())
        seen.append(all(map(torch.is_tensor, Kernel()(torch.randn(1, 2, 3, 4)))))
        done.set()

    thread = threading.Thread(target=run_eagerly)
    thread.start()
    gm = fxopt.trace(Waits(), (X,), verify=False)
    thread.join()
    assert seen == [True, True, True]
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [operator.mul]


def test_two_threads_capture_at_once():
    failures = []

    def capture():
        for _ in range(5):
            gm = fxopt.trace(Inference(), (X,))
            if not all(map(torch.equal, gm(X), Inference()(X))):
                failures.append("captured graph wrong")

    threads = [threading.Thread(target=capture) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


class ThroughModule(torch.autograd.Function):
    """The forward of a module, with a backward of its own that runs it again."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x.detach())
        return module(x) if ctx.needs_input_grad[0] else module(x) * 2

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ThroughModuleWithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x, module):
        return module(x) * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.module = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.parametrize("function", [ThroughModule, ThroughModuleWithSetup])
def test_an_autograd_function_that_takes_a_module_is_captured_without_gradients(function):
    class Reversible(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, x):
            return function.apply(x, self.layer)

    model, x = Reversible(), torch.randn(2, 3)
    with pytest.raises(fxopt.TraceError, match=rf"{function.__name__} takes a module.*torch.no_grad"):
        fxopt.trace(model, (x,))
    with torch.no_grad():
        gm = fxopt.trace(model, (x,))
        assert torch.equal(gm(x), model(x))
    assert [node.target for node in gm.graph.nodes if node.op == "call_module"][-1] == "layer"
    with pytest.raises(fxopt.GuardError, match="captured with grad off"):
        gm(x)
    taken = function.apply
    model.forward = lambda x: taken(x, model.layer)
    with pytest.raises(fxopt.TraceError, match="through a reference .* taken earlier"):
        fxopt.trace(model, (x,))


@pytest.mark.parametrize("function", [Exp, ExpInTwo, OwnForward, Reversed])
def test_what_a_function_saves_is_not_in_the_graph(function):
    class Saves(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.taken = torch.nn.Linear(4, 4), function.apply

        def forward(self, x):
            return self.taken(self.layer(x)).sum()

    model = Saves()
    traced = fxopt.trace(model, (X,))
    assert [node.op for node in traced.graph.nodes][-4:] == [
        "call_module",
        "call_function",
        "call_method",
        "output",
    ]
    with torch.no_grad():
        assert torch.equal(traced(X), model(X))
    gradients = []
    for module in (model, traced):
        x = X.clone().requires_grad_()
        module(x).backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("function", [Exp, ExpInTwo, OwnForward, Reversed])
def test_a_forward_that_differentiates_gets_what_a_function_saved(function):
    taken = function.apply

    def slopes(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(taken(x).sum(), x)[0]

    model = torch.nn.Module()
    model.forward = slopes
    assert torch.equal(fxopt.trace(model, (X,))(X), model(X))


def test_a_forward_of_two_functions_without_a_context_is_refused():
    class Base(torch.autograd.Function):
        forward = staticmethod(ExpInTwo.forward)
        setup_context = staticmethod(ExpInTwo.setup_context)

    class Heir(Base):
        @staticmethod
        def backward(ctx, grad):
            return -grad

    class Calls(torch.nn.Module):
        taken = Heir.apply

        def forward(self, x):
            return self.taken(x)

    with pytest.raises(fxopt.TraceError, match="Base .* and .*Heir has the same forward: call .*Heir.apply"):
        fxopt.trace(Calls(), (X,))


HOOKS = {
    "given back": (lambda t: t, lambda t: t),
    "moved": (lambda t: (t.device, t.cpu()), lambda kept: kept[1].to(kept[0])),
    "detached": (lambda t: t.detach(), lambda t: t),
    "halved": (lambda t: t.half(), lambda t: t.float()),
    "changed where it is large": (lambda t: t * 2 if t.numel() > 12 else t, lambda t: t),
}


class Hooked(torch.nn.Module):
    def __init__(self, pack, unpack):
        super().__init__()
        self.dense, self.hooks = torch.nn.Linear(4, 4), (pack, unpack)

    def forward(self, x):
        x = self.dense(x)
        with torch.autograd.graph.saved_tensors_hooks(*self.hooks):
            return self.dense(x).relu() * x


@pytest.mark.parametrize("case", HOOKS)
def test_hooks_on_saved_tensors_are_left_out_where_they_change_none(case):
    model = Hooked(*HOOKS[case])
    with torch.no_grad():
        traced = fxopt.trace(model, (X,))
        assert torch.equal(traced(X), model(X))
    with pytest.raises(fxopt.GuardError, match="grad"):
        traced(X)
    if case in ("halved", "changed where it is large"):
        with pytest.raises(fxopt.TraceError, match="saved_tensors_hooks that change"):
            fxopt.trace(model, (X,), verify=False)
        return
    traced = fxopt.trace(model, (X,))
    expected, found = (torch.autograd.grad(m(X).sum(), list(m.parameters())) for m in (model, traced))
    assert all(map(torch.equal, expected, found))
    with pytest.raises(fxopt.GuardError, match="requires_grad"):
        traced(X.clone().requires_grad_())


class Forked(torch.nn.Module):
    def __init__(self, inside, training=False):
        super().__init__()
        self.dense, self.dropout, self.inside = torch.nn.Linear(4, 4), torch.nn.Dropout(), inside
        self.train(training)

    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            y = self.inside(self, x)
        return self.dropout(y)


@pytest.mark.parametrize("training", [True, False])
def test_random_numbers_may_be_forked_where_none_is_drawn(training):
    model = Forked(lambda self, x: self.dense(x), training)
    traced = fxopt.trace(model, (X,))
    torch.manual_seed(0)
    expected = model(X)
    torch.manual_seed(0)
    assert torch.equal(traced(X), expected)


@pytest.mark.parametrize(
    "inside",
    [
        lambda self, x: x + torch.rand(4),
        lambda self, x: self.dropout(x),
        lambda self, x: x + torch.get_rng_state().sum(),
    ],
)
def test_forked_random_numbers_that_are_drawn_or_read_are_refused(inside):
    with pytest.raises(fxopt.TraceError, match=r"torch\.get_rng_state"):
        fxopt.trace(Forked(inside, training=True), (X,), verify=False)


class Checkpoints(torch.nn.Module):
    """Asks for gradients before it asks whether to save memory, as the models of diffusers do."""

    def __init__(self, saves):
        super().__init__()
        self.dense, self.saves = torch.nn.Linear(4, 4), saves

    def forward(self, x):
        if torch.is_grad_enabled() and self.saves:
            return torch.sigmoid(self.dense(x))
        return torch.relu(self.dense(x))


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("captured", [False, True])
def test_whether_gradients_are_recorded_is_guarded_where_the_graph_depends_on_it(saves, captured):
    model = Checkpoints(saves).eval()
    with torch.set_grad_enabled(captured):
        gm = fxopt.trace(model, (X,))
    with torch.set_grad_enabled(not captured):
        if saves:
            with pytest.raises(fxopt.GuardError, match=f"captured with grad {'on' if captured else 'off'}"):
                gm(X)
        else:
            assert torch.equal(gm(X), model(X))
            assert gm(X).requires_grad is not captured
    assert bool(gm.modes_read) is saves


class AsksFurther(torch.nn.Module):
    """Asks whether its input takes gradients only where gradients are recorded."""

    def forward(self, x):
        return x * 2 if torch.is_grad_enabled() and x.requires_grad else x * 3


def test_what_the_forward_asks_in_the_other_mode_keeps_the_guard():
    with torch.no_grad():
        gm = fxopt.trace(AsksFurther(), (X,))
    with pytest.raises(fxopt.GuardError, match="captured with grad off"):
        gm(X.clone().requires_grad_())


class SparseProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, matrix, x):
        return torch.sparse.mm(matrix, x)

    @staticmethod
    def backward(ctx, grad):
        return None, grad


def test_an_autograd_function_may_take_a_tensor_without_storage():
    class Product(torch.nn.Module):
        def forward(self, matrix, x):
            return SparseProduct.apply(matrix, x)

    matrix, x = torch.eye(3).to_sparse(), torch.randn(3, 2)
    assert torch.equal(fxopt.trace(Product(), (matrix, x))(matrix, x), x)
