"""KV heads train on blocks that begin where they may, count the steps that they should, and have
the loss of their definition.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoints.fitting import named_tensors
from jaxspec.config import Qwen2Config, RopeScaling
from jaxspec.data.prepared import mixture, prepare
from jaxspec.errors import InputError
from jaxspec.heads.blocks import TargetPass
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.kinds.dflash.config import DFlashConfig
from jaxspec.heads.kinds.eagle3.config import Eagle3Config
from jaxspec.heads.kinds.kv_head.config import KVHeadConfig
from jaxspec.heads.loading import load_head, save_head
from jaxspec.heads.making import init_head, new_head
from jaxspec.loading.models import LoadedHead, LoadedModel
from jaxspec.models.families import text_params
from jaxspec.models.inputs import PromptRows
from jaxspec.models.language_model import LanguageModel
from jaxspec.training.config import MeshConfig
from jaxspec.training.conversations import GROUP, ConversationBatch
from jaxspec.training.head_batches import Anchoring, HeadBatches, KeptReadings, draw_anchors
from jaxspec.training.head_loss import make_loss, read_target
from jaxspec.training.loop.dry import dry_run
from jaxspec.training.losses import BlockLoss, block_loss, count_places, draft_loss, metrics_of
from jaxspec.training.recipes import stage_data
from tests import tiny
from tests.tiny import families, training
from tests.tiny.dflash_reference import draft as dflash
from tests.tiny.eagle_reference import draft as reference
from tests.tiny.training import train_head
from tests.training import child
from tests.training.test_conversations import batches, joined, same

ONE_PASS = {"feature": "last_hidden", "parallel": True, "markov": 2, "gamma": 3, "image_slots": 1}
MASK = np.asarray(
    [
        [0, 0, 1, 1, 1, 0, 1, 1, 0],  # two answers, of three tokens and of two
        [0, 1, 0, 0, 0, 0, 0, 0, 1],  # none is followed by what the assistant wrote
        [1, 1, 1, 1, 1, 1, 1, 1, 1],
    ],
    bool,
)


def test_blocks_begin_where_the_assistant_wrote_and_goes_on() -> None:
    anchors = draw_anchors(MASK, 4, draws(0))
    assert anchors[0].tolist() == [2, 3, 6, -1]
    assert anchors[1].tolist() == [-1] * 4
    assert sorted(set(anchors[2])) == anchors[2].tolist()
    assert 0 <= anchors[2].min() <= anchors[2].max() < 8
    others = draw_anchors(MASK, 4, draws(1))
    assert anchors[2].tolist() != others[2].tolist()


def draws(seed: int) -> list[np.random.Generator]:
    """Return a generator for each row of `MASK`."""
    return [np.random.default_rng((seed, row)) for row in range(len(MASK))]


def test_processes_share_a_batch_with_its_anchors() -> None:
    """Processes share a batch with its anchors, also where a row has more images than there is room
    for, and counts nothing.
    """
    config = KVHeadConfig.of_target(tiny.CONFIG, image_slots=1)
    whole, *parts = (
        HeadBatches(
            batches(tile_buckets=(1,), process=process), {"head": (config, Anchoring(anchors=3))}
        )
        for process in ((0, 1), (0, 2), (1, 2))
    )
    drawn = images = 0
    for step in range(GROUP):
        made, halves = whole(step), [part(step) for part in parts]
        same(made, joined(*halves))
        drawn += (made.blocks["head"].anchors >= 0).sum()
        images += (made.blocks["head"].spans[..., 1] > 0).sum()
    assert drawn
    assert images


@pytest.mark.parametrize("kind", get_args(BlockLoss))
@pytest.mark.parametrize("outside", [False, True], ids=["", "a label that is not scored"])
def test_the_loss_is_the_weighted_mean_of_the_steps(kind: BlockLoss, outside: bool) -> None:
    rng = np.random.default_rng(0)
    drafted, teacher = rng.normal(size=(2, 2, 3, 4, 5)).astype(np.float32)
    output = rng.normal(size=(5, 7)).astype(np.float32)
    labels = rng.integers(0, 7, (2, 3, 4))
    mask = np.asarray(
        [[[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]], [[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]]]
    )
    whole = mask.all(-1)
    if outside:
        labels[0, 0, 2] = -1
    weights = np.asarray([1, 0.5, 0.25, 0.125])
    count = count_places(labels, mask)
    blocks = drafted, teacher, labels, mask, kind, weights
    loss, sums = draft_loss(lambda x: x @ output, *blocks, lambda x: x @ output, count)
    metrics = metrics_of(sums)
    if outside:
        mask[0, 0, 2:] = 0

    def probs(x: np.ndarray) -> np.ndarray:
        scores = np.exp(x.astype(np.float64) @ output)
        return scores / scores.sum(-1, keepdims=True)

    p, q = probs(teacher), probs(drafted)
    kl, alpha = (p * np.log(p / q)).sum(-1), np.minimum(p, q).sum(-1)
    each = {
        "kl": kl,
        "ce": -np.log(np.take_along_axis(q, labels[..., None], -1)[..., 0]),
        "reverse_kl": (q * np.log(q / p)).sum(-1),
        "tvd": np.abs(p - q).sum(-1) / 2,
        "lk_alpha": -np.log(alpha),
        "lk_lambda": np.exp(-3 * alpha) * kl + (1 - np.exp(-3 * alpha)) * (1 - alpha),
    }[kind]
    means = [(each[..., s] * mask[..., s]).sum() / mask[..., s].sum() for s in range(4)]
    assert float(loss) == pytest.approx(np.dot(weights, means) / weights.sum(), rel=1e-5)
    assert float(metrics["acceptance"]) == pytest.approx(
        (alpha * mask).sum() / mask.sum(), rel=1e-5
    )
    agrees = (p.argmax(-1) == q.argmax(-1)) & (mask > 0)
    assert float(metrics["accuracy"]) == pytest.approx(agrees.sum() / mask.sum())
    runs = [np.cumprod(agrees[b, a]).sum() for b, a in np.argwhere(whole)]
    assert float(metrics["tokens_per_pass"]) == pytest.approx(1 + np.mean(runs))


def test_the_weight_of_lk_lambda_has_no_gradient() -> None:
    """The weight of `lk_lambda` has no gradient: the loss's gradient is that of the two losses at
    the fixed weight.
    """
    p, logits = (jax.nn.log_softmax(jnp.asarray(row)) for row in ([0.0, 1, 3], [1.0, 0, 2]))
    alpha = jnp.minimum(jnp.exp(p), jnp.exp(logits)).sum()

    def slope(kind: BlockLoss) -> Any:
        return jax.grad(
            lambda x: block_loss(kind, p, jax.nn.log_softmax(x), jnp.zeros((), int))[0]
        )(logits)

    share = jnp.exp(-3 * alpha)
    expected = share * slope("kl") + (1 - share) * slope("tvd")
    np.testing.assert_allclose(slope("lk_lambda"), expected, rtol=1e-5)


def test_blocks_have_a_weight_for_each_place() -> None:
    assert Anchoring(1, decay=0.5).of_places(3) == (1, 0.5, 0.25)
    assert Anchoring(1, weights=(1, 0)).of_places(2) == (1, 0)
    with pytest.raises(InputError, match="2 weights for the 3 places of a block; give 3"):
        Anchoring(1, weights=(1, 0)).of_places(3)
    with pytest.raises(InputError, match="all weights are 0"):
        Anchoring(1, weights=(0, 0))


@dataclass
class Given:
    """Give one batch for every step."""

    batch: ConversationBatch
    images: np.ndarray

    def __call__(self, step: int) -> ConversationBatch:
        return self.batch

    def shown(self, step: int) -> list[np.ndarray]:
        return list(self.images)


def check_loss(
    target: LanguageModel,
    params: Any,
    config: HeadConfig,
    head: Any,
    anchoring: Anchoring,
    scored: Any,
    rotary: np.ndarray | None = None,
) -> None:
    """Assert that the loss of two rows of text is that of its definition, and that all parameters
    learn of it.

    Args:
      scored: (what the head reads of the target, tokens, row, anchor) -> the losses [J] of a
      block's steps.
    """
    tokens = np.random.default_rng(0).integers(3, 20, (2, 12)).astype(np.int32)
    mask = np.zeros((2, 12), bool)
    mask[0, 5:9] = mask[1, 6:] = True
    rows = PromptRows(tokens, np.full(2, 12), rotary=rotary)
    whole = ConversationBatch(rows, mask, None, np.arange(2, dtype=np.uint32))
    # type: ignore[arg-type]
    heads = {"head": (config, anchoring)}
    batch = HeadBatches(Given(whole, np.full((2, 12), -1)), heads, seed=1)(0)
    loss_fn = jax.jit(jax.value_and_grad(make_loss(target, heads), has_aux=True))
    (loss, _), gradient = loss_fn({"target": params, "head": head}, batch)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradient["head"]))

    reader = jax.jit(read_target, static_argnums=(0, 3))
    (read,) = jax.tree.map(np.asarray, reader(target, params, whole, config))
    sums, counts = np.zeros(3), np.zeros(3)
    anchors = batch.blocks["head"].anchors
    for b, anchor in [(row, one) for row in range(2) for one in anchors[row] if one >= 0]:
        losses = scored(read, tokens, b, anchor)
        for step in range(3):
            if anchor + step + 1 >= 12 or not mask[b, anchor : anchor + step + 2].all():
                break
            sums[step] += losses[step]
            counts[step] += 1
    assert counts.all()
    weights = anchoring.decay ** np.arange(3)
    assert float(loss) == pytest.approx((weights * sums / counts).sum() / weights.sum(), rel=1e-4)


@pytest.mark.parametrize("output", ["own", "target's", "target's embedding"])
def test_an_eagle_heads_loss_is_that_of_its_definition(output: str) -> None:
    """An EAGLE head's loss is that of its definition, with rotary positions of three axes, by the
    reference in numpy; labels alone are learned.
    """
    text = Qwen2Config(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        rope_scaling=RopeScaling(mrope_section=(1, 1, 2)),
        tie_word_embeddings=output == "target's embedding",
    )
    target, params = LanguageModel(text), tiny.random_params(text, scale=0.4)
    config = Eagle3Config.of_target(text, target_layers=(0, 1, 2), gamma=3)
    embedding = np.asarray(params["model"]["embed_tokens"]["embedding"], np.float64)
    matrix = params["lm_head"]["weight"] if "lm_head" in params else embedding
    head = tiny.eagle_params(config, {"lm_head": {"weight": matrix}})
    rotary = (np.arange(12) + np.random.default_rng(1).integers(0, 3, (2, 3, 12))).astype(np.int32)
    rotary[:, :, 4:] = np.arange(4, 12)  # text
    tensors = {
        name.replace("layers.0.", "midlayer."): leaf for name, leaf in named_tensors(head).items()
    }
    if output != "own":
        decoder = replace(config.text_config, own_output=False)
        config, _ = replace(config, text_config=decoder), head.pop("lm_head")

    def scored(read: Any, tokens: np.ndarray, b: int, anchor: int) -> np.ndarray:
        states, drafted = (
            read.states[b, :anchor].astype(np.float64),
            tokens[b, anchor + 1 : anchor + 3],
        )
        given = states, tokens[b, : anchor + 1], rotary[b].T[:anchor], drafted
        scores = reference(config.to_dict(), tensors, embedding, *given)
        logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        return np.asarray(
            [-row[token] for row, token in zip(logs, tokens[b, anchor + 1 : anchor + 4])]
        )

    check_loss(
        target, params, config, head, Anchoring(anchors=2, loss="ce", decay=0.5), scored, rotary
    )


def test_a_dflash_heads_loss_is_that_of_its_definition() -> None:
    """A DFlash head's loss is that of its definition, with a draft vocabulary and a Markov head;
    blocks may reach over the end of a row.
    """
    target, params = tiny.text_only(*tiny.lvlm(16, 2, seed=0))
    config = DFlashConfig.of_target(target.config, 2, (0, 1), gamma=3, markov=2)
    words = (*range(3, 20), 21)
    config = replace(config, text_config=replace(config.text_config, draft_vocabulary=words))
    head = tiny.eagle_params(config, params)
    tensors = named_tensors(head) | {"d2t": np.asarray(words) - np.arange(len(words))}
    embedding = np.asarray(params["model"]["embed_tokens"]["embedding"], np.float64)

    def scored(read: Any, tokens: np.ndarray, b: int, anchor: int) -> np.ndarray:
        states, drafted = read.states[b, :anchor].astype(np.float64), tokens[b, anchor + 1 :][:2]
        drafted = np.pad(drafted, (0, 2 - len(drafted)))
        given = embedding, embedding, states, tokens[b, anchor], 3, drafted
        q = dflash(config.to_dict(), tensors, *given)[:, list(words)]
        p = read.hidden[b, anchor : anchor + 3] @ np.asarray(params["lm_head"]["weight"]).T
        p, q = (np.asarray(jax.nn.log_softmax(x)) for x in (p[:, list(words)], q))
        return (np.exp(p) * (p - q[: len(p)])).sum(-1)

    check_loss(target, params, config, head, Anchoring(anchors=2, decay=0.5), scored)


@pytest.mark.full
def test_losses_on_a_mesh_are_those_of_one_device(taught: Path, tmp_path: Path) -> None:
    """Losses on a mesh, with the target split over both axes and the rows over one, are those of
    one device, which keeps what it has read of the target.
    """
    data = {"talk": taught / "talk"}
    alone = replace(child.HEAD.stages[0], train=replace(child.HEAD_STAGE, mesh=MeshConfig(data=1)))
    for name, stages in (("mesh", child.HEAD.stages), ("one", (alone,))):
        recipe = replace(child.HEAD, target=str(taught / "target"), stages=stages, head=ONE_PASS)
        recipe = replace(recipe, keep_readings=str(tmp_path / "readings") if name == "one" else "")
        train_head(recipe, tmp_path / name, data)
    mesh, one = (training.losses(tmp_path / name / "head") for name in ("mesh", "one"))
    np.testing.assert_allclose(mesh, one, rtol=1e-4)


@pytest.mark.full
def test_a_dflash_head_learns_and_drafts(taught: Path, tmp_path: Path) -> None:
    """A DFlash head's loss falls, its blocks are accepted, and its files can be read."""
    train = replace(child.HEAD_STAGE, steps=40, learning_rate=1e-2, mesh=MeshConfig(data=1))
    recipe = replace(
        child.HEAD,
        target=str(taught / "target"),
        stages=(replace(child.HEAD.stages[0], train=train),),
        head={"feature": "block", "layers": 1, "target_layers": (1,), "gamma": 3, "markov": 2},
    )
    save_head(tmp_path / "hf", *train_head(recipe, tmp_path, {"talk": taught / "talk"}), None)
    lines = training.metrics(tmp_path / "head")
    first, last = (np.mean([line["loss"] for line in part]) for part in (lines[:5], lines[-5:]))
    assert last < 0.9 * first
    assert np.mean([line["tokens_per_pass"] for line in lines[-5:]]) > 1
    config, _ = load_head(tmp_path / "hf")
    assert isinstance(config, DFlashConfig)
    assert config.markov == 2


