"""Define EAGLE-3's head (Li et al. 2025, arXiv 2503.01840), from hidden states of its target.

It has one layer, keys and values of its own, and its own output matrix. The state that it reads of
the target is `fc` of some hidden states; for a token that it drafted itself it is its own output.
The target's states are those after DeepStack's addition, as in vLLM, for which these heads are
published; those of transformers 5 and of SGLang are before it. They differ only at image slots.

Two layouts exist, which vLLM, SGLang and tpu-inference load. SafeAILab's and SpecForge's has a
Llama's entries at the top level. speculators' has them under `transformer_layer_config`.

Numbers of target layers are vLLM's: i is the hidden state after i layers, 0 the embedding. So is
`eagle_aux_hidden_state_layer_ids` at the top level. The same entry within `eagle_config` counts the
layers from 0 and names their outputs, as SGLang and ModelOpt read and write it: 1 is the hidden
state after 2 layers. So does `target_layer_ids` in DeepSeek's `Qwen3Eagle3Model` and
`Gemma4Eagle3Model`, which name five.

The tensors of the first layout:

| tensor                                                                  | shape               |
|-------------------------------------------------------------------------|---------------------|
| `fc.weight`                                                             | [D, n target D]     |
| `input_norm.weight`                                                     | norm_before_fc      |
| `fc_norm.i.weight`                                                      | fc_norm             |
| `midlayer.{input_layernorm,hidden_norm,post_attention_layernorm}.weight` | [D]                |
| `midlayer.self_attn.{q,k,v}_proj.weight`                                | [out, 2 D]          |
| `midlayer.self_attn.o_proj.weight`, `midlayer.mlp.*_proj.weight`        | as a Llama's        |
| `norm.weight`                                                           | [D]                 |
| `midlayer.self_attn.{q,k}_norm.weight`                                  | optional (Qwen3's)  |
| `lm_head.weight`                                                        | optional, [words, D] |
| `embed_tokens.weight`                                                   | optional            |
| `d2t` int64 or int32 [draft words]                                      | target id less index |
| `t2d` bool [vocabulary]                                                 | whether it is drafted |

`fc` reads n states, three or as many as config.json names. speculators' and DeepSeek's layer is
`layers.0`; speculators' config.json nests the decoder. DeepSeek's layer for Gemma 4 is a full one
of the target's, whose queries and keys are made of both vectors; its embedding and its scores have
Gemma's factor and cap.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxspec.checkpoints.formats.tensor_files import StoredTensor
from jaxspec.errors import InputError
from jaxspec.heads.files import (
    Arrays,
    ExportOptions,
    Server,
    check_one_layer,
    draft_words,
    renamed,
    sglang_command,
    speculators_entries,
    vllm_command,
    window_facts,
    with_target,
    with_words,
)
from jaxspec.heads.kinds import eagle1
from jaxspec.heads.kinds.eagle3.config import (
    SPECULATORS,
    Eagle3Config,
    EagleConfig,
    GemmaEagleConfig,
)
from jaxspec.heads.kinds.eagle3.module import Eagle3Head
from jaxspec.heads.states import StateKind
from jaxspec.typing import Params

_LAYER = re.compile(r"^(?:midlayer|layers\.0)\.")
_OUTER = (
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size"),
    *("eagle_aux_hidden_state_layer_ids", "jaxspec", "torch_dtype"),
)
"""Entries at the top level of speculators' config.json."""


