"""Where compilers of this kind go wrong, each case proved against one device."""

import handwritten as hw
import pytest
import torch
import transformers
from compare import difference
from zoo import batch, tiny, tiny_config

from autoshard import CaptureError, MeshSpec, ShardingError, autoshard, collectives, verify
from passes import tensor_parallel


def proved(model, mesh, inputs, **options):
    report = verify(model, mesh, example_inputs=inputs, steps=2, **options)
    assert report.ok, str(report)


class Embedded(torch.nn.Module):
    """A table at the start and a head at its end."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(24, 16), torch.nn.Linear(16, 24)


def conversions(sharded) -> list[str]:
    kinds = (collectives.CONVERSIONS.get(n.target) for n in sharded.graph_module.graph.nodes)
    return [kind for kind in kinds if kind]


# --- mesh axes of size one ---


def test_size_one_axes_leave_the_graph_untouched():
    alone = autoshard(hw.GPT(), MeshSpec(dp=1, tp=1), example_inputs=hw.tokens())
    assert conversions(alone) == []
    for mesh, plain in ((MeshSpec(dp=2, tp=1), MeshSpec(dp=2)), (MeshSpec(dp=1, tp=2), {"tp": 2})):
        with_one = autoshard(hw.GPT(), mesh, example_inputs=hw.tokens())
        without = autoshard(hw.GPT(), plain, example_inputs=hw.tokens())
        assert conversions(with_one) == conversions(without)
        assert with_one.code == without.code


def test_on_one_rank_the_outputs_are_the_models_own():
    model, inputs = hw.GPT(), hw.tokens()
    sharded = autoshard(model, MeshSpec(dp=1, tp=1), example_inputs=inputs)
    got, want = sharded(**inputs), model(**inputs)
    assert torch.equal(got.loss, want.loss)
    assert torch.equal(got.logits, want.logits)


# --- sizes that do not divide ---


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_50257_tokens_over_four_ranks(tied):
    proved(hw.GPT(vocab=50257, layers=1, tied=tied), {"tp": 4}, hw.tokens(vocab=50257))


def test_50257_tokens_are_cut_and_not_replicated():
    model = hw.GPT(vocab=50257, layers=1)
    sharded = autoshard(model, {"tp": 4}, example_inputs=hw.tokens(vocab=50257))
    local = [dict(sharded.rank(r).named_parameters())["head.weight"] for r in range(4)]
    assert max(p.shape[0] for p in local) == 12565  # a quarter, rounded up
    assert sum(p.shape[0] for p in local) in (50257, 4 * 12565)
    assert torch.equal(torch.cat(local)[:50257], model.head.weight)


def test_a_few_padded_tokens_never_win():
    """Large negative logits everywhere: a pad of zeros would take all of the softmax."""
    model = hw.GPT(vocab=97, layers=1)
    model.head = torch.nn.Linear(32, 97)
    torch.nn.init.constant_(model.head.bias, -50.0)
    proved(model, {"tp": 4}, hw.tokens(vocab=97))


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "no_sp"])
def test_six_heads_over_four_ranks(sequence_parallel):
    model = hw.GPT(width=48, heads=6)
    proved(model, {"tp": 4}, hw.tokens(), sequence_parallel=sequence_parallel)


def test_six_heads_over_four_ranks_are_cut_in_two():
    model = hw.GPT(width=48, heads=6)
    sharded = autoshard(model, {"tp": 4}, example_inputs=hw.tokens())
    whole = dict(model.named_parameters())["blocks.0.attn.in_proj.weight"].view(3, 6, 8, 48)
    for rank in range(4):
        local = dict(sharded.rank(rank).named_parameters())["blocks.0.attn.in_proj.weight"]
        half = whole[:, :3] if rank < 2 else whole[:, 3:]
        assert torch.equal(local.flatten(), half.flatten())


def test_every_axis_indivisible_at_once():
    proved(hw.GPT(width=48, heads=6, ffn=130, vocab=101), {"tp": 4}, hw.tokens(vocab=101))


def test_a_sequence_that_the_ranks_do_not_divide():
    proved(hw.GPT(), {"tp": 4}, hw.tokens(s=18))


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "no_sp"])
def test_eight_query_and_two_kv_heads_over_eight_ranks(sequence_parallel):
    model = tiny("llama", num_attention_heads=8, num_key_value_heads=2, head_dim=8)
    proved(model, {"tp": 8}, batch(), sequence_parallel=sequence_parallel)


def test_kv_heads_are_replicated_over_the_minor_ranks():
    model = tiny("llama", num_attention_heads=8, num_key_value_heads=2, head_dim=8)
    sharded = autoshard(model, {"tp": 8}, example_inputs=batch())
    q, k = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
    whole = dict(model.named_parameters())
    for rank in range(8):
        local = dict(sharded.rank(rank).named_parameters())
        assert torch.equal(local[q], whole[q].chunk(8)[rank])
        assert torch.equal(local[k], whole[k].chunk(2)[rank // 4])


# --- weights and biases ---


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_tied_embeddings(mesh):
    proved(hw.GPT(tied=True), mesh, hw.tokens())


def test_tied_embeddings_are_one_parameter():
    sharded = autoshard(hw.GPT(tied=True), {"tp": 2}, example_inputs=hw.tokens())
    names = [name for name, _ in sharded.named_parameters()]
    assert "tokens.weight" in names and "head.weight" not in names


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "no_sp"])
def test_row_linear_bias_is_added_once(sequence_parallel):
    model = hw.GPT(layers=1)
    for block in model.blocks:
        torch.nn.init.constant_(block.down.bias, 3.0)
        torch.nn.init.normal_(block.attn.out_proj.bias)
    proved(model, {"tp": 4}, hw.tokens(), sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("shape", [(4, 32), (4, 8, 32)], ids=["rows", "sequences"])
def test_residual_feeds_a_column_linear_and_an_add(shape):
    proved(hw.NoNormResidual(), {"dp": 2, "tp": 2}, hw.vectors(*shape))


@pytest.mark.parametrize("tp", [2, 4])
def test_full_width_query_and_key_norm(tp):
    proved(hw.QKNormAttention(), {"tp": tp}, hw.vectors(4, 8, 32))


def test_full_width_query_and_key_norm_gathers_nothing():
    """A mean over cut heads is a small all-reduce: q and k themselves never travel."""
    sharded = autoshard(
        hw.QKNormAttention(),
        {"tp": 2},
        example_inputs=hw.vectors(4, 8, 32),
        sequence_parallel=False,
    )
    kinds = conversions(sharded)
    assert not any("gather" in kind or "shard" in kind for kind in kinds), kinds
    local = dict(sharded.rank(1).named_parameters())
    assert local["q.weight"].shape == (16, 32) and local["q_norm.weight"].shape == (16,)


def freeze(model, *parts):
    for name, parameter in model.named_parameters():
        if name.startswith(parts):
            parameter.requires_grad_(False)
    return model


FROZEN = {
    "embeddings": ("tokens", "positions"),
    "first_block": ("blocks.0",),
    "all_but_norms": ("tokens", "positions", "head", "blocks.0.attn", "blocks.1.up"),
}


@pytest.mark.parametrize("parts", FROZEN.values(), ids=FROZEN)
def test_frozen_parameters(parts):
    proved(freeze(hw.GPT(), *parts), {"dp": 2, "tp": 2}, hw.tokens())


def test_frozen_parameters_stay_frozen():
    model = freeze(hw.GPT(), "blocks.0")
    sharded = autoshard(model, {"dp": 2, "tp": 2}, example_inputs=hw.tokens())
    wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    assert {name: p.requires_grad for name, p in sharded.named_parameters()} == wanted


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}], ids=str)
def test_parameters_without_gradient(mesh):
    proved(hw.Unused(), mesh, hw.vectors(4, 32))


# --- what is written in place, and what a meta model remembers ---


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_in_place_ops(mesh):
    proved(hw.InPlace(), mesh, hw.vectors(4, 32))


def test_in_place_ops_leave_the_inputs_alone():
    inputs = hw.vectors(4, 32)
    before = {name: value.clone() for name, value in inputs.items()}
    autoshard(hw.InPlace(), MeshSpec(tp=1), example_inputs=inputs)(**inputs)
    assert all(torch.equal(inputs[name], before[name]) for name in inputs)


def held(sharded) -> list[torch.Tensor]:
    """Every tensor the module of one rank holds, apart from its parameters."""
    graph = sharded.graph_module
    found = [b for _, b in sharded.named_buffers()] + [b for _, b in graph.named_buffers()]
    return found + [v for v in vars(graph).values() if isinstance(v, torch.Tensor)]


def test_rope_tables_of_a_meta_model_hold_true_values():
    config = tiny_config("llama")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
    true = transformers.LlamaForCausalLM(config).model.rotary_emb.inv_freq
    inputs = {name: value.to("meta") for name, value in batch().items()}
    sharded = autoshard(model, {"dp": 2, "tp": 2}, example_inputs=inputs).rank(3)
    tables = [t for t in held(sharded) if t.shape == true.shape and t.dtype == true.dtype]
    assert tables and not any(t.is_meta for t in tables)
    assert all(difference(t, true) == "" for t in tables)


class Table(torch.nn.Module):
    """A linear after a table of values that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 32), persistent=False)

    def forward(self, x, target):
        return (self.down(torch.tanh(self.up(x * self.table))) - target).square().mean()


