"""Batches in common shapes: how few shapes there are, what the fillers are, and that no result depends on fillers."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from ppo_rlhf.core.randomness import minibatch_partition
from ppo_rlhf.models.critic import Critic
from ppo_rlhf.models.forward import packs
from ppo_rlhf.models.transfers import tensors_of
from ppo_rlhf.ppo import rollouts as ppo_rollouts
from ppo_rlhf.ppo import update
from ppo_rlhf.ppo.forward_passes import CriticForward, PolicyForward, PolicyOutput
from ppo_rlhf.ppo.sequences import SequenceBatch, in_common_shapes, make_batch
from tests.ppo_runs import MEASURED, build_model, learn_from

from .support import ONE_STEP, assert_same_gradients, freeze, moved_on, with_settings_of

NAN, COLUMNS, FILLER = float("nan"), 24, 22
"""FILLER is a token that no sequence has."""


def drawn(seed: int, rows: int, prompts: int = 12, columns: int = COLUMNS) -> SequenceBatch:
    """A batch of random tokens, of prompts of 1 to so many tokens and responses of 1 to so many columns."""
    numbers = np.random.default_rng(seed)
    prompt_ids = [numbers.integers(3, FILLER, size=numbers.integers(1, prompts + 1)).tolist() for _ in range(rows)]
    ids = torch.from_numpy(numbers.integers(3, FILLER, size=(rows, columns)))
    return make_batch(prompt_ids, ids, torch.from_numpy(numbers.integers(1, columns + 1, size=rows)), 0)


def shapes(batch: SequenceBatch) -> tuple:
    return batch.shape, batch.rows.layout.shape, *(tuple(tensor.shape) for tensor in tensors_of(batch))


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 32, 45])
@pytest.mark.parametrize(("prompts", "columns"), [(1, 1), (1, 40), (200, 3), (12, 24), (60, 128)], ids=str)
def test_a_batch_keeps_its_numbers_and_each_filler_has_a_place_of_its_own(rows, prompts, columns):
    for seed in range(4):
        batch = drawn(seed, rows, prompts, columns)
        actual = in_common_shapes(batch, columns)
        tokens, states, responses = len(batch.rows.slots), len(batch.state_slots), len(batch.response_slots)
        all_tokens, (sequences, width) = actual.rows.packed_ids.shape[1], actual.rows.layout.shape
        assert torch.equal(actual.rows.packed_ids[:, :tokens], batch.rows.packed_ids)
        assert torch.equal(actual.rows.packed_positions[:, :tokens], batch.rows.packed_positions)
        assert torch.equal(actual.state_positions[:states], batch.state_positions)
        assert torch.equal(actual.predicting[:responses], batch.predicting)
        assert torch.equal(actual.targets[:responses], batch.targets)
        lengths = actual.rows.layout.starts.diff().tolist()
        assert lengths[:rows] == batch.rows.layout.starts.diff().tolist()
        assert sum(lengths) == all_tokens
        assert len(lengths) == sequences
        assert max(lengths) <= width
        assert actual.shape[1] == columns
        assert len(actual.state_slots) == len(actual.state_positions)
        assert len(actual.response_slots) == len(actual.predicting) == len(actual.targets)
        for indices, limit in (
            (actual.state_positions, all_tokens),
            (actual.predicting, len(actual.state_positions)),
            (actual.response_slots, actual.shape[0] * columns),
            (actual.state_slots, actual.shape[0] * (columns + 1)),
            (actual.rows.layout.slots, sequences * width),
        ):
            assert len(set(indices.tolist())) == len(indices)
            assert 0 <= int(indices.min()) <= int(indices.max()) < limit
        placed = actual.scatter_responses(torch.arange(1.0, 1 + len(actual.targets)))[:rows, : batch.shape[1]]
        assert torch.equal(placed, batch.scatter_responses(torch.arange(1.0, 1 + responses)))
        placed = actual.scatter_states(torch.arange(1.0, 1 + len(actual.state_slots)))[:rows, : batch.shape[1] + 1]
        assert torch.equal(placed, batch.scatter_states(torch.arange(1.0, 1 + states)))
        assert all_tokens <= 1.25 * 1.125 * tokens + 128 + rows


def test_sizes_decide_every_shape():
    """Batches whose tokens, responses, rows and width have the same sizes have all shapes in common."""
    by_size: dict[tuple, set[tuple]] = {}
    for seed in range(150):
        batch = in_common_shapes(drawn(seed, 5 + seed % 4), COLUMNS)
        size = batch.rows.packed_ids.shape[1], len(batch.targets), len(batch.state_slots), batch.rows.layout.shape[1]
        by_size.setdefault(size, set()).add(shapes(batch))
    assert all(len(actual) == 1 for actual in by_size.values())
    assert 1 < len(by_size) < 12


@pytest.mark.parametrize("name", ["tiny", "gpt2"])
def test_an_iteration_of_the_benchmark_has_few_shapes(monkeypatch, name):
    """Mixed lengths: a stop token after each token with the probability that halves responses on average."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from inputs import stop_probability
    from workload import PRESETS

    preset = PRESETS[name]
    counts, real, computed = [], 0, 0
    for iteration in range(1, 5):
        numbers = np.random.default_rng(iteration)
        stops = numbers.geometric(stop_probability(preset.response_length), size=preset.batch)
        lengths = torch.from_numpy(stops.clip(max=preset.response_length))
        ids = torch.ones(preset.batch, preset.response_length, dtype=torch.long)
        prompt_lengths = numbers.integers(preset.prompt_length // 4, preset.prompt_length + 1, size=preset.batch)
        actual = set()
        for epoch in range(preset.epochs):
            for rows in minibatch_partition(0, iteration, epoch, preset.batch, preset.batch // preset.minibatch):
                batch = make_batch([[1] * prompt_lengths[row] for row in rows], ids[rows], lengths[rows], 0)
                made = in_common_shapes(batch, preset.response_length)
                actual.add(shapes(made))
                real += len(batch.rows.slots)
                computed += made.rows.packed_ids.shape[1]
        counts.append(len(actual))
    assert max(counts) <= {"tiny": 6, "gpt2": 12}[name]
    assert computed < {"tiny": 1.25, "gpt2": 1.1}[name] * real


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_no_real_token_reads_a_filler(kind):
    """The fillers' embeddings are NaN: what the losses read of the real tokens is as without fillers."""
    policy = build_model(kind, tie_word_embeddings=False)
    critic = Critic.from_policy(policy)
    torch.nn.init.normal_(critic.value_head.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    assert packs(policy.base_model)
    assert packs(critic.backbone)
    forwards = PolicyForward(policy, critic, 0.8), CriticForward(critic)
    batch = drawn(3, 5)
    rows, width = batch.shape
    expected = forwards[0](batch, with_entropy=True), forwards[1](batch)
    filled = in_common_shapes(batch, COLUMNS)
    ids = filled.rows.packed_ids.clone()
    ids[:, len(batch.rows.slots) :] = FILLER
    filled = dataclasses.replace(filled, rows=dataclasses.replace(filled.rows, packed_ids=ids))
    with torch.no_grad():
        for model in (policy, critic.backbone):
            model.get_input_embeddings().weight[FILLER] = NAN
    actual = forwards[0](filled, with_entropy=True), forwards[1](filled)
    for ours, theirs in ((actual[0].logprobs, expected[0].logprobs), (actual[0].entropy, expected[0].entropy)):
        assert_close(ours[:rows, :width], theirs, rtol=0.0, atol=1e-6 if kind == "llama" else 1e-12)
    assert_close(actual[1][:rows, : width + 1], expected[1], rtol=0.0, atol=1e-6 if kind == "llama" else 1e-12)
    assert not actual[1].isfinite().all()


CASES = {
    "every loss": {"kl_in": "loss", "kl_estimator": "k2", "entropy_coef": 0.1, "importance_cap": 1.5},
    "a shared trunk": {"value_model": "shared", "kl_in": "loss", "kl_estimator": "full"},
    "sums of responses": {"loss_aggregation": "seq_mean_token_sum", "max_tokens_per_micro_batch": 40},
    "means of responses": {"loss_aggregation": "seq_mean_token_mean", "per_device_train_batch_size": 3},
    "positive examples": {"positive_coef": 0.3, "positive_threshold": 0.75, "dual_clip": 1.5},
}


def poisoned(table: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor | None:
    """Return a table with NaN everywhere but at the given indices."""
    is_real = torch.zeros(0 if table is None else table.numel(), dtype=torch.bool)
    is_real[slots[: len(is_real)]] = True
    return None if table is None else torch.where(is_real.view_as(table), table, NAN)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_nan_in_every_filler_changes_neither_gradients_nor_statistics(make_run, monkeypatch, kind, case):
    """All that a loss reads is NaN in fillers and padding, given or computed; the fillers' tokens are others."""
    settings = {**ONE_STEP, **CASES[case]}
    plain = make_run(kind, **settings)
    experience = with_settings_of(plain, moved_on(make_run(kind, **settings).before_update()[-1]))
    expected, statistics = freeze(plain), learn_from(plain.state, experience, plain.reference)
    real: dict[int, SequenceBatch] = {}  # by its batch in common shapes
    cut_out = []

    def with_other_tokens(batch, columns):
        made = in_common_shapes(batch, columns)
        fillers = made.rows.packed_ids[0, len(batch.rows.slots) :]
        fillers.copy_(torch.arange(len(fillers)) % FILLER)
        real[id(made)] = batch
        return made

    def cut(table, rows, shape):
        actual, is_response = original(table, rows, shape), experience.rollouts.mask[rows]
        cut_out.append(shape[0] - len(rows))
        is_real = torch.nn.functional.pad(is_response, (0, 0, 0, shape[0] - len(rows)))
        return torch.where(is_real, actual, NAN) if actual.is_floating_point() else actual

    def poison(module, given, actual):
        batch, before = given[0], real[id(given[0])]
        responses, states = (len(slots) for slots in (before.response_slots, before.state_slots))
        of_states = batch.state_slots[:states]
        if isinstance(actual, torch.Tensor):
            return poisoned(actual, of_states)
        *of_responses, values = actual
        return PolicyOutput(
            *(poisoned(x, batch.response_slots[:responses]) for x in of_responses), poisoned(values, of_states)
        )

    original = update._cut
    monkeypatch.setattr(ppo_rollouts, "in_common_shapes", with_other_tokens)
    monkeypatch.setattr(update, "_cut", cut)
    run = make_run(kind, **settings)
    for each in run.state.forwards:
        each.register_forward_hook(poison)
    actual = freeze(run)
    plan = ppo_rollouts.plan_update(
        run.state, run.reference, experience.rollouts.prompts, experience.rollouts.responses
    )
    run.state.plan = dataclasses.replace(plan, common_shapes=True)
    numbers = learn_from(run.state, experience, run.reference)
    assert min(cut_out) > 0
    assert_same_gradients(actual[0], expected[0])
    for name, value in statistics.items():
        if not name.startswith(MEASURED):
            assert numbers[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name
