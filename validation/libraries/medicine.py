"""Models of volumes and images in medicine (MONAI), and of image geometry (kornia)."""

from __future__ import annotations

from typing import Any

import torch

from .models import Inputs, LibraryModel, image, model, noise

_NETS = "monai.networks.nets"
_PLANE: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
_GRAY = image(32, 1)


def _diffusion(**more: int) -> Inputs:
    return lambda batch: {"x": torch.randn(batch, 1, 16, 16), "timesteps": torch.arange(batch) + 3}


MONAI = [
    model(f"{_NETS}.UNet", _GRAY, **_PLANE, channels=(4, 8, 16), strides=(2, 2), num_res_units=1),
    model(f"{_NETS}.AttentionUnet", _GRAY, **_PLANE, channels=(4, 8, 16), strides=(2, 2)),
    model(f"{_NETS}.BasicUNet", _GRAY, **_PLANE, features=(4, 4, 8, 8, 16, 4)),
    model(f"{_NETS}.BasicUNetPlusPlus", _GRAY, **_PLANE, features=(4, 4, 8, 8, 16, 4)),
    model(f"{_NETS}.SegResNet", _GRAY, **_PLANE, init_filters=8),
    model(f"{_NETS}.SegResNetDS", _GRAY, **_PLANE, init_filters=8),
    model(f"{_NETS}.SegResNetVAE", _GRAY, input_image_size=(32, 32), vae_nz=8, **_PLANE, init_filters=8),
    model(
        f"{_NETS}.DynUNet",
        _GRAY,
        **_PLANE,
        kernel_size=(3, 3, 3),
        strides=(1, 2, 2),
        upsample_kernel_size=(2, 2),
        filters=(4, 8, 16),
    ),
    model(f"{_NETS}.VNet", image(32, 1), spatial_dims=2, in_channels=1, out_channels=2),
    model(
        f"{_NETS}.UNETR",
        _GRAY,
        1,
        2,
        (32, 32),
        feature_size=4,
        hidden_size=24,
        mlp_dim=32,
        num_heads=2,
        spatial_dims=2,
    ),
    model(
        f"{_NETS}.SwinUNETR",
        image(64, 1),
        1,
        2,
        feature_size=12,
        depths=(1, 1, 1, 1),
        num_heads=(2, 2, 2, 2),
        spatial_dims=2,
    ),
    model(f"{_NETS}.DenseNet121", _GRAY, **_PLANE),
    model(f"{_NETS}.resnet18", image(32, 1), spatial_dims=2, n_input_channels=1, num_classes=2),
    model(f"{_NETS}.EfficientNetBN", image(64, 3), "efficientnet-b0", pretrained=False, num_classes=2),
    model(
        f"{_NETS}.ViT",
        _GRAY,
        1,
        (32, 32),
        (8, 8),
        hidden_size=24,
        mlp_dim=32,
        num_layers=2,
        num_heads=2,
        spatial_dims=2,
        classification=True,
    ),
    model(
        f"{_NETS}.MaskedAutoEncoderViT",
        image(32, 1),
        1,
        (32, 32),
        (8, 8),
        hidden_size=24,
        mlp_dim=32,
        num_layers=2,
        num_heads=2,
        spatial_dims=2,
        decoder_hidden_size=24,
        decoder_mlp_dim=32,
        decoder_num_layers=1,
        decoder_num_heads=2,
    ),
    model(f"{_NETS}.AutoEncoder", _GRAY, **_PLANE, channels=(4, 8), strides=(2, 2)),
    model(
        f"{_NETS}.VarAutoEncoder",
        _GRAY,
        spatial_dims=2,
        in_shape=(1, 32, 32),
        out_channels=1,
        latent_size=4,
        channels=(4, 8),
        strides=(2, 2),
    ),
    model(
        f"{_NETS}.AutoencoderKL",
        _GRAY,
        spatial_dims=2,
        channels=(8, 8),
        num_res_blocks=(1, 1),
        attention_levels=(False, True),
        norm_num_groups=4,
    ),
    model(
        f"{_NETS}.VQVAE",
        _GRAY,
        spatial_dims=2,
        in_channels=1,
        out_channels=1,
        channels=(8, 8),
        num_res_channels=(8, 8),
        num_res_layers=1,
        downsample_parameters=((2, 4, 1, 1), (2, 4, 1, 1)),
        upsample_parameters=((2, 4, 1, 1, 0), (2, 4, 1, 1, 0)),
        num_embeddings=8,
        embedding_dim=8,
    ),
    model(
        f"{_NETS}.DiffusionModelUNet",
        _diffusion(),
        spatial_dims=2,
        in_channels=1,
        out_channels=1,
        channels=(8, 8),
        attention_levels=(False, True),
        num_res_blocks=1,
        num_head_channels=4,
        norm_num_groups=4,
    ),
    model(f"{_NETS}.HighResNet", image(16, 1), **_PLANE),
    model(f"{_NETS}.RegUNet", _GRAY, spatial_dims=2, in_channels=1, num_channel_initial=4, depth=2),
    model(
        f"{_NETS}.LocalNet",
        _GRAY,
        spatial_dims=2,
        in_channels=1,
        out_channels=2,
        num_channel_initial=4,
        extract_levels=(0, 1, 2),
    ),
    model(f"{_NETS}.Quicknat", image(64, 1), num_classes=2, num_channels=1, num_filters=8),
    model(
        f"{_NETS}.FlexibleUNet",
        image(64, 3),
        in_channels=3,
        out_channels=2,
        backbone="efficientnet-b0",
        spatial_dims=2,
    ),
    model(f"{_NETS}.FullyConnectedNet", noise(6), 6, 2, (8, 8)),
    model(
        f"{_NETS}.Generator",
        noise(6),
        latent_shape=(6,),
        start_shape=(4, 4, 4),
        channels=(4, 2),
        strides=(2, 2),
    ),
    model(f"{_NETS}.Discriminator", _GRAY, in_shape=(1, 32, 32), channels=(4, 8), strides=(2, 2)),
    model(f"{_NETS}.PatchDiscriminator", _GRAY, spatial_dims=2, channels=4, in_channels=1, num_layers_d=2),
    model(f"{_NETS}.MedNeXt", image(64, 1), spatial_dims=2, in_channels=1, out_channels=2, init_filters=4),
    model(
        f"{_NETS}.DecoderOnlyTransformer",
        lambda batch: (torch.randint(0, 20, (batch, 8)),),
        num_tokens=20,
        max_seq_len=8,
        attn_layers_dim=16,
        attn_layers_depth=2,
        attn_layers_heads=2,
    ),
]


