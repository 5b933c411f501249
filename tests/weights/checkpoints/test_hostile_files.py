"""Files and configurations that lie: whatever is changed in them, the error is infuse's own, and the model is what it
was.
"""

from __future__ import annotations

import copy
import json
import random
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import infuse
from infuse.config.inference import Checkpoint as CheckpointKeys
from infuse.config.inference import InferenceConfig, Moe, TensorParallel
from infuse.config.quant import ModuleQuant, Quant, WeightQuant
from infuse.shards.index import SEAL, seal
from infuse.weights.checkpoint import Checkpoint
from infuse.weights.model_tensors import model_tensors
from infuse.weights.sources import find_files
from tests.models.families import BY_NAME
from tests.support.checkpoints import bin_shards, on_meta, refused, safetensors_shards, state_of
from tests.support.checkpoints import saved as saved_by
from tests.support.ranks import Ranks

DEEP = 100_000  # levels of JSON, beyond every parser's recursion limit
JUNK = [
    None, True, 0, 1, -1, 7, 2.0, 0.5, float("nan"), 2**70, -(2**70), "", " ", ".", "..", "../x.bin", "/",
    "/etc/passwd", "\0", "\ud800", "a" * 5000, "F32", "I32", "int4", "int8:16", "auto", "cuda", "0:1", "9:3", [], [[]],
    {}, {"": None}, [1, 2, 3], ["a"], [None], {"a": {"a": 1}},
]  # fmt: skip
TRIES = 100


def source(name: str = "llama") -> nn.Module:
    return BY_NAME[name].make()


# ---- changes ----


def nodes(tree: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON tree: a dict or list, and the key in it."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []
    return [place for key in keys for place in ((tree, key), *nodes(tree[key]))]


def tampered(tree: Any, chance: random.Random) -> Any:
    """A copy of a JSON tree with one to three places replaced, removed or exchanged."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.randint(1, 3)):
        places = nodes(tree)
        if not places:
            break
        owner, key = chance.choice(places)
        other, name = chance.choice(places)
        match chance.randrange(5):
            case 0:
                del owner[key]
            case 1 if isinstance(owner, dict):
                owner[chance.choice([*map(str, JUNK), str(name)])] = owner.pop(key)
            case 2:
                owner[key] = copy.deepcopy(other[name])
            case _:
                owner[key] = copy.deepcopy(chance.choice(JUNK))
    return tree


def garbled(data: bytes, chance: random.Random, limit: int | None = None) -> bytes:
    """The bytes with a few of the first `limit` changed, removed or doubled."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(min(len(changed), limit or len(changed)) or 1)
        match chance.randrange(4):
            case 0:
                del changed[at : at + chance.choice([1, 2, 50])]
            case 1:
                changed[at:at] = changed[at : at + chance.choice([1, 9, 80])]
            case _ if at < len(changed):
                changed[at] = chance.choice([chance.randrange(256), *b'0123456789[]{}",:'])
    return bytes(changed)


def header_of(path: Path) -> tuple[bytes, bytes]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], data[end:]


