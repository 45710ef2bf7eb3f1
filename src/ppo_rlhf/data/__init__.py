"""Prompts, chats and tables: checked, split and tokenised."""
