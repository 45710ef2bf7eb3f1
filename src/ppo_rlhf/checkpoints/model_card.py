"""Model cards of policies, critics and reward models: the README.md that the Hugging Face hub shows for a model."""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.data.files import HUB, is_hub_name
from ppo_rlhf.models.adapters import has_adapter
from ppo_rlhf.models.directories import CARD, is_local
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.older_readers import readers
from ppo_rlhf.models.origins import Origin, in_words, start_on_hub, tables_on_hub
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.models.tokenizers import drops_first_space, templates_of
from ppo_rlhf.ppo.batch_sampling import Sampler
from ppo_rlhf.ppo.learner import Learner
from ppo_rlhf.ppo.progress import Progress
from ppo_rlhf.runtime.paths import place

OWN_FORM = "ppo_rlhf.models.reward_model"
"""Module whose import lets transformers load a reward model of this project's own architecture."""
OF_A_CHAT = """\
# for a chat whose last message is the response:
# inputs = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)
"""
BEGIN, END = "<!-- ppo_rlhf: result -->", "<!-- ppo_rlhf: end of result -->"
"""Markers around a model card's evaluation result, which the next evaluation replaces."""
CRITIC_TITLE = "# A critic that PPO trained"
PEOPLE, END_OF_PEOPLE = "<!-- ppo_rlhf: people -->", "<!-- ppo_rlhf: end of people -->"
"""Markers around a model card's result by people, which the pipeline `human_evaluation` replaces."""
INDEXED = {
    "eval/win_rate": "Win rate over SFT",
    "eval/judge_score": "Judge's mean score",
    "eval/reward": "Mean reward",
    "eval/kl": "KL from SFT, nats per response",
}
"""Evaluation metrics that the hub's metadata lists, with their names in the metadata."""
NOT_EVALUATED = "Not evaluated yet."
LIMITS = (
    "PPO raised the reward named above. Rewards and judges are programs, not people: a higher score may come from text "
    "that exploits the reward or the judge. Read samples before you use the policy.",
    "The policy was trained on prompts of one kind; its behaviour on other prompts is unknown. Its safety was not "
    "examined.",
    "The licences and limitations of the base model and the training data also apply to this model.",
)


def render_card(
    learner: Learner,
    sampler: Sampler,
    progress: Progress,
    rewards: Sequence[str],
    prompts: str | None = None,
    run_id: str | None = None,
    made_from: Sequence[Origin] = (),
) -> str:
    """Return the card of a trained policy as Markdown with the hub's metadata; the model card has no evaluation result
    yet.

    `rewards` has one text for each component of the reward. `prompts` is the source of the training prompts.
    `made_from` are the models and tables that the policy was trained from.
    """
    base = learner.policy.config.name_or_path or ""
    library = "peft" if learner.config.export == "adapter" else "transformers"
    facts = {
        "Started from": _started_from(base),
        "Exported as": _exported_as(learner),
        "Left out": _left_out(learner.policy),
        "Read by": None if library == "peft" else readers(learner.policy.config),
        **_training(progress, rewards, prompts, run_id),
    }
    settings = [f"`{name}`: {place(str(value))}" for name, value in learner.config.not_default().items()]
    sections = {
        **_made_from(made_from),
        "Result": f"{BEGIN}\n\n{NOT_EVALUATED}\n\n{END}",
        "Use": _usage(sampler),
        "Limits": _list(LIMITS),
        "Settings of PPO that are not the defaults": _list(settings) or "None.",
    }
    metadata = _metadata("text-generation", base, prompts, made_from, ["ppo", "rlhf"], library)
    return _render(metadata, "# A language model aligned by PPO", facts, sections)


