"""Nodes of the pipeline `evaluation`, which compares both policies' responses to the held-out prompts."""

import hashlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from datasets import Dataset
from transformers import PreTrainedModel

from ppo_rlhf.checkpoints.model_card import with_index, with_result
from ppo_rlhf.checkpoints.training_record import DRAWN_BY
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import DataError
from ppo_rlhf.data.chats import TOOLS, read_tools
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.data.prompts import PromptReader, PromptsConfig, name_unevaluated, prompt_key
from ppo_rlhf.data.readable_prompts import readable_prompts
from ppo_rlhf.evaluation.comparison import before_after, compare_evaluations, conclude, sample_pairs
from ppo_rlhf.evaluation.exploitation import exploits_at_end, stopped_at, untested_p
from ppo_rlhf.evaluation.perplexity import PPO, SFT, TOKENS, compare_perplexity, perplexity_row, text_losses
from ppo_rlhf.evaluation.policy import EvaluationConfig, Evaluator, PolicyEvaluation, check_vocabularies, resolve_judge
from ppo_rlhf.evaluation.verdict import LEVELS, MIN_PROMPTS, Verdict
from ppo_rlhf.judge.settings import LLMJudgeConfig
from ppo_rlhf.models.context_length import usable_context
from ppo_rlhf.models.loading import PretrainedHandle
from ppo_rlhf.models.stored_weights import store_linear_weights
from ppo_rlhf.models.tokenizers import encode_texts, printed_dates
from ppo_rlhf.passes.halvings import KEYS
from ppo_rlhf.passes.transfers import to_host
from ppo_rlhf.ppo.precision import device_of, frozen_dtype, trained_dtype
from ppo_rlhf.ppo.run_setup import sampling_settings
from ppo_rlhf.reporting.wording import headline, measure, remarks, result_section, say_verdict
from ppo_rlhf.rewards.config import RewardConfig
from ppo_rlhf.rewards.scorers import build_reward_scorer, reward_model_accuracy
from ppo_rlhf.runtime.names import HELD_OUT_DEMONSTRATIONS
from ppo_rlhf.runtime.paths import place
from ppo_rlhf.supervised.demonstrations import IGNORED, DataPreparationConfig
from ppo_rlhf.supervised.reference_texts import choose_reference_texts, tokenise_reference_texts

logger = logging.getLogger(__name__)


def choose_prompts(
    evaluation_prompts: pd.DataFrame | None,
    raw_evaluation_prompts: Dataset | None,
    training_prompts: pd.DataFrame | None,
    sft_policy: PretrainedHandle,
    ppo: PPOConfig,
    prompts: PromptsConfig,
) -> tuple[pd.DataFrame | None, int]:
    """Return the user's evaluation prompts, and the number of evaluation prompts that PPO trained on.

    If the user gives no evaluation prompts, return the prompts that PPO held out from training, and 0.

    Raises:
        DataError: The prompts that PPO held out have tokens of another tokenizer than the SFT policy's.
    """
    if raw_evaluation_prompts is None:
        if evaluation_prompts is not None:
            _check_tokens(evaluation_prompts.head(16), sft_policy)
        return evaluation_prompts, 0
    table = raw_evaluation_prompts.select(range(min(prompts.max_held_out, len(raw_evaluation_prompts))))
    name_unevaluated(raw_evaluation_prompts, prompts)
    chosen = PromptReader.of(sft_policy, ppo).read(table, prompts.column, "evaluation prompts").to_frame()
    trained = 0 if training_prompts is None else int(_are_among(chosen, training_prompts).sum())
    if trained:
        logger.warning("PPO trained on %d of these %d prompts: they are not held-out.", trained, len(chosen))
    return chosen, trained


