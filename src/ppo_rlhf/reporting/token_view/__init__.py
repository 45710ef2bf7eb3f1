"""The token view: sample responses token by token, as plain data and as an HTML page."""

from ppo_rlhf.reporting.token_view.page import render_page, render_view
from ppo_rlhf.reporting.token_view.samples import TokenSample, TokenSamples, sample_tokens

__all__ = ["TokenSample", "TokenSamples", "render_page", "render_view", "sample_tokens"]
