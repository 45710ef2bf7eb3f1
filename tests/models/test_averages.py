"""The moving average of weights, against its closed form."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from ppo_rlhf.models.adapters import LoraSettings, with_adapter
from ppo_rlhf.models.averages import WeightAverage, copy_tensors, trained_parameters
from tests.tiny_models import KINDS, draw_weights, tiny_model

IDS = torch.tensor([[4, 7, 9, 12]])


def shift(model, amount: float) -> None:
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.add_(amount)


def test_each_step_weighs_by_the_decay_to_the_power_of_its_age():
    """After w0, w1, w2: d² w0 + d (1 − d) w1 + (1 − d) w2."""
    model = tiny_model().double()
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    average = WeightAverage(model, 0.8)
    for amount in (1.0, 2.0):  # w1 = w0 + 1, w2 = w0 + 3
        shift(model, amount)
        average.update(model)
    for name, weight in average.weights.items():
        assert_close(weight, start[name] + 0.8 * 0.2 * 1.0 + 0.2 * 3.0, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("decay", [0.999, 0.75, 0.1])
def test_each_number_moves_as_a_plain_float_does_and_to_the_bit_as_lerp_moves_it(decay):
    model = tiny_model().double()
    average = WeightAverage(model, decay)
    plain = {name: weight.flatten().tolist() for name, weight in average.weights.items()}
    lerped = {name: weight.clone() for name, weight in average.weights.items()}
    for step in range(3):
        draw_weights(model, 0.3, seed=step + 1)
        average.update(model)
        for name, weight in trained_parameters(model).items():
            now = zip(plain[name], weight.flatten().tolist(), strict=True)
            plain[name] = [decay * before + (1.0 - decay) * number for before, number in now]
            lerped[name].lerp_(weight.detach(), 1.0 - decay)
    for name, weight in average.weights.items():
        assert_close(weight.flatten(), torch.tensor(plain[name], dtype=torch.float64), rtol=0.0, atol=1e-15)
        assert torch.equal(weight, lerped[name])


def test_an_update_is_one_launch_for_all_weights():
    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            launched.append(func)
            return func(*args, **(kwargs or {}))

    launched: list[object] = []
    model = tiny_model()
    average = WeightAverage(model, 0.9)
    with Launches():
        average.update(model)
    assert launched == [torch.ops.aten._foreach_lerp_.Scalar]


@pytest.mark.parametrize("kind", KINDS)  # GPT-2's head is its embedding: tied weights stay tied
def test_the_averaged_model_computes_with_the_averaged_weights_and_the_model_with_its_own(kind):
    model = tiny_model(kind).double()
    average = WeightAverage(model, 0.5)
    shift(model, 0.2)
    average.update(model)
    after = model(IDS).logits
    averaged = average.applied_to(model)(IDS).logits
    assert torch.equal(model(IDS).logits, after)
    shift(model, -0.1)  # half of the way back
    assert_close(averaged, model(IDS).logits, rtol=0.0, atol=1e-10)


def test_of_an_adapted_model_the_adapter_is_averaged_and_the_rest_shared():
    model = with_adapter(tiny_model(), LoraSettings(2, 4, "q_proj"), torch.Generator())
    average = WeightAverage(model, 0.9)
    assert average.weights.keys() == trained_parameters(model).keys()
    averaged = average.applied_to(model)
    frozen = {p.data_ptr() for p in model.parameters() if not p.requires_grad}
    assert {p.data_ptr() for p in averaged.parameters() if not p.requires_grad} == frozen


def test_weights_of_another_model_are_refused():
    average = WeightAverage(tiny_model(), 0.9)
    with pytest.raises(ValueError, match="differ, such as"):
        copy_tensors({"weight": torch.zeros(1)}, average.weights)
    with pytest.raises(ValueError, match="has shape"):
        copy_tensors({name: weight[:1] for name, weight in average.weights.items()}, average.weights)