def ended(_: Any, params: Any, *__: Any, **___: Any) -> Any:
    """Run a stage as if it had no step."""
    return params


@pytest.mark.full
def test_a_head_goes_on_from_one_of_its_kind(taught: Path, tmp_path: Path) -> None:
    begun: list[Any] = []

    def begin(config: Any, params: Any, *_: Any, **__: Any) -> Any:
        begun.append(params["head"])
        return {"head": params["head"]}

    data = {"talk": taught / "talk"}
    recipe = replace(child.HEAD, target=str(taught / "target"), draft_vocabulary=20)
    config, head = train_head(recipe, tmp_path, data, begin)
    changed = jax.tree.map(lambda leaf: leaf + 1, head)
    save_head(tmp_path / "head", config, changed, None)
    again, _ = train_head(
        replace(recipe, start=str(tmp_path / "head"), draft_vocabulary=0), tmp_path, data, begin
    )
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, begun[-1], changed)
    other = replace(recipe, start=str(tmp_path / "head"), head={**recipe.head, "pooling": "drop"})
    with pytest.raises(InputError, match="head: its kind is 'KV head', the recipe's 'one-pass KV"):
        train_head(replace(other, head={**recipe.head, "parallel": True}), tmp_path, data)
    with pytest.raises(InputError, match=r"start .*head: its pooling is '\w+', the recipe's 'drop"):
        train_head(other, tmp_path, data)


