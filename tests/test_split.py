"""Backward in two parts gives what backward in one gives, and computes nothing twice."""

import contextlib
import weakref
from concurrent.futures import ThreadPoolExecutor

import handwritten as hw
import pytest
import torch
from compare import differences
from gloo import launch, results_in
from recompute_jobs import DroppingStack
from split_jobs import (
    Counting,
    Step,
    deferring_graph,
    gradients,
    split_module,
    two_batches,
    without_gradients,
)
from tensor_memory import TensorMemory
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map
from zoo import batch, tiny

from autoshard import MeshSpec, ShardingError, autoshard
from autoshard.api import Source
from autoshard.emit import LINKED, ShardedModule, loss_graph
from autoshard.runtime import zero
from autoshard.runtime.experts import grouped_product
from autoshard.runtime.split import FACTORS, Named, Queue, deferred, deferring, gate
from autoshard.simulate import simulate
from autoshard.verify import _Float64, _float64_by_default, reduce_gradients, split_batch

aten = torch.ops.aten
ALONE = {"dp": 1}


def compiled(model, inputs, **options):
    return autoshard(model, ALONE, example_inputs=inputs, **{"zero": 0, **options})


def in_one_part(sharded, rows, module=None, seed=3):
    """A step as it is, by the module's own graph or by another."""
    torch.manual_seed(seed)
    module = sharded._running.loss_module if module is None else module
    step = Step(without_gradients(sharded), module, rows, split=False).inputs()
    return step, gradients(sharded)


def in_two_parts(sharded, rows, module=None, seed=3):
    torch.manual_seed(seed)
    module = split_module(sharded) if module is None else module
    step = Step(without_gradients(sharded), module, rows).inputs()
    assert not any(g is not None for g in gradients(sharded).values())
    assert len(step.queue)
    step.weights()
    assert not len(step.queue)
    return step, gradients(sharded)


