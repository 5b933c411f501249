"""Checkpoints that are missing, broken, another model's or in copies: errors name the fault, models are unchanged."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import infuse
from infuse import native
from infuse.architectures.parts.attention import NoPosition, Rotary
from infuse.layers.block import Block
from infuse.weights.lazy import FileTensor
from tests.models.families import BY_NAME
from tests.support.checkpoints import (
    bin_shards,
    loaded,
    on_meta,
    outputs,
    refused,
    safetensors_shards,
    save,
    state_of,
    training,
    truncate,
    wanted,
)
from tests.support.formerly_written import specs_for

pytestmark = pytest.mark.usefixtures("unread")  # a spec that is broken would be replaced by a reading
PLAN = importlib.import_module("infuse.plan.decide")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


BREAK = pytest.mark.parametrize("broken", [truncate, empty, remove], ids=lambda change: change.__name__)


@BREAK
def test_a_broken_safetensors_file_is_named(broken: Callable[[Path], None], tmp_path: Path) -> None:
    source = safetensors_shards(BY_NAME["llama"].make(), tmp_path)
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    broken(victim)
    refused(source, victim.name)


@BREAK
@pytest.mark.parametrize("form", [bin_shards, training], ids=lambda form: form.__name__)
def test_a_broken_torch_file_is_named(
    form: Callable[[Any, Path], Any], broken: Callable[[Path], None], tmp_path: Path
) -> None:
    source = form(BY_NAME["llama"].make(), tmp_path)
    victim = sorted(path for path in tmp_path.rglob("*") if path.suffix in (".bin", ".pt"))[-1]
    broken(victim)
    refused(source, victim.name if broken is not remove or form is bin_shards else "no checkpoint; looked for")


class Harmful:
    def __reduce__(self) -> tuple:
        return (os.mkdir, ("harm",))


def test_code_in_a_pickle_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model.norm.weight": Harmful()}, tmp_path / "pytorch_model.bin")
    refused(str(tmp_path), r"pytorch_model.bin: .*weights_only=True")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful()))
    refused(str(tmp_path), r"pytorch_model.bin: .*weights_only=True")
    assert not (tmp_path / "harm").exists()


def test_arguments_beside_the_model_are_data(tmp_path: Path) -> None:
    import argparse

    state = BY_NAME["llama"].make().state_dict()
    save({"model": state, "args": argparse.Namespace(lr=0.1)}, tmp_path / "mp_rank_00_model_states.pt")
    torch.save(state, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    for source in (str(tmp_path), str(tmp_path / "old.bin")):
        assert sum(isinstance(module, Block) for module in loaded("llama", source).module.modules()) == 3


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("nowhere", "nowhere: does not exist"),
        ("void", "no checkpoint; looked for model.safetensors.index.json"),
        ("void/*.safetensors", "no file matches"),
        (["a.bin", "b.safetensors"], "2 files are missing: .*a.bin, .*b.safetensors"),
        (["a.txt"], "found .*a.txt; possible: files of .safetensors"),
        ({"type": "BLOOM", "checkpoints": ["x.bin", "y.bin"]}, "2 files are missing: .*x.bin, .*y.bin"),
        ({"type": "x", "checkpoints": {"tp": ["x.pt"] * 3}, "tp_size": 2}, "3 files under 'tp' for tp_size 2"),
        ("broken.json", "broken.json: truncated or corrupt: not valid JSON"),
        ("list.json", 'list.json: has no "checkpoints"'),
        ("tagged", "names 'step9'"),
        ("index", 'index.json: has no "weight_map"'),
    ],
    ids=str,
)
def test_sources_that_are_none(source: Any, match: str, tmp_path: Path) -> None:
    for name in ("void", "tagged", "index"):
        (tmp_path / name).mkdir()
    (tmp_path / "tagged" / "latest").write_text("step9")
    (tmp_path / "index" / "model.safetensors.index.json").write_text("{}")
    (tmp_path / "broken.json").write_text('{"checkpoints": [')
    (tmp_path / "list.json").write_text("[]")
    refused(source, match, base_dir=str(tmp_path))


def test_all_keys_that_are_wrong_are_listed_at_once(tmp_path: Path) -> None:
    state: dict[str, Any] = BY_NAME["llama"].make().state_dict()
    del state["model.layers.0.mlp.up_proj.weight"], state["model.norm.weight"]
    state["model.layers.1.self_attn.q_norm.weight"] = torch.ones(12)
    state["model.layers.3.mlp.up_proj.weight"] = torch.ones(80, 48)  # of a model with more layers
    state["lm_head.weight"] = torch.ones(97, 48)
    state["model.layers.2.input_layernorm.weight"] = torch.ones(49)
    save(state, tmp_path / "pytorch_model.bin")
    text = refused(str(tmp_path), "2 missing, 2 unexpected, 2 misshaped")
    assert text.splitlines()[1:] == [
        "  missing  model.layers.0.mlp.up_proj.weight",
        "  missing  model.norm.weight",
        "  unexpected  model.layers.1.self_attn.q_norm.weight",
        "  unexpected  model.layers.3.mlp.up_proj.weight",
        "  misshaped  model.layers.2.input_layernorm.weight: (49,), the model has (48,)",
        "  misshaped  lm_head.weight: (97, 48), the model has (96, 48)",
    ]


def test_layers_that_deepspeed_replaced_are_told(tmp_path: Path) -> None:
    state = {
        "model.layers.0.attention.attn_qkvw": torch.ones(144, 48),
        "model.layers.0.mlp.inter_w": torch.ones(80, 48),
    }
    save(state, tmp_path / "pytorch_model.bin")
    assert refused(str(tmp_path), "2 unexpected").endswith("give the checkpoint that they were made from")


def test_tied_weights_with_two_values_are_refused(tmp_path: Path) -> None:
    """transformers would untie them; a model that is tied in memory cannot hold both."""
    state = {name: tensor.clone() for name, tensor in BY_NAME["llama-bias"].make().state_dict().items()}
    save(state, tmp_path / "same" / "pytorch_model.bin")
    loaded("llama-bias", str(tmp_path / "same"))
    state["lm_head.weight"] += 1
    save(state, tmp_path / "other" / "pytorch_model.bin")
    refused(str(tmp_path / "other"), "the model ties it to model.embed_tokens.weight", name="llama-bias")


def test_what_fails_while_values_are_read_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that ends early behind our back, in the last layer; and a value that no format can hold."""
    BY_NAME["llama"].make().save_pretrained(tmp_path)
    read = FileTensor.read

    def short(self: FileTensor, part: tuple = ()) -> torch.Tensor:
        if self.name == "model.layers.2.mlp.down_proj.weight":
            os.truncate(tmp_path / "model.safetensors", 2000)
        return read(self, part)

    kept = shutil.copy(tmp_path / "model.safetensors", tmp_path / "kept")
    for _ in range(2):
        monkeypatch.setattr(FileTensor, "read", short)
        model = BY_NAME["llama"].make()
        wanted, before = outputs(model, "llama"), state_of(model)
        with pytest.raises(
            infuse.CheckpointError, match="model.safetensors: ended while model.layers.2.mlp.down_proj.weight was read"
        ):
            infuse.init_inference(model, checkpoint=str(tmp_path), dtype="bf16", quant="int8:16", progress=False)
        assert state_of(model) == before and torch.equal(outputs(model, "llama"), wanted)
        monkeypatch.undo()
        shutil.copy(kept, tmp_path / "model.safetensors")
    state = BY_NAME["llama"].make().state_dict()
    state["model.layers.2.mlp.down_proj.weight"][3, 4] = float("nan")
    save(state, tmp_path / "nan" / "pytorch_model.bin")
    with pytest.raises(infuse.ConfigError, match=r"holds nan at \[3, 4\]"):
        infuse.init_inference(
            model, checkpoint=str(tmp_path / "nan"), dtype="bf16", quant="int8:16", verify="off", progress=False
        )
    assert state_of(model) == before and torch.equal(outputs(model, "llama"), wanted)


