"""Context-parallel attention against its definition on one device: every kind, every cut."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import attention_jobs as jobs
import gloo
import pytest
import torch
import torch.nn.functional as F
from attention_jobs import BATCH, CASES, Case
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from autoshard.attention import Attention
from autoshard.collectives import Link
from autoshard.runtime import attention as engine
from autoshard.runtime.attention import gathered_attention, pairs, ring_attention

NOBODY = ()


def links(cp: int, zigzag: bool, group: str = "") -> list[Link]:
    return [Link(("cp",), group, cp, index, zigzag) for index in range(cp)]


def assert_near(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert found.shape == wanted.shape, what
    if wanted.numel():
        limit = 1e-9 * max(1e-3, wanted.abs().max().item())
        assert (found - wanted).abs().max().item() <= limit, what


def together(attention: Attention, given: dict, cut: list) -> dict[str, torch.Tensor]:
    """What all ranks' gathered attentions give, put together, and their gradients' sums."""
    size = given["q"].shape[2]
    outs = [jobs.gathered_on(attention, given, link) for link in cut]
    whole = torch.zeros_like(given["grad"])
    loss = torch.zeros((), dtype=torch.float64)
    for out, link in zip(outs, cut, strict=True):
        loss = loss + (out * jobs.local(given["grad"], link, size)).sum()
        rows = jobs.local(torch.arange(size), link, size, 0)
        whole[:, :, rows] = out.detach()
    wanted = jobs.leaves(given)
    found = torch.autograd.grad(loss, list(wanted.values()))
    return {"out": whole} | dict(zip(wanted, found, strict=True))


def compare(case: Case, given: dict, cut: list, what: str) -> None:
    wanted = jobs.solved(case.attention, given)
    for name, found in together(case.attention, given, cut).items():
        assert_near(found, wanted[name], f"{what}: {name}")


CUTS = [(1, False), *itertools.product((2, 3, 4), (False, True))]


@pytest.mark.parametrize("name", CASES)
def test_gathered_attention_is_that_of_one_device(name):
    case = CASES[name]
    for size in (16, 17, 5, 1):
        given = jobs.inputs(case, size, size)
        compare(case, given, [NOBODY], f"{size} alone")
        for cp, zigzag in CUTS:
            compare(case, given, links(cp, zigzag), f"{size} over {cp}, zigzag {zigzag}")


@pytest.mark.parametrize("name", ["full", "causal", "causal, sinks", "softcap", "bias"])
def test_grouped_heads_and_other_dimensions(name):
    case = CASES[name]
    for heads, dims in itertools.product(((8, 2), (4, 1), (3, 3)), ((4, 6), (6, 4), (1, 1))):
        given = jobs.inputs(case, 11, 11, heads, dims)
        compare(case, given, links(2, True), f"heads {heads}, dims {dims}")


@pytest.mark.parametrize(
    "name", ["full", "causal", "padding", "padding, lowest", "bias", "softcap"]
)
@pytest.mark.parametrize("sizes", [(6, 13), (13, 6), (1, 9), (9, 1)])
def test_queries_and_keys_of_different_lengths(name, sizes):
    case = CASES[name]
    given = jobs.inputs(case, *sizes)
    for cp, zigzag in CUTS:
        compare(case, given, links(cp, zigzag), f"{sizes} over {cp}, zigzag {zigzag}")


@pytest.mark.parametrize("name", ["window", "alibi", "bias, causal", "mask added"])
def test_scores_in_tiles(name, monkeypatch):
    monkeypatch.setattr(engine, "TILE", 3)
    given = jobs.inputs(CASES[name], 17, 17)
    for cp, zigzag in CUTS:
        compare(CASES[name], given, links(cp, zigzag), f"over {cp}, zigzag {zigzag}")


def test_a_traced_score_and_a_wider_softmax():
    def score(s, columns):
        return s + columns

    traced = torch.fx.symbolic_trace(score)
    attention = Attention(0.3, score=traced, varies=(jobs.KEYS,), dtype=torch.float64)
    case = Case(attention, lambda h, i, j: [torch.linspace(-1, 1, j).view(1, 1, 1, j)])
    given = jobs.inputs(case, 8, 8, dtype=torch.float32)
    out = jobs.gathered_on(attention, given, NOBODY)
    assert out.dtype == torch.float32
    assert (out - jobs.reference(attention, given)).abs().max() < 1e-6


# --- the plan ---


def calls_of(monkeypatch) -> list[tuple[int, int, bool]]:
    """Queries, keys and causality of every kernel call that follows."""
    seen, kernel = [], engine._kernel

    def counted(q, k, v, square, scale):
        seen.append((q.shape[2], k.shape[2], square))
        return kernel(q, k, v, square, scale)

    monkeypatch.setattr(engine, "_kernel", counted)
    return seen


def test_fewest_kernel_calls(monkeypatch):
    seen = calls_of(monkeypatch)
    causal, full = CASES["causal"], CASES["full"]

    def gathered(case: Case, link) -> list[tuple[int, int, bool]]:
        seen.clear()
        jobs.gathered_on(case.attention, jobs.inputs(case, 16, 16), link)
        return list(seen)

    def ring(link) -> list[tuple[int, int, bool]]:
        seen.clear()
        given = jobs.inputs(causal, 16, 16)
        part = {n: jobs.local(given[n], link, 16) for n in "qkv"}
        rest = (None, [], causal.attention, 16, 16)
        ring_attention(part["q"], link, part["k"], part["v"], *rest)
        return list(seen)

    assert gathered(full, links(2, True)[0]) == [(8, 16, False)]
    assert gathered(causal, NOBODY) == [(16, 16, True)]
    assert gathered(causal, links(2, False)[0]) == [(8, 8, True)]
    assert gathered(causal, links(2, False)[1]) == [(8, 8, False), (8, 8, True)]
    assert gathered(causal, links(2, True)[1]) == [(8, 4, False), (8, 8, True)]
    outer = [(4, 4, True), (4, 12, False), (4, 4, True)]
    assert gathered(causal, links(2, True)[0]) == outer
    # own piece as one square; all rows on an earlier rank's first run; the later on both of a later
    assert ring(links(2, True)[0]) == [(8, 8, True), (4, 8, False)]
    assert ring(links(2, True)[1]) == [(8, 8, True), (8, 4, False)]
    assert ring(links(2, False)[0]) == [(8, 8, True)]


def test_pairs_are_balanced_in_zigzag_order():
    causal, full = CASES["causal"].attention, CASES["full"].attention
    for cp, zigzag, size in itertools.product((1, 2, 3, 4), (False, True), (16, 17, 5, 1)):
        counts = [pairs(causal, link, size, size) for link in links(cp, zigzag)]
        assert sum(counts) == size * (size + 1) // 2
        assert sum(pairs(full, link, size, 7) for link in links(cp, zigzag)) == size * 7
    assert [pairs(causal, link, 16, 16) for link in links(2, True)] == [68, 68]
    assert [pairs(causal, link, 16, 16) for link in links(2, False)] == [36, 100]
    assert pairs(causal, NOBODY, 4, 4) == 10


# --- real processes ---

RUNS = [
    ("causal", 16, 16, {}),
    ("full", 17, 17, {"heads": (8, 2), "dims": (4, 6)}),
    ("causal, sinks", 5, 5, {}),
    ("bias, causal", 17, 17, {"heads": (4, 1)}),
    ("padding, lowest", 6, 13, {}),
    ("window, sinks", 16, 16, {}),
    ("softcap", 1, 1, {}),
    ("causal", 9, 9, {"dtype": torch.bfloat16}),
]
SIZES = {"cp": 4}
JOBS: dict[str, tuple] = {
    f"{cp} {zigzag}": (jobs.rings, cp, zigzag, RUNS) for cp in (2, 4) for zigzag in (False, True)
}
JOBS |= {f"dropout {cp}": (jobs.ring_with_dropout, cp, "window", 11) for cp in (2, 4)}


@pytest.fixture(scope="module")
def ranks():
    with tempfile.TemporaryDirectory() as folder:
        gloo.launch(SIZES, JOBS, Path(folder))
        return gloo.results_in(Path(folder), SIZES)


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("cp", [2, 4])
def test_ring_attention_on_processes(ranks, cp, zigzag):
    every = [results[f"{cp} {zigzag}"] for results in ranks]
    assert not [text for text in every if isinstance(text, str)], every[0]
    for first in range(0, len(ranks), cp):
        check_ring(every[first : first + cp], links(cp, zigzag))


def check_ring(found: list, cut: list[Link]) -> None:
    """What the ranks of a ring have, and what they sent for it."""
    for n, (name, i, j, more) in enumerate(RUNS):
        case = CASES[name]
        given = jobs.inputs(case, i, j, **more)
        half = more.get("dtype") == torch.bfloat16
        wanted = jobs.solved(case.attention, given)
        sums: dict[str, torch.Tensor] = {}
        for link, results in zip(cut, found, strict=True):
            result = results[n]
            what = f"{name} on {link}"
            for key, size in {"out": i, "q": i, "k": j, "v": j}.items():
                mine = jobs.local(wanted[key], link, size)
                if half:
                    torch.testing.assert_close(result[key], mine, atol=0.05, rtol=0.05)
                else:
                    assert_near(result[key], mine, f"{what}: {key}")
            for key in wanted.keys() - {"out", "q", "k", "v"}:
                varies = case.attention.varies[int(key[-1])] if key != "sinks" else jobs.NEITHER
                if varies[0]:
                    assert_near(result[key], jobs.local(wanted[key], link, i), f"{what}: {key}")
                else:
                    sums[key] = sums.get(key, 0) + result[key]
            # a hop of keys and values; in the backward that once more, and one of gradients
            hop = BATCH * link.padded(j) * given["k"].shape[1]
            hop *= given["k"].shape[3] + given["v"].shape[3]
            key_bytes, sum_bytes = (2, 4) if half else (8, 8)
            hops = link.size - 1
            assert result["forward"] == [hop * key_bytes] * hops, what
            every = [hop * key_bytes] * hops + [hop * sum_bytes] * hops
            assert sorted(result["backward"]) == sorted(every), what
        for key, total in sums.items():
            assert_near(total, wanted[key], f"{name}: sum of {key}")


@pytest.mark.parametrize("cp", [2, 4])
def test_dropout_round_a_ring_has_one_mask(ranks, cp):
    sums = [results[f"dropout {cp}"] for results in ranks[:cp]]
    results, values = (sum(side) for side in zip(*sums, strict=True))
    assert abs(results) > 1e-3
    assert abs(results - values) < 1e-9 * abs(results)


# --- precision ---


def errors(attend, given: dict, exact: dict[str, torch.Tensor], dtype: torch.dtype) -> dict:
    """Of the result and of gradients: the largest error, and the root of the mean square."""
    low = {n: given[n].detach().to(dtype).requires_grad_() for n in "qkv"}
    low |= {"grad": given["grad"].to(dtype), "sinks": None, "vectors": []}
    out = attend(low)
    grads = torch.autograd.grad(out, [low[n] for n in "qkv"], low["grad"])
    found = {"out": out.detach()} | dict(zip("qkv", grads, strict=True))
    off = {n: x.double() - exact[n] for n, x in found.items()}
    return {n: torch.stack([x.abs().max(), x.square().mean().sqrt()]) for n, x in off.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["causal", "full"])
def test_blocks_lose_no_precision(dtype, name):
    """Against torch's own attention of the same inputs: means over some, largest errors vary."""
    attention, size, seeds = CASES[name].attention, 256, 12
    cut = links(4, True)
    order = torch.cat([jobs.local(torch.arange(size), link, size, 0) for link in cut]).argsort()

    def sdpa(low):
        more = {"is_causal": attention.causal, "enable_gqa": True, "scale": attention.scale}
        return F.scaled_dot_product_attention(low["q"], low["k"], low["v"], **more)

    def in_blocks(low):
        return torch.cat([jobs.gathered_on(attention, low, link) for link in cut], 2)[:, :, order]

    ours, torchs = [], []
    for seed in range(seeds):
        given = jobs.inputs(CASES[name], size, size, dims=(16, 16), seed=seed)
        given |= {n: given[n].detach().to(dtype).double().requires_grad_() for n in "qkv"}
        given["grad"] = given["grad"].to(dtype).double()
        exact = jobs.solved(attention, given)
        ours.append(errors(in_blocks, given, exact, dtype))
        torchs.append(errors(sdpa, given, exact, dtype))
    for key in ours[0]:
        mine, other = (sum(e[key] for e in found) / seeds for found in (ours, torchs))
        assert (mine <= 1.05 * other).all(), f"{key}: {mine} against {other}"