@pytest.mark.full
def test_an_eagle_head_without_an_output_matrix_goes_on_without_one(
    taught: Path, tmp_path: Path
) -> None:
    target = LoadedModel.load(taught / "target")
    options = {"feature": "fused", "target_layers": (0, 1, 2)}
    config = new_head(target.config, **options)
    config = replace(config, text_config=replace(config.text_config, own_output=False))
    head = init_head(config, text_params(target.config, target.params), jax.random.key(0))
    save_head(tmp_path / "start", config, head, None)
    recipe = replace(child.HEAD, target=str(taught / "target"), head=options)
    recipe = replace(recipe, start=str(tmp_path / "start"))
    trained, params = train_head(recipe, tmp_path, {"talk": taught / "talk"}, ended)
    assert trained.text_config == config.text_config
    assert "lm_head" not in params
    jax.tree.map(np.testing.assert_array_equal, params, head)
    save_head(tmp_path / "hf", trained, params, None)
    assert LoadedHead.load(tmp_path / "hf", target).config.text_config == config.text_config


@pytest.mark.parametrize(
    ("start", "name", "value", "line"),
    [
        (
            {"feature": "fused", "images": "zero"},
            "images",
            "embedding",
            "its images is 'zero', not",
        ),
        ({"feature": "fused"}, "target_layers", (0, 1, 1), r"its target_layers is \(0, 1, 2\), no"),
        ({"feature": "block", "layers": 1}, "markov", 4, "its markov is 0, not 4; leave out --hea"),
        ({"feature": "block", "layers": 1}, "layers", 2, "its layers is 1, not 2; leave out --hea"),
    ],
)
def test_a_start_decides_what_is_not_chosen(
    start: dict[str, Any], name: str, value: Any, line: str, taught: Path, tmp_path: Path
) -> None:
    """A start decides the options that the command line leaves open; one that contradicts the
    command line is refused.
    """
    target = LoadedModel.load(taught / "target")
    layers = (0, 1, 2) if start["feature"] == "fused" else (0, 1)
    options = {"target_layers": layers, **start}
    config = new_head(target.config, **options)
    head = init_head(config, text_params(target.config, target.params), jax.random.key(0))
    save_head(tmp_path / "start", config, head, None)
    plain = {**options, "images": "placeholder"} if "images" in options else options
    recipe = replace(child.HEAD, target=str(taught / "target"), start=str(tmp_path / "start"))
    data = {"talk": taught / "talk"}
    trained, _ = train_head(replace(recipe, head=plain), tmp_path, data, ended)
    assert trained.kept_options == config.kept_options
    other = {**options, name: value}
    assert train_head(replace(recipe, head=other), tmp_path, data, ended)[0] == trained
    with pytest.raises(InputError, match=line):
        train_head(replace(recipe, head=other, chosen=(name,)), tmp_path, data)


