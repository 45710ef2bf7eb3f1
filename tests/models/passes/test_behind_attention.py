"""Last hidden states of the tokens that are read, against passes in which every token's is computed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from ppo_rlhf.models.gradient_checkpointing import enable_gradient_checkpointing, recomputing
from ppo_rlhf.models.passes import trunks
from ppo_rlhf.models.passes.behind_attention import ReadTokens, modules_behind_attention
from ppo_rlhf.models.passes.compilation import compile_layers
from ppo_rlhf.models.passes.decoding import Decoder
from ppo_rlhf.models.passes.packed_attention import PackedLayout, packed_attention
from ppo_rlhf.models.passes.token_rows import right_padded
from ppo_rlhf.models.passes.trunks import packing, packs, states_at, token_states
from ppo_rlhf.models.products.compiled_shapes import ROUND
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.models.sequence_scores import sequence_scores
from tests.models.passes.test_trunks import KINDS, OTHERS, SEQUENCES, other, states_one_by_one
from tests.tiny_models import tiny_model

READ = torch.tensor([4, 5, 2, 15])  # two sequences' last tokens, another, and the last of all; in any order
TAILS = {
    "llama": ["layers.1.self_attn.o_proj", "layers.1.mlp"],
    "gpt2": ["h.1.attn.c_proj", "h.1.mlp"],
    "bitnet": ["layers.1.self_attn.o_proj", "layers.1.mlp"],
    "opt": ["decoder.layers.1.self_attn.out_proj", "decoder.layers.1.fc1", "decoder.layers.1.fc2"],
}


def trunk(name: str):
    return (tiny_model(name) if name in KINDS else other(name)[0]).base_model.double()


def tail(backbone) -> list[nn.Module]:
    return [backbone.get_submodule(name) for name in TAILS["gpt2" if hasattr(backbone, "h") else "llama"]]


@contextmanager
def rows_given(*modules: nn.Module) -> Iterator[list[list[int]]]:
    """Collect how many rows each module is given, call by call."""
    given: list[list[int]] = [[] for _ in modules]

    def note(at: int) -> Callable[..., Tensor]:
        return lambda states: given[at].append(states.shape[-2]) or before[at](states)

    before = [module.forward for module in modules]
    for at, module in enumerate(modules):
        module.forward = note(at)
    try:
        yield given
    finally:
        for module in modules:
            del module.forward


@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
def test_states_of_some_tokens_are_those_of_each_sequence_alone(name):
    backbone = trunk(name)
    with torch.no_grad():
        found = states_at(backbone, right_padded(SEQUENCES, 0), READ)
    assert_close(found, states_one_by_one(backbone)[READ], rtol=0.0, atol=1e-6)  # a Llama's norm is float32


@pytest.mark.parametrize("name", TAILS)
def test_gradients_of_some_states_are_those_of_each_sequence_alone(name):
    ours, alone = trunk(name), trunk(name)
    weights = torch.arange(1.0, 1.0 + len(READ), dtype=torch.float64)[:, None]
    (states_at(ours, right_padded(SEQUENCES, 0), READ) * weights).square().sum().backward()
    states = torch.cat([alone(torch.tensor([ids]), use_cache=False).last_hidden_state[0] for ids in SEQUENCES])
    (states[READ] * weights).square().sum().backward()
    for (parameter, found), expected in zip(ours.named_parameters(), alone.parameters(), strict=True):
        assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-4, msg=parameter)


@pytest.mark.parametrize("name", TAILS)
def test_what_follows_the_last_attention_is_given_the_tokens_that_are_read_and_the_layers_before_all(name):
    backbone = trunk(name)
    assert packs(backbone)
    modules = [backbone.get_submodule(module) for module in TAILS[name]]
    earlier = [backbone.get_submodule(module.replace(".1.", ".0.")) for module in TAILS[name]]
    with torch.no_grad(), rows_given(*modules, *earlier) as given:
        states_at(backbone, right_padded(SEQUENCES, 0), READ)
    assert given == [[4]] * len(modules) + [[16]] * len(modules)


def test_a_reward_model_computes_one_token_of_each_sequence_there():
    torch.manual_seed(0)
    model = CausalLMRewardModel.from_causal_lm(tiny_model("gpt2"))
    sequence_scores(model, [[4, 5]], 0)  # the first time it asks the model what it can
    with torch.no_grad(), rows_given(*tail(model.backbone)) as given:
        sequence_scores(model, SEQUENCES, 0)
    assert given == [[4], [4]]


def test_a_prefill_computes_the_last_token_of_each_prompt_there():
    model = tiny_model()
    assert packs(model.base_model)
    decoder = Decoder(model, [*SEQUENCES, SEQUENCES[-1]], 9)
    with torch.no_grad(), rows_given(*tail(model.base_model)) as given:
        decoder.prefill()
    assert given == [[4], [4]]


def test_states_that_are_not_read_may_be_anything(monkeypatch):
    """Not a number, say; and no gradient flows from there."""
    backbone = trunk("gpt2")
    assert packs(backbone)
    whole, seen = trunks.packed_states, []

    def poisoned(*given):
        states = whole(*given)
        others = torch.ones(len(states), dtype=torch.bool)
        others[READ] = False
        seen.append(int(others.sum()))
        return states.masked_fill(others[:, None], torch.nan)

    monkeypatch.setattr(trunks, "packed_states", poisoned)
    states = states_at(backbone, right_padded(SEQUENCES, 0), READ)
    states.sum().backward()
    assert seen == [12]
    assert states.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in backbone.parameters())


@pytest.mark.parametrize("shape", [(1, 5, 2), (5, 2)])
def test_tokens_that_are_read_are_taken_in_their_order_and_placed_among_zeros(shape):
    read = ReadTokens(torch.tensor([3, 0]), 5, more=1)
    taken = read.take(torch.arange(10.0).view(shape))
    assert taken.shape == (*shape[:-2], 3, 2)
    assert taken.flatten().tolist() == [6, 7, 0, 1, 0, 0]
    taken[..., 2, :] = torch.nan  # what fills up goes nowhere
    placed = read.place(taken)
    assert placed.shape == shape
    assert placed.flatten().tolist() == [0, 1, 0, 0, 0, 0, 6, 7, 0, 0]


def test_products_are_given_rounded_numbers_of_rows_where_each_number_is_compiled(monkeypatch):
    backbone = trunk("gpt2")
    assert packs(backbone)
    monkeypatch.setattr(trunks, "fills_rows", lambda *_: True)
    whole, read = [*SEQUENCES, [19]], torch.cat([READ, torch.tensor([16])])
    with torch.no_grad(), rows_given(*tail(backbone), backbone.h[0].mlp) as given:
        found = states_at(backbone, right_padded(whole, 0), read)
        alone = backbone(torch.tensor([[19]]), use_cache=False).last_hidden_state[0]
    assert [rows[0] for rows in given] == [ROUND, ROUND, 2 * ROUND]
    assert_close(found[:-1], states_one_by_one(backbone)[READ], rtol=0.0, atol=1e-12)
    assert_close(found[-1:], alone, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_a_model_that_checkpoints_gradients_computes_again_what_it_computed_and_has_the_same_gradient(name):
    found, expected = tiny_model(name).double(), tiny_model(name).double()
    enable_gradient_checkpointing(found)
    with recomputing(found), packing(found), rows_given(*tail(found.base_model)) as given:
        states_at(found.base_model, right_padded(SEQUENCES, 0), READ).square().sum().backward()
    assert given == [[4, 4], [4, 4]]
    with packing(expected):
        states_at(expected.base_model, right_padded(SEQUENCES, 0), READ).square().sum().backward()
    for ours, theirs in zip(found.base_model.parameters(), expected.base_model.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_passes_of_other_tokens_and_of_all_may_be_computed_again_in_any_order(order):
    """A recomputation stops as soon as it has what it needs, in the midst of what follows the attention."""
    found, expected = trunk("gpt2"), trunk("gpt2")
    enable_gradient_checkpointing(found)
    rows = [right_padded(SEQUENCES, 0), right_padded(SEQUENCES[:2], 0), right_padded(SEQUENCES[1:], 0)]

    def losses(backbone) -> list[Tensor]:
        passes = [states_at(backbone, rows[0], READ), states_at(backbone, rows[1], READ[:2])]
        return [states.square().sum() for states in (*passes, token_states(backbone, rows[2]))]

    sum(losses(expected)).backward()
    packs(found)
    with recomputing(found), packed_attention(found), trunks._tails[found].in_place():
        ours = losses(found)
        for turn in order:
            ours[turn].backward()
    for mine, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def test_compiled_layers_compute_all_tokens(monkeypatch):
    monkeypatch.setattr("ppo_rlhf.models.passes.compilation.BACKEND", "eager")
    backbone, seen = trunk("gpt2"), []
    compile_layers(backbone)
    take = ReadTokens.take
    packs(backbone)
    monkeypatch.setattr(ReadTokens, "take", lambda *given: seen.append(given) or take(*given))
    with torch.no_grad():
        found = states_at(backbone, right_padded(SEQUENCES, 0), READ)
    assert not seen
    assert_close(found, states_one_by_one(backbone)[READ], rtol=0.0, atol=1e-12)


def test_modules_compute_all_tokens_again_after_the_block_and_after_an_error():
    backbone = trunk("llama")
    assert packs(backbone)
    with pytest.raises(IndexError):
        states_at(backbone, right_padded(SEQUENCES, 0), torch.tensor([16]))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in backbone.modules())
    with torch.no_grad():
        states_at(backbone, right_padded(SEQUENCES, 0), READ)
        found = token_states(backbone, right_padded(SEQUENCES, 0))
    assert_close(found, states_one_by_one(backbone), rtol=0.0, atol=1e-6)


def test_modules_that_do_not_give_the_same_of_some_tokens_alone_compute_all(monkeypatch):
    """The first layer's do not: what it gives of the other tokens is what the second attends to."""
    monkeypatch.setattr(trunks, "modules_behind_attention", lambda backbone, *_: [backbone.h[0].mlp])
    backbone = trunk("gpt2")
    assert packs(backbone)
    with torch.no_grad(), rows_given(backbone.h[0].mlp) as given:
        found = states_at(backbone, right_padded(SEQUENCES, 0), READ)
    assert given == [[16]]
    assert_close(found, states_one_by_one(backbone)[READ], rtol=0.0, atol=1e-12)


