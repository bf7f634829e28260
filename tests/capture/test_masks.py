"""Masks that transformers' eager code leaves out where they hide nothing, and a graph cannot."""

from collections.abc import Callable

import pytest
import torch
from torch.export import Dim
from transformers import (
    Aimv2TextConfig,
    Aimv2TextModel,
    LlamaConfig,
    LlamaModel,
    MoonshineConfig,
    MoonshineModel,
    masking_utils,
    modeling_utils,
)

import fxopt
from fxopt.errors import GuardError, TraceError
from fxopt.testing import assert_equivalent


def text_model(attention: str, is_causal: bool) -> Aimv2TextModel:
    """A model whose mask is causal, and whose attention declares to be so or not."""
    torch.manual_seed(0)
    config = Aimv2TextConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=20,
        eos_token_id=39,
        attn_implementation=attention,
    )
    model = Aimv2TextModel(config).double().eval()
    for layer in model.encoder.layers:
        layer.attention.is_causal = is_causal
    return model


def inputs(hidden: int, length: int = 6) -> dict[str, torch.Tensor]:
    """Token ids of two rows, of which the second has its last `hidden` tokens hidden."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length - hidden :] = 0
    return {"input_ids": torch.arange(2 * length).reshape(2, length), "attention_mask": mask}


def test_the_eager_model_attends_otherwise_where_no_token_is_hidden() -> None:
    """Why the next test asks for a refusal: what is shown here is transformers' own doing."""
    declared, other = text_model("sdpa", True), text_model("sdpa", False)
    for hidden, same in ((1, True), (0, False)):
        outputs = [model(**inputs(hidden)).last_hidden_state for model in (declared, other)]
        assert torch.allclose(*outputs, rtol=0, atol=1e-12) is same


@pytest.mark.sweep(4)
@pytest.mark.parametrize("specialize", [False, True])
@pytest.mark.parametrize("hidden", [0, 1])
def test_attention_is_what_it_is_in_the_eager_model_with_padding_and_without(
    hidden: int, specialize: bool
) -> None:
    model = text_model("sdpa", False)
    free = {name: {0: Dim.AUTO, 1: Dim.AUTO} for name in inputs(0)}
    traced = fxopt.trace(model, kwargs=inputs(hidden), dynamic_shapes=free, specialize=specialize)
    for given in (inputs(0), inputs(1), inputs(3), inputs(0, length=9), inputs(2, length=9)):
        assert_equivalent(model, traced, kwargs=given)


