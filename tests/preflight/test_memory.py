"""The plan of a run's memory: exact where it can be counted, else within 35 % of a measured peak."""

from __future__ import annotations

import math
import multiprocessing
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig

from ppo_rlhf.config import PPOConfig
from ppo_rlhf.config.advice import head_rate
from ppo_rlhf.config.ppo import OFFLOADING_FIELDS
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.models.reward_model import CausalLMRewardConfig, CausalLMRewardModel
from ppo_rlhf.passes import free_memory
from ppo_rlhf.passes.free_memory import sequences_at_a_time
from ppo_rlhf.ppo import epoch_batches, token_budget
from ppo_rlhf.ppo.precision import autocast, resolve_device
from ppo_rlhf.preflight.memory import MemoryPlan, RunShape, plan_memory, suggestions
from tests.ppo_runs import build_prompts, build_run

LLAMA = LlamaConfig(
    vocab_size=23,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=2,
)
WIDE = LlamaConfig(**{**LLAMA.to_dict(), "hidden_size": 256, "intermediate_size": 512})
REWARD_MODEL = CausalLMRewardConfig(text_config=LLAMA)
SETTINGS: dict[str, Any] = {"per_device_train_batch_size": 8, "response_length": 8}
FOUR_MICRO_BATCHES = {"use_peft": True, "gradient_accumulation_steps": 4, "num_mini_batches": 1}
MOMENTS = "optimisers: two moments of each trained weight"


def plan(shape: RunShape | None = None, **settings: Any) -> MemoryPlan:
    return plan_memory(PPOConfig(**{**SETTINGS, **settings}), shape or RunShape(LLAMA, 6))


def passing(planned: MemoryPlan, phase: str) -> int:
    return planned.phases[phase] - sum(planned.held.values())


