"""The generator: random programs out of the motifs in which rewrites go wrong.

All choices come from one `random.Random`, so that a seed is a program, and hypothesis can drive it as well
(`st.randoms`) and shrink what it finds.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

from tests.fuzz.program import Program

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor in the forward.

    Attributes:
        name: its variable.
        shape: its sizes.
        exact: no rounding but that of a division has touched it, so that steps may follow.
        floating: its dtype is not one of integers.
    """

    name: str
    shape: Shape
    exact: bool = True
    floating: bool = True


def generate(draw: random.Random) -> Program:
    """A random program; not every one runs."""
    return _Builder(draw, "float32" if draw.random() < 0.1 else "float64").build()


class _Builder:
    def __init__(self, draw: random.Random, dtype: str) -> None:
        self.draw = draw
        self.dtype = dtype
        self.layers: dict[str, str] = {}
        self.setup: list[str] = []
        self.body: list[str] = []
        self.values: list[Value] = []
        self.count = 0
        self.integers = False

    def build(self) -> Program:
        inputs = [self._input(number) for number in range(1 if self.chance(0.75) else 2)]
        for _ in range(self.draw.randint(2, 7)):
            motif = self.draw.choices(_MOTIFS, _WEIGHTS)[0]
            motif(self)
        for _ in range(self.draw.choice((0, 0, 1, 1, 2))):
            self._unusual()
        body = self._in_blocks()
        return Program(
            tuple(self.layers.items()), tuple(self.setup), body, self._returns(), tuple(inputs), self.dtype
        )

    # What motifs are made of.

    def chance(self, probability: float) -> bool:
        return self.draw.random() < probability

    def pick(self, *shapes: int) -> Value:
        """A value, mostly a recent one, with one of these numbers of dimensions."""
        found = [v for v in self.values if not shapes or len(v.shape) in shapes]
        if not found:
            return self.values[0]
        return self.draw.choice(found[-3:] if self.chance(0.7) else found)

    def add(self, expression: str, shape: Shape, exact: bool, floating: bool = True) -> Value:
        value = Value(f"v{self.count}", shape, exact, floating)
        self.count += 1
        self.body.append(f"{value.name} = {expression}")
        self.values.append(value)
        return value

    def layer(self, expression: str, reuse: float = 0.15) -> str:
        """The name of a layer, mostly a new one."""
        same = [name for name, made in self.layers.items() if made == expression]
        if same and self.chance(reuse):
            return self.draw.choice(same)
        name = f"layer{len(self.layers)}"
        self.layers[name] = expression
        return name

    def call(self, layer: str, value: Value, shape: Shape, exact: bool = False) -> Value:
        if not value.floating:
            value = self.add(f"{value.name}.to(torch.{self.dtype})", value.shape, value.exact)
        keyword = "input=" if self.chance(0.15) else ""
        return self.add(f"self.{layer}({keyword}{value.name})", shape, exact and value.exact)

    # Motifs.

    def linear(self, value: Value | None = None) -> Value:
        value = value or self.pick()
        width = self.draw.choice((4, 4, 4, 2, 6))
        kind = "Scaled" if self.chance(0.04) else "nn.Linear"
        bias = ", bias=False" if self.chance(0.2) else ""
        layer = self.layer(f"{kind}({value.shape[-1]}, {width}{bias})")
        return self.call(layer, value, (*value.shape[:-1], width))

    def heads(self) -> None:
        value = self.pick()
        for number in range(self.draw.choice((2, 2, 3))):
            if number and self.chance(0.25):
                self.write(value if self.chance(0.6) else None)
            out = self.linear(value)
            if self.chance(0.2):
                self.view(out)

    def norm(self) -> None:
        value = self.pick(2, 3)
        if len(value.shape) not in (2, 3):
            return
        before, after = self.chance(0.6), self.chance(0.3)
        if before and len(value.shape) == 3 and self.chance(0.4):
            kind, channels = self.draw.choice(("Conv1d", "ConvTranspose1d")), value.shape[1]
            value = self.call(self.layer(f"nn.{kind}({channels}, {channels}, 1)"), value, value.shape)
        elif before:
            value = self.linear(value)
            if len(value.shape) == 3 and self.chance(0.6):
                rows = value.shape[0] * value.shape[1]
                value = self.add(f"{value.name}.flatten(0, 1)", (rows, value.shape[2]), False)
        options = self.draw.choice(("", "", ", affine=False", ", eps=0.1", ", track_running_stats=False"))
        for _ in range(self.draw.choice((1, 1, 2))):
            layer = self.layer(f"nn.BatchNorm1d({value.shape[1]}{options})")
            if self.chance(0.1):
                self.write(value)
            value = self.call(layer, value, value.shape)
        if after:
            self.linear(value)

    def convolution(self) -> None:
        value = self.pick(4)
        if len(value.shape) != 4:
            return
        channels = value.shape[1]
        if self.chance(0.15):
            layer = self.layer(f"nn.ConvTranspose2d({channels}, {channels}, 1)")
        else:
            options = self.draw.choice(_CONV_OPTIONS)
            layer = self.layer(f"nn.Conv2d({channels}, {channels}{options})", reuse=0.25)
        value = self.call(layer, value, value.shape)
        if self.chance(0.15):
            self.write(value if self.chance(0.5) else None)
        for _ in range(self.draw.choice((0, 1, 1, 1, 2))):
            options = self.draw.choice(("", "", ", affine=False", ", eps=0.1", ", track_running_stats=False"))
            value = self.call(self.layer(f"nn.BatchNorm2d({channels}{options})", 0.3), value, value.shape)

    def scale(self) -> None:
        """Constants beside a layer: numbers, and parameters with a value for each channel, or for each position."""
        value = self.pick()
        before = self.chance(0.4)
        value = value if before else self.linear(value)
        if self.chance(0.3):
            kind = self.draw.choice(("LayerNorm", "RMSNorm"))
            options = self.draw.choice(("", "", ", elementwise_affine=False"))
            value = self.call(self.layer(f"nn.{kind}({value.shape[-1]}{options})"), value, value.shape)
            for _ in range(self.draw.choice((0, 1, 2))):
                self.linear(value)
        for _ in range(self.draw.choice((1, 1, 2))):
            size = self.draw.choice((value.shape[-1], value.shape[-1], value.shape[0]))
            count = sum("nn.Parameter" in line for line in self.setup)
            constant = self.draw.choice(("0.3", "-2", f"self.gamma{count}", f"(1 + self.gamma{count})"))
            if "gamma" in constant:
                self.setup.append(f"self.gamma{count} = nn.Parameter(torch.rand({size}) + 0.5)")
            spelling = self.draw.choice(_SCALES)
            broadcast = size in (1, value.shape[-1]) or "gamma" not in constant
            if not broadcast and value.shape[-1] != 1:
                return
            shape = value.shape if broadcast else (*value.shape[:-1], size)
            value = self.add(spelling.format(v=value.name, c=constant), shape, False)
            if self.chance(0.1):
                self.write(value)
        if before:
            self.linear(value)

    def constant(self) -> None:
        """A table that is made of no input, written or not, before or after what is read of it."""
        value = self.pick()
        count, dtype = value.shape[-1], f"torch.{self.dtype}"
        made = self.draw.choice(_TABLES).format(v=value.name, n=count, d=dtype)
        table = self.add(made, (count, count), True)
        writes = [self.draw.choice(_TABLE_WRITES).format(t=table.name, v=value.name) for _ in range(2)]
        read = self.draw.choice(("{t} * 2", "{t} - {t}.mT", "({t} == 1).to({d})", "{t}.cos()", "{t}[0]"))
        exact = "cos" not in read
        for line in writes[: self.draw.choice((0, 1, 2))]:
            self.body.append(line)
        shape = (count,) if read == "{t}[0]" else (count, count)
        found = self.add(read.format(t=table.name, d=dtype), shape, exact)
        if self.chance(0.3):
            self.body.append(writes[0])
        row = found.name if shape == (count,) else f"{found.name}[0]"
        self.add(f"{value.name} + {row}", value.shape, value.exact and exact)

    def division(self) -> None:
        value = self.pick()
        for _ in range(self.draw.choice((1, 1, 2))):
            number = self.draw.choice(
                ("2", "7", "8", "49", "3.7", "0.5", "-3", "255", "1", "True", "2 ** 0.5")
            )
            spelling = self.draw.choice(_DIVISIONS)
            value = self.add(spelling.format(v=value.name, c=number), value.shape, value.exact)
        if value.exact and self.chance(0.4):
            step = self.draw.choice(_STEPS)
            self.add(step.format(v=value.name), value.shape, True, "int" not in step)

    def activation(self) -> None:
        value = self.pick()
        spelling = self.draw.choice(_ACTIVATIONS)
        if "{m}" in spelling:
            module = self.draw.choice(_ACTIVATION_MODULES)
            self.call(self.layer(module, 0.3), value, value.shape)
        else:
            self.add(spelling.format(v=value.name), value.shape, False, value.floating)

    def view(self, value: Value | None = None) -> None:
        value = value or self.pick()
        spelling, shape = self.draw.choice(_VIEWS)
        changed = shape(value.shape)
        if changed is None:
            return
        sizes = ", ".join(map(str, changed))
        self.add(
            spelling.format(v=value.name, sizes=sizes, last=value.shape[-1]),
            changed,
            value.exact,
            value.floating,
        )

    def write(self, value: Value | None = None) -> None:
        value = value or self.pick()
        other = self.pick()
        same = other.shape == value.shape and other != value
        spelling = self.draw.choice(_WRITES)
        if "{o}" in spelling and not same:
            spelling = _WRITES[0]
        if "{m}" in spelling:
            layer = self.layer("nn.ReLU(inplace=True)", 0.5)
            self.body.append(f"self.{layer}({value.name})")
        else:
            self.body.append(spelling.format(v=value.name, o=other.name))
        if "elu" in spelling or ("{o}" in spelling and not other.exact):  # into any alias
            self.values = [dataclasses.replace(v, exact=False) for v in self.values]

    def join(self) -> None:
        left = self.pick()
        same = [v for v in self.values if v.shape == left.shape]
        right = self.draw.choice(same)
        exact, floating = left.exact and right.exact, left.floating or right.floating
        spelling = self.draw.choice(("{a} + {b}", "{a} * {b}", "{a} - {b}", "torch.add({a}, {b})", "cat"))
        if spelling == "cat":
            shape = (*left.shape[:-1], 2 * left.shape[-1])
            self.add(f"torch.cat([{left.name}, {right.name}], -1)", shape, exact, floating)
        else:
            self.add(
                spelling.format(a=left.name, b=right.name),
                left.shape,
                exact and "*" not in spelling,
                floating,
            )

    def attention(self) -> None:
        value = self.pick(3)
        if len(value.shape) != 3 or value.shape[-1] != 4:
            return
        batch, length = value.shape[:2]
        names = []
        for _ in range(3):
            layer = self.layer("nn.Linear(4, 4)")
            out = self.call(layer, value, (*value.shape[:-1], 4))
            spelling = f"{out.name}.view({batch}, {length}, 2, 2).transpose(1, 2)"
            copied = ".contiguous()" if self.chance(0.3) else ""
            heads = self.add(spelling + copied, (batch, 2, length, 2), False)
            names.append(heads.name)
        shapes = {"b": batch, "n": length, "q": names[0], "k": names[1], "v": names[2]}
        scores, weighted = self.draw.choice(_ATTENTION)
        scores = self.add(scores.format(**shapes), (batch, 2, length, length), False)
        if self.chance(0.4):
            mask = self.draw.choice(_MASKS).format(s=scores.name, x=value.name, **shapes)
            scores = self.add(mask, scores.shape, False)
        if self.chance(0.1):
            self.write(self.draw.choice((None, scores)))
        if self.chance(0.1):
            scores = self.add(f"{scores.name} * 0.3", scores.shape, False)
        softmax = self.draw.choice(("{s}.softmax(-1)", "F.softmax({s}, dim=3)", "{s}.softmax(-2)"))
        weights = self.add(softmax.format(s=scores.name), scores.shape, False)
        if self.chance(0.1):
            self.write(None)
        result = weighted.format(w=weights.name, **shapes)
        self.values = [v for v in self.values if v not in (scores, weights) or self.chance(0.1)]
        self.add(f"({result}).transpose(1, 2).reshape({batch}, {length}, 4)", (batch, length, 4), False)

    def grouped_attention(self) -> None:
        value = self.pick(3)
        if len(value.shape) != 3 or value.shape[-1] != 4:
            return
        batch, length = value.shape[:2]
        heads, shape = [], (batch, 2, length, 2)
        for _ in range(3):
            out = self.call(self.layer("nn.Linear(4, 4)"), value, value.shape)
            heads.append(self.add(f"{out.name}.view({batch}, {length}, 2, 2).transpose(1, 2)", shape, False))
        query, *others = heads
        copies = []
        for head in others:
            head = self.add(f"{head.name}[:, :1]", (batch, 1, length, 2), False)
            repeat = self.draw.choice(_REPEATS).format(h=head.name, b=batch, n=length)
            copies.append(self.add(repeat, shape, False))
            if self.chance(0.1):
                self.write(self.draw.choice((None, head, copies[-1])))
        options = self.draw.choice(("", ", is_causal=True", ", scale=0.3"))
        names = ", ".join(each.name for each in (query, *copies))
        result = self.add(f"F.scaled_dot_product_attention({names}{options})", shape, False)
        self.values = [v for v in self.values if v not in copies or self.chance(0.1)]
        self.add(f"{result.name}.transpose(1, 2).reshape({batch}, {length}, 4)", (batch, length, 4), False)

    def weight_read(self) -> None:
        layers = [
            n
            for n, made in self.layers.items()
            if "False" not in made and ("Linear" in made or "Norm" in made)
        ]
        if layers:
            value, layer = self.pick(), self.draw.choice(layers)
            name = "weight" if "Linear" in self.layers[layer] else self.draw.choice(("running_mean", "bias"))
            self.add(f"{value.name} + self.{layer}.{name}.mean()", value.shape, False)

    # Around the motifs.

    def _input(self, number: int) -> str:
        shape = self.draw.choice(((3, 4), (3, 4), (2, 3, 4), (2, 4, 4), (2, 4, 3, 4), (4,)))
        sizes = ", ".join(map(str, shape))
        whole, floating = self.chance(0.4), self.chance(0.85)
        self.values.append(Value(f"x{number}", shape, floating=floating or not whole))
        if whole:
            return f"torch.randint(-150, 150, ({sizes},))" + (".double()" if floating else "")
        return f"torch.randn({sizes})"

    def _unusual(self) -> None:
        """A tie, a hook, a flag or another oddity of one or two layers."""
        statement, kinds = self.draw.choice(_ODDITIES)
        names = [n for n, made in self.layers.items() if any(kind in made for kind in kinds.split() or ("",))]
        if names:
            first = self.draw.choice(names)
            twins = [n for n in names if n != first and self.layers[n] == self.layers[first]]
            if "{b}" not in statement or twins:
                other = self.draw.choice(twins) if twins else first
                self.setup.append(statement.format(a=first, b=other))

    def _in_blocks(self) -> tuple[str, ...]:
        """The body, now and then with some statements in a block without gradients."""
        body = list(self.body)
        if len(body) > 2 and self.chance(0.06):
            start = self.draw.randrange(len(body) - 1)
            stop = self.draw.randint(start + 1, len(body))
            block = "\n".join(f"    {line}" for line in body[start:stop])
            body[start:stop] = [f"with torch.no_grad():\n{block}"]
        return tuple(body)

    def _returns(self) -> tuple[str, ...]:
        chosen = [self.values[-1], *(self.pick() for _ in range(self.draw.choice((0, 1, 1, 2, 3))))]
        unread = [v for v in self.values if not any(v.name in line.split("=", 1)[-1] for line in self.body)]
        chosen += [v for v in unread if self.chance(0.8)]
        names = list(dict.fromkeys(value.name for value in chosen))
        return tuple(self.draw.choice(_RETURNS).format(v=name) for name in names)