def with_header(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


# ---- what is asserted ----


def read_all(model: nn.Module, folder: Path) -> dict[str, torch.Tensor] | None:
    """All values of `model` as the checkpoint has them; None where it is refused."""
    before = state_of(model)
    try:
        tensors = model_tensors(model, Checkpoint(find_files(str(folder)))).tensors
        found = {name: tensor.read() for name, tensor in tensors.items()}
    except infuse.CheckpointError:
        found = None
    assert state_of(model) == before
    return found


def loads(model: nn.Module, folder: Path, **keys: Any) -> infuse.InferenceEngine | None:
    """The engine; None where the checkpoint is refused, and the model is as it was."""
    before = state_of(model)
    try:
        return infuse.init_inference(model, checkpoint=str(folder), verify="off", progress=False, **keys)
    except (infuse.CheckpointError, infuse.ConfigError):
        assert state_of(model) == before
        return None


def right_or_refused(
    model: nn.Module, folder: Path, change: Callable[[random.Random], None], tries: int = TRIES
) -> None:
    refusals = 0
    for seed in range(tries):
        change(random.Random(seed))
        found = read_all(model, folder)
        refusals += found is None
        wanted = model.state_dict()
        assert found is None or all(torch.equal(found[name], wanted[name]) for name in wanted), seed
    assert refusals > tries // 3  # it does change something


@pytest.mark.parametrize("way", ["tree", "bytes", "length"])
def test_headers(way: str, tmp_path: Path) -> None:
    model, path = source(), tmp_path / "model.safetensors"
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    header, data = header_of(path)
    tree = json.loads(header)

    def change(chance: random.Random) -> None:
        if way == "tree":
            with_header(path, json.dumps(tampered(tree, chance)).encode(), data)
        elif way == "bytes":
            with_header(path, garbled(header, chance), data)
        else:
            length = len(header) + chance.choice([-9, -1, 1, 8, 1000, 10**7, 10**12, 2**62])
            path.write_bytes(length.to_bytes(8, "little") + header + data[: chance.choice([None, 0, 100])])

    right_or_refused(model, tmp_path, change)


@pytest.mark.parametrize("way", ["tree", "bytes"])
@pytest.mark.parametrize("form", [safetensors_shards, bin_shards], ids=lambda form: form.__name__)
def test_indexes(form: Callable[[Any, Path], Any], way: str, tmp_path: Path) -> None:
    model = source()
    form(model, tmp_path)
    (path,) = tmp_path.glob("*.index.json")
    text = path.read_bytes()

    def change(chance: random.Random) -> None:
        path.write_bytes(
            json.dumps(tampered(json.loads(text), chance)).encode() if way == "tree" else garbled(text, chance)
        )

    right_or_refused(model, tmp_path, change, 60)


def test_pickles(tmp_path: Path) -> None:
    """A pickle that was changed may name other values, so that of values nothing is asserted."""
    model, path = source(), tmp_path / "pytorch_model.bin"
    torch.save(model.state_dict(), path)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    (pickle,) = (name for name in records if name.endswith("data.pkl"))
    for seed in range(TRIES):
        chance = random.Random(seed)
        if seed % 2:
            end = len(whole) - chance.randrange(1, 4000)
            path.write_bytes(whole[:end] + garbled(whole[end:], chance))  # the archive's own directory
        else:
            with zipfile.ZipFile(path, "w") as archive:
                for name, data in records.items():
                    archive.writestr(name, garbled(data, chance) if name == pickle else data)
        read_all(model, tmp_path)


@pytest.mark.parametrize("writers", [1, 2])
@pytest.mark.parametrize("way", ["tree", "sealed tree", "bytes"])
def test_indexes_of_our_own(way: str, writers: int, tmp_path: Path, ranks: Ranks) -> None:
    """A tree that was sealed again may say anything that an index can say, so that of values nothing is asserted."""
    saved_by("llama", tmp_path, writers, ranks, quant="int8:4")
    model, path = on_meta("llama"), tmp_path / "infuse.json"
    text = path.read_bytes()
    for seed in range(25):
        chance = random.Random(seed)
        if way == "bytes":
            path.write_bytes(garbled(text, chance))
        else:
            index = tampered(json.loads(text), chance)
            if way == "sealed tree":
                index.pop(SEAL, None)
                index[SEAL] = seal(index)
            path.write_text(json.dumps(index))
        if loads(model, tmp_path) is not None:
            assert way == "sealed tree" or json.loads(path.read_bytes()) == json.loads(text), seed
            model = on_meta("llama")


# ---- the kinds that were tried by hand ----


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [48], "data_offsets": [0, 192], **changes}


