"""What holds for every test: no network, quiet libraries, one thread, the slow ones first, and random numbers that do
not depend on what ran before.
"""

import gc
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported, which reads it once
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["INFUSE_RECEIPTS"] = "0"  # each test proves what it replaces
os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # of processes that share the cores, none is to wait for its threads by computing

import numpy
import pytest
import torch

from infuse.ground import neighbours
from tests.support.gate import Recorder, taken
from tests.support.leftovers import found_and_put_back
from tests.support.ranks import Ranks

TESTS = Path(__file__).parent
LONGEST = (
    "ops/triton/test_interpreter",
    "ops/cpu/test_instruction_sets",
    "ops/triton/test_compiler",
    "cli/test_ranks",
    "docs/test_tensor_parallel",
)  # tests of 10 s and more


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="Run all tests, not only those of the fast gate.")
    parser.addoption("--rest", action="store_true", help="Run the tests that the fast gate leaves out, and no others.")
    parser.addoption("--variants", action="store_true", help="Take in the tests marked `variants`.")
    parser.addoption(
        "--seconds", action="store_true", help="Record the times by which the fast gate chooses its cases."
    )
    parser.addoption("--order", metavar="SEED", help="Run in random order: modules, and within each its tests.")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--seconds") and not hasattr(config, "workerinput"):  # of pytest-xdist's workers
        config.pluginmanager.register(Recorder())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest first, then what is slow: the last to end decides when processes that share the tests are done."""
    kept = taken(items, config)
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    items[:] = kept
    if (seed := config.getoption("--order")) is not None:
        shuffle(items, seed)
        return

    def place(item: pytest.Item) -> int:
        if item.get_closest_marker("slow") is None:
            return len(LONGEST) + 1
        path = item.path.relative_to(TESTS).with_suffix("").as_posix()
        return LONGEST.index(path) if path in LONGEST else len(LONGEST)

    items.sort(key=place)


def shuffle(items: list[pytest.Item], seed: str) -> None:
    """Modules stay together: what they share is made once for each of them."""
    by_module: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_module.setdefault(item.path, []).append(item)
    modules, order = list(by_module.values()), random.Random(seed)
    order.shuffle(modules)
    for module in modules:
        order.shuffle(module)
    items[:] = [item for module in modules for item in module]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the skipped tests by reason."""
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section("skipped")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:6}  {reason}")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported meanwhile is not garbage: to search for some took a quarter of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers without a written spec stay, as those do whose graphs have what no part has."""
    from infuse.ground.errors import SpecMismatch
    from infuse.plan.readings import Readings

    def of(readings: Readings, path: str) -> None:
        raise SpecMismatch("its graph", ["is not read here"])

    monkeypatch.setattr(Readings, "of", of)


def pytest_collection_finish() -> None:
    """What was imported stays to the end. Each search for garbage, two for each of transformers' batches, would read
    all of it: 0.6 s instead of 0.02.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def lasting() -> Iterator[None]:
    """What a module of tests leaves, such as models and readings kept for others, stays to the end, too: each later
    search would read it. Of 139 s of 2,219 tests in one process, searches took 12, and take 5 so.
    """
    yield
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with Ctrl-C ignored
neighbours.LEAST_SECONDS = float("inf")  # tests are each other's neighbours
torch.set_num_threads(1)  # the models are tiny: a second thread only waits for the first
if not torch.cuda.is_available():
    # PyTorch's own formats the stack three times, for devices that are not there: 0.4 ms and more.
    torch.manual_seed = torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail a test that leaves changed what those after it share. It is put back, so that no other test fails, too."""
    with found_and_put_back() as changes:
        yield
    if changes:
        pytest.fail("the test leaves changed: " + "; ".join(changes), pytrace=False)


@pytest.fixture(autouse=True)
def seeded(nothing_left: None) -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def compiled_anew() -> None:
    """PyTorch compiles one function eight times at most, and all containers share one: the ninth raises."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Worker processes for tests of several ranks; none is started before a test asks for it."""
    pool = Ranks()
    yield pool
    pool.close()