def _check_tokens(prompts: pd.DataFrame, policy: PretrainedHandle) -> None:
    """Raise `DataError` if stored token ids are not those of the policy's tokenizer. A truncated prompt is an end."""
    stored = [list(ids) for ids in prompts["prompt_ids"]]
    are_chats = prompts["prompt_chat"].notna().tolist() if "prompt_chat" in prompts else None
    for before, ids in zip(
        stored, encode_texts(prompts["prompt"].tolist(), policy.tokenizer(), are_chats), strict=True
    ):
        tail = max(1, min(len(before), len(ids)) - 1)  # a truncated prompt begins with BOS
        if before[-tail:] != ids[-tail:]:
            raise DataError(
                f"The held-out prompts of the newest run have other tokens than {policy.source}'s tokenizer gives "
                "them. Set evaluation_prompts_path to prompts, which are then tokenised for this policy."
            )


def _are_among(prompts: pd.DataFrame, others: pd.DataFrame) -> "pd.Series[bool]":
    """Return for each prompt whether `others` contains a prompt with the same text, or the same messages and tools.

    The comparison of messages ignores today's date if the chat template prints the date.
    """

    def messages(table: pd.DataFrame) -> "pd.Series[str]":
        chats = table.get("prompt_chat", pd.Series(dtype=object)).dropna()
        tools = table[TOOLS].map(json.loads) if TOOLS in table else dict.fromkeys(chats.index)
        keys = [prompt_key(json.loads(chat), read_tools(tools[row], f"row {row}")) for row, chat in chats.items()]
        return pd.Series(keys, chats.index, dtype=object)

    are_known = messages(prompts).isin(messages(others)).reindex(prompts.index, fill_value=False)
    return prompts["prompt"].isin(others["prompt"]) | are_known


def _without_date(prompts: pd.DataFrame, policy: PretrainedHandle) -> pd.DataFrame:
    """Drop the rendered text and tokens of chat prompts if the policy's chat template prints today's date."""
    chats = prompts.get("prompt_chat")
    if chats is None or chats.isna().all() or not printed_dates(policy.tokenizer()):
        return prompts
    return prompts.assign(
        prompt=prompts["prompt"].where(chats.isna()), prompt_ids=prompts["prompt_ids"].where(chats.isna())
    )


def evaluate_sft_policy(
    sft_policy: PretrainedHandle,
    reward_model: PretrainedHandle | None,
    evaluation_prompts: pd.DataFrame,
    ppo: PPOConfig,
    reward: RewardConfig,
    evaluation: EvaluationConfig,
) -> pd.DataFrame:
    """Sample the SFT policy's responses to the held-out prompts, and score and judge the responses.

    Returns:
        One row for each response: prompt, sample (if a prompt has several responses), response, response_ids, reward,
        judge_score (if there is a judge), judge_score_<name> of further judges, rates, kl (0, because the policy is its
        own reference), length (tokens), terminated.
    """
    reference = _load_reference(sft_policy, ppo)
    return _evaluate(
        reference,
        None,
        sft_policy=sft_policy,
        reward_model=reward_model,
        evaluation_prompts=evaluation_prompts,
        ppo=ppo,
        reward=reward,
        evaluation=evaluation,
    )


def evaluate_ppo_policy(
    ppo_policy: PretrainedHandle,
    sft_policy: PretrainedHandle,
    reward_model: PretrainedHandle | None,
    evaluation_prompts: pd.DataFrame,
    sft_evaluation: pd.DataFrame,
    ppo: PPOConfig,
    reward: RewardConfig,
    evaluation: EvaluationConfig,
) -> pd.DataFrame:
    """Sample the exported PPO policy with SFT's prompts and sampling noise, and measure the policy's KL from SFT.

    Returns:
        One row for each response, with the columns of the SFT evaluation's table. The column `kl` has the KL estimate
        k1 summed over the response, in nats. A judge may compare PPO's responses with SFT's.

    Raises:
        ModelError: The policies have different vocabularies, so the same token ids are different prompts.
    """
    logger.info("Evaluating the policy %s against the SFT policy %s …", ppo_policy.source, sft_policy.source)
    check_vocabularies(ppo_policy, sft_policy)
    policy = ppo_policy.frozen_lm(trained_dtype(ppo), device_of(ppo))
    reference = _load_reference(sft_policy, ppo, waits=ppo.offload_reference_policy)
    return _evaluate(
        policy,
        reference,
        PolicyEvaluation.from_frame(sft_evaluation),
        sft_policy=sft_policy,
        reward_model=reward_model,
        evaluation_prompts=evaluation_prompts,
        ppo=ppo,
        reward=reward,
        evaluation=evaluation,
    )


