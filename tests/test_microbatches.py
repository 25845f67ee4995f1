"""What micro-batches need of each other: losses, statistics of all rows, what runs once for all.

A loss that is a sum over micro-batches begins backward in each at once; one that is none needs all
forwards first. Layers behind statistics of all rows leave one micro-batch.
"""

import operator

import pytest
import torch
import torch.nn.functional as F
from staged_models import PRODUCTS, SUMS, Chain, Normed, contrastive, rows
from torch import fx, nn

from autoshard import ShardingError, autoshard, verify
from autoshard.pipeline import plan_of
from autoshard.runtime import turns
from autoshard.runtime.turns import in_first, in_lockstep, peak, total
from autoshard.summands import Summands


def proved(model, mesh="pp=2", inputs=None, **options):
    report = verify(model, mesh, example_inputs=rows() if inputs is None else inputs, **options)
    assert report.ok, str(report)
    return report.sharded.program


def refusal(model, mesh="pp=2", inputs=None, **options) -> str:
    """The error that names what cannot be done, whole."""
    inputs = rows() if inputs is None else inputs
    with pytest.raises(ShardingError) as error:
        autoshard(model, mesh, example_inputs=inputs, **options)
    text = str(error.value)
    assert "why:" in text and "fix:" in text
    return text


# --- losses ---


@pytest.mark.parametrize(("mesh", "microbatches"), [("pp=2", 4), ("pp=2,dp=2", 2)])
@pytest.mark.parametrize("name", SUMS)
def test_losses_that_are_sums_over_micro_batches(name, mesh, microbatches):
    program = proved(Chain(loss=SUMS[name]), mesh, microbatches=microbatches, zero=3)
    plan = plan_of(program, True)
    assert plan.seed and not plan.joint
    assert plan.seed != plan.results[0]


@pytest.mark.parametrize("name", PRODUCTS)
def test_losses_that_are_none_are_refused_by_name(name):
    loss, op = PRODUCTS[name]
    text = refusal(Chain(loss=loss), microbatches=4)
    assert f"the loss: {op} in forward" in text
    assert "schedule='1f1b', microbatches 4" in text
    assert 'pass schedule="gpipe"' in text and "microbatches=1" in text


@pytest.mark.parametrize("options", [{"schedule": "gpipe", "microbatches": 4}, {"microbatches": 1}])
@pytest.mark.parametrize("name", PRODUCTS)
def test_losses_that_are_none_when_all_forwards_come_first(name, options):
    program = proved(Chain(loss=PRODUCTS[name][0]), **options)
    assert bool(plan_of(program, True).joint) == (options["microbatches"] > 1)


@pytest.mark.parametrize("name", ["zb", "interleaved", "dualpipev"])
def test_other_schedules_refuse_it_too(name):
    text = refusal(Chain(loss=PRODUCTS["a root"][0]), schedule=name)
    assert f"schedule={name!r}, microbatches chosen from the rows" in text


def balance_of_layers(m, y, target, x):
    """As the loss of routers: how much each gets times how likely that is, of every layer."""
    found = F.cross_entropy(y, target)
    for block in m.blocks:
        x = block(x)
        likely = x.softmax(-1)
        found = found + (likely.mean(0) * likely.gt(0.1).to(x.dtype).mean(0)).sum()
    return found


def test_products_in_all_layers_are_listed_at_once():
    text = refusal(Chain(loss=balance_of_layers), "pp=4", microbatches=2)
    assert all(f"{op} in forward" in text for op in ("mul", "mul_1", "mul_2", "mul_3"))
    proved(Chain(loss=balance_of_layers), "pp=4", schedule="gpipe", microbatches=4)
    proved(Chain(loss=balance_of_layers), "pp=2,dp=2", schedule="gpipe", microbatches=2, zero=3)


@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,dp=2"])
def test_rows_that_are_compared_with_each_other_are_refused_by_name(mesh):
    text = refusal(Chain(loss=contrastive), mesh)
    assert "matmul" in text and "mixes rows" in text and "pass microbatches=1" in text
    assert ("drop dp from the mesh" in text) == ("dp" in mesh)


