"""Evaluation scripts read their command line alike, and refuse wrong values in one line."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest

from configs.eval.mini import config as MINI
from eval import (
    accelerator,
    compiled,
    draft_quality,
    exactness,
    kv_head,
    latency,
    mmspec,
    peers,
    plans,
    serving,
)
from eval.lib.collaborative.config import CollaborativeEvalConfig
from eval.lib.drafts.command_line import parse_command
from eval.lib.drafts.loading import load_models
from eval.lib.recorded.config import RecordedConfig
from jaxspec.command import load_preset, preset_names
from jaxspec.engine.requests import Request
from jaxspec.errors import InputError
from jaxspec.training.config import TrainConfig
from jaxspec.training.regenerate import Regeneration
from train import prepare, steps


@dataclass(frozen=True)
class Options:
    out: Path = Path("runs")


def parse(line: str):
    return parse_command(Options, "Measures.", line.split())


def test_a_preset_as_it_is() -> None:
    assert parse("mini") == ("mini", MINI, Options())


def test_debug_shrinks_counts_alone() -> None:
    shrunk = {"limit": 2, "max_new_tokens": 8, "repeats": 1}
    assert parse("mini --debug") == ("mini", replace(MINI, **shrunk), Options(Path("runs/debug")))
    assert parse("mini --debug --limit 1")[1].limit == 1
    config = parse_command(Options, "", ["gsm8k", "--debug"], CollaborativeEvalConfig)[1]
    assert (config.limit, config.held_out, config.max_new_tokens, config.repeats) == (2, 2, 8, 1)


def test_results_have_a_folder_of_their_own() -> None:
    """Results have a folder of their own: a trial's is never the run's, and by default no preset's
    is another's.
    """

    @dataclass(frozen=True)
    class Named(Options):
        out: Path = Path("runs/eval/PRESET")

    def out(line: str) -> str:
        return str(parse_command(Named, "", line.split())[2].out)

    assert [out(line) for line in ("mini", "mini --debug", "mini_views")] == [
        *("runs/eval/mini", "runs/debug/eval/mini", "runs/eval/mini_views")
    ]
    assert [out(f"mini --out {place} --debug") for place in ("runs/mine", "/data/mine")] == [
        *("runs/debug/mine", "runs/debug/data/mine")
    ]


def test_blocks_are_no_longer_than_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("mini --gamma 50 --max-new-tokens 7")[1].gamma == 7
    assert "--gamma: 50 is over the 7 new tokens" in capsys.readouterr().err


def test_a_script_of_several_draft_lengths_takes_one() -> None:
    @dataclass(frozen=True)
    class Several(Options):
        gammas: tuple[int, ...] = (3, 5)

    def gammas(line: str) -> tuple[int, ...]:
        return parse_command(Several, "", line.split())[2].gammas

    lines = ("", f" --gamma {MINI.gamma}", " --gamma=9 --max-new-tokens 8", " --gammas 1 2")
    assert [gammas(f"mini{line}") for line in lines] == [(3, 5), (MINI.gamma,), (8,), (1, 2)]
    with pytest.raises(InputError, match="--gamma: --gammas has the draft lengths; give one of"):
        gammas("mini --gamma 3 --gammas 1")


def test_rows_are_named_or_views() -> None:
    _, config, _ = parse("mini --rows MT* T-slots M,P9")
    assert [(row.name, row.views) for row in config.rows] == [
        ("MT*", ("M", "T")),
        ("T-slots", ("T-slots",)),
        ("M,P9", ("M", "P9")),
    ]
    with pytest.raises(InputError, match="no row 'T-slot' in the preset"):
        parse("mini --rows T-slot")
    with pytest.raises(InputError, match="no row 'M,' in the preset"):
        parse("mini --rows M,")


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_has_32_bits(seed: int) -> None:
    """Questions, tables, training and answers written for training all refuse a seed of more than
    32 bits.
    """
    for make in (
        lambda: parse(f"mini --seed {seed}"),
        lambda: parse_command(Options, "", ["gsm8k", "--seed", str(seed)], CollaborativeEvalConfig),
        lambda: parse_command(Options, "", ["recorded", "--seed", str(seed)], RecordedConfig),
        lambda: TrainConfig(steps=1, batch=1, seed=seed),
        lambda: Regeneration("", "", 1, seed=seed),
        lambda: prepare.main(prepare.Book(seed=seed)),
        lambda: Request("Hi", seed=seed),
    ):
        with pytest.raises(InputError, match=f"seed: {seed}; give a whole number from 0 to"):
            make()


def test_own_sets() -> None:
    _, config, _ = parse("mini --sets read mine=a/b.jsonl pope=c.parquet --images photos")
    assert (config.sets, config.images) == (("read", "mine", "pope"), Path("photos"))
    assert config.data == ("mine=a/b.jsonl", "pope=c.parquet")
    assert replace(config, sets=("read",)).data == config.data


def test_what_is_missing_is_told_before_models_load(tmp_path: Path) -> None:
    """What is missing is named before models load: the target here has no weights, so loading it
    would be another error.
    """
    target, data = tmp_path / "target", tmp_path / "mine.jsonl"
    target.mkdir()
    shutil.copy(Path(MINI.target) / "config.json", target)
    data.write_text('{"id": "a", "image": "a.png", "turns": ["What?"]}\n')
    config = replace(MINI, target=str(target), sets=("mine",), data=(f"mine={data}",))
    for changed, message in (
        ({"turns": (1,)}, "line 1, image: no such image file 'a.png'"),
        ({"data": ("mine=nowhere.jsonl",)}, "data nowhere.jsonl: no such file"),
        ({"images": tmp_path / "photos"}, "images .*photos: no such folder"),
        ({"draft": ("nowhere",)}, "'nowhere': no such directory"),
        ({"target": "replay:nowhere.jsonl"}, "data nowhere.jsonl: no such file"),
        ({"captioner": "file:nowhere.jsonl"}, "captioner file:nowhere.jsonl: no such file"),
    ):
        with pytest.raises(InputError, match=message):
            load_models(replace(config, **changed))


def test_rows_that_recorded_answers_cannot_serve_are_left_out_with_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, config, _ = parse("mini --target replay:answers.jsonl")
    assert [row.name for row in config.rows] == ["M", "T", "C", "P", "MT static"]
    assert capsys.readouterr().err.splitlines() == [
        "rows left out: MT*, MTCP*: recorded answers have no probabilities to learn from; "
        "give a model as target",
        "rows left out: KV head: recorded answers have no keys and values; give a model as target",
    ]
    assert list(config.left_out) == ["MT*", "MTCP*", "KV head"]
    names = [row.name for row in parse("mini_weightings --target replay:answers.jsonl")[1].rows]
    assert names == [
        *("static", "random", "random:draw=uniform", "grid:measure=matches", "hard_match"),
        "adaboost",
    ]


CAPTIONED = ["C", "MTCP static", "MTCP*"]


@pytest.mark.parametrize(
    ("captioner", "torch", "message"),
    [
        (None, False, r"needs torch; pip install -e '.\[captioner\]'"),
        ("blip:org/absent", True, "'org/absent': no such directory, and cannot be fetched from th"),
    ],
)
def test_rows_whose_captioner_cannot_run_are_left_out_with_a_line(
    captioner: str | None,
    torch: bool,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("jaxspec.engine.captioners.find_spec", lambda name: torch or None)
    option = f"--captioner {captioner}" if captioner else ""
    _, config, _ = parse(f"llava15 {option}")
    assert [row.name for row in config.rows] == ["M", "T", "P", "MT random", "MT static", "MT*"]
    assert list(config.left_out) == CAPTIONED
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"rows left out: C, MTCP static, MTCP\\*: .*{message}", line)
    with pytest.raises(InputError, match=f"rows: none can be measured; C, MTCP.*{message}"):
        parse_command(Options, "", ["llava15", *option.split(), "--rows", "C", "MTCP*"])
    assert not parse("llava15 --rows M T")[1].left_out
    with pytest.raises(InputError, match="captioner: 'blop:x' is unknown"):
        parse("llava15 --captioner blop:x")


def test_a_set_is_named_with_its_file() -> None:
    config = parse("mini --sets read mine=a/b.jsonl")[1]
    for name, message in (
        ("read", "set read: too long"),
        ("mine", r"set mine \(a/b\.jsonl\): too long"),
    ):
        with pytest.raises(InputError, match=f"^{message}$"), config.named(name):
            raise InputError("too long")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "preset: missing"),
        ("minni", "did you mean 'mini'"),
        ("mini --limt 3", "--limt: no such option; did you mean '--limit'"),
        ("mini --limit 2 3", "--limit: takes one value, and '2', '3' are two"),
        ("mini --limit x", "--limit: 'x'; give a whole number"),
        ("mini --dtype float8", "unknown dtype 'float8'; did you mean 'float32'"),
        ("mini --batch-size 65", "batch_size: 65; give 1 to 64"),
        ("mini --width 1000", "width: 1000; give 1 to 256"),
        ("mini --sets describ", "unknown set 'describ'; did you mean 'describe'"),
        ("mini --sets read --data reed=a.jsonl", "data: 'reed' is a set that is not asked; add it"),
        ("mini --follow-ups", "follow_ups: none; give one or more kinds"),
        ("mini --sets", "sets: none; give one or more"),
    ],
)
def test_wrong_words_are_one_line(line: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse(line)
    assert "\n" not in str(caught.value)


def test_a_temperature_that_exactness_does_not_read_is_refused() -> None:
    with pytest.raises(InputError, match=r"temperature: 0\.7; compared answers are greedy"):
        exactness.main(["mini", "--temperature", "0.7"])


@pytest.mark.parametrize("name", preset_names("eval"))
def test_presets_are_well_formed(name: str) -> None:
    config = load_preset("eval", name)
    if isinstance(config, CollaborativeEvalConfig):
        for pairing in config.pairings:
            config.collaboration(pairing, "alternating", pairing.gammas).checked(
                len(pairing.models)
            )
    if isinstance(config, RecordedConfig):
        sources = {name for one in config.methods for name in one.sources.split("+")}
        assert sources <= {"lookup", "history", "table", "similar"}


@pytest.mark.parametrize(
    ("script", "words", "name"),
    [
        (mmspec, "mini --turns 1", "turns"),
        (mmspec, "mini --sets read", "sets"),
        (mmspec, "recorded --sets=pope", "sets"),
        (mmspec, "mini --no-times", "times"),
        (mmspec, "mini --each_follow_up", "each_follow_up"),
        (draft_quality, "mini --repeats 3", "repeats"),
        (exactness, "mini --trace", "trace"),
        (exactness, "mini --batch-size 4", "batch_size"),
        (plans, "mini --gamma 3", "gamma"),
        (plans, "mini --rows M", "rows"),
    ],
)
def test_an_option_that_a_script_does_not_read_is_refused(
    script: ModuleType, words: str, name: str
) -> None:
    with pytest.raises(InputError, match=f"^{name}: .* does not read it; leave out --"):
        script.main(words.split())


def test_help_leaves_out_the_options_that_a_script_does_not_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        plans.main(["--help"])
    options = set(re.findall(r"^\W*(--[\w-]+)", capsys.readouterr().out, re.MULTILINE))
    assert {"--repeats", "--turns", "--out"} <= options
    assert not options & {"--rows", "--times", "--no-times", "--trace"}


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: latency.main("mini", batches=(1, 0)), "batches: 0; give a whole number, 1 or"),
        (lambda: latency.main("mini", views=(0,)), "views: 0; give a whole number"),
        (lambda: latency.main("mini", gammas=(-1,)), "gammas: -1; give a whole number"),
        (lambda: compiled.main("mini", batches=(0,)), "batches: 0; give a whole number"),
        (lambda: compiled.main("mini", layers=0), "layers: 0; give a whole number"),
        (lambda: steps.main("small", anchors=(0,)), "anchors: 0; give a whole number"),
        (lambda: steps.main("small", repeats=0), "repeats: 0; give a whole number"),
        (lambda: steps.main("small", anchors=(8, 9)), r"anchors: \(8, 9\); give one number, or"),
        (lambda: serving.main(draft="mine"), "draft mine, gamma auto: read only with --target"),
        (
            lambda: draft_quality.main(["mini", "--attributes", "4", "--text-only"]),
            "attributes: 4; asked of single models with their images, so leave out --text-only",
        ),
        (lambda: mmspec.main(["recorded", "--data"]), "data: no mmspec; give the record's folder"),
        (lambda: peers.main("mini", new=1), "new: 1; give 2 or more"),
        (lambda: peers.main("mini", threads=0), "threads: 0; give a whole number"),
        (lambda: peers.main("coder", data=("gsm=x",)), "data: unknown set 'gsm'; did you mean"),
        (lambda: serving.main(new=0), "clients, requests, new: .*, 0; give 1 or more"),
        (lambda: kv_head.main(["aasd", "--gammas", "0"]), "gammas: 0; give a whole number"),
        (lambda: kv_head.main(["aasd", "--gammas"]), "gammas: none; give one or more"),
        (lambda: accelerator.main(page=Path("nowhere.md")), "page nowhere.md: no such file"),
    ],
)
def test_numbers_that_measure_nothing_are_refused_first(
    run: Callable[[], None], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        run()
