"""TABED's tables and figures."""

from __future__ import annotations

from configs.commands.line import DRAWN, LATENCY, PASSES, QUALITY, TABLE, TRAIN, Line

TABED = (
    Line(
        tables=(1, 3, 4, 18),
        needs="benchmarks, captioner, plots; 16 GB",
        what="These tables compare views M, T, C and P with their mixtures, whose weights are "
        "static, random or learned. The three commands measure first turns and second turns, then "
        "second turns with questions from NQ (Natural Questions), then second turns with questions "
        "from GSM8K.",
        details=(
            "We ask the whole set of POPE, as the released code does; the paper's text names the "
            "Lite subset.",
            "Our questions of LLaVA-Bench have the instruction that the paper prints; the released "
            "code leaves this instruction out.",
            "As in the released code, there is no system prompt.",
            "Our second turns use the sentences of the released code, but our first answer keeps "
            "its end token, which the released code takes out.",
            "Our random weights are uniform on the simplex; the released code divides uniform "
            "numbers by their sum.",
            "In the sets of image pairs and stories we ask each sample's own question. The paper "
            "prints one prompt for all samples.",
            "We make captions before the prefill, and the paper makes them during the prefill. No "
            "speed-up counts their time, which a line below the table has.",
            "A line below the table has the abstract's two figures, 1.74 times the speed and a "
            "gain of 5 %.",
        ),
        command=f"{TABLE} llava15\n"
        f"{TABLE} llava15 --turns 2 --follow-ups fact --out runs/eval/llava15_nq\n"
        f"{TABLE} llava15 --turns 2 --follow-ups sum --out runs/eval/llava15_gsm8k",
        mini=f"{TABLE} mini_views",
    ),
    Line(
        tables=(2, 9, 10),
        needs="benchmarks, plots; 15 GB",
        what="These tables compare chains with trees of width 2 and 3, for the rows M, T and MT*. "
        "(The width of a tree is the number of children of a node.)",
        details=("We cut a tree with three children per node to 80 of its 363 nodes.",),
        command=f"{TABLE} llava15_trees",
        mini=f"{TABLE} mini_trees",
    ),
    Line(
        tables=(5, 8),
        needs="benchmarks, captioner, plots; 16 GB",
        what="These tables compare rules that learn the weights, and windows: the number of "
        "verified tokens that MT* takes into account.",
        details=(
            "Our AdaBoost computes each view's error rate from the tokens of the request that "
            "were checked so far. The paper fixes the weight of a view by its error rate, which "
            "the paper does not print. If you know the error rates of your views, `--weighting "
            "adaboost:errors=0.4/0.5` fixes their weights in the same way.",
            "Our AdaBoost multiplies its term ln(V - 1), for a vocabulary of V tokens, by 1, as "
            "the released code does; the paper names no factor. Negative weights become 0.",
            "The paper mentions both hard and soft labels, so the table has every rule that the "
            "paper may mean by MT* and MTCP*. The rules called `mt-paper` and `mtcp-paper` take "
            "soft labels.",
            "Our hard labels are the target's likeliest tokens. The paper compares sampled tokens, "
            "which is the same at temperature 0, the temperature of its tables. For higher "
            "temperatures `grid:measure=sampled` computes the paper's count in expectation.",
            "Our POPE and LLaVA-Bench differ from the paper's as described for Table 1.",
        ),
        command=f"{TABLE} llava15_weightings",
        mini=f"{TABLE} mini_weightings",
    ),
    Line(
        tables=(6, 7),
        needs="benchmarks, captioner, plots; 16 GB",
        what="These tables repeat Table 1 with blocks of 3 and of 7 drafted tokens.",
        details=(
            "Our tables also have the mixtures of Table 1, which the paper does not print here.",
        ),
        command=f"{TABLE} llava15 --gamma 3 --turns 1 --out runs/eval/llava15_gamma3\n"
        f"{TABLE} llava15 --gamma 7 --turns 1 --out runs/eval/llava15_gamma7",
        mini=f"{TABLE} mini_views --gamma 3 --out runs/eval/mini_gamma3",
    ),
    Line(
        tables=(11, 13, 14),
        figures=(5, 6, 9),
        needs="plots, captioner; 3 GB",
        what="These tables and figures show how long a pass of a model takes, how long a caption "
        "takes to write, and how long an answer about 1, 2 or 5 images takes. They also have T_q / "
        "T_p: the time of a draft's pass divided by the time of a target's pass. All times are in "
        "float16, which the paper names for Figures 5 and 6. The models have random weights, so "
        "only the captioners are fetched.",
        details=(
            "We print the times of passes as tables, by rows (R views are R rows of the draft), by "
            "context and by block length; the paper plots lines.",
            "`inference_times.png` has bars for the times of the image encoder (tower), of "
            "prefill and of decoding, with 1, 2 and 5 images. The answers have 92, 117 and 88 "
            "tokens, which are the mean lengths in the paper. The paper's bars are for 100 tokens.",
            "Here BLIP and Florence-2 caption drawn pages. They run in float32, with torch on the "
            "host, and nothing else runs at the same time. The paper captions photographs during "
            "the prefill.",
            "Our pass of the target reads gamma + 1 tokens, and the paper's reads gamma.",
            "One column counts all operations of a pass, those of attention included, for a "
            "context of 648 tokens.",
            "We measure T_q / T_p with a cache of 1,024 tokens. The paper's T_q / T_p is a mean "
            "over data sets.",
        ),
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
        what="This table scores the target's answers, with and without images, against the "
        "references. The paper does not say which score it used; we use ROUGE-L and METEOR.",
        details=(
            "The paper also scores GPT-4o, which we do not measure.",
            "We also score the draft's answers.",
        ),
        command=f"{QUALITY} llava15 --sets spot-the-diff magicbrush --text-only --out "
        f"runs/quality/llava15_two",
        mini=f"{QUALITY} mini --sets spot brush --text-only --out runs/quality/mini_two",
    ),
    Line(
        tables=(15,),
        needs="train; 1 GB",
        what="This table has the hyperparameters of the 68M and 160M drafts. Our recipes have the "
        "same hyperparameters, and these commands train both drafts.",
        details=(
            "We crop images, and do not group samples. The code that the paper names pads images "
            "to squares, and groups samples by modality.",
        ),
        command=f"{TRAIN} llava15_68m\n{TRAIN} llava15_160m",
        mini=f"{TRAIN} mini_draft",
    ),
    Line(
        tables=(16,),
        needs="train; 1 GB",
        what="This table has the hyperparameters of the OneVision draft. Our recipe has the same "
        "hyperparameters, and this command trains the draft.",
        details=(
            "Our draft uses the target's image encoder, CLIP, and one tile per image; OneVision "
            "has SigLIP and several tiles.",
            "Three of the data files are not public, and are left out.",
            "The system prompt is LLaVA-1.5's, since the paper names none.",
            "Our training rows have up to 5,120 tokens and eight images or frames, and the draft "
            "has 5,120 positions. The paper does not say how long its rows were.",
            "A row with more than eight images teaches nothing if no answer comes before its "
            "ninth image. The run ends if more than a tenth of the rows teach nothing.",
            "The command with the shipped models trains one stage.",
        ),
        command=f"{TRAIN} onevision_68m",
        mini=f"{TRAIN} mini_llava",
    ),
    Line(
        tables=(17,),
        figures=(7,),
        needs="benchmarks, quality; 15 GB",
        what="This table and figure have the accuracy, ROUGE-L and METEOR of target and draft, "
        "with and without images, and some of their answers.",
        details=(
            "The paper does not say how many questions it asked. The digits of its scores fit all "
            "1,000 of OCRBench, so we ask these, and 100 of TextCaps.",
            "The paper does not say how these questions are asked and judged, which variant of "
            "ROUGE it computes, and in which dtype. Here an answer is right if it holds an "
            "accepted one, ROUGE is ROUGE-L, and the dtype is float16.",
        ),
        command=f"{QUALITY} llava15 --sets ocrbench --limit 1000 --text-only --out "
        f"runs/quality/llava15_ocrbench\n{QUALITY} llava15 --sets textcaps --text-only --out "
        f"runs/quality/llava15_textcaps",
        mini=f"{QUALITY} mini --sets read --text-only",
    ),
    Line(
        tables=(19, 20, 21, 22),
        needs="benchmarks, captioner, plots; 43 GB",
        what="In these tables LLaVA-NeXT reads each image as a single tile. The drafts are the "
        "68M, the 160M and the OneVision one, and the last table has the 13B target. For questions "
        "from NQ add `--turns 2 --follow-ups fact` to each command, and for GSM8K add `--turns 2 "
        "--follow-ups sum`. Give each run its own `--out`.",
        details=(
            "Our prompts and captions differ from the paper's as described for Table 1.",
            "The paper names float16 for its times only. Its released code ran the 160M draft in "
            "bfloat16, and all others in float16.",
            "The rows of Table 21 name the draft LLaVA-1.5 160M, and the caption names LLaVA-OV "
            "68M; we take the one of the caption.",
        ),
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
        what="`weight_trajectory.png` shows how the weights change during an answer. Behind the "
        "line of the first view's weight, a shaded range shows with which weights the target "
        "accepts the token. Each rule has a panel, with the answer in which its weights change "
        "most. `report.html` has the answers.",
        command=f'{TABLE} llava15 --trace --rows M T "MT static" "MT*" '
        "--out runs/eval/llava15_trace",
        mini=f"{TABLE} mini --trace",
    ),
    Line(figures=(1, 2), what=DRAWN),
)
