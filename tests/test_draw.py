"""A drawing shows modules as nested frames, layers and operations as boxes, tensors as labelled arrows."""

import re
import runpy
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from torch import nn

import fxopt
from tests import small_models

needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz's program dot")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x):
        return self.act(self.linear(x)) + x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return {"y<": x.view(x.shape[0], 2, 2) * 0.5}


def traced(model=None):
    return fxopt.trace(
        (model or Model()).eval(), (torch.zeros(3, 4),), dynamic_shapes=({0: torch.export.Dim.AUTO},)
    )


def frames(source):
    return re.findall(r"subgraph .* label=<<b>([^<]*)</b><br/><font [^>]*>([^<]*)<", source)


def boxes(source):
    return re.findall(r'^ +("[^"]*") \[label=', source, re.M)


def arrows(source):
    return re.findall(r'^  ("[^"]*") -> ("[^"]*")(?: \[label=" (.*)"\])?', source, re.M)


def words(picture):
    """The texts of an SVG."""
    texts = ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    return {"".join(text.itertext()) for text in texts}


def test_every_module_is_a_frame_around_its_nodes():
    gm = traced()
    source = fxopt.draw(gm, format="dot")
    assert frames(source) == [("blocks.0", "Block"), ("blocks.1", "Block")]
    drawn = [node.name for node in gm.graph.nodes if node.target not in ("input_guard", "size")]
    assert boxes(source) == [f'"{name}"' for name in drawn]
    first = source[source.index("subgraph") :].partition("\n  }")[0]
    assert [name for name in drawn if f'"{name}"' in first] == ["blocks_0_linear", "blocks_0_act", "add"]


def test_arrows_carry_shapes_and_follow_the_graph():
    gm = traced()
    found = arrows(fxopt.draw(gm, format="dot"))
    size = str(next(node for node in gm.graph.nodes if node.op == "placeholder").meta["val"].shape[0])
    assert ('"blocks_0_linear"', '"blocks_0_act"', f"{size}×4") in found
    assert ('"view"', '"mul"', f"{size}×2×2") in found
    assert len(found) == 11


def test_modules_below_the_depth_are_one_box():
    source = fxopt.draw(traced(), depth=0, format="dot")
    assert frames(source) == []
    assert boxes(source) == [
        '"x"',
        '"blocks.0 blocks_0_linear"',
        '"blocks.1 blocks_1_linear"',
        '"view"',
        '"mul"',
        '"output"',
    ]
    assert [arrow[:2] for arrow in arrows(source)] == [
        ('"x"', '"blocks.0 blocks_0_linear"'),
        ('"blocks.0 blocks_0_linear"', '"blocks.1 blocks_1_linear"'),
        ('"blocks.1 blocks_1_linear"', '"view"'),
        ('"view"', '"mul"'),
        ('"mul"', '"output"'),
    ]


def test_a_module_called_twice_is_two_frames():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return self.block(self.block(x) * 2)

    assert frames(fxopt.draw(traced(Twice()), format="dot")) == [("block", "Block")] * 2


def test_what_a_pass_rewrote_is_marked():
    gm = traced()
    assert "#dc2626" not in fxopt.draw(gm, format="dot")
    fused = fxopt.FuseBiasInLinear()(gm)
    source = fxopt.draw(fused, format="dot")
    marked = [line.split('"')[1] for line in source.splitlines() if "#dc2626" in line]
    assert marked == [node.name for node in fxopt.FuseBiasInLinear().get_transformed_nodes(fused)]
    assert marked
    assert "rewritten by fxopt.passes" in source


@needs_dot
@pytest.mark.parametrize("depth", [None, 0, 2])
def test_bert_as_svg(depth):
    model, inputs = small_models.bert(num_hidden_layers=2)
    found = words(fxopt.draw(fxopt.trace(model.eval(), (), inputs), depth=depth))
    assert {"input_ids", "Linear", "classifier", "SequenceClassifierOutput"} <= found
    assert ("layer.1" in found) == (depth != 0)
    assert ("scaled_dot_product_attention" in found) == (depth is None)


@needs_dot
def test_a_graph_without_metadata_and_with_names_to_escape():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.einsum("ij,ij->i", x, x), x.to(torch.float64), {'a"<\\': x}

    gm = torch.fx.symbolic_trace(Odd())
    gm.graph.call_function(print, ('"\\n<b>&',))
    assert {"ij,ij->i", '"\\n<b>&'} <= words(fxopt.draw(gm))


def test_without_graphviz_the_error_names_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(fxopt.FxoptError, match=r"install Graphviz.*format='dot'"):
        fxopt.draw(traced())
    assert fxopt.draw(traced(), format="dot")


@pytest.mark.parametrize(
    ("options", "message"), [({"depth": -1}, "depth is -1"), ({"format": "png"}, "format is 'png'")]
)
def test_unknown_options(options, message):
    with pytest.raises(ValueError, match=message):
        fxopt.draw(traced(), **options)


@needs_dot
def test_the_picture_of_the_readme_is_what_its_command_draws(capsys):
    root = Path(__file__).parents[1]
    runpy.run_path(str(root / "docs/merge_linears.py"), run_name="__main__")
    assert words(capsys.readouterr().out) == words((root / "docs/images/merge_linears.svg").read_text())
