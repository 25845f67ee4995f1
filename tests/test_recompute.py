"""recompute="block": the same gradients from the inputs of blocks; what it saves and costs."""

import operator

import handwritten as hw
import pytest
import torch
from compare import differences
from filelock import FileLock
from gloo import gradients_of, launch, results_in
from recompute_jobs import DroppingStack, dropout, saved_in_table, step
from torch import fx, nn
from zoo import batch, tiny

from autoshard import ShardingError, autoshard, simulate, verify
from autoshard.activations import forward, measured, predicted
from autoshard.outline import RECOMPUTE, draws, outlined
from autoshard.report import step_collectives
from autoshard.runtime import recompute as runtime

ALONE = {"dp": 1, "tp": 1}


def zoo(name: str, **over) -> nn.Module:
    model = tiny(name, **over)
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "batched_mm"
    return model


def blocks(program) -> list[str]:
    return list(dict.fromkeys(b for n in program.graph.nodes if (b := n.meta.get(RECOMPUTE))))


def rows_of(table: str, start: str) -> list[str]:
    return [line for line in table.splitlines() if line.startswith(start)]


# --- the same numbers ---


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=4"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "bert"])
def test_the_zoo_trains_like_one_device(name, mesh):
    report = verify(zoo(name), mesh, batch(), recompute="block")
    assert report.ok, str(report)
    assert len(blocks(report.sharded.program)) == 2
    assert report.sharded.program.notes == []


@pytest.mark.parametrize(
    ("build", "inputs", "count"),
    [(hw.RecurrentDepthGPT, hw.tokens, 3), (hw.EncoderDecoder, hw.translation, 4)],
    ids=["called three times", "encoder and decoder"],
)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_blocks_that_are_called_again_or_read_others(build, inputs, count, sequence_parallel):
    report = verify(
        build(), "dp=2,tp=2", inputs(), recompute="block", sequence_parallel=sequence_parallel
    )
    assert report.ok, str(report)
    assert len(blocks(report.sharded.program)) == count


def test_buffers_are_updated_once():
    report = verify(hw.ResNet(), "dp=2", hw.images(), recompute="block")
    assert report.ok, str(report)
    assert any(row.kind.startswith("buffer") for row in report.rows)
    # a convolution alone frees nothing
    assert not any(n.meta.get(RECOMPUTE) == "stem.0" for n in report.sharded.program.graph.nodes)


def test_a_model_without_blocks_says_so():
    report = verify(hw.MLP(), "dp=2,tp=2", hw.vectors(8, 32), recompute="block")
    assert report.ok and blocks(report.sharded.program) == []
    assert "no blocks" in str(report.sharded)


def test_verify_computes_blocks_again(monkeypatch):
    """Counted: the ops that all ranks run, with recomputation and without."""
    run, calls = simulate.run_node, []
    monkeypatch.setattr(
        simulate, "run_node", lambda node, *rest: calls.append(node) or run(node, *rest)
    )
    counts = {}
    for recompute in ("none", "block"):
        calls.clear()
        verify(hw.GPT(), "tp=2", hw.tokens(), steps=1, recompute=recompute)
        counts[recompute] = len(calls)
    assert counts["block"] > 1.2 * counts["none"]


def gradients(model, inputs, recompute, seed=3, **how):
    """Loss and gradients of one step on a mesh of one rank."""
    sharded = autoshard(model, ALONE, inputs, recompute=recompute)
    torch.manual_seed(seed)
    if how.get("own_loss"):
        loss = sharded(**inputs).logits.square().mean()
        loss.backward()
    else:
        loss = sharded.train_step(**inputs)
    return loss.detach(), gradients_of(sharded), torch.get_rng_state()


@pytest.mark.parametrize("own_loss", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_recomputed_gradients_are_equal_to_the_bit(name, own_loss):
    want = gradients(zoo(name), batch(), "none", own_loss=own_loss)
    got = gradients(zoo(name), batch(), "block", own_loss=own_loss)
    assert torch.equal(got[0], want[0])
    assert (
        all(torch.equal(got[1][k], v) for k, v in want[1].items())
        and got[1].keys() == want[1].keys()
    )


@pytest.mark.parametrize("p", [0.5, 0.0])
def test_dropout_in_a_block_draws_its_masks_again(p):
    torch.manual_seed(0)
    model, inputs = DroppingStack(p), {"x": torch.randn(4, 8, 32)}
    want, got = (gradients(model, inputs, recompute) for recompute in ("none", "block"))
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(got[1][k], v) for k, v in want[1].items())
    assert torch.equal(got[2], want[2])  # the stream goes on as without
    other = gradients(model, inputs, "block", seed=4)
    assert torch.equal(got[0], other[0]) == (p == 0)


