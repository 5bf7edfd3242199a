"""`jaxspec serve`: serve one model with OpenAI's API, and a page to see it."""

from __future__ import annotations

import errno
import math
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.locating import model_name
from jaxspec.cli.shared import numbers, progress, refuse_set
from jaxspec.cli.speculation import Drafting, Model, load_engine
from jaxspec.config import LvlmConfig, ModelConfig, text_config
from jaxspec.engine.config import PROMPT_BUCKETS, GenerationConfig
from jaxspec.engine.engine import Engine, EngineConfig, Request
from jaxspec.errors import InputError, check_counts, check_numbers, needing
from jaxspec.plugins import load_plugin, plugins
from jaxspec.prompts.placeholders import check_text
from jaxspec.runtime import say

LOCAL = ("127.0.0.1", "localhost", "::1")
HOST = r"[^\s:/*\[\]]+|\[[0-9a-f:.]+\]"
"""Form of a name in `--allowed-hosts`: without scheme and port, which headers may have or lack."""
ORIGIN = r"\*|[a-z][a-z0-9+.-]*://[^\s/*]+"
"""Form of a name in `--allowed-origins`, as browsers send it: without a path."""
KEY = "JAXSPEC_API_KEY"
"""Environment variable with the key of `--api-key`, which a list of processes would show."""
LENGTHS = [length for length in PROMPT_BUCKETS if length <= 1024]
"""Prompt lengths that a server has programs for, unless it is given others."""
PATIENCE = 60.0
"""Seconds after which programs that are not always needed are left for later."""
SQUARE = 672**2
"""Pixels of the largest image to compile for in models that cut images in tiles."""


@dataclass(frozen=True, kw_only=True)
class ServedModel(Model):
    """Choose the model to serve, and how to load it."""

    target: str = ""
    """Directory in Hugging Face layout, GGUF file or hub id, as of `jaxspec generate`."""
    demo: bool = False
    """Serve the shipped model and draft, with --race: for a first look."""
    model: str | None = None
    """Name of the model in requests; by default the target's."""
    generation_config: GenerationConfig = "auto"
    """ignore leaves the target's generation_config.json out, except for its EOS."""


@dataclass(frozen=True)
class Listening:
    """Choose who may ask, and where."""

    host: str = "127.0.0.1"
    """Address to listen on. Any other than this machine's own needs --api-key or --insecure."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    api_key: str | None = None
    """Key that requests must bring, by default the environment variable JAXSPEC_API_KEY."""
    insecure: bool = False
    """Answer anybody who reaches --host, without a key."""
    allowed_hosts: str = ""
    """Names under which the server may be asked, comma-separated, as behind a proxy. Without a key,
    only this machine's own are allowed by default, against pages of other sites; else any."""
    allowed_origins: str = ""
    """Other sites whose pages may ask and read answers, comma-separated, as https://chat.example;
    * for all."""
    image_dir: Path | None = None
    """Directory below which requests may name images, as file:photo.jpg."""
    race: bool = False
    """Also decode without drafts where a request asks for it, so that the page can race both."""
    log: bool = False
    """Print a line for each request: when, who, what, status, seconds and id."""


@dataclass(frozen=True)
class Bounds:
    """Limit requests. Memory and compilation grow with these sizes."""

    batch_size: int = 8
    """Requests that decode together, 1 to 64."""
    queue: int = 64
    """Requests that may wait for a row of the batch; more get status 429."""
    timeout: float = 300.0
    """Maximum seconds from a request to the end of its answer."""
    prompt_buckets: str | None = None
    """Lengths of prompts in tokens, comma-separated, images included; a longer prompt is
    refused. By default 64 to 1024 in nine steps. Programs for the longest are compiled at the
    start; others in the first minute, while nobody asks, or when needed."""
    max_new_tokens: int = 512
    """Maximum tokens of an answer."""
    images: int | None = None
    """Maximum images of a request; by default 1 if the target sees."""
    max_pixels: int | None = None
    """Maximum pixels of an image after resizing, to compile for. Qwen's larger images are scaled to
    it, by default until --images of them fill three quarters of the longest prompt. Models that cut
    images in tiles (LLaVA-NeXT, OneVision) take as many tiles as a square of it has, by default of
    451584 pixels; more are refused."""
    max_soft_tokens: int | None = None
    """Maximum tokens of an image of Gemma 4, to compile for, where a request does not say it: 70,
    140, 280, 560 or 1120. By default as its image processor is set, to 280."""
    image_pixels: int = 50_331_648
    """Maximum pixels of an image as it is sent. A waiting request holds 3 bytes for each."""
    max_body: int = 32 * 2**20
    """Maximum bytes of a request, and of a file in --image-dir."""
    prefix_bytes: int = 2**30
    """Maximum bytes of a device that keep prompts, for others that begin alike: the next turn of a
    conversation, or another question about an image. 0 keeps none."""


