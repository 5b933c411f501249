"""Run a whole block in one C++ call, for decode steps of a few new tokens and for encoders (all blocks: stack.py).

All of its ops must be C++ bodies, and no module inside may have hooks. Otherwise the block runs part by part, with the
same result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import getitem
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from infuse.architectures.attention import AttentionShape, NoPosition
from infuse.architectures.layer import LayerShape
from infuse.architectures.moe import AVERAGE
from infuse.architectures.norm import RMS, NormShape
from infuse.architectures.program import ADD, ADD_NORM, ADD_NORM_STREAM, NORMS, Program
from infuse.layers.attention import Attention
from infuse.layers.cache import KVCache
from infuse.layers.embedding import QuantizedEmbedding
from infuse.layers.experts import Experts
from infuse.layers.inputs import Inputs
from infuse.layers.linear import Quantized, QuantizedLinear, has_global_hooks, has_no_hooks, rounds_activations
from infuse.layers.mlp import MLP
from infuse.layers.moe import MoE
from infuse.layers.norm import Norm
from infuse.native import DTYPES, limits
from infuse.ops.cpu.activation import ACTIVATION_NUMBERS
from infuse.ops.cpu.layer import STEPS, encoder_layer, layers_step
from infuse.ops.cpu.linear import takes_tiles
from infuse.ops.cpu.quantized_linear import code_of
from infuse.ops.cpu.router import numbers

# A norm's number in C++, beside 0 (RMSNorm) and 1 (LayerNorm): RMSNorm as transformers writes it.
ROUNDED_RMS = 2


class Node(NamedTuple):
    """A module of a block, and what it must still be in a call: of the class `wanted`, or, if that is None, of one
    with this `forward`, since attention and routers are of classes mixed from ours and the original's.
    """

    owner: int  # index of the owner among the roots and nodes; the roots come first
    name: str
    wanted: type | None
    forward: Any = None


class OneCall:
    """The programs of blocks encoded for C++, and where to find the tensors of a call.

    Whether hooks hear the modules around the blocks is not checked here.

    Integers and reals are in the order in which `program_of` (ops/cpu/src/binding_layer.h) reads them: each step,
    followed by the numbers of its part. Weights are indices into the call's tensors (-1: none).
    """

    def __init__(self, roots: Sequence[Any], programs: Sequence[Program | str]):
        """`roots`: blocks with their programs, and modules around a decoder's blocks with their steps, in order."""
        self._count = len(roots)
        self._nodes: list[Node] = []
        self._places: list[tuple[int, str, str]] = []  # of each tensor: index of its node, dict that holds it, name
        self._absent: list[tuple[int, str, str]] = []  # the same of tensors that are None
        self._quantized: list[int] = []  # nodes that may hold a weight in another layout than the kernels'
        self._experts_of: list[tuple[int, int, int]] = []  # nodes: experts, their matrices
        self._routers: list[int] = []  # nodes
        self._found: Found | None = None
        integers: list[int] = []
        reals: list[float] = []
        for owner, (root, program) in enumerate(zip(roots, programs, strict=True)):
            if isinstance(program, str):
                integers += [STEPS.index(program), *self._around(root, owner, reals)]
            else:
                integers += self._block(root, program, owner, reals)
        # Tensors, because passing these lists would take 5 us in each call.
        self._numbers = torch.tensor(integers, device="cpu"), torch.tensor(reals, dtype=torch.float64, device="cpu")

    def _block(self, block: Any, program: Program, owner: int, reals: list[float]) -> list[int]:
        (attn,) = block.shape.mixers.values()
        integers = [STEPS.index("layer"), attn.window] if attn.causal else []
        for step in program:
            name = step.part
            part = getattr(block, name) if name else None
            integers.append(STEPS.index("moe" if isinstance(part, MoE) else step.does))
            if step.does in (ADD, ADD_NORM, ADD_NORM_STREAM):
                reals.append(step.scale)
            if isinstance(part, Norm):
                integers += self._norm(owner, name, part, reals)
            elif isinstance(part, Attention):
                integers += self._attention(part, self._branch(owner, name, part), reals)
            elif isinstance(part, MLP):
                integers += self._mlp(part, self._branch(owner, name, part))
            elif isinstance(part, MoE):
                integers += self._moe(part, self._branch(owner, name, part), reals)
        return integers

    def _around(self, part: Any, node: int, reals: list[float]) -> list[int]:
        """Encode the embedding, the last norm or the head of a decoder."""
        if isinstance(part, Norm):
            return self._norm_of(node, part, reals)
        if isinstance(part, (nn.Embedding, QuantizedEmbedding)):
            return self._matrix(node, part, part.num_embeddings)
        if isinstance(part, (nn.Linear, QuantizedLinear)):
            return self._matrix(node, part, part.out_features)
        reals += [part.variance_epsilon, 0.0]
        return [ROUNDED_RMS, self._place(node, "_parameters", "weight"), -1]

    def _attention(self, part: Attention, owner: int, reals: list[float]) -> list[int]:
        shape = part.shape
        reals += [shape.scale, shape.softcap]
        integers = [shape.heads, shape.kv_heads, shape.head_width, int(part.positions.interleaved)]
        integers.append(self._parameter(owner, part, "sinks"))
        integers += [*self._linear(owner, "qkv", part.qkv), *self._linear(owner, "out", part.out)]
        for name in ("q_norm", "k_norm"):
            norm: Any = getattr(part, name)
            if norm is None:
                self._node(owner, name, NoneType)
                integers.append(0)
            else:
                integers += [1, *self._norm(owner, name, norm, reals)]
        return integers

    def _mlp(self, part: MLP, owner: int) -> list[int]:
        integers = [ACTIVATION_NUMBERS[part.activation], int(part.gated)]
        return [*integers, *self._linear(owner, "up", part.up), *self._linear(owner, "down", part.down)]

    def _moe(self, part: MoE, owner: int, reals: list[float]) -> list[int]:
        router: Any = part.router
        rule = numbers(router.shape.routing, router.shape.experts)
        assert rule is not None
        reals += rule[1]
        integers, node = list(rule[0]), self._branch(owner, "router", router)
        held = "_parameters" if "correction" in router._parameters else "_buffers"
        self._routers.append(node)
        integers += [self._place(node, "_parameters", "weight"), self._parameter(node, router, "bias")]
        integers += [self._tensor(node, held, "correction", router.correction), int(part.shape.combine == AVERAGE)]
        reals.append(part.shape.scale)
        integers += self._experts(part.experts, self._branch(owner, "experts", part.experts), reals)
        shared: Any = part.shared
        if shared is None:
            self._node(owner, "shared", NoneType)
            integers.append(0)
        else:
            integers += [1, *self._mlp(shared, self._branch(owner, "shared", shared))]
        if part.shared_gate is None:
            self._node(owner, "shared_gate", NoneType)
            return [*integers, -1]
        gate = self._node(owner, "shared_gate", nn.Linear)
        self._absent.append((gate, "_parameters", "bias"))
        return [*integers, self._place(gate, "_parameters", "weight")]

    def _experts(self, part: Experts, owner: int, reals: list[float]) -> list[int]:
        gate = part.shape.gate
        reals += [gate.limit, gate.up_offset]
        integers = [part.shape.inner, ACTIVATION_NUMBERS[gate.activation], int(gate.gated), int(gate.limit_after)]
        integers += [gate.first, *self._linear(owner, "up", part.up), *self._linear(owner, "down", part.down)]
        last = self._count + len(self._nodes) - 1
        self._experts_of.append((owner, last - 1, last))
        return integers

    def _norm(self, owner: int, name: str, norm: Norm, reals: list[float]) -> list[int]:
        return self._norm_of(self._node(owner, name, Norm), norm, reals)

    def _norm_of(self, node: int, norm: Norm, reals: list[float]) -> list[int]:
        reals += [norm.shape.eps, norm.shape.offset]
        kind = int(norm.shape.kind != RMS)
        return [kind, self._parameter(node, norm, "weight"), self._parameter(node, norm, "bias")]

    def _linear(self, owner: int, name: str, linear: Any) -> list[int]:
        """Encode a linear, or one matrix of all experts."""
        return self._matrix(self._node(owner, name, type(linear)), linear, linear.out_features)

    def _matrix(self, node: int, module: nn.Module, rows: int) -> list[int]:
        if isinstance(module, Quantized):
            self._quantized.append(node)
            code = code_of(str(module.format))
            places = [*(self._place(node, "_buffers", name) for name in module.tensors), -1, -1][:3]
        else:
            code, places = -1, [self._place(node, "_parameters", "weight"), -1, -1]
        return [code, rows, *places, self._parameter(node, module, "bias")]

    def _branch(self, owner: int, name: str, part: nn.Module) -> int:
        self._nodes.append(Node(owner, name, None, type(part).forward))
        return self._count + len(self._nodes) - 1

    def _node(self, owner: int, name: str, wanted: type) -> int:
        self._nodes.append(Node(owner, name, wanted))
        return self._count + len(self._nodes) - 1

    def _parameter(self, node: int, part: nn.Module, name: str) -> int:
        return self._tensor(node, "_parameters", name, part._parameters.get(name))

    def _tensor(self, node: int, held: str, name: str, tensor: Tensor | None) -> int:
        """Return the index of a tensor; -1 if it is None."""
        if tensor is not None:
            return self._place(node, held, name)
        self._absent.append((node, held, name))
        return -1

    def _place(self, node: int, held: str, name: str) -> int:
        self._places.append((node, held, name))
        return len(self._places) - 1

    def takes(self, *roots: nn.Module) -> bool:
        """Whether the modules of these roots are still those that the call was made for, and nothing listens."""
        return self._tensors(roots) is not None

    def _tensors(self, roots: Sequence[nn.Module]) -> list[Tensor] | None:
        """Collect the tensors of the call; None if a module has been exchanged or has hooks."""
        found = self._found
        if found is None or not found.are_in_place():
            self._found = found = self._find(roots)
        if found is None or not found.is_unmodified() or has_global_hooks():
            return None
        tensors = [*map(getitem, *found.tensors)]
        return None if [1 for tensor in tensors if tensor is None] else tensors

    def _find(self, roots: Sequence[nn.Module]) -> Found | None:
        """Find the modules of the call; None if one has been exchanged for another kind."""
        dicts: list[dict[str, Any]] = [root.__dict__ for root in roots]  # and those of all nodes
        for owner, name, wanted, forward in self._nodes:
            part = dicts[owner]["_modules"].get(name)
            kind: Any = type(part)
            if kind is not wanted and (wanted is not None or getattr(kind, "forward", None) is not forward):
                return None
            dicts.append({} if part is None else part.__dict__)
        owners = [dicts[owner]["_modules"] for owner, _, _, _ in self._nodes]
        modules = [owner[node.name] for owner, node in zip(owners, self._nodes, strict=True)]
        routers = [modules[node - self._count] for node in self._routers]
        parts = [part for part in modules if part is not None and not any(part is router for router in routers)]
        return Found(
            places=(owners, [node.name for node in self._nodes]),
            modules=modules,
            kinds=[*map(type, modules)],
            parts=parts,
            attributes=[part.__dict__ for part in parts],
            hooks=[hooks for part in parts for hooks in (part._forward_pre_hooks, part._forward_hooks)],
            routers=routers,
            tensors=([dicts[node][held] for node, held, _ in self._places], [name for _, _, name in self._places]),
            absent=[(dicts[node][held], name) for node, held, name in self._absent],
            quantized=[dicts[node] for node in self._quantized],
            experts=[tuple(dicts[node] for node in nodes) for nodes in self._experts_of],
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_found": None}  # a copy of the block has its own modules


class Found(NamedTuple):
    """The modules of a call as dicts, so that a step can check within 2 us a block that they are still the same."""

    places: tuple[list[dict[str, Any]], list[str]]  # of each module: its owner's modules, its name there
    modules: list[nn.Module]
    kinds: list[type]
    parts: list[nn.Module]  # each module that is there but routers
    attributes: list[dict[str, Any]]  # of each of these
    hooks: list[Mapping[int, Callable[..., Any]]]  # of each of these: those before its forward, those after it
    routers: list[nn.Module]  # hooks may hear them: see StepCall
    tensors: tuple[list[dict[str, Any]], list[str]]  # of each tensor: dict that holds it, name
    absent: list[tuple[dict[str, Any], str]]  # the same of tensors that are None
    quantized: list[dict[str, Any]]
    experts: list[tuple[dict[str, Any], ...]]  # attributes of experts, then of their matrices

    def are_in_place(self) -> bool:
        """Whether no module has been exchanged and none has become of another class."""
        # Lists are compared by identity first.
        return [*map(dict.get, *self.places)] == self.modules and [*map(type, self.modules)] == self.kinds

    def is_unmodified(self) -> bool:
        """Whether the kernels compute what the modules would: no hooks, and weights in the kernels' layouts."""
        if any(self.hooks) and not all(map(has_no_hooks, self.parts)):
            return False
        if [1 for own in self.attributes if "forward" in own]:
            return False
        if [1 for held, name in self.absent if held.get(name) is not None]:
            return False
        if [1 for own in self.quantized if not own["prepared"]]:
            return False
        for experts, *matrices in self.experts:
            named = experts.get("named")
            if named is not None and not named.is_ours:
                return False
            if [1 for own in matrices if own.get("first_use") is not None]:  # Python checks the pages of mapped experts
                return False
        return True


class BlockCall(OneCall):
    """One call of one block."""

    def __init__(self, block: Any, program: Program):
        super().__init__((block,), (program,))
        (attention,) = block.shape.mixers.values()
        self._rows = attention.cached_rows

    def __call__(self, block: nn.Module, attention: Any, x_BTC: Tensor, inputs: Inputs) -> Tensor | None:
        """Return the block's result; None if it has to run part by part."""
        raise NotImplementedError


class StepCall(BlockCall):
    """One call for a few new tokens of a decoder."""

    def __init__(self, block: nn.Module, program: Program, index: int):
        super().__init__(block, program)
        few = limits()
        self.index, self.most_rows, self.most_tokens = index, few.plain_rows, few.few_tokens
        if rounds_activations(block):
            self.most_rows = min(few.plain_rows, few.code_rows_integer)

    def __call__(self, block: nn.Module, attention: Any, x_BTC: Tensor, inputs: Inputs) -> Tensor | None:
        batch, tokens, _ = x_BTC.shape
        cache = inputs.cache
        if batch * tokens > self.most_rows or tokens > self.most_tokens or not isinstance(cache, KVCache):
            return None
        if inputs.want_weights or inputs.causal is False:
            return None
        slot, tensors = cache.slot(self.index), self._tensors((block,))
        if tensors is None or slot.place is not None or slot.row_lengths is not None:
            return None
        start = slot.reserve(batch, tokens, self._rows, x_BTC, attention.filler)
        assert slot.key_storage is not None and slot.value_storage is not None
        positions, mask = attention._modules["positions"], inputs.mask
        cos_sin, bias = positions.cos_sin(inputs), positions.bias(inputs, batch, start + tokens)
        if mask is not None:
            mask = attention.allowed(mask, start + tokens, x_BTC.dtype)
        storage = (slot.key_storage,), (slot.value_storage,)
        step = partial(layers_step, x_BTC, tensors, cos_sin, mask, bias, storage, start, self._numbers)
        assert self._found is not None
        routers = self._found.routers
        out = step() if all(map(has_no_hooks, routers)) else _routed_by(routers[0], step)
        if out is not None:
            slot.advance(tokens)
        return out


def _routed_by(router: nn.Module, step: Callable[..., Tensor | None]) -> Tensor | None:
    """Make the step with the routes that the router and its hooks give. It appends the same keys twice."""
    y_BTC = step(before_experts=True)
    if y_BTC is None:
        return None
    y_TC = y_BTC.flatten(0, 1)
    _, weights, index = router(y_TC)
    if index.dim() != 2 or weights.shape != index.shape or len(index) != len(y_TC):
        return None
    weights = weights if weights.dtype in DTYPES else weights.float()
    return step(routes=(index.to(torch.int64).contiguous(), weights.contiguous()))


class EncoderCall(BlockCall):
    """One call for many tokens of an encoder, without causal order."""

    def __call__(self, block: nn.Module, attention: Any, x_BTC: Tensor, inputs: Inputs) -> Tensor | None:
        if x_BTC.dtype is torch.float16 or inputs.cache is not None or inputs.want_weights or inputs.causal:
            return None
        if torch.jit.is_tracing():  # which fails at results that may be None; the parts say what to do instead
            return None
        tensors = self._tensors((block,))
        if tensors is None:
            return None
        mask = None if inputs.mask is None else attention.allowed(inputs.mask, x_BTC.shape[1], x_BTC.dtype)
        return encoder_layer(x_BTC, tensors, mask, self._numbers)


def make_one_call(block: Any, program: Program, bodies: Mapping[str, str], index: int | None) -> BlockCall | None:
    """Make the one call of a block; None for blocks that run part by part.

    That is if one of `bodies` is not the C++ one, a part has no kernel, ranks share the block, or PyTorch's products
    are faster.
    """
    shape: LayerShape = block.shape
    attn = next(iter(shape.mixers.values()))
    known = {*shape.mixers, "mlp", *NORMS}
    if type(attn) is not AttentionShape or len(shape.mixers) > 1 or not known.issuperset(shape.parts):
        return None
    norms = [part for part in (*shape.parts.values(), attn.q_norm, attn.k_norm) if isinstance(part, NormShape)]
    if any(norm.whole or (norm.weight is not None and len(norm.weight) != 1) for norm in norms):
        return None
    if attn.clip or attn.norm_after or attn.gate is not None or attn.head_counts or set(bodies.values()) != {"cpu"}:
        return None
    if type(block.mlp) is MoE:
        router = block.mlp.router.shape
        if block.mlp.combines or not attn.causal or numbers(router.routing, router.experts) is None:
            return None
    elif type(block.mlp) is not MLP:
        return None
    if attn.causal:
        return None if index is None else StepCall(block, program, index)
    plain = all(step.scale == 1.0 for step in program) and not attn.window and isinstance(attn.position, NoPosition)
    tiled = any(map(takes_tiles, (torch.bfloat16, torch.float32)))
    return EncoderCall(block, program) if plain and tiled else None
