"""What is shown of pipelines: tables of each rank's own stages, forecasts, the command line."""

import json
import re
import xml.etree.ElementTree as ElementTree
from functools import cache

import handwritten as hw
import pytest
import sympy
from zoo import batch, tiny

from autoshard import autoshard
from autoshard.activations import predicted, predicted_stages, stage_forwards
from autoshard.batches import batch_sizes, microbatch_count, of_microbatch
from autoshard.cli import main
from autoshard.errors import ShardingError
from autoshard.flow import Flow
from autoshard.forecast import costs_of, stage_work
from autoshard.report import AGAIN, BATCH, SAVED, SEQUENCE, TABLES, TIED, step_collectives
from autoshard.runtime.buckets import Reducer
from autoshard.schedule import Costs, dry_run, peaks, schedule
from autoshard.timeline import Event, Timeline, bubble
from autoshard.traffic import routes

ITEMSIZE, WIDTH, LENGTH = 4, 32, 16
STAGES = range(4)


@cache
def sharded(mesh: str, layers: int = 2, tied: bool = False, rows: int = 8, **options):
    options = {"microbatches": 2} | options
    return autoshard(hw.GPT(layers=layers, tied=tied), mesh, hw.tokens(rows), **options)


def rows_of(module, name: str, position: int = 0) -> list[dict]:
    options = {"position": position} if name in ("collectives", "groups", "memory") else {}
    made = TABLES[name](module.program, **options)
    return [dict(zip(made.headers, row, strict=True)) for row in made.rows]


def row(module, name: str, position: int = 0, **wanted) -> dict:
    found = [
        r for r in rows_of(module, name, position) if all(r[k] == v for k, v in wanted.items())
    ]
    assert len(found) == 1, found
    return found[0]


# --- every table, on every rank ---


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,dp=2"])
def test_every_table_of_every_rank(mesh, zero):
    module = sharded(mesh, zero=zero, tied=True)
    world = module.program.mesh.mesh.world_size
    for rank in range(world):
        own, stage = module.rank(rank), rank * 2 // world
        for name in TABLES:
            assert own.table(name)
        told = {r["what"]: r["bytes on a rank"] for r in rows_of(module, "memory", stage)}
        held = sum(p.numel() * p.element_size() for p in own.parameters())
        assert told["optimizer state"] == 2 * held
        assert f"stage {stage}: {module.program.stages.split('|')[stage]}" in str(own)
        assert f"# stage {stage}, in each micro-batch" in own.code
        assert f"# stage {1 - stage}" not in own.code


def test_what_all_micro_batches_need_is_in_the_code():
    first, last = (sharded("pp=2").rank(r).code for r in (0, 1))
    assert "before all" not in first and "after all" not in first
    assert "before all" in last and "after all" in last and last.count("def forward") == 3


# --- the table of the pipeline ---

PIPELINE = """
stage    pp    ranks    what is in it      FLOPs share    parameters, bytes    activations, bytes    alive    alive, bytes  sends           bytes
-------  ----  -------  ---------------  -------------  -------------------  --------------------  -------  --------------  ------------  -------
0        0     0 1      embed,blocks.0           44.9%               54,656                50,304        2         100,608  1 value to 1    4,096
1        1     2 3      blocks.1,head            55.1%               46,720                70,916        1          70,916  -                   0

One micro-batch is one of 2, of batch=4, sequence=16. Bytes are those of one rank.

1f1b, in units of time of which F, I and W take one and B two:

rank    0    1    2    3    4    5    6    7    8
------  ---  ---  ---  ---  ---  ---  ---  ---  ---
0       0F0  0F1            0B0  ..        0B1  ..
1            1F0  1B0  ..   1F1  1B1  ..

even stages: bubble 33.3%; formula (p-1)/(m+p-1) = 33.3%
these stages: bubble 35.5%
"""  # noqa: E501


def test_the_table_of_the_pipeline_of_a_small_model():
    for rank in (0, 3):
        got = sharded("pp=2,dp=2").rank(rank).table("pipeline").splitlines()
        assert [line.split() for line in got] == [
            line.split() for line in PIPELINE.strip().splitlines()
        ]


