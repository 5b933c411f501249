"""A tensor that lies in several files: the index says which one counts, and without an index all of them must agree."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from families import BY_NAME
from safetensors.torch import load_file, save_file
from test_checkpoint_faults import refused
from test_checkpoints import loaded, outputs, safetensors_shards, save, wanted

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