def test_non_persistent_buffers_of_a_meta_model_keep_their_values():
    model = Table()
    values = model.table.clone()
    for part in (model.up, model.down):
        part.to("meta")
    sharded = autoshard(model, {"tp": 2}, example_inputs=hw.vectors(4, 32))
    tables = [t for t in held(sharded.rank(1)) if t.shape == values.shape]
    assert tables and all(torch.equal(t, values) for t in tables)


class NoGrad(torch.nn.Module):
    """A part under ``torch.no_grad``, once with an in-place op in it."""

    def __init__(self, in_place: bool):
        super().__init__()
        self.in_place = in_place
        self.first, self.last = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x, target):
        with torch.no_grad():
            y = self.first(x) + 1
            if self.in_place:
                y.mul_(2)
        return torch.nn.functional.mse_loss(self.last(y + self.first(x)), target)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2}])
def test_no_gradient_flows_out_of_a_block_under_no_grad(in_place, mesh):
    proved(NoGrad(in_place), mesh, hw.vectors(4, 16))


class ByItsSize(torch.nn.Module):
    """A sum divided by the number of rows, written as users write it."""

    def __init__(self, by):
        super().__init__()
        self.by = by
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x, target):
        y = self.down(torch.relu(self.up(x))) - target
        return self.by((y**2).sum(), y)


