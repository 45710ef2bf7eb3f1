"""Check, split and tokenise prompts, chats and tables."""
