"""config.json, the image processor's file and the chat templates of each family, with the entries
of their age.

A function a family: (words, decoder's entries) -> the files, by name. Widths, depths and CLIP's
images are small. The patches, the layers that features are taken from and the names of entries are
the originals'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

SIDE, SIGLIP_SIDE = 168, 384
"""Pixels along a tile of CLIP's and of SigLIP's: 12 patches, half of the original's, and 27 as in
the original.
"""
_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_CLIP_COLOURS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_STEPS = dict.fromkeys(("do_convert_rgb", "do_normalize", "do_rescale", "do_resize"), True)
_PINPOINTS = [
    [SIDE * rows, SIDE * columns] for rows, columns in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
]
_SIGLIP_PINPOINTS = [
    [SIGLIP_SIDE * rows, SIGLIP_SIDE * columns] for rows in range(1, 7) for columns in range(1, 7)
]

VICUNA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ part['text'] + ' ' }}{% endgeneration %}"
    "{% else %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""What LLaVA-1.5's and 1.6's say: all images first, roles in capitals."""
CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's template of text and images; `IMAGE` is replaced by the placeholder."""
ONEVISION = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} "
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\n' + part['text'] }}{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""What LLaVA-OneVision's says: parts only, all images first, each text on a line of its own."""
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system, said = messages[0]['content'] + '\n\n', messages[1:] %}"
    "{% else %}{% set system, said = '', messages %}{% endif %}{% for message in said %}"
    "{% if message['role'] == 'user' %}[INST] {{ system if loop.last }}{{ message['content'] }}[/INST]"
    "{% else %} {{ message['content'] | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Mistral's, whose system prompt moves to the last question."""

GEMMA3 = (
    "{{ bos_token }}{% set system, said = '', messages %}{% if messages[0]['role'] == 'system' %}"
    "{% set system, said = messages[0]['content'], messages[1:] %}"
    "{% if system is not string %}{% set system = system[0]['text'] %}{% endif %}"
    "{% set system = system + '\n\n' %}{% endif %}{% for message in said %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user and assistant') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{{ system if loop.first }}{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<start_of_image>"
    "{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""Gemma 3's: the system prompt opens the first question, and an image is one token."""
GEMMA4 = (
    "{{ bos_token }}{% set said = messages %}{% if messages[0]['role'] == 'system' %}"
    "{% set system, said = messages[0]['content'], messages[1:] %}"
    "{% if system is not string %}{% set system = system[0]['text'] %}{% endif %}"
    "{{ '<|turn>system\n' + ('<|think|>' if enable_thinking else '') + system | trim + '<turn|>\n' }}"
    "{% elif enable_thinking %}{{ '<|turn>system\n<|think|><turn|>\n' }}{% endif %}"
    "{% for message in said %}"
    "{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{% if message['content'] is string %}{{ (message['content'].split('<channel|>')[-1]"
    " if message['role'] == 'assistant' else message['content']) | trim }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '\n\n<|image|>\n\n' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<turn|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\n' }}"
    "{% if not enable_thinking %}{{ '<|channel>thought\n<channel|>' }}{% endif %}{% endif %}"
)
"""Gemma 4's, in short: an image has empty lines around it, earlier answers have no thoughts, and
no thoughts are an empty channel.
"""
GEMMA_SIDE, GEMMA_STOP = 224, "<end_of_turn>"
"""Pixels along a tile, a quarter of the original's; the token that closes a turn."""

Files = dict[str, dict[str, Any]]


def llama(words: Mapping[str, int], text: dict[str, Any]) -> Files:
    heads = {
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_scaling": None,
    }
    own = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": False,
    }
    return {"config.json": own | _SIZES | heads | {"vocab_size": len(words)} | text}