def test_random_states_are_kept_only_for_blocks_that_draw():
    inputs = {"x": torch.randn(4, 8, 32)}
    for p, asked in ((0.5, "True"), (0.0, "False")):
        sharded = autoshard(DroppingStack(p), ALONE, inputs, recompute="block")
        assert f"recomputed(layers_0, {asked}," in sharded.code
        assert any(draws(n) for n in sharded.program.graph.nodes) == (p > 0)


def test_nothing_is_computed_twice_without_gradients(monkeypatch):
    sharded = autoshard(hw.GPT(), ALONE, hw.tokens(), recompute="block")
    monkeypatch.setattr(runtime, "checkpoint", None)
    with torch.no_grad():
        sharded(**hw.tokens())
        sharded.eval()(**hw.tokens())


def test_evaluation_with_gradients_recomputes_too():
    inputs, found = hw.tokens(), {}
    for recompute in ("none", "block"):
        torch.manual_seed(0)
        sharded = autoshard(hw.GPT(), ALONE, inputs, recompute=recompute).eval()
        sharded(**inputs).loss.backward()
        found[recompute] = gradients_of(sharded)
    assert all(torch.equal(found["block"][k], v) for k, v in found["none"].items())


def test_other_sizes_and_a_second_backward():
    model = zoo("llama")
    one, two = (autoshard(model, ALONE, batch(), recompute=r) for r in ("none", "block"))
    for b, s in ((6, 20), (2, 9)):
        for sharded in (one, two):
            sharded.zero_grad()
            loss = sharded(**batch(b=b, s=s)).loss
            loss.backward(retain_graph=True)
            loss.backward()
        assert differences(gradients_of(two), gradients_of(one)) == {}


# --- handles of gathered weights ---


def start_gather(x):
    return {"weight": x, "log": LOG}


def wait_gather(handle, unit):
    assert isinstance(unit, nn.Module)
    handle["log"].append("wait")
    return [handle["weight"] * 2]


def release(handle):
    handle["log"].append("release")


LOG: list[str] = []


