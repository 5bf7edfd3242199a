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
        "none. SD is naive with the bonus token, our reading of the paper's words; it could then "
        "not be slower than naive, but the paper prints it below naive in all four cells of "
        "ensembles that have both, and in two of the eight of contrasts. The first command asks "
        "pairs with a base model in raw text, Qwen's in their chat form, GSM8K after four rows of "
        "the training set, MMLU after five without reasons, CNN/DM after none, and the first 100 "
        "rows, of MMLU one or two of each subject by turns. The second asks as the released code "
        "does, from a clone of it: all in raw text, GSM8K and MMLU after its own examples that "
        "think step by step, CNN/DM as 'Article / Highlights' after one, and 100 rows of its "
        "shuffle. bfloat16 and 8 timed prompts per set are ours, 256 tokens the released code's, "
        "as the paper names none; WE-P and CD-P, which in the paper have 0.39 to 0.82 of "
        "standard's speed, are a bound below the table. Tables 5 and 6 are whole calls",
        command=f"{TOGETHER} cos\n{TOGETHER} cos --released CoS --out "
        f"runs/collaborative/cos_released",
        mini=f"{TOGETHER} visual",
    ),
    Line(
        tables=(9, 10),
        what="two pairs on an Ascend 910B3, on HumanEval, GSM8K, MMLU and CNN/DM. Times standard: "
        "Llama-Vicuna SD 1.79, 1.50, 1.47, 1.51, CoS 1.86, 1.71, 1.66, 1.73; Llama-2 SD 1.09, "
        "1.53, 1.43, 1.07, CoS 1.39, 1.53, 1.52, 1.16. Tokens per second: Llama-Vicuna standard "
        "7.60, 5.83, 2.60, 2.35, SD 13.59, 8.73, 3.81, 3.55, CoS 14.14, 9.98, 4.32, 4.06; Llama-2 "
        "11.98, 10.63, 4.96, 4.51, SD 13.00, 16.28, 7.098, 4.83, CoS 16.71, 16.30, 7.54, 5.23",
        why="not a device of JAX's; the same pairs on a GPU are two of the six in Tables 2 to 6",
    ),
    Line(
        figures=(4,),
        needs="benchmarks, plots, sentencepiece, torch; 40 GB",
        what="weight of the first model, on 8 prompts per set, at draft lengths 1, 1 and 5, 1; the "
        "paper prints at least 1.5 times the speed at all weights. The first model proposes at all "
        "of them, where the paper selects an appropriate one: at 0.1 to 0.4 that is "
        "`--default-proposer 1`. `sweep.png` draws whole calls, as in the "
        "paper, and decoding",
        command=f'{SWEEP} --pairings "Llama, Vicuna" "Qwen 3B" --sweep {LAMBDA} '
        "--out runs/cos_weight",
        mini=f'{TOGETHER} visual --pairings "draft + target" --sweep {LAMBDA} '
        "--out runs/visual_weight",
    ),
    Line(
        figures=(5,),
        needs="benchmarks, plots; 19 GB",
        what="mu of contrastive decoding, on 8 prompts per set, at both temperatures; the paper "
        "names no temperature",
        command=f'{SWEEP} --pairings "Llama-3, T=0" "Llama-3, T=1" '
        "--sweep mu:0.1,0.2,0.3,0.4,0.5 --out runs/cos_mu",
        mini=f'{TOGETHER} visual --pairings "target - target blind" --sweep mu:0.1,0.3,0.5 '
        "--out runs/visual_mu",
    ),
    Line(
        figures=(6,),
        needs="benchmarks, plots, sentencepiece, torch; 95 GB",
        what="draft length of the smaller model, on 8 prompts per set and all pairs; the paper "
        "draws ensembles, Llama-3 and Llama-2 and names no temperature",
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
