"""Small random models of families that read text and images, and inputs for them."""

import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MllamaConfig,
    MllamaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

IMAGE = 90
TEXT = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
}


def llama():
    return LlamaForCausalLM(LlamaConfig(**TEXT)), text


def llava():
    config = LlavaConfig(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=CLIPVisionConfig(**VISION, projection_dim=32),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config), lambda length: text(length, 16, pixel_values=image())


def mistral3():
    config = Mistral3Config(
        text_config=TEXT | {"model_type": "mistral", "head_dim": 8},
        vision_config=VISION | {"model_type": "pixtral", "head_dim": 8},
        image_token_id=IMAGE,
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )
    sizes = torch.tensor([[32, 32]])
    return Mistral3ForConditionalGeneration(config), lambda length: text(
        length, 4, pixel_values=image(), image_sizes=sizes
    )


def gemma3():
    config = Gemma3Config(
        text_config=TEXT
        | {"head_dim": 8, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config=VISION | {"model_type": "siglip_vision_model", "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        boi_token_id=91,
        eoi_token_id=92,
    )

    def inputs(length):
        given = text(length, 4, pixel_values=image())
        return given | {"token_type_ids": (given["input_ids"] == IMAGE).long()}

    return Gemma3ForConditionalGeneration(config), inputs


def qwen2_vl():
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 8}
    return Qwen2VLForConditionalGeneration(_qwen(Qwen2VLConfig, vision)), qwen_inputs


def qwen2_5_vl():
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
    vision |= {"patch_size": 8, "window_size": 32, "fullatt_block_indexes": [1]}
    return Qwen2_5_VLForConditionalGeneration(_qwen(Qwen2_5_VLConfig, vision)), qwen_inputs


def _qwen(config, vision):
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    return config(
        text_config=TEXT | {"rope_parameters": rope},
        vision_config=vision | {"temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3},
        image_token_id=IMAGE,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )


def qwen_inputs(length):
    """One image of 4 by 4 patches, which are merged by two."""
    given = text(length, 4, pixel_values=torch.randn(16, 3 * 2 * 8 * 8))
    given |= {"image_grid_thw": torch.tensor([[1, 4, 4]])}
    return given | {"mm_token_type_ids": (given["input_ids"] == IMAGE).int()}


def mllama():
    text_config = TEXT | {
        "cross_attention_layers": [1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    vision = VISION | {
        "num_global_layers": 1,
        "attention_heads": 4,
        "max_num_tiles": 2,
        "vision_output_dim": 64,
    }
    vision |= {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]]}
    config = MllamaConfig(text_config=text_config, vision_config=vision, image_token_index=IMAGE)

    def inputs(length):
        return text(
            length,
            1,
            pixel_values=torch.randn(1, 1, 2, 3, 32, 32),
            aspect_ratio_ids=torch.ones(1, 1, dtype=torch.long),
            aspect_ratio_mask=torch.ones(1, 1, 2, dtype=torch.long),
            cross_attention_mask=torch.ones(1, length, 1, 2, dtype=torch.long),
        )

    return MllamaForConditionalGeneration(config), inputs


def idefics3():
    config = Idefics3Config(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=VISION,
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=0,
    )
    return Idefics3ForConditionalGeneration(config), lambda length: text(
        length, 4, pixel_values=torch.randn(1, 1, 3, 32, 32)
    )


FAMILIES = [llama, mistral3, gemma3, qwen2_vl, qwen2_5_vl, llava, mllama, idefics3]


def image():
    return torch.randn(1, 3, 32, 32)


def text(length, tokens=0, **images):
    """Token ids (1, length), of which some from the second on stand for the image, and a mask."""
    ids = torch.randint(3, 80, (1, length))
    ids[:, 1 : 1 + tokens] = IMAGE
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **images}
