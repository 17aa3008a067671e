"""A guest's end: exit statuses and reasons, what is left behind, and what JUnit and QMP say. QEMU is a shell script."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tierloop.devices.errors import ConfigurationError
from tierloop.devices.system import HOST, PUNCH_HOLE
from tierloop.tools.guest import running, testing
from tierloop.tools.guest.arguments import Choices
from tierloop.tools.guest.console import Tail, last_lines, panic
from tierloop.tools.guest.machine import DEFAULT, load, parse
from tierloop.tools.guest.places import FORMAT, Layers, Places, write_note
from tierloop.tools.guest.relay import main as relay

SMALL = parse("[[node]]\nid = 0\nmib = 64\ncpus = 1\n", "small")
RUN_FOLDER = 'for word; do case "$word" in *path=*/console) run=${word#*path=}; run=${run%/console};; esac; done\n'
Boot = Callable[..., running.Outcome]


def write_layers(places: Places) -> None:
    """A rig that says that it stands."""
    places.layers.mkdir(parents=True)
    write_note(places.layers, Layers(FORMAT, "bookworm", "6.12", "10", 1.0, ()))


@pytest.fixture
def boot(tmp_path: Path) -> Boot:
    """Run a command in a guest whose QEMU is a script; $run is the folder of the run."""
    places = Places(tmp_path / "rig")
    write_layers(places)
    script = tmp_path / "qemu"

    def run(text: str, limit_s: float = 60, **more: Any) -> running.Outcome:
        script.write_text(f"#!/bin/bash\n{RUN_FOLDER}{text}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        choices = Choices(qemu=str(script))
        try:
            return running.run(
                places, SMALL, ["true"], limit_s=limit_s, choices=choices, folder=tmp_path, silent=True, **more
            )
        finally:
            assert list(places.runs.iterdir()) == []

    return run


@pytest.mark.parametrize("status", [0, 1, 7, 255])
def test_the_commands_exit_status_passes_through(boot: Boot, status: int) -> None:
    outcome = boot(f"touch $run/ready; echo {status} > $run/status")
    assert (outcome.status, outcome.exit_code, outcome.reason) == (status, status, "")
    assert outcome.boot_s is not None


def test_a_panic_is_named_and_has_the_consoles_last_lines(boot: Boot) -> None:
    lines = "\\n".join(f"line {at}" for at in range(99))
    outcome = boot(f"printf '{lines}\\n[ 1.2] Kernel panic - not syncing: Attempted to kill init!\\n' > $run/console")
    assert (outcome.status, outcome.exit_code) == (None, running.NO_STATUS)
    assert outcome.reason == "kernel panic: Attempted to kill init!"
    assert outcome.last_lines[-1].endswith("Attempted to kill init!")
    assert "line 98" in outcome.last_lines


def test_what_qemu_complains_of_is_passed_on(boot: Boot) -> None:
    outcome = boot("echo 'qemu: no such device model' >&2; exit 1")
    assert outcome.reason == "QEMU ended with 1: qemu: no such device model"


def test_a_qemu_that_the_host_killed_is_the_hosts_fault_and_is_told_so(boot: Boot) -> None:
    outcome = boot("kill -9 $$")
    assert "killed (signal 9), as the kernel does where memory runs out" in outcome.reason
    assert outcome.starved


def test_a_guest_that_is_switched_off_has_no_status(boot: Boot) -> None:
    outcome = boot("exit 0")
    assert "switched off before the command ended" in outcome.reason
    assert not outcome.starved


def test_a_full_results_folder_is_no_success(boot: Boot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results"
    results.mkdir()
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(1 << 40, 0, 4096 if folder == results else 1 << 40))
    outcome = boot("touch $run/ready; echo 0 > $run/status", results=results)
    assert outcome.exit_code == running.NO_STATUS
    assert f"the disk of {results} is full" in outcome.reason


def test_a_command_that_never_ends_is_ended(boot: Boot) -> None:
    outcome = boot("echo $$ > $run/../../pid; touch $run/ready; exec sleep 1000", limit_s=0.5)
    assert outcome.reason == "still running after 0.5 s"
    assert (outcome.status, outcome.starved) == (None, True)


def test_a_guest_that_does_not_get_ready_hangs(boot: Boot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_BOOT_S", 0.3)
    assert boot("exec sleep 1000").reason == "hangs: it did not get ready within 0.3 s"


def test_no_qemu_outlives_an_interruption(boot: Boot, tmp_path: Path) -> None:
    def interrupt(guest: running.Guest) -> None:
        (tmp_path / "pid").write_text(str(guest.process.pid))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        boot("touch $run/ready; exec sleep 1000", while_running=interrupt)
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


@pytest.fixture
def command_line(tmp_path: Path) -> Callable[..., tuple[list[str], dict[str, str], Places]]:
    """The words and environment of `tierloop guest …` on a small machine whose QEMU is a script."""

    def made(text: str, verb: str, *more: str, machine: Path | None = None) -> tuple[list[str], dict[str, str], Places]:
        places = Places(tmp_path / "rig")
        write_layers(places)
        (tmp_path / "small.toml").write_text("[[node]]\nid = 0\nmib = 64\ncpus = 1\n")
        script = tmp_path / "qemu"
        script.write_text(f"#!/bin/bash\n{RUN_FOLDER}{text}\n")
        script.chmod(0o755)
        code = "import sys; from tierloop.tools.cli import main; sys.exit(main())"
        options = ["--machine", str(machine or tmp_path / "small.toml"), "--qemu", str(script)]
        environment = {**os.environ, "TIERLOOP_GUEST": str(places.root), "PYTHONPATH": os.pathsep.join(sys.path)}
        return [sys.executable, "-c", code, "guest", verb, *options, *more], environment, places

    return made


Line = Callable[..., tuple[list[str], dict[str, str], Places]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_line_leaves_no_qemu_and_no_folder(command_line: Line, number: signal.Signals) -> None:
    """The whole of `tierloop guest run`, and the real signal: as Ctrl-C, to the program in front."""
    words, environment, places = command_line(
        "touch $run/ready; echo begun > $run/stdout; exec sleep 1000", "run", "--", "true"
    )
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"begun\n"
        [child] = Path(f"/proc/{caller.pid}/task/{caller.pid}/children").read_text().split()
        caller.send_signal(number)
        _, said = caller.communicate(timeout=60)
    assert (caller.returncode, said) == (128 + number, b"tierloop: interrupted\n")
    assert not Path("/proc", child).exists()
    assert list(places.runs.iterdir()) == []


def test_a_shell_has_the_terminal_and_ends_with_its_status(command_line: Line) -> None:
    text = 'touch $run/ready; read -r line; echo "got $line"; grep TERMINAL $run/settings; echo 7 > $run/status'
    words, environment, places = command_line(text, "shell")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
    environment = {name: value for name, value in environment.items() if name not in ("LINES", "COLUMNS")}
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as shell:
        os.close(theirs)
        os.write(ours, b"hello\n")
        said = b""
        while b"TERMINAL" not in said or not said.endswith(b"\n"):
            said += os.read(ours, 4096)
        assert shell.wait(60) == 7
    os.close(ours)
    assert b"got hello" in said
    assert b"TERMINAL='rows 33 cols 101'" in said
    assert list(places.runs.iterdir()) == []


def test_a_shell_without_a_terminal_is_refused(command_line: Line) -> None:
    words, environment, _ = command_line("exit 1", "shell")
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert "guest shell needs a terminal" in done.stderr


def ended(words: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """The exit code of a command line, and what it said."""
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, check=False)
    return done.returncode, done.stdout, done.stderr


LINES = """for one in begins passed; do echo '{"test": "a.one", "outcome": "'$one'", "reason": ""}'; done > $run/report
echo '{"test": "a.two", "outcome": "begins", "reason": ""}' >> $run/report
echo '{"test": "a.two", "outcome": "failed", "reason": "assert 1 == 2"}' >> $run/report
"""
HANGS = """touch $run/ready
echo '{"test": "a.three", "outcome": "begins", "reason": ""}' >> $run/report
printf '{"test": "a.fo' >> $run/report
exec sleep 1000"""
QUICK = ("--limit-s", "1", "--json", "--", "tests/guest/test_cxl.py")


@pytest.fixture
def nothing_to_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compile at once: the environment of the command line has a Python that does nothing for it."""
    folder = tmp_path / "quick"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import tierloop.tools.guest.testing as testing\ntesting.compile_ahead = lambda places: {}\n"
    )
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.usefixtures("nothing_to_compile")
def test_time_that_ran_out_behind_a_test_that_failed_is_a_failure(command_line: Line) -> None:
    words, environment, _ = command_line(LINES + HANGS, "test", *QUICK)
    code, said, complained = ended(words, environment)
    told = json.loads(said)
    assert (code, told["passed"], told["failed"]) == (1, 1, 1)
    assert told["failures"] == [{"test": "a.two", "reason": "assert 1 == 2"}]
    assert "guest: it was at a.three" in complained
    assert "failed: a.two: assert 1 == 2" in complained


