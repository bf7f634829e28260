"""Models that make images and sound: diffusers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .models import LibraryModel, model, noise

_TEXT = 16


def _denoised(*shape: int, hidden: int = 0, **more: Any) -> Callable[[int], dict[str, torch.Tensor]]:
    """Noise, its step, and where `hidden` is given, the states of a text."""

    def inputs(batch: int) -> dict[str, torch.Tensor]:
        made = {more.get("name", "sample"): torch.randn(batch, *shape), "timestep": torch.arange(batch) + 5}
        if hidden:
            made["encoder_hidden_states"] = torch.randn(batch, 7, hidden)
        if "pooled" in more:
            made["pooled_projections"] = torch.randn(batch, more["pooled"])
        if "classes" in more:
            made["class_labels"] = torch.arange(batch)
        return made

    return inputs


def _flux(batch: int) -> dict[str, torch.Tensor]:
    return {
        "hidden_states": torch.randn(batch, 4, 4),
        "encoder_hidden_states": torch.randn(batch, 5, 16),
        "pooled_projections": torch.randn(batch, 8),
        "timestep": torch.rand(batch),
        "img_ids": torch.zeros(4, 3),
        "txt_ids": torch.zeros(5, 3),
    }


_UNET: dict[str, Any] = {
    "sample_size": 16,
    "layers_per_block": 1,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
}
_DIT: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "sample_size": 8}
_VAE: dict[str, Any] = {
    "block_out_channels": (8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 4,
}
_PICTURE = noise(3, 16, 16)

DIFFUSERS = [
    model(
        "diffusers.UNet2DModel",
        _denoised(3, 16, 16),
        **_UNET,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    ),
    model(
        "diffusers.UNet2DConditionModel",
        _denoised(4, 16, 16, hidden=_TEXT),
        **_UNET,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=_TEXT,
        attention_head_dim=2,
    ),
    model(
        "diffusers.UNet1DModel",
        _denoised(14, 16),
        block_out_channels=(16, 16, 16),
        in_channels=14,
        out_channels=14,
        time_embedding_type="positional",
        use_timestep_embedding=True,
        flip_sin_to_cos=False,
        freq_shift=1.0,
        down_block_types=("DownResnetBlock1D", "DownResnetBlock1D", "DownResnetBlock1D"),
        up_block_types=("UpResnetBlock1D", "UpResnetBlock1D"),
        mid_block_type="MidResTemporalBlock1D",
        out_block_type="OutConv1DBlock",
        act_fn="swish",
    ),
    model(
        "diffusers.UNet3DConditionModel",
        _denoised(4, 2, 16, 16, hidden=_TEXT),
        **_UNET,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=_TEXT,
        attention_head_dim=4,
    ),
    model("diffusers.AutoencoderKL", _PICTURE, **_VAE, latent_channels=4),
    model(
        "diffusers.AsymmetricAutoencoderKL",
        _PICTURE,
        down_block_types=("DownEncoderBlock2D",),
        down_block_out_channels=(8,),
        up_block_types=("UpDecoderBlock2D",),
        up_block_out_channels=(8,),
        norm_num_groups=4,
    ),
    model(
        "diffusers.AutoencoderTiny",
        _PICTURE,
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    ),
    model("diffusers.VQModel", _PICTURE, **_VAE, latent_channels=3, num_vq_embeddings=16),
    model(
        "diffusers.AutoencoderDC",
        _PICTURE,
        latent_channels=4,
        attention_head_dim=4,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
    ),
    model(
        "diffusers.DiTTransformer2DModel",
        _denoised(4, 8, 8, name="hidden_states", classes=True),
        **_DIT,
        in_channels=4,
        patch_size=2,
        norm_num_groups=4,
    ),
    model(
        "diffusers.PixArtTransformer2DModel",
        _denoised(4, 8, 8, hidden=_TEXT, name="hidden_states"),
        **_DIT,
        in_channels=4,
        out_channels=8,
        patch_size=2,
        cross_attention_dim=16,
        caption_channels=_TEXT,
        norm_num_groups=4,
        use_additional_conditions=False,
    ),
    model(
        "diffusers.SD3Transformer2DModel",
        _denoised(4, 8, 8, hidden=_TEXT, name="hidden_states", pooled=8),
        **_DIT,
        in_channels=4,
        patch_size=2,
        joint_attention_dim=_TEXT,
        caption_projection_dim=16,
        pooled_projection_dim=8,
        out_channels=4,
    ),
    model(
        "diffusers.SanaTransformer2DModel",
        _denoised(4, 8, 8, hidden=_TEXT, name="hidden_states"),
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=4,
        num_attention_heads=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=_TEXT,
        sample_size=8,
        mlp_ratio=2.0,
    ),
    model(
        "diffusers.AuraFlowTransformer2DModel",
        _denoised(4, 8, 8, hidden=_TEXT, name="hidden_states"),
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        joint_attention_dim=_TEXT,
        caption_projection_dim=16,
        attention_head_dim=8,
        num_attention_heads=2,
        out_channels=4,
        pos_embed_max_size=64,
    ),
    model(
        "diffusers.FluxTransformer2DModel",
        _flux,
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    ),
    model(
        "diffusers.PriorTransformer",
        lambda batch: {
            "hidden_states": torch.randn(batch, 8),
            "timestep": torch.arange(batch),
            "proj_embedding": torch.randn(batch, 8),
            "encoder_hidden_states": torch.randn(batch, 5, 8),
        },
        num_attention_heads=2,
        attention_head_dim=4,
        num_layers=1,
        embedding_dim=8,
        num_embeddings=5,
        additional_embeddings=4,
    ),
    model(
        "diffusers.CogVideoXTransformer3DModel",
        _denoised(2, 4, 8, 8, hidden=8, name="hidden_states"),
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=8,
        num_layers=1,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=7,
    ),
    model(
        "diffusers.ControlNetModel",
        lambda batch: {
            **_denoised(4, 16, 16, hidden=_TEXT)(batch),
            "controlnet_cond": torch.randn(batch, 3, 128, 128),
        },
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        cross_attention_dim=_TEXT,
        attention_head_dim=2,
        conditioning_embedding_out_channels=(4, 8, 8, 8),
    ),
    model(
        "diffusers.WanTransformer3DModel",
        _denoised(4, 2, 8, 8, hidden=_TEXT, name="hidden_states"),
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=_TEXT,
        freq_dim=16,
        ffn_dim=32,
        num_layers=1,
        rope_max_seq_len=32,
    ),
]

MODELS: list[LibraryModel] = DIFFUSERS