_MOTIFS: Sequence[Callable[[_Builder], object]] = (
    *(_Builder.heads, _Builder.linear, _Builder.norm, _Builder.convolution, _Builder.division),
    *(_Builder.activation, _Builder.view, _Builder.write, _Builder.join, _Builder.attention),
    *(_Builder.grouped_attention, _Builder.weight_read, _Builder.scale, _Builder.constant),
)
_WEIGHTS = (5, 2, 4, 5, 4, 2, 2, 2, 2, 2, 1, 1, 3, 2)

_TABLES = (
    *("torch.zeros({n}, {n}, dtype={d})", "{v}.new_zeros({n}, {n})", "torch.eye({n}, dtype={d})"),
    "torch.arange({n} * {n}, dtype={d}).view({n}, {n})",
)
_TABLE_WRITES = (
    *(
        "{t}[0] = {v}.flatten()[0]",
        "{t}[1:].add_(3)",
        "{t}.diagonal().copy_({v}.flatten()[:1])",
        "{t}[:] = 1",
    ),
    *("{t} += {v}.flatten()[-1]", "{t}.masked_fill_({v}.flatten()[0] > 0, 2)", "{t}.fill_(1)"),
)
"""Tables that are made of no input, and writes into them."""

_CONV_OPTIONS = (
    *(", 1", ", 1", ", 1, bias=False", ", 1, groups=2", ", 3, padding=1", ", 3, padding='same'"),
    *(", 3, padding=1, padding_mode='reflect'", ", 3, padding=2, dilation=2", ", 1, groups=4, bias=False"),
    ", 3, padding=1, padding_mode='circular', bias=False",
)
_ATTENTION = (
    ("{q} @ {k}.transpose(-1, -2)", "{w} @ {v}"),
    ("{q} @ {k}.transpose(-1, -2) / 2 ** 0.5", "{w} @ {v}"),
    ("({q} * 0.7) @ {k}.mT * 3", "torch.matmul({w}, {v})"),
    ("torch.einsum('bhid,bhjd->bhij', {q}, {k}).div(1.7)", "torch.einsum('bhij,bhjd->bhid', {w}, {v})"),
    (
        "torch.bmm({q}.flatten(0, 1), {k}.reshape(-1, {n}, 2).transpose(1, 2)).view({b}, 2, {n}, {n})",
        "torch.bmm({w}.view({b} * 2, {n}, {n}), {v}.reshape(-1, {n}, 2)).view({b}, 2, {n}, 2)",
    ),
)
"""Scores of queries and keys, and values with their weights."""