# --- dropout ---


def dropped(given: dict, link=NOBODY, v=None, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return jobs.gathered_on(
        Attention(jobs.SCALE, causal=True, ahead=False, dropout=0.5),
        given if v is None else given | {"v": v},
        link,
    )


def test_dropout_keeps_the_mean():
    given = jobs.inputs(CASES["causal"], 8, 8)
    wanted = jobs.reference(CASES["causal"].attention, given)
    for link in (NOBODY, links(2, True)[1]):
        mean = sum(dropped(given, link, seed=seed).detach() for seed in range(1500)) / 1500
        assert (mean - jobs.local(wanted, link, 8)).abs().max() < 0.2


@pytest.mark.parametrize("cp", [1, 2])
def test_dropout_has_one_mask(cp, monkeypatch):
    monkeypatch.setattr(engine, "TILE", 3)
    given, link = jobs.inputs(CASES["causal"], 8, 8), links(cp, True)[0]
    out = dropped(given, link)
    assert not torch.equal(out, dropped(given, link, seed=1))
    grad = jobs.local(given["grad"], link, 8)
    dq, dk, dv = torch.autograd.grad(out, [given[n] for n in "qkv"], grad)
    # linear in v: its gradient says what the result is
    assert torch.allclose((out * grad).sum(), (given["v"] * dv).sum(), rtol=1e-9)
    step = 1e-6
    for name, found in {"q": dq, "k": dk, "v": dv}.items():
        along = torch.randn_like(given[name])
        sides = []
        for sign in (step, -step):
            moved = given | {name: (given[name] + sign * along).detach()}
            sides.append((dropped(moved, link) * grad).sum().item())
        slope = (sides[0] - sides[1]) / (2 * step)
        assert abs(slope - (found * along).sum().item()) < 1e-6 * max(1.0, abs(slope)), name


def test_dropout_of_everything_is_nothing():
    given = jobs.inputs(CASES["full"], 4, 4)
    assert not jobs.gathered_on(Attention(1.0, dropout=1.0), given, NOBODY).any()


# --- how it runs ---


@pytest.mark.parametrize("name", ["causal", "bias, causal", "window, sinks"])
def test_recomputed(name):
    case = CASES[name]
    given = jobs.inputs(case, 8, 8)
    wanted = jobs.solved(case.attention, given)
    out = checkpoint(lambda: jobs.gathered_on(case.attention, given, NOBODY), use_reentrant=False)
    leaves = jobs.leaves(given)
    found = torch.autograd.grad(out, list(leaves.values()), given["grad"])
    for key, x in zip(leaves, found, strict=True):
        assert_near(x, wanted[key], key)


def test_recomputed_dropout_draws_the_same_mask():
    given = jobs.inputs(CASES["causal"], 8, 8)
    attention = Attention(jobs.SCALE, dropout=0.5)
    grads = []
    for recompute in (False, True):
        torch.manual_seed(5)

        def run():
            return jobs.gathered_on(attention, given, NOBODY)

        out = checkpoint(run, use_reentrant=False) if recompute else run()
        grads.append(torch.autograd.grad(out, [given["q"]], given["grad"])[0])
    assert torch.equal(*grads)


def saved_numel(run) -> list[int]:
    sizes: list[int] = []

    def pack(x):
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run()
    return sizes


@pytest.mark.parametrize("name", ["causal", "window"])
def test_nothing_as_large_as_the_scores_is_kept(name):
    size = 64
    given = jobs.inputs(CASES[name], size, size)
    kept = saved_numel(lambda: jobs.gathered_on(CASES[name].attention, given, links(2, True)[0]))
    assert max(kept) < size * size // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["causal, sinks", "bias, causal", "window", "padding"])
def test_shapes_are_known_without_values(name, dtype):
    case = CASES[name]
    with FakeTensorMode():
        for (cp, zigzag), dropout in itertools.product(((1, False), (4, True)), (0.0, 0.5)):
            attention = Attention(**vars(case.attention) | {"dropout": dropout})
            given = jobs.inputs(case, 17, 17, heads=(8, 2), dims=(8, 12), dtype=dtype)
            for link in links(cp, zigzag):
                q, k, v = (jobs.local(given[n].detach(), link, 17).requires_grad_() for n in "qkv")
                vectors = [
                    x.detach().requires_grad_(x.requires_grad)
                    for x in jobs.rank_vectors(attention, given, link, 17)
                ]
                rest = (given["sinks"], vectors, attention, 17, 17)
                out = ring_attention(q, link, k, v, *rest)
                assert (out.shape, out.dtype) == ((*q.shape[:3], v.shape[3]), dtype)
                out.sum().backward()
                for x in (q, k, v, *(x for x in vectors if x.requires_grad)):
                    assert (x.grad.shape, x.grad.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_cuda_take_what_they_are_given(dtype):
    """As far as shapes say, which are those of the kernels on no device."""
    for square, dims, j in ((True, (8, 8), 5), (False, (12, 20), 7), (False, (300, 300), 7)):
        shapes = ((2, 8, 5, dims[0]), (2, 2, j, dims[0]), (2, 2, j, dims[1]))
        q, k, v = (torch.empty(*shape, dtype=dtype, device="meta") for shape in shapes)
        out, lse = engine._kernel(q, k, v, square, 0.3)
        assert (out.shape, out.dtype) == ((2, 8, 5, dims[1]), dtype)
        assert (lse.shape, lse.dtype) == ((2, 8, 5), torch.float32)
        found = engine._kernel_backward(out, q, k, v, out, lse, square, 0.3)
        assert [x.shape for x in found] == list(shapes)


def test_gathered_shapes_are_known_without_values():
    with FakeTensorMode():
        q, k = torch.randn(2, 4, 8, 8, requires_grad=True), torch.randn(2, 2, 16, 8)
        link = links(2, True)[0]
        out = gathered_attention(q, link, k, k, None, [], CASES["causal"].attention, 16, 16)
        out.sum().backward()
        assert q.grad.shape == q.shape
