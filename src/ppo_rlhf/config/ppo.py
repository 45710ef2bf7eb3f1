"""PPOConfig: every hyperparameter of PPO in one flat, validated dataclass, with TRL's names."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import InitVar, fields
from typing import Annotated, Any, Literal

from pydantic import Field, InstanceOf

from ppo_rlhf.config import advice, ppo_rules
from ppo_rlhf.config.advice import INSTRUCT_GPT, TUNING_GUIDE, Typical
from ppo_rlhf.config.parameter_groups import Seed, parameter_group
from ppo_rlhf.config.setting_roles import Role, names_in_group
from ppo_rlhf.config.trl_names import LIVES_ELSEWHERE
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.core.option_names import KLEstimator, LossAggregation
from ppo_rlhf.runtime.processes import process_count

LearningRateSchedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
]
Precision = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]

EIGHT_BIT = "adamw_8bit"
VLLM_IMPORTANCE_CAP = 3.0
SAMPLE_INTERVAL = 5
"""Iterations between two samples: a table in MLflow, some responses token by token, and all completions in a file. No
setting: a sample takes milliseconds and some kilobytes, and responses that nobody kept cannot be read afterwards."""


class _Processes(int):
    """A number of processes that no parameters file can give."""


@parameter_group("ppo", lives_elsewhere=LIVES_ELSEWHERE)
class PPOConfig:
    """Hyperparameters of PPO on a language model (Schulman et al. 2017, arXiv:1707.06347; Ouyang et al. 2022).

    An episode is one response. Token counts leave out prompts and padding. Settings that TRL also has keep TRL's name,
    and TRL's default unless docs/algorithm.md, section 10, lists another default. `Typical` gives the usual range of a
    setting.

    Raises:
        ConfigError: A value or a combination of values is not allowed; the message has one line for each problem.
    """

    num_ppo_epochs: Annotated[int, Field(ge=1), Typical(1, 10, TUNING_GUIDE), Role("replaced")] = 4
    """Passes over each batch of rollouts. 2 to 4 are usual."""
    num_critic_epochs: Annotated[int, Field(ge=1), Typical(1, 20, TUNING_GUIDE), Role("replaced")] | None = None
    """Passes that train a critic with its own backbone; None: `num_ppo_epochs`. Passes beyond `num_ppo_epochs` train
    only the critic."""
    cliprange: Annotated[
        float, Field(gt=0.0), Typical(0.1, 0.3, "arXiv:1707.06347, table 3"), Role("taken", group="clipping")
    ] = 0.2
    """Policy clipping range epsilon. Ratios outside [1 - epsilon, 1 + epsilon] get no gradient that moves them
    further."""
    cliprange_high: (
        Annotated[float, Field(gt=0.0), Typical(0.1, 0.5, "DAPO, arXiv:2503.14476"), Role("taken", group="clipping")]
        | None
    ) = None
    """Upper clipping range of the policy; None: `cliprange`. DAPO ("clip higher") takes 0.28."""
    cliprange_value: Annotated[float, Field(gt=0.0), Typical(0.1, 0.5, TUNING_GUIDE), Role("taken")] | None = 0.2
    """Value clipping range, in units of the return; None: the value loss is not clipped. The value loss clips the
    critic's new values to a distance of at most cliprange_value from the critic's values at the rollout."""
    vf_coef: Annotated[float, Field(gt=0.0), Typical(0.05, 3.0, f"{TUNING_GUIDE}, SmolLM2"), Role("taken")] = 0.1
    """Weight of the value loss. With value_model=shared vf_coef weighs the value loss, which is in squared rewards,
    against the policy loss, whose whitened advantages have variance 1; in the recipe obedience, with rewards of 0 and
    1, the critic explains more with 3 than with 0.1. The optimiser step of a separate critic hardly depends on vf_coef,
    because Adam rescales gradients."""
    gamma: Annotated[float, Field(ge=0.0, le=1.0), Typical(0.95, 1.0, INSTRUCT_GPT), Role("taken")] = 1.0
    """Discount factor per token."""
    lam: Annotated[float, Field(ge=0.0, le=1.0), Typical(0.9, 1.0, "arXiv:1506.02438"), Role("taken")] = 0.95
    """Lambda of generalised advantage estimation. With 0 it is one-step TD, with 1 Monte Carlo."""
    lam_critic: (
        Annotated[float, Field(ge=0.0, le=1.0), Typical(0.9, 1.0, "VAPO, arXiv:2504.05118"), Role("taken")] | None
    ) = None
    """GAE lambda of the critic's targets; None: `lam`. VAPO takes 1, for unbiased returns."""
    lam_alpha: Annotated[float, Field(gt=0.0), Typical(0.01, 2.0, "VAPO: 0.05; SAO: 1.5"), Role("taken")] | None = None
    """Makes the GAE lambda of the policy's advantages 1 - 1 / (lam_alpha x tokens of the response); None: `lam`. It is
    0 for responses of at most 1 / lam_alpha tokens. With lam_alpha, `lam` applies only to the critic's targets."""
    whiten_rewards: Annotated[bool, Role("taken")] = False
    """Divide shaped rewards by their standard deviation over the batch, and keep their mean. TRL does so, too."""
    whiten_advantages: Annotated[bool, Role("taken")] = True
    """Shift and scale advantages to mean 0 and variance 1 over the response tokens of the batch."""
    entropy_coef: Annotated[
        float, Field(ge=0.0), Typical(0.0, 0.02, "arXiv:1707.06347, table 5: 0.01"), Role("taken")
    ] = 0.0
    """Bonus per nat of the policy's exact entropy at `temperature`. It is subtracted from the policy loss. With 0 the
    policy loss has no entropy bonus."""
    positive_coef: Annotated[float, Field(ge=0.0), Typical(0.0, 0.3, "VAPO, arXiv:2504.05118: 0.1"), Role("taken")] = (
        0.0
    )
    """Weight, in the policy loss, of the negative log-likelihood of positive examples. With 0 the policy loss has no
    term for positive examples."""
    positive_threshold: Annotated[float | None, Role("replaced")] = None
    """For `positive_coef`: a response with at least this raw reward score is a positive example."""
    dual_clip: (
        Annotated[float, Field(gt=1.0), Typical(1.5, 10.0, "arXiv:1912.09729: 3"), Role("taken", group="clipping")]
        | None
    ) = None
    """Upper bound c on the probability ratio of a token whose advantage A is negative: its policy loss is at most -A x
    c; None: off."""
    target_kl: (
        Annotated[float, Field(gt=0.0), Typical(0.003, 0.2, "OpenAI Spinning Up: 0.01 to 0.05"), Role("left out")]
        | None
    ) = None
    """Target for the approximate KL (`approxkl`) of an update, in nats per token; None: no update stops early. An
    update stops before an optimiser step whose minibatch has an approxkl above 1.5 x target_kl."""
    loss_aggregation: Annotated[LossAggregation, Role("taken")] = "token_mean"
    """How token losses become one number. token_mean: their mean. seq_mean_token_sum, seq_mean_token_mean: the mean
    over responses of each response's sum or mean. token_sum_fixed_length: the sum over tokens divided by (responses x
    response_length)."""
    importance_cap: (
        Annotated[float, Field(gt=0.0), Typical(1.0, 10.0, "verl: 2"), Role("taken", group="clipping")] | None
    ) = None
    """Weight each token's loss by min(pi_old / pi_sampler, importance_cap); None: no weights, but with
    rollout_engine=vllm 3. The sampler rounds probabilities differently from the training forward pass. 3 is the value
    of TRL's vllm_importance_sampling_clip_max."""
    importance_low: (
        Annotated[float, Field(ge=0.0, lt=1.0), Typical(0.2, 0.8, "arXiv:2607.07508: 0.7"), Role("taken")] | None
    ) = None
    """Lower limit of the ratio pi / pi_sampler; with `importance_high`, SAO's policy loss replaces the clipped loss.
    SAO's policy loss weights each token by this ratio. Tokens whose ratio is not between importance_low and
    importance_high do not train the policy. Without both limits the loss is PPO's clipped loss."""
    importance_high: (
        Annotated[float, Field(gt=1.0), Typical(1.2, 10.0, "arXiv:2607.07508: 6"), Role("taken")] | None
    ) = None
    """Upper limit of the ratio pi / pi_sampler, for `importance_low`. Lower and upper limit in SAO are 0.7 and 6 for
    reasoning, 0.2 and 4 for code."""

    kl_coef: Annotated[float, Field(ge=0.0), Typical(0.01, 0.2, TUNING_GUIDE), Role("taken")] = 0.05
    """Beta, the weight of the KL estimate, in score units per nat. The adaptive KL controller starts with beta =
    kl_coef."""
    kl_estimator: Annotated[KLEstimator, Role("taken")] = "k1"
    """Per-token estimator of KL(policy || reference) (Schulman 2020, "Approximating KL Divergence"). k3+ has k3's value
    and k2's gradient. full is the exact KL over the vocabulary. With kl_in=loss it runs the reference policy in each
    optimiser step."""
    kl_in: Annotated[Literal["reward", "loss"], Role("taken")] = "reward"
    """reward: subtract beta x KL from each token's reward. loss: add beta x KL to the policy loss (not with k1)."""
    kl_controller: Annotated[Literal["fixed", "adaptive"], Role("left out")] = "fixed"
    """fixed: beta stays `kl_coef`. adaptive: beta changes so that KL approaches `kl_target` (Ziegler et al. 2019,
    arXiv:1909.08593, section 2.2)."""
    kl_target: Annotated[
        float, Field(gt=0.0), Typical(1.0, 20.0, "arXiv:1909.08593: 6"), Role("left out", group="adaptive_kl")
    ] = 6.0
    """KL that the adaptive controller aims at, in nats per response. It is k1, summed over the tokens."""
    kl_horizon: Annotated[
        float, Field(gt=0.0), Typical(100, 100_000, "arXiv:1909.08593: 10000"), Role("left out", group="adaptive_kl")
    ] = 10_000.0
    """Episodes in which the adaptive KL controller changes beta by at most 20 %. Set kl_horizon to a fifth of
    total_episodes or less."""
    kl_warning: Annotated[float, Field(gt=0.0), Typical(5, 50, TUNING_GUIDE), Role("none", resume="free")] = 15.0
    """KL in nats per response above which the run warns, once for each crossing. The warning names the
    setting to change first."""
    kl_alarm: Annotated[float, Field(gt=0.0), Typical(5, 50, TUNING_GUIDE), Role("none", resume="free")] = 20.0
    """KL in nats per response above which the run raises an alarm and no checkpoint becomes the best."""
    kl_stop: Annotated[float, Field(gt=0.0), Typical(10, 200, TUNING_GUIDE), Role("left out", resume="free")] | None = (
        None
    )
    """KL of a rollout batch, in nats per response, that stops training; None: no KL does."""

    reward_scale: Annotated[float, Field(gt=0.0), Typical(0.01, 10.0, TUNING_GUIDE), Role("taken")] = 1.0
    """Factor of each response's score. It is applied after normalisation and before clipping."""
    reward_clip: Annotated[float, Field(gt=0.0), Typical(0.5, 20.0, "DeepSpeed-Chat: 5"), Role("taken")] | None = None
    """Clip each response's score to [-reward_clip, reward_clip]. Penalties and KL are subtracted afterwards."""
    reward_normalisation: Annotated[Literal["none", "running", "batch"], Role("taken")] = "none"
    """Shift and scale scores to mean 0 and variance 1. running: over all responses so far. batch: over each batch."""
    missing_eos_penalty: Annotated[float, Field(ge=0.0), Role("left out")] | None = None
    """Penalty subtracted from the score of a response without a stop token. It is subtracted after normalisation,
    scaling and clipping. Its unit is that of the scaled score."""
    truncated_responses: Annotated[Literal["keep", "penalise", "replace", "mask", "bootstrap"], Role("left out")] = (
        "keep"
    )
    """What becomes of responses cut off at response_length. keep: nothing, apart from missing_eos_penalty. penalise:
    subtract missing_eos_penalty from the score. replace: the score is -missing_eos_penalty. mask: no loss counts them.
    bootstrap: the score is the critic's value after the last token."""
    overlong_buffer: Annotated[int, Field(ge=1), Role("left out")] | None = None
    """Last tokens before response_length over which a length penalty rises linearly from 0 to 1 score unit (DAPO,
    arXiv:2503.14476)."""

    learning_rate: Annotated[
        float, Field(gt=0.0), Typical(1e-6, 5e-5, TUNING_GUIDE, is_rate=True), Role("replaced")
    ] = 3e-6
    """Peak learning rate of the policy's AdamW."""
    value_learning_rate: (
        Annotated[float, Field(gt=0.0), Typical(1e-6, 1e-4, TUNING_GUIDE, is_rate=True), Role("replaced")] | None
    ) = None
    """Peak learning rate of the critic's AdamW; None: `learning_rate`. With value_model=shared it is the value head's,
    and the shared trunk follows `learning_rate`."""
    lr_scheduler_type: Annotated[LearningRateSchedule, Role("left out")] = "linear"
    """Schedule of both learning rates over iterations, after the warm-up. The schedules are the schedules of
    transformers, to which no arguments can be passed."""
    warmup_ratio: Annotated[float, Field(ge=0.0, lt=1.0), Typical(0.0, 0.2, TUNING_GUIDE), Role("left out")] = 0.0
    """Share of the training over which the learning rate rises to its peak. The learning rate of the first iteration is
    never 0. For the policy's learning rate, only the iterations after critic_warmup_iterations count."""
    critic_warmup_iterations: Annotated[
        int, Field(ge=0), Typical(0, 100, "VC-PPO, arXiv:2503.01491: 50"), Role("left out")
    ] = 0
    """Iterations at the start that train only the critic. The policy and the KL controller do not change during the
    critic's warm-up."""
    optim: Annotated[Literal["adamw_torch_fused", "adamw_8bit"], Role("left out")] = "adamw_torch_fused"
    """adamw_torch_fused: torch's AdamW in one kernel. adamw_8bit: bitsandbytes' AdamW, whose moments take a quarter of
    float32's memory (arXiv:2110.02861)."""
    adam_beta1: Annotated[float, Field(ge=0.0, lt=1.0), Typical(0.8, 0.95, "arXiv:1412.6980: 0.9"), Role("taken")] = 0.9
    """AdamW's decay rate of the mean gradient."""
    adam_beta2: Annotated[
        float, Field(ge=0.0, lt=1.0), Typical(0.95, 0.999, "arXiv:1412.6980: 0.999"), Role("taken")
    ] = 0.999
    """AdamW's decay rate of the mean squared gradient."""
    adam_epsilon: Annotated[
        float, Field(gt=0.0), Typical(1e-8, 1e-5, "arXiv:1412.6980; baselines' PPO: 1e-5"), Role("taken")
    ] = 1e-8
    """AdamW's epsilon. It keeps the step finite where gradients vanish."""
    weight_decay: Annotated[float, Field(ge=0.0), Typical(0.0, 0.1, "arXiv:1711.05101"), Role("taken")] = 0.0
    """AdamW's decoupled weight decay. It applies to matrices, not to biases and norms."""
    max_grad_norm: Annotated[float, Field(gt=0.0), Typical(0.1, 10.0, TUNING_GUIDE), Role("taken")] = 1.0
    """Largest 2-norm of a gradient. The policy's and the critic's gradients are clipped separately at every optimiser
    step."""
    ema_decay: (
        Annotated[float, Field(gt=0.0, lt=1.0), Typical(0.9, 0.9999, "DeepSpeed-Chat: 0.992"), Role("left out")] | None
    ) = None
    """Decay of a moving average of the policy's weights; None: no average. Each optimiser step sets the average to
    ema_decay x average + (1 - ema_decay) x weights. The averaged weights are exported in the folder ema beside the
    policy."""

    total_episodes: Annotated[Count, Role("replaced", resume="rounds")] = 10_000
    """Responses to train on, rounded up to full batches."""
    per_device_train_batch_size: Annotated[Count, Role("replaced", resume="rounds")] = 8
    """Largest number of responses in one forward and backward pass on one device."""
    gradient_accumulation_steps: Annotated[Count, Role("replaced", resume="rounds")] = 1
    """Factor of the rollout batch: batch_size = per_device_train_batch_size x gradient_accumulation_steps x world
    size."""
    num_mini_batches: Annotated[Count, Role("replaced")] = 1
    """Minibatches of a rollout batch, each with one optimiser step per PPO epoch."""
    local_rollout_forward_batch_size: Annotated[Count | None, Role("replaced", resume="rounds", record="here")] = None
    """Largest number of responses that one device generates or scores at a time; None: as many as fit. The number need
    not divide the rollout batch. In 16 bits the reference policy takes the update's micro-batches."""
    responses_per_prompt: Annotated[int, Field(ge=1), Typical(1, 16, "RLOO, arXiv:2402.14740: 4"), Role("taken")] = 1
    """Responses sampled for each prompt of a batch. Each has sampling noise of its own. responses_per_prompt must
    divide the batch size."""
    drop_uniform_prompts: Annotated[NonNegative, Role("left out")] = 0
    """How often, at most, an iteration draws other prompts for those whose responses all score the same (dynamic
    sampling, DAPO, arXiv:2503.14476). 0 keeps all prompts."""
    max_tokens_per_micro_batch: Annotated[int, Field(ge=2), Role("none", record="here")] | None = None
    """Largest number of tokens in one forward and backward pass. Prompts and responses count. Padding counts where the
    architecture needs it. A beginning that prompts share counts once, and an eighth of it for each further row. A
    single response with more tokens is its own micro-batch. None: on a GPU what fits into free memory (docs/memory.md);
    on a CPU, or with `deterministic`, no limit."""

    response_length: Annotated[
        int, Field(ge=1), Typical(8, 2048, TUNING_GUIDE), Role("replaced", record="sampling", varies=False)
    ] = 53
    """Largest number of tokens in a response, including its stop token."""
    min_response_length: Annotated[NonNegative, Role("left out", record="sampling")] = 0
    """Smallest number of tokens in a response (with `environment`: in a turn). Its stop token counts. The sampler
    excludes stop tokens before token number min_response_length. The loss uses the distribution in which no stop tokens
    are excluded."""
    temperature: Annotated[float, Field(gt=0.0), Typical(0.5, 1.2, TUNING_GUIDE), Role("taken", record="sampling")] = (
        0.7
    )
    """Sampling temperature. Log-probabilities, KL and entropy of policy and reference are computed at this
    temperature."""
    top_k: Annotated[NonNegative, Role("left out", record="sampling")] = 0
    """Sample only from the top_k most probable tokens; 0: from all. The loss uses the distribution without the top-k
    filter."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0), Role("left out", record="sampling")] = 1.0
    """Sample only from the most probable tokens that together have probability top_p. 1 turns the top-p filter off. The
    loss uses the distribution without the top-p filter."""
    stop_token: Annotated[Literal["eos", "period", "none"], Role("left out", record="sampling")] = "eos"
    """What ends a response. eos: any end token of the generation config, the tokenizer or the chat template. period: a
    full stop. none: only response_length."""
    stop_token_id: Annotated[int, Field(ge=0), Role("left out", record="sampling")] | None = None
    """Token id that ends a response, in place of those of `stop_token`."""
    environment: Annotated[str | None, Role("left out", record="sampling")] = None
    """`module:name` of a function that answers the policy's turns (docs/conversations.md); None: a response is one
    turn. `reply(prompts, completions, turns, **columns)` returns for each episode a text, or None if the episode is
    over. With an environment, a response is a whole episode: `response_length` covers all turns of the policy and the
    environment's replies between the turns."""
    turn_length: Annotated[int, Field(ge=1), Role("left out", record="sampling")] | None = None
    """For `environment`: largest number of tokens in one turn of the policy. Its stop token counts."""
    overlong_prompts: Annotated[
        Literal["error", "drop", "truncate_left"], Role("none", record="here", varies=False)
    ] = "error"
    """What to do with prompts that leave no room for response_length tokens: stop with an error, drop them, or cut off
    their start."""

    value_model: Annotated[Literal["separate", "shared", "reward_init", "pretrained"], Role("taken")] = "separate"
    """Where the critic comes from. separate: a copy of the policy's backbone. reward_init: a copy of the reward model.
    pretrained: the critic at critic_path. shared: a value head on the policy's last hidden states. The pipeline
    critic_pretraining or `export_critic` stores a critic at critic_path. A shared trunk minimises one loss, policy loss
    + vf_coef x value loss. With separate and shared, the value head starts as the value head in the SFT model's
    directory (TRL's v_head) if there is one, else at 0."""
    value_freeze: Annotated[Literal["none", "attention"], Role("taken")] = "none"
    """Frozen weights of a critic with its own backbone. attention: the attention layers (SAO, arXiv:2607.07508).
    Embeddings, norms, MLPs and the value head then train. Frozen weights need no optimiser state."""
    use_peft: Annotated[bool, Role("left out")] = False
    """Train LoRA adapters (arXiv:2106.09685) on frozen weights that policy, reference and critic share. The value head
    trains in full. The setting `export` selects whether the merged model or only the adapter is exported."""
    lora_r: Annotated[
        int, Field(ge=1), Typical(4, 256, "arXiv:2106.09685, section 7.2: 1 to 64"), Role("left out", group="lora")
    ] = 16
    """Rank of the LoRA adapters."""
    lora_alpha: Annotated[
        int, Field(ge=1), Typical(4, 512, "arXiv:2106.09685; TRL: 32"), Role("left out", group="lora")
    ] = 32
    """Scale of the LoRA adapters: their output is multiplied by lora_alpha / lora_r."""
    lora_target_modules: Annotated[str, Role("left out", group="lora")] = "all-linear"
    """Comma-separated names of the linear layers that get a LoRA adapter. all-linear: all plain linear layers except
    the language-model head. all-linear+head: all plain linear layers and the language-model head. In a mixture of
    experts, only routers and experts that are plain linear layers get an adapter. A small model whose head is tied to
    its embeddings learns little without an adapter on the head (docs/results.md)."""
    load_in_4bit: Annotated[bool, Role("left out")] = False
    """QLoRA (arXiv:2305.14314), for use_peft: bitsandbytes stores the shared frozen weights in NF4. They take an eighth
    of float32's memory. The reward model keeps `dtype` (docs/memory.md)."""
    gradient_checkpointing: Annotated[bool, Role("left out")] = False
    """Recompute activations in the backward pass (arXiv:1604.06174). The activations are those of each layer of policy
    and critic. With gradient checkpointing the update takes about a third more time, and memory holds the activations
    of one layer instead of all layers."""
    compile: Annotated[bool, Role("left out", record="here")] = False
    """Compile the layers of policy, critic and reference with torch.compile. Compiling needs a compiler on the machine
    and takes time in the first iterations. Compiled layers give the same results except for rounding. compile is off by
    default, because no speed-up was measured on a CPU."""
    export_value_head: Annotated[bool, Role("none")] = False
    """Save the value head with the exported policy, under TRL's names. These are the names of
    AutoModelForCausalLMWithValueHead."""
    export_critic: Annotated[bool, Role("none", resume="free")] = False
    """Save the trained critic, from which later runs can start (docs/studies.md)."""
    export: Annotated[Literal["merged", "adapter"], Role("none", resume="free")] = "merged"
    """What is exported with use_peft. merged: a whole model. adapter: only the adapter. peft loads it onto the SFT
    model that the adapter's configuration names."""
    dtype: Annotated[Precision, Role("left out")] = "auto"
    """Precision of matrix products and of frozen models; what trains is never 16 bits wide. auto: bfloat16 on a GPU
    that supports it, else float32. A resumed run keeps the precision that it started with. In bfloat16 and float16
    forward passes run under autocast, and frozen models are stored in the 16-bit type, of a reference policy without
    LoRA only the linear layers; trainable weights, optimiser moments, log-probabilities and losses stay float32.
    float16 uses loss scaling and needs a GPU. float32 on CUDA: matrix products use TF32 without `deterministic`."""
    offload_reference_policy: Annotated[bool, Role("none", resume="free", record="here", group="offloading")] = False
    """Keep the reference policy in host memory while it computes nothing. Offloading saves one copy of the policy in
    `dtype` on the GPU, costs one transfer per iteration, and changes no result."""
    offload_reward_model: Annotated[bool, Role("none", resume="free", record="here", group="offloading")] = False
    """Keep the reward model in host memory while it scores nothing."""
    rollout_engine: Annotated[Literal["static", "hf", "vllm"], Role("left out")] = "static"
    """Which code generates responses. static: this project's decoding loop, without padding. hf: transformers'
    generate, slower, for architectures that need padding. vllm: vLLM, through TRL (docs/scaling.md). Sequences that
    have ended leave the batch of static. vLLM gets the policy's weights before each rollout and uses its own random
    numbers."""
    vllm_mode: Annotated[Literal["colocate", "server"], Role("none", resume="free", record="here", group="vllm")] = (
        "colocate"
    )
    """colocate: vLLM shares the GPU of each process. server: vLLM runs as a separate program (`vllm serve`)."""
    vllm_server_base_url: Annotated[str | None, Role("none", resume="free", record="here", group="vllm.served")] = None
    """Address of the vLLM server, such as http://localhost:8000."""
    vllm_server_timeout: Annotated[
        float, Field(gt=0.0), Role("none", resume="free", record="here", group="vllm.served")
    ] = 240.0
    """Seconds to wait for the vLLM server. They count at the start of the run and after a lost connection. Then the run
    stops."""
    vllm_gpu_memory_utilization: Annotated[
        float, Field(gt=0.0, le=1.0), Role("none", resume="free", record="here", group="vllm.colocated")
    ] = 0.3
    """Share of the GPU's memory that a colocated vLLM reserves. It holds the weights and the cache."""
    vllm_tensor_parallel_size: Annotated[Count, Role("none", resume="free", record="here", group="vllm.colocated")] = 1
    """GPUs, with one process each, that share one colocated vLLM."""
    vllm_enable_sleep_mode: Annotated[bool, Role("none", resume="free", record="here", group="vllm.colocated")] = False
    """Let a colocated vLLM release its GPU memory during the update."""
    vllm_max_model_length: (
        Annotated[int, Field(ge=2), Role("none", resume="free", record="here", group="vllm.colocated")] | None
    ) = None
    """Largest number of tokens in a prompt with its response in a colocated vLLM; None: the model's context."""
    device: Annotated[str, Role("none", resume="rounds", record="here")] = "auto"
    """A torch device such as cuda:1. auto: this process's GPU, or the CPU if there is no GPU."""
    deterministic: Annotated[bool, Role("none")] = False
    """Use only torch's deterministic kernels. They are slower. With deterministic=true, runs on CUDA with the same seed
    are equal bit for bit."""
    seed: Annotated[Seed, Role("taken", record="here")] = 42
    """Seed. All random numbers are a function of the seed, the iteration and the episode's index."""
    sft_model_path: Annotated[str | None, Role("none", record="here", group="model_path", varies=False)] = None
    """For PPOTrainer: directory or hub id of the policy to start from. The pipeline reads sft_model_path from
    globals.yml."""
    reward_model_path: Annotated[str | None, Role("none", record="here", group="model_path", varies=False)] = None
    """For PPOTrainer: directory or hub id of the reward model. The pipeline reads reward_model_path from
    globals.yml."""

    eval_interval: Annotated[Count, Role("none", resume="free")] = 10
    """Iterations between evaluations on the held-out prompts."""
    save_interval: Annotated[Count, Role("none", resume="free")] = 10
    """Iterations between checkpoints. The last iteration is always saved."""
    save_interval_minutes: Annotated[float, Field(gt=0.0), Role("none", resume="free")] | None = 10.0
    """Minutes after which an iteration is saved as well, whatever `save_interval` is; None: never by time. After a
    checkpoint that took s seconds the next waits at least 19 s seconds, so that checkpoints by time take at most 5 % of
    the time. The first iteration of a run is saved if it took longer than a minute."""
    save_total_limit: Annotated[Count, Role("none", resume="free")] = 2
    """Number of newest checkpoints to keep for each run. The best checkpoint is kept as well."""
    max_time: Annotated[float, Field(gt=0.0), Role("none", resume="free", record="here")] | None = None
    """Time limit of the process in hours; None: no limit. All stages count. At the time limit the run saves its current
    iteration and stops, as after a termination signal. Set max_time below the time limit of a cluster's queue."""
    report_to: Annotated[str, Role("none", resume="free", record="here")] = "none"
    """Comma-separated names of transformers integrations that also get the metrics, such as tensorboard,wandb."""
    callbacks: Annotated[str | None, Role("none", resume="free", record="here")] = None
    """Comma-separated `module:name` of transformers TrainerCallbacks (docs/trainer.md). Functions that return one will
    do, too. PPOTrainer also takes callback objects."""
    shutdown_grace_s: Annotated[float, Field(ge=0.0), Role("none", resume="free", record="here")] = 25.0
    """Seconds for finishing the update and saving after a signal. The signals are SIGTERM, SIGINT and SIGHUP. A run
    that takes longer stops without saving, and can resume from its last checkpoint. Ctrl-C at a terminal has no limit.
    Kubernetes kills a process 30 seconds after SIGTERM. With 0 the run stops without saving."""

    # No setting: `of_run` gives the number, and `replace` passes it on
    _processes: InitVar[InstanceOf[_Processes] | None] = None

    def __post_init__(self, _processes: _Processes | None) -> None:
        object.__setattr__(self, "_processes", _processes)
        if self.rollout_engine == "vllm" and self.importance_cap is None and not self.masks_tokens:
            # Set the default in the config itself, so that MLflow and checkpoints record the value in use
            object.__setattr__(self, "importance_cap", VLLM_IMPORTANCE_CAP)
        if problems := ppo_rules.problems(self):
            raise ConfigError("\n".join(problems))

    @property
    def masks_tokens(self) -> bool:
        """Whether the policy loss masks tokens by their ratio to the sampler's probability, and clips nothing."""
        return self.importance_low is not None

    @classmethod
    def of_run(cls, processes: int, settings: Mapping[str, Any]) -> PPOConfig:
        """Return the settings of a run on `processes` processes, which need not be this launch's number."""
        return cls(_processes=_Processes(processes), **settings)

    @property
    def world_size(self) -> int:
        """Number of processes that share one batch: of the run in `of_run`, else as the launcher set it."""
        return self._processes or process_count()  # type: ignore[attr-defined]  # set in `__post_init__`

    @property
    def micro_batch_size(self) -> int:
        """Responses in one forward pass over all devices (TRL's formula)."""
        return self.per_device_train_batch_size * self.world_size

    @property
    def local_batch_size(self) -> int:
        """Responses of one iteration on one device."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def batch_size(self) -> int:
        """Responses of one iteration over all devices."""
        return self.local_batch_size * self.world_size

    @property
    def mini_batch_size(self) -> int:
        """Responses of one optimiser step over all devices."""
        return self.batch_size // self.num_mini_batches

    @property
    def local_mini_batch_size(self) -> int:
        """Responses of one optimiser step on one device."""
        return self.local_batch_size // self.num_mini_batches

    @property
    def local_micro_batch_size(self) -> int:
        """Responses of one forward and backward pass on one device."""
        return min(self.per_device_train_batch_size, self.local_mini_batch_size)

    @property
    def num_total_batches(self) -> int:
        """Iterations of training: ceil(total_episodes / batch_size), every batch full."""
        return math.ceil(self.total_episodes / self.batch_size)

    @property
    def prompts_per_batch(self) -> int:
        """Different prompts of one iteration: batch_size / responses_per_prompt."""
        return self.batch_size // self.responses_per_prompt

    def samples(self, iteration: int) -> bool:
        """Return whether an iteration's responses are kept as samples: of the first, each fifth and the last one."""
        return iteration in (1, self.num_total_batches) or iteration % SAMPLE_INTERVAL == 0

    def not_default(self) -> dict[str, Any]:
        """Return the settings whose value differs from the default, in order of declaration."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}

    def advice(self, names: Container[str] | None = None, parameters: int | None = None) -> list[str]:
        """Return one line for each changed setting whose value is unusual or has little effect.

        If `names` is given, only the settings in `names` get advice. Learning rates are judged only if `parameters`,
        the policy's number of parameters, is given.
        """
        return advice.advice(self, names, parameters)


MODEL_PATHS = names_in_group(PPOConfig, "model_path")
"""Settings that only PPOTrainer reads; the pipeline reads the globals of the same names."""
VLLM_FIELDS = names_in_group(PPOConfig, "vllm")
OFFLOADING_FIELDS = names_in_group(PPOConfig, "offloading")