def same(got, want):
    """To the bit; None where there is none."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        here = got[name]
        assert (here is None) == (value is None), name
        assert value is None or torch.equal(here, value), name


# --- what becomes of a graph ---


def test_products_are_deferred_and_other_ops_read_by_a_gate():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.scale = nn.Linear(8, 16), nn.Parameter(torch.ones(16))
            self.low, self.high = nn.Linear(16, 2, bias=False), nn.Linear(2, 8, bias=False)

        def forward(self, x):
            x = self.up(x) * self.scale.exp()
            return {"loss": (x @ (self.high.weight @ self.low.weight).T).square().mean()}

    rows = {"x": torch.randn(4, 8)}
    sharded = compiled(Model(), rows)
    code = split_module(sharded).code.replace("autoshard_runtime_split_", "")
    lines = [line.split(";")[0].strip().replace("torch.ops.aten.", "") for line in code.split("\n")]
    weights, t = "p_model_up_weight, p_model_up_bias", "numpy_t_default"
    assert [line for line in lines if " = " in line] == [
        f"linear_default = deferred(linear.default, [{weights}], inputs_x, {weights})",
        "exp_default = exp.default(p_model_scale)",
        "gate = gate(exp_default)",
        "mul_tensor = mul.Tensor(linear_default, gate)",
        "matmul_default = matmul.default(p_model_high_weight, p_model_low_weight)",
        f"{t} = numpy_T.default(matmul_default)",
        f"matmul_default_1 = deferred(matmul.default, [{t}], mul_tensor, {t})",
        "square_default = square.default(matmul_default_1)",
        "mean_default = mean.default(square_default)",
    ]
    same(in_two_parts(sharded, rows)[1], in_one_part(sharded, rows)[1])


def graph_of(build):
    """A graph of placeholders x (of the batch), w, v (trained) and c (constant)."""
    graph = fx.Graph()
    names = {name: graph.placeholder(name) for name in ("x", "w", "v", "c")}
    graph.output(build(graph.call_function, **names))
    deferring(graph, {"w", "v"}, {"c"})
    graph.lint()
    return [getattr(n.target, "__name__", n.target) for n in graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(
    ("build", "targets"),
    [
        (lambda call, x, w, v, c: call(aten.mm.default, (x, w)), "deferred"),
        (lambda call, x, w, v, c: call(aten.mm.default, (w, x)), "deferred"),
        # both factors are weights: the gradient of each depends on the other
        (lambda call, x, w, v, c: call(aten.addmm.default, (x, w, v)), "gate gate addmm"),
        (
            lambda call, x, w, v, c: call(aten.einsum.default, ("ab,bc,cd", [x, w, w])),
            "gate einsum",
        ),
        (lambda call, x, w, v, c: call(aten.einsum.default, ("ab,bc", [x, w])), "deferred"),
        # a bias alone has no product
        (lambda call, x, w, v, c: call(aten.linear.default, (x, x, w)), "gate linear"),
        # on the weight side only
        (lambda call, x, w, v, c: call(aten.mm.default, (w, v)), "mm gate"),
        (lambda call, x, w, v, c: call(aten.mul.Tensor, (w, c)), "mul gate"),
        (lambda call, x, w, v, c: w, "gate"),
        (lambda call, x, w, v, c: call(aten.mm.default, (x, c)), "mm"),
        (lambda call, x, w, v, c: call(grouped_product, (x, w, c)), "deferred"),
    ],
)
def test_which_ops_are_deferred(build, targets):
    assert [name.partition(".")[0] for name in graph_of(build)] == targets.split()


def test_ops_that_the_simulation_must_see_are_never_deferred():
    names = {getattr(op, "_opname", None) or op.__name__ for op in LINKED}
    assert names.isdisjoint(FACTORS)


# --- the same gradients, nothing computed twice ---


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {}),
        ("llama", {"recompute": "block"}),
        # one rank has units only where its weights lie elsewhere, or are of another type
        ("gpt2", {"zero": 1, "offload": True}),
        ("llama", {"zero": 3, "offload": True}),
        ("llama", {"zero": 3, "param_dtype": torch.bfloat16, "recompute": "block"}),
        ("mixtral", {}),
        ("mixtral", {"zero": 3, "param_dtype": torch.bfloat16, "recompute": "block"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_the_zoo(name, options):
    layers = 2 if "recompute" in options else 1
    sharded = compiled(tiny(name, num_hidden_layers=layers, n_layer=layers), batch(), **options)
    module = split_module(sharded)
    plain, want = in_one_part(sharded, batch())
    step, got = in_two_parts(sharded, batch(), module)
    assert torch.equal(step.loss, plain.loss)
    same(got, want)
    assert step.first.products.keys().isdisjoint({"embedding_dense_backward"})
    assert step.forward.products == plain.forward.products
    assert step.first.products + step.second.products == plain.first.products
    # of every product of an activation and a weight, W has one of the two gradients
    assert (
        step.second.products["mm"] == step.forward.products["mm"] + step.forward.products["addmm"]
    )


@pytest.mark.parametrize(
    ("build", "inputs", "recompute"),
    [
        (hw.ResNet, hw.images, "none"),
        (hw.ResNet, hw.images, "block"),
        (lambda: hw.GPT(tied=True), hw.tokens, "none"),
        (hw.RecurrentDepthGPT, hw.tokens, "block"),
        (hw.EncoderDecoder, hw.translation, "block"),
        (hw.TiedAutoencoder, lambda: {"x": torch.ones(8, 32)}, "none"),
        (hw.InPlace, lambda: hw.vectors(8, 32), "none"),
    ],
    ids="convolutions blocks tied called-again encoder-and-decoder transposed in-place".split(),
)
def test_models_written_by_hand(build, inputs, recompute):
    torch.manual_seed(0)
    sharded = compiled(build(), inputs(), recompute=recompute)
    plain, want = in_one_part(sharded, inputs())
    step, got = in_two_parts(sharded, inputs())
    assert torch.equal(step.loss, plain.loss)
    same(got, want)
    for kind in ("mm", "bmm", "embedding_dense_backward"):
        assert step.first.calls[kind] + step.second.calls[kind] == plain.first.calls[kind]


@pytest.mark.parametrize("p", [0.5, 0.0])
def test_a_recomputed_block_draws_its_masks_again(p):
    torch.manual_seed(0)
    model, rows = DroppingStack(p), {"x": torch.randn(4, 8, 32)}
    plain, want = in_one_part(compiled(model, rows), rows)
    sharded = compiled(model, rows, recompute="block")
    step, got = in_two_parts(sharded, rows)
    assert torch.equal(step.loss, plain.loss)
    same(got, want)
    # the block's last product is left out where only its result would be new
    once = in_one_part(sharded, rows)[0].first.products
    assert step.first.products["addmm"] == once["addmm"]


# --- what it costs ---


def test_what_lives_between_the_parts_are_operands_and_gradients_of_products():
    sharded = compiled(hw.MLP(), hw.vectors(8, 32))
    module, rows = split_module(sharded), hw.vectors(8, 32)
    step = Step(sharded, module, rows)
    with TensorMemory() as memory:
        memory.see(list(sharded.parameters()))
        before = memory.now
        step.inputs()
        # of up and of down the gradient of the result; what they read lived before
        assert memory.now - before == 4 * 8 * (64 + 32)
        step.weights()
        assert memory.now - before == sum(p.nbytes for p in sharded.parameters())


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_weights_that_are_gathered_for_backward_are_let_go_before_the_second_part(
    recompute, monkeypatch
):
    gathered, reduced = [], []
    gather, reduce = zero.Weights.gather, zero.Gathering.reduce

    def gather_noted(self, shards):
        gathered.append(self.unit.name)
        return gather(self, shards)

    def reduce_noted(self, grads):
        reduced.append((self, second.calls["mm"]))
        return reduce(self, grads)

    monkeypatch.setattr(zero.Weights, "gather", gather_noted)
    monkeypatch.setattr(zero.Gathering, "reduce", reduce_noted)
    sharded = compiled(tiny("llama"), batch(), zero=3, offload=True, recompute=recompute)
    step = Step(sharded, split_module(sharded), batch())
    forward = sharded._store.running
    step.inputs()
    assert gathered and sharded._store.gathered == 0 and not reduced
    gathered.clear()
    with Counting() as second:
        step.weights()
    assert gathered == []
    # reductions begin as soon as the gradients of a segment are there, the last one's first
    assert [unit for unit, _ in reduced] == forward.order[::-1]
    done = [count for _, count in reduced]
    assert done == sorted(done) and done[0] < done[1] < done[-1] == second.calls["mm"]


# --- one queue, one forward ---


def test_several_batches_are_alive_at_once():
    sharded = compiled(hw.GPT(), hw.tokens(), recompute="block")
    batches = [hw.tokens(seed=seed) for seed in range(3)]
    without_gradients(sharded)
    for rows in batches:
        sharded.train_step(**rows)
    want = {n: g.clone() for n, g in gradients(sharded).items()}
    module = split_module(without_gradients(sharded))
    steps = [Step(sharded, module, rows) for rows in batches]
    for step in steps[::-1]:
        step.inputs()
    assert not any(g is not None for g in gradients(sharded).values())
    for step in steps:
        step.weights()
    same(gradients(sharded), want)


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_parts_may_run_on_another_thread(recompute):
    """As they do on a device, where autograd has threads of its own."""
    sharded = compiled(hw.GPT(), hw.tokens(), recompute=recompute)
    want = in_one_part(sharded, hw.tokens())[1]
    step = Step(without_gradients(sharded), split_module(sharded), hw.tokens())
    with ThreadPoolExecutor(1) as other:
        other.submit(step.inputs).result()
        other.submit(step.weights).result()
    same(gradients(sharded), want)


def test_frozen_weights_and_unused_ones():
    model = hw.GPT(tied=True)
    model.blocks[0].requires_grad_(False)
    model.norm.weight.requires_grad_(False)
    sharded = compiled(model, hw.tokens())
    got = in_two_parts(sharded, hw.tokens())[1]
    same(got, in_one_part(sharded, hw.tokens())[1])
    assert [n for n, g in got.items() if g is None and not n.startswith("blocks.0")] == [
        "norm.weight"
    ]
    sharded = compiled(hw.Unused(), hw.vectors(8, 32))
    same(in_two_parts(sharded, hw.vectors(8, 32))[1], in_one_part(sharded, hw.vectors(8, 32))[1])


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_weights_frozen_or_thawed_after_compilation(recompute):
    sharded = compiled(hw.GPT(), hw.tokens(), recompute=recompute)
    module = split_module(sharded)
    for frozen in (["blocks.0.up.weight"], ["blocks.1.attn.in_proj.bias", "norm.bias"], []):
        for name, parameter in sharded.named_parameters():
            parameter.requires_grad_(name not in frozen)
        got = in_two_parts(sharded, hw.tokens(), module)[1]
        same(got, in_one_part(sharded, hw.tokens())[1])
        assert [n for n, g in got.items() if g is None] == frozen


def test_what_backward_does_not_come_to_leaves_nothing():
    sharded = compiled(hw.TwoHeads(), {"x": torch.randn(4, 32)})
    program, x = sharded.program, torch.randn(4, 32)
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    module = fx.GraphModule(nn.Module(), deferring_graph(program, graph))
    queue, arguments = Queue(), sharded.arguments((), {"x": x})
    with queue.open():
        left, right = module(*arguments)
    nodes = [weakref.ref(right.grad_fn), weakref.ref(right)]
    left.square().mean().backward()
    assert len(queue) == 2  # trunk and left
    queue.run()
    assert {n for n, g in gradients(sharded).items() if g is not None} == {
        f"{name}.{kind}" for name in ("trunk", "left") for kind in ("weight", "bias")
    }
    del left, right
    assert [ref() for ref in nodes] == [None, None]
    Queue().run()  # nothing to do


def test_inputs_get_gradients_at_once():
    """As a later stage of a pipeline: the input of the graph is the last stage's output."""
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    queue = Queue()
    with queue.open():
        out = deferred(aten.linear.default, [weight], x * 1, weight)
        out = out * gate(weight).sum()
    torch.autograd.backward([out], [torch.ones(4, 8)])
    got, x.grad = x.grad, None
    assert weight.grad is None
    queue.run()
    there, weight.grad = weight.grad, None
    (aten.linear.default(x * 1, weight) * weight.sum()).backward(torch.ones(4, 8))
    assert torch.equal(got, x.grad) and torch.equal(there, weight.grad)