def render_sft_card(
    base: str | None, facts: Mapping[str, str], model: PreTrainedModel, made_from: Sequence[Origin], *, is_chat: bool
) -> str:
    """Return the card of a policy after supervised fine-tuning, as Markdown with the hub's metadata.

    `base` is the model that was fine-tuned; None: a small model was trained from random weights. `is_chat` is True if
    the tokenizer has a chat template. `made_from` has the same meaning as in `render_card`.
    """
    started = "random weights" if base is None else _started_from(base)
    shown = {"Started from": started, "Read by": readers(model.config), **facts}
    prompt = '[{"role": "user", "content": "Your prompt"}]' if is_chat else '"Your prompt"'
    usage = f"""```python
from transformers import pipeline

generator = pipeline("text-generation", model="path or hub id of this model")
print(generator({prompt}, return_full_text=False)[0]["generated_text"])
```"""
    metadata = _metadata("text-generation", base or "", None, made_from, ["sft"])
    limit = (
        "The model imitates its demonstrations; its behaviour on other prompts is unknown. Its safety was not examined."
    )
    sections = {**_made_from(made_from), "Use": usage, "Limits": _list([limit, LIMITS[-1]])}
    return _render(metadata, "# A language model after supervised fine-tuning", shown, sections)


def render_reward_card(
    base: str,
    facts: Mapping[str, str],
    preferences: str | None,
    own_form: str | None,
    made_from: Sequence[Origin] = (),
    *,
    has_template: bool = False,
) -> str:
    """Return the card of a reward model that this project trained, as Markdown with the hub's metadata.

    `base` is the model whose backbone the reward model started from. `preferences` is the source of the user's
    preferences, or None. `own_form` says why the model is not one of transformers' sequence classifiers, or is None if
    the model is such a classifier. `has_template` is True if the tokenizer has a chat template. `made_from` has the
    same meaning as in `render_card`.
    """
    needed = "" if own_form is None else f"import {OWN_FORM}  # {own_form}\n"
    of_a_chat = OF_A_CHAT if has_template else ""
    usage = f"""\
Only differences between scores of responses have a meaning.

```python
{needed}from transformers import AutoModelForSequenceClassification, AutoTokenizer

name = "path or hub id of this model"
tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForSequenceClassification.from_pretrained(name)
inputs = tokenizer("A prompt and its response" + tokenizer.eos_token, return_tensors="pt", add_special_tokens=False)
{of_a_chat}print(model(inputs["input_ids"]).logits.item(){"" if needed else " - model.config.score_mean"})
```"""
    limit = (
        "The model was trained on responses of one kind. Its scores may be wrong for other responses, and for text that"
        " was\n  optimised for a high score."
    )
    metadata = _metadata("text-classification", base, preferences, made_from, ["reward-model", "rlhf"])
    facts = {"Started from": _started_from(base), **facts}
    sections = {**_made_from(made_from), "Use": usage, "Limits": _list([limit, LIMITS[-1]])}
    return _render(metadata, "# A reward model", facts, sections)


def render_critic_card(
    learner: Learner,
    progress: Progress,
    rewards: Sequence[str],
    critic: PreTrainedModel,
    made_from: Sequence[Origin] = (),
    *,
    prompts: str | None,
    run_id: str | None,
) -> str:
    """Return the card of a trained critic as it is stored, in Markdown with the hub's metadata in front.

    The arguments `rewards`, `prompts` and `made_from` have the same meaning as in `render_card`.
    """
    base = learner.policy.config.name_or_path or ""
    facts = {
        "Of a policy that started from": _started_from(base),
        "Kind (`ppo.value_model`)": learner.config.value_model,
        **_training(progress, rewards, prompts, run_id),
    }
    is_ours = isinstance(critic, CausalLMRewardModel)
    auto = "AutoModelForSequenceClassification" if is_ours else "AutoModelForTokenClassification"
    needed = f"import {OWN_FORM}  # transformers has no token classifier of this architecture\n" if is_ours else ""
    values = "model.score(model.backbone(ids).last_hidden_state)" if is_ours else "model(ids).logits"
    by_trl = "" if is_ours else " For TRL's\n`AutoModelForCausalLMWithValueHead` the head is there as `v_head.summary`."
    usage = f"""\
The value at a token is the return that PPO expected of the policy from there on, in units of the rewards as PPO
shaped them: scale, clip and a KL penalty in the reward included.

```python
{needed}from transformers import {auto}, AutoTokenizer

name = "path or hub id of this model"
tokenizer = AutoTokenizer.from_pretrained(name)
model = {auto}.from_pretrained(name, dtype="auto")
text = "A prompt and the beginning of its response"
ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
print({values}[0, :, 0])
```

PPO starts from it with `ppo.value_model=pretrained` and `critic_path`, as PPOTrainer does with `value_model`.{by_trl}\
"""
    limit = "The critic knows the returns of one policy under one reward, and may be wrong for others."
    metadata = _metadata("token-classification", base, prompts, made_from, ["ppo", "rlhf", "critic", "value-model"])
    sections = {**_made_from(made_from), "Use": usage, "Limits": _list([limit, LIMITS[-1]])}
    return _render(metadata, CRITIC_TITLE, facts, sections)


