"""The numerics of PPO-RLHF: pure functions on tensors, and the error classes.

The modules of `core` import torch and the standard library only, and know no model, tokenizer, file or training loop.

Axes: B sequences, T response tokens (time order, padding on the right), V vocabulary. A tensor's name carries its axes
as a suffix (`kl_BT`). A mask is True on real tokens, unless the function's docstring says otherwise. The content of
padding, NaN included, changes neither a value nor a gradient, and padded outputs are 0. Half-precision inputs are
computed in float32; float64 stays float64.
"""
