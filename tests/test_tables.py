"""The tables: real content, published closed forms, and readable for deep models."""

import re
from functools import cache

import handwritten as hw
import pytest
import sympy
import torch
from zoo import batch, tiny

from autoshard import autoshard
from autoshard.report import BATCH, SEQUENCE, TABLES, step_collectives

HIDDEN, ITEMSIZE = 64, 4  # of tiny Llama
RANKS_AND_KV_HEADS = [(2, 2), (4, 4), (4, 2)]


@cache
def sharded(
    mesh: str, layers: int = 2, sequence_parallel: bool = True, name: str = "llama", kv: int = 2
):
    model = tiny(name, num_hidden_layers=layers, n_layer=layers, num_key_value_heads=kv)
    return autoshard(model, mesh, example_inputs=batch(), sequence_parallel=sequence_parallel)


def rows(module, name: str) -> list[dict[str, str]]:
    made = TABLES[name](module.program)
    return [dict(zip(made.headers, row, strict=True)) for row in made.rows]


def row(module, name: str, **wanted: str) -> dict[str, str]:
    found = [r for r in rows(module, name) if all(r[k] == v for k, v in wanted.items())]
    assert len(found) == 1, found
    return found[0]


# --- bytes ---


def bytes_of_a_layer(
    tp: int, kv: int, sequence_parallel: bool
) -> dict[tuple[str, str], tuple[int, object]]:
    """Count and bytes over tp of one Llama layer: the difference of three layers and two."""
    total: dict = {}
    for layers, sign in ((3, 1), (2, -1)):
        module = sharded(f"tp={tp}", layers, sequence_parallel, kv=kv)
        for c in step_collectives(module.program):
            if c.axes == "tp" and not c.why.startswith("gradients"):
                count, size = total.get((c.when, c.kind), (0, 0))
                total[c.when, c.kind] = count + sign * c.count, size + sign * c.bytes
    return {key: (count, sympy.expand(size)) for key, (count, size) in total.items() if count}


@pytest.mark.parametrize(("tp", "kv"), RANKS_AND_KV_HEADS)
def test_bytes_of_tensor_parallelism_are_the_published_ones(tp, kv):
    """Two all-reduces each way, 2 (t-1)/t b s h e bytes each (Shoeybi et al. 2019)."""
    activation = BATCH * SEQUENCE * HIDDEN * ITEMSIZE
    each = 2 * sympy.Rational(tp - 1, tp) * activation
    assert bytes_of_a_layer(tp, kv, False) == {
        ("forward", "all_reduce"): (2, 2 * each),
        ("backward", "all_reduce"): (2, 2 * each),
    }


@pytest.mark.parametrize(("tp", "kv"), RANKS_AND_KV_HEADS)
def test_bytes_of_sequence_parallelism_are_the_published_ones(tp, kv):
    """Two all-gathers and two reduce-scatters each way, (t-1)/t b s h e each (Korthikanti 2022)."""
    each = sympy.Rational(tp - 1, tp) * BATCH * SEQUENCE * HIDDEN * ITEMSIZE
    assert bytes_of_a_layer(tp, kv, True) == {
        (when, kind): (2, 2 * each)
        for when in ("forward", "backward")
        for kind in ("all_gather", "reduce_scatter")
    }


