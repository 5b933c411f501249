"""Plans: what they say (golden text), that they change nothing, that they know the memory, and what becomes of unknown
models.

The golden texts are in golden/; `python -m tests.plan.test_plan` writes them anew, for a diff that one can read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infuse
from infuse import native
from infuse.apply.apply import apply
from infuse.architectures.packing import Fill
from infuse.config.inference import InferenceConfig
from infuse.ground.errors import ConfigError
from infuse.parallel.mesh import Mesh
from infuse.plan.digest import digest_of
from infuse.plan.kinds import ATTENTION, BLOCK, EMBEDDING, LINEAR
from infuse.plan.plan import Plan
from infuse.quant.parse import quant_format
from tests.models import families
from tests.support.plans import LONG_T5, MIXTRAL, T5, UNKNOWN, applied, outputs, plan_of

GOLDEN = Path(__file__).parent / "golden"


def family(name: str) -> Callable[..., nn.Module]:
    return families.BY_NAME[name].make


def stored_in_files() -> dict[str, str]:
    """Formats of a checkpoint of "llama": v of one layer, and down of another one, in another format than the rest."""
    names = [name for name, _ in family("llama")().named_parameters() if "_proj.weight" in name]
    formats = dict.fromkeys(names, "int4:16:f16") | {
        "lm_head.weight": "int4:16",
        "model.embed_tokens.weight": "int8:16",
    }
    others = ("model.layers.0.self_attn.v_proj.weight", "model.layers.2.mlp.down_proj.weight")
    return formats | dict.fromkeys(others, "int8:row:f16")


GOLDEN_PLANS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "llama": (family("llama"), dict(dtype="fp32")),
    "llama-int4": (family("llama"), dict(dtype="bf16", quant="int4:16")),
    "llama-no-blocks": (family("llama"), dict(dtype="fp32", replace_with_kernel_inject=False)),
    "gpt2": (family("gpt2"), dict(dtype="bf16")),
    "bert": (family("bert"), dict(dtype="fp32")),
    "t5": (T5, dict(dtype="fp32")),
    "t5-int8": (T5, dict(dtype="fp32", quant="int8")),
    "llama-stored": (family("llama"), dict(dtype="bf16", stored=stored_in_files())),
    "mixtral": (MIXTRAL, dict(dtype="fp32")),
}


# ---- text ----


def text_of(plan: Plan) -> str:
    """The text less who declined, which depends on the kernels that there are; test_text_tells_of_who_declined has
    that.
    """
    return "".join(f"{line}\n" for line in str(plan).splitlines() if not line.startswith("  declined"))


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler: PyTorch's own linear is the best there is."""
    monkeypatch.setattr(native, "kernels", lambda: "not built here")


@pytest.mark.parametrize("name", GOLDEN_PLANS)
def test_text(name: str, no_kernels: None) -> None:
    make, keys = GOLDEN_PLANS[name]
    assert text_of(plan_of(make(), **keys)) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_every_golden_text_is_of_a_plan() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(GOLDEN_PLANS)


def test_text_tells_of_who_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    from infuse.ops import Body, registered

    declines = Body("cpu", lambda x, weight, bias: x, lambda device, dtype: f"wants avx2, {device.name} it is")
    monkeypatch.setattr(native, "kernels", lambda: "wants avx2, without extensions it is")
    monkeypatch.setitem(registered()["linear"].bodies, "cpu", declines)
    plan = plan_of(family("llama")(), dtype="fp32")
    assert ("linear", "cpu", "wants avx2, without extensions it is") in plan.declined
    text = str(plan)
    assert "declined  cpu, for " in text and "linear" in text and ": wants avx2, without extensions it is" in text


def test_a_rank_says_which_codes_its_part_cannot_keep() -> None:
    """The inputs of `out` are split by heads of 12, those of `down` in groups of 16."""
    stored = stored_in_files()
    whole = plan_of(family("llama")(), dtype="fp32", stored=stored)
    plan = plan_of(family("llama")(), Mesh(2, 1), dtype="fp32", stored=stored)
    block = next(step for step in plan.steps if step.depth == BLOCK)
    assert block.apart.keys() == {"self_attn.qkv"}
    told = (
        "self_attn.out.weight: in torch.float32: though stored in int4:16:f16: int4:16:f16: groups of 16 do not divide"
    )
    assert told in str(plan) and told not in str(whole)
    assert block.formats == {
        "self_attn.qkv.0.weight": "int4:16:f16",
        "self_attn.qkv.1.weight": "int8:row:f16",
        "mlp.up.weight": "int4:16:f16",
        "mlp.down.weight": "int4:16:f16",
    }
    cuts = {fill.target: fill.cut for fill in block.fills if fill.format}
    assert all(stop % 16 == start % 16 == 0 for start, stop in cuts["mlp.down.weight"].ranges)  # type: ignore[union-attr]


# ---- pure ----


