"""Libraries do with an optimized model what they do with the model itself: generation, pipelines, adapters, processes."""

import copy
import multiprocessing

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BaseImageProcessor,
    BatchFeature,
    BertForSequenceClassification,
    BertForTokenClassification,
    MambaConfig,
    MambaForCausalLM,
    pipeline,
)

import fxopt
from fxopt.testing import randomise
from tests.capture.test_generation import gpt2, llama, mistral, t5
from tests.capture.test_transformers import bert, resnet, text
from tests.optimizing.test_generation import SIZES, SPECIAL, TEXT, tokenizer, whisper

pytestmark = pytest.mark.filterwarnings("ignore")


def reasons(fast):
    return [each.reason for each in fast.report]


def bart():
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in SIZES.items()}
    config = BartConfig(vocab_size=90, d_model=32, max_position_embeddings=64, **sizes, **SPECIAL)
    return randomise(BartForConditionalGeneration(config).eval())


def mamba():
    config = MambaConfig(vocab_size=90, hidden_size=32, state_size=8, num_hidden_layers=2, **SPECIAL)
    return randomise(MambaForCausalLM(config).eval())


PADDED = {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])}
ONE = {name: value[:1] for name, value in TEXT.items()}
MODES = {
    "greedy": {},
    "padding": PADDED,
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "static": {"cache_implementation": "static"},
    "lookup": ONE | {"prompt_lookup_num_tokens": 2},
    "assisted": ONE,
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("make", "modes"),
    [
        (gpt2, "padding sampling"),
        (llama, "static lookup"),
        (mistral, "greedy assisted"),
        (bart, "beams sampling"),
        (mamba, "padding sampling"),
        (t5, "sampling assisted"),
        (whisper, "beams static"),
    ],
)
def test_tokens_are_those_of_the_model(make, modes):
    model = make().float()
    fast = fxopt.optimize(model, tune=False)
    for mode in modes.split():
        options = TEXT | {"max_new_tokens": 8, "do_sample": False} | MODES[mode]
        if make is whisper:
            options = {"input_features": torch.randn(2, 8, 100)} | {
                n: v for n, v in options.items() if n not in TEXT
            }
        if mode == "assisted":
            options["assistant_model"] = make().float()
        tokens = []
        for each in (model, fast):
            torch.manual_seed(3)
            tokens.append(each.generate(**options))
        assert torch.equal(*tokens), mode
    assert len(fast.report) > 1
    assert set(reasons(fast)) == {None}


class Pixels(BaseImageProcessor):
    def __call__(self, images, **options):
        pixels = torch.tensor([*images.resize((32, 32)).getdata()]) / 255
        return BatchFeature({"pixel_values": pixels.T.reshape(1, 3, 32, 32)})


def classifier(cls, *labels):
    model = bert(cls=cls, num_labels=len(labels))
    model.config.id2label = dict(enumerate(labels))
    model.config.label2id = {label: number for number, label in enumerate(labels)}
    return model


PIPELINES = {
    "text-classification": (lambda: classifier(BertForSequenceClassification, "a", "b"), {}),
    "token-classification": (lambda: classifier(BertForTokenClassification, "a", "b"), {}),
    "zero-shot-classification": (
        lambda: classifier(BertForSequenceClassification, "contradiction", "entailment"),
        {"candidate_labels": ["w20", "w21 w22"], "hypothesis_template": "w30 {}"},
    ),
    "feature-extraction": (bert, {}),
}


def assert_same_answers(task, model, inputs, options, **parts):
    fast = fxopt.optimize(model, tune=False)
    wanted, found = (
        tree_leaves([pipeline(task, model=each, **parts)(one, **options) for one in inputs])
        for each in (model, fast)
    )
    assert len(wanted) > 1
    for one, other in zip(wanted, found, strict=True):
        assert one == (pytest.approx(other, rel=1e-3, abs=1e-5) if isinstance(other, float) else other)
    assert set(reasons(fast)) == {None}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("task", PIPELINES)
def test_pipelines_of_text(task):
    make, options = PIPELINES[task]
    assert_same_answers(task, make(), ["w5 w6 w7", "w8 w9 w10 w11 w12"], options, tokenizer=tokenizer())


def test_a_pipeline_of_images():
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    images = [image.effect_mandelbrot((40, size), (-2, -1, 1, 1), 9).convert("RGB") for size in (30, 40)]
    assert_same_answers("image-classification", resnet(), images, {}, image_processor=Pixels())


@torch.no_grad()
def test_embeddings_of_another_size():
    model = llama().float()
    fast, plain = fxopt.optimize(model, tune=False), copy.deepcopy(model)
    fast(**TEXT)
    for each in (fast, plain):
        torch.manual_seed(0)
        each.resize_token_embeddings(100)
    assert model.config.vocab_size == 100
    torch.testing.assert_close(fast(**TEXT).logits, plain(**TEXT).logits, rtol=1e-4, atol=1e-4)
    assert set(reasons(fast)) == {None}


def called(fast, inputs, queue):
    with torch.no_grad():
        queue.put((fast(**inputs)[0].numpy(), len(fast.report)))


@pytest.mark.long
@torch.no_grad()
def test_a_process_that_is_spawned_can_call():
    fast, inputs, context = (
        fxopt.optimize(bert(), tune=False),
        text(2, 5),
        multiprocessing.get_context("spawn"),
    )
    queue = context.Queue()
    child = context.Process(target=called, args=(fast, inputs, queue))
    child.start()
    found, graphs = queue.get(timeout=100)
    child.join()
    torch.testing.assert_close(torch.from_numpy(found), fast(**inputs)[0])
    assert graphs == 1


@torch.no_grad()
def test_hooks_of_accelerate_run_around_the_graph():
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    fast, inputs = fxopt.optimize(bert(), tune=False), text(2, 5)
    wanted = fast(**inputs)[0]
    hooks.add_hook_to_module(fast, hooks.ModelHook())
    assert torch.equal(fast(**inputs)[0], wanted)
    hooks.remove_hook_from_module(fast)
    assert torch.equal(fast(**inputs)[0], wanted)
    assert reasons(fast) == [None] * 2, "the attributes that accelerate adds are another state"


@torch.no_grad()
def test_adapters_unmerged_switched_and_merged():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["query", "value"], init_lora_weights=False)
    model = peft.get_peft_model(bert(), config)
    model.add_adapter("b", config)
    model.eval()
    fast, plain, inputs = fxopt.optimize(model, tune=False), copy.deepcopy(model), text(2, 5)

    def assert_same():
        found = fast(**inputs)[0]
        torch.testing.assert_close(found, plain(**inputs)[0], rtol=1e-4, atol=1e-4)
        return found

    found = []
    for name in ("default", "b") * 6:
        fast.set_adapter(name)
        plain.set_adapter(name)
        found.append(assert_same())
    assert not torch.allclose(*found[:2])
    assert reasons(fast) == [None] * 2
    for change in ("merge_adapter", "unmerge_adapter"):
        getattr(fast, change)()
        getattr(plain, change)()
        assert_same()
    with fast.disable_adapter(), plain.disable_adapter():
        assert_same()
    assert_same()
    assert set(reasons(fast)) == {None}
    merged = fxopt.optimize(plain.merge_and_unload(), tune=False)
    torch.testing.assert_close(merged(**inputs)[0], assert_same(), rtol=1e-4, atol=1e-4)
