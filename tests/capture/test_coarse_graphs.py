"""Graphs with whole decoder layers as nodes: which modules are leaves, and what goes into and out of them."""

import re

import pytest
import torch
from torch.export import Dim
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import fxopt
from fxopt.testing import randomise

from . import multimodal
from .test_generation import assert_same_cache, greedy, llama, prompt

LAYERS = ["model.layers.0", "model.layers.1"]


def called(gm):
    return [node.target for node in gm.graph.nodes if node.op == "call_module"]


@pytest.mark.parametrize(
    "leaves",
    [
        [LlamaDecoderLayer],
        LlamaDecoderLayer,
        LAYERS,
        "model.layers.?",
        ["model.layers.*"],
        lambda name, module: re.fullmatch(r"model\.layers\.\d+", name),
    ],
    ids=["types", "type", "names", "pattern", "patterns", "predicate"],
)
def test_leaves_are_chosen(leaves):
    model = llama()
    ids, mask = prompt(2, 6)
    gm = fxopt.trace(model, (ids, mask), leaf_modules=leaves)
    assert [name for name in called(gm) if "layers" in name] == LAYERS
    assert gm.get_submodule(LAYERS[0]) is model.get_submodule(LAYERS[0])
    with torch.no_grad():
        expected, actual = model(ids, mask), gm(ids, mask)
    assert torch.equal(actual.logits, expected.logits)
    assert_same_cache(actual.past_key_values, expected.past_key_values)


@pytest.mark.parametrize(
    ("leaves", "shown"),
    [
        (["model.layers.0", "model.layer.*"], "'model.layer.*'"),
        ([torch.nn.Conv2d], "<class 'torch.nn.modules.conv.Conv2d'>"),
        (lambda name, module: False, "<function"),
    ],
)
def test_a_leaf_that_fits_nothing_is_an_error(leaves, shown):
    with pytest.raises(fxopt.TraceError, match="which fits no module of LlamaForCausalLM") as error:
        fxopt.trace(llama(), prompt(2, 6), leaf_modules=leaves)
    assert f"leaf_modules has {shown}" in str(error.value)


@pytest.mark.long
def test_layers_that_are_leaves_write_into_the_cache():
    model = llama()
    ids, mask = prompt(2, 6)
    batch_and_length = {0: Dim.AUTO, 1: Dim.AUTO}
    free = {"input_ids": batch_and_length, "attention_mask": batch_and_length}
    inputs = {"input_ids": ids, "attention_mask": mask}
    prefill = fxopt.trace(model, (), inputs, dynamic_shapes=free, leaf_modules=LlamaDecoderLayer)
    step = {
        "input_ids": ids[:, :1],
        "attention_mask": torch.ones(2, 7, dtype=torch.long),
        "past_key_values": model(**inputs).past_key_values,
    }
    free = free | {"input_ids": {0: Dim.AUTO}, "past_key_values": {0: Dim.AUTO, 2: Dim.AUTO}}
    decode = fxopt.trace(model, (), step, dynamic_shapes=free, leaf_modules=LlamaDecoderLayer)
    for batch, length in [(2, 6), (3, 9)]:
        expected, cache = greedy(model, model, *prompt(batch, length), steps=5)
        actual, mine = greedy(prefill, decode, *prompt(batch, length), steps=5)
        assert torch.equal(actual, expected)
        assert_same_cache(mine, cache)


# Where the sizes of images are Python values in the model, decisions on them are taken as the inputs give them.
ON_VALUES = {multimodal.mistral3, multimodal.qwen2_vl, multimodal.qwen2_5_vl}
# The token types are a Python list in the model, so a graph is for one length.
ONE_LENGTH = {multimodal.qwen2_vl, multimodal.qwen2_5_vl}
TOKENS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "cross_attention_mask"}


@pytest.mark.sweep(8)
@pytest.mark.parametrize("family", multimodal.FAMILIES, ids=lambda family: family.__name__)
def test_families_that_read_text_and_images(family):
    torch.manual_seed(0)
    model, make = family()
    randomise(model, seed=0)
    model.double().eval()
    short, long = ({name: as_double(value) for name, value in make(n).items()} for n in (24, 30))
    gm = fxopt.trace(
        model,
        (),
        short,
        dynamic_shapes={name: {1: Dim.AUTO} if name in TOKENS else None for name in short},
        leaf_modules=lambda name, module: type(module).__name__.endswith("DecoderLayer"),
        specialize=family in ON_VALUES,
    )
    assert [
        re.sub(r".*\.", "", name)
        for name in called(gm)
        if re.search(r"(?<!vision)_?model\.layers\.\d$", name)
    ]
    assert not [name for name in called(gm) if "q_proj" in name and "vision" not in name]
    for inputs in (short, long):
        if inputs is long and family in ONE_LENGTH:
            with pytest.raises(fxopt.GuardError):
                gm(**inputs)
            continue
        with torch.no_grad():
            expected, actual = model(**inputs), gm(**inputs)
        assert type(actual) is type(expected)
        assert torch.equal(actual.logits, expected.logits)


def as_double(value):
    return value.double() if value.is_floating_point() else value