def everything(model: nn.Module) -> tuple:
    """All that a plan could change: modules, classes, tensors, their versions, hooks, flags, and the random state."""
    modules = [
        (name, id(m), type(m), m.training, len(m._forward_hooks), sorted(vars(m))) for name, m in model.named_modules()
    ]
    tensors = [
        (name, id(p), p.data_ptr(), p._version, p.requires_grad)
        for name, p in (*model.named_parameters(), *model.named_buffers())
    ]
    return modules, tensors, torch.get_rng_state().tolist()


@pytest.mark.parametrize("name", [*GOLDEN_PLANS, *UNKNOWN])
def test_a_plan_on_meta_is_the_plan_on_the_live_model_and_changes_neither(name: str) -> None:
    make, keys = GOLDEN_PLANS.get(name) or (UNKNOWN[name], dict(dtype="fp32", quant="int8"))
    live = make()
    with torch.device("meta"):
        meta = make()
    assert all(p.is_meta for p in meta.parameters())
    for model in (live, meta):
        before = everything(model)
        plan = plan_of(model, **keys)
        assert everything(model) == before
        assert plan == plan_of(live, **keys) and plan.digest() == plan_of(live, **keys).digest()
        assert str(plan) == str(plan_of(live, **keys))


def test_digest_tells_decisions_apart() -> None:
    llama = family("llama")()
    plans = [
        plan_of(llama, dtype="fp32"),
        plan_of(llama, dtype="bf16"),
        plan_of(llama, dtype="fp32", quant="int8:16"),
        plan_of(llama, dtype="fp32", quant="int4:16"),
        plan_of(llama, dtype="fp32", replace_with_kernel_inject=False),
        plan_of(family("llama")(num_hidden_layers=2), dtype="fp32"),
        plan_of(family("llama-bias")(), dtype="fp32"),
    ]
    assert len({plan.digest() for plan in plans}) == len(plans)


def test_digest_tells_act_order() -> None:
    plan = plan_of(family("falcon-40b")(), dtype="bf16")
    step = next(step for step in plan.steps if step.fills)
    fills = (replace(step.fills[0], ordered=True), *step.fills[1:])
    other = replace(plan, steps=tuple(replace(s, fills=fills) if s is step else s for s in plan.steps))
    assert other.digest() != plan.digest()


def test_digest_does_not_depend_on_weights_or_how_the_plan_is_proven() -> None:
    first, second = (
        plan_of(family("llama")(seed=0), dtype="fp32"),
        plan_of(family("llama")(seed=5), dtype="fp32", verify="off"),
    )
    assert first.digest() == second.digest()


def test_ranks_decide_alike() -> None:
    ranks = [plan_of(family("falcon-40b")(), Mesh(tp=2, tp_rank=rank), dtype="bf16") for rank in range(2)]
    assert ranks[0].digest() == ranks[1].digest() != plan_of(family("falcon-40b")(), dtype="bf16").digest()
    assert [step.whole for step in ranks[0].steps] == [step.whole for step in ranks[1].steps]
    assert "rank 1 of 2" in str(ranks[1])


def test_a_dtype_that_the_device_lacks_is_refused_with_what_it_has() -> None:
    with pytest.raises(ConfigError, match="float64.*computes in torch.float32, torch.bfloat16, torch.float16"):
        plan_of(family("llama")(), dtype=torch.float64)


# ---- memory ----


def resident_bytes(model: nn.Module) -> int:
    """Bytes of all storages behind the model's parameters and buffers, each once: also what a view keeps alive."""
    tensors = (*model.parameters(), *model.buffers())
    return sum({s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in tensors) if s.nbytes()}.values())


KEYS = [dict(dtype="fp32"), dict(dtype="bf16"), dict(dtype="bf16", quant="int8"), dict(dtype="fp32", quant="int4")]


@pytest.mark.parametrize(
    ("name", "keys", "tied"),
    [
        (name, keys, (i + j) % 2 == 0)
        for i, name in enumerate(("llama", "gpt2", "gptj", "stablelm-parallel", "bert"))
        for j, keys in enumerate(KEYS)
    ],
    ids=str,
)
def test_memory_is_known_before(name: str, keys: dict[str, Any], tied: bool) -> None:
    width = dict(n_embd=64) if name in ("gpt2", "gptj") else dict(hidden_size=64, intermediate_size=128)
    model = family(name)(**width, tie_word_embeddings=tied)
    plan = plan_of(model, **keys)
    assert plan.before_bytes == resident_bytes(model)
    done = apply(plan, model, InferenceConfig(**keys))
    assert len(done.steps) == len(plan.steps) > 0
    assert plan.after_bytes == done.after_bytes == resident_bytes(model)
    if "quant" in keys:
        assert all(step.formats for step in done.steps)