def bytes_of(value: Any) -> int:
    """Return the bytes of all tensors of a dataclass, and of those in it."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(bytes_of(getattr(value, each.name)) for each in fields(value)) if is_dataclass(value) else 0


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "float64"},
        {"value_model": "shared"},
        {"dtype": "bfloat16"},
        {"use_peft": True, "dtype": "bfloat16"},
        {"use_peft": True, "value_model": "shared", "lora_r": 3},
    ],
    ids=str,
)
def test_weights_and_moments_are_those_of_a_run_to_the_byte(settings: dict[str, Any]):
    run = build_run("llama", **{"dtype": "float32", **settings})
    models = (run.state.learner.policy, run.reference, run.state.learner.critic)
    planned = plan(**settings)
    unique = {p.untyped_storage().data_ptr(): p.nbytes for model in models for p in model.parameters()}
    buffers = sum(planned.held.values()) - planned.held[MOMENTS] - sum(unique.values())
    assert 0 <= buffers < 200 * len(models)
    run.iteration()
    optimizers = {
        id(o): o for o in (run.state.learner.policy_optimizer, run.state.learner.critic_optimizer) if o is not None
    }
    moments = [state for optimizer in optimizers.values() for state in optimizer.state.values()]
    assert planned.held[MOMENTS] == sum(m[name].nbytes for m in moments for name in ("exp_avg", "exp_avg_sq"))
    trained = {p.untyped_storage().data_ptr(): p.nbytes for o in optimizers.values() for p in parameters_of(o)}
    assert planned.checkpoint == planned.held[MOMENTS] + sum(trained.values())


def test_the_numbers_of_a_tiny_model_are_those_worked_out_by_hand():
    """Rows of 14 tokens, 8 at a time. A token keeps 1.5 times the inputs and outputs of all linear layers."""
    layer = (16 + 16) + 2 * (16 + 8) + (16 + 16) + 2 * (16 + 24) + (24 + 16)
    one_layer, kept = int(1.5 * layer * 4), int(1.5 * 2 * layer * 4)
    logits, cache = 8 * 8 * 23 * 4, 8 * 14 * (2 * 2 * 1 * 8) * 4
    gradients, epoch = plan().held[MOMENTS] // 2, 8 * (14 * 64 + 8 * 61)
    assert passing(plan(), "update") == gradients + epoch + 8 * 14 * kept + 2 * logits
    assert passing(plan(entropy_coef=0.01), "update") == gradients + epoch + 8 * 14 * kept + 3 * logits
    embedding = 23 * 16 * 4  # a micro-batch's gradient of it, beside that of the earlier ones
    assert passing(plan(gradient_accumulation_steps=4), "update") - passing(plan(), "update") == 3 * epoch + embedding
    tied = RunShape(LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": True}), 6)
    assert plan().held[MOMENTS] - plan(tied).held[MOMENTS] == 2 * embedding  # there is no head of its own
    assert passing(plan(tied), "update") == passing(plan(), "update")  # but its gradient is there, before it is added
    full = {"kl_estimator": "full"}
    assert passing(plan(**full), "update") == gradients + epoch + 8 * 14 * kept + 2 * logits
    assert passing(plan(**full, kl_in="loss"), "update") == gradients + epoch + 8 * 14 * kept + 4 * logits
    checkpointed = gradients + epoch + 8 * 14 * (2 * 16 * 4 + one_layer) + 2 * logits
    assert passing(plan(gradient_checkpointing=True), "update") == checkpointed
    assert passing(plan(), "scoring") == 8 * 14 * one_layer
    assert passing(plan(), "rollout") == cache + 8 * 6 * one_layer
    for accumulation, buckets in (
        (1, 0),
        (2, gradients),
    ):  # DDP's buckets are the gradients, unless these accumulate
        one, two = (
            plan(replace(RunShape(LLAMA, 6), processes=count), gradient_accumulation_steps=accumulation)
            for count in (1, 2)
        )
        assert passing(two, "update") - passing(one, "update") == buckets


def test_a_beginning_of_all_prompts_is_counted_once_a_pass_and_an_eighth_for_each_further_row():
    shared, tokens = RunShape(LLAMA, 20, shared_length=16), 8 * 28 - 7 * 16 + 7 * 16 // 8
    one, two = plan(RunShape(LLAMA, 20)), plan(shared)
    kept = (passing(one, "update") - passing(plan(RunShape(LLAMA, 19)), "update")) // 8 - 64
    assert passing(one, "update") - passing(two, "update") == (8 * 28 - tokens) * kept
    assert passing(one, "scoring") / passing(two, "scoring") == 8 * 28 / tokens
    assert plan(shared, max_tokens_per_micro_batch=tokens).update_rows == 8
    assert plan(shared, max_tokens_per_micro_batch=tokens - 1).update_rows == 7
    windowed = LlamaConfig(**{**LLAMA.to_dict(), "sliding_window": 4})
    assert passing(plan(replace(shared, policy=windowed)), "update") == passing(plan(RunShape(windowed, 20)), "update")


def test_an_epochs_tensors_are_counted_to_a_tenth():
    """Prompts of one length, responses of full length: then nothing is padding."""
    run = build_run("llama", prompts=build_prompts((6,) * 4), stop_token="none", missing_eos_penalty=None)
    *_, experience = run.before_update()
    cut = experience.rollouts.cut
    pieces = epoch_batches._micro_batches(experience, cut, cut.first_micro_batches)
    rows, width = run.config.local_batch_size, run.config.response_length
    assert (
        run.state.learner.statistics_dtype == torch.float64
    )  # bytes per number of the tests' float64 models; runs use four
    expected = rows * ((6 + width) * 64 + width * (61 + 5 * 4))
    assert sum(map(bytes_of, pieces)) == pytest.approx(expected, rel=0.1)


def test_logits_beyond_what_is_held_at_a_time_do_not_count():
    on_card = RunShape(LLAMA, 6, on_cpu=False, memory=100 * 256)
    before = passing(plan(), "update")
    assert before - passing(plan(on_card, dtype="float32"), "update") == 2 * (8 * 8 * 23 - 100) * 4
    assert before - passing(plan(replace(on_card, on_cpu=True)), "update") == 2 * (8 * 8 * 23 - 100) * 4


@pytest.mark.parametrize(("tokens", "rows"), [(None, 8), (1000, 8), (28, 2), (27, 1), (5, 1)])
def test_rows_of_a_micro_batch_follow_the_token_budget(tokens: int | None, rows: int):
    planned = plan(max_tokens_per_micro_batch=tokens)
    assert (planned.update_rows, planned.update_tokens) == (rows, tokens)


@pytest.mark.parametrize(("fitting", "rows"), [(8 * 14, 8), (8 * 14 - 1, 7), (100 * 14, 8), (28, 2), (5, 1)])
def test_on_a_gpu_the_free_memory_says_how_many_tokens_a_micro_batch_has(fitting: int, rows: int):
    """By hand: beside what is held there are gradients, an epoch's tensors, and all logits that may be held, twice."""
    card, kept = 2**20, int(1.5 * 2 * 232) * 4
    held, gradients = sum(plan().held.values()), plan().held[MOMENTS] // 2
    logits, epoch = 2 * card // 256 * 4, 8 * (14 * 64 + 8 * 61)
    free = held + gradients + epoch + logits + math.ceil((fitting + 0.5) * kept / 0.8)
    shape = RunShape(LLAMA, 6, on_cpu=False, free=free, memory=card)
    planned = plan(shape, dtype="float32")
    assert (planned.update_tokens, planned.update_rows) == (max(2, fitting), rows)
    taken = rows * 14 * kept + 2 * min(rows * 8 * 23, card // 256) * 4
    assert passing(planned, "update") == gradients + epoch + taken
    assert plan(replace(shape, on_cpu=True), dtype="float32").update_tokens is None
    assert plan(shape, dtype="float32", deterministic=True).update_tokens is None
    assert plan(shape, dtype="float32", max_tokens_per_micro_batch=30).update_tokens == 30


def test_scoring_takes_as_many_responses_as_fit_beside_what_is_held():
    shape, one_layer = RunShape(LLAMA, 6, on_cpu=False, memory=2**30), int(1.5 * 2 * 232) * 4 // 2
    settings = {"dtype": "float32", "max_tokens_per_micro_batch": 14}
    held = sum(plan(shape, **settings).held.values())
    for fitting, rows in ((8, 8), (7, 4)):
        planned = plan(replace(shape, free=held + math.ceil((fitting + 0.5) * 14 * one_layer / 0.8)), **settings)
        assert sum(planned.held.values()) == held
        assert passing(planned, "scoring") == rows * 14 * one_layer


@pytest.mark.parametrize(
    ("free", "limit", "rows"),
    [(None, None, 8), (2**40, None, 8), (0, None, 1), (0, 3, 3), (2**40, 3, 3)],
)
def test_without_a_limit_the_rollouts_take_what_is_left_beside_what_is_held(
    free: int | None, limit: int | None, rows: int
):
    planned = plan(RunShape(LLAMA, 6, free=free), local_rollout_forward_batch_size=limit)
    assert planned.rollout_rows == rows
    one_layer, cache = int(1.5 * 2 * 232 * 4) // 2, 14 * 2 * 16 * 4
    assert passing(planned, "rollout") == rows * (cache + 6 * one_layer)


@pytest.mark.parametrize(("limit", "scored"), [(None, 64), (128, 128)])
def test_a_cpu_scores_64_at_a_time_unless_a_number_is_set(limit: int | None, scored: int):
    many = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 32}
    planned = plan(**many, local_rollout_forward_batch_size=limit)
    assert passing(planned, "scoring") == scored * 14 * (int(1.5 * 2 * 232 * 4) // 2)


def test_offloaded_models_count_on_the_host_and_while_they_score():
    shape = RunShape(LLAMA, 6, (REWARD_MODEL,), on_cpu=False)
    near, far = (plan(shape, dtype="float32", **dict.fromkeys(OFFLOADING_FIELDS, waits)) for waits in (False, True))
    moved = {name: near.held[f"{name}: weights"] for name in ("reference policy", "reward model")}
    assert sum(near.held.values()) - sum(far.held.values()) == far.on_host == sum(moved.values())
    assert passing(far, "scoring") == passing(near, "scoring") + max(moved.values())  # one at a time


def test_each_of_several_reward_models_counts_and_moves_by_itself():
    wide = CausalLMRewardConfig(text_config=WIDE)
    one = RunShape(LLAMA, 6, (REWARD_MODEL,), on_cpu=False)
    two = replace(one, reward_models=(REWARD_MODEL, wide))
    alone = plan(replace(one, reward_models=(wide,)), dtype="float32").held["reward model: weights"]
    near, far = (plan(two, dtype="float32", offload_reward_model=waits) for waits in (False, True))
    before = plan(one, dtype="float32").held
    assert near.held == {**before, "reward model 2: weights": alone}
    with torch.device("meta"):
        built = CausalLMRewardModel(wide)
    assert alone == sum(each.nbytes for each in (*built.parameters(), *built.buffers()))
    assert far.on_host == before["reward model: weights"] + alone
    assert sum(near.held.values()) - sum(far.held.values()) == far.on_host
    assert passing(far, "scoring") == passing(near, "scoring") + alone  # one at a time, here the larger


def test_a_moving_average_an_evaluation_and_casts_to_16_bits_count():
    averaged = plan(ema_decay=0.9, value_model="shared").held
    assert 0 < averaged[MOMENTS] // 2 - averaged["policy: moving average"] <= 17 * 4  # the value head has no average
    assert "evaluation" not in plan().phases
    evaluated = plan(RunShape(LLAMA, 6, evaluation_rows=64))
    assert passing(evaluated, "evaluation") == 8 * passing(evaluated, "scoring")
    weights = plan().held["policy: weights"] // 4
    full, cast = (passing(plan(dtype=dtype), "rollout") for dtype in ("float32", "bfloat16"))
    assert full // 2 + 1.9 * weights < cast < full // 2 + 2 * weights


@pytest.mark.parametrize(
    "settings",
    [{}, {"use_peft": True, "lora_r": 3}, {"value_model": "shared"}, {"dtype": "bfloat16"}],
    ids=str,
)
def test_a_run_takes_as_many_tokens_and_responses_at_a_time_as_its_plan_says(settings: dict[str, Any], monkeypatch):
    """An accelerator is pretended, whose memory holds 2^24 logits at a time."""
    run = build_run("llama", **{"dtype": "float32", "local_rollout_forward_batch_size": None, **settings})
    shape = RunShape(run.reference.config, max(run.prompts.lengths), on_cpu=False, memory=2**24 * 256)
    held = plan_memory(run.config, shape).held
    budgets, rows = set(), set()
    monkeypatch.setattr(token_budget, "UNLIMITED_ON", ())
    monkeypatch.setattr(token_budget, "logits_held", lambda _: 2**24)
    for left in (2**14, 2**15, 2**16, 2**28, 2**28 + 2**20):
        planned = plan_memory(run.config, replace(shape, free=sum(held.values()) + left))
        monkeypatch.setattr(token_budget, "free_bytes", lambda _, left=left: left + held[MOMENTS])
        run.state.learner.micro_batch_tokens = None
        assert token_budget.token_budget(run.state.learner, shape.prompt_length) == planned.update_tokens
        copied = token_budget.copied_bytes(run.config, run.state.learner.policy)
        monkeypatch.setattr(free_memory, "free_bytes", lambda _, left=left, copied=copied: left - copied)
        longest, size = shape.prompt_length, run.config.local_batch_size
        with autocast(run.config, torch.device("cpu")):
            at_a_time = sequences_at_a_time(
                run.state.learner.policy, size, longest + run.config.response_length, decoded_from=longest
            )
        assert at_a_time == planned.rollout_rows
        budgets.add(planned.update_tokens)
        rows.add(at_a_time)
    assert len(budgets) > 2
    assert len(rows) > 1


@pytest.mark.parametrize("settings", [pytest.param({}, marks=pytest.mark.slow), {"use_peft": True}], ids=str)
def test_a_stored_critic_counts_as_large_as_the_policy(settings):
    separate, pretrained = (plan(value_model=name, **settings).held for name in ("separate", "pretrained"))
    with torch.device("meta"):
        backbone = sum(parameter.nbytes for parameter in AutoModel.from_config(LLAMA).parameters())
    more = pretrained["critic: weights"] - separate["critic: weights"]
    assert more == (pytest.approx(backbone, rel=0.01) if settings else 0)  # with LoRA `separate` shares the policy's
    assert pretrained[MOMENTS] == separate[MOMENTS]


def test_4_bit_weights_count_with_their_scales_and_one_layer_unpacked():
    """Worked by hand: a block has queries and output of two heads, 8 wide, keys and values of one, and an MLP."""
    settings = {"use_peft": True, "dtype": "bfloat16"}
    whole, packed = (plan(RunShape(WIDE, 6), **settings, load_in_4bit=four) for four in (False, True))
    matrices = [16 * 256, 8 * 256, 8 * 256, 16 * 256, *[256 * 512] * 3]
    saved = sum(2 * n - (n // 2 + n // 64 + 4 * -(-n // 64 // 256)) for n in matrices)
    found = whole.held["policy: weights"] - packed.held["policy: weights"]
    assert found == 2 * saved
    assert passing(packed, "update") - passing(whole, "update") == 256 * 512 * 2
    assert (whole.trained, whole.exported) == (packed.trained, packed.exported)


def test_the_disk_holds_the_exported_policy_and_if_it_is_asked_for_the_critic():
    shape = RunShape(WIDE, 6)
    policy, both = (plan(shape, export_critic=critic).exported for critic in (False, True))
    model = AutoModelForCausalLM.from_config(WIDE)
    assert policy == 4 * model.num_parameters()
    assert both - policy == 4 * model.model.num_parameters()


@pytest.mark.slow
def test_8_bit_moments_and_4_bit_weights_are_suggested_last():
    found = list(suggestions(PPOConfig(**SETTINGS), RunShape(WIDE, 6)))
    assert [each.changes.get("load_in_4bit", each.changes.get("optim")) for each in found[-2:]] == ["adamw_8bit", True]


def test_a_critic_from_a_reward_model_needs_one():
    with pytest.raises(ConfigError, match="value_model=reward_init"):
        plan(value_model="reward_init")


@pytest.mark.slow
def test_changes_that_lower_the_peak_are_suggested_alone_and_the_cheapest_first():
    config = PPOConfig(**{**SETTINGS, "per_device_train_batch_size": 16})
    shape = RunShape(WIDE, 6, on_cpu=False)
    found = list(suggestions(config, shape))
    assert found[0].changes == {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    settings = [next(iter(each.changes)) for each in found]
    assert settings.index("offload_reference_policy") < settings.index("value_model") < settings.index("use_peft")
    shared = next(each.changes for each in found if "value_model" in each.changes)
    assert shared == {"value_model": "shared", "value_learning_rate": head_rate(config.learning_rate)}
    for each in found:
        assert each.needed == plan_memory(replace(config, **each.changes), shape).needed
        assert each.needed < plan_memory(config, shape).needed


@pytest.mark.slow
def test_nothing_that_the_settings_or_the_device_exclude_is_suggested():
    config = PPOConfig(**SETTINGS, value_model="reward_init", offload_reward_model=True)
    shape = RunShape(WIDE, 6, (CausalLMRewardConfig(text_config=WIDE),), on_cpu=False)
    assert not any("use_peft" in each.changes for each in suggestions(config, shape))
    assert not any(
        each.changes.get("offload_reference_policy") for each in suggestions(PPOConfig(**SETTINGS), RunShape(WIDE, 6))
    )


# The plan against a measured peak.


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure(model: dict[str, Any], settings: dict[str, Any], result: Any) -> None:
    """Put planned and measured bytes of a run into `result`; growth is counted from behind a small first run."""
    fixed = {"total_episodes": 64, "stop_token": "none", "missing_eos_penalty": None, "dtype": "float32"}
    resolve_device("cpu")  # as each run begins
    settings = {**fixed, "num_mini_batches": 2, "num_ppo_epochs": 1, "gradient_accumulation_steps": 1, **settings}
    prompts = build_prompts((32,) * 8)
    build_run("llama", prompts=prompts, **{**settings, "per_device_train_batch_size": 2}).iteration()
    before = resident("VmRSS")
    run = build_run("llama", model=model, prompts=prompts, **settings)
    run.iteration()  # the second minibatch meets the moments of the first
    measured = resident("VmHWM") - before
    planned = plan_memory(run.config, RunShape(run.reference.config, 32))
    result.put((planned.needed, measured))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, FOUR_MICRO_BATCHES], ids=["whole weights", "adapters"])
def test_the_plan_is_within_35_percent_of_a_measured_peak(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "vocab_size": 8192}
    settings = {"per_device_train_batch_size": 32, "response_length": 8, "local_rollout_forward_batch_size": 32}
    settings |= changes
    context = multiprocessing.get_context("spawn")
    result = context.Queue()
    process = context.Process(target=measure, args=(model, settings, result))
    process.start()
    planned, measured = result.get(timeout=120)
    process.join()
    assert planned == pytest.approx(measured, rel=0.35)
