"""All decoding engines against a slow oracle: no cache, no padding, no mask, one row and one token at a time."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM, MambaConfig, OpenAIGPTConfig

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.core.sampling import sample_tokens
from ppo_rlhf.models.preparation import prepare
from ppo_rlhf.passes import engines, sampling
from ppo_rlhf.passes.decoding import Decoder, decodes
from ppo_rlhf.passes.engines import generate_responses
from ppo_rlhf.passes.sampling import SamplingSettings
from tests.tiny_models import draw_weights

KINDS = ["gpt2", "llama", "bitnet"]
ENGINES = ["static", "hf"]
STEPS = 9
STOPS = (2, 5, 17)
WITHOUT_KEYS = [
    MambaConfig(vocab_size=23, hidden_size=16, num_hidden_layers=2, state_size=4, eos_token_id=None),
    OpenAIGPTConfig(vocab_size=23, n_embd=16, n_layer=2, n_head=2, n_positions=32),
]
EVEN = [[3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14], [15, 16, 17], [18, 19, 20]]
UNEVEN = [[3], [4, 5, 6, 7, 8, 9], [10, 11], [12, 13, 14, 0, 2, 5], [15, 16, 17, 18], [0, 0]]


def noise(rows: int, steps: int = STEPS) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(11).random((rows, steps)))


def settings(**changes) -> SamplingSettings:
    plain = {
        "response_length": STEPS,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "stop_token_ids": STOPS,
        "pad_token_id": 0,
    }
    return SamplingSettings(**{**plain, **changes})


def next_token(logits: np.ndarray, uniform: float, how: SamplingSettings, step: int) -> tuple[int, float]:
    """Inverse CDF over exact probabilities: no stop token yet? the top k, then the top p of the rest; look it up."""
    probabilities = np.exp(logits / how.temperature - np.max(logits / how.temperature))
    probabilities /= probabilities.sum()
    kept = probabilities.copy()
    kept[[index for ids in how.unused_ids for index in ids]] = 0.0
    if step + 1 < how.min_response_length:
        kept[list(how.stop_token_ids)] = 0.0
    order = np.argsort(-kept)
    if how.top_k:
        kept[order[how.top_k :]] = 0.0
    if how.top_p < 1.0:
        mass_before = np.cumsum(kept[order]) - kept[order]
        kept[order[mass_before >= how.top_p * kept.sum()]] = 0.0
    cumulated = np.cumsum(kept) / kept.sum()
    token = int(np.searchsorted(cumulated, uniform, side="right"))
    return token, float(np.log(probabilities[token]))


def decode_slowly(model, prompts, uniforms, how: SamplingSettings) -> tuple[list[list[int]], list[list[float]]]:
    tokens, logprobs = [], []
    for prompt, row in zip(prompts, uniforms.numpy(), strict=True):
        ids, row_logprobs = list(prompt), []
        for step, uniform in enumerate(row[: how.response_length]):
            with torch.no_grad():
                logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1].double().numpy()
            token, logprob = next_token(logits, uniform, how, step)
            ids.append(token)
            row_logprobs.append(logprob)
            if token in how.stop_token_ids:
                break
        tokens.append(ids[len(prompt) :])
        logprobs.append(row_logprobs)
    return tokens, logprobs


def check_against_the_oracle(model, prompts, how, *, engine="static", batch_size=64):
    uniforms = noise(len(prompts), how.response_length)
    tokens, logprobs = decode_slowly(model, prompts, uniforms, how)
    actual = generate_responses(model, prompts, uniforms, how, engine=engine, batch_size=batch_size)
    assert actual.token_lists() == tokens
    assert actual.response_ids.shape == (len(prompts), how.response_length)
    assert actual.lengths.tolist() == [len(row) for row in tokens]
    assert actual.terminated.tolist() == [row[-1] in how.stop_token_ids for row in tokens]
    tolerance = 1e-10 if engine == "static" else 1e-5  # generate hands its processors float32 logits
    for row, expected in enumerate(logprobs):
        assert_close(
            actual.sampler_logprobs[row, : len(expected)].double(),
            torch.tensor(expected, dtype=torch.float64),
            rtol=0.0,
            atol=tolerance,
        )
        assert actual.response_ids[row, len(expected) :].tolist() == [how.pad_token_id] * (
            how.response_length - len(expected)
        )
        assert actual.sampler_logprobs[row, len(expected) :].tolist() == [0.0] * (how.response_length - len(expected))
    return actual


@pytest.mark.parametrize(("prompts", "batch_size"), [(EVEN, 64), (UNEVEN, 64), (UNEVEN, 4), (UNEVEN, 1)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_tokens_are_those_of_the_oracle_whatever_the_batch_size(make_model, kind, prompts, batch_size):
    actual = check_against_the_oracle(make_model(kind), prompts, settings(), batch_size=batch_size)
    assert len(set(actual.lengths.tolist())) > 1  # some stop early, not all at once


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_generate_samples_the_same_tokens(make_model, kind):
    check_against_the_oracle(make_model(kind), UNEVEN, settings(), engine="hf", batch_size=4)


@pytest.mark.parametrize("kind", KINDS)
def test_both_engines_sample_in_16_bits_from_weights_of_32(make_model, kind):
    """Under autocast Llama's rotary embeddings return float32 keys, while values are in 16 bits."""
    model = make_model(kind).float()
    with torch.autocast("cpu", torch.bfloat16):
        static, hf = (
            generate_responses(model, UNEVEN, noise(6), settings(stop_token_ids=()), engine=engine)
            for engine in ("static", "hf")
        )
    is_same = (static.response_ids == hf.response_ids).cumprod(1).bool()  # up to where rounding has drawn another token
    assert is_same.float().mean() > 0.5
    assert (static.sampler_logprobs - hf.sampler_logprobs)[is_same].abs().max() < 0.1


