"""The shipped demo: a grammar of movie reviews, and the gold judge.

The demo uses only the standard library. Only the judge knows the grammar; the policy and the reward model see texts and
noisy labels.
"""
