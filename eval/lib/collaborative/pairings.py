"""Measure collaborative decoding: every method on every set, and sweeps of CoS.

All methods of one pairing decode the same few requests by turns, so that other load on the machine
slows them equally. The speed-up compares the fastest run with the fastest run of standard
collaborative decoding, since other load can only slow a run. The quality of answers is measured
separately: two methods answer all requests once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from tqdm import tqdm

from eval.lib.collaborative.config import CollaborativeEvalConfig, Pairing
from eval.lib.collaborative.references import References, read_references
from eval.lib.collaborative.theory import formulas, law, parallel_speedup, speedup
from eval.lib.drafts.comparison import Group, Keep, Kept, error_line, first_prompt, requests_of
from eval.lib.drafts.loading import load_model
from eval.lib.output.intervals import interval
from eval.lib.output.report import progress
from eval.lib.output.tables import Record, has, mean
from eval.lib.questions.prompts import prompt_records
from eval.lib.times.passes import call_interval, interleaved, speed_up, time_members
from jaxspec.data.samples import Sample
from jaxspec.decoding.collaboration.combination import parse_combination
from jaxspec.engine.config import CollaborationConfig, Method
from jaxspec.engine.engine import Engine
from jaxspec.engine.metrics import collaboration_metrics
from jaxspec.engine.requests import Request, Result, encode
from jaxspec.errors import InputError
from jaxspec.loading.models import LoadedModel
from jaxspec.prompts.encoder import Prompt
from jaxspec.prompts.rows import Showing, prompt_row

METHODS: dict[str, Method] = {
    "standard": "standard",
    "naive": "naive",
    "speculative": "speculative",
    "speculative, 1 each": "speculative",
    "CoS": "alternating",
    "CoS, 1 each": "alternating",
}
"""Rows of a pairing, and the method of each."""
SWEEP = "sweep"
"""The `row` of the sweep's records."""
JUDGED = ("standard", "CoS")
"""Rows that answer all samples and are judged. The other rows sample from the same distribution and
are only timed."""
Judge = Callable[[Sample, str], float | None]
"""Returns the quality of an answer from 0 to 1; None if it cannot be judged."""


def measure(
    config: CollaborativeEvalConfig,
    judge: Judge,
    before: Sequence[Record] = (),
    keep: Keep = lambda _, work: work(),
) -> Iterator[Group]:
    """Yield rows and records of each pairing and set that `before` lacks.

    If a pairing fails on a set, the others are still measured. Only one pairing's models are in
    memory at a time.

    Args:
      keep: `Run.keep`, which keeps the answers of a part that is stopped.
    """
    loaded: dict[str, LoadedModel] = {}
    mesh = config.mesh(1)
    open_parts = [
        (pairing, name)
        for pairing, name in product(config.pairings, config.sets)
        if not has(before, pairing=pairing.name, dataset=name)
    ]
    work = sum(_runs(config, pairing) for pairing, _ in open_parts)
    with progress(work, "collaboration") as bar:
        for pairing, dataset in open_parts:
            bar.set_postfix_str(f"{pairing.name}, {dataset}", refresh=False)
            try:
                loaded = {name: model for name, model in loaded.items() if name in pairing.models}
                for name in pairing.models:
                    if name not in loaded:
                        shared = next(iter(loaded.values()), None)
                        loaded[name] = load_model(
                            name, config.dtype, share_tower_with=shared, mesh=mesh
                        )
                # No name holds the list, which would keep it while the next pairing's models load.
                group = _Measurement(
                    config,
                    pairing,
                    [loaded[name] for name in pairing.models],
                    dataset,
                    judge,
                    keep,
                    bar,
                ).group()
            except Exception as error:
                part = {"dataset": dataset, "turn": 1, "pairing": pairing.name, "row": pairing.name}
                group = Group([], [], [part | {"error": error_line(error)}])
            yield group


def methods_of(pairing: Pairing) -> dict[str, tuple[Method, tuple[int, ...]]]:
    """Return method and draft lengths of each row; rows of equal ones appear once.

    For gammas (5, 1): CoS with (5, 1), and "CoS, 1 each" with (1, 1).
    """
    ones = (1,) * len(pairing.models)
    alone = tuple(pairing.alone or gamma for gamma in pairing.gammas)
    methods: dict[str, tuple[Method, tuple[int, ...]]] = {}
    for name, method in METHODS.items():
        gammas = pairing.gammas if method == "alternating" else alone
        way = method, ones if "1 each" in name or method == "standard" else gammas
        if way not in methods.values():
            methods[name] = way
    return methods