def test_buffers_that_cannot_be_computed_are_told(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("table", torch.arange(4.0), persistent=False)

    save(Own().state_dict(), tmp_path / "pytorch_model.bin")
    with torch.device("meta"):
        model = Own()
    with pytest.raises(infuse.CheckpointError, match="cannot be made anew from its config: table"):
        infuse.init_inference(model, checkpoint=str(tmp_path), dtype="fp32", progress=False)
    model.table = torch.arange(4.0)
    engine = infuse.init_inference(model, checkpoint=str(tmp_path), dtype="fp32", progress=False)
    assert not any(x.is_meta for x in (*engine.parameters(), *engine.buffers()))


# ---- the proof on a model that has no values of its own ----


@pytest.mark.parametrize("keys", [dict(dtype="fp32"), dict(dtype="bf16", quant="int8:16")], ids=str)
@pytest.mark.parametrize(
    ("name", "change"),
    [("llama", dict(attn=dict(position=Rotary(interleaved=True)))), ("bloom", dict(attn=dict(position=NoPosition())))],
)
def test_a_broken_spec_is_refused(
    name: str, change: dict, keys: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the layers that stay have the checkpoint's values."""
    monkeypatch.setattr(native, "kernels", lambda: "not built here")
    live = BY_NAME[name].make()
    live.save_pretrained(tmp_path)
    monkeypatch.setattr(PLAN, "specs_for", lambda layer: tuple(spec.but(**change) for spec in specs_for(layer)))
    with pytest.warns(UserWarning, match="refused"):
        engine = loaded(name, str(tmp_path), verify="sample", **keys)
    assert not any(isinstance(module, Block) for module in engine.module.modules())
    reasons = [left.why for left in engine.plan.left if left.why.startswith("refused")]
    assert len(reasons) == 3
    assert all("differs from the original by" in why or "UnsupportedCall" in why for why in reasons)
    assert not any(x.is_meta for x in (*engine.parameters(), *engine.buffers()))
    if keys == dict(dtype="fp32"):
        assert torch.equal(outputs(engine, name), outputs(live, name))
    meta = on_meta(name)
    before = state_of(meta)
    with pytest.raises(infuse.ProofError):
        infuse.init_inference(meta, checkpoint=str(tmp_path), verify="strict", progress=False, **keys)
    assert state_of(meta) == before


NORM, OTHER = "model.norm.weight", "lm_head.weight"


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def with_copy(folder: Path, off: float) -> tuple[str, Path, Path]:
    """Add a copy of a tensor, off by `off`, to the first file without it; return its name, its file and that one."""
    where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    stale = files_of(folder)[0]
    files = list(where.values())
    name = next(name for name, file in where.items() if file != stale.name and files.count(file) > 1)
    own = folder / where[name]
    save_file({**load_file(stale), name: load_file(own)[name] + off}, stale, {"format": "pt"})
    return name, own, stale


def test_the_file_that_the_index_names_counts(tmp_path: Path) -> None:
    safetensors_shards(BY_NAME["llama"].make(), tmp_path)
    with_copy(tmp_path, 6.0)
    assert torch.equal(outputs(loaded("llama", str(tmp_path)), "llama"), wanted("llama"))


def test_a_tensor_that_is_not_in_the_file_that_the_index_names(tmp_path: Path) -> None:
    safetensors_shards(BY_NAME["llama"].make(), tmp_path)
    name, own, _ = with_copy(tmp_path, 0.0)
    save_file({key: value for key, value in load_file(own).items() if key != name} or {"none": torch.ones(1)}, own)
    refused(str(tmp_path), f"1 tensors are not in the files that the index names: {name} in .*{own.name}")


def test_without_an_index_copies_must_agree(tmp_path: Path) -> None:
    safetensors_shards(BY_NAME["llama"].make(), tmp_path)
    name, own, stale = with_copy(tmp_path, 0.0)
    (tmp_path / "model.safetensors.index.json").unlink()
    for source in (str(tmp_path), str(tmp_path / "*.safetensors"), files_of(tmp_path)):
        assert torch.equal(outputs(loaded("llama", source), "llama"), wanted("llama"))
    state = load_file(stale)
    state[name].view(-1)[-1] += 1e-3
    save_file(state, stale, {"format": "pt"})
    for source in (str(tmp_path), str(tmp_path / "*.safetensors"), files_of(tmp_path)):
        refused(source, f"1 tensors have other values in another file: {name} in .*{stale.name} and .*{own.name}")


def test_an_index_that_leaves_a_tensor_out(tmp_path: Path) -> None:
    """It is read where it is, as transformers does, unless two files have other values for it."""
    safetensors_shards(BY_NAME["llama"].make(), tmp_path)
    name, _, stale = with_copy(tmp_path, 0.0)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][name]
    path.write_text(json.dumps(index))
    assert torch.equal(outputs(loaded("llama", str(tmp_path)), "llama"), wanted("llama"))
    state = load_file(stale)
    save_file({**state, name: state[name] + 1}, stale, {"format": "pt"})
    refused(str(tmp_path), f"1 tensors have other values in another file: {name} in")


def test_two_whole_models_in_one_list(tmp_path: Path) -> None:
    """The same names in each file are taken for pieces of ranks; whole tensors among them must agree."""
    state = BY_NAME["llama"].make().state_dict()
    first, second = (tmp_path / file for file in ("first.bin", "second.bin"))
    save(state, first)
    save(state, second)
    assert torch.equal(outputs(loaded("llama", [first, second]), "llama"), wanted("llama"))
    save({**state, NORM: state[NORM] + 1, OTHER: state[OTHER] * 2}, second)
    text = refused([first, second], "2 misshaped")
    assert f"{NORM}: several files have it, with other values" in text and OTHER in text


def test_norms_that_drifted_between_training_ranks_are_told(tmp_path: Path) -> None:
    state = BY_NAME["llama"].make().state_dict()
    cut = ("model.embed_tokens.weight", OTHER)
    for rank in range(2):
        pieces = {name: value.chunk(2)[rank].clone() if name in cut else value for name, value in state.items()}
        save({"module": {**pieces, NORM: state[NORM] + rank}}, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    with pytest.warns(
        UserWarning, match=f"1 tensors that ranks saved whole differ between them; the first rank's are taken: {NORM}"
    ):
        engine = loaded("llama", str(tmp_path))
    assert torch.equal(outputs(engine, "llama"), wanted("llama"))


def test_links_lead_where_the_user_wants(tmp_path: Path) -> None:
    """As in the cache of Hugging Face: a snapshot of links to blobs without a suffix."""
    safetensors_shards(BY_NAME["llama"].make(), tmp_path / "made")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number, path in enumerate(sorted((tmp_path / "made").iterdir())):
        path.rename(tmp_path / "blobs" / str(number))
        os.symlink(f"../blobs/{number}", tmp_path / "snapshot" / path.name)
    assert torch.equal(outputs(loaded("llama", str(tmp_path / "snapshot")), "llama"), wanted("llama"))
