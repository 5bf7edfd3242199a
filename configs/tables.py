"""Every table and figure of the four papers, and the commands that measure it.

    python -m configs.tables docs/tables.md

They are written between the page's two markers, `<!-- tables: ... -->` and `<!-- /tables -->`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from configs.published.ibed import POOLED
from eval.lib.output.tables import put_between


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of docs/tables.md: tables and figures that the same commands measure."""

    tables: tuple[int, ...] = ()
    figures: tuple[int, ...] = ()
    what: str
    """What is compared there."""
    command: str = ""
    """Measures it with the paper's own models; of several, each on a line of its own."""
    mini: str = ""
    """The like with the shipped models."""
    needs: str = ""
    """Extras to install for the paper's models, and the gigabytes of weights that the commands
    fetch.
    """
    why: str = ""
    """Why there is no command."""

    @property
    def where(self) -> str:
        """Return the numbers as a page has them: `Tables 1, 3; Figure 2`."""
        kinds = (("Table", self.tables), ("Figure", self.figures))
        return "; ".join(
            f"{kind}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
            for kind, numbers in kinds
            if numbers
        )


TABLE = "python -m eval.block_efficiency"
LATENCY = "python -m eval.latency"
PASSES = f"{LATENCY} llava7b_68m --dtype float16"
QUALITY = "python -m eval.draft_quality"
HEAD = "python -m eval.kv_head"
TOGETHER = "python -m eval.collaborative"
SWEEP = f"{TOGETHER} cos --sets humaneval gsm8k --limit 8"
LAMBDA = "lambda:0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9"
TRAIN = "python -m train.recipe"

DRAFTS = " ".join(f'"pool ({n}, ft)=runs/train/pooled_{n}/hf:{view}"' for n, view in POOLED.items())

DRAWN = "drawings, no measurement"
LONG = "--captioner florence2:florence-community/Florence-2-large-ft:MORE_DETAILED_CAPTION"