def test_below_the_table_lines_stay_as_they_are():
    module = sharded("pp=2,dp=2")
    html, github = (module.table("pipeline", format=f) for f in ("html", "github"))
    assert "<pre>One micro-batch" in html and html.endswith("</pre>")
    assert github.count("```") == 2 and github.endswith("```")


def test_without_pp_there_is_no_pipeline():
    module = autoshard(hw.MLP(), "dp=2", hw.vectors(4, 32))
    assert row(module, "pipeline")["why"] == "mesh dp=2 has no pp"
    with pytest.raises(ShardingError, match="mesh dp=2"):
        module.forecast()


def test_a_deep_pipeline_is_readable():
    module = sharded("pp=4", layers=4, rows=16, microbatches=None)
    assert microbatch_count(module.program) == 16
    lines = module.table("pipeline").splitlines()
    assert max(map(len, lines)) <= 166
    assert sum(line.startswith("rank ") for line in lines) == 3  # 57 units of time


def test_parameters_and_activations_of_stages_add_up():
    """To those of one stage: what crosses a cut is saved in any case, once."""
    module = sharded("pp=4", layers=4, microbatches=4)
    alone = autoshard(hw.GPT(layers=4), "pp=1", hw.tokens(2))
    found = rows_of(module, "pipeline")
    whole = sum(p.numel() for p in alone.parameters()) * ITEMSIZE
    assert sum(r["parameters, bytes"] for r in found) == whole
    (saved,) = {row(alone, "memory", what=SAVED)["bytes on a rank"]}
    assert sum(r["activations, bytes"] for r in found) == saved
    assert sum(float(r["FLOPs share"].rstrip("%")) for r in found) == pytest.approx(100, abs=0.3)
    forms = [p.saved for p in predicted_stages(module.program)]
    assert str(sympy.expand(sum(forms))) == _renamed(predicted(alone.program).saved, alone, module)


def _renamed(form, one, other) -> str:
    """A closed form with the sizes of another program of the same model."""
    names = dict(zip(one.program.hints, other.program.hints, strict=True))
    return str(form.xreplace(names))


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb", "dualpipev"])
def test_micro_batches_alive_are_those_of_the_schedule(name):
    module = sharded("pp=2", layers=4, schedule=name, microbatches=4)
    made, saved = schedule(name, 2, 4), [f.saved for f in stage_forwards(module.program)]
    most = peaks(made, saved.__getitem__)
    found = rows_of(module, "pipeline")
    assert [r["pp"] for r in found] == list(made.place)
    assert [r["alive"] for r in found] == [most[p][s] for s, p in enumerate(made.place)]
    for position in (0, 1):
        own = [r for r in found if r["pp"] == position]
        told = row(module, "memory", position, what=SAVED)
        assert told["bytes on a rank"] == sum(r["alive, bytes"] for r in own)
        sizes = dict(zip((BATCH, SEQUENCE), hw.tokens(8)["ids"].shape, strict=True))
        form = told[next(k for k in told if k.startswith("as a formula"))]
        assert form.subs(sizes) == told["bytes on a rank"]


def test_recomputed_blocks_are_those_of_the_stage():
    module = sharded("pp=2", layers=4, recompute="block")
    plain = sharded("pp=2", layers=4)
    for position in (0, 1):
        block = row(module, "memory", position, what=AGAIN)["bytes on a rank"]
        kept, all_of_it = (
            row(m, "memory", position, what=SAVED)["bytes on a rank"] for m in (module, plain)
        )
        assert block > 0 and kept + block <= all_of_it


class Skips(hw.GPT):
    """What the first layer reads is read by the last one too."""

    def hidden(self, ids):
        x = first = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x + first)


def test_what_skips_a_stage_goes_straight_to_its_reader():
    module = autoshard(Skips(layers=3), "pp=3", hw.tokens(6), microbatches=3)
    assert [r["sends"] for r in rows_of(module, "pipeline")] == [
        "1 value to 1; 1 value to 2",
        "1 value to 2",
        "-",
    ]
    sent = [c for c in step_collectives(module.program) if c.kind == "send"]
    assert [(c.to, c.count) for c in sent] == [(1, 3), (2, 3)]
    assert {c.bytes for c in sent} == {BATCH * SEQUENCE * WIDTH * ITEMSIZE}


