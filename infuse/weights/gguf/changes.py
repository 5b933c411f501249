"""What llama.cpp did to the values of an architecture's tensors, undone lazily. Codes keep their values.

The gated delta rule of Qwen has fewer heads of keys than of values. transformers lists the heads of values key by key,
llama.cpp those that are the first of their keys, then the second ones, and so on:

    transformers   k0 v0  k0 v1  k1 v0  k1 v1
    the file       k0 v0  k1 v0  k0 v1  k1 v1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infuse.ground.errors import CheckpointError
from infuse.parallel.slices import Span
from infuse.weights.gguf.tensors import Viewed
from infuse.weights.lazy import Coded, CodedTensor, Composite, Joined, LazyTensor, Order, Rearranged, Shape, Slices


class Unlike(Exception):
    """A tensor is not what its name says."""


@dataclass(frozen=True)
class Sizes:
    """Whole numbers of a file's keys, as those of `architecture`. `told`: the name of a tensor and its file."""

    values: Mapping[str, Any]
    architecture: str
    told: str

    def __call__(self, key: str) -> int:
        value = self.values.get(f"{self.architecture}.{key}")
        if not isinstance(value, int) or value < 1:
            raise Unlike(f"{self.architecture}.{key} is {value!r:.40}, not a whole number from 1 on")
        return value


Change = Callable[[LazyTensor, Sizes], LazyTensor]
Joining = Callable[[list[LazyTensor], Sizes], LazyTensor]


def vector(tensor: LazyTensor, sizes: Sizes) -> LazyTensor:
    """All numbers along one axis."""
    if tensor.coded is not None:
        raise Unlike("is not in plain numbers")
    return tensor if len(tensor.shape) == 1 else Viewed(tensor, (math.prod(tensor.shape),))


def row(tensor: LazyTensor, sizes: Sizes) -> LazyTensor:
    """All numbers as one row, [1, numbers]."""
    if tensor.coded is not None:
        raise Unlike("is not in plain numbers")
    return Viewed(tensor, (1, math.prod(tensor.shape)))


def convolution(tensor: LazyTensor, sizes: Sizes) -> LazyTensor:
    """[channels, taps] as [channels, 1, taps]."""
    if len(tensor.shape) != 2 or tensor.coded is not None:
        raise Unlike(f"{tensor.shape} is no convolution [channels, taps] in plain numbers")
    return Viewed(tensor, (tensor.shape[0], 1, tensor.shape[1]))


def log_decay(tensor: LazyTensor, sizes: Sizes) -> LazyTensor:
    """log(-x): the file has -exp(A_log)."""
    return LogDecay(vector(tensor, sizes), sizes.told)


@dataclass(frozen=True)
class LogDecay(Rearranged):
    """log(-source), in float32. CheckpointError for a number above 0, which names `told`."""

    told: str

    dtype = torch.float32

    def read(self, part: Slices = ()) -> Tensor:
        values = self.source.read(part).float()
        if not bool((values <= 0).all()):
            raise CheckpointError(f"{self.told}: has decays above 0 or that are not numbers; possible: numbers up to 0")
        return (-values).log()


def head_numbers(tensor: LazyTensor, sizes: Sizes) -> LazyTensor:
    """A row, or a number, for each head of values."""
    heads = sizes("ssm.time_step_rank")
    if tensor.shape[0] != heads:
        raise Unlike(f"{tensor.shape[0]} rows are not one for each of {heads} heads")
    return _rows_by_key(tensor, sizes, 0, 1)


def head_values(tensor: LazyTensor, sizes: Sizes) -> LazyTensor:
    """Rows of values, after those of queries and keys if there are any."""
    values, keys = sizes("ssm.inner_size"), sizes("ssm.group_count") * sizes("ssm.state_size")
    first = tensor.shape[0] - values
    if first not in (0, 2 * keys):
        raise Unlike(f"{tensor.shape[0]} rows are neither {values} of values nor, with queries and keys, {keys} more")
    return _rows_by_key(tensor, sizes, first, _value_width(sizes))


def head_convolution(tensor: LazyTensor, sizes: Sizes) -> LazyTensor:
    return convolution(head_values(tensor, sizes), sizes)


def head_decay(tensor: LazyTensor, sizes: Sizes) -> LazyTensor:
    return log_decay(head_numbers(tensor, sizes), sizes)


