"""AASD's tables and figures."""

from __future__ import annotations

from configs.commands.line import DRAWN, HEAD, TRAIN, Line

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
            f"{HEAD} aasd_{size or '7b'} --heads {ablations} --baselines "
            f"FT-LLaMA=runs/train/ft_llama/hf DT-LLaMA={runs['dt_llama']}/hf "
            f"DT-LLaVA={runs['dt_llava']}/hf",
        ]
    )


AASD = (
    Line(
        tables=(1, 2),
        figures=(3, 4),
        needs="train, benchmarks; 40 GB",
        what="These tables compare the KV head with heads that lack a part of it, and with "
        "separate drafts. Four more heads are trained, for the same number of steps as the full "
        "head. One lacks the projector, one the image's keys, one the text's keys, and one all of "
        "the target's keys. Separate drafts are finetuned (FT) or distilled on the target's "
        "answers (DT), [from scratch](data.md#aasds-drafts). The commands train and measure all "
        "of these for the 7B target, then for the 13B. With `--untrained` no such heads are "
        "trained: each part is removed from the full head instead.",
        details=(
            "Our targets are LLaVA-1.5's, and the paper's are those of 'Visual Instruction "
            "Tuning', so the paper's numbers belong to other models.",
            "The paper names no dtype, number of samples, length of answers or temperature. We "
            "use bfloat16, 100 samples of each set, at most 128 new tokens, and greedy answers.",
            "The prompts are ours too: TABED's instruction, COCO's 'Describe this image in "
            "detail.', and ScienceQA without hints.",
            "How we train heads is our own choice, and is written in the recipe.",
            "In our table omega and delta are measured over whole calls. Further columns have the "
            "same for the decode loop only.",
            "tau is a little below 1 + gamma alpha, because the block in which an answer ends "
            "adds no token of the target's own. The difference is 0.06 to 0.19 in the paper. In "
            "our tables of heads it is 0 to 0.22.",
            "For Figures 3 and 4 the paper disables keys, and does not say whether it trained new "
            "heads for this. We train new heads.",
        ),
        command=f"{_head()}\n{_head('13b')}",
        mini=f"{HEAD} aasd --untrained",
    ),
    Line(figures=(1, 2), what=DRAWN),
)
