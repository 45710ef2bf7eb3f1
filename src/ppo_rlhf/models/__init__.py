"""Everything around a transformers model: loading, tokenizers, reward and value heads. No training, no Kedro."""
