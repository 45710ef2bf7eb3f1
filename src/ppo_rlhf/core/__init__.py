"""The numerics of PPO-RLHF: pure functions on tensors, and the error tree.

Imports torch and the standard library only; knows no model, tokenizer, file, or training loop.

| module | what is there |
| --- | --- |
| `responses` | lengths of sampled responses, masks from lengths |
| `logprobs` | log-probability of chosen tokens, exact entropy, both under a temperature |
| `sampling` | tokens from logits and given uniforms by inverse CDF (temperature, top-k, top-p) |
| `kl` | per-token KL estimates k1, k2, k3; fixed and adaptive KL coefficient |
| `rewards` | score on the last token minus the per-token KL penalty |
| `advantages` | generalised advantage estimation |
| `turns` | tokens of several turns taken together, without what an environment wrote between them |
| `visible` | control characters in texts, made harmless |
| `statistics` | masked mean, variance, whitening, explained variance, running moments |
| `aggregation` | from a `[B, T]` matrix of token losses to one number, and its denominator |
| `best_of_n` | expectations of the response that a reward picks among n, and their KL |
| `losses` | clipped policy and value losses |
| `choices` | the names by which a setting chooses a formula; imports no torch |
| `checks` | shape and range checks that the others share |
| `errors` | every error a user can see |

Axes: B sequences, T response tokens (time order, padding on the right), V vocabulary; names carry them as suffixes
(`kl_BT`). A mask is True on real tokens, except where its docstring says otherwise. Whatever is in padding, NaN
included, changes neither a value nor a gradient, and padded outputs are 0. Half precision is computed in float32;
float64 stays float64.
"""