def measure_reference_texts(
    raw_reference_texts: Dataset | None,
    evaluation_demonstrations: pd.DataFrame | None,
    ppo_policy: PretrainedHandle,
    sft_policy: PretrainedHandle,
    ppo: PPOConfig,
    data_preparation: DataPreparationConfig,
    evaluation: EvaluationConfig,
) -> pd.DataFrame:
    """Measure how probable the reference texts are under both policies.

    Returns:
        One row for each text, with the columns of `evaluation.perplexity`: tokens, sft, ppo. The table is empty without
        `evaluation.reference_texts`, and then no model is loaded.

    Raises:
        ModelError: The policies have different vocabularies, so the same token ids are different texts.
    """
    given = (raw_reference_texts, evaluation_demonstrations, data_preparation)
    table = choose_reference_texts(evaluation.reference_texts, *given)
    if table is None:
        return pd.DataFrame()
    check_vocabularies(ppo_policy, sft_policy)
    tokenizer, policies = sft_policy.tokenizer(), {SFT: sft_policy, PPO: ppo_policy}
    contexts = [usable_context(policy.config())[0] for policy in policies.values()]
    context = min((length for length in contexts if length is not None), default=None)
    is_held_out = evaluation.reference_texts == HELD_OUT_DEMONSTRATIONS
    texts = tokenise_reference_texts(table, tokenizer, context, leaves_out=is_held_out)
    counts = [[label != IGNORED for label in labels] for labels in texts.labels]
    columns: dict[str, Any] = {TOKENS: [sum(row[1:]) for row in counts]}
    for name, policy in policies.items():
        columns[name] = text_losses(
            policy.frozen_lm(trained_dtype(ppo), device_of(ppo)),
            texts.input_ids,
            counts,
            ppo,
            device=device_of(ppo),
            batch_size=evaluation.batch_size,
            pad_token_id=tokenizer.pad_token_id,
        )
    return pd.DataFrame(columns)


