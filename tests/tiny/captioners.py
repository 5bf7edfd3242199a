"""Write tiny random captioners: BLIP, BLIP-2 and Florence-2, as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = ("<s>", "<pad>", "</s>", "<unk>", "<image>", *(f"w{i}" for i in range(59)))
SIDE = 32


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
    )


def blip(path: Path) -> Path:
    from transformers import (
        BlipConfig,
        BlipForConditionalGeneration,
        BlipImageProcessorPil,
        BlipProcessor,
    )

    ids = {"bos_token_id": 0, "sep_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
    small = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = BlipConfig(
        text_config=small
        | ids
        | {"vocab_size": len(WORDS), "encoder_hidden_size": 16, "projection_dim": 16},
        vision_config=small | {"image_size": SIDE, "patch_size": 16},
        projection_dim=16,
    )
    sizes = {"height": SIDE, "width": SIDE}
    processor = BlipProcessor(BlipImageProcessorPil(size=sizes), tokenizer())
    return save(path, BlipForConditionalGeneration(config), processor)


def blip2(path: Path) -> Path:
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        BlipImageProcessorPil,
        OPTConfig,
    )

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Blip2Config(
        vision_config=small | {"intermediate_size": 24, "image_size": SIDE, "patch_size": 16},
        qformer_config=small
        | {"intermediate_size": 24, "encoder_hidden_size": 16, "vocab_size": len(WORDS)},
        text_config=OPTConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            word_embed_proj_dim=16,
            ffn_dim=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            bos_token_id=0,
            eos_token_id=2,
            pad_token_id=1,
        ).to_dict(),
        num_query_tokens=3,
        image_token_index=4,
    )
    sizes = {"height": SIDE, "width": SIDE}
    processor = Blip2Processor(BlipImageProcessorPil(size=sizes), tokenizer(), num_query_tokens=3)
    return save(path, Blip2ForConditionalGeneration(config), processor)


def florence2(path: Path) -> Path:
    from transformers import (
        BartConfig,
        CLIPImageProcessorPil,
        Florence2Config,
        Florence2ForConditionalGeneration,
        Florence2Processor,
    )

    text = BartConfig(
        vocab_size=len(WORDS),
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
        max_position_embeddings=128,
    )
    vision = {
        **{"depths": (1, 1), "patch_size": (7, 3), "patch_stride": (4, 2), "patch_padding": (3, 1)},
        **{"patch_prenorm": (False, True), "embed_dim": (8, 16), "num_heads": (2, 2)},
        **{"num_groups": (2, 2), "window_size": 4, "projection_dim": 16},
    }
    config = Florence2Config(text_config=text.to_dict(), vision_config=vision, image_token_id=4)
    pictures = CLIPImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_center_crop=False)
    pictures.image_seq_length = 17  # 4x4 places and their mean
    return save(
        path, Florence2ForConditionalGeneration(config), Florence2Processor(pictures, tokenizer())
    )


def save(path: Path, model: Any, processor: Any) -> Path:
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():  # far from uniform, so that images get words of their own
            if weight.ndim > 1:
                weight.normal_(0, 0.4, generator=generator)
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return path
