"""No way through train/slice.sh and the lines of docs/tpu.md, against a stub of `gcloud`, leaves an
idle slice that is billed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.hub.pages import Command, parse, shell_blocks

SLICE = ROOT / "train" / "slice.sh"
BLOCKS = shell_blocks((ROOT / "docs" / "tpu.md").read_text(encoding="utf-8"))
CLOUD = r"""
set -u
export FAIL AT TPU=mine ZONE=here BUCKET=gs://bucket
git() { :; }
sleep() {
    [ -e slice ] && [ ! -e session ] && echo idle >> calls
    echo sleep >> calls; [ $(wc -l < calls) -lt 400 ]
}
gcloud() {
    echo "$*" | tr '\n' ' ' >> calls; echo >> calls
    n=$(grep -c '^compute' calls)
    [ $FAIL = before ] && [ $n = $AT ] && return 1
    [ $FAIL = always ] && [[ $* = *$AT* ]] && return 1
    [ $FAIL = taken ] && [ $n = $AT ] && { rm -f session; [ -e slice ] && echo PREEMPTED > slice; }
    case "$*" in
        *--command*)
            bash -n -c "${@: -1}" || echo unreadable >> calls
            [ "$(cat slice 2> /dev/null)" = READY ] || return 255 ;;
    esac
    case "$*" in
        *"tpu-vm create"*) [ -e slice ] && return 1; echo READY > slice ;;
        *"queued-resources create"*--runtime-version*)
            [ -e slice ] && return 1; echo WAITING_FOR_RESOURCES > slice ;;
        *" delete "*) [ -e slice ] || return 1; rm -f slice session ended ;;
        *"queued-resources list"*)
            [ ! -e slice ] || echo "mine $(sed s/READY/ACTIVE/ slice)"
            sed -i s/WAITING_FOR_RESOURCES/READY/ slice 2> /dev/null || true ;;
        *"tpu-vm list"*) printf 'other READY\n'; [ ! -e slice ] || echo "mine $(cat slice)" ;;
        *new-session*) [ -e session ] || { touch session; rm -f ended; echo trained >> calls; } ;;
        *kill-session*) rm -f session ended ;;
        *train.exit*)
            if [ -e session ] && [ $(tail -n 4 calls | grep -c sleep) -ge 2 ]; then
                # It ends at the second look.
                rm session; sed -n 1p codes > ended; sed -i 1d codes
            fi
            if [ -e session ]; then echo running; else cat ended 2> /dev/null || return 1; fi ;;
        *has-session*) [ -e session ] || return 1 ;;
        *my-draft*) touch saved ;;
    esac
    [ $FAIL = after ] && [ $n = $AT ] && return 1
    return 0
}
export -f git sleep gcloud
"""


def walk(
    folder: Path,
    fail: str,
    at: object,
    codes: str = "0\n0\n",
    lines: str = f"{SLICE} walk llava15_68m --tune.checkpoints gs://bucket/run",
) -> tuple[int, list[str]]:
    """Run lines of shell in a folder; return their exit code and what was called, with the word
    idle for each sleep in which a slice did not train.

    Args:
      fail: `before` or `after` call number `at` takes effect; `taken`: the slice is gone at that
      call; `always`: every
        call with the text `at` fails.
      codes: Exit codes of the trainings, one a line.
    """
    folder.mkdir()
    (folder / "codes").write_text(codes)
    (folder / "calls").touch()
    script = f"FAIL={fail} AT='{at}'\n{CLOUD}\n{lines}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    calls = (folder / "calls").read_text().splitlines()
    assert "unreadable" not in calls, done.stderr
    assert not (folder / "slice").exists(), "a slice is left"
    assert calls.count("idle") <= 10
    return done.returncode, calls


def test_a_draft_is_trained_saved_and_the_slice_deleted(tmp_path: Path) -> None:
    code, calls = walk(tmp_path / "it", "never", 0)
    assert code == 0
    assert (tmp_path / "it" / "saved").exists()
    assert calls.count("trained") == 1
    assert "idle" not in calls


@pytest.mark.parametrize("fail", ["before", "after", "taken"])
def test_a_step_that_fails_once_is_done_again(fail: str, tmp_path: Path) -> None:
    whole = sum(call.startswith("compute") for call in walk(tmp_path / "whole", "never", 0)[1])
    for number in range(1, whole + 1):
        code, _ = walk(tmp_path / str(number), fail, number)
        assert code == 0, f"call {number} of {whole}"
        assert (tmp_path / str(number) / "saved").exists()


@pytest.mark.full
@pytest.mark.parametrize("step", ["scp", "apt-get", "new-session", "train.exit", "my-draft", "ssh"])
def test_a_step_that_always_fails_ends_the_walk(step: str, tmp_path: Path) -> None:
    assert walk(tmp_path / "it", "always", step)[0] != 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("codes", "trained", "ends"),
    [("143\n143\n0\n", 3, 0), ("2\n", 1, 1), ("134\n0\n", 2, 0), ("134\n1\n", 2, 1)],
)
def test_what_ended_training_decides_what_follows(
    codes: str, trained: int, ends: int, tmp_path: Path
) -> None:
    code, calls = walk(tmp_path / "it", "never", 0, codes)
    assert (code, calls.count("trained")) == (ends, trained)


@pytest.mark.parametrize("block", [b for b in BLOCKS if "slice.sh" in b and "export TPU" not in b])
def test_the_lines_of_the_page_lead_to_their_end(block: str, tmp_path: Path) -> None:
    """The lines of the page lead to their end: each block begins without a slice and ends without
    one.
    """
    lines = re.sub("^jaxspec .*", "", block, flags=re.MULTILINE).replace(
        "train/slice.sh", str(SLICE)
    )
    if "create" not in block and "walk" not in block and "trial" not in block:
        lines = f"{SLICE} create\n{lines}"
    code, calls = walk(tmp_path / "it", "never", 0, lines=f"set -e\n{lines}")
    assert code == 0
    assert "trial" not in block or any("--debug" in call for call in calls)
    if "walk" in block:
        (export,) = re.findall(r"jaxspec export \S+ \S+.*?(?= &&)", "\n".join(calls))
        parse(Command("docs/tpu.md", export))
        (recipe,) = re.findall(r"(python -m train.recipe .*?) >> ", "\n".join(calls))
        parse(Command("docs/tpu.md", recipe))


@pytest.mark.full
def test_a_slice_of_the_queue_is_awaited_and_its_request_deleted(tmp_path: Path) -> None:
    code, calls = walk(
        tmp_path / "it", "never", 0, lines=f"export QUEUED=1; {SLICE} walk llava15_68m"
    )
    assert code == 0
    assert calls.count("trained") == 1
    assert not any("tpu-vm create" in call or "tpu-vm delete" in call for call in calls)


HOST = r"""#!/usr/bin/env bash
case $(basename "$0") in
    gcloud)
        echo "$*" >> "$ROOT/calls"
        case "$*" in
            *"tpu-vm list"*) [ ! -e "$ROOT/slice" ] || echo mine READY ;;
            *"tpu-vm create"*) touch "$ROOT/slice" ;;
            *"tpu-vm delete"*) rm "$ROOT/slice" ;;
            *"tpu-vm scp"*) cp "$5" "$ROOT/host/${6#*:}" ;;
            *"tpu-vm ssh"*) cd "$ROOT/host" && HOME=$ROOT/host exec bash -c "${@: -1}" ;;
            "storage cp"*)
                to=$ROOT/bucket/${@: -1}; mkdir -p "$to" && cp -r "${@:4:$# - 4}" "$to" ;;
        esac ;;
    git)
        case $1 in
            status) echo ' M train/mine.py' ;;
            archive) tar -cf jaxspec.tar keys.env ;;
        esac ;;
    tmux) case $1 in new-session) sh -c "${@: -1}" ;; has-session) exit 1 ;; esac ;;
    python3.12)
        mkdir -p .venv/bin && for name in python pip jaxspec; do cp "$0" .venv/bin/$name; done ;;
    python)
        printf '%s
