"""Files and directories are there whole or not at all."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxspec.errors import InputError
from jaxspec.files import (
    check_directory,
    forget_trial,
    sole,
    trial_of,
    whole,
    whole_directory,
    write_text,
)


def stop_within(path: Path) -> None:
    with whole(path) as fresh:
        fresh.write_text("half of")
        raise KeyboardInterrupt


def test_a_file_that_is_not_finished_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    write_text(path, "é\n")
    with pytest.raises(KeyboardInterrupt):
        stop_within(path)
    assert path.read_bytes() == "é\n".encode()
    write_text(path, "anew")
    assert path.read_text() == "anew"
    assert list(tmp_path.iterdir()) == [path]


def test_threads_write_one_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "caption.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: write_text(path, f"{number}" * 999), range(8 * 40)))
    text = path.read_text()
    assert text == text[: len(text) // 999] * 999
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_line_and_leaves_the_file_before(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    write_text(path, "before")
    (tmp_path / f".table.md.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(InputError, match=r"table\.md: cannot be written: No space left on device;"):
        write_text(path, "anew")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def fill(path: Path, *names: str) -> None:
    with whole_directory(path, lambda name: name.startswith("own")) as fresh:
        for name in names:
            (fresh / name).write_text("new")


def test_a_directory_keeps_what_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "out"
    fill(path, "own1", "own2")
    path.chmod(0o700)
    (path / "mine" / "deep").mkdir(parents=True)
    (path / "mine" / "deep" / "note").write_text("mine")
    (path / "link").symlink_to("mine/deep")
    fill(path, "own2", "own3")
    assert sorted(entry.name for entry in path.iterdir()) == ["link", "mine", "own2", "own3"]
    assert (path / "link" / "note").read_text() == "mine"
    assert path.stat().st_mode & 0o777 == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_what_a_kill_left_is_restored_or_cleared(tmp_path: Path) -> None:
    """What a kill left is restored or cleared: killed between two renames, the old directory has
    another name; killed before, a half is left.
    """
    out = tmp_path / "out"
    fill(out, "own1")
    (out / "mine").write_text("mine")
    out.rename(tmp_path / ".out.old")
    for name in (".out.1.tmp", ".out.tmp", ".outer.2.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own").write_text("half")
    check_directory(out)
    assert (out / "own1").exists()
    (tmp_path / ".out.old").mkdir()
    (tmp_path / ".out.old" / "own1").write_text("killed behind the second rename")
    fill(out, "own2")
    assert sorted(entry.name for entry in out.iterdir()) == ["mine", "own2"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".out.tmp", ".outer.2.tmp", "out"]


KILLED = """
import os, signal, sys
from pathlib import Path
from jaxspec.files import whole_directory
left = int(sys.argv[1])
def kill(event, arguments):
    global left
    left -= event in ("os.mkdir", "os.link", "os.rename", "os.remove", "os.rmdir")
    if left == 0:
        left = -1
        os.kill(os.getpid(), signal.SIGKILL)
with whole_directory(Path("out"), lambda name: name.startswith("own")) as fresh:
    (fresh / "own1").write_text("new")
    sys.addaudithook(kill)