# --- what ranks send ---


def test_bytes_from_stage_to_stage_are_those_of_the_hidden_states():
    """b s h, once there and once back, however many micro-batches it goes in."""
    whole = BATCH * SEQUENCE * WIDTH * ITEMSIZE
    for count in (1, 2, 4):
        module = sharded("pp=4", layers=4, microbatches=count)
        for position in range(4):
            sent = {
                (c.when, c.to): (c.count, c.bytes)
                for c in step_collectives(module.program, position=position)
                if c.kind == "send"
            }
            there = {("forward", position + 1): (count, whole)} if position < 3 else {}
            back = {("backward", position - 1): (count, whole)} if position else {}
            assert sent == there | back
        assert [(r.source, r.target, r.travels) for r in routes(module.program)] == [
            (s, s + 1, True) for s in range(3)
        ]


def test_sequence_parallelism_sends_a_slice_of_the_tokens():
    module = sharded("pp=2,tp=2")
    (sent,) = (c for c in step_collectives(module.program) if c.kind == "send")
    assert sent.count == 2 and sent.bytes == BATCH * SEQUENCE * WIDTH * ITEMSIZE / 2


def test_gradients_of_tied_weights_are_summed_over_their_holders():
    """2 (n-1)/n of the weight and of the number that says whether there is a gradient."""
    module = sharded("pp=4,dp=2", layers=4, tied=True, zero=0)
    weight = (hw.VOCAB * WIDTH + 1) * ITEMSIZE
    for position in range(4):
        found = [c for c in step_collectives(module.program, position=position) if c.why == TIED]
        told = [(c.kind, c.axes, c.count, c.bytes) for c in found]
        assert told == ([("all_reduce", "pp:0+3", 1, weight)] if position in (0, 3) else [])
    groups = {r["over"]: r["ranks"] for r in rows_of(module, "groups")}
    assert groups == {"pp": "0 2 4 6; 1 3 5 7", "pp:0+3": "0 6; 1 7", "dp": "0 1; 2 3; 4 5; 6 7"}
    own = row(module, "params", parameter="tokens.weight")
    assert (own["stage"], own["gradient over"]) == ("0, 3", "dp")
    assert row(module, "params", parameter="norm.weight")["stage"] == "3"


def test_gradient_rows_count_the_buckets_of_the_ranks_stages(monkeypatch):
    module = sharded("pp=2,dp=2", layers=4, schedule="interleaved", zero=0)
    for limit in (25 * 2**20, 20_000):
        monkeypatch.setattr("autoshard.cost.BUCKET_BYTES", limit)
        for position in (0, 1):
            reducer = Reducer(module.rank(2 * position), limit)
            sent = step_collectives(module.program, position=position)
            (gradients,) = (c for c in sent if c.why.startswith("gradients of parameters"))
            (flags,) = (c for c in sent if c.why.startswith("flags"))
            assert gradients.count == len(reducer.buckets) >= 2
            assert gradients.bytes == sum(b.numel * ITEMSIZE for b in reducer.buckets)
            assert flags.count == len(reducer._present) == 2


def test_stage_3_gathers_for_every_micro_batch_unless_it_keeps_weights():
    numbers = {}
    for keeps in (False, True):
        module = sharded("pp=2,dp=2", zero=3, microbatches=4, reshard_after_forward=not keeps)
        of_units = [
            c
            for c in step_collectives(module.program, by_layer=True)
            if c.why.startswith(("weights blocks", "gradients blocks"))
        ]
        numbers[keeps] = {(c.when, c.kind): c.count for c in of_units}
    times = {("forward", "all_gather"): 4, ("backward", "reduce_scatter"): 4}
    assert numbers[False] == times | {("backward", "all_gather"): 4}
    assert numbers[True] == dict.fromkeys(times, 1)