def test_bytes_of_data_parallelism_are_the_gradients_reduced_once():
    module = sharded("dp=4")
    sent = [c for c in step_collectives(module.program) if c.why.startswith("gradients")]
    count = sum(p.numel() for p in module.parameters())
    assert [(c.kind, c.axes, c.bytes) for c in sent] == [
        ("all_reduce", "dp", 2 * 3 * count * ITEMSIZE // 4)
    ]
    others = [c for c in step_collectives(module.program) if c not in sent]
    assert {c.axes for c in others} == {"dp"}
    assert not any(getattr(c.bytes, "free_symbols", None) for c in others)


def test_a_fused_weight_counts_each_part_once():
    """GPT-2 over more ranks than parts: q, k and v are pieces of one parameter."""
    module = sharded("dp=2,tp=2", name="gpt2")
    sent = sum(c.bytes for c in step_collectives(module.program) if c.why.startswith("gradients"))
    local = sum(p.numel() for p in module.parameters())
    over_tp = [r["parameter"] for r in rows(module, "params") if "tp" in r["gradient summed over"]]
    extra = sum(dict(module.named_parameters())[n].numel() for n in over_tp)
    assert sent == ITEMSIZE * (local + extra / 2)  # 2 (n-1)/n is 1 for two ranks, 3/2 for four


def test_the_number_beside_a_closed_form_is_its_value_at_the_captured_sizes():
    module = sharded("dp=2,tp=2")
    made = TABLES["collectives"](module.program)
    rows_captured, length = batch()["input_ids"].shape
    assert made.headers[-1] == f"bytes at batch={rows_captured // 2}, sequence={length}"
    for *_, form, number in made.rows:
        value = sympy.sympify(form).subs({BATCH: rows_captured // 2, SEQUENCE: length})
        assert number == sympy.ceiling(value)
    assert made.rows[-1][0] == "step"


# --- axes and parameters ---

KINDS = {
    "llama": {
        "column": "q_proj k_proj v_proj gate_proj up_proj lm_head",
        "row": "o_proj down_proj",
    },
    "gpt2": {"column": "attn.c_attn c_fc lm_head", "row": "attn.c_proj mlp.c_proj"},
}


@pytest.mark.parametrize("name", KINDS)
def test_linears_are_called_column_or_row(name):
    module = sharded("tp=2", name=name)
    got = {r["parameter"]: r["linear"] for r in rows(module, "params") if r["linear"]}
    for kind, modules in KINDS[name].items():
        for suffix in modules.split():
            own = {k: v for k, v in got.items() if k.endswith(f"{suffix}.weight")}
            assert set(own.values()) <= {kind} and (own or suffix == "lm_head"), suffix
    axes = module.table("axes")
    assert "(column)" in axes and "(row)" in axes


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=4"])
def test_local_shapes_are_those_of_the_modules_tensors(mesh):
    module = sharded(mesh)
    real = dict(module.named_parameters())
    whole = dict(tiny("llama").named_parameters())
    listed = rows(module, "params")
    assert {r["parameter"] for r in listed} == set(real)
    for r in listed:
        assert r["local shape"] == str(list(real[r["parameter"]].shape))
        assert r["global shape"] == str(list(whole[r["parameter"]].shape))


def test_axes_say_who_cuts_them_and_why():
    module = sharded("dp=2,tp=2")
    assert row(module, "axes", axis="batch")["cut over"] == "dp (data_parallel)"
    assert row(module, "axes", axis="batch")["size"] == "2*batch"
    assert row(module, "axes", axis="kv")["cut over"] == "tp (tensor_parallel)"
    assert row(module, "axes", axis="sequence")["cut over"] == "tp (sequence_parallel)"
    embed = row(module, "axes", axis="embed")
    assert (embed["cut over"], embed["size"]) == ("-", str(HIDDEN))
    assert all(r["reason"] for r in rows(module, "axes"))


def test_memory_is_that_of_the_modules_tensors():
    module = sharded("dp=2,tp=2")
    held = sum(p.numel() * p.element_size() for p in module.parameters())
    whole = sum(p.numel() * p.element_size() for p in tiny("llama").parameters())
    for what, times in (("parameters", 1), ("gradients", 1), ("AdamW state", 2), ("total", 4)):
        found = row(module, "memory", what=what)
        assert found["bytes on a rank"] == times * held
        assert found["bytes on one device"] == times * whole


# --- the graph ---

GRAPH = """
node                 op             module  global shape   layout                    local shape  collective          bytes
-------------------  -------------  ------  -------------  ------------------------  -----------  ------------------  ---------
p_model_up_weight    placeholder            [64, 32]       dp:R tp:S(hidden)         [32, 32]
p_model_up_bias      placeholder            [64]           dp:R tp:S(hidden)         [32]
p_model_down_weight  placeholder            [32, 64]       dp:R tp:S(hidden)         [32, 32]
p_model_down_bias    placeholder            [32]           dp:R                      [32]
inputs_x             placeholder            [2*batch, 32]  dp:S(batch)               [batch, 32]
inputs_target        placeholder            [2*batch, 32]  dp:S(batch)               [batch, 32]
sym_size_int         sym_size
linear_default       linear column  up      [2*batch, 64]  dp:S(batch) tp:S(hidden)  [batch, 32]
gelu_default         gelu                   [2*batch, 64]  dp:S(batch) tp:S(hidden)  [batch, 32]
linear_default_1     linear row     down    [2*batch, 32]  dp:S(batch) tp:P          [batch, 32]
all_reduce           all_reduce     down    [2*batch, 32]  dp:S(batch)               [batch, 32]  all_reduce over tp  128*batch
add_tensor           add            down    [2*batch, 32]  dp:S(batch)               [batch, 32]
mse_loss_default     mse_loss
"""  # noqa: E501


def test_the_graph_table_of_a_small_model():
    module = autoshard(hw.MLP(), {"dp": 2, "tp": 2}, example_inputs=hw.vectors(4, 32))
    got = [line.split() for line in module.table("graph").splitlines()]
    want = [line.split() for line in GRAPH.strip().splitlines()]
    rules = 1  # a line whose length only says how wide the columns are
    assert [line for i, line in enumerate(got[: len(want)]) if i != rules] == [
        line for i, line in enumerate(want) if i != rules
    ]
    assert [
        line[1] for line in got[len(want) :]
    ] == "mul new_full all_reduce div all_reduce".split()


def test_the_graph_table_lists_every_node_and_collective():
    module = sharded("dp=2,tp=2")
    listed = rows(module, "graph")
    nodes = [n for n in module.program.graph.nodes if n.op != "output"]
    assert [r["node"] for r in listed] == [n.name for n in nodes]
    over = [r for r in listed if r["collective"]]
    assert len(over) == len(module.program.conversions) > 8
    gathers = [r for r in over if r["collective"] == "all_gather over tp"]
    for r in gathers:
        assert r["local shape"] == f"[batch, sequence, {HIDDEN}]"
        assert r["global shape"] == f"[2*batch, sequence, {HIDDEN}]"
        assert r["bytes"] == BATCH * SEQUENCE * HIDDEN * ITEMSIZE / 2
    norm = next(r for r in listed if r["module"].endswith("input_layernorm") and r["op"] == "pow")
    assert norm["layout"] == "dp:S(batch) tp:S(sequence)"
    assert norm["local shape"] == f"[batch, sequence/2, {HIDDEN}]"


# --- form ---


def test_repeated_layers_share_their_rows():
    two, five = sharded("dp=2,tp=2", 2), sharded("dp=2,tp=2", 5)
    for name in ("axes", "collectives"):
        assert len(rows(two, name)) == len(rows(five, name)), name
        assert not re.search(r"layers\.\d", five.table(name))
    for name in ("params", "graph"):
        assert "layers.4." in five.table(name)
    assert row(five, "axes", axis="kv")["count"] == 5
    assert len(str(five).splitlines()) == len(str(two).splitlines()) <= 10


@pytest.mark.parametrize("name", TABLES)
def test_every_table_comes_in_every_format(name):
    module = sharded("dp=2,tp=2")
    made = TABLES[name](module.program)
    plain, github, html = (module.table(name, format=f) for f in ("plain", "github", "html"))
    assert plain.splitlines()[0].split() == " ".join(made.headers).split()
    assert len(plain.splitlines()) == len(made.rows) + 2
    assert github.startswith("| ") and github.count("\n") == len(made.rows) + 1
    assert html.startswith("<table>") and html.count("<tr>") == len(made.rows) + 1


def test_unknown_tables_and_formats_are_refused():
    module = sharded("tp=2")
    with pytest.raises(ValueError, match="no table 'layers': there are axes, params"):
        module.table("layers")
    with pytest.raises(ValueError, match="no format 'markdown'"):
        module.table("axes", format="markdown")


def test_the_passes_table_says_what_each_pass_changed():
    module = sharded("dp=2,tp=2")
    names = [r["pass"] for r in rows(module, "passes")]
    assert names[:3] == ["canonicalize", "infer_axes", "data_parallel"]
    assert names[-2:] == ["partition", "all"]
    assert "assignments 0 -> 1" in row(module, "passes", **{"pass": "data_parallel"})["changed"]
    assert "collectives 0 ->" in row(module, "passes", **{"pass": "partition"})["changed"]
    assert all(float(r["seconds"]) >= 0 for r in rows(module, "passes"))


def test_the_summary_names_mesh_strategies_and_collectives():
    text = str(sharded("dp=2,tp=2"))
    for part in (
        "dp=2,tp=2, rank 0",
        "tensor_parallel: ",
        "kv -> tp",
        "sequence_parallel: sequence -> tp",
        "all_gather over tp",
        "gradients summed over dp",
    ):
        assert part in text
    assert torch.nn.Module.__repr__ is not type(sharded("dp=2,tp=2")).__repr__
