"""CoS's tables and figures."""

from __future__ import annotations

from configs.commands.line import DRAWN, TOGETHER, Line

SWEEP = f"{TOGETHER} cos --sets humaneval gsm8k --limit 8"
LAMBDA = "lambda:0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9"

COS = (
    Line(tables=(1,), what="the pairs of models", why="the preset `cos` has them"),
    Line(
        tables=(2, 3, 4, 5, 6, 7, 8),
        needs="benchmarks, quality, sentencepiece, torch; 95 GB",
        what="ensembles and contrast of models: standard, naive (without APF), speculative (SD) "
        "and CoS, and how well they answer. SD and CoS have draft lengths 5 and 1, and the paper "
        "prints the better of the two (CoS of three models has 1); naive has 5, as the paper names "
        "none. SD is naive with the bonus token, our reading of the paper's words. The "
        "first command asks pairs with a base model in raw text, Qwen's in their chat form, GSM8K "
        "after four rows of the training set, MMLU after five without reasons, CNN/DM after none, "
        "and the first 100 rows. The second asks as the released code does, from a clone of it: "
        "all in raw text, GSM8K and MMLU after its own examples that think step by step, CNN/DM as "
        "'Article / Highlights' after one, and 100 rows of its shuffle. bfloat16, 256 tokens and 8 "
        "timed prompts a set are ours, as the paper names none; WE-P and CD-P, which in the paper "
        "have 0.39 to 0.82 of standard's speed, are a bound below the table. Tables 5 and 6 are "
        "whole calls",
        command=f"{TOGETHER} cos\n{TOGETHER} cos --released CoS --out "
        f"runs/collaborative/cos_released",
        mini=f"{TOGETHER} visual",
    ),
    Line(
        tables=(9, 10),
        what="Ascend 910B3",
        why="not a device of JAX's; elsewhere it is Tables 2 to 6",
    ),
    Line(
        figures=(4,),
        needs="benchmarks, plots, sentencepiece, torch; 40 GB",
        what="weight of the first model, on 8 prompts a set; the paper prints at least 1.5 times "
        "the speed at all weights",
        command=f'{SWEEP} --pairings "Llama, Vicuna" "Qwen 3B" --sweep {LAMBDA} '
        "--out runs/cos_weight",
        mini=f'{TOGETHER} visual --pairings "draft + target" --sweep {LAMBDA} '
        "--out runs/visual_weight",
    ),
    Line(
        figures=(5,),
        needs="benchmarks, plots; 19 GB",
        what="mu of contrastive decoding, on 8 prompts a set, at both temperatures; the paper "
        "names no temperature",
        command=f'{SWEEP} --pairings "Llama-3, T=0" "Llama-3, T=1" '
        "--sweep mu:0.1,0.2,0.3,0.4,0.5 --out runs/cos_mu",
        mini=f'{TOGETHER} visual --pairings "target - target blind" --sweep mu:0.1,0.3,0.5 '
        "--out runs/visual_mu",
    ),
    Line(
        figures=(6,),
        needs="benchmarks, plots, sentencepiece, torch; 95 GB",
        what="draft length of the smaller model, on 8 prompts a set and all pairs; the paper draws "
        "ensembles, Llama-3 and Llama-2 and names no temperature",
        command=f"{SWEEP} --sweep gamma:1,2,3,4,5 --out runs/cos_gamma",
        mini=f"{TOGETHER} visual --sweep gamma:1,2,3,4,5 --out runs/visual_gamma",
    ),
    Line(
        figures=(8,),
        needs="benchmarks, plots, quality; 19 GB",
        what="quality and speed of Llama-3's weighted ensemble over the weight of the smaller "
        "model, at temperature 1, which is ours: `sweep.png` and a table. HumanEval is judged only "
        "with `--run-code`; without it the figure has nats of its references",
        command=f'{TOGETHER} cos --pairings "Llama-3, T=1" --sweep {LAMBDA} --out runs/cos_quality',
        mini=f"{TOGETHER} synthetic",
    ),
    Line(figures=(1, 2, 3, 7), what=DRAWN, why="the method"),
)