@pytest.mark.parametrize("config", WITHOUT_KEYS, ids=lambda config: config.model_type)
def test_a_model_without_a_cache_of_keys_and_values_is_sampled_by_generate(config):
    model = prepare(draw_weights(AutoModelForCausalLM.from_config(config), 0.4))
    check_against_the_oracle(model.double(), UNEVEN, settings(), engine="hf")
    actual = [generate_responses(model, UNEVEN, noise(6), settings(), engine=engine) for engine in ("static", "hf")]
    assert torch.equal(actual[0].response_ids, actual[1].response_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_generate_has_a_static_cache_and_transformers_attention_and_leaves_the_model_as_it_was(make_model, kind):
    """Padding prompts to the width used on a GPU changes no token: in float64 they equal those of `static`."""
    model = make_model(kind)
    expected = generate_responses(model, UNEVEN, noise(6), settings(), engine="static")
    attention, caches = model.config._attn_implementation, set()
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: caches.add(
            (type(kwargs.get("cache", kwargs.get("past_key_values"))).__name__, model.config._attn_implementation)
        ),
        with_kwargs=True,
    )
    actual = generate_responses(model, UNEVEN, noise(6), settings(), engine="hf")
    handle.remove()
    assert caches == {("_Cache", "sdpa")}
    assert model.config._attn_implementation == attention == "ppo_rlhf_packed"
    assert torch.equal(actual.response_ids, expected.response_ids)
    assert "_compiled_call" not in vars(model)


def forward_of_5_23(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None): ...


def forward_of_5_24(self, input_ids, attention_mask=None, position_ids=None, cache=None): ...


def forward_without_either(self, input_ids, attention_mask=None, position_ids=None, memory=None): ...


@pytest.mark.parametrize(("forward", "name"), [(forward_of_5_23, "past_key_values"), (forward_of_5_24, "cache")])
def test_generate_gets_the_cache_by_the_name_that_forward_has_in_this_version(make_model, monkeypatch, forward, name):
    model, without = make_model("llama"), make_model("gpt2")
    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    monkeypatch.setattr(type(without), "forward", forward_without_either)
    caches = [engines._cache(model, columns) for columns in (9, 5)]
    assert [list(cache) for cache in caches] == [[name], [name]]
    assert [cache[name].get_max_length() for cache in caches] == [9, 9], "a width that is compiled already is kept"
    assert engines._cache(without, 9) == {"cache_implementation": "static"}


