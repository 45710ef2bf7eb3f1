"""The win rate of one policy over another, its interval, and the sign test."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, ndtri

CONFIDENCE = 0.95
NORMAL_QUANTILE = float(ndtri(0.5 + CONFIDENCE / 2.0))
_Z2 = NORMAL_QUANTILE**2


class WinRate(NamedTuple):
    """Share of prompts that our policy wins, with ties counted as half, and the ends of its 95 % interval."""

    rate: float
    low: float
    high: float


def win_rate(outcomes: NDArray[np.float64]) -> WinRate:
    """Return the win rate and its interval from outcomes [N, n] of N prompts.

    The interval of the win rate generalises the interval of Agresti and Coull (1998) to prompts whose mean outcome is
    any number from 0 to 1. With the normal quantile z, the computation adds z² / 2 won and z² / 2 lost prompts; the
    interval is then mean ± z · standard deviation / √number of prompts. Without ties the interval of the win rate
    equals the interval of Agresti and Coull. Unlike a bootstrap interval, the interval of the win rate keeps its
    coverage near 0 and 1, and when all prompts are won or all are lost.
    """
    outcomes_N = outcomes.mean(axis=1)
    number = len(outcomes_N) + _Z2
    centre = (outcomes_N.sum() + _Z2 / 2.0) / number
    variance = (np.square(outcomes_N).sum() + _Z2 / 2.0) / number - centre**2
    half = math.sqrt(_Z2 * variance / number)
    return WinRate(float(outcomes_N.mean()), low=float(max(0.0, centre - half)), high=float(min(1.0, centre + half)))


def sign_test(wins: int, losses: int) -> float:
    """Return the p-value of the exact two-sided sign test for a number of wins and losses.

    The probability is 0.03 if one policy wins all of six prompts, and 0.06 if one policy wins all of five.
    """
    return min(1.0, 2.0 * float(bdtr(min(wins, losses), wins + losses, 0.5)))
