"""The experts of a mixture as one part: all experts of a layer. A router outside of it chooses among them.

Recognizes the classes that transformers marks with `@use_experts_implementation`, others of the same signature,
`forward(hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K])`, and a few that are called in other ways.
Attributes of the instance tell the layout of its weights. The gate is recognized by the values that it returns, because
classes override it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from infuse.architectures.foreign.adapters import is_adapter
from infuse.architectures.foreign.expert_roles import roles_of
from infuse.architectures.foreign.plain import linears, patched
from infuse.architectures.packing import BY_EXPERT, Fill, Heads, StackedExperts
from infuse.architectures.part import COLUMN, EXPERT, INNER, ROW, Extent, Matrix, PartShape, Share
from infuse.ground.activations import ACTIVATIONS, ExpertGate
from infuse.ground.authors import LIBRARIES, package_of, users_methods
from infuse.ground.errors import SpecMismatch

_MARKS = "transformers.integrations.moe"  # the module of the forward that the decorator gives to a class
_PROBES = 24  # values of gate and of up on which a gate is compared with ours
_PROBE_TOLERANCE = 1e-5  # some gates round to float32; the two forms of gelu differ by up to 5e-4
_SIGNATURE = ("hidden_states", "top_k_index", "top_k_weights")
# How a module of experts is called and what it returns; layers/mixture/called_experts.py has the calls.
ROUTES = "by routes"  # _SIGNATURE
BATCHES = "by routes, in batches"  # _SIGNATURE, but hidden states and result are [B, T, H]: DBRX
ONE_HOT = "by one-hot routes"  # (hidden_states [T, H], selected_experts [T, 1, E], routing_weights [T, 1]): Switch
# (hidden_states [T, H], router_mask [T, E], router_probs [T, E]): NLLB-MoE, see `_takes_masks`
MASKS = "by masks"
EVERY = "with every expert's tokens"  # (hidden_states [E * T, H], zeros where an expert is not chosen): Llama 4
_ONE_HOT_SIGNATURE = ("hidden_states", "selected_experts", "routing_weights")
# Classes of transformers that our experts do not compute, and why.
_STAY: Mapping[str, str] = MappingProxyType(
    {
        "LongcatFlashExperts": "its last experts return their input and have first matrices without second ones",
        "NllbMoeExperts": "its router passes a mask in place of the numbers of experts",
        "JetMoeParallelExperts": "it holds one of its experts' two products; what is between them is outside of it",
    }
)
# Attributes that the decorator writes to each instance, and their values for a class without it.
_LAYOUT: Mapping[str, bool] = MappingProxyType(
    {
        "has_gate": True,
        "has_bias": False,
        "is_concatenated": True,
        "is_transposed": False,
        "has_post_expert_norm": False,
        "_is_expert_parallel": False,
    }
)
_ROUTER_NAMES = ("router", "gate", "gating", "classifier", "wg")


@dataclass(frozen=True)
class ExpertsShape(PartShape):
    """Dimensions and settings of the experts of one layer. `gate.first` is the number of the first one held here.

    The first matrices of all experts are one matrix [count * rows, hidden], where rows = 2 * inner ([gate | up]) if
    gated; the second ones are one matrix [count * hidden, inner]. Ranks get whole experts, split the width of each, or
    both.
    """

    count: int
    hidden: int
    inner: int
    gate: ExpertGate
    up_bias: bool = False
    down_bias: bool = False
    call: str = ROUTES

    @property
    def rows(self) -> int:
        """Rows of one expert's first matrix."""
        return self.inner * (2 if self.gate.gated else 1)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        sections = range(self.rows // self.inner)  # gate and up, or up alone
        of_up = tuple(Extent(INNER, self.inner, expert=expert) for expert in range(self.count) for _ in sections)
        up, down = (self.count * self.rows, self.hidden), (self.count * self.hidden, self.inner)
        rows = Extent(EXPERT, self.count, self.hidden)
        return (
            Matrix("up", *up, self.up_bias, COLUMN, of_up, op="experts"),
            Matrix("down", *down, self.down_bias, ROW, (Extent(INNER, self.inner),), op="experts", experts=rows),
        )

    def of_rank(self, share: Share) -> ExpertsShape:
        first, last = share.own[EXPERT]
        return replace(
            self,
            count=last - first,
            inner=share.count(INNER),
            gate=self.gate._replace(first=self.gate.first + first),
            down_bias=self.down_bias and share.own[INNER][0] == 0,
        )


@dataclass(frozen=True)
class BoundExperts:
    """The shape of one module of experts and the fills from its parameters."""

    shape: ExpertsShape
    fills: tuple[Fill, ...]


def is_experts(module: nn.Module) -> bool:
    """Whether the module computes experts that its caller chooses."""
    return _call(module) is not None or _stays(module) is not None


def _stays(module: nn.Module) -> str | None:
    """Why experts of this class of transformers stay; None for other classes."""
    cls = type(module)
    return _STAY.get(cls.__name__) if cls.__module__.startswith("transformers.") else None


def _call(module: nn.Module) -> str | None:
    """How the module of experts is called; None if it is not one that ours can replace."""
    forward: Any = type(module).forward
    if getattr(forward, "__globals__", {}).get("__name__") == _MARKS:
        return ROUTES
    in_dict = isinstance(module, nn.ModuleDict)
    if not in_dict and (not hasattr(module, "num_experts") or _stays(module)):
        return None
    arguments = tuple(inspect.signature(forward).parameters)[1:]
    if in_dict:
        return ONE_HOT if arguments == _ONE_HOT_SIGNATURE else None
    if "gate_up_proj" in module._parameters:
        return {_SIGNATURE: ROUTES, _SIGNATURE[:1]: EVERY}.get(arguments)
    flat = getattr(module, "mlp", None)
    is_flat = isinstance(flat, nn.Module) and tuple(flat._parameters) == ("w1", "v1", "w2")
    return BATCHES if is_flat and arguments == _SIGNATURE else None


def experts_in(module: nn.Module, path: str = "") -> Iterator[str]:
    """Paths, from the root, of the modules of experts in `module`, whose own path is `path`."""
    for name, child in module.named_modules():
        if is_experts(child):
            yield ".".join(part for part in (path, name) if part)


def router_paths(model: nn.Module) -> frozenset[str]:
    """Paths of the linears beside experts that choose among them or weigh them: routers and gates of shared experts.

    Experts are modules that `is_experts` accepts, and any module named "experts". A linear beside them counts if it has
    one output, one output per expert, or a router's name.
    """
    paths: set[str] = set()
    for path, experts in list(model.named_modules()):
        where, _, last = path.rpartition(".")
        if last != "experts" and not is_experts(experts):
            continue
        counts = (1, getattr(experts, "num_experts", len(experts._modules)))
        for name, shape in linears(model.get_submodule(where), where):
            inside = name.removeprefix(f"{where}.").split(".")
            named = inside[-1] in _ROUTER_NAMES or "router" in inside
            if not name.startswith(f"{path}.") and (shape.outputs in counts or named):
                paths.add(name)
    return frozenset(paths)


def drops_tokens(model: nn.Module) -> bool:
    """Whether experts in the model take a limited number of tokens, so that padding may keep others out."""
    return any(hasattr(module, "expert_capacity") for module in model.modules())


def bind_experts(module: nn.Module, caller: nn.Module, *, by_mask: bool = False) -> BoundExperts:
    """Read layout, sizes and gate of a module of experts, live or on meta; `caller` is its parent module.

    `by_mask`: they are called so, by a router that is part of the same block. SpecMismatch lists what our experts do
    not support.
    """
    experts: Any = module
    told = {name: bool(getattr(experts, name, default)) for name, default in _LAYOUT.items()}
    name, call = type(module).__name__, MASKS if by_mask else _call(module)
    if differences := list(_differences(module, caller, told, by_mask=by_mask)):
        raise SpecMismatch(name, differences)
    if call in (ONE_HOT, MASKS):
        children = module.named_children()
        bound = bind_listed({path: child for path, child in children if not isinstance(child, nn.Dropout)}, hidden=None)
        return replace(bound, shape=replace(bound.shape, call=call))
    if call == BATCHES:
        return _bind_flat(experts)
    if call == EVERY:
        told["is_transposed"] = True
    first = "gate_up_proj" if told["has_gate"] else "up_proj"
    leaves = (first, "down_proj") + ((f"{first}_bias", "down_proj_bias") if told["has_bias"] else ())
    tensors = dict(experts.named_parameters())
    if set(tensors) != set(leaves):
        raise SpecMismatch(name, [f"its parameters are {', '.join(tensors)}; understood: {', '.join(leaves)}"])
    sizes = _sizes(experts.num_experts, tensors[first], tensors["down_proj"], told)
    if sizes is None:
        shapes = ", ".join(f"{leaf} {list(tensor.shape)}" for leaf, tensor in tensors.items())
        raise SpecMismatch(name, [f"{shapes} are not the matrices of {experts.num_experts} experts"])
    gate = _gate(experts, told)
    if isinstance(gate, str):
        raise SpecMismatch(name, [gate])
    shape = ExpertsShape(experts.num_experts, *sizes, gate, told["has_bias"], told["has_bias"], call or ROUTES)
    turned, interleaved = told["is_transposed"], told["has_gate"] and not told["is_concatenated"]
    weights = (StackedExperts(turned, interleaved), StackedExperts(turned))
    layouts = (*weights, StackedExperts(interleaved=interleaved), StackedExperts())
    targets = ("up.weight", "down.weight", "up.bias", "down.bias")
    parameters = zip(targets, leaves, layouts, strict=False)
    return BoundExperts(shape, tuple(Fill(target, (leaf,), stacked=stacked) for target, leaf, stacked in parameters))


def bind_listed(experts: Mapping[str, nn.Module], hidden: int | None) -> BoundExperts:
    """Read experts that are separate modules, by path; `hidden` None: the input width of their first linear.

    SpecMismatch lists what our experts do not support.
    """
    paths, members = tuple(experts), list(experts.values())
    if not members:
        raise SpecMismatch("experts", ["it has no experts"])
    shapes = dict(linears(members[0]))
    width = next((shape.inputs for shape in shapes.values()), 0) if hidden is None else hidden
    roles = roles_of(members[0], width)
    if isinstance(roles, str):
        raise SpecMismatch("experts", [roles])
    if any(_held(expert) != _held(members[0]) for expert in members):
        raise SpecMismatch("experts", ["its experts have different parameters"])
    gate, (*ups, down) = roles
    up_bias, down_bias = shapes[ups[0]].bias, shapes[down].bias
    shape = ExpertsShape(len(members), width, shapes[down].inputs, gate, up_bias, down_bias)
    fills = []
    for target, of, biased in (("up", ups, up_bias), ("down", [down], down_bias)):
        for leaf in ("weight", "bias") if biased else ("weight",):
            sources = (f"{path}.{name}.{leaf}" for path in paths for name in of)
            fills.append(Fill(f"{target}.{leaf}", tuple(sources)))
    return BoundExperts(shape, tuple(fills))


def _held(expert: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in expert.named_parameters()}


def _bind_flat(experts: Any) -> BoundExperts:
    """Read DBRX's experts: gate w1, up v1 and down w2, all [E * I, H], and down is transposed."""
    matrices, count = dict(experts.mlp.named_parameters()), experts.num_experts
    rows, hidden = matrices["w1"].shape
    if {tuple(tensor.shape) for tensor in matrices.values()} != {(rows, hidden)} or rows % count:
        shapes = ", ".join(f"{leaf} {list(tensor.shape)}" for leaf, tensor in matrices.items())
        raise SpecMismatch(type(experts).__name__, [f"{shapes} are not the matrices of {count} experts"])
    probe = _probe(())
    tried = [ExpertGate(name) for name in dict.fromkeys(ACTIVATIONS.values())]
    gate = _alike(lambda h: experts.mlp.activation_fn(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1], probe, probe, tried)
    if isinstance(gate, str):
        raise SpecMismatch(type(experts).__name__, [gate])
    shape = ExpertsShape(count, hidden, rows // count, gate, call=BATCHES)
    up = Fill("up.weight", ("mlp.w1", "mlp.v1"), packing=BY_EXPERT, heads=Heads(count, 0, rows // count))
    down = Fill("down.weight", ("mlp.w2",), stacked=StackedExperts(transposed=True, flat=count))
    return BoundExperts(shape, (up, down))


def _probe(limits: Sequence[float]) -> Tensor:
    """Random values of gate and of up, beyond all limits."""
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(_PROBES, 2 * _PROBES, generator=generator, dtype=torch.float64, device="cpu")
    return probe * (2 * max([*limits, 2.0]))


def _differences(experts: nn.Module, caller: nn.Module, told: Mapping[str, bool], *, by_mask: bool) -> Iterator[str]:
    if by_mask and not _takes_masks(experts):
        yield "they read the router's mask in a way that ours do not"
    elif not by_mask and (why := _stays(experts)):
        yield why
    if patched(experts):
        yield "it has a forward set on the instance"
    if methods := list(_users_methods(experts)):
        yield f"{', '.join(methods)}: a method of your own, which its replacement would not call"
    if is_adapter(caller):
        yield "its adapter (peft) changes its parameters in each call"
    if told["has_post_expert_norm"]:
        yield "each expert has a norm after its second product"
    if told["_is_expert_parallel"]:
        yield "transformers has distributed its experts over ranks"


class _Times(nn.Module):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _takes_masks(experts: nn.Module) -> bool:
    """Whether these experts take the entries of a mask of chosen experts, 0 or 1, for the numbers of experts.

    NLLB-MoE's do in transformers 5: expert 1 computes what was chosen first, expert 0 all other entries that have a
    probability, and no other expert is used.
    """
    made = nn.ModuleDict({f"expert_{number}": _Times(10.0**number) for number in range(4)})
    made.num_experts, made.moe_token_dropout = 4, 0.0  # type: ignore[assignment]
    mask = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]], device="cpu")
    probabilities = torch.tensor([[0.0, 0.0, 0.5, 0.25], [0.125, 0.0, 0.0, 0.0]], device="cpu")
    forward: Any = type(experts).forward
    try:
        with torch.no_grad():
            found = forward(made, torch.ones(2, 1, device="cpu"), mask, probabilities)
    except Exception:  # another class's forward may need what these lack
        return False
    return found.tolist() == [[10 * 0.5 + 0.25], [0.125]]


def _users_methods(experts: nn.Module) -> Iterator[str]:
    """The user's methods in experts of a library's class; experts that are the user's own are read as they are."""
    known = LIBRARIES - {"torch"}
    of_library = any(package_of(kind) in known for kind in type(experts).__mro__)
    for kind in dict.fromkeys(type(module) for module in experts.modules()):
        yield from users_methods(kind, LIBRARIES if of_library else known)


def _sizes(count: int, up: Tensor, down: Tensor, told: Mapping[str, bool]) -> tuple[int, int] | None:
    """Hidden and inner width; None if the two parameters do not fit together."""
    if up.dim() != 3 or down.dim() != 3:
        return None
    if told["is_transposed"]:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    _, hidden, inner = down.shape
    rows = inner * (2 if told["has_gate"] else 1)
    return (hidden, inner) if (*up.shape, *down.shape) == (count, rows, hidden, count, hidden, inner) else None


def _gate(experts: Any, told: Mapping[str, bool]) -> ExpertGate | str:
    """Find our gate that matches the module's on random numbers beyond all its limits; a reason if none does."""
    attributes = {name: value for name, value in vars(experts).items() if "limit" in name}
    limits = sorted({float(value) for value in attributes.values() if isinstance(value, (int, float))} - {math.inf})
    probe = _probe(limits)
    names = tuple(dict.fromkeys(ACTIVATIONS.values()))
    if not told["has_gate"]:
        return _alike(experts.act_fn, probe, probe, [ExpertGate(name, gated=False) for name in names])
    laid = probe if told["is_concatenated"] else torch.cat([probe[:, 0::2], probe[:, 1::2]], dim=1)
    gate = getattr(experts, "_apply_gate", None) or (lambda h: experts.act_fn(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1])
    clamps = [(0.0, False), *((limit, after) for limit in limits for after in (False, True))]
    tried = [
        ExpertGate(name, True, limit, after, offset)
        for limit, after in clamps
        for offset in (0.0, 1.0)
        for name in names
    ]
    return _alike(gate, probe, laid, tried)


def _alike(
    original: Callable[[Tensor], Tensor], probe: Tensor, laid: Tensor, tried: list[ExpertGate]
) -> ExpertGate | str:
    """The first gate in `tried` that returns for `laid` what `original` returns for `probe`; a reason if none does."""
    try:
        with torch.no_grad():
            wanted = original(probe.clone())
    except Exception as error:  # it may read what a probe does not have
        return f"its gate cannot be tried on numbers: {type(error).__name__}: {error}".partition("\n")[0]
    allowed = _PROBE_TOLERANCE * (wanted.abs() + 0.1)
    for gate in tried:
        output = gate.inner(laid)
        if output.shape == wanted.shape and bool(((output - wanted).abs() <= allowed).all()):
            return gate
    return "its gate is none that our experts have: act(gate) * (up + offset), both clamped or not"
