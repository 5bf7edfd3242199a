"""How the views of a draft are weighted, and how the weights learn from what the target has verified."""

from __future__ import annotations

from dataclasses import dataclass

from jaxspec.typing import Array, Bool, Float


@dataclass(frozen=True)
class Static:
    """IbED: the given weights, for good."""

    def init(self, weights: Float[Array, "B R"]) -> Float[Array, "B R"]:
        return weights

    def weights(self, state: Float[Array, "B R"]) -> Float[Array, "B R"]:
        return state

    def observe(
        self,
        state: Float[Array, "B R"],
        p: Float[Array, "B J V"],
        view_probs: Float[Array, "R B J V"],
        valid: Bool[Array, "B J"],
    ) -> Float[Array, "B R"]:
        """Learns from the target's and the views' distributions at the places that were verified in context."""
        return state
