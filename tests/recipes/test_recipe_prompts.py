"""The recipes' prompts, made from rows with the columns of the tables on the hub."""

from __future__ import annotations

from datasets import Dataset

from ppo_rlhf.recipes.recipe_prompts import gsm8k_chats, review_openings


def test_a_question_becomes_a_chat_that_asks_for_the_form_of_the_answer() -> None:
    table = gsm8k_chats(Dataset.from_dict({"question": ["How many?"], "answer": ["Seven.\n#### 7"]}))
    [[message]] = table["prompt"]
    assert message["role"] == "user"
    assert message["content"] == ('How many? Let\'s think step by step and output the final answer after "####".')
    assert table["answer"][:] == ["Seven.\n#### 7"]


def test_long_reviews_open_with_two_to_seven_words_the_same_each_time() -> None:
    words = [f"word{i}" for i in range(60)]
    reviews = Dataset.from_dict({"text": ["too short to be used"] + [" ".join(words)] * 300})
    prompts = review_openings(reviews)["prompt"][:]
    assert len(prompts) == 300
    assert {len(prompt.split()) for prompt in prompts} == set(range(2, 8))
    assert all(" ".join(words).startswith(prompt) for prompt in prompts)
    assert review_openings(reviews)["prompt"][:] == prompts
