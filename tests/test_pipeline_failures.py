"""Every rank of a pipeline hears of one that fails, and why: none hangs, no process is aborted."""

import json
import re
import threading
import time

import pipeline_failures as jobs
import pytest
import torch
from pipeline_failures import LENGTHS, LIMIT, RAISES
from test_gloo import each, ranks_of

from autoshard import autoshard
from autoshard.runtime import failures
from autoshard.runtime.failures import PATIENCE

QUICK = ("known to both", "new to both")


def cases(raised, lengths):
    return {f"raises {w}": (jobs.raises, w, {"zero": 1}) for w in raised} | {
        f"shape {n}": (jobs.other_shape, n, {"zero": 0}) for n in lengths
    }


line = ranks_of(
    {"pp": 2, "dp": 2},
    cases(["targets"], QUICK)
    | {"tries again": (jobs.tries_again,)}
    | {f"again on {axes}": (jobs.again, axes) for axes in ("pp=2,dp=2", "dp=4")},
)
others = ranks_of({"pp": 2, "dp": 2}, cases(["ids"], [n for n in LENGTHS if n not in QUICK]))
tensor = ranks_of({"pp": 2, "tp": 2}, {"shape": (jobs.other_shape, "new to both", {"zero": 0})})


def assert_all_hear_of_what_a_stage_raised(results, what):
    failed = RAISES[what]
    for rank, (kind, text, seconds) in enumerate(each(results, f"raises {what}")):
        assert seconds < LIMIT + 2 * PATIENCE
        if rank == failed:
            assert kind == "IndexError"
            continue
        assert kind == "MeshError"
        assert f"rank {failed}: RuntimeError" in text and "it raised IndexError" in text
        assert "why:" in text and "load the last checkpoint" in text


def assert_all_hear_of_other_shapes(results, name):
    ranks = each(results, f"shape {name}")
    lengths = [LENGTHS[name][1][r == 3] for r in range(4)]
    for rank, (kind, text, seconds) in enumerate(ranks):
        assert kind == "MeshError", rank
        assert seconds < LIMIT + 2 * PATIENCE
        told = [n for n in {*lengths} if f"'ids': [4, {n}]" in text]
        assert told and "same rows" in text, f"rank {rank}: {text}"
    texts = "".join(text for _, text, _ in ranks)
    for r in (1, 3):
        assert re.search(rf"rank {r}|ranks {r} and|and {r}:|ranks \[{r}\]", texts), r


def test_all_ranks_hear_of_what_the_last_stage_raised(line):
    assert_all_hear_of_what_a_stage_raised(line, "targets")


@pytest.mark.slow
def test_all_ranks_hear_of_what_the_first_stage_raised(others):
    assert_all_hear_of_what_a_stage_raised(others, "ids")


@pytest.mark.parametrize("name", QUICK)
def test_a_batch_of_another_shape_on_one_rank_is_no_crash(line, name):
    assert_all_hear_of_other_shapes(line, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in LENGTHS if n not in QUICK])
def test_a_batch_of_a_new_shape_on_some_ranks_is_no_crash(others, name):
    assert_all_hear_of_other_shapes(others, name)


def test_ranks_that_see_new_shapes_say_so_before_they_send(line):
    kinds = each(line, "shape new to both")
    assert all(kinds[r][2] < PATIENCE for r in (1, 3))


@pytest.mark.slow
def test_tensor_ranks_of_a_stage_compare_new_shapes_too(tensor):
    for kind, text, seconds in each(tensor, "shape"):
        assert kind == "MeshError" and seconds < PATIENCE
        assert "'ids': [8, 12]" in text and "'ids': [8, 10]" in text


def test_a_rank_that_tries_again_is_no_cause_of_what_comes(line):
    for rank, got in enumerate(each(line, "tries again")):
        (kind, text), *more, alike, words = got
        assert kind == "CaptureError" and "forward takes no more" in text
        assert [kind for kind, _ in more] == ["CaptureError"] * (rank == 2)
        assert alike and words == []


@pytest.mark.parametrize("axes", ["pp=2,dp=2", "dp=4"])
def test_modules_made_behind_a_failure_work_and_older_ones_say_so(line, axes):
    torch.manual_seed(0)
    model = jobs.hw.GPT(layers=4)
    want = model(**jobs.hw.tokens(8)).loss.detach()
    for rank, got in enumerate(each(line, f"again on {axes}")):
        assert got["failed"] == ("IndexError" if rank == 3 else got["failed"]) != ""
        assert torch.allclose(got["new"], want, rtol=1e-5)
        assert torch.allclose(got["other"], want, rtol=1e-5)
        if "pp" in axes:
            kind, text, _ = got["old"]
            assert kind == "MeshError" and "an earlier step ended" in text


@pytest.mark.parametrize("how", ["killed", pytest.param("raises", marks=pytest.mark.slow)])
def test_a_process_that_ends_is_named_and_a_checkpoint_outlives_it(how, tmp_path):
    found = jobs.ended(tmp_path / how, how)
    for rank, ((kind, text, seconds), _) in found.items():
        assert kind == "MeshError", f"rank {rank}: {text}"
        assert seconds < LIMIT + 2 * PATIENCE
        assert "left no word" in text or "rank 2" in text
        if how == "raises":
            assert "its script ended with ValueError: the learning rate" in text
    named = [text for (_, text, _), _ in found.values() if "2" in text.partition(": Runtime")[0]]
    assert named
    alone = autoshard(jobs.hw.GPT(layers=4), "dp=1", jobs.hw.tokens(8))
    optimizer = torch.optim.AdamW(alone.parameters())
    alone.load_checkpoint(tmp_path / how / "saved", optimizer)
    state = alone.full_state_dict()
    assert all(torch.equal(v, state[n]) for n, v in found[0][1].items())
    assert all(len(s) == 3 for s in optimizer.state.values())


def test_a_thread_ends_a_process_that_waits_for_a_rank_that_failed(monkeypatch):
    """As on a GPU, where nothing raises in a process that waits."""
    monkeypatch.setattr(failures, "LISTEN", 0.01)
    monkeypatch.setattr(failures, "GRACE", 0.1)
    store, told, waits = torch.distributed.HashStore(), [], []
    about = (store, 0, lambda: bool(waits), told.append)
    threading.Thread(target=failures._listen, args=about, daemon=True).start()

    def word(number, rank, cause, text):
        store.add(failures.COUNT, 1)
        store.set(failures.WORD.format(number), json.dumps([rank, cause, text, {}]))

    def after(seconds):
        time.sleep(seconds)
        return told

    word(1, 0, 2, "of this rank itself")
    word(2, 1, 1, "it waits")
    word(3, 2, 2, "it went on")
    assert after(0.3) == []  # nothing of this rank waits
    store.set(failures.WORD.format(3), "")
    waits.append(True)
    assert after(0.3) == []
    word(4, 3, 2, "it raised IndexError")
    assert after(0.5) == ["rank 3 failed, and this rank 0 waits for it: it raised IndexError"]
