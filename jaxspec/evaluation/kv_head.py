"""What a KV head would accept of answers that the target wrote: block efficiency without decoding.

At temperature 0 a draft that begins at token a is accepted as far as it agrees with the answer, and all its steps are
scored by one pass of Target-Draft attention over the answer. So one pass gives the blocks of every draft length up to
that one: the same that decoding makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxspec.config import KVHeadConfig
from jaxspec.data.prompts import Prompt
from jaxspec.decoding.engine import Engine, Request
from jaxspec.decoding.loading import LoadedHead, LoadedModel
from jaxspec.evaluation.block_efficiency import each_turn
from jaxspec.evaluation.config import EvalConfig
from jaxspec.evaluation.exactness import whole_row
from jaxspec.models import LanguageModel
from jaxspec.models.inputs import PromptRows
from jaxspec.models.kv_head import HeadRows, KVHead, head_rows, states_before
from jaxspec.models.layers import apply
from jaxspec.typing import Array, Bool, Int, Params


@dataclass(frozen=True)
class Blocks:
    """Blocks of one answer, or of several added up."""

    steps: int = 0
    emitted: int = 0

    def __add__(self, other: Blocks) -> Blocks:
        return Blocks(self.steps + other.steps, self.emitted + other.emitted)

    @property
    def efficiency(self) -> float | None:
        """Tokens per target pass, tau: the correction or bonus token counted, the answer's first token not."""
        return self.emitted / self.steps if self.steps else None


def head_agreement(
    target: LoadedModel, head: LoadedHead, prompt: Prompt, answer: Sequence[int], gamma: int
) -> Bool[np.ndarray, "T J"]:
    """Whether step s of a draft that begins at token t of the answer is the answer's token t + s + 1.

    Past the answer's end it is false. The answer, of T tokens, must be the target's greedy one.
    """
    rows, images, shown = whole_row(target, prompt, answer)
    width = rows.tokens.shape[1]
    begin = int(rows.length[0]) - len(answer)
    prompts = head_rows(head.config, [shown[:begin]], width, len(prompt.images))
    # The head reads the answer too, as far as a draft's beginning: its slots are text.
    prompts.text[0, (prompts.text[0] >= 0).sum() :][: len(answer)] = np.arange(begin, begin + len(answer))
    params = {"target": target.params, "head": head.params}
    agrees = _agreement(target.model, head.config, gamma, params, rows, images, prompts)[0, begin:][: len(answer)]
    last = np.arange(len(answer))[:, None] + np.arange(1, gamma + 1)
    return np.asarray(agrees) & (last < len(answer))


def walk(agrees: Bool[np.ndarray, "T J"], gamma: int) -> Blocks:
    """The blocks of at most `gamma` drafted tokens in which decoding writes an answer, its first token given."""
    at, steps, end = 0, 0, len(agrees) - 1
    while at < end:
        at += min(int(np.cumprod(agrees[at, :gamma]).sum()) + 1, end - at)
        steps += 1
    return Blocks(steps, max(end, 0))


def foretold(
    config: EvalConfig, plain: Engine, heads: Mapping[str, LoadedHead], gammas: Sequence[int]
) -> dict[tuple[str, int, str, int], float | None]:
    """Tokens per target pass of heads over the config's sets, by (set, turn, head, draft length); `plain` is their
    target alone."""
    found = {}
    bar = tqdm(total=len(config.sets) * len(config.turns) * (1 + len(heads)), unit="run", desc="foretold", delay=1)
    for dataset in config.sets:
        bar.set_postfix_str(dataset, refresh=False)
        for turn, questions in each_turn(config, plain, dataset):
            prompts = [question.prompt for question in questions]
            answers = plain.generate([Request(prompt, config.max_new_tokens) for prompt in prompts])
            bar.update()
            for name, head in heads.items():
                agrees = [
                    head_agreement(plain.target, head, prompt, answer.tokens, max(gammas))
                    for prompt, answer in zip(prompts, answers, strict=True)
                ]
                for gamma in gammas:
                    blocks = sum((walk(steps, gamma) for steps in agrees), Blocks())
                    found[dataset, turn, name, gamma] = blocks.efficiency
                bar.update()
    bar.close()
    return found


@partial(jax.jit, static_argnums=(0, 1, 2))
def _agreement(
    model: LanguageModel,
    config: KVHeadConfig,
    gamma: int,
    params: dict[str, Params],
    rows: PromptRows,
    images: dict[str, Array] | None,
    prompts: HeadRows,
) -> Bool[Array, "1 L J"]:
    """For every token of a row as the beginning of a draft."""
    features = None if images is None else model.encode(params["target"], images)
    length = rows.tokens.shape[1]
    seen, cache = model.read(params["target"], model.embed(params["target"], rows, features), rows, length)
    at: Int[Any, "1 L J"] = np.minimum(np.arange(length)[None, :, None] + np.arange(gamma + 1), length - 1)
    tokens = rows.tokens[:, at[0]]
    written = PromptRows(tokens[..., :-1].reshape(1, -1), rows.length)
    embeds = model.embed(params["target"], written, None).reshape(*tokens[..., :-1].shape, -1)
    before = states_before(config, seen, at[..., 0])
    hidden = apply(
        KVHead(config), params["head"], embeds, at[..., 0], at[..., :-1], cache.k[-1], cache.v[-1], prompts, before
    )
    steps = jax.lax.map(lambda x: model.logits(params["target"], x).argmax(-1), jnp.moveaxis(hidden, 2, 0))
    return jnp.moveaxis(steps, 0, 2) == tokens[..., 1:]
