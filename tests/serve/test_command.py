"""`jaxspec serve` runs as a process, and the commands of its page are answered."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from openai import OpenAI

from jaxspec.cli.serve import Bounds, Listening, Serve, ServedModel, _bind, _changed, _listen
from jaxspec.cli.speculation import Drafting
from jaxspec_demo.models import EYES
from jaxspec_demo.models import served as options
from tests.conftest import ROOT
from tests.serve.conftest import Served

PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
SMALL = ("--prompt-buckets", "60", "--max-new-tokens", "33", "--images", "0", "--batch-size", "2")


def test_it_warms_up_answers_and_ends_what_it_has_begun(pair: tuple[Path, Path]) -> None:
    """A server warms up, answers, and on SIGTERM finishes the answer that it has begun; the exit
    code is 0.
    """
    command = ["-m", "jaxspec", "serve", "--target", str(pair[0]), "--draft", str(pair[1]), *SMALL]
    process = subprocess.Popen(
        [sys.executable, *command, "--port", "0", "--gamma", "2"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("ready: "):
                break
        address = re.findall(r"http://\S+", lines[-1])[0] if lines else ""
        assert address, "".join(lines)
        count = sum(line.startswith("warming up: ") for line in lines)
        assert f"warming up: {count} of {count} programs\n" in lines  # not silent in a log
        client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        (model,) = client.models.list().data
        limits = model.model_extra["jaxspec"]
        assert (limits["prompt_tokens"], limits["new_tokens"]) == (60, 33)  # no bucket above
        stream = client.chat.completions.create(
            model=pair[0].name,
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            temperature=0,
        )
        text, reason = "", None
        for number, part in enumerate(stream):
            if number == 1:
                process.send_signal(signal.SIGTERM)
            text += part.choices[0].delta.content or ""
            reason = part.choices[0].finish_reason or reason
        assert text
        assert reason in ("stop", "length")
        assert process.wait(120) == 0
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--target: missing"),
        (("--target", "x", "--host", "0.0.0.0"), "--host: 0.0.0.0 may be reached by others"),
        (("--target", "x", "--prompt-buckets", "a"), "--prompt-buckets: 'a'"),
        (("--target", "x", "--prompt-buckets", "64,0"), "--prompt-buckets: 0"),
        (("--target", "x", "--prompt-buckets", "9" * 12), "--prompt-buckets: 999999999999"),
        (("--target", "x", "--host", "0.0.0.0", "--api-key", " "), "--host: 0.0.0.0 may be"),
        (("--target", "x", "--allowed-hosts", "a.example:80"), "--allowed-hosts: 'a.example:80'"),
        (("--target", "x", "--allowed-hosts", "b, *"), "--allowed-hosts: '*'; give a name as"),
        (("--target", "x", "--allowed-origins", "a.example"), "--allowed-origins: 'a.example'"),
        (("--target", "x", "--allowed-origins", "https://a.example/"), "'https://a.example/'"),
        (("--target", "x", "--queue", "0"), "--queue: 0"),
        (("--target", "x", "--images", "-1"), "--images: -1"),
        (("--target", "x", "--timeout", "inf"), "--timeout: inf"),
        (("--target", "x", "--image-dir", "absent"), "--image-dir: absent: no such directory"),
        (("--target", "x", "--race"), "--race: nothing drafts; give --draft, or leave it out"),
        (("--target", "x", "--max-pixels", "9" * 12), "max_pixels: 999999999999; give 1 to"),
        (("--target", "x", "--max-soft-tokens", "5"), "max_soft_tokens: 5; give one of 70, 140"),
        (("--target", "x", "--insecure", "--host", "ä" * 70), f"--host: {'ä' * 70}:8000: "),
        (("--target", "x", "--insecure", "--host", "192.0.2.1"), "--host: 192.0.2.1:8000: "),
        (("--target", "x", "--image-dir", "a" * 300), ": no such directory"),
        (("--target", "x", "--max-body", "9" * 20), "--max-body: 99999999999999999999; give a"),
        (("--target", "x", "--model", "\udce9"), r"--model '\udce9': '\udce9' is half a character"),
        (("--demo", "--target", "x"), "--target: --demo brings its own; leave one of them out"),
        (("--demo", "--draft", "x"), "--draft: --demo brings its own; leave one of them out"),
    ],
)
def test_options_are_checked_before_anything_is_read(
    options: tuple[str, ...], words: str, refusal: Callable[..., str]
) -> None:
    assert words in refusal("serve", *options)


def test_options_that_the_target_cannot_obey_are_refused_before_it_is_loaded(
    refusal: Callable[..., str], pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxspec.cli.speculation.LoadedModel", None)
    words = "--prompt-buckets: 1024 tokens, and 512 --max-new-tokens, are over the target's context"
    assert words in refusal("serve", "--target", pair[0], "--port", "0")


def test_options_that_are_given_with_the_demo_hold() -> None:
    args = Serve(ServedModel(demo=True), Drafting(), Listening(), Bounds(max_new_tokens=64))
    changed = _changed(args, {"race": True, "max_new_tokens": 128, "gamma": 7})
    sizes, drafting, listening = changed.sizes, changed.drafting, changed.listening
    assert (sizes.max_new_tokens, drafting.gamma, listening.race) == (64, 7, True)


def test_a_port_in_use_is_named(refusal: Callable[..., str], pair: tuple[Path, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f":{port}: " in refusal("serve", "--target", pair[0], "--port", port)


def test_connections_are_refused_until_the_models_are_loaded(
    refusal: Callable[..., str], pair: tuple[Path, Path]
) -> None:
    """While models load, connections are refused, which else would wait without an answer; the port
    is taken all the same.
    """
    with _bind("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        assert f":{address[1]}: " in refusal("serve", "--target", pair[0], "--port", address[1])
        _listen(listener, *address)
        socket.create_connection(address).close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_the_curl_lines_of_the_page_are_answered(served: Served) -> None:
    """The curl lines of the page are answered as they are written, except for the port."""
    block = next(
        block for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if "curl" in block
    )
    commands = re.sub(r"\\\n *", "", block).strip().splitlines()
    assert len(commands) == 5
    answers = []
    for command in commands:
        run = command.replace("http://127.0.0.1:8000", served.url)
        done = subprocess.run(run, shell=True, capture_output=True, text=True, check=True)
        answers.append(done.stdout)
    expected = ('"object":"list"', '"chat.completion"', "data: [DONE]", '"ready"', "vllm:")
    assert all(words in answer for words, answer in zip(expected, answers, strict=True)), answers


def test_the_python_of_the_page_is_answered(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(block.replace("http://127.0.0.1:8000", served.url), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.full
def test_the_demo_serves_what_is_shipped() -> None:
    shipped, (picture, _) = options()
    assert picture.is_file()
    assert all(Path(draft).is_dir() for draft in shipped["draft"])
    assert Path(shipped["target"]).is_dir() or shipped["target"] == EYES
