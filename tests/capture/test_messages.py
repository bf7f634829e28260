"""Texts that hold values: refused where the forward may decide on them, and left alone where they only tell."""

import logging
import warnings

import pytest
import torch
from torch.export import Dim

import fxopt
from fxopt.capture.runtime.checks import check_outcome
from tests.modules import module

X = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 3)
LOG = logging.getLogger("tests.messages")


def returned(text):
    return module(lambda self, x: x * 2 if text(x) == "3" else x)


def looked_up(self, x):
    return x * {"expert_3": 2}.get(f"expert_{x[0].argmax()}", 5)


def asked_for(self, x):
    return x * getattr(self, f"expert_{x[0].argmax()}", 5)


def kept(self, x):
    names = []
    names.append(f"{x[0].argmax()}")
    return x * 2 if names == ["3"] else x


def formatted_later(self, x):
    name = "expert_%s" % x[0].argmax()  # noqa: UP031
    return x * len(name)


def inside_a_call_that_writes(self, x):
    y = x.clone()
    y.mul_(2 if f"{x[0].argmax()}" == "3" else 3)
    return y


def put(kept, key, value):
    kept[key] = value


def kept_by_a_function(self, x):
    names = {}
    put(names, f"{x[0].argmax()}", 2)
    return x * names.get("3", 1)


def kept_as_an_attribute(self, x):
    names = torch.nn.Module()
    setattr(names, f"expert_{x[0].argmax()}", 2)
    return x * getattr(names, "expert_3", 1)


def decided_by_a_function(self, x):
    def double_at(name):
        nonlocal x
        x = x * 2 if name == "3" else x

    double_at(f"{x[0].argmax()}")
    return x


def compared_by_a_check(self, x):
    torch._check(f"{x[0].argmax()}" != "0", lambda: "the first is the largest")
    return x * 2


@pytest.mark.parametrize(
    "model",
    [
        *map(
            returned,
            [
                lambda x: f"{x[0].argmax()}",
                lambda x: str(x[0].argmax()),
                lambda x: repr(x[0]),
                lambda x: f"{x}",
                lambda x: f"{x.sum():.2f}",
                lambda x: "%s" % x.sum(),  # noqa: UP031
                lambda x: f"{x.sum().item()}",
                lambda x: str(x[0].argmax().item()),
                lambda x: f"{(x > 2).any().item()}",
                lambda x: str(x.tolist())[2],
            ],
        ),
        *(
            module(forward, expert_3=2)
            for forward in (
                *(
                    looked_up,
                    asked_for,
                    kept,
                    formatted_later,
                    inside_a_call_that_writes,
                    compared_by_a_check,
                ),
                *(kept_by_a_function, kept_as_an_attribute, decided_by_a_function),
            )
        ),
    ],
)
def test_a_text_of_a_value_is_refused_where_the_forward_may_decide_on_it(model):
    with pytest.raises(fxopt.TraceError, match=r"decides on the value.*test_messages\.py:\d+"):
        fxopt.trace(model, (X,))


def logged(self, x):
    LOG.warning(f"the sum is {x.sum()}")
    LOG.warning("the sum is %s", x.sum().item())


def printed(self, x):
    print(x, x.sum().item(), f"{x[0].argmax()}" + " is the largest")


def warned(self, x):
    warnings.warn(f"the sum is {x.sum()}", stacklevel=1)


def check_rows(x, message):
    if x.shape[0] == 0:
        raise ValueError(message)


def checked(self, x):
    torch._check(x.shape[0] > 0, f"no rows in {x}")
    check_rows(x, f"no rows in {x}")  # as in transformers
    assert x.shape[0] > 0, f"no rows in {x}"


def raised(self, x):
    if x.shape[0] == 0:
        raise ValueError(f"no rows in {x}")
    if x.sum() > 1000:
        raise ValueError(f"{x.sum()} is too large")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tell", [logged, printed, warned, checked, raised])
def test_a_message_is_no_decision(tell, caplog):
    def forward(self, x):
        tell(self, x)
        return x * 2

    gm = fxopt.trace(module(forward), (X,), dynamic_shapes=({0: Dim.AUTO},))
    for x in (X, X + 1, X[:2]):
        assert torch.equal(gm(x), x * 2)


def test_a_text_is_decided_by_the_example_inputs_where_that_is_asked():
    model = module(looked_up)
    gm = fxopt.trace(model, (X,), specialize=True)
    assert torch.equal(gm(X + 1), (X + 1) * 2)
    with pytest.raises(fxopt.GuardError, match="decides on a value: it was 3"):
        gm(-X)


def told_and_looked_up(self, x):
    LOG.debug(f"largest: {x[1].argmax()}")
    return looked_up(self, x)


def test_a_specialised_graph_decides_texts_but_no_messages_in_one_run():
    gm = fxopt.trace(module(told_and_looked_up), (X,), specialize=True, verify=False)
    assert sum(node.target is check_outcome for node in gm.graph.nodes) == 1
    assert gm.meta["forward_runs"] == 1


@pytest.mark.parametrize("text", [lambda x: f"{x.shape[0] / 2}", lambda x: f"{x.shape[0] == 3}"])
def test_a_text_of_what_is_computed_with_a_size_is_guarded(text):
    model = module(lambda self, x: x * 2 if text(x) in ("1.5", "True") else x)
    gm = fxopt.trace(model, (X,), dynamic_shapes=({0: Dim.AUTO},))
    assert torch.equal(gm(X), X * 2)
    with pytest.raises(fxopt.GuardError, match="dimension 0 is 2"):
        gm(X[:2])


def test_a_size_in_a_message_stays_free():
    def forward(self, x):
        LOG.debug(f"{x.shape[0]} rows, {x.shape[0] / 2} pairs")
        return x * 2

    gm = fxopt.trace(module(forward), (X,), dynamic_shapes=({0: Dim.DYNAMIC},))
    assert torch.equal(gm(X[:2]), X[:2] * 2)


def test_a_size_in_a_text_that_a_function_may_keep_is_guarded():
    def forward(self, x):
        kept = {}
        put(kept, f"{x.shape[0]} rows", x * 2)
        return kept

    gm = fxopt.trace(module(forward), (X,), dynamic_shapes=({0: Dim.AUTO},))
    assert list(gm(X)) == ["3 rows"]
    with pytest.raises(fxopt.GuardError, match="dimension 0 is 2"):
        gm(X[:2])
