"""Offloaded models: which tensors are copied, how often, and for how long.

The device `meta` stands for the host: a model there has no values, so a forward pass outside the block gives none.
"""

import pytest
import torch
from torch import nn

from ppo_rlhf.passes import transfers
from ppo_rlhf.passes.transfers import on_device, to_host
from tests.tiny_models import tiny_model

CPU = torch.device("cpu")
IDS = torch.tensor([[4, 7, 9, 12]])


class Waiting:
    """A model on `meta` whose values come from a store when they are copied. The store counts the copies."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.copied = model, []
        self._values = {}
        shared = {}
        for table, name, tensor in transfers.places(model):
            if id(tensor) not in shared:
                empty = tensor.detach().to("meta")
                shared[id(tensor)] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
                self._values[id(shared[id(tensor)])] = tensor.detach()
            table[name] = shared[id(tensor)]
        monkeypatch.setattr(transfers, "copied_to", self._copy)

    def _copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.copied.append(tensor)
        return self._values[id(tensor)].to(device)

    @property
    def devices(self) -> set[str]:
        return {tensor.device.type for _, _, tensor in transfers.places(self.model)}


def test_waiting_weights_are_copied_once_for_the_block_and_dropped_after_it(monkeypatch):
    expected = tiny_model("gpt2")(IDS).logits  # its head is tied to its embedding
    waiting = Waiting(tiny_model("gpt2").requires_grad_(False), monkeypatch)
    before = [tensor for _, _, tensor in transfers.places(waiting.model)]
    with on_device(waiting.model, CPU):
        assert waiting.devices == {"cpu"}
        assert waiting.model.device == CPU
        assert waiting.model.lm_head.weight is waiting.model.transformer.wte.weight
        assert torch.equal(waiting.model(IDS).logits, expected)
    after = [tensor for _, _, tensor in transfers.places(waiting.model)]
    assert all(first is second for first, second in zip(before, after, strict=True))
    tensors = [*waiting.model.parameters(), *waiting.model.buffers()]
    assert sorted(map(id, waiting.copied)) == sorted(map(id, tensors))


def test_a_model_that_is_on_the_device_already_is_not_copied(monkeypatch):
    monkeypatch.setattr(transfers, "copied_to", lambda *_: pytest.fail("copied"))
    model = tiny_model()
    weights = list(model.parameters())
    with on_device(model, CPU):
        assert all(first is second for first, second in zip(weights, model.parameters(), strict=True))


@pytest.mark.parametrize("copies", [3, 1000])
def test_after_a_failure_while_copying_or_in_the_block_the_model_waits_again(copies, monkeypatch):
    waiting = Waiting(tiny_model(), monkeypatch)
    copy = transfers.copied_to

    def fail(tensor, device):
        if len(waiting.copied) == copies:
            raise RuntimeError("no memory")
        return copy(tensor, device)

    monkeypatch.setattr(transfers, "copied_to", fail)
    with pytest.raises(RuntimeError, match="no memory"), on_device(waiting.model, CPU):
        raise RuntimeError("no memory")
    assert waiting.devices == {"meta"}


def test_a_model_on_the_host_keeps_its_values_and_its_shared_weights():
    model = tiny_model("gpt2").requires_grad_(False)
    expected = model(IDS).logits
    to_host(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert torch.equal(model(IDS).logits, expected)


@pytest.mark.gpu
def test_on_a_gpu_the_host_has_pinned_copies_and_the_device_gets_its_memory_back():
    torch.backends.cuda.matmul.allow_tf32 = False  # runs of other tests in this process change this setting
    model = tiny_model("gpt2").requires_grad_(False)
    expected = model(IDS).logits
    to_host(model)
    assert all(parameter.is_pinned() for parameter in model.parameters())
    with on_device(model, torch.device("cuda")):
        model(IDS.cuda())  # cuBLAS allocates its workspaces here and keeps them
    before = torch.cuda.memory_allocated()
    with on_device(model, torch.device("cuda")):
        assert torch.cuda.memory_allocated() > before
        found = model(IDS.cuda()).logits.cpu()
    assert torch.cuda.memory_allocated() == before
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
