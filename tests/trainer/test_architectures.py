"""Every causal language model of transformers that can be built tiny trains, or is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ppo_rlhf.core.errors import ModelError
from ppo_rlhf.models.reward_model import CausalLMRewardModel
from ppo_rlhf.training import PPOConfig, PPOTrainer
from tests.tiny_models import BEGIN, END, PAD, VOCABULARY, save

MOST_PARAMETERS = 3_000_000
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "embed_dim", "lru_width"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "expand_size"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "decoder_ffn_dim"), 24),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "state_size", "ssm_state_size"), 4),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_d_state", "mamba_dt_rank"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("n_group", "n_groups", "topk_group", "mamba_n_groups"), 1),
    **{"mamba_d_ssm": 32, "attention_hidden_size": 16, "word_embed_proj_dim": 16},
    **{"linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"vocab_size": len(VOCABULARY) + 1, "bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD},
}
TYPES = ("layer_types", "mlp_layer_types", "layers_block_type")
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
CHUNKS = {"mamba_expand": 2, "mamba_chunk_size": 8}
KINDS: dict[str, dict[str, Any]] = {  # one layer of each type
    "bamba": {**CHUNKS, "attn_layer_indices": [1]},
    "cohere2": WINDOWS,
    "falcon_h1": CHUNKS,
    "gemma3_text": WINDOWS,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gpt_oss": WINDOWS,
    "granitemoehybrid": {**CHUNKS, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 24},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"head_dim": 8, "chunk_size": 8, "expand": 2},
    "ministral": WINDOWS,
    "nemotron_h": {"hybrid_override_pattern": "M*-M", "num_hidden_layers": 4, "chunk_size": 8, "expand": 2},
    "olmo3": WINDOWS,
    "olmo_hybrid": LINEAR,
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR,
    "recurrent_gemma": {"num_hidden_layers": 3},
}
END_IN_A_TRACEBACK = {
    "deepseek_v4": "transformers' static cache does not know its layers",
    "minimax": "it takes only a cache of its own",
    "recurrent_gemma": "it keeps states between forward passes, which cannot be copied",
}


def is_free(config: PreTrainedConfig, name: str) -> bool:
    """Return whether a value can be given: some are computed from others."""
    computed = getattr(type(config), config.attribute_map.get(name, name), None)
    return not isinstance(computed, property) or computed.fset is not None


def tiny(kind: str) -> PreTrainedModel:
    """Build a tiny model that computes, or skip the test: configurations name their sizes differently."""
    try:
        usual = CONFIG_MAPPING[kind]()
        known = [name for name in (*SMALL, *TYPES) if hasattr(usual, name) and is_free(usual, name)]
        given = {name: SMALL[name] if name in SMALL else list(getattr(usual, name) or ())[:2] for name in known}
        if "kv_lora_rank" in known:  # latent attention has one size of heads for each of its parts
            given |= {"num_key_value_heads": 4}
            given.pop("head_dim", None)
        config: PreTrainedConfig = CONFIG_MAPPING[kind](**{**given, **KINDS.get(kind, {})})
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
        assert count <= MOST_PARAMETERS, f"{count} parameters"
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).float().eval()
        model(torch.tensor([[4, 5, 6]]))
    except Exception as error:  # an own one for many an architecture
        pytest.skip(f"{type(error).__name__}: {error}")
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.xfail(reason=END_IN_A_TRACEBACK[kind], strict=True))
        if kind in END_IN_A_TRACEBACK
        else kind
        for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    ],
)
def test_an_architecture_trains_in_sixteen_bits_with_a_reward_model_of_its_kind_or_is_refused(kind, tmp_path: Path):
    model = tiny(kind)
    policy = save(tmp_path / "policy", model)
    config = PPOConfig(
        total_episodes=8,
        per_device_train_batch_size=4,
        response_length=8,
        num_ppo_epochs=1,
        dtype="bfloat16",
        device="cpu",
    )
    try:
        reward = save(tmp_path / "reward", CausalLMRewardModel.from_causal_lm(model))
        trainer = PPOTrainer(config, policy, reward=reward, prompts=["a b", "c", "d e f", "g"])
        first, _ = trainer.train()
    except ModelError as error:
        if "\n" in str(error):
            raise
        pytest.skip(f"refused: {error}")
    assert abs(first["objective/kl"]) < 0.02  # the policy is the reference, which computes the log-probabilities anew
    trainer.save_pretrained(str(tmp_path / "trained"))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "trained").float().eval()
    ids = torch.tensor([[4, 5, 6, 7]])
    with torch.no_grad():
        difference = opened(ids).logits - trainer.policy.float()(ids).logits
    assert difference.abs().max() < 1e-4
