"""Define the record of a kind of head, `Kind`, and what the files of several kinds share.

Other code asks a kind, and never which kind it is. Public heads store a draft vocabulary as `d2t`,
and as `t2d` for readers of that: `d2t` [words] is the target's id of each draft word less its
index, and `t2d` [V] whether a token is a draft word. Readers of `t2d` put the draft words in the
order of their ids.
"""

from __future__ import annotations

import json
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np

from jaxspec.checkpoints.formats.tensor_files import StoredTensor
from jaxspec.checkpoints.locating import published_name
from jaxspec.config import RotaryConfig
from jaxspec.errors import InputError
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.head import Head
from jaxspec.models.vocabulary import first_tokens
from jaxspec.sharding import Axes
from jaxspec.typing import Params

Server = Literal["vllm", "sglang", "speculators"]
"""Program that serves a written head."""
Arrays = dict[str, np.ndarray]
"""Tensors by name."""
Stored = dict[str, StoredTensor]
"""Tensors in files, by name."""
Config = TypeVar("Config", bound=HeadConfig)

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class ExportOptions:
    """Hold the options of an export."""

    source: Path
    """Directory of the head, for errors."""
    target: str | None
    """Name of the target to serve it with; for a server, its hub id or directory."""
    draft_vocabulary: int | None
    """Number of tokens to keep."""
    server: Server | None
    """Program that will serve it."""


@dataclass(frozen=True, kw_only=True)
class Kind(ABC, Generic[Config]):
    """Describe a kind of head to other code: its classes, its files, how it is recognised."""

    unread: ClassVar[tuple[str, ...]] = ()
    """Files that would change its scores and are not read."""
    cuts_vocabulary: ClassVar[bool] = False
    """Whether an export may keep only the first tokens of its draft vocabulary."""
    config: type[Config]
    module: type[Head]
    titles: tuple[str, ...]
    """Its name, and those of variants, in messages."""
    about: str
    """What it is, for its card."""
    note: str = ""
    """What its card says about other programs that load it."""
    features: tuple[str, ...] = ()
    """Values of `new_head`'s feature that make one; () for a kind that is not trained."""
    options: tuple[str, ...] = ()
    """Options of `new_head` that not every kind has."""
    names: str = "(?!)"
    """Pattern of lower-case names of architectures and of speculators' types."""
    tensors: str = "(?!)"
    """Pattern of tensors that only this kind has."""
    axes: Axes = ()
    """Rows of `jaxspec.sharding.TABLE` for parameters that decoders lack."""

    def claims(self, raw: Mapping[str, Any]) -> bool:
        """Return whether config.json names this kind in entries of its own."""
        return False

    def within(self, raw: Mapping[str, Any]) -> bool:
        """Return whether a model's own files hold such a head, by its config.json."""
        return False

    def resembles(
        self, raw: Mapping[str, Any], names: Sequence[str], tensors: Collection[str]
    ) -> bool:
        """Return whether files without such names may hold this kind.

        Args:
          raw: config.json.
          names: Lower-case names, as for `names`.
          tensors: Names of the tensors, if they were listed.
        """
        return False

    def read(self, path: Path, raw: dict[str, Any]) -> Config:
        """Return the configuration of the head in a directory.

        raw: config.json.
        """
        return self.config.from_dict(raw)

    def completed(self, config: Config, stored: Stored) -> tuple[Config, Stored]:
        """Complete the configuration by the tensors; return both, these by this library's names."""
        return config, stored

    def written(
        self, config: Config, tensors: Arrays, server: Server, architectures: Sequence[str]
    ) -> tuple[dict[str, Any], Arrays]:
        """Return the entries of config.json and the tensors, as files have them.

        Args:
          tensors: By this library's names.
          server: Program that will serve the head, if any can.
          architectures: The target's classes in transformers, which speculators' layout names.
        """
        return config.to_dict(), tensors

    def generation(self, config: Config) -> dict[str, Any]:
        """Return the entries of generation_config.json; {} for a kind without that file."""
        return {}

    @abstractmethod
    def refusal(self, config: Config, server: Server) -> str:
        """Return why a server does not read the head, as a part of an error; "" if it does."""

    def exported(
        self, config: Config, params: Params, options: ExportOptions
    ) -> tuple[Config, Params]:
        """Return the head as it is exported.

        Raises InputError for options that it does not take, and where a server would not find the
        target.
        """
        source, server, text = options.source, options.server, config.text_config
        if server is not None and (reason := self.refusal(config, server)):
            raise InputError(f"{source}: {reason}")
        if options.draft_vocabulary is not None:
            if not self.cuts_vocabulary:
                reason = f"{config.title}s keep their draft vocabulary; leave that out"
                raise InputError(f"{source}: {reason}")
            ids = first_tokens(source, text.draft_vocabulary, options.draft_vocabulary)
            config = replace(config, text_config=replace(text, draft_vocabulary=ids))
        name = options.target or config.target_name
        if server is not None and options.target is None and not (name := published_name(name)):
            raise InputError(
                f"{source}: its target {config.target_name!r} has no id on the hub, so {server} "
                "cannot find it; give --vocab-of its hub id or directory"
            )
        return replace(config, target_name=name), params

    def command(self, config: Config, path: str, server: Server) -> str:
        """Return the command that serves the head's target with the head; "" if none does."""
        return ""

    def image_slots(self, config: Config) -> int | None:
        """Return the slots of an image, for a head that pools images."""
        return None

    def facts(self, config: Config) -> dict[str, str]:
        """Return what the kind adds to a head's card."""
        return {}

    def tag(self, config: Config) -> str:
        """Return the kind's tag on the hub, such as eagle3 or kv-head."""
        return config.name.replace("_", "-")


