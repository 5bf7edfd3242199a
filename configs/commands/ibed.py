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
        what="These tables compare views M and T, images pooled to 144, 36, 9 and 1 tokens, "
        "captions, and the static mixtures MT, MC, MTC and MTCP. The second command decodes one "
        "request at a time, to measure the speed-up.",
        details=(
            "We compute in float16; the paper names no dtype.",
            "The paper names no split for ChartQA, TextVQA and VQAv2. We take the splits with "
            "public answers, from the sets that the paper links. TABED's released code fetches "
            "these sets from LMMs-Eval-Lite.",
            "In the sets of image pairs and stories we ask each sample's own question. TABED "
            "prints one prompt for all samples.",
            "`predicted` is the speed-up of Table 1b, with the measured time of the target's pass "
            "over a block; the paper takes the time of a pass over one token instead.",
            "The paper's Eq. (2) is about one request at a time, as in the second command. Our "
            "table has the mean of Eq. (2) over the sets, while the paper prints one value for "
            "each set.",
            "The mini models read an image as 16 tokens, so it is pooled to 4 and to 1.",
        ),
        command=f"{TABLE} ibed\n{TABLE} ibed --rows M T --batch-size 1 --out runs/eval/ibed_one",
        mini=f"{TABLE} mini_views\n{TABLE} mini --rows M,C M,T,C P4 P1 --out runs/eval/mini_pools",
    ),
    Line(
        tables=(4,),
        needs="train; 1 GB",
        what="This table has the hyperparameters of the 68M draft. Our recipe has the same "
        "hyperparameters, and this command trains the draft.",
        details=("We crop images and do not group samples, as for TABED's Table 15.",),
        command=f"{TRAIN} llava15_68m",
        mini=f"{TRAIN} mini_draft",
    ),
    Line(
        tables=(5,),
        needs="train, benchmarks, plots; 15 GB",
        what="This table has drafts that are trained further on pooled images. The first command "
        "of each pair trains the finished draft further: it repeats the second stage of training, "
        "on pooled images. The second command measures the result.",
        details=(
            "In the paper, training switches to pooled images within the second stage. The paper "
            "prints neither where it switches nor the hyperparameters; we use those of Table 4.",
        ),
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
        what="These tables compare captioners, by themselves and in mixtures. Tables 1 to 3 have "
        "short captions; Tables 6 and 7 have Florence-2's detailed captions, and those of BLIP and "
        "BLIP-2.",
        details=(
            "All captioners run in float32. BLIP and BLIP-2 keep their own defaults, as in TABED's "
            "released code.",
            "In the command with the shipped models the mini target writes the detailed captions.",
        ),
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
        what="In these tables view M has a weight of 1 to 4 in every mixture, and the other views "
        "have 1. The second command has detailed captions.",
        command=f"{TABLE} ibed_weights\n{TABLE} ibed_weights {LONG} --out "
        f"runs/eval/ibed_weights_detailed",
        mini=f"{TABLE} mini_weights",
    ),
    Line(
        tables=(10, 11),
        figures=(3, 9),
        needs="plots, captioner; 3 GB",
        what="These tables and figures show how long the image encoder (tower), prefill and "
        "decoding take for each number of images. `inference_times.png` draws these times as bars. "
        "The models have random weights, so only the captioners are fetched.",
        details=(
            "Our prompts have 648, 1224 and 2952 tokens. The paper's have 600, 1200 and 3000. "
            "Our answers are as long as the paper's.",
            "We time the draft's prefill for the same prompts. In the paper the draft's prompts "
            "have 200, 1200 and 2200 tokens.",
            "We time the draft's steps for batches of up to 128 rows (4 views of 32 requests), "
            "with a cache of 1,024 tokens. The paper plots batches of up to 64 rows over 200 "
            "steps.",
            "The paper names no dtype.",
        ),
        command=f"{PASSES} --parts passes images captions flops",
        mini=f"{LATENCY} mini --parts passes images captions flops --captioners "
        f"jax:jaxspec_demo/mini/captioner",
    ),
    Line(
        tables=(12,),
        figures=(10,),
        needs="benchmarks, quality; 15 GB",
        what="This table and figure have the accuracy, ROUGE-L and METEOR of the target, the draft "
        "and the pooled drafts of Table 5, with and without images, and some of their answers.",
        details=(
            "We compute in float16; the paper names no dtype.",
            "The paper does not say how many questions it asked. The digits of its scores fit 100 "
            "of ChartQA and all 1,000 of OCRBench, so we ask these, and 100 of TextCaps.",
            "The paper does not say how these questions are asked and judged, and which variant "
            "of ROUGE it computes. Here an answer is right if it holds an accepted one, and ROUGE "
            "is ROUGE-L.",
        ),
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
        what="This table has Llama-68M as a draft, first as it was published, and then trained "
        "further on the texts of LLaVA's data.",
        details=(
            "The paper prints no learning rates for this draft, so we use those of the second "
            "stage in Table 4.",
        ),
        command=f"{TABLE} ibed --rows T --draft JackFram/llama-68m --out "
        f"runs/eval/ibed_llama\n{TRAIN} text_68m\n{TABLE} ibed --rows T --draft "
        f"runs/train/text_68m/hf --out runs/eval/ibed_text",
        mini=f"{TRAIN} mini_text\n{TABLE} mini --rows T --draft runs/train/mini_text/hf --out "
        f"runs/eval/mini_text",
    ),
    Line(
        figures=(4, 5, 8, 11),
        needs="benchmarks, captioner, plots; 16 GB",
        what="`report.html` shows answers, and which of their tokens each view predicted. In "
        "`overlap.png`, the panel of ChartQA corresponds to the paper's Figure 5, with bars in "
        "place of circles. `accepted_over_time.png` shows how many guesses are accepted in each "
        "tenth of the answers.",
        command=f"{TABLE} ibed --trace --rows M T C MTC --out runs/eval/ibed_trace",
        mini=f"{TABLE} mini --trace",
    ),
    Line(figures=(1, 2, 6), what=DRAWN),
)