class BothWays(torch.nn.Module):
    """A mask in both directions for attention that declares to be causal; `change` is what is done to the mask."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda mask: mask) -> None:
        super().__init__()
        self.inner = text_model("sdpa", True)
        self.change = change

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        mask = masking_utils.create_bidirectional_mask(self.inner.config, x, attention_mask)
        mask = None if mask is None else self.change(mask)
        return self.inner.encoder.layers[0].attention(x, attention_mask=mask)[0]


def test_attention_that_is_causal_without_padding_is_that_in_the_graph() -> None:
    model, x = BothWays(), torch.randn(2, 6, 16, dtype=torch.float64)
    traced = fxopt.trace(model, (x, inputs(1)["attention_mask"]))
    for hidden in (0, 1, 3):
        assert_equivalent(model, traced, (x, inputs(hidden)["attention_mask"]))


class Changed(BothWays):
    """Attention under a mask in both directions, as it declares, or under one that is causal."""

    def __init__(
        self, change: Callable[[torch.Tensor], torch.Tensor], attention: str, is_causal: bool
    ) -> None:
        super().__init__(change)
        self.inner = text_model(attention, is_causal)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        if not self.inner.encoder.layers[0].attention.is_causal:
            return super().forward(x, attention_mask)
        mask = masking_utils.create_causal_mask(self.inner.config, x, attention_mask, None)
        mask = None if mask is None else self.change(mask)
        return self.inner.encoder.layers[0].attention(x, attention_mask=mask)[0]


def joined(mask: torch.Tensor) -> torch.Tensor:
    hides = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return mask.masked_fill(torch.arange(mask.shape[-1]) == 2, hides)


def written(mask: torch.Tensor) -> torch.Tensor:
    mask[..., 2] = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return mask


@pytest.mark.sweep(2)
@pytest.mark.parametrize("change", [joined, written])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_mask_that_the_model_changes_is_refused_unless_the_eager_model_has_one(
    change: Callable[[torch.Tensor], torch.Tensor], is_causal: bool
) -> None:
    model, x = Changed(change, "sdpa", is_causal), torch.randn(2, 6, 16, dtype=torch.float64)
    full, hidden = (inputs(count)["attention_mask"] for count in (0, 1))
    unchanged = Changed(lambda mask: mask, "sdpa", is_causal)
    assert torch.equal(model(x, full), unchanged(x, full))
    assert not torch.equal(model(x, hidden), unchanged(x, hidden))
    with pytest.raises(TraceError, match=r"changes the attention mask.*The changed mask is ") as refused:
        fxopt.trace(model, (x, hidden))
    assert "and_mask_function" in str(refused.value)
    assert ("test_masks.py:" in str(refused.value)) is (change is joined)  # the line that makes the mask
    with pytest.raises(TraceError, match="an example in which padding hides a token"):
        fxopt.trace(model, (x, full), specialize=True)
    specialised = fxopt.trace(model, (x, hidden), specialize=True)
    for count in (1, 3):
        assert_equivalent(model, specialised, (x, inputs(count)["attention_mask"]))
    with pytest.raises(fxopt.GuardError):
        specialised(x, full)


def test_a_part_of_a_mask_may_be_taken_by_keyword() -> None:
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    model = Changed(lambda mask: torch.unsqueeze(input=mask[:, 0], dim=1), "sdpa", False)
    traced = fxopt.trace(model, (x, inputs(1)["attention_mask"]))
    for hidden in (0, 1, 3):
        assert_equivalent(model, traced, (x, inputs(hidden)["attention_mask"]))


@pytest.mark.parametrize("change", [joined, written])
def test_a_mask_that_eager_attention_leaves_out_may_not_be_changed(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    both_ways = Changed(change, "eager", False)  # causal masks are always there
    with pytest.raises(TraceError, match="changes the attention mask"):
        fxopt.trace(both_ways, (x, inputs(1)["attention_mask"]))
    causal = Changed(change, "eager", True)
    traced = fxopt.trace(causal, (x, inputs(1)["attention_mask"]))
    for count in (0, 1):
        assert_equivalent(causal, traced, (x, inputs(count)["attention_mask"]))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_parts_and_copies_of_a_mask_are_no_change(attention: str, is_causal: bool) -> None:
    def copied(mask: torch.Tensor) -> torch.Tensor:
        return mask[:, :, -mask.shape[-1] :].expand(-1, 2, -1, -1).contiguous()

    model, x = Changed(copied, attention, is_causal), torch.randn(2, 6, 16, dtype=torch.float64)
    traced = fxopt.trace(model, (x, inputs(1)["attention_mask"]))
    for hidden in (0, 1, 3):
        assert_equivalent(model, traced, (x, inputs(hidden)["attention_mask"]))


def test_a_part_of_a_mask_that_attention_would_not_want_is_refused() -> None:
    model, x = BothWays(lambda mask: mask.clone()), torch.randn(2, 6, 16, dtype=torch.float64)
    with pytest.raises(
        TraceError, match=r"declares is_causal=True.*part of another mask.*attn_implementation='eager'"
    ):
        fxopt.trace(model, (x, inputs(1)["attention_mask"]))


@pytest.mark.parametrize(("attention", "is_causal"), [("sdpa", True), ("eager", False)])
def test_a_mask_that_changes_nothing_is_captured(attention: str, is_causal: bool) -> None:
    model = text_model(attention, is_causal)
    traced = fxopt.trace(model, kwargs=inputs(1))
    for hidden in (0, 1, 3):
        assert_equivalent(model, traced, kwargs=inputs(hidden))


def test_one_query_sees_every_token_either_way() -> None:
    model = text_model("sdpa", False)
    traced = fxopt.trace(model, kwargs=inputs(0, length=1))
    assert_equivalent(model, traced, kwargs=inputs(0, length=1))


def test_what_a_user_has_put_into_a_registry_stays_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    registries = (masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, modeling_utils.ALL_ATTENTION_FUNCTIONS)
    for registry in registries:
        monkeypatch.setitem(registry._local_mapping, "sdpa", print)
    before = [dict(type(registry)._global_mapping) for registry in registries]
    fxopt.trace(torch.nn.Linear(2, 2), (torch.ones(2),))
    assert before == [type(registry)._global_mapping for registry in registries]
    assert all(registry["sdpa"] is print for registry in registries)


class AlwaysMasked(torch.nn.Module):
    """Attention of the model above under a causal mask that is made without a mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = text_model("sdpa", False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = masking_utils.create_causal_mask(self.inner.config, x, None, None)
        return self.inner.encoder.layers[0].attention(x, attention_mask=mask)[0]


def test_a_mask_that_is_left_out_for_want_of_padding_is_none_either() -> None:
    model, x = AlwaysMasked(), torch.randn(2, 6, 16, dtype=torch.float64)
    assert_equivalent(model, fxopt.trace(model, (x,)), (x,))


class WithoutPadding(torch.nn.Module):
    """Attends in both directions, and leaves out every second token first, which a mask for all of them does not fit."""

    def __init__(self, attention: str, window: int | None = None) -> None:
        super().__init__()
        self.inner = text_model(attention, False)
        self.inner.config.sliding_window = window

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inner.config.sliding_window is None:
            mask = masking_utils.create_bidirectional_mask(self.inner.config, x, None)
            x = x[:, ::2]
        else:
            mask = masking_utils.create_bidirectional_sliding_window_mask(self.inner.config, x, None)
        if mask is not None and mask.shape[-1] != x.shape[1]:
            raise ValueError("the mask is for another length")
        return self.inner.encoder.layers[0].attention(x, attention_mask=mask)[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_in_both_directions_without_padding_is_left_out(attention: str) -> None:
    model, x = WithoutPadding(attention), torch.randn(2, 6, 16, dtype=torch.float64)
    traced = fxopt.trace(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},))
    for length in (3, 7, 12):
        assert_equivalent(model, traced, (x.repeat(2, 2, 1)[:, :length],))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_of_a_window_stays(attention: str) -> None:
    model, x = WithoutPadding(attention, window=3), torch.randn(2, 6, 16, dtype=torch.float64)
    traced = fxopt.trace(model, (x,))
    assert not torch.allclose(model(x), WithoutPadding(attention, window=9)(x))
    assert_equivalent(model, traced, (x,))


