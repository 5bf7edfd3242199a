"""What a kind of head says about its files; all other code asks it, and not for the kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from jaxspec.checkpoints.formats.tensor_files import StoredTensor
from jaxspec.config import HeadConfig
from jaxspec.typing import Params

Server = Literal["vllm", "sglang", "speculators"]
"""Program that serves a written head."""
Config = TypeVar("Config", bound=HeadConfig)


@dataclass(frozen=True)
class Kind(ABC, Generic[Config]):
    """Read, write and describe the files of a kind of head."""

    config: type[Config]
    about: str
    """What it is, for its card."""

    def own(
        self, config: Config, stored: dict[str, StoredTensor]
    ) -> tuple[Config, dict[str, StoredTensor]]:
        """Return the configuration as the tensors complete it, and them by this library's names."""
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

    @abstractmethod
    def exported(
        self,
        source: Path,
        config: Config,
        params: Params,
        *,
        target: str | None,
        draft_vocabulary: int | None,
        server: Server | None,
    ) -> tuple[Config, Params]:
        """Return the head as it is exported. Raises InputError for options that it does not take.

        Args:
          source: Directory of the head, for errors.
          target: Name of the target to serve it with.
          draft_vocabulary: Number of tokens to keep.
          server: Program that will serve it.
        """

    def command(self, config: Config, path: str, server: Server) -> str:
        """Return the command that serves the head's target with the head; "" if none does."""
        return ""

    def image_slots(self, config: Config) -> int | None:
        """Return the slots of an image, for a head that pools images."""
        return None

    def facts(self, config: Config) -> dict[str, str]:
        """Return what the kind adds to a head's card."""
        return {}


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
