"""Nothing that a child started outlives its owner, in whatever way either of them ends."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from eagle3lib.lab import child as child_module
from eagle3lib.lab.child import Child

# A process tree as engines make it: workers that ignore SIGTERM, helpers with a session of their
# own, and (orphan) a daemon whose parent has gone. Each writes its id once it is ready.
TREE = """
import os, signal, subprocess, sys, time
from pathlib import Path
role, folder = sys.argv[1], Path(sys.argv[2])
def start(role):
    return subprocess.Popen([sys.executable, "-S", __file__, role, str(folder)])
if role == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if role in ("session", "orphan"):
    os.setsid()
if role == "leaver":
    start("orphan")
    raise SystemExit
if role == "root":
    start("stubborn"), start("session"), start("leaver").wait()
(folder / f".{role}").write_text(str(os.getpid()))
(folder / f".{role}").rename(folder / f"{role}.pid")
if role == "root" and len(sys.argv) > 3:
    while not (folder / "leave").exists():
        time.sleep(0.02)
    raise SystemExit(int(sys.argv[3]))
time.sleep(1000)
"""
OWNER = """
import sys, time
from pathlib import Path
from eagle3lib.lab import child
child.STOP_DEADLINE_S = float(sys.argv[1])
started = child.Child(sys.argv[3:], log=Path(sys.argv[2]))
time.sleep(1000)
"""
# Orphans are found through PR_SET_CHILD_SUBREAPER, which only Linux has.
ROLES = ("root", "stubborn", "session") + (("orphan",) if sys.platform == "linux" else ())
DEADLINE_S = 2.0  # of a stop; the grace between SIGTERM and SIGKILL is half of it
SLOW_S = 20.0  # how long a busy machine may take for what should be immediate


@pytest.fixture(autouse=True)
def short_deadline(monkeypatch):
    monkeypatch.setattr(child_module, "STOP_DEADLINE_S", DEADLINE_S)


@pytest.fixture
def tree(tmp_path):
    """The command of a process tree; whatever a failing test leaves of it is killed."""
    script = tmp_path / "tree.py"
    script.write_text(TREE)
    yield [sys.executable, "-S", str(script), "root", str(tmp_path)]
    for path in tmp_path.glob("*.pid"):
        try:
            process = psutil.Process(int(path.read_text()))
            if str(script) in process.cmdline():
                process.kill()
        except psutil.Error:
            continue


def members(folder):
    """The processes of the tree, once all of them are ready."""
    deadline = time.monotonic() + SLOW_S
    while not all((folder / f"{role}.pid").exists() for role in ROLES):
        assert time.monotonic() < deadline, "the tree did not start"
        time.sleep(0.02)
    return {role: psutil.Process(int((folder / f"{role}.pid").read_text())) for role in ROLES}


def alive(processes):
    """Names of those that still run; a zombie that nobody has reaped is gone."""
    found = []
    for name, process in processes.items():
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(name)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_until_gone(processes, within_s):
    deadline = time.monotonic() + within_s
    while alive(processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive(processes)


def test_leaving_the_block_ends_all_that_the_child_started_and_nothing_else(tree, tmp_path):
    bystander = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
    try:
        with Child(tree, log=tmp_path / "log") as child:
            processes = members(tmp_path)
            assert sorted(alive(processes)) == sorted(ROLES)
            assert child.exit_code() is None
        assert alive(processes) == []  # at once: stop() waits until they are gone
        assert child.exit_code() is not None
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_an_owner_killed_without_warning_takes_the_tree_along(tree, tmp_path):
    """A killed kernel runs no ``finally``, so the owner can't be the one that cleans up."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(DEADLINE_S), str(tmp_path / "log"), *tree]
    )
    try:
        processes = members(tmp_path)
        supervisor = processes["root"].parent()
        assert supervisor.ppid() == owner.pid
        processes["supervisor"] = supervisor
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    # The grace is half of it; the other half is for a busy machine's scheduler.
    assert wait_until_gone(processes, within_s=DEADLINE_S) == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_supervisor_that_is_told_to_end_ends_the_tree_first(tree, tmp_path, signum):
    child = Child(tree, log=tmp_path / "log")
    processes = members(tmp_path)
    os.kill(child.pid, signum)
    child.wait(SLOW_S)
    assert alive(processes) == []


def test_what_a_child_leaves_behind_when_it_exits_is_ended_and_its_code_passed_on(tree, tmp_path):
    child = Child([*tree, "7"], log=tmp_path / "log")
    processes = members(tmp_path)
    (tmp_path / "leave").touch()
    assert child.wait(SLOW_S) == 7
    assert alive(processes) == []


def test_a_polite_child_gets_time_to_tidy_up(tmp_path):
    script = (
        "import signal, sys, time, pathlib\n"
        "def tidy(*_):\n"
        f"    time.sleep(0.2); pathlib.Path({str(tmp_path / 'tidy')!r}).touch(); sys.exit()\n"
        "signal.signal(signal.SIGTERM, tidy)\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "time.sleep(1000)\n"
    )
    with Child([sys.executable, "-S", "-c", script], log=tmp_path / "log"):
        deadline = time.monotonic() + SLOW_S
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    assert (tmp_path / "tidy").exists()


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(0)", 0), ("sys.exit(3)", 3),
                                              ("os.kill(os.getpid(), 9)", 128 + 9)])  # fmt: skip
def test_the_exit_code_is_passed_on(tmp_path, ending, code):
    child = Child([sys.executable, "-S", "-c", f"import os, sys; {ending}"], log=tmp_path / "log")
    assert child.wait(SLOW_S) == code
    assert child.exit_code() == code
    child.stop()  # of a child that has ended: no error


def test_the_child_gets_our_environment_and_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("OURS", "ours")
    script = "import os; print(os.environ['OURS'], os.environ['ITS'], os.getcwd())"
    child = Child(
        [sys.executable, "-c", script], log=tmp_path / "log", env={"ITS": "its"}, cwd=tmp_path
    )
    child.wait(SLOW_S)
    assert child.last_lines() == f"ours its {tmp_path}"


def test_last_lines_are_the_end_of_the_log_of_both_streams(tmp_path):
    log = tmp_path / "logs" / "child.log"
    script = (
        "import sys, os\n"
        "[print(i) for i in range(100)]\n"
        "sys.stdout.flush()\n"
        "os.write(2, b'broken \\xff byte\\n')"
    )
    child = Child([sys.executable, "-c", script], log=log)
    child.wait(SLOW_S)
    assert child.last_lines(3) == "98\n99\nbroken \ufffd byte"
    log.unlink()
    assert child.last_lines() == ""


def test_a_process_that_vanishes_while_it_is_looked_at_counts_as_gone(monkeypatch):
    """Else the supervisor dies of the question and leaves the others running."""
    from eagle3lib.lab import supervise

    class Vanished:
        def is_running(self):
            return True

        def status(self):
            raise psutil.NoSuchProcess(1)

    class Me:
        def children(self, recursive):
            return [Vanished()]

    monkeypatch.setattr(supervise.psutil, "Process", Me)
    assert supervise._alive() == []
