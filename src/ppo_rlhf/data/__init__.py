"""The three kinds of data, prompts, demonstrations and preferences: checked, split, tokenised."""