NORM = "model.norm.weight"
HEADERS = {
    "shape of floats": json.dumps({NORM: entry(shape=[48.0])}),
    "three offsets": json.dumps({NORM: entry(data_offsets=[0, 192, 192])}),
    "deep": '{"a":' + "[" * DEEP + "]" * DEEP + "}",
    "overlap": json.dumps({NORM: entry(), "other": entry(shape=[24], data_offsets=[0, 96])}),
    "gap": json.dumps({NORM: entry(shape=[47], data_offsets=[0, 188])}),
    "beyond the end": json.dumps({NORM: entry(shape=[96], data_offsets=[0, 384])}),
    "twice": f'{{"{NORM}": {json.dumps(entry())}, "{NORM}": {json.dumps(entry())}}}',
    "overflow": json.dumps({NORM: entry(shape=[2**62, 8])}),
    "unknown dtype": json.dumps({NORM: entry(dtype="F4", shape=[384])}),
    "a list": "[]",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_malformed_header_is_refused(kind: str, tmp_path: Path) -> None:
    with_header(tmp_path / "model.safetensors", HEADERS[kind].encode(), bytes(192))
    refused(str(tmp_path), "model.safetensors: (truncated, corrupt, or not a safetensors file|holds tensors of F4)")


INDEXES = {
    "numbers": ({"weight_map": {NORM: 5}}, '"weight_map" names no files for model.norm.weight: 5'),
    "a list": ({"weight_map": [1]}, 'has no "weight_map"'),
    "empty": ({"weight_map": {}}, 'has no "weight_map"'),
    "above": ({"weight_map": {NORM: "../model.bin"}}, "names '../model.bin'; possible: files inside of"),
    "absolute": ({"weight_map": {NORM: "/etc/passwd"}}, "names '/etc/passwd'; possible: files inside of"),
    "itself": ({"weight_map": {NORM: ""}}, "names ''; possible: files inside of"),
    "long": ({"weight_map": {NORM: "a" * 5000}}, "cannot be looked up"),
    "zero byte": ({"weight_map": {NORM: "a\0"}}, "1 files are missing"),
    "deep": ("[" * DEEP + "]" * DEEP, "truncated or corrupt"),
}


@pytest.mark.parametrize("kind", INDEXES)
def test_a_malformed_index_is_refused(kind: str, tmp_path: Path) -> None:
    index, match = INDEXES[kind]
    (tmp_path / "model.safetensors.index.json").write_text(index if isinstance(index, str) else json.dumps(index))
    refused(str(tmp_path), match)


DESCRIPTIONS = {
    "numbers": {"checkpoints": [1, 2]},
    "a number for a size": {"checkpoints": {"tp": ["a.pt"]}, "tp_size": "two"},
    "a size of zero": {"checkpoints": {"tp": ["a.pt"]}, "tp_size": 0},
    "version": {"checkpoints": ["a.pt"], "type": "Megatron", "version": "one"},
    "no list": {"checkpoints": {"tp": {"a": 1}}},
    "itself": {"checkpoints": "description.json"},
}


@pytest.mark.parametrize("kind", DESCRIPTIONS)
def test_a_malformed_description_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "description.json").write_text(json.dumps(DESCRIPTIONS[kind]))
    refused(str(tmp_path / "description.json"), "is no description of a checkpoint|names another description")


@pytest.mark.parametrize("name", ["a\0b", "a" * 5000, "\0*", "\ud800"])
def test_a_name_that_no_system_takes_is_refused(name: str) -> None:
    refused(name, "does not exist|no file matches|cannot be looked up")


def test_a_tag_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "latest").write_text("..")
    refused(str(tmp_path / "inner"), "names '..'; possible: files inside of")
    (tmp_path / "inner" / "latest").write_bytes(b"\xff\xfe")
    refused(str(tmp_path / "inner"), "cannot be looked up")


def in_itself() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["again"] = found
    return found


PICKLES: dict[str, Callable[[dict[str, Any]], dict[Any, Any]]] = {
    "sparse": lambda state: {**state, NORM: state[NORM].to_sparse()},
    "meta": lambda state: {**state, NORM: state[NORM].to("meta")},
    "quantized": lambda state: {**state, NORM: torch.quantize_per_tensor(state[NORM], 0.1, 0, torch.qint8)},
    "integers": lambda state: {**state, NORM: state[NORM].long()},
    "twice": lambda state: {**state, "model.norm": {"weight": state[NORM] + 1}},
    "without end": lambda state: {**state, "more": in_itself()},
}


@pytest.mark.parametrize("kind", PICKLES)
def test_tensors_without_plain_values_are_refused(kind: str, tmp_path: Path) -> None:
    torch.save(PICKLES[kind](dict(source().state_dict())), tmp_path / "pytorch_model.bin")
    what = {
        "without end": "nested too deeply",
        "twice": "more than once",
        "integers": f"{NORM}: torch.int64, the model has torch.float32",
    }
    refused(str(tmp_path), what.get(kind, f"tensors that are not dense values: {NORM}"))


def test_parameters_are_read_as_values(tmp_path: Path) -> None:
    """`dict(model.named_parameters())` holds leaves of a graph, which copies of would record."""
    model = source()
    torch.save(dict(model.named_parameters()), tmp_path / "pytorch_model.bin")
    engine = loads(on_meta("llama"), tmp_path, dtype="fp32")
    assert engine is not None and all(parameter.is_leaf for parameter in engine.parameters())


# ---- configurations ----

