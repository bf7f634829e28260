"""Models of images: vit-pytorch, timm, torchvision, segmentation-models-pytorch, efficientnet-pytorch."""

from __future__ import annotations

from typing import Any

import torch

from .models import Inputs, LibraryModel, image, model, noise

_VIT: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": 5,
    "dim": 32,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 48,
}
_PLAIN: dict[str, Any] = {
    key: value for key, value in _VIT.items() if key not in ("image_size", "patch_size")
}
_VIDEO: dict[str, Any] = {**_VIT, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2}
del _VIDEO["patch_size"]


def _vit(path: str, inputs: Inputs, **options: Any) -> LibraryModel:
    return model(f"vit_pytorch.{path}", inputs, name=path, **options)


VIT_PYTORCH = [
    *(
        _vit(path, image(), **_VIT)
        for path in (
            *("vit.ViT", "simple_vit.SimpleViT", "deepvit.DeepViT", "parallel_vit.ViT"),
            "simple_vit_with_qk_norm.SimpleViT",
            *("simple_vit_with_register_tokens.SimpleViT", "simple_vit_with_value_residual.SimpleViT"),
            "simple_vit_with_patch_dropout.SimpleViT",
            *("simple_flash_attn_vit.SimpleViT", "vit_for_small_dataset.ViT", "learnable_memory_vit.ViT"),
            *("normalized_vit.nViT", "rvt.RvT", "vit_with_patch_merger.ViT", "simple_uvit.SimpleUViT"),
            *("vit_with_decorr.ViT", "vit_with_keel_post_ln.ViT"),
        )
    ),
    _vit("cait.CaiT", image(), **_VIT, cls_depth=1),
    _vit("xcit.XCiT", image(), **_VIT, cls_depth=1),
    _vit("vit_with_patch_dropout.ViT", image(), **_VIT, patch_dropout=0.25),
    _vit("vit_1d.ViT", noise(3, 32), seq_len=32, patch_size=8, **_PLAIN),
    _vit("simple_vit_1d.SimpleViT", noise(3, 32), seq_len=32, patch_size=8, **_PLAIN),
    _vit("vit_3d.ViT", noise(3, 4, 32, 32), **_VIDEO),
    _vit("simple_vit_3d.SimpleViT", noise(3, 4, 32, 32), **_VIDEO),
    _vit(
        "cct.CCT",
        image(),
        img_size=32,
        embedding_dim=32,
        num_layers=2,
        num_heads=2,
        mlp_ratio=2.0,
        num_classes=5,
    ),
    _vit(
        "cvt.CvT",
        image(64),
        num_classes=5,
        s1_emb_dim=16,
        s2_emb_dim=16,
        s3_emb_dim=16,
        s3_depth=1,
        s3_heads=2,
        s2_heads=2,
        s2_depth=1,
    ),
    _vit(
        "levit.LeViT",
        image(64),
        image_size=64,
        num_classes=5,
        dim=(16, 16),
        stages=2,
        depth=1,
        heads=(2, 2),
        mlp_mult=2,
    ),
    _vit("max_vit.MaxViT", image(64), num_classes=5, dim=16, depth=(1, 1), dim_head=8, window_size=2),
    _vit(
        "mobile_vit.MobileViT",
        image(64),
        image_size=(64, 64),
        dims=[16, 16, 16],
        channels=[8, 8, 16, 16, 16, 16, 16, 16, 16, 16, 16],
        num_classes=5,
    ),
    _vit(
        "nest.NesT",
        image(),
        image_size=32,
        patch_size=4,
        dim=16,
        heads=2,
        num_hierarchies=2,
        block_repeats=(1, 1),
        num_classes=5,
    ),
    _vit(
        "pit.PiT",
        image(),
        image_size=32,
        patch_size=8,
        dim=16,
        num_classes=5,
        depth=(1, 1),
        heads=2,
        mlp_dim=32,
    ),
    _vit("regionvit.RegionViT", image(224), dim=(16, 16, 16, 16), depth=(1, 1, 1, 1), num_classes=5),
    _vit(
        "scalable_vit.ScalableViT",
        image(64),
        num_classes=5,
        dim=16,
        heads=(2, 2),
        depth=(1, 1),
        ssa_dim_key=(8, 8),
        reduction_factor=(2, 1),
        window_size=(4, None),
    ),
    _vit(
        "t2t.T2TViT",
        image(64),
        image_size=64,
        num_classes=5,
        dim=16,
        depth=1,
        heads=2,
        mlp_dim=32,
        t2t_layers=((7, 4), (3, 2)),
    ),
    _vit(
        "twins_svt.TwinsSVT",
        image(64),
        num_classes=5,
        s1_emb_dim=8,
        s2_emb_dim=16,
        s3_emb_dim=16,
        s4_emb_dim=16,
        s1_local_patch_size=2,
        s1_global_k=2,
        s2_local_patch_size=2,
        s2_global_k=2,
        s3_local_patch_size=2,
        s3_global_k=2,
        s3_depth=1,
        s4_local_patch_size=1,
        s4_global_k=1,
    ),
    _vit("ats_vit.ViT", image(), **_VIT, max_tokens_per_depth=(8, 4)),
    _vit("jumbo_vit.JumboViT", image(), **_VIT, num_jumbo_cls=1, jumbo_cls_k=2, jumbo_ff_mult=2),
]

