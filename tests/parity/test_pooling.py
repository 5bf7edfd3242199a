"""View P pools as PyTorch's adaptive average pooling does, in front of the projector."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.errors import InputError
from jaxspec.models.families import build
from jaxspec.models.inputs import Pool
from jaxspec.models.language_model import LanguageModel
from jaxspec.prompts.views import parse_views
from tests import tiny

torch = pytest.importorskip(
    "torch", reason="torch is the oracle of parity: install the `parity` extra"
)

SIZES = [(576, 144), (576, 1), (576, 100), (16, 4)]
"""LLaVA-1.5's and the mini models'; 24 places to 10 overlap."""


def adaptive(features: np.ndarray, left: int, kind: str) -> np.ndarray:
    """Pool [P, E] to [P', E] by PyTorch."""
    columns = torch.tensor(features).T
    if kind == "avg1d":
        return torch.nn.functional.adaptive_avg_pool1d(columns, left).T.numpy()
    side, small = round(len(features) ** 0.5), round(left**0.5)
    page = columns.reshape(-1, side, side)
    return torch.nn.functional.adaptive_avg_pool2d(page, small).flatten(1).T.numpy()


@pytest.mark.parametrize("kind", ["avg2d", "avg1d"])
@pytest.mark.parametrize(("tokens", "left"), SIZES)
def test_pools_as_pytorch(tokens: int, left: int, kind: str) -> None:
    features = np.random.default_rng(0).normal(size=(tokens, 3)).astype(np.float32)
    pool = Pool(left, "avg1d" if kind == "avg1d" else "avg2d")
    np.testing.assert_allclose(
        pool.matrix(tokens) @ features, adaptive(features, left, kind), atol=1e-6
    )


@pytest.mark.parametrize("name", ["P", "P1", "P4"])
def test_the_projector_reads_averages(name: str) -> None:
    """The projector reads averages of features, of each image for itself."""
    model, params = tiny.lvlm(16, 2, seed=0)
    (view,) = parse_views([name])
    assert view.pool is not None
    features = np.random.default_rng(1).normal(size=(1, 2, 4, 8)).astype(np.float32)
    project = {
        k: {n: np.asarray(x) for n, x in v.items()}
        for k, v in params["multi_modal_projector"].items()
    }

    def projector(x: np.ndarray) -> np.ndarray:
        inner = torch.tensor(x @ project["linear_1"]["weight"].T + project["linear_1"]["bias"])
        return (
            torch.nn.functional.gelu(inner).numpy() @ project["linear_2"]["weight"].T
            + project["linear_2"]["bias"]
        )

    left = int(name[1:] or 1)
    expected = [projector(adaptive(page, left, "avg2d")) for page in features[0]]
    ours = build(model.config).apply(
        {"params": params}, jnp.asarray(features), view.pool, method="project"
    )
    np.testing.assert_allclose(ours, np.concatenate(expected)[None], atol=1e-5)


@pytest.mark.parametrize(("pool", "tokens"), [(Pool(100 + 1), 576), (Pool(25), 16)])
def test_sizes_that_cannot_be(pool: Pool, tokens: int) -> None:
    with pytest.raises(
        InputError, match=f"view P: a tile of {tokens} image tokens cannot be pooled to"
    ) as refusal:
        pool.matrix(tokens)
    assert "\n" not in str(refusal.value)


def test_the_tower_runs_once_for_all_views() -> None:
    """For a draft with a tower of its own, views M and P run one convolution for the target and one
    for the draft.
    """
    import jax

    model, params = tiny.lvlm(16, 2, seed=0)
    batch, options = tiny.prompts([3], [1], ("M", "P", "T")), tiny.sampling(1)
    speculator = tiny.speculator(model, LanguageModel(model.config), ("M", "P", "T"), 3)
    both = {"target": params, "draft": params}
    program = jax.make_jaxpr(lambda: speculator.prefill(both, batch, options, 8))()
    assert str(program).count("conv_general_dilated[") == 2
