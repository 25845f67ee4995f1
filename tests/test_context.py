"""Context parallelism on real gloo processes: every way against one device, to 1e-9."""

from functools import cache

import context_jobs as jobs
import pytest
from compare import difference, differences
from test_gloo import each, ranks_of
from zoo import CONTEXTS, batch, tiny

from autoshard import verify

#: Learned positions; softcap and windows; windows and sinks. Heads of llama share keys.
ZOO = ("gpt2", "gemma2", "gpt_oss")
WAYS = CONTEXTS
SQUARE, HYBRID = {"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}
LENGTHS = (23, 24, 6, 31)
SHORT = (1, 2, 3, 5, 7, 9)


def train(mesh, name, options):
    return jobs.train(mesh, name, **options)


def evaluated(mesh, name, options):
    return jobs.evaluated(mesh, name, **options)


def short(mesh, name, options):
    return jobs.short(mesh, name, SHORT, **options)


def dropping(mesh, name, options):
    return jobs.dropping(mesh, name, **options)


def differing(mesh, options):
    return jobs.differing(mesh, **options)


def ways(text, job, *arguments, only=WAYS, **options):
    """A job for every way of context parallelism."""
    return {
        f"{text} {way}": (job, *arguments, {**options, "context_parallel": way}) for way in only
    }


#: Of four ranks some meet the keys of others twice over: heads are cut two ways, or not at all.
RINGS = ("ring", "ulysses")

pair = ranks_of(
    {"cp": 2},
    {key: job for name in ZOO for key, job in ways(name, train, name).items()}
    | ways("lengths", train, "llama", lengths=LENGTHS)
    | {
        "bloom": (train, "bloom", {"lengths": LENGTHS}),
        "lfm2": (train, "lfm2", {"lengths": LENGTHS}),
        "accumulate": (train, "gpt2", {"accumulate": 2, "context_parallel": "allgather"}),
        "recompute": (train, "qwen3", {"recompute": "block"}),
    }
    | ways("eval", evaluated, "gpt2", only=RINGS)
    | ways("dropout", dropping, "gpt2", only=RINGS)
    | {"dropout recompute": (dropping, "gpt2", {"recompute": "block"})}
    | {"differing": (differing, {})},
)

four = ranks_of(
    {"cp": 4},
    ways("gemma2", train, "gemma2", only=RINGS)
    | ways("short", short, "gpt2", only=RINGS)
    | {"short lfm2": (short, "lfm2", {"context_parallel": "allgather"})}
    | ways("hybrid", train, "llama", only=RINGS, axes=HYBRID, zero=3, accumulate=2)
    | ways("square", train, "llama", only=RINGS, axes=SQUARE, lengths=LENGTHS[:2])
    | {"eval square": (evaluated, "gpt2", {"axes": SQUARE, "sequence_parallel": False})},
)


def assert_trained_alike(results, job, name, **options):
    want = jobs.alone(name, **options)
    for rank, got in enumerate(each(results, job)):
        for key in ("loss", "norm"):
            wrong = [difference(a, b) for a, b in zip(got[key], want[key], strict=True)]
            assert not any(wrong), f"rank {rank}, {key}: {wrong}"
        for step, (a, b) in enumerate(zip(got["gradients"], want["gradients"], strict=True)):
            assert differences(a, b) == {}, f"rank {rank}, step {step}"
        assert differences(got["state"], want["state"]) == {}, f"rank {rank}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ZOO)
def test_two_ranks_train_like_one_device(pair, name, way):
    assert_trained_alike(pair, f"{name} {way}", name)


def test_two_ranks_add_up_two_batches(pair):
    assert_trained_alike(pair, "accumulate", "gpt2", accumulate=2)


@pytest.mark.parametrize("way", WAYS)
def test_lengths_that_do_not_divide_follow_each_other(pair, way):
    assert_trained_alike(pair, f"lengths {way}", "llama", lengths=LENGTHS)


@pytest.mark.parametrize("name", ["bloom", "lfm2"])
def test_alibi_and_convolutions_of_such_lengths(pair, name):
    assert_trained_alike(pair, name, name, lengths=LENGTHS)


def test_blocks_computed_again_with_their_ring(pair):
    assert_trained_alike(pair, "recompute", "qwen3")


@pytest.mark.parametrize("way", RINGS)
def test_four_ranks_train_like_one_device(four, way):
    assert_trained_alike(four, f"gemma2 {way}", "gemma2")


@pytest.mark.parametrize("way", RINGS)
def test_beside_data_ranks_that_share_out_parameters(four, way):
    assert_trained_alike(four, f"hybrid {way}", "llama", accumulate=2)


@pytest.mark.parametrize("way", RINGS)
def test_beside_tensor_ranks_that_cut_tokens_too(four, way):
    assert_trained_alike(four, f"square {way}", "llama", lengths=LENGTHS[:2])


@cache
def evaluated_alone(name):
    return jobs.evaluated(None, name)


def assert_evaluated_alike(results, job, name):
    want = evaluated_alone(name)
    for rank, got in enumerate(each(results, job)):
        for key in ("loss", "logits"):
            wrong = [difference(a, b) for a, b in zip(got[key], want[key], strict=True)]
            assert not any(wrong), f"rank {rank}, {key}: {wrong}"


@pytest.mark.parametrize("way", RINGS)
def test_evaluation_and_back(pair, way):
    assert_evaluated_alike(pair, f"eval {way}", "gpt2")


def test_evaluation_beside_tensor_ranks(four):
    assert_evaluated_alike(four, "eval square", "gpt2")


@pytest.mark.parametrize("job", [*(f"short {way}" for way in RINGS), "short lfm2"])
def test_sequences_of_which_some_ranks_hold_nothing(four, job):
    want = short_alone("lfm2" if "lfm2" in job else "gpt2")
    for rank, got in enumerate(each(four, job)):
        for at, length in enumerate(SHORT):
            text = f"rank {rank}, length {length}"
            assert difference(got["logits"][at], want["logits"][at]) == "", text
            assert differences(got["gradients"][at], want["gradients"][at]) == {}, text


@cache
def short_alone(name):
    return jobs.short(None, name, SHORT)


@pytest.mark.parametrize("job", [*(f"dropout {way}" for way in RINGS), "dropout recompute"])
def test_dropout_repeats_itself_for_a_seed_and_has_its_gradient(pair, job):
    first, *others = each(pair, job)
    one, again, other = first["loss"]
    assert one == again != other and one != first["without"]
    assert abs(first["by differences"] / first["by backward"] - 1) < 1e-6  # of differences
    for rank in others:
        assert all(a == b for a, b in zip(rank["loss"], first["loss"], strict=True))


def test_blocks_computed_again_drop_the_same(pair):
    again = each(pair, "dropout recompute")
    for got, want in zip(again, each(pair, "dropout ring"), strict=True):
        assert got["loss"] == want["loss"]
        assert differences(got["gradients"], want["gradients"]) == {}


def test_ranks_of_cp_with_other_tokens_are_told_so(pair):
    for told in each(pair, "differing"):
        assert len(told) == 2 and "batch" in told[0] and "cp" in told[0]
        assert told[1] == "True"


# --- all ranks in this process ---


def assert_verified(way, length, **over):
    model = tiny("llama", num_hidden_layers=1, **over)
    given = batch(b=2, s=length, pad=length > 9)
    report = verify(model, "cp=4", given, steps=1, context_parallel=way)
    assert report.ok, f"{way}, {length} tokens: {report}"


@pytest.mark.parametrize("length", range(2, 10))
def test_models_captured_with_fewer_tokens_than_ranks_need(length):
    assert_verified(WAYS[length % 3], length)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_models_captured_with_few_tokens_in_every_way(way):
    for length in range(2, 10):
        assert_verified(way, length)


@pytest.mark.parametrize("way", WAYS)
def test_a_length_that_four_ranks_do_not_divide(way):
    assert_verified(way, 299, max_position_embeddings=512)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_2999_tokens(way):
    assert_verified(way, 2999, max_position_embeddings=4096)