def test_collectives_of_a_layer_run_once_a_micro_batch():
    one, four = (sharded("pp=2,tp=2", microbatches=n) for n in (1, 4))
    for a, b in zip(step_collectives(one.program), step_collectives(four.program), strict=True):
        assert (a.when, a.kind, a.axes, a.why) == (b.when, b.kind, b.axes, b.why)
        inside = a.axes == "tp" and not a.why.startswith(("gradients", "flags"))
        assert b.count == (4 if inside or a.kind == "send" else 1) * a.count
        assert sympy.expand(a.bytes - b.bytes) == 0


# --- stages in other tables ---


def test_the_graph_says_which_stage_computes_what():
    module = sharded("pp=2", tied=True)
    listed = rows_of(module, "graph")
    by_module = {r["module"]: r["stage"] for r in listed if r["module"].startswith("blocks.")}
    assert {(name[:8], stage) for name, stage in by_module.items()} == {
        ("blocks.0", "0"),
        ("blocks.1", "1"),
    }
    free = next(r for r in listed if r["op"] == "arange")
    tied = next(r for r in listed if r["node"] == "tokens.weight")
    assert (free["stage"], tied["stage"]) == ("", "0, 1")
    assert "mb: micro-batches" in module.table("graph")
    assert "stage" not in autoshard(hw.MLP(), "dp=2", hw.vectors(4, 32)).table("graph")


def test_attentions_and_experts_say_their_stage():
    made = rows_of(sharded("pp=2", layers=4), "attention")
    assert [(r["stage"], r["count"]) for r in made] == [(0, 2), (1, 2)]
    module = autoshard(tiny("mixtral"), "pp=2,ep=2", batch(), schedule="gpipe")
    assert [(r["stage"], r["count"]) for r in rows_of(module, "experts")] == [(0, 1), (1, 1)]


def test_the_summary_is_of_the_ranks_own_stage():
    module = sharded("pp=2,dp=2", zero=0)
    for rank, names in ((0, "embed,blocks.0"), (3, "blocks.1,head")):
        text = str(module.rank(rank))
        own = sum(p.numel() for p in module.rank(rank).parameters())
        assert f"parameters {own:,} of 25,344" in text
        stage = rank // 2
        assert f"1f1b, 2 stages -> pp, 2 micro-batches; stage {stage}: {names}" in text
        assert "2 send over pp" in text and "batch -> dp,micro-batches" in text
    assert "stages 1 -> 2" in module.table("passes")


# --- forecasts ---


def test_a_forecast_is_the_dry_run_of_the_work_and_the_bytes():
    module = sharded("pp=2,dp=2", schedule="zb")
    made = module.forecast(flops_per_second=1e9, bytes_per_second=1e6)
    (forward, again), sizes = stage_work(module.program), of_microbatch(module.program)
    assert again == [0, 0] and sizes[batch_sizes(module.program)[0]] == 2
    first = {e.kind: e.end - e.start for e in made.events if e.stage == 0 and e.microbatch == 0}
    assert first["F"] == pytest.approx(forward[0] / 1e9)
    assert first["I"] == pytest.approx(first["W"]) == pytest.approx(first["F"])
    assert first["send"] == pytest.approx(2 * LENGTH * WIDTH * ITEMSIZE / 1e6)
    assert (made.name, made.note, made.ranks) == ("zb", "predicted", 2)
    wide = module.forecast(microbatches=4)
    assert {e.microbatch for e in wide.events} == set(range(4))
    assert module.forecast(processors=1).total > module.forecast().total


def test_work_of_stages_is_that_of_the_whole_model():
    """For half of the rows half of it, and blocks that are recomputed count twice."""
    one = autoshard(hw.GPT(layers=4), "pp=1", hw.tokens(8))
    module = sharded("pp=2", layers=4, recompute="block")
    forward, again = stage_work(module.program)
    flow = Flow(one.program)  # what is moved of weights does not depend on rows
    assert 2 * sum(forward) == pytest.approx(sum(map(flow.cost, flow.nodes)), rel=0.01)
    assert all(0.5 * f < a < f for f, a in zip(forward, again, strict=True))
    costs = module.forecast().events
    back = {e.stage: e.end - e.start for e in costs if e.kind == "B"}
    there = {e.stage: e.end - e.start for e in costs if e.kind == "F"}
    for stage in (0, 1):
        ratio = (2 * forward[stage] + again[stage]) / forward[stage]
        assert back[stage] / there[stage] == pytest.approx(ratio)


