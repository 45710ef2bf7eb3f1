"""Forward and backward passes over sequences of different lengths, without padding, and decoding step by step."""