def renamed(title: str, stored: Stored, rename: Callable[[str], str]) -> Stored:
    """Return a head's tensors by this library's names; InputError for two of one name.

    title: Name of the head's kind.
    """
    tensors: Stored = {}
    for name, tensor in stored.items():
        if (first := tensors.setdefault(rename(name), tensor)) is not tensor:
            raise InputError(f"{title}: {first.name} and {name} are the same parameter; remove one")
    return tensors


def check_one_layer(title: str, names: Iterable[str]) -> None:
    """Raise InputError for tensors of more than one layer.

    title: Name of the head's kind.
    """
    depth = 1 + max((int(match[1]) for name in names if (match := _LAYER.match(name))), default=0)
    if depth > 1:
        raise InputError(f"{title}: has {depth} layers; give a head with one")


def vllm_command(target: str, **speculation: Any) -> str:
    """Return the command by which vLLM serves a target with a draft."""
    config = shlex.quote(json.dumps(speculation))
    return f"vllm serve {shlex.quote(target)} --speculative-config {config}"


def sglang_command(target: str, algorithm: str, path: str, more: str = "") -> str:
    """Return the command by which SGLang serves a target with the head in a path.

    more: Further options, with a space before each.
    """
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} "
        f"--speculative-algorithm {algorithm} --speculative-draft-model-path {shlex.quote(path)}"
        f"{more}"
    )


def speculators_entries(
    algorithm: str, config: HeadConfig, architectures: Sequence[str]
) -> dict[str, Any]:
    """Return the entries that every config.json of speculators has.

    Args:
      algorithm: Name of the kind there.
      architectures: See `Kind.written`.
    """
    method = {"proposal_type": "greedy", "speculative_tokens": config.gamma}
    return {
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method | {"accept_tolerance": 0.0, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": config.target_name, "architectures": [*architectures]},
        },
    }


def window_facts(text: RotaryConfig) -> dict[str, str]:
    """Return what a head's card says of its sliding layers."""
    if text.sliding_window is None:
        return {}
    layers = range(text.num_hidden_layers)
    sliding = sum(text.of_layer(layer).sliding_window is not None for layer in layers)
    return {"window": f"{text.sliding_window} tokens, in {sliding} of {len(layers)} layers"}


_BY_WORD = ("lm_head.weight", "markov_head.markov_w2.weight")
"""Tensors with a row for each draft word."""


def draft_words(title: str, stored: Stored, text: RotaryConfig) -> tuple[int, ...]:
    """Return the target's ids of a head's draft words; () for all tokens in their order.

    Args:
      title: Name of the head's kind, for errors.
      stored: The head's tensors.
      text: Its decoder, with as many draft words as config.json says.

    Raises InputError where `d2t` is missing, or no list of the target's tokens.
    """
    if "d2t" not in stored:
        if text.draft_vocabulary:
            raise InputError(f"{title}: the files lack d2t, the draft vocabulary; fetch it")
        return ()
    offsets, size = stored["d2t"], len(text.draft_vocabulary) or None
    wrong = f"{offsets.file}: d2t {offsets.dtype} {list(offsets.shape)}"
    if len(offsets.shape) != 1 or not offsets.whole_numbers:
        raise InputError(f"{wrong} is not a list of integers; fetch the head again")
    count = offsets.shape[0]
    if size not in (None, count) or not 0 < count <= text.vocab_size:
        number = size or f"1 to {text.vocab_size}"
        raise InputError(f"{wrong} has not {number} tokens, as config.json says; fetch both again")
    tokens = np.arange(count) + offsets.read()
    if tokens.min() < 0 or tokens.max() >= text.vocab_size:
        worst = tokens.min() if tokens.min() < 0 else tokens.max()
        raise InputError(f"{wrong} names token {worst} of {text.vocab_size}; fetch the head again")
    if len(np.unique(tokens)) < count:
        raise InputError(f"{wrong} names a token twice; fetch the head again")
    return () if np.array_equal(tokens, np.arange(text.vocab_size)) else tuple(tokens.tolist())


def with_words(text: RotaryConfig, tensors: Arrays) -> Arrays:
    """Return a head's tensors with `d2t` and `t2d`, and with its draft words in their order."""
    vocabulary = np.asarray(text.draft_vocabulary or range(text.vocab_size), np.int64)
    order = np.argsort(vocabulary)
    ordered = {
        name: np.ascontiguousarray(tensors[name][order]) for name in _BY_WORD if name in tensors
    }
    d2t = vocabulary[order] - np.arange(len(vocabulary))
    t2d = np.isin(np.arange(text.vocab_size), vocabulary)
    return {**tensors, **ordered, "d2t": d2t, "t2d": t2d}
