"""Everything around a transformers model: loading, tokenizers, reward and value heads. Knows no training, no Kedro."""
