"""Count what Prometheus reads at `/metrics`; names are vLLM's where it has one."""

from __future__ import annotations

import time

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jaxspec.serve.worker import Late, Ticket, Worker

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)


class Metrics:
    """Count the answers of one server."""

    def __init__(self, model: str) -> None:
        """Make the counters, gauges and histograms; `model` labels each."""
        self.registry = CollectorRegistry()
        self.labels = {"model_name": model}
        about = {"labelnames": ["model_name"], "registry": self.registry}

        def counter(name: str, text: str, *more: str, project: str = "vllm") -> Counter:
            names = ["model_name", *more]
            return Counter(f"{project}:{name}", text, names, registry=self.registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"vllm:{name}_seconds", text, buckets=SECONDS, **about)

        self.running = Gauge("vllm:num_requests_running", "Requests that have a row.", **about)
        self.waiting = Gauge("vllm:num_requests_waiting", "Requests that wait for one.", **about)
        self.prompt = counter("prompt_tokens", "Tokens of prompts.")
        self.new = counter("generation_tokens", "Tokens of answers.")
        self.queries = counter("prefix_cache_queries", "Tokens of prompts that may be kept.")
        self.hits = counter("prefix_cache_hits", "Tokens of prompts that were kept, so not read.")
        self.ended = counter("request_success", "Answers, by their end.", "finished_reason")
        self.drafts = counter("spec_decode_num_drafts", "Drafted blocks.")
        self.drafted = counter("spec_decode_num_draft_tokens", "Drafted tokens.")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Accepted drafted tokens.")
        self.places = counter(
            "spec_decode_num_accepted_tokens_per_pos", "The same by place in the block.", "position"
        )
        texts = {
            "blocks": "Blocks, by the plan that --gamma auto chose.",
            "tokens": "Tokens of answers, by plan.",
            "seconds": "Time that requests spent in the loop, by plan.",
        }
        self.plans = {
            name: counter(f"plan_{name}", text, "plan", project="jaxspec")
            for name, text in texts.items()
        }
        self.first = histogram("time_to_first_token", "From a request to its first token.")
        self.each = histogram("time_per_output_token", "Mean between the tokens of an answer.")
        self.whole = histogram("e2e_request_latency", "From a request to the end of its answer.")

    def observe(self, ticket: Ticket) -> None:
        """Count a ticket that has ended."""
        result = ticket.result
        if result is None or result.finish_reason is None:
            reason = "timeout" if isinstance(ticket.error, Late) else "abort"
            self.ended.labels(**self.labels, finished_reason=reason).inc()
            return
        now, count, stats = time.monotonic(), len(result.tokens), result.stats
        self.ended.labels(**self.labels, finished_reason=result.finish_reason).inc()
        self.prompt.labels(**self.labels).inc(len(ticket.request.rows[0]))
        self.queries.labels(**self.labels).inc(len(ticket.request.rows[0]))
        self.hits.labels(**self.labels).inc(result.cached)
        self.new.labels(**self.labels).inc(count)
        self.first.labels(**self.labels).observe(ticket.first - ticket.arrived)
        self.each.labels(**self.labels).observe((now - ticket.first) / max(count - 1, 1))
        self.whole.labels(**self.labels).observe(now - ticket.arrived)
        for plan, use in result.plans.items():
            counts = {"blocks": use.blocks, "tokens": use.tokens, "seconds": use.ms / 1e3}
            for name, number in counts.items():
                self.plans[name].labels(**self.labels, plan=plan).inc(number)
        if len(accepted := np.asarray(stats.accepted_at)):
            self.drafts.labels(**self.labels).inc(int(stats.steps))
            self.drafted.labels(**self.labels).inc(int(np.sum(stats.drafted_at)))
            self.accepted.labels(**self.labels).inc(int(accepted.sum()))
            for place, number in enumerate(accepted.tolist()):
                self.places.labels(**self.labels, position=place).inc(number)

    def page(self, worker: Worker) -> bytes:
        """Return all counts as Prometheus reads them."""
        self.running.labels(**self.labels).set(len(worker.tickets))
        self.waiting.labels(**self.labels).set(len(worker.waiting))
        return generate_latest(self.registry)
