"""Which collectives the emitted graph has: Megatron-LM's, and no other."""

import pickle
from collections import Counter

import handwritten as hw
import pytest
import torch
from zoo import batch, tiny

from autoshard import autoshard, collectives

VOCAB = 152  # no other size in these models has this value or a half of it


def kinds(sharded) -> Counter:
    found = (collectives.CONVERSIONS.get(n.target) for n in sharded.graph_module.graph.nodes)
    return Counter(kind for kind in found if kind)


def of_one_layer(model_type: str, **options) -> tuple[Counter, Counter]:
    """Primitives of one layer, forward and backward: the difference of three layers and two."""
    three, two = (
        kinds(
            autoshard(
                tiny(model_type, num_hidden_layers=n, n_layer=n),
                {"tp": 2},
                example_inputs=batch(),
                **options,
            )
        )
        for n in (3, 2)
    )
    forward, backward = Counter(), Counter()
    for kind, count in (three - two).items():
        ahead, back = collectives.KINDS[kind]
        forward[ahead] += count
        backward[back] += count
    assert not two - three
    return tuple(
        Counter({k: n for k, n in c.items() if k != "identity"}) for c in (forward, backward)
    )


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_tensor_parallel_layer_is_megatrons(model_type):
    forward, backward = of_one_layer(model_type, sequence_parallel=False)
    assert forward == {"sum": 2}
    assert backward == {"sum": 2}


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_sequence_parallel_layer_is_megatrons(model_type):
    forward, backward = of_one_layer(model_type, sequence_parallel=True)
    assert forward == {"gather": 2, "scatter_sum": 2}
    assert backward == {"gather": 2, "scatter_sum": 2}


def test_data_parallel_moves_no_activation():
    """Only the loss travels, as a sum and a count, whatever the depth."""
    found = [
        kinds(autoshard(tiny("llama", num_hidden_layers=n), {"dp": 2}, example_inputs=batch()))
        for n in (1, 3)
    ]
    assert found[0] == found[1]
    ahead = Counter()
    for kind, count in found[0].items():
        ahead[collectives.KINDS[kind][0]] += count
    assert 1 <= ahead["sum"] <= 2 and set(ahead) <= {"sum", "identity"}


def test_conversions_are_functions_that_graphs_can_print_and_pickle():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for function, kind in collectives.CONVERSIONS.items():
        assert getattr(collectives, kind) is function and function.__doc__
        assert pickle.loads(pickle.dumps(function)) is function
        x = graph.call_function(function, (x, ("tp",), 0, 4))
    graph.output(x)
    code = torch.fx.GraphModule(torch.nn.Module(), graph).code
    assert all(f"autoshard_collectives_{kind}(" in code for kind in collectives.TABLE), code


def test_what_is_on_the_wire_is_transposed():
    """The gradient of a gather is a scattered sum, of a sum of summands nothing or a sum."""
    for kind in collectives.TABLE.values():
        if kind.forward == "gather" and kind.target == "R":
            assert kind.backward == "scatter_sum"
        dual = {"I": "P", "P": "I"}  # of a value that ranks hold equally, ranks sum the gradients
        assert (kind.forward == "sum") == (kind.source == "P" and kind.target in "IR")
        assert (kind.backward == "sum") == (kind.target == "R" and kind.source in dual)


def ancestors(node: torch.fx.Node) -> set[torch.fx.Node]:
    seen, stack = set(), [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return seen


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "no_sp"])
@pytest.mark.parametrize("build", ["llama", "handwritten"])
def test_no_logits_are_gathered_for_the_loss(build, sequence_parallel):
    if build == "llama":
        model, inputs = tiny("llama", vocab_size=VOCAB), batch(VOCAB)
    else:
        model, inputs = hw.GPT(vocab=VOCAB), hw.tokens(vocab=VOCAB)
    sharded = autoshard(
        model, {"tp": 2}, example_inputs=inputs, sequence_parallel=sequence_parallel
    )
    output = next(n for n in sharded.graph_module.graph.nodes if n.op == "output")
    before_the_loss = ancestors(output.all_input_nodes[0])  # both return (loss, logits)
    assert len(before_the_loss) > 20
    for node in before_the_loss:
        if "gather" in collectives.CONVERSIONS.get(node.target, ""):
            shape = getattr(node.meta.get("val"), "shape", ())
            assert {VOCAB, VOCAB // 2}.isdisjoint((*node.args[2:], *shape)), node.format_node()


def test_the_head_is_cut_over_the_vocabulary():
    sharded = autoshard(tiny("llama", vocab_size=VOCAB), {"tp": 2}, example_inputs=batch(VOCAB))
    assert dict(sharded.named_parameters())["lm_head.weight"].shape == (VOCAB // 2, 64)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "no_sp"])
def test_the_collectives_table_states_closed_forms(sequence_parallel):
    sharded = autoshard(
        tiny("llama"), {"tp": 2}, example_inputs=batch(), sequence_parallel=sequence_parallel
    )
    table = sharded.table("collectives")
    words = ("all_gather", "reduce_scatter") if sequence_parallel else ("all_reduce",)
    assert [word for word in (*words, "tp", "bytes", "batch", "seq") if word not in table] == []
