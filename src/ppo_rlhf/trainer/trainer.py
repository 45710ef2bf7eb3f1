"""PPOTrainer: PPO without Kedro and MLflow, by the same functions that the pipeline's nodes call.

`train()` runs the whole PPO loop. The three calls `generate`, `step` and `log_stats` run one iteration of PPO with the
caller's own scores, as in TRL's first PPOTrainer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from ppo_rlhf.advice import in_words
from ppo_rlhf.checkpoints import hub
from ppo_rlhf.checkpoints.evaluations import prune_run
from ppo_rlhf.checkpoints.exports import exported_critic, exported_policy
from ppo_rlhf.checkpoints.files import checkpoint_name
from ppo_rlhf.checkpoints.model_card import may_write_card, render_card, render_critic_card
from ppo_rlhf.checkpoints.restore import MENDABLE, printed_date, restore
from ppo_rlhf.checkpoints.store import check_best, check_kept_best, load_best, write_checkpoint
from ppo_rlhf.config import PPOConfig
from ppo_rlhf.core.errors import ConfigError, DataError, TrainingError
from ppo_rlhf.core.fingerprints import fingerprint
from ppo_rlhf.data.prompt_dataset import PromptDataset
from ppo_rlhf.evaluation.policy import OnExploitation
from ppo_rlhf.models.directories import CONFIG
from ppo_rlhf.models.origins import CRITIC
from ppo_rlhf.ppo import loop
from ppo_rlhf.ppo.callbacks import Callbacks, checked, own_callbacks, reporting_callbacks
from ppo_rlhf.ppo.checkpointer import Checkpointer
from ppo_rlhf.ppo.precision import device_of, with_dtype
from ppo_rlhf.ppo.rollouts import measure
from ppo_rlhf.ppo.run_setup import build_state, check_device
from ppo_rlhf.rewards.scorers import check_chats, check_scorable
from ppo_rlhf.rewards.shaping import check_normalisation
from ppo_rlhf.runtime.launcher import ending_together
from ppo_rlhf.runtime.log_lines import said
from ppo_rlhf.runtime.own_process import ending_children
from ppo_rlhf.runtime.processes import check_alike, check_launch, from_main, is_main_process, on_main, refuse_sharding
from ppo_rlhf.runtime.progress_display import readings, say
from ppo_rlhf.trainer import inputs as trainer_inputs
from ppo_rlhf.trainer.bookkeeping import Bookkeeper, warn, watched
from ppo_rlhf.trainer.evaluation import Evaluated, HeldOut, is_reward, take_held_out
from ppo_rlhf.trainer.output_folder import checkpoint_to_resume, claim, locked, say_where
from ppo_rlhf.trainer.query_sampler import QuerySampler
from ppo_rlhf.trainer.start_models import (
    ModelSource,
    check_model_paths,
    context_of_all,
    model_origin,
    take_critic,
    take_policies,
)
from ppo_rlhf.trainer.trl_scripts import answers_trl

log = logging.getLogger(__name__)

CRITIC_FOLDER = "critic"


@answers_trl
class PPOTrainer:
    """Trains a policy by PPO.

    Under torchrun or `accelerate launch` every process must make the same calls with the same arguments; different
    arguments raise `DataError`. Only the main process logs and writes files.

    Attributes:
        config: Hyperparameters; `dtype=auto` is replaced by the precision that `auto` selects.
        state: Everything that changes while PPO trains.
        reference_policy: The frozen policy from which the KL divergence is measured.
        held_out: The evaluation on `evaluation_prompts`; None without evaluation prompts.
    """

    def __init__(
        self,
        config: PPOConfig,
        policy: ModelSource | None = None,
        reference_policy: ModelSource | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        reward: Any = None,
        prompts: Any = None,
        value_model: ModelSource | None = None,
        evaluation_prompts: Any = None,
        judge: Callable[..., list[float]] | str | None = None,
        on_exploitation: OnExploitation = "off",
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
    ) -> None:
        """Prepare the models and check everything that can be checked before training.

        Args:
            config: Hyperparameters.
            policy: A causal language model, its directory or hub id; None takes `config.sft_model_path`. A model object
                is trained in place; with `use_peft` the object's own weights do not change.
            reference_policy: A model, directory or hub id as for `policy`; None takes a frozen copy of the policy.
            tokenizer: The policy's tokenizer; optional if the policy is a path.
            reward: For `train()`: see `trainer.inputs.take_reward`; None takes `config.reward_model_path`.
            prompts: For `train()`: see `trainer.inputs.take_prompts`.
            value_model: What the critic is initialised from: a language model or a sequence classifier with one label,
                which is copied; or the directory of a stored critic. With None `config.value_model` decides.
            evaluation_prompts: Held-out prompts, of the kinds that `prompts` takes, for `evaluate()` and for the
                evaluation every `eval_interval` iterations.
            judge: Decides which response to an evaluation prompt wins: see `trainer.evaluation.take_held_out`; with
                None the reward decides.
            on_exploitation: What `train()` does if the policy exploits its reward: `off`, `warn` or `stop`, as
                `evaluation.on_exploitation` in docs/configuration.md. After `stop` the trainer has the policy and the
                critic of the best evaluation.
            callbacks: transformers' TrainerCallbacks, or their classes, for `train()` (docs/trainer.md), beside
                `config.callbacks`.

        Raises:
            ConfigError, DataError, ModelError, RewardError: An argument of `PPOTrainer` cannot be used.
        """
        check_launch()
        said.clear()
        refuse_sharding("PPOTrainer")
        if not isinstance(config, PPOConfig):
            raise ConfigError(
                f"PPOTrainer: config is a {type(config).__module__}.{type(config).__name__}, not a PPOConfig of "
                "ppo_rlhf; ppo_rlhf.compat.from_trl(…).ppo_config() converts TRL's"
            )
        config = with_dtype(config)
        self.config = config
        checked_callbacks = [checked(callback, "PPOTrainer: callbacks") for callback in callbacks or ()]
        self._callbacks, self._reporting = [*checked_callbacks, *own_callbacks(config)], reporting_callbacks(config)
        check_device(config, device_of(config))
        check_model_paths(
            config.sft_model_path if policy is None else policy,
            reference_policy,
            config.reward_model_path if reward is None else reward,
            value_model,
        )
        start, self.reference_policy = take_policies(config, policy, reference_policy, tokenizer, device_of(config))
        self._scorer = trainer_inputs.take_reward(reward, start, config)
        if self._scorer is not None:
            check_normalisation(self._scorer.normalise, config)
        reward_model = None if self._scorer is None else self._scorer.model
        critic = take_critic(config, start, reward_model, value_model)
        limit = context_of_all(start.model, self.reference_policy, critic)
        self._prompts, held_out = (
            None if table is None else trainer_inputs.take_prompts(table, name, start, config, *limit)
            for name, table in (("prompts", prompts), ("evaluation_prompts", evaluation_prompts))
        )
        judge_function = take_held_out(held_out, judge, self._scorer, self._prompts, on_exploitation)
        tables = [table for table in (self._prompts, held_out) if table is not None]
        if self._scorer is not None:
            for table in tables:
                if self._scorer is not reward:
                    trainer_inputs.try_functions(self._scorer, table, config)
                check_chats(self._scorer, table)
        models = {"policy": start.model, "reference_policy": self.reference_policy, "value_model": critic}
        data = trainer_inputs.origin_of(self._scorer) | {
            name: trainer_inputs.origin_of_prompts(table, start.tokenizer)
            for name, table in (("prompts", self._prompts), ("evaluation_prompts", held_out))
        }
        if on_exploitation != "off":
            data["judge_and_reward"] = [judge_function, data.get(MENDABLE)]  # whose scores are compared over the run
        origin = {name: fingerprint(value) for name, value in {**models, **data}.items() if value is not None}
        tokens = None if self._prompts is None else self._prompts.prompt_ids[:]
        check_alike("PPOTrainer", config=config, prompt_tokens=tokens, **origin)
        self.state = build_state(start.model, critic, start.tokenizer, config)
        self.state.origin = origin | ({} if self._prompts is None else printed_date(self._prompts, start.tokenizer))
        critic_origins = () if value_model is None else (model_origin(value_model, CRITIC),)
        rewards = () if self._scorer is None else self._scorer.made_from
        self.state.made_from = (*start.made_from, *rewards, *critic_origins)
        # The folders that hold this run, each with the checkpoint at which the run goes on there; None: it is in step
        self._folders: dict[Path, Path | None] = {}
        self.held_out: HeldOut | None = None
        if held_out is not None and self._scorer is not None:
            by_reward = judge_function is None or is_reward(judge_function, reward)
            self.held_out = HeldOut(
                self.state.learner,
                self.state.sampler,
                self.state.shaping,
                self.state.progress,
                self.reference_policy,
                held_out,
                self._scorer,
                judge_function,
                by_reward=by_reward,
                on_exploitation=on_exploitation,
            )
        self._sampler = QuerySampler(self.state.sampler, self.state.progress, limit)
        for table in tables:
            if self._scorer is not None:
                check_scorable(
                    self._scorer, table.lengths, config.response_length, self.state.sampler.settings.stop_token_ids
                )
        warn(self.state.learner, evaluates=self.held_out is not None)

    @property
    def policy(self) -> PreTrainedModel:
        """The policy that trains; with `use_peft` it includes the adapter."""
        return self.state.learner.policy

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer."""
        return self.state.sampler.tokenizer

    @property
    def history(self) -> list[dict[str, float]]:
        """The metrics of each iteration so far (docs/metrics.md), with `iteration`."""
        return self.state.progress.history

    def generate(
        self,
        queries: Tensor | Sequence[Tensor],
        return_prompt: bool = True,
        *,
        attention_mask: Tensor | None = None,
        batch_size: int | None = None,
        length_sampler: Callable[[], int] | None = None,
        **generation: Any,
    ) -> list[Tensor] | Tensor:
        """Sample a response to each query from the current policy.

        The sampling noise is a function of seed, iteration and row. Rows are counted over all calls of `generate` since
        the last `step`. Row i gets the same noise as row i of the pipeline's rollouts.

        Args:
            queries: 1-D tensors of token ids; or one tensor, `[N, P]` for N queries, `[P]` for one.
            return_prompt: Whether each returned response starts with its query.
            attention_mask: 0 where a query has padding. Without an attention mask, pad tokens at both ends count as
                padding.
            batch_size: Queries decoded at a time; None takes `local_rollout_forward_batch_size`.
            length_sampler: A function that is called once and returns `max_new_tokens`.
            **generation: num_return_sequences, max_new_tokens, min_new_tokens, min_length (0 or less), temperature,
                top_k, top_p, do_sample, pad_token_id, eos_token_id as in transformers, with PPOConfig's values as
                defaults. The responses to one query are next to each other.

        Returns:
            1-D tensors without padding; for a single query `[P]` one tensor `[1, n]`, as in TRL.

        Raises:
            ConfigError: An argument is unknown or cannot be used.
            DataError: A query is not a row of token ids, begins or ends with tokens that may be padding or text, or
                leaves no room for a response.
        """
        if length_sampler is not None:
            generation = {"max_new_tokens": from_main(length_sampler()), **generation}
        check_alike("generate", queries=queries, attention_mask=attention_mask, arguments=[batch_size, generation])
        return self._sampler.generate(queries, attention_mask, return_prompt, batch_size, generation)

    def step(self, queries: Sequence[Tensor], responses: Sequence[Tensor], scores: Any) -> dict[str, float]:
        """Train on one batch of scored responses, one iteration of PPO, and return its metrics (docs/metrics.md).

        A response ends with its first stop token; tokens after the stop token are dropped. The old log-probabilities
        are computed with the current policy, also for responses that `generate` did not sample.

        Args:
            queries: `batch_size` queries as token ids; pad tokens at both ends count as padding.
            responses: One response per query, without the query. Pad tokens at both ends count as padding, unless all
                responses come from `generate`.
            scores: One finite number per response: floats, 0-d tensors, or a tensor `[batch_size]`.

        Raises:
            ConfigError: The run has trained on `total_episodes` responses, or a setting or a callback works only in
                `train`.
            DataError, RewardError: The queries, the responses or the scores cannot be used.
            TrainingError: torch's gradients are off, or the previous PPO update was interrupted.
        """
        config, sampler = self.config, self._sampler
        trainer_inputs.check_one_turn(config)
        if config.drop_uniform_prompts:
            raise ConfigError("step: ppo.drop_uniform_prompts replaces prompts, which only train() can do; set it to 0")
        if self._callbacks or self._reporting:
            raise ConfigError("step: callbacks and ppo.report_to are for train(); step() returns the metrics to report")
        if self.held_out is not None and self.held_out.on_exploitation != "off":
            raise ConfigError("step: on_exploitation is for train(), which evaluates while it trains; leave it out")
        self._check_ready("step")
        check_alike("step", queries=queries, responses=responses, scores=scores)
        if self.state.progress.finished:
            raise ConfigError(
                f"step: ppo.total_episodes={config.total_episodes} are done ({config.num_total_batches} iterations, as "
                "the learning rate's schedule has); raise ppo.total_episodes for a longer run"
            )
        if not len(queries) == len(responses) == config.batch_size:
            raise DataError(
                f"step: got {len(queries)} queries and {len(responses)} responses; batch_size is "
                f"{config.batch_size} (ppo.per_device_train_batch_size {config.per_device_train_batch_size} x "
                f"ppo.gradient_accumulation_steps {config.gradient_accumulation_steps} x {config.world_size} processes)"
            )
        models = self.policy, self.tokenizer, config
        prompt_ids = trainer_inputs.without_padding(queries, "query", *models)
        response_ids = trainer_inputs.token_lists(responses, "response", sampler.vocabulary)
        if not sampler.answers.issuperset(map(tuple, response_ids)):
            response_ids = trainer_inputs.without_padding(responses, "response", *models)
            if all(row[: len(query)] == query != row for query, row in zip(prompt_ids, response_ids, strict=True)):
                raise DataError("step: each response begins with its query; give generate(return_prompt=False)")
        scorer = trainer_inputs.given_scores(scores, config.batch_size)
        cut_responses = trainer_inputs.take_responses(response_ids, self.state.sampler.settings)
        trainer_inputs.check_query_length(prompt_ids, cut_responses.lengths.tolist(), *sampler.limit)
        if not sampler.rows:
            # Restart the iteration's clock here, because the script has not called `generate`, which restarts the clock
            self.state.progress.clock.restart()
        prompts = PromptDataset(prompt_ids, self.tokenizer.batch_decode(prompt_ids), {})
        state, reference = self.state, self.reference_policy
        rollouts = measure(state.learner, state.sampler, state.progress, reference, prompts, cut_responses)
        metrics = loop.learn(state, reference, rollouts, scorer)
        self._sampler.start_iteration()
        return metrics

    def log_stats(self, stats: Mapping[str, float], batch: Mapping[str, Sequence[Any]], rewards: Any) -> None:
        """Log one line about an iteration with the first query and its response; print the line without logging set up.

        `stats` are the metrics that `step` returned, and `rewards` the scores. `batch` has the texts under `query` and
        `response`; other entries are ignored.
        """
        texts = [batch.get(name, ()) for name in ("query", "response")]
        pair = "; {!r} -> {!r}".format(*(column[0] for column in texts)) if all(map(len, texts)) else ""
        mean = float(torch.tensor([float(score) for score in rewards], dtype=torch.float64).mean())
        heading = f"Iteration {self.state.progress.iteration}/{self.state.progress.total_iterations}"
        say(", ".join([heading, *readings(stats), f"mean reward {mean:.4g}{pair}"]))

    def train(
        self, resume_from_checkpoint: str | Path | bool | None = None, output_dir: str | Path | None = None
    ) -> list[dict[str, float]]:
        """Run all remaining iterations with `reward` and `prompts`, and return the metrics of every iteration.

        Args:
            resume_from_checkpoint: Directory of the checkpoint to resume from; True takes the newest whole checkpoint
                in `output_dir`.
            output_dir: Directory for checkpoints, one every `save_interval` iterations, after `save_interval_minutes`
                and at the end; the newest `save_total_limit` are kept. If an exception ends training, the last whole
                iteration is saved. None saves no checkpoint.

        Raises:
            ConfigError: Reward or prompts are missing, `output_dir` holds another run, or the checkpoint's run had
                other settings, models, rewards or prompts.
            CheckpointError: There is no whole checkpoint, or another process trains in `output_dir`.
            TrainingError: As `step`; or a callback raised an exception.
            RunInterruptedError: The run reached `max_time`; the last iteration is saved.
        """
        missing = [name for name, value in {"reward": self._scorer, "prompts": self._prompts}.items() if value is None]
        if self._scorer is None or self._prompts is None:
            raise ConfigError(f"train: PPOTrainer was given no {' and no '.join(missing)}")
        check_alike("train", resume_from_checkpoint=resume_from_checkpoint, output_dir=output_dir)
        directory = None if output_dir is None else Path(output_dir).expanduser()
        if directory is None and self.config.max_time is not None:
            raise ConfigError("train: ppo.max_time stops the run with a checkpoint; give output_dir")
        stops = self.held_out is not None and self.held_out.on_exploitation == "stop"
        if directory is None and stops:
            raise ConfigError("train: on_exploitation=stop goes back to a checkpoint; give output_dir")
        with nullcontext() if directory is None else locked(directory):
            if resume_from_checkpoint:
                self.load_checkpoint(checkpoint_to_resume(resume_from_checkpoint, directory))
            self._check_ready("train")
            if directory is not None:
                self._claim(directory)
                if stops and self.state.progress.iteration:
                    check_kept_best(self.state.progress)
            state, can_evaluate = self.state, self.held_out is not None
            checkpointer = Checkpointer(
                state.progress, directory, None if directory is None else partial(self._save, directory)
            )
            callbacks = Callbacks(
                state.learner,
                state.sampler,
                state.progress,
                self._callbacks,
                self._reporting,
                directory,
                checkpointer,
                can_evaluate=can_evaluate,
            )
            with closing(callbacks), watched(state, directory) as show, ending_together(), ending_children():
                books = Bookkeeper(state, callbacks, checkpointer, show, held_out=self.held_out, directory=directory)
                with books.heeding_ctrl_c():
                    books.begin(is_resumed=bool(resume_from_checkpoint) and state.progress.iteration > 0)
                    if directory is not None and stops:
                        check_best(directory, state.progress)
                    models_and_data = state, self.reference_policy, self._prompts, self._scorer
                    loop.train(*models_and_data, books.after_iteration, books.before_update, books.iteration)
                if directory is not None and stops:
                    load_best(directory, state.learner, state.progress)
                callbacks.end()
        if directory is not None:
            say_where(directory, self.state.progress)
        curves = self.history if self.held_out is None else self.held_out.with_evaluations(self.history)
        for line in in_words(self.config, curves, most=None):
            say(line)
        return self.history

    def evaluate(self) -> Evaluated:
        """Compare the current policy with the reference policy by their responses to `evaluation_prompts`.

        `metrics, completions = trainer.evaluate()`. The current policy and the reference policy sample with the same
        noise. `train` evaluates every `eval_interval` iterations and at the end; `held_out.rows` keeps the metrics of
        each evaluated iteration.

        Raises:
            ConfigError: There are no `evaluation_prompts`.
            RewardError: The reward or the judge failed.
        """
        if self.held_out is None:
            raise ConfigError("evaluate: PPOTrainer was given no evaluation_prompts")
        self.state.progress.check_whole()
        return self.held_out.evaluate()

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write the policy with its tokenizer as a model directory that transformers loads, like the pipeline.

        An adapter is merged, unless `config.export` is `adapter`. With `config.ema_decay` the moving average of the
        weights is written to the folder `ema`, and with `config.export_critic` the critic to the folder `critic`. A
        model card is written to README.md, unless the folder has a different README.

        Raises:
            ModelError: As `TrainedModel.save`.
        """
        folder = Path(save_directory).expanduser()
        self._export(folder)
        say(f"The policy is saved in {folder}")

    def _export(self, folder: Path) -> None:
        rewards = [] if self._scorer is None else [f"`{name}`" for name in self._scorer.names]
        state = self.state
        parts = state.learner, state.sampler
        card = None
        if may_write_card(folder):
            card = render_card(*parts, state.progress, rewards, made_from=state.made_from)
        on_main(lambda: replace(exported_policy(*parts), card=card, made_from=state.made_from).save(folder))
        if self.config.export_critic:
            on_main(partial(self._export_critic, folder / CRITIC_FOLDER, rewards))
        elif (folder / CRITIC_FOLDER / CONFIG).is_file():
            log.warning(
                "%s has the critic of an earlier policy; the critic of this policy is not saved.",
                folder / CRITIC_FOLDER,
            )

    def _export_critic(self, folder: Path, rewards: list[str]) -> None:
        state = self.state
        critic = exported_critic(state.learner, state.sampler.tokenizer)
        parts = state.learner, state.progress, rewards, critic.model, state.made_from
        card = render_critic_card(*parts, prompts=None, run_id=None) if may_write_card(folder) else None
        replace(critic, card=card, made_from=state.made_from).save(folder)

    def push_to_hub(self, repo_id: str, *, commit_message: str = "Policy trained by PPO", **options: Any) -> str:
        """Upload the policy, as `save_pretrained` writes it, to the Hugging Face hub, and return the commit's URL.

        `options` are the options of `checkpoints.hub.push`, such as `private` (True for a new repository), `license`
        and `token`. Errors are those of `checkpoints.hub.push`.
        """
        on_main(partial(hub.check_push, repo_id, options.get("token")))
        with TemporaryDirectory() as directory:
            self._export(Path(directory))
            return on_main(partial(hub.push, Path(directory), repo_id, commit_message, **options))

    def save_checkpoint(self, output_dir: str | Path) -> Path:
        """Write the whole training state to `<output_dir>/iteration_NNNNNN`, and return the path of this directory.

        Raises:
            CheckpointError: The checkpoint cannot be written.
            ConfigError: `output_dir` holds another run.
        """
        folder = Path(output_dir).expanduser()
        self._claim(folder)
        on_main(partial(write_checkpoint, folder, self.state))
        return folder / checkpoint_name(self.state.progress.iteration)

    def load_checkpoint(self, directory: str | Path) -> None:
        """Replace the training state by the state of a checkpoint.

        Raises:
            CheckpointError: The checkpoint is damaged, or was made for other models.
            ConfigError: The checkpoint's run had other settings, models, rewards or prompts.
        """
        checkpoint = Path(directory).expanduser()
        restore(self.state, checkpoint)
        folder = checkpoint.resolve().parent
        self._folders = {folder: checkpoint}
        if self.held_out is not None:
            self.held_out.resume(folder, self.state.progress.iteration)
        self._sampler.start_iteration()

    def _claim(self, folder: Path) -> None:
        on_main(partial(claim, folder, self._folders))
        self._folders[folder.resolve()] = None

    def _save(self, directory: Path) -> None:
        self.save_checkpoint(directory)
        if is_main_process():
            prune_run(directory, self.config, self.state.progress.best_evaluation)

    def _check_ready(self, call: str) -> None:
        if not torch.is_grad_enabled():
            raise TrainingError(f"{call}: gradients are off (torch.no_grad or inference_mode); call it outside")
        self.state.progress.check_whole()
