"""Critics: their first values, whose weights they copy, what a shared trunk shares, and value heads on disk."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    Gemma3ForConditionalGeneration,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.critic import Critic, SharedCritic, read_value_head
from ppo_rlhf.models.directories import weight_files
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.models.trained_model import TrainedModel
from tests.tiny_models import KINDS, PAD, adapter_of, composite_config, draw_weights, save, tiny_model, word_tokenizer

ROWS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13]]
# the rows as in a rollout: padded before the prompt and after the response
IDS = torch.tensor([[0, 3, 4, 5, 6, 7], [0, 0, 8, 9, 22, 22], [10, 11, 12, 13, 22, 22]])
MASK = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0]])
POSITIONS = torch.tensor([[0, 0, 1, 2, 3, 4], [0, 0, 0, 1, 1, 1], [0, 1, 2, 3, 3, 3]])
BERT = {"vocab_size": 25, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 1}
LLAMA = tiny_model("llama").config
MAKE = {"separate": Critic.from_policy, "shared": SharedCritic}
WEIGHT, BIAS = "v_head.summary.weight", "v_head.summary.bias"
HEAD = {WEIGHT: torch.linspace(-1.0, 1.0, 16)[None], BIAS: torch.tensor([0.5])}
PROMPT = torch.tensor([[4, 7, 9]])


def policy_of(kind: str):
    if kind != "gemma3":  # which reads images too, and has sliding windows
        return tiny_model(kind).double()
    shape = {name: value for name, value in LLAMA.to_dict().items() if name != "rope_parameters"}  # Gemma 3 has its own
    text = {**shape, "head_dim": 8, "sliding_window": 4}
    config = composite_config(**{**text, "layer_types": ["sliding_attention", "full_attention"]})
    return draw_weights(Gemma3ForConditionalGeneration(config), 0.3).double().eval()


def drawn_head(width: int = 16) -> nn.Linear:
    head = nn.Linear(width, 1, dtype=torch.float64)
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(3))
        head.bias.fill_(0.25)
    return head


def one_row(critic, tokens: list[int]) -> torch.Tensor:
    length = len(tokens)
    return critic(torch.tensor([tokens]), torch.ones(1, length).long(), torch.arange(length)[None])[0]


@pytest.mark.parametrize("kind", [*KINDS, "gemma3"])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_fresh_critic_values_every_state_at_exactly_zero_and_can_learn(kind, make):
    critic = make(policy_of(kind))
    values = critic(IDS, MASK, POSITIONS)
    assert torch.equal(values, torch.zeros(3, 6, dtype=torch.float64))
    values.sum().backward()
    assert float(critic.value_head.weight.grad.abs().max()) > 0.0
    assert all(parameter.requires_grad for parameter in critic.parameters())


@pytest.mark.parametrize("kind", [*KINDS, "gemma3"])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_values_do_not_depend_on_padding_on_either_side(kind, make):
    critic = make(policy_of(kind), value_head=drawn_head())
    values = critic(IDS, MASK, POSITIONS)
    for row, tokens, start in zip(values, ROWS, (1, 2, 0), strict=True):
        assert_close(row[start : start + len(tokens)], one_row(critic, tokens), rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_critic_reads_the_hidden_states_of_the_language_model_head(kind):
    policy, head = policy_of(kind), drawn_head()
    read: list[torch.Tensor] = []
    policy.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].detach()))
    critic = SharedCritic(policy, head)
    policy(input_ids=IDS, attention_mask=MASK, position_ids=POSITIONS)
    assert_close(critic.values(read[0]), read[0] @ head.weight[0] + 0.25, rtol=0.0, atol=1e-10)
    critic(IDS, MASK, POSITIONS).sum().backward()
    assert bool(policy.get_input_embeddings().weight.grad.any())  # the value loss trains the trunk


def test_the_names_of_saved_weights():
    backbone = [f"backbone.{name}" for name in tiny_model().base_model.state_dict()]
    head = ["value_head.weight", "value_head.bias"]
    assert list(Critic.from_policy(tiny_model()).state_dict()) == backbone + head
    assert list(SharedCritic(tiny_model()).state_dict()) == head


def test_a_given_head_is_copied_and_must_fit():
    for make in MAKE.values():
        head = drawn_head()
        critic = make(tiny_model().double(), value_head=head)
        assert torch.equal(critic.value_head.weight, head.weight)
        assert critic.value_head.weight.data_ptr() != head.weight.data_ptr()
        with pytest.raises(ModelError, match=r"v_head.*\b8\b.*\b16\b"):
            make(tiny_model(), value_head=nn.Linear(8, 1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: CausalLMRewardModel.from_causal_lm(tiny_model("llama", seed=5)),
        lambda: CausalLMRewardModel.from_causal_lm(policy_of("gemma3")),
        lambda: GPT2ForSequenceClassification(tiny_model("gpt2", num_labels=1).config),
        lambda: LlamaForSequenceClassification(tiny_model("llama", num_labels=1).config),
    ],
    ids=["ours", "ours on gemma3", "gpt2", "llama"],
)
def test_a_critic_from_a_reward_model_gives_its_score_at_the_last_token(make):
    torch.manual_seed(0)
    reward_model = make().double().eval()
    if reward_model.score.bias is not None:
        nn.init.constant_(reward_model.score.bias, 0.7)
    critic = Critic.from_reward_model(reward_model, tiny_model().double())
    for row in ROWS:
        score = reward_model(input_ids=torch.tensor([row])).logits[0, 0]
        assert_close(one_row(critic, row)[-1], score, rtol=0.0, atol=1e-12)


def test_a_critic_copies_what_it_starts_from_even_if_that_is_frozen():
    policy = tiny_model().requires_grad_(False)
    reward_model = CausalLMRewardModel.from_causal_lm(policy).requires_grad_(False)
    originals = {**policy.state_dict(), **{f"r.{n}": t for n, t in reward_model.state_dict().items()}}
    before = {name: tensor.clone() for name, tensor in originals.items()}
    for critic in (Critic.from_policy(policy), Critic.from_reward_model(reward_model, policy)):
        assert all(parameter.requires_grad for parameter in critic.parameters())
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.add_(1.0)
    assert all(torch.equal(originals[name], before[name]) for name in before)
    assert not any(parameter.requires_grad for parameter in [*policy.parameters(), *reward_model.parameters()])


def test_critics_train_and_value_in_float32_at_least():
    policy = tiny_model().bfloat16()
    reward_model = CausalLMRewardModel.from_causal_lm(policy)
    for critic in (Critic.from_policy(policy), Critic.from_reward_model(reward_model, policy)):
        assert {parameter.dtype for parameter in critic.parameters()} == {torch.float32}
        assert one_row(critic, ROWS[0]).dtype == torch.float32
    assert one_row(SharedCritic(policy), ROWS[0]).dtype == torch.float32


@pytest.mark.parametrize(
    ("reward_model", "message"),
    [
        (CausalLMRewardModel.from_causal_lm(tiny_model(vocab_size=31)), r"vocabulary.*\b31\b.*\b25\b"),
        (BertForSequenceClassification(BertConfig(**BERT)), "`score`"),
        (LlamaForSequenceClassification(LlamaConfig(**{**LLAMA.to_dict(), "num_labels": 2})), "`score`"),
    ],
    ids=["vocabulary", "head", "labels"],
)
def test_a_reward_model_that_gives_no_critic_is_refused(reward_model, message):
    with pytest.raises(ModelError, match=r"ppo\.value_model=reward_init: .*" + message):
        Critic.from_reward_model(reward_model, tiny_model())


def add_weights(folder: str, more: dict[str, torch.Tensor]) -> None:
    """The head is saved as by TRL's `AutoModelForCausalLMWithValueHead.save_pretrained`: among the model's weights."""
    file = f"{folder}/model.safetensors"
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_that_trl_wrote_gives_its_model_and_its_value_head(tmp_path, kind, caplog, capfd):
    model = tiny_model(kind)
    folder = save(tmp_path / "policy", model)
    assert PretrainedHandle(folder).value_head() is None
    add_weights(folder, HEAD)
    capfd.readouterr()
    loaded, head = PretrainedHandle(folder).causal_lm(), PretrainedHandle(folder).value_head()
    assert (caplog.messages, *capfd.readouterr()) == ([], "", "")
    assert_close(loaded(PROMPT).logits, model(PROMPT).logits, rtol=0.0, atol=1e-5)
    assert torch.equal(head.weight, HEAD[WEIGHT])
    assert torch.equal(head.bias, HEAD[BIAS])


def test_other_weights_that_the_model_does_not_have_are_named_in_one_line(tmp_path, capfd, caplog):
    folder = save(tmp_path / "policy", tiny_model())
    add_weights(folder, {"aux.weight": torch.zeros(1)})
    PretrainedHandle(folder).causal_lm()
    assert len(caplog.messages) == 1
    assert "aux.weight" in caplog.messages[0]
    assert "aux" not in capfd.readouterr().err  # transformers prints no table of ignored weights


def test_a_sharded_value_head_of_sixteen_bits_is_read_in_float32(tmp_path):
    save_file({WEIGHT: HEAD[WEIGHT].bfloat16()}, tmp_path / "one.safetensors")
    save_file({BIAS: HEAD[BIAS].bfloat16()}, tmp_path / "two.safetensors")
    shards = {WEIGHT: "one.safetensors", BIAS: "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    head = read_value_head(weight_files(tmp_path))
    assert head.weight.dtype == torch.float32
    assert torch.equal(head.weight, HEAD[WEIGHT].bfloat16().float())


@pytest.mark.parametrize("head", [{WEIGHT: torch.zeros(1, 16)}, {WEIGHT: torch.zeros(2, 16), BIAS: torch.zeros(2)}])
def test_a_value_head_of_another_shape_is_refused(tmp_path, head):
    save_file(head, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"v_head\.summary\.weight"):
        read_value_head(weight_files(tmp_path))


@pytest.mark.parametrize("form", ["whole", "adapter"])
def test_a_language_model_with_llama_factorys_value_head_scores_the_last_token(tmp_path, form):
    """LLaMA-Factory: the head on the last layer's normed states, at the last token that is not padding."""
    model = tiny_model()
    folder = Path(save(tmp_path / "whole", model))
    if form == "adapter":
        model, folder = (
            adapter_of(model, tmp_path / "adapter", str(folder), task_type="CAUSAL_LM"),
            tmp_path / "adapter",
        )
    with pytest.raises(ModelError, match="num_labels=1"):
        PretrainedHandle(str(folder)).reward_model()
    before = PretrainedHandle(str(folder)).fingerprint()
    save_file(HEAD, folder / "value_head.safetensors")
    handle = PretrainedHandle(str(folder))
    ids, mask = torch.tensor([[4, 7, 9, 5], [6, 8, PAD, PAD]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    states = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states[-1]
    expected = torch.stack([states[0, 3] @ HEAD[WEIGHT][0] + 0.5, states[1, 1] @ HEAD[WEIGHT][0] + 0.5])
    assert_close(handle.reward_model()(ids, attention_mask=mask).logits[:, 0], expected, rtol=0.0, atol=1e-5)
    assert handle.reward_model(torch.bfloat16).dtype == handle.reward_model(torch.bfloat16).score.weight.dtype
    assert handle.fingerprint() != before
    assert torch.equal(handle.value_head().weight, HEAD[WEIGHT])  # the critic of such a policy starts from this head


def test_a_value_head_of_another_models_width_is_refused(tmp_path):
    save(tmp_path, tiny_model())
    save_file({WEIGHT: torch.zeros(1, 8), BIAS: torch.zeros(1)}, tmp_path / "value_head.safetensors")
    with pytest.raises(ModelError, match=r"value_head\.safetensors: .*\b8\b.*\b16\b"):
        PretrainedHandle(str(tmp_path)).reward_model()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_saved_plain_unless_it_is_given_a_value_head(tmp_path, kind):
    model, head = tiny_model(kind), nn.Linear(16, 1)
    TrainedModel(model, word_tokenizer()).save(tmp_path / "plain")
    TrainedModel(model, word_tokenizer(), value_head=head).save(tmp_path / "with_head")
    plain, with_head = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "with_head"))
    assert with_head.keys() - plain.keys() == {WEIGHT, BIAS}
    assert all(torch.equal(with_head[name], plain[name]) for name in plain)
    assert torch.equal(with_head[WEIGHT], head.weight)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "with_head")
    assert_close(loaded(PROMPT).logits, model(PROMPT).logits, rtol=0.0, atol=1e-5)


def test_an_average_is_saved_as_a_model_directory_below_the_model(tmp_path):
    model, average = tiny_model(seed=0), tiny_model(seed=1)
    TrainedModel(model, word_tokenizer(), average=average).save(tmp_path / "policy")
    for folder, expected in (("policy", model), ("policy/ema", average)):
        handle = PretrainedHandle(str(tmp_path / folder))
        assert_close(handle.causal_lm()(PROMPT).logits, expected(PROMPT).logits, rtol=0.0, atol=1e-5)
        assert handle.tokenizer().get_vocab() == word_tokenizer().get_vocab()
