"""A curriculum by difficulty: prompts that the policy always or never solves are drawn less often than the others."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ppo_rlhf.core.errors import ConfigError
from ppo_rlhf.core.randomness import permutation

STREAK = 8
"""A prompt is set aside while its last `STREAK` responses were all solved, or all unsolved."""
SET_ASIDE_STEP = 8
"""A prompt that is set aside is drawn only at every `SET_ASIDE_STEP`-th place of a pass over the prompts."""


class Curriculum:
    """Remembers how the latest responses to each of N prompts ended, and draws prompts in passes.

    Each pass over the prompts follows its own seeded permutation, as in `randomness.episode_prompts`. A prompt that is
    set aside is skipped at most places of a pass, so that a pass sees about one in `SET_ASIDE_STEP` of them again. If
    no prompt is set aside, the draws are those of `episode_prompts`; if all are, all prompts are drawn equally often.

    Attributes:
        streaks_N: `[N]` int8, the length of each prompt's current streak, at most `STREAK`: positive if the latest
            responses were solved, negative if unsolved, 0 if there was no response yet. Empty before the first draw.
        position: Number of places that all passes so far have used, skipped places included.
    """

    def __init__(self, seed: int, solved_at: float) -> None:
        """Take the seed of the passes, and the score from which a response solves its prompt."""
        self.seed = seed
        self.solved_at = solved_at
        self.streaks_N = torch.zeros(0, dtype=torch.int8)
        self.position = 0

    def draw(self, count: int, num_prompts: int) -> list[int]:
        """Return the indices of the next `count` of `num_prompts` prompts; equal calls before `update` draw the same.

        A prompt occurs twice only if the draw continues in the next pass.

        Raises:
            ConfigError: Outcomes of another number of prompts were recorded.
        """
        if not len(self.streaks_N):
            self.streaks_N = torch.zeros(num_prompts, dtype=torch.int8)
        if len(self.streaks_N) != num_prompts:
            raise ConfigError(
                f"ppo.curriculum={self.solved_at:g}: outcomes of {len(self.streaks_N)} prompts were counted, and now "
                f"there are {num_prompts}; give the same prompts, or start a new run"
            )
        return self._walk(count)[0]

    def update(self, scores_B: Tensor, group_size: int) -> None:
        """Record the scores of the responses to the prompts that `draw` returned, and move on.

        `scores_B` [B] has the scores of `group_size` consecutive responses for each prompt.
        """
        drawn, self.position = self._walk(len(scores_B) // group_size)
        for row, is_solved in enumerate((scores_B >= self.solved_at).tolist()):
            prompt = drawn[row // group_size]
            streak = int(self.streaks_N[prompt])
            streak = max(streak, 0) + 1 if is_solved else min(streak, 0) - 1
            self.streaks_N[prompt] = max(-STREAK, min(STREAK, streak))

    def shares(self) -> dict[str, float]:
        """Return the metrics of the curriculum: the shares of prompts that are solved, unsolved and in reach.

        A prompt with fewer than `STREAK` responses is in reach.
        """
        solved, unsolved = (int((self.streaks_N == end).sum()) for end in (STREAK, -STREAK))
        counts = {"solved": solved, "unsolved": unsolved, "in_reach": len(self.streaks_N) - solved - unsolved}
        return {f"curriculum/{name}": count / len(self.streaks_N) for name, count in counts.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return the state as tensors, for a checkpoint."""
        return {"streaks": self.streaks_N, "position": torch.tensor(self.position)}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the result of `tensors`."""
        self.streaks_N, self.position = tensors["streaks"].clone(), int(tensors["position"])

    def _walk(self, count: int) -> tuple[list[int], int]:
        """Return the next `count` prompts, and the position after the last of them."""
        size, position = len(self.streaks_N), self.position
        in_reach_N = self.streaks_N.abs() < STREAK
        drawn: list[int] = []
        while len(drawn) < count:
            number, start = divmod(position, size)
            order, places = permutation(size, self.seed, "prompts", number), torch.arange(size)
            # The first place of each pass is due, so each whole pass draws a prompt and the loop ends
            is_due = (places >= start) & (in_reach_N[order] | (places % SET_ASIDE_STEP == 0))
            due = places[is_due][: count - len(drawn)]
            drawn += order[due].tolist()
            position = number * size + (int(due[-1]) + 1 if len(drawn) == count else size)
        return drawn, position
