"""Runs with `ppo.critic_column`: what the critic reads, that the policy does not, and what is refused."""

from dataclasses import replace

import pytest
import torch

from ppo_rlhf.checkpoints.restore import restore
from ppo_rlhf.checkpoints.store import write_checkpoint
from ppo_rlhf.core.errors import ConfigError, DataError
from ppo_rlhf.ppo import rollouts as rollouts_module
from ppo_rlhf.ppo.critic_column import check_critic_column, critic_prompt_ids, longest_critic_prompt
from ppo_rlhf.ppo.micro_batches import own_micro_batches
from ppo_rlhf.ppo.update import _micro_batches, compute_gradients
from ppo_rlhf.rewards.scoring import RewardScorer
from tests.ppo_runs import END, MEASURED, build_prompts, build_tokenizer, tensors_equal, weight_sums

WITH = {"critic_column": "answer"}
ANSWERS = ["a b c", "d", 3, ["e"], "f g", ""]
"""The column of the six prompts. A number and a list become words of their JSON, which the tokenizer does not know."""
ANSWER_IDS = [[3, 4, 5], [6], [1], [1], [8, 9], []]


def with_answers(answers=ANSWERS):
    prompts = build_prompts()
    return replace(prompts, columns={**prompts.columns, "answer": list(answers)})


@pytest.fixture
def build(make_run):
    return lambda kind="llama", **settings: make_run(kind, prompts=with_answers(), **{**WITH, **settings})


def numbers(metrics):
    return {key: value for key, value in metrics.items() if not key.startswith(MEASURED)}


def critic_rows(rollouts):
    """Return what the critic reads, row by row: the answer's tokens, the end of text, the prompt and the response."""
    answer_of = {tuple(prompt): ids for prompt, ids in zip(build_prompts().prompt_ids, ANSWER_IDS, strict=True)}
    tokens = zip(rollouts.prompts.prompt_ids, rollouts.responses.token_lists(), strict=True)
    return [([*answer_of[tuple(prompt)], END, *prompt], response) for prompt, response in tokens]


def plain_values(run, prefix, response):
    """Return V(s_0) … V(s_T) of one row, by a forward pass of the critic over that row alone."""
    critic, ids = run.state.critic, torch.tensor([[*prefix, *response]])
    states = critic.backbone(input_ids=ids, use_cache=False).last_hidden_state[0, len(prefix) - 1 :]
    return critic.values(states)


def test_the_column_comes_before_the_prompt_with_an_end_of_text_between_them(make_run):
    run, prompts = make_run(**WITH), with_answers()
    ids = critic_prompt_ids(prompts, run.config, run.state.tokenizer)
    assert ids == [[*answer, END, *prompt] for answer, prompt in zip(ANSWER_IDS, prompts.prompt_ids, strict=True)]
    assert critic_prompt_ids(prompts, replace(run.config, critic_column=None), run.state.tokenizer) is None
    assert longest_critic_prompt(prompts, run.config, run.state.tokenizer) == max(map(len, ids))
    without_end = build_tokenizer(eos_token=None)
    assert critic_prompt_ids(prompts, run.config, without_end)[1] == [6, *prompts.prompt_ids[1]]


@pytest.mark.parametrize(("kind", "fill"), [("llama", False), ("llama", True), ("gpt2", False)])
def test_values_are_those_of_the_whole_sequence_and_zero_in_padding(build, monkeypatch, kind, fill):
    """With `fill`, as on a GPU, token rows are padded to common sizes."""
    monkeypatch.setattr(rollouts_module, "fills_rows", lambda *_: fill)
    run = build(kind)
    rollouts = run.rollouts()
    with torch.no_grad():
        for row, (prefix, response) in enumerate(critic_rows(rollouts)):
            actual, expected = rollouts.values[row], plain_values(run, prefix, response)
            assert torch.allclose(actual[: len(expected)], expected, atol=1e-10)
            assert not actual[len(expected) :].any()


@pytest.mark.parametrize("settings", [{}, {"use_peft": True, "lora_r": 2}, {"kl_in": "loss", "kl_estimator": "full"}])
def test_the_policy_samples_and_learns_as_without_the_column(build, settings):
    run, plain = build(**settings), build(critic_column=None, **settings)
    first, other = run.rollouts(), plain.rollouts()
    for name in ("old_logprobs", "reference_logprobs", "entropy"):
        assert torch.equal(getattr(first, name), getattr(other, name))
    assert torch.equal(first.responses.response_ids, other.responses.response_ids)
    assert not torch.allclose(first.values, other.values)
    # With equal advantages the policy's gradients are equal
    gradients = []
    for each in (run, plain):
        experience = each.before_update()[-1]
        experience = replace(experience, advantages=torch.where(experience.mask, 0.5, 0.0).double())
        (minibatch, *_) = each.state.plan.epochs[0]
        inputs = _micro_batches(experience, each.state.plan, minibatch.micro_batches)
        reference = each.reference if settings.get("kl_estimator") == "full" else None
        compute_gradients(each.state, experience, minibatch, inputs, reference)
        gradients.append({n: p.grad for n, p in each.state.policy.named_parameters() if p.grad is not None})
    assert gradients[0]
    assert tensors_equal(*gradients)