def test_rows_that_are_compared_in_one_micro_batch():
    proved(Chain(loss=contrastive), microbatches=1)


# --- statistics of all rows ---


def test_batch_norm_leaves_one_micro_batch_and_says_so():
    program = proved(Chain(block=Normed), "pp=2,dp=2", zero=2)
    assert program.pipeline.microbatches == 1
    (note,) = [note for note in program.notes if note.startswith("pipeline")]
    assert all(f"batch_norm_legit_functional{n} in blocks.{i}.norm" in note
               for i, n in enumerate(("", "_1", "_2", "_3")))  # fmt: skip
    assert "need all rows" in note


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_batch_norm_refuses_more_by_name(schedule):
    text = refusal(Chain(block=Normed), microbatches=2, schedule=schedule)
    assert "blocks.0.norm" in text and "pass microbatches=1" in text


class NormedHead(Chain):
    """The statistics of all rows are needed in the last stage only."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(self.head, nn.BatchNorm1d(5))


def test_batch_norm_behind_the_last_layer():
    assert proved(NormedHead()).pipeline.microbatches == 1
    proved(NormedHead(), schedule="gpipe", microbatches=4)
    assert "cross_entropy_loss" in refusal(NormedHead(), microbatches=4)


# --- numbers of rows that are fixed ---


class Fixed(Chain):
    def forward(self, x, target):
        y = self.head(self.body(self, x)).reshape(8, -1)
        return F.cross_entropy(y, target), y


def test_a_fixed_number_of_rows_leaves_one_micro_batch_and_says_so():
    program = proved(Fixed())
    assert program.pipeline.microbatches == 1
    assert "pipeline: one micro-batch, as the number of rows is fixed in the graph" in program.notes


@pytest.mark.parametrize(("model", "count"), [(Fixed, 8), (Chain, 1)])
def test_a_fixed_number_of_rows_refuses_more(model, count):
    text = refusal(model(), inputs=rows(count), microbatches=2)
    assert "microbatches=2" in text and "number of rows is fixed" in text
    proved(model(), inputs=rows(count), microbatches=1)


# --- what a micro-batch adds, against autograd ---


def traced(function) -> fx.Graph:
    """Its graph, in which sums over micro-batches are nodes."""
    tracer = fx.Tracer(autowrap_functions=(total, in_first))
    return tracer.trace(function)


def node_of_one(node, envs):
    args, kwargs = fx.map_arg((node.args, node.kwargs), envs[0].__getitem__)
    if node.op == "call_method":
        return [getattr(args[0], node.target)(*args[1:], **kwargs)]
    return [node.target(*args, **kwargs)]


#: Losses of a[m] (what micro-batch m has), of the weights v and w, and of n, which all know.
AFFINE = {
    "a mean": lambda a, v, w, n: torch.div(total(a), n).sum(),
    "two sums": lambda a, v, w, n: torch.add(total(a).sum(), total(torch.square(a)).sum(), alpha=3),
    "less": lambda a, v, w, n: torch.sub(torch.mul(total(a), 2).sum(), torch.square(v).sum()),
    "broadcast": lambda a, v, w, n: torch.add(total(a.sum()), v).sum(),
    "times a weight": lambda a, v, w, n: torch.mul(total(a), w).sum(),
    "all": lambda a, v, w, n: torch.add(
        torch.mul(torch.add(total(a), v), w).sum(), torch.div(total(a.exp()).mean(), n)
    ),
    "stacked": lambda a, v, w, n: torch.stack([total(a).sum(), torch.square(w), v.sum()]).mean(),
}
NOT_AFFINE = {
    "square": lambda a, v, w, n: torch.square(total(a)).sum(),
    "product": lambda a, v, w, n: torch.mul(total(a), total(torch.square(a))).sum(),
    "itself": lambda a, v, w, n: torch.mul(total(a), total(a)).sum(),
    "divisor": lambda a, v, w, n: torch.div(v, total(a)).sum(),
    "sum of what is made of sums": lambda a, v, w, n: total(torch.sub(a, total(a)).exp()).sum(),
}


def summands_of(graph: fx.Graph) -> tuple[Summands, fx.Node]:
    late, weights = set(), set()
    for node in graph.nodes:
        read = set(node.all_input_nodes)
        if node.target is total or read & late:
            late.add(node)
        elif node.name in ("v", "w") or (read and read <= weights):
            weights.add(node)
    loss = next(n for n in graph.nodes if n.op == "output").args[0]
    fixed = {n for n in graph.nodes if n.name == "n"}
    return Summands(late, fixed.__contains__, weights.__contains__), loss


def inputs_of_turns() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    a = [torch.randn(3, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    v = torch.randn(3, generator=g, dtype=torch.float64, requires_grad=True)
    w = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    return a, [v, w, torch.tensor(5.0, dtype=torch.float64)]


@pytest.mark.parametrize("name", AFFINE)
def test_what_a_micro_batch_adds_has_the_gradients_of_the_loss(name, monkeypatch):
    graph = traced(lambda a, v, w, n: AFFINE[name](a, v, w, n))
    a, others = inputs_of_turns()
    ((loss,), *_) = in_lockstep(graph, [[[one, *others]] for one in a], node_of_one)
    wanted = torch.autograd.grad(loss, [*a, *others[:2]], allow_unused=True)
    summands, result = summands_of(graph)
    assert summands.breaks(result) == []
    adds = summands.write(graph, result)
    next(n for n in graph.nodes if n.op == "output").args = (adds,)
    graph.eliminate_dead_code()
    parts = _each_alone(graph, a, others, monkeypatch)
    got = torch.autograd.grad(sum(parts), [*a, *others[:2]], allow_unused=True)
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=1e-12, atol=1e-13)
    assert not any(node.target is total for node in graph.nodes)


def _each_alone(graph, a, others, monkeypatch):
    """The same graph on every micro-batch by itself, as the body of a stage runs it."""
    parts = []
    for turn, one in enumerate(a):
        monkeypatch.setattr(turns, "turn", turn)
        parts.append(fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(one, *others))
    return parts


@pytest.mark.parametrize("name", NOT_AFFINE)
def test_what_is_no_sum_breaks(name):
    graph = traced(lambda a, v, w, n: NOT_AFFINE[name](a, v, w, n))
    summands, result = summands_of(graph)
    assert len(summands.breaks(result)) == 1


# --- what runs once for all ---


def test_what_is_made_of_sums_alone_runs_once():
    seen = []

    def noted(x):
        seen.append(x)
        return x + 1

    graph = fx.Graph()
    x = graph.placeholder("x")
    whole = graph.call_function(total, (x,))
    more = graph.call_function(noted, (whole,))
    first = graph.call_function(in_first, (more,))
    own = graph.call_function(operator.sub, (more, x))
    graph.output((more, first, own))
    xs = [torch.tensor(float(i)) for i in range(4)]
    made = in_lockstep(graph, [[[x]] for x in xs], node_of_one)
    assert len(seen) == 1 and seen[0] == 6
    assert [float(first) for ((_, first, _),) in made] == [7, 0, 0, 0]
    assert [float(own) for ((_, _, own),) in made] == [7, 6, 5, 4]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bfloat16, torch.float64])
def test_a_sum_keeps_its_type_and_the_largest_has_no_gradient(dtype):
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(total, (x,)), graph.call_function(peak, (x,))))
    xs = [torch.tensor([i, 1]).to(dtype) for i in range(3)]
    if dtype.is_floating_point:
        xs = [x.requires_grad_() for x in xs]
    (((whole, largest),), *_) = in_lockstep(graph, [[[x]] for x in xs], node_of_one)
    assert whole.dtype == largest.dtype == dtype
    assert whole.tolist() == [3, 3] and largest.tolist() == [2, 1]
    assert not largest.requires_grad