@dataclass(frozen=True)
class Serve:
    """Answer HTTP requests in OpenAI's form, text and images, with the target. Drafts make answers
    faster and never change them. `/` is a page to ask, and to see what was drafted.

    $ jaxspec serve --demo
    $ jaxspec serve --target llava-hf/llava-1.5-7b-hf --draft mjbooo/lvlm68m
    """

    model: ServedModel
    drafting: Drafting
    listening: Listening
    sizes: Bounds


def run(args: Serve) -> None:
    """Load the models, warm up, and answer until SIGTERM or Ctrl-C."""
    example: tuple[Path, str] | None = None
    if args.model.demo:
        for group, name in ((args.model, "target"), (args.drafting, "draft")):
            refuse_set(group, [name], "--demo brings its own; leave one of them out")
        options, example = load_plugin(plugins("demos")["serve"])()
        args = _changed(args, {"race": True} | options)
    elif not args.model.target:
        raise InputError("--target: missing; give a model, or --demo")
    models, drafting, listening, sizes = args.model, args.drafting, args.listening, args.sizes
    lengths = LENGTHS
    if sizes.prompt_buckets is not None:
        lengths = sorted(numbers("--prompt-buckets", sizes.prompt_buckets, int))
    counts = {"max-pixels": SQUARE if sizes.max_pixels is None else sizes.max_pixels}
    counts |= {"image-pixels": sizes.image_pixels, "max-body": sizes.max_body}
    counts |= {"max-new-tokens": sizes.max_new_tokens, "queue": sizes.queue}
    check_counts(**{f"--{name}": count for name, count in counts.items()})
    for length in (lengths[0], lengths[-1]):
        check_numbers(1, 1e6, **{"--prompt-buckets": length})
    check_numbers(0, 1024, **{"--images": sizes.images or 0})
    check_numbers(1, 1e6, **{"--timeout": sizes.timeout})
    check_numbers(0, 1e15, **{"--prefix-bytes": sizes.prefix_bytes, "--max-body": sizes.max_body})
    Request("", max_pixels=sizes.max_pixels, max_soft_tokens=sizes.max_soft_tokens)
    key = (listening.api_key or os.environ.get(KEY, "")).strip()
    if listening.host not in LOCAL and not (key or listening.insecure):
        raise InputError(f"--host: {listening.host} may be reached by others; give --api-key")
    if listening.image_dir is not None and not os.path.isdir(listening.image_dir):
        raise InputError(f"--image-dir: {listening.image_dir}: no such directory")
    name = models.model or Path(model_name(models.target)).name
    check_text(name, "--model")
    hosts = _names("--allowed-hosts", listening.allowed_hosts, HOST, "chat.example")
    origins = _names("--allowed-origins", listening.allowed_origins, ORIGIN, "https://chat.example")
    if hosts or (listening.host in LOCAL and not key):
        hosts = *hosts, *LOCAL, "[::1]"
    drafts = bool(drafting.draft or drafting.views)
    if listening.race and not drafts:
        raise InputError("--race: nothing drafts; give --draft, or leave it out")
    models.template  # noqa: B018  # is read before the models
    with needing("jaxspec serve", "serve"):
        from jaxspec.serve.app import Server, ServerSettings, serve
        from jaxspec.serve.examples import examples, scaled_pixels
        from jaxspec.serve.messages import Limits
        from jaxspec.serve.metrics import Metrics
        from jaxspec.serve.worker import Worker
    listener = _bind(listening.host, listening.port)

    def check(target: ModelConfig) -> None:
        context, prompt, new = text_config(target).context, lengths[-1], sizes.max_new_tokens
        if prompt + new > context:
            raise InputError(
                f"--prompt-buckets: {prompt} tokens, and {new} --max-new-tokens, are over the "
                f"target's context of {context}; give fewer"
            )
        if sizes.images and not isinstance(target, LvlmConfig):
            raise InputError(f"--images: {sizes.images}, but the target is a text model; give 0")

    batching: dict[str, Any] = {
        "generation_config": models.generation_config,
        "prompt_buckets": tuple(sorted({*lengths, *PROMPT_BUCKETS})),
        "new_buckets": (sizes.max_new_tokens,),
    }
    config = drafting.config(batch_size=sizes.batch_size, trace=drafts, **batching)
    engine, reports = load_engine(models, drafting, config, check)
    models.encoder(engine)  # checks --thinking
    sees = engine.assembly.lead.images is not None
    images = int(sees) if sizes.images is None else sizes.images
    scaled = scaled_pixels(engine, max(lengths), images)
    if scaled is not None:
        scaled = sizes.max_pixels or scaled
    side = math.isqrt(scaled or sizes.max_pixels or SQUARE)
    scales = scaled, sizes.max_soft_tokens
    requests = examples(engine, lengths, images, side, sizes.max_new_tokens, *scales)
    metrics = Metrics(name)
    plain = None
    if listening.race:
        config = EngineConfig(batch_size=sizes.batch_size, width=drafting.width, **batching)
        plain = Engine(engine.target, config=config)
    host = f"[{listening.host}]" if ":" in listening.host else listening.host
    address = f"http://{host}:{listener.getsockname()[1]}"

    def tell() -> None:
        if not worker.ready.is_set():
            note = progress if sys.stderr.isatty() else say
            return note(f"warming up: {worker.warmed} of {len(worker.programs)} programs")
        if remaining := len(worker.programs) - worker.warmed:
            say(f"{remaining} programs are left to compile while nobody asks, or when first needed")
        if engine.batcher.policy is not None and (costs := engine.batcher.policy.report()):
            say(costs)
        say(f"ready: {address} serves {name}")

    waits = PATIENCE, sizes.prefix_bytes
    worker = Worker(engine, requests, sizes.queue, plain, metrics.observe, tell, *waits)
    for line in (*reports, worker.batch.memory()):
        say(line)
    say(f"warming up {len(worker.programs)} programs ...")
    files = listening.image_dir, sizes.max_body
    most = sizes.image_pixels, max(lengths), sizes.batch_size + sizes.queue
    limits = Limits(name, images, *most, *files, plain is not None, models.thinks, *scales)
    log = say if listening.log else None
    doors = {"hosts": hosts, "origins": origins, "log": log}
    settings = ServerSettings(limits, key, sizes.timeout, example, **doors)
    _listen(listener, listening.host, listening.port)
    serve(Server(worker, settings, metrics), listener)