_REPEATS = (
    "{h}[:, :, None, :, :].expand({b}, 1, 2, {n}, 2).reshape({b}, 2, {n}, 2)",
    "{h}.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2)",
    "{h}[:, None].expand({b}, 2, 1, {n}, 2).reshape({b}, 2, {n}, 2)",
    "{h}[:, [0], None].expand({b}, 1, 2, {n}, 2).reshape({b}, 2, {n}, 2)",
)
"""One head twice."""

_MASKS = (
    "{s} + {s}.new_ones({n}, {n}).tril()",
    "{s} + {x}[:, None, :, :1]",
    "{s}.masked_fill({x}[:, None, None, :, 0] > 0, torch.finfo({s}.dtype).min)",
    "torch.where({x}[:, None, :, 0, None] > 0, {s}, -1e39)",
    "{s}.masked_fill_({x}[:, None, :, :1] > 0, -1e4)",
    "{s}.add_({x}[0, 0, 0])",
)
_SCALES = (
    *(
        "{v} * {c}",
        "{c} * {v}",
        "{v} + {c}",
        "{v} - {c}",
        "{c} - {v}",
        "{v} / {c}",
        "{v}.mul({c})",
        "{v}.mul_({c})",
    ),
    *("torch.add({v}, {c})", "torch.sub({v}, {c}, alpha=2)", "({v} * {c}).flatten(0, 0)"),
)
_DIVISIONS = ("{v} / {c}", "torch.div({v}, {c})", "{v}.div({c})", "torch.true_divide({v}, other={c})")
_STEPS = (
    *("{v}.floor()", "torch.round({v})", "({v} >= 1).double()", "{v}.int()", "{v}.to(torch.int64)"),
    *("{v} % 1", "torch.where({v} == 1, {v}, 0 * {v})", "{v}.sign()", "torch.frac({v})", "{v}.ceil() + 1"),
    *("({v} - 1).trunc()", "torch.relu({v}).floor()", "({v} + 0).floor_()", "{v} // 1"),
)
_ACTIVATIONS = (
    *("{m}", "{m}", "torch.relu({v})", "F.gelu({v})", "{v}.tanh()", "F.relu({v})", "torch.sigmoid({v})"),
    *("F.gelu({v}, approximate='tanh')", "{v}.relu()", "F.silu({v})", "F.relu({v}, inplace=True)"),
)
_ACTIVATION_MODULES = ("nn.ReLU()", "nn.GELU()", "nn.Tanh()", "nn.ReLU(inplace=True)", "nn.GELU('tanh')")


