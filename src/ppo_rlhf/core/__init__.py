"""The numerics of PPO-RLHF: pure functions on tensors, and the error tree. Each module begins with what it holds.

Imports torch and the standard library only; knows no model, tokenizer, file, or training loop.

Axes: B sequences, T response tokens (time order, padding on the right), V vocabulary; names carry them as suffixes
(`kl_BT`). A mask is True on real tokens, except where its docstring says otherwise. Whatever is in padding, NaN
included, changes neither a value nor a gradient, and padded outputs are 0. Half precision is computed in float32;
float64 stays float64.
"""