TABED = (
    Line(
        tables=(1, 3, 4, 18),
        needs="benchmarks, captioner, plots; 16 GB",
        what="views M, T, C, P, their static, random and learned mixtures; first turns, second turns, and second turns "
        "from NQ and GSM8K. POPE is the whole set, as in the released code (the text names the Lite subset); LLaVA-Bench "
        "has the instruction that the text prints (the released code leaves it out); no system prompt, as in that code. "
        "Second turns are in that code's words; the first answer keeps its end token, which that code takes out. Random "
        "weights are uniform on the simplex, where that code divides uniform numbers by their sum. The 1.74 and the 5 % "
        "of the abstract are printed below the table",
        command=f"{TABLE} llava15\n"
        f"{TABLE} llava15 --turns 2 --follow-ups fact --out runs/eval/llava15_nq\n"
        f"{TABLE} llava15 --turns 2 --follow-ups sum --out runs/eval/llava15_gsm8k",
        mini=f"{TABLE} mini_views",
    ),
    Line(
        tables=(2, 9, 10),
        needs="benchmarks, plots; 15 GB",
        what="chains and trees of width 2 and 3 of M, T and MT*; width 3 is cut to 80 of its 363 nodes",
        command=f"{TABLE} llava15_trees",
        mini=f"{TABLE} mini_trees",
    ),
    Line(
        tables=(5, 8),
        needs="benchmarks, captioner, plots; 16 GB",
        what="how many verified tokens MT* looks back on; AdaBoost, whose negative weights count as 0; and all rules "
        "that the paper's MT* and MTCP* may be: it writes both hard and soft labels, and the rule called paper takes "
        "soft ones; POPE and LLaVA-Bench as above",
        command=f"{TABLE} llava15_weightings",
        mini=f"{TABLE} mini_weightings",
    ),
    Line(
        tables=(6, 7),
        needs="benchmarks, captioner, plots; 16 GB",
        what="blocks of 3 and 7 drafted tokens; also the mixtures of Table 1, which the paper does not print here",
        command=f"{TABLE} llava15 --gamma 3 --turns 1 --out runs/eval/llava15_gamma3\n"
        f"{TABLE} llava15 --gamma 7 --turns 1 --out runs/eval/llava15_gamma7",
        mini=f"{TABLE} mini_views --gamma 3 --out runs/eval/mini_gamma3",
    ),
    Line(
        tables=(11, 13, 14),
        figures=(5, 6, 9),
        needs="plots, captioner; 3 GB of captioners, other weights are random",
        what="in float16, as in the paper: T_q / T_p, a draft's pass over a target's; passes by rows (R views are R rows "
        "of the draft), context and block length, as numbers, where the paper draws lines; bars of tower, prefill and "
        "decoding by 1, 2 and 5 images (`inference_times.png`), for answers as long as IbED's; BLIP's and Florence-2's "
        "captions of pages that picturebook draws, in float32 (torch runs both on the host), where the paper captions photographs; operations, "
        "where the column with attention counts 648 slots. T_q / T_p is measured at 1,024 slots; the paper's is a mean "
        "over data sets",
        command=f"{PASSES} --parts passes images captions flops\n"
        + "\n".join(
            f"{LATENCY} {pair} --dtype float16 --parts passes"
            for pair in ("llava7b_160m", "llava13b_68m", "llava13b_160m")
        ),
        mini=f"{LATENCY} mini --parts passes images captions flops --captioners jax:jaxspec_demo/mini/captioner",
    ),
    Line(
        tables=(12,),
        needs="benchmarks, quality; 15 GB",
        what="the target's answers with and without images against the references, by ROUGE-L and METEOR: the paper "
        "names no measure, and GPT-4o is not measured; also the draft's answers",
        command=f"{QUALITY} llava15 --sets spot-the-diff magicbrush --text-only --out runs/quality/llava15_two",
        mini=f"{QUALITY} mini --sets spot brush --text-only --out runs/quality/mini_two",
    ),
    Line(
        tables=(15,),
        needs="train; 1 GB",
        what="hyperparameters of the 68M and 160M drafts: the recipes have them. The code that the paper names pads "
        "images to squares and groups samples by modality; here images are cropped, and nothing is grouped",
        command=f"{TRAIN} llava15_68m\n{TRAIN} llava15_160m",
        mini=f"{TRAIN} mini_draft",
    ),
    Line(
        tables=(16,),
        needs="train; 1 GB",
        what="hyperparameters of the OneVision draft: the recipe has them, on the target's CLIP tower, one tile an "
        "image, where OneVision has SigLIP and several. The mini command trains one stage",
        command=f"{TRAIN} onevision_68m",
        mini=f"{TRAIN} mini_llava",
    ),
    Line(
        tables=(17,),
        figures=(7,),
        needs="benchmarks, quality; 15 GB",
        what="accuracy, ROUGE-L and METEOR of target and draft, with and without images, and answers; the digits are of "
        "OCRBench's whole 1,000 questions; of TextCaps the paper does not say how many, nor how either is asked",
        command=f"{QUALITY} llava15 --sets ocrbench --limit 1000 --text-only --out runs/quality/llava15_ocrbench\n"
        f"{QUALITY} llava15 --sets textcaps --text-only --out runs/quality/llava15_textcaps",
        mini=f"{QUALITY} mini --sets read --text-only",
    ),
    Line(
        tables=(19, 20, 21, 22),
        needs="benchmarks, captioner, plots; 43 GB",
        what="LLaVA-NeXT read as one tile an image: 68M, 160M and OneVision drafts, the 13B; NQ and GSM8K as above. The "
        "paper names float16; that the 160M draft ran in bfloat16 is in its released code. Table 21's rows name "
        "LLaVA-1.5 160M, its caption LLaVA-OV 68M, which is taken here",
        command=f"{TABLE} llava_next_base\n"
        f"{TABLE} llava_next_base --draft mjbooo/lvlm160m-bf16 --dtype bfloat16 --out runs/eval/llava_next_160m\n"
        f"{TABLE} llava_next_base --draft mjbooo/lvlm68m-ov --out runs/eval/llava_next_ov\n"
        f"{TABLE} llava_next_base --target llava-hf/llava-v1.6-vicuna-13b-hf --out runs/eval/llava_next_13b",
        mini=f"{TRAIN} mini_large\n{TABLE} mini_views --draft runs/train/mini_large/hf --out runs/eval/mini_large",
    ),
    Line(
        figures=(3, 4, 8),
        needs="benchmarks, plots; 15 GB",
        what="weights from step to step on the range of weights for which the target accepts "
        "(`weight_trajectory.png`: each row's answer over which its weights move most), and answers (`report.html`)",
        command=f'{TABLE} llava15 --trace --rows M T "MT static" "MT*" --out runs/eval/llava15_trace',
        mini=f"{TABLE} mini --trace",
    ),
    Line(figures=(1, 2), what=DRAWN, why="the method"),
)

