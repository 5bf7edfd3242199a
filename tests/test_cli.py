"""`jaxspec generate` answers on tiny checkpoints, and refuses every kind of bad input."""

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

import numpy as np
import pytest
from PIL import Image

from jaxspec import Engine
from jaxspec.checkpoints.directories import written_once
from jaxspec.cli import main
from jaxspec.cli.shared import progress
from jaxspec.config import text_config
from jaxspec_demo import command as demo
from jaxspec_demo import models as shipped_models
from jaxspec_demo.race import draw
from tests import tiny
from tests.tiny import families
from tests.tiny.files import read_json

NEW = 12
Refusal = Callable[..., str]
ASKED = "generate --target {}/target --prompt Hi"
WEB = "https://a.org/b"
LONG = "a" * 300
"""A name that is too long for a file."""


@pytest.fixture(scope="module")
def world(pair: tuple[Path, Path]) -> Path:
    """Return a folder with `target`, `draft` and pictures of every kind."""
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


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(world: Path, said: Callable[..., str]) -> Run:
    """Return a function that gives the JSON that `generate` prints; its models are those of
    `world`.
    """

    def call(*args: object, draft: str | None = "draft", views: str | None = "M,T") -> Any:
        models = ["--target", world / "target", *(["--draft", world / draft] if draft else [])]
        shown = ["--views", views] if views and draft else []
        asked = ["--prompt", "Hi", "--max-new-tokens", NEW, "--json"]
        return json.loads(said("generate", *models, *shown, *asked, *args))

    return call


def pictures(world: Path, *names: str) -> list[str]:
    return [part for name in names for part in ("--image", str(world / f"{name}.png"))]


# Good runs


@pytest.mark.parametrize(
    "names",
    [(), ("rgb", "gray", "rgba", "palette", "wide", "tall", "dot")],
    ids=["no image", "images of all kinds"],
)
def test_the_draft_changes_nothing(names: tuple[str, ...], world: Path, run: Run) -> None:
    args = pictures(world, *names)
    spoken, plain = run(*args), run(*args, draft=None)
    assert spoken["tokens"] == plain["tokens"]
    assert spoken["text"] == plain["text"]
    assert len(plain["tokens"]) == NEW


def test_a_head_drafts_alone_or_with_a_model(world: Path, run: Run) -> None:
    pages = pictures(world, "rgb", "gray")
    plain = run(*pages, draft=None)["tokens"]
    for draft, args, views in [
        (None, [], ["head", "lookup"]),
        ("draft", ["--views", " t, LOOKUP"], ["T", "head", "lookup"]),
    ]:
        answer = run(*pages, "--draft", world / "head", *args, draft=draft, views=None)
        assert answer["tokens"] == plain
        assert answer["stats"]["views"] == views


def test_messages_are_a_prompt_in_another_form(
    world: Path, run: Run, said: Callable[..., str]
) -> None:
    """Messages give the tokens of the same prompt as options, with images of a file's folder and of
    --image, and a system prompt.
    """
    text = {"type": "text", "text": "Hi"}
    page, next_page = {"type": "image", "path": "rgb.png"}, {"type": "image"}
    system = {"role": "system", "content": "Be kind."}
    file = world / "messages.json"
    args = ["generate", "--target", world / "target", "--max-new-tokens", NEW, "--json"]
    both = pictures(world, "rgb", "gray")
    for messages, images, options in [
        ([{"role": "user", "content": [page, next_page, text]}], both[2:], []),
        ([system, {"role": "user", "content": "Hi"}], both, ["--system", "Be kind."]),
    ]:
        file.write_text(json.dumps({"model": "any", "messages": messages}))
        answer = json.loads(said(*args, "--messages", file, *images))["tokens"]
        assert answer == run(*both, *options, draft=None)["tokens"]


def test_json_has_the_names_of_the_records(run: Run) -> None:
    spoken = run("--weights", "1,3")
    assert spoken.keys() == {"text", "reasoning", "tokens", "finish_reason", "stop_string", "stats"}
    stats, plain = spoken["stats"], run(draft=None)["stats"]
    assert stats.keys() == plain.keys()
    assert (stats["drafter"], stats["views"], stats["weighting"], stats["gamma"]) == (
        "chain",
        ["M", "T"],
        "static",
        "auto",
    )
    assert stats["num_spec_steps"] == sum(stats["acceptance_histogram"])
    assert len(stats["acceptance_histogram"]) == 6
    assert stats["num_accepted_draft_tokens"] + stats["num_spec_steps"] >= NEW - 1
    assert (plain["drafter"], plain["views"], plain["gamma"]) == (None, None, 0)
    assert (plain["tokens_per_pass"], plain["num_spec_steps"]) == (1.0, NEW - 1)