def test_a_model_with_code_of_its_own_gets_the_cache_by_the_name_of_earlier_versions(make_model, monkeypatch):
    model = make_model("gpt2")
    monkeypatch.setattr(LlamaForCausalLM, "forward", forward_of_5_24)
    monkeypatch.setattr(type(model), "forward", forward_of_5_23)
    assert list(engines._cache(model, 9)) == ["past_key_values"]


def test_an_argument_that_transformers_has_renamed_is_an_error_and_not_a_model_without_it(make_model, monkeypatch):
    model = make_model("gpt2")
    monkeypatch.setattr(LlamaForCausalLM, "forward", forward_without_either)
    monkeypatch.setattr(type(model), "forward", forward_without_either)
    with pytest.raises(ModelError, match=r"cache or past_key_values.*constraints\.txt"):
        generate_responses(model, UNEVEN, noise(6), settings(), engine="hf")


def test_prompts_are_filled_up_to_few_widths_on_a_gpu_which_changes_no_token(make_model, monkeypatch):
    assert [engines._prompt_width(longest, torch.device("cuda")) for longest in (1, 64, 65)] == [64, 64, 128]
    assert engines._prompt_width(5, torch.device("cpu")) == 5
    model = make_model("llama")
    narrow = generate_responses(model, UNEVEN, noise(6), settings(), engine="hf")
    monkeypatch.setattr(engines, "_prompt_width", lambda longest, _: 20)
    wide = generate_responses(model, UNEVEN, noise(6), settings(), engine="hf")
    assert torch.equal(narrow.response_ids, wide.response_ids)
    assert_close(narrow.sampler_logprobs, wide.sampler_logprobs, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_without_a_number_as_many_are_decoded_together_as_fit(make_model, monkeypatch, engine):
    sizes = []
    name = "decode_packed" if engine == "static" else "_decode_with_generate"
    decode = getattr(engines, name)
    monkeypatch.setattr(engines, name, lambda m, ids, *rest: sizes.append(len(ids)) or decode(m, ids, *rest))
    asked = []
    monkeypatch.setattr(
        engines, "sequences_at_a_time", lambda _, count, tokens, **prompt: asked.append((count, tokens, prompt)) or 4
    )
    model = make_model("llama")
    in_parts = generate_responses(model, UNEVEN, noise(6), settings(), engine=engine, batch_size=None)
    assert asked == [(6, 6 + STEPS, {"decoded_from": 6})]
    whole = generate_responses(model, UNEVEN, noise(6), settings(), engine=engine, batch_size=6)
    assert len(asked) == 1  # a number is a limit, and the memory is not asked
    assert sizes == [4, 2, 6]
    assert torch.equal(in_parts.response_ids, whole.response_ids)


def test_no_prompts_give_no_responses(make_model):
    actual = generate_responses(make_model("llama"), [], noise(0), settings())
    assert actual.response_ids.shape == actual.sampler_logprobs.shape == (0, STEPS)
    assert actual.lengths.tolist() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1.7},
        {"top_k": 1},
        {"top_k": 1000},
        {"top_p": 0.5},
        {"top_p": 1e-9},
        {"temperature": 0.7, "top_k": 6, "top_p": 0.8},
        {"min_response_length": 4, "top_k": 2, "temperature": 0.7},
        {"min_response_length": STEPS},
        {"stop_token_ids": ()},
        {"stop_token_ids": tuple(range(23))},
        {"response_length": 1},
        {"unused_ids": (range(15, 23),)},
        {"unused_ids": (range(1), range(6, 12), range(20, 23)), "top_k": 1},
        {"unused_ids": (range(3, 15),), "top_p": 0.5, "min_response_length": 4, "temperature": 0.7},
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ["static", "hf"])
def test_every_sampling_setting_agrees_with_the_oracle(make_model, engine, changes):
    how = settings(**changes)
    actual = check_against_the_oracle(make_model("llama"), UNEVEN, how, engine=engine, batch_size=4)
    assert int(actual.lengths.min()) >= how.min_response_length


