"""BLIP, BLIP-2 and Florence-2 from tiny random checkpoints in the real layout, against transformers called by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxspec.decoding.captioners import TransformersCaptioner, captioner_lack, load_captioner
from jaxspec.errors import InputError

torch = pytest.importorskip("torch", reason="these captioners run in torch")

WORDS = ("<s>", "<pad>", "</s>", "<unk>", "<image>", *(f"w{i}" for i in range(59)))
SIDE = 32


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip


def blip(path: Path) -> Path:
    from transformers import BlipConfig, BlipForConditionalGeneration, BlipImageProcessorPil, BlipProcessor

    ids = {"bos_token_id": 0, "sep_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BlipConfig(
        text_config=small | ids | {"vocab_size": len(WORDS), "encoder_hidden_size": 16, "projection_dim": 16},
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
        qformer_config=small | {"intermediate_size": 24, "encoder_hidden_size": 16, "vocab_size": len(WORDS)},
        text_config=OPTConfig(
            vocab_size=len(WORDS), hidden_size=16, word_embed_proj_dim=16, ffn_dim=24, num_hidden_layers=2,
            num_attention_heads=2, bos_token_id=0, eos_token_id=2, pad_token_id=1,
        ).to_dict(),
        num_query_tokens=3,
        image_token_index=4,
    )  # fmt: skip
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
        vocab_size=len(WORDS), d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=24, decoder_ffn_dim=24,
        encoder_attention_heads=2, decoder_attention_heads=2, bos_token_id=0, pad_token_id=1, eos_token_id=2,
        decoder_start_token_id=2, forced_eos_token_id=2, max_position_embeddings=128,
    )  # fmt: skip
    vision = {
        "depths": (1, 1), "patch_size": (7, 3), "patch_stride": (4, 2), "patch_padding": (3, 1),
        "patch_prenorm": (False, True), "embed_dim": (8, 16), "num_heads": (2, 2), "num_groups": (2, 2),
        "window_size": 4, "projection_dim": 16,
    }  # fmt: skip
    config = Florence2Config(text_config=text.to_dict(), vision_config=vision, image_token_id=4)
    pictures = CLIPImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_center_crop=False)
    pictures.image_seq_length = 17  # 4x4 places and their mean
    return save(path, Florence2ForConditionalGeneration(config), Florence2Processor(pictures, tokenizer()))


def save(path: Path, model: Any, processor: Any) -> Path:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():  # far from uniform, so that images get words of their own
            if weight.ndim > 1:
                weight.normal_(0, 0.4, generator=generator)
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return path


def pages() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, size, np.uint8)) for size in ((40, 50, 3), (32, 32, 3), (64, 20, 3))]


KINDS = {
    "blip": (blip, "blip", None),
    "blip-2": (blip2, "blip", None),
    "florence2": (florence2, "florence2", "<DETAILED_CAPTION>"),
}
NEW = 8


@pytest.mark.parametrize("name", KINDS)
def test_captions_are_those_of_transformers_alone(name: str, tmp_path: Path) -> None:
    import transformers

    make, kind, task = KINDS[name]
    path = make(tmp_path / name)
    captioner = TransformersCaptioner(kind, str(path), task, NEW)
    captions = captioner.caption(pages())
    assert captioner.identity != TransformersCaptioner(kind, str(path), task).identity
    assert len({caption.text for caption in captions}) > 1

    processor = transformers.AutoProcessor.from_pretrained(path, backend="pil")
    model = transformers.AutoModelForImageTextToText.from_pretrained(path)
    for image, caption in zip(pages(), captions, strict=True):
        asked = {"text": task} if task else {}
        inputs = processor(images=image, **asked, return_tensors="pt")
        ids = model.generate(**inputs, num_beams=3, do_sample=False, max_new_tokens=NEW)
        assert caption.text == processor.decode(ids[0], skip_special_tokens=True).strip()


def test_the_model_must_be_of_its_kind(tmp_path: Path) -> None:
    path = blip(tmp_path)
    with pytest.raises(InputError, match=r"is a 'blip', not a florence2; choose from jax:DIR"):
        load_captioner(f"florence2:{path}").caption(pages())


def test_florence2_in_its_legacy_form_is_refused(tmp_path: Path) -> None:
    path = florence2(tmp_path / "Florence-2-base")
    assert captioner_lack(f"florence2:{path}") is None
    told = json.loads((path / "config.json").read_text())
    told["auto_map"] = {"AutoConfig": "configuration_florence2.Florence2Config"}
    (path / "config.json").write_text(json.dumps(told))
    for source in (str(path), "microsoft/Florence-2-base"):
        lack = captioner_lack(f"florence2:{source}")
        assert lack is not None
        assert lack.endswith("runs code of its own; use florence2:florence-community/Florence-2-base")


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="captioner blip: transformers cannot read") as refusal:
        load_captioner(f"blip:{tmp_path}").caption(pages())
    assert "\n" not in str(refusal.value)


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as where it is not installed
    with pytest.raises(InputError, match="captioner florence2: runs in torch, which is not installed"):
        TransformersCaptioner("florence2", "somewhere")


def test_the_task_of_florence2() -> None:
    tasks = {"": "CAPTION", "DETAILED": "DETAILED_CAPTION", "MORE_DETAILED_CAPTION": "MORE_DETAILED_CAPTION"}
    for how, task in tasks.items():
        cached: Any = load_captioner(f"florence2:somewhere:{how}")
        assert cached.captioner.task == f"<{task}>"