def test_a_stage_of_captions_only_teaches_a_head_no_question(taught: Path) -> None:
    stage = replace(child.HEAD.stages[0], train=training.STAGE, plain=True)
    recipe = replace(child.HEAD, target=str(taught / "target"), stages=(stage,))
    target = LoadedModel.load(recipe.target)
    made, inputs = stage_data(recipe, stage, {"talk": tiny.Talk()}, target, target)
    assert made.plain
    assert inputs["plain"]


def test_each_row_is_read_once(tmp_path: Path) -> None:
    """Each row is read once, also next to rows of more images, and kept with keys of two sizes and
    of more than ten layers. In older files keys of one size have no number.
    """

    def reading(batch: ConversationBatch) -> TargetPass:
        hidden = jnp.asarray(batch.tokens)[..., None] * jnp.ones(3)
        pixels = batch.images.get("pixels", np.zeros((len(hidden), 0, 1, 1, 1)))
        shades = pixels.sum((1, 2, 3, 4)).reshape(-1, 1, 1, 1)
        keys = hidden[:, None]
        more = tuple(i * keys for i in range(2, 12))
        return TargetPass(
            hidden=hidden, k=(keys, keys[..., :2], *more), v=(keys + shades, 2 * keys[..., :2])
        )

    read: list[ConversationBatch] = []
    keep = KeptReadings(lambda batch: read.append(batch) or reading(batch), tmp_path)
    samples = mixture([([tiny.Talk()[i] for i in range(6)], 1.0)], seed=0)
    made = batches(samples=samples, batch=2, tile_buckets=(0, 1, 2))
    steps = [made(step) for step in range(GROUP)]
    first = [keep(batch) for batch in steps]
    assert len(read) == 6
    keep = KeptReadings(keep.read, tmp_path)  # of a later run
    for batch, before in zip(steps, first, strict=True):
        wanted, again = jax.tree.leaves(reading(batch)), jax.tree.leaves(keep(batch))
        same(again, jax.tree.leaves(before))
        for row, length in enumerate(batch.rows.length):  # what lies behind a row is read by nobody
            same(
                [leaf[row, ..., :length, :] for leaf in again],
                [leaf[row, ..., :length, :] for leaf in wanted],
            )
    assert len(read) == 6
    for file in tmp_path.iterdir():
        leaves = load_file(file)
        save_file(
            {name: leaves[f"{name}.0"] for name in ("k", "v")} | {"hidden": leaves["hidden"]}, file
        )
    older = keep(steps[0])
    same([*older.k, *older.v], [first[0].k[0], first[0].v[0]])
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:99])
    with pytest.raises(InputError, match=r"reading .*safetensors: cannot be read \(.*\); remove i"):
        keep(steps[0])


def test_a_dry_run_keeps_no_readings(taught: Path, tmp_path: Path) -> None:
    stage = replace(child.HEAD.stages[0], train=replace(child.HEAD_STAGE, mesh=MeshConfig(data=1)))
    recipe = replace(child.HEAD, target=str(taught / "target"), stages=(stage,))
    kept = replace(recipe, keep_readings=str(tmp_path / "readings"))
    train_head(kept, tmp_path / "runs", {"talk": taught / "talk"}, dry_run)
    assert not [*tmp_path.iterdir()]


def test_targets_without_rotary_keys_are_refused(tmp_path: Path) -> None:
    target = families.write(tmp_path, "opt") / "target"
    stage = replace(child.HEAD.stages[0], train=replace(child.HEAD_STAGE, mesh=MeshConfig(data=1)))
    data = {"talk": prepare("talk", tmp_path, [tiny.Talk()[0]])}
    with pytest.raises(InputError, match="no rotary keys"):
        train_head(replace(child.HEAD, target=str(target), stages=(stage,)), tmp_path, data)
