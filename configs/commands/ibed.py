"""IbED's tables and figures."""

from __future__ import annotations

from configs.commands.line import DRAWN, LATENCY, PASSES, QUALITY, TABLE, TRAIN, Line
from configs.published.ibed import POOLED

DRAFTS = " ".join(f'"pool ({n}, ft)=runs/train/pooled_{n}/hf:{view}"' for n, view in POOLED.items())
LONG = "--captioner florence2:florence-community/Florence-2-large-ft:MORE_DETAILED_CAPTION"

IBED = (
    Line(
        tables=(1, 2, 3),
        figures=(7,),
        needs="benchmarks, captioner, plots; 16 GB",
        what="M against T; images pooled to 144, 36, 9 and 1 tokens; captions; static mixtures "
        "MT, MC, MTC, MTCP; in float16, where the paper names no dtype. For ChartQA, TextVQA and "
        "VQAv2 it names no split: here they are those with public answers, from the sets that it "
        "links; TABED's released code fetches them from LMMs-Eval-Lite. The pair and story sets "
        "are asked each row's own question, where TABED prints one prompt for all. `predicted` is "
        "the speed-up of Table 1b, with the time of the target's pass over a block, for which the "
        "paper takes one over a token; Eq. (2) is of one request, as in the second command. The "
        "table has its mean over sets; the paper prints one for each. The mini models have 16 "
        "tokens an image, pooled to 4 and 1",
        command=f"{TABLE} ibed\n{TABLE} ibed --rows M T --batch-size 1 --out runs/eval/ibed_one",
        mini=f"{TABLE} mini_views\n{TABLE} mini --rows M,C M,T,C P4 P1 --out runs/eval/mini_pools",
    ),
    Line(
        tables=(4,),
        needs="train; 1 GB",
        what="hyperparameters of the 68M draft: the recipe has them. Images are cropped, and "
        "nothing is grouped, as in TABED's Table 15",
        command=f"{TRAIN} llava15_68m",
        mini=f"{TRAIN} mini_draft",
    ),
    Line(
        tables=(5,),
        needs="train, benchmarks, plots; 15 GB",
        what="drafts trained further on pooled images, by one more second stage from the finished "
        "draft. The paper pools during the second stage, and prints neither where that starts nor "
        "its hyperparameters; here they are Table 4's",
        command="\n".join(
            f"{TRAIN} pooled --view {view} --runs runs/train/pooled_{n}\n"
            f'{TABLE} ibed --rows "pool ({n})" --draft runs/train/pooled_{n}/hf '
            f"--out runs/eval/ibed_pooled_{n}"
            for n, view in POOLED.items()
        ),
        mini=f"{TRAIN} mini_pooled\n"
        f"{TABLE} mini --rows P --draft runs/train/mini_pooled/hf --out runs/eval/mini_pooled",
    ),
    Line(
        tables=(6, 7),
        needs="benchmarks, captioner, plots; 24 GB",
        what="captions, by themselves and in mixtures: next to the short ones of `ibed` "
        "Florence-2's detailed ones, BLIP's, BLIP-2's; all in float32, BLIP's and BLIP-2's by "
        "their own defaults, as in TABED's released code. The mini target writes the detailed "
        "captions of the mini command",
        command=f"{TABLE} ibed --rows C MC MTC {LONG} --out runs/eval/ibed_detailed\n{TABLE} ibed "
        f"--rows C --captioner blip:Salesforce/blip-image-captioning-base --out "
        f"runs/eval/ibed_blip\n{TABLE} ibed --rows C --captioner blip:Salesforce/blip2-opt-2.7b "
        f"--out runs/eval/ibed_blip2",
        mini=f"{TABLE} mini --rows C M,C M,T,C "
        '--captioner "jax:jaxspec_demo/mini/target:Describe this image in detail." '
        "--out runs/eval/mini_detailed",
    ),
    Line(
        tables=(8, 9),
        needs="benchmarks, captioner, plots; 16 GB",
        what="weights of 1 to 4 for M in every mixture; with detailed captions too",
        command=f"{TABLE} ibed_weights\n{TABLE} ibed_weights {LONG} --out "
        f"runs/eval/ibed_weights_detailed",
        mini=f"{TABLE} mini_weights",
    ),
    Line(
        tables=(10, 11),
        figures=(3, 9),
        needs="plots, captioner; 3 GB of captioners, other weights are random",
        what="bars of tower, prefill and decoding by images (`inference_times.png`), for prompts "
        "of 648, 1224 and 2952 tokens, where the paper has 600, 1200 and 3000, and for answers of "
        "the lengths it prints; the draft's prefill, where the paper counts 200, 1200 and 2200 "
        "tokens, and its steps by rows, up to 128 (4 views of 32), at 1,024 slots, where the paper "
        "draws up to 64 rows over 200 steps; the paper names no dtype",
        command=f"{PASSES} --parts passes images captions flops",
        mini=f"{LATENCY} mini --parts passes images captions flops --captioners "
        f"jax:jaxspec_demo/mini/captioner",
    ),
    Line(
        tables=(12,),
        figures=(10,),
        needs="benchmarks, quality; 15 GB",
        what="accuracy, ROUGE-L and METEOR of the target, the draft and the pooled drafts of Table "
        "5, with and without images, and answers, in float16; the digits are of 100 questions of "
        "ChartQA and the 1,000 of OCRBench; the paper does not say how many are of TextCaps, "
        "nor how any is asked and judged, by which ROUGE, and in which dtype",
        command=f"{QUALITY} llava15 --sets chartqa textcaps --text-only --drafts {DRAFTS} --out "
        f"runs/quality/ibed\n{QUALITY} llava15 --sets ocrbench --limit 1000 --text-only --drafts "
        f"{DRAFTS} --out runs/quality/ibed_ocrbench",
        mini=f"{QUALITY} mini --sets chart read --text-only "
        '--drafts "pool (ft)=runs/train/mini_pooled/hf:P" '
        "--out runs/quality/mini_three",
    ),
    Line(
        tables=(13,),
        needs="train, benchmarks, plots; 15 GB",
        what="Llama-68M as a draft, as it is and trained on the texts, with the rates of Table 4's "
        "second stage, as the paper prints none",
        command=f"{TABLE} ibed --rows T --draft JackFram/llama-68m --out "
        f"runs/eval/ibed_llama\n{TRAIN} text_68m\n{TABLE} ibed --rows T --draft "
        f"runs/train/text_68m/hf --out runs/eval/ibed_text",
        mini=f"{TRAIN} mini_text\n{TABLE} mini --rows T --draft runs/train/mini_text/hf --out "
        f"runs/eval/mini_text",
    ),
    Line(
        figures=(4, 5, 8, 11),
        needs="benchmarks, captioner, plots; 16 GB",
        what="answers (`report.html`), which tokens which view would have kept (Figure 5 is the "
        "panel of ChartQA in `overlap.png`, with bars in place of circles), and when drafts are "
        "accepted (`accepted_over_time.png`)",
        command=f"{TABLE} ibed --trace --rows M T C MTC --out runs/eval/ibed_trace",
        mini=f"{TABLE} mini --trace",
    ),
    Line(figures=(1, 2, 6), what=DRAWN, why="the method"),
)