IBED = (
    Line(
        tables=(1, 2, 3),
        figures=(7,),
        needs="benchmarks, captioner, plots; 16 GB",
        what="M against T; images pooled to 144, 36, 9 and 1 tokens; captions; static mixtures MT, MC, MTC, MTCP; in "
        "float16, where the paper names no dtype, nor the splits of ChartQA, TextVQA and VQAv2; `predicted` is the "
        "speed-up of Table 1b. The mini models have 16 tokens an image, pooled to 4 and 1",
        command=f"{TABLE} ibed",
        mini=f"{TABLE} mini_views\n{TABLE} mini --rows M,C M,T,C P4 P1 --out runs/eval/mini_pools",
    ),
    Line(
        tables=(4,),
        needs="train; 1 GB",
        what="hyperparameters of the 68M draft: the recipe has them",
        command=f"{TRAIN} llava15_68m",
        mini=f"{TRAIN} mini_draft",
    ),
    Line(
        tables=(5,),
        needs="train, benchmarks, plots; 15 GB",
        what="drafts trained on with pooled images, from the finished draft; the paper does not say what they start from",
        command="\n".join(
            f"{TRAIN} pooled --view {view} --runs runs/train/pooled_{n}\n"
            f'{TABLE} ibed --rows "pool ({n})" --draft runs/train/pooled_{n}/hf --out runs/eval/ibed_pooled_{n}'
            for n, view in POOLED.items()
        ),
        mini=f"{TRAIN} mini_pooled\n"
        f"{TABLE} mini --rows P --draft runs/train/mini_pooled/hf --out runs/eval/mini_pooled",
    ),
    Line(
        tables=(6, 7),
        needs="benchmarks, captioner, plots; 24 GB",
        what="captions, alone and in mixtures: next to the short ones of `ibed` Florence-2's detailed ones, BLIP's, "
        "BLIP-2's; all in float32, BLIP's and BLIP-2's by their own defaults, as in TABED's released code. The mini "
        "target writes the detailed captions of the mini command",
        command=f"{TABLE} ibed --rows C MC MTC {LONG} --out runs/eval/ibed_detailed\n"
        f"{TABLE} ibed --rows C --captioner blip:Salesforce/blip-image-captioning-base --out runs/eval/ibed_blip\n"
        f"{TABLE} ibed --rows C --captioner blip:Salesforce/blip2-opt-2.7b --out runs/eval/ibed_blip2",
        mini=f'{TABLE} mini --rows C M,C M,T,C --captioner "jax:jaxspec_demo/mini/target:Describe this image in detail." '
        "--out runs/eval/mini_detailed",
    ),
    Line(
        tables=(8, 9),
        needs="benchmarks, captioner, plots; 16 GB",
        what="weights of 1 to 4 for M in every mixture; with detailed captions too",
        command=f"{TABLE} ibed_weights\n{TABLE} ibed_weights {LONG} --out runs/eval/ibed_weights_detailed",
        mini=f"{TABLE} mini_weights",
    ),
    Line(
        tables=(10, 11),
        figures=(3, 9),
        needs="plots, captioner; 3 GB of captioners, other weights are random",
        what="bars of tower, prefill and decoding by images (`inference_times.png`), for prompts of 648, 1224 and 2952 "
        "tokens, where the paper has 600, 1200 and 3000, and for answers of the lengths it prints; the draft's prefill, "
        "where the paper counts 200, 1200 and 2200 tokens, and its steps by rows: up to 128, as 4 views of 32 rows, "
        "where the paper ends at 64; the paper names no dtype",
        command=f"{PASSES} --parts passes images captions flops",
        mini=f"{LATENCY} mini --parts passes images captions flops --captioners jax:jaxspec_demo/mini/captioner",
    ),
    Line(
        tables=(12,),
        figures=(10,),
        needs="benchmarks, quality; 15 GB",
        what="accuracy, ROUGE-L and METEOR of the target, the draft and the pooled drafts of Table 5, with and without "
        "images, and answers, in float16; the digits are of 100 questions of ChartQA and the 1,000 of OCRBench; of "
        "TextCaps the paper does not say how many, and of none how they are asked or in which dtype",
        command=f"{QUALITY} llava15 --sets chartqa textcaps --text-only --drafts {DRAFTS} --out runs/quality/ibed\n"
        f"{QUALITY} llava15 --sets ocrbench --limit 1000 --text-only --drafts {DRAFTS} --out runs/quality/ibed_ocrbench",
        mini=f'{QUALITY} mini --sets chart read --text-only --drafts "pool (ft)=runs/train/mini_pooled/hf:P" '
        "--out runs/quality/mini_three",
    ),
    Line(
        tables=(13,),
        needs="train, benchmarks, plots; 15 GB",
        what="Llama-68M as a draft, as it is and trained on the texts",
        command=f"{TABLE} ibed --rows T --draft JackFram/llama-68m --out runs/eval/ibed_llama\n{TRAIN} text_68m\n"
        f"{TABLE} ibed --rows T --draft runs/train/text_68m/hf --out runs/eval/ibed_text",
        mini=f"{TRAIN} mini_text\n{TABLE} mini --rows T --draft runs/train/mini_text/hf --out runs/eval/mini_text",
    ),
    Line(
        figures=(4, 5, 8, 11),
        needs="benchmarks, captioner, plots; 16 GB",
        what="answers (`report.html`), which tokens which view would have kept (Figure 5 is the panel of ChartQA in "
        "`overlap.png`, with bars in place of circles), and when drafts are accepted (`accepted_over_time.png`)",
        command=f"{TABLE} ibed --trace --rows M T C MTC --out runs/eval/ibed_trace",
        mini=f"{TABLE} mini --trace",
    ),
    Line(figures=(1, 2, 6), what=DRAWN, why="the method"),
)