def test_a_mask_of_fewer_rows_than_the_batch_is_refused_with_a_guard() -> None:
    """The eager model leaves out one that hides nothing before it looks up a row for each."""
    model, x = BothWays(), torch.randn(4, 6, 16, dtype=torch.float64)
    free = ({0: Dim.AUTO}, {0: Dim.AUTO})
    traced = fxopt.trace(model, (x[:2], inputs(1)["attention_mask"]), dynamic_shapes=free)
    for rows, hidden in ((4, 2), (2, 0), (1, 0)):
        mask = inputs(hidden)["attention_mask"].repeat(2, 1)
        assert_equivalent(model, traced, (x[:rows], mask[:rows]))
    hides_in_the_last_row = inputs(1)["attention_mask"]
    assert_equivalent(model, traced, (x[:1], hides_in_the_last_row))
    one_row = inputs(0)["attention_mask"][:1]
    model(x[:2], one_row)
    with pytest.raises(GuardError, match="transformers_masks|masking_utils"):
        traced(x[:2], one_row)


def test_attention_that_is_causal_only_where_it_has_no_mask_keeps_the_mask() -> None:
    """Moonshine gives `is_causal=False` where there is a mask, which the eager model leaves out."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 99, "pad_token_id": 0}
    layers = {"encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 1}
    heads = {"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4}
    model = MoonshineModel(MoonshineConfig(**sizes, **layers, **heads)).eval().double()

    def sound(batch: int, tokens: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(1, 99, (batch, tokens))
        return {"input_values": torch.randn(batch, 2000).double(), "decoder_input_ids": ids}

    free = {"input_values": {0: Dim.AUTO}, "decoder_input_ids": {0: Dim.AUTO, 1: Dim.AUTO}}
    traced = fxopt.trace(model, (), sound(2, 5), dynamic_shapes=free)
    for batch, tokens in ((2, 5), (3, 4), (1, 7)):
        given = sound(batch, tokens)
        with torch.no_grad():
            expected, actual = model(**given), traced(**given)
        torch.testing.assert_close(actual.last_hidden_state, expected.last_hidden_state)


def test_positions_that_count_up_pack_no_sequences() -> None:
    """As in PaliGemma, whose attention declares not to be causal: without padding, the eager model leaves the mask out."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaModel(config).double().eval()
    ids = torch.arange(14).reshape(2, 7)
    for is_causal in (True, False):
        for layer in model.layers:
            layer.self_attn.is_causal = is_causal
        sizes = {"input_ids": {1: Dim.AUTO}, "use_cache": None}
        traced = fxopt.trace(model, (), {"input_ids": ids, "use_cache": False}, dynamic_shapes=sizes)
        assert not any(node.target == "cumsum" for node in traced.graph.nodes)
        for given in (ids, ids[:, :3]):
            assert_equivalent(traced, model, (), {"input_ids": given, "use_cache": False})


