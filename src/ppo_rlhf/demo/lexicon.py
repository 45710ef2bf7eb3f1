"""The words of the movie-review grammar by word class, and the sentiment of each word.

Words of a class whose name ends in `+` or `-` have a sentiment: +1 or -1, and +0.6 or -0.6 after the bar `|`. All words
are lower case and have no apostrophes, so that a tokenizer that splits at white space has one token per word.
"""

STRONG = 1.0
MILD = 0.6

CLASSES = {
    "TITLE_FIRST": """silent midnight golden hidden distant crimson paper winter summer burning frozen secret
        velvet electric northern scarlet ivory painted copper invisible""",
    "TITLE_SECOND": """harbor garden river mirror letters island train orchard lantern bridge kingdom station
        clock forest tower window canyon road shore hotel moon""",
    "FIRST_NAME": "anna clara diego elena felix greta henry irene jonas karim lucia marta nina oscar",
    "SURNAME": """archer bauer keller moreno novak okafor petrov quinn rossi santos tanaka ueda vogel weber
        yilmaz""",
    "ROLE": "detective doctor teacher soldier mother father king queen thief poet pilot captain nurse stranger",
    "ASPECT": "acting plot music dialogue pacing ending camera humor script editing cast atmosphere",
    "PARTS": "jokes songs costumes effects stunts characters twists lines",
    "MOVIE": "film movie picture",
    "KIND": "thriller comedy drama western romance musical mystery fable",
    "SITE": "castle city village school prison market hospital church",
    "OBJECT": "diamond map letter key painting sword ring book",
    "FINDS": "finds steals hides loses sells burns",
    "AGE": "young old famous tired",
    "SITE_KIND": "small quiet modern ancient remote",
    "SIZE": "long loud slow dark short",
    "VERY": "very truly really so simply utterly",
    "RATHER": "slightly somewhat fairly",
    "ADJECTIVE+": """brilliant superb wonderful charming clever moving delightful excellent elegant gripping lovely
        stunning inventive touching | good decent pleasant solid""",
    "ADJECTIVE-": """awful dreadful terrible boring clumsy tedious lifeless annoying ugly empty shallow messy
        insulting hollow | bad weak dull poor""",
    "ADVERB+": "brilliantly superbly beautifully perfectly | well nicely",
    "ADVERB-": "terribly clumsily dreadfully hopelessly | badly poorly",
    "VERDICT+": "triumph masterpiece joy treat gem",
    "VERDICT-": "disaster mess bore failure insult",
    "FEEL+": "love adore admire | enjoy like",
    "FEEL-": "hate despise loathe | dislike regret",
    "SHINES+": "shines sparkles soars | works",
    "SHINES-": "fails collapses stumbles | drags",
    "SHINE+": "shine sparkle soar | work",
    "SHINE-": "fail collapse stumble | drag",
    "SAVES+": "saves lifts enriches",
    "SAVES-": "ruins spoils sinks",
    "SAVE+": "save lift enrich",
    "SAVE-": "ruin spoil sink",
    "MOVED+": "moved thrilled delighted | amused",
    "MOVED-": "bored annoyed offended | confused",
    "QUALITY+": "charm warmth wit energy grace tension",
    "QUALITY-": "cliches flaws holes nonsense noise errors",
}


def _read_classes() -> tuple[dict[str, tuple[str, ...]], dict[str, float]]:
    words: dict[str, tuple[str, ...]] = {}
    valence: dict[str, float] = {}
    for name, text in CLASSES.items():
        strong, _, mild = text.partition("|")
        words[name] = (*strong.split(), *mild.split())
        if name[-1] in "+-":
            sign = 1.0 if name[-1] == "+" else -1.0
            valence |= dict.fromkeys(strong.split(), sign * STRONG)
            valence |= dict.fromkeys(mild.split(), sign * MILD)
    return words, valence


WORDS, VALENCE = _read_classes()
VALENCE["too"] = -MILD  # adjectives of SIZE are neutral alone, but "too long" and "too loud" are negative