def head_columns(tensor: LazyTensor, sizes: Sizes) -> LazyTensor:
    """Columns of values. Where a block holds columns of several heads, they stay as they are, with their order."""
    width, columns = _value_width(sizes), tensor.shape[-1]
    if len(tensor.shape) != 2 or columns != sizes("ssm.inner_size"):
        raise Unlike(f"{tensor.shape} has not a column for each of {sizes('ssm.inner_size')} values")
    places = _places(sizes)
    if places == sorted(places):
        return tensor
    joined = Joined.of({0: tensor}, [Span(0, place * width, (place + 1) * width) for place in places], axis=1)
    if tensor.coded is None or joined.coded is not None:
        return joined
    heads = torch.tensor(places).argsort()  # the model's head at each place of the file
    inputs = (heads[:, None] * width + torch.arange(width)).flatten()
    return CodedTensor(tensor.shape, tensor.dtype, Coded(tensor.coded.format, tensor.coded.buffers, Order.of(inputs)))


def by_key_head(tensors: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    """Rows of queries, keys and values, and those of the gate, as the rows of each head of keys, one after another."""
    heads, width, values = sizes("ssm.group_count"), sizes("ssm.state_size"), sizes("ssm.inner_size")
    keys = heads * width
    found = [tensor.shape[0] for tensor in tensors]
    if found != [2 * keys + values, values] or values % heads or len({tensor.shape[1:] for tensor in tensors}) > 1:
        told = " and ".join(str(tensor.shape) for tensor in tensors)
        raise Unlike(f"{told} with the gate are not {2 * keys + values} and {values} rows of {heads} heads of keys")
    parts = ((0, 0, width), (0, keys, width), (0, 2 * keys, values // heads), (1, 0, values // heads))
    return Joined.of(
        dict(enumerate(tensors)),
        [
            Span(source, first + head * rows, first + (head + 1) * rows)
            for head in range(heads)
            for source, first, rows in parts
        ],
    )


def one_below_the_other(tensors: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    """Matrices with the same inputs as one matrix."""
    if len({tensor.shape[1:] for tensor in tensors}) > 1 or len(tensors[0].shape) != 2:
        raise Unlike(f"{' and '.join(str(tensor.shape) for tensor in tensors)} have not the same inputs")
    return Joined.of(dict(enumerate(tensors)))


def by_latent_head(tensors: list[LazyTensor], sizes: Sizes) -> LazyTensor:
    """Keys [heads, latent, width] and values [heads, width, latent] of a latent as rows of each head, in plain numbers.

    Keys are transposed, so that their codes are those of other inputs.
    """
    heads, latent = sizes("attention.head_count"), sizes("attention.kv_lora_rank")
    keys, values = tensors
    numbers = math.prod(keys.shape), math.prod(values.shape)
    whole = all(number % (heads * latent) == 0 for number in numbers)
    if not whole or math.prod(keys.shape[:-1]) != heads * latent or values.shape[-1] != latent:
        raise Unlike(f"{keys.shape} and {values.shape} are not {heads} heads of keys and values of {latent} numbers")
    return OfLatent(keys, values, heads, latent)


@dataclass(frozen=True)
class OfLatent(Composite):
    """For each head, rows of keys and then of values: [heads * (key + value width), latent], in float32."""

    keys: LazyTensor
    values: LazyTensor
    heads: int
    latent: int

    coded, dtype = None, torch.float32

    @property
    def made_of(self) -> Iterable[LazyTensor]:
        return (self.keys, self.values)

    @property
    def shape(self) -> Shape:
        return ((math.prod(self.keys.shape) + math.prod(self.values.shape)) // self.latent, self.latent)

    def read(self, part: Slices = ()) -> Tensor:
        keys = self.keys.read().float().reshape(self.heads, self.latent, -1).transpose(1, 2)
        values = self.values.read().float().reshape(self.heads, -1, self.latent)
        return torch.cat([keys, values], dim=1).flatten(0, 1)[part]


def _rows_by_key(tensor: LazyTensor, sizes: Sizes, first: int, width: int) -> LazyTensor:
    """The rows from `first` on, `width` of each head, key by key."""
    places = _places(sizes)
    if places == sorted(places):
        return tensor
    starts = [first + place * width for place in places]
    return Joined.of({0: tensor}, [Span(0, 0, first), *(Span(0, start, start + width) for start in starts)])


def _places(sizes: Sizes) -> list[int]:
    """The place in the file of each head of values."""
    keys, heads = sizes("ssm.group_count"), sizes("ssm.time_step_rank")
    if heads % keys:
        raise Unlike(f"{heads} heads of values are no multiple of {keys} heads of keys")
    return [turn * keys + key for key in range(keys) for turn in range(heads // keys)]


def _value_width(sizes: Sizes) -> int:
    values, heads = sizes("ssm.inner_size"), sizes("ssm.time_step_rank")
    if values % heads:
        raise Unlike(f"{values} values are not {heads} heads of one width")
    return values // heads