class Operations(TorchDispatchMode):
    """Records the operations that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.7}], ids=str)
def test_without_unused_ids_a_step_runs_the_operations_of_sampling_alone(filters):
    logits, uniforms = torch.randn(4, 23, generator=torch.Generator().manual_seed(0)), noise(4, 1)[:, 0]
    with Operations() as expected:
        tokens, logprobs = sample_tokens(logits, uniforms, temperature=0.7, **filters)
    with Operations() as actual:
        drawn = sampling.sample_step(logits, uniforms, settings(temperature=0.7, **filters), may_stop=True)
    assert actual.names == expected.names
    assert torch.equal(drawn[0], tokens)
    assert torch.equal(drawn[1], logprobs)


def test_an_unused_id_that_has_all_probability_is_not_drawn_and_the_others_keep_their_shares():
    """Beside logits of 200 the other weights would vanish in float32."""
    logits, how = torch.zeros(1000, 4), settings(unused_ids=(range(3, 4),), stop_token_ids=())
    logits[:, 0], logits[:, 3] = math.log(2), 200.0
    tokens, logprobs = sampling.sample_step(logits, noise(1000, 1)[:, 0], how, may_stop=True)
    shares = tokens.bincount(minlength=4) / 1000
    assert_close(shares, torch.tensor([0.5, 0.25, 0.25, 0.0]), rtol=0.0, atol=0.05)
    assert_close(logprobs, logits.gather(1, tokens[:, None])[:, 0] - 200.0, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stop_token_on_the_last_step_terminates_and_none_there_cuts_the_response_off(make_model, engine):
    model, uniforms = make_model("llama"), noise(2)
    free = generate_responses(model, EVEN[:2], uniforms, settings(stop_token_ids=()), engine=engine)
    last = int(free.response_ids[0, -1])
    assert last not in free.response_ids[0, :-1].tolist()  # the noise is chosen so
    actual = generate_responses(model, EVEN[:1], uniforms[:1], settings(stop_token_ids=(last,)), engine=engine)
    assert actual.lengths.tolist() == [STEPS]
    assert actual.terminated.tolist() == [True]
    absent = next(i for i in range(23) if i not in free.response_ids[0].tolist())
    actual = generate_responses(model, EVEN[:1], uniforms[:1], settings(stop_token_ids=(absent,)), engine=engine)
    assert actual.lengths.tolist() == [STEPS]
    assert actual.terminated.tolist() == [False]


@pytest.mark.parametrize("engine", ENGINES)
def test_neither_the_pad_tokens_id_nor_its_embedding_matters(make_model, engine):
    """The pad token's embedding is huge, so that attention to padding would change every result."""
    model = make_model("llama")
    expected = generate_responses(model, UNEVEN, noise(6), settings(), engine=engine, batch_size=4)
    for pad_token_id in (STOPS[0], 7):
        how = settings(pad_token_id=pad_token_id)
        actual = generate_responses(model, UNEVEN, noise(6), how, engine=engine, batch_size=4)
        assert actual.token_lists() == expected.token_lists()
        assert torch.equal(actual.terminated, expected.terminated)
        assert_close(actual.sampler_logprobs, expected.sampler_logprobs, rtol=0.0, atol=1e-6)
    how = settings(pad_token_id=1, stop_token_ids=(1, *STOPS))  # a stop token is never fed to the model again
    expected = generate_responses(model, UNEVEN, noise(6), how, engine=engine)
    with torch.no_grad():
        model.model.embed_tokens.weight[1] = 1e6
    actual = generate_responses(model, UNEVEN, noise(6), how, engine=engine)
    assert torch.equal(actual.response_ids, expected.response_ids)
    assert_close(actual.sampler_logprobs, expected.sampler_logprobs, rtol=0.0, atol=1e-10)


