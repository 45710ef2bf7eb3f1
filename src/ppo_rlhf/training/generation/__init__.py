"""Responses to prompts: the engines that sample them, and the arguments of a request."""
