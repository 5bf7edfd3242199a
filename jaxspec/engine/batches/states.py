"""Make states of a batch: of empty rows, and with other rows inserted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.state import DecodeState
from jaxspec.decoding.steps import insert_rows
from jaxspec.engine.batches.batcher import Batcher
from jaxspec.engine.batches.together import Together
from jaxspec.engine.compile_cache import timed
from jaxspec.engine.memory import Sizes, abstract_inputs, abstract_state
from jaxspec.engine.requests import EncodedRequest
from jaxspec.runtime import usual_settings
from jaxspec.sampling import Sampling
from jaxspec.sharding import replicated

Rows = tuple[DecodeState, Sampling]
"""State and options of the same rows."""


class States:
    """Make states whose prompts and answers have the sizes of one batch."""

    def __init__(self, batcher: Batcher, together: Together) -> None:
        self.batcher, self.together = batcher, together
        self._shapes: dict[tuple[int, Sizes], DecodeState] = {}
        """Shapes by the number of rows and their sizes."""
        self.ms = 0.0
        """Milliseconds of all insertions."""

    def empty(self, rows: int, sizes: Sizes) -> Rows:
        """Return rows of these sizes without any request."""
        held, mesh, key = self.together.held, self.batcher.mesh, (rows, sizes)
        options = self.empty_options(rows)
        if key not in self._shapes:
            inputs, _ = abstract_inputs(held.program, rows, sizes)
            self._shapes[key] = abstract_state(
                held.program, held.params, inputs, options, sizes.new
            )
        with usual_settings():
            empty = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), self._shapes[key]
            )
        options = options if mesh is None else jax.device_put(options, replicated(mesh))
        return empty.replace(done=~empty.done), options

    def empty_options(self, rows: int) -> Sampling:
        """Return the options of rows without any request, as numpy arrays."""
        return self.together.options([], self.batcher.eos, rows)

    def options(self, requests: Sequence[EncodedRequest], rows: int) -> Sampling:
        """Return the options of `rows` rows; those past the requests emit nothing."""
        return self.batcher.options(self.together, requests, rows)

    def inserted(self, old: Rows, fresh: Rows, rows: Sequence[int], logits: Any = None) -> Rows:
        """Return the old rows with the first fresh ones at these places.

        logits: Logits from which the fresh options draw first tokens; None keeps those drawn.
        """
        (state, options), (new, new_options) = old, fresh
        dropped = [len(state.done)] * (len(new.done) - len(rows))
        places = np.asarray([*rows, *dropped], np.int32)
        arrays = state, options, new, new_options, places, logits
        inserted, ms = timed(insert_rows, self.together.held, *arrays)
        self.ms += ms
        return inserted