def mistral(words: Mapping[str, int], text: dict[str, Any]) -> Files:
    own = {
        **{
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "attention_dropout": 0.0,
        },
        **{"bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "num_key_value_heads": 1},
        **{
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
        },
        **{"tie_word_embeddings": False, "vocab_size": len(words)},
    }
    return {"config.json": own | _SIZES | text}


def qwen2(words: Mapping[str, int], text: dict[str, Any]) -> Files:
    return {"config.json": {"architectures": ["Qwen2ForCausalLM"]} | _qwen_text(words) | text}


def qwen3(words: Mapping[str, int], text: dict[str, Any]) -> Files:
    own = {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 24,
        "max_position_embeddings": 40960,
    }
    return {"config.json": {"architectures": ["Qwen3ForCausalLM"]} | _qwen_text(words) | own | text}


def _qwen_text(words: Mapping[str, int]) -> dict[str, Any]:
    return {
        **_SIZES,
        **{
            "model_type": "qwen2",
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "max_window_layers": 2,
        },
        **{
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
        },
        **{"bos_token_id": words["<|endoftext|>"], "eos_token_id": words["<|im_end|>"]},
        # More rows than words, as all Qwens have.
        "vocab_size": len(words) + 5,
    }


def opt(words: Mapping[str, int], text: dict[str, Any]) -> Files:
    own = {
        **{"architectures": ["OPTForCausalLM"], "model_type": "opt", "activation_function": "relu"},
        **{"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "max_position_embeddings": 2048, "do_layer_norm_before": True},
        **{"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "prefix": "</s>"},
        **{"_remove_final_layer_norm": False, "vocab_size": len(words) + 7},
    }
    return {"config.json": own | text}


def _clip(words: Mapping[str, int], text: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return LLaVA-1.5's and 1.6's config.json."""
    rows = len(words) + 62
    decoder = llama(
        words, {"_name_or_path": "lmsys/vicuna-7b-v1.5", "max_position_embeddings": 4096}
    )["config.json"]
    tower = {
        **{
            "model_type": "clip_vision_model",
            "image_size": SIDE,
            "patch_size": 14,
            "projection_dim": 8,
        },
        **_SIZES,
        "vocab_size": 32000,
    }
    return {
        **{"architectures": [f"{kind}ForConditionalGeneration"], "ignore_index": -100},
        **{"image_token_index": words["<image>"], "projector_hidden_act": "gelu"},
        "text_config": decoder | {"vocab_size": rows} | text,
        "vision_config": tower,
        **{
            "tie_word_embeddings": False,
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        },
        "vocab_size": rows,
    }


def llava(words: Mapping[str, int], text: dict[str, Any]) -> Files:
    config = _clip(words, text, "Llava") | {"model_type": "llava", "pad_token_id": words["<pad>"]}
    processor = _llava_processor("Llava")
    crop = {
        "crop_size": {"height": SIDE, "width": SIDE},
        "size": {"shortest_edge": SIDE},
        "do_center_crop": True,
    }
    images = {
        "image_processor_type": "CLIPImageProcessor",
        "resample": 3,
        "rescale_factor": 1 / 255,
    }
    images |= _CLIP_COLOURS | _STEPS | crop | {"processor_class": "LlavaProcessor"}
    return {"config.json": config, "preprocessor_config.json": images, **processor}


def llava_next(words: Mapping[str, int], text: dict[str, Any]) -> Files:
    config = _clip(words, text, "LlavaNext") | {
        "model_type": "llava_next",
        "image_grid_pinpoints": _PINPOINTS,
    }
    images = llava(words, {})["preprocessor_config.json"] | {
        **{"image_processor_type": "LlavaNextImageProcessor", "aspect_ratio_setting": "anyres"},
        **{"image_grid_pinpoints": _PINPOINTS, "processor_class": "LlavaNextProcessor"},
    }
    config["use_image_newline_parameter"] = True
    return {
        "config.json": config,
        "preprocessor_config.json": images,
        **_llava_processor("LlavaNext"),
    }


def _llava_processor(kind: str) -> Files:
    counts = {
        "num_additional_image_tokens": 1,
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
    }
    whole = {"image_token": "<image>", "processor_class": f"{kind}Processor"} | counts
    return {"processor_config.json": whole, "chat_template.json": {"chat_template": VICUNA}}


def llava_onevision(words: Mapping[str, int], text: dict[str, Any]) -> Files:
    tower = {
        **{
            "model_type": "siglip_vision_model",
            "image_size": SIGLIP_SIDE,
            "patch_size": 14,
            "vision_use_head": False,
        },
        **_SIZES,
        "num_hidden_layers": 1,
    }
    config = {
        **{
            "architectures": ["LlavaOnevisionForConditionalGeneration"],
            "model_type": "llava_onevision",
        },
        **{"image_grid_pinpoints": _SIGLIP_PINPOINTS, "image_token_index": words["<image>"]},
        **{"video_token_index": words["<video>"], "projector_hidden_act": "gelu"},
        "text_config": _qwen_text(words) | text,
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        **{"use_image_newline_parameter": True, "vision_aspect_ratio": "anyres_max_9"},
        "vision_config": tower,
        **{"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    }
    images = {
        **{
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "processor_class": "LlavaOnevisionProcessor",
        },
        **{
            "do_pad": True,
            "image_grid_pinpoints": _SIGLIP_PINPOINTS,
            "resample": 3,
            "rescale_factor": 1 / 255,
        },
        **{
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "size": {"height": SIGLIP_SIDE, "width": SIGLIP_SIDE},
        },
        **_STEPS,
    }
    processor = {
        **{
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": (SIGLIP_SIDE // 14) ** 2,
        },
        **{
            "image_token": "<image>",
            "video_token": "<video>",
            "vision_feature_select_strategy": "full",
        },
    }
    template = {"chat_template": ONEVISION}
    return {
        **{"config.json": config, "preprocessor_config.json": images},
        **{"processor_config.json": processor, "chat_template.json": template},
    }


def qwen2_5_vl(words: Mapping[str, int], text: dict[str, Any]) -> Files:
    vision = {
        **{
            "depth": 2,
            "hidden_act": "silu",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
        },
        **{
            "in_chans": 3,
            "out_hidden_size": 16,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
        },
        **{
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
    }
    names = ("vision_start", "vision_end", "vision", "image", "video")
    tokens = (
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
        "<|image_pad|>",
        "<|video_pad|>",
    )
    config = _qwen_text(words) | {
        **{"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"},
        **{f"{name}_token_id": words[token] for name, token in zip(names, tokens)},
        **{"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "vision_config": vision},
        "use_sliding_window": False,
    }
    images = {
        **{
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
        },
        **{"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2},
        **{"merge_size": 2, **_CLIP_COLOURS},
    }
    template = {
        "chat_template": CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    }
    return {
        "config.json": config | text,
        "preprocessor_config.json": images,
        "chat_template.json": template,
    }


def qwen3_vl(words: Mapping[str, int], text: dict[str, Any]) -> Files:
    vision = {
        **{
            "model_type": "qwen3_vl",
            "depth": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 16,
            "num_heads": 2,
        },
        **{"in_channels": 3, "intermediate_size": 24, "out_hidden_size": 16, "patch_size": 16},
        **{"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
        **{"spatial_merge_size": 2, "temporal_patch_size": 2},
    }
    rope = {"mrope_interleaved": True, "mrope_section": [4, 4, 4], "rope_type": "default"}
    own = {
        "model_type": "qwen3_vl_text",
        "attention_bias": False,
        "head_dim": 24,
        "rope_scaling": rope,
    }
    names = ("vision_start", "vision_end", "image", "video")
    tokens = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    config = {
        **{"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"},
        **{f"{name}_token_id": words[token] for name, token in zip(names, tokens)},
        **{"text_config": _qwen_text(words) | own | text, "vision_config": vision},
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
    }
    images = {
        **{
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
        },
        **{
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "patch_size": 16,
            "temporal_patch_size": 2,
        },
        **{"merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    }
    template = {
        "chat_template": CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    }
    return {
        "config.json": config,
        "preprocessor_config.json": images,
        "chat_template.json": template,
    }


def gemma3_text(words: Mapping[str, int], text: dict[str, Any]) -> Files:
    own = {
        **{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
        **{"attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": None},
        **{"bos_token_id": words["<bos>"], "eos_token_id": [words["<eos>"], words[GEMMA_STOP]]},
        **{"cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 12},
        **{"hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02},
        **{"max_position_embeddings": 32768, "num_key_value_heads": 1, "pad_token_id": 0},
        **{"query_pre_attn_scalar": 12, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000},
        **{"rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512},
        **{"sliding_window_pattern": 2, "use_cache": True},
        # The image token is behind the last row, and no prompt of text has it.
        "vocab_size": words["<image_soft_token>"],
    }
    return {"config.json": own | _SIZES | text}


def gemma3(words: Mapping[str, int], text: dict[str, Any]) -> Files:
    names = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"}
    decoder = {
        **{"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        **{"sliding_window": 1024, "sliding_window_pattern": 2, "head_dim": 12},
        **{"num_key_value_heads": 1, "query_pre_attn_scalar": 12},
        "vocab_size": words["<image_soft_token>"] + 64,
    }
    tower = {
        **{"image_size": GEMMA_SIDE, "model_type": "siglip_vision_model", "patch_size": 14},
        "vision_use_head": False,
    }
    config = {
        **{"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
        **{f"{name}_token_index": words[word] for name, word in names.items()},
        **{"eos_token_id": [words["<eos>"], words[GEMMA_STOP]], "initializer_range": 0.02},
        **{"mm_tokens_per_image": (GEMMA_SIDE // 14 // 4) ** 2},
        **{"text_config": _SIZES | decoder | text, "vision_config": _SIZES | tower},
    }
    images = {
        **{"image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor"},
        **dict.fromkeys(("do_convert_rgb", "do_pan_and_scan", "pan_and_scan_max_num_crops")),
        **dict.fromkeys(("pan_and_scan_min_crop_size", "pan_and_scan_min_ratio_to_activate")),
        **{"do_normalize": True, "do_rescale": True, "do_resize": True, "resample": 2},
        **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255},
        **{"image_seq_length": config["mm_tokens_per_image"]},
        "size": {"height": GEMMA_SIDE, "width": GEMMA_SIDE},
    }
    processor = {"image_seq_length": images["image_seq_length"]}
    return {
        **{"config.json": config, "preprocessor_config.json": images},
        "processor_config.json": processor | {"processor_class": "Gemma3Processor"},
        "chat_template.json": {"chat_template": GEMMA3},
    }


def gemma4_unified(words: Mapping[str, int], text: dict[str, Any]) -> Files:
    sizes = {"model_type": "gemma4_unified_vision", "mm_embed_dim": 16, "output_proj_dims": 16}
    sizes |= {"mm_posemb_size": 1120, "patch_size": 16, "pooling_kernel_size": 3}
    audio = {"model_type": "gemma4_unified_audio", "audio_embed_dim": 640}
    parts = {"vision_config": sizes, "audio_config": audio}
    return _gemma4(words, "Gemma4Unified", "gemma4_unified", parts, text)


def gemma4(words: Mapping[str, int], text: dict[str, Any]) -> Files:
    """Return the 31B's files, or E4B's and E2B's for a decoder with per-layer embeddings."""
    small = "hidden_size_per_layer_input" in text
    tower = {
        **{"model_type": "gemma4_vision", "attention_bias": False, "attention_dropout": 0.0},
        **{"default_output_length": 280, "head_dim": 8, "num_key_value_heads": 2},
        **{"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072},
        **{"patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10240},
        **{"rms_norm_eps": 1e-06, "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}},
        **{"standardize": not small, "use_clipped_linears": small},
    }
    audio = {"model_type": "gemma4_audio", "hidden_size": 1024, "output_proj_dims": 1536}
    parts = {"vision_config": _SIZES | tower, "audio_config": audio if small else None}
    return _gemma4(words, "Gemma4", "gemma4", parts, text)


def _gemma4(
    words: Mapping[str, int],
    kind: str,
    model_type: str,
    parts: dict[str, Any],
    text: dict[str, Any],
) -> Files:
    names = {"boi": "<|image>", "eoi": "<image|>", "image": "<|image|>"}
    rope = {
        "full_attention": {
            **{"partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    tokens = max(words.values()) // 8 * 8 + 8
    decoder = {
        **{"model_type": f"{model_type}_text", "attention_k_eq_v": True, "attention_bias": False},
        **{"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
        **{"enable_moe_block": False, "hidden_size_per_layer_input": 0},
        **{"final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh"},
        **{"max_position_embeddings": 262144, "head_dim": 8, "global_head_dim": 16},
        **{"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
        **{"num_key_value_heads": 2, "num_global_key_value_heads": 1},
        **{"rms_norm_eps": 1e-06, "rope_parameters": rope, "sliding_window": 1024},
        **{"tie_word_embeddings": True, "use_bidirectional_attention": "vision"},
        **{"use_double_wide_mlp": False, "vocab_size": tokens},
        "vocab_size_per_layer_input": tokens,
    }
    config = {
        **{"architectures": [f"{kind}ForConditionalGeneration"], "model_type": model_type},
        **{f"{name}_token_id": words[word] for name, word in names.items()},
        **{"eos_token_id": [words["<eos>"], words["<turn|>"]], "initializer_range": 0.02},
        **{"tie_word_embeddings": True, "text_config": _SIZES | decoder | text, **parts},
    }
    images = {
        **{"image_processor_type": f"{kind}ImageProcessor", "do_convert_rgb": True},
        **{"do_normalize": False, "do_rescale": True, "do_resize": True, "resample": 3},
        **{"image_mean": [0.0] * 3, "image_std": [1.0] * 3, "rescale_factor": 1 / 255},
        **{"max_soft_tokens": 280, "patch_size": 16, "pooling_kernel_size": 3},
        "image_seq_length": 280,
    }
    return {
        "config.json": config,
        "processor_config.json": {
            **{"image_processor": images, "image_seq_length": 280},
            "processor_class": f"{kind}Processor",
        },
    }


FAMILIES: dict[str, Callable[[Mapping[str, int], dict[str, Any]], Files]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "opt": opt,
    "llava": llava,
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "gemma3_text": gemma3_text,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "gemma4_unified": gemma4_unified,
}
CHATS = {
    **{"mistral": MISTRAL, "llama3": LLAMA3, "qwen": CHATML.replace("IMAGE", "")},
    **{"gemma": GEMMA3, "gemma4": GEMMA4},
}
"""Templates that lie in tokenizer_config.json; LLaVA's lie in chat_template.json alone."""
