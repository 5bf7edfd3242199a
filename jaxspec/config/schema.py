"""Types and ranges of config.json's entries: one table, as names mean the same in all families."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.errors import InputError

WHOLE = (1 << 31) - 1
"""The largest number that token ids and positions, int32, take."""


@dataclass(frozen=True)
class Rule:
    """The type and range of an entry."""

    kind: type
    low: float = -math.inf
    high: float = math.inf
    levels: tuple[int, ...] = (0,)
    """How deep lists may be nested around it: 0 is the value itself."""

    def __str__(self) -> str:
        if self.kind in (int, float):
            noun, nouns = {int: ("whole number", "whole numbers"), float: ("number", "numbers")}[
                self.kind
            ]
            span = f" from {self.low:.10g} to {self.high:.10g}"
        else:
            noun = {bool: "truth value (true or false)", str: "text", dict: "object"}[self.kind]
            nouns, span = f"{noun}s", ""
        forms = (
            f"one {noun}{span}",
            f"a list of {nouns}{span}",
            f"a list of lists of {nouns}{span}",
        )
        return " or ".join(forms[level] for level in self.levels)

    def allows(self, value: Any, level: int = 0) -> bool:
        """Return whether a value has the type and range; booleans and infinity are no numbers."""
        if isinstance(value, list | tuple):
            return level < max(self.levels) and all(self.allows(part, level + 1) for part in value)
        if level not in self.levels or not isinstance(
            value, (int, float) if self.kind is float else self.kind
        ):
            return False
        if self.kind not in (int, float):
            return True
        return not isinstance(value, bool) and self.low <= value <= self.high


def _rules(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_SWITCHES = (
    "attention_bias do_layer_norm_before enable_bias layer_norm_elementwise_affine mlp_bias "
    "multimodal_projector_bias norm_before_fc norm_before_residual norm_output own_embedding "
    "reads_text remove_final_layer_norm _remove_final_layer_norm "
    "slot_bias tie_word_embeddings truncate use_sliding_window vision_use_head"
)
_WORDS = (
    "activation_function feature hidden_act model_type pooling projector_hidden_act rope_type "
    "target_hash target_name type vision_aspect_ratio vision_feature_select_strategy"
)
_TOKENS = (
    "bos_token_id image_token_id image_token_index video_token_id video_token_index "
    "vision_end_token_id vision_start_token_id"
)
_WIDTHS = (
    "draft_vocab_size ffn_dim hidden_size in_channels intermediate_size num_channels out_hidden_size projection_dim "
    "vocab_size"
)
RULES: dict[str, Rule] = {
    **_rules(
        Rule(dict),
        "eagle_config rope_parameters rope_scaling text_config transformer_layer_config vision_config",
    ),
    **_rules(Rule(bool), _SWITCHES),
    **_rules(Rule(str), _WORDS),
    **_rules(Rule(str, levels=(1,)), "layer_types"),
    **_rules(Rule(int, 0, WHOLE), _TOKENS),
    # -1 is how transformers before 4.30 wrote that a Llama has none.
    **_rules(Rule(int, -1, WHOLE), "pad_token_id"),
    **_rules(Rule(int, 0, WHOLE, (0, 1)), "eos_token_id"),
    **_rules(Rule(int, 0, WHOLE, (1,)), "draft_vocabulary"),
    **_rules(Rule(int, 1, 1 << 24), _WIDTHS),
    # 0 is what this library's own defaults are written as.
    **_rules(
        Rule(int, 0, 1 << 24),
        "head_dim num_key_value_heads target_hidden_size word_embed_proj_dim",
    ),
    **_rules(Rule(int, 1, 1024), "depth gamma num_hidden_layers"),
    **_rules(Rule(int, 1, 1 << 30), "max_position_embeddings original_max_position_embeddings"),
    **_rules(Rule(int, 0, 1 << 30), "max_window_layers sliding_window tokens_per_second"),
    **_rules(
        Rule(int, 1, 4096),
        "image_size num_attention_heads num_heads patch_size spatial_merge_size "
        "temporal_patch_size window_size",
    ),
    **_rules(Rule(int, 0, 1 << 16), "image_slots image_tokens"),
    **_rules(Rule(int, -1024, 1024), "vision_feature_layer"),
    **_rules(
        Rule(int, 0, 1024, (1,)),
        "eagle_aux_hidden_state_layer_ids fullatt_block_indexes target_layers",
    ),
    **_rules(Rule(int, 1, 1 << 24, (1,)), "mrope_section"),
    **_rules(Rule(int, 1, 1 << 14, (2,)), "image_grid_pinpoints"),
    **_rules(Rule(float, 0, 1), "layer_norm_eps rms_norm_eps"),
    **_rules(Rule(float, 1, 1e15), "rope_theta"),
    **_rules(Rule(float, 1e-6, 1e6), "beta_fast beta_slow factor high_freq_factor low_freq_factor"),
    **_rules(Rule(float, 0, 1e6), "attention_factor mscale mscale_all_dim"),
}


def check_fields(part: str, raw: Mapping[str, Any], rules: Mapping[str, Rule] = RULES) -> None:
    """Raise InputError for the first entry that the table does not allow; null means the default.

    Args:
      part: what errors call it, such as "text config".
      rules: another table.
    """
    for name, value in raw.items():
        rule = rules.get(name)
        if value is not None and rule is not None and not rule.allows(value):
            raise InputError(f"{part}: {name} {_shown(value)} is not supported; give {rule}")


def check_choice(part: str, config: Any, name: str, *known: str) -> None:
    """Raise InputError for a field with an unknown word."""
    if (value := getattr(config, name)) not in known:
        raise InputError(
            f"{part}: {name} {value!r} is not supported; supported: {', '.join(map(repr, known))}"
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
