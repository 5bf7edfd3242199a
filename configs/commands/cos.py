"""CoS's tables and figures."""

from __future__ import annotations

from configs.commands.line import DRAWN, TOGETHER, Line

SWEEP = f"{TOGETHER} cos --sets humaneval gsm8k --limit 8"
LAMBDA = "lambda:0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9"

COS = (
    Line(
        tables=(1,),
        what="This table lists the pairs of models. The preset `cos` has these pairs, so the table "
        "needs no command.",
    ),
    Line(
        tables=(2, 3, 4, 5, 6, 7, 8),
        needs="benchmarks, quality, sentencepiece, torch; 95 GB",
        what="These tables have the speed of ensembles and contrasts of models, and how well they "
        "answer. The methods are standard, naive (without APF), speculative (SD) and CoS. The "
        "first command asks the questions in our wording. The second command asks them in the "
        "wording of the released code, and reads a clone of that code in the folder `CoS`.",
        details=(
            "SD and CoS are measured with draft lengths 5 and 1, and the paper prints the better "
            "of the two. CoS of three models has draft length 1. For naive the paper names no "
            "draft length, and we use 5.",
            "SD is naive with the bonus token, which is our reading of the paper's words. In this "
            "reading SD could not be slower than naive. But the paper prints lower speeds for SD "
            "than for naive in all four cells of ensembles that have both, and in three of the "
            "eight of contrasts.",
            "In the first command, pairs with a base model are asked in raw text, and Qwen's in "
            "their chat form.",
            "In the first command, each prompt of GSM8K begins with four solved examples from the "
            "training set. Each prompt of MMLU begins with five examples that give only the "
            "answer. Prompts of CNN/DM have no examples. Each set gives its first 100 questions; "
            "in MMLU these are one or two of each subject.",
            "In the second command all models are asked in raw text. Prompts of GSM8K and MMLU "
            "begin with the released code's own examples, which think step by step. A prompt of "
            "CNN/DM shows one example and then the article, both written as 'Article / "
            "Highlights'. Each set gives 100 questions, in the order into which the released code "
            "shuffles them.",
            "The paper names no dtype, number of timed prompts or length of answers. We use "
            "bfloat16 and 8 prompts of each set. Answers have at most 256 tokens, as in the "
            "released code.",
            "WE-P and CD-P have 0.39 to 0.82 of standard's speed in the paper. We do not have this "
            "parallel variant; a line below our table gives an upper bound of its speed.",
            "The speeds in Tables 5 and 6 are of whole calls. The paper's speeds are means over "
            "prompts. Ours are the number of all tokens divided by the time that they took, in "
            "the fastest of three runs.",
        ),
        command=f"{TOGETHER} cos\n{TOGETHER} cos --released CoS --out "
        f"runs/collaborative/cos_released",
        mini=f"{TOGETHER} visual",
    ),
    Line(
        tables=(9, 10),
        what="""\
These tables have two pairs of models on an Ascend 910B3. JAX does not run on it, so these tables
have no command. Tables 2 to 6 measure the same two pairs on a GPU. The paper prints these speeds:

| models and method | HumanEval | GSM8K | MMLU | CNN/DM |
|---|---:|---:|---:|---:|
| Llama-Vicuna, SD, times standard | 1.79 | 1.50 | 1.47 | 1.51 |
| Llama-Vicuna, CoS, times standard | 1.86 | 1.71 | 1.66 | 1.73 |
| Llama-2, SD, times standard | 1.09 | 1.53 | 1.43 | 1.07 |
| Llama-2, CoS, times standard | 1.39 | 1.53 | 1.52 | 1.16 |
| Llama-Vicuna, standard, tokens per second | 7.60 | 5.83 | 2.60 | 2.35 |
| Llama-Vicuna, SD, tokens per second | 13.59 | 8.73 | 3.81 | 3.55 |
| Llama-Vicuna, CoS, tokens per second | 14.14 | 9.98 | 4.32 | 4.06 |
| Llama-2, standard, tokens per second | 11.98 | 10.63 | 4.96 | 4.51 |
| Llama-2, SD, tokens per second | 13.00 | 16.28 | 7.098 | 4.83 |
| Llama-2, CoS, tokens per second | 16.71 | 16.30 | 7.54 | 5.23 |""",
    ),
    Line(
        figures=(4,),
        needs="benchmarks, plots, sentencepiece, torch; 40 GB",
        what="This figure has the speed-up of CoS for nine weights of the first model, on 8 "
        "prompts of each set. The draft lengths are 1 for both models, then 5 and 1. `sweep.png` "
        "draws the speed-ups of whole calls, as in the paper, and of decoding.",
        details=(
            "In the paper, whole calls are at least 1.5 times as fast at all weights.",
            "In our command the model with the larger weight proposes, as with `--default-proposer "
            "auto`. The paper says only that an appropriate model can be selected.",
        ),
        command=f'{SWEEP} --pairings "Llama, Vicuna" "Qwen 3B" --sweep {LAMBDA} '
        "--out runs/cos_weight",
        mini=f'{TOGETHER} visual --pairings "draft + target" --sweep {LAMBDA} '
        "--out runs/visual_weight",
    ),
    Line(
        figures=(5,),
        needs="benchmarks, plots; 19 GB",
        what="This figure has the speed-up for several values of mu, the weight of the amateur in "
        "contrastive decoding, on 8 prompts of each set. The paper names no temperature, so the "
        "command measures at two, 0 and 1.",
        command=f'{SWEEP} --pairings "Llama-3, T=0" "Llama-3, T=1" '
        "--sweep mu:0.1,0.2,0.3,0.4,0.5 --out runs/cos_mu",
        mini=f'{TOGETHER} visual --pairings "target - target blind" --sweep mu:0.1,0.3,0.5 '
        "--out runs/visual_mu",
    ),
    Line(
        figures=(6,),
        needs="benchmarks, plots, sentencepiece, torch; 95 GB",
        what="This figure has the speed-up for draft lengths 1 to 5 of the smaller model, on 8 "
        "prompts of each set, for all pairs of models.",
        details=(
            "The paper plots only the ensembles and the contrasts of Llama-3 and Llama-2, "
            "and names no temperature.",
        ),
        command=f"{SWEEP} --sweep gamma:1,2,3,4,5 --out runs/cos_gamma",
        mini=f"{TOGETHER} visual --sweep gamma:1,2,3,4,5 --out runs/visual_gamma",
    ),
    Line(
        figures=(8,),
        needs="benchmarks, plots, quality; 19 GB",
        what="This figure has the quality and speed of Llama-3's weighted ensemble for nine "
        "weights of the smaller model. The command writes `sweep.png` and a table.",
        details=(
            "The paper names no temperature for this figure; we use 1.",
            "HumanEval is judged only with `--run-code`. Without `--run-code` the figure instead "
            "has the loss on HumanEval's reference answers, in nats per token.",
        ),
        command=f'{TOGETHER} cos --pairings "Llama-3, T=1" --sweep {LAMBDA} --out runs/cos_quality',
        mini=f"{TOGETHER} synthetic",
    ),
    Line(figures=(1, 2, 3, 7), what=DRAWN),
)