def test_the_gradient_of_the_critic_is_that_of_the_value_loss_on_plain_sequences(build):
    run = build(cliprange_value=None, max_tokens_per_micro_batch=40)
    rollouts, _, _, experience = run.before_update()
    (minibatch, *_) = run.state.plan.epochs[0]
    inputs = _micro_batches(experience, run.state.plan, minibatch.micro_batches)
    assert len(inputs) > 1
    compute_gradients(run.state, experience, minibatch, inputs, None)
    actual = {name: p.grad.clone() for name, p in run.state.critic.named_parameters()}
    run.state.critic.zero_grad()
    rows, total = critic_rows(rollouts), 0.0
    for row in minibatch.rows:
        prefix, response = rows[row]
        values = plain_values(run, prefix, response)[:-1]
        total = total + 0.5 * (values - experience.returns[row, : len(response)]).square().sum()
    (run.config.vf_coef * total / experience.mask[minibatch.rows].sum()).backward()
    for name, parameter in run.state.critic.named_parameters():
        assert torch.allclose(actual[name], parameter.grad, atol=1e-12), name


def test_a_micro_batch_counts_the_column_s_tokens(build):
    run = build(max_tokens_per_micro_batch=40)
    rollouts = run.rollouts()
    lengths = [len(prefix) + len(response) for prefix, response in critic_rows(rollouts)]
    cut = own_micro_batches(run.state.plan.epochs[0])
    sizes = [sum(lengths[row] for row in rows) for rows in cut]
    assert max(sizes) <= 40
    assert sorted(row for rows in cut for row in rows) == list(range(12))


def test_an_update_runs_without_cuda_graphs_and_says_why(build, monkeypatch, caplog):
    run = build()
    monkeypatch.setattr(run.state.captures, "serves", lambda use: True)
    with caplog.at_level("INFO"):
        assert not rollouts_module.captures_update(run.state, None)
    assert "without CUDA graphs: the critic's sequences are longer than the policy's (ppo.critic_column)" in caplog.text


def test_a_resumed_run_has_the_numbers_of_one_that_was_not_interrupted(build, tmp_path):
    run = build()
    run.iteration()
    saved = write_checkpoint(tmp_path / "run", run.state)
    resumed = build(model={"seed": 9})
    restore(resumed.state, saved)
    resumed.reference = run.reference  # no checkpoint holds it
    for _ in range(2):
        assert numbers(resumed.iteration()) == numbers(run.iteration())
    assert weight_sums(resumed) == weight_sums(run)


@pytest.mark.parametrize("now", [None, "wanted"])
def test_a_run_is_resumed_only_with_the_column_that_it_had(build, tmp_path, now):
    run = build()
    run.iteration()
    saved = write_checkpoint(tmp_path / "run", run.state)
    with pytest.raises(ConfigError, match=rf"^ppo\.critic_column: answer in .*, {now} now"):
        restore(build(critic_column=now).state, saved)


def test_only_a_critic_that_reads_the_column_explains_rewards_that_depend_on_it(make_run):
    """All prompts are equal, and the score is 1 or 0 by the answer alone."""
    prompts = build_prompts((3,))
    prompts = replace(prompts.select([0] * 16), columns={"answer": ["a", "b"] * 8})

    def by_answer(batch):
        return torch.tensor([float(answer == "a") for answer in batch.columns["answer"]], dtype=torch.float64)

    explained = {}
    for column in ("answer", None):
        run = make_run(
            prompts=prompts,
            scorer=RewardScorer([("by_answer", 1.0, by_answer)]),
            critic_column=column,
            total_episodes=20 * 16,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=1,
            learning_rate=1e-6,
            value_learning_rate=1e-2,
            lam=1.0,
            missing_eos_penalty=None,
        )
        explained[column] = [run.iteration()["val/explained_variance"] for _ in range(20)][-1]
    assert explained["answer"] > 0.9
    assert explained[None] < 0.1


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (["a", None, "b", "c", "d", "e"], r"row 1 has None, which is neither text nor a number nor a list"),
        (["a", "b", float("nan"), "c", "d", "e"], r"row 2 has nan"),
        ([{"text": "a"}, "b", "c", "d", "e", "f"], r"row 0 has \{'text': 'a'\}"),
        ([1, 2, 3, "z", "", "zz"], r"the tokenizer knows no word of this column"),
        (["a", "b c d", "e", "f", "g", "h"], r"would read up to 9 tokens and a response of 8, but its context has 16"),
    ],
)
def test_a_column_that_the_critic_cannot_read_is_refused_in_one_line(make_run, answers, message):
    config, prompts = make_run(**WITH).config, with_answers(answers)
    with pytest.raises(DataError, match=rf"^ppo\.critic_column=answer: .*{message}") as error:
        check_critic_column(prompts, config, build_tokenizer(), 16)
    assert "\n" not in str(error.value)
    if "would read" in message:
        check_critic_column(prompts, config, build_tokenizer(), 17)
        check_critic_column(prompts, config, build_tokenizer(), None)


def test_a_column_that_the_prompts_lack_is_refused_with_those_that_they_have(make_run):
    config = make_run(critic_column="reference").config
    with pytest.raises(DataError, match=r"^ppo\.critic_column=reference: .* no such column; .*: wanted$"):
        check_critic_column(build_prompts(), config, build_tokenizer(), 64)