def compare_policies(
    sft_evaluation: pd.DataFrame,
    ppo_evaluation: pd.DataFrame,
    reference_losses: pd.DataFrame,
    sft_policy: PretrainedHandle,
    chosen_prompts: pd.DataFrame,
    evaluation_prompts: pd.DataFrame | None,
    trained_prompts: int,
    training_history: pd.DataFrame,
    ppo: PPOConfig,
    reward: RewardConfig,
    evaluation: EvaluationConfig,
) -> dict[str, object]:
    """Compare the two policies: win rate with its interval, verdict, means, diversity, perplexity of reference texts.

    A policy that was chosen as its run's best evaluation is compared on the prompts that took no part in the choice:
    noise favoured it on the others. With fewer than `MIN_PROMPTS` of them no winner is named.

    Returns:
        `evaluation_summary`: the eval/* metrics, the verdict with its reasons (`conclude`), `decided_by` (who decided
        the win rate), `exploits` (`exploits_at_end`), `untested_p` (only if the last evaluation of training could show
        no fall), `stopped_after`, `exported_iteration` and `choice_prompts` (only of a run that an evaluation stopped,
        see `stopped_at`) with `unchosen_prompts` (the prompts that took no part in the choice, if there was one),
        `rollout_halvings` and `update_halvings` (only where memory ran out while training),
        `trained_prompts` (the number of evaluation prompts that PPO trained on), `reference_texts` (their number, if
        there are any), and `conditions` (two runs' win rates
        can be compared only if the runs have equal `conditions`).
        `before_after`: a table with one row for each measure, and the values of SFT and of PPO.
    """
    sft, policy = PolicyEvaluation.from_frame(sft_evaluation), PolicyEvaluation.from_frame(ppo_evaluation)
    judge, stopped = resolve_judge(evaluation), stopped_at(training_history)
    by_trained_reward = reward.is_judge(judge.reference)
    if stopped.get("exported_iteration"):
        took_part = np.ones(len(chosen_prompts), dtype=bool)
        if evaluation_prompts is not None:
            took_part = _are_among(chosen_prompts, evaluation_prompts.head(stopped["choice_prompts"])).to_numpy()
        stopped["unchosen_prompts"] = int((~took_part).sum())
        if stopped["unchosen_prompts"] >= MIN_PROMPTS:
            sft, policy = sft.of_prompts(~took_part), policy.of_prompts(~took_part)
            chosen_prompts = chosen_prompts[~took_part]
    concluded = conclude(policy, sft, by_trained_reward=by_trained_reward)
    if stopped.get("unchosen_prompts", MIN_PROMPTS) < MIN_PROMPTS:
        concluded |= {"verdict": Verdict.TOO_FEW_PROMPTS, "eval/verdict": LEVELS[Verdict.TOO_FEW_PROMPTS]}
    metrics = compare_evaluations(policy, sft, evaluation.pass_at) | compare_perplexity(reference_losses)
    untested = untested_p(training_history)
    context: dict[str, Any] = {
        **concluded,
        "decided_by": judge.description,
        "exploits": not stopped and exploits_at_end(training_history),
        **({} if stopped or untested is None else {"untested_p": untested}),
        **stopped,
        **_halvings(training_history),
        "trained_prompts": trained_prompts,
        **({} if reference_losses.empty else {"reference_texts": len(reference_losses)}),
        "conditions": {
            "start_model": sft_policy.fingerprint(),
            "prompts": _digest(_without_date(chosen_prompts, sft_policy).to_json(orient="values").encode()),
            "judge": f"{judge.description} ({_code(judge.reference)})",
            "sampling": _drawn(ppo, evaluation),
        },
    }
    kl = "greedy_kl" if evaluation.temperature == 0.0 else "kl"
    low, high = (metrics[f"eval/win_rate_{end}"] for end in ("low", "high"))
    logger.info(
        "Win rate over SFT %.1f %% (95 %% interval %.1f to %.1f) on %d prompts, decided by %s; "
        "reward %s, SFT's %s; %s %s nats.",
        *(100 * rate for rate in (metrics["eval/win_rate"], low, high)),
        context["prompts"],
        context["decided_by"],
        *(f"{metrics[name]:z.3f}" for name in ("eval/reward", "eval/reward_sft")),
        measure(kl).label,
        f"{metrics['eval/kl']:z.2f}",
    )
    if not reference_losses.empty:
        logger.info(
            "Perplexity of %d reference texts (%d tokens): %.3f, SFT's %.3f; %+.4f nats a token.",
            len(reference_losses),
            reference_losses[TOKENS].sum(),
            *(metrics[f"eval/reference_{name}"] for name in ("perplexity", "perplexity_sft", "nll_change")),
        )
    run = mlflow.active_run()
    if run is not None:
        logger.info(
            "The run's results and report are below %s; data/ has those of the newest run.",
            run.info.artifact_uri,
        )
    table = before_after(policy, sft, evaluation.pass_at).replace({"measure": {"kl": kl}})
    if not reference_losses.empty:
        table = pd.concat([table, perplexity_row(reference_losses)], ignore_index=True)
    return {"evaluation_summary": {**metrics, **context}, "before_after": table}


def pair_samples(
    sft_evaluation: pd.DataFrame,
    ppo_evaluation: pd.DataFrame,
    evaluation_prompts: pd.DataFrame,
    evaluation: EvaluationConfig,
) -> pd.DataFrame:
    """Return both policies' responses side by side, for random prompts and for PPO's widest wins and losses.

    The column `prompt` shows a chat as its turns.
    """
    pairs = sample_pairs(
        PolicyEvaluation.from_frame(ppo_evaluation),
        PolicyEvaluation.from_frame(sft_evaluation),
        seed=evaluation.seed,
    )
    prompts = PromptDataset.from_frame(evaluation_prompts)
    shown = dict(zip(prompts.texts, readable_prompts(prompts), strict=True))
    return pairs.assign(prompt=[shown.get(text, text) for text in pairs["prompt"]])