@pytest.mark.parametrize(
    "by",
    [
        lambda total, y: total / y.shape[0],
        lambda total, y: total * (1 / len(y)),
        lambda total, y: total / y.numel(),
        lambda total, y: total / y.shape[0] ** 2,
    ],
)
def test_a_size_used_as_a_number_is_that_of_the_global_batch(by):
    proved(ByItsSize(by), {"dp": 2, "tp": 2}, hw.vectors(4, 16))


class Mixing(torch.nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.mix, self.up = mix, torch.nn.Linear(16, 16)

    def forward(self, x, target):
        return self.mix(self.up(x)).sum()


@pytest.mark.parametrize(
    "mix",
    [
        lambda y: y @ y.T,
        lambda y: y.logsumexp(0),
        lambda y: y * torch.arange(y.shape[0])[:, None],
        lambda y: torch.eye(y.shape[0]) @ y,
        lambda y: y[torch.tensor([2, 0, 1, 3])],
        lambda y: y.sort(0).values,
        lambda y: y[0],
        lambda y: y.sort(0).values.cumsum(0),
        lambda y: y.flip(0),
    ],
)
def test_rows_of_other_data_ranks_are_never_needed_silently(mix):
    with pytest.raises(ShardingError) as error:
        verify(Mixing(mix), {"dp": 2}, example_inputs=hw.vectors(4, 16))
    assert "rows" in str(error.value) and "dp" in str(error.value)


@pytest.mark.parametrize("kind", ["llama", "bert", "gpt2", "mamba"])
def test_a_padding_mask_as_an_input(kind):
    given = batch()
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    for row in range(4):
        given["attention_mask"][row, 32 - 3 * row :] = 0
    proved(tiny(kind), {"dp": 2, "tp": 2}, given)


class TimeShift(torch.nn.Module):
    """Every token also reads the one before it: a pad of one in front and of minus one behind."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.embed = torch.nn.Embedding(hw.VOCAB, width)
        self.up, self.down = torch.nn.Linear(width, 64), torch.nn.Linear(64, hw.VOCAB)

    def forward(self, ids, targets):
        x = self.embed(ids)
        x = x + torch.nn.functional.pad(x, (0, 0, 1, -1))
        logits = self.down(torch.relu(self.up(x)))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_shift_along_the_sequence_reads_it_whole(sequence_parallel):
    proved(TimeShift(), {"tp": 2}, hw.tokens(), sequence_parallel=sequence_parallel)


class OnWords(torch.nn.Module):
    """Words, numbers of words, and vectors; ``then`` makes a loss of them."""

    def __init__(self, then):
        super().__init__()
        self.then = then
        self.words = torch.nn.Embedding(16, 8, padding_idx=1)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def out(self, x):
        return self.down(torch.relu(self.up(x)))

    def forward(self, x, ids, which):
        return self.then(self, x, ids, which)


CASES_ON_WORDS = {
    "a padding row": lambda m, x, ids, which: m.out(m.words(ids)).square().mean(),
    "a padding row, tied": lambda m, x, ids, which: torch.nn.functional.cross_entropy(
        (m.words(ids) @ m.words.weight.T).flatten(0, 1), ids.flatten()
    ),
    "sums by class": lambda m, x, ids, which: (
        torch.ones(4, 4).index_add(0, which, m.out(x)).square().sum()
    ),
    "one of every row": lambda m, x, ids, which: m.out(x)[torch.arange(x.shape[0]), which].mean(),
    "ones by row": lambda m, x, ids, which: m.out(x).mean() * torch.ones(x.shape[0]).sum(),
    "einsum without an arrow": lambda m, x, ids, which: (
        torch.einsum("bi,ij", m.out(x), m.down.weight).square().sum()
    ),
    "einsum with an ellipsis": lambda m, x, ids, which: (
        torch.einsum("...i,ij->...j", m.out(x), m.down.weight).square().sum()
    ),
    "a fixed number of rows": lambda m, x, ids, which: (
        m.out(x) * torch.arange(len(x))[:, None]
    ).sum(),
}


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "dp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("case", CASES_ON_WORDS)
def test_words_rows_and_letters(case, mesh):
    inputs = {
        "x": torch.randn(6, 8),
        "ids": torch.randint(0, 16, (6, 5)).clamp(max=9),
        "which": torch.randint(0, 4, (6,)),
    }
    inputs["ids"][:, 0] = 1  # the padding row
    proved(OnWords(CASES_ON_WORDS[case]), mesh, inputs)


@pytest.mark.parametrize("length", [5, 6, 7, 9])
@pytest.mark.parametrize("ranks", [4, 8])
def test_lengths_that_do_not_divide_with_fewer_heads_than_ranks(length, ranks):
    config = tiny_config("llama", num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    proved(transformers.LlamaForCausalLM(config), {"tp": ranks}, batch(s=length, b=2, pad=False))


class Writing(torch.nn.Module):
    def __init__(self, to_input: bool):
        super().__init__()
        self.to_input = to_input
        self.table, self.up = torch.nn.Embedding(8, 16, max_norm=1.0), torch.nn.Linear(16, 16)

    def forward(self, x, ids):
        if self.to_input:
            return self.up(x.mul_(2)).square().mean()
        return self.up(self.table(ids)).square().mean()


@pytest.mark.parametrize("to_input", [True, False])
def test_writing_to_inputs_or_parameters_is_refused(to_input):
    given = {"x": torch.randn(4, 16), "ids": torch.arange(4)}
    with pytest.raises(CaptureError) as error:
        autoshard(Writing(to_input), {"tp": 2}, example_inputs=given)
    assert "in place" in str(error.value)


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4", "dp=2,tp=2"])
@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + x.chunk(2, -1)[0].repeat(1, 1, 2),
        lambda x: x + x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2),
    ],
    ids=["a half, twice", "shuffled"],
)
def test_features_that_meet_themselves_in_another_order(mix, mesh):
    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(24, 48), torch.nn.Linear(48, 24)

        def forward(self, x):
            x = mix(x)
            return mix(x + self.down(torch.relu(self.up(x)))).square().mean()

    proved(Mixed(), mesh, {"x": torch.randn(4, 8, 24)})


class Shifted(torch.nn.Module):
    """One more class in front: 1 + 47 logits, cut in runs that differ from rank to rank."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(48, 24)
        self.up, self.head = torch.nn.Linear(24, 48), torch.nn.Linear(48, 48)

    def forward(self, ids, targets):
        logits = self.head(torch.relu(self.up(self.embed(ids))))
        logits = torch.cat([torch.zeros_like(logits[..., :1]), logits], -1)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2", "tp=4"])
def test_runs_of_a_parameter_that_differ_between_ranks(mesh):
    proved(Shifted(), mesh, hw.tokens(vocab=48))


class Picking(torch.nn.Module):
    """Some positions of every row: two lengths that have nothing to do with each other."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(48, 24)
        self.up, self.head = torch.nn.Linear(24, 48), torch.nn.Linear(48, 48)

    def forward(self, ids, at, targets):
        picked = torch.take_along_dim(self.up(self.embed(ids)), at[..., None], 1)
        return torch.nn.functional.cross_entropy(self.head(picked).flatten(0, 1), targets.flatten())


def test_lengths_of_inputs_are_not_taken_for_each_other():
    ids, at = torch.randint(48, (4, 8)), torch.randint(8, (4, 3))
    proved(Picking(), "tp=2", {"ids": ids, "at": at, "targets": torch.randint(48, (4, 3))})


def test_a_gradient_that_is_zero_in_exact_arithmetic_makes_no_step():
    class Spans(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(32, 16)
            self.up, self.spans = torch.nn.Linear(16, 32), torch.nn.Linear(32, 1)

        def forward(self, ids, start):  # a shift of all logits changes nothing
            logits = self.spans(torch.relu(self.up(self.embed(ids)))).squeeze(-1)
            return torch.nn.functional.cross_entropy(logits, start)

    given = {"ids": torch.randint(32, (4, 9)), "start": torch.randint(9, (4,))}
    proved(Spans(), {"tp": 2}, given)


@pytest.mark.parametrize("kind", ["cummax", "median"])
def test_along_the_features_rows_are_free(kind):
    class Along(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(16, 32)

        def forward(self, x):
            return getattr(self.up(x), kind)(-1).values.square().mean()

    proved(Along(), {"dp": 2}, {"x": torch.randn(4, 16)})


def test_an_op_that_checks_its_result_is_named():
    class Solving(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(16, 16)

        def forward(self, x):
            return (x @ torch.linalg.solve(self.up.weight, self.up.weight.T)).square().mean()

    with pytest.raises(CaptureError) as error:
        autoshard(Solving(), {"tp": 2}, example_inputs={"x": torch.randn(4, 16)})
    assert "linalg.solve" in str(error.value)


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("times", [2, 4])
@pytest.mark.parametrize("threshold", [0, tensor_parallel.THRESHOLD])
def test_slices_of_what_turns_out_to_repeat_later(threshold, times, mesh, monkeypatch):
    """The tied weight makes the sliced width a product, after the slices made it a concatenation:
    every slice then still starts where the model says."""

    class Rotated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(24, 32)

        def forward(self, ids):
            x, size = self.embed(ids), 32 // times
            slices = [x[..., k * size : (k + 1) * size] for k in range(times)]
            x = torch.cat([k * part for k, part in enumerate(slices, 1)][::-1], -1)
            repeated = x.chunk(times, -1)[0].repeat(1, 1, times)
            return torch.nn.functional.linear(repeated, self.embed.weight).square().mean()

    monkeypatch.setattr(tensor_parallel, "THRESHOLD", threshold)
    proved(Rotated(), mesh, {"ids": torch.randint(24, (4, 8))})


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm", "var", "std", "mean"])
def test_moments_over_features_of_which_a_part_is_cut(kind, mesh):
    """The split makes the features a concatenation; a part that is not cut counts once only."""

    class Halved(Embedded):
        def forward(self, ids):
            x = self.embed(ids)
            if kind in ("layer_norm", "rms_norm"):
                x = getattr(torch.nn.functional, kind)(x, (16,))
            else:
                x = x / (1 + getattr(x, kind)(-1, keepdim=True) ** 2)
            return self.head(x.chunk(2, -1)[0].repeat(1, 1, 2)).square().mean()

    proved(Halved(), mesh, {"ids": torch.randint(24, (4, 8))})


@pytest.mark.parametrize("mesh", ["dp=2", "cp=2", "tp=2"])
def test_one_element_is_made_in_the_type_of_a_batch_that_is_cut(mesh):
    """The corner of the batch is cut out for its type alone, which takes no row of any rank."""

    class Masked(Embedded):
        def forward(self, ids):
            x = self.embed(ids)
            corner = x[:1, :1, :1]
            allowed = ids[:, :, None] > 3
            x = x + torch.zeros_like(corner).masked_fill(~allowed, -2.0)
            x = x * torch.ones_like(corner) + torch.full_like(corner, 0.5)
            return self.head(x).square().mean()

    proved(Masked(), mesh, {"ids": torch.randint(24, (4, 8))})


def test_a_backward_written_by_hand_is_told_and_not_lost_in_silence():
    """Export sees the ops of forward; the note and the warning say so, and verify compares."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(8, 8)

        def forward(self, x):
            return Doubled.apply(self.up(x)).square().mean()

    inputs, apply = {"x": torch.randn(4, 8)}, torch.autograd.Function.__dict__["apply"]
    with pytest.warns(UserWarning, match="Doubled.*ops in forward"):
        sharded = autoshard(Model(), {"dp": 2}, example_inputs=inputs)
    assert any("Doubled" in note for note in sharded.program.notes)
    assert torch.autograd.Function.__dict__["apply"] is apply
    with pytest.warns(UserWarning, match="Doubled"):
        assert not verify(Model(), {"dp": 2}, example_inputs=inputs, steps=1).ok


def test_tensors_beside_other_things_are_outputs_too():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(8, 8)

        def forward(self, x):
            a = self.up(x)
            nested = {"q": a * 2, "n": 3, "r": (a * 3, None, [a * 4, "text"])}
            return {"a": a, "k": 7, "list": [a + 1, None], "nested": nested, "none": [None, 2]}

    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 8)
    got, a = autoshard(model, {"dp": 1}, example_inputs={"x": x})(x=x), model.up(x)
    assert [*got] == ["a", "list", "nested"] and [*got["nested"]] == ["q", "r"]
    (plus, none), (three, hole, four) = got["list"], got["nested"]["r"]
    assert none is hole is None and four[1] is None and type(four) is list
    pairs = [(plus, a + 1), (got["nested"]["q"], a * 2), (three, a * 3), (four[0], a * 4)]
    assert all(torch.allclose(b, c) for b, c in pairs)
    proved(Model(), {"dp": 2}, {"x": x})