@pytest.mark.usefixtures("nothing_to_compile")
def test_time_that_ran_out_while_all_was_well_is_an_invalid_run(command_line: Line) -> None:
    words, environment, _ = command_line(HANGS, "test", *QUICK)
    code, said, complained = ended(words, environment)
    assert (code, json.loads(said)["reason"]) == (3, "still running after 1 s")
    assert "guest: until then 0 passed, 0 failed, 0 skipped" in complained


@pytest.mark.usefixtures("nothing_to_compile")
def test_a_host_without_the_memory_for_tests_is_an_invalid_run(command_line: Line, tmp_path: Path) -> None:
    huge = tmp_path / "huge.toml"
    huge.write_text("".join(f"[[node]]\nid = {at}\nmib = 1048576\ncpus = 1\n" for at in range(16)))
    words, environment, _ = command_line("exit 1", "test", machine=huge)
    code, said, complained = ended(words, environment)
    assert (code, said) == (3, "")
    assert "guest machine huge: takes up to 16777728 MiB of memory" in complained


@pytest.mark.usefixtures("nothing_to_compile")
def test_a_junit_file_is_kept_whole_and_is_that_of_this_run(command_line: Line, tmp_path: Path) -> None:
    (tmp_path / "junit").write_text(JUNIT)
    results = tmp_path / "results"
    results.mkdir()
    (results / "junit.xml").write_text("of an earlier run")
    text = f"touch $run/ready; cp {tmp_path}/junit $run/junit.xml; echo 1 > $run/status"
    words, environment, _ = command_line(text, "test", "--results", str(results), "--", "tests/guest/test_cxl.py")
    assert ended(words, environment)[0] == 1
    assert [path.name for path in results.iterdir()] == ["junit.xml"]
    assert (results / "junit.xml").read_text() == JUNIT


