"""Several heads that learn by the same passes of their target learn what each does by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec.errors import InputError
from jaxspec.heads.loading import load_head
from jaxspec.loading.models import LoadedModel
from jaxspec.publishing.history import training_facts
from jaxspec.training.config import MeshConfig
from jaxspec.training.head_batches import Anchoring
from jaxspec.training.head_recipe import HeadRecipe, train_heads
from tests.tiny import training
from tests.tiny.training import train_head
from tests.training import child
from train import recipe as script
from train.setup import begin, own_output

HEADS = {
    "kv": {"image_slots": 1, "feature": "last_hidden", "gamma": 3},
    "eagle": {"feature": "fused", "target_layers": (0, 1, 1), "images": "embedding", "gamma": 2},
    "dflash": {"feature": "block", "layers": 1, "target_layers": (1,), "gamma": 2},
}


def recipes(target: Path) -> dict[str, HeadRecipe]:
    """Return recipes of three kinds of heads, whose gradients are clipped, and one of which takes
    fewer blocks.
    """
    train = replace(child.HEAD_STAGE, clip=0.1, mesh=MeshConfig(data=1))
    stage = replace(child.HEAD.stages[0], train=train)
    common = replace(child.HEAD, target=str(target), stages=(stage,))
    made = {name: replace(common, head=head) for name, head in HEADS.items()}
    return made | {"eagle": replace(made["eagle"], anchoring=Anchoring(2, "ce"))}


def test_heads_learn_together_what_each_learns_alone(taught: Path, tmp_path: Path) -> None:
    data, made = {"talk": taught / "talk"}, recipes(taught / "target")
    del made["dflash"]
    together = train_heads(made, tmp_path / "together", data)
    lines = training.metrics(tmp_path / "together" / "head")
    for name, recipe in made.items():
        config, params = train_head(recipe, tmp_path / name, data)
        assert together[name][0] == config
        jax.tree.map(
            lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=2e-5),
            together[name][1],
            params,
        )
        losses = [line[f"{name}/loss"] for line in lines]
        np.testing.assert_allclose(losses, training.losses(tmp_path / name / "head"), rtol=1e-4)


def test_recipes_that_differ_in_more_than_the_head_are_refused(tmp_path: Path) -> None:
    made = recipes(tmp_path)
    other = made | {"dflash": replace(made["dflash"], buckets=(64, 96))}
    with pytest.raises(InputError, match=r"kv and dflash: differ in buckets, .*\(64, 96\); train"):
        train_heads(other, tmp_path)
    with pytest.raises(InputError, match="mini_text: trains a draft model; give it alone"):
        script.parse_all(["kv_mini", "mini_text", "--kv-head.steps", "3"])
    parsed, options = script.parse_all(["coder_kv", "coder_dflash", "--tune.steps", "3"])
    assert [each.stages[0].train.steps for each in parsed.values()] == [3, 3]
    assert list(parsed) == ["coder_kv", "coder_dflash"]
    assert options.out is None


def test_what_does_not_fit_is_told_before_the_target_is_read_or_a_stage_is_trained(
    taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, data = recipes(taught / "target")["kv"], {"talk": taught / "talk"}
    train = replace(child.HEAD_STAGE, mesh=MeshConfig(data=1))
    first = replace(made.stages[0], train=train)
    for change, message in (
        ({"rates": (("nowhere", 0.5),)}, "rates: 'nowhere' matches no parameter"),
        ({"mesh": MeshConfig(data=3)}, "mesh: 4 samples at a time do not divide over 3 data"),
    ):
        later = replace(first, name="later", train=replace(train, **change))
        with pytest.raises(InputError, match=message):
            train_heads({"kv": replace(made, stages=(first, later))}, tmp_path / "runs", data)
    assert not (tmp_path / "runs").exists()
    monkeypatch.setattr(LoadedModel, "load", lambda *_, **__: pytest.fail("read the target"))
    wrong = replace(made, head={"feature": "fused", "parallel": True})
    with pytest.raises(InputError, match="parallel is an option of KV heads; leave it out"):
        train_heads({"it": wrong}, tmp_path, data)


@pytest.mark.full
def test_the_command_writes_each_head_with_a_card_of_its_own(taught: Path, tmp_path: Path) -> None:
    names = []
    for name, recipe in recipes(taught / "target").items():
        names.append(str(tmp_path / f"{name}.py"))
        head = dict(recipe.head)
        Path(names[-1]).write_text(
            "from dataclasses import replace\n"
            "from tests.training.child import HEAD, HEAD_STAGE\n"
            "from jaxspec.training.config import MeshConfig\n"
            "train = replace(HEAD_STAGE, mesh=MeshConfig(data=1))\n"
            f"config = replace(HEAD, target={recipe.target!r}, head={head!r},\n"
            "    stages=(replace(HEAD.stages[0], name='learn', train=train),))\n"
        )
    runs = tmp_path / "runs"
    words = ["--data", f"talk={taught / 'talk'}", "--runs", str(runs)]
    for _ in range(2):  # the second finds all finished
        assert script.main([*names, *words]) == runs / "hf"
    for name in HEADS:
        config, _ = load_head(runs / "hf" / name)
        assert config.gamma == HEADS[name]["gamma"]
        assert "tokens per pass" in training_facts(runs / "hf" / name)["learn"]


def test_a_run_goes_on_to_the_heads_that_are_not_written(tmp_path: Path) -> None:
    """A run that was killed between two heads, or while it wrote one, goes on to the heads that are
    not written.
    """
    runs, out = tmp_path / "runs", tmp_path / "runs" / "hf"
    fresh = out / ".kv.1.tmp"
    fresh.mkdir(parents=True)
    (fresh / "config.json").write_text('{"architectures": ["KVHead"]}')
    (fresh / "model.safetensors").write_bytes(b"weights")
    own_output(out / "kv", runs)(fresh)
    fresh.rename(out / "kv")
    (out / ".eagle.lock").touch()
    (out / ".eagle.2.tmp").mkdir()
    assert begin(runs, None, "", False, ("kv", "eagle")) == (runs, out)
    with pytest.raises(InputError, match="hf/kv: holds another run's model; give another path"):
        begin(tmp_path / "other", out, "", False, ("kv", "eagle"))


def test_a_head_whose_name_would_freeze_it_is_refused(tmp_path: Path) -> None:
    made = recipes(tmp_path)
    with pytest.raises(InputError, match="target_kv: begins with 'target', whose parameters stay"):
        train_heads({"eagle": made["eagle"], "target_kv": made["kv"]}, tmp_path)


def test_the_command_refuses_recipes_whose_stages_differ(tmp_path: Path) -> None:
    """The command refuses recipes whose stages differ, since heads that learn together would all
    learn by the first one's.
    """
    for name, steps in (("one", 2), ("two", 3)):
        (tmp_path / f"{name}.py").write_text(
            "from dataclasses import replace\n"
            "from tests.training.child import HEAD, HEAD_STAGE\n"
            f"stage = replace(HEAD.stages[0], train=replace(HEAD_STAGE, steps={steps}))\n"
            "config = replace(HEAD, stages=(replace(stage, name='learn'),))\n"
        )
    names = [str(tmp_path / "one.py"), str(tmp_path / "two.py")]
    with pytest.raises(InputError, match="one and two: differ in stages"):
        script.main([*names, "--runs", str(tmp_path / "runs")])


def test_two_recipes_of_one_name_are_refused() -> None:
    """Two recipes of one name are refused, since their heads would be written to one folder."""
    with pytest.raises(InputError, match="kv_mini: given twice"):
        script.parse_all(["kv_mini", "other/kv_mini.py"])