SECTIONS = (InferenceConfig, TensorParallel, Moe, CheckpointKeys, Quant, WeightQuant, ModuleQuant)
NAMES = sorted(
    {name for section in SECTIONS for name in (*section.model_fields, *section.aliases, *section.moved)}
    | {"unknown", ""}
)
OBJECTS = [
    torch.float16, torch.int64, torch.zeros(3), np.zeros(3), nn.Linear(2, 2), {1, 2}, b"x", object(), int, {1: 2},
    {None: 1},
]  # fmt: skip
LEAVES = [
    *JUNK, "fp16", "cpu:3", "cuda:99999999999", "meta", "9" * 5000, "int8:groups=9999999999999999999999", 10**12,
    float("inf"),
]  # fmt: skip
WRITTEN = st.recursive(
    st.sampled_from(LEAVES) | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.dictionaries(st.sampled_from(NAMES), inner, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=8,
)
QUICK = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def judged(given: Any) -> InferenceConfig | None:
    """The configuration, which can be told; None where it is refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            config = InferenceConfig(given)
    except infuse.ConfigError as error:
        assert str(error)
        return None
    assert str(config) and config.notes() is not None
    return config


@QUICK
@given(st.dictionaries(st.sampled_from(NAMES), WRITTEN, min_size=1, max_size=3))
def test_configurations(written: dict[str, Any]) -> None:
    judged(written)


@pytest.mark.parametrize(
    "key", sorted({*InferenceConfig.model_fields, *InferenceConfig.aliases, *InferenceConfig.moved})
)
def test_each_key_with_each_value(key: str) -> None:
    for value in (*LEAVES, *OBJECTS, in_itself()):
        judged({key: value})
        for section in ("tensor_parallel", "moe", "checkpoint_config", "quant"):
            if key == section:
                for name in NAMES:
                    judged({key: {name: value}})


def test_configurations_in_files(tmp_path: Path) -> None:
    quant = {"weight": {"num_bits": 8, "q_groups": 2}}
    tree = {"dtype": "fp32", "quant": quant, "tp": {"tp_size": 1}, "moe": True, "checkpoint": ["a.bin"]}
    path = tmp_path / "config.json"
    for seed in range(TRIES):
        chance = random.Random(seed)
        text = json.dumps(tree).encode()
        path.write_bytes(json.dumps(tampered(tree, chance)).encode() if seed % 2 else garbled(text, chance))
        judged(str(path))
    path.write_text("[" * DEEP + "]" * DEEP)
    assert judged(str(path)) is None and judged(in_itself()) is None and judged({"zero": in_itself()}) is None


@pytest.mark.parametrize(
    "keys",
    [
        {"tensor_parallel": {"tp_group": "all"}},
        {"quant": {"weight": {"q_groups": 10**12}}},
        {"checkpoint": torch.zeros(3)},
        {"injection_policy": {"LlamaDecoderLayer": torch.zeros(3)}},
        {"zero": in_itself()},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_a_configuration_that_is_refused_leaves_the_model_alone(keys: dict[str, Any]) -> None:
    model = source()
    before = state_of(model)
    with pytest.raises(infuse.ConfigError):
        infuse.init_inference(model, dtype="fp32", progress=False, **keys)
    assert state_of(model) == before


@pytest.mark.parametrize("folder", ["a\0b", "\ud800", "a" * 5000], ids=["zero byte", "half a character", "long"])
def test_a_folder_that_no_system_takes_is_refused(folder: str) -> None:
    model = source()
    before = state_of(model)
    with pytest.raises(infuse.CheckpointError, match="the shards cannot be written"):
        infuse.init_inference(model, dtype="fp32", progress=False, save_mp_checkpoint_path=folder)
    assert state_of(model) == before


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_indexes_of_our_own_that_lack_a_key(name: str, tmp_path: Path, ranks: Ranks) -> None:
    """Each key and entry but checksums, one at a time, sealed again; and names that no system takes."""
    saved_by(name, tmp_path, 1, ranks, quant="int8:4")
    path = tmp_path / "infuse.json"
    whole = json.loads(path.read_bytes())
    whole.pop(SEAL)

    def places(tree: Any, above: tuple = ()) -> Iterator[tuple]:
        keys = tree.keys() if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
        for key in keys:
            yield (*above, key)
            if key != "checksums":
                yield from places(tree[key], (*above, key))

    for place in places(whole):
        values = [None] if place[-1] != "name" else [None, "a" * 300, "a/" * 3000, "\ud800", "a\0b", ""]
        for value in values:
            index = copy.deepcopy(whole)
            owner = index
            for key in place[:-1]:
                owner = owner[key]
            if value is None:
                del owner[place[-1]]
            else:
                owner[place[-1]] = value
            path.write_text(json.dumps(index | {SEAL: seal(index)}))
            loads(on_meta(name), tmp_path)