def test_modules_that_fail_with_fewer_tokens_compute_all():
    backbone = trunk("gpt2")
    mlp = backbone.h[1].mlp
    mlp.forward = partial(_of_more_than_four, mlp.forward)
    with torch.no_grad():
        found = states_at(backbone, right_padded(SEQUENCES, 0), READ)
    assert_close(found, states_one_by_one(trunk("gpt2"))[READ], rtol=0.0, atol=1e-12)


def _of_more_than_four(forward: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    if states.shape[1] <= 4:
        raise RuntimeError("too few")
    return forward(states)


class Toy(nn.Module):
    """A trunk that attends once; what comes behind is told by its modules' names."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.once = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.twice = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.of_two = OfTwo()
        self.never = nn.Linear(4, 4)
        self.of_less = nn.Linear(4, 4)

    def run(self, attention) -> Tensor:
        states = self.before(torch.ones(1, 3, 4))[0][:, None]
        states = attention.attend(states, states, states, None)[None, :, 0]
        states = self.norm(self.once(states)) + self.twice(self.twice(states))
        return self.of_two(states, states) + self.of_less(states[:, :1])


class OfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, states: Tensor, others: Tensor) -> Tensor:
        return others + self.down(self.up(states))


def test_the_largest_modules_with_matrices_that_are_called_once_and_with_states_alone_are_found():
    toy = Toy()
    assert modules_behind_attention(toy, toy.run, PackedLayout.of([2, 1])) == [
        toy.once,
        toy.of_two.up,
        toy.of_two.down,
    ]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in toy.modules())
