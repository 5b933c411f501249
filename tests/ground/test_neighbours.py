"""What is said of a start that other processes slowed."""

import subprocess
import sys
import warnings

import pytest

from infuse.ground import neighbours

LEAST_SECONDS = 1.0


@pytest.fixture(autouse=True)
def noticed(monkeypatch):
    monkeypatch.setattr(neighbours, "LEAST_SECONDS", LEAST_SECONDS)  # the tests' conftest.py has another


def test_a_start_that_waited_for_a_core_says_so_in_one_line(monkeypatch, recwarn):
    waits = iter([3.0, 5.5])
    monkeypatch.setattr(neighbours, "waited_seconds", lambda: next(waits))
    seconds = iter([10.0, 16.0])
    monkeypatch.setattr(neighbours.time, "perf_counter", lambda: next(seconds))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    with neighbours.noticed(1):
        pass
    (said,) = [str(one.message) for one in recwarn]
    assert "for 2.5 of 6.0 s" in said and "OMP_WAIT_POLICY=passive" in said and "\n" not in said


def test_the_advice_is_another_where_threads_sleep_already(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert "set_num_threads" in neighbours.advice()


@pytest.mark.parametrize(
    ("ranks", "waited", "seconds"), [(1, 0.9, 2.0), (1, 2.0, 11.0), (2, 2.5, 6.0)], ids=["short", "little", "ranks"]
)
def test_nothing_is_said_of_short_waits_and_ranks(monkeypatch, caplog, recwarn, ranks, waited, seconds):
    waits, times = iter([0.0, waited]), iter([0.0, seconds])
    monkeypatch.setattr(neighbours, "waited_seconds", lambda: next(waits))
    monkeypatch.setattr(neighbours.time, "perf_counter", lambda: next(times))
    with neighbours.noticed(ranks):
        pass
    assert not caplog.text and not list(recwarn)


def test_the_wait_is_the_second_number(monkeypatch, tmp_path):
    """Nanoseconds on a core, nanoseconds of waiting for one, turns."""
    (tmp_path / "schedstat").write_text("9000000000 2500000000 17\n")
    monkeypatch.setattr(neighbours, "_SCHEDULER", str(tmp_path / "schedstat"))
    assert neighbours.waited_seconds() == 2.5


def test_a_system_that_does_not_tell_has_no_waits(monkeypatch, tmp_path):
    monkeypatch.setattr(neighbours, "_SCHEDULER", str(tmp_path / "none"))
    assert neighbours.waited_seconds() == 0.0
    (tmp_path / "other").write_text("what another system writes")
    monkeypatch.setattr(neighbours, "_SCHEDULER", str(tmp_path / "other"))
    assert neighbours.waited_seconds() == 0.0


def test_a_filter_that_makes_errors_of_warnings_ends_no_start(monkeypatch, caplog):
    waits, times = iter([0.0, 5.0]), iter([0.0, 6.0])
    monkeypatch.setattr(neighbours, "waited_seconds", lambda: next(waits))
    monkeypatch.setattr(neighbours.time, "perf_counter", lambda: next(times))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with neighbours.noticed(1):
            pass
    assert "for 5.0 of 6.0 s" in caplog.text, "it is logged"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells how long a thread waited")
def test_the_wait_is_what_linux_measures():
    program = (
        "import os, time; from infuse.ground.neighbours import waited_seconds\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "before, stop = waited_seconds(), time.perf_counter() + 0.6\n"
        "while time.perf_counter() < stop: pass\n"
        "print(waited_seconds() - before)"
    )
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    waited = [float(process.communicate(timeout=120)[0]) for process in both]
    assert max(waited) > 0.1, waited  # on one core each waits while the other runs
