"""`jaxspec generate`: good runs on tiny checkpoints, and every kind of bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from jaxspec import __version__
from jaxspec.cli import demo, main
from jaxspec.cli.race import draw
from jaxspec.config import text_config
from PIL import Image
from tqdm import tqdm

from tests import tiny

STATS = {
    *("tokens_per_pass", "draft_acceptance_rate"),
    *("acceptance_rate_per_position", "conditional_acceptance_rate_per_position", "acceptance_histogram"),
    *("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"),
    *("caption_ms", "compile_ms", "prefill_ms", "decode_tokens_per_second"),
    *("drafter", "views", "weighting", "gamma", "tree", "tree_width", "tree_nodes"),
    *("temperature", "dtype", "target_weights", "device", "batch", "seed"),
}
NEW = 12
Refusal = Callable[..., str]


@pytest.fixture(autouse=True)
def _slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No progress bar waits before it appears, as where loading takes seconds."""
    begin = tqdm.__init__

    def at_once(bar: tqdm, *args: Any, **kwargs: Any) -> None:
        begin(bar, *args, **kwargs | {"delay": 0})

    monkeypatch.setattr(tqdm, "__init__", at_once)


@pytest.fixture(scope="module")
def world(pair: tuple[Path, Path]) -> Path:
    """A folder with `target`, `draft` and pictures of every kind."""
    path = pair[0].parent
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    rgb = Image.fromarray(pixels)
    pictures = {
        "rgb": rgb,
        "gray": rgb.convert("L"),
        "rgba": rgb.convert("RGBA"),
        "palette": rgb.convert("P"),
        "wide": rgb.resize((30, 1)),
        "tall": rgb.resize((1, 30)),
        "dot": rgb.resize((1, 1)),
    }
    for name, picture in pictures.items():
        picture.save(path / f"{name}.png")
    (path / "empty.png").touch()
    return path


def run(
    capsys: pytest.CaptureFixture[str],
    world: Path,
    *args: str | Path,
    draft: str | None = "draft",
    views: str | None = "M,T",
) -> dict[str, Any]:
    """The JSON that the command prints; its models are those of `world`."""
    models = ["--target", world / "target", *(["--draft", world / draft] if draft else [])]
    shown = ["--views", views] if views and draft else []
    main(["generate", *map(str, [*models, *shown, "--prompt", "Hi", "--max-new-tokens", NEW, "--json", *args])])
    return json.loads(capsys.readouterr().out)


def pictures(world: Path, *names: str) -> list[str]:
    return [part for name in names for part in ("--image", str(world / f"{name}.png"))]


# Good runs