KORNIA = [
    model("kornia.feature.HardNet", image(32, 1), pretrained=False),
    model("kornia.feature.SOSNet", image(32, 1), pretrained=False),
    model("kornia.feature.TFeat", image(32, 1), pretrained=False),
    model("kornia.feature.HyNet", image(32, 1), pretrained=False),
    model("kornia.feature.SIFTDescriptor", image(41, 1), 41),
    model("kornia.feature.DISK", image(32), name="DISK"),
    model("kornia.feature.DeFMO", noise(6, 64, 64), pretrained=False),
    model("kornia.feature.BlobHessian", image(32, 1)),
    model("kornia.feature.CornerHarris", image(32, 1), 0.04),
    model("kornia.filters.Sobel", image()),
    model("kornia.filters.Canny", image()),
    model("kornia.filters.GaussianBlur2d", image(), (3, 3), (1.0, 1.0)),
    model("kornia.filters.UnsharpMask", image(), (3, 3), (1.0, 1.0)),
    model("kornia.color.RgbToLab", image()),
    model("kornia.color.RgbToHsv", image()),
    model("kornia.geometry.transform.PyrDown", image()),
    model("kornia.geometry.transform.ScalePyramid", image(32, 1)),
]

MODELS: list[LibraryModel] = [*MONAI, *KORNIA]