def _same(shape: Shape) -> Shape | None:
    return shape


def _swapped(shape: Shape) -> Shape | None:
    return (*shape[:-2], shape[-1], shape[-2]) if len(shape) > 1 else None


def _first(shape: Shape) -> Shape | None:
    return shape[1:] if len(shape) > 1 else None


def _flat(shape: Shape) -> Shape | None:
    product = 1
    for size in shape[:-1]:
        product *= size
    return (product, shape[-1]) if len(shape) != 2 else None


def _vector(shape: Shape) -> Shape | None:
    product = 1
    for size in shape:
        product *= size
    return (product,)


def _half(shape: Shape) -> Shape | None:
    return (*shape[:-1], shape[-1] // 2) if shape[-1] % 2 == 0 and shape[-1] > 2 else None


_VIEWS: Sequence[tuple[str, Callable[[Shape], Shape | None]]] = (
    *(("{v}.transpose(-1, -2)", _swapped), ("{v}[0]", _first), ("{v}.detach()", _same)),
    *(("{v}.view(-1, {last})", _flat), ("{v}.reshape(-1, {last})", _flat), ("{v}.view(-1)", _vector)),
    *(
        ("{v}.contiguous()", _same),
        ("{v}.chunk(2, -1)[0]", _half),
        ("torch.split({v}, {last} // 2, -1)[1]", _half),
    ),
    *(("{v}.view({sizes})", _same), ("{v}.expand({sizes})", _same), ("{v}[..., :{last} // 2]", _half)),
    *(("{v}.flatten()", _vector), ("torch.narrow({v}, 0, 0, 1)[0]", _first), ("{v}.unbind(0)[0]", _first)),
    *(
        ("{v}.mT", _swapped),
        ("{v}.float().double()", _same),
        ("{v}.as_strided(({sizes},), {v}.stride())", _same),
    ),
    ("{v}.is_contiguous() * {v}", _same),
)
_WRITES = (
    *("{v}.mul_(2)", "{v}.add_({o})", "{v}[0] = 1.5", "{v}.detach().zero_()", "torch.add({o}, 1, out={v})"),
    *("F.relu({v}, inplace=True)", "F.elu({v}, 1.0, True)", "{m}", "{v}.view(-1).add_(1)", "{v}[0].mul_(3)"),
    *(
        "torch.relu_({v})",
        "operator.iadd({v}, 1)",
        "{v} += 1",
        "{v}.transpose(0, -1).sub_(1)",
        "{v}.copy_({o})",
    ),
    *("torch.ops.aten.mul_.Tensor({v}, 2)", "{v}[..., 0].fill_(2)", "{v}[..., 1] = {v}[..., 0]"),
    *("torch._foreach_add_([{v}], 1.0)", "{v}.data.mul_(2)", "{v}.unbind(0)[0].add_(1)"),
)
# What may be odd about a layer, for layers of which kinds; `b` is another one like it.
_ODDITIES: Sequence[tuple[str, str]] = (
    ("self.{a}.weight = self.{b}.weight", "Linear Conv BatchNorm"),
    ("self.{a}.weight = nn.Parameter(self.{b}.weight.detach())", "Linear Conv"),
    ("self.{a}.bias = self.{b}.bias", "Linear Conv BatchNorm"),
    ("self.{a} = self.{b}", ""),
    ("self.again = self.{a}", ""),
    ("self.again = self.{a}.weight", "Linear Conv"),
    ("self.holder = nn.Sequential(self.{a})", ""),
    ("self.{a}.train()", "BatchNorm"),
    ("self.{a}.train()", ""),
    ("self.{a}.requires_grad_(False)", ""),
    ("self.{a}.weight.requires_grad_(False)", "Linear Conv"),
    ("self.{a}.weight.register_hook(lambda grad: grad)", "Linear Conv"),
    ("self.{a}.register_forward_hook(doubled)", ""),
    ("self.{a}.register_forward_pre_hook(halved)", ""),
    ("parametrizations.weight_norm(self.{a})", "Linear Conv"),
    ("self.{a}.forward = doubled_input", "Linear Conv BatchNorm"),
    ("self.register_buffer('again', self.{a}.running_mean)", "BatchNorm"),
    ("self.{a}.running_mean = self.{b}.running_mean", "BatchNorm"),
)
_RETURNS = ("{v}", "{v}", "{v}", "[{v}]", "{{'key': {v}}}", "({v}, 1)", "{v}[..., :1]")