@pytest.mark.parametrize(
    "names",
    [(), ("rgb", "gray", "rgba", "palette", "wide", "tall", "dot")],
    ids=["no image", "images of all kinds"],
)
def test_the_draft_changes_nothing(names: tuple[str, ...], world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = pictures(world, *names)
    spoken, plain = run(capsys, world, *args), run(capsys, world, *args, draft=None)
    assert spoken["tokens"] == plain["tokens"]
    assert spoken["text"] == plain["text"]
    assert len(plain["tokens"]) == NEW


def test_a_kv_head_is_a_draft_or_one_more_view(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages = pictures(world, "rgb", "gray")
    plain = run(capsys, world, *pages, draft=None)["tokens"]
    for draft, args, views in [(None, [], ["kv"]), ("draft", ["--views", " t, KV"], ["T", "kv"])]:
        answer = run(capsys, world, *pages, "--kv-head", world / "head", *args, draft=draft, views=None)
        assert answer["tokens"] == plain
        assert answer["stats"]["views"] == views


def test_placeholders_say_where_images_stand(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = pictures(world, "rgb", "gray")
    front = run(capsys, world, *images)["tokens"]
    assert run(capsys, world, "--prompt", "<image>\n<image>\nHi", *images)["tokens"] == front
    assert run(capsys, world, "--prompt", "<image> or <image>?", *images)["tokens"] != front
    assert run(capsys, world, *pictures(world, "gray", "rgb"))["tokens"] != front


def test_json_has_the_names_of_the_records(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoken = run(capsys, world, "--weights", "1,3")
    assert spoken.keys() == {"text", "tokens", "stats"}
    stats = spoken["stats"]
    assert stats.keys() == STATS
    assert stats["views"] == ["M", "T"]
    assert (stats["drafter"], stats["weighting"], stats["gamma"], stats["batch"]) == ("chain", "static", 5, 1)
    assert stats["num_spec_steps"] == sum(stats["acceptance_histogram"])
    assert len(stats["acceptance_histogram"]) == 6
    assert stats["num_accepted_draft_tokens"] + stats["num_spec_steps"] >= NEW - 1
    stats = run(capsys, world, draft=None)["stats"]
    assert stats.keys() == STATS
    assert (stats["drafter"], stats["views"], stats["gamma"]) == (None, None, 0)
    assert stats["tokens_per_pass"] == 1.0
    assert stats["num_spec_steps"] == NEW - 1


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"jaxspec {__version__}\n"


def test_blocks_are_no_longer_than_answers(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = ["--target", str(world / "target"), "--draft", str(world / "draft"), "--views", "T"]
    main(["generate", *both, "--prompt", "Hi", "--gamma", "5000", "--max-new-tokens", "6", "--json"])
    told = capsys.readouterr()
    assert "--gamma: 5000 is over the 6 new tokens; drafting 6 a block\n" in told.err
    assert json.loads(told.out)["stats"]["gamma"] == 6


def test_captions_for_the_draft(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    file = tmp_path / "captions.jsonl"
    file.write_text(json.dumps({"image": str(world / "rgb.png"), "caption": "a page of noise"}) + "\n")
    args = ["--views", "C", "--captioner", f"file:{file}"]
    spoken, plain = (run(capsys, world, *pictures(world, "rgb"), *more) for more in (args, []))
    assert spoken["tokens"] == plain["tokens"]
    assert spoken["stats"]["views"] == ["C"]
    models = ["--target", world / "target", "--draft", world / "draft", "--prompt", "Hi"]
    assert "none for the 1x1 image" in refusal("generate", *models, *args, *pictures(world, "dot"))
    assert "'x' is unknown; give jax:DIR" in refusal("generate", *models, *args[:3], "x")


def test_standard_output_is_the_text_alone(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--target", str(world / "target"), "--max-new-tokens", str(NEW), "--prompt", "Hi"]
    main(["generate", *args])
    out, err = capsys.readouterr()
    assert out.rstrip("\n") == run(capsys, world, draft=None)["text"]
    assert [line.split()[0] for line in err.splitlines()] == ["target:", "memory", "compiling", "done:"]


def test_a_terminal_is_shown_the_answer_while_it_is_written(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    args = ["generate", "--target", str(world / "target"), "--max-new-tokens", str(NEW), "--prompt", "Hi"]
    main(args)
    whole = capsys.readouterr().out
    write = sys.stdout.write
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "write", lambda text: written.append(text) or write(text))
    main(args)
    assert capsys.readouterr().out == whole
    assert len(list(filter(None, written))) > 2
    written.clear()
    main([*args, "--no-stream"])
    assert capsys.readouterr().out == whole
    assert list(filter(None, written)) == [whole[:-1], "\n"]


@pytest.mark.parametrize("drafter", ["kv_head", "draft"])
def test_the_demo_tells_what_drafting_was_worth(
    drafter: str, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tiny models in the place of the mini ones."""
    (tmp_path / "mini").mkdir()
    for name, there in {"target": "target", "draft": "draft", "kv_head": "head"}.items():
        (tmp_path / "mini" / name).symlink_to(world / there)
    monkeypatch.setattr(demo, "ASSETS", tmp_path)
    contest = demo.CONTESTS["mini"]._replace(target=str(world / "target"), runs=1)
    monkeypatch.setitem(demo.CONTESTS, "mini", contest)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    main(["demo", "--drafter", drafter, "--image", str(world / "rgb.png"), "--prompt", "Hi"])
    out = capsys.readouterr().out
    assert out.count("\x1b[38;2;") > 100  # the page
    told = re.sub(r"\x1b\[[\d;]*m", "", out)
    assert told.startswith(f"page      {world / 'rgb.png'}\nquestion  Hi\n\n▀▀")
    counts = re.search(r"Drafted, and kept by the target: (\d+) of (\d+) tokens", told)
    assert counts is not None
    assert int(counts[1]) < int(counts[2])
    assert out.count("\x1b[1;32m") == int(counts[1]) + 1
    assert re.search(r"answers +identical", told)


def test_the_race_tells_the_median_of_its_prompts(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "kv_head").symlink_to(world / "head")
    monkeypatch.setattr(demo, "ASSETS", tmp_path)
    contest = demo.Contest(str(world / "target"), 2, ("Hi", "Ho", "Ha"), 1)
    monkeypatch.setitem(demo.CONTESTS, "smollm2", contest)
    race, picture = tmp_path / "race.json", tmp_path / "race.svg"
    main(["demo", "--model", "smollm2", "--out", str(race), "--svg", str(picture)])
    told = capsys.readouterr().out
    assert re.findall(r"^question  (.*)$", told, re.M) == ["Hi", "Ho", "Ha"]
    assert told.count("identical") == 3
    each = sorted(float(gain) for gain in re.findall(r"([\d.]+) times as fast$", told, re.M))
    assert f"{each[1]:.2f} times as fast as plain decoding, in the median." in told
    written = json.loads(race.read_text())
    assert sorted(round(row["speedup"], 2) for row in written["rows"]) == each
    assert all(row["identical"] and row["passes"][0] >= row["passes"][1] for row in written["rows"])
    assert all(len(row["tokens"]) == 1 + row["passes"][0] for row in written["rows"])
    assert picture.read_text() == draw(written)
    (tmp_path / "mine.json").write_text("{}")
    for option, mine in (("--out", tmp_path / "mine.json"), ("--out", tmp_path), ("--svg", race)):
        with pytest.raises(SystemExit):
            main(["demo", "--model", "smollm2", option, str(mine)])
        assert "is no demo's file" in capsys.readouterr().err


def test_the_picture_of_a_race_has_its_tokens_and_passes() -> None:
    """Plain decoding: 1 pass a token after the first. Drafting: [' b<' ' c\n\n' own], [own], [' f', cut by the answer's
    end]."""
    tokens = [["A", -1], [" b<", 0], [" c\n\n", 1], ["  d", -1], ["e", -1], [" f", 0]]
    row = {"prompt": "Q?", "tokens": tokens, "passes": [5, 3], "decode_ms": [50.0, 60.0], "speedup": 5 / 6}
    race = {"model": "tiny", "device": "cpu", "load": "load 0.0", "rows": [row | {"identical": True}]}
    svg = ElementTree.fromstring(draw(race))
    name = "{http://www.w3.org/2000/svg}"
    assert {element.tag.removeprefix(name) for element in svg.iter()} == {"svg", "title", "style", "rect", "text", "g"}
    groups = svg.findall(f"{name}g")
    begin = [float(re.search(r"([\d.]+)%{opacity:1", group[0].text or "")[1]) for group in groups]  # type: ignore[index]
    # The slower lane takes 60 ms, which are two thirds of the picture.
    assert begin == [*np.round(np.arange(6) * 10 / 60 * 200 / 3, 2), *np.round(np.arange(4) * 20 / 60 * 200 / 3, 2)]
    told = [[(t.text, t.get("class")) for t in group.findall(f"{name}text")] for group in groups]
    assert told[:2] == [[("A", None)], [("b<", None)]]
    assert told[6:] == [
        [("A", None)],
        [("b<", "drafted"), ("c", "drafted"), ("d", None)],
        [("e", None)],
        [("f", "drafted"), ("3 passes, 1.67 tokens a pass, 0.06 s", "note end")],
    ]
    assert [len(group.findall(f"{name}rect")) for group in groups] == [0, 1, 1, 1, 1, 1, 0, 1, 1, 1]
    (b, d) = (next(t for t in svg.iter(f"{name}text") if t.text == text) for text in ("b<", "d"))
    assert float(d.get("x", 0)) == float(b.get("x", 0))  # both in column 2
    assert int(d.get("y", 0)) > int(b.get("y", 0))
    race["rows"] = [row | {"tokens": [[" word", -1]] * 500, "identical": True}]
    assert 30 < len(ElementTree.fromstring(draw(race)).findall(f"{name}g")) < 100, "longer answers are cut"


@pytest.mark.parametrize(
    ("command", "args", "words"),
    [
        ("demo", ["--model", "smollm2", "--drafter", "draft"], "--drafter: smollm2 has no shipped draft"),
        ("demo", ["--model", "smollm2", "--image", "{}/rgb.png"], "--image: smollm2 is a text model"),
        ("genrate", ["--target", "{}/target"], "command 'genrate': unknown; did you mean 'generate'?"),
        ("x", [], "unknown; use one of demo, generate, collaborate, export, import, inspect, plan"),
    ],
)
def test_refused_commands(command: str, args: list[str], words: str, world: Path, refusal: Refusal) -> None:
    assert words in refusal(command, *(part.format(world) for part in args))


def test_a_first_answer_waits_for_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    """Torch, plots and training stay unread, and programs are kept in the user's cache directory: also where a process
    was killed while it wrote there."""
    assets = Path(demo.ASSETS)
    args = ["generate", "--target", assets / "mini" / "target", "--draft", assets / "mini" / "draft"]
    args += ["--image", assets / "page.png", "--prompt", "Hi", "--max-new-tokens", "8"]
    heavy = ("torch", "torchvision", "matplotlib", "optax", "orbax", "grain", "tensorflow_datasets", "jaxspec.training")
    code = f"""
import runpy, sys
sys.argv = ["jaxspec", *{[str(arg) for arg in args]}]
runpy.run_module("jaxspec", run_name="__main__")
print([name for name in {heavy} if sys.modules.get(name)])
"""
    programs = tmp_path / "jaxspec" / "programs"
    programs.mkdir(parents=True)
    (programs / "half-cache").touch()
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("\n[]\n"), done.stderr
    assert list(programs.glob("jit_run_decode-*"))


# Bad input


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--gamma", "0"], "--gamma: 0; give 1 or more, or give no draft"),
        (["--tree", "2:4"], "no room for a path of 5"),
        (["--temperature", "-0.5"], "temperature: -0.5"),
        (["--top-p", "0"], "top_p: 0"),
        (["--views", "M,Q"], "views: 'Q' is unknown"),
        (["--views", "M,C", "--draft", "{}/draft"], "view C: there is no captioner"),
        (["--views", "t, T"], "each once"),
        (["--views", "M,T", "--draft", "{}/head"], "head is a KV head; give it as --kv-head"),
        (["--views", "M,T", "--kv-head", "{}/head"], "--kv-head: no view of M,T reads it; add kv to --views"),
        (["--views", "M,kv", "--draft", "{}/draft"], "view kv needs a KV head; give --kv-head"),
        (["--views", "kv,M", "--draft", "{}/draft"], "'kv,M'; name kv behind all others"),
        (["--views", "lookup,kv", "--kv-head", "{}/head"], "'lookup,kv'; name kv behind all others, lookup last"),
        (["--views", "M,lookup"], "M,lookup: M needs a draft; give --draft"),
        (["--views", "lookup", "--draft", "{}/draft"], "--draft: no view of lookup reads it"),
        (["--weighting", "mt-paper", "--draft", "{}/draft"], "--weighting: M is one view; name more in --views"),
        (["--views", "M,T", "--weights=-1,2"], "-1.0,2.0"),
        (["--weights", "half"], "'half' is not a list of numbers"),
        (["--image", "{}/missing.png"], "missing.png: no such file"),
        (["--image", "{}/target"], "target: a folder; give an image file"),
        (["--image", "{}/empty.png"], "empty.png: not readable"),
        (["--image", "{}/rgb.png", "--image", "{}/dot.png", "--prompt", "<image>?"], "placeholders but 2"),
        (["--prompt", "<image>?"], "1 <image> placeholders but 0 images"),
        (["--target", "{}/nothing"], "nothing': no such directory"),
        (["--gamma", "3"], "--gamma: needs a draft; give --draft or --kv-head, or leave it out"),
        (["--draft-revision", "v2"], "--draft-revision: needs --draft with a hub id"),
        (["--captioner", "jax:x", "--draft", "{}/draft"], "no view of M shows captions"),
        (["--captioner", "jax:x", "--draft", "{}/draft", "--kv-head", "{}/head"], "no view of M,kv shows captions"),
        (["--prompt", "caf\udce9"], r"prompt 'caf\udce9': '\udce9' is half a character"),
    ],
    ids=lambda value: "-".join(value).strip("-").replace("{}/", "") if isinstance(value, list) else "",
)
def test_refused_before_a_model_is_read(
    args: list[str], words: str, world: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxspec.cli.generate.LoadedModel", None)
    args = [part.format(world) for part in args]
    if "--prompt" not in args:
        args += ["--prompt", "Hi"]
    if "--target" not in args:
        args += ["--target", str(world / "target")]
    assert words in refusal("generate", *args)


def test_models_write_together(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = ["--models", f"{world / 'target'},{world / 'draft'}", "--combination", "weighted:0.6,0.4"]
    main(["collaborate", *both, "--gammas", "1,2", "--prompt", "Hi", "--max-new-tokens", str(NEW), "--json"])
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert len(told["tokens"]) == NEW
    assert told["stats"]["gammas"] == [1, 2]
    assert all(0 < calls <= 2 for calls in told["stats"]["calls_per_token"])
    assert [line.split()[0] for line in err.splitlines()] == ["memory", "compiling", "done:"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--models", "{}/target"], "1 model; give at least 2"),
        (["--models", "{0}/target,{0}/nothing"], "nothing': no such directory"),
        (["--models", "{0}/target,{0}/draft", "--combination", "weighted:0.6,0.5"], "sum to 1.1"),
        (["--models", "{0}/target,{0}/draft", "--gammas", "1,2,3"], "1,2,3 are 3 for 2 models"),
    ],
)
def test_refused_collaborations(
    args: list[str], words: str, world: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxspec.cli.collaborate.LoadedModel", None)
    assert words in refusal("collaborate", *(part.format(world) for part in args), "--prompt", "Hi")


def without_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def without_image_processor(model: Path) -> None:
    for name in ("preprocessor_config.json", "processor_config.json"):
        (model / name).unlink()


def small_vocabulary(model: Path) -> None:
    config = replace(tiny.CONFIG, text_config=replace(text_config(tiny.CONFIG), vocab_size=30))
    tiny.save(model, config, tiny.random_params(config))


@pytest.mark.parametrize("which", ["target", "draft"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without_tokenizer, "no tokenizer"),
        (without_image_processor, "no image processor"),
        (small_vocabulary, "vocab_size 30"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damaged_checkpoint(
    which: str, damage: Callable[[Path], None], words: str, world: Path, tmp_path: Path, refusal: Refusal
) -> None:
    models = {"target": world / "target", "draft": world / "draft"}
    models[which] = shutil.copytree(models[which], tmp_path / which)
    damage(models[which])
    before = sorted(path.name for path in tmp_path.rglob("*"))
    line = refusal("generate", "--target", models["target"], "--draft", models["draft"], "--prompt", "Hi")
    assert words in line
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_text_draft_cannot_read_images(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    text = text_config(tiny.CONFIG)
    draft = tiny.save(tmp_path / "text", text, tiny.random_params(text))
    models = ["--target", world / "target", "--draft", draft, "--prompt", "Hi"]
    assert "use view T" in refusal("generate", *models)
    spoken = run(capsys, world, "--draft", draft, "--views", "T", *pictures(world, "rgb"), draft=None)
    plain = run(capsys, world, *pictures(world, "rgb"), draft=None)
    assert spoken["tokens"] == plain["tokens"]


def test_a_text_target(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    """Without images, with a text draft, and with the tokeniser's own chat template."""
    text = text_config(tiny.CONFIG)
    words, params = tiny.tokenizer(), tiny.random_params(text)
    words.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    target = tiny.save(tmp_path / "target", text, params, words)
    draft = tiny.save(tmp_path / "draft", text, tiny.noisy(params, 0.1), words)
    both = ("--target", target, "--prompt", "Hi", "--draft", draft)
    assert "views: M shows images and the target is a text model; use view T" in refusal("generate", *both)
    assert "the target is a text model; give none" in refusal("generate", *both[:4], *pictures(world, "rgb"))
    answers = []
    for arguments in (both[:4], (*both, "--views", "T")):
        main(["generate", *map(str, arguments), "--max-new-tokens", str(NEW), "--json"])
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0]["tokens"] == answers[1]["tokens"]
    stats = answers[1]["stats"]
    # Of 12 tokens the first is the prefill's, and each block writes one more than it accepts, or cuts that one off.
    assert 0 <= stats["num_accepted_draft_tokens"] + stats["num_spec_steps"] - (NEW - 1) <= 1