ABLATIONS = {
    "noprojector": ("- projector", "--head.pooling none"),
    "noimage": ("- image KV", "--head.pooling drop"),
    "notext": ("- text KV", "--head.no-reads-text"),
    "nokv": ("- target's KV", "--head.pooling drop --head.no-reads-text"),
}
"""AASD's ablations: the row of each, and the options of the recipe that trains it."""


def _head(size: str = "") -> str:
    """Return the commands of AASD's tables for a target, the 7B or `13b`: the head, the other
    drafts, the table.
    """
    end, target = (
        (f"_{size}", f"llava-hf/llava-1.5-{size}-hf") if size else ("", "llava-hf/llava-1.5-7b-hf")
    )
    answers = [f"llava_v1_5_mix665k{end}_t{temperature}" for temperature in (0, 1)]
    distill = f"python -m train.distill_data --target {target} --data runs/data/llava_v1_5_mix665k"
    learned = f" --data {' '.join(f'runs/data/{name}' for name in answers)}"
    runs = {name: f"runs/train/{name}{end}" for name in ("ft_llava", "dt_llama", "dt_llava")}
    options = {
        name: f" --target {target} --runs {folder}" if size else "" for name, folder in runs.items()
    }
    start = f" --start {runs['ft_llava']}/hf" if size else ""
    head = f"kv_llava15_{size or '7b'}_paper"
    ablations = " ".join(
        f'"{row}=runs/train/{head}_{name}/hf"' for name, (row, _) in ABLATIONS.items()
    )
    return "\n".join(
        [
            f"{TRAIN} {head}",
            *(
                f"{TRAIN} {head} {how} --runs runs/train/{head}_{name}"
                for name, (_, how) in ABLATIONS.items()
            ),
            *([] if size else [f"{TRAIN} ft_llama"]),
            f"{TRAIN} ft_llava{options['ft_llava']}",
            f"{distill} --name {answers[0]}",
            f"{distill} --temperature 1 --name {answers[1]}",
            f"{TRAIN} dt_llama{options['dt_llama']}{learned if size else ''}",
            f"{TRAIN} dt_llava{options['dt_llava']}{start}{learned if size else ''}",
            f"{HEAD} aasd_{size or '7b'} --heads {ablations} --baselines FT-LLaMA=runs/train/ft_llama/hf "
            f"DT-LLaMA={runs['dt_llama']}/hf DT-LLaVA={runs['dt_llava']}/hf",
        ]
    )


AASD = (
    Line(
        tables=(1, 2),
        figures=(3, 4),
        needs="train, benchmarks; 40 GB",
        what="the KV head, heads trained without projector, image keys, text keys or all of the target's keys, each for "
        "as many steps (`--untrained` takes the same from the trained head instead), and separate drafts, finetuned (FT) "
        "and distilled on the target's answers (DT), [from scratch](recipes.md#aasds-drafts); of the 7B, then of the "
        "13B. The targets here are LLaVA-1.5's, the paper's those of 'Visual Instruction Tuning', so that its numbers "
        "are of other models; bfloat16, 100 samples a set, 128 new tokens, greedy answers and the prompts (TABED's "
        "instruction, COCO's 'Describe this image in detail.', ScienceQA without hints) are ours, as it names none of "
        "them. omega and delta are of whole calls, next to those of the decode loop; its tau is not 1 + gamma alpha, "
        "ours is",
        command=f"{_head()}\n{_head('13b')}",
        mini=f"{HEAD} aasd --untrained",
    ),
    Line(figures=(1, 2), what=DRAWN, why="the method"),
)