def write_model_card(
    evaluation_summary: dict[str, Any],
    before_after: pd.DataFrame,
    ppo_policy: PretrainedHandle,
    sft_policy: PretrainedHandle,
    reward_model: PretrainedHandle | None,
    ppo: PPOConfig,
    reward: RewardConfig,
    evaluation: EvaluationConfig,
) -> tuple[str | None, str]:
    """Write the evaluation's result into the policy's model card, in place of an earlier result.

    Returns:
        The policy's directory and the policy's model card. If this project did not write the model card, return None
        and the text of the result.
    """
    accuracy = reward_model_accuracy(reward_model, reward)
    temperature = ppo.temperature if evaluation.temperature is None else evaluation.temperature
    drawn = f"at temperature {temperature:g}" if temperature else "greedily"
    notes = [
        f"SFT is `{place(sft_policy.source)}`. Both answered {drawn}.",
        *(f"**{problem}**" for problem in remarks(evaluation_summary, before_after, accuracy)),
    ]
    said = f"**{say_verdict(evaluation_summary['verdict'])}.** {headline(evaluation_summary)}"
    result = result_section(said, before_after, notes)
    card = with_result(ppo_policy.card() or "", result)
    return (None, result) if card is None else (ppo_policy.source, with_index(card, evaluation_summary))


def _evaluate(
    policy: PreTrainedModel,
    reference: PreTrainedModel | None,
    sft: PolicyEvaluation | None = None,
    *,
    sft_policy: PretrainedHandle,
    reward_model: PretrainedHandle | None,
    evaluation_prompts: pd.DataFrame,
    ppo: PPOConfig,
    reward: RewardConfig,
    evaluation: EvaluationConfig,
) -> pd.DataFrame:
    tokenizer = sft_policy.tokenizer()
    scorer = build_reward_scorer(
        reward,
        reward_model,
        tokenizer,
        batch_size=evaluation.batch_size,
        device=policy.device,
        dtype=frozen_dtype(ppo),
        offload=ppo.offload_reward_model,
        setting="evaluation.batch_size",
    )
    evaluator = Evaluator(
        tokenizer,
        PromptDataset.from_frame(evaluation_prompts),
        scorer,
        resolve_judge(evaluation),
        ppo,
        # both policies use the SFT policy's stop tokens, so that all responses end by the same rule
        sampling=evaluation.sampling(sampling_settings(ppo, tokenizer, policy if reference is None else reference)),
        seed=evaluation.seed,
        batch_size=evaluation.batch_size,
        samples_per_prompt=evaluation.samples_per_prompt,
    )
    return evaluator.evaluate(policy, reference, against=sft).to_frame()


def _drawn(ppo: PPOConfig, evaluation: EvaluationConfig) -> str:
    """Return all sampling settings of the evaluation as one text."""
    given = {name: getattr(ppo, name) for name in DRAWN_BY} | {"samples_per_prompt": evaluation.samples_per_prompt}
    given |= {} if evaluation.temperature is None else {"temperature": evaluation.temperature}
    return ", ".join(f"{name}={value}" for name, value in given.items())


def _code(reference: str | LLMJudgeConfig | None) -> str:
    """Return a digest of the source file of an imported function, or of the request to a language model."""
    if isinstance(reference, LLMJudgeConfig):
        return _digest(reference.opinion.encode())
    return "" if reference is None else _digest(Path(str(sys.modules[reference.split(":")[0]].__file__)).read_bytes())


def _halvings(history: pd.DataFrame) -> dict[str, int]:
    """Return how often memory ran out while training, in rollouts and in updates; nothing where it never did."""
    counts = {name: history[f"memory/{name}"].max() for name in KEYS if f"memory/{name}" in history}
    return {name: int(count) for name, count in counts.items() if count > 0}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _load_reference(handle: PretrainedHandle, ppo: PPOConfig, *, waits: bool = False) -> PreTrainedModel:
    """Return the SFT policy, which does the same arithmetic as the exported policy; it may wait in host memory."""
    model = handle.frozen_lm(trained_dtype(ppo), "cpu" if waits else device_of(ppo))
    store_linear_weights(model, frozen_dtype(ppo))
    if waits:
        to_host(model)
    return model