@pytest.mark.usefixtures("nothing_to_compile")
@pytest.mark.parametrize("word", ["--junitxml=/tmp/x", "--junit-xml=x"])
def test_a_junit_file_of_ones_own_is_refused_with_the_place_of_ours(command_line: Line, word: str) -> None:
    words, environment, places = command_line("exit 1", "test", "--", word)
    code, _, complained = ended(words, environment)
    assert code == 2
    assert f"the JUnit file is {places.root}/results/junit.xml" in complained


@pytest.mark.parametrize("language", ["C.UTF-8", "POSIX"])
def test_words_of_any_bytes_reach_the_guest_as_they_are(command_line: Line, tmp_path: Path, language: str) -> None:
    text = f"cp $run/command $run/settings {tmp_path}; touch $run/ready; echo 0 > $run/status"
    words, environment, _ = command_line(
        text, "run", "--", "echo", "gr\u00fc\u00df", b"\xff".decode(errors="surrogateescape")
    )
    spoken = {**environment, "LC_ALL": language, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    folder = tmp_path / "\u00fc"
    folder.mkdir()
    assert subprocess.run(words, cwd=folder, env=spoken, check=False).returncode == 0
    assert (tmp_path / "command").read_bytes() == "echo 'gr\u00fc\u00df' '".encode() + b"\xff'\n"
    assert os.fsencode(folder) in (tmp_path / "settings").read_bytes()


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_standard_stream_that_the_caller_closed_leads_nowhere(command_line: Line, closed: int) -> None:
    words, environment, _ = command_line("touch $run/ready; echo a > $run/stdout; echo 7 > $run/status", "run", "true")
    close = f"import os, sys; os.close({closed}); os.execv(sys.argv[1], sys.argv[1:])"
    assert ended([sys.executable, "-c", close, *words], environment)[0] == 7


def test_no_qemu_outlives_a_caller_that_is_killed(tmp_path: Path) -> None:
    """As far as the host has setpriv: the kernel then does it."""
    code = (
        "import sys; from pathlib import Path; from tierloop.tools.guest import running as r\n"
        "from tierloop.tools.guest.arguments import Choices, Files\n"
        "p = Path(sys.argv[1]); made = r._start(['sleep', '1000'], Files(p, p, p), Choices())\n"
        "while Path('/proc', str(made.pid), 'comm').read_text() != 'sleep\\n': pass\n"
        "print(made.pid, flush=True); input()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as caller:
        assert caller.stdout is not None
        pid = int(caller.stdout.readline())
        child = os.pidfd_open(pid)
        caller.kill()
    assert poll_until_gone(child)
    os.close(child)


def poll_until_gone(pidfd: int, wait_s: float = 10) -> bool:
    import select

    return bool(select.select([pidfd], [], [], wait_s)[0])


def test_what_is_left_of_a_killed_run_goes_with_the_next_one(boot: Boot, tmp_path: Path) -> None:
    left = tmp_path / "rig/runs/run-dead"
    left.mkdir(parents=True)
    (left / "owner").touch()
    os.utime(left, (0, 0))
    boot("echo 0 > $run/status")
    assert not left.exists()


def test_sockets_of_a_run_that_was_killed_go_and_those_of_one_that_runs_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(running, "_MOST_SOCKET_FOLDER", 4096)
    dead, others = tmp_path / "tierloop-guest-dead", tmp_path / "kept"
    for folder in (dead, others):
        folder.mkdir()
        os.utime(folder, (0, 0))
    with running.socket_folder() as alive:
        os.utime(alive, (0, 0))
        with running.socket_folder() as another:
            assert sorted(tmp_path.iterdir()) == sorted([alive, another, others])
    assert list(tmp_path.iterdir()) == [others]


def test_sockets_lie_where_their_paths_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("a" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with running.socket_folder() as folder, socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "guest"))


@pytest.mark.parametrize("hidden", ["/dev/shm", "/run", "/proc/self", "/sys"])
def test_a_folder_that_a_guest_does_not_see_is_refused(tmp_path: Path, hidden: str) -> None:
    write_layers(Places(tmp_path / "rig"))
    with pytest.raises(ConfigurationError, match=f"{hidden} is not seen in a guest"):
        running.run(
            Places(tmp_path / "rig"), SMALL, ["true"], limit_s=1, choices=Choices(qemu="true"), folder=Path(hidden)
        )


def test_memory_that_a_control_group_keeps_back_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "available_nbytes", lambda: 512 << 20)
    with pytest.raises(running.TooLarge, match="512 MiB are free"):
        running.check(SMALL, Choices())


