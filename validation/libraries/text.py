"""Models of text, and adapters: x-transformers, PEFT."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .models import LibraryModel, imported, model, noise, tokens


def _layers(kind: str, **options: Any) -> Any:
    return lambda: imported(f"x_transformers.{kind}")(dim=32, depth=2, heads=2, attn_dim_head=16, **options)


def _text_model(name: str, kind: str = "Decoder", **options: Any) -> LibraryModel:
    return model(
        "x_transformers.TransformerWrapper",
        tokens(),
        num_tokens=50,
        max_seq_len=16,
        attn_layers=_layers(kind, **options),
        name=name,
    )


X_TRANSFORMERS = [
    _text_model("Decoder"),
    _text_model("Encoder", "Encoder"),
    _text_model("rotary", rotary_pos_emb=True),
    _text_model("alibi", alibi_pos_bias=True),
    _text_model("t5_bias", rel_pos_bias=True),
    _text_model("dynamic_pos_bias", dynamic_pos_bias=True),
    _text_model("rmsnorm", use_rmsnorm=True),
    _text_model("scalenorm", use_scalenorm=True),
    _text_model("glu", ff_glu=True),
    _text_model("relu_squared", ff_relu_squared=True),
    _text_model("one_kv_head", attn_one_kv_head=True),
    _text_model("kv_heads", attn_kv_heads=1),
    _text_model("qk_norm", attn_qk_norm=True),
    _text_model("talking_heads", attn_pre_talking_heads=True),
    _text_model("sparse_topk", attn_sparse_topk=4),
    _text_model("flash", attn_flash=True),
    _text_model("memory_keys", attn_num_mem_kv=3),
    _text_model("residual_attention", residual_attn=True),
    _text_model("sandwich", sandwich_norm=True),
    _text_model("gate_residual", gate_residual=True),
    _text_model("shift_tokens", shift_tokens=1),
    _text_model("macaron", macaron=True),
    _text_model("value_residual", add_value_residual=True),
    _text_model("laser", attn_laser=True),
    _text_model("softclamp", attn_softclamp_logits=True),
    model(
        "x_transformers.ViTransformerWrapper",
        noise(3, 32, 32),
        image_size=32,
        patch_size=8,
        num_classes=5,
        attn_layers=_layers("Encoder"),
    ),
    model(
        "x_transformers.ContinuousTransformerWrapper",
        noise(8, 6),
        dim_in=6,
        dim_out=4,
        max_seq_len=16,
        attn_layers=_layers("Encoder"),
    ),
    model(
        "x_transformers.XTransformer",
        lambda batch: (torch.randint(0, 30, (batch, 8)), torch.randint(0, 30, (batch, 6))),
        dim=32,
        enc_num_tokens=30,
        enc_depth=1,
        enc_heads=2,
        enc_max_seq_len=16,
        dec_num_tokens=30,
        dec_depth=1,
        dec_heads=2,
        dec_max_seq_len=16,
    ),
]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def _tuned(name: str, **options: Any) -> LibraryModel:
    """A network with an adapter of PEFT in its middle layers, without the wrapper around it."""

    def make() -> nn.Module:
        config = imported(f"peft.{name}Config")(target_modules=["0", "2"], **options)
        made: nn.Module = imported("peft.get_peft_model")(_mlp(), config).base_model.model
        return made

    return LibraryModel(
        f"peft.{name}{''.join(f'_{key}' for key in options if key.startswith('use'))}", make, noise(8)
    )


PEFT = [
    _tuned("Lora", r=2),
    _tuned("Lora", r=2, use_dora=True),
    _tuned("Lora", r=2, use_rslora=True),
    _tuned("LoHa", r=2),
    _tuned("LoKr", r=2),
    _tuned("OFT", oft_block_size=4, r=0),
    _tuned("BOFT", boft_block_size=4),
    _tuned("IA3", feedforward_modules=[]),
    _tuned("AdaLora", total_step=10),
    _tuned("HRA", r=2),
    _tuned("VBLoRA", r=2, num_vectors=8, vector_length=4),
    _tuned("FourierFT", n_frequency=8),
]

MODELS: list[LibraryModel] = [*X_TRANSFORMERS, *PEFT]
