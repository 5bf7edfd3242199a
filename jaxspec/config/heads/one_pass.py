"""Configure a KV head that drafts a block in one pass, as DFlash, P-EAGLE and DSpark do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxspec.config.heads.kv_head import KVHeadConfig


@dataclass(frozen=True)
class OnePassConfig(KVHeadConfig):
    """Describe a head whose one pass reads J positions: the newest token, and learned masks.

    Each position sees those before it. All read the hidden state of the newest token, if any.
    """

    markov: int = 0
    """r: rank of a Markov head as in DSpark: it adds a term for the token before to a token's
    score. Tokens are drawn from the softmax of the sum, and verified against it. 0: no Markov
    head."""

    title: ClassVar = "one-pass KV head"
    free: ClassVar = ("target_name",)

    @property
    def keeps_vocabulary(self) -> bool:
        return self.markov > 0

    @property
    def corrects(self) -> bool:
        return self.markov > 0

    def options(self) -> dict[str, Any]:
        """Return the fields by name, and the entry that tells the kind."""
        options = super().options() | {"parallel": True}
        if not self.markov:
            del options["markov"]
        return options