# ---- what no spec knows ----


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.usefixtures("unread")
def test_an_unknown_model_is_left_alone_with_a_reason_and_unchanged(name: str, no_kernels: None) -> None:
    model = UNKNOWN[name]()
    wanted = outputs(model)
    done = applied(model, dtype="fp32")
    assert done.steps == () and all(left.why for left in done.left)
    left = [left.path.partition(": ")[0] for left in done.left]
    for parameter, _ in model.named_parameters():
        assert any(not path or parameter.startswith(f"{path}.") for path in left), (
            f"the plan says nothing of {parameter}"
        )
    assert torch.equal(outputs(model), wanted)


@pytest.mark.parametrize("name", ["long-t5", "olmo", "sequential"])
@pytest.mark.usefixtures("unread")
def test_linears_of_an_unknown_model_are_quantized(name: str) -> None:
    model = UNKNOWN[name](hidden_size=64) if name == "olmo" else UNKNOWN[name]()
    wanted, before = outputs(model), resident_bytes(model)
    done = applied(model, dtype="fp32", quant="int8")
    assert done.steps and {step.depth for step in done.steps} <= {LINEAR, EMBEDDING, ATTENTION}
    # What the format does not fit may run through a kernel for plain linears, and the plan says so.
    for step in (step for step in done.steps if step.depth == LINEAR):
        assert step.formats == {"weight": "int8"} or any(left.path == f"{step.path}: weight" for left in done.left), (
            step
        )
    assert any(step.formats for step in done.steps)
    assert resident_bytes(model) == done.after_bytes < before
    found = outputs(model)
    error = float((found - wanted).norm() / wanted.norm())
    assert 0 < error < 0.06, (
        error
    )  # a linear is off by 0.006 (infuse.quant.integer.ERRORS), and tens of them follow each other


def test_t5_in_int4_is_t5_with_rounded_weights() -> None:
    """T5 casts activations to the dtype of a weight unless that is int8: packed codes must not be taken for one."""
    model, rounded = LONG_T5(), LONG_T5()
    done = applied(model, dtype="fp32", quant="int4")
    for step in done.steps:
        format = quant_format(step.formats["weight"])
        weight = rounded.get_submodule(step.path).weight.data
        weight.copy_(format.dequantize(format.quantize(weight)))
    wanted = outputs(rounded)
    assert len(done.steps) > 10
    assert float((outputs(model) - wanted).norm() / wanted.norm()) < 1e-4


def test_what_reads_the_weights_of_its_linears_itself_keeps_them() -> None:
    model = UNKNOWN["pytorch-encoder"]()
    wanted = outputs(model)
    done = applied(model, dtype="fp32", quant="int8")
    assert not done.steps and "itself" in str(done)
    assert torch.equal(outputs(model), wanted)


def test_blocks_and_linears_live_in_one_plan() -> None:
    done = applied(family("bert")(hidden_size=64, intermediate_size=128), dtype="fp32", quant="int8")
    depths = {step.path: step.depth for step in done.steps}
    linears = ("cls.predictions.transform.dense", "cls.predictions.decoder")
    blocks = {f"bert.encoder.layer.{i}": BLOCK for i in range(3)}
    assert depths == {**blocks, **dict.fromkeys(linears, LINEAR), "bert.embeddings.word_embeddings": EMBEDDING}
    table = next(step for step in done.steps if step.depth == EMBEDDING)
    assert table.shares == "cls.predictions.decoder" and table.why in str(done)


if __name__ == "__main__":
    native.kernels = lambda: "not built here"  # type: ignore[assignment]
    for name, (make, keys) in GOLDEN_PLANS.items():
        (GOLDEN / f"{name}.txt").write_text(text_of(plan_of(make(), **keys)), encoding="utf-8")


def test_formats_that_a_body_leaves_to_the_reference_are_told() -> None:
    """Groups of 6 cut the words of four codes that the C++ body reads; groups of 8 do not."""
    if isinstance(native.kernels(), str):
        pytest.skip(native.kernels())
    told, silent = (str(plan_of(family("llama")(), quant=f"int8:{size}")) for size in (6, 8))
    assert "declined  cpu, for quantized_linear: int8:6: groups of 6 are not multiples of 4" in told
    assert "for quantized_linear" not in silent


def test_digests_are_of_values() -> None:
    """An address would make the digest another one in each process."""
    fill = Fill("weight", ("a", "b"))
    assert digest_of(fill, {"a": 1, "b": 2}) == digest_of(replace(fill), {"b": 2, "a": 1})
    assert digest_of(fill) != digest_of(replace(fill, sources=("a", "c"))) != digest_of(replace(fill, exact=True))
    with pytest.raises(TypeError, match="not JSON serializable"):
        digest_of(object())


def test_the_repr_of_a_plan_is_one_line() -> None:
    plan = infuse.plan(families.BY_NAME["llama"].make(num_hidden_layers=32), dtype="fp32")
    assert re.fullmatch(
        r"<plan for LlamaForCausalLM on cpu .*: float32 \(asked for\): 32 block, 1 linear; .* MB>", repr(plan)
    )
    assert len(repr(plan)) < 200 and "\n" not in repr([plan])
    assert len(str(plan).splitlines()) > 5
