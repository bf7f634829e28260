"""`generate()` and pipelines on optimized models: the tokens are eager's."""

import copy
import warnings

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import (
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperForConditionalGeneration,
    pipeline,
)

import fxopt
from fxopt.kernels import kernels_for
from fxopt.optimizing import prepare
from fxopt.testing import randomise
from tests.capture.test_generation import gpt2, llama, qwen3, t5

pytestmark = pytest.mark.skipif(
    not kernels_for(nn.Linear(16, 16)), reason="this build of torch has no packed kernels"
)

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IDS = torch.arange(3, 17).reshape(2, 7)
TEXT = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


def whisper():
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in SIZES.items()}
    config = WhisperConfig(
        vocab_size=90,
        d_model=32,
        num_mel_bins=8,
        max_source_positions=50,
        max_target_positions=40,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        decoder_start_token_id=1,
        **sizes,
        **SPECIAL,
    )
    return randomise(WhisperForConditionalGeneration(config).eval())


SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}


@pytest.fixture(autouse=True)
def no_timing(monkeypatch):
    """Count small models as faster, which is a matter of luck on a busy machine."""
    monkeypatch.setattr(prepare, "speedup", lambda *_: 1.5)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("make", [llama, qwen3, gpt2, t5, whisper])
def test_greedy_tokens_are_those_of_the_model(make):
    model = make().float()
    inputs = {"input_features": torch.randn(1, 8, 100)} if make is whisper else TEXT
    fast = fxopt.optimize(model, tune=False)
    options = {"max_new_tokens": 12, "do_sample": False}
    wanted = model.generate(**inputs, **options)
    assert torch.equal(fast.generate(**inputs, **options), wanted)
    encoders = int(model.config.is_encoder_decoder)  # which generate() calls by themselves
    assert [each.reason for each in fast.report] == [None] * (3 + encoders), str(fast.report)
    known = len(fast.report)
    assert torch.equal(fast.generate(**inputs, **options), wanted)
    assert len(fast.report) == known, "a second time, all graphs are there"


@torch.no_grad()
def test_an_encoder_that_is_called_by_itself_follows_the_model():
    model = t5().float()
    fast, plain = fxopt.optimize(model, tune=False), copy.deepcopy(model)

    def assert_same():
        encoder = fast.get_encoder()
        wanted, found = plain.get_encoder()(**TEXT)[0], encoder(**TEXT)[0]
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
        return encoder

    assert assert_same() is assert_same() is not fast.encoder
    assert [each.reason for each in fast.report] == [None]
    for each in (fast, plain):
        torch.manual_seed(1)
        each.encoder.final_layer_norm.weight.mul_(2)
        each.encoder.block[0].layer[0].SelfAttention.q.weight = nn.Parameter(torch.randn(32, 32))
    assert_same()
    handles = [
        each.encoder.register_forward_hook(lambda m, args, kwargs, out: (out[0] * 2,), with_kwargs=True)
        for each in (fast, plain)
    ]
    assert_same()
    for handle in handles:
        handle.remove()
    assert_same()
    fast.train()
    assert fast.get_encoder().training
    fast.eval()
    assert_same()


@torch.no_grad()
def test_an_encoder_needs_none_of_the_methods_that_are_named_for_its_model():
    fast = fxopt.optimize(t5().float(), methods=("prepare_decoder_input_ids_from_labels",), tune=False)
    torch.testing.assert_close(fast.get_encoder()(**TEXT)[0], fast.encoder(**TEXT)[0], atol=1e-5, rtol=1e-4)
    assert [each.reason for each in fast.report] == [None]


def tokenizer():
    words = {name: number for number, name in enumerate(["<pad>", "<s>", "</s>", "<unk>"])}
    words |= {f"w{number}": number for number in range(4, 90)}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def test_a_text_generation_pipeline():
    model = llama().float()
    text = "w5 w6 w7 w8"
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "return_full_text": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = pipeline("text-generation", model=model, tokenizer=tokenizer())(text, **options)
        fast = fxopt.optimize(model, tune=False)
        found = pipeline("text-generation", model=fast, tokenizer=tokenizer())(text, **options)
    assert found == wanted
    assert found[0]["generated_text"].split()
    assert len(fast.report) == 3
