"""Read generation_config.json: what ends an answer, defaults of requests, and what is ignored."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.directories import read_json
from jaxspec.config import TextConfig
from jaxspec.config.schema import check_fields

APPLIED: dict[str, Any] = {
    "repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
}
"""Setting that requests take over -> the value with which it changes nothing."""
SAMPLED: dict[str, Any] = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
"""More of them, for requests that sample."""
NEUTRAL: dict[str, Any] = {
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "forced_decoder_ids": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "min_length": 0,
    "stop_strings": None,
    "guidance_scale": 1,
    "penalty_alpha": 0,
    "dola_layers": None,
    "watermarking_config": None,
    "token_healing": False,
    "constraints": None,
    "force_words_ids": None,
    "num_beams": 1,
    "num_beam_groups": 1,
}
"""Setting that changes transformers' answers and no answers here -> the value with which it does
not."""
SAMPLING = {"top_h": None, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0}
"""More of them, which transformers reads with do_sample only."""
BEAMS = {"length_penalty": 1, "early_stopping": False, "diversity_penalty": 0}
"""More of them, which transformers reads with several beams only."""


@dataclass(frozen=True)
class GenerationSettings:
    """Hold what a checkpoint's generation_config.json says about its answers."""

    file: Path
    stop: int | tuple[int, ...] | None
    """Tokens that end an answer."""
    defaults: dict[str, Any]
    """Fields of `Request` that the file sets, by name."""
    unapplied: dict[str, Any]
    """Settings with which transformers' answers differ, and which jaxspec does not apply."""

    @property
    def applied_line(self) -> str:
        """Return a line that names the defaults of requests; "" without any."""
        defaults = self.defaults.items()
        always = _listed({k: v for k, v in defaults if k not in SAMPLED})
        sampled = _listed({k: v for k, v in defaults if k in SAMPLED})
        parts = [always] * bool(always) + [f"when sampling {sampled}"] * bool(sampled)
        text = "; ".join(parts)
        advice = "generation_config='ignore' leaves this out"
        return f"{self.file} sets {text} ({advice})" if parts else ""

    @property
    def unapplied_line(self) -> str:
        """Return a line that names the settings that are not applied; "" without any."""
        if not self.unapplied:
            return ""
        settings = _listed(self.unapplied)
        return f"{self.file}: {settings}: not applied; transformers' answers differ by that"


def read_generation_settings(path: Path) -> GenerationSettings | None:
    """Return the settings in a checkpoint's directory; None without generation_config.json.

    Limits of the answer's length are left to requests.
    """
    file = path / "generation_config.json"
    if not file.is_file():
        return None
    raw = read_json(file)
    stop = raw.get("eos_token_id")
    check_fields(str(file), TextConfig, {"eos_token_id": stop})
    neutral = NEUTRAL | (SAMPLING if raw.get("do_sample") else {})
    neutral |= BEAMS if raw.get("num_beams") not in (None, 1) else {}
    unapplied = {
        name: raw[name]
        for name, value in neutral.items()
        if raw.get(name) not in (None, value, [], {})
    }
    defaults = {
        name.removesuffix("_ids"): raw[name]
        for name, value in (APPLIED | SAMPLED).items()
        if raw.get(name) not in (None, value, [])
    }
    stop = tuple(stop) if isinstance(stop, list) else stop
    return GenerationSettings(file, stop, defaults, unapplied)


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {json.dumps(value):.40}" for name, value in settings.items())
