"""Tensors on large pages: the same values with and without them; if granted, the Linux kernel counts them."""

from __future__ import annotations

import ctypes
import io
import mmap
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers

import infuse
from infuse.ground import memory


def huge_kilobytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


@pytest.mark.parametrize("shape", [(0,), (3, 5), (1 << 21,), (1001, 4099)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_copies_are_equal_and_contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    source = torch.randint(-100, 100, shape).float()
    for given in (source, source.flip(0), source.t() if source.dim() == 2 else source):
        found = memory.copied(given, dtype)
        assert found.dtype == dtype and torch.equal(found, given.to(dtype))
        assert found.is_contiguous() or found.nbytes < memory.LEAST_BYTES or not memory.given()


def test_what_is_small_and_fits_is_not_copied() -> None:
    source = torch.randn(16, 16)
    assert memory.copied(source, torch.float32) is source


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_pages_are_given() -> None:
    """As many as the system has: what asks for itself just before and just after must have got them, too."""
    size, kept = 1 << 26, []
    source = torch.ones(size // 4)

    def ask() -> mmap.mmap:
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapped.madvise(mmap.MADV_HUGEPAGE)
        mapped.write(b"1" * size)
        return mapped

    def on_large_pages(make: Callable[[], object]) -> bool:
        before = huge_kilobytes()
        kept.append(make())
        return huge_kilobytes() - before >= size // 1024 // 2

    for make in (lambda: memory.empty((size,), torch.int8).fill_(1), lambda: memory.copied(source, torch.float32)):
        rounds = [(on_large_pages(ask), on_large_pages(make), on_large_pages(ask)) for _ in range(3)]
        if not any(got_some for _, got_some, _ in rounds):
            if not all(before and after for before, _, after in rounds):
                pytest.skip("the system has too few large pages left for one who asks for them")
            pytest.fail("no large pages, where others got them just before and just after")


def huge_kilobytes_around(address: int) -> int:
    """Of the pages around it that the process has asked about alike."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        first, _, rest = line.partition("-")
        last = rest.partition(" ")[0]
        if all(char in "0123456789abcdef" for char in first) and int(first, 16) <= address < int(last, 16):
            return next(int(each.split()[1]) for each in lines if each.startswith("AnonHugePages"))
    return 0


def collapses() -> bool:
    """Whether this system moves memory that was touched before to large pages on request."""
    size, before = 1 << 24, huge_kilobytes()
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.write(b"1" * size)
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), memory._MADV_COLLAPSE)
    return huge_kilobytes() - before >= size // 1024 // 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_that_was_used_before_gets_them_too() -> None:
    """A process that has run for a while gives free parts of its heap to new tensors. Where Linux collapses pages."""
    torch.ones(1 << 22)  # freed: from now on the heap holds tensors of 16 MB
    small = [torch.ones(1 << 18) for _ in range(200)]
    last = torch.ones(1 << 18)  # so that the memory of those stays with the process
    addresses = range(small[0].data_ptr(), small[-1].data_ptr())
    del small
    made = memory.empty((1 << 26,), torch.int8).fill_(1)
    granted = huge_kilobytes_around(made.data_ptr() + made.nbytes // 2)
    if made.data_ptr() not in addresses:
        pytest.skip("the new tensor got fresh memory")
    if granted < (1 << 25) // 1024 and not collapses():
        pytest.skip(f"the system collapsed {granted} kB")
    assert granted >= (1 << 25) // 1024
    assert last.sum() == 1 << 18 and made.sum() == 1 << 26


def test_nothing_is_copied_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "given", lambda: False)
    source = torch.randn(1 << 21)
    assert memory.copied(source, torch.float32) is source


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_small_tensors_share_large_pages() -> None:
    """Where Linux collapses pages on request, since 6.1. The values stay."""
    size, least = 1 << 19, 1 << 18
    tensors = [torch.full((size,), i, dtype=torch.uint8) for i in range(64)]
    odd = [torch.empty(0), torch.empty(least, device="meta"), torch.ones(3), torch.ones(2 * least).t()]
    before = huge_kilobytes()
    memory.collapse([*tensors, *odd])
    assert all(bool((each == i).all()) for i, each in enumerate(tensors))
    if huge_kilobytes() == before:
        pytest.skip("the system collapses no pages")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_checkpoint_is_not_kept_mapped_for_its_norms(tmp_path: Path) -> None:
    """`from_pretrained` maps the file. Tied weights stay tied, and who holds a parameter holds the model's."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=4096, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).eval().save_pretrained(tmp_path)
    file = str(tmp_path / "model.safetensors")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    if file not in Path("/proc/self/maps").read_text():
        pytest.skip("this version of transformers maps no file")
    norm, tokens = model.model.norm.weight, torch.arange(1, 9)[None]
    expected = model(tokens).logits.detach()
    infuse.init_inference(model, dtype=torch.float32)
    assert file not in Path("/proc/self/maps").read_text()
    assert model.model.norm.weight is norm and model.lm_head.weight is model.get_input_embeddings().weight
    torch.testing.assert_close(model(tokens).logits, expected, rtol=0, atol=5e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_most_of_a_file_stays_mapped(tmp_path: Path) -> None:
    values = torch.randn(1 << 21)
    torch.save({"values": values}, tmp_path / "values.pt")
    mapped = torch.load(tmp_path / "values.pt", mmap=True)["values"]
    places = large, small, same = mapped[: 3 << 19], mapped[:4], mapped[:4]
    addresses = [one.data_ptr() for one in places]
    memory.off_files(places)
    assert [one.data_ptr() for one in places] == addresses  # three quarters of the file
    memory.off_files((small, same, torch.empty(0)))
    assert small.data_ptr() == same.data_ptr() != addresses[1]
    assert torch.equal(small, values[:4]) and torch.equal(large, values[: 3 << 19])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_processes_share_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "shared").write_bytes(bytes(1 << 23))
    shared = torch.from_file(str(tmp_path / "shared"), shared=True, size=1 << 21)
    small = shared[:4]
    memory.off_files([small])
    assert small.data_ptr() == shared.data_ptr()
    small.fill_(1.0)
    assert torch.from_file(str(tmp_path / "shared"), shared=True, size=4).sum() == 4


def test_scratch_memory_is_taken_again_once_nothing_uses_it() -> None:
    scratch, shape = memory.Scratch(), (memory.LEAST_BYTES // 1024, 256)
    first = scratch.empty(shape, torch.float32)
    assert first.shape == shape and first.dtype == torch.float32 and first.is_contiguous()
    address, view = first.data_ptr(), first[1:].detach()
    del first
    view.fill_(7)
    assert scratch.empty(shape, torch.float32).fill_(0).data_ptr() != address  # the view still uses it
    assert bool((view == 7).all())
    del view
    again = scratch.empty((memory.LEAST_BYTES // 2, 1), torch.bfloat16)
    assert address in (again.data_ptr(), scratch.empty(shape, torch.float32).data_ptr())


def test_scratch_memory_that_is_cleared_or_far_too_large_is_not_taken_again() -> None:
    scratch, count = memory.Scratch(), memory.LEAST_BYTES
    kept = scratch.empty((count,), torch.int8)
    scratch.clear()
    del kept
    assert not scratch._free
    large = scratch.empty((9 * count,), torch.int8)
    del large
    assert len(scratch._free) == 1
    small = scratch.empty((count,), torch.int8)
    assert small.nbytes == count and len(scratch._free) == 1


def test_lasting_tensors_lie_side_by_side_in_storages_of_their_own() -> None:
    """Of 0.25 to 4 MiB, where the system gives large pages; others are as `empty` makes them."""
    shapes = [(300, 1024), (1, 300_007), (7, 5), (0, 9), (1 << 20,), (1 << 23,)] * 9
    with ThreadPoolExecutor(4) as pool:
        made = [*pool.map(lambda shape: memory.lasting(shape, torch.int8), shapes)]
    for i, each in enumerate(made):
        each.fill_(i)
    assert all(
        each.shape == shape and bool((each == i).all())
        for i, (each, shape) in enumerate(zip(made, shapes, strict=True))
    )
    assert all(each.untyped_storage().nbytes() == each.nbytes and each.storage_offset() == 0 for each in made)
    if memory.given():
        small = sorted(each.data_ptr() for each in made if 1 << 18 <= each.nbytes < memory.LEAST_BYTES)
        assert not any(address % 64 for address in small)
        assert sum(after - before < 1 << 21 for before, after in pairwise(small)) >= len(small) - 3


@pytest.mark.skipif(not memory.given(), reason="the system gives no large pages")
def test_a_slab_ends_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory._Slab, "present", None)
    first, second = (memory.lasting((1 << 20,), torch.int8) for _ in range(2))
    slab, view = memory._Slab.present, second[5:]
    assert slab is not None and second.data_ptr() == first.data_ptr() + first.nbytes
    del first, second
    assert slab._room() is not None and memory.lasting((1 << 20,), torch.int8).data_ptr() > view.data_ptr()
    del view
    assert slab._room() is None
    kept = [memory.lasting((3 << 20,), torch.int8).fill_(i) for i in range(40)]  # more than a slab holds
    assert len({each.data_ptr() for each in kept}) == 40 and all(bool((each == i).all()) for i, each in enumerate(kept))
    saved = io.BytesIO()
    torch.save(kept[3], saved)
    assert saved.tell() < 4 << 20 and len(pickle.dumps(kept[3])) < 4 << 20
