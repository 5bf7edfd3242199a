"""Define what a kind of head says about its files; other code asks it, not for the kind."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np

from jaxspec.checkpoints.formats.tensor_files import StoredTensor
from jaxspec.config import HeadConfig
from jaxspec.errors import InputError
from jaxspec.typing import Params

Server = Literal["vllm", "sglang", "speculators"]
"""Program that serves a written head."""
Config = TypeVar("Config", bound=HeadConfig)

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class ExportOptions:
    """Hold the options of an export."""

    source: Path
    """Directory of the head, for errors."""
    target: str | None
    """Name of the target to serve it with."""
    draft_vocabulary: int | None
    """Number of tokens to keep."""
    server: Server | None
    """Program that will serve it."""


@dataclass(frozen=True)
class Kind(ABC, Generic[Config]):
    """Read, write and describe the files of a kind of head."""

    unread: ClassVar[tuple[str, ...]] = ()
    """Files that would change its scores and are not read."""
    config: type[Config]
    about: str
    """What it is, for its card."""

    def read(self, path: Path, raw: dict[str, Any]) -> Config:
        """Return the configuration of the head in a directory.

        raw: config.json.
        """
        return self.config.from_dict(raw)

    def completed(
        self, config: Config, stored: dict[str, StoredTensor]
    ) -> tuple[Config, dict[str, StoredTensor]]:
        """Complete the configuration by the tensors; return both, these by this library's names."""
        return config, stored

    @abstractmethod
    def written(
        self,
        config: Config,
        tensors: dict[str, np.ndarray],
        server: Server,
        architectures: list[str] | None,
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return the entries of config.json and the tensors, as files have them.

        Args:
          tensors: By this library's names.
          server: Program that will serve the head, if any can.
          architectures: The target's classes in transformers, which speculators' layout names.
        """

    def generation(self, config: Config) -> dict[str, Any]:
        """Return the entries of generation_config.json; {} for a kind without that file."""
        return {}

    @abstractmethod
    def exported(
        self, config: Config, params: Params, options: ExportOptions
    ) -> tuple[Config, Params]:
        """Return the head as it is exported; InputError for options that it does not take."""

    def command(self, config: Config, path: str, server: Server) -> str:
        """Return the command that serves the head's target with the head; "" if none does."""
        return ""

    def image_slots(self, config: Config) -> int | None:
        """Return the slots of an image, for a head that pools images."""
        return None

    def facts(self, config: Config) -> dict[str, str]:
        """Return what the kind adds to a head's card."""
        return {}


def renamed(
    title: str, stored: Mapping[str, StoredTensor], rename: Callable[[str], str]
) -> dict[str, StoredTensor]:
    """Return a head's tensors by this library's names; InputError for two of one name.

    title: Name of the head's kind.
    """
    tensors: dict[str, StoredTensor] = {}
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


def with_target(config: Config, options: ExportOptions) -> Config:
    """Return the configuration with the export's target, of a head that keeps its vocabulary.

    Raises InputError for another vocabulary, and where speculators' layout would lack the target's
    name.
    """
    if options.draft_vocabulary is not None:
        reason = f"{config.title}s keep their draft vocabulary; leave that out"
        raise InputError(f"{options.source}: {reason}")
    config = replace(config, target_name=options.target or config.target_name)
    if options.server == "speculators" and not config.target_name:
        advice = f"which {options.server} needs; give vocab-of"
        raise InputError(f"{options.source}: does not name its target, {advice}")
    return config


def speculators_entries(
    algorithm: str, config: HeadConfig, architectures: list[str] | None
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
            "verifier": {"name_or_path": config.target_name, "architectures": architectures or []},
        },
    }
