"""Break one promise after another by one line, and see that a test of the fast tier notices.

python -m tests.mutants              # all, in copies of the tree
python -m tests.mutants residual     # those whose names hold one of these texts
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Mutant(NamedTuple):
    name: str
    file: str
    """File below `jaxspec/`."""
    old: str
    """Text that occurs once in it."""
    new: str
    test: str
    """Test below `tests/` that must fail."""


LAW = "decoding/test_sampling_law.py::test_sequences_follow_the_targets_law"
GREEDY = "decoding/test_greedy.py::test_speculation_writes_the_targets_tokens"
YIELD = "decoding/test_yields.py::test_a_pass_yields_what_it_did"
STREAM = "decoding/test_streaming.py::"
SHARED = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax"),
}
"""Environment of the runs: programs that a mutant does not change are those of the whole suite."""
MUTANTS = (
    Mutant(
        "an idle head does not catch up",
        "decoding/sources/head.py",
        "lambda context: jnp.any(context.length < most)",
        "lambda context: jnp.any(context.length < -1)",
        "decoding/test_plans.py::test_idle_sources_catch_up[M,eagle,lookup]",
    ),
    Mutant(
        "an idle draft model misses its last token",
        "decoding/sources/draft_model.py",
        "start + committed.count - 2 - cache.length",
        "start + committed.count - 3 - cache.length",
        "decoding/test_plans.py::test_idle_sources_catch_up[M,T,lookup]",
    ),
    Mutant(
        "a key reads behind what another's prompt left",
        "engine/prefixes.py",
        "for p in self.kept if p.owner == owner]",
        "for p in self.kept]",
        "decoding/test_prefixes.py::test_prefixes_are_apart_by_key_and_image",
    ),
    Mutant(
        "an image passes for another one in its place",
        "engine/prefixes.py",
        "if len({*pair}) > 1",
        "if len({*pair}) > 2",
        "decoding/test_prefixes.py::test_prefixes_are_apart_by_key_and_image",
    ),
    Mutant(
        "at one width pieces begin anywhere",
        "engine/reading.py",
        "count -= count % PIECE",
        "count -= 0",
        "decoding/test_prefixes.py::test_at_one_width_no_bit_depends_on_what_was_kept",
    ),
    Mutant(
        "a policy stays with what it knows",
        "engine/policy.py",
        "hope = doubt * self.tokens(i, rows, HOPE) / ms",
        "hope = self.tokens(i, rows) / ms",
        "decoding/test_auto.py::test_it_finds_what_pays_for_each_text",
    ),
    Mutant(
        "drafts may lose without an end",
        "engine/policy.py",
        "self.debt = max(0.0, self.debt + lost - BUDGET * ms / plain)",
        "self.debt = 0.0 * lost",
        "decoding/test_auto.py::test_drafts_lose_little_though_their_fastest_runs_promise_gains",
    ),
    Mutant(
        "the residual forgets the draft",
        "verification.py",
        "excess = jnp.maximum(p - q, 0.0)",
        "excess = jnp.maximum(p - 0 * q, 0.0)",
        "test_verification.py::test_accepted_and_residual_mass_make_the_target",
    ),
    Mutant(
        "the verdict forgets the correction",
        "decoding/state.py",
        "places == verdict.count[:, None], verdict.next_token[:, None], padded",
        "places == verdict.count[:, None] + 1, verdict.next_token[:, None], padded",
        f"{GREEDY}[M,T-3-None-float]",
    ),
    Mutant(
        "more is accepted than is likely",
        "verification.py",
        "(q_x > 0) & (u * q_x < p_x)",
        "(q_x > 0) & (u * u * q_x < p_x)",
        "test_verification.py::test_sequences_follow_the_target",
    ),
    Mutant(
        "greedy verification skips a wrong token",
        "verification.py",
        "count = jnp.cumprod(\n            draft.tokens == best",
        "count = jnp.asarray(\n            draft.tokens == best",
        f"{GREEDY}[M,T-3-None-float]",
    ),
    Mutant(
        "a rejected sibling keeps its mass",
        "verification.py",
        "walk.q * (1 - here), walk.q)",
        "walk.q, walk.q)",
        "test_tree_verification.py::test_sequences_follow_the_target",
    ),
    Mutant(
        "a mixture is weighted by other rows",
        "sampling.py",
        "weights.T[..., None]).sum(0)",
        "weights[::-1].T[..., None]).sum(0)",
        "test_sampling.py::test_mixture_is_filtered_after_mixing",
    ),
    Mutant(
        "views are mixed evenly",
        "sampling.py",
        "(view_probs * weights.T[..., None]).sum(0)",
        "(view_probs * jnp.ones_like(weights.T)[..., None]).sum(0)",
        "test_sampling.py::test_mixture_is_filtered_after_mixing",
    ),
    Mutant(
        "top-p keeps one token too many",
        "sampling.py",
        "(equal & (before < aim))",
        "(equal & (before <= aim))",
        "test_sampling.py::test_equals_go_by_index",
    ),
    Mutant(
        "top-k is forgotten",
        "sampling.py",
        "few = warm & (options.top_k > 0)",
        "few = warm & (options.top_k < 0)",
        "test_sampling.py::test_distribution_equals_numpy",
    ),
    Mutant(
        "siblings are drawn without noise",
        "sampling.py",
        "jnp.log(probs) + noise",
        "jnp.log(probs) + 0 * noise",
        "test_sampling.py::test_siblings_are_draws_without_replacement",
    ),
    Mutant(
        "all rows draw with the first row's key",
        "decoding/state.py",
        "fold(fold(options.keys, count)",
        "fold(fold(options.keys[jnp.zeros(len(count), int)], count)",
        "decoding/test_greedy.py::test_a_row_of_a_batch_is_the_row_alone",
    ),
    Mutant(
        "every step draws with the same key",
        "decoding/state.py",
        "fold(fold(options.keys, count)",
        "fold(fold(options.keys, 0 * count)",
        f"{LAW}[autoregressive]",
    ),
    Mutant(
        "caches are not rolled back",
        "decoding/state.py",
        "cache.replace(length=cache.length + emitted), state.target)",
        "cache.replace(length=cache.length + drafted.shape[1] + 1), state.target)",
        f"{GREEDY}[M,T-3-None-float]",
    ),
    Mutant(
        "rows go on after their end",
        "decoding/state.py",
        "ended = jnp.any(ends, axis=1)\n",
        "ended = jnp.all(ends, axis=1)\n",
        "decoding/test_greedy.py::test_rows_stop_at_their_limits_and_at_eos[3-None]",
    ),
    Mutant(
        "rows pass their limit by one",
        "decoding/state.py",
        "options.max_new_tokens - state.count, options)",
        "options.max_new_tokens - state.count + 1, options)",
        "decoding/test_greedy.py::test_rows_stop_at_their_limits_and_at_eos[3-None]",
    ),
    Mutant(
        "accepted drafts are counted once too often",
        "decoding/state.py",
        "accepted_at=stats.accepted_at.at[:, :width].add(places[:-1] < accepted)",
        "accepted_at=stats.accepted_at.at[:, :width].add(places[:-1] <= accepted)",
        f"{GREEDY}[M,T-3-None-float]",
    ),
    Mutant(
        "a write moves valid slots at the end",
        "cache.py",
        'mode="drop", unique_indices=True',
        'mode="clip", unique_indices=True',
        "test_cache.py::test_a_write_touches_its_slots_and_no_other",
    ),
    Mutant(
        "an accepted path is moved one slot too far",
        "cache.py",
        "slots = root[:, None] + 1 + jnp.arange(path.shape[1])",
        "slots = root[:, None] + 2 + jnp.arange(path.shape[1])",
        f"{GREEDY}[KV head-3-2:5-float]",
    ),
    Mutant(
        "a query reads the next slot",
        "models/attention.py",
        "visible = slots <= (positions if reach is None else reach)[..., None]",
        "visible = slots <= 1 + (positions if reach is None else reach)[..., None]",
        "test_attention.py::test_tokens_of_an_image_read_one_another",
    ),
    Mutant(
        "a window is one position longer",
        "models/attention.py",
        "visible & (slots > positions[..., None] - window)",
        "visible & (slots >= positions[..., None] - window)",
        "test_attention.py::test_a_window_hides_all_but_the_newest_tokens",
    ),
    Mutant(
        "a window is one position longer in a tree",
        "models/attention.py",
        "mask = mask & (mask_behind <= window)",
        "mask = mask & (mask_behind <= window + 1)",
        "test_attention.py::test_a_window_counts_the_positions_of_a_tree",
    ),
    Mutant(
        "the first block of a window is skipped",
        "models/attention.py",
        "jnp.min(least) // BLOCK",
        "jnp.min(least) // BLOCK + 1",
        "test_attention.py::test_a_window_hides_all_but_the_newest_tokens",
    ),
    Mutant(
        "images that follow one another are one row early",
        "prompts/rows.py",
        "first += image.rows",
        "first += image.rows - 1",
        "decoding/test_views.py::test_rewrite_shows_feature_rows",
    ),
    Mutant(
        "a view of other pixels shows the first image's features",
        "prompts/rows.py",
        "first = before * sum(",
        "first = 0 * sum(",
        "decoding/test_views.py::test_a_view_may_show_other_pixels",
    ),
    Mutant(
        "view T shows nothing for an image",
        "prompts/views.py",
        'return encoder.text_ids("\\n")[-1:]',
        'return encoder.text_ids("\\n")[:0]',
        "decoding/test_views.py::test_what_stands_for_an_image",
    ),
    Mutant(
        "a rule forgets all places but the newest block",
        "decoding/drafting/weighting.py",
        "ring = ring + jnp.where(valid",
        "ring = 0 * ring + jnp.where(valid",
        "decoding/test_weighting.py::test_rules_equal_the_reference",
    ),
    Mutant(
        "a rule counts places that were not verified",
        "decoding/drafting/weighting.py",
        "stays = valid & (rank > added[:, None] - self.window)",
        "stays = (rank > 0) & (rank > added[:, None] - self.window)",
        "decoding/test_weighting.py::test_rules_equal_the_reference",
    ),
    Mutant(
        "an error decays with the wrong power",
        "decoding/drafting/rules.py",
        "return -jnp.log(error) / self.tau",
        "return -jnp.log(error) * self.tau",
        "decoding/test_weighting.py::test_rules_equal_the_reference",
    ),
    Mutant(
        "penalties forget what the block has drafted",
        "decoding/processors.py",
        "occurrences.at[rows, columns, fresh].add(1",
        "occurrences.at[rows, columns, fresh].add(0",
        "decoding/test_processors.py::test_speculation_writes_the_processed_tokens",
    ),
    Mutant(
        "a form forgets what the block has drafted",
        "decoding/grammars.py",
        "answer = [*committed, *drafted[row, seen].tolist()]",
        "answer = [*committed]",
        "decoding/test_grammars.py::test_a_program_asks_for_each_row_and_place_of_a_tree",
    ),
    Mutant(
        "a stop string is found one token late",
        "prompts/stops.py",
        "step = 1 if self.stops or self.records",
        "step = 2 if self.stops or self.records",
        f"{STREAM}test_an_answer_read_in_parts_has_the_text_of_all",
    ),
    Mutant(
        "a stop string may not begin tokens before",
        "prompts/stops.py",
        "start = max(len(head) - max(map(len, self.stops)), 0)",
        "start = max(len(head), 0)",
        f"{STREAM}test_a_stop_string_may_begin_tokens_before",
    ),
    Mutant(
        "an answer is cut behind its stop string",
        "prompts/stops.py",
        "self.text, self.stop = text[:cut], self.stops[i]",
        "self.text, self.stop = text[: cut + len(self.stops[i])], self.stops[i]",
        f"{STREAM}test_a_stop_string_may_begin_tokens_before",
    ),
    Mutant(
        "reasoning ends one token late",
        "prompts/reasoning.py",
        'return "reasoning" if self.reasons else "mark"',
        'return "reasoning"',
        "data/test_reasoning.py::test_an_answer_is_split_while_it_is_written",
    ),
    Mutant(
        "the second of several samples has the first's seed",
        "engine/requests.py",
        "return (seed + n) % 2**32",
        "return (seed + n // 2) % 2**32",
        "decoding/test_answers.py::test_samples_are_those_of_their_seeds",
    ),
    Mutant(
        "int8 weights are off by a step",
        "models/int8.py",
        "return jnp.round(exact / scale[:, None])",
        "return jnp.floor(exact / scale[:, None])",
        "test_int8.py::test_a_layer_is_off_by_half_a_step_of_each_weight",
    ),
    Mutant(
        "a combination filters each model",
        "decoding/collaboration/combination.py",
        "return filtered(soft, options, combination.best(logits, soft))",
        "return filtered(soft * soft, options, combination.best(logits, soft))",
        "decoding/test_combination.py::test_combined_distributions",
    ),
    Mutant(
        "a proposer draws each run with one key",
        "decoding/collaboration/one_proposer.py",
        "next_token(scores[:, 0], state.count + place, options)",
        "next_token(scores[:, 0], state.count, options)",
        "decoding/test_collaborative_law.py::test_one_proposer_follows_the_combination",
    ),
    Mutant(
        "a part of a batch counts its own positions",
        "training/loop/step.py",
        "frozen), part, count)",
        "frozen), part, loss.count(part))",
        "training/test_accumulation.py::test_the_gradient_of_parts_is_that_of_the_batch",
    ),
    Mutant(
        "conversations of a row read one another",
        "models/attention.py",
        "visible &= slots >= first[..., None]",
        "pass",
        "training/test_packing.py::test_a_draft_learns_the_same_of_packed_rows",
    ),
    Mutant(
        "blocks read another conversation of their row",
        "heads/head.py",
        "seen if self.first is None else",
        "seen if True else",
        "training/test_packing.py::test_a_head_learns_the_same_of_packed_rows",
    ),
    Mutant(
        "heads that learn together are clipped together",
        "training/loop/step.py",
        'parts[name if name in apart else ""][path] = update',
        'parts[""][path] = update',
        "training/test_joint.py::test_heads_learn_together_what_each_learns_alone",
    ),
    Mutant(
        "a student is taught one position late",
        "training/losses.py",
        "return cross_entropy(logits[:, :-1], tokens[:, 1:], mask[:, 1:], count)",
        "return cross_entropy(logits[:, :-1], tokens[:, :-1], mask[:, 1:], count)",
        "training/test_goldens.py::test_losses",
    ),
    Mutant(
        "a teacher's rest is forgotten",
        "training/losses.py",
        "remainder = 1.0 - jnp.exp(log_p).sum(-1, keepdims=True)",
        "remainder = 0.5 - jnp.exp(log_p).sum(-1, keepdims=True)",
        "training/test_distillation.py::test_top_k_is_a_lower_bound_and_exact_when_it_holds_all",
    ),
    Mutant(
        "a file is replaced before it is whole",
        "files.py",
        'fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")\n    with',
        "fresh = path\n    with",
        "test_files.py::test_a_file_that_is_not_finished_leaves_the_one_before",
    ),
    Mutant(
        "lookup misses the newest match",
        "decoding/sources/lookup.py",
        "possible = (slots <= last[..., None])",
        "possible = (slots <= last[..., None] // 2)",
        f"{YIELD}[lookup]",
    ),
    Mutant(
        "weights stay what they were",
        "decoding/drafting/weighting.py",
        "next_weights = jnp.where(count[:, None] > 0, next_weights, state.initial)",
        "next_weights = jnp.where(count[:, None] < 0, next_weights, state.initial)",
        f"{YIELD}[KV head, T and lookup by the grid]",
    ),
    Mutant(
        "a head reads the wrong layer",
        "heads/kinds/kv_head.py",
        "return self.key_layers or (-1,) * self.text_config.num_hidden_layers",
        "return self.key_layers or (0,) * self.text_config.num_hidden_layers",
        f"{YIELD}[KV head]",
    ),
    Mutant(
        "a head's sliding layers read everything",
        "heads/head.py",
        "seen &= slots > block - window",
        "seen &= slots >= 0",
        "checkpoints/test_dflash.py::test_a_window_as_long_as_the_context_changes_no_score",
    ),
    Mutant(
        "a block of training reads another's tokens",
        "models/attention.py",
        "split, slots, **options",
        "split, slots[:, :, ::-1], **options",
        "training/test_goldens.py::test_kv_heads",
    ),
    Mutant(
        "a head does not catch up with what was verified",
        "decoding/sources/head.py",
        "return context.replace(k=keys, v=values, length=length)",
        "return context.replace(length=length)",
        "decoding/test_mtp.py::test_blocks_are_drafted_as_the_published_layer_says",
    ),
    Mutant(
        "a drafted token reads the state of another one",
        "decoding/sources/head.py",
        "above = scratch.read[None, None] - 1",
        "above = scratch.read[None, None] - 2",
        "decoding/test_mtp.py::test_blocks_are_drafted_as_the_published_layer_says",
    ),
)


def outcome(mutant: Mutant, tree: Path) -> str:
    """Run the mutant's test on a copy of the tree; return "caught" or what happened instead."""
    path = tree / "jaxspec" / mutant.file
    source = path.read_text()
    if source.count(mutant.old) != 1:
        return f"{mutant.old!r} occurs {source.count(mutant.old)} times in jaxspec/{mutant.file}"
    path.write_text(source.replace(mutant.old, mutant.new))
    command = (sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider")
    try:
        run = subprocess.run(
            (*command, "-m", "not full", f"tests/{mutant.test}"),
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), **SHARED},
            capture_output=True,
            text=True,
        )
    finally:
        path.write_text(source)
    if run.returncode == 1 and "\nFAILED" in run.stdout:
        return "caught"
    return "not noticed" if run.returncode == 0 else f"no test ran:\n{run.stdout[-2000:]}"


def main(*texts: str) -> int:
    """Run the mutants whose names hold one of the texts; return how many were not caught."""
    mutants = [one for one in MUTANTS if any(text in one.name for text in texts or [""])]
    absent = shutil.ignore_patterns(".*", "runs", "__pycache__", "build", "dist")
    trees: SimpleQueue[Path] = SimpleQueue()
    with ExitStack() as stack:
        cores = int(os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS", os.cpu_count() or 1))
        workers = min(len(mutants), cores)
        for _ in range(workers):
            tree = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tree"
            trees.put(Path(shutil.copytree(ROOT, tree, ignore=absent, symlinks=True)))

        def try_out(mutant: Mutant) -> str:
            tree = trees.get()
            try:
                return outcome(mutant, tree)
            finally:
                trees.put(tree)

        outcomes = []
        with ThreadPoolExecutor(workers) as pool:
            for mutant, found in zip(mutants, pool.map(try_out, mutants)):
                print(f"{mutant.name}: {found}", flush=True)
                outcomes.append(found)
    return sum(found != "caught" for found in outcomes)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