def test_standard_output_is_the_text_alone(
    world: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    main(f"generate --target {world}/target --max-new-tokens {NEW} --prompt Hi".split())
    out, err = capsys.readouterr()
    assert out.rstrip("\n") == run(draft=None)["text"]
    begins = [line.split()[0] for line in err.splitlines()]
    assert begins == ["target:", "memory", "compiling", "done:"]


def test_a_terminal_is_shown_the_answer_while_it_is_written(
    world: Path, said: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    args = f"generate --target {world}/target --max-new-tokens {NEW} --prompt Hi".split()
    whole = said(*args)
    write = sys.stdout.write
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "write", lambda text: written.append(text) or write(text))
    assert said(*args) == whole
    assert len(list(filter(None, written))) > 2
    written.clear()
    assert said(*args, "--no-stream") == whole
    assert list(filter(None, written)) == [whole[:-1], "\n"]


def test_a_line_of_progress_is_cleared_before_a_line_that_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress("loading models")
    written_once(b"", "gguf", "model", Path.mkdir, "model.gguf")
    shown, stays = capsys.readouterr().err.rsplit("\r\033[K", 1)
    assert shown == "\r\033[Kloading models ..."
    assert stays.startswith("model.gguf: written to ")


@pytest.mark.parametrize(("model", "drafter"), [("eyes", "kv_head"), ("mini", "draft")])
def test_the_demo_tells_what_drafting_was_worth(
    model: str, drafter: str, world: Path, tmp_path: Path, said: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The demo tells what drafting was worth, here with tiny models in the place of the shipped
    ones, and with or without SmolLM2's wheel.
    """
    contest = demo.CONTESTS[model]._replace(target=str(world / "target"), runs=1)
    (tmp_path / contest.name).mkdir()
    for name, there in {"target": "target", "draft": "draft", "kv_head": "head"}.items():
        (tmp_path / contest.name / name).symlink_to(world / there)
    monkeypatch.setattr(demo, "ASSETS", tmp_path)
    monkeypatch.setattr(demo, "smollm2_file", lambda: tmp_path if model == "eyes" else None)
    monkeypatch.setattr(shipped_models, "find_spec", lambda name: None)
    monkeypatch.setitem(demo.CONTESTS, model, contest)
    out = said("demo", "--drafter", drafter, "--image", world / "rgb.png", "--prompt", "Hi")
    assert ("A larger toy: pip install -e '.[gguf]' && pip install" in out) == (model == "mini")
    assert "the target checks every guess" in out
    counts = re.search(r"(\d+) of the answer's (\d+) tokens were written by the draft", out)
    assert counts is not None
    assert int(counts[1]) < int(counts[2])
    assert re.search(r"answers +identical", out)


def test_the_race_tells_the_median_of_its_prompts(
    world: Path,
    tmp_path: Path,
    said: Callable[..., str],
    refusal: Refusal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "kv_head").symlink_to(world / "head")
    monkeypatch.setattr(demo, "ASSETS", tmp_path)
    contest = demo.Contest("smollm2", str(world / "target"), 2, ("Hi", "Ho", "Ha"), 1, page=False)
    monkeypatch.setitem(demo.CONTESTS, "smollm2", contest)
    race, picture = tmp_path / "race.json", tmp_path / "race.svg"
    told = said("demo", "--model", "smollm2", "--out", race, "--svg", picture)
    assert re.findall(r"^question  (.*)$", told, re.M) == ["Hi", "Ho", "Ha"]
    assert told.count("identical") == 3
    written = read_json(race)
    each = sorted(row["speedup"] for row in written["rows"])
    assert f"{each[1]:.2f} times as fast as plain decoding, in the median." in told
    assert all(row["identical"] and row["passes"][0] >= row["passes"][1] for row in written["rows"])
    assert picture.read_text() == draw(written)
    assert told.endswith(f"wrote {race}\nwrote {picture}\n")
    (tmp_path / "mine.json").write_text("{}")
    for option, mine in (("--out", tmp_path / "mine.json"), ("--out", tmp_path), ("--svg", race)):
        assert "is no demo's file" in refusal("demo", "--model", "smollm2", option, mine)
    both = "--out", tmp_path / "new", "--svg", tmp_path / "new"
    assert "is also --out's; give the name" in refusal("demo", "--model", "smollm2", *both)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("demo --model smollm2 --drafter draft", "--drafter: smollm2 has no shipped draft"),
        ("demo --model smollm2 --image {}/rgb.png", "--image: smollm2 is a text model"),
        ("collaborate --models {}/target --prompt Hi", "1 model; give at least 2"),
        (
            "collaborate --models {0}/draft,{0}/target --prompt Hi --max-new-tokens 1024",
            "--max-new-tokens: 1024, and model 1's context has",
        ),
        ("plan {}/target --images -1", "--images: -1; give 0 to 1048576"),
        ("plan {}/target --chips", "--chips: give one or more of v3"),
        ("plan --chips h100", "TARGET: missing; 'h100' is a chip"),
        ("plan {}/head", "a head, not a model; give it as a draft"),
        ("genrate --target {}/target", "command 'genrate': unknown; did you mean 'generate'?"),
        ("x", "unknown; use one of demo, generate, collaborate"),
        ("serv --help", "command 'serv': unknown; did you mean 'serve'?"),
        ("help colaborate", "command 'colaborate': unknown; did you mean 'collaborate'?"),
        ("--gamma", "command '--gamma': unknown; use one of demo"),
        ("generate", "--target: missing; see jaxspec generate --help"),
        ("generate --target x --prmpt Hi", "--prmpt: no such option; did you mean '--prompt'?"),
        (f"{ASKED} --zzz=1", "--zzz: no such option; see jaxspec generate --help"),
        (f"{ASKED} --image b b", "--image: takes one value, and 'b', 'b' are two; quote"),
        (f"{ASKED} you all?", "--prompt: takes one value, and 'Hi', 'you' are two; quote"),
        (f"{ASKED} --json yes", "--json: takes no value; leave out 'yes'"),
        (f"{ASKED} --json=yes", "--json: takes no value; leave out 'yes'"),
        (f"{ASKED} --draft", "--draft: the value is missing; give one"),
        (f"{ASKED} --gamma 2.5", "--gamma: '2.5'; give auto or a whole number"),
        (f"{ASKED} --width x", "--width: 'x'; give a whole number"),
        (f"{ASKED} --top-p x", "--top-p: 'x'; give a number"),
        (f"{ASKED} --gamma", "--gamma: the value is missing; give auto or a whole number"),
        (f"{ASKED} --dtype f32", "--dtype: 'f32'; did you mean 'float32'?"),
        (f"{ASKED} --image {WEB}.png", f"--image: '{WEB}.png': a web address"),
        (f"demo --image {WEB}.png", f"--image: '{WEB}.png': a web address"),
        (f"{ASKED} --adapter {WEB}", f"'{WEB}': a web address; fetch it"),
        (f"{ASKED} --adapter {LONG}", "no adapter_config.json; give the directory"),
        (f"import {LONG}.gguf x", "no such file; give one that ends in .gguf"),
        (f"demo --model smollm2 --drafter draft --out {LONG}", "--drafter: smollm2 has no"),
        ("plan {0}/target --draft {0}/draft --train 9999999999", "--train: 9999999999; give 0 to"),
        ("inspect", "path: missing; see jaxspec inspect --help"),
        ("inspect {}/targe", "no such directory; did you mean '{}/target'?"),
        ("inspect smolm2-135m", "no such directory; did you mean 'smollm2-135m'?"),
        ("inspect https://huggingface.co/org/llava/tree/main", "did you mean 'org/llava'?"),
        ("export a b c", "'c': nothing takes it; see jaxspec export --help"),
    ],
)
def test_refused_commands(command: str, words: str, world: Path, refusal: Refusal) -> None:
    assert words.format(world) in refusal(*command.format(world).split())


def test_a_mistyped_option_is_refused_before_jax_is_imported() -> None:
    code = (
        "import sys; from jaxspec.cli import main\n"
        "try: main(['generate', '--target', 'x', '--prmpt', 'Hi'])\n"
        "finally: print('jax' in sys.modules, 'tyro' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "False False\n")
    assert done.stderr == "jaxspec: error: --prmpt: no such option; did you mean '--prompt'?\n"


def test_the_home_directory_is_named_by_its_sign(
    world: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    monkeypatch.setenv("HOME", str(world))
    place = ["generate", "--target", "~/target", "--prompt", "Hi"]
    assert f"image {world}/empty.png: an empty file" in refusal(*place, "--image", "~/empty.png")
    assert f"adapter {world}/draft: no adapter_config.json" in refusal(
        *place, "--adapter", "~/draft"
    )


def test_options_without_effect_are_named(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = f"generate --target {world}/target --prompt Hi --max-new-tokens {NEW}".split()
    for temperature, line in (
        ("0", "--sample, --top-p, --seed: without effect at --temperature 0"),
        ("1", ""),
    ):
        options = ["--sample", "--top-p", "0.5", "--seed", "3", "--temperature", temperature]
        main([*place, *options])
        lines = capsys.readouterr().err.splitlines()
        assert "".join(word for word in lines if "without effect" in word).startswith(line)
        assert ("without effect" in "".join(lines)) == bool(line)


def test_a_first_answer_waits_for_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    """A first answer leaves torch, plots and training unread, and keeps programs in the user's
    cache directory, also where a process was killed while it wrote there.
    """
    assets = Path(demo.ASSETS)
    args = ["generate", "--target", assets / "mini/target", "--draft", assets / "mini/draft"]
    args += ["--image", assets / "page.png", "--prompt", "Hi", "--max-new-tokens", "8"]
    heavy = (
        *("torch", "torchvision", "matplotlib", "optax", "orbax", "grain", "tensorflow_datasets"),
        "jaxspec.training",
    )
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
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.endswith("\n[]\n"), done.stderr
    assert list(programs.glob("jit_run_decode-*"))


# Bad input


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--gamma 0", "--gamma: 0; give 1 or more, or give no draft"),
        ("--views M,C --draft {}/draft", "view C: there is no captioner"),
        ("--views M,T --draft {}/head", "M,T need a draft model; give one, or leave them out"),
        ("--draft {}/draft --draft {}/target", "2 models and 0 heads; give at most one of each"),
        ("--views lookup --draft {}/draft", "draft: no view shows the model a prompt; add M"),
        ("--weighting mt-paper --draft {}/draft", "--weighting: M drafts alone; add --draft or --"),
        ("--weights half", "'half' is not a list of numbers"),
        ("--weights 1,2 --draft {}/draft", "weights: 2 given for 1 views; give one a view"),
        ("--image {}/target", "target: a folder; give an image file"),
        ("--image {}/empty.png", "empty.png: an empty file; fetch it again"),
        ("--prompt <image><image> --image {}/rgb.png", "2 <image> placeholders but 1 images"),
        ("--prompt Hi --messages {}/x", "--prompt: --messages is given too; give --prompt"),
        ("--system Hi --no-chat-template", "--system: --no-chat-template has no roles"),
        ("--messages {}/empty.png", "empty.png (Expecting value: line 1 column 1 (char 0)); give"),
        ("--target {}/nothing", "nothing': no such directory"),
        ("--gamma 3", "--gamma: needs a draft; give --draft, or leave it out"),
        ("--draft-revision v2", "--draft-revision: needs --draft with a hub id"),
        ("--captioner jax:x --draft {}/draft", "no view of M shows captions"),
        (
            "--captioner jax:{}/nothing --views M,C --draft {}/draft",
            "nothing': no such directory",
        ),
        (
            "--captioner file:{}/nothing.jsonl --views M,C --draft {}/draft",
            "nothing.jsonl: no such file; check the path",
        ),
        ("--prompt caf\udce9", r"prompt 'caf\udce9': '\udce9' is half a character"),
        ("--system caf\udce9", r"--system 'caf\udce9': '\udce9' is half a character"),
        ("--bad-words caf\udce9", r"bad_words: ('caf\udce9',); give a list of texts"),
        ("--max-new-tokens 32769", "--max-new-tokens: 32769 is over the largest bucket 32768"),
        (
            f"--captioner file:{LONG} --views M,C --draft {{}}/draft",
            "no such file; check the path",
        ),
        ("--max-new-tokens 512", "--max-new-tokens: 512, and the target's context has 512 tokens"),
        ("--gamma 8 --width 4 --draft {}/draft", "width: 4, but a block has 9 tokens"),
        ("--tree 2 --width 8 --draft {}/draft", "width: 8 with a tree; leave out width or tree"),
    ],
)
def test_refused_before_a_model_is_read(
    args: str, words: str, world: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxspec.cli.speculation.LoadedModel", None)
    asked = "" if "--prompt" in args or "--messages" in args else "--prompt Hi"
    target = "" if "--target" in args else "--target {}/target"
    assert words in refusal(
        "generate", *f"{args} {asked} {target}".replace("{}", str(world)).split()
    )


@pytest.mark.parametrize(
    "family", ["llava", *tiny.rarer(*(f for f in families.FAMILIES if f != "llava"))]
)
def test_commands_take_prompts_without_images(
    family: str, tmp_path: Path, said: Callable[..., str]
) -> None:
    path = str(families.write(tmp_path, family) / "target")
    asked = ["--prompt", "What?", "--max-new-tokens", "2", "--json"]
    said("plan", path, "--images", "0")
    for words in (["generate", "--target", path], ["collaborate", "--models", f"{path},{path}"]):
        assert json.loads(said(*words, *asked))["tokens"]


def test_models_write_together(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"collaborate --models {world}/target,{world}/draft --combination weighted:0.4,0.6"
    words += f" --gammas 2,1 --default-proposer auto --prompt Hi --max-new-tokens {NEW} --json"
    main(words.split())
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert len(told["tokens"]) == NEW
    assert told["stats"]["default_proposer"] == 1
    assert told["stats"]["gammas"] == [1, 2]
    assert all(0 < calls <= 2 for calls in told["stats"]["calls_per_token"])
    assert [line.split()[0] for line in err.splitlines()] == ["memory", "compiling", "done:"]


@pytest.mark.parametrize("which", ["target", "draft"])
def test_a_model_of_fewer_rows_than_its_tokeniser_has_words(
    which: str, world: Path, tmp_path: Path, refusal: Refusal
) -> None:
    small = replace(tiny.CONFIG, text_config=replace(text_config(tiny.CONFIG), vocab_size=30))
    models = {"target": world / "target", "draft": world / "draft"}
    models[which] = tiny.save(tmp_path / which, small, tiny.random_params(small))
    line = refusal(
        "generate", "--target", models["target"], "--draft", models["draft"], "--prompt", "Hi"
    )
    assert "vocab_size 30" in line


def test_other_words_are_refused_before_weights_are_read(
    world: Path, tmp_path: Path, refusal: Refusal
) -> None:
    """A draft whose ids mean other words than the target's is refused before weights are read,
    which are missing here; so is a model that writes together with another one.
    """
    target, draft = (
        shutil.copytree(world / name, tmp_path / name, ignore=lambda *_: ["model.safetensors"])
        for name in ("target", "draft")
    )
    tiny.tokenizer(tiny.CHARACTERS[::-1]).save_pretrained(draft)
    words = "tokeniser: differs from"
    line = refusal("generate", "--target", target, "--draft", draft, "--prompt", "Hi")
    assert f"draft {words} the target's" in line
    assert f"draft {words} the target's" in tiny.one_line(Engine.from_pretrained, target, draft)
    asked = ["--prompt", "Hi", "--max-new-tokens", NEW]
    line = refusal("collaborate", "--models", f"{target},{draft}", *asked)
    assert f"model 2 {words} model 1's" in line


def test_a_text_target(
    world: Path,
    tmp_path: Path,
    said: Callable[..., str],
    refusal: Refusal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A text target answers with a text draft and the tokeniser's own chat template, and takes no
    image.
    """
    text = text_config(tiny.CONFIG)
    words, params = tiny.tokenizer(), tiny.random_params(text)
    words.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    target = tiny.save(tmp_path / "target", text, params, words)
    draft = tiny.save(tmp_path / "draft", text, tiny.noisy(params, 0.1), words)
    both = ("--target", target, "--prompt", "Hi, <image>", "--draft", draft)
    assert "views: M shows images and the target is a text model; use view T" in refusal(
        "generate", *both, "--views", "M"
    )
    seeing = ("--target", world / "target", *both[2:], "--views", "M")
    assert "use view T" in refusal("generate", *seeing)
    assert "1 <image> placeholders but 0 images" in refusal("generate", *seeing[:4])
    with monkeypatch.context() as patch:
        patch.setattr("jaxspec.cli.speculation.LoadedModel", None)  # before it is loaded
        assert "the target is a text model; give no image" in refusal(
            "generate", *both[:4], *pictures(world, "rgb")
        )
    short = ("--max-new-tokens", NEW, "--json")
    answers = [json.loads(said("generate", *given, *short)) for given in (both[:4], both)]
    (tmp_path / "form.jinja").write_text(words.chat_template)
    bare = tiny.save(tmp_path / "bare", text, params)
    form = ("--chat-template", str(tmp_path / "form.jinja"))
    assert "leaves it out; give one" in refusal(
        "generate", "--target", bare, *both[2:4], *form, "--no-chat-template"
    )
    for given in (form, (), ("--no-chat-template",)):
        told = said("generate", "--target", bare, *both[2:4], *given, *short)
        answers.append(json.loads(told))
    assert answers[0]["tokens"] == answers[1]["tokens"] == answers[2]["tokens"]
    assert all(answer["tokens"] != answers[0]["tokens"] for answer in answers[3:])
    stats = answers[1]["stats"]
    # Of 12 tokens the first is the prefill's, and each block writes one more than it accepts, or
    # cuts that one off.
    assert 0 <= stats["num_accepted_draft_tokens"] + stats["num_spec_steps"] - (NEW - 1) <= 1
