"""Mixtures of experts: tokens to experts on other ranks and back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import expert_jobs as jobs
import mixtures
import pytest
import sympy
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # registers the products by groups
from dense_mixtures import (
    DENSE,
    LEFT,
    LOOPS,
    OWN_TOKENS,
    ROUTED,
    UNCOMMON,
    Every,
    Expert,
    Routed,
    feed_forward,
)
from expert_jobs import CASES
from test_gloo import each, ranks_of
from torch import nn
from zoo import EXPERT_MESHES, batch, tiny

from autoshard import MeshSpec, autoshard, verify
from autoshard.capture import capture
from autoshard.chain import run
from autoshard.cost import conversion_bytes
from autoshard.errors import CaptureError, ShardingError
from autoshard.expert_loops import Loop
from autoshard.experts import combine, dispatches
from autoshard.routing import draw_ids
from autoshard.rules import op_name
from autoshard.runtime.dispatch import to_experts
from autoshard.runtime.experts import expert_rows, grouped_product
from passes import chain
from passes.canonicalize import Canonicalize
from passes.fuse_experts import FuseExperts

assert transformers.integrations.moe

SIZES = {"dp": 2, "ep": 2}
JOBS = {
    f"{ranks} {name}": (jobs.experts_on_ranks, ranks, name) for ranks in (2, 4) for name in CASES
}


def assert_near(found, wanted, what: str) -> None:
    assert found is not None, f"{what}: nothing"
    assert found.shape == wanted.shape, what
    if found.numel():
        assert (found - wanted).abs().max() <= 1e-12 * max(1, wanted.abs().max()), what


def assert_part(found: dict, case: jobs.Case, ranks: int, rank: int) -> None:
    given = jobs.inputs(case, ranks)
    exact = {
        name: value.requires_grad_(name != "out")
        for name, value in jobs.on_one_device(given, jobs.dropped(given, case, ranks)).items()
    }
    for name, wanted in jobs.part(given | exact, case, ranks, rank).items():
        if name in exact:
            assert_near(found[name], wanted, f"{name} of rank {rank} of {ranks}")


JOBS |= mixtures.QUICK | mixtures.OTHER
ranks = ranks_of(SIZES, JOBS)


@pytest.mark.parametrize("name", CASES)
def test_experts_of_one_rank(name):
    case = CASES[name]
    own = jobs.part(jobs.inputs(case, 1), case, 1, 0)
    if len(own["x"]):
        assert_part(jobs.with_gradients(own, (), case), case, 1, 0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [2, 4])
def test_experts_on_processes(ranks, count, name):
    """All hard cases: ranks that send or receive nothing, experts that get no token."""
    for rank, found in enumerate(each(ranks, f"{count} {name}")):
        assert_part(found, CASES[name], count, rank % count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_many_rows_in_half_precision(dtype):
    """2000 ones, of which half precision can hold the sum but not add it up one by one."""
    table = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    ends = torch.tensor([2000, 2001], dtype=torch.int32)
    rows = expert_rows(table, ends, SimpleNamespace(rows=2001))
    rows.backward(torch.ones_like(rows))
    assert table.grad.dtype is dtype
    assert table.grad.tolist() == [[2000.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_under_autocast(dtype):
    """As a linear for each group; double precision stays as it is, as it does there."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 8, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(2, 8, 3, generator=g).requires_grad_()
    ends = torch.tensor([2, 5], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        found = grouped_product(x, weight, ends)
        parts = [F.linear(rows, w.T) for rows, w in zip(x.split([2, 3]), weight, strict=True)]
        wide = grouped_product(x.double(), weight.double(), ends)
    wanted = torch.cat(parts)
    assert found.dtype is torch.bfloat16 and torch.equal(found, wanted)
    assert wide.dtype is torch.float64
    by = torch.randn(5, 3, generator=g).bfloat16()
    got, own = (torch.autograd.grad(out, (x, weight), by) for out in (found, wanted))
    for a, b in zip(got, own, strict=True):
        assert a.dtype is b.dtype and torch.equal(a, b)


def test_a_second_derivative_is_refused():
    """Of what has none it is said so, and no wrong number given."""
    own = jobs.part(jobs.inputs(CASES["plain"], 1), CASES["plain"], 1, 0)
    out = jobs.computed(own, (), CASES["plain"])
    (grad,) = torch.autograd.grad(out.square().sum(), own["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice.*once_differentiable"):
        grad.sum().backward()


# --- models on meshes, in one process ---


class Mixture(nn.Module):
    """Experts stacked in two parameters; ``form``: how tokens come to them and back."""

    def __init__(self, form: str, experts: int = 4, k: int = 2, width: int = 16, inner: int = 24):
        super().__init__()
        self.form, self.k, self.experts = form, k, experts
        self.router = nn.Linear(width, experts, bias=False)
        loops = experts if form in ("chosen_first", "masked") else 0
        self.each = nn.ModuleList(feed_forward(width, inner) for _ in range(loops))
        self.up = nn.Parameter(torch.randn(experts, width, inner) / 4)
        self.down = nn.Parameter(torch.randn(experts, inner, width) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(tokens).softmax(-1).topk(self.k, -1)
        return getattr(self, self.form)(tokens, weights, chosen).view_as(x)

    def by_expert(self, chosen):
        """The order of slots by expert, and how many each expert has."""
        experts = chosen.reshape(-1)
        return experts.argsort(stable=True), F.one_hot(experts, self.experts).sum(0)

    def added(self, tokens, weights, chosen):
        """Rows sorted by expert, added to their tokens."""
        order, counts = self.by_expert(chosen)
        ends = counts.cumsum(0).to(torch.int32)
        rows = tokens[order // self.k]
        inner = F.gelu(grouped_mm(rows, self.up, ends))
        out = grouped_mm(inner, self.down, ends) * weights.reshape(-1)[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, order // self.k, out)

    def added_twice(self, tokens, weights, chosen):
        """The same, times a number: it is not recognised."""
        order, counts = self.by_expert(chosen)
        ends = counts.cumsum(0).to(torch.int32)
        rows = grouped_mm(tokens[order // self.k], self.up, ends)
        out = grouped_mm(rows.relu(), self.down, ends) * weights.reshape(-1)[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, order // self.k, out, alpha=2)

    def looked_up(self, tokens, weights, chosen):
        """Every row with its own expert's weights."""
        experts = chosen.reshape(-1)
        rows = tokens.repeat_interleave(self.k, 0).unsqueeze(1)
        inner = F.gelu(torch.bmm(rows, self.up[experts]))
        out = torch.bmm(inner, self.down[experts]).squeeze(1) * weights.reshape(-1, 1)
        return out.view(-1, self.k, tokens.shape[-1]).sum(1)

    def chosen_first(self, tokens, weights, chosen):
        """A loop over experts: positions of their tokens."""
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.each):
            token, slot = torch.where(chosen == e)
            out.index_add_(0, token, expert(tokens[token]) * weights[token, slot, None])
        return out

    def masked(self, tokens, weights, chosen):
        """A loop over experts: masks of their tokens."""
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.each):
            mask = chosen == e
            own = mask.any(-1)
            out[own] += expert(tokens[own]) * (weights * mask).sum(-1)[own, None]
        return out

    def computed(self, rows, chosen):
        """Of rows for every expert of a token, sorted by expert; and their order."""
        order, counts = self.by_expert(chosen)
        ends = counts.cumsum(0).to(torch.int32)
        inner = F.gelu(grouped_mm(rows[order], self.up, ends))
        return grouped_mm(inner, self.down, ends), order

    def weighed_by_token(self, tokens, weights, chosen):
        """Rows times weights after they are brought back; tokens repeated before sorting."""
        out, order = self.computed(tokens.repeat_interleave(self.k, 0), chosen)
        out = out[order.argsort()].view(-1, self.k, tokens.shape[1])
        return (out.to(weights.dtype) * weights[..., None]).sum(1).to(tokens.dtype)

    def weighed_flat(self, tokens, weights, chosen):
        place = torch.arange(tokens.shape[0]).repeat_interleave(self.k)
        out, order = self.computed(tokens[place], chosen)
        out = out[order.argsort()] * weights.reshape(-1, 1)
        return out.view(-1, self.k, tokens.shape[1]).sum(1)

    def weighed_by_product(self, tokens, weights, chosen):
        rows = tokens[:, None].expand(-1, self.k, -1).reshape(-1, tokens.shape[1])
        out, order = self.computed(rows, chosen)
        out = out[order.argsort()].view(-1, self.k, tokens.shape[1])
        return torch.bmm(weights[:, None], out).squeeze(1)

    def weighed_by_einsum(self, tokens, weights, chosen):
        """Rows are put back by their order."""
        out, order = self.computed(tokens.repeat_interleave(self.k, 0), chosen)
        back = torch.empty_like(out)
        back[order] = out
        return torch.einsum("tkd,tk->td", back.view(*chosen.shape, -1), weights)

    def weighed_by_themselves(self, tokens, weights, chosen):
        out, order = self.computed(tokens.repeat_interleave(self.k, 0), chosen)
        out = out[order.argsort()].view(-1, self.k, tokens.shape[1])
        return (out * out.mean(-1, keepdim=True)).sum(1)

    def repeated_by_index(self, tokens, weights, chosen):
        """Every row with its own expert's weights."""
        place = torch.arange(tokens.shape[0]).repeat_interleave(self.k)
        experts = chosen.reshape(-1)
        inner = F.gelu(torch.bmm(tokens[place][:, None], self.up[experts]))
        out = torch.bmm(inner, self.down[experts]).squeeze(1) * weights.reshape(-1, 1)
        return torch.zeros_like(tokens).index_add(0, place, out)

    def indexed(self, tokens, weights, chosen):
        """A loop over experts that takes parts of stacked parameters, by index and by unbind."""
        out, down = torch.zeros_like(tokens), self.down.unbind()
        for e in range(self.experts):
            token, slot = torch.where(chosen == e)
            inner = F.gelu(tokens[token] @ self.up[e]) @ down[e]
            out.index_add_(0, token, inner * weights[token, slot, None])
        return out

    def split(self, tokens, weights, chosen):
        """Parts of one by split and by slice, turned."""
        out, up = torch.zeros_like(tokens), self.up.split(1)
        for e in range(self.experts):
            token, slot = torch.where(chosen == e)
            inner = F.gelu(tokens[token] @ up[e].squeeze(0))
            inner = F.linear(inner, self.down[e : e + 1][0].T)
            out.index_add_(0, token, inner * weights[token, slot, None])
        return out

    def reversed(self, tokens, weights, chosen):
        """Parts in another order, and all of them but one twice."""
        out = torch.zeros_like(tokens)
        for e in range(self.experts):
            token, slot = torch.where(chosen == e)
            inner = F.gelu(tokens[token] @ self.up[-1 - e]) @ self.down[max(e, 1)]
            out.index_add_(0, token, inner * weights[token, slot, None])
        return out

    def indexed_everywhere(self, tokens, weights, chosen):
        """Every expert computes every token, in a loop by index."""
        given = torch.zeros(tokens.shape[0], self.experts, dtype=weights.dtype)
        given, out = given.scatter(1, chosen, weights), 0
        for e in range(self.experts):
            out = out + (F.gelu(tokens @ self.up[e]) @ self.down[e]) * given[:, e, None]
        return out

    def everywhere(self, tokens, weights, chosen):
        """Every expert computes every token."""
        given = torch.zeros(tokens.shape[0], self.experts, dtype=weights.dtype)
        given = given.scatter(1, chosen, weights)
        inner = F.gelu(torch.einsum("td,edh->teh", tokens, self.up))
        return torch.einsum("teh,ehd,te->td", inner, self.down, given)


class Model(nn.Module):
    def __init__(self, form: str, **sizes: int):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        kind = next(kind for kind in (Mixture, Routed, Every) if hasattr(kind, form))
        self.mixture, self.head = kind(form, **sizes), nn.Linear(16, 32)

    def forward(self, ids, labels):
        x = self.embed(ids)
        x = x + self.mixture(self.norm(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def grouped_mm(x, weight, ends):
    return torch.ops.transformers.grouped_mm_fallback(x, weight, ends)


def tokens(rows: int = 4) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return {n: torch.randint(32, (rows, 6), generator=g) for n in ("ids", "labels")}


def ways(report) -> int:
    """How many times tokens are sent to experts."""
    return sum(n.target is to_experts for n in report.sharded.program.graph.nodes)


def layouts(report, name: str) -> dict:
    program = report.sharded.program
    return next(p.layout for p in program.parameters().values() if p.name.endswith(name))


MESHES = ["ep=2", "ep=4", "dp=2,ep=2", "ep=2,tp=2", "cp=2", "cp=2,ep=2"]


@pytest.mark.parametrize("mesh", MESHES)
def test_mixtral(mesh):
    report = verify(tiny("mixtral"), mesh, batch(), steps=1)
    assert report.ok, report
    assert ways(report) == 2
    conversions = report.sharded.program.conversions
    gathered = [c for c in conversions if c.axes == ("cp",) and "all_gather" in c.kind]
    assert not [c.why for c in gathered if "mlp" in c.why], "tokens need not be whole"
    if "ep" in mesh:
        assert layouts(report, "0.mlp.experts.down_proj")["ep"].role == "experts"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["cp=2", "cp=2,tp=2", "dp=2,cp=2"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_architectures_without_ep(kind, mesh):
    report = verify(tiny(kind), mesh, batch(), steps=1)
    assert report.ok, report
    assert ways(report) == (1 if kind == "deepseek_v3" else 2)


@pytest.mark.slow
def test_experts_chosen_by_chance():
    """In training they are drawn anew; in evaluation the best are taken, one after the other."""
    report = verify(tiny("phimoe").eval(), "ep=2", batch(), steps=1)
    assert report.ok, report
    assert ways(report) == 2


@pytest.mark.slow
def test_auxiliary_loss_without_ep():
    report = verify(tiny("mixtral", output_router_logits=True), "cp=2", batch(), steps=1)
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_batched_products(kind):
    model = tiny(kind)
    model.config._experts_implementation = "batched_mm"
    report = verify(model, "cp=2,ep=2", batch(), steps=1)
    assert report.ok, report
    assert ways(report) == 2


FORMS = ("added", "looked_up", "chosen_first", "masked")
WRITTEN = [(form, *each) for each in EXPERT_MESHES for form in FORMS]


def proved(form: str, mesh: str, zero: int) -> None:
    """Two steps, on rows with unequal numbers of labels."""
    given = tokens()
    for row, labels in enumerate(given["labels"]):
        labels[:row] = -100
    accumulate = 2 if zero else 1
    report = verify(Model(form), mesh, given, zero=zero, accumulate=accumulate)
    assert report.ok, report
    assert ways(report) == 1


@pytest.mark.parametrize("form, mesh, zero", WRITTEN[::3])
def test_written_by_hand(form, mesh, zero):
    proved(form, mesh, zero)


@pytest.mark.slow
@pytest.mark.parametrize("form, mesh, zero", [each for each in WRITTEN if each not in WRITTEN[::3]])
def test_written_by_hand_on_every_mesh(form, mesh, zero):
    proved(form, mesh, zero)


def test_a_loop_over_experts_that_mix_tokens():
    """It is said which op inside experts stands in the way."""
    model = Model("chosen_first")
    for expert in model.mixture.each:
        expert[1] = nn.Softmax(0)
    with pytest.raises(ShardingError, match="why: experts are not recognised in mixture: softmax"):
        verify(model, "ep=2", tokens(), steps=1)


def with_experts(experts) -> nn.Module:
    model = Model("chosen_first")
    model.mixture.each = nn.ModuleList(experts)
    return model


@pytest.mark.parametrize("form", UNCOMMON)
def test_a_loop_over_uncommon_experts(form):
    """Each computes with all that its ops were given."""
    report = verify(with_experts(Expert(form) for _ in range(4)), "ep=2", tokens(), steps=2)
    assert report.ok, report
    assert ways(report) == 1


@pytest.mark.parametrize("sizes", [{}, {"k": 3}, {"experts": 9}, {"k": 1}], ids=str)
@pytest.mark.parametrize("form", ROUTED)
def test_loops_by_what_was_chosen(form, sizes):
    report = verify(Model(form, **sizes), "ep=2", tokens(), steps=1)
    assert report.ok, report
    assert ways(report) == ROUTED[form]


def test_all_experts_for_every_token():
    report = verify(Model("chosen_first", experts=3, k=3), "ep=2", tokens(), steps=1)
    assert report.ok, report
    assert ways(report) == 1


def test_many_experts():
    """All are told apart, though several tokens choose the same ones."""
    model = Model("chosen_first", experts=64, k=8)
    assert len(autoshard(model, "ep=2", tokens()).program.mixtures) == 1


def test_a_bank_that_is_not_recognised():
    """The other one is; and it is said why."""
    model = Model("two_banks")
    for expert in model.mixture.other:
        expert[1] = nn.Softmax(0)
    with pytest.raises(ShardingError, match="why: experts are not recognised in mixture: softmax"):
        verify(model, "ep=2", tokens(), steps=1)


def test_weights_rounded_on_the_way():
    """They are summed in float32 and used in bfloat16, as the rewritten graph uses them. Where they
    are rounded before, they are not the same."""
    model = Model("any_slot").to(torch.bfloat16)
    assert len(autoshard(model, "ep=2", tokens()).program.mixtures) == 1

    class Rounded(Routed):
        def any_slot(self, x, weights, chosen):
            return super().any_slot(x, weights.to(torch.bfloat16).float(), chosen)

        def two_banks(self, x, weights, chosen):
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.each):
                hit = chosen == e
                token = torch.where(hit.any(-1))[0]
                given = (weights * hit).sum(-1).to(torch.bfloat16).float()
                out = out.index_add(0, token, expert(x[token]) * given[token, None])
            return out

    model.mixture = Rounded("any_slot").to(torch.bfloat16)
    assert len(autoshard(model, "ep=2", tokens()).program.mixtures) == 1
    model = Model("any_slot")
    model.mixture = Rounded("two_banks")
    with pytest.raises(ShardingError, match="numbers of tokens that are not one for each"):
        autoshard(model, "ep=2", tokens())


@pytest.mark.parametrize("count, k", [(4, 1), (4, 2), (8, 2), (9, 8), (128, 8)])
def test_ids_of_a_trial(count, k):
    ids = draw_ids(2 * count, count, k, torch.Generator().manual_seed(0))
    assert all(len(row.unique()) == k for row in ids)
    assert len(ids.unique()) == count


def test_rows_that_are_added_up_times_a_number():
    program = run(
        capture(Model("added_twice"), MeshSpec(ep=2), tokens())[0], [Canonicalize(), FuseExperts()]
    )
    assert program.unfused == ["mixture: rows that are added up times a number"] * 2
    assert not dispatches(program.graph)


def test_sums_in_other_types():
    """As the model has them, where it is not run in float64 to be verified."""
    program = autoshard(Model("types"), "ep=2", tokens()).program
    assert len(program.mixtures) == 1
    kept = [n for n in program.graph.nodes if n.kwargs.get("dtype") is torch.float64]
    assert [op_name(n.target) for n in kept if op_name(n.target) == "mean"]


def test_gates_are_no_experts(monkeypatch):
    """It costs nothing to see that."""

    class Gates(Model):
        def forward(self, ids, labels):
            x = self.embed(ids)
            x = x * self.mixture.router(x).sigmoid().repeat(1, 1, 4) + x.softmax(-1) * x
            return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    monkeypatch.setattr("autoshard.dense_experts.infer_axes", None)
    assert not autoshard(Gates("soft"), "ep=2", tokens()).program.unfused


def as_on_gpus(program) -> None:
    """What capture gives there: a count of int32, for which the CPU has no kernel; and devices."""
    cuda = torch.device("cuda")
    for node in program.graph.nodes:
        if op_name(node.target) == "histc":
            (cast,) = node.all_input_nodes
            cast.kwargs = {"dtype": torch.int32}
            for each in (cast, node):
                each.meta["val"] = each.meta["val"].to(torch.int32)
        if "device" in node.kwargs or op_name(node.target) in ("arange", "zeros_like", "full_like"):
            node.kwargs = {**node.kwargs, "device": cuda}


@pytest.mark.parametrize("form", ["mixtral", "chosen_first", "everywhere", "any_slot"])
def test_as_captured_on_gpus(form):
    model, given = (tiny(form), batch()) if form == "mixtral" else (Model(form), tokens())
    program = run(capture(model, MeshSpec(ep=2), given)[0], [Canonicalize()])
    devices = sum("device" in node.kwargs for node in program.graph.nodes)
    assert devices or form != "everywhere"
    as_on_gpus(program)
    program = run(program, [FuseExperts()])
    assert not program.unfused
    assert len(dispatches(program.graph)) == (2 if form == "mixtral" else 1)


def test_a_loop_over_experts_of_different_sizes():
    model = with_experts(feed_forward(16, 16 + 8 * e) for e in range(4))
    with pytest.raises(ShardingError, match="mixture: experts of different sizes"):
        verify(model, "ep=2", tokens(), steps=1)


def test_a_rewriting_that_fails_leaves_the_graph(monkeypatch):
    """What is not foreseen is a reason to leave a mixture as it is."""

    def fails(*args):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(Loop, "_stack", fails)
    with pytest.raises(ShardingError, match=r"on rows of all of them \(no such thing\)"):
        verify(Model("chosen_first"), "ep=2", tokens(), steps=1)
    report = verify(Model("loop"), "ep=2", tokens(), steps=1)
    assert report.ok, report
    assert ways(report) == 0


def test_a_mixture_after_many_ops():
    """The network before it is not walked op by op."""

    class Deep(Model):
        def forward(self, ids, labels):
            x = self.embed(ids)
            for _ in range(1000):
                x = x * 1.001
            x = x + self.mixture(x) * x.mean()
            return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    assert len(autoshard(Deep("chosen_first"), "ep=2", tokens()).program.mixtures) == 1


def test_a_loop_that_cannot_be_captured():
    model = tiny("mixtral")
    model.config._experts_implementation = "eager"
    with pytest.raises(CaptureError, match='_experts_implementation = "grouped_mm"'):
        verify(model, "ep=2", batch(), steps=1)


@pytest.mark.parametrize("form", ["everywhere", *DENSE])
def test_experts_that_compute_every_token(form):
    """Only the rows of tokens at the experts they chose are computed, and experts are cut."""
    sizes = {"inner": 16} if form == "square" else {}
    report = verify(Model(form, **sizes), "ep=2", tokens(), steps=1)
    assert report.ok, report
    assert ways(report) == 1
    if form not in LOOPS:
        assert layouts(report, "mixture.up")["ep"].role == "experts"


@pytest.mark.parametrize("mesh", ["ep=2,tp=2", "dp=2,ep=2", "ep=4"])
@pytest.mark.parametrize("form", ["everywhere", "loop"])
def test_every_token_on_meshes(form, mesh):
    report = verify(Model(form), mesh, tokens(), steps=1)
    assert report.ok, report
    assert ways(report) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["ep=2,tp=2", "dp=2,ep=2", "ep=4", "cp=2,ep=2"])
@pytest.mark.parametrize("form", [*DENSE, *OWN_TOKENS])
def test_every_form_on_meshes(form, mesh):
    sizes = {"inner": 16} if form == "square" else {}
    report = verify(Model(form, experts=5, **sizes), mesh, tokens(), steps=2)
    assert report.ok, report
    assert ways(report) == 1


@pytest.mark.parametrize("form", OWN_TOKENS)
def test_loops_over_chosen_tokens(form):
    report = verify(Model(form), "ep=2", tokens(), steps=1)
    assert report.ok, report
    assert ways(report) == 1


def test_a_loop_whose_weights_learn_nothing():
    """It is not taken for one whose weights do."""
    with pytest.raises(ShardingError, match="numbers of tokens that are not one for each"):
        verify(Model("detached"), "ep=2", tokens(), steps=1)


BACK = [f"weighed_{how}" for how in ("by_token", "flat", "by_product", "by_einsum")]


@pytest.mark.parametrize("mesh", ["ep=2", "dp=2,ep=2"])
@pytest.mark.parametrize("form", [*BACK, "repeated_by_index"])
def test_ways_to_experts_and_back(form, mesh):
    report = verify(Model(form), mesh, tokens(), steps=1)
    assert report.ok, report
    assert ways(report) == 1
    assert layouts(report, "mixture.up")["ep"].role == "experts"


@pytest.mark.parametrize("form", BACK)
def test_one_expert_a_token_and_back(form):
    report = verify(Model(form, k=1), "ep=2", tokens(), steps=1)
    assert report.ok, report
    assert ways(report) == 1


def test_rows_weighed_by_what_is_made_of_them():
    """They are left as they are."""
    report = verify(Model("weighed_by_themselves"), "ep=2", tokens(), steps=1)
    assert report.ok, report
    assert ways(report) == 0


@pytest.mark.parametrize("form", ["weighed_by_token", "weighed_by_product"])
def test_types_of_weighed_rows(form):
    """A product of matrices rounds once, at the end; what is multiplied row by row, each."""
    model = Model(form).to(torch.bfloat16)
    program = run(capture(model, MeshSpec(ep=2), tokens())[0], [Canonicalize(), FuseExperts()])
    (out,) = (n for n in program.graph.nodes if n.target is combine)
    wide = form == "weighed_by_product"
    assert out.args[0].meta["val"].dtype is (torch.float32 if wide else torch.bfloat16)
    (user,) = out.users
    assert not wide or user.meta["val"].dtype is torch.bfloat16


@pytest.mark.parametrize("mesh", ["ep=2", "dp=2,ep=2"])
@pytest.mark.parametrize("form", ["indexed", "split", "indexed_everywhere"])
def test_a_loop_over_parts_of_stacked_parameters(form, mesh):
    """They are cut as they are."""
    report = verify(Model(form), mesh, tokens(), steps=1)
    assert report.ok, report
    assert ways(report) == 1
    for name in ("mixture.up", "mixture.down"):
        assert layouts(report, name)["ep"].role == "experts"


def test_parts_in_another_order():
    report = verify(Model("reversed"), "ep=2", tokens(), steps=1)
    assert report.ok, report
    assert ways(report) == 1
    assert layouts(report, "mixture.up")["ep"] == "R"


def test_a_product_in_a_loop_is_no_mixture_of_its_own():
    program = autoshard(Model("indexed"), "ep=2", tokens(), expert_capacity=1.25).program
    assert len(program.mixtures) == 1
    assert not program.unfused


@pytest.mark.parametrize("form", LEFT)
def test_experts_that_must_compute_every_token(form):
    """Nothing is sent: ep carries samples, and why is said."""
    report = verify(Model(form), "ep=2", tokens(), steps=1)
    assert report.ok, report
    assert ways(report) == 0
    notes = "".join(report.sharded.program.notes)
    assert (
        f"no experts are cut over ep, which carries samples in any case: mixture: {LEFT[form]}"
        in notes
    )


@pytest.mark.parametrize(
    "sizes", [{"experts": 6}, {"experts": 5, "k": 1}, {"experts": 3, "k": 3}], ids=str
)
def test_sizes_that_do_not_divide(sizes):
    report = verify(Model("added", **sizes), "ep=4", tokens(), steps=1)
    assert report.ok, report
    assert ways(report) == 1


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_storage_is_shared_out_over_what_is_left(zero):
    report = verify(Model("added"), "dp=2,ep=2", tokens(), steps=2, zero=zero, accumulate=2)
    assert report.ok, report
    program = report.sharded.program
    stored = {p.name: p.zero for p in program.parameters().values()}
    assert stored["mixture.up"] == ("dp",)
    assert stored["head.weight"] == ("dp", "ep")


def test_recomputed_blocks():
    report = verify(tiny("mixtral"), "ep=2", batch(), steps=1, zero=3, recompute="block")
    assert report.ok, report


def test_one_device_computes_the_same():
    """The rewritten graph, on a mesh of one rank."""
    passes = [replace(p, always=True) if isinstance(p, FuseExperts) else p for p in chain()]
    report = verify(Model("added"), "dp=1", tokens(), steps=2, passes=passes)
    assert report.ok, report
    assert ways(report) == 1


def test_bytes_of_tokens():
    """k rows of every token, (ep-1)/ep of them to other ranks; the numbers beside them go there
    only."""
    program = autoshard(Model("added"), "ep=4", tokens(), zero=0).program
    sent = {c.kind: conversion_bytes(c, program.mesh) for c in program.conversions}
    (tokens_here,) = {c.numel / 32 for c in program.conversions if c.kind == "to_tokens"}
    rows = 2 * 4 * sympy.Rational(3, 4) * tokens_here  # k rows, bytes, share
    assert tokens_here.free_symbols
    assert sent["to_tokens"] == (rows * 16,) * 2
    assert sent["to_experts"] == (rows * 17,) * 2
    assert "all_to_all" in autoshard(Model("added"), "ep=4", tokens()).table("collectives")


@pytest.mark.parametrize("form", ["chosen_first", "masked"])
def test_a_loop_over_experts_on_data_ranks(form):
    """Each rank has all experts, and takes those rows of its own that chose one."""
    report = verify(Model(form), "dp=2", tokens(), steps=2)
    assert report.ok, report
    assert layouts(report, "0.0.weight")["dp"] == "R"


def assert_refused(mixture: nn.Module, mesh: str, match: str) -> None:
    """By name, of a model with this mixture."""
    model = Model("added")
    model.mixture = mixture
    with pytest.raises(ShardingError, match=match):
        verify(model, mesh, tokens(), steps=1)


class Limited(Mixture):
    """Of the rows of an expert, sorted before it, it computes so many of all."""

    def added(self, tokens, weights, chosen):
        order, counts = self.by_expert(chosen)
        ends = counts.clamp(max=9).cumsum(0).to(torch.int32)
        out = grouped_mm(tokens[order // self.k], self.up, ends) @ self.down[0]
        return torch.zeros_like(tokens).index_add(0, order // self.k, out)


@pytest.mark.parametrize("mesh", ["ep=2", "dp=2"])
def test_a_limit_of_counts_is_of_all_rows(mesh):
    """Counts of the rows of one rank cannot stand for it."""
    assert_refused(Limited("added"), mesh, "where the rows of each expert end")


class WithRoom(Mixture):
    """An expert takes the first 8 tokens that chose it, of all."""

    def __init__(self, form: str):
        super().__init__("chosen_first")
        self.form = form

    def first_of(self, tokens, weights, chosen):
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.each):
            token, slot = (i[:8] for i in torch.where(chosen == e))
            out.index_add_(0, token, expert(tokens[token]) * weights[token, slot, None])
        return out

    def counted(self, tokens, weights, chosen):
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.each):
            mask = chosen == e
            kept = mask & (mask.any(-1).cumsum(0) <= 8)[:, None]
            own = mask.any(-1)
            out[own] += expert(tokens[own]) * (weights * kept).sum(-1)[own, None]
        return out


@pytest.mark.parametrize("mesh", ["ep=2", "dp=2"])
@pytest.mark.parametrize("form", ["first_of", "counted"])
def test_a_limit_that_few_tokens_do_not_reach(form, mesh):
    """It is no part of a routing that may be left out, however few tokens it is tried with."""
    assert_refused(WithRoom(form), mesh, "experts are not recognised in mixture")


class Inside(nn.Module):
    """An expert that is a mixture itself."""

    def __init__(self):
        super().__init__()
        self.mixture = Mixture("chosen_first", experts=2, k=1)

    def forward(self, x):
        return self.mixture(x)


def test_a_mixture_inside_an_expert():
    """Its tokens are as many as the data tell: it is refused by name."""
    model = Model("chosen_first")
    model.mixture.each = nn.ModuleList(Inside() for _ in range(4))
    with pytest.raises(ShardingError, match="experts are not recognised in mixture"):
        verify(model, "ep=2", tokens(), steps=1)


class Unweighted(Mixture):
    """Nothing follows the last product of an expert but the way back."""

    def added(self, tokens, weights, chosen):
        order, counts = self.by_expert(chosen)
        ends = counts.cumsum(0).to(torch.int32)
        rows = tokens[order // self.k] * weights.reshape(-1)[order].unsqueeze(-1)
        out = grouped_mm(F.gelu(grouped_mm(rows, self.up, ends)), self.down, ends)
        return torch.zeros_like(tokens).index_add(0, order // self.k, out)


@pytest.mark.parametrize("mesh", ["ep=2", "cp=2", "ep=2,tp=2"])
def test_weights_before_the_experts(mesh):
    model = Model("added")
    model.mixture = Unweighted("added")
    report = verify(model, mesh, tokens(), steps=1)
    assert report.ok, report
    assert ways(report) == 1


def test_fewer_experts_than_ranks_that_share_them_out_are_told():
    sharded = autoshard(Model("added"), "dp=4,ep=2", tokens(8))
    told = "zero: mixture.up, mixture.down have 2 in dim 0, for 4 ranks of dp"
    assert [note for note in sharded.program.notes if note.startswith(told)]


class Tiled(Mixture):
    """Rows of all first choices, then of all second ones, in an order that is by token."""

    def added(self, tokens, weights, chosen):
        order, counts = self.by_expert(chosen)
        ends = counts.cumsum(0).to(torch.int32)
        out = grouped_mm(tokens.repeat(self.k, 1)[order], self.up, ends) @ self.down[0]
        return torch.zeros_like(tokens).index_add(0, order // self.k, out)


@pytest.mark.parametrize("mesh", ["ep=2", "dp=2"])
def test_positions_in_another_order_of_rows(mesh):
    """On one device they point at rows of other tokens, which are on other ranks."""
    assert_refused(Tiled("added"), mesh, "mixes rows of the batch")