@dataclass(frozen=True)
class Eagle3Kind(StateKind[Eagle3Config]):
    """Read heads in either public layout, and write them for the programs that serve them."""

    def resembles(
        self, raw: Mapping[str, Any], names: Sequence[str], tensors: Collection[str]
    ) -> bool:
        """Know heads by their names, by `draft_vocab_size` or by their tensors.

        Some trainers write their target's architecture and depth.
        """
        if eagle1.has_tensors(tensors):
            return False
        named = any("eagle3" in name for name in names) or raw.get("draft_vocab_size") is not None
        normed = any(name.endswith("hidden_norm.weight") for name in tensors)
        return named or ("fc.weight" in tensors and normed)

    def completed(
        self, config: Eagle3Config, stored: dict[str, StoredTensor]
    ) -> tuple[Eagle3Config, dict[str, StoredTensor]]:
        """Return the configuration with its draft vocabulary and the optional tensors it has.

        A head without an output matrix uses the target's.

        Raises InputError for a draft vocabulary that is not a list of the target's tokens, and for
        heads with more layers.
        """
        stored = renamed(
            config.title, stored, lambda name: _LAYER.sub("layers.0.", name.removeprefix("model."))
        )
        check_one_layer(config.title, stored)
        text: Any = replace(
            config.text_config,
            own_embedding="embed_tokens.weight" in stored,
            own_output="lm_head.weight" in stored,
        )
        if isinstance(text, EagleConfig):
            text = replace(text, qk_norm="layers.0.self_attn.q_norm.weight" in stored)
        text = replace(text, draft_vocabulary=draft_words(config.title, stored, text))
        parameters = {name: stored[name] for name in stored if name not in ("d2t", "t2d")}
        return replace(config, text_config=text), parameters

    def written(
        self, config: Eagle3Config, tensors: Arrays, server: Server, architectures: Sequence[str]
    ) -> tuple[dict[str, Any], Arrays]:
        raw = config.to_dict() | {"torch_dtype": str(tensors["fc.weight"].dtype)}
        tensors = with_words(config.text_config, tensors)
        if isinstance(config.text_config, GemmaEagleConfig):
            return raw, tensors
        if server != "speculators":
            return raw, {_LAYER.sub("midlayer.", name): leaf for name, leaf in tensors.items()}
        outside = (*_OUTER, "eagle_config", "architectures")
        inner = {key: value for key, value in raw.items() if key not in outside}
        target_size = inner.pop("target_hidden_size")
        return {
            "architectures": [SPECULATORS[0]],
            "transformer_layer_config": inner,
            "target_hidden_size": None if target_size == inner["hidden_size"] else target_size,
            "tie_word_embeddings": False,
            **{key: raw[key] for key in _OUTER},
            **speculators_entries("eagle3", config, architectures),
        }, tensors

    def exported(
        self, config: Eagle3Config, params: Params, options: ExportOptions
    ) -> tuple[Eagle3Config, Params]:
        source, server, text = options.source, options.server, config.text_config
        unread = ["qk_norm"] if server else []
        if server == "sglang":
            unread += ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]
        if names := [name for name in unread if getattr(text, name)]:
            raise InputError(f"{source}: has {', '.join(names)}, which {server} does not read")
        if server == "sglang" and 0 in text.target_layers:
            reason = "reads the target's embedding, and sglang only layers' outputs"
            raise InputError(f"{source}: {reason}")
        return with_target(config, options), params

    def facts(self, config: Eagle3Config) -> dict[str, str]:
        return {"image rule": config.images} | window_facts(config.text_config)

    def command(self, config: Eagle3Config, path: str, server: Server) -> str:
        target, count = config.target_name, min(config.gamma, 3)
        if server == "speculators":
            return f"vllm serve {shlex.quote(path)}"
        if server == "sglang":
            steps = (
                f" --speculative-num-steps {count} --speculative-eagle-topk 1"
                f" --speculative-num-draft-tokens {count + 1}"
            )
            return sglang_command(target, "EAGLE3", path, steps)
        return vllm_command(target, method="eagle3", model=path, num_speculative_tokens=count)


KIND = Eagle3Kind(
    config=Eagle3Config,
    module=Eagle3Head,
    titles=("EAGLE-3",),
    about="EAGLE-3 head: a draft that reads hidden states of its target",
    features=("fused",),
    options=("images", "layers", "target_layers", "window"),
    axes=((r"fc/weight", (None, "embed")),),
)
