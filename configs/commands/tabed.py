"""TABED's tables and figures."""

from __future__ import annotations

from configs.commands.line import DRAWN, LATENCY, PASSES, QUALITY, TABLE, TRAIN, Line

TABED = (
    Line(
        tables=(1, 3, 4, 18),
        needs="benchmarks, captioner, plots; 16 GB",
        what="views M, T, C, P, their static, random and learned mixtures; first turns, second "
        "turns, and second turns from NQ and GSM8K. POPE is the whole set, as in the released code "
        "(the text names the Lite subset); LLaVA-Bench has the instruction that the text prints "
        "(the released code leaves it out); no system prompt, as in that code. Second turns are in "
        "that code's words; the first answer keeps its end token, which that code takes out. "
        "Random weights are uniform on the simplex, where that code divides uniform numbers by "
        "their sum. The pair and story sets are asked each row's own question, where the paper "
        "prints one prompt for all. Captions are made before the prefill, where the paper makes "
        "them beside it. The 1.74 and the 5 % of the abstract are printed below the table",
        command=f"{TABLE} llava15\n"
        f"{TABLE} llava15 --turns 2 --follow-ups fact --out runs/eval/llava15_nq\n"
        f"{TABLE} llava15 --turns 2 --follow-ups sum --out runs/eval/llava15_gsm8k",
        mini=f"{TABLE} mini_views",
    ),
    Line(
        tables=(2, 9, 10),
        needs="benchmarks, plots; 15 GB",
        what="chains and trees of width 2 and 3 of M, T and MT*; width 3 is cut to 80 of its 363 "
        "nodes",
        command=f"{TABLE} llava15_trees",
        mini=f"{TABLE} mini_trees",
    ),
    Line(
        tables=(5, 8),
        needs="benchmarks, captioner, plots; 16 GB",
        what="how many verified tokens MT* looks back on; AdaBoost by each request's running "
        "error, where the paper fixes a draft's weight by its error rate (then give these weights "
        "to `--weights`, which `static` keeps), with the released code's constant of 1 (the paper "
        "names none), and negative weights as 0; and all rules that the paper's MT* and MTCP* may "
        "be: it writes both hard and soft labels, and the rule called paper takes soft ones; POPE "
        "and LLaVA-Bench as above",
        command=f"{TABLE} llava15_weightings",
        mini=f"{TABLE} mini_weightings",
    ),
    Line(
        tables=(6, 7),
        needs="benchmarks, captioner, plots; 16 GB",
        what="blocks of 3 and 7 drafted tokens; also the mixtures of Table 1, which the paper does "
        "not print here",
        command=f"{TABLE} llava15 --gamma 3 --turns 1 --out runs/eval/llava15_gamma3\n"
        f"{TABLE} llava15 --gamma 7 --turns 1 --out runs/eval/llava15_gamma7",
        mini=f"{TABLE} mini_views --gamma 3 --out runs/eval/mini_gamma3",
    ),
    Line(
        tables=(11, 13, 14),
        figures=(5, 6, 9),
        needs="plots, captioner; 3 GB of captioners, other weights are random",
        what="in float16, as in the paper: T_q / T_p, a draft's pass over a target's; passes by "
        "rows (R views are R rows of the draft), context and block length, as numbers, where the "
        "paper draws lines; bars of tower, prefill and decoding by 1, 2 and 5 images "
        "(`inference_times.png`), for answers of 92, 117 and 88 tokens, the paper's mean lengths, "
        "where it also says that it draws 100; BLIP's and Florence-2's captions of pages that "
        "picturebook draws, in float32 (torch runs both on the host), timed by themselves, where "
        "the paper captions photographs, beside the prefill; a target's pass reads gamma + 1 "
        "tokens, in the paper gamma; operations, where the column with attention counts 648 slots. "
        "T_q / T_p is measured at 1,024 slots; the paper's is a mean over data sets",
        command=f"{PASSES} --parts passes images captions flops\n"
        + "\n".join(
            f"{LATENCY} {pair} --dtype float16 --parts passes"
            for pair in ("llava7b_160m", "llava13b_68m", "llava13b_160m")
        ),
        mini=f"{LATENCY} mini --parts passes images captions flops --captioners "
        f"jax:jaxspec_demo/mini/captioner",
    ),
    Line(
        tables=(12,),
        needs="benchmarks, quality; 15 GB",
        what="the target's answers with and without images against the references, by ROUGE-L and "
        "METEOR: the paper names no measure, and GPT-4o is not measured; also the draft's answers",
        command=f"{QUALITY} llava15 --sets spot-the-diff magicbrush --text-only --out "
        f"runs/quality/llava15_two",
        mini=f"{QUALITY} mini --sets spot brush --text-only --out runs/quality/mini_two",
    ),
    Line(
        tables=(15,),
        needs="train; 1 GB",
        what="hyperparameters of the 68M and 160M drafts: the recipes have them. The code that the "
        "paper names pads images to squares and groups samples by modality; here images are "
        "cropped, and nothing is grouped",
        command=f"{TRAIN} llava15_68m\n{TRAIN} llava15_160m",
        mini=f"{TRAIN} mini_draft",
    ),
    Line(
        tables=(16,),
        needs="train; 1 GB",
        what="hyperparameters of the OneVision draft: the recipe has them, on the target's CLIP "
        "tower, one tile per image, where OneVision has SigLIP and several. Three of its data "
        "files are not public and left out; the system prompt is LLaVA-1.5's, as the paper names "
        "none. Rows have up to 5,120 tokens, eight images or frames, and the draft as many "
        "positions; rows with more images, and no answer before the ninth, teach nothing, and the "
        "run ends if they are over a tenth. The paper does not say how long its rows were. The "
        "mini command trains one stage",
        command=f"{TRAIN} onevision_68m",
        mini=f"{TRAIN} mini_llava",
    ),
    Line(
        tables=(17,),
        figures=(7,),
        needs="benchmarks, quality; 15 GB",
        what="accuracy, ROUGE-L and METEOR of target and draft, with and without images, and "
        "answers; the digits are of all 1,000 questions of OCRBench. The paper does not say how "
        "many are of TextCaps, nor how either is asked and judged, by which ROUGE, and in which "
        "dtype (here float16)",
        command=f"{QUALITY} llava15 --sets ocrbench --limit 1000 --text-only --out "
        f"runs/quality/llava15_ocrbench\n{QUALITY} llava15 --sets textcaps --text-only --out "
        f"runs/quality/llava15_textcaps",
        mini=f"{QUALITY} mini --sets read --text-only",
    ),
    Line(
        tables=(19, 20, 21, 22),
        needs="benchmarks, captioner, plots; 43 GB",
        what="LLaVA-NeXT read as one tile per image: 68M, 160M and OneVision drafts, the 13B. For "
        "NQ and GSM8K add `--turns 2 --follow-ups fact` or `sum` and another `--out` to each "
        "command. Prompts and captions as above. The paper names float16; that the 160M draft ran "
        "in bfloat16 is in its released code. Table 21's rows name LLaVA-1.5 160M, its caption "
        "LLaVA-OV 68M, which is taken here",
        command=f"{TABLE} llava_next_base\n{TABLE} llava_next_base --draft mjbooo/lvlm160m-bf16 "
        f"--dtype bfloat16 --out runs/eval/llava_next_160m\n{TABLE} llava_next_base --draft "
        f"mjbooo/lvlm68m-ov --out runs/eval/llava_next_ov\n{TABLE} llava_next_base --target "
        f"llava-hf/llava-v1.6-vicuna-13b-hf --out runs/eval/llava_next_13b",
        mini=f"{TRAIN} mini_large\n{TABLE} mini_views --draft runs/train/mini_large/hf --out "
        f"runs/eval/mini_large",
    ),
    Line(
        figures=(3, 4, 8),
        needs="benchmarks, plots; 15 GB",
        what="weights from step to step on the range of weights for which the target accepts "
        "(`weight_trajectory.png`: each row's answer over which its weights move most), and "
        "answers (`report.html`)",
        command=f'{TABLE} llava15 --trace --rows M T "MT static" "MT*" '
        "--out runs/eval/llava15_trace",
        mini=f"{TABLE} mini --trace",
    ),
    Line(figures=(1, 2), what=DRAWN, why="the method"),
)
