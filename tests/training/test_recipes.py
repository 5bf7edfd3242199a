"""A recipe says what a draft starts as; its stages run and resume, and presets fit their models."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.checkpoints import huggingface
from jaxspec.command import load_preset, preset_names
from jaxspec.data.prepared import prepare
from jaxspec.errors import InputError
from jaxspec.loading.models import LoadedModel
from jaxspec.models.families import abstract_params
from jaxspec.publishing.export import export
from jaxspec.training.config import MeshConfig, TrainConfig
from jaxspec.training.draft_recipe import Recipe, start_draft, train_draft
from jaxspec.training.loop.dry import dry_run
from jaxspec.training.loop.step import make_optimizer, partition
from jaxspec.training.loop.trainer import fit
from jaxspec.training.objectives import Distillation
from jaxspec.training.recipes import Stage, StagedRecipe, with_data
from picturebook.training import Picturebook
from tests import tiny
from tests.tiny import Talk, families
from tests.tiny.hub_server import running_hub
from tests.tiny.training import metrics as log
from train import recipe as script

SMALL = replace(
    tiny.CONFIG.text_config,
    vocab_size=101,
    hidden_size=16,
    num_attention_heads=2,
    num_key_value_heads=2,
)
TRAIN = TrainConfig(
    steps=1, batch=4, learning_rate=0.1, warmup=1, log_every=1, mesh=MeshConfig(data=1)
)
ALIGN = replace(TRAIN, warmup=0, final_rate=1.0, frozen=("vision_tower", "language_model"))
FIRST = Stage("align", ALIGN, (("talk", 1.0),), plain=True)
SECOND = Stage(
    "tune", replace(TRAIN, frozen=("vision_tower",)), (("talk", 3.0), ("picturebook:facts", 1.0))
)


def recipe(taught: Path, **fields: Any) -> Recipe:
    target = str(taught / "target")
    made = Recipe(
        target=target, start=SMALL, stages=(FIRST, SECOND), buckets=(128,), tile_buckets=(2,)
    )
    return replace(made, **fields)


@pytest.fixture
def data(taught: Path) -> dict[str, Any]:
    return {"picturebook:facts": Picturebook(kinds=("facts",)), "talk": taught / "talk"}


@pytest.mark.parametrize(("count", "samples"), [(40, 128), (1, 4)])
def test_a_dry_run_says_what_stages_take_and_writes_nothing(
    count: int,
    samples: int,
    taught: Path,
    data: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stage = replace(SECOND, train=replace(SECOND.train, steps=count))
    made = recipe(taught, stages=(stage,))
    train_draft(made, tmp_path / "run", data, dry_run)
    first, memory, steps = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        rf"tune: {count} steps of 4 samples; of {samples} samples [\d.]+% teach, and "
        r"[\d.]+% of the slots are filled \([\d.]+% with packing\)",
        first,
    )
    assert re.search(r"each of 1 cpu devices: .* frozen, .* trained, .* optimizer, ", memory)
    assert re.search(r"all steps about [\d.]+ hours$", steps)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_takes_the_arguments_of_a_run_and_no_others() -> None:
    assert signature(dry_run) == signature(fit)


def test_a_recipe_is_found_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from configs.train.recipes.mini_text import config")
    assert load_preset(script.KIND, str(file)) == load_preset(script.KIND, "mini_text")
    file.write_text("from nowhere import config")
    with pytest.raises(InputError, match=r"mine.py': \(No module named 'nowhere'\)|mend the file"):
        load_preset(script.KIND, str(file))
    file.write_text("")
    with pytest.raises(InputError, match="has no `config`"):
        load_preset(script.KIND, str(file))
    with pytest.raises(InputError, match=r"no such file; give a path that ends in \.py"):
        load_preset(script.KIND, str(tmp_path / "other.py"))


def test_stages_train_what_they_should(taught: Path, data: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(taught / "target", tmp_path / "target")
    first = replace(FIRST, train=replace(ALIGN, evaluate_every=1))
    made = recipe(taught, target=str(tmp_path / "target"), stages=(first, SECOND), held_out="talk")
    start = start_draft(made, LoadedModel.load(made.target))
    draft = train_draft(made, tmp_path, data)
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), start.params, draft.params)
    assert not any(jax.tree.leaves(changed["vision_tower"]))
    assert all(jax.tree.leaves(changed["multi_modal_projector"]))
    assert any(jax.tree.leaves(changed["language_model"]))
    assert log(tmp_path / "align")[-1]["simulated_tokens_per_pass"] >= 1
    finished = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = train_draft(replace(made, stages=(first,)), tmp_path, data)  # finds it finished
    assert again.config == draft.config
    assert finished.keys() == {*tmp_path.rglob("*")}
    for stage in ("align", "tune"):
        shutil.copytree(tmp_path / stage, tmp_path / "longer" / stage)
    longer = replace(first, train=replace(first.train, steps=2))
    with pytest.raises(InputError, match=r"tune: holds a run with before.align 1, but now it is 2"):
        train_draft(replace(made, stages=(longer, SECOND)), tmp_path / "longer", data)
    assert [line["step"] for line in log(tmp_path / "longer/align") if "loss" in line] == [1, 2]
    with pytest.raises(InputError, match="view 'M', but now it is 'P1'"):
        train_draft(replace(made, view="P1"), tmp_path, data)
    heavier = replace(made, stages=(replace(first, data=(("talk", 2.0),)),))
    with pytest.raises(InputError, match=r"data .*'talk', 1.0, 20.*, but now it is .*'talk', 2.0,"):
        train_draft(heavier, tmp_path, data)
    prepare("talk", tmp_path, [Talk()[i + 1] for i in range(20)])
    with pytest.raises(
        InputError, match=r"data .*'talk', 1.0, 20, 'fing.*, but now it is .*'talk', 1.0, 20, 'fing"
    ):
        train_draft(made, tmp_path, data | {"talk": tmp_path / "talk"})
    shutil.rmtree(tmp_path / "target")
    tiny.save(
        tmp_path / "target",
        tiny.CONFIG,
        jax.tree.map(lambda leaf: -leaf, tiny.random_params(tiny.CONFIG)),
    )
    (tmp_path / "align/train_config.json").unlink()
    with pytest.raises(
        InputError,
        match=rf"target '{tmp_path}/target, fing.*, but now it is '{tmp_path}/target, fing",
    ):
        train_draft(made, tmp_path, data)


def test_a_draft_that_sees_has_positions_for_its_longest_rows(taught: Path) -> None:
    target = LoadedModel.load(taught / "target")
    small = replace(SMALL, max_position_embeddings=100)
    for buckets, positions in ((64,), 100), ((64, 128), 128):
        draft = start_draft(recipe(taught, start=small, buckets=buckets), target)
        assert draft.model.text.max_position_embeddings == positions


@pytest.mark.full
def test_a_text_draft_learns_from_a_teacher(
    taught: Path, data: dict[str, Any], tmp_path: Path
) -> None:
    stages = (replace(SECOND, train=replace(TRAIN, accumulate=2)),)
    made = recipe(
        taught, view="T", stages=stages, distillation=Distillation("tvd", top_k=4, share=0.5)
    )
    draft = train_draft(made, tmp_path, data)
    assert draft.config == SMALL
    assert set(draft.params) == {"model", "lm_head"}
    entry = log(tmp_path / "tune")[-1]
    assert entry["divergence"] < 1
    assert 0 < entry["acceptance"] < 1


@pytest.mark.parametrize("view", ["M", "T", "T-slots"])
def test_a_start_of_another_tokeniser_is_refused(
    taught: Path, data: dict[str, Any], tmp_path: Path, view: str
) -> None:
    """A start of another tokeniser is refused before anything is trained, also where the draft gets
    the target's tower and tokeniser.
    """
    words = tiny.tokenizer(tiny.CHARACTERS[::-1])
    start = str(tiny.save(tmp_path / "start", SMALL, tiny.random_params(SMALL), words))
    made = recipe(taught, start=start, view=view)
    line = f"start {start}: tokeniser: differs from the target's: .*; use one made for it"
    with pytest.raises(InputError, match=line):
        train_draft(made, tmp_path / "runs", data)
    assert not (tmp_path / "runs").exists()


def test_a_process_without_a_cpu_backend_is_told_so(
    taught: Path, data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(backend: str) -> None:
        raise RuntimeError(f"Unknown backend: {backend!r}")

    monkeypatch.setattr(jax, "local_devices", absent)
    with pytest.raises(InputError, match="JAX has no CPU backend; add cpu to JAX_PLATFORMS"):
        train_draft(recipe(taught), tmp_path, data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frozen": ("nowhere",)}, "frozen: 'nowhere' matches no parameter"),
        ({"rates": (("nowhere", 0.5),)}, "rates: 'nowhere' matches no parameter"),
        ({"mesh": MeshConfig(data=3)}, "mesh: 4 samples at a time do not divide over 3 data"),
    ],
)
def test_what_does_not_fit_in_a_later_stage_is_told_before_the_first(
    change: dict[str, Any], message: str, taught: Path, data: dict[str, Any], tmp_path: Path
) -> None:
    later = replace(SECOND, train=replace(TRAIN, **change))
    with pytest.raises(InputError, match=message):
        train_draft(recipe(taught, stages=(FIRST, later)), tmp_path, data)
    assert not list(tmp_path.iterdir())


def test_the_data_of_a_stage_have_weights() -> None:
    for weight in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError, match=f"stage tune: weight of b: {weight}; give a number"):
            replace(SECOND, data=(("a", 1.0), ("b", weight)))
    with pytest.raises(InputError, match="stage tune: no data; name a data set"):
        replace(SECOND, data=())


def test_more_tokens_than_are_scored_are_not_compared(taught: Path, tmp_path: Path) -> None:
    """A distillation that compares more tokens than are scored is refused, and so is a negative
    draft vocabulary.
    """
    stages = (replace(SECOND, data=(("talk", 1.0),)),)
    made = recipe(taught, view="T", stages=stages, distillation=Distillation("tvd", top_k=9))
    few, data = replace(made, draft_vocabulary=8), {"talk": taught / "talk"}
    with pytest.raises(InputError, match="distillation: top_k 9 of 8 scored tokens; give fewer"):
        train_draft(few, tmp_path, data)
    with pytest.raises(InputError, match="draft_vocabulary: -5; give a number from 0"):
        replace(made, draft_vocabulary=-5)


@pytest.mark.full
def test_a_qwen_vl_draft_learns_a_draft_vocabulary(tmp_path: Path) -> None:
    start = str(families.write(tmp_path, "qwen2_5_vl") / "target")
    stage = Stage("tune", TRAIN, (("talk", 1.0),))
    made = Recipe(
        target=start,
        start=start,
        stages=(stage,),
        buckets=(128,),
        tile_buckets=(8,),
        draft_vocabulary=9,
    )
    draft = train_draft(made, tmp_path, {"talk": Talk()})
    assert draft.params["lm_head"]["weight"].shape == (9, 16)
    huggingface.save(tmp_path / "out", draft.config, draft.params)
    found = huggingface.load(tmp_path / "out")
    assert found.config == draft.config
    whole = export(tmp_path / "out", tmp_path / "whole")
    assert whole.text_config.draft_vocabulary == ()  # pyright: ignore
    # pyright: ignore
    assert huggingface.load(tmp_path / "whole").params["lm_head"]["weight"].shape == (
        whole.text_config.vocab_size,
        16,
    )


def test_the_command_writes_a_draft_that_loads(
    taught: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command writes a draft that loads, and pushes it, with a card that says that it is a
    draft.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    terms = ["--licence", "apache-2.0", "--base-model", "someone/llama"]
    words = ["mini_text", "--target", str(taught / "target"), "--data", str(taught / "talk")]
    words += ["--runs", str(tmp_path)]
    words += ["--tune.steps", "1", "--tune.batch", "4", "--tune.mesh.data", "1"]
    with running_hub() as hub:
        out = script.main([*words, "--push", "us/draft", *terms])
    wrote, pushed = capsys.readouterr().out.splitlines()
    assert (wrote, pushed.split(" (")[0]) == (f"wrote {out}", f"pushed to {hub.url}/us/draft")
    card = hub.repos["us/draft"].commits[-1].files["README.md"].decode()
    assert "speculative-decoding" in card
    assert "--target path/to/target --draft path/to/this --views T" in card
    draft = LoadedModel.load(out)
    assert draft.tokenizer.get_vocab() == LoadedModel.load(taught / "target").tokenizer.get_vocab()
    assert [entry["step"] for entry in log(tmp_path / "tune")] == [1]


@pytest.mark.full
def test_a_trial_leaves_no_checkpoints_and_goes_on_from_none(
    taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared" / "run.debug" / "2").mkdir(parents=True)  # a killed trial's
    (tmp_path / "shared" / "run").mkdir()
    words = ["mini_text", "--target", str(taught / "target"), "--data", str(taught / "talk")]
    out = script.main([*words, "--debug", "--tune.checkpoints", "shared/run/"])
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["run"]
    assert [entry["step"] for entry in log(out.parent / "tune")] == [2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["llava15_68m"], "blip_laion_cc_sbu_558k: not in .*docs/data.md"),
        (["mini_text", "--data", "nowhere"], "nowhere: no prepared data"),
        (
            ["mini_text", "--tune.seed", "-1"],
            "^seed: -1; give a whole number from 0 to 4294967295$",
        ),
        (
            ["kv_mini", "--kv-head.evaluate-every", "5"],
            "^--kv.head.evaluate-every 5: no answers to evaluate on; give --held-out SET$",
        ),
        (
            ["mini_text", "--tune.evaluate-every", "5"],
            "^--tune.evaluate-every 5: no answers to evaluate on; give --held-out SET$",
        ),
        (["kv_mini", "--no-head.slot-bias"], "such option; did you mean '--head.no-slot-bias'"),
        (["llava15_68m", "--data", "llava_v1_5_mix=x"], "no stage reads it; did you mean 'llava_v"),
    ],
)
def test_errors_of_the_command(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("jaxspec.training.recipes.PREPARED", tmp_path)
    with pytest.raises(InputError, match=message):
        script.main(words)


@pytest.mark.parametrize(
    ("name", "stage"), [("kv_mini", "head"), ("kv_mini", "anchoring"), ("mini_text", "data")]
)
def test_a_stage_has_no_name_of_other_options(name: str, stage: str) -> None:
    made = load_preset("train.recipes", name)
    made = replace(made, stages=(replace(made.stages[0], name=stage),))
    with pytest.raises(InputError, match=f"{name}: stage '{stage}' has the name of other options"):
        script.parse(name, made, [])


def test_the_command_line_chooses_what_it_names() -> None:
    """The command line chooses the options that it names, also with the recipe's value. A start
    decides the other options of a head.
    """
    made = load_preset("train.recipes", "gemma4_assistant")
    start = ["--start", "nowhere"]
    words = ["--head.layers", "2", "--head.width=1024", "--head.no-own-keys"]
    parsed, _ = script.parse("gemma4_assistant", made, [*start, *words])
    assert parsed.head["layers"] == 2
    assert {*parsed.chosen} == {"layers", "width", "own_keys"}
    assert script.parse("gemma4_assistant", made, start)[0].chosen == ()


def test_data_that_is_named() -> None:
    tested = replace(FIRST, train=replace(ALIGN, evaluate_every=1))
    made = StagedRecipe(target="", stages=(tested, SECOND), buckets=(8,), held_out="x")
    read, places = with_data(made, ("talk=/a", "x=/b"))
    assert read == made
    assert places == {"talk": Path("/a"), "x": Path("/b")}
    read, places = with_data(made, ("/c", "/d"))
    assert [stage.data for stage in read.stages] == [(("/c", 1.0), ("/d", 1.0))] * 2
    assert places == {"/c": Path("/c"), "/d": Path("/d")}
    for buckets in ((), (-8, 8)):
        with pytest.raises(InputError, match=r"buckets: .*; give one whole number or more"):
            replace(made, buckets=buckets)
    with pytest.raises(InputError, match="--data tlk: no stage reads it; did you mean 'talk'"):
        with_data(made, ("tlk=/nowhere",))


DRAFTS = [
    name
    for name in preset_names("train.recipes")
    if isinstance(load_preset("train.recipes", name), Recipe)
]


@pytest.mark.parametrize("name", DRAFTS)
def test_presets_fit_the_models_that_they_train(name: str) -> None:
    """Presets fit the models that they train: every pattern of a stage matches a parameter, and
    leaves something to train.
    """
    made: Recipe = load_preset("train.recipes", name)
    paths = abstract_params(tiny.CONFIG if made.view != "T" else tiny.CONFIG.text_config)
    for stage in made.stages:
        trainable, held = partition(paths, stage.train.frozen)
        make_optimizer(stage.train, trainable)
        assert trainable
        assert bool(held) == bool(stage.train.frozen)