def with_result(card: str, result: str) -> str | None:
    """Return the model card with a new evaluation result, or None if this project did not write the card."""
    before, begin, rest = card.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n\n{result}\n\n{end}{after}" if end else None


def with_people(card: str, result: str) -> str | None:
    """Return the model card with people's result after the evaluation's, in place of an earlier result by people.

    The function returns None if this project did not write the model card.
    """
    before, end, after = card.partition(END)
    if not end:
        return None
    if PEOPLE in after and END_OF_PEOPLE in after:
        after = after.partition(PEOPLE)[0].rstrip() + after.partition(END_OF_PEOPLE)[2]
    return f"{before}{end}\n\n{PEOPLE}\n\nBy people: {result}\n\n{END_OF_PEOPLE}{after}"


def with_index(card: str, summary: Mapping[str, Any]) -> str:
    """Return a model card whose hub metadata (`model-index`) has `summary` in place of an earlier evaluation."""
    parsed = ModelCard(card)
    data: Any = parsed.data
    data.model_name = data.model_name or "policy"
    data.eval_results = []
    for key, name in INDEXED.items():
        value = summary.get(key)
        if isinstance(value, float) and math.isfinite(value):
            result = EvalResult(
                task_type="text-generation",
                dataset_type="prompts",
                dataset_name=f"{summary['prompts']} held-out prompts",
                metric_type=key.removeprefix("eval/"),
                metric_value=value,
                metric_name=name,
            )
            data.eval_results.append(result)
    return str(parsed)


def may_write_card(folder: Path) -> bool:
    """Return whether the folder has no README.md, or a model card that this project wrote."""
    card = folder / CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.exists() else BEGIN
    return BEGIN in text or CRITIC_TITLE in text


def _started_from(base: str) -> str:
    """Return the model that training started from, as a path or hub id; of a GGUF file also its weights and license."""
    gguf = PretrainedHandle(base).gguf if base else None
    name = f"`{place(base) or 'a model without a name'}`"
    if gguf is None or not gguf.path.is_file():
        return name
    under = f"; its license, as the file names it: {gguf.license!r:.60}" if gguf.license else ""
    return f"{name}, a GGUF file, whose weights of the types {gguf.types} were dequantised{under}"


def _exported_as(learner: Learner) -> str:
    """Return the type of the exported weights, and how they differ from the start model's, if that was quantised."""
    config = learner.config
    if config.export == "adapter":
        return "a LoRA adapter, without the weights of the start model"
    dtype = str(next(learner.policy.parameters()).dtype).removeprefix("torch.")
    if has_adapter(learner.policy):
        dtype = "float32"  # `merged` merges an adapter in float32
    if config.load_in_4bit:
        return f"{dtype} weights: the start model's, rounded to 4 bits (NF4) and dequantised, and the merged adapter"
    if quantised := _quantisation(learner.policy.config.name_or_path or ""):
        return f"{dtype} weights, not in the {quantised} of the start model"
    return f"{dtype} weights"


def _quantisation(base: str) -> str | None:
    """Return the kind of quantisation of a start model, such as GGUF, fp8 or mxfp4; None if it is not quantised."""
    if not base:
        return None
    handle = PretrainedHandle(base)
    try:
        if handle.gguf:
            return "GGUF types"
        return (getattr(handle.config(), "quantization_config", None) or {}).get("quant_method")
    # A policy that the user passed as a model object may have a name that is neither a folder nor on the hub
    except ModelError:
        return None


def _left_out(policy: PreTrainedModel) -> str | None:
    """Return which parts of its source model a policy lacks (such as a vision tower), or None if it has all parts."""
    try:
        parts = PretrainedHandle(policy.config.name_or_path or "").left_out(policy)
    # A policy that the user passed as a model object may have a name that is neither a folder nor on the hub
    except ModelError:
        return None
    return f"{parts} of the source model: only the text part was trained and exported" if parts else None


