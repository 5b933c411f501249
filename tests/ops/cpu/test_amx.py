"""AMX: the kernels as they are compiled, on an emulator of the instructions where the processor lacks them; which level
runs.

Run as a program with the emulator's path, it runs the kernels' cases: in a process of its own, where signals are
handled and a level is forced that the machine may lack.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from infuse import ops
from infuse.ground.device import cpu_features
from infuse.native import described, isa, kernels, text_of
from infuse.ops.cpu.activation import ACTIVATION_NUMBERS
from infuse.ops.cpu.linear import takes_tiles
from tests.support.amx.programs import NATIVE, build, built_emulator, compiled, loaded, shown_configuration
from tests.support.attention import check, check_many_queries, check_not_finite_tiles, check_tiles_with_masks
from tests.support.levels import run_at_level
from tests.support.products import (
    assert_product,
    check_quantized,
    check_tiled,
    exact,
    poison,
    quantized,
    quantized_args,
)
from tests.support.tolerance import assert_near

LEVEL = "avx512_amx"

built = pytest.mark.skipif(
    isinstance(kernels(), str) or f"{LEVEL} unbuilt" in text_of(kernels().levels()),
    reason="no kernels with AMX were built",
)
# What is not emulated: the rest of the level's instructions.
runs = pytest.mark.skipif("avx512_bf16" not in cpu_features(), reason="the processor has no AVX512-BF16")


# ---- the kernels ----


@pytest.mark.skipif(
    isinstance(kernels(), str) or takes_tiles(torch.bfloat16), reason="test_encoder_call.py runs as it is"
)
@pytest.mark.skipif(isa() != LEVEL, reason="the processor has no AMX")
def test_encoders_go_in_one_call_over_our_tiles() -> None:
    """PyTorch's own products are preferred with AMX, so test_encoder_call.py has to ask for ours."""
    file = str(Path(__file__).parents[2] / "layers" / "test_encoder_call.py")
    code, out, err = run_at_level(
        f"{LEVEL}!", "-m", "pytest", "--full", "-p", "no:xdist", "-p", "no:cacheprovider", file
    )
    assert code == 0 and "passed" in out and "skipped" not in out, out[-3000:] + err[-3000:]


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_emulator(tmp_path_factory.mktemp("amx"))


def poison_scratch() -> None:
    """Leave NaN in the memory that this thread keeps for arranged rows and tiles: what is padded must be cleared, not
    multiplied by 0.
    """
    nan = torch.full((64, 128), float("nan"), dtype=torch.bfloat16)
    kernels().tiled_linear(nan, nan, None, -1, False)
    kernels().attention(*[nan.view(1, 1, 64, 128)] * 3, None, None, 1.0, False, 0, 0.0)


def product_cases() -> None:
    """The op `tiled_linear` itself: rows around blocks of 16 and 32, inputs around steps of 32, outputs around tiles of
    32.
    """
    for rows in (1, 15, 16, 17, 32, 33):
        for inputs in (2, 30, 32, 34, 66):
            poison_scratch()
            check_tiled(torch.bfloat16, rows, inputs)
    for outputs in (270, 1030):  # several tiles for a thread at once, the last ones fewer
        x, weight, bias = (
            torch.randn(49, 98).bfloat16(),
            torch.randn(outputs, 98).bfloat16(),
            torch.randn(outputs).bfloat16(),
        )
        poison(49, outputs, dtype=torch.bfloat16)
        assert_product(kernels().tiled_linear(x, weight, bias, -1, False), x, weight, bias, f"to {outputs}")
        found = kernels().tiled_linear(x, weight, bias, ACTIVATION_NUMBERS["relu"], True)
        assert_near(found, ops.gated_activation(exact(x, weight, bias), "relu"), torch.bfloat16, f"gated, to {outputs}")


def quantized_cases() -> None:
    for text in ("int8:32", "int8:row:asymmetric", "int4:32", "int4:96:asymmetric"):
        for inputs in (96, 192):
            for outputs in (1, 17, 64, 100):
                check_quantized(torch.bfloat16, text, inputs, outputs)
    buffers, weight = quantized_args("int8:8", 72, 300)  # inputs that are no whole steps
    for rows in (49, 64, 81):
        poison_scratch()
        x = torch.randn(rows, 72).bfloat16()
        assert_product(quantized(x, buffers, None, 300, 72, "int8:8"), x, weight, None, f"{rows} rows of 72")


def not_finite_cases() -> None:
    for value in (float("nan"), float("inf"), -float("inf")):
        x, weight = torch.randn(40, 66).bfloat16(), torch.randn(50, 66).bfloat16()
        for place in ((0, 0), (17, 65), (39, 33)):
            x[place] = value
            assert_near(
                kernels().tiled_linear(x, weight, None, -1, False),
                ops.linear.reference(x, weight, None),
                torch.bfloat16,
            )
        weight[49, 64] = value
        assert_near(
            kernels().tiled_linear(x, weight, None, -1, False), ops.linear.reference(x, weight, None), torch.bfloat16
        )
        buffers, _ = quantized_args("int8:32:asymmetric", 96, 50)
        buffers[1][49, 1] = value
        args = (torch.randn(75, 96).bfloat16(), buffers, None, 50, 96, "int8:32:asymmetric")
        assert_near(quantized(*args), ops.quantized_linear.reference(*args), torch.bfloat16)
        check_not_finite_tiles(value, torch.bfloat16)


