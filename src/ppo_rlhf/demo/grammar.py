"""A grammar of movie reviews, and a recogniser of its sentences.

A review has the form `TITLE ( ASPECT ) : BODY`. The body is one to four sentences, each with a final full stop. The
grammar has no recursion and no empty production, so derivatives recognise a sentence (Brzozowski 1964): the state after
a word is the set of symbol sequences that may follow, and a cache holds the step from a state and a word to the next
state.

Weights and polarities matter only for writing the corpus (`scripts/write_corpus.py`). In the rules `~` is the polarity
of the head and `!` the opposite polarity. The recogniser ignores polarities: "brilliant but superb" is grammatical.
"""

import re
from collections.abc import Sequence
from functools import cache

from ppo_rlhf.demo.lexicon import WORDS

END = "."

RULES = """
SENTENCE~
    14 CLAUSE~ .
    3 LEAD_IN , CLAUSE~ .
    2 CLAUSE~ and CLAUSE~ .
    3 CLAUSE~ , but CLAUSE! .
    1 CLAUSE~ , yet CLAUSE! .
    2 although CLAUSE! , CLAUSE~ .
    1 while CLAUSE! , CLAUSE~ .
    3 NEUTRAL .
CLAUSE~
    6 TOPIC is JUDGED~
    3 TOPIC is JUDGED~ THROUGHOUT
    4 the PARTS are JUDGED~
    3 ACTOR is JUDGED~ as the ROLE
    2 ACTOR plays the ROLE ADVERB~
    3 FILM is AN_ADJECTIVE~ KIND
    1 FILM is AN_ADJECTIVE~ KIND by DIRECTOR
    2 FILM is AN_VERDICT~
    2 i FEEL~ the THING
    1 i did not FEEL! the THING
    2 TOPIC SHINES~
    1 TOPIC never SHINES!
    2 the PARTS SHINE~
    1 the PARTS never SHINE!
    2 the ASPECT SAVES~ the MOVIE
    1 the PARTS SAVE~ the MOVIE
    2 TOPIC MOVED~ me
    1 TOPIC never MOVED! me
    2 TOPIC is full of QUALITY~
    2 TOPIC has no QUALITY!
    2 DIRECTOR tells AN_ADJECTIVE~ story
    1 DIRECTOR directs the MOVIE ADVERB~
    2 the ROLE , played by ACTOR , is JUDGED~
    2 there is AN_ADJECTIVE~ scene in the SITE
    2 the scene where the ROLE FINDS the OBJECT is JUDGED~
CLAUSE-
    2 TOPIC is too SIZE
CLAUSE+
    2 TOPIC is never too SIZE
JUDGED~
    12 ADJECTIVE~
    4 VERY ADJECTIVE~
    2 RATHER ADJECTIVE~
    2 not ADJECTIVE!
    3 not ADJECTIVE! at all
    1 never ADJECTIVE!
    3 ADJECTIVE~ and ADJECTIVE~
    2 ADJECTIVE~ but ADJECTIVE!
NEUTRAL
    2 the story is set in AN_SITE_KIND SITE
    2 it follows AN_AGE ROLE in the SITE
    2 ACTOR plays the ROLE
    2 the ROLE FINDS the OBJECT in the SITE
    1 DIRECTOR wrote the script
    1 FILM was made by DIRECTOR
LEAD_IN
    1 in the end
    1 for me
    1 in my opinion
    1 as expected
    1 once again
THROUGHOUT
    1 from start to finish
    1 in every scene
    1 most of the time
TOPIC
    5 the ASPECT
    2 the ASPECT of this MOVIE
    3 FILM
FILM
    3 this MOVIE
    2 the MOVIE
    2 it
    1 TITLE
THING
    2 ASPECT
    1 PARTS
TITLE
    1 TITLE_FIRST TITLE_SECOND
ACTOR
    1 FIRST_NAME SURNAME
DIRECTOR
    1 FIRST_NAME SURNAME
"""

Production = tuple[str, ...]


def is_terminal(symbol: str) -> bool:
    return not symbol[0].isupper()


def _read_rules() -> dict[str, list[tuple[float, Production]]]:
    """Return the weighted productions of every symbol, with explicit polarities (`CLAUSE+` and `CLAUSE-`).

    For each word class X there is also a symbol AN_X: the same words with the article `a` or `an`.
    """
    rules: dict[str, list[tuple[float, Production]]] = {}
    for name, words in WORDS.items():
        rules[name] = [(1.0, (word,)) for word in words]
        rules[f"AN_{name}"] = [(1.0, ("an" if word[0] in "aeiou" else "a", word)) for word in words]
    head = ""
    for line in RULES.strip().splitlines():
        if not line.startswith(" "):
            head = line
            continue
        weight, production = line.split(maxsplit=1)
        for sign in "+-" if head.endswith("~") else (head[-1] if head[-1] in "+-" else "",):
            signed = production.replace("~", sign).replace("!", "-" if sign == "+" else "+")
            rules.setdefault(head.replace("~", sign), []).append((float(weight), tuple(signed.split())))
    return rules


PRODUCTIONS = _read_rules()


def _read_syntax() -> dict[str, frozenset[Production]]:
    """Return `PRODUCTIONS` without weights and polarities."""
    syntax: dict[str, set[Production]] = {}
    for head, options in PRODUCTIONS.items():
        stripped = {tuple(symbol.rstrip("+-") for symbol in production) for _, production in options}
        syntax.setdefault(head.rstrip("+-"), set()).update(stripped)
    return {head: frozenset(productions) for head, productions in syntax.items()}


_SYNTAX = _read_syntax()
VOCABULARY = frozenset("():").union(
    word for productions in _SYNTAX.values() for production in productions for word in production if is_terminal(word)
)

State = frozenset[Production]
_START: State = frozenset({("SENTENCE",)})
_FINISHED: State = frozenset({()})
_NOTHING: State = frozenset()


def tokenize(text: str) -> list[str]:
    """Split a text of any alphabet into lower-case words and single punctuation marks; spaces do not matter."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def _after(symbol: str, word: str) -> State:
    """Return the symbol sequences that may follow within `symbol` after its first word `word`."""
    if is_terminal(symbol):
        return _FINISHED if symbol == word else _NOTHING
    return _step(_SYNTAX[symbol], word)


@cache
def _step(state: State, word: str) -> State:
    return frozenset(rest + stack[1:] for stack in state if stack for rest in _after(stack[0], word))


def _derive(tokens: Sequence[str]) -> State:
    state = _START
    for word in tokens:
        # Call the cached `_step` only for words of the vocabulary, so that the grammar bounds the size of the cache
        state = _step(state, word) if word in VOCABULARY else _NOTHING
    return state


def is_sentence(tokens: Sequence[str]) -> bool:
    """Return whether the tokens, full stop included, are exactly one sentence of the grammar."""
    return () in _derive(tokens)


def is_sentence_start(tokens: Sequence[str]) -> bool:
    """Return whether a sentence of the grammar begins with the tokens; True for no tokens."""
    return bool(_derive(tokens))


def header_length(tokens: Sequence[str]) -> int:
    """Return the number of tokens of the header `TITLE ( ASPECT ) :`, with any words; 0 without a header."""
    return 6 if [*tokens[2:3], *tokens[4:6]] == ["(", ")", ":"] else 0