@pytest.mark.parametrize("name", ["1f1b", "zb", "interleaved"])
def test_costs_are_read_from_a_timeline(name):
    plan = schedule(name, 2, 6)
    even, edges = (2.0,) * plan.stages, [(s, s + 1) for s in range(plan.stages - 1)]
    transfers = {pair: 0.5 for a, b in edges for pair in ((a, b), (b, a))}
    made = dry_run(plan, Costs(even, even, even, transfers))
    found = costs_of(made)
    assert (found.forward, found.inputs, found.weights) == (even, even, even)
    assert {k: pytest.approx(v) for k, v in found.transfer.items()} == transfers
    module = sharded("pp=2", layers=4, schedule=name)
    again = module.forecast(microbatches=6, costs=found)
    assert bubble(again) == pytest.approx(bubble(made))


def test_costs_of_an_outlier_are_those_of_the_others():
    spans = [(0.0, 1.0), (1.0, 2.0), (2.0, 12.0)]
    events = tuple(Event(0, "F", f"0F{m}", 0, m, *span) for m, span in enumerate(spans))
    assert costs_of(Timeline(events, 1, "gpipe")).forward == (1.0,)


@pytest.mark.parametrize(
    "wrong", [{"flops_per_second": 0}, {"bytes_per_second": -1.0}, {"microbatches": 0}]
)
def test_forecasts_refuse_what_makes_no_step(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ShardingError, match=re.escape(f"{name}={value!r}")):
        sharded("pp=2").forecast(**wrong)


def test_forecasts_are_saved_as_pictures_and_traces(tmp_path):
    made = sharded("pp=2").forecast()
    made.save(tmp_path / "step.svg")
    made.save(tmp_path / "step.json")
    title = ElementTree.parse(tmp_path / "step.svg").getroot()[0]
    assert title.text == "1f1b, predicted"
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {e["name"] for e in events if e["ph"] == "X"} == {
        f"{s}{kind}{m}" for s in (0, 1) for kind in "FB" for m in (0, 1)
    }


# --- the command line ---

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return nn.functional.cross_entropy(x, y)

def build():
    return Net(), {"x": torch.ones(8, 8), "y": torch.zeros(8, dtype=torch.long)}
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return str(path)


def test_inspect_shows_the_pipeline_and_writes_its_forecast(model, tmp_path, capsys):
    options = ["--schedule", "interleaved", "--chunks", "2", "--microbatches", "4"]
    options += ["--stages", "layers.0|layers.1|layers.2|layers.3"]
    picture = tmp_path / "step.svg"
    asked = ["--mesh", "pp=2", *options, "--timeline", str(picture)]
    assert main(["inspect", model, *asked]) == 0
    out = capsys.readouterr().out
    assert "# pipeline" in out and "layers.3" in out and "interleaved, 4 stages -> pp" in out
    assert "interleaved, predicted" in picture.read_text()
    assert main(["inspect", model, *asked, "--table", "pipeline"]) == 0
    assert "# params" not in capsys.readouterr().out
    assert main(["inspect", model, "--mesh", "tp=2", "--timeline", str(picture)]) == 2
    assert "without pp" in capsys.readouterr().err
    assert main(["inspect", model, "--mesh", "pp=2", "--timeline", "step.txt"]) == 2
    assert ".svg" in capsys.readouterr().err


def test_verify_takes_the_options_of_pipelines(model, capsys):
    options = ["--mesh", "pp=2", "--schedule", "zb", "--microbatches", "2"]
    assert main(["verify", model, *options, "--stages", "layers.0|layers.1-3"]) == 0
    assert "equal to one device" in capsys.readouterr().out
    assert main(["verify", model, *options, "--stages", "layers.0|layers.9"]) == 2
    assert "layers.9" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["verify", model, "--mesh", "pp=2", "--schedule", "2f2b"])