def thread_cases() -> None:
    x, weight = torch.randn(70, 128).bfloat16(), torch.randn(515, 128).bfloat16()
    buffers, values = quantized_args("int4:32", 128, 515)
    q, k, v = (torch.randn(2, heads, 50, 64).bfloat16() for heads in (4, 2, 2))
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert_product(kernels().tiled_linear(x, weight, None, -1, False), x, weight, None, f"{threads} threads")
        assert_product(quantized(x, buffers, None, 515, 128, "int4:32"), x, values, None, f"int4, {threads} threads")
        check(torch.bfloat16, q, k, v, None, None, 0.125, True, 0, 0.0)
    torch.set_num_threads(1)


def attention_cases() -> None:
    for width in (1, 32, 33, 80):
        poison_scratch()
        check_many_queries(width, torch.bfloat16)
    check_tiles_with_masks(torch.bfloat16)


CASES = {
    case.__name__: case for case in (product_cases, quantized_cases, not_finite_cases, thread_cases, attention_cases)
}


def kernel_cases(path: str, name: str) -> None:
    """One of CASES: the instructions run, every thread that configures its tiles releases them, and none is left
    configured.
    """
    library = loaded(path)
    assert isa() == LEVEL
    CASES[name]()
    assert shown_configuration(library) == bytes(64), "this thread's tiles are configured still"
    if not NATIVE:
        assert library.amx_products() > 100
        assert library.amx_configurations() == library.amx_releases() > 0


@built
@runs
@compiled
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_compute_what_the_reference_does(emulator: Path, name: str) -> None:
    code, out, err = run_at_level(f"{LEVEL}!", __file__, str(emulator), name)
    assert code == 0, out[-3000:] + err[-3000:]


# ---- which level runs ----

# AMX-TILE and AMX-BF16; tile configuration and data beside AVX-512's.
AMX_BITS, SAVED_STATES = 1 << 24 | 1 << 22, 3 << 17 | 0xE7


@pytest.fixture(scope="module")
def detection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(
        "detection.cpp", tmp_path_factory.mktemp("amx") / "detection", "-DINFUSE_WITH_AMX", "-Wno-extern-initializer"
    )


def detected(program: Path, bits: int, states: int, permitted: bool, forced: str = "") -> list[str]:
    """The level that runs; 1 where products are left to PyTorch; how often the system was asked, by then; the names."""
    environment = os.environ | {"INFUSE_CPU_ISA": forced}
    command = [str(program), str(bits), str(states), str(int(permitted))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    first, *names = done.stdout.splitlines()
    assert [name.split()[0] for name in names] == [LEVEL, "avx512_bf16", "avx512", "avx2", "generic"]
    return [*first.split(), names[0]]


@compiled
def test_amx_runs_where_processor_and_system_have_it(detection: Path) -> None:
    """The system is asked once at most, and only where the processor and XCR0 have it."""
    assert detected(detection, AMX_BITS, SAVED_STATES, True) == [LEVEL, "0", "1", "1", LEVEL]
    assert detected(detection, AMX_BITS, SAVED_STATES, False) == ["avx512_bf16", "0", "1", "1", f"{LEVEL} refused"]
    for states in (0xE7, 0xE7 | 1 << 17, 0xE7 | 1 << 18):
        assert detected(detection, AMX_BITS, states, True) == ["avx512_bf16", "0", "0", "0", f"{LEVEL} refused"]
    for bits in (0, 1 << 22, 1 << 24):
        assert detected(detection, bits, SAVED_STATES, True) == ["avx512_bf16", "0", "0", "0", f"{LEVEL} missing"]


@compiled
def test_a_binary_without_amx_runs_the_next_lower(tmp_path: Path) -> None:
    program = build("detection.cpp", tmp_path / "detection")
    expected = ["avx512_bf16", "1", "0", "1", f"{LEVEL} unbuilt"]  # PyTorch's products use the AMX that there is
    for forced in ("", LEVEL, f"{LEVEL}!"):
        assert detected(program, AMX_BITS, SAVED_STATES, True, forced) == expected, forced


@compiled
def test_a_lower_level_leaves_products_to_pytorch_that_has_amx(detection: Path) -> None:
    for level in ("avx512_bf16", "avx512", "avx2", "generic"):
        assert detected(detection, AMX_BITS, SAVED_STATES, True, level) == [level, "1", "0", "1", LEVEL]
        assert detected(detection, AMX_BITS, SAVED_STATES, False, level)[:3] == [level, "0", "0"]
    assert detected(detection, AMX_BITS, SAVED_STATES, False, LEVEL)[0] == "avx512_bf16"
    assert detected(detection, 0, 0, False, f"{LEVEL}!") == [LEVEL, "0", "0", "0", f"{LEVEL} missing"]
    # Asked for permission all the same.
    assert detected(detection, AMX_BITS, SAVED_STATES, True, f"{LEVEL}!")[:3] == [LEVEL, "0", "1"]
    assert detected(detection, AMX_BITS, SAVED_STATES, True, "no such level")[0] == "generic"


@built
@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("missing", "this CPU does not have it"),
        ("refused", "the system does not let this"),
        ("unbuilt", "the compiler that built"),
    ],
)
def test_env_says_why_amx_does_not_run(monkeypatch: pytest.MonkeyPatch, state: str, text: str) -> None:
    class Binary:
        levels = staticmethod(lambda: f"{LEVEL} {state}\navx512_bf16\ngeneric".encode())
        isa = staticmethod(lambda: b"generic")
        compiler = torch_version = staticmethod(lambda: b"")

    monkeypatch.setenv("INFUSE_CPU_ISA", "generic")
    monkeypatch.setattr("infuse.native.kernels", Binary)
    found = described()
    assert (LEVEL in found["C++ kernels"]) == (state != "unbuilt")
    assert found[f"  not {LEVEL}"].startswith(text) and found["  not avx512_bf16"] == "INFUSE_CPU_ISA=generic"


if __name__ == "__main__":
    path, what = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kernel_cases(path, what)