def test_hooks_of_parameters_see_the_second_part():
    seen, queue = [], Queue()
    weight = torch.randn(8, 8, requires_grad=True)
    weight.register_hook(lambda grad: seen.append("grad") or 2 * grad)
    weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    with queue.open():
        out = deferred(aten.mm.default, [weight], torch.ones(8, 8), weight)
    out.sum().backward()
    assert seen == []
    queue.run()
    assert seen == ["grad", "accumulated"]
    assert torch.equal(weight.grad, torch.full((8, 8), 16.0))


def test_without_a_queue_nothing_changes():
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    assert gate(weight) is weight
    out = deferred(aten.mm.default, [weight], x, weight)
    assert out.grad_fn.name() == "MmBackward0"
    with Queue().open(), torch.no_grad():
        assert gate(weight) is weight
        assert not deferred(aten.mm.default, [weight], x, weight).requires_grad


def test_errors_leave_no_queue_open():
    weight, queue = torch.randn(8, 8, requires_grad=True), Queue()
    with pytest.raises(RuntimeError, match="shape"), queue.open():
        deferred(aten.mm.default, [weight], torch.ones(4, 7), weight)
    assert gate(weight) is weight and len(queue) == 0
    with queue.open():
        out = deferred(aten.mm.default, [weight], torch.ones(4, 8), weight)
    out.sum().backward(retain_graph=True)
    with pytest.raises(ShardingError, match="second time"):
        out.sum().backward()
    queue.run()
    assert torch.equal(weight.grad, torch.full((8, 8), 4.0))