def _render(metadata: ModelCardData, title: str, facts: Mapping[str, str | None], sections: Mapping[str, str]) -> str:
    """Return a model card: the hub's metadata, a title, the facts that are not empty, and the sections by heading."""
    known = [f"{name}: {text}" for name, text in {**facts, "Versions": _versions()}.items() if text]
    texts = [title, _list(known), *(f"## {heading}\n\n{text}" for heading, text in sections.items())]
    return "\n\n".join([f"---\n{metadata.to_yaml()}\n---", *texts]) + "\n"


def _made_from(made_from: Sequence[Origin]) -> dict[str, str]:
    """Return the section that lists the models and tables of a model's origins, or no section if none are known."""
    return {"Made from": in_words(made_from)} if made_from else {}


def _metadata(
    task: str, base: str, data: str | None, made_from: Sequence[Origin], tags: list[str], library: str = "transformers"
) -> ModelCardData:
    metadata = ModelCardData(library_name=library, pipeline_tag=task, tags=tags)
    if (on_hub := base if base and not is_local(base) else start_on_hub(made_from)) is not None:
        metadata.base_model = on_hub.partition("@")[0]
    is_on_hub = data is not None and (data.startswith(HUB) or (is_hub_name(data) and not Path(data).exists()))
    tables = [*([data] if data is not None and is_on_hub else []), *tables_on_hub(made_from)]
    parts = (table.removeprefix(HUB).split("/")[:2] for table in tables)
    names = dict.fromkeys(f"{owner}/{re.split('[@#:]', name)[0]}" for owner, name in parts)
    metadata.datasets = list(names) or None
    return metadata


def _training(
    progress: Progress, rewards: Sequence[str], prompts: str | None, run_id: str | None
) -> dict[str, str | None]:
    iterations, episodes, stopped = progress.policy_iteration, progress.episode, None
    if progress.loaded_iteration is not None:
        episodes = iterations * progress.config.batch_size
        stopped = f"after iteration {progress.iteration:,}, because the policy exploited its reward"
    return {
        "Reward": "; ".join(rewards),
        "Prompts": f"`{place(prompts)}`" if prompts else None,
        "Training": f"{episodes:,} responses in {iterations:,} iterations of PPO",
        "Stopped": f"{stopped}: these are the weights of the best evaluation" if stopped else None,
        "MLflow run": f"`{run_id}`" if run_id else None,
    }


def _list(texts: Iterable[str]) -> str:
    return "\n".join(f"- {text}" for text in texts)


def _versions() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("ppo_rlhf", "torch", "transformers"))


def _usage(sampler: Sampler) -> str:
    sampling = sampler.settings
    is_chat = bool(templates_of(sampler.tokenizer))
    prompt = '[{"role": "user", "content": "Your prompt"}]' if is_chat else '"Your prompt"'
    text = '["generated_text"][-1]["content"]' if is_chat else '["generated_text"]'
    shown = f"print(generator({prompt}, do_sample=True, **sampling)[0]{text})"
    if not is_chat and drops_first_space(sampler.tokenizer):
        shown = f"""# decode the ids: the text of the pipeline lacks the space after the prompt
ids = generator({prompt}, do_sample=True, return_tensors=True, **sampling)[0]["generated_token_ids"]
print(generator.tokenizer.decode(ids, skip_special_tokens=True))"""
    options = {
        "max_new_tokens": sampling.turn_length or sampling.response_length,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "eos_token_id": list(sampling.stop_token_ids) or None,
    }
    arguments = ", ".join(f"{name}={value}" for name, value in options.items())
    # An adapter is loaded by peft, because transformers ignores which revision of the base model an adapter names
    by_peft = sampler.config.export == "adapter"
    needed = "from peft import AutoPeftModelForCausalLM\n" if by_peft else ""
    model = "AutoPeftModelForCausalLM.from_pretrained(name)" if by_peft else "name"
    return f"""```python
{needed}from transformers import pipeline

name = "path or hub id of this model"
generator = pipeline("text-generation", model={model}, tokenizer=name)
sampling = dict({arguments})  # as in training
{shown}
```"""