_TIMM: dict[str, dict[str, Any]] = {
    "resnet18 resnext26ts seresnet18 skresnet18 mobilenetv3_small_050 efficientnet_b0 ghostnet_050 regnetx_002": {},
    "convnext_atto convnextv2_atto dla34 lcnet_035 repvgg_a0 edgenext_xx_small poolformer_s12 starnet_s1": {},
    "inception_next_atto mobilevit_xxs pvt_v2_b0 fastvit_t8 repvit_m0_9 mvitv2_tiny": {},
    "vit_tiny_patch16_224 deit_tiny_patch16_224 gmlp_ti16_224 xcit_nano_12_p16_224": {"img_size": 64},
    "eva02_tiny_patch14_224 pit_ti_224 convit_tiny levit_128s visformer_tiny": {"img_size": 64},
    "swin_tiny_patch4_window7_224 swinv2_tiny_window8_256": {"img_size": 64, "window_size": 4},
}

TIMM = [
    model("timm.create_model", image(64), name, name=name, num_classes=5, **options)
    for names, options in _TIMM.items()
    for name in names.split()
]

TORCHVISION = [
    *(
        model(f"torchvision.models.{name}", image(64), num_classes=5)
        for name in (
            *("alexnet", "resnet18", "squeezenet1_1", "densenet121", "mobilenet_v2", "mobilenet_v3_small"),
            *(
                "mnasnet0_5",
                "shufflenet_v2_x0_5",
                "efficientnet_b0",
                "regnet_y_400mf",
                "convnext_tiny",
                "swin_t",
            ),
            *("swin_v2_t", "googlenet"),
        )
    ),
    model("torchvision.models.inception_v3", image(96), num_classes=5, init_weights=False),
    model("torchvision.models.VisionTransformer", image(), 32, 8, 2, 2, 32, 48, num_classes=5),
    model(
        "torchvision.models.segmentation.lraspp_mobilenet_v3_large",
        image(64),
        num_classes=3,
        weights_backbone=None,
    ),
    model(
        "torchvision.models.segmentation.deeplabv3_mobilenet_v3_large",
        image(64),
        num_classes=3,
        weights_backbone=None,
    ),
    model("torchvision.models.video.r3d_18", noise(3, 4, 32, 32), num_classes=5),
    model(
        "torchvision.models.optical_flow.raft_small",
        lambda batch: (torch.randn(batch, 3, 128, 128), torch.randn(batch, 3, 128, 128)),
    ),
]

SEGMENTATION = [
    *(
        model(f"segmentation_models_pytorch.{name}", image(64), encoder_name="resnet18", encoder_weights=None)
        for name in (
            *("Unet", "UnetPlusPlus", "Linknet", "FPN", "PSPNet", "MAnet", "DeepLabV3", "DeepLabV3Plus"),
            *("UPerNet", "Segformer"),
        )
    ),
]

EFFICIENTNET = [
    model("efficientnet_pytorch.EfficientNet.from_name", image(64), "efficientnet-b0", name="EfficientNet")
]

MODELS: list[LibraryModel] = [*VIT_PYTORCH, *TIMM, *TORCHVISION, *SEGMENTATION, *EFFICIENTNET]
