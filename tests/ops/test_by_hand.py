"""References against computations of their own in float64: number by number, as the definition reads."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from infuse import ops
from infuse.ground.activations import ACTIVATIONS
from infuse.ground.device import Device
from infuse.ops import Case, registered
from infuse.ops.cache_rows import values_of
from tests.support.tolerance import assert_near


def cases(name: str) -> list[Case]:
    maker = registered()[name].case_maker
    assert maker is not None
    return list(maker(torch.float32, torch.device("cpu")))


def norm_by_hand(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, centred: bool
) -> Tensor:
    out = torch.empty_like(x, dtype=torch.float64)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in x.shape[:-1])).view(-1, x.dim() - 1).tolist():
        row = x[tuple(at)].double()
        if centred:
            row = row - row.sum() / row.numel()
        row = row / ((row * row).sum() / row.numel() + eps) ** 0.5
        head = at[-1] if weight is not None and weight.dim() > 1 else ...
        row = row if weight is None else row * (weight[head].double() + offset)
        out[tuple(at)] = row if bias is None else row + bias[head].double()
    return out


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"])
def test_norm_by_hand(name: str) -> None:
    for case in cases(name):
        args = list(case.args)
        x = args.pop(0)
        if name.startswith("add_"):
            x = x + args.pop(0)
        weight, bias = args[0], args[1] if "layer" in name else None
        out = registered()[name].reference(*case.args)
        wanted = norm_by_hand(x, weight, bias, args[-2], args[-1], "layer" in name)
        assert_near(out[1] if isinstance(out, tuple) else out, wanted, torch.float32, case.label)
        if name.startswith("add_"):
            assert torch.equal(out[0], x)


def experts_by_hand(args: tuple) -> Tensor:
    """One token, one route at a time, in float64, as the definition reads."""
    x, index, weights, up, up_bias, down, down_bias, *gate = (
        arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args
    )
    act, gated, limit, limit_after, offset, first = gate
    width, function = x.shape[1], ACT2FN[{"gelu_tanh": "gelu_pytorch_tanh"}.get(act, act)]
    count = len(down) // width
    bias = [torch.zeros(len(m), dtype=torch.float64) if b is None else b for m, b in ((up, up_bias), (down, down_bias))]
    out = torch.zeros_like(x)
    for t, k in torch.cartesian_prod(*(torch.arange(n) for n in index.shape)).tolist():
        e = int(index[t, k]) - first
        if not 0 <= e < count:
            continue
        h = up.view(count, -1, width)[e] @ x[t] + bias[0].view(count, -1)[e]
        if gated:
            g, h = h[: len(h) // 2], h[len(h) // 2 :]
            g = function(g.clamp(max=limit) if limit and not limit_after else g)
            g, h = (g.clamp(max=limit), h.clamp(-limit, limit)) if limit else (g, h)
            h = g * (h + offset)
        else:
            h = function(h)
        out[t] += weights[t, k] * (down.view(count, width, -1)[e] @ h + bias[1].view(count, -1)[e])
    return out


def test_experts_by_hand() -> None:
    for case in cases("experts"):
        assert_near(ops.experts(*case.args), experts_by_hand(case.args), torch.float32, case.label)


def attention_by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """One query, one head, one key at a time, in float64."""
    k, v = values_of(k), values_of(v)
    batch, heads, tokens, _ = q.shape
    kv_heads, length = k.shape[1:3]
    out = torch.zeros(batch, tokens, heads, v.shape[3], dtype=torch.float64)
    mask = None if mask is None else mask.expand(batch, heads, tokens, length)
    bias = None if bias is None else bias.expand(batch, heads, tokens, length)
    for b, h, t in torch.cartesian_prod(torch.arange(batch), torch.arange(heads), torch.arange(tokens)).tolist():
        key_head, place = h * kv_heads // heads, length - tokens + t
        scores: dict[int, float] = {}
        for j in range(length):
            hidden = mask is not None and mask.dtype == torch.bool and not mask[b, h, t, j]
            if hidden or (causal and j > place) or (window and j <= place - window):
                continue
            score = float(q[b, h, t].double() @ k[b, key_head, j].double()) * scale
            if softcap:
                score = float(torch.tensor(score / softcap, dtype=torch.float64).tanh()) * softcap
            score += 0.0 if bias is None else float(bias[b, h, t, j])
            scores[j] = score + (float(mask[b, h, t, j]) if mask is not None and mask.dtype != torch.bool else 0.0)
        if scores:
            weights = torch.tensor(list(scores.values()), dtype=torch.float64)
            weights = (weights - weights.max()).exp()
            sink = 0.0 if sinks is None else float((sinks[h].double() - max(scores.values())).exp())
            out[b, t, h] = (weights / (weights.sum() + sink)) @ v[b, key_head, list(scores)].double()
    return out


ATTENTION = sorted(
    name
    for name, body in registered()["attention"].bodies.items()
    if body.needs(Device.of("cpu"), torch.float32) is None
)


@pytest.mark.parametrize("body", ATTENTION)
def test_attention_by_hand(body: str) -> None:
    for case in cases("attention"):
        if case.args[2].shape[1] * case.args[0].shape[2] < 12:
            assert_near(ops.attention.body(body)(*case.args), attention_by_hand(*case.args), torch.float32, case.label)


@pytest.mark.parametrize("body", ATTENTION)
@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize(("causal", "window"), [(False, 0), (True, 0), (True, 2)])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_row_that_may_look_nowhere_is_zeros(
    body: str, softcap: float, causal: bool, window: int, tokens: int, with_bias: bool
) -> None:
    q = torch.randn(2, 4, tokens, 8)
    k, v = torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    mask = torch.rand(2, 1, tokens, 6) > 0.3
    mask[0, :, 0] = False
    bias = torch.randn(2, 4, 1, 6) if with_bias else None
    args = (q, k, v, mask, bias, 0.3, causal, window, softcap)
    found = ops.attention.body(body)(*args)
    assert torch.equal(found[0, 0], torch.zeros(4, 8))
    assert_near(found, attention_by_hand(*args), torch.float32)


def test_attention_weights_add_up_to_the_attention() -> None:
    for case in cases("attention"):
        q, k, v, *rest = case.args
        weights = ops.attention_weights(q, k, *rest)
        by_hand = (
            attention_by_hand(q, k, torch.eye(k.shape[2]).expand(*k.shape[:3], -1), *rest) if q.shape[1] < 6 else None
        )
        if by_hand is not None:
            assert_near(weights, by_hand.transpose(1, 2), torch.float32, case.label)
        sums = weights.sum(-1)
        if rest[-1] is not None:
            assert torch.all(sums < 1), case.label
        else:
            assert torch.all(torch.isclose(sums, torch.ones(())) | (sums == 0)), case.label


def rotary_by_hand(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Pair by pair: (a, b) → (a cos - b sin, b cos + a sin) with the columns of each half's own position."""
    out, width = x.double().clone(), cos.shape[-1]
    cos, sin = (table.double().expand(x.shape[0], -1, -1).unsqueeze(2) for table in (cos, sin))
    for i in range(width // 2):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + width // 2)
        a, b = x[..., first].double(), x[..., second].double()
        out[..., first] = a * cos[..., first] - b * sin[..., first]
        out[..., second] = b * cos[..., second] + a * sin[..., second]
    return out


def test_rotary_by_hand() -> None:
    for case in cases("rotary"):
        assert_near(ops.rotary.reference(*case.args), rotary_by_hand(*case.args), torch.float32, case.label)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turned", [8, 12])
def test_rotary_turns_complex_numbers(interleaved: bool, turned: int) -> None:
    """With tables that models make (each angle for both of a pair), a pair is a complex number times exp(i angle)."""
    x, angles = torch.randn(2, 5, 3, 12), torch.rand(2, 5, turned // 2) * 6.28
    table = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    found = ops.rotary.reference(x, table.cos(), table.sin(), interleaved)
    pairs = x[..., :turned].double().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    cos_sin = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones_like(angles).double(), angles.double()
    ).unsqueeze(2)
    wanted = torch.view_as_real(cos_sin)
    wanted = (wanted if interleaved else wanted.transpose(-1, -2)).flatten(-2)
    assert_near(found[..., :turned], wanted, torch.float32)
    assert torch.equal(found[..., turned:], x[..., turned:])


def test_rotary_append_by_hand() -> None:
    for case in cases("rotary_append"):
        qkv, cos, sin, keys, values, start, heads, interleaved = case.args
        kv_heads, turned = keys.shape[1], qkv if cos is None else rotary_by_hand(qkv, cos, sin, interleaved)
        q = ops.rotary_append.reference(qkv, cos, sin, keys, values, start, heads, interleaved)
        assert_near(q, turned[:, :, :heads].transpose(1, 2), torch.float32, case.label)
        for t in range(qkv.shape[1]):
            wanted = turned[:, t, heads : heads + kv_heads], qkv[:, t, heads + kv_heads :]
            for rows, exact in zip((keys[:, :, start + t], values[:, :, start + t]), wanted, strict=True):
                if rows.dtype == torch.int8:  # within half a step, of which 127 reach the largest value
                    step = exact.double().abs().amax(-1, keepdim=True) / 127
                    assert bool(((values_of(rows) - exact).abs() <= 0.501 * step).all()), case.label
                else:
                    assert_near(rows, exact, torch.float32, case.label)


@pytest.mark.parametrize("theirs", sorted(name for name in ACTIVATIONS if name in ACT2FN))
def test_activation_is_that_of_transformers(theirs: str) -> None:
    x = torch.linspace(-12, 12, 4001)
    gate, up = x.view(1, -1), torch.randn(1, 4001)
    wanted = ACT2FN[theirs](x.double())
    assert_near(ops.activation.reference(x, ACTIVATIONS[theirs]), wanted, torch.float32)
    gated = ops.gated_activation.reference(torch.cat((gate, up), -1), ACTIVATIONS[theirs])
    assert_near(gated, wanted * up.double(), torch.float32)


def test_every_activation_has_a_name_of_transformers() -> None:
    assert set(ACTIVATIONS.values()) == {ACTIVATIONS[name] for name in ACTIVATIONS if name in ACT2FN}


def test_linear_by_hand() -> None:
    """residual + act(norm(x) @ weight.T + bias); activations by transformers' own functions."""
    for case in cases("linear"):
        x, weight, bias, norm, norm_weight, norm_bias, eps, offset, activation, gated, residual = case.args
        wanted = x.double()
        if norm is not None:
            wanted = norm_by_hand(x, norm_weight, norm_bias, eps, offset, norm == "layer")
        wanted = torch.einsum("...i,oi->...o", wanted, weight.double()) + (0 if bias is None else bias.double())
        if activation is not None:
            gate, up = wanted.chunk(2, -1) if gated else (wanted, 1)
            wanted = ACT2FN[activation](gate) * up
        wanted = wanted if residual is None else residual.double() + wanted
        assert_near(ops.linear.reference(*case.args), wanted, torch.float32, case.label)


# ---- recurrent mixers ----


def bodies_here(name: str) -> list[str]:
    return sorted(b for b, body in registered()[name].bodies.items() if not body.needs(Device.of("cpu"), torch.float32))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def convolution_by_hand(args: tuple) -> tuple[Tensor, Tensor]:
    """One value at a time."""
    x, weight, bias, state, gate, out_gate, silu = args
    (batch, tokens, channels), taps = x.shape, weight.shape[1]
    y, after = torch.zeros(x.shape, dtype=torch.float64), torch.zeros(batch, taps, channels, dtype=torch.float64)
    for b, c in torch.cartesian_prod(torch.arange(batch), torch.arange(channels)).tolist():
        seen = [0.0] * taps if state is None else state[b, :, c].tolist()
        for t in range(tokens):
            seen.append(float(x[b, t, c]) * (1.0 if gate is None else float(gate[b, t, c])))
            total = 0.0 if bias is None else float(bias[c])
            total += sum(float(w) * value for w, value in zip(weight[c], seen[-taps:], strict=True))
            total *= sigmoid(total) if silu else 1.0
            y[b, t, c] = total * (1.0 if out_gate is None else float(out_gate[b, t, c]))
        after[b, :, c] = torch.tensor(seen[-taps:])
    return y, after


def linear_attention_by_hand(args: tuple) -> tuple[Tensor, Tensor]:
    """One head, one token at a time."""
    q, k, v, decay, beta, skip, state, scale, normalise, delta = args
    (batch, tokens, heads, width), groups = v.shape, k.shape[2]
    out = torch.zeros(v.shape, dtype=torch.float64)
    after = torch.zeros(batch, heads, k.shape[3], width, dtype=torch.float64)
    for b, h in torch.cartesian_prod(torch.arange(batch), torch.arange(heads)).tolist():
        s, group = after[b, h] if state is None else state[b, h].double(), h * groups // heads
        for t in range(tokens):
            query, key, value = q[b, t, group].double(), k[b, t, group].double(), v[b, t, h].double()
            if normalise:
                query, key = (x / ((x * x).sum() + 1e-6) ** 0.5 for x in (query, key))
            s = decay[b, t, h].double().exp().view(-1, 1) * s
            change = float(beta[b, t, h]) * (value - key @ s if delta else value)
            s = s + torch.outer(key, change)
            out[b, t, h] = scale * query @ s + (0.0 if skip is None else float(skip[h]) * value)
        after[b, h] = s
    return out, after


def decay_by_hand(args: tuple) -> tuple[Tensor, Tensor]:
    """One head of one token at a time, in Python's own numbers."""
    step, beta, a_log, dt_bias, least, most, factor = args
    out, taken = torch.empty(step.shape, dtype=torch.float64), torch.empty(step.shape, dtype=torch.float64)
    for b, t, h in torch.cartesian_prod(*map(torch.arange, step.shape)).tolist():
        dt = min(max(math.log1p(math.exp(float(step[b, t, h]) + float(dt_bias[h]))), least), most)
        out[b, t, h] = -math.exp(float(a_log[h])) * dt
        taken[b, t, h] = dt if beta is None else factor * sigmoid(float(beta[b, t, h]))
    return out, taken


def gated_norm_by_hand(args: tuple) -> Tensor:
    x, gate, weight, width, eps, gate_first, by_sigmoid = args
    gate = gate.double()
    factor = 1 / (1 + (-gate).exp()) * (1.0 if by_sigmoid else gate)
    if weight is None:
        return x.double() * factor
    y = x.double() * (factor if gate_first else 1.0)
    for first in range(0, x.shape[-1], width):
        part, at = y[..., first : first + width], first % len(weight)
        rms = ((part * part).sum(-1, keepdim=True) / width + eps) ** 0.5
        y[..., first : first + width] = part / rms * weight[at : at + width].double()
    return y * (1.0 if gate_first else factor)


def selective_scan_by_hand(args: tuple) -> tuple[Tensor, Tensor]:
    """One channel, one token at a time."""
    x, dt, keys, queries, gate, a_log, dt_bias, skip, state = args
    (batch, tokens, channels), states = x.shape, keys.shape[-1]
    y, after = torch.zeros(x.shape, dtype=torch.float64), torch.zeros(batch, channels, states, dtype=torch.float64)
    for b, c in torch.cartesian_prod(torch.arange(batch), torch.arange(channels)).tolist():
        s = after[b, c] if state is None else state[b, c].double()
        for t in range(tokens):
            step, value = math.log1p(math.exp(float(dt[b, t, c]) + float(dt_bias[c]))), float(x[b, t, c])
            s = (-a_log[c].double().exp() * step).exp() * s + step * value * keys[b, t].double()
            y[b, t, c] = s @ queries[b, t].double() + float(skip[c]) * value
            if gate is not None:
                y[b, t, c] *= float(gate[b, t, c]) * sigmoid(float(gate[b, t, c]))
        after[b, c] = s
    return y, after


BY_HAND = {
    "causal_conv": convolution_by_hand, "decay": decay_by_hand, "linear_attention": linear_attention_by_hand,
    "gated_norm": gated_norm_by_hand, "selective_scan": selective_scan_by_hand,
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_recurrent_mixer_by_hand(name: str) -> None:
    for case in cases(name):
        if name != "selective_scan" or case.args[0].numel() < 5000:
            found, wanted = registered()[name].reference(*case.args), BY_HAND[name](case.args)
            pairs = [(found, wanted)] if isinstance(found, Tensor) else zip(found, wanted, strict=True)
            for a, b in pairs:
                assert_near(a, b, torch.float32, case.label)


def test_recurrent_mixers_on_paper() -> None:
    """A channel, or a head of one column, over two or three tokens, with numbers that can be checked on paper."""

    def of(*numbers: float) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float32).view(1, -1, 1)

    def same(found: Tensor, *numbers: float) -> None:
        torch.testing.assert_close(found.flatten(), torch.tensor(numbers, dtype=torch.float32))

    y, after = ops.causal_conv(of(1, 2, 3), torch.tensor([[10.0, 1.0]]), torch.tensor([0.5]), None, None, None, False)
    same(y, 1.5, 12.5, 23.5)
    same(after, 2, 3)
    one, log_half = of(1, 1)[..., None], of(math.log(0.5), math.log(0.5))
    for delta, wanted in ((True, (4, 9, 4.5)), (False, (4, 10, 5))):  # S = 2, then 1 + (8 - 1) / 2 or 1 + 8 / 2
        args = one, one, of(4, 8)[..., None], log_half, of(0.5, 0.5), None, None, 2.0, False, delta
        y, after = ops.linear_attention(*args)
        same(torch.cat((y.flatten(), after.flatten())), *wanted)
    x, zeros, weight = torch.tensor([[[3.0, 4.0]]]), torch.zeros(1, 1, 2), torch.tensor([4.0, 8.0])
    same(ops.gated_norm(x, zeros, weight, 2, 3.5, False, True), 1.5, 4)  # sqrt(12.5 + 3.5) = 4
    same(ops.gated_norm(x, zeros, weight, 2, 0.875, True, True), 3, 8)  # of 1.5 and 2: sqrt(3.125 + 0.875) = 2
    zero, log_two = torch.zeros(1), math.log(2)  # softplus(0), of which exp(-step) is one half
    y, after = ops.selective_scan(of(1, 1), of(0, 0), of(1, 1), of(1, 2), None, zero[:, None], zero, zero + 3, None)
    same(y, log_two + 3, 3 * log_two + 3)
    same(after, 1.5 * log_two)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("body", bodies_here("linear_attention"))
def test_large_decays_of_linear_attention(body: str, by_channel: bool, delta: bool) -> None:
    """Between tokens that keep almost all of the state, tokens that forget all of it."""
    q, k, v = torch.randn(1, 150, 2, 12), torch.randn(1, 150, 2, 12), torch.randn(1, 150, 2, 8)
    shape = (1, 150, 2, 12) if by_channel else (1, 150, 2)
    some = torch.rand(shape)
    for large in (-30.0, -1e4, -3e38, -float("inf")):
        decay = torch.where(some < 0.1, large, -0.01 * some)
        args = q, k, v, decay, torch.rand(1, 150, 2), None, torch.randn(1, 2, 12, 8), 0.3, delta, delta
        found, wanted = ops.linear_attention.body(body)(*args), linear_attention_by_hand(args)
        for a, b in zip(found, wanted, strict=True):
            assert_near(a, b, torch.float32, f"{large}")