# --- ops ---


def ops():
    """Name, op, its arguments, and which of their floating tensors are weights."""
    g = torch.Generator().manual_seed(0)

    def t(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    ids, ends = torch.tensor([[0, 3], [3, 1]]), torch.tensor([2, 2, 5], dtype=torch.int32)
    yield "linear of rows", aten.linear.default, (t(5), t(3, 5), t(3)), (1, 2)
    yield "linear of a batch", aten.linear.default, (t(2, 4, 5), t(3, 5), t(3)), (1, 2)
    yield "weight on the left", aten.matmul.default, (t(3, 5), t(2, 5, 4)), (0,)
    yield "broadcast", aten.matmul.default, (t(7, 1, 4, 5), t(2, 5, 3)), (1,)
    yield "bmm", aten.bmm.default, (t(2, 4, 5), t(2, 5, 3)), (1,)
    yield "addmm", aten.addmm.default, (t(3), t(4, 5), t(5, 3)), (0, 2)
    yield "addmm to an activation", aten.addmm.default, (t(4, 3), t(4, 5), t(5, 3)), (2,)
    yield "baddbmm", aten.baddbmm.default, (t(4, 3), t(2, 4, 5), t(2, 5, 3)), (0, 2)
    yield "conv1d", aten.conv1d.default, (t(2, 4, 9), t(4, 1, 3), t(4), [1], [1], [1], 4), (1, 2)
    yield "conv2d", aten.conv2d.default, (t(2, 4, 6, 6), t(8, 4, 3, 3)), (1,)
    padded = (t(2, 4, 6, 6), t(8, 4, 3, 3), None, [1, 1], "same")
    yield "padded", aten.conv2d.padding, padded, (1,)
    yield "transposed", aten.conv_transpose2d.input, (t(2, 4, 6, 6), t(4, 3, 3, 3), t(3)), (1, 2)
    yield "embedding", aten.embedding.default, (t(5, 3), ids), (0,)
    yield "index", aten.index.Tensor, (t(5, 3), [ids]), (0,)
    yield "einsum", aten.einsum.default, ("bhqd,hed->bqe", [t(2, 3, 4, 5), t(3, 6, 5)]), (1,)
    product = Named("autoshard.runtime.experts", "grouped_product")
    yield "by groups", product, (t(5, 4), t(3, 4, 6), ends), (1,)


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("case", ops(), ids=lambda case: case[0])
def test_ops(case, hooks):
    """``hooks``: on saved tensors, as ZeRO has; all operands then lie in one storage, too."""
    _, op, args, at = case
    given = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    parts = torch.cat([x.flatten() for x in given]).split([x.numel() for x in given])
    lie = [part.view(x.shape) for part, x in zip(parts, given, strict=True)]
    leaves = [(x if hooks else x.clone()).requires_grad_() for x in lie]
    remaining = iter(leaves)
    args = tree_map(lambda x: next(remaining) if any(x is y for y in given) else x, args)
    made, queue = op(*args), Queue()
    grad = torch.randn(made.shape, dtype=torch.float64)
    want = torch.autograd.grad(made, leaves, grad)
    saving = torch.autograd.graph.saved_tensors_hooks(lambda x: (x.detach(),), lambda x: x[0])
    with saving if hooks else contextlib.nullcontext(), queue.open():
        out = deferred(op, [leaves[i] for i in at], *args)
    assert torch.equal(out, made)
    out.backward(grad)
    assert [x.grad is None for x in leaves] == [i in at for i in range(len(leaves))]
    queue.run()
    for leaf, expected in zip(leaves, want, strict=True):
        assert torch.equal(leaf.grad, expected)


def test_a_product_by_groups_computes_the_gradients_that_are_asked_for():
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(2, 8, 8, requires_grad=True)
    ends = torch.tensor([2, 6], dtype=torch.int32)
    queue = Queue()
    with queue.open():
        out = deferred(grouped_product, [weight], x * 1, weight, ends)
    with Counting() as first:
        out.sum().backward()
    with Counting() as second:
        queue.run()
    assert (first.calls["mm"], second.calls["mm"]) == (2, 2)
    out = grouped_product(x, weight, ends).sum()
    with Counting() as once:
        (alone,) = torch.autograd.grad(out, [weight])
    assert once.calls["mm"] <= 4 and torch.equal(alone, weight.grad)


def test_autocast_keeps_no_casts_of_inputs():
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    queue = Queue()
    with torch.autocast("cpu", torch.bfloat16), TensorMemory() as memory:
        with queue.open():
            out = deferred(aten.linear.default, [weight], x * 1, weight)
        out.sum().backward()
        queue.run()
        del out
        # both gradients, and the cast of the weight, which autocast keeps in any backward
        assert memory.now == x.nbytes + weight.nbytes + weight.nbytes // 2
    got, x.grad, weight.grad = (x.grad, weight.grad), None, None
    with torch.autocast("cpu", torch.bfloat16):
        aten.linear.default(x * 1, weight).sum().backward()
    assert torch.equal(got[0], x.grad) and torch.equal(got[1], weight.grad)


# --- all ranks ---


def all_ranks(ranks, rows, split):
    """Losses and gradients of all ranks of a module, in this process."""
    program = ranks[0].program
    graph = fx.Graph()
    graph.output(graph.graph_copy(loss_graph(program), {}))
    if split:
        deferring_graph(program, graph)
    for module in ranks:
        without_gradients(module)
    arguments = [m.arguments((), split_batch(program, rows, r)) for r, m in enumerate(ranks)]
    units, queue = [{**m.units, **m._running.loads} for m in ranks], Queue()
    with _Float64():
        with queue.open() if split else contextlib.nullcontext():
            out = simulate(graph, program.mesh, arguments, units, program.attentions)
        torch.autograd.backward([result[0] for result in out])
        if split:
            assert not any(g is not None for m in ranks for g in gradients(m).values())
        queue.run()
    with torch.no_grad():
        reduce_gradients(program, ranks)
    losses = {f"loss {r}": result[0].detach() for r, result in enumerate(out)}
    return losses | {f"{n} {r}": g for r, m in enumerate(ranks) for n, g in gradients(m).items()}


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("gpt2", "dp=2,tp=2", {}),
        ("llama", "dp=2", {"zero": 3, "recompute": "block"}),
        ("mixtral", "ep=2", {"recompute": "block"}),
    ],
)
@_float64_by_default()
def test_all_ranks_in_one_process(name, mesh, options):
    spec, rows = MeshSpec.of(mesh), batch(b=2, s=8)
    options = {"zero": 0, **options}
    source = Source(tiny(name).double(), spec, rows, options=options, raise_precision=True)
    program = source.program(True)
    ranks = [ShardedModule(program, r, False, source) for r in range(spec.world_size)]
    same(all_ranks(ranks, rows, True), all_ranks(ranks, rows, False))


def test_on_real_processes(tmp_path):
    options = {
        "buckets": {"zero": 0},
        "kept": {"zero": 1},
        "again": {"zero": 3, "recompute": "block"},
    }
    jobs = {name: (two_batches, "handwritten", each) for name, each in options.items()}
    launch({"dp": 2}, jobs, tmp_path)
    ranks = results_in(tmp_path, {"dp": 2})
    for name in options:
        first, second = (rank[name] for rank in ranks)
        assert isinstance(first, dict), first
        assert first["parts"] == second["parts"]  # the same collectives on both ranks
        for result in (first, second):
            assert differences(result["got"], result["want"]) == {} and result["early"] == []
            first_parts, second_parts = result["parts"][:2], result["parts"][2:]
            assert all("reduce_scatter" not in sent for sent, _ in first_parts)
            assert all("all_gather" not in sent for sent, _ in second_parts)
            assert [left for _, left in result["parts"][1:]] == [0, 0, 0]
    sent = [sent for sent, _ in ranks[0]["again"]["parts"]]
    assert all(sent)
