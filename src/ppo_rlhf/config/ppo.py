"""PPOConfig: every hyperparameter of PPO in one flat, validated dataclass, with TRL's names."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field

from ppo_rlhf.config import advice, ppo_rules
from ppo_rlhf.config.advice import INSTRUCT_GPT, TUNING_GUIDE, Typical
from ppo_rlhf.config.settings_group import Seed, settings_group
from ppo_rlhf.config.trl_names import LIVES_ELSEWHERE
from ppo_rlhf.core.choices import KLEstimator, LossAggregation
from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.runtime.processes import process_count

MODEL_PATHS = ("sft_model_path", "reward_model_path")
"""Fields that only PPOTrainer uses: the pipeline has them as globals."""

LearningRateSchedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
]
Precision = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]

EIGHT_BIT = "adamw_8bit"
VLLM_IMPORTANCE_CAP = 3.0


@settings_group("ppo", lives_elsewhere=LIVES_ELSEWHERE)
class PPOConfig:
    """Hyperparameters of PPO on a language model (Schulman et al. 2017, arXiv:1707.06347; Ouyang et al. 2022).

    Episodes are responses. Token counts leave out prompts and padding. Raises `ConfigError` with one line a problem.
    Settings that TRL has keep TRL's name, and its default except for those in docs/algorithm.md, section 10.
    `Typical` gives the usual range of a setting.
    """

    num_ppo_epochs: Annotated[int, Field(ge=1), Typical(1, 10, TUNING_GUIDE)] = 4
    """Passes over each batch of rollouts; 2 to 4 are usual."""
    num_critic_epochs: Annotated[int, Field(ge=1), Typical(1, 20, TUNING_GUIDE)] | None = None
    """Passes of a critic with a backbone of its own; those after the policy's train only the critic. None takes
    `num_ppo_epochs`."""
    cliprange: Annotated[float, Field(gt=0.0), Typical(0.1, 0.3, "arXiv:1707.06347, table 3")] = 0.2
    """Policy clipping range epsilon: ratios outside [1 - epsilon, 1 + epsilon] get no gradient that widens them."""
    cliprange_high: Annotated[float, Field(gt=0.0), Typical(0.1, 0.5, "DAPO, arXiv:2503.14476")] | None = None
    """Upper clipping range of its own ("clip higher"; DAPO: 0.28); None takes `cliprange`."""
    cliprange_value: Annotated[float, Field(gt=0.0), Typical(0.1, 0.5, TUNING_GUIDE)] | None = 0.2
    """Value clipping range, in units of the return: new values are clipped to this distance from the rollout's. None:
    the plain squared error."""
    vf_coef: Annotated[float, Field(gt=0.0), Typical(0.05, 1.0, TUNING_GUIDE)] = 0.1
    """Factor of the value loss. It matters for a shared trunk; a separate critic's Adam step hardly depends on it."""
    gamma: Annotated[float, Field(ge=0.0, le=1.0), Typical(0.95, 1.0, INSTRUCT_GPT)] = 1.0
    """Discount per token."""
    lam: Annotated[float, Field(ge=0.0, le=1.0), Typical(0.9, 1.0, "arXiv:1506.02438")] = 0.95
    """Lambda of generalised advantage estimation: 0 is one-step TD, 1 is Monte Carlo."""
    lam_critic: Annotated[float, Field(ge=0.0, le=1.0), Typical(0.9, 1.0, "VAPO, arXiv:2504.05118")] | None = None
    """Lambda of only the critic's targets (VAPO: 1, unbiased returns); None takes `lam`."""
    lam_alpha: Annotated[float, Field(gt=0.0), Typical(0.01, 2.0, "VAPO: 0.05; SAO: 1.5")] | None = None
    """Lambda of only the policy's advantages, by each response's length: 1 - 1 / (lam_alpha x tokens), 0 for up to
    1 / lam_alpha tokens. `lam` is then only the critic's. None takes `lam`."""
    whiten_rewards: bool = False
    """Divide shaped rewards by their standard deviation over the batch; their mean stays (as in TRL)."""
    whiten_advantages: bool = True
    """Shift and scale advantages to mean 0 and variance 1 over the response tokens of the batch."""
    entropy_coef: Annotated[float, Field(ge=0.0), Typical(0.0, 0.02, "arXiv:1707.06347, table 5: 0.01")] = 0.0
    """Bonus per nat of the policy's entropy (exact, tempered), subtracted from the policy loss; 0 is off."""
    positive_coef: Annotated[float, Field(ge=0.0), Typical(0.0, 0.3, "VAPO, arXiv:2504.05118: 0.1")] = 0.0
    """Weight of the negative log-likelihood of positive examples, added to the policy loss; 0 is off."""
    positive_threshold: float | None = None
    """A response with at least this score, as the reward gives it, is a positive example; for `positive_coef`."""
    dual_clip: Annotated[float, Field(gt=1.0), Typical(1.5, 10.0, "arXiv:1912.09729: 3")] | None = None
    """Ceiling c on the ratio's effect where the advantage is negative: the loss is at most -A x c; None is off."""
    target_kl: Annotated[float, Field(gt=0.0), Typical(0.003, 0.2, "OpenAI Spinning Up: 0.01 to 0.05")] | None = None
    """Nats per token. An update ends before a step whose minibatch has approxkl above 1.5 x this; None is off."""
    loss_aggregation: LossAggregation = "token_mean"
    """From token losses to one number: the mean over tokens, or over responses of their token sums or means, or the
    sum over tokens by (responses x response_length)."""
    importance_cap: Annotated[float, Field(gt=0.0), Typical(1.0, 10.0, "verl: 2")] | None = None
    """Weigh each token by min(pi_old / pi_sampler, this), because the sampler rounds differently. None is off; with
    rollout_engine=vllm it is 3, TRL's vllm_importance_sampling_clip_max."""
    importance_low: Annotated[float, Field(ge=0.0, lt=1.0), Typical(0.2, 0.8, "arXiv:2607.07508: 0.7")] | None = None
    """With `importance_high`: SAO's policy loss in place of the clipped one. Each token is weighed by pi / pi_sampler,
    and those whose ratio is not above this and below `importance_high` teach the policy nothing. None: clipped."""
    importance_high: Annotated[float, Field(gt=1.0), Typical(1.2, 10.0, "arXiv:2607.07508: 6")] | None = None
    """The upper end for `importance_low` (SAO: 0.7 and 6 for reasoning, 0.2 and 4 for code)."""

    kl_coef: Annotated[float, Field(ge=0.0), Typical(0.01, 0.2, TUNING_GUIDE)] = 0.05
    """Beta, score units per nat: the price of the KL estimate; with the adaptive controller its first value."""
    kl_estimator: KLEstimator = "k1"
    """Per-token estimator of KL(policy || reference) (Schulman 2020, "Approximating KL Divergence"). k3+ has k3's value
    and k2's gradient. full is the exact KL over the vocabulary; in the loss the reference runs in each step."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Where beta x KL goes: subtracted from each token's reward, or added to the policy loss (all but k1)."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: beta follows `kl_target` (Ziegler et al. 2019, arXiv:1909.08593, section 2.2)."""
    kl_target: Annotated[float, Field(gt=0.0), Typical(1.0, 20.0, "arXiv:1909.08593: 6")] = 6.0
    """Target of the adaptive controller in nats: k1 summed over a response."""
    kl_horizon: Annotated[float, Field(gt=0.0), Typical(100, 100_000, "arXiv:1909.08593: 10000")] = 10_000.0
    """Episodes over which the adaptive controller changes beta by 20 % at most; a fifth of the run or less."""
    kl_hold_iterations: Annotated[int, Field(ge=0), Typical(0, 100, "docs/results.md: 10")] = 0
    """Iterations at the start in which the adaptive controller holds still (KL starts at 0, which would lower beta)."""
    kl_warning: Annotated[float, Field(gt=0.0), Typical(5, 50, TUNING_GUIDE)] = 15.0
    """Nats per response. A KL above it is warned of once, with the setting to change first."""
    kl_alarm: Annotated[float, Field(gt=0.0), Typical(5, 50, TUNING_GUIDE)] = 20.0
    """Nats per response. A KL above it is an alarm; checkpoints evaluated above it are never kept as the best."""
    kl_stop: Annotated[float, Field(gt=0.0), Typical(10, 200, TUNING_GUIDE)] | None = None
    """Nats per response. Training stops when the rollouts' KL exceeds it; None never stops training."""

    reward_scale: Annotated[float, Field(gt=0.0), Typical(0.01, 10.0, TUNING_GUIDE)] = 1.0
    """Factor of each response's score, after the normalisation and before the clip."""
    reward_clip: Annotated[float, Field(gt=0.0), Typical(0.5, 20.0, "DeepSpeed-Chat: 5")] | None = None
    """Clip each response's score to [-reward_clip, reward_clip], score units, before penalties and KL."""
    reward_normalisation: Literal["none", "running", "batch"] = "none"
    """Shift and scale scores to mean 0 and variance 1: over all responses so far (running), or over the batch."""
    missing_eos_penalty: Annotated[float, Field(ge=0.0)] | None = None
    """Score units after normalisation, scale and clip, subtracted from the score of a response that was cut off before
    a stop token (TRL)."""
    truncated_responses: Literal["keep", "penalise", "replace", "mask", "bootstrap"] = "keep"
    """Responses cut off at response_length. keep: like others, except for missing_eos_penalty if it is set.
    penalise: their score loses missing_eos_penalty. replace: their score is -missing_eos_penalty. mask: they count in
    no loss. bootstrap: the critic's value of the state after the last token replaces their score."""
    overlong_buffer: Annotated[int, Field(ge=1)] | None = None
    """Tokens before response_length over which a penalty rises from 0 to 1 score unit (DAPO, arXiv:2503.14476)."""

    learning_rate: Annotated[float, Field(gt=0.0), Typical(1e-6, 5e-5, TUNING_GUIDE, is_rate=True)] = 3e-6
    """Peak learning rate of the policy's AdamW."""
    value_learning_rate: Annotated[float, Field(gt=0.0), Typical(1e-6, 1e-4, TUNING_GUIDE, is_rate=True)] | None = None
    """Peak learning rate of the critic's AdamW; None takes the policy's."""
    lr_scheduler_type: LearningRateSchedule = "linear"
    """Shape of both learning rates over iterations, after the warm-up: transformers' schedules without arguments."""
    warmup_ratio: Annotated[float, Field(ge=0.0, lt=1.0), Typical(0.0, 0.2, TUNING_GUIDE)] = 0.0
    """Share of a model's iterations over which its learning rate rises to its peak. The first is never 0. The policy's
    iterations are those after critic_warmup_iterations."""
    critic_warmup_iterations: Annotated[int, Field(ge=0), Typical(0, 100, "VC-PPO, arXiv:2503.01491: 50")] = 0
    """Iterations at the start in which only the critic is trained; the policy and the KL controller stand still."""
    optim: Literal["adamw_torch_fused", "adamw_8bit"] = "adamw_torch_fused"
    """adamw_torch_fused: torch's AdamW in one kernel. adamw_8bit: bitsandbytes' AdamW, whose moments take a quarter of
    the memory (arXiv:2110.02861)."""
    adam_beta1: Annotated[float, Field(ge=0.0, lt=1.0), Typical(0.8, 0.95, "arXiv:1412.6980: 0.9")] = 0.9
    """AdamW's decay of the mean gradient."""
    adam_beta2: Annotated[float, Field(ge=0.0, lt=1.0), Typical(0.95, 0.999, "arXiv:1412.6980: 0.999")] = 0.999
    """AdamW's decay of the mean squared gradient."""
    adam_epsilon: Annotated[float, Field(gt=0.0), Typical(1e-8, 1e-5, "arXiv:1412.6980; baselines' PPO: 1e-5")] = 1e-8
    """AdamW's summand that keeps the step finite where gradients vanish."""
    weight_decay: Annotated[float, Field(ge=0.0), Typical(0.0, 0.1, "arXiv:1711.05101")] = 0.0
    """AdamW's decoupled weight decay of matrices; biases and norms have none."""
    max_grad_norm: Annotated[float, Field(gt=0.0), Typical(0.1, 10.0, TUNING_GUIDE)] = 1.0
    """Gradients of policy and critic are each clipped to this 2-norm at every optimiser step."""
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0), Typical(0.9, 0.9999, "DeepSpeed-Chat: 0.992")] | None = None
    """Keep a moving average of the policy's weights, this share of it kept at each optimiser step, and export it in the
    folder ema beside the policy. None is off."""

    total_episodes: Count = 10_000
    """Responses to train on; rounded up to full batches."""
    per_device_train_batch_size: Count = 8
    """Responses in one forward and backward pass on one device, at most."""
    gradient_accumulation_steps: Count = 1
    """Multiplies the rollout batch: batch_size = per_device_train_batch_size x this x world size."""
    num_mini_batches: Count = 1
    """Optimiser steps an epoch: the batch is cut into this many minibatches."""
    local_rollout_forward_batch_size: Count | None = None
    """Responses generated, and scored, at a time on one device, at most; None: as many as the free memory allows. It
    need not divide the batch."""
    responses_per_prompt: Annotated[int, Field(ge=1), Typical(1, 16, "RLOO, arXiv:2402.14740: 4")] = 1
    """Responses sampled to each prompt of a batch, each with noise of its own; it divides the batch."""
    drop_uniform_prompts: NonNegative = 0
    """Times that an iteration draws other prompts, at most, in place of those whose `responses_per_prompt` responses
    all score alike (DAPO, arXiv:2503.14476, dynamic sampling); 0 keeps all."""
    max_tokens_per_micro_batch: Annotated[int, Field(ge=2)] | None = None
    """Prompt and response tokens in one forward and backward pass, at most, with their padding where the architecture
    needs it; a single response that has more is a micro-batch of its own. None: on a GPU as many as its free memory
    holds when training starts (docs/memory.md), unless `deterministic` is set; on a CPU only
    per_device_train_batch_size sets the limit."""

    response_length: Annotated[int, Field(ge=1), Typical(8, 2048, TUNING_GUIDE)] = 53
    """Most tokens in a response, its stop token included."""
    min_response_length: NonNegative = 0
    """Fewest tokens in a response, with `environment` in a turn, its stop token included: before, no stop token is
    sampled. The loss uses the whole distribution."""
    temperature: Annotated[float, Field(gt=0.0), Typical(0.5, 1.2, TUNING_GUIDE)] = 0.7
    """Sampling temperature; log-probabilities, KL and entropy are those of the tempered policy and reference."""
    top_k: NonNegative = 0
    """Sample among the k most probable tokens; 0 is off. The loss uses the whole distribution."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample among the most probable tokens that hold this share; 1 is off. The loss uses the whole distribution."""
    stop_token: Literal["eos", "period", "none"] = "eos"
    """What ends a response. eos: any end id of the generation config, the tokenizer or the chat template."""
    stop_token_id: Annotated[int, Field(ge=0)] | None = None
    """An explicit token id that ends a response; it replaces `stop_token`."""
    environment: str | None = None
    """`module:name` of a function that answers the policy's turns: `reply(prompts, completions, turns, **columns)`
    returns a text for each episode, or None where it is over (docs/conversations.md). None: one turn. A response is
    then a whole episode: `response_length` holds all turns with the replies between them."""
    turn_length: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of one of the policy's turns, its stop token included; for `environment`."""
    overlong_prompts: Literal["error", "drop", "truncate_left"] = "error"
    """What to do with prompts that leave no room for response_length tokens in the model's context."""

    value_model: Literal["separate", "shared", "reward_init", "pretrained"] = "separate"
    """The critic. separate: a backbone of its own, copied from the policy. reward_init: the same, copied from the
    reward model with its score head. pretrained: the same, copied from the critic that the pipeline critic_pretraining
    or `export_critic` stored, which is at critic_path. shared: a value head on the policy's last hidden states, one
    model with one optimiser (loss = policy's + vf_coef x value's). A head on the policy's backbone starts as the value
    head in the SFT model's directory (TRL's v_head), or at 0."""
    value_freeze: Literal["none", "attention"] = "none"
    """Weights of a critic with a backbone of its own that stay as they start. attention: those of its attention layers,
    so that embeddings, norms, MLPs and the value head train (SAO, arXiv:2607.07508). They take no optimiser state."""
    use_peft: bool = False
    """Train LoRA adapters (arXiv:2106.09685) on frozen weights, which policy, reference and critic share; a value head
    trains fully. `export` says what is exported."""
    lora_r: Annotated[int, Field(ge=1), Typical(4, 256, "arXiv:2106.09685, section 7.2: 1 to 64")] = 16
    """Rank of the adapters."""
    lora_alpha: Annotated[int, Field(ge=1), Typical(4, 512, "arXiv:2106.09685; TRL: 32")] = 32
    """The adapter's output is scaled by lora_alpha / lora_r."""
    lora_target_modules: str = "all-linear"
    """Names of the linear layers that get an adapter, comma-separated; all-linear: all plain linear layers but the
    language-model head; all-linear+head: that too. Of a mixture's routers and experts only plain linear layers get
    one. A small model whose head is tied to its embeddings learns little without it (docs/results.md)."""
    load_in_4bit: bool = False
    """QLoRA (arXiv:2305.14314), with use_peft: the policy's frozen weights, which reference and critic share, are NF4
    by bitsandbytes; they take an eighth of float32's memory. The reward model keeps `dtype` (docs/memory.md)."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass of policy and critic (arXiv:1604.06174): about a third more time for
    the update, activations of one layer instead of all."""
    compile: bool = False
    """Compile the layers of policy, critic and reference policy (torch.compile), which needs a compiler on the machine
    and takes time in the first iterations. The numbers are the same except for rounding. Off, since on a CPU no gain
    was measured."""
    cuda_graphs: bool | None = None
    """Capture steps as CUDA graphs, whose kernels are launched all at once (docs/speed.md). The numbers are the same
    except for rounding. null: on CUDA, where a probe of the model passes. true: refused elsewhere. false: never."""
    export_value_head: bool = False
    """Save the value head among the exported policy's weights, as TRL's AutoModelForCausalLMWithValueHead has it."""
    export_critic: bool = False
    """Save the trained critic, too: a second model on the disk, which later runs start from (docs/studies.md)."""
    export: Literal["merged", "adapter"] = "merged"
    """What is exported with use_peft. merged: a whole model, the adapter in its weights. adapter: only the adapter,
    which peft loads on the SFT model that it names."""
    dtype: Precision = "auto"
    """Precision. auto: bfloat16 on a GPU with instructions for it, else float32; a resumed run keeps what it began
    with. bfloat16 and float16: forward passes under autocast, frozen models in that type, trainable weights, their
    moments, log-probabilities and losses in float32; float16 with loss scaling, on a GPU only. float32 on CUDA: matrix
    products read TF32 (10 bits of the mantissa), unless `deterministic` is set."""
    offload_reference_policy: bool = False
    """Keep the reference policy in the host's memory, and on the GPU only while it computes log-probabilities. This
    saves one copy of the policy in `dtype` on the GPU, costs a transfer each iteration, and changes no number."""
    offload_reward_model: bool = False
    """The same for the reward model."""
    rollout_engine: Literal["static", "hf", "vllm"] = "static"
    """static: decodes without padding and drops the sequences that have ended. hf: transformers' generate, which is
    slower, checks the first, and decodes the architectures that need padding. vllm: vLLM, through TRL
    (docs/scaling.md); it gets the policy's weights before each rollout, and draws by noise of its own."""
    vllm_mode: Literal["colocate", "server"] = "colocate"
    """colocate: vLLM shares the GPU of each process. server: a program of its own, `vllm serve`."""
    vllm_server_base_url: str | None = None
    """Address of the server, such as http://localhost:8000."""
    vllm_server_timeout: Annotated[float, Field(gt=0.0)] = 240.0
    """Seconds to wait for the server, at the start and when it is gone in between; then the run stops."""
    vllm_gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.3
    """Share of the GPU's memory that a colocated vLLM takes, for its own weights and its cache."""
    vllm_tensor_parallel_size: Count = 1
    """GPUs, and processes, that share one colocated vLLM."""
    vllm_enable_sleep_mode: bool = False
    """Let a colocated vLLM give its memory back during the update."""
    vllm_max_model_length: Annotated[int, Field(ge=2)] | None = None
    """Most tokens of a prompt with its response in a colocated vLLM; None takes the model's context."""
    device: str = "auto"
    """auto takes this process's GPU, or the CPU if there is none; or a torch device such as cuda:1."""
    deterministic: bool = False
    """Use only torch's deterministic kernels (slower): on CUDA, runs with one seed are then equal bit for bit."""
    seed: Seed = 42
    """Everything random is a function of it, the iteration and the episode's index."""
    sft_model_path: str | None = None
    """Directory or hub id of the policy to start from, for PPOTrainer; the pipeline has it in globals.yml."""
    reward_model_path: str | None = None
    """Directory or hub id of the reward model, for PPOTrainer; the pipeline has it in globals.yml."""

    eval_interval: Count = 10
    """Iterations between evaluations on the held-out prompts."""
    save_interval: Count = 10
    """Iterations between checkpoints; the last iteration is always saved."""
    save_total_limit: Count = 2
    """Newest checkpoints kept of one run; the best is kept beside them."""
    max_time: Annotated[float, Field(gt=0.0)] | None = None
    """Hours from the start of the process, all stages counted, after which the run saves its iteration and stops, as
    after a signal; below the limit of a cluster's queue. None: no limit."""
    report_to: str = "none"
    """Where metrics go beside MLflow, comma-separated: transformers' integrations, such as tensorboard,wandb."""
    callbacks: str | None = None
    """`module:name` of a transformers TrainerCallback, or of a function that returns one; several are comma-separated
    (docs/trainer.md). PPOTrainer takes objects, too."""
    sample_interval: Count = 5
    """Iterations between samples: a table in MLflow, some responses token by token, and all of the iteration's
    completions in a file beside the checkpoints. The first and the last iteration are sampled, too."""
    shutdown_grace_s: Annotated[float, Field(ge=0.0)] = 25.0
    """Seconds that a run has to finish and save its iteration after SIGTERM, SIGINT or SIGHUP. Then it stops, and the
    last checkpoint stands (Kubernetes kills after 30 seconds); 0 stops at once."""
    max_skipped_steps: Count = 5
    """Optimiser steps in a row that may be skipped for a non-finite gradient before the run stops."""

    def __post_init__(self) -> None:
        if self.rollout_engine == "vllm" and self.importance_cap is None and not self.masks_tokens:
            object.__setattr__(self, "importance_cap", VLLM_IMPORTANCE_CAP)  # so that it is logged and saved
        if problems := ppo_rules.problems(self):
            raise ConfigError("\n".join(problems))

    @property
    def masks_tokens(self) -> bool:
        """Whether the policy loss masks tokens by their ratio to the sampler's probability, and clips nothing."""
        return self.importance_low is not None

    @property
    def world_size(self) -> int:
        """Number of processes that share one batch, from the launcher."""
        return process_count()

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

    @property
    def held_iterations(self) -> int:
        """Iterations at the start in which the KL controller holds still."""
        return self.critic_warmup_iterations + self.kl_hold_iterations

    def samples(self, iteration: int) -> bool:
        """Return whether an iteration's responses are kept as samples."""
        return iteration in (1, self.num_total_batches) or iteration % self.sample_interval == 0

    def not_default(self) -> dict[str, Any]:
        """Return the settings whose value differs from the default, in order of declaration."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}

    def advice(self, names: Container[str] | None = None, parameters: int | None = None) -> list[str]:
        """Return a line for each changed setting, among `names` if given, that is unusual or of little effect.

        Learning rates are judged only if the number of the policy's `parameters` is given.
        """
        return advice.advice(self, names, parameters)


def on_processes(count: int) -> type[PPOConfig]:
    """Return the class of a run's settings on so many processes, whatever launched this one: its batch counts them."""
    return PPOConfig if count == process_count() else type("PPOConfig", (PPOConfig,), {"world_size": count})
