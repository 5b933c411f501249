"""Receipts: what was proven is not proven again, unless anything that its proof depends on has changed."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import infuse
from infuse import architectures
from infuse.apply import prove as proving
from infuse.ground import cache_folder, identity
from infuse.ground.cache_folder import READINGS, RECEIPTS
from infuse.layers import parts
from infuse.proof import compare, identities
from infuse.quant import parse
from infuse.reading import kind
from infuse.weights import foreign
from infuse.weights.lazy import InMemory
from tests.models.families import BY_NAME
from tests.support import gguf_files, quantized_files
from tests.support.commands import run

ROOT = Path(__file__).parent.parent.parent
REASON = "made up: it differs"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("INFUSE_RECEIPTS", "1")
    monkeypatch.setenv("INFUSE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / RECEIPTS.name


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths of the steps that are proven, as they are."""
    run, proven = proving.Proofs._mismatch, list[str]()

    def recorded(self: Any, step: Any, cases: Any) -> Any:
        proven.append(step.path)
        return run(self, step, cases)

    monkeypatch.setattr(proving.Proofs, "_mismatch", recorded)
    yield proven


def made(name: str = "llama") -> Any:
    torch.manual_seed(0)
    return BY_NAME[name].make()


def replaced(model: nn.Module, **keys: Any) -> Any:
    return infuse.init_inference(model, **{"dtype": "fp32", **keys})


@pytest.mark.parametrize("keys", [{}, {"quant": "int8:16"}, {"replace_with_kernel_inject": False}])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mixtral", "t5", "qwen2"])
def test_a_second_start_proves_nothing(name: str, keys: dict[str, Any], proofs: list[str], folder: Path) -> None:
    first = replaced(made(name), **keys)
    assert proofs and len(list(folder.iterdir())) == len(proofs)
    assert "proven  before" not in str(first.plan)
    steps = set(proofs)
    proofs.clear()
    second = replaced(made(name), **keys)
    assert not proofs
    (line,) = (line for line in str(second.plan).splitlines() if line.startswith("  proven"))
    for path in steps:
        assert f"{path} on " in line
    assert first.plan.digest() == second.plan.digest() and first.plan.steps == second.plan.steps
    for old, new in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(old, new)