def test_a_machine_that_is_too_large_for_this_host_is_refused(boot: Boot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_memory_mib", lambda: 100)
    with pytest.raises(ConfigurationError, match="takes up to 576 MiB of memory, 100 MiB are free"):
        running.check(SMALL, Choices())


def test_without_layers_it_is_said_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="tierloop guest setup"):
        running.run(Places(tmp_path), SMALL, ["true"], limit_s=1, choices=Choices(), folder=tmp_path)


def test_kvm_that_cannot_run_a_kernel_is_refused_with_the_reason(tmp_path: Path) -> None:
    cpuinfo, device = tmp_path / "cpuinfo", tmp_path / "kvm"
    assert "there is no" in running.kvm_refused(str(device))
    device.touch()
    cpuinfo.write_text("flags\t\t: fpu sse2\n")
    assert "neither vmx nor svm" in running.kvm_refused(str(device), str(cpuinfo))
    cpuinfo.write_text("flags\t\t: fpu vmx sse2\n")
    assert running.kvm_refused(str(device), str(cpuinfo)) == ""


def test_a_qemu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no such program"):
        running.check(SMALL, Choices(qemu=str(tmp_path / "qemu")))


def test_an_unknown_accelerator_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="allowed: tcg, kvm"):
        running.check(SMALL, Choices(accelerator="hvf"))


def test_what_grows_is_copied_once(tmp_path: Path) -> None:
    to, path = io.BytesIO(), tmp_path / "stdout"
    tail = Tail(path, to)
    assert tail.copy() == 0
    path.write_bytes(b"one")
    assert tail.copy() == 3
    path.write_bytes(b"one\xfftwo")
    assert (tail.copy(), tail.copy()) == (4, 0)
    assert to.getvalue() == b"one\xfftwo"


def test_what_was_copied_fills_no_disk(tmp_path: Path) -> None:
    to, path = io.BytesIO(), tmp_path / "stdout"
    tail = Tail(path, to)
    lines = [f"{number:063}\n".encode() for number in range(1 << 18)]
    for first in range(0, len(lines), 1 << 16):
        with path.open("ab") as file:
            file.writelines(lines[first : first + (1 << 16)])
        assert tail.copy() == 4 << 20
    assert to.getvalue() == b"".join(lines)
    assert last_lines(path, 3) == [line.decode().strip() for line in lines[-3:]]
    status = path.stat()
    assert status.st_size == 16 << 20
    assert status.st_blocks * 512 <= 3 << 20 or not gives_room_back(tmp_path)


