"""The exported mini draft as `assistant_model` of the exported mini target in transformers: the target's own tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is the oracle of parity: install the `parity` extra")

import transformers  # noqa: E402
from jaxspec.cli import main  # noqa: E402
from jaxspec.data.images import to_rgb  # noqa: E402
from jaxspec.decoding.engine import Engine, LoadedModel, Request  # noqa: E402
from jaxspec.files import ASSETS  # noqa: E402
from jaxspec.loading import image_inputs  # noqa: E402
from picturebook import test_set as samples_of  # noqa: E402
from transformers import AutoTokenizer, LlamaForCausalLM, LlavaForConditionalGeneration  # noqa: E402

NEW = 32
ANY_TEXT_DRAFT = int(transformers.__version__.split(".")[0]) >= 5
"""transformers 4 refuses a language model as the draft of an LVLM."""


def reload(path: Path, kind: Any) -> Any:
    model, report = kind.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
    assert not {key: value for key, value in report.items() if value}
    return model.eval()


def test_same_tokens(tmp_path: Path) -> None:
    """Counted too: the draft proposes, and the target's calls are fewer than its tokens.

    transformers 5 shows a LLaVA draft no image, so that its proposals are poorer there, never its output.
    """
    target, draft, text = (str(tmp_path / name) for name in ("target", "draft", "text"))
    main(["export", str(ASSETS / "mini" / "target"), target, "--dtype", "float32"])
    main(["export", str(ASSETS / "mini" / "draft"), draft, "--dtype", "float32", "--vocab-of", target])
    main(["export", str(ASSETS / "mini" / "draft"), text, "--dtype", "float32", "--vocab-of", target, "--text-only"])
    theirs = reload(tmp_path / "target", LlavaForConditionalGeneration)
    assistants = [reload(tmp_path / "draft", LlavaForConditionalGeneration)]
    if ANY_TEXT_DRAFT:
        assistants.append(reload(tmp_path / "text", LlamaForCausalLM))
    assert AutoTokenizer.from_pretrained(text).get_vocab() == AutoTokenizer.from_pretrained(target).get_vocab()

    ours = LoadedModel.load(target)
    engine = Engine(ours)
    sample = samples_of("describe", 1)[0]
    prompt = engine.encoder.prompt(sample.turns[0][0], sample.images)
    expected = list(engine.generate([Request(prompt, NEW)])[0].tokens)
    assert len(expected) > 8
    count = ours.config.image_tokens  # type: ignore[union-attr]
    tokens = [t for token in prompt.tokens for t in [token] * (count if token == engine.encoder.image_token else 1)]
    images = image_inputs(ours, [[to_rgb(page) for page in prompt.images]], len(prompt.images))
    assert images is not None
    ids = torch.tensor([tokens]).long()
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.tensor(images["pixels"][0].transpose(0, 3, 1, 2)),
    }
    calls = []
    theirs.register_forward_hook(lambda *_: calls.append(1))
    for assistant in [None, *assistants]:
        calls.clear()
        out = theirs.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant_model=assistant)
        assert out[0, len(tokens) :].tolist() == expected
        assert len(calls) == len(expected) if assistant is None else len(calls) < len(expected)