def test_nothing_runs_where_all_has_receipts(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(made())
    monkeypatch.setattr(nn.Module, "__call__", None)
    assert replaced(made()).plan.receipts


def one_byte(tensor: torch.Tensor) -> None:
    tensor.detach().reshape(-1).view(torch.uint8)[-1] ^= 1


def another_weight(model: Any, patch: pytest.MonkeyPatch) -> None:
    one_byte(model.model.layers[0].mlp.down_proj.weight)


def another_norm(model: Any, patch: pytest.MonkeyPatch) -> None:
    one_byte(model.model.layers[0].input_layernorm.weight)


def another_attribute(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.model.layers[0].self_attn.not_known = 3


def an_object(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.model.layers[0].self_attn.not_known = object()


def another_config(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.config.max_position_embeddings += 1


def another_method(model: Any, patch: pytest.MonkeyPatch) -> None:
    forward = type(model.model.layers[0].mlp).forward
    source = "def forward(self, x):\n    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 1\n"
    names = dict(forward.__globals__)
    exec(source, names)
    patch.setattr(type(model.model.layers[0].mlp), "forward", names["forward"])


def another_method_of_the_model(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(model.model), "more", lambda self: 3, raising=False)


def another_default(model: Any, patch: pytest.MonkeyPatch) -> None:
    def more(self: Any, number: int = 3) -> int:
        return number

    patch.setattr(type(model.model), "more", more, raising=False)


def another_version(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "__version__", "2.99")


def another_transformers(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(identity.metadata, "version", lambda package: "5.99")


def another_processor(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("infuse.native.isa", lambda: "another")


def another_variable(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("INFUSE_ANYTHING", "1")


def our_code(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(identities, "of_infuse", lambda: "other code")


def another_attention(model: Any, patch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *args, **kwargs: own(*args, **kwargs))


def a_hook(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output)


CHANGES: list[Callable[[Any, pytest.MonkeyPatch], None]] = [
    another_weight, another_norm, another_attribute, an_object, another_config, another_method,
    another_method_of_the_model, another_default, another_version, another_transformers, another_processor,
    another_variable, our_code, another_attention, a_hook,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_proven_anew(
    change: Callable[[Any, pytest.MonkeyPatch], None], proofs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced(made())
    proofs.clear()
    model = made()
    change(model, monkeypatch)
    replaced(model)
    assert any("layers.0" in path for path in proofs)


@pytest.mark.parametrize(
    "keys",
    [{"dtype": "bf16"}, {"quant": "int8:16"}, {"quant": "int4:16"}, {"kv_cache": "int8"}, {"verify": "all"},
     {"verify": "strict"}],
)  # fmt: skip
def test_other_settings_are_proven_anew(keys: dict[str, Any], proofs: list[str]) -> None:
    replaced(made())
    for _ in range(1 if keys.get("verify") is None else 2):  # other ways to prove leave no receipts
        proofs.clear()
        assert not replaced(made(), **keys).plan.receipts
        assert proofs


def test_a_layer_with_an_object_of_any_kind_is_proven_each_time(proofs: list[str]) -> None:
    for _ in range(2):
        proofs.clear()
        model = made()
        model.model.layers[0].self_attn.not_known = object()
        replaced(model)
        assert any("layers.0" in path for path in proofs)


def test_receipts_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, proofs: list[str], folder: Path) -> None:
    monkeypatch.setenv("INFUSE_RECEIPTS", "0")
    replaced(made())
    assert not folder.exists()
    monkeypatch.setenv("INFUSE_RECEIPTS", "1")
    replaced(made())
    proofs.clear()
    monkeypatch.setenv("INFUSE_RECEIPTS", "0")
    replaced(made())
    assert proofs


@pytest.mark.parametrize(
    "register",
    [
        lambda: architectures.register(architectures.SPECS[0]),
        lambda: parts.register(type("Mine", (), {}), lambda shape, context: nn.Identity()),
        lambda: parse.register("mine", lambda options: parse.quant_format("int8")),
        lambda: foreign.register(lambda unread: foreign.merged(unread)),
    ],
)
def test_what_is_registered_from_outside_is_proven_each_time(
    register: Callable[[], Callable[[], Any]], proofs: list[str], folder: Path
) -> None:
    replaced(made())
    proofs.clear()
    take_back = register()
    try:
        assert not replaced(made()).plan.receipts and proofs
    finally:
        take_back()
    proofs.clear()
    assert replaced(made()).plan.receipts and not proofs


def test_weights_of_other_layers_do_not_count(proofs: list[str]) -> None:
    """As without receipts, where one layer of each kind is proven."""
    replaced(made())
    proofs.clear()
    model = made()
    one_byte(model.model.layers[-1].mlp.down_proj.weight)
    replaced(model)
    assert not proofs


def test_what_fails_gets_no_receipt(monkeypatch: pytest.MonkeyPatch, proofs: list[str], folder: Path) -> None:
    with monkeypatch.context() as failing:
        failing.setattr(compare, "attempted", lambda prove: REASON)
        assert REASON in str(replaced(made()).plan)
    assert not folder.exists()
    proofs.clear()
    replaced(made())
    assert proofs


def test_linears_are_proven_together(proofs: list[str], folder: Path) -> None:
    """One of them without a receipt: all run, because their callers are compared with all of them in place."""
    replaced(made(), replace_with_kernel_inject=False)
    called, files = set(proofs), sorted(folder.iterdir())
    proofs.clear()
    files[0].unlink()
    replaced(made(), replace_with_kernel_inject=False)
    assert set(proofs) == called and sorted(folder.iterdir()) == files


IDENTITY, CONTENT = "ab" * 32, b"2026-11-30\n"


def kept(folder: Path) -> Path:
    RECEIPTS.write(IDENTITY, CONTENT)
    (file,) = folder.iterdir()
    assert RECEIPTS.read(IDENTITY) == CONTENT
    return file


def test_a_changed_receipt_is_none(folder: Path) -> None:
    file = kept(folder)
    content = file.read_bytes()
    for place in range(len(content)):
        for changed in (bytes([content[place] ^ 1]), b""):
            file.write_bytes(content[:place] + changed + content[place + 1 :])
            assert RECEIPTS.read(IDENTITY) is None, place
        file.write_bytes(content[:place])
        assert RECEIPTS.read(IDENTITY) is None, place
    for other in (b"", b"\xff\xfe", content * 2, content + b"\n"):
        file.write_bytes(other)
        assert RECEIPTS.read(IDENTITY) is None
    file.unlink()
    file.mkdir()
    assert RECEIPTS.read(IDENTITY) is None


def test_a_receipt_of_another_proof_is_none(folder: Path) -> None:
    """Also where the names of their files are the same."""
    kept(folder)
    assert RECEIPTS.read("ab" * 31 + "cd") is None


def test_only_the_newest_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "MOST", 3)
    for number in range(6):
        RECEIPTS.write(f"{number}" * 64, CONTENT)
    assert RECEIPTS.count() == len(list(folder.iterdir())) == 3
    assert RECEIPTS.read("5" * 64) == CONTENT
    assert RECEIPTS.clear() == 3 and RECEIPTS.count() == 0


@pytest.mark.parametrize("kind", ["a file", "a folder that is a file"])
def test_a_folder_that_takes_none_costs_nothing_but_proofs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proofs: list[str]
) -> None:
    root = tmp_path / "other"
    if kind == "a file":
        root.write_text("")
    else:
        root.mkdir()
        (root / RECEIPTS.name).write_text("")
    monkeypatch.setenv("INFUSE_CACHE_DIR", str(root))
    for _ in range(2):
        proofs.clear()
        replaced(made())
        assert proofs


def test_the_command_line_counts_and_removes_them(folder: Path) -> None:
    kind.read_once.cache_clear()
    replaced(made("qwen2"))
    receipts, readings = RECEIPTS.count(), READINGS.count()
    assert receipts and readings
    assert f"{receipts} receipts of proofs, {readings} readings" in run("env")[0].replace("\n", " ")
    assert run("clear-cache")[0] == f"{receipts} receipts and {readings} readings removed\n"
    assert not list(folder.iterdir()) and not READINGS.count()


@pytest.mark.parametrize("quant", [None, "int8:16"])
def test_a_checkpoint(quant: str | None, tmp_path: Path, proofs: list[str]) -> None:
    saved, model = tmp_path / "model", made()
    model.save_pretrained(saved)
    keys = {"checkpoint": str(saved), **({"quant": quant} if quant else {})}

    def loaded() -> Any:
        with torch.device("meta"):
            empty = type(model)(copy.deepcopy(model.config))
        return replaced(empty, **keys)

    loaded()
    assert proofs
    proofs.clear()
    assert loaded().plan.receipts and not proofs
    (file,) = saved.glob("*.safetensors")
    values = load_file(file)
    one_byte(values["model.layers.0.self_attn.q_proj.weight"])
    save_file(values, file, {"format": "pt"})
    loaded()
    assert any("layers.0" in path for path in proofs)


@pytest.mark.parametrize("case", ["gptq-4-sym-v1", "awq", "fp8-blocks", "nf4-doubly", "gptq-8-sym-v1-order"])
def test_a_checkpoint_in_codes(case: str, tmp_path: Path, proofs: list[str]) -> None:
    quantized_files.publish(tmp_path, quantized_files.BY_CASE[case], quantized_files.llama())

    def loaded() -> Any:
        with torch.device("meta"):
            empty = quantized_files.llama()
        return infuse.init_inference(empty, checkpoint=str(tmp_path), dtype="fp32")

    loaded()
    assert proofs
    proofs.clear()
    assert loaded().plan.receipts and not proofs
    file = tmp_path / "model.safetensors"
    values = load_file(file)
    scales = [name for name in values if name.startswith("model.layers.0.self_attn.o_proj.") and "scale" in name]
    one_byte(values[(scales or ["model.layers.0.self_attn.o_proj.weight.absmax"])[0]])
    save_file(values, file)
    loaded()
    assert any("layers.0" in path for path in proofs)


@pytest.mark.parametrize("type", ["Q8_0", "Q4_K"])
def test_a_gguf_file(type: str, tmp_path: Path, proofs: list[str]) -> None:
    model, file = quantized_files.llama(hidden_size=256, intermediate_size=512), tmp_path / "model.gguf"

    def of(name: str, tensor: torch.Tensor) -> str:
        return type if name.startswith("blk.") and tensor.dim() == 2 else "F32"

    gguf_files.write(file, "llama", gguf_files.llama_values(model.config), gguf_files.llama_tensors(model), of)

    def loaded() -> Any:
        with torch.device("meta"):
            empty = model.__class__(copy.deepcopy(model.config))
        return infuse.init_inference(empty, checkpoint=str(file), dtype="fp32")

    loaded()
    assert proofs
    proofs.clear()
    assert loaded().plan.receipts and not proofs


def test_code_is_read_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte of any file of ours, or of the kernels, makes another identity."""
    (tmp_path / "inner").mkdir()
    files = [tmp_path / "a.py", tmp_path / "inner" / "b.py", tmp_path / "kernels"]
    for file in files:
        file.write_bytes(b"content")
    monkeypatch.setattr(identity, "_ROOT", tmp_path)
    monkeypatch.setattr(identity, "_IMPORTED", math.inf)
    monkeypatch.setattr("infuse.native.library", lambda: files[2])

    def of_infuse() -> str:
        identity._of_code.cache_clear()
        identity._of_file.cache_clear()
        return identity.of_infuse()

    found = {of_infuse()}
    for file in files:
        file.write_bytes(b"contens")
        found.add(of_infuse())
    files[0].rename(tmp_path / "c.py")
    found.add(of_infuse())
    identity._of_code.cache_clear()
    assert len(found) == 5


PROGRAM = """
import torch, infuse
from tests.models.families import BY_NAME
torch.manual_seed(0)
print(len(infuse.init_inference(BY_NAME["mixtral"].make(), dtype="fp32").plan.receipts))
"""


@pytest.mark.slow
def test_identities_are_the_same_in_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=300)
        found.append(done.stdout)
    assert found[0] == "0\n" and int(found[1]) > 0


class Node:
    def __init__(self) -> None:
        self.next: Any = self


def test_layers_are_read_once_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time, in a process that has read none, the reading of the first counts."""
    for name in ("qwen2", "gptj"):
        kind.read_once.cache_clear()
        first = str(replaced(made(name)).plan)
        kind.read_once.cache_clear()
        with monkeypatch.context() as unread:
            unread.setattr(kind, "read", None)
            second = str(replaced(made(name)).plan)
        assert [line for line in second.splitlines() if "proven  before" not in line] == first.splitlines()
    assert READINGS.count() >= 2


def test_a_changed_layer_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(made("qwen2"))
    kind.read_once.cache_clear()
    seen = list[nn.Module]()

    def read(layer: nn.Module, calls: Any) -> Any:
        seen.append(layer)
        return reading(layer, calls)

    reading = kind.read
    monkeypatch.setattr(kind, "read", read)
    model = made("qwen2")
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon *= 2
    replaced(model)
    assert seen


def test_code_that_was_written_after_it_was_imported_has_no_identity(
    monkeypatch: pytest.MonkeyPatch, proofs: list[str], folder: Path
) -> None:
    """A receipt would be one of code that never ran."""
    monkeypatch.setattr(identity, "_IMPORTED", 0.0)
    identity._of_code.cache_clear()
    for _ in range(2):
        proofs.clear()
        replaced(made())
        assert proofs and not folder.exists()


class Raises:
    def to_dict(self) -> dict[str, Any]:
        raise RuntimeError("made up")


def test_what_raises_is_proven(proofs: list[str], folder: Path) -> None:
    for path in ("", "model.layers.0.mlp"):
        for _ in range(2):
            proofs.clear()
            model = made()
            vars(model.get_submodule(path))["mine"] = Raises()
            replaced(model)
            assert proofs and not folder.exists()


MINE: Any = None


def names_mine() -> Any:
    return MINE


def test_code_that_could_not_be_told_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing half told is kept: the name of a function alone would pass for its code."""
    text = identity.Code()
    monkeypatch.setitem(globals(), "MINE", Raises())
    for value in (names_mine, names_mine, type("Mine", (), {"run": names_mine})):
        with pytest.raises(RuntimeError, match="made up"):
            text(value)
    monkeypatch.setitem(globals(), "MINE", 1)
    assert text(names_mine) == identity.Code()(names_mine)


class Rows(InMemory):
    """Counts the rows that are read at once."""

    most = 0

    def read(self, part: Any = ()) -> torch.Tensor:
        found = super().read(part)
        Rows.most = max(Rows.most, len(found) if found.dim() else 1)
        return found


def test_large_tensors_of_files_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: Rows(torch.randn(23, width).bfloat16()) for name, width in (("data", 32), ("scale", 2))}
    whole = identities._sums(tensors)
    assert Rows.most == 23
    monkeypatch.setattr(identities, "PART_VALUES", 5 * 32)
    Rows.most = 0
    assert identities._sums(tensors) == whole and Rows.most == 5
    apart = {"data": tensors["data"], "scale": Rows(torch.tensor(1.0)), "none": Rows(torch.empty(0, 3))}
    assert [sums[:2] for sums in identities._sums(apart)] == [("data", (23, 32)), ("none", (0, 3)), ("scale", ())]
    one_byte(tensors["data"].tensor)
    assert identities._sums(tensors) != whole


def test_a_reading_that_cannot_be_used_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    kind.read_once.cache_clear()
    first = str(replaced(made("qwen2")).plan)
    monkeypatch.setattr(type(READINGS), "read", lambda folder, identity: b"no pickle" if folder is READINGS else None)
    kind.read_once.cache_clear()
    assert str(replaced(made("qwen2")).plan) == first


def test_values_without_a_text() -> None:
    text = identity.Code()
    loop: list[Any] = []
    loop.append(loop)
    for value in (object(), Node(), [Node()], torch.empty(2, device="meta")):
        with pytest.raises(identity.Unknown):
            text(value)
    with pytest.raises(RecursionError):
        text(loop)
    assert text({1, 2, 3}) == text({3, 2, 1}) and text([1]) != text((1,)) and text(1) != text(True)
    assert text(torch.zeros(2)) != text(torch.zeros(1, 2)) != text(torch.zeros(1, 2, dtype=torch.int32))


def test_functions_are_told_apart_by_what_they_run() -> None:
    def of(number: int) -> Callable[[], int]:
        return lambda: number

    text = identity.Code()
    assert text(of(1)) == text(of(1)) != text(of(2))
    several = [lambda x=1: x, lambda x=2: x, lambda *, x=1: x, lambda *, x=2: x]
    assert len({text(function) for function in several}) == 4
    first, second = (compile(f"def f(x):\n    return x + {number}\n", "f", "exec") for number in (1, 2))
    assert text(first) != text(second)