class Packs(torch.nn.Module):
    """A decoder that gets the positions of two sequences, which it makes itself."""

    def __init__(self, model: torch.nn.Module, positions: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.positions = model, positions

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        positions = self.positions(input_ids.shape[1])
        return self.model(input_ids, position_ids=positions.unsqueeze(0), use_cache=False).last_hidden_state


def begun_anew(length: int) -> torch.Tensor:
    positions = torch.arange(length)
    positions[3:] = positions[3:] - 3
    return positions


def begun_anew_then_added(length: int) -> torch.Tensor:
    positions = torch.arange(length)
    positions[3:] -= 3
    return positions + 1


def with_gaps(length: int) -> torch.Tensor:
    return torch.arange(length) + torch.arange(length) // 3


def doubled(length: int) -> torch.Tensor:
    positions = torch.arange(length)
    return positions + positions


def of_low_precision(length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.bfloat16)


def all_one(length: int) -> torch.Tensor:
    return torch.arange(1).expand(length)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "positions", [begun_anew, begun_anew_then_added, with_gaps, doubled, of_low_precision, all_one]
)
def test_positions_that_a_forward_makes_may_pack_sequences(
    positions: Callable[[int], torch.Tensor], inference: bool
) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = Packs(LlamaModel(config), positions).double().eval()
    ids = torch.arange(14).reshape(2, 7)
    with torch.inference_mode(inference):
        traced = fxopt.trace(model, (ids,), verify=False)
        assert any(node.target == "cumsum" for node in traced.graph.nodes)
        assert_equivalent(traced, model, (ids,))


def test_positions_that_are_given_may_pack_sequences() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaModel(config).double().eval()
    ids, positions = torch.arange(14).reshape(2, 7), torch.tensor([[0, 1, 2, 0, 1, 2, 3]]).expand(2, 7)
    example = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    traced = fxopt.trace(model, (), example)
    for given in (positions, torch.arange(7).expand(2, 7)):
        assert_equivalent(traced, model, (), {**example, "position_ids": given})