"""


def test_a_kill_at_any_change_of_the_disk_loses_nothing(tmp_path: Path) -> None:
    for change in range(1, 100):
        home = tmp_path / str(change)
        out = home / "out"
        (out / "mine").mkdir(parents=True)
        for name in ("own1", "own2", "mine/note"):
            (out / name).write_text("old")
        code = subprocess.run(
            [sys.executable, "-c", KILLED, str(change)], cwd=home, check=False
        ).returncode
        held = out if out.exists() else home / ".out.old"
        files = {
            str(file.relative_to(held)): file.read_text()
            for file in held.rglob("*")
            if file.is_file()
        }
        old = {"own1": "old", "own2": "old", "mine/note": "old"}
        assert files in (old, {"own1": "new", "mine/note": "old"}), change
        fill(out, "own3")
        assert (out / "mine" / "note").read_text() == "old"
        assert sorted(os.listdir(out)) == ["mine", "own3"]
        assert os.listdir(home) == ["out"]
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert change > 6


def test_a_directory_has_one_writer(tmp_path: Path) -> None:
    with whole_directory(tmp_path / "out", lambda name: True):
        with pytest.raises(InputError, match=r"\.out\.lock: held by process"):
            fill(tmp_path / "out", "own")
        assert not (tmp_path / "out").exists()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out"]


def test_a_neighbours_half_is_let_alone(tmp_path: Path) -> None:
    """A neighbour's half is let alone if its name begins with another's and a dot, as versions
    have.
    """
    with whole_directory(tmp_path / "qwen2.5", lambda name: True) as fresh:
        (fresh / "first").touch()
        fill(tmp_path / "qwen2", "own")
        (fresh / "second").touch()
    assert sorted(os.listdir(tmp_path / "qwen2.5")) == ["first", "second"]


def remove_half(path: Path, again: bool) -> None:
    with whole_directory(path, lambda name: True) as fresh:
        shutil.rmtree(fresh)
        if again:
            (fresh / "second half").mkdir(parents=True)


def test_half_of_a_directory_is_not_published(tmp_path: Path) -> None:
    fill(tmp_path / "out", "own")
    removed = r"\.out\.\d+\.tmp: was removed while .*out was written; try again"
    for again in (True, False):
        with pytest.raises(InputError, match=removed):
            remove_half(tmp_path / "out", again)
    assert os.listdir(tmp_path / "out") == ["own"]
    assert os.listdir(tmp_path) == ["out"]


def test_no_directory_can_take_some_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "here" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "deep")
    for path, why in (
        (tmp_path / "file", "is a file"),
        (tmp_path / "link", "is a symbolic link"),
        (tmp_path / "file" / "out", f"{tmp_path}/file is a file"),
        (tmp_path / ("long" * 70), "cannot be written: File name too long"),
        (tmp_path / "here", "holds the working directory"),
        (Path("."), "holds the working directory"),
        (Path("/dev"), "is a mount point"),
    ):
        with pytest.raises(InputError) as refused:
            fill(path, "own")
        assert str(refused.value).startswith(f"{path}: {why}")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "here", "link"]


HOLDER = """
import sys
from pathlib import Path
from jaxspec.files import sole
with sole(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_names_its_holder_and_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "run" / "train.lock"
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    holder = f"process {child.pid} on {socket.gethostname()}"
    with pytest.raises(InputError, match=f"train.lock: held by {holder}; wait"), sole(path):
        pytest.fail("two hold it")
    assert path.read_text() == f"{holder}\n"
    child.kill()
    child.communicate()
    with sole(path):
        assert path.read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    assert not path.exists()
    with pytest.raises(InputError, match="cannot be written: Is a directory"), sole(tmp_path):
        pass


def test_trials_keep_to_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = ["mix", "mix.answers", "mix.lock", "mix.skipped.jsonl", "mix.unfinished"]
    others = ["mix.v2", "mix.v2.unfinished", "mix_t0"]
    there = Path("runs/debug/data/mix")
    assert trial_of(Path("runs/data/mix")) == trial_of(there) == trial_of(Path("data/mix")) == there
    assert trial_of(Path("runs/../data/mix")) == trial_of(Path("/data/mix")) == there
    assert trial_of(Path("../mix")).parts[:2] == ("runs", "debug")
    for place in (there, Path("runs/data/mix")):
        for name in (
            *("mix/a", "mix.answers/b", "mix.unfinished/c", "mix_t0/d", "mix.v2/e"),
            "mix.v2.unfinished/f",
        ):
            write_text(place.parent / name, "here")
        write_text(place.parent / "mix.skipped.jsonl", "{}")
        forget_trial(place)
        (place.parent / "mix.lock").touch()
        forget_trial(place)
    assert sorted(os.listdir(there.parent)) == ["mix.lock", *others]
    assert sorted(os.listdir("runs/data")) == sorted(own + others)


def test_processes_of_a_trial_may_remove_its_leftovers_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place, remove = trial_of(Path("runs/mix")), shutil.rmtree

    def remove_next_to_another(path: Path) -> None:
        first = next(path.iterdir(), None)
        remove(path / "a") if first else remove(path)
        if first:
            raise FileNotFoundError(first)

    monkeypatch.setattr("jaxspec.files.shutil.rmtree", remove_next_to_another)
    (place / "a").mkdir(parents=True)
    forget_trial(place)
    assert not place.exists()


WRITER = """
import signal, sys
from pathlib import Path
from jaxspec.files import whole, whole_directory
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
with whole(Path("file")) as file, whole_directory(Path("folder"), lambda name: True) as folder:
    file.touch()
    (folder / "half").touch()
    print("writing", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_leaves_nothing_half_written(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", WRITER]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    child.send_signal(number)
    child.communicate()
    assert child.returncode == 128 + number
    assert list(tmp_path.iterdir()) == []
