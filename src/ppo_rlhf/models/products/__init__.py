"""Products of rows and weights on the processor at hand, in the types of numbers that it is fast at."""
