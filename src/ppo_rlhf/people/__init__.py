"""Pairs of responses for people to compare, their answers, and the win rate that follows."""
