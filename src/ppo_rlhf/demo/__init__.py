"""The shipped demonstration: a grammar of movie reviews, the corpus made from it, and the gold judge.

Standard library only. The judge knows the grammar; policy and reward model never do: they see text and noisy labels.
"""
