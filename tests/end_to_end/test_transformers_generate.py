"""`jaxspec generate` on photographs against transformers' own `generate`, at LLaVA-1.5's real image settings.

The checkpoint is made by transformers: 336-pixel images in patches of 14, so 576 image tokens, and random weights.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is the oracle of parity: install the `parity` extra")

from jaxspec.cli import main  # noqa: E402
from PIL import Image  # noqa: E402
from transformers import (  # noqa: E402
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from tests.tiny import SPECIAL, tokenizer  # noqa: E402

NEW_TOKENS = 32
QUESTION = "What is unusual about this picture?"


def make(seed: int, width: int, base: LlavaForConditionalGeneration | None = None) -> LlavaForConditionalGeneration:
    words = tokenizer()
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            text_config=LlamaConfig(
                vocab_size=len(words),
                hidden_size=width,
                intermediate_size=2 * width,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=4096,
            ),
            vision_config=CLIPVisionConfig(
                hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
                image_size=336, patch_size=14, projection_dim=16,
            ),
            image_token_index=SPECIAL.index("<image>"),
            image_seq_length=576,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:  # far from uniform, or all answers would be one token
                parameter.mul_(14.0 if "language_model" in name or "lm_head" in name else 4.0)
        if base is not None:
            for mine, theirs in zip(model.parameters(), base.parameters(), strict=True):
                mine.copy_(theirs * (1 + 0.05 * torch.randn(theirs.shape)))
    return model.eval()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The target and a draft that agrees with it in part, as transformers saves them."""
    words = tokenizer()
    processor = CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})
    target = make(0, 64)
    paths = []
    for name, model in (("target", target), ("draft", make(1, 64, base=target))):
        path = tmp_path_factory.mktemp(name)
        for part in (model, words, processor):
            part.save_pretrained(path)
        paths.append(str(path))
    return target, words, processor, paths


def reference(target, words, processor, files):
    images = [Image.open(file).convert("RGB") for file in files]
    text = "USER: " + "<image>\n" * len(images) + f"{QUESTION} ASSISTANT:"
    ids = [words.bos_token_id]
    for token in words.encode(text, add_special_tokens=False):
        ids += [token] * (576 if token == SPECIAL.index("<image>") else 1)
    pixels = torch.tensor(np.asarray(processor(images=images, return_tensors="np")["pixel_values"]))
    with torch.no_grad():
        out = target.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            pixel_values=pixels,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("names", [("waterview.jpg", "extreme_ironing.jpg")])
def test_same_tokens_as_transformers(pair, names, shared_data, capsys):
    target, words, processor, (target_path, draft_path) = pair
    files = [str(shared_data / "photos" / name) for name in names]
    expected = reference(target, words, processor, files)
    assert len(set(expected)) > 4, "a constant answer proves little"
    arguments = ["generate", "--target", target_path, "--prompt", QUESTION, "--json", "--dtype", "float32"]
    arguments += ["--max-new-tokens", str(NEW_TOKENS)]
    for file in files:
        arguments += ["--image", file]
    for more in ([], ["--draft", draft_path, "--views", "M,T", "--weights", "0.7,0.3"]):
        main([*arguments, *more])
        answer = json.loads(capsys.readouterr().out)
        assert answer["tokens"] == expected
    assert answer["stats"]["num_accepted_draft_tokens"] > 0
