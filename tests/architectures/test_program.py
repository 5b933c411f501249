"""Residual shapes as programs, and what the peepholes make of them (architectures/program.py)."""

from __future__ import annotations

import pytest

from infuse.architectures.program import (
    ADD,
    ATTENTION,
    IMAGE,
    MLP,
    NORM,
    PARALLEL,
    POST,
    PRE,
    SANDWICH,
    TEXT,
    Program,
    Step,
    carried,
    folded,
    merged,
    on_ranks,
    program_of,
)


def words(program: Program) -> str:
    return " ".join(
        f"{step.does}({step.norm or step.part})" if step.norm or step.part else step.does for step in program
    )


MERGED = {
    PRE: "norm(norm1) attention(attn) add_norm(norm2) mlp(mlp) add",
    POST: "attention(attn) add_norm_stream(norm1) mlp(mlp) add_norm_stream(norm2)",
    PARALLEL: "norm(norm1) attention(attn) norm(norm2) mlp(mlp) add",
    SANDWICH: "norm(norm1) attention(attn) norm_branch(post1) add_norm(norm2) mlp(mlp) norm_branch(post2) add",
}
FOLDED = {
    PRE: "carry folded_attention(norm1) take carry folded_mlp(norm2) take",
    POST: "folded_attention(attn) add_norm_stream(norm1) folded_mlp(mlp) add_norm_stream(norm2)",
    PARALLEL: "carry folded_attention(norm1) folded_mlp(norm2) take",
    SANDWICH: "folded_attention(norm1) norm_branch(post1) add folded_mlp(norm2) norm_branch(post2) add",
}


@pytest.mark.parametrize("residual", MERGED)
def test_sums_go_with_the_norms_after_them_or_with_the_products_before(residual: str) -> None:
    program = on_ranks(program_of(residual, "attn"), 1)
    assert words(merged(program)) == MERGED[residual]
    assert words(merged(folded(program))) == FOLDED[residual]


def test_norms_that_a_layer_lacks_are_left_out() -> None:
    shared = on_ranks(program_of(PARALLEL, "attn", {"norm2"}), 1)
    assert words(shared) == "norm(norm1) attention(attn) mlp(mlp) add"
    assert words(folded(shared)) == "carry folded_attention(norm1) folded_mlp(norm1) take"
    assert words(merged(program_of(PRE, "attn", {"norm2"}))) == "norm(norm1) attention(attn) add mlp(mlp) add"


def test_ranks_add_up_parallel_branches_once_before_the_stream() -> None:
    program = program_of(PARALLEL, "attn")
    assert words(merged(program)) == "norm(norm1) attention(attn) norm(norm2) mlp(mlp) reduce add"
    assert words(folded(program)) == "folded_attention(norm1) folded_mlp(norm2) reduce add"
    assert "reduce" not in words(program_of(PRE, "attn"))


def test_scaled_branches_are_added_by_themselves() -> None:
    program = program_of(PRE, "attn", scale=0.5)
    assert words(folded(program)) == "folded_attention(norm1) add folded_mlp(norm2) add"
    assert [step.scale for step in merged(program) if step.does.startswith("add")] == [0.5, 0.5]


def test_sums_of_streams_go_with_norms_that_are_modulated_as_they_are_or_with_products() -> None:
    """A gated sum goes with a modulated norm of its stream, a plain one with a plain norm or the product before it."""
    gated, modulated, plain = Step(ADD, on=IMAGE, by=(2,)), Step(NORM, "norm", on=IMAGE, by=(1, 0)), Step(ADD, on=IMAGE)
    mlp, norm = Step(MLP, "mlp", on=IMAGE), Step(NORM, "norm", on=IMAGE)
    assert merged((gated, modulated)) == (Step("add_norm", "norm", on=IMAGE, by=(2, 1, 0)),)
    assert merged((plain, norm)) == (Step("add_norm", "norm", on=IMAGE),)
    for apart in ((gated, norm), (plain, modulated), (plain, Step(NORM, on=IMAGE)), (plain, norm._replace(on=TEXT))):
        assert merged(apart) == apart
    across = Step(ATTENTION, "cross", on=IMAGE, over=TEXT)
    assert words(carried((across, plain, modulated, mlp, gated))) == (
        "carry attention(cross) take norm(norm) mlp(mlp) add"
    )


@pytest.mark.parametrize(
    ("residual", "wanted"),
    [
        (PRE, "norm(norm1) attention(mixer) add"),
        (POST, "attention(mixer) add norm_stream(norm1)"),
        (SANDWICH, "norm(norm1) attention(mixer) norm_branch(post1) add"),
    ],
)
def test_a_layer_without_an_mlp_adds_one_branch(residual: str, wanted: str) -> None:
    assert words(program_of(residual, "mixer", {"norm2", "mlp", "post2"})) == wanted