def gives_room_back(folder: Path) -> bool:
    """Whether the file system under a folder takes the blocks of a hole back."""
    file = folder / "hole"
    file.write_bytes(bytes([1]) * (1 << 20))
    with file.open("r+b") as opened, suppress(OSError):
        HOST.fallocate(opened.fileno(), PUNCH_HOLE, 0, 1 << 20)
    return file.stat().st_blocks * 512 < 1 << 20


def test_last_lines_are_free_of_what_moves_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "console").write_bytes(b"\x1bc\x1b[?7l\x1b[2JSeaBIOS\r\n\r\nready\xff\r\n")
    assert last_lines(tmp_path / "console") == ["SeaBIOS", "ready\ufffd"]
    assert last_lines(tmp_path / "nothing") == []
    assert panic(["fine"]) is None


JUNIT = """<?xml version="1.0"?><testsuites><testsuite tests="4">
<testcase classname="a" name="one"/>
<testcase classname="a" name="two"><failure message="assert 1 == 2">long</failure></testcase>
<testcase classname="a" name="three"><skipped message="no such device"/></testcase>
<testcase classname="a" name="four"><error message="fixture"/></testcase>
</testsuite></testsuites>"""


def test_junit_is_read(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    found = testing.read_junit(tmp_path / "junit.xml")
    failed = (("a.two", "assert 1 == 2"), ("a.four", "fixture"))
    assert found == testing.Found(1, failed, (("a.three", "no such device"),))


@pytest.mark.parametrize("text", ["", "<testsuites>", JUNIT[:200]])
def test_half_a_junit_file_is_no_result(tmp_path: Path, text: str) -> None:
    (tmp_path / "junit.xml").write_text(text)
    assert testing.read_junit(tmp_path / "junit.xml") is None


@pytest.mark.parametrize(
    ("arguments", "pair"),
    [
        ([], True),
        (["-k", "poison"], True),
        (["tests/guest"], True),
        (["tests/guest/test_rdma_pair.py::test_a"], True),
        (["tests/guest/test_cxl.py", "-k", "poison"], False),
        (["tests/test_numa_real.py"], False),
    ],
)
def test_a_second_guest_is_started_where_its_tests_run(arguments: list[str], pair: bool) -> None:
    assert testing.asks_for_a_pair(arguments) is pair


def test_the_word_behind_an_option_names_no_tests() -> None:
    assert testing.named_tests(["-k", "poison", "-x", "tests/guest/test_cxl.py::test_a"]) == ["tests/guest/test_cxl.py"]


OUTCOME = running.Outcome(0, "", (), 7.0, 60.0)


@pytest.mark.parametrize(
    ("status", "found", "good"),
    [
        (0, testing.Found(3, (), ()), True),
        (0, testing.Found(0, (), ()), False),
        (0, None, False),
        (None, testing.Found(3, (), ()), False),
        (1, testing.Found(3, (("a", "b"),), ()), False),
    ],
)
def test_only_tests_that_ran_and_passed_are_good(status: int | None, found: testing.Found | None, good: bool) -> None:
    assert testing.Verdict(running.Outcome(status, "", (), 7.0, 60.0), found).good is good


def test_the_verdict_as_json_has_what_was_promised() -> None:
    verdict = testing.Verdict(OUTCOME, testing.Found(3, (), (("a.b", "why"),)))
    told = testing.as_json(verdict, load(DEFAULT), "6.12", "10.0", 16.0)
    assert {key: told[key] for key in ("kernel", "qemu", "setup_s", "boot_s", "passed", "failed", "skipped")} == {
        "kernel": "6.12",
        "qemu": "10.0",
        "setup_s": 16.0,
        "boot_s": 7.0,
        "passed": 3,
        "failed": 0,
        "skipped": [{"test": "a.b", "reason": "why"}],
    }
    assert {one["kind"] for one in told["devices"]} == {"node", "nvme", "cxl", "rdma"}
    json.dumps(told, allow_nan=False)


def test_a_connection_out_of_the_guest_is_handed_on_until_one_side_leaves(tmp_path: Path) -> None:
    words = [sys.executable, relay.__code__.co_filename, str(tmp_path / "far")]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(words[-1])
        listener.listen(1)
        listener.settimeout(10)
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            client, _ = listener.accept()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"ask\n")
            process.stdin.flush()
            assert client.recv(100) == b"ask\n"
            client.sendall(b"answer\n")
            assert process.stdout.readline() == b"answer\n"
            client.close()
            assert process.wait(10) == 0
