"""The shipped mini models load in transformers, change nothing by speculation, and run the demo's
script.
"""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.eval.mini import config
from eval import block_efficiency
from eval.draft_quality import attribute_accuracy
from eval.lib.drafts.comparison import first_prompt
from eval.lib.drafts.forward import forward_logits
from jaxspec.data.images import to_rgb
from jaxspec.engine.captioners import LvlmCaptioner
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel
from jaxspec.loading.images import image_inputs
from jaxspec.loading.models import prompt_encoder
from jaxspec.loading.pairs import same_tower
from jaxspec_demo import ASSETS
from picturebook import caption, test_set
from tests.tiny.files import read_json, read_lines

BUCKETS = {
    "prompt_buckets": config.prompt_buckets,
    "image_buckets": config.image_buckets,
    "new_buckets": (48,),
}


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return LoadedModel.load(ASSETS / "mini" / "target", jnp.dtype("float32"))


@pytest.fixture(scope="module")
def draft() -> LoadedModel:
    return LoadedModel.load(ASSETS / "mini" / "draft", jnp.dtype("float32"))


@pytest.fixture(scope="module")
def captioner(target: LoadedModel) -> LoadedModel:
    return LoadedModel.load(
        ASSETS / "mini" / "captioner", jnp.dtype("float32"), share_tower_with=target
    )


@pytest.mark.full
@pytest.mark.parametrize("name", ["target", "draft"])
def test_transformers_loads_them_and_agrees(name: str, request: pytest.FixtureRequest) -> None:
    torch = pytest.importorskip(
        "torch", reason="torch is the oracle of parity: install the `parity` extra"
    )
    from transformers import LlavaForConditionalGeneration

    theirs, found = LlavaForConditionalGeneration.from_pretrained(
        ASSETS / "mini" / name, dtype=torch.float32, output_loading_info=True
    )
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    ours: LoadedModel = request.getfixturevalue(name)
    encoder = Engine(ours).encoder
    sample = test_set("describe", 1)[0]
    prompt = encoder.prompt(sample.turns[0][0], sample.images)
    tokens = np.repeat(
        prompt.tokens, np.where(prompt.tokens == encoder.image_token, ours.config.image_tokens, 1)
    )
    images = image_inputs(ours, [tuple(map(to_rgb, prompt.images))], 1)
    assert images is not None
    pixels = images["pixels"][0].transpose(0, 3, 1, 2)
    with torch.no_grad():
        expected = theirs(
            input_ids=torch.tensor(tokens[None]).long(), pixel_values=torch.tensor(pixels)
        ).logits
    np.testing.assert_allclose(
        forward_logits(ours, prompt, []), expected[0, -1].numpy(), atol=1e-4, rtol=1e-4
    )


@pytest.mark.full
def test_the_target_sees(target: LoadedModel) -> None:
    accuracy = attribute_accuracy(Engine(target, None, EngineConfig(batch_size=16)), per_kind=16)
    assert accuracy["sign"] > 0.9  # 24 words: chance is 4 %
    assert accuracy["colour"] > 0.7
    assert accuracy["all"] > 0.6


def test_all_three_look_through_one_tower(
    target: LoadedModel, draft: LoadedModel, captioner: LoadedModel
) -> None:
    assert same_tower(target, draft)
    towers = (jax.tree.leaves(model.params["vision_tower"]) for model in (captioner, target))
    assert all(ours is theirs for ours, theirs in zip(*towers, strict=True))


@pytest.mark.full
def test_captions_name_what_is_there(captioner: LoadedModel) -> None:
    """Captions name kind, colour, size and place of the things of a page, and its background,
    nearly always; words often not.
    """
    samples = test_set("brush", 10)
    pages = [to_rgb(image) for sample in samples for image in sample.images]
    scenes = [scene for sample in samples for scene in sample.scenes]
    captions = LvlmCaptioner(captioner, "mini").caption(pages)
    words = [
        (said.text.split(), caption(scene).split())
        for said, scene in zip(captions, scenes, strict=True)
    ]
    right = [ours == theirs for said, meant in words for ours, theirs in zip_longest(said, meant)]
    assert np.mean(right) > 0.9
    assert np.mean([said == meant for said, meant in words]) > 0.2


def test_the_demos_script_writes_its_records(
    target: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ("T", "MTCP*", "KV head")  # of one view, of all, and of the head
    words = (
        f"mini --out {tmp_path} --limit 1 --sets read --turns 1 --max-new-tokens 48 "
        "--batch-size 1 --rows"
    ).split()
    block_efficiency.main([*words, *rows])
    assert "MTCP*" in capsys.readouterr().out
    results = read_json(tmp_path / "results.json")
    assert {(r["dataset"], r["turn"], r["row"]) for r in results["rows"]} == {
        ("read", 1, row) for row in rows
    }
    for row in results["rows"]:
        assert row["token_identity_rate"] == 1
        assert row["tokens_per_pass"] == pytest.approx(
            1 + row["num_accepted_draft_tokens"] / row["num_spec_steps"], abs=0.5
        )
    records = read_lines(tmp_path / "records.jsonl")
    assert len(records) == len(results["rows"])
    table = (tmp_path / "table.md").read_text()
    assert table.startswith("# Tokens per pass of the target (block efficiency)")
    assert f"an answer, turn 1: read {records[0]['tokens']}." in table
    prompts = read_lines(tmp_path / "prompts.jsonl")
    forms = {(prompt["reader"], prompt["view"]): prompt for prompt in prompts}
    assert len(forms) == len(prompts) == 5  # of the target, and M, T, C and P of the draft
    whole, pooled, blind = (
        forms[form] for form in (("the target", "M"), ("the draft", "P"), ("the draft", "T"))
    )
    (image,) = (entry for entry in whole["ids"] if isinstance(entry, list))
    assert [image[0], image[1] // 4] in pooled["ids"]
    assert "image: " in forms["the draft", "C"]["text"]
    # The text is the prompt's: written out again, it has the ids.
    encoder = prompt_encoder(target)
    prompt = first_prompt(encoder, test_set("read", 1)[0])
    assert encoder.ids(whole["text"]) == prompt.tokens.tolist()
    flat = [entry for entry in whole["ids"] if entry != image]
    assert flat == [token for token in prompt.tokens.tolist() if token != encoder.image_token]
    assert image[0] not in blind["ids"]