' "$@" > ~/words; env > ~/environment
        tune=runs/train/llava15_68m/tune
        mkdir -p $tune && echo {} > $tune/metrics.jsonl ;;
    jaxspec) mkdir my-draft ;;
esac
"""


def test_words_reach_the_host_as_they_are_and_keys_are_on_no_command_line(tmp_path: Path) -> None:
    """Words reach the host as they are, and keys are on no command line; the stubs run what they
    are given, as a host does.
    """
    for folder in ("bin", "host"):
        (tmp_path / folder).mkdir()
    for name in ("gcloud", "git", "tmux", "python3.12", "sudo", "sleep"):
        (tmp_path / "bin" / name).write_text(HOST)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "keys.env").write_text("HF_TOKEN=secret\n")
    words = ["llava15_68m", "--system", "", "--tune.frozen", "a|b", "it's $HOME", 'a "b"  c', "*"]
    variables = {"TPU": "mine", "ZONE": "here", "BUCKET": "gs://bucket", "KEYS": "keys.env"}
    done = subprocess.run(
        [str(SLICE), "walk", *words],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "ROOT": str(tmp_path), "DATA": ""}
        | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = (tmp_path / "host" / "words").read_text().splitlines()
    assert said == ["-m", "train.recipe", *words, "--cluster", "auto"]
    environment = (tmp_path / "host" / "environment").read_text().splitlines()
    assert {"HF_TOKEN=secret", "JAX_COMPILATION_CACHE_DIR=gs://bucket/compiled"} <= {*environment}
    assert "secret" not in (tmp_path / "calls").read_text()
    assert (tmp_path / "host" / "keys").stat().st_mode & 0o077 == 0
    assert "not committed, so not on the slice:\n M train/mine.py" in done.stderr
    (log,) = (tmp_path / "bucket" / "gs:" / "bucket" / "log").iterdir()
    assert sorted(path.name for path in log.rglob("*.*")) == ["metrics.jsonl", "train.log"]
    assert not (tmp_path / "slice").exists()


def test_keys_are_a_file(tmp_path: Path) -> None:
    lines = f"export KEYS=HF_TOKEN=secret; {SLICE} walk llava15_68m"
    code, calls = walk(tmp_path / "it", "never", 0, lines=lines)
    assert (code, calls) == (2, [])


def test_a_trial_that_fails_leaves_no_slice(tmp_path: Path) -> None:
    lines = f"{SLICE} trial llava15_68m"
    code, calls = walk(tmp_path / "it", "always", "--debug", lines=lines)
    assert code == 1
    assert any("delete" in call for call in calls)


@pytest.mark.parametrize(
    ("words", "told"),
    [("wlak", "'wlak' is no step"), ("walk", "name a recipe"), ("on all", "give a command")],
)
def test_a_wrong_step_is_named(words: str, told: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"TPU=a ZONE=b BUCKET=c {SLICE} {words}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert told in done.stderr


SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.defpath}")


@pytest.mark.skipif(SHELLCHECK is None, reason="no shellcheck")
def test_shellcheck_finds_nothing() -> None:
    subprocess.run([str(SHELLCHECK), str(SLICE)], check=True)