LEAKING = {
    "top_p": 0.2,
    "top_k": 2,
    "temperature": 0.1,
    "do_sample": True,
    "repetition_penalty": 5.0,
    "no_repeat_ngram_size": 1,
    "min_new_tokens": 7,
    "bad_words_ids": [[4], [6]],
    "suppress_tokens": [8, 9],
    "max_new_tokens": 2,
    "num_beams": 3,
    "eos_token_id": [3, 4, 5, 6],
    "pad_token_id": 9,
}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_models_own_generation_config_does_not_leak_into_the_samples(make_model, engine):
    model = make_model("llama")
    expected = generate_responses(model, UNEVEN, noise(6), settings(), engine=engine)
    own = GenerationConfig(**LEAKING)
    model.generation_config = own
    actual = generate_responses(model, UNEVEN, noise(6), settings(), engine=engine)
    assert torch.equal(actual.response_ids, expected.response_ids)
    assert torch.equal(actual.sampler_logprobs, expected.sampler_logprobs)
    assert model.generation_config is own
    assert own.to_dict() == GenerationConfig(**LEAKING).to_dict()


@pytest.mark.parametrize("engine", ENGINES)
def test_decoding_ends_with_the_last_response_to_stop(make_model, engine):
    model, passes = make_model("llama"), []
    how = settings(stop_token_ids=tuple(range(0, 23, 3)))
    generate_responses(model, UNEVEN[:1], noise(1), how, engine=engine)  # the model is probed at the first call
    model.base_model.register_forward_hook(lambda *_: passes.append(1))
    actual = generate_responses(model, UNEVEN, noise(6), how, engine=engine)
    assert max(actual.lengths.tolist()) < STEPS
    assert len(set(actual.lengths.tolist())) > 1
    assert len(passes) == max(actual.lengths.tolist())


def test_ended_sequences_leave_at_once(make_model, monkeypatch):
    """An eighth of the vocabulary are stop tokens, so that some of the 11 responses end at almost every step."""
    rows, step = [], Decoder.step

    def counted(self, token_ids):
        rows.append(len(token_ids))
        return step(self, token_ids)

    model = make_model("llama")
    assert decodes(model)  # probed now: that takes steps, too
    monkeypatch.setattr(Decoder, "step", counted)
    actual = generate_responses(model, [*UNEVEN, *EVEN[1:]], noise(11), settings())
    live = [int(((actual.lengths > taken) | ~actual.terminated).sum()) for taken in range(1, STEPS)]
    assert len(set(rows)) > 1
    assert rows == live[: len(rows)]
    assert not any(live[len(rows) :])  # no step once all have ended


def test_looking_for_ended_sequences_less_often_as_on_a_gpu_changes_no_token(make_model, monkeypatch):
    model = make_model("llama")
    expected = generate_responses(model, UNEVEN, noise(6), settings())
    monkeypatch.setattr("ppo_rlhf.passes.sampling._is_check_due", lambda step, device: step % 4 == 3)
    actual = generate_responses(model, UNEVEN, noise(6), settings())
    assert torch.equal(actual.response_ids, expected.response_ids)
    assert_close(actual.sampler_logprobs, expected.sampler_logprobs, rtol=0.0, atol=1e-10)


def test_sampled_frequencies_follow_the_exact_probabilities(make_model):
    """Chi-square of 4,000 first tokens under temperature, top-k and top-p; the critical value is for p = 1e-4."""
    model, how = make_model("llama"), settings(response_length=1, temperature=1.3, top_k=12, top_p=0.9)
    uniforms = torch.from_numpy(np.random.default_rng(3).random((4000, 1)))
    actual = generate_responses(model, [[7, 8]] * 4000, uniforms, how, batch_size=1000)
    logits = model(torch.tensor([[7, 8]])).logits[0, -1].detach().numpy()
    weights = np.exp(logits / 1.3)
    order = np.argsort(-weights)
    weights[order[12:]] = 0.0
    share_before = (np.cumsum(weights[order]) - weights[order]) / weights.sum()
    weights[order[share_before >= 0.9]] = 0.0
    expected = 4000 * weights / weights.sum()
    counts = torch.bincount(actual.response_ids[:, 0], minlength=23).numpy()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert 3 <= possible.sum() <= 11  # the filters cut, and leave something to compare
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 35.6  # at most 10 degrees of freedom
