"""The tables: real content, published closed forms, and readable for deep models."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import handwritten as hw
import pytest
import sympy
import torch
from torch import nn
from zoo import batch, tiny

from autoshard import MeshSpec, autoshard
from autoshard.errors import MeshError
from autoshard.groups import crosses, groups, listed, warning
from autoshard.mesh import SubMesh
from autoshard.report import BATCH, FEW, PRESENT, SEQUENCE, SHAPE, TABLES, step_collectives
from autoshard.runtime.buckets import Reducer
from autoshard.shapes import closed_forms
from passes import chain

HIDDEN, ITEMSIZE = 64, 4  # of tiny Llama
RANKS_AND_KV_HEADS = [(2, 2), (4, 4), (4, 2)]


@cache
def sharded(
    mesh: str,
    layers: int = 2,
    sequence_parallel: bool = True,
    name: str = "llama",
    kv: int = 2,
    zero: int = 0,
):
    model = tiny(name, num_hidden_layers=layers, n_layer=layers, num_key_value_heads=kv)
    return autoshard(
        model, mesh, example_inputs=batch(), sequence_parallel=sequence_parallel, zero=zero
    )


def rows(module, name: str) -> list[dict[str, str]]:
    made = TABLES[name](module.program)
    return [dict(zip(made.headers, row, strict=True)) for row in made.rows]


def row(module, name: str, **wanted: str) -> dict[str, str]:
    found = [r for r in rows(module, name) if all(r[k] == v for k, v in wanted.items())]
    assert len(found) == 1, found
    return found[0]


def before(shape: str) -> str:
    """The shape of the model, of ``[2*batch→batch, 64]``."""
    return re.sub("→[^,\\]]*", "", shape)


def after(shape: str) -> str:
    """The shape on a rank."""
    return re.sub("[^,\\[ ]*→", "", shape).strip()


# --- bytes ---


def bytes_of_a_layer(
    tp: int, kv: int, sequence_parallel: bool
) -> dict[tuple[str, str], tuple[int, object]]:
    """Count and bytes over tp of one Llama layer: the difference of three layers and two."""
    total: dict = {}
    for layers, sign in ((3, 1), (2, -1)):
        module = sharded(f"tp={tp}", layers, sequence_parallel, kv=kv)
        for c in step_collectives(module.program):
            if c.axes == "tp" and not c.why.startswith(("gradients", "flags")):
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
    over_tp = [r["parameter"] for r in rows(module, "params") if "tp" in r["gradient over"]]
    extra = sum(dict(module.named_parameters())[n].numel() for n in over_tp)
    assert sent == ITEMSIZE * (local + extra / 2)  # 2 (n-1)/n is 1 for two ranks, 3/2 for four


@pytest.mark.parametrize(("mesh", "name"), [("dp=2,tp=2", "llama"), ("dp=2,tp=2", "gpt2")])
def test_gradient_rows_count_the_buckets_that_are_launched(monkeypatch, mesh, name):
    module = sharded(mesh, name=name)
    for limit in (25 * 2**20, 20_000):
        monkeypatch.setattr("autoshard.cost.BUCKET_BYTES", limit)
        reducer = Reducer(module, limit)
        for c in step_collectives(module.program):
            axes = tuple(c.axes.split(","))
            if c.why.startswith("gradients"):
                held = [b for b in reducer.buckets if b.axes == axes]
                assert c.count == len(held) and (c.count > 1) == (
                    limit == 20_000 and c.axes == "dp"
                )
                ranks = 2 ** len(axes)
                assert c.bytes == sum(2 * (ranks - 1) * b.numel * ITEMSIZE // ranks for b in held)
            elif c.why == PRESENT:
                keys, flags = reducer._present[None, axes]
                ranks = 2 ** len(axes)
                assert (c.count, c.bytes) == (1, 2 * (ranks - 1) * len(keys) * ITEMSIZE // ranks)


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
        assert before(r[SHAPE]) == str(list(whole[r["parameter"]].shape))
        assert after(r[SHAPE]) == str(list(real[r["parameter"]].shape))


def test_axes_say_who_cuts_them_and_why():
    module = sharded("dp=2,tp=2")
    assert row(module, "axes", axis="batch")["cut over"] == "dp (data_parallel)"
    assert row(module, "axes", axis="batch")["size"] == "2*batch"
    assert row(module, "axes", axis="kv")["cut over"] == "tp (tensor_parallel)"
    assert row(module, "axes", axis="sequence")["cut over"] == "tp (sequence_parallel)"
    embed = row(module, "axes", axis="embed")
    assert (embed["cut over"], embed["size"]) == ("-", str(HIDDEN))
    assert all(r["reason"] for r in rows(module, "axes"))


def test_an_axis_that_tp_does_not_divide_says_so():
    module = sharded("tp=3", kv=4)
    heads = row(module, "axes", axis="heads")
    assert heads["reason"] == "tp=3 does not divide 4: whole on every rank"
    assert heads["cut over"] == "-"


def test_a_mesh_without_tensor_parallelism_leaves_axes_to_nobody():
    assert row(sharded("dp=2"), "axes", axis="kv")["reason"] == "no strategy of this mesh cuts it"


@pytest.mark.parametrize("name", ["llama", "gpt2", "deepseek_v3"])
def test_no_two_axes_of_a_table_share_a_name(name):
    module = sharded("tp=2", name=name)
    names = [r["axis"] for r in rows(module, "axes") if r["axis"] != "-"]
    assert len(set(names)) == len(names)
    if name == "llama":
        assert "hidden 2" in names  # the half of a head that is rotated is the first one
        up = row(module, "params", parameter="model.layers.0.mlp.up_proj.weight")
        assert up["axes"] == "[hidden 2, embed]" and up["layout"] == "tp:S(hidden 2)"


def test_memory_is_that_of_the_modules_tensors():
    module = sharded("dp=2,tp=2")
    held = sum(p.numel() * p.element_size() for p in module.parameters())
    whole = sum(p.numel() * p.element_size() for p in tiny("llama").parameters())
    kinds = {"parameters": 1, "gradients": 1, "optimizer state": 2, "held between steps": 4}
    for what, times in kinds.items():
        found = row(module, "memory", what=what)
        assert found["bytes on a rank"] == times * held
        assert found["bytes on one device"] == times * whole


# --- the graph ---

GRAPH = """
node              op             module    global shape    layout                    local shape    collective              bytes
----------------  -------------  --------  --------------  ------------------------  -------------  ------------------  ---------
up.weight         placeholder              [64, 32]        dp:R tp:S(hidden)         [32, 32]
up.bias           placeholder              [64]            dp:R tp:S(hidden)         [32]
down.weight       placeholder              [32, 64]        dp:R tp:S(hidden)         [32, 32]
down.bias         placeholder              [32]            dp:R                      [32]
x                 placeholder              [2*batch, 32]   dp:S(batch)               [batch, 32]
target            placeholder              [2*batch, 32]   dp:S(batch)               [batch, 32]
sym_size_int      sym_size
linear_default    linear column  up        [2*batch, 64]   dp:S(batch) tp:S(hidden)  [batch, 32]
gelu_default      gelu                     [2*batch, 64]   dp:S(batch) tp:S(hidden)  [batch, 32]
linear_default_1  linear row     down      [2*batch, 32]   dp:S(batch) tp:P          [batch, 32]
all_reduce        all_reduce     down      [2*batch, 32]   dp:S(batch)               [batch, 32]    all_reduce over tp  128*batch
add_tensor        add            down      [2*batch, 32]   dp:S(batch)               [batch, 32]
mse_loss_default  mse_loss                                                           []
"""  # noqa: E501


def test_the_graph_table_of_a_small_model():
    module = autoshard(hw.MLP(), {"dp": 2, "tp": 2}, example_inputs=hw.vectors(4, 32), zero=0)
    got = [line.split() for line in module.table("graph").splitlines()]
    want = [line.split() for line in GRAPH.strip().splitlines()]
    rules = 1  # a line whose length only says how wide the columns are
    assert [line for i, line in enumerate(got[: len(want)]) if i != rules] == [
        line for i, line in enumerate(want) if i != rules
    ]
    assert [line[1] for line in got[len(want) :]] == "mul full all_reduce div all_reduce".split()


def test_the_graph_table_lists_every_node_and_collective():
    module = sharded("dp=2,tp=2")
    listed = rows(module, "graph")
    nodes = [n for n in module.program.graph.nodes if n.op != "output"]
    known = {k: p.name for k, p in module.program.values.items()} | module.program.inputs
    assert [r["node"] for r in listed] == [known.get(n.name, n.name) for n in nodes]
    over = [r for r in listed if r["collective"]]
    assert len(over) == len(module.program.conversions) > 8
    gathers = [r for r in over if r["collective"] == "all_gather over tp" and r["layout"]]
    assert len(gathers) > 4
    for r in gathers:
        assert r["local shape"] == f"[batch, sequence, {HIDDEN}]"
        assert r["global shape"] == f"[2*batch, sequence, {HIDDEN}]"
        assert r["bytes"] == BATCH * SEQUENCE * HIDDEN * ITEMSIZE / 2
    norm = next(r for r in listed if r["module"].endswith("input_layernorm") and r["op"] == "pow")
    assert norm["layout"] == "dp:S(batch) tp:S(sequence)"
    assert norm["local shape"] == f"[batch, sequence/2, {HIDDEN}]"


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=2", "tp=4"])
def test_every_tensor_of_the_graph_has_a_shape(mesh):
    """Those that a rule makes for its own local form, too: the mask of an embedding's rows, the
    sums of a loss over a vocabulary that is cut."""
    module = sharded(mesh)
    blank = [r["op"] for r in rows(module, "graph") if not r["local shape"]]
    assert set(blank) <= {"sym_size", "local_start", "local_size", "mul", "getitem"}, blank
    if "tp" in mesh:
        mask = next(r for r in rows(module, "graph") if r["op"] == "ge")
        assert mask["local shape"] == "[batch, sequence]"


def test_shapes_in_the_graph_table_are_those_of_a_rank():
    """At other sizes than those captured."""
    found = {}

    class Shapes(torch.fx.Interpreter):
        def run_node(self, node):
            out = super().run_node(node)
            if isinstance(out, torch.Tensor):
                found[node] = tuple(out.shape)
            return out

    module = sharded("tp=1")
    alone = module.program
    Shapes(alone.graph_module).run(*module.arguments((), batch(b=6, s=20)))
    at = dict(zip(alone.hints, (6, 20), strict=True))
    for node, shape in closed_forms(alone).items():
        assert tuple(sympy.sympify(s).subs(at) for s in shape) == found[node], node
    assert len(closed_forms(alone)) == len(found)


# --- attentions ---

ATTENTION = """
attentions at batch=4, sequence=32      count  how           heads    mask    tokens                 bytes    FLOPs, least     most    most/mean
------------------------------------  -------  ------------  -------  ------  --------  ------------------  --------------  -------  -----------
model.layers.*.self_attn                    2  ring over cp  4 on 2   causal  zigzag    768*batch*sequence         540,672  540,672         1.00
"""  # noqa: E501

ATTENTION_ON_A_SQUARE = """
attentions at batch=4, sequence=32      count  how                           heads    mask    tokens                                            bytes    FLOPs, least     most    most/mean
------------------------------------  -------  ----------------------------  -------  ------  --------------------------------------  ------------------  --------------  -------  -----------
model.layers.*.self_attn                    2  ring over cp; heads over tp   2 on 1   causal  contiguous: the last rank reads most    384*batch*sequence         139,264  401,408         1.48
"""  # noqa: E501


@pytest.mark.parametrize(
    ("mesh", "balance", "want"),
    [("cp=2", True, ATTENTION), ("cp=2,tp=2", False, ATTENTION_ON_A_SQUARE)],
)
def test_the_table_of_attentions_of_a_small_model(mesh, balance, want):
    made = autoshard(tiny("llama"), mesh, batch(), passes=chain(zero=0, balance=balance))
    got = [line.split() for line in made.table("attention").splitlines()]
    assert got[0] == want.split("\n")[1].split()
    assert got[2:] == [line.split() for line in want.strip().split("\n")[2:]]


def test_without_context_parallelism_attentions_are_whole_or_cut_by_heads():
    for mesh, how, heads in (("dp=2", "whole", "4 on 4"), ("tp=2", "heads over tp", "2 on 2")):
        found = row(sharded(mesh), "attention", count=2)
        assert (found["how"], found["heads"], found["tokens"]) == (how, heads, "whole")
        assert (found["bytes"], found["mask"], found["most/mean"]) == (0, "causal", "1.00")


def test_the_flops_of_attentions_are_those_of_the_pairs_that_are_read():
    """Two products of 2 d FLOPs a pair, over heads, rows and layers; half of them is causal."""
    rows_of, length = batch()["input_ids"].shape
    pairs = length * (length + 1) // 2
    found = row(sharded("dp=2"), "attention", count=2)
    assert found["most"] == 2 * (rows_of // 2) * 4 * pairs * 4 * 16


# --- groups of ranks ---

GROUPS = """
over      size    groups  ranks     crosses nodes    sends in a step                                               bytes    bytes at batch=4, sequence=16
------  ------  --------  --------  ---------------  ----------------------------------------------  -------------------  -------------------------------
dp           2         2  0 2; 1 3  yes              4 all_reduce                                                 45,760                           45,760
dp,tp        4         1  0-3       yes              2 all_reduce                                                 15,066                           15,066
tp           2         2  0 1; 2 3  no               10 all_gather, 3 all_reduce, 10 reduce_scatter  1292*batch*sequence                           82,688
"""  # noqa: E501


def test_the_table_of_groups_of_a_small_model():
    module = autoshard(hw.GPT(), "dp=2,tp=2", hw.tokens(8), zero=0)
    got = module.table("groups", ranks_per_node=2).strip().splitlines()
    want = GROUPS.strip().splitlines()
    assert [line.split() for line in got[2:]] == [line.split() for line in want[2:]]
    assert got[0].split() == want[0].split()


def test_groups_send_what_the_collectives_of_a_step_do():
    for mesh in ("dp=2,tp=2", "dp=2,cp=2", "tp=4"):
        module = sharded(mesh, zero=1)
        step = step_collectives(module.program)
        listed_ = rows(module, "groups")
        assert {r["over"] for r in listed_} == {c.axes for c in step}
        assert sympy.expand(sum(r["bytes"] for r in listed_) - sum(c.bytes for c in step)) == 0
        for r in listed_:
            assert r["size"] * r["groups"] == module.program.mesh.mesh.world_size


@pytest.mark.parametrize("mesh", ["dp=2,tp=3", "pp=2,dp=2,tp=2", "pp=3,cp=2,ep=2", "tp=4"])
def test_ranks_of_a_group_differ_only_along_its_axes(mesh):
    spec = MeshSpec.parse(mesh)
    for name in spec.names:
        found = groups(SubMesh(spec), (name,))
        assert sorted(sum(found, [])) == list(range(spec.world_size))
        for group in found:
            at = [spec.coordinate(rank) for rank in group]
            assert [a[name] for a in at] == list(range(spec.size(name)))
            assert len({tuple(a[n] for n in spec.names if n != name) for a in at}) == 1
    assert groups(SubMesh(spec), spec.names) == [list(range(spec.world_size))]


def test_groups_of_sub_axes():
    mesh = SubMesh(MeshSpec(dp=2, tp=4), factors=(("tp", (2, 2)),))
    assert groups(mesh, ("tp.0",)) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups(mesh, ("dp", "tp.1")) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert groups(mesh, ("tp",)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([[0, 1, 2, 3], [4, 5, 6, 7]], "0-3; 4-7"),
        ([[0, 4], [1, 5]], "0 4; 1 5"),
        ([[2 * i, 2 * i + 1] for i in range(8)], "0 1; 2 3; 4 5; 6 7; …"),
        ([list(range(0, 64, 8))], "0 8 16 … 56"),
        ([[0, 1, 2, 6, 7, 8]], "0-2 6-8"),
    ],
)
def test_ranks_are_shortened(found, text):
    assert listed(found) == text


def test_groups_cross_nodes_where_their_ranks_are_on_several():
    pairs = groups(SubMesh(MeshSpec(dp=2, tp=2)), ("tp",))
    assert [crosses(pairs, n) for n in (1, 2, 3, 4)] == ["yes", "no", "some", "no"]


@pytest.mark.parametrize(
    ("mesh", "ranks_per_node", "words"),
    [
        ("dp=2,tp=4", 2, "tp=4 over several nodes: the 4 ranks of tp do not divide the 2"),
        ("dp=4,tp=2", 3, "tp=2 over several nodes: the 2 ranks of tp do not divide the 3"),
        ("ep=4,tp=2", 4, "ep=4 over several nodes: the 8 ranks of ep x tp do not divide the 4"),
        ("pp=2,ep=4", 2, "ep=4 over several nodes: the 4 ranks of ep do not divide the 2"),
        ("ep=2,tp=4", 2, "tp=4, ep=2 over several nodes"),
        ("dp=2,tp=4", 4, ""),
        ("pp=2,dp=4", 1, ""),
        ("tp=3", 8, ""),
    ],
)
def test_inner_axes_over_several_nodes_are_warned_of(mesh, ranks_per_node, words):
    said = warning(SubMesh(MeshSpec.parse(mesh)), ranks_per_node)
    assert words in said and bool(said) == bool(words) and "\n" not in said


def test_a_warning_stands_below_the_table():
    module = sharded("dp=2,tp=2")
    plain, github, html = (
        module.table("groups", format=f, ranks_per_node=1) for f in ("plain", "github", "html")
    )
    for text in (plain, github):
        assert text.splitlines()[-2] == "" and text.splitlines()[-1].startswith("warning: tp=2")
    assert html.endswith("larger</p>")
    assert "warning" not in module.table("groups", ranks_per_node=2)
    assert "warning" not in module.table("groups") and "crosses" not in module.table("groups")


@pytest.mark.parametrize("wrong", [0, -2, 2.0, "8", True])
def test_ranks_of_a_node_are_a_positive_number(wrong):
    with pytest.raises(MeshError, match="ranks_per_node") as caught:
        sharded("tp=2").table("groups", ranks_per_node=wrong)
    assert repr(wrong) in str(caught.value) and "fix:" in str(caught.value)
    with pytest.raises(ValueError, match="table of groups alone"):
        sharded("tp=2").table("axes", ranks_per_node=2)


# --- form ---


def test_repeated_layers_share_their_rows():
    two, five = sharded("dp=2,tp=2", 2), sharded("dp=2,tp=2", 5)
    for name in ("axes", "collectives"):
        assert len(rows(two, name)) == len(rows(five, name)), name
        assert not re.search(r"layers\.\d", five.table(name))
    assert "layers.4." in five.table("graph") and "layers.1." in two.table("params")
    assert (len(rows(two, "params")), len(rows(five, "params"))) == (3 + 2 * 9, 3 + 9)
    assert row(five, "params", parameter="model.layers.*.mlp.up_proj.weight")["count"] == 5
    assert sum(r["count"] for r in rows(five, "params")) == len(list(five.named_parameters()))
    assert row(five, "axes", axis="kv")["count"] == 5
    assert len(str(five).splitlines()) == len(str(two).splitlines()) <= 10


class Blocks(nn.Module):
    """Layers that hold a sequence of two equal linears."""

    def __init__(self, layers: int = 3):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))})
            for _ in range(layers)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block["mlp"](x)
        return (x**2).mean()


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "dp=2,tp=2"])
def test_only_the_index_of_a_layer_is_starred(mesh):
    for layers in (1, 3, FEW + 1):
        module = autoshard(Blocks(layers), mesh, example_inputs={"x": torch.randn(4, 64)}, zero=0)
        text = "".join(module.table(name) for name in ("axes", "params", "collectives"))
        assert "mlp.*" not in text and "*.mlp.*" not in text
        assert ("blocks.*.mlp.0" in module.table("params")) == (layers > FEW)
        if mesh == "tp=2" and layers > 1:
            assert "row linear blocks.*.mlp.2" in module.table("collectives")


def test_layers_of_two_kinds_share_what_they_have_in_common():
    module = sharded("tp=2", 5, name="deepseek_v3")  # the first layer is dense
    counts = {r["parameter"]: r["count"] for r in rows(module, "params")}
    assert counts["model.layers.*.self_attn.o_proj.weight"] == 5
    assert counts["model.layers.0.mlp.down_proj.weight"] == 1
    assert counts["model.layers.*.mlp.shared_experts.down_proj.weight"] == 4
    assert sum(counts.values()) == len(list(module.named_parameters()))


def test_collectives_say_which_linear_they_serve():
    for name in ("llama", "gpt2"):
        why = {c.why for c in step_collectives(sharded("tp=2", name=name).program)}
        path = {"llama": "model.layers.*.mlp", "gpt2": "transformer.h.*.mlp"}[name]
        into, out = {"llama": ("gate_proj", "down_proj"), "gpt2": ("c_fc", "c_proj")}[name]
        assert {f"column linear {path}.{into}", f"row linear {path}.{out}"} <= why
        assert not any(word.startswith(("add ", "pow ")) for word in why)


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_readable_in_a_wide_terminal(name):
    lines = sharded("dp=2,tp=2", 5).table(name).splitlines()
    assert max(map(len, lines)) <= (250 if name == "graph" else 166)  # names in full there


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
    first = ["canonicalize", "fuse_attention", "fuse_experts", "infer_axes"]
    assert names[:4] == first
    last = ["partition", "overlap_experts", "pipeline_parallel", "zero(stage=0)", "all"]
    assert names[-5:] == last
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


def test_activations_are_told_where_weights_are_gathered_and_nothing_has_run():
    """In a process of its own: nothing is left over from other compilations."""
    code = (
        "import handwritten as hw; from autoshard import autoshard;"
        "print(autoshard(hw.GPT(), 'dp=2', hw.tokens(), zero=1).table('memory'))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    (row,) = (line for line in ran.stdout.splitlines() if line.startswith("activations"))
    assert "batch*sequence" in row, ran.stdout + ran.stderr