def test_handles_cross_the_boundary_and_are_waited_for_again():
    """A release at the end of a block is not run again."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    handle = graph.call_function(start_gather, (w,))
    wait = graph.call_function(wait_gather, (handle, None))
    weight = graph.call_function(operator.getitem, (wait, 0))
    y = graph.call_function(torch.sigmoid, (graph.call_function(torch.mul, (x, weight)),))
    y = graph.call_function(torch.add, (y, 1))
    freed = graph.call_function(release, (handle,))
    nodes = list(graph.nodes)
    graph.output((y,))
    kept = nodes[nodes.index(wait) : nodes.index(freed) + 1]
    for node in kept:
        node.meta[RECOMPUTE] = "layers.0"
    root = nn.Module()
    root.unit = nn.Module()
    for node in (wait, weight):  # the second stands in the middle of the run
        with graph.inserting_before(node):
            wait.update_arg(1, graph.get_attr("unit")) if node is wait else graph.get_attr("unit")
    module = outlined(graph, root)
    assert [n.op for n in module.graph.nodes].count("call_function") == 2
    LOG.clear()
    x, w = torch.randn(3), torch.randn(3, requires_grad=True)
    module(x, w)[0].sum().backward()
    assert LOG == ["wait", "release", "wait"]
    s = torch.sigmoid(2 * x * w.detach())
    assert torch.allclose(w.grad, 2 * x * s * (1 - s))


# --- what it is ---


@pytest.mark.parametrize("call", [autoshard, verify])
def test_unknown_values_are_refused_with_those_there_are(call):
    with pytest.raises(ShardingError, match=r"(?s)'blocks'.*'none', 'block'"):
        call(hw.MLP(), "tp=2", hw.vectors(8, 32), recompute="blocks")


def test_without_it_the_module_is_as_before():
    sharded = autoshard(hw.GPT(), "tp=2", hw.tokens())
    assert "recomputed" not in sharded.code and not list(sharded.graph_module.children())
    assert "recomput" not in sharded.table("graph") + sharded.table("memory")


def test_the_tables_show_it():
    sharded = autoshard(hw.GPT(), "tp=2", hw.tokens(), recompute="block")
    assert "blocks recomputed 0 -> 2" in sharded.table("passes")
    graph = sharded.table("graph").splitlines()
    assert graph[0].rstrip().endswith("recomputed")
    again = [line for line in graph if line.rstrip().endswith("yes")]
    assert again and all("blocks." in line for line in again)
    assert "blocks_0 = self.blocks_0" in sharded.code and "# blocks_1:" in sharded.code


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_layer_repeats_all_collectives_but_its_last(sequence_parallel):
    sharded = autoshard(
        zoo("llama"), "tp=2", batch(), recompute="block", sequence_parallel=sequence_parallel
    )
    again = {}
    for c in step_collectives(sharded.program):
        if c.when == "recompute":
            again[c.kind] = again.get(c.kind, 0) + c.count
    layers = 2
    if sequence_parallel:
        assert again == {"all_gather": 2 * layers, "reduce_scatter": layers}
    else:
        assert again == {"all_reduce": layers}


# --- memory ---


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_the_saved_bytes_are_predicted(name, recompute):
    sharded = autoshard(zoo(name), ALONE, batch(), recompute=recompute)
    for b, s in ((4, 32), (2, 16), (8, 48)):
        form = predicted(sharded.program).saved
        sizes = dict(zip(sharded.program.hints, (b, s), strict=True))
        got = measured(sharded, **batch(b=b, s=s))
        assert got == form.subs(sizes), (b, s)
    assert saved_in_table(sharded.program) == measured(sharded, **batch())


@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (lambda: zoo("bert"), batch),
        (lambda: zoo("mixtral"), batch),
        (lambda: zoo("gpt2", attn="eager"), batch),
        (lambda: DroppingStack(0.5), lambda: {"x": torch.randn(4, 8, 32)}),
        (hw.EncoderDecoder, hw.translation),
        (hw.ResNet, hw.images),
    ],
    ids=["bert", "mixtral", "eager attention", "dropout", "encoder and decoder", "resnet"],
)
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_the_saved_bytes_of_others_are_predicted(build, inputs, recompute):
    sharded = autoshard(build(), ALONE, inputs(), recompute=recompute)
    assert saved_in_table(sharded.program) == measured(sharded, **inputs())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_blocks_save_their_inputs_only(name):
    """With eight layers: a fraction, which grows by one input of a block for each layer."""
    saved = {}
    for layers in (4, 8):
        for recompute in ("none", "block"):
            model = zoo(name, num_hidden_layers=layers, n_layer=layers)
            sharded = autoshard(model, ALONE, batch(), recompute=recompute)
            saved[layers, recompute] = measured(sharded, **batch())
    assert saved[8, "block"] < 0.12 * saved[8, "none"]
    inputs = 4 * 32 * 64 * 4
    assert saved[8, "block"] - saved[4, "block"] == 4 * inputs


def test_one_block_is_what_recomputing_it_saves():
    """The peak of one block: what a model of one more block saves without recomputation."""
    saved = [
        forward(autoshard(zoo("llama", num_hidden_layers=n), ALONE, batch()).program).saved
        for n in (1, 2)
    ]
    blocks = forward(autoshard(zoo("llama"), ALONE, batch(), recompute="block").program).blocks
    inputs = 4 * 32 * 64 * 4
    assert blocks == [saved[1] - saved[0] - inputs] * 2


# --- real processes ---


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, worker_id):
    root = tmp_path_factory.getbasetemp()
    root = root if worker_id == "master" else root.parent
    folder, sizes = root / "recompute", {"dp": 2, "tp": 2}
    jobs = {f"{n} {r}": (step, n, r) for n in ("llama", "gpt2") for r in ("none", "block")}
    jobs["dropout"] = (dropout,)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            launch(sizes, jobs, folder)
    return results_in(folder, sizes)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_on_real_processes(ranks, name):
    for result in ranks:
        none, block = result[f"{name} none"], result[f"{name} block"]
        assert isinstance(none, dict) and isinstance(block, dict), (none, block)
        assert torch.equal(none["loss"], block["loss"])
        assert differences(block["gradients"], none["gradients"]) == {}
        for got in (none, block):
            assert got["called"] == got["table"]
            assert got["measured"] == got["predicted"]
        assert none["again"] == 0
        assert block["again"] == sum(block["called"].values()) - sum(none["called"].values()) == 6
        assert block["measured"] < 0.5 * none["measured"]


def test_masks_of_parts_are_drawn_again_on_real_processes(ranks):
    for result in ranks:
        assert isinstance(result["dropout"], dict), result["dropout"]
        assert len(result["dropout"]) == 12 and all(result["dropout"].values()), result["dropout"]