COS = (
    Line(tables=(1,), what="the pairs of models", why="the preset `cos` has them"),
    Line(
        tables=(2, 3, 4, 5, 6, 7, 8),
        needs="benchmarks, quality, sentencepiece, torch; 95 GB",
        what="ensembles and contrast of models: standard, naive (without APF), speculative (SD) and CoS, each with draft "
        "lengths 5 and 1, of which the paper prints the better; also how well they answer. SD is naive with the bonus "
        "token, our reading of the paper's words. The first command asks pairs with a base model in raw text, Qwen's in "
        "their chat form, GSM8K after four rows of the training set, MMLU after five without reasons, CNN/DM after none, "
        "and the first 100 rows. The second asks as the released code does, from a clone of it: all in raw text, GSM8K "
        "and MMLU after its own examples that think step by step, CNN/DM as 'Article / Highlights' after one, and 100 "
        "rows of its shuffle. bfloat16, 256 tokens and 8 timed prompts a set are ours, as the paper names none; WE-P and "
        "CD-P, which in the paper have 0.39 to 0.82 of standard's speed, are a bound below the table. Tables 5 and 6 are "
        "whole calls",
        command=f"{TOGETHER} cos\n{TOGETHER} cos --released CoS --out runs/collaborative/cos_released",
        mini=f"{TOGETHER} visual",
    ),
    Line(
        tables=(9, 10),
        what="Ascend 910B3",
        why="not a device of JAX's; elsewhere it is Tables 2 to 6",
    ),
    Line(
        figures=(4,),
        needs="benchmarks, sentencepiece, torch; 40 GB",
        what="weight of the first model, on 8 prompts a set; the paper prints at least 1.5 times the speed at all weights",
        command=f'{SWEEP} --pairings "Llama, Vicuna" "Qwen 3B" --sweep {LAMBDA} --out runs/cos_weight',
        mini=f'{TOGETHER} visual --pairings "draft + target" --sweep {LAMBDA} --out runs/visual_weight',
    ),
    Line(
        figures=(5,),
        needs="benchmarks; 19 GB",
        what="mu of contrastive decoding, on 8 prompts a set at both temperatures; the paper names none",
        command=f'{SWEEP} --pairings "Llama-3, T=0" "Llama-3, T=1" --sweep mu:0.1,0.2,0.3,0.4,0.5 --out runs/cos_mu',
        mini=f'{TOGETHER} visual --pairings "target - target blind" --sweep mu:0.1,0.3,0.5 --out runs/visual_mu',
    ),
    Line(
        figures=(6,),
        needs="benchmarks, sentencepiece, torch; 95 GB",
        what="draft length of the smaller model, on 8 prompts a set and all pairs; the paper draws ensembles, Llama-3 "
        "and Llama-2 and names no temperature",
        command=f"{SWEEP} --sweep gamma:1,2,3,4,5 --out runs/cos_gamma",
        mini=f"{TOGETHER} visual --sweep gamma:1,2,3,4,5 --out runs/visual_gamma",
    ),
    Line(
        figures=(8,),
        needs="benchmarks, quality; 19 GB",
        what="quality and speed of Llama-3's weighted ensemble over the weight of the smaller model, at temperature 1, "
        "which is ours: `sweep.png` and a table",
        command=f'{TOGETHER} cos --pairings "Llama-3, T=1" --sweep {LAMBDA} --out runs/cos_quality',
        mini=f"{TOGETHER} synthetic",
    ),
    Line(figures=(1, 2, 3, 7), what=DRAWN, why="the method"),
)

PAPERS = {"TABED": TABED, "IbED": IBED, "AASD": AASD, "CoS": COS}


def commands() -> Iterator[str]:
    """Yield each command of every line, once."""
    texts = (
        text for lines in PAPERS.values() for line in lines for text in (line.command, line.mini)
    )
    yield from dict.fromkeys(command for text in texts for command in text.splitlines())


def list_of_tables() -> str:
    """Return the lines of each paper as a table in Markdown."""
    parts = []
    for paper, lines in PAPERS.items():
        rows = [f"| {paper} | comparison | needs | commands |", "|---|---|---|---|"]
        for line in lines:
            cells = [f"`{command}`" for command in line.command.splitlines()] or [line.why]
            cells += [f"mini: `{command}`" for command in line.mini.splitlines()]
            rows.append(f"| {line.where} | {line.what} | {line.needs} | {'<br>'.join(cells)} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        put_between(page, "tables", list_of_tables())
