"""Computing with models: forward passes without padding, decoding, sampling, rows dealt over processes. No PPO."""