def _runs(config: CollaborativeEvalConfig, pairing: Pairing) -> int:
    """Return the number of runs of programs over requests."""
    points = pairing.points(config.sweep)
    combinations = len({point.combination for point in points})
    timed = len(methods_of(pairing)) + combinations + len(points)
    return timed * config.repeats + len(JUDGED) + combinations


@dataclass
class _Measurement:
    """Measure one pairing on one set."""

    config: CollaborativeEvalConfig
    pairing: Pairing
    models: Sequence[LoadedModel]
    dataset: str
    judge: Judge
    keep: Keep
    bar: tqdm

    @property
    def part(self) -> Record:
        """Return the fields that all rows and records of the part share."""
        return {"dataset": self.dataset, "turn": 1, "pairing": self.pairing.name}

    def group(self) -> Group:
        """Measure every method, and the sweep, on the samples that fit; return rows and records."""
        config = self.config
        programs = {name: self.program(*way) for name, way in methods_of(self.pairing).items()}
        engine, chat_form = programs["standard"], config.in_chat_form(self.pairing)
        samples = config.samples(self.dataset, max(config.limit, config.held_out))
        questions = [
            (sample, first_prompt(engine.encoder, sample, chat_form)) for sample in samples
        ]
        fitting = [(sample, prompt) for sample, prompt in questions if self.fits(engine, prompt)]
        if not fitting:
            raise InputError(
                f"set {self.dataset}: no prompt fits the models' context; lower --max-new-tokens"
            )
        references = read_references(engine, fitting[: config.held_out], config.max_new_tokens)
        answered, prompts = zip(*fitting[: config.limit])
        requests = requests_of(config, prompts, self.pairing.temperature)
        rows, records = self.methods(programs, references, answered, requests)
        rows += self.sweep(references, answered, requests)
        rows = [row | {"left_out": len(samples) - len(fitting)} for row in rows]
        return Group(rows, records, [], list(prompt_records(self.part, [engine], requests)))

    def fits(self, engine: Engine, prompt: Prompt) -> bool:
        """Return whether every model's context holds the prompt and an answer."""
        (request,) = encode(engine.encoder, [Request(prompt, self.config.max_new_tokens)])
        try:
            for form in engine.assembly.forms:
                images = form.model.images, engine.assembly.lead.images
                showing = Showing(form.view, engine.encoder, *images)
                form.check_row(request, prompt_row(showing, request.prompt))
        except InputError:
            return False
        return True

    def program(
        self, method: Method, gammas: tuple[int, ...], combination: str | None = None
    ) -> Engine:
        return Engine(
            self.models, config=self.config.collaboration(self.pairing, method, gammas, combination)
        )

    def methods(
        self,
        programs: dict[str, Engine],
        references: References,
        samples: Sequence[Sample],
        requests: list[Request],
    ) -> tuple[list[Record], list[Record]]:
        """Measure every method; return a row for each, and a record for each answer."""
        answers, rows = self.by_turns(programs, requests, JUDGED)
        combination = programs["standard"].assembly.params["combination"]
        likely = {
            "held_out_nats": references.nats(combination),
            "held_out_nats_alone": references.nats_alone(),
        }
        records = []
        for name, row in rows.items():
            fields = self.run_fields(name, programs[name])
            here = [
                fields
                | {"sample": sample.id, "tokens": len(answer.tokens), "text": answer.text}
                | {"quality": self.judge(sample, answer.text) if name in JUDGED else None}
                | collaboration_metrics([answer.stats])
                for sample, answer in zip(samples, answers[name])
            ]
            records += here
            same = [a.tokens == b.tokens for a, b in zip(answers[name], answers["standard"])]
            greedy = self.pairing.temperature == 0
            row |= likely | {
                "quality": mean(here, "quality"),
                "token_identity_rate": float(np.mean(same)) if greedy else None,
            }
        return list(rows.values()), records

    def sweep(
        self, references: References, samples: Sequence[Sample], requests: list[Request]
    ) -> list[Record]:
        """Measure quality, and speed of alternation, at the points of the pairing's sweep."""
        swept: list[Record] = []
        points = self.pairing.points(self.config.sweep)
        for text in dict.fromkeys(point.combination for point in points):
            here = {point.gammas: point for point in points if point.combination == text}
            # Runs are kept by these names, and the methods' standard decoding has others.
            programs: dict[Any, Engine] = {
                f"{SWEEP}, standard": self.program("standard", (1,) * len(self.models), text)
            }
            programs |= {gammas: self.program("alternating", gammas, text) for gammas in here}
            combination = parse_combination(text, len(self.models))
            alphas = references.alphas(combination, self.pairing.temperature)
            judged = list(here)[-1]
            answers, rows = self.by_turns(programs, requests, [judged], alphas)
            scores = [
                {"quality": self.judge(s, a.text)}
                for s, a in zip(samples, answers[judged], strict=True)
            ]
            shared = {
                "row": SWEEP,
                "held_out_nats": references.nats(combination),
                "held_out_alpha": alphas,
                "quality": mean(scores, "quality"),
            }
            swept += [
                rows[gammas] | shared | {"dial": point.dial, "value": point.value}
                for gammas, point in here.items()
            ]
        return swept

    def by_turns(
        self,
        programs: dict[Any, Engine],
        requests: list[Request],
        judged: Sequence[Any],
        alphas: Sequence[float] | None = None,
    ) -> tuple[dict[Any, list[Result]], dict[Any, Record]]:
        """Run programs by turns, the first of them standard decoding.

        Args:
          judged: Programs that answer all requests; the others answer only the timed ones.
          alphas: Acceptance rates for the predictions; None takes those of the answers.

        Returns the answers and the row of each program. Speeds are those of the fastest run.
        """
        config = self.config
        keepers = {
            name: Kept(engine, self.keep, self.run_fields(str(name), engine))
            for name, engine in programs.items()
        }
        timed, rates = interleaved(
            list(keepers.values()), requests[: config.timed], config.repeats, self.bar
        )
        answers = dict(zip(programs, timed, strict=True))
        spreads = {name: call_interval(timed[0], each) for name, each in answers.items()}
        for name in judged:
            answers[name] = [*answers[name], *keepers[name].generate(requests[config.timed :])]
            self.bar.update()
        if alphas is None:
            stats = [answer.stats for every in answers.values() for answer in every]
            alphas = [alpha or 0.0 for alpha in collaboration_metrics(stats)["alpha"]]
        laws = {name: law(each.assembly.program, alphas) for name, each in programs.items()}
        widths = {1, *(width for _, each in laws.values() for width in each)}
        pass_ms = time_members(programs[judged[-1]], requests[0], widths)
        speeds = np.max([rates.loop, rates.call], axis=2).T
        rows = {}
        for (name, (calls, each)), speed in zip(laws.items(), speeds, strict=True):
            scoring_ms = [pass_ms[width][m] for m, width in enumerate(each)]
            fields = {
                "samples": len(answers[name]),
                "pass_ms": pass_ms[1],
                "scoring_pass_ms": scoring_ms,
                "calls_per_token_predicted": calls.total.tolist(),
                "speedup_predicted": speedup(calls, pass_ms[1]),
                "speedup_predicted_with_verify": speedup(calls, pass_ms[1], scoring_ms),
                "speedup_parallel_at_most": parallel_speedup(pass_ms[1]),
                "decode_tokens_per_second": float(speed[0]),
                "call_tokens_per_second": float(speed[1]),
                "speedup_measured": speed_up(speed[0], speeds[0, 0]),
                "speedup_call": speed_up(speed[1], speeds[0, 1]),
            }
            fields |= dict(zip(("speedup_call_low", "speedup_call_high"), spreads[name]))
            fields |= formulas(programs[name].assembly, alphas, pass_ms[1])
            rows[name] = self.run_fields(name, programs[name]) | fields
            stats = [answer.stats for answer in answers[name]]
            low, high = interval(np.array([[each.emitted, each.verified] for each in stats]))
            rows[name] |= collaboration_metrics(stats) | {"low": low, "high": high}
        return answers, rows

    def run_fields(self, row: str, engine: Engine) -> Record:
        """Return the fields of a record that describe the run."""
        settings, pairing = engine.config, self.pairing
        assert isinstance(settings, CollaborationConfig)
        return self.part | {
            "row": row,
            "models": [
                os.path.relpath(name) if os.path.isabs(name) else name for name in pairing.models
            ],
            "combination": settings.combination,
            "method": settings.method,
            "gammas": list(settings.checked(len(pairing.models))[1]),
            "default_proposer": settings.default_proposer,
            "chat_template": self.config.in_chat_form(pairing),
            "views": [form.view.name for form in engine.assembly.forms],
            "temperature": pairing.temperature,
            "dtype": self.config.dtype,
            "device": self.config.device,
            "batch": 1,
            "seed": self.config.seed,
        }
