"""The forms in which checkpoints are saved; models that are read from them, faulty or not, and what they give."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import infuse
import infuse.deepspeed as deepspeed
from infuse.shards.index import SEAL, seal
from tests.models.families import BY_NAME, inputs
from tests.models.unknown import bart
from tests.support.ranks import Ranks, same


def on_meta(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """The family's model without values, as DeepSpeed's users make it."""
    family = BY_NAME[name]
    with deepspeed.OnDevice(dtype, device="meta"):
        return family.model(family.config(**{**family.values, **changes})).eval()


def loaded(name: str, source: Any, **keys: Any) -> infuse.InferenceEngine:
    return infuse.init_inference(
        on_meta(name), checkpoint=source, **{"dtype": "fp32", "progress": False, "verify": "off", **keys}
    )


def outputs(model: nn.Module, name: str) -> Tensor:
    with torch.no_grad():
        return model(**inputs(BY_NAME[name]))[0]


def wanted(name: str, **keys: Any) -> Tensor:
    """What the live model gives, replaced in the same way from its own memory."""
    live = infuse.init_inference(BY_NAME[name].make(), **{"dtype": "fp32", "progress": False, "verify": "off", **keys})
    return outputs(live, name)


def save(tensors: dict[str, Tensor], path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, path)
    return path.name


def safetensors(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    assert (folder / "model.safetensors").is_file()
    return str(folder)


def safetensors_shards(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder, max_shard_size="30KB")
    assert (folder / "model.safetensors.index.json").is_file() and len(list(folder.glob("*.safetensors"))) > 2
    return str(folder)


def bin_single(model: Any, folder: Path) -> Any:
    save(model.state_dict(), folder / "pytorch_model.bin")
    return str(folder)


def split(model: Any, folder: Path, parts: int = 3) -> dict[str, str]:
    """The state dict over several files; name → file."""
    state = model.state_dict()
    names = list(state)
    where = {name: f"part-{i * parts // len(names)}.bin" for i, name in enumerate(names)}
    for file in dict.fromkeys(where.values()):
        save({name: state[name].clone() for name in names if where[name] == file}, folder / file)
    return where


def bin_shards(model: Any, folder: Path) -> Any:
    index = {"metadata": {}, "weight_map": split(model, folder)}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return str(folder)


def file_list(model: Any, folder: Path) -> Any:
    return [folder / file for file in sorted(set(split(model, folder).values()))]


def file_glob(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder, max_shard_size="30KB")
    return str(folder / "model-*.safetensors")


def one_file(model: Any, folder: Path) -> Any:
    return str(folder / save(model.state_dict(), folder / "weights.pt"))


def description(model: Any, folder: Path) -> Any:
    files = sorted(set(split(model, folder).values()))
    (folder / "checkpoints.json").write_text(json.dumps({"type": "BLOOM", "checkpoints": files, "version": 1.0}))
    return str(folder / "checkpoints.json")


def description_dict(model: Any, folder: Path) -> Any:
    files = sorted(set(split(model, folder).values()))
    return {
        "type": "ds_model",
        "checkpoints": {"non_tp": files, "tp": []},
        "base_dir": str(folder),
        "parallelization": "tp",
        "tp_size": 1,
    }


def training(model: Any, folder: Path) -> Any:
    (folder / "latest").parent.mkdir(exist_ok=True)
    (folder / "latest").write_text("global_step7\n")
    state = {
        f"module.{name}": tensor for name, tensor in model.state_dict().items()
    }  # as DistributedDataParallel wraps
    save(
        {"module": state, "optimizer": None, "global_steps": 7}, folder / "global_step7" / "mp_rank_00_model_states.pt"
    )
    return str(folder)


def training_nested(model: Any, folder: Path) -> Any:
    """As Megatron nests: {"model": {first part: {...}}}."""
    nested: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        first, _, rest = name.partition(".")
        nested.setdefault(first, {})[rest] = tensor
    save({"model": nested, "iteration": 7}, folder / "mp_rank_00_model_states.pt")
    return str(folder)


def state_of(model: nn.Module) -> list[tuple]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return [(path, id(module), type(module)) for path, module in model.named_modules()] + [
        (name, id(x), x.dtype) for name, x in tensors
    ]


def refused(source: Any, match: str, name: str = "llama", **keys: Any) -> str:
    """The text of the error, for a live model and for one on meta, both of which must be left as they were."""
    live, meta = BY_NAME[name].make(), on_meta(name)
    wanted = outputs(live, name)
    for model in (live, meta):
        before = state_of(model)
        with pytest.raises(infuse.CheckpointError, match=match) as caught:
            infuse.init_inference(
                model, checkpoint=source, **{"dtype": "bf16", "progress": False, "verify": "off", **keys}
            )
        assert state_of(model) == before
    assert torch.equal(outputs(live, name), wanted) and all(parameter.is_meta for parameter in meta.parameters())
    return str(caught.value)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


ROWS, COLUMNS = 0, 1


# Parts of names → the axis along which ranks cut the matrix; a bias is cut where its matrix is cut by rows; the rest is
# on each rank.
CUT = {
    "llama": {"q_proj": ROWS, "k_proj": ROWS, "v_proj": ROWS, "o_proj": COLUMNS, "gate_proj": ROWS, "up_proj": ROWS,
              "down_proj": COLUMNS, "embed_tokens": ROWS, "lm_head": ROWS},
    "gpt2": {"attn.c_attn": COLUMNS, "attn.c_proj": ROWS, "c_fc": COLUMNS, "mlp.c_proj": ROWS, "wte": ROWS,
             "lm_head": ROWS},
    "bloom": {"query_key_value": ROWS, "self_attention.dense": COLUMNS, "h_to_4h": ROWS, "4h_to_h": COLUMNS,
              "word_embeddings.w": ROWS, "lm_head": ROWS},
    "bert": {"query": ROWS, "key": ROWS, "value": ROWS, "attention.output.dense": COLUMNS, "intermediate.dense": ROWS,
             "output.dense": COLUMNS, "word_embeddings": ROWS},
    "phi3": {"qkv_proj": ROWS, "o_proj": COLUMNS, "gate_up_proj": ROWS, "down_proj": COLUMNS, "embed_tokens": ROWS,
             "lm_head": ROWS},
}  # fmt: skip


CUT["falcon-40b"] = CUT["falcon-7b"] = CUT["bloom"]


TRANSPOSED = {"gpt2"}


HEADS, WIDTH = 4, 12


def piece(family: str, name: str, tensor: Tensor, rank: int, size: int) -> Tensor:
    """What `rank` of `size` saves of a tensor: written without a word of the code under test."""
    axis = next((axis for part, axis in CUT[family].items() if part in name), None)
    if axis is None:
        return tensor
    if tensor.dim() == 1:
        if axis == (ROWS if family in TRANSPOSED else COLUMNS):
            return tensor
        axis = 0
    if "c_attn" in name or (family == "phi3" and "gate_up" in name):
        parts = tensor.chunk(3 if "c_attn" in name else 2, dim=axis)
        return torch.cat([part.chunk(size, dim=axis)[rank] for part in parts], dim=axis)
    grouped = family in ("llama", "falcon-40b") and size > 2  # two key heads: neighbours have the same
    if family == "llama" and ("k_proj" in name or "v_proj" in name) and grouped:
        return tensor[rank // 2 * WIDTH : (rank // 2 + 1) * WIDTH]
    if family == "phi3" and "qkv" in name:
        q, k, v = tensor.split((HEADS * WIDTH, 2 * WIDTH, 2 * WIDTH))
        return torch.cat([part.chunk(size)[rank] for part in (q, k, v)])
    if family == "falcon-40b" and "query_key_value" in name and grouped:
        heads = tensor.view(2, 4, WIDTH, *tensor.shape[1:])[rank // 2]  # (q, q, k, v)
        return torch.cat((heads[rank % 2], heads[2], heads[3]))
    if family == "falcon-7b" and "query_key_value" in name:
        heads = tensor.view(6, WIDTH, *tensor.shape[1:])  # (q, q, q, q, k, v)
        mine = [heads[i] for i in range(rank * 4 // size, (rank + 1) * 4 // size)]
        return torch.cat([*mine, heads[4], heads[5]])
    return tensor.chunk(size, dim=axis)[rank].clone()


def shards(family: str, size: int) -> list[dict[str, Tensor]]:
    state = BY_NAME[family].make().state_dict()
    return [{name: piece(family, name, tensor, rank, size) for name, tensor in state.items()} for rank in range(size)]


def engine_from(name: str, source: Any, grain: int = 64, **keys: Any) -> infuse.InferenceEngine:
    size = dist.get_world_size() if dist.is_initialized() else 1
    given = {"dtype": "fp32", "progress": False, "tensor_parallel": {"tp_size": size, "tp_grain_size": grain}, **keys}
    if source is None:
        return infuse.init_inference(BY_NAME[name].make(), **given)
    return infuse.init_inference(on_meta(name), checkpoint=source, **{**given, "dtype": keys.get("dtype")})


def saved_by_rank(name: str, folder: str, keys: dict) -> Tensor:
    return outputs(engine_from(name, None, save_mp_checkpoint_path=folder, **{"verify": "off", **keys}), name)


def saved(name: str, folder: Path, size: int, ranks: Ranks, **keys: Any) -> Tensor:
    """What the engine gives whose shards are in `folder` now."""
    found = (
        ranks.run(size, saved_by_rank, name, str(folder), keys)
        if size > 1
        else [saved_by_rank(name, str(folder), keys)]
    )
    assert same(found)
    return found[0]


def bart_by_rank(folder: str, write: bool, keys: dict) -> Tensor:
    torch.manual_seed(0)
    given = {"dtype": "fp32", "progress": False, "tensor_parallel": {"tp_size": dist.get_world_size()}, **keys}
    if write:
        engine = infuse.init_inference(bart(), save_mp_checkpoint_path=folder, **given)
    else:
        with torch.device("meta"):
            model = bart()
        engine = infuse.init_inference(model, checkpoint=folder, **given)
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        return engine(input_ids=ids, decoder_input_ids=ids).logits


def changed(folder: Path, **changes: Any) -> None:
    """Write these entries of the index, and its checksum anew."""
    path = folder / "infuse.json"
    index = {**json.loads(path.read_text()), **changes}
    del index[SEAL]
    path.write_text(json.dumps({**index, SEAL: seal(index)}))
