"""`symbolic_trace` on small variants of the models that fxopt must capture wholly."""

import copy
import pickle

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    ConvBertConfig,
    ConvBertModel,
    GroupViTConfig,
    GroupViTModel,
    ResNetConfig,
    ResNetForImageClassification,
)

import fxopt
from fxopt.testing import randomise

TEXT = ["input_ids", "attention_mask", "token_type_ids"]
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER = LAYERS | {"vocab_size": 100, "intermediate_size": 64, "max_position_embeddings": 24}


def bert(attention="sdpa", cls=BertModel, **options):
    config = BertConfig(**ENCODER | options, attn_implementation=attention)
    return prepared(cls(config))


def resnet():
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], num_labels=5)
    return prepared(ResNetForImageClassification(config))


def groupvit():
    layers = LAYERS | {"intermediate_size": 48}
    text = layers | {"vocab_size": 99, "max_position_embeddings": 16, "eos_token_id": 98}
    groups = {"num_group_tokens": [8, 4, 0], "num_output_groups": [8, 4, 0], "depths": [1, 1, 1]}
    vision = layers | groups | {"num_hidden_layers": 3, "image_size": 32, "patch_size": 8}
    config = GroupViTConfig(
        text_config=text, vision_config=vision, projection_dim=16, projection_intermediate_dim=32
    )
    return prepared(GroupViTModel(config))


def convbert():
    config = ConvBertConfig(**ENCODER, embedding_size=32)
    return prepared(ConvBertModel(config))


def prepared(model):
    torch.manual_seed(0)
    randomise(model, seed=0)
    return model.eval()


def text(batch, length):
    ids = torch.randint(0, 98, (batch, length))
    mask = torch.ones_like(ids)
    mask[0, max(1, length // 2) :] = 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}


def assert_equal_outputs(gm, model, inputs):
    with torch.no_grad():
        expected, actual = model(**inputs), gm(**inputs)
    assert type(actual) is type(expected)
    assert list(actual) == list(expected)
    compared = [
        torch.equal(a, e)
        for a, e in zip(actual.values(), expected.values(), strict=True)
        if torch.is_tensor(e)
    ]
    assert compared
    assert all(compared)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bert_at_every_size_with_padding(attention, dtype):
    model = bert(attention).to(dtype)
    gm = fxopt.symbolic_trace(model, TEXT)
    for batch, length in [(1, 1), (1, 9), (5, 1), (4, 7), (2, 24)]:
        assert_equal_outputs(gm, model, text(batch, length))
    with pytest.raises(
        fxopt.GuardError, match=r"'input_ids', dimension 1 is 25; it takes at most 24 .*bert\.py:\d+"
    ):
        gm(**text(2, 25))
    with pytest.raises(fxopt.GuardError, match="'attention_mask', dimension 1 is 5; it must be 6"):
        gm(**text(2, 6) | {"attention_mask": torch.ones(2, 5, dtype=torch.long)})


def test_groupvit_with_independent_batches():
    model = groupvit()
    gm = fxopt.symbolic_trace(model, ["input_ids", "attention_mask", "pixel_values"])
    for texts, images, length in [(1, 1, 1), (3, 2, 5), (2, 1, 16)]:
        inputs = text(texts, length) | {"pixel_values": torch.randn(images, 3, 32, 32)}
        del inputs["token_type_ids"]
        assert_equal_outputs(gm, model, inputs)
    with pytest.raises(fxopt.GuardError, match="takes at most 16"):
        gm(
            torch.ones(1, 17, dtype=torch.long),
            torch.randn(1, 3, 32, 32),
            torch.ones(1, 17, dtype=torch.long),
        )


def test_resnet_at_any_batch():
    model = resnet()
    gm = fxopt.symbolic_trace(model, ["pixel_values"])
    for batch in (1, 2, 17):  # in float32 torch chooses another kernel from 16 on
        assert_equal_outputs(gm, model, {"pixel_values": torch.randn(batch, 3, 224, 224)})


def test_convbert_divides_by_a_constant():
    import operator

    model = convbert()
    gm = fxopt.symbolic_trace(model, TEXT)
    for batch, length in [(1, 1), (3, 7), (2, 24)]:
        assert_equal_outputs(gm, model, text(batch, length))
    divisors = [node.args[1] for node in gm.graph.nodes if node.target is operator.truediv]
    assert any(isinstance(divisor, float) for divisor in divisors)


def test_labels_and_a_loss():
    model = bert(cls=BertForSequenceClassification, num_labels=3)
    inputs = text(3, 7) | {"labels": torch.tensor([0, 2, 1])}
    gm = fxopt.trace(model, (), inputs)
    assert_equal_outputs(gm, model, inputs)


@pytest.mark.long
def test_input_names_in_any_order_and_by_default():
    model = bert()
    gm = fxopt.symbolic_trace(model, ["attention_mask", "input_ids"])
    assert [n.target for n in gm.graph.nodes if n.op == "placeholder"] == ["input_ids", "attention_mask"]
    gm = fxopt.symbolic_trace(model)
    assert [n.target for n in gm.graph.nodes if n.op == "placeholder"] == ["input_ids"]
    gm = fxopt.symbolic_trace(model, input_names=["input_ids"], disable_check=True)
    assert gm.config is model.config


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["inputs"], r"BertModel\.forward has no input \['inputs'\]; it takes .*'use_cache'\]"),
        ("input_ids", r'write \["input_ids"\]'),
        (["input_ids", "past_key_values"], r"BertModel returns no 'past_key_values' for \['input_ids'\]"),
        (["input_ids", "cache"], r"BertModel returns no 'cache' for"),  # transformers has renamed it
    ],
)
def test_unusable_input_names(names, message):
    with pytest.raises(fxopt.TraceError, match=message):
        fxopt.symbolic_trace(bert(), names)


def test_a_module_without_config_is_told_to_use_trace():
    with pytest.raises(fxopt.TraceError, match=r"use fxopt\.trace"):
        fxopt.symbolic_trace(torch.nn.Linear(2, 2))


@pytest.mark.long
@pytest.mark.parametrize("make", [bert, groupvit, convbert])
def test_copies_move_and_load(make):
    model = make()
    names = ["input_ids", "attention_mask"] + (["pixel_values"] if make is groupvit else [])
    gm = fxopt.symbolic_trace(model, names)
    inputs = {name: value for name, value in text(3, 7).items() if name in names}
    if make is groupvit:
        inputs["pixel_values"] = torch.randn(2, 3, 32, 32)
    for again in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        assert again.code == gm.code
        assert_equal_outputs(again, model, inputs)
    moved = copy.deepcopy(gm).to("meta")
    output = moved(**{name: value.to("meta") for name, value in inputs.items()})
    assert all(value.device.type == "meta" for value in output.values() if torch.is_tensor(value))
    assert list(gm.state_dict()) == list(model.state_dict())
    copy.deepcopy(gm).load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(gm.state_dict(), strict=True)


def test_training_mode_gives_the_gradients_of_the_model():
    model = bert().train()
    gm = fxopt.symbolic_trace(model, TEXT)
    inputs = text(2, 7)
    gradients = []
    for module in (model, gm):
        model.zero_grad()
        torch.manual_seed(5)
        module(**inputs).last_hidden_state.square().sum().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert gradients[0]
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