def _changed(args: Serve, options: dict[str, Any]) -> Serve:
    """Return the arguments with these options, each in its group, where they are not given."""

    def is_open(group: Any, option: str) -> bool:
        return hasattr(group, option) and getattr(group, option) == getattr(type(group), option)

    groups = {
        name: replace(group, **{key: options[key] for key in options if is_open(group, key)})
        for name, group in vars(args).items()
    }
    return Serve(**groups)


def _names(option: str, text: str, form: str, example: str) -> tuple[str, ...]:
    """Return the names of a comma-separated list; InputError for one that no header has."""
    names = tuple(text.lower().replace(",", " ").split())
    for name in names:
        if not re.fullmatch(form, name):
            raise InputError(f"{option}: {name!r:.100}; give a name as {example}")
    return names


@contextmanager
def _refusing(host: str, port: int) -> Iterator[None]:
    """Raise InputError where the address cannot be listened on."""
    try:
        yield
    except (OSError, OverflowError, TypeError, UnicodeError) as error:
        number = getattr(error, "errno", None) or 0  # of an unknown name it is negative
        is_wrong = number < 0 or number == errno.EADDRNOTAVAIL
        is_wrong |= isinstance(error, TypeError | UnicodeError)  # no name has such letters
        option = "--host" if is_wrong else "--port"
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{option}: {host}:{port}: {reason}; give another {option}") from None


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that no other server can have, before models are loaded.

    Connections are refused until it listens: they would wait for minutes without an answer.
    """
    with _refusing(host, port):
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            if listener.family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            _reuse(listener, True)
            listener.bind((host, port))
            _reuse(listener, False)  # else another one that does not listen yet can bind it too
        except BaseException:
            listener.close()
            raise
        return listener


def _listen(listener: socket.socket, host: str, port: int) -> None:
    """Accept connections from now on."""
    with _refusing(host, port):
        _reuse(listener, True)
        listener.listen(256)


def _reuse(listener: socket.socket, allowed: bool) -> None:
    """Let a port be taken, or not, whose earlier server's connections have just ended."""
    if os.name == "posix":
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, allowed)
